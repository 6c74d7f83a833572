"""A program as one list of operations, and the order in which small collectives travel together."""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.program.axis import axis_name
from mirror._src.program.collective_eqns import axes_of
from mirror._src.program.jaxprs import called, jaxpr_of, walk

_REDUCTIONS = frozenset({"psum", "pmax", "pmin"})
_NAMES_AXIS = "NamedAxisEffect"
_ENSURED = "ensure_mirrored"  # which the proof has looked at, and which computes nothing


def has_effects(effects: Iterable[object]) -> bool:
    """Whether there are others than that an axis is named."""
    return any(type(effect).__name__ != _NAMES_AXIS for effect in effects)


class Value:
    """One value of a flat program.

    Attributes:
        aval: Shape and dtype on one replica.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval

    @property
    def num_bytes(self) -> int:
        """Its size on one replica."""
        return int(self.aval.size * self.aval.dtype.itemsize)


@dataclass(eq=False)
class Constant:
    """A number or array that the program holds."""

    value: Any


Atom: TypeAlias = Value | Constant


@dataclass(eq=False)
class Operation:
    """One operation of a flat program.

    Attributes:
        eqn: The operation.
        inputs: What it reads.
        outputs: What it computes.
        around: The calls that it was taken out of, the outermost first.
        is_barrier: Whether it stands for the barrier before the opened call `eqn`.
    """

    eqn: JaxprEqn
    inputs: list[Atom]
    outputs: list[Value]
    around: tuple[JaxprEqn, ...] = ()
    is_barrier: bool = False

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return "optimization_barrier" if self.is_barrier else self.eqn.primitive.name

    @property
    def has_effects(self) -> bool:
        """Whether its place among other operations matters: callbacks, and reads of a `Ref`."""
        if self.is_barrier:
            return False
        return has_effects(self.eqn.effects)


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
    made: Callable[[Operation], None] = lambda _: None,
    inputs: list[Value] | None = None,
) -> FlatProgram:
    """Takes the operations out of the calls around them.

    Args:
        programs: Programs in turn; each gets the inputs of the first one and the outputs of the
            previous one.
        opens: Whether a call of an inner program is to be replaced by its operations.
        made: Called with each operation when it is added.
        inputs: Stand for the inputs of the first program, if they are to be known before.
    """
    operations: list[Operation] = []
    around: list[JaxprEqn] = []

    def add(eqn: JaxprEqn, inputs: list[Atom], avals: Sequence[Any], **more: bool) -> list[Value]:
        outputs = list(map(Value, avals))
        operations.append(Operation(eqn, inputs, outputs, tuple(around), **more))
        made(operations[-1])
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
    """Whether XLA must not merge the call with what is known outside, as JAX lowers it."""
    return bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse"))


class Packing(NamedTuple):
    """Which collectives may travel in one buffer with others.

    Attributes:
        limit: The largest operand in bytes; 0 for no packing.
    """

    limit: int

    def key(self, eqn: JaxprEqn) -> Hashable:
        """Returns what collectives of one buffer have in common; `None` if it travels alone."""
        if not self.limit or eqn.primitive.name not in _REDUCTIONS or len(eqn.invars) != 1:
            return None
        if axes_of(eqn) != (axis_name(),) or eqn.params.get("axis_index_groups") is not None:
            return None
        aval: Any = eqn.invars[0].aval
        if not 0 < aval.size * aval.dtype.itemsize <= self.limit:
            return None
        return eqn.primitive.name, aval.dtype

    def count(self, program: ClosedJaxpr | Jaxpr) -> int:
        """Returns how many such collectives a program has, outside of its loops and branches."""
        if not self.limit:
            return 0
        found = 0
        for eqn in jaxpr_of(program).eqns:
            inner = called(eqn)
            found += self.key(eqn) is not None if inner is None else self.count(inner)
        return found

    def opens(self, eqn: JaxprEqn, _: Sequence[Atom]) -> bool:
        """Whether a call holds such a collective."""
        inner = called(eqn)
        return inner is not None and self.count(inner) > 0

    def key_of(self, operation: Operation) -> Hashable:
        """Returns the key of an operation of a flat program."""
        return None if operation.is_barrier else self.key(operation.eqn)


def in_order(
    operations: Sequence[Operation], key_of: Callable[[Operation], Hashable]
) -> Iterator[list[Operation]]:
    """Yields operations in an order in which they can be evaluated, packs in one list.

    A collective waits until nothing else can be evaluated, and then travels with all of its kind
    that wait too. Only those must go by then that the longest chain of collectives starts with:
    the others, which can still travel with a later pack, wait on. So there are no more rounds than
    the longest chain needs.

    Args:
        operations: Operations, each after the ones that it depends on.
        key_of: What the operations of one pack have in common; `None` for one that is alone.
    """
    keys = list(map(key_of, operations))
    after, missing = _dependences(operations)
    heights = [0] * len(operations)
    for i in reversed(range(len(operations))):
        below = max((heights[k] for k in after[i]), default=0)
        heights[i] = below + (keys[i] is not None)
    ready = [i for i, count in enumerate(missing) if not count and keys[i] is None]
    waiting = [i for i, count in enumerate(missing) if not count and keys[i] is not None]

    def done(i: int) -> None:
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
            done(i)
            continue
        highest = max(heights[i] for i in waiting)
        urgent = {keys[i] for i in waiting if heights[i] == highest}
        for key in sorted(urgent, key=lambda key: min(i for i in waiting if keys[i] == key)):
            pack = sorted(i for i in waiting if keys[i] == key)
            yield [operations[i] for i in pack]
            waiting = [i for i in waiting if keys[i] != key]
            for i in pack:
                done(i)


def _dependences(operations: Sequence[Operation]) -> tuple[list[set[int]], list[int]]:
    """For each operation, which ones depend on it, and on how many it depends itself."""
    maker = {value: i for i, each in enumerate(operations) for value in each.outputs}
    after: list[set[int]] = [set() for _ in operations]
    missing: list[int] = []
    last: int | None = None
    for i, each in enumerate(operations):
        before = {maker[atom] for atom in each.inputs if atom in maker}
        if each.has_effects:
            before |= set() if last is None else {last}
            last = i
        for k in before:
            after[k].add(i)
        missing.append(len(before))
    return after, missing
