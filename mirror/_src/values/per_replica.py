"""`PerReplica`: the one kind of value that is not a plain array."""

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
    """Whether JAX has arrays of this dtype: numbers, small floats among them, and booleans."""
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)


def is_float0(leaf: Any) -> bool:
    """Whether it is JAX's gradient of an integer, an array without numbers."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


@set_module("mirror")
class PerReplica:
    """One array for each replica, all of one dtype: what may differ between replicas.

    `strategy.run` hands each replica its own array, without a leading axis, and gives back a
    `PerReplica` for every result that is not proved to be the same on all replicas. It is a
    registered pytree with one leaf: the stacked array, or what holds the arrays apart where
    lengths differ.

    Args:
        values: one array for each replica, in replica order; of one dtype and number of dimensions.

    Raises:
        ValueError: no values, or values that differ in dtype or number of dimensions.

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
        """Wraps an array `(num_replicas, *shape)`: row r is replica r's value. Copies nothing.

        >>> PerReplica.from_stacked(np.arange(4).reshape(2, 2))
        PerReplica([0, 1], [2, 3])
        """
        if not getattr(stacked, "ndim", 0):
            raise ValueError(
                f"{describe(stacked)} has no leading replica axis. Pass (num_replicas, *shape), or "
                "mirror.PerReplica([value, ...]) with one value for each replica."
            )
        return _wrap(stacked)

    @property
    def stacked(self) -> Array | np.ndarray:
        """The array `(num_replicas, *shape)`, as it lies on the devices; on the host if on several.

        Raises:
            ValueError: the replicas' values differ in shape.
        """
        if not isinstance(self._stacked, UnstackedArrays):
            return self._stacked
        if not self._stacked.are_equal:
            raise ValueError(
                f"{self!r} has no stacked array: its values differ in shape. Look at x.values, or "
                "join them, strategy.gather(x, axis=0)."
            )
        return np.stack([np.asarray(array) for array in self._stacked.arrays])

    @property
    def values(self) -> tuple[Array | np.ndarray, ...]:
        """One array `(*shape)` for each replica, each on its replica's device."""
        if isinstance(self._stacked, UnstackedArrays):
            return self._stacked.arrays
        rows = rows_on_devices(self._stacked)
        if rows is None:
            return _apart(self._stacked)
        return tuple(map(without_axis, rows))

    @property
    def num_replicas(self) -> int:
        """How many replicas it holds a value for."""
        held = self._stacked
        return len(held.arrays) if isinstance(held, UnstackedArrays) else held.shape[0]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Each replica's shape."""
        held = self._stacked
        if isinstance(held, UnstackedArrays):
            return held.shapes
        return (held.shape[1:],) * held.shape[0]

    @property
    def dtype(self) -> np.dtype:
        """The dtype, the same on every replica."""
        return self._stacked.dtype

    __array_ufunc__ = None  # `numpy_array + per_replica` comes here, to be refused

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.stacked, dtype=dtype, copy=copy)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else _refuse("__format__")(self)

    def __repr__(self) -> str:
        if isinstance(self._stacked, UnstackedArrays):
            return f"PerReplica({', '.join(map(_shown, self._stacked.arrays))})"
        if not isinstance(self._stacked, jax.Array | np.ndarray):
            return f"PerReplica({self._stacked!r})"
        traced = isinstance(self._stacked, jax.core.Tracer)
        if not traced and isinstance(self._stacked, jax.Array) and self._stacked.is_deleted():
            return f"PerReplica(deleted {describe(self._stacked)})"
        if traced or self._stacked.size > 64 or not is_numeric(self.dtype):
            shape = ",".join(map(str, self._stacked.shape[1:]))
            return f"PerReplica({self.num_replicas} x {self.dtype}[{shape}])"
        rows = ", ".join(np.array2string(row, separator=", ") for row in np.asarray(self._stacked))
        return f"PerReplica({rows})"


