"""`PerReplica`: a value that may differ between replicas."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mirror._src.base.errors import describe, nearest_name
from mirror._src.base.foreign_arrays import to_array
from mirror._src.base.keras_library import GLOBAL_BATCHES, loads_batches
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import is_library
from mirror._src.base.types import REPLICA_AXIS, Array, ArrayLike, is_numeric, long_fix
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.transfer import (
    NoMesh,
    UnstackedArrays,
    host_copy,
    is_remote,
    move,
    with_axis,
    without_axis,
)

UNEQUAL_SHAPES = (
    "The replicas' values differ in shape, but the replicas are in several processes, which run "
    "one program with one shape. Pad them to the same shape: "
    "strategy.distribute_dataset(data, remainder='pad')."
)


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
        if not any(tuple(getattr(stacked, "shape", ()))[:1]):
            raise ValueError(
                f"`stacked` must have a leading replica axis, got {describe(stacked)}. Pass an "
                "array (num_replicas, *shape), or use mirror.PerReplica([value, ...]) with one "
                "value per replica."
            )
        return per_replica(to_array("`stacked`", stacked))

    @property
    def stacked(self) -> Array | np.ndarray:
        """The array `(num_replicas, *shape)`, sharded across the replicas' devices.

        A copy on the host if the devices are of several types. With several processes, this process
        can read only the rows of its own replicas; see `values`.

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
        """One array `(*shape)` per replica, on the replica's device.

        With several processes, the values of this process's replicas,
        `strategy.local_replica_ids`.
        """
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

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            rejection(
                self,
                f"np.{ufunc.__name__}" if method == "__call__" else f"np.{ufunc.__name__}.{method}",
            )
        )

    def __jax_array__(self) -> Array | np.ndarray:
        """Returns the stacked array to `jnp.asarray`, and rejects all other functions of JAX.

        JAX asks for it without saying for what, so the function that the user called is the
        outermost one of JAX on the stack.
        """
        frame, called = sys._getframe(1), ""
        while is_library(frame.f_code.co_filename) and frame.f_back is not None:
            called, frame = frame.f_code.co_name, frame.f_back
        if called in ("asarray", "array"):
            return self.stacked
        fix = "Pass x.stacked to it, or reduce first: REDUCED."
        raise TypeError(rejection(self, "a function of jax.numpy", fix))

    if not TYPE_CHECKING:  # A type checker would accept any attribute.

        def __getattr__(self, name):
            raise AttributeError(missing_attribute(self, name), name=name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if loads_batches(sys._getframe(1)):  # it would take the replica axis for the batch
            raise TypeError(f"A dataset of a Keras model yields {brief(self)}. {GLOBAL_BATCHES}")
        if spans_processes(self):
            elsewhere = self.num_replicas - len(self.values)
            raise ValueError(
                f"Cannot convert {brief(self)} to a NumPy array: {elsewhere} of its "
                f"{self.num_replicas} values are in other processes. Read this process's values, "
                "x.values, or gather all of them on every process: strategy.gather(x)."
            )
        return np.array(self.stacked, dtype=dtype, copy=copy)

    def __format__(self, spec: str) -> str:
        if spec:
            fix = f"Format one number: format(float(REDUCED), {spec!r})."
            raise TypeError(rejection(self, "format()", fix))
        return repr(self)

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
        if spans_processes(self):
            values = self.values
            rows = ", ".join(map(_format, values))
            return f"PerReplica({len(values)} of {self.num_replicas} here: {rows})"
        rows = ", ".join(np.array2string(row, separator=", ") for row in np.asarray(self._stacked))
        return f"PerReplica({rows})"


_LONGEST = 60  # characters of the values in a message


def brief(value: PerReplica) -> str:
    """Returns `PerReplica(2 x float32[3])`, without reading the values."""
    leaf = value._stacked
    if isinstance(leaf, UnstackedArrays):
        return f"PerReplica({', '.join(map(describe, leaf.arrays))})"
    if not hasattr(leaf, "shape"):
        return "PerReplica"
    row = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return f"PerReplica({leaf.shape[0]} x {describe(row)})"


def rejection(value: PerReplica, operation: str, fix: str = "") -> str:
    """Returns the message for an operation that needs one value, not one per replica.

    In `fix`, `REDUCED` is replaced by the call of `strategy.reduce` that returns one number.
    """
    shown = repr(value)
    if len(shown) > _LONGEST or "\n" in shown:
        shown = brief(value)
    fix = fix or "Reduce it first: REDUCED."
    fix = fix.replace("REDUCED", f"strategy.reduce('mean', x{_axes_argument(value)})")
    return (
        f"Cannot apply {operation} to {shown} in cross-replica context: it holds one value "
        f"per replica. {fix} Or read x.values or x.stacked, or compute inside the step passed to "
        "strategy.run."
    )


def missing_attribute(value: PerReplica, name: str) -> str:
    """Returns the message for an attribute of arrays that a `PerReplica` does not have."""
    text = f"'PerReplica' object has no attribute {name!r}"
    if name.startswith("_"):  # asked for by Python, JAX or a notebook
        return text
    known = ("values", "stacked", "shapes", "dtype", "num_replicas")
    fix = _ATTRIBUTES.get(name)
    nearest = nearest_name(name, known)
    if fix is None and name in ("sum", "mean", "min", "max"):
        fix = f'Reduce it over the replicas: strategy.reduce("{name}", x{_axes_argument(value)}).'
    elif fix is None and hasattr(jax.Array, name):
        fix = f"Use x.stacked.{name}, whose first axis is the replica, or compute in the step."
    elif fix is None and nearest is not None:
        fix = f"Did you mean x.{nearest}?"
    elif fix is None:
        fix = f"It has {', '.join(known)}."
    return f"{text}: {brief(value)} holds one value per replica. {fix}"


def _axes_argument(value: PerReplica) -> str:
    """Returns `, axis=0`: the argument of `strategy.reduce` that reduces to one number."""
    leaf = value._stacked
    shapes = leaf.shapes if isinstance(leaf, UnstackedArrays) else (getattr(leaf, "shape", ())[1:],)
    axes = tuple(range(len(shapes[0])))
    return f", axis={axes[0] if len(axes) == 1 else axes}" if axes else ""


_ATTRIBUTES = {
    "shape": "Read x.shapes, one shape per replica, or x.stacked.shape.",
    "item": 'For one number: float(strategy.reduce("mean", x)); for all of them: '
    "[float(value) for value in x.values].",
    "tolist": "Use np.asarray(x).tolist().",
    "numpy": "Use np.asarray(x), whose first axis is the replica.",
    "cpu": "Use np.asarray(x), whose first axis is the replica.",
    "detach": "Use np.asarray(x), whose first axis is the replica.",
    "value": "Read x.values.",
    "block_until_ready": "Use jax.block_until_ready(x).",
}


def per_replica(stacked: Any) -> PerReplica:
    """Returns a `PerReplica` around any leaf: JAX also unflattens trees with placeholders."""
    value = object.__new__(PerReplica)
    value._stacked = stacked
    return value


jax.tree_util.register_pytree_with_keys(
    PerReplica,
    lambda value: (((jax.tree_util.GetAttrKey("stacked"), value._stacked),), None),
    lambda _, children: per_replica(next(iter(children))),
    lambda value: ((value._stacked,), None),
)


def _format(array: Array | np.ndarray) -> str:
    """Returns the values of a small array, else its dtype and shape."""
    if isinstance(array, jax.Array) and array.is_deleted():
        return f"deleted {describe(array)}"
    is_small = array.size <= 16 and is_numeric(array.dtype)
    return np.array2string(np.asarray(array), separator=", ") if is_small else describe(array)


def on_replicas(value: PerReplica, replicas: ReplicaDevices) -> PerReplica:
    """Moves each value to its replica's device."""
    if len(set(value.shapes)) > 1:
        return per_replica(UnstackedArrays(list(map(move, value.values, replicas.devices))))
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return per_replica(replicas.stack(value.stacked))
    return per_replica(replicas.stack(np.stack([np.asarray(row) for row in value.values])))


def on_local_replicas(rows: Sequence[ArrayLike], replicas: ReplicaDevices) -> PerReplica:
    """Returns a value of which `rows` are this process's, in the order of `local_ids`."""
    if not replicas.spans_processes:
        return on_replicas(PerReplica(rows), replicas)
    local = PerReplica(rows)
    if len(set(local.shapes)) > 1:
        raise NotImplementedError(UNEQUAL_SHAPES)
    return per_replica(replicas.stack_local(np.stack([np.asarray(row) for row in local.values])))


def spans_processes(value: PerReplica) -> bool:
    """Whether other processes store some of the values."""
    leaf = value._stacked
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and is_remote(leaf)


def local_ids(value: PerReplica) -> list[int]:
    """Returns the replicas whose values this process stores, in the order of `value.values`."""
    if not spans_processes(value):
        return list(range(value.num_replicas))
    slices = [shard.index[0] for shard in value._stacked.addressable_shards]
    return sorted(i for rows in slices for i in range(*rows.indices(value.num_replicas)))


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
    if others or count * len(stacked.sharding.device_set) != stacked.shape[0]:
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
    if is_remote(stacked):  # indexing would be a collective, which no other process runs
        raise ValueError(
            f"The values of {brief(per_replica(stacked))} are not in the order of the devices, "
            "and other processes store some. Pass stacked arrays that strategy.run returned."
        )
    with NoMesh():
        return tuple(stacked[i] for i in range(stacked.shape[0]))


def _stack(values: Sequence[ArrayLike]) -> Array | np.ndarray | UnstackedArrays:
    is_one = isinstance(values, jax.Array | np.ndarray | PerReplica | dict | str)
    if is_one or not isinstance(values, Iterable):
        raise TypeError(
            f"PerReplica expects a list with one value per replica, got {describe(values)}. For an "
            "array (num_replicas, *shape), use mirror.PerReplica.from_stacked(array)."
        )
    values = list(values)
    rows: list[Any] = [to_array(f"Value {i} of a PerReplica", v) for i, v in enumerate(values)]
    for row, value in zip(rows, values, strict=True):
        is_array = isinstance(row, jax.Array) or is_numeric(row.dtype)
        if isinstance(value, PerReplica) or not is_array:
            fix = long_fix(row, "For a pytree, make each leaf a PerReplica.")
            raise TypeError(
                f"PerReplica expects one array or number per replica, got {describe(value)}. {fix}"
            )
    if not rows:
        raise ValueError("PerReplica expects one value per replica, got [].")
    if len({(row.ndim, row.dtype) for row in rows}) > 1:
        raise ValueError(
            "The values of a PerReplica must have the same dtype and number of dimensions, got "
            f"{', '.join(map(describe, rows))}."
        )
    if len({row.shape for row in rows}) > 1:
        return UnstackedArrays(list(map(host_copy, rows)))
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


def _rejecting(operation: str, fix: str = "") -> Callable[..., NoReturn]:
    """Returns a method that raises, because the operation needs one value, not one per replica."""

    def method(self: PerReplica, *_: object) -> NoReturn:
        raise TypeError(rejection(self, operation, fix))

    return method


_NUMBER = "Reduce it to one number first: float(REDUCED)."
_ITEMS = "Index the value of a replica, x.values[0], or all of them, x.stacked[:, 0]."
_OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"},
    **{"pow": "**", "matmul": "@", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"},
    **{"neg": "unary -", "pos": "unary +", "invert": "~"},
}
_COMPARISONS = ("lt", "le", "gt", "ge")
_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or")
_OPERATIONS = {
    **{n: (f"`{o}`", _NUMBER if n in _COMPARISONS else "") for n, o in _OPERATORS.items()},
    **{f"r{name}": (f"`{_OPERATORS[name]}`", "") for name in _REFLECTED},
    **{name: (f"{name}()", _NUMBER) for name in ("float", "int", "complex", "bool", "round")},
    **{name: (f"math.{name}()", _NUMBER) for name in ("trunc", "floor", "ceil")},
    **dict.fromkeys(("divmod", "rdivmod"), ("divmod()", "")),
    **dict.fromkeys(("getitem", "setitem", "delitem"), ("`[]`", _ITEMS)),
    **{name: (f"{name}()", "") for name in ("abs", "reversed")},
    **{"iter": ("iter()", "Iterate over x.values."), "contains": ("`in`", "Search x.values.")},
    "len": ("len()", "Read x.num_replicas, or the length of x.values[0]."),
}
for _name, (_operation, _fix) in _OPERATIONS.items():
    setattr(PerReplica, f"__{_name}__", _rejecting(_operation, _fix))
