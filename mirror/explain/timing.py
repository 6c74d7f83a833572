"""`strategy.explain`: measures where a step's time goes, on copies of its objects.

A step's wall time is the time it takes in the user's own loop, `next(data)` and `run`, nobody
waiting for results: that of a number of steps, divided by the number. There the host is busy with
one step while the devices work on another. So the rest is measured with steps that begin with idle
devices, one after the other:

- input is what `next(data)` takes;
- transfer, what it takes to bring the batch, and arguments that lie on the host, to the devices;
- dispatch, what a step takes that computes nothing, with as many arrays of one number each. (When
  `run` returns says little: on the host it may compute first.) Those three are the host's;
- exchange, what the program's exchanges take alone, on buffers of the same sizes;
- compute, what else `run` takes until the results are there. Those two are the devices'.

Who takes longer, the host or the devices, counts in full, because the wall cannot be shorter; the
other one counts for what the wall is longer. Each part gets its share of that. If the wall is
longer than all of it, everything takes longer in the loop, where steps share cores with the host.
So the parts add up to the wall, and the largest is what to change.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror import calls
from mirror._errors import describe
from mirror._types import Array, PyTree, StepFunction
from mirror.checks import copy_of, restore, whole_batch, with_objects
from mirror.devices.memory import memory_info
from mirror.devices.replicas import ReplicaDevices
from mirror.explain.exchanges import ExchangeRow
from mirror.explain.memory import memory_report
from mirror.explain.program import describe_program
from mirror.explain.report import Explanation, Seconds
from mirror.objects import is_object
from mirror.parts import Parts
from mirror.program.axis import axis_name
from mirror.runner import Runner
from mirror.values import PerReplica, held_by, is_numeric, is_per_replica, on_replicas
from mirror.variables import collapse

_WARM_UP_STEPS = 2
_MOST_EXCHANGE_STEPS = 10


class Idle(NamedTuple):
    """What one step takes that begins with idle devices, in seconds.

    Attributes:
        input: `next(data)`.
        transfer: bringing to the devices what is not there.
        run: `run`, until its results are there.
    """

    input: float
    transfer: float
    run: float


class Runners(NamedTuple):
    """What runs the programs that are measured.

    Attributes:
        many: the strategy's runner.
        scratch: another one over the same devices, for programs that nobody runs again.
        single: that of one replica.
    """

    many: Runner
    scratch: Runner
    single: Runner


def explain(
    runners: Runners,
    fn: StepFunction,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    data: Iterable[PyTree] | None,
    steps: int,
) -> Explanation:
    """See `Strategy.explain`."""
    many = runners.many
    batches = Batches(data)
    first = batches.take()
    many.prepare(fn, (*args, *first), kwargs)  # its variables are known from here on
    captured = many.captured(fn)
    saved = copy_of(captured)
    try:
        trial = Trial(many, fn, args, kwargs)
        program = describe_program(many, fn, *trial.arguments(first))
        memory = memory_report(many.examined(fn, *trial.arguments(first)), many.replicas)
        trial.warm_up(first)
        empty = _empty(runners.scratch, trial, first)
        _in_a_loop(trial, batches, steps)  # uses up what was read ahead while XLA compiled
        wall = _in_a_loop(trial, batches, steps)
        idle, nothing = _one_by_one(batches, [trial, empty], steps)
        restore(captured, saved)
        collapse(captured)
        alone, why_not = _alone(runners, fn, (*args, *first), kwargs, steps)
    finally:
        restore(captured, saved)
    exchange = _exchanging(runners.scratch, program.exchanges, min(steps, _MOST_EXCHANGE_STEPS))
    return Explanation(
        step=program.step,
        devices=tuple(map(str, many.replicas.devices)),
        on_host=many.replicas.on_host,
        steps=steps,
        wall_secs=wall,
        secs=split(wall, idle, nothing.run, exchange),
        num_arrays=len(jax.tree.leaves((nnx.state(trial.objects), *trial.arguments(first)))),
        num_exchanges=sum(row.least_trips for row in program.exchanges),
        exchanged_bytes=sum(row.least_trips * row.num_bytes for row in program.exchanges),
        speedup=alone / idle.run if alone else None,
        no_speedup_because=why_not,
        memory=memory,
        device_memory=memory_info(many.replicas.devices[0].memory_stats()) or {},
    )


def require_steps(steps: object) -> None:
    """Refuses a number of steps that is none.

    Raises:
        TypeError: no int.
        ValueError: below 1.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps={describe(steps)} is no int. Pass how many to measure.")
    if steps < 1:
        raise ValueError(f"steps={steps}: one at least. Pass how many to measure.")


