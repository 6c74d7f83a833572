"""Placement of eager ops: `mirror.device` and `mirror.add_n`."""

import contextlib
import functools
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import final

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.extend.core import set_current_trace

from mirror._src.base.errors import InvalidDeviceError, describe
from mirror._src.base.tracebacks import line_of_user
from mirror._src.base.types import Array, ArrayLike
from mirror._src.devices import settings
from mirror._src.devices.backend import default_devices, devices_of_type, logical_name
from mirror._src.devices.names import DeviceSpec, LogicalDevice
from mirror._src.devices.op_log import eager_trace, unlogged
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_device
from mirror._src.devices.transfer import host_copy, move, require_fits

_logger = logging.getLogger("mirror")


def device(name: DeviceLike | None) -> "Placement":
    """Context manager that runs eager ops and jitted functions on one device.

    Contexts nest. Inside a strategy's scope, `device` takes precedence: new arrays are not
    mirrored. A context applies to the thread that enters it. Arrays created inside are not
    committed to the device: JAX copies them when they are used elsewhere. Arrays committed to a
    device, for example by `jax.device_put`, stay there.

    Args:
        name: A name such as `"/gpu:1"`, a `LogicalDevice`, or a `jax.Device`. None selects JAX's
            default device, regardless of enclosing contexts.

    Returns:
        A reusable context manager.

    Raises:
        TypeError: If `name` is not a device.
        ValueError: If `name` is not a device name.
        InvalidDeviceError: If the device does not exist; the message lists the available devices.
            After `config.set_soft_device_placement(True)`, an existing device is used instead.
        RuntimeError: When entered inside `jax.jit` or a step run by `strategy.run`.

    >>> with device("/cpu:1"):
    ...     x = jnp.ones(3)
    >>> x.devices()
    {CpuDevice(id=1)}
    """
    return Placement(None if name is None else _resolve(name))


class _Entered(threading.local):
    """The contexts that a thread has entered; several threads may share one `Placement`."""

    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack] = []


@final
class Placement:
    """Context manager returned by `mirror.device`."""

    def __init__(self, device: jax.Device | None) -> None:
        self._device = device
        self._entered = _Entered()

    def __enter__(self) -> jax.Device | None:
        _require_eager(self._device)
        with contextlib.ExitStack() as stack:
            # The mesh of a scope would take precedence over the default device.
            if not jax.sharding.get_abstract_mesh().empty:
                with set_current_trace(eager_trace()):  # `set_mesh` raises inside `jax.grad`
                    stack.enter_context(jax.set_mesh(None))
            stack.enter_context(jax.default_device(self._device))
            self._entered.stacks.append(stack.pop_all())
        return self._device

    def __exit__(self, *_: object) -> None:
        self._entered.stacks.pop().close()

    def __repr__(self) -> str:
        return f"mirror.device({None if self._device is None else logical_name(self._device)!r})"


def add_n(values: Iterable[ArrayLike]) -> Array:
    """Returns the sum of several arrays, computed on the current device from left to right.

    Inside `mirror.device`, arrays committed to other devices (by `jax.device_put`, or as results of
    a strategy) are copied first. Inside a strategy's scope, the sum is mirrored. Elsewhere, if all
    arrays are committed to the same devices, the sum is computed there. Differentiable.

    Args:
        values: One or more arrays or numbers with the same shape and dtype.

    Raises:
        ValueError: If `values` is empty, or shapes or dtypes differ.
        TypeError: If `values` is a single array, or an element is not an array.

    >>> add_n([jnp.ones(2), jnp.arange(2.0)])
    Array([1., 2.], dtype=float32)
    """
    is_single = isinstance(values, jax.Array | np.ndarray | str | Mapping)
    is_single = is_single or hasattr(values, "__jax_array__")  # an nnx variable
    if is_single or not isinstance(values, Iterable):
        raise TypeError(f"add_n expects a list of arrays, got {describe(values)}.")
    arrays = [_as_array(value) for value in values]
    if not arrays:
        raise ValueError("add_n expects at least one array, got [].")
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        raise ValueError(
            "add_n expects arrays of the same shape and dtype, got "
            f"{', '.join(map(describe, arrays))}."
        )
    first, *others = _together(arrays)
    return functools.reduce(jnp.add, others, first if others else jnp.copy(first))


def _as_array(value: ArrayLike) -> Array:
    require_fits("An array of add_n", value)
    try:
        return jnp.asarray(host_copy(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"add_n expects arrays or numbers, got {describe(value)}.") from error


def _together(arrays: list[Array]) -> list[Array]:
    """Copies the arrays to the devices of the sum; JAX itself copies only uncommitted arrays."""
    concrete = [array for array in map(_concrete, arrays) if isinstance(array, jax.Array)]
    shardings = {array.sharding for array in concrete if array.committed}
    if len(concrete) < len(arrays) or not shardings:  # inside a compilation, or uncommitted
        return arrays
    with set_current_trace(eager_trace()):  # `get_mesh` raises inside `jax.grad`
        mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        replicas = ReplicaDevices(tuple(mesh.devices.flat))
        are_mirrored = all(map(replicas.is_mirrored, concrete))
        return arrays if are_mirrored else list(map(replicas.mirror, arrays))
    if len(shardings) == 1 and jax.config.values["jax_default_device"] is None:
        return arrays
    target = jax.extend.backend.get_default_device()
    return [move(array, target) for array in arrays]


def _concrete(value: object) -> object:
    """Returns the array under tracers of `jax.grad` and `vmap`; inside `jax.jit`, not an array."""
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "primal", getattr(value, "val", None))
    return value


def _resolve(name: DeviceLike) -> jax.Device:
    try:
        return canonicalize_device(name)
    except InvalidDeviceError:
        if not settings.get_soft_device_placement():
            raise
        text = name.name if isinstance(name, LogicalDevice) else str(name)
        kind = None if isinstance(name, jax.Device) else DeviceSpec.parse(text).device_type
        substitute = ((devices_of_type(kind) if kind else ()) or default_devices())[0]
        _warn_substituted(text, logical_name(substitute))
        return substitute


@functools.cache
def _warn_substituted(name: str, substitute: str) -> None:
    """Warns once for each name, instead of for each op."""
    _logger.warning("Unknown device %s; soft placement uses %s instead.", name, substitute)


def _require_eager(device: jax.Device | None) -> None:
    with unlogged():
        is_compiling = isinstance(jnp.zeros(()), jax.core.Tracer)
    if is_compiling:
        name = None if device is None else logical_name(device)
        raise RuntimeError(
            f"mirror.device({name!r}) was entered at {line_of_user()}, inside a function compiled "
            "by jax.jit or strategy.run, which cannot change devices midway. Enter it around the "
            "call instead."
        )
