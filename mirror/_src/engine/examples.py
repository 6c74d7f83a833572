"""`example_keys` and `example_mask`: the examples of a batch, whatever the number of replicas."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from mirror._src.base.naming import warn_user
from mirror._src.base.types import Array, PyTree
from mirror._src.engine.replica_context import current_replica

_SEPARATE = "threefry2x32"
_use_keys = set[tuple[jax.Device, ...]]()  # devices of replicas whose steps call `example_keys`
_padded: dict[tuple[jax.Device, ...], str] = {}  # and batches that pad rows of several processes


def example_keys(key: Array, batch: PyTree) -> Array:
    """Returns one PRNG key per example, derived from its position in the global batch.

    Dropout, noise and augmentation that use these keys are the same on one device as on eight. In
    contrast, per-replica keys (`replica_context.fold_in`, `nnx.Rngs`) give different samples for
    every number of replicas. Outside a step, `batch` is the global batch. With `input="local"`,
    padding of one process counts as positions, with a warning.

    Args:
        key: A PRNG key of the type `threefry2x32`, JAX's default, the same on all replicas. Pass
            a new one in every step.
        batch: Pytree of this replica's arrays, each of shape `(B, ...)`.

    Returns:
        An array of keys with shape `(B,)`. Use `jax.vmap` to sample with them.

    Raises:
        ValueError: If `batch` contains no arrays, a scalar, or arrays that differ in leading size,
            or if the key has another type: the numbers of an `rbg` key depend on the other keys
            that `jax.vmap` samples with.

    >>> def dropout(x, key, rate=0.1):  # inside a step
    ...     keys = mirror.example_keys(key, x)
    ...     sample = lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:])
    ...     return jnp.where(jax.vmap(sample)(keys), x / (1 - rate), 0)
    >>> dropout(jnp.ones((2, 3)), jax.random.key(0)).shape
    (2, 3)
    """
    size, replica = _num_rows("example_keys", batch), current_replica()
    if (kind := str(jax.random.key_impl(key))) != _SEPARATE:
        raise ValueError(
            f"example_keys got a key of the type {kind!r}, whose numbers depend on the other keys "
            "of a jax.vmap, and so on the number of replicas. Create one with "
            f"jax.random.key(0, impl={_SEPARATE!r})."
        )
    positions = jnp.arange(size) if replica is None else replica._positions(size)
    if replica is not None and replica._in_step:
        warn_of_positions(replica.devices)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, positions)


def warn_of_positions(devices: Sequence[jax.Device], padded: str = "") -> None:
    """Warns once if keys of examples count padding, for one of the two that is noted.

    Args:
        devices: Devices of the replicas, on which a step calls `example_keys`.
        padded: If not, a batch with padding before other examples, in words.
    """
    group = tuple(devices)
    was_noted = group in _use_keys and group in _padded
    if padded:
        _padded.setdefault(group, padded)
    else:
        _use_keys.add(group)
    if group in _use_keys and group in _padded and not was_noted:
        warn_user(
            "mirror.example_keys counts padding that lies before other examples, so that examples "
            f"get other keys than on one device: {_padded[group]}. Give each process as many "
            "examples as its replicas can split evenly, drop the last batch (remainder='drop'), or "
            "use input='global'."
        )


def _num_rows(name: str, batch: PyTree) -> int:
    """Returns the leading size of all arrays of a batch."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"The arrays passed to {name} must have a leading batch axis of the same size, "
            f"got shapes: {', '.join(map(str, shapes)) or None}."
        )
    ((size,),) = sizes
    return size


def example_mask(batch: PyTree) -> Array:
    """Returns a mask of this replica's rows: True for examples, False for padding.

    A `Trainer` pads batches that cannot be split evenly, and ignores the losses of the padding. A
    loss that looks across rows, as batch normalization does, must exclude the padding itself. In
    any other code, all rows are examples.

    Args:
        batch: Pytree of this replica's arrays, each of shape `(B, ...)`.

    Returns:
        A boolean array of shape `(B,)`. It is the `mask` of `nnx.BatchNorm` and `linen.BatchNorm`
        after axes are added for the other axes of their input.

    Raises:
        ValueError: If `batch` contains no arrays, a scalar, or arrays that differ in leading size,
            or if a `Trainer` calls the function and `B` is not the size of the replica's batch.

    >>> def loss_fn(model, batch):
    ...     outputs = model(batch)
    ...     mean = jnp.mean(outputs, axis=0, where=mirror.example_mask(batch)[:, None])
    ...     return ((outputs - mean) ** 2).sum(-1)
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> loss_fn(model, jnp.ones((4, 2))).shape
    (4,)
    """
    size, replica = _num_rows("example_mask", batch), current_replica()
    mask = None if replica is None else replica.mask
    if mask is None:
        return jnp.ones(size, bool)
    if mask.shape != (size,):
        raise ValueError(
            f"The arrays passed to example_mask have {size} rows, but the replica's batch has "
            f"{mask.size}. Pass the batch that the loss function receives, or a part of it."
        )
    found: Array = mask
    return found


@contextlib.contextmanager
def masking(mask: Array) -> Iterator[None]:
    """Context manager in which `example_mask` returns this mask in the current replica."""
    replica = current_replica()
    if replica is None:
        yield
        return
    before, replica.mask = replica.mask, mask
    try:
        yield
    finally:
        replica.mask = before
