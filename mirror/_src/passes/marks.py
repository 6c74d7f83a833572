"""The marks and layouts of the values of a flat program, by the proof."""

import math
from collections.abc import Container, Sequence

from mirror._src.base.types import REPLICA_AXIS
from mirror._src.jaxprs.equations import Scan
from mirror._src.jaxprs.marks import MIRRORED, Mark
from mirror._src.jaxprs.primitives import ELEMENTWISE, REDUCTION
from mirror._src.jaxprs.proof import Proof
from mirror._src.passes.program import (
    OWN,
    Atom,
    Constant,
    Layout,
    Operation,
    Program,
    Value,
    values_of,
)

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
        (atom, *_), (result,) = operation.inputs, operation.outputs
        held = atom.layout
        match operation.kind:
            case "slice":
                assert held == _WHOLE, f"{operation.name} of {held}"
                return [Layout(axis=result.layout.axis)]
            case "scatter":
                assert held.axis is None, f"{operation.name} of {held}"
                return [Layout(axis=result.layout.axis)]
            case _:
                assert held.axis is not None, f"{operation.name} of {held}"
                return [_WHOLE]

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
