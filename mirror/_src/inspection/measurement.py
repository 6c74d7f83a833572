"""Runs a step on copies of its objects and measures it, in a loop, in turns and on idle devices.

`benchmarks/` measures in turns by a function of its own: its parent process and its hand-written
contenders must not import `mirror`.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.types import Array, PyTree, StepFunction
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import UnstackedArrays
from mirror._src.engine.arguments import ObjectPlaceholder, hoist_nested
from mirror._src.engine.nnx.structure import is_object
from mirror._src.engine.per_replica import (
    PerReplica,
    held_by,
    is_per_replica,
    on_replicas,
    spans_processes,
)
from mirror._src.engine.replica_context import current_replica
from mirror._src.engine.runner import Runner
from mirror._src.engine.variable import Variable

_T = TypeVar("_T")


def in_turns(measurements: Sequence[Callable[[], _T]], rounds: int) -> list[list[_T]]:
    """Takes every measurement once per round, and returns the results of each measurement.

    Measuring one alternative after the other would charge a busy moment of the machine to one of
    them. Every other round runs backwards, so that the measurements change neighbors.

    >>> in_turns([lambda: "a", lambda: "b"], rounds=3)
    [['a', 'a', 'a'], ['b', 'b', 'b']]
    """
    results: list[list[_T]] = [[] for _ in measurements]
    for number in range(rounds):
        turns = list(zip(measurements, results, strict=True))
        for measure, values in reversed(turns) if number % 2 else turns:
            values.append(measure())
    return results


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Returns the first and third quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def copy_of(objects: Sequence[Any]) -> list[Any]:
    """Copies nnx objects; variables that several objects share are shared by the copies too."""
    graphdef: Any
    graphdef, state = nnx.split(tuple(objects))
    return list(nnx.merge(graphdef, jax.tree.map(_copy, state)))


def _copy(leaf: Any) -> Any:
    is_unstacked = isinstance(leaf, UnstackedArrays)
    return UnstackedArrays(list(map(jnp.copy, leaf.arrays))) if is_unstacked else jnp.copy(leaf)


def restore(variables: Sequence[Variable], saved: Sequence[Any]) -> None:
    """Sets variables to the values of earlier copies; the copies stay usable."""
    for variable, copied in zip(variables, copy_of(list(saved)), strict=True):
        variable.set_raw_value(copied.get_raw_value())


def with_objects(tree: Any, objects: list[Any]) -> Any:
    """Replaces the placeholders in the arguments of a call by these objects."""
    return jax.tree.map(
        lambda node: objects[node.number] if isinstance(node, ObjectPlaceholder) else node,
        tree,
        is_leaf=lambda node: is_per_replica(node) or isinstance(node, ObjectPlaceholder),
    )


def gathered(runner: Runner, tree: PyTree) -> PyTree:
    """Returns the tree with all values of `PerReplica` leaves in this process.

    A collective if they are in several processes; every process must call it.
    """
    leaves: list[Any]
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_per_replica)
    spread = [i for i, leaf in enumerate(leaves) if is_per_replica(leaf) and spans_processes(leaf)]
    if spread:
        arrays = runner.run(_stack, ([leaves[i] for i in spread],), {})
        for i, array in zip(spread, arrays, strict=True):
            leaves[i] = PerReplica.from_stacked(np.asarray(array))
    return jax.tree.unflatten(treedef, leaves)


def _stack(leaves: list[Array]) -> list[Array]:
    replica = current_replica()
    assert replica is not None  # a runner calls this
    return replica.all_gather([leaf[None] for leaf in leaves])


def whole_batch(leaf: Any) -> Any:
    """Joins the replicas' batches into one batch for a single replica.

    Raises:
        ValueError: If the leaf is a `PerReplica` of scalars.
    """
    if not is_per_replica(leaf):
        return leaf
    rows = [np.asarray(value) for value in leaf.values]
    if rows[0].ndim == 0:
        raise ValueError(
            f"Cannot join the replicas' values of {leaf!r} into one batch: scalars have no batch "
            "axis. Pass a mirrored value, or one with a batch axis."
        )
    return PerReplica([np.concatenate(rows)])


_WARM_UP_STEPS = 2


class IdleTimes(NamedTuple):
    """Duration of one step that starts on idle devices, in seconds.

    Attributes:
        input: Duration of `next(data)`.
        transfer: Duration of moving arrays to the devices.
        run: Duration of `run` until its results are ready.
    """

    input: float
    transfer: float
    run: float


def endless(data: Iterable[PyTree] | None) -> Iterator[tuple[PyTree, ...]]:
    """Yields batches of equal shapes, each as the last argument of a step, again and again.

    Args:
        data: Iterable of batches, which is read again when it ends. If `None`, the step takes no
            batch.

    Raises:
        ValueError: If the data ended and cannot be read again.
    """
    if data is None:
        yield from itertools.repeat(())
        return
    known: list[Any] = []
    num_read, before = 0, -1
    while num_read > before:
        before = num_read
        for batch in data:
            num_read += 1
            shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batch)]
            known = known or shapes
            if shapes == known:  # other shapes would be compiled and distort the times
                yield (batch,)
    raise ValueError(
        f"The data ended (batches read: {num_read}) and cannot be read again. explain reads "
        "slightly more than 3 * `steps` batches: pass a list or a dataset, or reduce `steps`."
    )


class Trial:
    """Step on copies of its objects.

    Attributes:
        runner: Runner of the step.
        objects: Copies of the nnx objects among the arguments.
        tree: Arguments and keyword arguments, with the copies.
        variables: Variables of the copies.
        changed: For every variable, whether the step changes it.
        elsewhere: Whether an argument is not on the devices.
        num_results: Number of arrays that the step returns.
    """

    def __init__(
        self, runner: Runner, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.runner, self._fn = runner, fn
        hoisted = hoist_nested(args, kwargs)
        self.objects = copy_of(hoisted.objects)
        self.tree = with_objects(hoisted.tree, self.objects)
        self.variables = variables_of(self.objects)
        self.changed: list[bool] = []
        self.elsewhere = False
        self.num_results = 0

    def arguments(self, batch: tuple[PyTree, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments and keyword arguments of a call with this batch."""
        args, kwargs = self.tree
        return (*args, *batch), kwargs

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        """Runs one step; returns its results and variables, which may not be ready yet."""
        results = self.runner.run(self._fn, args, kwargs)
        return results, [variable.get_raw_value() for variable in self.variables]

    def warm_up(self, batch: tuple[PyTree, ...]) -> None:
        """Compiles the step, and finds out which variables it changes."""
        for _ in range(_WARM_UP_STEPS):
            before = [variable.get_raw_value() for variable in self.variables]
            results, after = self.call(*self.arguments(batch))
            wait((results, after))
        self.changed = [a is not b for a, b in zip(before, after, strict=True)]
        self.num_results = len(jax.tree.leaves(results))
        leaves = jax.tree.leaves(self.arguments(batch), is_leaf=is_whole)
        self.elsewhere = not all(_is_placed(leaf, self.runner.replicas) for leaf in leaves)


