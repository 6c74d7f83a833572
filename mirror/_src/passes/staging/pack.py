"""Packs small all-reduces of the same level, reduction and dtype into one buffer."""

from typing import Any

import jax

from mirror._src.jaxprs.atoms import Value, values_of
from mirror._src.jaxprs.collective_eqns import ALL_REDUCES
from mirror._src.passes.packing import join, split
from mirror._src.passes.staging.ir import Branch, Collective, Communication, Computation, Loop
from mirror._src.passes.staging.schedule import levels_of


def pack_collectives(
    steps: list[Computation | Communication], limit: int
) -> list[Computation | Communication]:
    """Returns the steps with all-reduces of at most `limit` bytes packed."""
    levels = levels_of(steps)
    packs: dict[Any, list[Collective]] = {}
    # A loop or branch is staged for inputs that are mirrored. Unpacked results are per-replica, so
    # an all-reduce that a loop or branch reads cannot be packed.
    read_inside = {
        value
        for step in steps
        if isinstance(step, Loop | Branch)
        for value in values_of(step.inputs)
    }
    for step in steps:
        if (
            isinstance(step, Collective)
            and step.primitive in ALL_REDUCES
            and step.outputs[0].mirrored
            and step.outputs[0] not in read_inside
            and 0 < step.operand.num_bytes <= limit
        ):
            key = levels[step], step.primitive, step.operand.aval.dtype
            packs.setdefault(key, []).append(step)
    members = {step: pack for pack in packs.values() if len(pack) > 1 for step in pack}
    packed: list[Computation | Communication] = []
    for step in steps:
        pack = members.get(step) if isinstance(step, Collective) else None
        if pack is None:
            packed.append(step)
        elif step is pack[-1]:
            packed += _join_pack(pack)
    return _sort(packed)


def _join_pack(pack: list[Collective]) -> list[Computation | Communication]:
    """Returns the steps that join the operands, reduce them together and split the result."""
    operands = [step.operand for step in pack]
    avals = [value.aval for value in operands]
    aval = jax.core.ShapedArray((sum(aval.size for aval in avals),), avals[0].dtype)
    flat, reduced = Value(aval), Value(aval, mirrored=True)
    lines = [line for step in pack for line in step.lines]
    results = [step.outputs[0] for step in pack]
    for value in results:
        value.mirrored = False
    return [
        Computation(list(operands), [flat], lambda *values: [join(values)]),
        Collective(pack[0].primitive, pack[0].params, [flat], [reduced], lines),
        Computation([reduced], results, lambda value: split(value, avals)),
    ]


def _sort(steps: list[Computation | Communication]) -> list[Computation | Communication]:
    """Returns the steps in an order in which each step comes after the steps it depends on."""
    maker = {value: step for step in steps for value in step.outputs}
    placed: dict[Computation | Communication, None] = {}
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
