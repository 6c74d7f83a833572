"""`Program`: one flat list of operations, which the passes rewrite.

Every value has a layout, which says what the replicas hold of it. The operations are of few kinds:

- `equation`: an operation of the jaxpr;
- `barrier`: its results are its operands; XLA must not move operations across it;
- `block`: operations that are evaluated unchanged, as one;
- `slice`: each replica keeps its slice of a mirrored array; the second operand is its index;
- `scatter`: sums arrays over the replicas; each replica gets its slice of the sum;
- `gather`: joins the slices of all replicas, after its other operands have been computed;
- `loop`: a `scan` whose body is a program of its own, because values in it are slices;
- `pack`: several collectives of one kind that send their operands in one buffer.

`Marks` are what the proof says of the values of a program.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.types import REPLICA_AXIS, num_bytes
from mirror._src.devices.replicas import Kind as Layout
from mirror._src.jaxprs.collective_eqns import has_effects, is_collective, kind_of
from mirror._src.jaxprs.equations import Scan, called, jaxpr_of, walk
from mirror._src.jaxprs.marks import MIRRORED, Mark, ensured_p
from mirror._src.jaxprs.primitives import ELEMENTWISE, REDUCTION, SIMPLE
from mirror._src.jaxprs.proof import Proof

OWN = Layout(is_own=True)
_COLLECTIVES = {"scatter": "reduce_scatter", "gather": "all_gather"}

Kind = Literal["equation", "barrier", "block", "slice", "scatter", "gather", "loop", "pack"]


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
        return _sharded(self.inputs)

    @property
    def sharded_outputs(self) -> dict[int, int]:
        """Sharded axis of each sharded output, by position."""
        return _sharded(self.outputs)


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
        on_cpus: Whether the replicas are on host devices.
    """

    num_replicas: int = 1
    pack_bytes: int = 0
    per_replica: Sequence[bool] = ()
    state: Sequence[tuple[int, int]] | None = None
    axis_name: str = REPLICA_AXIS
    in_rounds: bool = False
    min_bytes: float = math.inf
    kept_bytes: int | None = None
    on_cpus: bool = False


def _sharded(atoms: Iterable[Atom]) -> dict[int, int]:
    return {i: a.layout.axis for i, a in enumerate(atoms) if a.layout.axis is not None}


