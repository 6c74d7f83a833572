"""`PerReplica`: a value that may differ between replicas."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import NoMesh, move, with_axis, without_axis
from mirror._src.devices.unstacked import UnstackedArrays
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import REPLICA_AXIS, Array, ArrayLike


def is_numeric(dtype: Any) -> bool:
    """Whether JAX supports arrays of this dtype: booleans and numbers, including small floats."""
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)


def is_float0(leaf: Any) -> bool:
    """Whether the leaf has the dtype float0, which JAX uses for gradients of integers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


@set_module("mirror")
class PerReplica:
    """One array per replica: a value that may differ between replicas.

    `strategy.run` passes each replica its array, without a leading axis, and returns a `PerReplica`
    for every result that is not proved to be identical on all replicas. A `PerReplica` is a pytree
    with one leaf: the stacked array, or a container of the arrays if their lengths differ.

    Args:
        values: One array per replica, in replica order, with the same dtype and number of
            dimensions.

    Raises:
        ValueError: If `values` is empty, or its elements differ in dtype or number of dimensions.
        TypeError: If `values` is not a list of arrays or numbers.

    >>> import numpy as np
    >>> x = PerReplica([np.zeros(3), np.ones(3)])
    >>> x.stacked.shape, x.num_replicas
    ((2, 3), 2)
    """

    __slots__ = ("_stacked",)
    _stacked: Any

    def __init__(self, values: Sequence[ArrayLike]) -> None:
        self._stacked = _stack(values)

    @classmethod
    def from_stacked(cls, stacked: Array | np.ndarray) -> "PerReplica":
        """Wraps an array `(num_replicas, *shape)` without a copy: row r is replica r's value.

        >>> PerReplica.from_stacked(np.arange(4).reshape(2, 2))
        PerReplica([0, 1], [2, 3])
        """
        if not getattr(stacked, "ndim", 0):
            raise ValueError(
                f"`stacked` must have a leading replica axis, got {describe(stacked)}. Pass an "
                "array (num_replicas, *shape), or use mirror.PerReplica([value, ...]) with one "
                "value per replica."
            )
        return _wrap(stacked)

    @property
    def stacked(self) -> Array | np.ndarray:
        """The array `(num_replicas, *shape)`, sharded across the replicas' devices.

        A copy on the host if the devices are of several types.

        Raises:
            ValueError: If the replicas' values differ in shape.
        """
        if not isinstance(self._stacked, UnstackedArrays):
            return self._stacked
        if not self._stacked.are_equal:
            raise ValueError(
                f"Cannot stack {self!r}: its values differ in shape. Read x.values, or concatenate "
                "them: strategy.gather(x, axis=0)."
            )
        return np.stack([np.asarray(array) for array in self._stacked.arrays])

    @property
    def values(self) -> tuple[Array | np.ndarray, ...]:
        """One array `(*shape)` per replica, on the replica's device."""
        if isinstance(self._stacked, UnstackedArrays):
            return self._stacked.arrays
        rows = rows_on_devices(self._stacked)
        if rows is None:
            return _unstack(self._stacked)
        return tuple(map(without_axis, rows))

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        leaf = self._stacked
        return len(leaf.arrays) if isinstance(leaf, UnstackedArrays) else leaf.shape[0]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each replica's value."""
        leaf = self._stacked
        if isinstance(leaf, UnstackedArrays):
            return leaf.shapes
        return (leaf.shape[1:],) * leaf.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """The dtype, the same on every replica."""
        return self._stacked.dtype

    __array_ufunc__ = None  # so that `numpy_array + per_replica` raises in `__radd__`

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.stacked, dtype=dtype, copy=copy)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else _rejecting("format()")(self)

    def __repr__(self) -> str:
        if isinstance(self._stacked, UnstackedArrays):
            return f"PerReplica({', '.join(map(_format, self._stacked.arrays))})"
        if not isinstance(self._stacked, jax.Array | np.ndarray):
            return f"PerReplica({self._stacked!r})"
        is_traced = isinstance(self._stacked, jax.core.Tracer)
        if not is_traced and isinstance(self._stacked, jax.Array) and self._stacked.is_deleted():
            return f"PerReplica(deleted {describe(self._stacked)})"
        if is_traced or self._stacked.size > 64 or not is_numeric(self.dtype):
            shape = ",".join(map(str, self._stacked.shape[1:]))
            return f"PerReplica({self.num_replicas} x {self.dtype}[{shape}])"
        rows = ", ".join(np.array2string(row, separator=", ") for row in np.asarray(self._stacked))
        return f"PerReplica({rows})"


def _wrap(stacked: Any) -> PerReplica:
    """Returns a `PerReplica` around any leaf: JAX also unflattens trees with placeholders."""
    value = object.__new__(PerReplica)
    value._stacked = stacked
    return value


jax.tree_util.register_pytree_with_keys(
    PerReplica,
    lambda value: (((jax.tree_util.GetAttrKey("stacked"), value._stacked),), None),
    lambda _, children: _wrap(next(iter(children))),
    lambda value: ((value._stacked,), None),
)