def split(wall: float, idle: Idle, dispatch: float, exchange: float) -> Seconds:
    """The parts of a step, which add up to its wall time; see the module's docstring.

    >>> split(10.0, Idle(input=6.0, transfer=0.0, run=8.0), dispatch=2.0, exchange=3.0)
    Seconds(input=6.0, transfer=0.0, dispatch=2.0, compute=1.0, exchange=1.0)
    """
    dispatch = min(dispatch, idle.run)
    host, devices = idle.input + idle.transfer + dispatch, idle.run - dispatch
    slower = max(1.0, wall / (host + devices)) if host + devices else 1.0
    longer = min(max(host, devices) * slower, wall)
    on_host = longer if host >= devices else wall - longer
    each = on_host / host if host else 0.0
    exchanging = min(exchange / devices, 1.0) if devices else 0.0
    return Seconds(
        input=each * idle.input,
        transfer=each * idle.transfer,
        dispatch=each * dispatch,
        compute=(wall - on_host) * (1 - exchanging),
        exchange=(wall - on_host) * exchanging,
    )


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
        hoisted = calls.hoist_nested(args, kwargs)
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
        jax.block_until_ready(leaf.arrays if isinstance(leaf, Parts) else leaf)


def _in_a_loop(trial: Trial, batches: Batches, steps: int) -> float:
    """Seconds a step in the user's own loop."""
    start = time.perf_counter()
    for _ in range(steps):
        left = trial.call(*trial.arguments(batches.take()))
    wait(left)
    return (time.perf_counter() - start) / steps


def _one_by_one(batches: Batches, trials: Sequence[Trial], steps: int) -> list[Idle]:
    """What the parts of a step take when each begins with idle devices: medians, in seconds.

    Args:
        batches: the first trial's.
        trials: what to hold against each other: they take turns, because a machine that others
            use too is not as fast now as later.
        steps: how many of each.
    """
    sources = [batches, *(Batches(None) for _ in trials[1:])]
    rows: list[list[Idle]] = [[] for _ in trials]
    for _ in range(steps):
        for trial, source, row in zip(trials, sources, rows, strict=True):
            row.append(_one(trial, source))
    return [Idle(*map(statistics.median, zip(*row, strict=True))) for row in rows]


def _one(trial: Trial, batches: Batches) -> Idle:
    start = time.perf_counter()
    batch = batches.take()
    taken = time.perf_counter()
    wait(batch)
    arguments = trial.arguments(batch)
    if trial.elsewhere:
        arguments = _placed(arguments, trial.runner.replicas)
        wait(arguments)
    there = time.perf_counter()
    wait(trial.call(*arguments))
    return Idle(taken - start, there - taken, time.perf_counter() - there)


def _placed(arguments: Any, replicas: ReplicaDevices) -> Any:
    """The arguments with all arrays on the replicas' devices."""

    def place(leaf: Any) -> Any:
        if _is_there(leaf, replicas):
            return leaf
        return on_replicas(leaf, replicas) if is_per_replica(leaf) else replicas.mirror(leaf)

    return jax.tree.map(place, arguments, is_leaf=_is_whole)


def _is_there(leaf: Any, replicas: ReplicaDevices) -> bool:
    """Whether a leaf of arguments needs no transfer; numbers and nnx objects do not."""
    held = held_by(leaf) if is_per_replica(leaf) else leaf
    if isinstance(held, Parts):
        return all(isinstance(array, jax.Array) for array in held.arrays)
    if is_per_replica(leaf):
        return isinstance(held, jax.Array) and held.sharding == replicas.stacked
    if isinstance(leaf, jax.Array):
        return replicas.is_mirrored(leaf)
    return not isinstance(leaf, np.ndarray)


def _is_whole(value: object) -> bool:
    return is_per_replica(value) or is_object(value)


