"""Sharded weight update: finds the operations and state of a step that replicas can share.

After the all-reduce of the gradients, every replica computes the same update (arXiv 2004.13336). If
the update is elementwise, each replica can compute a slice of it instead: the all-reduce becomes a
reduce-scatter, state that only the update reads is stored in slices, and the new weights are
gathered. A value is sharded along its first axis that the number of replicas divides.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.base.errors import describe
from mirror._src.jaxprs.atoms import Atom, Value, values_of
from mirror._src.jaxprs.collective_eqns import (
    MIRRORING,
    contains_collective,
    contains_replica_source,
    is_collective,
    is_replica_source,
    names_axis,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import called, is_ref, jaxpr_of, with_inner
from mirror._src.jaxprs.flat import FlatProgram, Operation, flatten
from mirror._src.jaxprs.primitives import ELEMENTWISE, REDUCTION, op_of
from mirror._src.jaxprs.user_lines import line_within


class Shards(NamedTuple):
    """Plan for the sharded update of a step.

    Attributes:
        flat: The program.
        region: Operations that each replica computes for its own slice.
        reduced: Reductions of a sharded value to a scalar. Each replica reduces its slice first.
        inputs: Sharded axis of each sharded input, by position.
        outputs: Sharded axis of each sharded output, by position.
        reasons: For state that is not sharded, the reason, by position of the input.
    """

    flat: FlatProgram
    region: frozenset[Operation]
    reduced: frozenset[Operation]
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    reasons: Mapping[int, str]

    @property
    def gathered(self) -> list[Value]:
        """The outputs that are computed in slices and returned whole."""
        sliced = {value for operation in self.region for value in operation.outputs}
        outputs = (atom for j, atom in enumerate(self.flat.outputs) if j not in self.outputs)
        return list(dict.fromkeys(atom for atom in values_of(outputs) if atom in sliced))

    @property
    def scattered(self) -> list[Operation]:
        """The all-reduces that become reduce-scatters."""
        return [op for op in self.flat.operations if op in self.region and is_scattered(op)]


def packs_of(values: Iterable[Value], limit: int) -> list[list[Value]]:
    """Groups values of at most `limit` bytes by dtype, to gather each group together."""
    packs: dict[Any, list[Value]] = {}
    for value in values:
        key = value.aval.dtype if value.num_bytes <= limit else value
        packs.setdefault(key, []).append(value)
    return list(packs.values())


def shard_axis(shape: Sequence[int], num_replicas: int) -> int | None:
    """Returns the axis to shard an array along; `None` if no axis is divisible."""
    return next((d for d, k in enumerate(shape) if k and k % num_replicas == 0), None)


def find_shards(
    programs: Sequence[ClosedJaxpr],
    pairs: Iterable[tuple[int, int]],
    per_replica: Sequence[bool],
    num_replicas: int,
) -> Shards:
    """Finds what can be sharded without changing results.

    Args:
        programs: The proved program and the programs after it, as for `flatten`.
        pairs: For all state, the position of its input and of the output with its new value.
        per_replica: For each input, whether replicas may hold different values.
        num_replicas: Number of replicas.
    """
    search = _Search(programs, per_replica, num_replicas)
    region = search.region()
    return search.shards(region, list(pairs))


class _Search:
    """Search for shardable operations in one program.

    Attributes:
        differs: The values that replicas may differ in.
        maker: The operation that computes each value.
        readers: The operations that read each value.
    """

    def __init__(
        self, programs: Sequence[ClosedJaxpr], per_replica: Sequence[bool], num_replicas: int
    ) -> None:
        self.num_replicas = num_replicas
        inputs = [Value(var.aval) for var in programs[0].jaxpr.invars]
        pairs = zip(inputs, per_replica, strict=True)
        self.differs = {value for value, differs in pairs if differs}
        self.flat = flatten(programs, self._opens, self._mark, inputs)
        self.maker = {v: op for op in self.flat.operations for v in op.outputs}
        self.readers = defaultdict[Value, list[Operation]](list)
        for operation in self.flat.operations:
            for value in values_of(operation.inputs):
                self.readers[value].append(operation)

    def _opens(self, eqn: JaxprEqn, inputs: Sequence[Atom]) -> bool:
        """Opens calls that contain collectives or compute with mirrored values only."""
        inner = called(eqn)
        assert inner is not None
        if contains_collective(jaxpr_of(inner)):
            return True
        is_mirrored = not any(atom in self.differs for atom in inputs)
        return is_mirrored and not contains_replica_source(jaxpr_of(inner))

    def _mark(self, operation: Operation) -> None:
        """Records which results may be per-replica. Errs on the side of per-replica."""
        if operation.is_barrier:
            pairs = zip(operation.inputs, operation.outputs, strict=True)
            self.differs |= {output for atom, output in pairs if atom in self.differs}
        elif self._is_per_replica(operation):
            self.differs |= set(operation.outputs)

    def _is_per_replica(self, operation: Operation) -> bool:
        eqn = operation.eqn
        if eqn.primitive.name in MIRRORING and is_collective(eqn):
            return not spans_whole_axis(eqn)
        if any(atom in self.differs for atom in operation.inputs):
            return True
        if any(map(is_ref, eqn.invars)):
            return True  # a `Ref`: a per-replica value may have been written to it
        return any(map(is_replica_source, with_inner(eqn)))

    def axis(self, atom: Atom) -> int | None:
        """Returns the axis that a value can be sharded along."""
        return shard_axis(_shape(atom), self.num_replicas)

    def region(self) -> set[Operation]:
        """Returns the largest set of operations whose results no other operation needs whole."""
        region = {op for op in self.flat.operations if self._is_shardable(op)}
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
        if operation.is_barrier or len(operation.outputs) != 1 or operation.has_effects:
            return False
        (output,) = operation.outputs
        if output in self.differs or self.axis(output) is None:
            return False
        if is_scattered(operation):
            # A reduce-scatter rounds half precision in another order. Integers are not gradients.
            dtype = output.aval.dtype
            is_wide_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4
            return is_wide_float and spans_whole_axis(operation.eqn)
        if operation.name == "broadcast_in_dim":
            return _shape(operation.inputs[0]) == ()
        shapes = {_shape(atom) for atom in operation.inputs}
        return operation.name in ELEMENTWISE and shapes <= {(), tuple(output.aval.shape)}

    def _whole_readers(self, operation: Operation, region: set[Operation]) -> list[Operation]:
        """Returns the readers that need a result of the operation whole."""
        readers = (reader for value in operation.outputs for reader in self.readers[value])
        return [reader for reader in readers if not self._reads_slices(reader, region)]

    def _reads_slices(self, operation: Operation, region: set[Operation]) -> bool:
        is_sharded = operation in region and not is_scattered(operation)
        return is_sharded or self._reduces_slices(operation)

    def _reduces_slices(self, operation: Operation) -> bool:
        """Whether the operation reduces a value to a scalar and can reduce slices of it first."""
        if operation.name not in REDUCTION or op_of(operation.name) not in ("sum", "max", "min"):
            return False
        if operation.outputs[0] in self.differs:
            return False
        aval: Any = operation.eqn.invars[0].aval
        if not 0 < len(aval.shape) == len(operation.eqn.params["axes"]):
            return False
        is_exact = bool(aval.dtype == jnp.bool_ or aval.dtype.itemsize >= 4)
        return is_exact and self.axis(operation.inputs[0]) is not None

    def shards(self, region: set[Operation], pairs: list[tuple[int, int]]) -> Shards:
        """Returns the plan: the parts of the region that are connected with sharded state."""
        reasons = {i: self._reason(i, o, region) for i, o in pairs}
        state = {i: o for i, o in pairs if not reasons[i]}
        inputs, outputs = self.flat.inputs, self.flat.outputs
        roots = [reader for i in state for reader in self.readers[inputs[i]]]
        roots += [self.maker[outputs[o]] for o in state.values()]  # type: ignore[index]
        useful = self._connected([root for root in roots if root in region], region)
        sliced = {value for operation in useful for value in operation.outputs}
        sliced |= {inputs[i] for i in state}
        reduced = {
            operation
            for operation in self.flat.operations
            if self._reduces_slices(operation) and operation.inputs[0] in sliced
        }
        axes = {i: self.axis(inputs[i]) for i in state}
        return Shards(
            self.flat,
            frozenset(useful),
            frozenset(reduced),
            {i: axis for i, axis in axes.items() if axis is not None},
            {state[i]: axis for i, axis in axes.items() if axis is not None},
            {i: reason for i, reason in reasons.items() if reason},
        )

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
        value, new = self.flat.inputs[i], self.flat.outputs[o]
        aval = value.aval
        if not aval.shape:
            return "a scalar"
        if self.axis(value) is None:
            return f"no axis of {describe(aval)} is divisible by {self.num_replicas}"
        if not isinstance(new, Value):
            return "its new value is a constant"
        if (new.aval.shape, new.aval.dtype) != (aval.shape, aval.dtype):
            return "its new value has a different shape or dtype"
        if any(atom is value for atom in self.flat.outputs):
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


def is_scattered(operation: Operation) -> bool:
    """Whether it is a sum over replicas only, which can become a reduce-scatter."""
    is_sum = operation.name == "psum" and names_axis(operation.eqn)
    return is_sum and len(operation.eqn.params["axes"]) == 1


def _shape(atom: Atom) -> tuple[int, ...]:
    return tuple(atom.aval.shape) if isinstance(atom, Value) else tuple(np.shape(atom.value))


def _describe(operation: Operation) -> str:
    return f"{operation.name} at {line_within(operation.eqn, operation.around)}"
