"""Assertions for tests of code that uses `mirror`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirror._src.base.errors import (
    ReplicaDivergenceError,
    VerifyError,
    counted,
    expected,
    require_int,
)
from mirror._src.base.naming import argument_names, name_of
from mirror._src.base.types import PyTree, StepFunction
from mirror._src.engine.per_replica import is_per_replica
from mirror._src.engine.plan import divergence_message
from mirror._src.engine.replica_context import has_strategy
from mirror._src.inspection.equality import EqualityReport
from mirror._src.inspection.verify import VerifyReport
from mirror._src.jaxprs.marks import ensure_mirrored
from mirror._src.strategy.mirrored import get_strategy
from mirror._src.strategy.strategy import Strategy


def assert_mirrored(tree: PyTree, strategy: Strategy | None = None) -> None:
    """Asserts that all replicas hold bitwise equal copies of every array in a tree.

    Args:
        tree: Pytree of arrays and nnx objects; see `Strategy.check_mirrored`.
        strategy: The strategy whose replicas are compared. Defaults to the current scope's.

    Raises:
        AssertionError: If copies differ, an array is not on the strategy's devices, or a leaf is a
            `PerReplica`. The message names the leaves.
        TypeError: If `strategy` is not a `Strategy`.
        RuntimeError: If no strategy was passed outside a strategy's scope.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    if strategy is None and not has_strategy():
        raise RuntimeError(
            "assert_mirrored(tree) was called outside a strategy's scope, so the devices of the "
            "copies are unknown. Pass the strategy: assert_mirrored(tree, strategy)."
        )
    strategy = get_strategy() if strategy is None else _require_strategy(strategy)
    try:
        strategy.check_mirrored(tree)
    except (TypeError, ValueError) as error:
        raise AssertionError(str(error)) from None


def assert_trains_like_one_device(
    step: StepFunction,
    args: Sequence[Any],
    strategy: Strategy,
    steps: int = 3,
    rtol: float = 1e-5,
) -> VerifyReport:
    """Asserts that training steps on all replicas equal the same steps on one device.

    The device gets the whole batch. Every step gets the same batch and the state that the previous
    step produced. nnx objects and variables carry the state by reference. If the step returns a
    new value of its first argument, alone or first in a tuple, the next step receives it; it is
    recognized by its structure, shapes and dtypes. The arguments do not change, because nnx
    objects are copied.

    Args:
        step: One replica's step, as for `Strategy.run`.
        args: Arguments of the first step.
        strategy: The strategy to test.
        steps: Number of consecutive steps.
        rtol: Relative tolerance, as for `Strategy.verify`, after all steps.

    Returns:
        The report of `Strategy.verify`: the results of every step, and the final state.

    Raises:
        AssertionError: If results or state differ by more than `rtol`, replicas would diverge, or
            the step trains nothing. The message names the leaves.
        TypeError: If `strategy` is not a `Strategy`, or `steps` is not an integer.
        ValueError: If `steps` is less than 1, or `Strategy.verify` rejects the arguments.
    """
    __tracebackhide__ = True
    _require_strategy(strategy)
    require_int("steps", steps, fix="Pass the number of steps to compare.")
    try:
        report = strategy.verify(_repeated(step, steps, _may_be_state(args)), args, rtol=rtol)
    except VerifyError as error:
        raise AssertionError(str(error)) from None
    except ReplicaDivergenceError:
        raise AssertionError(_divergence(step, args, strategy)) from None
    if all(row.name.startswith("result['step ") for row in report.rows):
        raise AssertionError(
            f"{counted(steps, 'step')} changed no variable and returned no new value of the first "
            "argument. Pass the model and the optimizer as arguments, or take and return the state "
            "first: step(state, batch) -> (state, loss)."
        )
    return report


def assert_equals_one_device(
    step: StepFunction, args: Sequence[Any], strategy: Strategy
) -> EqualityReport:
    """Asserts that a step is proved to compute what one device computes on the whole batch.

    The step is traced, with the batches of the replicas and with the whole batch, and does not run.
    A step that cannot be proved fails too: compare its numbers with `Strategy.verify`, or with
    `assert_trains_like_one_device`.

    Args:
        step: One replica's step, as for `Strategy.run`.
        args: Its arguments.
        strategy: The strategy to test.

    Returns:
        The report of `Strategy.inspect(step, args).equals_one_device`.

    Raises:
        AssertionError: If the verdict is not `"equal"`. The message names the operation and its
            line, and what to change.
        TypeError: If `strategy` is not a `Strategy`.
    """
    __tracebackhide__ = True
    report = _require_strategy(strategy).inspect(step, args).equals_one_device
    if report.verdict != "equal":
        raise AssertionError(str(report))
    return report


def _divergence(step: StepFunction, args: Sequence[Any], strategy: Strategy) -> str:
    """Returns the message of `run` for a step after which replicas differ."""
    report = strategy.inspect(step, args)
    if report.problems:
        return report.problems[0]
    # `run` returns state per-replica if it is not donated: alone, or first in a tuple.
    rows = [row for row in report.results if row.state == "per-replica"]
    first = [row for row in rows if row.name.startswith("result[0]")]
    prefix, (state,) = "result[0]" if first else "result", argument_names(step, 1)
    causes = [f"{state}{row.name.removeprefix(prefix)}: {row.why}" for row in first or rows]
    return divergence_message(name_of(step), causes)


@functools.lru_cache(8)  # so that repeated comparisons of a step do not compile it again
def _repeated(step: StepFunction, steps: int, carried: bool) -> Callable[..., dict[str, Any]]:
    """Returns a function that takes several steps."""

    @functools.wraps(step)  # keeps the parameter names, which appear in messages
    def several(*args: Any) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for i in range(steps):
            result = step(*args)
            state, rest = _split_result(result, args) if carried else (None, result)
            if state is not None:
                state = ensure_mirrored({"state": state})["state"]
                args, results["state"] = (state, *args[1:]), state
            results[f"step {i + 1}"] = rest
        return results

    return several


def _may_be_state(args: Sequence[Any]) -> bool:
    """Whether the first argument can be the state, rather than a batch, a number or a flag."""
    if not isinstance(args, tuple | list) or not args:  # `verify` rejects it
        return False
    leaves = jax.tree.leaves(args[0], is_leaf=is_per_replica)
    is_scalar = isinstance(args[0], bool | int | float | complex | str)
    return bool(leaves) and not is_scalar and not any(map(is_per_replica, leaves))


def _split_result(result: PyTree, args: Sequence[Any]) -> tuple[PyTree, PyTree]:
    """Splits the result of a step into the new state, which may be `None`, and the rest."""
    if _is_next(result, args[0]):  # checked first, because a state can be a NamedTuple
        return result, ()
    if isinstance(result, tuple) and result and _is_next(result[0], args[0]):
        return result[0], result[1:]
    return None, result


def _is_next(new: PyTree, old: PyTree) -> bool:
    """Whether two trees have the same structure, shapes and dtypes."""
    return _form(new) == _form(old)


def _form(tree: PyTree) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]


def _require_strategy(strategy: Any) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    fix = "For example: mirror.MirroredStrategy()."
    raise TypeError(expected("strategy", strategy, "a mirror.Strategy", fix))
