"""The pass `pack`: small collectives that do not depend on each other share one buffer."""

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.types import Array, num_bytes
from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, axes_of, is_collective, spans_whole_axis
from mirror._src.jaxprs.equations import called, jaxpr_of, with_inner
from mirror._src.jaxprs.primitives import SIMPLE
from mirror._src.passes.program import Opens, Operation, Program, Settings, flatten, with_bodies

_JITTED = ("jit", "closed_call")
_PRODUCTS = ("dot_general", "conv_general_dilated")
_MANY = 16  # arrays in a buffer


def pack(program: Program, settings: Settings) -> Program:
    """Packs all-reduces, scatters and gathers of at most `pack_bytes`."""
    program = with_bodies(program, lambda body: pack(body, settings))
    operations = program.operations
    limit = settings.pack_bytes
    keys = [
        None if op.eqn.primitive.name in SIMPLE and op.kind == "equation" else _key_of(op, limit)
        for op in operations
    ]
    if len(keys) - keys.count(None) < 2:
        return program
    if settings.in_rounds:  # a collective that nothing can join takes a round, too
        pairs = zip(keys, operations, strict=True)
        keys = [op if key is None and _communicates(op.eqn) else key for key, op in pairs]
    ordered = in_order(operations, keys)
    return program._replace(operations=[_joined(g) if g[1:] else g[0] for g in ordered])


def opens(programs: Sequence[ClosedJaxpr | Jaxpr], settings: Settings) -> Opens:
    """Returns which calls must be inlined: those with an all-reduce that another one could join."""
    limit = settings.pack_bytes
    if settings.in_rounds:
        return lambda eqn, _: _communicates(eqn) or _has_products(eqn)
    if sum(count(program, limit) for program in programs) < 2:
        return lambda *_: False
    return lambda eqn, _: (inner := called(eqn)) is not None and count(inner, limit) > 0


def packed(program: ClosedJaxpr | Jaxpr, settings: Settings) -> Program:
    """Returns a program as a flat one, packed."""
    return pack(flatten([program], opens([program], settings)), settings)


def count(program: ClosedJaxpr | Jaxpr, limit: int) -> int:
    """Returns the number of small all-reduces in a program, outside loops and branches."""
    if not limit:
        return 0
    total = 0
    for eqn in [eqn for eqn in jaxpr_of(program).eqns if eqn.primitive.name not in SIMPLE]:
        inner = called(eqn)
        total += _key(eqn, limit) is not None if inner is None else count(inner, limit)
    return total


def _communicates(eqn: JaxprEqn) -> bool:
    """Whether replicas communicate in an operation, or in its inner programs."""
    return any(map(is_collective, with_inner(eqn)))


def _has_products(eqn: JaxprEqn) -> bool:
    """Whether a jitted function has products, into which sums over replicas may move."""
    names = {inner.primitive.name for inner in with_inner(eqn)}
    return eqn.primitive.name in _JITTED and not names.isdisjoint(_PRODUCTS)


def _key(eqn: JaxprEqn, limit: int) -> Hashable:
    """Returns a key that all-reduces in one buffer share; `None` if it cannot be packed."""
    if not limit or eqn.primitive.name not in ALL_REDUCES or len(eqn.invars) != 1:
        return None
    if len(axes_of(eqn)) != 1 or not spans_whole_axis(eqn):
        return None
    aval: Any = eqn.invars[0].aval
    return (eqn.primitive.name, aval.dtype) if 0 < num_bytes(aval) <= limit else None


def _key_of(operation: Operation, limit: int) -> Hashable:
    """Returns the key of an operation of a flat program."""
    match operation.kind:
        case "equation":
            return _key(operation.eqn, limit)
        case "scatter":
            key = _key(operation.eqn, limit)
            return key and (operation.kind, key)
        case "gather":
            (whole,) = operation.outputs
            is_small = whole.num_bytes <= limit and len(operation.inputs) == 1
            return (operation.kind, whole.aval.dtype) if is_small else None
    return None


def _joined(operations: list[Operation]) -> Operation:
    """Returns one operation for several collectives."""
    first = operations[0]
    inputs = [atom for operation in operations for atom in operation.inputs]
    outputs = [value for operation in operations for value in operation.outputs]
    return Operation("pack", first.eqn, inputs, outputs, first.around, tuple(operations))


