"""Compares a step with the same step on one device, and the copies of the replicas bit for bit."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import ReplicaDivergenceError, VerifyError, counted, listing
from mirror._src.base.keras_library import has_variables
from mirror._src.base.keras_library import variables_of as variables_of_keras
from mirror._src.base.naming import keys
from mirror._src.base.public_names import set_module
from mirror._src.base.terminal import Table
from mirror._src.base.types import Array, PyTree
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.arguments import hoist_nested, object_names
from mirror._src.engine.in_step import bind_all_reduce
from mirror._src.engine.nnx.structure import Structure
from mirror._src.engine.per_replica import is_per_replica
from mirror._src.engine.reduce_op import ReduceOp
from mirror._src.engine.runner import Runner
from mirror._src.engine.variable import Variable, collapse, is_on_read
from mirror._src.inspection import measurement
from mirror._src.inspection.equality import DIFFERENT
from mirror._src.inspection.measurement import copy_of, gathered, restore, whole_batch, with_objects
from mirror._src.jaxprs.text import fingerprint

_T = TypeVar("_T")


def check_mirrored(runner: Runner, tree: PyTree) -> None:
    """Implements `Strategy.check_mirrored`."""
    is_leaf = lambda leaf: is_per_replica(leaf) or is_on_read(leaf) or has_variables(leaf)  # noqa: E731
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    of_keras = [leaf for _, leaf in leaves if has_variables(leaf)]
    named = [
        (keys(path).lstrip(".") or "the value", leaf)
        for path, leaf in leaves
        if not (has_variables(leaf) or is_on_read(leaf))  # an "on_read" variable may differ
    ]
    per_replica = [name for name, leaf in named if is_per_replica(leaf)]
    if per_replica:
        raise TypeError(
            "check_mirrored expects mirrored values, such as models, optimizers or reduced "
            "results. These leaves are PerReplica values, which may differ:\n"
            f"{listing(per_replica)}"
        )
    arrays = [(name, leaf) for name, leaf in named if isinstance(leaf, jax.Array)]
    arrays += _arrays_of_keras(of_keras)
    # A sharded array has a single copy, so there is nothing to compare.
    arrays = [(name, leaf) for name, leaf in arrays if not runner.replicas.is_sharded(leaf)]
    elsewhere = [name for name, leaf in arrays if not runner.replicas.is_mirrored(leaf)]
    if elsewhere:
        raise ValueError(
            f"These arrays are not mirrored on the strategy's devices:\n{listing(elsewhere)}\n"
            "Create them inside strategy.scope(), or pass them through strategy.run first."
            f"{_ADVICE_FOR_KERAS if of_keras else ''}"
        )
    if not arrays:
        return
    equal = np.asarray(runner.run(_compare_copies, ([leaf for _, leaf in arrays],), {}))
    differing = [name for (name, _), same in zip(arrays, equal, strict=True) if not same]
    if differing:
        raise ReplicaDivergenceError(
            f"The replicas' copies differ in {len(differing)} of {len(arrays)} arrays:\n"
            f"{listing(differing)}\nOnly some devices' copies were changed. Restore a checkpoint. "
            "To see every replica's copy, call strategy.local_results(x)."
        )


_ADVICE_FOR_KERAS = (
    " The first step of fit, evaluate or predict mirrors the variables of a Keras model again, "
    "after a method such as load_weights has assigned to them outside the scope."
)


def _arrays_of_keras(objects: Sequence[Any]) -> list[tuple[str, Array]]:
    """Returns the value of each variable, with its path.

    Raises:
        ValueError: If an object has no variables yet.
    """
    found: dict[int, tuple[str, Array]] = {}
    for each in objects:
        variables = variables_of_keras(each)
        if not variables:
            raise ValueError(
                f"The Keras object {each.name!r} has no variables yet, so there is nothing to "
                "compare. Build it first: model.build(input_shape), or model.fit(...)."
            )
        found |= {id(variable): (variable.path, variable.value) for variable in variables}
    return list(found.values())


def _compare_copies(leaves: list[Array]) -> Array:
    """Returns for every leaf whether the fingerprints of all replicas are equal."""
    prints = jnp.stack([fingerprint(leaf) for leaf in leaves])
    least, most = bind_all_reduce(ReduceOp.MIN, prints), bind_all_reduce(ReduceOp.MAX, prints)
    return jnp.all(least == most, axis=-1)


_config: Any = jax.config
_DEFAULT_RTOL = 1e-5
_NUDGES = 3  # runs of one device whose state is rounded again
_NOISE = 10  # times their largest difference: up to 4 was measured, of squares of gradients
_ROUNDINGS = 4  # of sums, of which a replica rounds its own part once more


def rtol_of(dtypes: Iterable[Any] = ()) -> float:
    """Returns the relative difference that rounding may cause between replicas and one device.

    Args:
        dtypes: Dtypes that layers compute in. What is not a dtype of floats is ignored.

    >>> rtol_of(), rtol_of(["float32", "bfloat16", None])
    (1e-05, 0.03125)
    """
    return max([_DEFAULT_RTOL, *(_ROUNDINGS * _spacing(dtype) for dtype in dtypes)])


def _spacing(dtype: Any) -> float:
    """Returns the spacing of the numbers of a dtype at 1."""
    try:
        return 0.0 if dtype is None else float(jnp.finfo(dtype).eps)
    except (TypeError, ValueError):  # an attribute of the user's that has the name `dtype`
        return 0.0


@dataclass(frozen=True)
class Difference:
    """Difference between a leaf on n replicas and the same leaf on one device.

    Attributes:
        name: Name of the leaf: `result['loss']`, `model.kernel`.
        relative: Largest absolute difference divided by the largest magnitude. `inf` for unequal
            integers.
        compared: Whether one device computes a corresponding leaf.
        rounding: For a leaf that differs by more than `rtol`, how much rounding its step's state
            again changes it on one device.
    """

    name: str
    relative: float
    compared: bool = True
    rounding: float = 0.0


@set_module("mirror")
@dataclass(frozen=True)
class VerifyReport:
    """Result of `strategy.verify`: one row per result and per changed variable.

    When printed, `-` marks a leaf for which one device computes no counterpart.

    Attributes:
        num_replicas: Number of replicas that were compared with one device.
        rtol: Largest relative difference allowed, but for leaves that rounding decides; see
            `Strategy.verify`.
        rows: Results first, then variables.
        same_bits: With `replicas=`, whether one device computes the same bits if it runs all
            replicas. None without `replicas=`, with one device, or in several processes.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> print(strategy.verify(lambda x: 2 * x, (mirror.PerReplica([[1.0], [2.0]]),)))
    2 replicas and one device, relative differences (at most 1e-05 allowed):
        0.0e+00  result
    """

    num_replicas: int
    rtol: float
    rows: tuple[Difference, ...]
    same_bits: bool | None = None

    @property
    def largest(self) -> float:
        """Largest relative difference of the compared leaves that rounding does not decide."""
        return max((row.relative for row in self.rows if not row.rounding), default=0.0)

    def _repr_html_(self) -> str:
        rows = [(r.name + _rounding_of(r), _text_of(r)) for r in self.rows]
        verdict = (
            f"{counted(self.num_replicas, 'replica')} and one device agree: the largest relative "
            f"difference is {self.largest:.1e}, and {self.rtol:g} is allowed"
        )
        return f"<b>{verdict}</b>" + Table(("value", "difference"), rows)._repr_html_()

    def __repr__(self) -> str:
        lines = [
            f"{counted(self.num_replicas, 'replica')} and one device, relative differences "
            f"(at most {self.rtol:g} allowed):"
        ]
        lines += [f"  {_text_of(row):>9}  {row.name}{_rounding_of(row)}" for row in self.rows]
        if self.same_bits:
            lines.append("The same replicas on one device compute the same bits.")
        return "\n".join(lines)


def _text_of(row: Difference) -> str:
    return f"{row.relative:.1e}" if row.compared else "-"


def _rounding_of(row: Difference) -> str:
    return f" (rounding alone: {row.rounding:.1e})" if row.rounding else ""


def exact_products(replicas: ReplicaDevices) -> contextlib.AbstractContextManager[None]:
    """Lets GPUs multiply in float32: rounding to TF32, the default, amplifies other roundings."""
    if replicas.on_gpus and _config.jax_default_matmul_precision is None:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()


def verify(
    many: Runner,
    single: Runner,
    fn: Callable,
    args: Sequence,
    kwargs: dict,
    rtol: float,
    alone: Callable[[PyTree], tuple[Callable, PyTree]] | None = None,
    in_turn: Runner | None = None,
) -> VerifyReport:
    """Implements `Strategy.verify`.

    Args:
        many: Runner of the replicas.
        single: Runner of one device.
        fn: The step.
        args: Its arguments.
        kwargs: Its keyword arguments.
        rtol: Largest allowed difference.
        alone: Returns what the one device runs, given the arguments with the whole batch. Defaults
            to the same step with the whole batch.
        in_turn: Runner of the same replicas on one device, for a fixed number of replicas.
    """
    arguments = hoist_nested(args, kwargs)
    objects = copy_of(arguments.objects)
    if Variable.in_use:  # the step may capture variables, which must be restored afterwards
        many.traced(fn, *with_objects(arguments.tree, objects))
    captured = many.captured(fn)
    names = object_names(fn, arguments.tree, [*arguments.objects, *captured], captured)
    num_replicas = len(many.replicas)
    saved = copy_of(captured)
    many.warned(fn).add(DIFFERENT)  # the report says it

    def run_one(signs: np.random.Generator | None) -> Outcome:
        singles = copy_of(arguments.objects)
        restore(captured, saved)
        collapse([*singles, *captured])
        whole = tree
        if signs is not None:
            nudge_variables([*singles, *captured], signs)
            nudge = functools.partial(nudged, signs)
            whole = jax.tree.map(nudge, whole, is_leaf=is_per_replica)
        whole = jax.tree.map(whole_batch, whole, is_leaf=is_per_replica)
        reference, whole = (fn, whole) if alone is None else alone(whole)
        results = single.run(reference, *with_objects(whole, singles))
        return results, variables_of([*singles, *captured], names)

    try:
        before = variables_of([*objects, *captured], names)
        results = many.run(fn, *with_objects(arguments.tree, objects))
        after = variables_of([*objects, *captured], names)
        if in_turn is not None:
            restore(captured, saved)
            others = copy_of(arguments.objects)
            of_one = in_turn.run(fn, *with_objects(arguments.tree, others))
            changed = variables_of([*others, *captured], names)
            _require_same_bits(num_replicas, (results, after), (of_one, changed))
        tree, results = gathered(many, (arguments.tree, results))
        outcome: Outcome = results, after
        rows = rows_of(rtol, functools.partial(differences, before), outcome, run_one)
    finally:
        restore(captured, saved)
    _, analysis = many.analyzed(fn, *with_objects(arguments.tree, objects))
    hint = _shared_key_hint(dict.fromkeys(analysis.notes.shared_samples))
    same_bits = True if in_turn is not None else None
    return checked(VerifyReport(num_replicas, rtol, rows, same_bits), CAUSES + hint)


def nudge_variables(objects: Sequence[Any], signs: np.random.Generator) -> None:
    """Nudges the variables of nnx objects."""
    for variable in measurement.variables_of(objects):
        variable.set_raw_value(nudged(signs, variable.get_raw_value()))


def nudged(signs: np.random.Generator, leaf: Any) -> Any:
    """Changes each number of an array of floats by the spacing of its dtype, up or down.

    If this changes a result by much, rounding decides it: a gradient that is zero but for rounding,
    or the first update of Adam, which divides gradients near its eps by their size.
    """
    if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    eps = jnp.finfo(leaf.dtype).eps
    up = signs.integers(0, 2, leaf.shape, bool)
    return leaf * jnp.where(up, 1 + eps, 1 - eps).astype(leaf.dtype)


def rows_of(
    rtol: float,
    compare: Callable[[_T, _T], Iterable[Difference]],
    outcome: _T,
    run_one: Callable[[np.random.Generator | None], _T],
) -> tuple[Difference, ...]:
    """Compares what a step computes with one device, and with the rounding of one device.

    Args:
        rtol: Above it, rounding is considered.
        compare: Returns the differences between two outcomes.
        outcome: The outcome of n replicas.
        run_one: Runs the step on one device: with its state, or given a generator, with its state
            nudged.
    """
    of_one = run_one(None)
    rows = tuple(compare(outcome, of_one))
    rounding = dict.fromkeys((row.name for row in rows if not row.relative <= rtol), 0.0)
    for seed in range(_NUDGES if rounding else 0):
        for row in compare(run_one(np.random.default_rng(seed)), of_one):
            if row.name in rounding and np.isfinite(row.relative):
                rounding[row.name] = max(rounding[row.name], row.relative)
    return tuple(dataclasses.replace(row, rounding=rounding.get(row.name, 0.0)) for row in rows)


def _require_same_bits(
    num_replicas: int, many: tuple[PyTree, Any], one: tuple[PyTree, Any]
) -> None:
    """Compares the results and variables of a step on several devices and on one.

    Raises:
        VerifyError: If bits differ.
    """
    leaves = jax.tree_util.tree_flatten_with_path(many[0], is_leaf=is_per_replica)[0]
    pairs = zip(leaves, jax.tree.leaves(one[0], is_leaf=is_per_replica), strict=True)
    wrong = [
        "result" + keys(path)
        for (path, a), b in pairs
        if not all(map(_equal, _parts_of(a), _parts_of(b)))
    ]
    wrong += [name for name, value in many[1].items() if not _equal(value, one[1][name])]
    if wrong:
        raise VerifyError(
            f"The bits of {counted(num_replicas, 'replica')} depend on the number of devices. With "
            f"one device, these differ:\n{listing(wrong)}\nstrategy.inspect(step, args) names "
            "the host callbacks of the step. A step without host callbacks is a fault of mirror: "
            "please report it."
        )


def _parts_of(leaf: Any) -> list[np.ndarray]:
    return list(map(_host, leaf.values if is_per_replica(leaf) else [leaf]))


CAUSES = (
    'Common causes: all_reduce("sum") where a mean is intended (or vice versa); a loss '
    "divided twice; batch normalization over each replica's own batch (pass "
    "axis_name=mirror.REPLICA_AXIS), or over pieces of it (accumulate_steps); padding in a loss "
    "that looks across examples (mirror.example_mask(batch)); random numbers of nnx.Rngs or "
    "replica_context.fold_in(key), such as dropout or the noise of a VAE, which each replica and "
    "each piece samples independently (mirror.example_keys(key, batch))."
)


def checked(report: VerifyReport, causes: str) -> VerifyReport:
    """Returns the report.

    Raises:
        VerifyError: If rows differ by more than allowed. The message ends with the causes.
    """
    wrong = [
        row
        for row in report.rows
        if row.compared and not row.relative <= max(report.rtol, _NOISE * row.rounding)
    ]
    if wrong:
        raise VerifyError(
            f"{report.num_replicas} replicas and one device on the whole batch differ by more than "
            f"rtol={report.rtol:g} in:\n"
            f"{listing(f'{r.name}: relative {r.relative:.1e}' for r in wrong)}\n{causes}"
        )
    return report


def _shared_key_hint(lines: Collection[str]) -> str:
    if not lines:
        return ""
    return (
        f"\nAll replicas sample with the same key at {', '.join(lines)}. For noise, derive a key "
        "per replica: replica_context.fold_in(key). For samples that do not depend on the number "
        "of replicas, use mirror.example_keys(key, batch)."
    )


def variables_of(objects: Sequence[Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns copies of the variables of nnx objects, given the names of the objects."""
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


