"""Rules for collectives over the replicas: one per device, or a single one.

A replica program names one replica axis. With one
replica per device, JAX's own collectives remain, except for those below that XLA computes
differently. A single replica has no axis. `Formulas` computes collectives from the values of all
replicas, also for the modes of the staged program with several replicas per device. A reduction of
the user's is computed from the operands of all replicas, by every device.

Collectives that give each replica a different part are built from an all-gather. `jax.vmap` has no
rule for some of them (groups, partial permutations), and an incorrect rule for `all_to_all` of
operands that are the same for all replicas (JAX 0.10 and 0.12).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from mirror._src.base.types import Array, keys_like
from mirror._src.cluster.store import is_initialized
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.jaxprs.collective_eqns import (
    ALL_REDUCES,
    axes_of,
    kind_of,
    names_axis,
    positive_zero,
    reduce_locally,
    with_nan,
)
from mirror._src.jaxprs.equations import user_line
from mirror._src.jaxprs.primitives import dtype_of
from mirror._src.passes.evaluate import Rule, Rules, bind

Reduction: TypeAlias = Callable[[str, Array, str], Array]
"""Reduces stacked operands, given the primitive, the operands and a description for messages."""

_ALL_REDUCE = {"psum": jax.lax.psum, "pmax": jax.lax.pmax, "pmin": jax.lax.pmin}


def uses_gloo(replicas: ReplicaDevices) -> bool:
    """Whether the collectives are gloo's: in a job, also those between devices of one process."""
    return replicas.on_host and is_initialized()


def reduce_extreme(
    primitive: str, value: Array, axis: str, groups: Sequence[Sequence[int]] | None = None
) -> Array:
    """Reduces a maximum or minimum over devices: NaN if any value is NaN, and 0.0 instead of -0.0.

    XLA's all-reduce may or may not propagate a NaN, and may return either zero.
    """
    reduce = functools.partial(_ALL_REDUCE[primitive], axis_index_groups=groups)
    if value.dtype == jnp.bool_:
        return reduce(value.astype(jnp.uint8), axis).astype(jnp.bool_)
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return reduce(value, axis)
    any_nan = jnp.isnan(value).astype(jnp.uint8)
    is_nan = jax.lax.pmax(any_nan, axis, axis_index_groups=groups) > 0
    return with_nan(reduce(value, axis), is_nan)


def canonical(value: Array) -> Array:
    """Returns 0.0 instead of -0.0, and one NaN instead of any."""
    if jnp.iscomplexobj(value):
        return jax.lax.complex(canonical(value.real), canonical(value.imag))
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    return with_nan(value, jnp.isnan(value))


def sum_of_parts(add_up: Callable[[Array], Array], value: Array) -> Array:
    """Returns a sum over devices, of complex numbers as pairs of floats on another, last axis.

    XLA ends the process for the sum of a complex constant, such as the gradient of what a loss does
    not read: `Check failed: buffer != nullptr` (JAX 0.10.2 and 0.12.0.1).
    """
    if not jnp.iscomplexobj(value):
        return add_up(value)
    total = add_up(jnp.stack([value.real, value.imag], -1))
    return jax.lax.complex(total[..., 0], total[..., 1])


def reduced_by(reduction: Reduction | None, primitive: str, rows: Array, collective: str) -> Array:
    """Returns the reduction of stacked operands, by the user's reduction if there is one."""
    if reduction is None:
        return reduce_locally(primitive, rows, (0,))
    if rows.dtype == jnp.bool_:
        bits = rows.astype(jnp.uint8)
        return reduced_by(reduction, primitive, bits, collective).astype(jnp.bool_)
    result = reduction(primitive, rows, collective)
    return result if primitive == "psum" else positive_zero(result)


def _find_complex_sum(eqn: JaxprEqn) -> Rule | None:
    """Returns the rule for a sum of complex numbers."""
    if not any(jnp.issubdtype(dtype_of(x), jnp.complexfloating) for x in eqn.invars):
        return None
    return lambda eqn, values: [sum_of_parts(lambda x: bind(eqn, [x])[0], y) for y in values]


def _find_gather(eqn: JaxprEqn) -> Rule | None:
    """Returns the rule for a gather of keys, which JAX cannot lower, or of no elements, as XLA."""
    aval: Any = eqn.outvars[0].aval
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        bits = jax.random.key_data
        return lambda eqn, keys: [keys_like(bind(eqn, [bits(x)])[0], x) for x in keys]
    return None if aval.size else lambda *_: [jnp.zeros(aval.shape, aval.dtype)]


