"""Tests of code that uses mirror: two asserts, and what the pytest plugin does with JAX.

The plugin's hooks stand in the package `pytest_mirror`: pytest loads them in every run, and an
import of this module brings JAX.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mirror._errors import ReplicaDivergenceError, ReplicaMismatchError, describe
from mirror._types import PyTree, StepFunction
from mirror.checks import VerifyReport
from mirror.context import has_strategy
from mirror.cross_device_ops import ReductionToOneDevice
from mirror.devices import backend
from mirror.devices.knobs import HOST_DEVICES
from mirror.devices.start import HOST_DEVICES_FLAG, culprit, forced_host_devices, started
from mirror.executors import launch
from mirror.mirrored import MirroredStrategy, get_strategy
from mirror.program.ensure import ensure_mirrored
from mirror.strategy import Strategy
from mirror.values import is_per_replica


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


def force_host_devices(count: int, asked_by: str) -> None:
    """Makes JAX start with so many host devices; what the user has set is left as it is.

    Args:
        count: how many.
        asked_by: who asks, for messages.

    Raises:
        RuntimeError: somebody has said another number, or JAX's backend has started.
    """
    known, forced = HOST_DEVICES.value, forced_host_devices()
    number = forced if known is None else known  # JAX's own option wins over XLA's flag
    if number == count:
        return
    if number is not None:
        who = f"XLA_FLAGS={HOST_DEVICES_FLAG}={forced}" if known is None else _who_says(known)
        raise RuntimeError(
            f"{asked_by} asks for {count} host devices, and {who} says {number}, which is left as "
            "it is. Take one of the two out, or let them say the same number."
        )
    if started():
        raise RuntimeError(
            f"{asked_by} comes too late: JAX's backend has started, which fixes the number of host "
            f"devices. {culprit()} Use JAX in fixtures and tests, not while conftest.py is "
            f"imported, or set JAX_NUM_CPU_DEVICES={count} before Python starts."
        )
    jax.config.update("jax_num_cpu_devices", count)


def _who_says(number: int) -> str:
    if os.environ.get("JAX_NUM_CPU_DEVICES") == str(number):
        return f"JAX_NUM_CPU_DEVICES={number}"
    return f"{HOST_DEVICES}, which was set in code (a conftest.py, say),"


def devices_for_tests(*, on_host: bool) -> tuple[jax.Device, ...]:
    """The distinct devices that tests run on. Starts JAX's backend.

    Args:
        on_host: host devices, also where there are accelerators.
    """
    found = backend.devices_of_type("CPU") if on_host else backend.default_devices()
    return tuple(dict.fromkeys(found))


def make_strategy(
    executor: str, num_replicas: int | None, devices: Sequence[jax.Device]
) -> MirroredStrategy:
    """A strategy that runs on so many replicas, by that executor.

    Args:
        executor: `"pmap"`, `"vmap"`, which needs one device, or `"staged"`.
        num_replicas: `None`: as many as there are devices.
        devices: at least as many as replicas, for the others.
    """
    n = len(devices) if num_replicas is None else num_replicas
    if executor == "vmap":
        return MirroredStrategy(devices[:1], replicas_per_device=n)
    return MirroredStrategy(devices[:n], ReductionToOneDevice() if executor == "staged" else None)


def launches_under_way() -> list[str]:
    """A line for each launch on host devices that has not ended, oldest first; waits for none."""
    lines = []
    for token in launch.under_way():
        parts = [(shard.device, shard.data.is_ready()) for shard in token.addressable_shards]
        ended = [device for device, ready in parts if ready]
        waiting = [device for device, ready in parts if not ready]
        if waiting:
            also = f", ended on {backend.names(ended)}" if ended else ", ended on no device"
            lines.append(f"under way on {backend.names(waiting)}{also}")
    return lines
