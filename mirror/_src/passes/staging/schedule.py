"""Assigns steps to stages, and finds the values that are kept from one stage to the next."""

from collections.abc import Sequence
from typing import Any

from mirror._src.passes.program import Atom, Value, values_of
from mirror._src.passes.staging.ir import Communication, Computation, Stage


def drop_unused(
    steps: Sequence[Computation | Communication], outputs: Sequence[Atom]
) -> list[Computation | Communication]:
    """Returns the steps without those that have no effects and whose results are not used."""
    used, kept = set(values_of(outputs)), list[Computation | Communication]()
    for step in reversed(steps):
        if step.has_effects or not used.isdisjoint(step.outputs):
            kept.append(step)
            used.update(values_of(step.inputs))
    return kept[::-1]


def levels_of(steps: Sequence[Computation | Communication]) -> dict[Any, int]:
    """Returns the number of rounds of communication that each step and value depends on."""
    levels: dict[Any, int] = {}
    ordered = 0
    for step in steps:
        level = max((levels.get(value, 0) for value in values_of(step.inputs)), default=0)
        if step.is_ordered:
            level = ordered = max(level, ordered)
        levels[step] = level
        levels.update(dict.fromkeys(step.outputs, level + (not isinstance(step, Computation))))
    return levels


def schedule_stages(
    steps: list[Computation | Communication], outputs: Sequence[Atom]
) -> list[Stage]:
    """Returns the stages of a program."""
    levels = levels_of(steps)
    last = max([0, *(levels[value] for step in steps for value in step.outputs)])
    _delay(steps, outputs, levels, last)
    stages = [Stage([]) for _ in range(last + 1)]
    for step in steps:
        stage = stages[levels[step]]
        if isinstance(step, Computation):
            stage.computations.append(step)
        else:
            stage.communications.append(step)
    _connect(stages, outputs)
    return stages


# Why not run every computation as early as possible: a momentum decay, m = 0.9 * m, does not depend
# on the gradients, so it would run in the first stage, and its result, as large as the state, would
# stay alive across the all-reduce. A computation is therefore delayed to the stage that first reads
# its results, if the inputs that must be kept for it are smaller than these results. In the example
# the update reads 0.9 * m after the all-reduce. Only m must be kept, which is stored anyway.
def _delay(
    steps: list[Computation | Communication],
    outputs: Sequence[Atom],
    levels: dict[Any, int],
    last: int,
) -> None:
    """Moves computations to later levels where that keeps fewer bytes between stages."""
    # Backward: the latest level at which each computation is possible.
    latest: dict[Value, int] = dict.fromkeys(values_of(outputs), last)
    possible: dict[Computation, int] = {}
    for step in reversed(steps):
        level = levels[step]
        if isinstance(step, Computation) and not step.has_effects:
            level = possible[step] = min([latest.get(value, last) for value in step.outputs])
        for value in values_of(step.inputs):
            latest[value] = min(latest.get(value, last), level)
    # Forward: a computation moves there unless more bytes of its inputs must then be kept. An input
    # of the program, or a result of a collective, is kept anyway.
    computed_at: dict[Value, int] = {}
    for step in steps:
        if isinstance(step, Computation) and step in possible:
            values = values_of(step.inputs)
            soonest = max((computed_at.get(v, levels.get(v, 0)) for v in values), default=0)
            kept = {v for v in values if computed_at.get(v, last) < possible[step]}
            kept_bytes = sum(value.num_bytes for value in kept)
            is_smaller = kept_bytes < sum(value.num_bytes for value in step.outputs)
            levels[step] = max(soonest, possible[step] if is_smaller else 0)
            computed_at.update(dict.fromkeys(step.outputs, levels[step]))
        elif isinstance(step, Computation):
            computed_at.update(dict.fromkeys(step.outputs, levels[step]))


def _connect(stages: list[Stage], outputs: Sequence[Atom]) -> None:
    """Sets the inputs, outputs and last reads of the stages."""
    later: set[Value] = set()
    for stage in reversed(stages):
        is_last = stage is stages[-1]
        computed = {value: None for step in stage.computations for value in step.outputs}
        after = set(later)
        sent = {value for step in stage.communications for value in values_of(step.inputs)}
        stage.outputs = list(outputs) if is_last else [v for v in computed if v in after | sent]
        read = [value for step in stage.computations for value in values_of(step.inputs)]
        read += values_of(outputs) if is_last else []
        stage.inputs = list(dict.fromkeys(value for value in read if value not in computed))
        kept = {*stage.inputs, *sent, *values_of(stage.outputs)}
        stage.last_read = [value for value in kept if value not in after]
        later |= set(stage.inputs) | sent
