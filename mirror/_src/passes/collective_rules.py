"""Collectives of a replica program with several replicas per device, and for a single replica.

A replica program names one replica axis. With several replicas per device, this axis is split in
two: the mapped axis of a `jax.vmap` over the replicas of a device and, with several devices, the
axis of a `jax.shard_map`. A reduction runs over the first axis, then over the second.

Collectives that give each replica a different part are built from an all-gather. `jax.vmap` has no
rule for some of them (groups, partial permutations), and an incorrect rule for `all_to_all` of
operands that are the same for all replicas (JAX 0.10 and 0.12).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from mirror._src.base.types import Array
from mirror._src.jaxprs.collective_eqns import (
    ALL_REDUCES,
    axes_of,
    kind_of,
    names_axis,
    reduce_locally,
)
from mirror._src.jaxprs.user_lines import user_line
from mirror._src.passes.evaluate import Rule, Rules, bind_with

_ALL_REDUCE = {"psum": jax.lax.psum, "pmax": jax.lax.pmax, "pmin": jax.lax.pmin}


def reduce_extreme(primitive: str, value: Array, axis: str) -> Array:
    """Reduces a maximum or minimum over devices: NaN if any value is NaN, and 0.0 instead of -0.0.

    XLA's all-reduce may or may not propagate a NaN, and may return either zero.
    """
    reduce = _ALL_REDUCE[primitive]
    if value.dtype == jnp.bool_:
        return reduce(value.astype(jnp.uint8), axis).astype(jnp.bool_)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return reduce(value, axis)
    is_nan = jax.lax.pmax(jnp.isnan(value).astype(jnp.uint8), axis) > 0
    extreme = jnp.where(is_nan, jnp.asarray(jnp.nan, value.dtype), reduce(value, axis))
    return _positive_zero(extreme)


def _positive_zero(value: Array) -> Array:
    return jnp.where(value == 0, jnp.zeros((), value.dtype), value)


def extreme_rules(axis: str) -> Rules:
    """Returns the rules for `Lowering` with one replica per device: maxima and minima of floats."""

    def find(eqn: JaxprEqn) -> Rule | None:
        avals: list[Any] = [atom.aval for atom in eqn.invars]
        dtypes = [aval.dtype for aval in avals]
        has_floats = any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
        has_bools = any(dtype == jnp.bool_ for dtype in dtypes)
        spans_all = axes_of(eqn) == (axis,) and eqn.params.get("axis_index_groups") is None
        return apply if spans_all and (has_floats or has_bools) else None

    def apply(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        return [reduce_extreme(eqn.primitive.name, value, axis) for value in arguments]

    return dict.fromkeys(("pmax", "pmin"), find)


def scatter_rules(axis: str, num_replicas: int) -> Rules:
    """Returns the rules for `Lowering` with one replica per device, over gloo: reduce-scatters.

    They become all-reduces, of which every replica keeps its part. The reduce-scatter of gloo
    returns wrong values for large arrays from time to time (jax#40830; JAX 0.10 to 0.12.0.1).
    """
    rule = DeviceCollectives(axis, num_replicas).rules["reduce_scatter"]
    return {"reduce_scatter": rule}


def _if_over_replicas(rule: Rule, eqn: JaxprEqn) -> Rule | None:
    return rule if names_axis(eqn) else None


def _call_sequentially(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    return bind_with(eqn, arguments, {**eqn.params, "vmap_method": "sequential"})


class VmapCollectives:
    """Collectives over all replicas, with several replicas per device.

    Args:
        vmap_axis: Name of the mapped axis of the replicas of a device.
        replicas_per_device: Size of that axis.
        device_axis: Name of the axis of the devices. `None` for a single device.
        num_devices: Size of that axis.
    """

    def __init__(
        self, vmap_axis: str, replicas_per_device: int, device_axis: str | None, num_devices: int
    ) -> None:
        self._vmap_axis, self._replicas_per_device = vmap_axis, replicas_per_device
        self._device_axis = device_axis
        self._num_replicas = replicas_per_device * num_devices

    @property
    def rules(self) -> Rules:
        """Rules for `Lowering`."""
        collectives: dict[str, Rule] = {
            "axis_index": lambda *_: [self._replica_id()],
            **dict.fromkeys(ALL_REDUCES, self._reduce),
            "all_gather": self._map_operands(self._all_gather),
            "reduce_scatter": self._map_operands(self._reduce_scatter),
            "all_to_all": self._map_operands(self._all_to_all),
            "ppermute": self._map_operands(self._ppermute),
            "pbroadcast": self._map_operands(lambda p, x: self._gather(x)[p["source"]]),
        }
        rules: dict[str, Callable[[JaxprEqn], Rule | None]] = {
            # Each replica calls its function separately, as with one replica per device.
            "pure_callback": lambda eqn: None if eqn.params["vmap_method"] else _call_sequentially
        }
        for name, rule in collectives.items():
            rules[name] = functools.partial(_if_over_replicas, rule)
        return rules

    def _map_operands(self, rule: Callable[[dict[str, Any], Array], Array]) -> Rule:
        def apply(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
            self._require_one_axis(eqn)
            return [rule(eqn.params, jnp.asarray(argument)) for argument in arguments]

        return apply

    def _require_one_axis(self, eqn: JaxprEqn, num_others: int = 0) -> None:
        if len(axes_of(eqn)) > 1 + num_others:
            raise NotImplementedError(
                f"the {kind_of(eqn.primitive.name)} at {user_line(eqn)} is over several axes, "
                f"{axes_of(eqn)}"
            )

    def _replica_id(self) -> Array:
        index = jax.lax.axis_index(self._vmap_axis)
        if self._device_axis is None:
            return index
        return jax.lax.axis_index(self._device_axis) * self._replicas_per_device + index

    def _gather(self, value: Array) -> Array:
        """Returns all replicas' values as `(num_replicas, *shape)`, in replica order."""
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            bits = self._gather(jax.random.key_data(value))
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
        values = jax.lax.all_gather(value, self._vmap_axis)
        if self._device_axis is None:
            return values
        return jax.lax.all_gather(values, self._device_axis, tiled=True)

    def _all_reduce(self, primitive: str, value: Array) -> Array:
        if primitive == "psum":
            total = jax.lax.psum(value, self._vmap_axis)
            return total if self._device_axis is None else jax.lax.psum(total, self._device_axis)
        if value.dtype == jnp.bool_:
            return self._all_reduce(primitive, value.astype(jnp.uint8)).astype(jnp.bool_)
        extreme = _positive_zero(_ALL_REDUCE[primitive](value, self._vmap_axis))
        if self._device_axis is None:
            return extreme
        return reduce_extreme(primitive, extreme, self._device_axis)

    def _reduce(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        primitive, groups = eqn.primitive.name, eqn.params.get("axis_index_groups")
        others = tuple(axis for axis in axes_of(eqn) if isinstance(axis, int))
        self._require_one_axis(eqn, len(others))
        values = list(map(jnp.asarray, arguments))
        if others:
            values = [reduce_locally(primitive, value, others) for value in values]
        if groups is None:
            return [self._all_reduce(primitive, value) for value in values]
        return [self._reduce_in_groups(primitive, value, groups) for value in values]

    def _reduce_in_groups(
        self, primitive: str, value: Array, groups: Sequence[Sequence[int]]
    ) -> Array:
        """Reduces within groups of replicas, which may differ in size."""
        values, me = self._gather(value), self._replica_id()
        sizes = sorted({len(group) for group in groups})
        members = self._group_of_each(groups)
        results = []
        for size in sizes:
            # Shapes are static, so all replicas reduce groups of every size. A replica in a group
            # of another size reduces copies of its own value, and discards the result.
            table = [g if len(g) == size else [i] * size for i, g in enumerate(members)]
            results.append(reduce_locally(primitive, values[jnp.asarray(table)[me]], (0,)))
        which = jnp.asarray([sizes.index(len(group)) for group in members])[me]
        return jax.lax.select_n(jnp.broadcast_to(which, value.shape), *results)

    def _group_of_each(self, groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [next(g for g in groups if i in g) for i in range(self._num_replicas)]

    def _gather_in_group(self, value: Array, groups: Sequence[Sequence[int]] | None) -> Array:
        """Returns the values of this replica's group as `(size, *shape)`, in the group's order."""
        values = self._gather(value)
        if groups is None:
            return values
        return values[jnp.asarray(self._group_of_each(groups))[self._replica_id()]]

    def _index_in_group(self, groups: Sequence[Sequence[int]] | None) -> Array:
        if groups is None:
            return self._replica_id()
        indices = {replica: index for group in groups for index, replica in enumerate(group)}
        return jnp.asarray([indices[i] for i in range(self._num_replicas)])[self._replica_id()]

    def _all_gather(self, params: dict[str, Any], value: Array) -> Array:
        axis = params["all_gather_dimension"]
        values = self._gather_in_group(value, params.get("axis_index_groups"))
        moved = jnp.moveaxis(values, 0, axis)
        if not params["tiled"]:
            return moved
        shape = list(value.shape)
        shape[axis] *= values.shape[0]
        return moved.reshape(shape)

    def _reduce_scatter(self, params: dict[str, Any], value: Array) -> Array:
        groups, axis = params.get("axis_index_groups"), params["scatter_dimension"]
        if groups is None:
            total, count = self._all_reduce("psum", value), self._num_replicas
        else:
            total, count = self._gather_in_group(value, groups).sum(0), len(groups[0])
        size = value.shape[axis] // count
        start = self._index_in_group(groups) * size
        part = jax.lax.dynamic_slice_in_dim(total, start, size, axis)
        return part if params["tiled"] else part.squeeze(axis)

    def _all_to_all(self, params: dict[str, Any], value: Array) -> Array:
        groups = params.get("axis_index_groups")
        split, joined = params["split_axis"], params["concat_axis"]
        values = self._gather_in_group(value, groups)
        size = value.shape[split] // values.shape[0]
        start = self._index_in_group(groups) * size
        received = jax.lax.dynamic_slice_in_dim(values, start, size, split + 1)
        return jnp.concatenate(list(received), joined)

    def _ppermute(self, params: dict[str, Any], value: Array) -> Array:
        """Sends values along a permutation. A replica that receives nothing gets zeros."""
        source = {target: origin for origin, target in params["perm"]}
        table = jnp.asarray([source.get(i, -1) for i in range(self._num_replicas)])
        origin = table[self._replica_id()]
        received = self._gather(value)[origin]
        if len(source) == self._num_replicas:
            return received
        return jnp.where(origin >= 0, received, jnp.zeros_like(received))


class SingleReplicaCollectives(VmapCollectives):
    """Collectives of a single replica, which need no axis."""

    def __init__(self) -> None:
        super().__init__("", 1, None, 1)

    def _replica_id(self) -> Array:
        return jnp.zeros((), jnp.int32)

    def _gather(self, value: Array) -> Array:
        return value[None]

    def _all_reduce(self, primitive: str, value: Array) -> Array:
        return value if primitive == "psum" else _positive_zero(value)


class DeviceCollectives(VmapCollectives):
    """Collectives over all replicas, with one replica per device."""

    def __init__(self, device_axis: str, num_devices: int) -> None:
        super().__init__("", 1, device_axis, num_devices)
        self._axis = device_axis

    def _replica_id(self) -> Array:
        return jax.lax.axis_index(self._axis)

    def _gather(self, value: Array) -> Array:
        return jax.lax.all_gather(value, self._axis)

    def _all_reduce(self, primitive: str, value: Array) -> Array:
        return _ALL_REDUCE[primitive](value, self._axis)
