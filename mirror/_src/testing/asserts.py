"""Asserts for tests of code that uses `mirror`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirror._src.checks.verify import VerifyReport
from mirror._src.context.scopes import has_strategy
from mirror._src.program.ensure import ensure_mirrored
from mirror._src.strategy.mirrored import get_strategy
from mirror._src.strategy.strategy import Strategy
from mirror._src.utils.errors import ReplicaDivergenceError, ReplicaMismatchError, describe
from mirror._src.utils.types import PyTree, StepFunction
from mirror._src.values.per_replica import is_per_replica


def assert_mirrored(tree: PyTree, strategy: Strategy | None = None) -> None:
    """Asserts that all replicas hold bitwise the same copy of every array in the tree.

    Args:
        tree: arrays, nnx objects, in any nest; see `Strategy.check_mirrored`.
        strategy: over whose devices. `None`: the one whose scope is open.

    Raises:
        AssertionError: copies differ, an array does not lie on the strategy's devices, or a leaf is
            a `PerReplica`; the message names the leaves.
        TypeError: `strategy` is none.
        RuntimeError: there is no strategy: none was passed, and no scope is open.
    """
    if strategy is None and not has_strategy():
        raise RuntimeError(
            "assert_mirrored(tree) was called outside every strategy's scope, so it is not known "
            "where the copies should lie. Pass the strategy: assert_mirrored(tree, strategy)."
        )
    strategy = get_strategy() if strategy is None else _require_strategy(strategy)
    try:
        strategy.check_mirrored(tree)
    except (TypeError, ValueError) as error:
        raise AssertionError(str(error)) from error


def assert_trains_like_one_device(
    step: StepFunction,
    args: Sequence[Any],
    strategy: Strategy,
    steps: int = 3,
    rtol: float = 1e-5,
) -> VerifyReport:
    """Asserts that some steps on all replicas do what they do on one device with the whole batch.

    All steps get the same batch, and the state that the step before has left: nnx objects and
    variables by reference. Where the step returns the new value of its first argument, alone or
    first in a tuple, that is the first argument of the next step: what has its structure, shapes
    and dtypes counts as such. Nothing is changed by it, the nnx objects are copied.

    Args:
        step: one replica's step, as for `Strategy.run`.
        args: its arguments, for the first step.
        strategy: the replicas.
        steps: how many steps, one after the other.
        rtol: as for `Strategy.verify`, over all the steps.

    Returns:
        The report of `Strategy.verify`: each step's results, and the state after the last one.

    Raises:
        AssertionError: results or state differ by more, replicas would drift apart, or the step
            trains nothing; the message names the leaves.
        TypeError: `strategy` is none, or `steps` is no int.
        ValueError: `steps` is below 1, or what `Strategy.verify` raises of the arguments.
    """
    _require_strategy(strategy)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps={describe(steps)} is no int. Pass how many steps to compare.")
    if steps < 1:
        raise ValueError(f"steps={steps}: there is nothing to compare. Pass 1 or more.")
    try:
        report = strategy.verify(_repeated(step, steps, _may_be_state(args)), args, rtol=rtol)
    except (ReplicaMismatchError, ReplicaDivergenceError) as error:
        raise AssertionError(str(error)) from error
    if all(row.name.startswith("result['step ") for row in report.rows):
        raise AssertionError(
            f"{steps} steps have trained nothing: no variable has changed, and the first result "
            "is no new value of the first argument. Pass the model and the optimizer as arguments, "
            "or take the state first and return it first: step(state, batch) -> (state, loss)."
        )
    return report


@functools.lru_cache(8)  # a step that is compared again, with other arguments, is the same program
def _repeated(step: StepFunction, steps: int, carried: bool) -> Callable[..., dict[str, Any]]:
    """A function that makes several steps."""

    @functools.wraps(step)  # for the names of its parameters
    def several(*args: Any) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for i in range(steps):
            result = step(*args)
            state, rest = _taken_apart(result, args) if carried else (None, result)
            if state is not None:
                state = ensure_mirrored({"state": state})["state"]
                args, results["state"] = (state, *args[1:]), state
            results[f"step {i + 1}"] = rest
        return results

    return several


def _may_be_state(args: Sequence[Any]) -> bool:
    """Whether the first argument can be the state: it is no batch, and no bare number or flag."""
    if not isinstance(args, tuple | list) or not args:  # `verify` says what is wrong with it
        return False
    leaves = jax.tree.leaves(args[0], is_leaf=is_per_replica)
    bare = isinstance(args[0], bool | int | float | complex | str)
    return bool(leaves) and not bare and not any(map(is_per_replica, leaves))


def _taken_apart(result: PyTree, args: Sequence[Any]) -> tuple[PyTree, PyTree]:
    """The new state in what a step has returned, `None` if there is none, and the rest of it."""
    if _is_next(result, args[0]):  # first: a state can be a NamedTuple
        return result, ()
    if isinstance(result, tuple) and result and _is_next(result[0], args[0]):
        return result[0], result[1:]
    return None, result


def _is_next(new: PyTree, old: PyTree) -> bool:
    """Whether one tree can take the place of the other."""
    return _form(new) == _form(old)


def _form(tree: PyTree) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]


def _require_strategy(strategy: Any) -> Strategy:
    if isinstance(strategy, Strategy):
        return strategy
    raise TypeError(
        f"strategy={describe(strategy)} is no strategy. Pass one, e.g. mirror.MirroredStrategy()."
    )
