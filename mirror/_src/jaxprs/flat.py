"""Programs as flat lists of operations, and the order in which small collectives are packed."""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.atoms import Atom, Constant, Value, num_bytes
from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, axes_of, spans_whole_axis
from mirror._src.jaxprs.equations import called, jaxpr_of, walk

_AXIS_EFFECT = "NamedAxisEffect"
_ENSURED = "ensure_mirrored"  # checked by the proof; computes nothing


def has_effects(effects: Iterable[object]) -> bool:
    """Whether there are effects other than naming an axis."""
    return any(type(effect).__name__ != _AXIS_EFFECT for effect in effects)


@dataclass(eq=False)
class Operation:
    """One operation of a flat program.

    Attributes:
        eqn: The operation in the jaxpr.
        inputs: Its operands.
        outputs: Its results.
        around: The calls that it was inlined from, outermost first.
        is_barrier: Whether it is the barrier in front of the inlined call `eqn`.
    """

    eqn: JaxprEqn
    inputs: list[Atom]
    outputs: list[Value]
    around: tuple[JaxprEqn, ...] = ()
    is_barrier: bool = False

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return "optimization_barrier" if self.is_barrier else self.eqn.primitive.name

    @property
    def has_effects(self) -> bool:
        """Whether its position among other operations matters, as for callbacks and `Ref` reads."""
        return not self.is_barrier and has_effects(self.eqn.effects)


class FlatProgram(NamedTuple):
    """A program as one list of operations.

    Attributes:
        inputs: Its inputs.
        operations: Its operations, in an order in which they can be evaluated.
        outputs: Its outputs.
    """

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Atom]


def flatten(
    programs: Sequence[ClosedJaxpr | Jaxpr],
    opens: Callable[[JaxprEqn, Sequence[Atom]], bool],
    on_operation: Callable[[Operation], None] = lambda _: None,
    inputs: list[Value] | None = None,
) -> FlatProgram:
    """Inlines calls and returns the operations of a program in one list.

    Args:
        programs: Programs to run in turn. Each gets the inputs of the first program and the outputs
            of the previous one.
        opens: Whether to inline a call.
        on_operation: Called with each operation when it is added.
        inputs: Values to use as the inputs of the first program. Created if omitted.
    """
    operations: list[Operation] = []
    around: list[JaxprEqn] = []

    def add(eqn: JaxprEqn, inputs: list[Atom], avals: Sequence[Any], **more: bool) -> list[Value]:
        outputs = list(map(Value, avals))
        operations.append(Operation(eqn, inputs, outputs, tuple(around), **more))
        on_operation(operations[-1])
        return outputs

    def equation(eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        if eqn.primitive.name == _ENSURED:
            return inputs
        program = called(eqn)
        if program is None or not opens(eqn, inputs):
            return add(eqn, inputs, [var.aval for var in eqn.outvars])
        if needs_barrier(eqn):
            inputs = [*add(eqn, inputs, [var.aval for var in eqn.invars], is_barrier=True)]
        around.append(eqn)
        outputs = walk(program, inputs, Constant, equation)
        around.pop()
        return outputs

    if inputs is None:
        inputs = [Value(var.aval) for var in jaxpr_of(programs[0]).invars]
    outputs: list[Atom] = []
    for program in programs:
        outputs = walk(program, [*inputs, *outputs], Constant, equation)
    return FlatProgram(inputs, operations, outputs)


def needs_barrier(eqn: JaxprEqn) -> bool:
    """Whether XLA must not merge the call with operations outside, as in JAX's own lowering."""
    return bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse"))


class Packing(NamedTuple):
    """Rule for which collectives may share one buffer.

    Attributes:
        limit: Largest operand to pack, in bytes. 0 disables packing.
    """

    limit: int

    def key(self, eqn: JaxprEqn) -> Hashable:
        """Returns a key that collectives in one buffer share; `None` if it cannot be packed."""
        if not self.limit or eqn.primitive.name not in ALL_REDUCES or len(eqn.invars) != 1:
            return None
        if len(axes_of(eqn)) != 1 or not spans_whole_axis(eqn):
            return None
        aval: Any = eqn.invars[0].aval
        if not 0 < num_bytes(aval) <= self.limit:
            return None
        return eqn.primitive.name, aval.dtype

    def count(self, program: ClosedJaxpr | Jaxpr) -> int:
        """Returns the number of packable collectives in a program, outside loops and branches."""
        if not self.limit:
            return 0
        total = 0
        for eqn in jaxpr_of(program).eqns:
            inner = called(eqn)
            total += self.key(eqn) is not None if inner is None else self.count(inner)
        return total

    def opens(self, eqn: JaxprEqn, _: Sequence[Atom]) -> bool:
        """Whether a call contains a packable collective."""
        inner = called(eqn)
        return inner is not None and self.count(inner) > 0

    def key_of(self, operation: Operation) -> Hashable:
        """Returns the key of an operation of a flat program."""
        return None if operation.is_barrier else self.key(operation.eqn)


def in_order(
    operations: Sequence[Operation], key_of: Callable[[Operation], Hashable]
) -> Iterator[list[Operation]]:
    """Yields operations in an order in which they can be evaluated, with packs as one list.

    A collective waits until nothing else can be evaluated. It is then packed with all waiting
    collectives that share its key. Only the keys at the start of the longest chain of collectives
    run in that round: the other collectives keep waiting, because a later pack can still include
    them. So there are no more rounds than the longest chain needs.

    Args:
        operations: Operations, each after the ones that it depends on.
        key_of: Returns the key that the operations of a pack share; `None` for an operation that
            is not packed.
    """
    keys = list(map(key_of, operations))
    after, missing = _dependences(operations)
    heights = [0] * len(operations)
    for i in reversed(range(len(operations))):
        below = max((heights[k] for k in after[i]), default=0)
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
        if operation.has_effects:
            before |= set() if last is None else {last}
            last = i
        for k in before:
            after[k].add(i)
        missing.append(len(before))
    return after, missing
