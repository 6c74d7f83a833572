"""The two questions: are the replicas equal, and is it the same training as on one device?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror import calls
from mirror._errors import ReplicaDivergenceError, ReplicaMismatchError, counted, listing
from mirror._types import Array, PyTree
from mirror.cross_device_ops import ReduceOp, exchange
from mirror.drift import require_none
from mirror.objects import Structure
from mirror.parts import Parts
from mirror.runner import Runner
from mirror.values import PerReplica, is_per_replica
from mirror.variables import Variable, collapse, is_own


def check_mirrored(runner: Runner, tree: PyTree) -> None:
    """See `Strategy.check_mirrored`."""
    is_leaf = lambda leaf: is_per_replica(leaf) or is_own(leaf)  # noqa: E731
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    found = [(path, leaf) for path, leaf in found if not is_own(leaf)]  # those may differ
    named = [(calls.keys(path).lstrip(".") or "the value", leaf) for path, leaf in found]
    per_replica = [name for name, leaf in named if is_per_replica(leaf)]
    if per_replica:
        raise TypeError(
            f"These are PerReplica values, which may differ:\n{listing(per_replica)}\n"
            "check_mirrored is for mirrored ones: models, optimizers, reduced results."
        )
    arrays = [(name, leaf) for name, leaf in named if isinstance(leaf, jax.Array)]
    # There is one copy of an array of which each device stores a slice: nothing to compare.
    arrays = [(name, leaf) for name, leaf in arrays if not runner.replicas.is_sharded(leaf)]
    elsewhere = [name for name, leaf in arrays if not runner.replicas.is_mirrored(leaf)]
    if elsewhere:
        raise ValueError(
            f"These arrays are not mirrored over the strategy's devices:\n{listing(elsewhere)}\n"
            "Create them inside strategy.scope(), or pass them through strategy.run first."
        )
    if not arrays:
        return
    equal = np.asarray(runner.run(_compare_copies, ([leaf for _, leaf in arrays],), {}))
    differing = [name for (name, _), same in zip(arrays, equal, strict=True) if not same]
    if differing:
        raise ReplicaDivergenceError(
            f"The replicas' copies differ in {len(differing)} of {len(arrays)} arrays:\n"
            f"{listing(differing)}\nSomething wrote to one device's copy alone. Restore from a "
            "checkpoint; strategy.local_results(x) shows each replica's copy."
        )


def _compare_copies(leaves: list[Array]) -> Array:
    """For each leaf whether all replicas' fingerprints of it agree."""
    prints = jnp.stack([fingerprint(leaf) for leaf in leaves])
    least, most = exchange(ReduceOp.MIN, prints), exchange(ReduceOp.MAX, prints)
    return jnp.all(least == most, axis=-1)


def fingerprint(leaf: Array) -> Array:
    """Two uint32 made of an array's bits; a change of any one element always shows in the first.

    Each element's bits are multiplied by an odd number that depends on the position, which is
    invertible modulo 2**32, and added up.
    """
    bits = _bits(leaf).ravel()
    position = jax.lax.iota(jnp.uint32, bits.size)
    weight = (position * jnp.uint32(0x9E3779B1)) | jnp.uint32(1)
    mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * (weight ^ jnp.uint32(0x27D4EB2E))
    return jnp.stack([jnp.sum(bits * weight), jnp.sum(mixed ^ (mixed >> 16))])


_SMALL_INTEGERS = ("int2", "uint2", "int4", "uint4")


