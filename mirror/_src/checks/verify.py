"""`verify`: compares a step on n replicas with the same step on one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.checks.trial import copy_of, restore, whole_batch, with_objects
from mirror._src.run.arguments import hoist_nested, object_names
from mirror._src.run.drift import require_none
from mirror._src.run.nnx.structure import Structure
from mirror._src.run.runner import Runner
from mirror._src.utils.errors import ReplicaMismatchError, counted, listing
from mirror._src.utils.modules import set_module
from mirror._src.utils.naming import keys, name_of
from mirror._src.utils.types import PyTree
from mirror._src.values.per_replica import is_per_replica
from mirror._src.variables.on_read import collapse
from mirror._src.variables.variable import Variable


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


@set_module("mirror")
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
    arguments = hoist_nested(args, kwargs)
    here, there = copy_of(arguments.objects), copy_of(arguments.objects)
    collapse(there)
    if Variable.in_use:  # some may be no arguments, and must be as they were afterwards
        many.prepare(fn, *with_objects(arguments.tree, here))
    captured = many.captured(fn)
    names = object_names(fn, arguments.tree, [*arguments.objects, *captured], captured)
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
    require_none(name_of(fn), program.drifts)
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
        name = "result" + keys(path)
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
