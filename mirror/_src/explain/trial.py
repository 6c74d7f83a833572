"""A step on copies of its objects, and its times: in a loop, and from idle devices."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from mirror._src.checks.trial import copy_of, with_objects
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.run.arguments import hoist_nested
from mirror._src.run.nnx.structure import is_object
from mirror._src.run.runner import Runner
from mirror._src.utils.types import PyTree, StepFunction
from mirror._src.values.per_replica import held_by, is_per_replica, on_replicas

_WARM_UP_STEPS = 2


class IdleTimes(NamedTuple):
    """What one step takes that begins with idle devices, in seconds.

    Attributes:
        input: `next(data)`.
        transfer: bringing to the devices what is not there.
        run: `run`, until its results are there.
    """

    input: float
    transfer: float
    run: float


class Batches:
    """Batches of one set of shapes, for ever: the data are read again when they end.

    Args:
        data: what yields batches; `None`: a step has no batch of its own.
    """

    def __init__(self, data: Iterable[PyTree] | None) -> None:
        self._data = data
        self._iterator: Iterator[PyTree] | None = None
        self._shapes: Any = None
        self._num_read = 0

    def take(self) -> tuple[PyTree, ...]:
        """The next batch, as the last argument of a step; nothing where there are no data.

        Raises:
            ValueError: the data have ended and cannot be read again.
        """
        if self._data is None:
            return ()
        while True:
            batch = self._next(self._data)
            shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(batch)]
            self._shapes = self._shapes or shapes
            if shapes == self._shapes:  # another would be compiled for
                return (batch,)

    def _next(self, data: Iterable[PyTree]) -> PyTree:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(data)
            for batch in self._iterator:
                self._num_read += 1
                return batch
            self._iterator = None
        raise ValueError(
            f"The data ended after {self._num_read} batches and cannot be read again, and explain "
            "reads some more than three times `steps`. Pass a list, a dataset, or a smaller steps=."
        )


class Trial:
    """A step on copies of its objects."""

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
        """The arguments of a call with this batch."""
        args, kwargs = self.tree
        return (*args, *batch), kwargs

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        """One step; what it leaves may not be there yet."""
        results = self.runner.run(self._fn, args, kwargs)
        return results, [variable.get_raw_value() for variable in self.variables]

    def warm_up(self, batch: tuple[PyTree, ...]) -> None:
        """Compiles the step; finds out what it changes, and whether anything lies elsewhere."""
        for _ in range(_WARM_UP_STEPS):
            before = [variable.get_raw_value() for variable in self.variables]
            results, after = self.call(*self.arguments(batch))
            wait((results, after))
        self.changed = [a is not b for a, b in zip(before, after, strict=True)]
        self.num_results = len(jax.tree.leaves(results))
        leaves = jax.tree.leaves(self.arguments(batch), is_leaf=_is_whole)
        self.elsewhere = not all(_is_there(leaf, self.runner.replicas) for leaf in leaves)


def variables_of(objects: Sequence[Any]) -> list[nnx.Variable]:
    """All variables in nnx objects, each once."""
    nodes = [node for _, node in nnx.iter_graph(tuple(objects))]
    return [node for node in nodes if isinstance(node, nnx.Variable)]


def wait(tree: PyTree) -> None:
    """Returns when all arrays in a tree are there, those in nnx objects left out."""
    for leaf in jax.tree.leaves(tree, is_leaf=is_object):
        if is_object(leaf):
            continue
        jax.block_until_ready(leaf.arrays if isinstance(leaf, UnstackedArrays) else leaf)


def in_a_loop(trial: Trial, batches: Batches, steps: int) -> float:
    """Seconds a step in the user's own loop."""
    start = time.perf_counter()
    for _ in range(steps):
        left = trial.call(*trial.arguments(batches.take()))
    wait(left)
    return (time.perf_counter() - start) / steps


def idle_times(batches: Batches, trials: Sequence[Trial], steps: int) -> list[IdleTimes]:
    """What the parts of a step take when each begins with idle devices: medians, in seconds.

    Args:
        batches: the first trial's.
        trials: what to hold against each other: they take turns, because a machine that others
            use too is not as fast now as later.
        steps: how many of each.
    """
    sources = [batches, *(Batches(None) for _ in trials[1:])]
    rows: list[list[IdleTimes]] = [[] for _ in trials]
    for _ in range(steps):
        for trial, source, row in zip(trials, sources, rows, strict=True):
            row.append(_one(trial, source))
    return [IdleTimes(*map(statistics.median, zip(*row, strict=True))) for row in rows]


def _one(trial: Trial, batches: Batches) -> IdleTimes:
    start = time.perf_counter()
    batch = batches.take()
    taken = time.perf_counter()
    wait(batch)
    arguments = trial.arguments(batch)
    if trial.elsewhere:
        arguments = placed_on(arguments, trial.runner.replicas)
        wait(arguments)
    there = time.perf_counter()
    wait(trial.call(*arguments))
    return IdleTimes(taken - start, there - taken, time.perf_counter() - there)


def placed_on(arguments: Any, replicas: ReplicaDevices) -> Any:
    """The arguments with all arrays on the replicas' devices."""

    def place(leaf: Any) -> Any:
        if _is_there(leaf, replicas):
            return leaf
        return on_replicas(leaf, replicas) if is_per_replica(leaf) else replicas.mirror(leaf)

    return jax.tree.map(place, arguments, is_leaf=_is_whole)


def _is_there(leaf: Any, replicas: ReplicaDevices) -> bool:
    """Whether a leaf of arguments needs no transfer; numbers and nnx objects do not."""
    held = held_by(leaf) if is_per_replica(leaf) else leaf
    if isinstance(held, UnstackedArrays):
        return all(isinstance(array, jax.Array) for array in held.arrays)
    if is_per_replica(leaf):
        return isinstance(held, jax.Array) and held.sharding == replicas.stacked
    if isinstance(leaf, jax.Array):
        return replicas.is_mirrored(leaf)
    return not isinstance(leaf, np.ndarray)


def _is_whole(value: object) -> bool:
    return is_per_replica(value) or is_object(value)