def flatten(
    programs: Sequence[ClosedJaxpr | Jaxpr],
    opens: Opens,
    on_operation: Callable[[Operation], None] | None = None,
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
        if on_operation is not None:
            on_operation(operations[-1])
        return outputs

    def equation(eqn: JaxprEqn, inputs: list[Atom]) -> Sequence[Atom]:
        if eqn.primitive is ensured_p:  # checked by the proof; computes nothing
            return inputs
        program = None if eqn.primitive.name in SIMPLE else called(eqn)
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
    operations = [
        op if op.body is None else replace(op, body=rewrite(op.body)) for op in program.operations
    ]
    return program._replace(operations=operations)


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


_WHOLE = Layout()


class Marks:
    """Marks of the values of one program.

    Args:
        inputs: The inputs of the program.
        num_replicas: Number of replicas.
        axis_name: Name of the replica axis.
    """

    def __init__(
        self, inputs: Sequence[Value], num_replicas: int, axis_name: str = REPLICA_AXIS
    ) -> None:
        self._num_replicas = num_replicas
        self._proof = Proof(num_replicas, axis_name)
        self._marks = {value: Mark(i) for i, value in enumerate(inputs) if value.layout.is_own}

    def assign(self, operation: Operation) -> None:
        """Gives the results of an operation the layouts that follow from its operands."""
        for value, layout in zip(operation.outputs, self.layouts(operation), strict=True):
            value.layout = layout

    def layouts(self, operation: Operation) -> list[Layout]:
        """Returns the layouts of the results of an operation.

        Raises:
            AssertionError: If it reads a slice as if it were the whole value.
        """
        match operation.kind:
            case "equation":
                return self._equation(operation)
            case "barrier":
                for atom, value in zip(operation.inputs, operation.outputs, strict=True):
                    self._marks[value] = self._mark(atom)
                return [atom.layout for atom in operation.inputs]
            case "pack":
                return [layout for each in operation.packed for layout in self.layouts(each)]
            case "loop":
                return self._loop(operation)
        held, (result,) = operation.inputs[0].layout, operation.outputs
        fits = {"slice": held == _WHOLE, "scatter": held.axis is None}
        assert fits.get(operation.kind, held.axis is not None), f"{operation.name} of {held}"
        return [_WHOLE if operation.kind == "gather" else Layout(axis=result.layout.axis)]

    def _loop(self, operation: Operation) -> list[Layout]:
        """Checks the body. Results have the layouts that its results have, as rows of a stack."""
        scan, body = Scan(operation.eqn), operation.body
        assert body is not None
        require_layouts(body, self._num_replicas)
        stacked = scan.num_consts + scan.num_carry
        for i, (atom, value) in enumerate(zip(operation.inputs, body.inputs, strict=True)):
            held = value.layout
            assert held.is_own or atom.layout == (_in_stack(held) if i >= stacked else held)
        found = [atom.layout for atom in body.outputs]
        carried = [value.layout for value in body.inputs[scan.num_consts : stacked]]
        for before, after in zip(carried, found, strict=False):
            assert before.is_own or before == after
        return [*carried, *map(_in_stack, found[scan.num_carry :])]

    def _equation(self, operation: Operation) -> list[Layout]:
        axes = {atom.layout.axis for atom in operation.inputs} - {None}
        if axes:
            return [_of_slices(operation, axes)]
        eqn = operation.eqn
        marks = self._proof.equation(eqn, list(map(self._mark, operation.inputs)))
        known = {id(self._mark(atom).source) for atom in operation.inputs} - {id(None)}
        for value, mark in zip(operation.outputs, marks, strict=True):
            # A variable of an inner program has a different value in every call.
            self._marks[value] = mark if id(mark.source) in known else mark.of(value)
        return [Layout(mark.per_replica) for mark in marks]

    def _mark(self, atom: Atom) -> Mark:
        if isinstance(atom, Constant):
            return MIRRORED
        mark = self._marks.get(atom)
        if mark is None:  # computed by another pass, or by an operation that was omitted
            mark = (Mark("a pass") if atom.layout.is_own else MIRRORED).of(atom)
        return mark


def require_layouts(program: Program, num_replicas: int, known: Container[Operation] = ()) -> None:
    """Checks that all operands exist, and that the layouts of results follow from them.

    Args:
        program: The program.
        num_replicas: Number of replicas.
        known: Operations that a pass has not changed, whose layouts the proof has found.

    Raises:
        AssertionError: If an operation reads a slice as if it were whole, or if a value that every
            replica must hold may differ.
    """
    marks, computed = program.marks or Marks(program.inputs, num_replicas), set(program.inputs)
    for operation in program.operations:
        assert computed.issuperset(values_of(operation.inputs)), f"{operation.eqn} reads a slice"
        computed.update(operation.outputs)
        if operation in known:
            continue
        found = marks.layouts(operation)
        for value, layout in zip(operation.outputs, found, strict=True):
            assert layout == value.layout, f"{operation.name} returns {layout}, not {value.layout}"


def _is_transposed(operation: Operation, axis: int | None, to: int | None) -> bool:
    """Whether slices along one axis become slices along another one."""
    return list(operation.eqn.params["permutation"]).index(axis) == to


def _is_reshaped(operation: Operation, axis: int | None, to: int | None) -> bool:
    """Whether a slice keeps its elements: the sizes before its axis have the same product."""
    (atom,), (result,) = operation.inputs, operation.outputs
    if operation.eqn.params["dimensions"] is not None:
        return False
    return math.prod(atom.aval.shape[:axis]) == math.prod(result.aval.shape[:to])


MOVES = {"transpose": _is_transposed, "reshape": _is_reshaped}
"""For operations that move elements: whether slices of the operand are slices of the result."""


def _in_stack(row: Layout) -> Layout:
    """Returns the layout of a stack of rows."""
    return row if row.axis is None else Layout(axis=row.axis + 1)


def _of_slices(operation: Operation, axes: set[int | None]) -> Layout:
    """Returns the layout of what each replica computes of its slices."""
    (result,), (axis, *others) = operation.outputs, axes
    if operation.name in MOVES:
        assert MOVES[operation.name](operation, axis, result.layout.axis), f"{operation.eqn} moves"
        return result.layout
    arrays = [atom for atom in operation.inputs if atom.layout.axis is not None]
    scalars = [atom for atom in operation.inputs if atom.layout.axis is None]
    if operation.name in REDUCTION and not scalars and not result.aval.shape:
        return OWN
    is_elementwise = operation.name in ELEMENTWISE and not others
    assert is_elementwise, f"{operation.eqn} reads slices as if they were whole"
    assert {atom.aval.shape for atom in arrays} == {result.aval.shape}
    for atom in scalars:
        assert not atom.aval.shape, f"{operation.eqn} mixes slices and whole arrays"
        assert atom.layout == _WHOLE, f"{operation.eqn} mixes slices and per-replica values"
    return Layout(axis=axis)
