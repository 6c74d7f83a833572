"""`strategy.explain`: measures where a step's time goes, on copies of its objects.

A step's wall time is the time it takes in the user's own loop, `next(data)` and `run`, nobody
waiting for results: that of a number of steps, divided by the number. There the host is busy with
one step while the devices work on another. So the rest is measured with steps that begin with idle
devices, one after the other:

- input is what `next(data)` takes;
- transfer, what it takes to bring the batch, and arguments that lie on the host, to the devices;
- dispatch, what a step takes that computes nothing, with as many arrays of one number each. (When
  `run` returns says little: on the host it may compute first.) Those three are the host's;
- communication: what the program's collectives take alone, on buffers of the same sizes;
- compute, what else `run` takes until the results are there. Those two are the devices'.

Who takes longer, the host or the devices, counts in full, because the wall cannot be shorter; the
other one counts for what the wall is longer. Each part gets its share of that. If the wall is
longer than all of it, everything takes longer in the loop, where steps share cores with the host.
So the parts add up to the wall, and the largest is what to change.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from mirror._src.checks.trial import copy_of, restore
from mirror._src.devices.memory import memory_info
from mirror._src.explain.baselines import Runners, collective_secs, empty_trial, one_replica_secs
from mirror._src.explain.memory import memory_report
from mirror._src.explain.program import describe_program
from mirror._src.explain.report import Explanation, Seconds
from mirror._src.explain.trial import Batches, IdleTimes, Trial, idle_times, in_a_loop
from mirror._src.utils.errors import describe
from mirror._src.utils.types import PyTree, StepFunction
from mirror._src.variables.on_read import collapse

_MOST_COLLECTIVE_STEPS = 10


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
        empty = empty_trial(runners.scratch, trial, first)
        in_a_loop(trial, batches, steps)  # uses up what was read ahead while XLA compiled
        wall = in_a_loop(trial, batches, steps)
        idle, nothing = idle_times(batches, [trial, empty], steps)
        restore(captured, saved)
        collapse(captured)
        alone, why_not = one_replica_secs(runners, fn, (*args, *first), kwargs, steps)
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
        secs=split(wall, idle, nothing.run, communication),
        num_arrays=len(jax.tree.leaves((nnx.state(trial.objects), *trial.arguments(first)))),
        num_collectives=sum(row.least_trips for row in program.collectives),
        collective_bytes=sum(row.least_trips * row.num_bytes for row in program.collectives),
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


def split(wall: float, idle: IdleTimes, dispatch: float, communication: float) -> Seconds:
    """The parts of a step, which add up to its wall time; see the module's docstring.

    >>> split(10.0, IdleTimes(input=6.0, transfer=0.0, run=8.0), dispatch=2.0, communication=3.0)
    Seconds(input=6.0, transfer=0.0, dispatch=2.0, compute=1.0, communication=1.0)
    """
    dispatch = min(dispatch, idle.run)
    host, devices = idle.input + idle.transfer + dispatch, idle.run - dispatch
    slower = max(1.0, wall / (host + devices)) if host + devices else 1.0
    longer = min(max(host, devices) * slower, wall)
    on_host = longer if host >= devices else wall - longer
    each = on_host / host if host else 0.0
    communicating = min(communication / devices, 1.0) if devices else 0.0
    return Seconds(
        input=each * idle.input,
        transfer=each * idle.transfer,
        dispatch=each * dispatch,
        compute=(wall - on_host) * (1 - communicating),
        communication=(wall - on_host) * communicating,
    )