Outcome = tuple[PyTree, Mapping[str, np.ndarray]]
"""Results of a step, and variables after it by name."""


def differences(
    before: Mapping[str, np.ndarray], outcome: Outcome, expected: Outcome
) -> list[Difference]:
    """Returns a row for each result, and for each variable that either step has changed."""
    (results, after), (results_of_one, after_one) = outcome, expected
    return _compare_results(results, results_of_one) + [
        Difference(name, relative_difference(value, after_one[name]))
        for name, value in after.items()
        if not (_equal(value, before[name]) and _equal(after_one[name], before[name]))
    ]


def _compare_results(results: PyTree, expected: PyTree) -> list[Difference]:
    """Returns a row for each leaf of what n replicas and one device have returned."""
    rows = []
    leaves = jax.tree_util.tree_flatten_with_path(results, is_leaf=is_per_replica)[0]
    expected_leaves = jax.tree.leaves(expected, is_leaf=is_per_replica)
    for (path, a), b in zip(leaves, expected_leaves, strict=True):
        name = "result" + keys(path)
        if not is_per_replica(a):
            rows.append(Difference(name, relative_difference(_host(a), _host(b))))
            continue
        one, shards = _host(b.values[0]), list(map(_host, a.values))
        joined = np.concatenate(shards) if shards[0].ndim else np.stack(shards)
        comparable = one.ndim > 0 and joined.shape == one.shape
        distance = relative_difference(joined, one) if comparable else 0.0
        rows.append(Difference(name, distance, comparable))
    return rows


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference over the largest magnitude; NaNs in equal places are equal."""
    if a.shape != b.shape:
        return float("inf")
    if a.size == 0 or _equal(a, b):
        return 0.0
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else float("inf")
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    is_equal = (a == b) | (np.isnan(a) & np.isnan(b))
    if is_equal.all():
        return 0.0
    with np.errstate(invalid="ignore"):
        distance = np.where(is_equal, 0.0, np.abs(a - b))
    finite = np.abs(b[np.isfinite(b)])
    scale = max(float(finite.max(initial=0.0)), float(np.finfo(np.float32).tiny))
    largest = float(distance.max())
    return largest / scale if np.isfinite(largest) else float("inf")