def _empty(scratch: Runner, trial: Trial, batch: tuple[PyTree, ...]) -> Trial:
    """The step without its work: as many arrays in and out, of one number each."""
    replicas, changed = scratch.replicas, trial.changed

    def small(leaf: Any) -> Any:
        if is_per_replica(leaf):
            return on_replicas(PerReplica([np.zeros(1, leaf.dtype)] * len(replicas)), replicas)
        if isinstance(leaf, jax.Array | np.ndarray) and is_numeric(leaf.dtype):
            return replicas.mirror(np.zeros(1, leaf.dtype))
        return leaf

    def step(*args: Any, **kwargs: Any) -> list[Array]:
        inside = variables_of(calls.hoist_nested(args, kwargs).objects)
        for variable, changes in zip(inside, changed, strict=True):
            if changes:
                zeros = jax.tree.map(jnp.zeros_like, variable.get_raw_value())
                variable.set_raw_value(zeros)
        return [jnp.zeros(1)] * trial.num_results

    step.__name__ = "nothing"
    args, kwargs = trial.arguments(batch)
    hoisted = calls.hoist_nested(args, kwargs)
    objects = copy_of(hoisted.objects)
    for variable in variables_of(objects):
        value = variable.get_raw_value()
        variable.set_raw_value(jax.tree.map(small, value, is_leaf=is_per_replica))
    tree = jax.tree.map(small, hoisted.tree, is_leaf=is_per_replica)
    empty = Trial(scratch, step, *with_objects(tree, objects))
    empty.warm_up(())
    return empty


def _alone(
    runners: Runners,
    fn: StepFunction,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    steps: int,
) -> tuple[float | None, str]:
    """Seconds a step of one replica with the whole batch, or why there is no such figure."""
    hoisted = calls.hoist_nested(args, kwargs)
    leaves = jax.tree.leaves(hoisted.tree, is_leaf=is_per_replica)
    if not any(map(is_per_replica, leaves)):
        return None, "no batch is split over the replicas"
    if len(runners.many.replicas) == 1:
        return None, "there is one replica"
    try:
        whole = jax.tree.map(whole_batch, hoisted.tree, is_leaf=is_per_replica)
        objects = copy_of(hoisted.objects)
        collapse(objects)
        placed = _placed(with_objects(whole, objects), runners.single.replicas)
        trial = Trial(runners.single, fn, *placed)
        trial.warm_up(())
        (found,) = _one_by_one(Batches(None), [trial], steps)
        return found.run, ""
    except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        return None, f"one replica cannot run it: {str(error).splitlines()[0]}"


def _exchanging(scratch: Runner, rows: Sequence[ExchangeRow], steps: int) -> float:
    """Seconds a step's exchanges take by themselves, each as often as it runs."""
    if len(scratch.replicas) == 1:
        return 0.0
    by_trips: dict[int, list[ExchangeRow]] = {}
    for row in rows:
        # PRNG keys are small; a gather after a reduce-scatter is timed as their all-reduce.
        if row.avals and all(is_numeric(aval.dtype) for aval in row.avals):
            by_trips.setdefault(row.least_trips, []).append(row)
    return sum(trips * _together(scratch, group, steps) for trips, group in by_trips.items())


def _together(scratch: Runner, rows: Sequence[ExchangeRow], steps: int) -> float:
    """Seconds that exchanges take one after the other, without what any program takes."""
    avals = [aval for row in rows for aval in row.avals]

    def make() -> list[Array]:
        number = jax.lax.axis_index(axis_name())
        return [jnp.full(aval.shape, number, aval.dtype) for aval in avals]

    def talk(buffers: list[Array]) -> list[Array]:
        got: list[Array] = []
        for row in rows:
            # Each waits for the one before: else the executor would let several travel together.
            start = len(got)
            mine = buffers[start : start + len(row.avals)]
            mine, got = jax.lax.optimization_barrier((mine, got))
            got = [*got, *row.again(mine)]
        return [_first(out) for out in jax.lax.optimization_barrier(got)]

    def stay(buffers: list[Array]) -> list[Array]:
        return [_first(out) for out in jax.lax.optimization_barrier(buffers)]

    buffers = scratch.run(make, (), {})
    trials = [Trial(scratch, step, (buffers,), {}) for step in (talk, stay)]
    for trial in trials:
        trial.warm_up(())
    talking, staying = _one_by_one(Batches(None), trials, steps)
    return max(0.0, talking.run - staying.run)


def _first(array: Array) -> Array:
    """Its first number, so that results take no time."""
    return array.ravel()[:1]