def _format(array: Array | np.ndarray) -> str:
    """Returns the values of a small array, else its dtype and shape."""
    if isinstance(array, jax.Array) and array.is_deleted():
        return f"deleted {describe(array)}"
    is_small = array.size <= 16 and is_numeric(array.dtype)
    return np.array2string(np.asarray(array), separator=", ") if is_small else describe(array)


def per_replica(stacked: "Array | np.ndarray | UnstackedArrays") -> PerReplica:
    """Returns a `PerReplica` with this leaf."""
    return _wrap(stacked)


def on_replicas(value: PerReplica, replicas: ReplicaDevices) -> PerReplica:
    """Moves each value to its replica's device."""
    if len(set(value.shapes)) > 1:
        return _wrap(UnstackedArrays(list(map(move, value.values, replicas.devices))))
    return _wrap(replicas.stack(np.stack([np.asarray(row) for row in value.values])))


def held_by(value: PerReplica) -> "Array | np.ndarray | UnstackedArrays":
    """Returns the leaf of a `PerReplica`."""
    return value._stacked


def is_per_replica(value: object) -> bool:
    """Whether the value is a `PerReplica`; usable as `is_leaf`."""
    return isinstance(value, PerReplica)


def rows_on_devices(stacked: Array | np.ndarray) -> tuple[Array, ...] | None:
    """Returns each replica's row `(1, *shape)` on its device, or None for another sharding."""
    if not isinstance(stacked, jax.Array) or isinstance(stacked, jax.core.Tracer):
        return None
    shards = stacked.addressable_shards
    counts = {shard.data.shape[0] for shard in shards}
    (count, *others) = counts
    if others or count * len(shards) != stacked.shape[0]:
        return None
    ordered = sorted(shards, key=lambda shard: shard.index[0].start or 0)
    if count == 1:
        return tuple(shard.data for shard in ordered)
    with NoMesh():
        return tuple(shard.data[i : i + 1] for shard in ordered for i in range(count))


def _unstack(stacked: Array | np.ndarray) -> tuple[Array | np.ndarray, ...]:
    """Returns the rows of an array with another sharding, or of a traced or host array."""
    if isinstance(stacked, np.ndarray | jax.core.Tracer):
        return tuple(stacked)
    with NoMesh():
        return tuple(stacked[i] for i in range(stacked.shape[0]))


def _stack(values: Sequence[ArrayLike]) -> Array | np.ndarray | UnstackedArrays:
    if isinstance(values, jax.Array | np.ndarray | PerReplica | dict | str):
        raise TypeError(
            f"PerReplica expects a list with one value per replica, got {describe(values)}. For an "
            "array (num_replicas, *shape), use mirror.PerReplica.from_stacked(array)."
        )
    rows: list[Any] = [v if isinstance(v, jax.Array) else np.asarray(v) for v in values]
    for row, value in zip(rows, values, strict=True):
        if not isinstance(row, jax.Array) and not is_numeric(row.dtype):
            raise TypeError(
                f"PerReplica expects one array or number per replica, got {describe(value)}. For a "
                "pytree, make each leaf a PerReplica."
            )
    if not rows:
        raise ValueError("PerReplica expects one value per replica, got [].")
    if len({(row.ndim, row.dtype) for row in rows}) > 1:
        raise ValueError(
            "The values of a PerReplica must have the same dtype and number of dimensions, got "
            f"{', '.join(map(describe, rows))}."
        )
    if len({row.shape for row in rows}) > 1:
        return UnstackedArrays(rows)
    if not all(isinstance(row, jax.Array) for row in rows):
        return np.stack([np.asarray(row) for row in rows])
    if any(isinstance(row, jax.core.Tracer) for row in rows):
        return jnp.stack(rows)
    devices = [next(iter(row.devices())) for row in rows if len(row.devices()) == 1]
    if len(set(devices)) < len(rows):
        with NoMesh():
            return jnp.stack(rows)
    if len({device.platform for device in devices}) > 1:
        return UnstackedArrays(rows)
    sharding = NamedSharding(
        Mesh(np.asarray(devices), (REPLICA_AXIS,)), PartitionSpec(REPLICA_AXIS)
    )
    return jax.make_array_from_single_device_arrays(
        (len(rows), *rows[0].shape), sharding, list(map(with_axis, rows, devices))
    )


def _rejecting(operation: str) -> Callable[..., NoReturn]:
    """Returns a method that raises, because the operation needs one value, not one per replica."""

    def method(self: PerReplica, *_: object) -> NoReturn:
        raise TypeError(
            f"Cannot apply {operation} to {self!r} in cross-replica context: it holds one value "
            "per replica. Reduce it first, strategy.reduce('mean', x); read x.values or x.stacked; "
            "or compute inside the step passed to strategy.run."
        )

    return method


_OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"},
    **{"pow": "**", "matmul": "@", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"getitem": "[]", "neg": "unary -"},
}
_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATIONS = {
    **{name: f"`{operator}`" for name, operator in _OPERATORS.items()},
    **{f"r{name}": f"`{_OPERATORS[name]}`" for name in _REFLECTED},
    **{name: f"{name}()" for name in ("abs", "float", "int", "bool", "len", "iter")},
}
for _name, _operation in _OPERATIONS.items():
    setattr(PerReplica, f"__{_name}__", _rejecting(_operation))
