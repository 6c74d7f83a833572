"""`Program`: one flat list of operations, which the passes rewrite.

Every value has a layout, which says what the replicas hold of it. The operations are of few kinds:

- `equation`: an operation of the jaxpr;
- `barrier`: its results are its operands; XLA must not move operations across it;
- `slice`: each replica keeps its slice of a mirrored array; the second operand is its index;
- `scatter`: sums arrays over the replicas; each replica gets its slice of the sum;
- `gather`: joins the slices of all replicas, after its other operands have been computed;
- `loop`: a `scan` whose body is a program of its own, because values in it are slices;
- `pack`: several collectives of one kind that send their operands in one buffer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.dtypes import num_bytes
from mirror._src.base.types import REPLICA_AXIS
from mirror._src.devices.replicas import Kind as Layout
from mirror._src.jaxprs.collective_eqns import has_effects, is_collective, kind_of
from mirror._src.jaxprs.ensure import ensured_p
from mirror._src.jaxprs.equations import called, jaxpr_of, walk

OWN = Layout(is_own=True)
_COLLECTIVES = {"scatter": "reduce_scatter", "gather": "all_gather"}

Kind = Literal["equation", "barrier", "slice", "scatter", "gather", "loop", "pack"]


class Value:
    """An input of a program or a result of one of its operations.

    Attributes:
        aval: Shape and dtype on one replica.
        layout: What the replicas hold. Per-replica unless a proof knows more.
    """

    __slots__ = ("aval", "layout")

    def __init__(self, aval: Any, layout: Layout = OWN) -> None:
        self.aval = aval
        self.layout = layout

    @property
    def num_bytes(self) -> int:
        """Size on one replica."""
        return num_bytes(self.aval)

    @property
    def is_mirrored(self) -> bool:
        """Whether every replica holds the whole of the same array."""
        return self.layout == Layout()


@dataclass(eq=False)
class Constant:
    """A number or array that is part of the program."""

    value: Any
    layout = Layout()

    @property
    def aval(self) -> Any:
        """Shape and dtype."""
        return jax.typeof(self.value)


Atom: TypeAlias = Value | Constant
Opens: TypeAlias = Callable[[JaxprEqn, Sequence[Atom]], bool]


def values_of(atoms: Iterable[Atom]) -> list[Value]:
    """Returns the atoms that are not constants."""
    return [atom for atom in atoms if isinstance(atom, Value)]


@dataclass(eq=False)
class Operation:
    """One operation of a program.

    Attributes:
        kind: What it does.
        eqn: The operation in the jaxpr; if a pass has added it, the one that it is added for.
        inputs: Its operands.
        outputs: Its results.
        around: The calls that it was inlined from, outermost first.
        packed: The collectives of a pack, in the order of the operands and results.
        body: The body of a loop, with the operands and results of the body of its `scan`.
    """

    kind: Kind
    eqn: JaxprEqn
    inputs: list[Atom]
    outputs: list[Value]
    around: tuple[JaxprEqn, ...] = ()
    packed: tuple["Operation", ...] = ()
    body: "Program | None" = None

    @property
    def name(self) -> str:
        """Name of the primitive; for an operation that a pass has added, its kind."""
        return self.eqn.primitive.name if self.kind == "equation" else self.kind

    @property
    def has_effects(self) -> bool:
        """Whether its position among other operations matters, as for callbacks and `Ref` reads."""
        return self.kind == "equation" and has_effects(self.eqn.effects)

    @property
    def collective(self) -> str:
        """Name of the collective in reports; empty for other operations."""
        if self.kind == "equation":
            return kind_of(self.eqn.primitive.name) if is_collective(self.eqn) else ""
        return kind_of(_COLLECTIVES[self.kind]) if self.kind in _COLLECTIVES else ""

    @property
    def sent(self) -> list[Atom]:
        """The operands of a collective that it sends."""
        return self.inputs[:1] if self.kind == "gather" else self.inputs

    @property
    def members(self) -> tuple["Operation", ...]:
        """The operations of a pack, or this one."""
        return self.packed or (self,)


class Program(NamedTuple):
    """A program as one list of operations.

    Attributes:
        inputs: Its inputs.
        operations: Its operations, in an order in which they can be evaluated.
        outputs: Its outputs.
        reasons: For state that is not sharded, the reason, by position of the input.
        marks: The `Marks` of the values before the passes; `None` if they are unknown.
    """

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Atom]
    reasons: Mapping[int, str] = {}
    marks: Any = None

    def everywhere(self) -> Iterator[Operation]:
        """Yields all operations, also in packs and in the bodies of loops."""
        for operation in self.operations:
            yield from operation.members
            if operation.body is not None:
                yield from operation.body.everywhere()

    @property
    def sharded_inputs(self) -> dict[int, int]:
        """Sharded axis of each sharded input, by position."""
        return dict(_sharded(self.inputs))

    @property
    def sharded_outputs(self) -> dict[int, int]:
        """Sharded axis of each sharded output, by position."""
        return dict(_sharded(self.outputs))


class Settings(NamedTuple):
    """Facts that passes need besides the program.

    Attributes:
        num_replicas: Number of replicas.
        pack_bytes: Collectives of at most this many bytes may share a buffer. 0 disables packing.
        per_replica: For each input, whether replicas may hold different values.
        state: For all state that may be stored in slices, the position of its input and of the
            output with its new value. `None` if nothing is stored in slices.
        min_bytes: Mirrored inputs of at least this many bytes are stored in slices even if
            operations need them whole, and gathered for each. Infinite if none are.
        kept_bytes: Bytes of gathered values that are kept for later reads. `None` for the largest.
        axis_name: Name of the replica axis.
        in_rounds: Whether the host runs all collectives, in rounds between stages.
    """

    num_replicas: int = 1
    pack_bytes: int = 0
    per_replica: Sequence[bool] = ()
    state: Sequence[tuple[int, int]] | None = None
    axis_name: str = REPLICA_AXIS
    in_rounds: bool = False
    min_bytes: float = math.inf
    kept_bytes: int | None = None


def _sharded(atoms: Iterable[Atom]) -> Iterator[tuple[int, int]]:
    for i, atom in enumerate(atoms):
        if atom.layout.axis is not None:
            yield i, atom.layout.axis


def flatten(
    programs: Sequence[ClosedJaxpr | Jaxpr],
    opens: Opens,
    on_operation: Callable[[Operation], None] = lambda _: None,
    inputs: list[Value] | None = None,
) -> Program:
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

    def add(kind: Kind, eqn: JaxprEqn, inputs: list[Atom], results: Sequence[Any]) -> list[Value]:
        outputs = [Value(var.aval) for var in results]
        operations.append(Operation(kind, eqn, inputs, outputs, tuple(around)))
        on_operation(operations[-1])
        return outputs

    def equation(eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        if eqn.primitive is ensured_p:  # checked by the proof; computes nothing
            return inputs
        program = called(eqn)
        if program is None or not opens(eqn, inputs):
            return add("equation", eqn, inputs, eqn.outvars)
        if needs_barrier(eqn):
            # As in JAX's own lowering: otherwise XLA merges the recomputation with the original.
            inputs = [*add("barrier", eqn, inputs, eqn.invars)]
        around.append(eqn)
        outputs = walk(program, inputs, Constant, equation)
        around.pop()
        return outputs

    if inputs is None:
        inputs = [Value(var.aval) for var in jaxpr_of(programs[0]).invars]
    outputs: list[Atom] = []
    for program in programs:
        outputs = walk(program, [*inputs, *outputs], Constant, equation)
    return Program(inputs, operations, outputs)


def readers_of(program: Program) -> Mapping[Value, list[Operation]]:
    """Returns the operations that read each value."""
    readers = defaultdict[Value, list[Operation]](list)
    for operation in program.operations:
        for value in values_of(operation.inputs):
            readers[value].append(operation)
    return readers


def makers_of(program: Program) -> Mapping[Atom, Operation]:
    """Returns the operation that computes each value."""
    return {value: op for op in program.operations for value in op.outputs}


def with_bodies(program: Program, rewrite: Callable[[Program], Program]) -> Program:
    """Returns a program with the bodies of its loops rewritten."""
    operations = program.operations
    if all(operation.body is None for operation in operations):
        return program

    def rewritten(operation: Operation) -> Operation:
        body = operation.body
        return operation if body is None else replace(operation, body=rewrite(body))

    return program._replace(operations=list(map(rewritten, operations)))


def walk_operations(
    program: Program,
    arguments: Sequence[Any],
    constant: Callable[[Any], Any],
    evaluate: Callable[[Operation, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Interprets a flat program, operation by operation, as `walk` interprets a jaxpr."""
    values: dict[Value, Any] = dict(zip(program.inputs, arguments, strict=True))

    def read(atom: Atom) -> Any:
        return constant(atom.value) if isinstance(atom, Constant) else values[atom]

    for operation in program.operations:
        outputs = evaluate(operation, list(map(read, operation.inputs)))
        values.update(zip(operation.outputs, outputs, strict=True))
    return list(map(read, program.outputs))


def needs_barrier(eqn: JaxprEqn) -> bool:
    """Whether XLA must not merge the call with operations outside, as in JAX's own lowering."""
    return bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse"))
