"""Where eager ops run: `mirror.device` and what follows it."""

import contextlib
import functools
import logging
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import final

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.extend.core import set_current_trace
from jax.sharding import SingleDeviceSharding

from mirror._src.devices import settings
from mirror._src.devices.backend import default_devices, devices_of_type, logical_name
from mirror._src.devices.names import DeviceSpec, LogicalDevice
from mirror._src.devices.op_log import eager_trace, unlogged
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_device
from mirror._src.devices.transfer import move
from mirror._src.utils.errors import InvalidDeviceError, describe
from mirror._src.utils.source_lines import line_of_user
from mirror._src.utils.types import Array, ArrayLike

_logger = logging.getLogger("mirror")


def device(name: DeviceLike | None) -> "Placement":
    """A context in which eager ops, and jitted functions that are called, run on one device.

    It nests, and inside a scope it wins: what is created is not mirrored. It holds for the thread
    that enters it. Arrays made inside are not bound to the device: used outside, they are copied to
    where they are needed. Arrays that are bound to a device, by `jax.device_put`, stay there.

    Args:
        name: such as `"/gpu:1"`, a `LogicalDevice` or a `jax.Device`; `None` means JAX's default
            device, whatever the contexts around say.

    Returns:
        A context that can be entered again and again.

    Raises:
        TypeError: no device.
        ValueError: no device name.
        InvalidDeviceError: there is no such device; the message lists those that there are. With
            `config.set_soft_device_placement(True)`: one that exists is taken.
        RuntimeError: on entering, inside `jax.jit` or a step that `strategy.run` runs.

    >>> with device("/cpu:1"):
    ...     x = jnp.ones(3)
    >>> x.devices()
    {CpuDevice(id=1)}
    """
    return Placement(None if name is None else _existing(name))


@final
class Placement:
    """The context of `mirror.device`."""

    def __init__(self, device: jax.Device | None) -> None:
        self._device = device
        self._entered = threading.local()

    def __enter__(self) -> jax.Device | None:
        _require_eager(self._device)
        with contextlib.ExitStack() as stack:
            if not jax.sharding.get_abstract_mesh().empty:  # a scope's mesh would win
                with set_current_trace(eager_trace()):  # `set_mesh` refuses that of `jax.grad`
                    stack.enter_context(jax.set_mesh(None))
            stack.enter_context(jax.default_device(self._device))
            self._stacks.append(stack.pop_all())
        return self._device

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stacks.pop().__exit__(kind, error, trace)

    @property
    def _stacks(self) -> list[contextlib.ExitStack]:
        """Those of this thread: a context may be shared by several."""
        if not hasattr(self._entered, "stacks"):
            self._entered.stacks = []
        return self._entered.stacks

    def __repr__(self) -> str:
        return f"mirror.device({None if self._device is None else logical_name(self._device)!r})"


def add_n(values: Iterable[ArrayLike]) -> Array:
    """The sum of several arrays, on the current device, added from the left.

    Inside `mirror.device` it is computed there, also where the arrays are bound to other devices,
    by `jax.device_put` or as results of a strategy: they are copied first. Inside a strategy's
    scope it is mirrored. Elsewhere arrays that are all bound to the same devices stay there.
    Differentiable.

    Args:
        values: at least one; arrays or numbers of one shape and dtype.

    Raises:
        ValueError: there are none, or they differ in shape or dtype.
        TypeError: a single array, or something that is no array.

    >>> add_n([jnp.ones(2), jnp.arange(2.0)])
    Array([1., 2.], dtype=float32)
    """
    single = isinstance(values, jax.Array | np.ndarray | str | Mapping)
    single = single or hasattr(values, "__jax_array__")  # an nnx variable
    if single or not isinstance(values, Iterable):
        raise TypeError(f"add_n({describe(values)}) is one value. Pass a list of arrays.")
    arrays = [_as_array(value) for value in values]
    if not arrays:
        raise ValueError("add_n([]) has nothing to add. Pass at least one array.")
    if len({(array.shape, array.dtype) for array in arrays}) > 1:
        raise ValueError(
            f"add_n takes arrays of one shape and dtype, not {', '.join(map(describe, arrays))}."
        )
    return functools.reduce(jnp.add, _together(arrays))


def _as_array(value: ArrayLike) -> Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"add_n takes arrays and numbers, not {describe(value)}.") from error


def _together(arrays: list[Array]) -> list[Array]:
    """The arrays where JAX can add them up: it copies by itself only what is bound to no device."""
    found = [array for array in map(_concrete, arrays) if isinstance(array, jax.Array)]
    places = {array.sharding for array in found if array.committed}
    if len(found) < len(arrays) or not places:  # compiled, or free
        return arrays
    with set_current_trace(eager_trace()):  # `get_mesh` refuses that of `jax.grad`
        mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        replicas = ReplicaDevices(tuple(mesh.devices.flat))
        there = all(map(replicas.is_mirrored, found))
        return arrays if there else list(map(replicas.mirror, arrays))
    if len(places) == 1 and jax.config.values["jax_default_device"] is None:
        return arrays
    here = jax.extend.backend.get_default_device()
    return arrays if places == {SingleDeviceSharding(here)} else [move(a, here) for a in arrays]


def _concrete(value: object) -> object:
    """What is under the tracers of `jax.grad` and `vmap`; something else where JAX compiles."""
    while isinstance(value, jax.core.Tracer):
        value = getattr(value, "primal", getattr(value, "val", None))
    return value


def _existing(name: DeviceLike) -> jax.Device:
    try:
        return canonicalize_device(name)
    except InvalidDeviceError:
        if not settings.get_soft_device_placement():
            raise
        text = name.name if isinstance(name, LogicalDevice) else str(name)
        kind = None if isinstance(name, jax.Device) else DeviceSpec.parse(text).device_type
        found = ((devices_of_type(kind) if kind else ()) or default_devices())[0]
        _say_once(text, logical_name(found))
        return found


@functools.cache
def _say_once(name: str, found: str) -> None:
    """Once for each name, not for each op."""
    _logger.warning("There is no device %s; soft placement takes %s.", name, found)


def _require_eager(device: jax.Device | None) -> None:
    with unlogged():
        compiled = isinstance(jnp.zeros(()), jax.core.Tracer)
    if compiled:
        where = None if device is None else logical_name(device)
        raise RuntimeError(
            f"mirror.device({where!r}) at {line_of_user()} is inside a function that JAX compiles, "
            "by jax.jit or strategy.run: the whole of it runs on one device, or one for each "
            "replica. Open it outside, around the call."
        )
