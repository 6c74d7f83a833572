"""The pass `shard`: replicas share the update of the weights, and store its state in slices.

After the all-reduce of the gradients, every replica computes the same update (arXiv 2004.13336). If
the update is elementwise, each replica can compute a slice of it instead: the all-reduce becomes a
reduce-scatter, state that only the update reads is stored in slices, and the new weights are
gathered. A value is sharded along its first axis that the number of replicas divides.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.errors import describe
from mirror._src.jaxprs.collective_eqns import (
    contains_collective,
    contains_replica_source,
    names_axis,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import called, jaxpr_of
from mirror._src.jaxprs.primitives import ELEMENTWISE, REDUCTION, op_of
from mirror._src.jaxprs.trace import struct_of, trace
from mirror._src.jaxprs.user_lines import line_within
from mirror._src.passes.marks import require_layouts
from mirror._src.passes.program import (
    Atom,
    Kind,
    Layout,
    Opens,
    Operation,
    Program,
    Settings,
    Value,
    values_of,
)

_ALL_REDUCES = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}


def opens(_: Sequence[ClosedJaxpr | Jaxpr], settings: Settings) -> Opens:
    """Returns which calls must be inlined: those that compute what replicas could share."""
    if settings.state is None:
        return lambda *_: False

    def may_share(eqn: JaxprEqn, inputs: Sequence[Atom]) -> bool:
        inner = called(eqn)
        assert inner is not None
        if contains_collective(jaxpr_of(inner)):
            return True
        is_mirrored = not any(value.layout.is_own for value in values_of(inputs))
        return is_mirrored and not contains_replica_source(jaxpr_of(inner))

    return may_share


def shard(program: Program, settings: Settings) -> Program:
    """Stores state in slices where that changes no result."""
    if settings.state is None:
        return program
    search = _Search(program, settings.num_replicas)
    plan = search.plan(search.region(), settings.state)
    sharded = _Rewriting(program, plan, settings).program()
    require_layouts(sharded, settings.num_replicas, set(program.operations))
    return sharded


class _Plan(NamedTuple):
    """Work and state that replicas share.

    Attributes:
        region: Operations that each replica computes for its own slice.
        reduced: Reductions of a sharded value to a scalar. Each replica reduces its slice first.
        state: For all sharded state, the positions of the input and of its new value.
        reasons: For state that is not sharded, the reason, by position of the input.
    """

    region: set[Operation]
    reduced: set[Operation]
    state: Mapping[int, int]
    reasons: Mapping[int, str]


def shard_axis(shape: Sequence[int], num_replicas: int) -> int | None:
    """Returns the axis to shard an array along; `None` if no axis is divisible."""
    return next((d for d, k in enumerate(shape) if k and k % num_replicas == 0), None)


class _Search:
    """Search for what replicas can share in one program.

    Attributes:
        maker: The operation that computes each value.
        readers: The operations that read each value.
    """

    def __init__(self, program: Program, num_replicas: int) -> None:
        self.program = program
        self.num_replicas = num_replicas
        self.maker = {v: op for op in program.operations for v in op.outputs}
        self.readers = defaultdict[Value, list[Operation]](list)
        for operation in program.operations:
            for value in values_of(operation.inputs):
                self.readers[value].append(operation)

    def axis(self, atom: Atom) -> int | None:
        """Returns the axis that a value can be sharded along."""
        return shard_axis(atom.aval.shape, self.num_replicas)

    def region(self) -> set[Operation]:
        """Returns the largest set of operations whose results no other operation needs whole."""
        region = {op for op in self.program.operations if self._is_shardable(op)}
        waiting = [op for op in region if self._whole_readers(op, region)]
        while waiting:
            operation = waiting.pop()
            if operation not in region:
                continue
            region.discard(operation)
            makers = {self.maker[atom] for atom in operation.inputs if atom in self.maker}
            waiting += [maker for maker in makers & region if self._whole_readers(maker, region)]
        return region

    def _is_shardable(self, operation: Operation) -> bool:
        """Whether a slice of the result can be computed from slices of the operands."""
        if operation.kind == "barrier" or len(operation.outputs) != 1 or operation.has_effects:
            return False
        (output,) = operation.outputs
        if output.layout.is_own or self.axis(output) is None:
            return False
        if _is_scattered(operation):
            # A reduce-scatter rounds half precision in another order. Integers are not gradients.
            dtype = output.aval.dtype
            is_wide_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4
            return is_wide_float and spans_whole_axis(operation.eqn)
        if operation.name == "broadcast_in_dim":
            return operation.inputs[0].aval.shape == ()
        shapes = {atom.aval.shape for atom in operation.inputs}
        return operation.name in ELEMENTWISE and shapes <= {(), tuple(output.aval.shape)}

    def _whole_readers(self, operation: Operation, region: set[Operation]) -> list[Operation]:
        """Returns the readers that need a result of the operation whole."""
        readers = (reader for value in operation.outputs for reader in self.readers[value])
        return [reader for reader in readers if not self._reads_slices(reader, region)]

    def _reads_slices(self, operation: Operation, region: set[Operation]) -> bool:
        is_sharded = operation in region and not _is_scattered(operation)
        return is_sharded or self._reduces_slices(operation)

    def _reduces_slices(self, operation: Operation) -> bool:
        """Whether the operation reduces a value to a scalar and can reduce slices of it first."""
        if operation.name not in REDUCTION or op_of(operation.name) not in ("sum", "max", "min"):
            return False
        if operation.outputs[0].layout.is_own:
            return False
        aval: Any = operation.eqn.invars[0].aval
        if not 0 < len(aval.shape) == len(operation.eqn.params["axes"]):
            return False
        is_exact = bool(aval.dtype == jnp.bool_ or aval.dtype.itemsize >= 4)
        return is_exact and self.axis(operation.inputs[0]) is not None

    def plan(self, region: set[Operation], pairs: Sequence[tuple[int, int]]) -> _Plan:
        """Returns the plan: the parts of the region that are connected with sharded state."""
        reasons = {i: self._reason(i, o, region) for i, o in pairs}
        state = {i: o for i, o in pairs if not reasons[i]}
        inputs, outputs = self.program.inputs, self.program.outputs
        roots = [reader for i in state for reader in self.readers[inputs[i]]]
        roots += [self.maker[outputs[o]] for o in state.values()]  # type: ignore[index]
        useful = self._connected([root for root in roots if root in region], region)
        sliced = {value for operation in useful for value in operation.outputs}
        sliced |= {inputs[i] for i in state}
        reduced = {
            operation
            for operation in self.program.operations
            if self._reduces_slices(operation) and operation.inputs[0] in sliced
        }
        return _Plan(useful, reduced, state, {i: why for i, why in reasons.items() if why})

    def _connected(self, roots: Sequence[Operation], region: set[Operation]) -> set[Operation]:
        """Returns the operations of the region that are connected with the roots.

        The other operations have no state to shard: sharding them would only add a gather.
        """
        reached, waiting = set(roots), list(roots)
        while waiting:
            operation = waiting.pop()
            neighbors = {reader for value in operation.outputs for reader in self.readers[value]}
            if not _is_scattered(operation):
                neighbors |= {self.maker[atom] for atom in operation.inputs if atom in self.maker}
            neighbors &= region
            waiting += neighbors - reached
            reached |= neighbors
        return reached

    def _reason(self, i: int, o: int, region: set[Operation]) -> str:
        """Returns why the state cannot be sharded; empty if it can."""
        value, new = self.program.inputs[i], self.program.outputs[o]
        aval = value.aval
        if not aval.shape:
            return "a scalar"
        if self.axis(value) is None:
            return f"no axis of {describe(aval)} is divisible by {self.num_replicas}"
        if not isinstance(new, Value):
            return "its new value is a constant"
        if (new.aval.shape, new.aval.dtype) != (aval.shape, aval.dtype):
            return "its new value has a different shape or dtype"
        if any(atom is value for atom in self.program.outputs):
            return "the step returns it unchanged"
        if not self.readers[value]:
            return "the step does not read it"
        for reader in self.readers[value]:
            if not self._reads_slices(reader, region):
                return f"read whole by {_describe(reader)}"
        maker = self.maker.get(new)
        if maker is None:
            return "its new value is another input"
        if maker in region:
            return ""
        if self._is_shardable(maker):
            return f"its new value is read whole by {_describe(self._whole_reader(maker, region))}"
        return f"its new value comes from {_describe(maker)}, which is not elementwise"

    def _whole_reader(self, operation: Operation, region: set[Operation]) -> Operation:
        """Returns the operation at the end of the chain that excludes this one from the region."""
        visited = {operation}
        while True:
            operation = self._whole_readers(operation, region)[0]
            is_end = not self._is_shardable(operation) or _is_scattered(operation)
            if is_end or operation in visited:
                return operation
            visited.add(operation)


class _Rewriting:
    """Program in which a plan is carried out.

    Attributes:
        slices: The slices of values, by the whole value.
        operations: The operations so far.
        index: The index of the replica.
    """

    def __init__(self, program: Program, plan: _Plan, settings: Settings) -> None:
        self.old, self.plan = program, plan
        self.num_replicas, self.axis_name = settings.num_replicas, settings.axis_name
        self.slices: dict[Atom, Value] = {
            program.inputs[i]: self.new_slice(program.inputs[i]) for i in plan.state
        }
        self.operations: list[Operation] = []
        self.index = Value(jax.core.ShapedArray((), jnp.int32))
        eqn = self.equation(lambda: jax.lax.axis_index(self.axis_name))
        self.operations.append(Operation("equation", eqn, [], [self.index]))

    def equation(self, fn: Callable[..., Any], *avals: Any) -> JaxprEqn:
        """Returns a new equation."""
        types = list(map(struct_of, avals))
        (eqn,) = trace(fn, types, self.num_replicas, self.axis_name).jaxpr.eqns
        return eqn

    def program(self) -> Program:
        """Returns the program."""
        for operation in self.old.operations:
            if operation in self.plan.region:
                self.share(operation)
            elif operation in self.plan.reduced:
                self.reduce(operation)
            else:
                self.operations.append(operation)
        outputs = list(self.old.outputs)
        for o in self.plan.state.values():
            outputs[o] = self.slices[outputs[o]]
        computed = {value for operation in self.operations for value in operation.outputs}
        makers = {value: op for op in self.old.operations for value in op.outputs}
        for value in dict.fromkeys(values_of(outputs)):
            if value in makers and value not in computed:
                self.add("gather", makers[value], [self.slices[value]], [value])
        inputs = [
            self.slices[v] if i in self.plan.state else v for i, v in enumerate(self.old.inputs)
        ]
        return Program(inputs, self.operations, outputs, self.plan.reasons)

    def new_slice(self, atom: Atom) -> Value:
        """Returns a new value for the slices of another one."""
        aval = atom.aval
        shape = list(aval.shape)
        axis = shard_axis(shape, self.num_replicas)
        assert axis is not None  # otherwise the value would not be in the region
        shape[axis] //= self.num_replicas
        return Value(jax.core.ShapedArray(tuple(shape), aval.dtype), Layout(axis=axis))

    def slice_of(self, atom: Atom, reader: Operation) -> Atom:
        """Returns the slices of a value, or a scalar itself."""
        if not atom.aval.shape:
            return atom
        if atom not in self.slices:
            self.slices[atom] = self.new_slice(atom)
            self.add("slice", reader, [atom, self.index], [self.slices[atom]])
        return self.slices[atom]

    def share(self, operation: Operation) -> None:
        """Adds an operation that computes this replica's slice of the result."""
        (whole,) = operation.outputs
        if operation.name == "broadcast_in_dim":  # XLA slices the scalar
            self.operations.append(operation)
            self.slice_of(whole, operation)
            return
        part = self.slices[whole] = self.new_slice(whole)
        if _is_scattered(operation):
            self.add("scatter", operation, operation.inputs, [part])
        else:
            inputs = [self.slice_of(atom, operation) for atom in operation.inputs]
            self.add("equation", operation, inputs, [part])

    def reduce(self, operation: Operation) -> None:
        """Adds a reduction of this replica's slice, and an all-reduce of the results."""
        (whole,) = operation.outputs
        part = Value(whole.aval)
        self.add("equation", operation, [self.slice_of(operation.inputs[0], operation)], [part])
        all_reduce = _ALL_REDUCES[op_of(operation.name)]
        eqn = self.equation(lambda x: all_reduce(x, self.axis_name), whole.aval)
        eqn = eqn.replace(source_info=operation.eqn.source_info)
        self.operations.append(Operation("equation", eqn, [part], [whole], operation.around))

    def add(self, kind: Kind, old: Operation, inputs: list[Atom], outputs: list[Value]) -> None:
        self.operations.append(Operation(kind, old.eqn, inputs, outputs, old.around))


def _is_scattered(operation: Operation) -> bool:
    """Whether it is a sum over replicas only, which can become a reduce-scatter."""
    is_sum = operation.name == "psum" and names_axis(operation.eqn)
    return is_sum and len(operation.eqn.params["axes"]) == 1


def _describe(operation: Operation) -> str:
    return f"{operation.name} at {line_within(operation.eqn, operation.around)}"
