"""Rewrites a program so that a plan of `shard` is carried out: `Slicing`."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from mirror._src.base.types import num_bytes
from mirror._src.devices.replicas import shard_axis, stored_axis
from mirror._src.jaxprs.collective_eqns import names_axis
from mirror._src.jaxprs.equations import Scan
from mirror._src.jaxprs.primitives import ADDITION, ELEMENTWISE, REDUCTION, dtype_of, op_of
from mirror._src.jaxprs.trace import struct_of, trace
from mirror._src.passes.program import (
    Atom,
    Constant,
    Kind,
    Layout,
    Marks,
    Opens,
    Operation,
    Program,
    Settings,
    Value,
    flatten,
    makers_of,
    readers_of,
    values_of,
)

_ALL_REDUCES = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}
# These calls do more than their program.
_CLOSED = frozenset({"compute_on", "custom_partitioning", "xla_metadata_call"})


class Plan(NamedTuple):
    """Work and state that replicas share.

    Attributes:
        region: Operations that each replica computes for its own slice.
        inputs: For each input that is stored in slices, the axis.
        outputs: For each output that is stored in slices, the axis.
        reasons: For state that is not sharded, the reason, by position of the input.
        sums: Additions in the body of a loop whose second operand is summed over the replicas, and
            the operation that summed their result.
    """

    region: Set[Operation]
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    reasons: Mapping[int, str] = {}
    sums: Mapping[Operation, Operation] = {}


def is_large(value: Atom, settings: Settings) -> bool:
    """Whether a value is stored in slices although operations read it whole."""
    if isinstance(value, Constant) or value.layout.is_own:
        return False
    return stored_axis(value.aval, settings.num_replicas, settings.min_bytes) is not None


def opens_slices(settings: Settings) -> Opens:
    """Returns which calls must be inlined so that their operations can read slices."""

    def reads(eqn: JaxprEqn, inputs: Sequence[Atom]) -> bool:
        half = settings._replace(min_bytes=settings.min_bytes / 2)  # a cast halves weights
        is_closed = eqn.primitive.name in _CLOSED
        return not is_closed and any(is_large(value, half) for value in values_of(inputs))

    return reads


def is_scattered(operation: Operation) -> bool:
    """Whether it is a sum over replicas only, which can become a reduce-scatter."""
    is_sum = operation.name == "psum" and names_axis(operation.eqn)
    return is_sum and len(operation.eqn.params["axes"]) == 1


def reduces_slices(operation: Operation, num_replicas: int) -> bool:
    """Whether the operation reduces a value to a scalar and can reduce slices of it first."""
    if operation.name not in REDUCTION or _op_of(operation) not in _ALL_REDUCES:
        return False
    if operation.outputs[0].layout.is_own:
        return False
    aval: Any = operation.eqn.invars[0].aval
    if not 0 < len(aval.shape) == len(operation.eqn.params["axes"]):
        return False
    is_exact = bool(aval.dtype == jnp.bool_ or aval.dtype.itemsize >= 4)
    return is_exact and shard_axis(aval.shape, num_replicas) is not None


def _op_of(operation: Operation) -> str:
    return op_of(operation.name, dtype_of(operation.eqn.invars[0]))


class Slicing:
    """Program in which a plan is carried out.

    Attributes:
        slices: The slices of values, by the whole value.
        whole: The values that exist whole.
        operations: The operations so far.
        summed: Values whose slices are already summed over the replicas.
        readers: The operations of the old program that read each value.
        makers: The operation of the old program that computes each value.
    """

    def __init__(self, program: Program, plan: Plan, settings: Settings) -> None:
        self.old, self.plan, self.settings = program, plan, settings
        self.num_replicas, self.axis_name = settings.num_replicas, settings.axis_name
        inputs = enumerate(program.inputs)
        self.whole = {value for i, value in inputs if i not in plan.inputs}
        self.slices: dict[Atom, Value] = {}
        for i, axis in plan.inputs.items():
            self.slices[program.inputs[i]] = self.new_slice(program.inputs[i], axis)
        self.operations: list[Operation] = []
        self.summed: set[Atom] = set()
        self.readers, self.makers = readers_of(program), makers_of(program)
        self._index: Value | None = None

    @property
    def index(self) -> Value:
        """The index of the replica."""
        if self._index is None:
            self._index = Value(jax.core.ShapedArray((), jnp.int32))
            eqn = self.equation(lambda: jax.lax.axis_index(self.axis_name))
            self.operations.append(Operation("equation", eqn, [], [self._index]))
        return self._index

    def equation(self, fn: Callable[..., Any], *avals: Any) -> JaxprEqn:
        """Returns a new equation."""
        types = list(map(struct_of, avals))
        (eqn,) = trace(fn, types, self.num_replicas, self.axis_name).jaxpr.eqns
        return eqn

    def program(self, output: Callable[[int, Atom], Atom] | None = None) -> Program:
        """Returns the program.

        Args:
            output: Returns what the new program returns for an output. Defaults to `self.output`.
        """
        for operation in self.old.operations:
            self.rewrite(operation)
        outputs = list(map(output or self.output, range(len(self.old.outputs)), self.old.outputs))
        inputs = [
            self.slices[v] if i in self.plan.inputs else v for i, v in enumerate(self.old.inputs)
        ]
        return Program(inputs, self.operations, outputs, self.plan.reasons, self.old.marks)

    def output(self, j: int, atom: Atom) -> Atom:
        """Returns an output: the slices of state and of what is stored like it, or the whole."""
        if j in self.plan.outputs:
            return self.slice_of(atom, self.makers.get(atom), self.plan.outputs[j])
        if self.is_slice(atom) and is_large(atom, self.settings):
            return self.slices[atom]
        return self.read(atom, self.makers.get(atom))

    def rewrite(self, operation: Operation) -> None:
        """Adds an operation, for slices where it can be."""
        if operation in self.plan.region:
            self.share(operation)
        elif operation in self.plan.sums:
            self.accumulate(operation)
        elif reduces_slices(operation, self.num_replicas) and self.is_slice(operation.inputs[0]):
            self.reduce(operation)
        elif operation.kind == "barrier":
            self.barrier(operation)
        elif (axis := self.local_axis(operation)) is not None:
            self.locally(operation, axis)
        elif operation.name != "scan" or not self.loop(operation):
            # One value for each operand: a loop may rely on two operands being the same.
            whole = {atom: self.read(atom, operation) for atom in dict.fromkeys(operation.inputs)}
            self.keep(operation, [whole[atom] for atom in operation.inputs])

    def keep(self, operation: Operation, inputs: list[Atom]) -> None:
        """Adds an operation that reads whole values."""
        if any(new is not old for new, old in zip(inputs, operation.inputs, strict=True)):
            operation = replace(operation, inputs=inputs)
        self.operations.append(operation)
        self.whole.update(operation.outputs)

    def is_slice(self, atom: Atom) -> bool:
        """Whether a value exists in slices only."""
        return atom in self.slices and atom not in self.whole

    def axis(self, atom: Atom) -> int:
        """Returns the axis along which a value of the region is sliced."""
        axis = shard_axis(atom.aval.shape, self.num_replicas)
        assert axis is not None  # otherwise the value would not be in the region
        return axis

    def new_slice(self, atom: Atom, axis: int) -> Value:
        """Returns a new value for the slices of another one."""
        shape = list(atom.aval.shape)
        shape[axis] //= self.num_replicas
        return Value(jax.core.ShapedArray(tuple(shape), atom.aval.dtype), Layout(axis=axis))

    def read(self, atom: Atom, reader: Operation | None) -> Atom:
        """Returns a whole value, which is gathered for the reader if it exists in slices only."""
        if not self.is_slice(atom):
            return atom
        whole = Value(atom.aval, Layout())
        self.add("gather", reader, [self.slices[atom]], [whole])
        return whole

    def slice_of(self, atom: Atom, reader: Operation | None, axis: int | None = None) -> Atom:
        """Returns the slices of a value, or a scalar itself."""
        if not atom.aval.shape:
            return atom
        axis = self.axis(atom) if axis is None else axis
        part = self.slices.get(atom)
        if part is None or part.layout.axis != axis:
            whole, part = self.read(atom, reader), self.new_slice(atom, axis)
            self.slices.setdefault(atom, part)
            self.add("slice", reader, [whole, self.index], [part])
        return part

    def share(self, operation: Operation) -> None:
        """Adds an operation that computes this replica's slice of the result."""
        (result,) = operation.outputs
        if operation.name == "broadcast_in_dim":  # XLA slices the scalar
            self.keep(operation, operation.inputs)
            self.slice_of(result, operation)
        elif is_scattered(operation):
            self.slices[result] = self.scatter(operation.inputs[0], result, operation)
        else:
            part = self.slices[result] = self.new_slice(result, self.axis(result))
            inputs = [self.slice_of(atom, operation) for atom in operation.inputs]
            self.add("equation", operation, inputs, [part])

    def scatter(self, atom: Atom, result: Atom, old: Operation, axis: int | None = None) -> Value:
        """Returns the slices of the sum of a value over the replicas."""
        if atom in self.summed:
            return self.slices[atom]
        part = self.new_slice(result, self.axis(result) if axis is None else axis)
        self.add("scatter", old, [self.read(atom, old)], [part])
        return part

    def reduce(self, operation: Operation) -> None:
        """Adds a reduction of this replica's slice, and an all-reduce of the results."""
        (result,) = operation.outputs
        part = Value(result.aval)
        self.add("equation", operation, [self.slices[operation.inputs[0]]], [part])
        all_reduce = _ALL_REDUCES[_op_of(operation)]
        eqn = self.equation(lambda x: all_reduce(x, self.axis_name), result.aval)
        eqn = eqn.replace(source_info=operation.eqn.source_info)
        self.operations.append(Operation("equation", eqn, [part], [result], operation.around))
        self.whole.add(result)

    def barrier(self, operation: Operation) -> None:
        """Adds a barrier, in slices where its operands are."""
        inputs = [self.slices[a] if self.is_slice(a) else a for a in operation.inputs]
        outputs = list(operation.outputs)
        for i, (atom, value) in enumerate(zip(operation.inputs, operation.outputs, strict=True)):
            if self.is_slice(atom):
                axis = self.slices[atom].layout.axis
                assert axis is not None
                outputs[i] = self.slices[value] = self.new_slice(value, axis)
            else:
                self.whole.add(value)
        self.add("barrier", operation, inputs, outputs)

    def local_axis(self, operation: Operation) -> int | None:
        """Returns the axis of the result if its slices follow from slices of all operands."""
        arrays = [atom for atom in operation.inputs if atom.aval.shape]
        if operation.kind != "equation" or not arrays or not all(map(self.is_slice, arrays)):
            return None
        if len(operation.outputs) != 1 or operation.outputs[0].layout.is_own:
            return None
        (result,) = operation.outputs
        axis, *others = {self.slices[atom].layout.axis for atom in arrays}
        assert axis is not None
        if operation.name == "transpose":
            return list(operation.eqn.params["permutation"]).index(axis)
        if operation.name == "reshape" and operation.eqn.params["dimensions"] is None:
            before, after = arrays[0].aval.shape, result.aval.shape
            same = math.prod(before[:axis])
            axes = (d for d in range(len(after)) if math.prod(after[:d]) == same)
            return next((d for d in axes if after[d] and after[d] % self.num_replicas == 0), None)
        shapes = {atom.aval.shape for atom in arrays}
        is_local = operation.name in ELEMENTWISE and shapes == {result.aval.shape} and not others
        return axis if is_local else None

    def locally(self, operation: Operation, axis: int) -> None:
        """Adds an operation that computes slices of its result from slices of its operands."""
        (result,) = operation.outputs
        part = self.slices[result] = self.new_slice(result, axis)
        eqn = operation.eqn
        if operation.name == "reshape":
            eqn = eqn.replace(params={**eqn.params, "new_sizes": part.aval.shape, "sharding": None})
        inputs = [self.slices.get(atom, atom) for atom in operation.inputs]
        self.operations.append(Operation("equation", eqn, inputs, [part], operation.around))

    def loop(self, operation: Operation) -> bool:
        """Adds a `scan` whose body reads or returns slices; if none would, returns `False`."""
        loop = _Loop(self, operation)
        if not loop.inputs and not loop.scattered:
            return False
        scan, body = loop.scan, loop.body()
        start, inputs = scan.num_consts, list[Atom]()
        for i, atom in enumerate(operation.inputs):
            axis = loop.stored.get(i)
            j = i - start
            if j in loop.sums and not _is_zero(self.makers.get(atom)):
                # The parts of a sum over the replicas that the loop starts with.
                inputs.append(self.scatter(atom, operation.outputs[j], loop.psums[j], axis))
            elif axis is not None:
                inputs.append(self.slice_of(atom, operation, axis))
            else:
                inputs.append(self.read(atom, operation))
        outputs = list(operation.outputs)
        for j, value in enumerate(operation.outputs):
            axis = body.outputs[j].layout.axis
            if axis is None:
                self.whole.add(value)
                continue
            axis += j >= scan.num_carry
            outputs[j] = self.slices[value] = self.new_slice(value, axis)
            if j in loop.sums or j in loop.scattered:
                self.summed.add(value)
        eqn, around = operation.eqn, operation.around
        self.operations.append(Operation("loop", eqn, inputs, outputs, around, body=body))
        return True

    def accumulate(self, operation: Operation) -> None:
        """Adds the sum of a second operand over the replicas to slices of the first one."""
        (first, second), psum = operation.inputs, self.plan.sums[operation]
        if not self.is_slice(first):
            first, second = second, first
        (result,) = operation.outputs
        axis = self.slices[first].layout.axis
        inputs: list[Atom] = [self.slices[first], self.scatter(second, result, psum, axis)]
        part = self.slices[result] = self.new_slice(result, axis)  # type: ignore[arg-type]
        self.add("equation", operation, inputs, [part])

    def add(
        self, kind: Kind, old: Operation | None, inputs: list[Atom], outputs: list[Value]
    ) -> None:
        """Adds an operation instead of, or for, one of the old program."""
        assert old is not None  # only an input has none, and those in slices are returned in slices
        self.operations.append(Operation(kind, old.eqn, inputs, outputs, old.around))


