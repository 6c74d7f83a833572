"""The pass `shard`: replicas share the update of the weights, and store state in slices.

After the all-reduce of the gradients, every replica computes the same update (arXiv 2004.13336). If
the update is elementwise, each replica can compute a slice of it instead: the all-reduce becomes a
reduce-scatter, state that only the update reads is stored in slices, and the new weights are
gathered. With `Settings.min_bytes`, large weights are stored in slices, too, and gathered for each
operation that needs them whole (arXiv 1910.02054, stage 3). This module decides, `slices` rewrites.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.errors import describe
from mirror._src.devices.replicas import shard_axis
from mirror._src.jaxprs.collective_eqns import (
    contains_collective,
    contains_replica_source,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import called, jaxpr_of, line_within
from mirror._src.jaxprs.primitives import ELEMENTWISE
from mirror._src.passes.program import (
    Atom,
    Opens,
    Operation,
    Program,
    Settings,
    Value,
    makers_of,
    readers_of,
    require_layouts,
    values_of,
)
from mirror._src.passes.slices import (
    Plan,
    Slicing,
    is_large,
    is_scattered,
    opens_slices,
    reduces_slices,
)


def opens(_: Sequence[ClosedJaxpr | Jaxpr], settings: Settings) -> Opens:
    """Returns which calls must be inlined: those that compute what replicas could share."""
    if settings.state is None:
        return lambda *_: False

    reads_slices = opens_slices(settings)

    def may_share(eqn: JaxprEqn, inputs: Sequence[Atom]) -> bool:
        inner = called(eqn)
        assert inner is not None
        if contains_collective(jaxpr_of(inner)) or reads_slices(eqn, inputs):
            return True
        is_mirrored = not any(value.layout.is_own for value in values_of(inputs))
        return is_mirrored and not contains_replica_source(jaxpr_of(inner))

    return may_share


def shard(program: Program, settings: Settings) -> Program:
    """Stores state in slices where that changes no result."""
    state = settings.state
    if state is None:
        return program
    if settings.kept_bytes is None:
        held = (value.num_bytes for value in program.inputs if is_large(value, settings))
        settings = settings._replace(kept_bytes=max(held, default=0))
    search = _Search(program, settings)
    plan = search.plan(search.region(), state)
    sharded = Slicing(program, plan, settings).program()
    require_layouts(sharded, settings.num_replicas, set(program.operations))
    return sharded


class _Search:
    """Search for what replicas can share in one program.

    Attributes:
        maker: The operation that computes each value.
        readers: The operations that read each value.
    """

    def __init__(self, program: Program, settings: Settings) -> None:
        self.program = program
        self.settings = settings
        self.num_replicas = settings.num_replicas
        self.maker = makers_of(program)
        self.readers = readers_of(program)

    def _axis(self, atom: Atom) -> int | None:
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
        if output.layout.is_own or self._axis(output) is None:
            return False
        if is_scattered(operation):
            # A reduce-scatter rounds half precision in another order. Integers are not gradients.
            dtype = output.aval.dtype
            is_wide_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4
            return is_wide_float and spans_whole_axis(operation.eqn)
        if operation.name == "broadcast_in_dim":
            return operation.inputs[0].aval.shape == ()
        shapes = {atom.aval.shape for atom in operation.inputs}
        # A bitcast of a scalar may have a shape.
        return operation.name in ELEMENTWISE and shapes | {()} == {(), tuple(output.aval.shape)}

    def _whole_readers(self, operation: Operation, region: set[Operation]) -> list[Operation]:
        """Returns the readers that need a result of the operation whole."""
        readers = (reader for value in operation.outputs for reader in self.readers[value])
        return [reader for reader in readers if not self._reads_slices(reader, region)]

    def _reads_slices(self, operation: Operation, region: set[Operation]) -> bool:
        is_sharded = operation in region and not is_scattered(operation)
        return is_sharded or reduces_slices(operation, self.num_replicas)

    def plan(self, region: set[Operation], pairs: Sequence[tuple[int, int]]) -> Plan:
        """Returns the plan: the parts of the region that are connected with sharded state."""
        reasons = {i: self._reason(i, o, region) for i, o in pairs}
        state = {i: o for i, o in pairs if not reasons[i]}
        inputs, outputs = self.program.inputs, self.program.outputs
        roots = [reader for i in state for reader in self.readers[inputs[i]]]
        roots += [self.maker[atom] for o in state.values() if (atom := outputs[o]) in self.maker]
        useful = self._connected([root for root in roots if root in region], region)
        only_read = [i for i, value in enumerate(inputs) if is_large(value, self.settings)]
        found = {i: self._axis(inputs[i]) for i in [*state, *only_read] if not reasons.get(i)}
        axes = {i: axis for i, axis in found.items() if axis is not None}
        new = {o: axes[i] for i, o in state.items()}
        return Plan(useful, axes, new, {i: why for i, why in reasons.items() if why})

    def _connected(self, roots: Sequence[Operation], region: set[Operation]) -> set[Operation]:
        """Returns the operations of the region that are connected with the roots.

        The other operations have no state to shard: sharding them would only add a gather.
        """
        reached, waiting = set(roots), list(roots)
        while waiting:
            operation = waiting.pop()
            neighbors = {reader for value in operation.outputs for reader in self.readers[value]}
            if not is_scattered(operation):
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
        if self._axis(value) is None:
            return f"no axis of {describe(aval)} is divisible by {self.num_replicas}"
        if not isinstance(new, Value):
            return "its new value is a constant"
        if (new.aval.shape, new.aval.dtype) != (aval.shape, aval.dtype):
            return "its new value has a different shape or dtype"
        if is_large(value, self.settings) and not new.layout.is_own:
            return ""
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
            is_end = not self._is_shardable(operation) or is_scattered(operation)
            if is_end or operation in visited:
                return operation
            visited.add(operation)


def _describe(operation: Operation) -> str:
    return f"{operation.name} at {line_within(operation.eqn, operation.around)}"
