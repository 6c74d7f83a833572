"""`strategy.explain`: measures where a step's time goes, on copies of its objects.

`Explanation` shows the measured parts as text, tables and a figure. Dispatch is measured with an
empty step rather than as the duration of `run`: on host devices, `run` may compute before it
returns. Other baselines are the whole batch on one replica, and the collectives alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import bytes_in_words, counted, first_line
from mirror._src.base.naming import name_of
from mirror._src.base.public_names import set_module
from mirror._src.base.terminal import Report, Table, new_figure
from mirror._src.base.types import Array, PyTree, StepFunction, is_numeric
from mirror._src.devices.memory import memory_info
from mirror._src.engine.agreement import require_same_call
from mirror._src.engine.arguments import hoist_nested
from mirror._src.engine.per_replica import PerReplica, is_per_replica, on_replicas
from mirror._src.engine.runner import Runner
from mirror._src.engine.variable import collapse
from mirror._src.inspection.measurement import (
    IdleTimes,
    Trial,
    copy_of,
    endless,
    gathered,
    idle_times,
    in_a_loop,
    is_whole,
    placed_on,
    restore,
    variables_of,
    whole_batch,
    with_objects,
)
from mirror._src.inspection.memory import MemoryReport, memory_report
from mirror._src.inspection.program_report import CollectiveRow, describe_program


class Seconds(NamedTuple):
    """Parts of a step's wall time, in seconds; see `Explanation`.

    Attributes:
        input: Waiting for the next batch.
        transfer: Transferring arrays from the host to the devices.
        dispatch: Launching the step from Python.
        compute: Computing on the devices.
        communication: Executing collectives.
    """

    input: float
    transfer: float
    dispatch: float
    compute: float
    communication: float


_MEANING = {
    "input": "waiting for next(data)",
    "transfer": "transferring the batch to the devices",
    "dispatch": "launching the step from Python",
    "compute": "computing on the devices",
    "communication": "executing collectives",
}


@set_module("mirror")
@dataclass(frozen=True, repr=False)
class Explanation(Report):
    """Measured parts of a step's time; `print` it, or display it in a notebook.

    The wall time of a step is measured in a loop like the user's, `next(data)` and then `run`. In
    that loop, the host prepares one step while the devices execute another. The parts are therefore
    measured with steps that start on idle devices:

    - input: the duration of `next(data)`.
    - transfer: moving the batch and other host arrays to the devices.
    - dispatch: a step with the same number of arrays that computes nothing.
    - communication: the step's collectives alone, on buffers of the same size.
    - compute: the remaining time until the results are ready.

    Input, transfer and dispatch run on the host; compute and communication run on the devices. The
    slower side counts in full, and the faster side only for the time that it adds. The parts add up
    to the wall time, so the largest part is the one to improve.

    Attributes:
        step: Name of the step.
        devices: Devices of the replicas.
        on_host: Whether these are host devices, which share the cores of the machine.
        steps: Number of steps measured.
        wall_secs: Wall time per step, in a loop.
        secs: Parts of the wall time, in seconds.
        num_arrays: Number of arrays that `run` passes to the devices in every step.
        num_collectives: Number of collectives per step. A `while` loop counts as one iteration.
        collective_bytes: Bytes that each replica contributes to them.
        speedup: Time per step on one replica with the whole batch, divided by the time on all
            replicas, both without waiting for data. `None` if it is unknown.
        no_speedup_because: Reason why the speedup is unknown, else empty.
        memory: Bytes per device of parameters, optimizer state, batch and temporaries.
        device_memory: Memory statistics of the first device: `"current"`, `"peak"` and `"limit"` in
            bytes. Empty on host devices.
    """

    step: str
    devices: tuple[str, ...]
    on_host: bool
    steps: int
    wall_secs: float
    secs: Seconds
    num_arrays: int
    num_collectives: int
    collective_bytes: int
    speedup: float | None
    no_speedup_because: str
    memory: MemoryReport
    device_memory: dict[str, int]

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the wall time that each part takes."""
        return {part: secs / self.wall_secs for part, secs in self.secs._asdict().items()}

    @property
    def bound(self) -> str:
        """Largest part: `"input"`, `"dispatch"`, `"communication"` or `"compute"`."""
        shares = self.shares
        shares["input"] += shares.pop("transfer")
        return max(shares, key=shares.__getitem__)

    @property
    def verdict(self) -> str:
        """Largest part of the step time, and how to reduce it."""
        shares = self.shares
        collectives = counted(self.num_collectives, "collective")
        return {
            "input": (
                f"input-bound: {shares['input'] + shares['transfer']:.0%} of the step time is "
                "spent waiting for data. Increase `prefetch`, or move preprocessing into loader "
                "workers."
            ),
            "dispatch": (
                f"dispatch-bound: {shares['dispatch']:.0%} of the step time is spent launching "
                f"the step from Python with {self.num_arrays} arrays. Run several steps per launch "
                "(Trainer(steps_per_execution=k)), use fewer and larger arrays, or do more work "
                "per step."
            ),
            "communication": (
                f"communication-bound: {shares['communication']:.0%} of the step time is spent in "
                f"{collectives} of {bytes_in_words(self.collective_bytes)}. Use a larger "
                "per-replica batch, or accumulate gradients over several batches "
                "(Trainer(accumulate_steps=k))."
            ),
            "compute": (
                f"compute-bound: the devices compute for {shares['compute']:.0%} of the step time. "
                "Nothing to improve here."
            ),
        }[self.bound]

    @property
    def heading(self) -> str:
        """Step, number of replicas and time per step in one line."""
        replicas = counted(len(self.devices), "replica")
        return f"{self.step} on {replicas}: {self.wall_secs * 1e3:.2f} ms per step"

    @property
    def table(self) -> Table:
        """Table with one row per part."""
        shares = self.shares
        return Table(
            ("part", "ms", "share", "activity"),
            (
                (part, f"{secs * 1e3:.2f}", f"{shares[part]:.0%}", _MEANING[part])
                for part, secs in self.secs._asdict().items()
            ),
        )

    @property
    def facts(self) -> Table:
        """Table of other measurements."""
        rows = [
            ("speedup over one replica", self._speedup),
            ("collectives per step", str(self.num_collectives)),
            ("collective bytes per replica", bytes_in_words(self.collective_bytes)),
            ("arrays per launch", str(self.num_arrays)),
        ]
        for name, count in self.device_memory.items():
            rows.append((f"memory of the first device, {name}", bytes_in_words(count)))
        return Table(("measurement", "value"), rows)

    @property
    def _speedup(self) -> str:
        if self.speedup is None:
            return f"unknown: {self.no_speedup_because}"
        note = " (host devices share the machine's cores)" if self.on_host else ""
        return f"{self.speedup:.2f}, ideal {len(self.devices)}{note}"

    def _parts(self) -> list[Table | list[str] | str]:
        return [[self.verdict], self.table, self.facts, self.memory.table, [self.memory.advice]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as JSON values."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "memory": self.memory.to_dict(),
            "devices": list(self.devices),
            "secs": self.secs._asdict(),
            "shares": self.shares,
            "bound": self.bound,
            "verdict": self.verdict,
        }

    def plot(self, file: str | Path | None = None) -> Any:
        """Plots the parts as one stacked bar.

        Args:
            file: File to save the figure to. The extension selects the format.

        Returns:
            A `matplotlib.figure.Figure`. A notebook displays it; no window is opened.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        figure = new_figure(8, 2)
        axes, start = figure.subplots(), 0.0
        for part, secs in self.secs._asdict().items():
            label = f"{part} {self.shares[part]:.0%}"
            axes.barh([0], [secs * 1e3], left=start, label=label)
            start += secs * 1e3
        axes.set_xlabel("ms per step")
        axes.set_yticks([])
        axes.set_title(self.verdict.split(":")[0])
        figure.legend(loc="outside lower center", ncols=len(self.secs))
        if file is not None:
            figure.savefig(file, dpi=120)
        return figure


class Runners(NamedTuple):
    """Runners of the measured programs.

    Attributes:
        many: Runner of the strategy.
        scratch: Second runner on the same devices, for programs that are run only here.
        single: Runner of a strategy with one replica.
    """

    many: Runner
    scratch: Runner
    single: Runner


def empty_trial(scratch: Runner, trial: Trial, batch: tuple[PyTree, ...]) -> Trial:
    """Returns a step that computes nothing, with the same number of arrays of one element each."""
    replicas, changed = scratch.replicas, trial.changed

    def small(leaf: Any) -> Any:
        if is_per_replica(leaf):
            zeros = PerReplica.from_stacked(np.zeros((len(replicas), 1), leaf.dtype))
            return on_replicas(zeros, replicas)
        if isinstance(leaf, jax.Array | np.ndarray) and is_numeric(leaf.dtype):
            return replicas.mirror(np.zeros(1, leaf.dtype))
        return leaf

    def step(*args: Any, **kwargs: Any) -> list[Array]:
        variables = variables_of(hoist_nested(args, kwargs).objects)
        for variable, is_changed in zip(variables, changed, strict=True):
            if is_changed:
                zeros = jax.tree.map(jnp.zeros_like, variable.get_raw_value())
                variable.set_raw_value(zeros)
        return [jnp.zeros(1)] * trial.num_results

    step.__name__ = "empty_step"
    empty = Trial(scratch, step, *trial.arguments(batch))
    for variable in empty.variables:
        value = variable.get_raw_value()
        variable.set_raw_value(jax.tree.map(small, value, is_leaf=is_per_replica))
    empty.tree = jax.tree.map(small, empty.tree, is_leaf=is_whole)
    empty.warm_up(())
    return empty


def one_replica_secs(
    runners: Runners, fn: StepFunction, args: Sequence[Any], kwargs: dict[str, Any], steps: int
) -> tuple[float | None, str]:
    """Returns the seconds per step on one replica with the whole batch, or why it is unknown."""
    hoisted = hoist_nested(args, kwargs)
    leaves = jax.tree.leaves(hoisted.tree, is_leaf=is_per_replica)
    if not any(map(is_per_replica, leaves)):
        return None, "no batch is split across the replicas"
    if len(runners.many.replicas) == 1:
        return None, "the strategy has only one replica"
    tree = gathered(runners.scratch, hoisted.tree)
    try:
        whole = jax.tree.map(whole_batch, tree, is_leaf=is_per_replica)
        objects = copy_of(hoisted.objects)
        collapse(objects)
        placed = placed_on(with_objects(whole, objects), runners.single.replicas)
        trial = Trial(runners.single, fn, *placed)
        trial.warm_up(())
        (times,) = idle_times(endless(None), [trial], steps)
        return times.run, ""
    except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        return None, f"one replica cannot run it: {first_line(error)}"


def collective_secs(scratch: Runner, rows: Sequence[CollectiveRow], steps: int) -> float:
    """Returns the seconds that all collectives of a step take without the computation."""
    if len(scratch.replicas) == 1:
        return 0.0
    by_trips: dict[int, list[CollectiveRow]] = {}
    for row in rows:
        # PRNG keys are small and skipped.
        if row.avals and all(is_numeric(aval.dtype) for aval in row.avals):
            by_trips.setdefault(row.least_trips, []).append(row)
    return sum(trips * _time_group(scratch, group, steps) for trips, group in by_trips.items())


def _time_group(scratch: Runner, rows: Sequence[CollectiveRow], steps: int) -> float:
    """Returns the seconds that these collectives take in sequence, without the launch overhead."""
    avals = [aval for row in rows for aval in row.avals]

    def make() -> list[Array]:
        number = jax.lax.axis_index(scratch.replicas.axis_name)
        return [jnp.full(aval.shape, number, aval.dtype) for aval in avals]

    def communication(buffers: list[Array]) -> list[Array]:
        results: list[Array] = []
        for row in rows:
            # Without the barrier, the executor would pack independent collectives into one.
            start = len(results)
            operands = buffers[start : start + len(row.avals)]
            operands, results = jax.lax.optimization_barrier((operands, results))
            results = [*results, *row.execute(operands, scratch.replicas.axis_name)]
        return [_first(out) for out in jax.lax.optimization_barrier(results)]

    def no_communication(buffers: list[Array]) -> list[Array]:
        return [_first(out) for out in jax.lax.optimization_barrier(buffers)]

    buffers = scratch.run(make, (), {})
    trials = [Trial(scratch, step, (buffers,), {}) for step in (communication, no_communication)]
    for trial in trials:
        trial.warm_up(())
    with_collectives, without = idle_times(endless(None), trials, steps)
    return max(0.0, with_collectives.run - without.run)


def _first(array: Array) -> Array:
    """Returns the first element, so that returning results takes no time."""
    return array.ravel()[:1]


_MOST_COLLECTIVE_STEPS = 10


def explain(
    runners: Runners,
    fn: StepFunction,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    data: Iterable[PyTree] | None,
    steps: int,
) -> Explanation:
    """Implements `Strategy.explain`."""
    many = runners.many
    if many.replicas.spans_processes:
        # The numbers of launches depend on nothing else, so that every process makes the same.
        takes = "batches" if data is not None else "no batches"
        require_same_call(f"explain({name_of(fn)})", [f"explain: {steps} steps, {takes}"])
    batches = endless(data)
    first = next(batches)
    many.traced(fn, (*args, *first), kwargs)  # finds the variables that the step captures
    captured = many.captured(fn)
    saved = copy_of(captured)
    try:
        trial = Trial(many, fn, args, kwargs)
        program = describe_program(many, lambda: runners.single, fn, *trial.arguments(first))
        memory = memory_report(many.examined(fn, *trial.arguments(first)), many.replicas)
        trial.warm_up(first)
        empty = empty_trial(runners.scratch, trial, first)
        in_a_loop(trial, batches, steps)  # uses up batches that were prefetched while XLA compiled
        wall = in_a_loop(trial, batches, steps)
        idle, empty_times = idle_times(batches, [trial, empty], steps)
        restore(captured, saved)
        collapse(captured)
        single_secs, reason = one_replica_secs(runners, fn, (*args, *first), kwargs, steps)
    finally:
        restore(captured, saved)
    communication = collective_secs(
        runners.scratch, program.collectives, min(steps, _MOST_COLLECTIVE_STEPS)
    )
    return Explanation(
        step=program.step,
        devices=tuple(map(str, many.replicas.devices)),
        on_host=many.replicas.on_host,
        steps=steps,
        wall_secs=wall,
        secs=split(wall, idle, empty_times.run, communication),
        num_arrays=len(jax.tree.leaves((nnx.state(trial.objects), *trial.arguments(first)))),
        num_collectives=sum(row.least_trips for row in program.collectives),
        collective_bytes=sum(row.least_trips * row.num_bytes for row in program.collectives),
        speedup=single_secs / idle.run if single_secs else None,
        no_speedup_because=reason,
        memory=memory,
        device_memory=memory_info(many.replicas.local_devices[0].memory_stats()) or {},
    )


def split(wall: float, idle: IdleTimes, dispatch: float, communication: float) -> Seconds:
    """Splits the wall time of a step into its parts.

    The host (input, transfer, dispatch) and the devices work at the same time. The slower side
    counts in full, because the wall time cannot be shorter; the faster side counts only for the
    time by which the wall time is longer. If the wall time is longer than both together, both are
    slower in the loop, where steps share cores with the host: the slower side then grows by the
    same factor.

    >>> split(10.0, IdleTimes(input=6.0, transfer=0.0, run=8.0), dispatch=2.0, communication=3.0)
    Seconds(input=6.0, transfer=0.0, dispatch=2.0, compute=1.0, communication=1.0)
    """
    dispatch = min(dispatch, idle.run)
    host, devices = idle.input + idle.transfer + dispatch, idle.run - dispatch
    slowdown = max(1.0, wall / (host + devices)) if host + devices else 1.0
    slower_side = min(max(host, devices) * slowdown, wall)
    on_host = slower_side if host >= devices else wall - slower_side
    scale = on_host / host if host else 0.0
    share = min(communication / devices, 1.0) if devices else 0.0
    return Seconds(
        input=scale * idle.input,
        transfer=scale * idle.transfer,
        dispatch=scale * dispatch,
        compute=(wall - on_host) * (1 - share),
        communication=(wall - on_host) * share,
    )
