"""The pass `gathers`: whole weights exist only around the operations that read them.

A program that stores weights in slices gathers each for every reader. This pass keeps few of the
gathered weights for later readers, sums gradients as soon as they are computed, and lets each
gather start after the operations that come before its reader. So whole weights and gradients live
about as long as one layer is computed.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from mirror._src.jaxprs.equations import Scan
from mirror._src.jaxprs.primitives import CONTROL, ELEMENTWISE, GENERAL, SHAPING
from mirror._src.passes.pack import in_order
from mirror._src.passes.program import (
    Atom,
    Operation,
    Program,
    Settings,
    Value,
    makers_of,
    readers_of,
    values_of,
    with_bodies,
)


def order(program: Program, settings: Settings) -> Program:
    """Orders and merges the gathers of a program, and of the loops in it."""
    if math.isinf(settings.min_bytes):
        return program
    program = with_bodies(program, lambda body: order(body, settings))
    operations, readers = _summed_early(program), readers_of(program)
    gathers = [op for op in operations if op.kind == "gather" and readers[op.outputs[0]]]
    if settings.kept_bytes is None:
        sizes = (gather.outputs[0].num_bytes for gather in gathers)
        settings = settings._replace(kept_bytes=max(sizes, default=0))
    cache = _Cache(gathers, settings.kept_bytes or 0)
    latest: list[Value] = []  # what the next gather starts after
    known: dict[Atom, Value] = {}  # the gathered value that is read instead of another one
    computed = set(program.inputs)
    ordered = []
    for operation in operations:
        if operation in cache.gathers:
            (part,), (whole,) = operation.inputs, operation.outputs
            kept = cache.find(part)
            if kept is not None:
                known[whole] = kept
                continue
            operands = [v for v in values_of(readers[whole][0].inputs) if v in computed]
            earlier = latest or [v for v in operands if _can_be_awaited(v)][:1]
            operation = replace(operation, inputs=[part, *earlier])
            cache.keep(part, whole)
            sums = [value for value in latest if value.layout.axis is not None]
            latest = [value for value in latest if value not in sums] + sums[-1:]
        else:
            if not known.keys().isdisjoint(operation.inputs):
                inputs = [known.get(atom, atom) for atom in operation.inputs]
                operation = replace(operation, inputs=inputs)
            if operation.kind == "scatter":
                latest.append(operation.outputs[0])
            elif (value := _result_of_work(operation)) is not None:
                latest = [value, *(v for v in latest if v.layout.axis is not None)]
        computed.update(operation.outputs)
        ordered.append(operation)
    outputs = [known.get(atom, atom) for atom in program.outputs]
    return program._replace(operations=ordered, outputs=outputs)


class _Cache:
    """The gathered values that are kept.

    The whole program is known, so it drops the value that is read last, which is best (Belady,
    1966).

    Args:
        gathers: All gathers, in order.
        num_bytes: How many bytes it may keep.
    """

    def __init__(self, gathers: Sequence[Operation], num_bytes: int) -> None:
        self.gathers = set(gathers)
        self._num_bytes = num_bytes
        self._reads = defaultdict[Atom, list[int]](list)
        for i, gather in enumerate(gathers):
            self._reads[gather.inputs[0]].append(i)
        self._kept: dict[Atom, Value] = {}

    def find(self, part: Atom) -> Value | None:
        """Returns the gathered value, if it is kept. To call for each gather in turn."""
        self._reads[part].pop(0)
        found = self._kept.get(part)
        self._drop()
        return found

    def keep(self, part: Atom, whole: Value) -> None:
        """Keeps a gathered value, if it is read again before the others."""
        self._kept[part] = whole
        self._drop()

    def _drop(self) -> None:
        room, kept = self._num_bytes, {}
        read_again = [part for part in self._kept if self._reads[part]]
        for part in sorted(read_again, key=lambda part: self._reads[part][0]):
            room -= self._kept[part].num_bytes
            if room < 0:
                break
            kept[part] = self._kept[part]
        self._kept = kept


def _result_of_work(operation: Operation) -> Value | None:
    """Returns a result of an operation that takes long; `None` for other operations."""
    if operation.kind != "loop" and operation.name not in GENERAL | CONTROL:
        return None
    return next(filter(_can_be_awaited, operation.outputs), None)


def _can_be_awaited(value: Value) -> bool:
    """Whether a value is a number of the replica's own that a gather can start after."""
    dtype = value.aval.dtype
    is_number = not jnp.issubdtype(dtype, jax.dtypes.extended) and dtype.itemsize <= 8
    return value.layout.is_own and is_number and math.prod(value.aval.shape) > 0


def _summed_early(program: Program) -> list[Operation]:
    """Returns the operations with each scatter, and what only leads to it, as early as possible."""
    operations = program.operations
    readers, makers = readers_of(program), makers_of(program)
    returned = set(values_of(program.outputs))
    early: set[Operation] = set()
    for operation in reversed(operations):
        after = [reader for value in operation.outputs for reader in readers[value]]
        leads = bool(after) and early.issuperset(after) and returned.isdisjoint(operation.outputs)
        is_light = operation.kind == "equation" and operation.name in ELEMENTWISE | SHAPING
        if operation.kind == "scatter" or (leads and is_light and not operation.has_effects):
            early.add(operation)
    waits = {op for op in early if not makers.keys().isdisjoint(op.inputs)}
    first = sorted(operations, key=lambda operation: operation not in waits)
    return [operation for (operation,) in in_order(first, [None] * len(first))]


def num_gathers(program: Program) -> Counter[Atom]:
    """Returns how often each input is gathered, also after a cast or transposition of its slices.

    Gathers in a loop count for each of its steps.
    """
    return _count_gathers(program)[0]


def _count_gathers(program: Program) -> tuple[Counter[Atom], dict[Atom, Atom]]:
    """Returns the numbers of gathers, and the input that each value in slices is made of."""
    found, origins = Counter[Atom](), dict[Atom, Atom]()
    for operation in program.operations:
        if operation.body is not None:
            body, (inner, inside) = operation.body, _count_gathers(operation.body)
            outer = dict[Atom, Atom](zip(body.inputs, operation.inputs, strict=True))
            length = Scan(operation.eqn).length
            for value in body.inputs:
                atom = outer[value]
                found[origins.get(atom, atom)] += inner[value] * length
            made_of = [outer.get(inside.get(atom, atom), atom) for atom in body.outputs]
        else:
            for gather in (each for each in operation.members if each.kind == "gather"):
                part = gather.inputs[0]
                found[origins.get(part, part)] += 1
            sliced = [atom for atom in operation.inputs if atom.layout.axis is not None]
            made_of = sliced[:1] * len(operation.outputs)
        for value, atom in zip(operation.outputs, made_of, strict=False):
            if value.layout.axis is not None:
                origins[value] = origins.get(atom, atom)
    return found, origins
