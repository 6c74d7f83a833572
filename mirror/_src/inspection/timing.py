"""`strategy.explain`: measures where a step's time goes, on copies of its objects.

The measured parts are described in `Explanation`. Dispatch is measured with an empty step rather
than as the duration of `run`: on host devices, `run` may compute before it returns.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from mirror._src.base.naming import name_of
from mirror._src.base.types import PyTree, StepFunction
from mirror._src.devices.memory import memory_info
from mirror._src.engine.agreement import require_same_call
from mirror._src.engine.on_read import collapse
from mirror._src.inspection.baselines import Runners, collective_secs, empty_trial, one_replica_secs
from mirror._src.inspection.explanation import Explanation, Seconds
from mirror._src.inspection.measurement import Batches, IdleTimes, Trial, idle_times, in_a_loop
from mirror._src.inspection.memory import memory_report
from mirror._src.inspection.program_report import describe_program
from mirror._src.inspection.trial_objects import copy_of, restore

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
    batches = Batches(data)
    first = batches.take()
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