class _Loop:
    """The values that the body of a `scan` reads and returns in slices.

    Attributes:
        inputs: For each operand of the body that is in slices, their axis.
        stored: For the same operands, the axis of the slices outside.
        sums: The numbers of carried sums, which are summed over the replicas after the loop: the
            body sums, and carries slices.
        scattered: For stacked results that are summed over the replicas after the loop, the axis of
            the slices of a row: the body sums them.
        psums: The operation that sums a result over the replicas, by number of the result.
    """

    def __init__(self, around: Slicing, operation: Operation) -> None:
        self.around, self.operation = around, operation
        self.scan = scan = Scan(operation.eqn)
        consts, carry, _ = scan.split(operation.inputs)
        start = len(consts) + len(carry)
        held = {i: a for i, a in enumerate(operation.inputs) if around.is_slice(a)}
        axes = {i: around.slices[atom].layout.axis or 0 for i, atom in held.items()}
        in_body = {i for i, axis in axes.items() if i >= start and axis > 0}
        read_all = [i for i in held if i < len(consts)]
        # Gathered once, before the loop, if they fit; otherwise by each execution of the body.
        assert around.settings.kept_bytes is not None
        if sum(num_bytes(held[i].aval) for i in read_all) > around.settings.kept_bytes:
            in_body.update(read_all)
        self.stored = {i: axes[i] for i in sorted(in_body)}
        self.inputs = {i: axis - (i >= start) for i, axis in self.stored.items()}
        self.flat = self._flat()
        self._readers = readers_of(self.flat)
        self.scattered, self.sums = dict[int, int](), dict[int, Operation]()
        self.psums = dict[int, Operation]()
        for j, value in enumerate(operation.outputs):
            psum = self._psum(value)
            axis = shard_axis(value.aval.shape, around.num_replicas)
            if psum is None or axis is None:
                continue
            self.psums[j] = psum
            if j >= scan.num_carry:
                if axis and value.num_bytes / scan.length >= around.settings.min_bytes:
                    self.scattered[j] = axis - 1
            elif (added := self._sum(j)) is not None:
                self.sums[j] = added
                self.inputs[scan.num_consts + j] = self.stored[scan.num_consts + j] = axis

    def _psum(self, value: Value) -> Operation | None:
        """Returns the operation that sums a value over the replicas, if no other reads it."""
        around, plan = self.around, self.around.plan
        readers = around.readers[value]
        is_small = value.num_bytes < around.settings.min_bytes
        if len(readers) != 1 or value in around.old.outputs or is_small:
            return None
        (reader,) = readers
        is_sum = reader in plan.region and is_scattered(reader)
        return reader if is_sum else plan.sums.get(reader)

    def _flat(self) -> Program:
        """Returns the body as a flat program."""
        scan, operation = self.scan, self.operation
        inputs = [Value(var.aval) for var in scan.body.jaxpr.invars]
        end = scan.num_consts + scan.num_carry
        carried = operation.outputs[: scan.num_carry]
        known = [*operation.inputs[: scan.num_consts], *carried, *operation.inputs[end:]]
        for value, atom in zip(inputs, known, strict=True):
            value.layout = Layout(atom.layout.is_own)
        settings = self.around.settings
        marks = Marks(inputs, settings.num_replicas, settings.axis_name)
        flat = flatten([scan.body], opens_slices(settings), marks.assign, inputs)
        return flat._replace(marks=marks)

    def _sum(self, j: int) -> Operation | None:
        """Returns the addition that a carried value is only the sum of; `None` if it is not."""
        value, new = self.flat.inputs[self.scan.num_consts + j], self.flat.outputs[j]
        readers = self._readers
        if len(readers[value]) != 1 or readers[value][0].outputs != [new]:
            return None
        (operation,) = readers[value]
        is_sum = operation.name in ADDITION and operation.name != "sub"
        outputs, shapes = self.flat.outputs, {atom.aval.shape for atom in operation.inputs}
        is_read = readers[new] or value in outputs or outputs.count(new) > 1  # type: ignore[index]
        return operation if is_sum and not is_read and shapes == {value.aval.shape} else None

    def body(self) -> Program:
        """Returns the body, rewritten."""
        start, num_carry = self.scan.num_consts, self.scan.num_carry
        carried = {j: self.stored[start + j] for j in self.sums}
        sums = {operation: self.psums[j] for j, operation in self.sums.items()}
        plan = Plan(set(), self.inputs, carried, sums=sums)
        slicing = Slicing(self.flat, plan, self.around.settings)

        def output(j: int, atom: Atom) -> Atom:
            if j in self.scattered:
                return slicing.scatter(atom, atom, self.psums[j], self.scattered[j])
            if slicing.is_slice(atom) and (j >= num_carry or j in self.sums):
                return slicing.slices[atom]
            return slicing.read(atom, slicing.makers.get(atom, self.operation))

        return slicing.program(output)


def _is_zero(maker: Operation | None) -> bool:
    """Whether an operation makes an array of zeros."""
    if maker is None or maker.name != "broadcast_in_dim":
        return False
    (scalar,) = maker.inputs
    return isinstance(scalar, Constant) and not scalar.aval.shape and bool(scalar.value == 0)