def _bits(leaf: Array) -> Array:
    """An array's bits as uint32."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_ or leaf.dtype.name in _SMALL_INTEGERS:
        return leaf.astype(jnp.int32).astype(jnp.uint32)
    if leaf.dtype.name == "float4_e2m1fn":  # no bits of its own: they are packed in bytes
        leaf = leaf.astype(jnp.float32)
    if leaf.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    unsigned = jnp.dtype(f"uint{leaf.dtype.itemsize * 8}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


@dataclass(frozen=True)
class Difference:
    """How far one leaf is from that of one device.

    Attributes:
        name: the user's name for it.
        relative: the largest difference over the largest magnitude; `inf` for unequal integers.
        compared: whether one device has a counterpart to hold it against.
    """

    name: str
    relative: float
    compared: bool = True


@dataclass(frozen=True)
class VerifyReport:
    """What `strategy.verify` found: one row for each result and each changed variable.

    Attributes:
        num_replicas: how many replicas were held against one device.
        rtol: the largest relative difference that was allowed.
        rows: the leaves, in the order of results, then variables.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> print(strategy.verify(lambda x: 2 * x, (mirror.PerReplica([[1.0], [2.0]]),)))
    2 replicas against one device, relative differences (allowed: 1e-05):
        0.0e+00  result
    """

    num_replicas: int
    rtol: float
    rows: tuple[Difference, ...]

    @property
    def largest(self) -> float:
        """The largest relative difference of all leaves that could be compared."""
        return max((row.relative for row in self.rows if row.compared), default=0.0)

    def __str__(self) -> str:
        lines = [
            f"{counted(self.num_replicas, 'replica')} against one device, relative differences "
            f"(allowed: {self.rtol:g}):"
        ]
        for row in self.rows:
            shown = f"{row.relative:9.1e}" if row.compared else "      own"
            lines.append(f"  {shown}  {row.name}")
        return "\n".join(lines)


def verify(
    many: Runner, single: Runner, fn: Callable, args: Sequence, kwargs: dict, rtol: float
) -> VerifyReport:
    """See `Strategy.verify`."""
    arguments = calls.hoist_nested(args, kwargs)
    here, there = copy_of(arguments.objects), copy_of(arguments.objects)
    collapse(there)
    if Variable.in_use:  # some may be no arguments, and must be as they were afterwards
        many.prepare(fn, *with_objects(arguments.tree, here))
    captured = many.captured(fn)
    names = calls.object_names(fn, arguments.tree, [*arguments.objects, *captured], captured)
    num_replicas = len(many.replicas)
    saved = copy_of(captured)
    try:
        before = _variables([*here, *captured], names)
        got = many.run(fn, *with_objects(arguments.tree, here))
        after = _variables([*here, *captured], names)
        restore(captured, saved)
        collapse(captured)
        whole = jax.tree.map(whole_batch, arguments.tree, is_leaf=is_per_replica)
        wanted = single.run(fn, *with_objects(whole, there))
        expected = _variables([*there, *captured], names)
    finally:
        restore(captured, saved)
    program = many.prepare(fn, *with_objects(arguments.tree, here))
    require_none(calls.name_of(fn), program.drifts)
    rows = _compare_results(got, wanted)
    for name, value in after.items():
        rows.append(Difference(name, relative_difference(value, expected[name])))
        if _equal(value, before[name]) and _equal(expected[name], before[name]):
            rows.pop()
    report = VerifyReport(num_replicas, rtol, tuple(rows))
    wrong = [row for row in rows if row.compared and not row.relative <= rtol]
    if wrong:
        raise ReplicaMismatchError(
            f"{num_replicas} replicas and one device on the whole batch differ by more than "
            f"rtol={rtol:g} in\n{listing(f'{r.name}: relative {r.relative:.1e}' for r in wrong)}\n"
            "The usual causes: a sum where a mean is meant (or the other way round), a loss "
            "divided twice, a batch normalisation over each replica's own batch (axis_name="
            "mirror.REPLICA_AXIS makes it one), dropout, which draws on each replica anew; for one "
            "variable alone, a true gradient of zero, as of a bias before a batch normalisation "
            "(use_bias=False): then rounding is compared with rounding."
            + _shared_draws(program.shared_draws)
        )
    return report


def _shared_draws(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return (
        f"\nAll replicas draw the same random numbers at {', '.join(lines)}: the key is the same. "
        "For dropout each needs its own, replica_context.fold_in(key); mirror.example_keys(key, "
        "batch) draws the same for an example on any number of replicas."
    )


def copy_of(objects: Sequence[Any]) -> list[Any]:
    """Copies of nnx objects, which share with each other what the objects share."""
    graphdef: Any
    graphdef, state = nnx.split(tuple(objects))
    return list(nnx.merge(graphdef, jax.tree.map(_copy, state)))


def _copy(leaf: Any) -> Any:
    return Parts([jnp.copy(x) for x in leaf.arrays]) if isinstance(leaf, Parts) else jnp.copy(leaf)


def restore(variables: Sequence[Variable], saved: Sequence[Any]) -> None:
    """Gives variables the values of copies of them, and keeps the copies."""
    for variable, copied in zip(variables, copy_of(list(saved)), strict=True):
        variable.set_raw_value(copied.get_raw_value())


def with_objects(tree: Any, objects: list[Any]) -> Any:
    """The arguments of a call with these objects in the places where others were taken out."""
    return jax.tree.map(
        lambda node: objects[node.number] if isinstance(node, calls.Hoisted) else node,
        tree,
        is_leaf=lambda node: is_per_replica(node) or isinstance(node, calls.Hoisted),
    )


def whole_batch(leaf: Any) -> Any:
    """A per-replica batch as the one batch of a lone replica."""
    if not is_per_replica(leaf):
        return leaf
    rows = [np.asarray(value) for value in leaf.values]
    if rows[0].ndim == 0:
        raise ValueError(
            f"The replicas' batches are put together to one, but {leaf!r} has one scalar for each "
            "replica and no batch axis. Pass it mirrored, or in a batch."
        )
    return PerReplica([np.concatenate(rows)])


def _variables(objects: list[Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    if not objects:
        return {}
    objects = copy_of(objects)
    collapse(objects)
    structure = Structure(objects)
    leaves = jax.tree.leaves(nnx.split(tuple(objects))[1])
    return {n: _host(x) for n, x in zip(structure.names(names), leaves, strict=True)}


def _host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


def _compare_results(got: PyTree, wanted: PyTree) -> list[Difference]:
    rows = []
    mine = jax.tree_util.tree_flatten_with_path(got, is_leaf=is_per_replica)[0]
    theirs = jax.tree.leaves(wanted, is_leaf=is_per_replica)
    for (path, a), b in zip(mine, theirs, strict=True):
        name = "result" + calls.keys(path)
        if not is_per_replica(a):
            rows.append(Difference(name, relative_difference(_host(a), _host(b))))
            continue
        one, parts = _host(b.values[0]), list(map(_host, a.values))
        joined = np.concatenate(parts) if parts[0].ndim else np.stack(parts)
        comparable = one.ndim > 0 and joined.shape == one.shape
        distance = relative_difference(joined, one) if comparable else 0.0
        rows.append(Difference(name, distance, comparable))
    return rows


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference over the largest magnitude; NaN in the same place is equal."""
    if a.shape != b.shape:
        return float("inf")
    if a.size == 0 or _equal(a, b):
        return 0.0
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else float("inf")
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    settled = (a == b) | (np.isnan(a) & np.isnan(b))
    if settled.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.where(settled, 0.0, np.abs(a - b))
    finite = np.abs(b[np.isfinite(b)])
    scale = max(float(finite.max(initial=0.0)), float(np.finfo(np.float32).tiny))
    largest = float(distance.max())
    return largest / scale if np.isfinite(largest) else float("inf")
