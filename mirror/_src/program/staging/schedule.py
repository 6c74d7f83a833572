"""Which operations are computed in which stage, and what is kept from one stage to the next."""

from collections.abc import Sequence
from typing import Any

from mirror._src.program.staging.ir import Atom, Communication, Operation, Stage, Value, values_of


def needed(
    steps: Sequence[Operation | Communication], outputs: Sequence[Atom]
) -> list[Operation | Communication]:
    """The steps without those that nobody reads the results of."""
    wanted, kept = set(values_of(outputs)), list[Operation | Communication]()
    for step in reversed(steps):
        if step.has_effects or not wanted.isdisjoint(step.outputs):
            kept.append(step)
            wanted.update(values_of(step.inputs))
    return kept[::-1]


def levels_of(steps: Sequence[Operation | Communication]) -> dict[Any, int]:
    """Returns the number of rounds of communication that each step and value depends on."""
    levels: dict[Any, int] = {}
    ordered = 0
    for step in steps:
        level = max((levels.get(value, 0) for value in values_of(step.inputs)), default=0)
        if step.is_ordered:
            level = ordered = max(level, ordered)
        levels[step] = level
        levels.update(dict.fromkeys(step.outputs, level + (not isinstance(step, Operation))))
    return levels


def in_stages(steps: list[Operation | Communication], outputs: Sequence[Atom]) -> list[Stage]:
    """Sorts the steps into stages."""
    levels = levels_of(steps)
    last = max([0, *(levels[value] for step in steps for value in step.outputs)])
    _delay(steps, outputs, levels, last)
    stages = [Stage([]) for _ in range(last + 1)]
    for step in steps:
        stage = stages[levels[step]]
        if isinstance(step, Operation):
            stage.operations.append(step)
        else:
            stage.communications.append(step)
    _connect(stages, outputs)
    return stages


def _delay(
    steps: list[Operation | Communication],
    outputs: Sequence[Atom],
    levels: dict[Any, int],
    last: int,
) -> None:
    """Puts off what only a later stage reads, where less has to be kept for it than it makes.

    A momentum's decay needs no gradient; but computed at once it would be a copy of the state.
    """
    latest: dict[Value, int] = dict.fromkeys(values_of(outputs), last)
    possible: dict[Operation, int] = {}
    for step in reversed(steps):
        level = levels[step]
        if isinstance(step, Operation) and not step.has_effects:
            level = possible[step] = min([latest.get(value, last) for value in step.outputs])
        for value in values_of(step.inputs):
            latest[value] = min(latest.get(value, last), level)
    made_at: dict[Value, int] = {}
    for step in steps:
        if isinstance(step, Operation) and step in possible:
            values = values_of(step.inputs)
            soonest = max((made_at.get(v, levels.get(v, 0)) for v in values), default=0)
            over = {v for v in values if made_at.get(v, last) < possible[step]}
            kept = sum(value.num_bytes for value in over)
            later = kept < sum(value.num_bytes for value in step.outputs)
            levels[step] = max(soonest, possible[step] if later else 0)
            made_at.update(dict.fromkeys(step.outputs, levels[step]))
        elif isinstance(step, Operation):
            made_at.update(dict.fromkeys(step.outputs, levels[step]))


def _connect(stages: list[Stage], outputs: Sequence[Atom]) -> None:
    """Finds out what goes from stage to stage."""
    later: set[Value] = set()
    for stage in reversed(stages):
        final = stage is stages[-1]
        made = {value: None for op in stage.operations for value in op.outputs}
        after = set(later)
        talked = {
            value
            for communication in stage.communications
            for value in values_of(communication.inputs)
        }
        stage.outputs = list(outputs) if final else [v for v in made if v in after | talked]
        read = [v for op in stage.operations for v in values_of(op.inputs)]
        read += values_of(outputs) if final else []
        stage.inputs = list(dict.fromkeys(v for v in read if v not in made))
        held = {*stage.inputs, *talked, *values_of(stage.outputs)}
        stage.last_read = [value for value in held if value not in after]
        later |= set(stage.inputs) | talked