def _wrap(stacked: Any) -> PerReplica:
    """A `PerReplica` around anything: trees are also unflattened with placeholders and tracers."""
    value = object.__new__(PerReplica)
    value._stacked = stacked
    return value


jax.tree_util.register_pytree_with_keys(
    PerReplica,
    lambda value: (((jax.tree_util.GetAttrKey("stacked"), value._stacked),), None),
    lambda _, children: _wrap(next(iter(children))),
    lambda value: ((value._stacked,), None),
)


def _shown(array: Array | np.ndarray) -> str:
    """One of several arrays: its values if they are few, else its type."""
    if isinstance(array, jax.Array) and array.is_deleted():
        return f"deleted {describe(array)}"
    small = array.size <= 16 and is_numeric(array.dtype)
    return np.array2string(np.asarray(array), separator=", ") if small else describe(array)


def per_replica(stacked: "Array | np.ndarray | UnstackedArrays") -> PerReplica:
    """A `PerReplica` around what holds its arrays."""
    return _wrap(stacked)


def on_replicas(value: PerReplica, replicas: ReplicaDevices) -> PerReplica:
    """The same values, each on its replica's device."""
    if len(set(value.shapes)) > 1:
        return _wrap(UnstackedArrays(list(map(move, value.values, replicas.devices))))
    return _wrap(replicas.stack(np.stack([np.asarray(row) for row in value.values])))


def held_by(value: PerReplica) -> "Array | np.ndarray | UnstackedArrays":
    """What holds the arrays of a `PerReplica`: it is its one leaf."""
    return value._stacked


def is_per_replica(value: object) -> bool:
    """Whether the value is a `PerReplica`; made for `is_leaf=`."""
    return isinstance(value, PerReplica)


def rows_on_devices(stacked: Array | np.ndarray) -> tuple[Array, ...] | None:
    """Each replica's row `(1, *shape)` where it lies; `None` if the array lies in another way."""
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


def _apart(stacked: Array | np.ndarray) -> tuple[Array | np.ndarray, ...]:
    """The rows of an array that lies in another way, or is traced."""
    if isinstance(stacked, np.ndarray | jax.core.Tracer):
        return tuple(stacked)
    with NoMesh():
        return tuple(stacked[i] for i in range(stacked.shape[0]))


def _stack(values: Sequence[ArrayLike]) -> Array | np.ndarray | UnstackedArrays:
    if isinstance(values, jax.Array | np.ndarray | PerReplica | dict | str):
        raise TypeError(
            f"PerReplica takes one value for each replica, not {describe(values)}. Pass a list, or "
            "use mirror.PerReplica.from_stacked(array) for an array (num_replicas, *shape)."
        )
    rows: list[Any] = [v if isinstance(v, jax.Array) else np.asarray(v) for v in values]
    for row, value in zip(rows, values, strict=True):
        if not isinstance(row, jax.Array) and not is_numeric(row.dtype):
            raise TypeError(
                f"A PerReplica holds one array for each replica, not {describe(value)}. For trees, "
                "make each leaf a PerReplica."
            )
    if not rows:
        raise ValueError("PerReplica([]) has no values. Pass one for each replica.")
    if len({(row.ndim, row.dtype) for row in rows}) > 1:
        received = ", ".join(map(describe, rows))
        raise ValueError(
            f"The replicas' values differ in dtype or number of dimensions: {received}. Pass "
            "values of one dtype, which differ in length at most."
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


def _refuse(operation: str) -> Callable[..., NoReturn]:
    def method(self: PerReplica, *_: object) -> NoReturn:
        raise TypeError(
            f"{operation} of {self!r} outside a replica: it holds one value for each replica. "
            "Reduce it first, strategy.reduce('mean', x); look at x.values or x.stacked; or "
            "compute inside the function that strategy.run runs."
        )

    return method


_OPERATIONS = """
add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
neg abs lt le gt ge float int bool len getitem iter
"""
for _name in _OPERATIONS.split():
    setattr(PerReplica, f"__{_name}__", _refuse(f"__{_name}__"))
