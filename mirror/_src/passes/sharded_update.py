"""Evaluation, on one replica, of a step with a sharded weight update."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.jaxprs.atoms import Atom, Constant, Value
from mirror._src.jaxprs.flat import Operation, Packing, in_order
from mirror._src.jaxprs.primitives import op_of
from mirror._src.passes.collective_rules import reduce_extreme
from mirror._src.passes.evaluate import Lowering
from mirror._src.passes.packing import join, split
from mirror._src.passes.shards import Shards, is_scattered, packs_of, shard_axis


class ShardedUpdate:
    """A step in which each replica computes its slices of the weight update.

    Args:
        shards: Plan for the sharded update.
        axis_name: Name of the replica axis.
        num_replicas: Number of replicas.
        pack_bytes: Arrays of at most this many bytes are packed.
    """

    def __init__(self, shards: Shards, axis_name: str, num_replicas: int, pack_bytes: int) -> None:
        self.shards = shards
        self.axis_name = axis_name
        self.num_replicas = num_replicas
        self.packing = Packing(pack_bytes)

    def evaluate(self, lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
        """Returns the outputs. Sharded inputs and outputs are slices."""
        return _Run(self, lowering).outputs(arguments)

    def key(self, operation: Operation) -> Hashable:
        """Returns a key that operations in one buffer share; `None` if it cannot be packed."""
        if operation in self.shards.region:
            (value,) = operation.outputs
            is_small = value.num_bytes <= self.packing.limit
            return ("scatter", value.aval.dtype) if is_small and is_scattered(operation) else None
        if operation in self.shards.reduced:
            is_sum = operation.name == "reduce_sum" and self.packing.limit > 0
            return ("psum", operation.outputs[0].aval.dtype) if is_sum else None
        return self.packing.key_of(operation)


class _Run:
    """One evaluation.

    Attributes:
        whole: Values that are known as a whole.
        part: Values of which this replica's slice is known.
        me: Index of this replica.
    """

    def __init__(self, update: ShardedUpdate, lowering: Lowering) -> None:
        self.update, self.shards, self.lowering = update, update.shards, lowering
        self.whole: dict[Atom, Any] = {}
        self.part: dict[Atom, Any] = {}
        self.me = jax.lax.axis_index(update.axis_name)

    def outputs(self, arguments: Sequence[Any]) -> list[Any]:
        flat = self.shards.flat
        for i, (value, argument) in enumerate(zip(flat.inputs, arguments, strict=True)):
            (self.part if i in self.shards.inputs else self.whole)[value] = argument
        for pack in in_order(flat.operations, self.update.key):
            self.evaluate(pack)
        for values in packs_of(self.shards.gathered, self.update.packing.limit):
            self.gather(values)
        return [
            self.slice_of(atom) if j in self.shards.outputs else self.read(atom)
            for j, atom in enumerate(flat.outputs)
        ]

    def read(self, atom: Atom) -> Any:
        """Returns a whole value."""
        if isinstance(atom, Constant):
            return self.lowering.constant(atom.value)
        return self.whole[atom]

    def slice_of(self, atom: Atom) -> Any:
        """Returns this replica's slice of a value, or a scalar itself."""
        if atom not in self.part:
            value = self.read(atom)
            shape = np.shape(value)
            if not shape:
                return value
            axis = self.axis(shape)
            size = shape[axis] // self.update.num_replicas
            self.part[atom] = jax.lax.dynamic_slice_in_dim(value, self.me * size, size, axis)
        return self.part[atom]

    def axis(self, shape: Sequence[int]) -> int:
        """Returns the axis along which a value of the update is sharded."""
        axis = shard_axis(shape, self.update.num_replicas)
        assert axis is not None  # otherwise the value would not be in the region
        return axis

    def evaluate(self, pack: Sequence[Operation]) -> None:
        first = pack[0]
        if first in self.shards.region:
            if is_scattered(first):
                self.scatter(pack)
            else:
                self.part[first.outputs[0]] = self.elementwise(first)
            return
        if first in self.shards.reduced and (op := op_of(first.name)) != "sum":
            (extreme,) = self.lowering.evaluate(first, [self.slice_of(first.inputs[0])])
            self.whole[first.outputs[0]] = reduce_extreme(f"p{op}", extreme, self.update.axis_name)
        elif any(operation in self.shards.reduced for operation in pack):
            self.sum_slices(pack)
        elif len(pack) == 1:
            outputs = self.lowering.evaluate(first, list(map(self.read, first.inputs)))
            self.whole.update(zip(first.outputs, outputs, strict=True))
        else:
            totals = self.lowering.packed(pack, [self.read(op.inputs[0]) for op in pack])
            self.whole.update((op.outputs[0], x) for op, x in zip(pack, totals, strict=True))

    def sum_slices(self, pack: Sequence[Operation]) -> None:
        """Sums over this replica's slices, then over the replicas, packed with other sums."""
        sums = []
        for operation in pack:
            if operation in self.shards.reduced:
                sums += self.lowering.evaluate(operation, [self.slice_of(operation.inputs[0])])
            else:
                sums.append(self.read(operation.inputs[0]))
        flat = join(sums) if len(sums) > 1 else sums[0]
        total = jax.lax.psum(flat, self.update.axis_name)
        totals = split(total, sums) if len(sums) > 1 else [total]
        self.whole.update((op.outputs[0], x) for op, x in zip(pack, totals, strict=True))

    def scatter(self, pack: Sequence[Operation]) -> None:
        """Sums over the replicas. Each replica gets its slice of the result."""
        values = [self.read(operation.inputs[0]) for operation in pack]
        axes = [self.axis(value.shape) for value in values]
        n, name = self.update.num_replicas, self.update.axis_name
        if len(pack) == 1:
            (value,), (axis,) = values, axes
            self.part[pack[0].outputs[0]] = jax.lax.psum_scatter(
                value, name, scatter_dimension=axis, tiled=True
            )
            return
        values = list(jax.lax.optimization_barrier(values))
        rows = [jnp.moveaxis(value, axis, 0) for value, axis in zip(values, axes, strict=True)]
        flat = jax.lax.concatenate([row.reshape(n, row.size // n) for row in rows], 1)
        received = jax.lax.psum_scatter(flat, name, scatter_dimension=0)
        like = [
            jax.ShapeDtypeStruct((row.shape[0] // n, *row.shape[1:]), row.dtype) for row in rows
        ]
        slices = jax.lax.optimization_barrier(split(received, like))
        for operation, part, axis in zip(pack, slices, axes, strict=True):
            self.part[operation.outputs[0]] = jnp.moveaxis(part, 0, axis)

    def gather(self, pack: Sequence[Value]) -> None:
        """Gathers values of which each replica has computed a slice."""
        n, name = self.update.num_replicas, self.update.axis_name
        slices = [self.part[atom] for atom in pack]
        axes = [self.axis(value.aval.shape) for value in pack]
        if len(pack) == 1:
            (part,), (axis,) = slices, axes
            self.whole[pack[0]] = jax.lax.all_gather(part, name, axis=axis, tiled=True)
            return
        slices = list(jax.lax.optimization_barrier(slices))
        rows = [jnp.moveaxis(part, axis, 0) for part, axis in zip(slices, axes, strict=True)]
        gathered = jax.lax.all_gather(join(rows), name)
        start, blocks = 0, []
        for row in rows:
            block = jax.lax.slice_in_dim(gathered, start, start + row.size, axis=1)
            blocks.append(block.reshape(n * row.shape[0], *row.shape[1:]))
            start += row.size
        blocks = list(jax.lax.optimization_barrier(blocks))
        for atom, whole, axis in zip(pack, blocks, axes, strict=True):
            self.whole[atom] = jnp.moveaxis(whole, 0, axis)

    def elementwise(self, operation: Operation) -> Any:
        """Returns this replica's slice of the result of an elementwise operation."""
        operands = list(map(self.slice_of, operation.inputs))
        if operation.name != "broadcast_in_dim":
            return self.lowering.evaluate(operation, operands)[0]
        shape = list(operation.outputs[0].aval.shape)
        axis = self.axis(shape)
        shape[axis] //= self.update.num_replicas
        return jax.lax.broadcast(operands[0], shape)
