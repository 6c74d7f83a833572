"""Collectives of a replica program where several replicas are the rows of one `jax.vmap`.

A program names one replica axis. Its replicas are rows on each device, `jax.vmap`, and, where
there are several devices, the devices of a `jax.shard_map`. A collective over the replica axis is
one over the rows and then one over the devices. Those that hand every replica another part are
made of an all-gather: `jax.vmap` has no rule for some of them (groups, partial permutations), and
a wrong one for operands that are the same in all rows (`all_to_all`, JAX 0.10 and 0.12).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from mirror._src.program.collective_eqns import axes_of, in_word, names_axis
from mirror._src.program.evaluate import Rule, Rules, bind_with
from mirror._src.program.user_lines import user_line
from mirror._src.utils.types import Array

_LOCAL: dict[str, Callable[..., Array]] = {
    "psum": jax.lax.reduce_sum,
    "pmax": jax.lax.reduce_max,
    "pmin": jax.lax.reduce_min,
}
_OVER = {"psum": jax.lax.psum, "pmax": jax.lax.pmax, "pmin": jax.lax.pmin}


def keeps_nan(kind: str, value: Array, axis: str) -> Array:
    """An extreme over an axis of devices: NaN where one value is, and 0.0 rather than -0.0.

    XLA's own all-reduce of extremes loses a NaN on one device, or does not, and takes either zero.
    """
    reduce = _OVER[kind]
    if value.dtype == jnp.bool_:
        return reduce(value.astype(jnp.uint8), axis).astype(jnp.bool_)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return reduce(value, axis)
    is_nan = jax.lax.pmax(jnp.isnan(value).astype(jnp.uint8), axis) > 0
    found = jnp.where(is_nan, jnp.asarray(jnp.nan, value.dtype), reduce(value, axis))
    return _one_zero(found)


def _one_zero(value: Array) -> Array:
    return jnp.where(value == 0, jnp.zeros((), value.dtype), value)


def extremes(axis: str) -> Rules:
    """The rules for `Lowering` where each replica has a device: extremes of floats."""

    def find(eqn: JaxprEqn) -> Rule | None:
        avals: list[Any] = [atom.aval for atom in eqn.invars]
        dtypes = [aval.dtype for aval in avals]
        floats = any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
        flags = any(dtype == jnp.bool_ for dtype in dtypes)
        whole = axes_of(eqn) == (axis,) and eqn.params.get("axis_index_groups") is None
        return apply if whole and (floats or flags) else None

    def apply(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        return [keeps_nan(eqn.primitive.name, value, axis) for value in arguments]

    return dict.fromkeys(("pmax", "pmin"), find)


def _if_over_replicas(rule: Rule, eqn: JaxprEqn) -> Rule | None:
    return rule if names_axis(eqn) else None


def _by_row(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
    return bind_with(eqn, arguments, {**eqn.params, "vmap_method": "sequential"})


class RowCollectives:
    """The collectives over all replicas, which are rows of devices.

    Args:
        rows: Name of the axis of the rows of a device.
        num_rows: How many rows each device has.
        devices: Name of the axis of the devices, `None` for a single one.
        num_devices: How many devices there are.
    """

    def __init__(self, rows: str, num_rows: int, devices: str | None, num_devices: int) -> None:
        self._rows, self._num_rows = rows, num_rows
        self._devices, self._num_devices = devices, num_devices
        self._num_replicas = num_rows * num_devices

    @property
    def rules(self) -> Rules:
        """The rules for `Lowering`."""
        own: dict[str, Rule] = {
            "axis_index": lambda *_: [self._replica_id()],
            "psum": self._reduction,
            "pmax": self._reduction,
            "pmin": self._reduction,
            "all_gather": self._each(self._all_gather),
            "reduce_scatter": self._each(self._reduce_scatter),
            "all_to_all": self._each(self._all_to_all),
            "ppermute": self._each(self._ppermute),
            "pbroadcast": self._each(lambda p, x: self._every(x)[p["source"]]),
        }
        # Each replica calls its function by itself, as on a device of its own.
        found: dict[str, Callable[[JaxprEqn], Rule | None]] = {
            "pure_callback": lambda eqn: None if eqn.params["vmap_method"] else _by_row
        }
        for name, rule in own.items():
            found[name] = functools.partial(_if_over_replicas, rule)
        return found

    def _each(self, rule: Callable[[dict[str, Any], Array], Array]) -> Rule:
        def apply(eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
            self._require_alone(eqn)
            return [rule(eqn.params, jnp.asarray(argument)) for argument in arguments]

        return apply

    def _require_alone(self, eqn: JaxprEqn, num_others: int = 0) -> None:
        if len(axes_of(eqn)) > 1 + num_others:
            raise NotImplementedError(
                f"the {in_word(eqn.primitive.name)} at {user_line(eqn)} is over several axes, "
                f"{axes_of(eqn)}"
            )

    def _replica_id(self) -> Array:
        row = jax.lax.axis_index(self._rows)
        if self._devices is None:
            return row
        return jax.lax.axis_index(self._devices) * self._num_rows + row

    def _every(self, value: Array) -> Array:
        """All replicas' values `(num_replicas, *shape)`, in replica order."""
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            bits = self._every(jax.random.key_data(value))
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
        every = jax.lax.all_gather(value, self._rows)
        if self._devices is None:
            return every
        return jax.lax.all_gather(every, self._devices, tiled=True)

    def _over_all(self, kind: str, value: Array) -> Array:
        if kind == "psum":
            total = jax.lax.psum(value, self._rows)
            return total if self._devices is None else jax.lax.psum(total, self._devices)
        if value.dtype == jnp.bool_:
            return self._over_all(kind, value.astype(jnp.uint8)).astype(jnp.bool_)
        extreme = _one_zero(_OVER[kind](value, self._rows))
        return extreme if self._devices is None else keeps_nan(kind, extreme, self._devices)

    def _reduction(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        kind, groups = eqn.primitive.name, eqn.params.get("axis_index_groups")
        others = tuple(axis for axis in axes_of(eqn) if isinstance(axis, int))
        self._require_alone(eqn, len(others))
        values = list(map(jnp.asarray, arguments))
        if others:
            values = [_LOCAL[kind](value, others) for value in values]
        if groups is None:
            return [self._over_all(kind, value) for value in values]
        return [self._in_groups(kind, value, groups) for value in values]

    def _in_groups(self, kind: str, value: Array, groups: Sequence[Sequence[int]]) -> Array:
        """A reduction within groups of replicas, which may differ in size."""
        every, me = self._every(value), self._replica_id()
        sizes = sorted({len(group) for group in groups})
        members = self._members_of_each(groups)
        of_size = []
        for size in sizes:  # a group of another size is replaced by so many copies of the replica
            table = [g if len(g) == size else [i] * size for i, g in enumerate(members)]
            of_size.append(_LOCAL[kind](every[jnp.asarray(table)[me]], (0,)))
        which = jnp.asarray([sizes.index(len(group)) for group in members])[me]
        return jax.lax.select_n(jnp.broadcast_to(which, value.shape), *of_size)

    def _members_of_each(self, groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [next(g for g in groups if i in g) for i in range(self._num_replicas)]

    def _members(self, value: Array, groups: Sequence[Sequence[int]] | None) -> Array:
        """The values of the replicas of this one's group `(size, *shape)`, in its order."""
        every = self._every(value)
        if groups is None:
            return every
        return every[jnp.asarray(self._members_of_each(groups))[self._replica_id()]]

    def _place(self, groups: Sequence[Sequence[int]] | None) -> Array:
        """Where this replica stands in its group."""
        if groups is None:
            return self._replica_id()
        places = {replica: place for group in groups for place, replica in enumerate(group)}
        return jnp.asarray([places[i] for i in range(self._num_replicas)])[self._replica_id()]

    def _all_gather(self, params: dict[str, Any], value: Array) -> Array:
        axis = params["all_gather_dimension"]
        members = self._members(value, params.get("axis_index_groups"))
        moved = jnp.moveaxis(members, 0, axis)
        if not params["tiled"]:
            return moved
        shape = list(value.shape)
        shape[axis] *= members.shape[0]
        return moved.reshape(shape)

    def _reduce_scatter(self, params: dict[str, Any], value: Array) -> Array:
        groups, axis = params.get("axis_index_groups"), params["scatter_dimension"]
        whole = groups is None
        total = self._over_all("psum", value) if whole else self._members(value, groups).sum(0)
        count = self._num_replicas if groups is None else len(groups[0])
        size = value.shape[axis] // count
        part = jax.lax.dynamic_slice_in_dim(total, self._place(groups) * size, size, axis)
        return part if params["tiled"] else part.squeeze(axis)

    def _all_to_all(self, params: dict[str, Any], value: Array) -> Array:
        groups = params.get("axis_index_groups")
        split, joined = params["split_axis"], params["concat_axis"]
        members = self._members(value, groups)
        count = members.shape[0]
        size = value.shape[split] // count
        mine = jax.lax.dynamic_slice_in_dim(members, self._place(groups) * size, size, split + 1)
        return jnp.concatenate(list(mine), joined)

    def _ppermute(self, params: dict[str, Any], value: Array) -> Array:
        """A replica to which nothing is sent gets zeros."""
        source = {target: origin for origin, target in params["perm"]}
        table = jnp.asarray([source.get(i, -1) for i in range(self._num_replicas)])
        mine = table[self._replica_id()]
        received = self._every(value)[mine]
        if len(source) == self._num_replicas:
            return received
        return jnp.where(mine >= 0, received, jnp.zeros_like(received))


class LoneCollectives(RowCollectives):
    """The collectives of a single replica, without an axis: it has every value already."""

    def __init__(self) -> None:
        super().__init__("", 1, None, 1)

    def _replica_id(self) -> Array:
        return jnp.zeros((), jnp.int32)

    def _every(self, value: Array) -> Array:
        return value[None]

    def _over_all(self, kind: str, value: Array) -> Array:
        return value if kind == "psum" else _one_zero(value)