def variables_of(objects: Sequence[Any]) -> list[nnx.Variable]:
    """Returns the variables of nnx objects, without repetition."""
    nodes = [node for _, node in nnx.iter_graph(tuple(objects))]
    return [node for node in nodes if isinstance(node, nnx.Variable)]


def wait(tree: PyTree) -> None:
    """Waits until all arrays in a tree are ready, except those in nnx objects."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_object):
        if is_object(leaf):
            continue
        jax.block_until_ready(leaf.arrays if isinstance(leaf, UnstackedArrays) else leaf)


def in_a_loop(trial: Trial, batches: Iterator[Any], steps: int) -> float:
    """Returns the seconds per step in a loop like the user's."""
    start = time.perf_counter()
    for _ in range(steps):
        results = trial.call(*trial.arguments(next(batches)))
    wait(results)
    return (time.perf_counter() - start) / steps


def idle_times(batches: Iterator[Any], trials: Sequence[Trial], steps: int) -> list[IdleTimes]:
    """Returns the median times of trials whose steps start on idle devices.

    Args:
        batches: Batches of the first trial.
        trials: Trials to compare. They take turns, so that a busy moment of the machine affects all
            of them.
        steps: Number of steps per trial.
    """
    sources = [batches, *(endless(None) for _ in trials[1:])]
    turns = [functools.partial(_time_step, *pair) for pair in zip(trials, sources, strict=True)]
    rows = in_turns(turns, steps)
    return [IdleTimes(*map(statistics.median, zip(*row, strict=True))) for row in rows]


def _time_step(trial: Trial, batches: Iterator[Any]) -> IdleTimes:
    start = time.perf_counter()
    batch = next(batches)
    taken = time.perf_counter()
    wait(batch)
    arguments = trial.arguments(batch)
    if trial.elsewhere:
        arguments = placed_on(arguments, trial.runner.replicas)
        wait(arguments)
    placed = time.perf_counter()
    wait(trial.call(*arguments))
    return IdleTimes(taken - start, placed - taken, time.perf_counter() - placed)


def placed_on(arguments: Any, replicas: ReplicaDevices) -> Any:
    """Returns the arguments with all arrays on the replicas' devices."""

    def place(leaf: Any) -> Any:
        if _is_placed(leaf, replicas):
            return leaf
        return on_replicas(leaf, replicas) if is_per_replica(leaf) else replicas.mirror(leaf)

    return jax.tree.map(place, arguments, is_leaf=is_whole)


def _is_placed(leaf: Any, replicas: ReplicaDevices) -> bool:
    """Whether an argument is on the devices already, or is a number or an nnx object."""
    value = held_by(leaf) if is_per_replica(leaf) else leaf
    if isinstance(value, UnstackedArrays):
        return all(isinstance(array, jax.Array) for array in value.arrays)
    if is_per_replica(leaf):
        return isinstance(value, jax.Array) and value.sharding == replicas.stacked
    if isinstance(leaf, jax.Array):
        return replicas.is_mirrored(leaf)
    return not isinstance(leaf, np.ndarray)


def is_whole(value: object) -> bool:
    """Whether a value is treated as one leaf: a `PerReplica` or an nnx object."""
    return is_per_replica(value) or is_object(value)