class Formulas:
    """Collectives that one replica computes from the values of all.

    Args:
        num_replicas: Number of replicas.
        replica_id: Returns the index of the replica.
        gather: Returns all replicas' values as `(num_replicas, *shape)`, in replica order.
    """

    def __init__(
        self, num_replicas: int, replica_id: Callable[[], Array], gather: Callable[[Array], Array]
    ) -> None:
        self._num_replicas, self._replica_id, self._gather = num_replicas, replica_id, gather

    @property
    def moves(self) -> dict[str, Callable[[dict[str, Any], Array], Array]]:
        """The collectives that compute nothing, by name of the primitive."""
        return {
            "all_gather": self.all_gather,
            "all_to_all": self.all_to_all,
            "ppermute": self.ppermute,
            "pbroadcast": lambda params, value: self._gather(value)[params["source"]],
        }

    def reduce_in_groups(
        self,
        primitive: str,
        value: Array,
        groups: Sequence[Sequence[int]],
        reduced: Callable[[str, Array], Array],
    ) -> Array:
        """Reduces within groups of replicas, which may differ in size, the rows of each group."""
        values, me = self._gather(value), self._replica_id()
        sizes = sorted({len(group) for group in groups})
        members = self._group_of_each(groups)
        results = []
        for size in sizes:
            # Shapes are static, so all replicas reduce groups of every size. A replica in a group
            # of another size reduces copies of its own value, and discards the result.
            table = [g if len(g) == size else [i] * size for i, g in enumerate(members)]
            results.append(reduced(primitive, values[jnp.asarray(table)[me]]))
        which = jnp.asarray([sizes.index(len(group)) for group in members])[me]
        return jax.lax.select_n(jnp.broadcast_to(which, value.shape), *results)

    def _group_of_each(self, groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [next(g for g in groups if i in g) for i in range(self._num_replicas)]

    def gather_in_group(self, value: Array, groups: Sequence[Sequence[int]] | None) -> Array:
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

    def all_gather(self, params: dict[str, Any], value: Array) -> Array:
        axis = params["all_gather_dimension"]
        values = self.gather_in_group(value, params.get("axis_index_groups"))
        moved = jnp.moveaxis(values, 0, axis)
        if not params["tiled"]:
            return moved
        shape = list(value.shape)
        shape[axis] *= values.shape[0]
        return moved.reshape(shape)

    def scattered(self, params: dict[str, Any], total: Array) -> Array:
        """Returns the replica's part of a sum."""
        groups, axis = params.get("axis_index_groups"), params["scatter_dimension"]
        size = total.shape[axis] // (len(groups[0]) if groups else self._num_replicas)
        start = self._index_in_group(groups) * size
        part = jax.lax.dynamic_slice_in_dim(total, start, size, axis)
        return part if params["tiled"] else part.squeeze(axis)

    def all_to_all(self, params: dict[str, Any], value: Array) -> Array:
        groups = params.get("axis_index_groups")
        split, joined = params["split_axis"], params["concat_axis"]
        values = self.gather_in_group(value, groups)
        size = value.shape[split] // values.shape[0]
        start = self._index_in_group(groups) * size
        received = jax.lax.dynamic_slice_in_dim(values, start, size, split + 1)
        return jnp.concatenate(list(received), joined)

    def ppermute(self, params: dict[str, Any], value: Array) -> Array:
        """Sends values along a permutation. A replica that receives nothing gets zeros."""
        source = {target: origin for origin, target in params["perm"]}
        table = jnp.asarray([source.get(i, -1) for i in range(self._num_replicas)])
        origin = table[self._replica_id()]
        received = self._gather(value)[origin]
        if len(source) == self._num_replicas:
            return received
        return jnp.where(origin >= 0, received, jnp.zeros_like(received))


@final
class CollectiveRules(Formulas):
    """Rules for collectives over all replicas.

    Args:
        axis: Name of the axis of the devices. `None` for a single replica.
        num_replicas: Size of this axis.
        over_gloo: Whether gloo runs the collectives.
        reduction: Reduces the replicas' operands in place of XLA, unless it is None.
    """

    def __init__(
        self,
        axis: str | None,
        num_replicas: int,
        *,
        over_gloo: bool = False,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(num_replicas, self._index, self._gathered)
        self._axis = axis
        self._over_gloo = over_gloo
        self._reduction = reduction

    @property
    def rules(self) -> Rules:
        """Rules for `Lowering`."""
        reduces: Rules = dict.fromkeys(ALL_REDUCES, self._if_over_replicas(self._reduce))
        scatters: Rules = {"reduce_scatter": self._if_over_replicas(self._reduce_scatter)}
        if self._axis is not None and self._reduction is not None:
            return {**reduces, **scatters}
        if self._axis is not None:
            extremes: Rules = dict.fromkeys(("pmax", "pmin"), self._find_extreme)
            sums: Rules = dict.fromkeys(("psum", "reduce_scatter"), _find_complex_sum)
            rules: Rules = {**sums, "all_gather": _find_gather, **extremes}
            # They become all-reduces, of which every replica keeps its part. The reduce-scatter of
            # gloo returns wrong values for large arrays from time to time (jax#40830; JAX 0.10 to
            # 0.12.0.1).
            return {**rules, **scatters} if self._over_gloo else rules
        moves = {name: self._map_operands(rule) for name, rule in self.moves.items()}
        moves["axis_index"] = lambda *_: [self._replica_id()]
        others = {name: self._if_over_replicas(rule) for name, rule in moves.items()}
        return {**reduces, **scatters, **others}

    def _find_extreme(self, eqn: JaxprEqn) -> Rule | None:
        """Returns the rule for a maximum or minimum of floats or booleans over devices."""
        dtypes = list(map(dtype_of, eqn.invars))
        has_floats = any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
        has_bools = any(dtype == jnp.bool_ for dtype in dtypes)
        is_whole = axes_of(eqn) == (self._axis,)
        return self._reduce if is_whole and (has_floats or has_bools) else None

    def _if_over_replicas(self, rule: Rule) -> Callable[[JaxprEqn], Rule | None]:
        return lambda eqn: rule if names_axis(eqn) else None

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

    def _index(self) -> Array:
        return jnp.zeros((), jnp.int32) if self._axis is None else jax.lax.axis_index(self._axis)

    def _gathered(self, value: Array) -> Array:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return keys_like(self._gathered(jax.random.key_data(value)), value)
        values = value[None]
        if self._axis is None:
            return values
        return jax.lax.all_gather(values, self._axis, tiled=True)

    def _reduced(self, eqn: JaxprEqn, primitive: str, rows: Array) -> Array:
        collective = f"{kind_of(eqn.primitive.name)} at {user_line(eqn)}"
        return reduced_by(self._reduction, primitive, rows, collective)

    def _all_reduce(self, eqn: JaxprEqn, primitive: str, value: Array) -> Array:
        if self._reduction is not None:
            return self._reduced(eqn, primitive, self._gather(value))
        if self._axis is not None:
            if primitive == "psum":
                return sum_of_parts(lambda x: jax.lax.psum(x, self._axis), value)
            return reduce_extreme(primitive, value, self._axis)
        return value if primitive == "psum" else positive_zero(value)

    def _reduce(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        primitive, groups = eqn.primitive.name, eqn.params.get("axis_index_groups")
        others = tuple(axis for axis in axes_of(eqn) if isinstance(axis, int))
        self._require_one_axis(eqn, len(others))
        values = list(map(jnp.asarray, arguments))
        if others:
            values = [reduce_locally(primitive, value, others) for value in values]
        if groups is None:
            return [self._all_reduce(eqn, primitive, value) for value in values]
        if self._axis is not None and self._reduction is None:
            return [reduce_extreme(primitive, value, self._axis, groups) for value in values]
        reduced = functools.partial(self._reduced, eqn)
        return [self.reduce_in_groups(primitive, value, groups, reduced) for value in values]

    def _reduce_scatter(self, eqn: JaxprEqn, arguments: list[Any]) -> list[Any]:
        self._require_one_axis(eqn)
        groups, value = eqn.params.get("axis_index_groups"), jnp.asarray(arguments[0])
        if groups is None:
            total = self._all_reduce(eqn, "psum", value)
        else:
            total = self._reduced(eqn, "psum", self.gather_in_group(value, groups))
        return [self.scattered(eqn.params, total)]
