"""Evaluation of a step whose weight update is sharded, for one replica."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.executors.collectives import keeps_nan
from mirror._src.program.evaluate import Lowering
from mirror._src.program.flat import Atom, Constant, Operation, Packing, Value, in_order
from mirror._src.program.shards import Shards, is_scattered, packs_of, shard_axis
from mirror._src.values.packing import join, split

_EXTREMES = {
    "reduce_max": "pmax",
    "reduce_min": "pmin",
    "reduce_and": "pmin",
    "reduce_or": "pmax",
}


class ShardedUpdate:
    """A step of which each replica computes the update for its slices alone.

    Args:
        shards: What is sharded.
        axis_name: The name of the replica axis.
        num_replicas: The number of replicas.
        pack_bytes: Arrays of at most this many bytes travel together.
    """

    def __init__(self, shards: Shards, axis_name: str, num_replicas: int, pack_bytes: int) -> None:
        self.shards = shards
        self.axis_name = axis_name
        self.num_replicas = num_replicas
        self.packing = Packing(pack_bytes)

    def evaluate(self, lowering: Lowering, arguments: Sequence[Any]) -> list[Any]:
        """Returns the outputs; those that are sharded as slices, as they come in."""
        return _Run(self, lowering).outputs(arguments)

    def key(self, each: Operation) -> Hashable:
        """What collectives of one buffer have in common; `None` where an operation is alone."""
        if each in self.shards.region:
            (value,) = each.outputs
            small = value.num_bytes <= self.packing.limit
            return ("scatter", value.aval.dtype) if small and is_scattered(each) else None
        if each in self.shards.reduced:
            is_sum = each.name == "reduce_sum" and self.packing.limit > 0
            return ("psum", each.outputs[0].aval.dtype) if is_sum else None
        return self.packing.key_of(each)


class _Run:
    """One evaluation: of each value the whole, the slice, or both."""

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
            self.carry_out(pack)
        kept = self.shards.outputs
        for values in packs_of(self.shards.gathered, self.update.packing.limit):
            self.gather(values)
        return [
            self.slice_of(atom) if j in kept else self.read(atom)
            for j, atom in enumerate(flat.outputs)
        ]

    def read(self, atom: Atom) -> Any:
        """A value, whole."""
        return self.lowering.held(atom.value) if isinstance(atom, Constant) else self.whole[atom]

    def slice_of(self, atom: Atom) -> Any:
        """This replica's slice of a value; of a scalar the scalar."""
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
        """The axis that a value of the update is sharded along."""
        axis = shard_axis(shape, self.update.num_replicas)
        assert axis is not None  # or it would not be in the region
        return axis

    def carry_out(self, pack: Sequence[Operation]) -> None:
        first = pack[0]
        if first in self.shards.region:
            if is_scattered(first):
                self.scatter(pack)
            else:
                self.part[first.outputs[0]] = self.elementwise(first)
            return
        if first.name in _EXTREMES and first in self.shards.reduced:
            (mine,) = self.lowering.operation(first, [self.slice_of(first.inputs[0])])
            kind = _EXTREMES[first.name]
            self.whole[first.outputs[0]] = keeps_nan(kind, mine, self.update.axis_name)
            return
        self.all_together(pack)

    def all_together(self, pack: Sequence[Operation]) -> None:
        """Operations on whole values, and sums of slices, which are summed over the replicas."""
        if any(each in self.shards.reduced for each in pack):
            self.sum_up(pack)
        elif len(pack) == 1:
            (each,) = pack
            outputs = self.lowering.operation(each, list(map(self.read, each.inputs)))
            self.whole.update(zip(each.outputs, outputs, strict=True))
        else:
            totals = self.lowering.packed(pack, [self.read(each.inputs[0]) for each in pack])
            self.whole.update((p.outputs[0], x) for p, x in zip(pack, totals, strict=True))

    def sum_up(self, pack: Sequence[Operation]) -> None:
        mine = []
        for each in pack:
            if each in self.shards.reduced:
                mine += self.lowering.operation(each, [self.slice_of(each.inputs[0])])
            else:
                mine.append(self.read(each.inputs[0]))
        flat = join(mine) if len(mine) > 1 else mine[0]
        total = jax.lax.psum(flat, self.update.axis_name)
        totals = split(total, mine) if len(mine) > 1 else [total]
        self.whole.update((p.outputs[0], x) for p, x in zip(pack, totals, strict=True))

    def scatter(self, pack: Sequence[Operation]) -> None:
        """Sums over the replicas, of which each gets its slice."""
        values = [self.read(each.inputs[0]) for each in pack]
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
        mine = jax.lax.psum_scatter(flat, name, scatter_dimension=0)
        like = [
            jax.ShapeDtypeStruct((row.shape[0] // n, *row.shape[1:]), row.dtype) for row in rows
        ]
        slices = jax.lax.optimization_barrier(split(mine, like))
        for each, part, axis in zip(pack, slices, axes, strict=True):
            self.part[each.outputs[0]] = jnp.moveaxis(part, 0, axis)

    def gather(self, pack: Sequence[Value]) -> None:
        """The whole of values of which each replica has computed its slice."""
        n, name = self.update.num_replicas, self.update.axis_name
        slices = [self.part[atom] for atom in pack]
        axes = [self.axis(value.aval.shape) for value in pack]
        if len(pack) == 1:
            (mine,), (axis,) = slices, axes
            self.whole[pack[0]] = jax.lax.all_gather(mine, name, axis=axis, tiled=True)
            return
        slices = list(jax.lax.optimization_barrier(slices))
        rows = [jnp.moveaxis(part, axis, 0) for part, axis in zip(slices, axes, strict=True)]
        every = jax.lax.all_gather(join(rows), name)
        start, found = 0, []
        for row in rows:
            block = jax.lax.slice_in_dim(every, start, start + row.size, axis=1)
            found.append(block.reshape(n * row.shape[0], *row.shape[1:]))
            start += row.size
        found = list(jax.lax.optimization_barrier(found))
        for atom, whole, axis in zip(pack, found, axes, strict=True):
            self.whole[atom] = jnp.moveaxis(whole, 0, axis)

    def elementwise(self, each: Operation) -> Any:
        operands = list(map(self.slice_of, each.inputs))
        if each.name != "broadcast_in_dim":
            return self.lowering.operation(each, operands)[0]
        shape = list(each.outputs[0].aval.shape)
        axis = self.axis(shape)
        shape[axis] //= self.update.num_replicas
        return jax.lax.broadcast(operands[0], shape)
