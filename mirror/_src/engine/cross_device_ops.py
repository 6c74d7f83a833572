"""`CrossDeviceOps`: base class for implementations of the collectives, and argument checks."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from mirror._src.base.errors import describe, require_int
from mirror._src.base.public_names import set_module
from mirror._src.base.tracebacks import api_boundary
from mirror._src.base.types import ARRAY_LIKE, Array, ArrayLike, PyTree, accumulator, is_numeric
from mirror._src.devices.backend import names
from mirror._src.devices.launches import StalledError
from mirror._src.devices.names import LogicalDevice
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import (
    DeviceLike,
    canonicalize_device,
    canonicalize_replica_devices,
)
from mirror._src.devices.transfer import (
    NoMesh,
    UnstackedArrays,
    any_deleted,
    is_tracing,
    move,
    require_fits,
)
from mirror._src.engine.in_step import bind_all_reduce
from mirror._src.engine.per_replica import (
    PerReplica,
    brief,
    held_by,
    is_per_replica,
    spans_processes,
)
from mirror._src.engine.reduce_op import (
    ReduceOp,
    Reduction,
    fold,
    prepare,
    require_op,
    result_dtype,
)
from mirror._src.jaxprs.collective_eqns import is_replica_source
from mirror._src.jaxprs.equations import equations, user_line
from mirror._src.jaxprs.primitives import CALLBACK, op_of
from mirror._src.jaxprs.trace import trace_inside

_DONATED = "its buffer was donated to an earlier `run`. Use the array that `run` returned."


def require_reducible(value: PerReplica) -> PerReplica:
    """Returns the operand of `reduce` unchanged.

    Raises:
        ValueError: If the replicas' values differ in shape or have been deleted.
    """
    if len(set(value.shapes)) > 1:
        raise ValueError(
            f"Cannot reduce {value!r}: its values differ in shape "
            f"({', '.join(map(str, value.shapes))}). Reduce each value over its own axis first: "
            "strategy.reduce(op, x, axis=0)."
        )
    held = held_by(value)
    arrays = held.arrays if isinstance(held, UnstackedArrays) else [held]
    if any_deleted([array for array in arrays if isinstance(array, jax.Array)]):
        raise ValueError(f"Cannot reduce {value!r}: {_DONATED}")
    return value


def replica_devices(devices: DeviceLike | Sequence[DeviceLike]) -> ReplicaDevices:
    """Returns the devices that one name or a list of names identifies."""
    several = list(devices) if isinstance(devices, list | tuple) else [devices]
    return ReplicaDevices(canonicalize_replica_devices(several))


def devices_of(value: PerReplica) -> ReplicaDevices | None:
    """Returns the devices of a value with one array per device, or with all arrays on one device.

    Returns `None` for any other value, such as one that is on the host.
    """
    if spans_processes(value):
        array: Any = held_by(value)
        return ReplicaDevices(tuple(array.sharding.mesh.devices.flat))
    values = value.values
    arrays = [array for array in values if isinstance(array, jax.Array)]
    devices = tuple(device for array in arrays for device in array.devices())
    if not len(arrays) == len(devices) == len(values):
        return None
    return ReplicaDevices(devices) if len(set(devices)) in (1, len(devices)) else None


_HOST_PACK_BYTES = 32 * 1024
# Each collective is a round of messages between all devices. Separate all-reduces of 1 MiB take 1.7
# to 2.3 of the time of packed ones, of 64 KiB 5 to 9, and of 4 MiB the same (2 x 2 and 4 x 1).
_GLOO_PACK_BYTES = 1024 * 1024


class LostValueError(RuntimeError):
    """Raised if a replica's operand of a collective cannot be read."""


