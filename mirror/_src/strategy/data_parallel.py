"""`DataParallel`: a wrapper that splits a module's batches across several devices."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from mirror._src.base.errors import counted, expected
from mirror._src.base.public_names import set_module
from mirror._src.base.types import Array
from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_replica_devices
from mirror._src.devices.transfer import require_fits
from mirror._src.engine.nnx.structure import is_object
from mirror._src.inspection.measurement import placed_on, variables_of

_logger = logging.getLogger("mirror")


@set_module("mirror")
@final
class DataParallel(nnx.Module):
    """Wrapper that runs a module on several devices, each with a shard of the batch.

    It replaces the module in one line, and the training loop stays the same. The wrapper is an
    `nnx.Module`, so `nnx.grad`, `nnx.jit` and `nnx.Optimizer` accept it, or its `module`. It is the
    easiest way to use several devices. `MirroredStrategy.run` is the fastest: it runs the whole
    step, with loss, gradients and optimizer, as one program on every device.

    The wrapper declares the sharding of the inputs along the batch axis
    (`jax.lax.with_sharding_constraint`), and XLA splits the computation. The outputs are therefore
    the same as on one device with the whole batch, including batch normalization, dropout, means
    over the batch, and gradients. If the batch size is not a multiple of the number of devices,
    such as in the last batch of an epoch, every device computes the whole batch, and a log entry
    reports it. (Padding would change outputs that depend on the whole batch.)

    Outside `jax.jit`, a call compiles the module once per set of shapes. Inside `jax.jit`, the
    module becomes part of the compiled function; its state must be on the devices or uncommitted.

    Args:
        module: Module to run. Its variables are moved to all devices, in place.
        device_ids: Devices to use: indices into `mirror.MirroredStrategy().devices`, names such as
            `"/gpu:1"`, or `jax.Device`s. Defaults to all devices.

    Attributes:
        module: The wrapped module, which shares its variables with the wrapper.

    Raises:
        TypeError: If `module` is not an `nnx.Module`, or an element of `device_ids` is not a
            device.
        ValueError: If the devices are empty, repeated, unknown or of several types.

    >>> import jax.numpy as jnp
    >>> model = DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> model(jnp.ones((8, 3))).shape
    (8, 2)
    """

    def __init__(
        self, module: nnx.Module, device_ids: Sequence[DeviceLike | int] | None = None
    ) -> None:
        if not isinstance(module, nnx.Module):
            fix = "Pass the model: DataParallel(model, device_ids=[0, 1])."
            raise TypeError(expected("module", module, "an nnx.Module", fix))
        self.module = module
        self._replicas = _replica_devices(_select_devices(device_ids))
        if not _are_traced(nnx.state(module)):
            _mirror_variables(module, self._replicas)

    def __getstate__(self) -> dict[str, Any]:
        names = [backend.logical_name(device) for device in self.devices]
        return {**super().__getstate__(), "_replicas": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        replicas = _replica_devices(_select_devices(state["_replicas"]))
        super().__setstate__({**state, "_replicas": replicas})
        _mirror_variables(self.module, replicas)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices across which batches are split."""
        return self._replicas.devices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Args:
            args: Arguments of the module. The leading axis of the first array is the batch axis.
                Arrays whose leading axis has the same size are split; other arrays are replicated.
                Everything else except nnx objects is static: a new value compiles a new program.
            kwargs: Keyword arguments of the module, treated like `args`.

        Returns:
            Outputs of the module for the whole batch, as plain arrays.
        """
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        dynamic = [leaf if _is_dynamic(leaf) else None for leaf in leaves]
        static = tuple(None if _is_dynamic(leaf) else leaf for leaf in leaves)
        if not _are_traced(nnx.state(self.module)):
            if _are_traced(dynamic):  # a part of the caller's program, which captures the module
                return _run(self.module, dynamic, static, treedef, self._replicas)
            _mirror_variables(self.module, self._replicas)
            for i, leaf in enumerate(dynamic):
                require_fits(f"Array {i} of the arguments", leaf)
            dynamic = [_place(leaf, _batch_size(dynamic), self._replicas) for leaf in dynamic]
        return _forward(self.module, dynamic, static, treedef, self._replicas)


def _run(
    module: Any, dynamic: list[Any], static: tuple[Any, ...], treedef: Any, replicas: ReplicaDevices
) -> Any:
    size = _batch_size(dynamic)
    if size % len(replicas):
        _logger.info(
            "DataParallel: %d examples cannot be split evenly across %d devices; every device "
            "computes the whole batch",
            *(size, len(replicas)),
        )

    def constrain(leaf: Any) -> Any:
        is_split = _is_split(leaf, size, len(replicas))
        return jax.lax.with_sharding_constraint(leaf, replicas.stacked) if is_split else leaf

    leaves = [constrain(d) if s is None else s for d, s in zip(dynamic, static, strict=True)]
    args, kwargs = treedef.unflatten(leaves)
    return module(*args, **kwargs)


_forward: Any = nnx.jit(_run, static_argnums=(2, 3, 4))


@functools.cache
def _replica_devices(devices: tuple[jax.Device, ...]) -> ReplicaDevices:
    """Returns the same object for the same devices: it is part of the key of `jit`'s cache."""
    return ReplicaDevices(devices)


def _select_devices(device_ids: Sequence[DeviceLike | int] | None) -> tuple[jax.Device, ...]:
    available = canonicalize_replica_devices(None)
    if isinstance(device_ids, Sequence) and not isinstance(device_ids, str):
        unknown = [i for i in device_ids if isinstance(i, int) and not 0 <= i < len(available)]
        if unknown:
            raise ValueError(
                f"Unknown index {unknown[0]} in device_ids={list(device_ids)!r}. Indices count the "
                f"{counted(len(available), 'available device')} from 0: {backend.names(available)}."
            )
        device_ids = [available[i] if isinstance(i, int) else i for i in device_ids]
    devices = canonicalize_replica_devices(device_ids)
    if len({backend.type_of(device) for device in devices}) > 1:
        raise ValueError(
            f"`device_ids` must be devices of a single type, got {backend.names(devices)}. Select "
            "one type, or use mirror.MirroredStrategy, which supports several."
        )
    return devices


def _is_dynamic(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) or is_object(leaf)


def _are_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _batch_size(leaves: Sequence[Any]) -> int:
    """Returns the leading size of the first array that is not a scalar, else 1."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]
    return next((leaf.shape[0] for leaf in arrays if leaf.ndim), 1)


def _is_split(leaf: Any, batch_size: int, num_devices: int) -> bool:
    """Whether an argument is split along its leading axis."""
    is_array = isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 0
    return is_array and leaf.shape[0] == batch_size and batch_size % num_devices == 0


def _place(leaf: Any, batch_size: int, replicas: ReplicaDevices) -> Any:
    """Moves an argument to the devices: split along its leading axis, or replicated."""
    if _is_split(leaf, batch_size, len(replicas)):
        return replicas.stack(leaf)
    if isinstance(leaf, np.ndarray):
        return replicas.mirror(leaf)  # its owner may refill it before the step has read it
    return replicas.broadcast(leaf) if isinstance(leaf, jax.Array) else leaf


def _mirror_variables(module: nnx.Module, replicas: ReplicaDevices) -> None:
    """Moves the variables of a module to all devices, if necessary."""
    for variable in variables_of([module]):
        value: Array = variable.get_raw_value()
        new = placed_on(value, replicas)
        if any(a is not b for a, b in zip(*map(jax.tree.leaves, (value, new)), strict=True)):
            variable.set_raw_value(new)
