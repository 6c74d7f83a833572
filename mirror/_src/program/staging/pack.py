"""Small reductions of one level, kind and dtype travel together in one buffer."""

from typing import Any

import jax

from mirror._src.program.staging.ir import (
    REDUCTIONS,
    Branch,
    Collective,
    Communication,
    Loop,
    Operation,
    Value,
    values_of,
)
from mirror._src.program.staging.schedule import levels_of
from mirror._src.values.packing import join, split


def packed(steps: list[Operation | Communication], limit: int) -> list[Operation | Communication]:
    """Reductions of one level, kind and dtype, if they are small, as one of one flat buffer."""
    levels = levels_of(steps)
    packs: dict[Any, list[Collective]] = {}
    # A loop or branch was cut for what it reads as it is: mirrored. Out of a buffer come rows.
    read_inside = {
        value
        for step in steps
        if isinstance(step, Loop | Branch)
        for value in values_of(step.inputs)
    }
    for step in steps:
        if (
            isinstance(step, Collective)
            and step.kind in REDUCTIONS
            and step.outputs[0].mirrored
            and step.outputs[0] not in read_inside
        ):
            value = step.operand
            if 0 < value.num_bytes <= limit:
                packs.setdefault((levels[step], step.kind, value.aval.dtype), []).append(step)
    members = {step: pack for pack in packs.values() if len(pack) > 1 for step in pack}
    found: list[Operation | Communication] = []
    for step in steps:
        pack = members.get(step) if isinstance(step, Collective) else None
        if pack is None:
            found.append(step)
        elif step is pack[-1]:
            found += _pack(pack)
    return _sorted(found)


def _pack(pack: list[Collective]) -> list[Operation | Communication]:
    operands = [step.operand for step in pack]
    avals = [value.aval for value in operands]
    aval = jax.core.ShapedArray((sum(each.size for each in avals),), avals[0].dtype)
    flat, reduced = Value(aval), Value(aval, mirrored=True)
    lines = [line for step in pack for line in step.lines]
    results = [step.outputs[0] for step in pack]
    for value in results:
        value.mirrored = False
    return [
        Operation(list(operands), [flat], lambda *values: [join(values)]),
        Collective(pack[0].kind, pack[0].params, [flat], [reduced], lines),
        Operation([reduced], results, lambda value: split(value, avals)),
    ]


def _sorted(steps: list[Operation | Communication]) -> list[Operation | Communication]:
    """In an order in which each step comes after those that make what it reads."""
    maker = {value: step for step in steps for value in step.outputs}
    placed: dict[Operation | Communication, None] = {}
    for root in steps:
        waiting = [root]
        while waiting:
            step = waiting[-1]
            before = [maker[v] for v in values_of(step.inputs) if v in maker]
            missing = [s for s in before if s not in placed]
            if missing:
                waiting += missing
            else:
                placed[waiting.pop()] = None
    return list(placed)