@set_module("mirror")
class CrossDeviceOps:
    """Base class for implementations of the collectives of a step.

    Pass an instance as `MirroredStrategy(cross_device_ops=...)`, or call its `reduce` and
    `broadcast` outside a step. To customize the reduction, for example to compress the operands,
    subclass `CrossDeviceOps` and override one of two methods, which then implements all reductions
    of the strategy: those in steps, in `strategy.reduce`, and in `reduce`.

    - `reduce_stacked` is compiled as a part of the step, for the devices of one or several
      processes.
    - `reduce_implementation` uses NumPy on the host, between the parts of a step.

    Raises:
        TypeError: If a subclass overrides neither or both.

    >>> class InHalfPrecision(CrossDeviceOps):
    ...     def reduce_stacked(self, op, stacked):
    ...         halves = stacked.astype("float16").astype(stacked.dtype)
    ...         return getattr(halves, op.value)(axis=0)
    >>> float(InHalfPrecision().reduce("sum", mirror.PerReplica([2049.0, 1.0])))
    2049.0
    """

    pack_bytes: int | None = 0
    """Size in bytes up to which all-reduces are packed into one collective; `None` if automatic."""

    _narrow = False
    """Whether steps sum half-precision values in their own dtype instead of float32."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Checks which methods are overridden."""
        on_host = cls.reduce_implementation is not CrossDeviceOps.reduce_implementation
        if on_host == cls._is_compiled():
            found = "both reduce_stacked and" if on_host else "neither reduce_stacked nor"
            raise TypeError(
                f"{cls.__name__} overrides {found} reduce_implementation. Override "
                "reduce_stacked(op, stacked) to reduce on the devices, or "
                "reduce_implementation(op, values) to reduce on the host."
            )
        return super().__new__(cls)

    @classmethod
    def _is_compiled(cls) -> bool:
        """Whether the reduction is a part of the compiled step."""
        return cls.reduce_stacked is not CrossDeviceOps.reduce_stacked

    @property
    def device(self) -> jax.Device:
        """The device on which values are reduced: the host CPU."""
        return canonicalize_device("/cpu:0")

    def reduce_stacked(self, op: ReduceOp, stacked: Array) -> Array:
        """Reduces the operands of one collective on the devices. Called while a step is traced.

        Every device receives the operands of all replicas and computes the result, so that the
        reduction may use any order and any JAX function, but not a collective, the id of the
        replica, or the host.

        Args:
            op: `SUM`, `MIN` or `MAX`. `mirror` divides a sum to obtain a mean.
            stacked: The operands in replica order, `(num_replicas, *shape)`.

        Returns:
            An array of shape `(*shape,)` and the dtype of `stacked`.
        """
        raise NotImplementedError  # unless overridden, it is not called

    def reduce_implementation(
        self, op: ReduceOp, values: Iterator[np.ndarray]
    ) -> Array | np.ndarray:
        """Reduces the operands of one collective. Called once, on behalf of all replicas.

        Args:
            op: `SUM`, `MIN` or `MAX`. `mirror` divides a sum to obtain a mean.
            values: One read-only array per replica, in replica order, all of the same shape and
                dtype. Each is yielded once its replica has computed it. To save memory, accumulate
                them instead of collecting them in a list.

        Returns:
            An array of the same shape and dtype, which must not be modified afterwards.
        """
        if type(self).reduce_stacked is CrossDeviceOps.reduce_stacked:
            return fold(op, values)
        with NoMesh():  # the current mesh consists of the devices of all replicas
            stacked = move(np.stack(list(values)), self.device)
            return np.asarray(self.reduce_stacked(op, stacked))

    @final
    def _reduce_in_step(self, primitive: str, stacked: Array, collective: str) -> Array:
        """Calls `reduce_stacked` while a step is traced, and checks what it computes.

        Args:
            primitive: `psum`, `pmin` or `pmax`.
            stacked: The operands, in replica order.
            collective: Description of the collective, for error messages.

        Raises:
            RuntimeError: If `reduce_stacked` raises an exception, or may return different values
                on different devices.
            TypeError: If the result has another shape or dtype.
        """
        op, method = ReduceOp(op_of(primitive)), f"{type(self).__name__}.reduce_stacked"
        operand = jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)
        of = f"in the {collective}, for {op.value!r} of {describe(operand)}"
        try:
            program = trace_inside(functools.partial(self.reduce_stacked, op), [stacked])
        except Exception as error:
            raise RuntimeError(f"{method} raised {type(error).__name__} {of}: {error}") from error
        for eqn in equations(program.jaxpr):
            if is_replica_source(eqn) or eqn.primitive.name in CALLBACK:
                raise RuntimeError(
                    f"{method} uses {eqn.primitive.name} at {user_line(eqn)}, {of}. Every device "
                    "must compute the same result from the stacked operands alone: remove it, or "
                    "override reduce_implementation, which runs on the host."
                )
        if len(program.out_avals) != 1 or not _fits(program.out_avals[0], operand):
            found = ", ".join(map(describe, program.out_avals)) or None
            raise TypeError(
                f"{method} returned {found} {of}. Return one array of the shape and dtype of a "
                "replica's operand."
            )
        (result,) = jaxpr_as_fun(program)(stacked)
        return result.astype(operand.dtype)

    @final
    def _carry_out(
        self,
        op: ReduceOp,
        values: Iterator[np.ndarray],
        shape: tuple[int, ...],
        dtype: Any,
        collective: str,
    ) -> Array | np.ndarray:
        """Calls `reduce_implementation` on the host and checks its result.

        Args:
            op: `SUM`, `MIN` or `MAX`.
            values: One array per replica, in replica order.
            shape: Shape of the operands.
            dtype: Dtype of the operands.
            collective: Description of the collective, for error messages.

        Raises:
            RuntimeError: If `reduce_implementation` raises an exception.
            ValueError: If the result has another shape, or a dtype that cannot be cast to `dtype`.
        """
        method = "reduce_stacked" if self._is_compiled() else "reduce_implementation"
        method = f"{type(self).__name__}.{method}"
        operand = jax.ShapeDtypeStruct(shape, dtype)
        try:
            result = self.reduce_implementation(op, values)
        except (LostValueError, StalledError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"{method} raised {type(error).__name__} in the {collective}, for {op.value!r} of "
                f"{describe(operand)}: {error}"
            ) from error
        if not isinstance(result, jax.Array):
            result = np.asarray(result)
        if not _fits(result, operand):
            raise ValueError(
                f"{method} returned {describe(result)} in the {collective}, but the operands are "
                f"{describe(operand)}. Return an array of that shape and dtype."
            )
        return result if result.dtype == dtype else result.astype(dtype)

    @final
    def all_reduce(self, op: ReduceOp, leaves: Sequence[Array]) -> list[Array]:
        """All-reduces arrays inside a replica, while the step is traced.

        Executors pack the small ones later, when the whole step is known.

        Args:
            op: The reduction. `ReduceOp` lists the dtypes of the results.
            leaves: This replica's arrays, of any shapes and dtypes.

        Returns:
            The reduced arrays, in the shapes of the leaves, mirrored over the replicas.

        Raises:
            TypeError: If a leaf cannot be reduced by `op`.
        """
        return [bind_all_reduce(op, prepare(op, leaf), narrow=self._narrow) for leaf in leaves]

    def _packed_bytes(self, *, on_host: bool, spans_processes: bool = False) -> int:
        """Returns the size in bytes up to which a program across the devices packs all-reduces.

        Args:
            on_host: Whether the devices are several host devices.
            spans_processes: Whether the devices belong to several processes.
        """
        if self.pack_bytes is not None:
            return self.pack_bytes
        if not on_host:
            return 0
        return _GLOO_PACK_BYTES if spans_processes else _HOST_PACK_BYTES

    @final
    @api_boundary
    def reduce(
        self,
        op: Reduction,
        value: PyTree,
        destinations: DeviceLike | Sequence[DeviceLike] | None = None,
    ) -> PyTree:
        """Reduces per-replica values outside a step.

        Args:
            op: A `ReduceOp` or its name: `"sum"`, `"mean"`, `"min"` or `"max"`.
            value: A pytree of `PerReplica` values. Any other array or number is treated as the
                value of a single replica.
            destinations: Device or devices on which to store the result. Defaults to the devices
                of the value.

        Returns:
            A pytree of the same structure. Each leaf is an array with the shape of one replica's
            value, mirrored over the destinations. `ReduceOp` lists the dtypes.

        Raises:
            ValueError: If `op` is unknown, if the replicas' values differ in shape or have been
                deleted, or if `destinations` are of several types.
            TypeError: If a leaf is not an array or cannot be reduced by `op`, or if `op` is
                neither a string nor a `ReduceOp`.
            RuntimeError: If called inside a replica or under a JAX transformation.
        """
        op = require_op(f"{type(self).__name__}().reduce", op, value)
        return self.batch_reduce(op, [value], destinations)[0]

    @final
    @api_boundary
    def batch_reduce(
        self,
        op: Reduction,
        values: Sequence[PyTree],
        destinations: DeviceLike | Sequence[DeviceLike] | None = None,
    ) -> list[PyTree]:
        """Reduces a list of values outside a step.

        Args:
            op: As in `reduce`.
            values: List of pytrees, each as the `value` of `reduce`.
            destinations: As in `reduce`.

        Returns:
            A list with the result of `reduce` for each value.

        Raises:
            TypeError: If `values` is not a list or tuple. Also raises the errors of `reduce`.
        """
        op = require_op(f"{type(self).__name__}().batch_reduce", op, values)
        self._require_untraced("reduce", "Use mirror.all_reduce.")
        if not isinstance(values, list | tuple):
            raise TypeError(f"batch_reduce expects a list of values, got {describe(values)}.")
        devices = None if destinations is None else replica_devices(destinations)
        if devices is not None and devices.are_mixed:
            raise ValueError(
                f"`destinations` must be devices of a single type, got {names(devices.devices)}. "
                "To copy the result to several types of devices, use broadcast(x, destinations)."
            )

        def reduce_leaf(leaf: Any) -> Array:
            value = require_reducible(leaf if is_per_replica(leaf) else PerReplica([leaf]))
            require_fits("`value`", held_by(value))
            result = self._reduced(op, value)
            return result if devices is None else devices.broadcast(result)

        return [jax.tree.map(reduce_leaf, value, is_leaf=is_per_replica) for value in values]

    @final
    @api_boundary
    def broadcast(
        self, value: ArrayLike, devices: DeviceLike | Sequence[DeviceLike]
    ) -> Array | PerReplica:
        """Copies an array to each of the devices.

        Args:
            value: An array or a number.
            devices: Device or list of devices: names, `LogicalDevice`s or `jax.Device`s.

        Returns:
            A mirrored array with the shape and dtype of `value`. If the devices are of several
            types, which one array cannot span, a `PerReplica` with one copy per device.

        Raises:
            ValueError: If a device is unknown or repeated, or `value` is a deleted array.
            TypeError: If `value` is neither an array nor a number.
            OverflowError: If `value` is an int that does not fit JAX's default integer type.
            RuntimeError: If called inside a replica or under a JAX transformation.
        """
        self._require_untraced("broadcast", "Arrays that a replica uses are on its device already.")
        if _are_devices(value) and not _are_devices(devices):
            method = f"{type(self).__name__}().broadcast"
            raise TypeError(
                f"The arguments of {method} are swapped: the value must come first, got devices "
                f"and then {describe(devices)}. Write {method}(value, devices)."
            )
        if not isinstance(value, int):
            require_fits("`value`", value)
        array: Any = value
        if isinstance(value, jax.Array) and value.is_deleted():
            raise ValueError(f"Cannot broadcast a deleted array, {describe(value)}: {_DONATED}")
        if not isinstance(value, jax.Array):
            if not isinstance(value, ARRAY_LIKE) or not is_numeric(np.asarray(value).dtype):
                raise TypeError(
                    f"broadcast expects an array or a number, got {describe(value)}. For a pytree, "
                    "broadcast each leaf with jax.tree.map."
                )
            array = np.array(value, jnp.result_type(value))
        targets = replica_devices(devices)
        if targets.are_mixed:
            return PerReplica([move(array, device) for device in targets.devices])
        return targets.broadcast(array)

    def _require_untraced(self, method: str, fix: str) -> None:
        if is_tracing():
            raise RuntimeError(
                f"{type(self).__name__}.{method} was called inside a replica, or inside another "
                f"function that JAX traces. {fix}"
            )

    def _reduced(self, op: ReduceOp, value: PerReplica) -> Array:
        """Returns the reduction of one value, on the value's own devices."""
        if spans_processes(value):
            raise NotImplementedError(
                f"{type(self).__name__}().reduce reduces on the host of one process, but other "
                f"processes store some values of {brief(value)}. Reduce it across the devices, on "
                "every process: strategy.reduce(op, x)."
            )
        arrays, dtype = value.values, result_dtype(op, value.dtype)
        is_mean = op is ReduceOp.MEAN
        wide = np.dtype(accumulator(dtype)) if is_mean else dtype
        rows = (np.asarray(row).astype(dtype, copy=False) for row in arrays)
        ready = (row.astype(wide, copy=False) for row in rows)
        of_sum = ReduceOp.SUM if is_mean else op
        result = self._carry_out(of_sum, ready, value.shapes[0], wide, "reduction outside a step")
        if is_mean:
            with np.errstate(all="ignore"):
                result = (np.asarray(result) / np.asarray(len(arrays), wide)).astype(dtype)
        devices = devices_of(value)
        return jnp.asarray(np.asarray(result)) if devices is None else devices.broadcast(result)


def _fits(result: Any, operand: jax.ShapeDtypeStruct) -> bool:
    """Whether a result has the shape of an operand, and a dtype that may be cast to its dtype."""
    casts = result.dtype == operand.dtype or np.can_cast(result.dtype, operand.dtype, "same_kind")
    return result.shape == operand.shape and casts


def _are_devices(value: Any) -> bool:
    """Whether this is a device, or a sequence of devices; a name is a string."""
    several = value if isinstance(value, list | tuple) else [value]
    return bool(several) and all(isinstance(d, str | LogicalDevice | jax.Device) for d in several)


def require_pack_bytes(pack_bytes: int | None) -> int | None:
    """Returns the argument unchanged.

    Raises:
        ValueError: If `pack_bytes` is negative.
        TypeError: If `pack_bytes` is neither an int nor `None`.
    """
    if pack_bytes is not None:
        require_int("pack_bytes", pack_bytes, 0, "It is a size in bytes; 0 disables packing.")
    return pack_bytes