def join(leaves: Sequence[Array]) -> Array:
    """Returns one flat buffer with the elements of arrays of the same dtype."""
    # jax.numpy would convert 64-bit arrays to 32 bits where JAX's x64 mode is disabled.
    return jax.lax.concatenate([jax.lax.reshape(leaf, (leaf.size,)) for leaf in leaves], 0)


def split(flat: Array, like: Sequence[Any], *, on_cpus: bool = False) -> list[Array]:
    """Splits a buffer into arrays with the sizes and shapes of `like`; see `split_columns`."""
    parts = split_columns(flat, [leaf.size for leaf in like], on_cpus=on_cpus)
    return [jax.lax.reshape(part, leaf.shape) for part, leaf in zip(parts, like, strict=True)]


def split_columns(buffer: Array, sizes: Sequence[int], *, on_cpus: bool) -> Sequence[Array]:
    """Splits a buffer along its last axis.

    On CPUs, XLA compiles a kernel for each constant offset, 5 ms each, but only one for each size
    if offsets are operands (JAX 0.10.2, 0.12.0.1). It does not look through a conditional.
    """
    if not on_cpus or len(sizes) < _MANY:
        return jax.lax.split(buffer, sizes, buffer.ndim - 1)
    offsets = tuple(map(np.int32, itertools.accumulate([0, *sizes[:-1]])))
    first = jax.lax.reshape(jax.lax.slice(buffer, [0] * buffer.ndim, [1] * buffer.ndim), ())
    zeros, lead = [np.int32(0)] * (buffer.ndim - 1), buffer.shape[:-1]
    starts = jax.lax.cond(first == first, lambda: offsets, lambda: offsets)
    return [
        jax.lax.dynamic_slice(buffer, [*zeros, start], [*lead, n], allow_negative_indices=False)
        for start, n in zip(starts, sizes, strict=True)
    ]


def in_order(
    operations: Sequence[Operation], keys: Sequence[Hashable]
) -> Iterator[list[Operation]]:
    """Yields operations in an order in which they can be evaluated, with packs as one list.

    A collective waits until nothing else can be evaluated. It is then packed with all waiting
    collectives that share its key. Only the keys at the start of the longest chain of collectives
    run in that round: the other collectives keep waiting, because a later pack can still include
    them. So there are no more rounds than the longest chain needs.

    Args:
        operations: Operations. Of those that can be evaluated, the first one in this order is next.
        keys: For each operation, the key that the operations of a pack share; `None` for one that
            is not packed.
    """
    after, missing = _dependences(operations)
    heights = [0] * len(operations)
    for i in reversed(range(len(operations))):
        below = max([0, *map(heights.__getitem__, after[i])])
        heights[i] = below + (keys[i] is not None)
    ready = [i for i, count in enumerate(missing) if not count and keys[i] is None]
    waiting = [i for i, count in enumerate(missing) if not count and keys[i] is not None]

    def release_after(i: int) -> None:
        for k in after[i]:
            missing[k] -= 1
            if missing[k]:
                continue
            if keys[k] is None:
                heapq.heappush(ready, k)
            else:
                waiting.append(k)

    while ready or waiting:
        if ready:
            i = heapq.heappop(ready)
            yield [operations[i]]
            release_after(i)
            continue
        highest = max(heights[i] for i in waiting)
        urgent = {keys[i] for i in waiting if heights[i] == highest}
        for key in sorted(urgent, key=lambda key: min(i for i in waiting if keys[i] == key)):
            pack = sorted(i for i in waiting if keys[i] == key)
            yield [operations[i] for i in pack]
            waiting = [i for i in waiting if keys[i] != key]
            for i in pack:
                release_after(i)


def _dependences(operations: Sequence[Operation]) -> tuple[list[set[int]], list[int]]:
    """Returns for each operation its dependents, and the number of operations it depends on."""
    maker = {value: i for i, op in enumerate(operations) for value in op.outputs}
    after: list[set[int]] = [set() for _ in operations]
    missing: list[int] = []
    last: int | None = None
    for i, operation in enumerate(operations):
        before = {maker[atom] for atom in operation.inputs if atom in maker}
        if operation.eqn.effects and operation.has_effects:
            before |= set() if last is None else {last}
            last = i
        for k in before:
            after[k].add(i)
        missing.append(len(before))
    return after, missing
