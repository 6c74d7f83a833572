"""`DataParallel`: a module whose batches are split over several devices, and nothing else to do."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from mirror._src.devices import backend
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.devices.resolve import DeviceLike, canonicalize_replica_devices
from mirror._src.run.nnx.structure import is_object
from mirror._src.utils.errors import describe
from mirror._src.utils.modules import set_module
from mirror._src.utils.types import Array

_logger = logging.getLogger("mirror")


@set_module("mirror")
@final
class DataParallel(nnx.Module):
    """Runs a module on several devices, each with a part of the batch: full batch in and out.

    In place of the module, in one line; the training loop around it stays as it is. It is an
    `nnx.Module` itself, so `nnx.grad`, `nnx.jit` and `nnx.Optimizer` take it, or its `module`. It
    is the quick way to more devices. `MirroredStrategy.run` is the way to speed: there the whole
    step, with loss, gradients and optimizer, is one program on each device.

    Nothing is padded and no step is rewritten: XLA is told over how many devices the batch axis of
    the inputs lies (`jax.lax.with_sharding_constraint`), and splits the computation itself. What
    comes out is by its definition what one device computes on the whole batch: batch
    normalisation, dropout, a mean over the batch, and the gradients too. A batch that does not
    divide by the number of devices, as the last one of an epoch, is not split: all devices compute
    all of it. (Padding it would change what depends on the whole batch.) The log says so.

    Outside `jax.jit` a call compiles the module, once for each set of shapes; inside, it is a part
    of what is compiled there, and the state must lie on the devices or be bound to none.

    Args:
        module: what to run. Its variables are put on all the devices, in place.
        device_ids: which devices: numbers as in `mirror.MirroredStrategy().devices`, names such as
            `"/gpu:1"`, or `jax.Device`s. `None`: all.

    Attributes:
        module: the module, which shares its variables with this one.

    Raises:
        TypeError: `module` is no `nnx.Module`, or something that is no device.
        ValueError: no devices, repeated or unknown ones, or devices of several types.

    >>> import jax.numpy as jnp
    >>> model = DataParallel(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> model(jnp.ones((8, 3))).shape
    (8, 2)
    """

    def __init__(
        self, module: nnx.Module, device_ids: Sequence[DeviceLike | int] | None = None
    ) -> None:
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"module={describe(module)} is no nnx.Module. Pass the model: "
                "DataParallel(model, device_ids=[0, 1])."
            )
        self.module = module
        self._replicas = _replicas(_devices(device_ids))
        if not _are_traced(nnx.state(module)):
            _spread(module, self._replicas)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that batches are split over."""
        return self._replicas.devices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Args:
            args: what the module takes. The first array's leading axis is the batch axis; arrays
                with as long a leading axis are split along it, the others go to all devices.
                Anything else but nnx objects is static: a new value is a new program.
            kwargs: treated alike.

        Returns:
            What the module returns: plain arrays of the whole batch, in order.
        """
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        dynamic = [leaf if _is_dynamic(leaf) else None for leaf in leaves]
        static = tuple(None if _is_dynamic(leaf) else leaf for leaf in leaves)
        if not _are_traced((nnx.state(self.module), dynamic)):
            _spread(self.module, self._replicas)
            dynamic = [_placed(leaf, _batch_size(dynamic), self._replicas) for leaf in dynamic]
        return _forward(self.module, dynamic, static, treedef, self._replicas)


def _run(
    module: Any, dynamic: list[Any], static: tuple[Any, ...], treedef: Any, replicas: ReplicaDevices
) -> Any:
    size = _batch_size(dynamic)
    if size % len(replicas):
        _logger.info(
            "DataParallel: %d examples do not divide by %d devices; each computes all of them",
            *(size, len(replicas)),
        )

    def constrained(leaf: Any) -> Any:
        fits = _has_rows(leaf, size) and size % len(replicas) == 0
        return jax.lax.with_sharding_constraint(leaf, replicas.stacked) if fits else leaf

    leaves = [constrained(d) if s is None else s for d, s in zip(dynamic, static, strict=True)]
    args, kwargs = treedef.unflatten(leaves)
    return module(*args, **kwargs)


_forward: Any = nnx.jit(_run, static_argnums=(2, 3, 4))


@functools.cache
def _replicas(devices: tuple[jax.Device, ...]) -> ReplicaDevices:
    """One object for the same devices, because programs are found by it."""
    return ReplicaDevices(devices)


def _devices(device_ids: Sequence[DeviceLike | int] | None) -> tuple[jax.Device, ...]:
    every = canonicalize_replica_devices(None)
    if isinstance(device_ids, Sequence) and not isinstance(device_ids, str):
        unknown = [i for i in device_ids if isinstance(i, int) and not 0 <= i < len(every)]
        if unknown:
            raise ValueError(
                f"device_ids={list(device_ids)!r}: there is no device {unknown[0]}. There are "
                f"{len(every)}, numbered from 0: {backend.names(every)}."
            )
        device_ids = [every[i] if isinstance(i, int) else i for i in device_ids]
    found = canonicalize_replica_devices(device_ids)
    if len({backend.type_of(device) for device in found}) > 1:
        raise ValueError(
            f"device_ids={list(device_ids or ())!r} are devices of several types, "
            f"{backend.names(found)}: no array spans them. Name devices of one type, or use "
            "mirror.MirroredStrategy, which can."
        )
    return found


def _is_dynamic(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) or is_object(leaf)


def _are_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _batch_size(leaves: Sequence[Any]) -> int:
    """The leading size of the first array that has one; 1 where there is none."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]
    return next((leaf.shape[0] for leaf in arrays if leaf.ndim), 1)


def _has_rows(leaf: Any, size: int) -> bool:
    is_array = isinstance(leaf, jax.Array | np.ndarray)
    return is_array and leaf.ndim > 0 and leaf.shape[0] == size


def _placed(leaf: Any, size: int, replicas: ReplicaDevices) -> Any:
    """A leaf of a batch on the devices, each row on its own where that can be."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    if _has_rows(leaf, size) and size % len(replicas) == 0:
        return replicas.stack(leaf)
    return replicas.broadcast(leaf)


def _spread(module: nnx.Module, replicas: ReplicaDevices) -> None:
    """Puts the variables of a module on all devices, where they are not."""

    def spread(leaf: Any) -> Any:
        there = not isinstance(leaf, jax.Array) or replicas.is_mirrored(leaf)
        return leaf if there else replicas.mirror(leaf)

    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            value: Array = node.get_raw_value()
            new = jax.tree.map(spread, value)
            if any(a is not b for a, b in zip(*map(jax.tree.leaves, (value, new)), strict=True)):
                node.set_raw_value(new)
