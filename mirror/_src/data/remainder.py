"""Batches that do not divide by the number of replicas: refused, left out, or padded."""

from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.data.batches import HostBatch
from mirror._src.utils.errors import describe

Remainder: TypeAlias = Literal["error", "drop", "pad"]


def require_remainder(remainder: Any) -> None:
    """Refuses an unknown choice.

    Raises:
        ValueError: it is none of the three.
    """
    if remainder not in get_args(Remainder):
        raise ValueError(
            f"remainder={remainder!r} is none of 'error', 'drop' and 'pad': what to do with a "
            "batch that does not divide by the number of replicas."
        )


def is_kept(batch: HostBatch, num_replicas: int, remainder: Remainder) -> bool:
    """Whether the batch is distributed.

    Raises:
        ValueError: it neither divides nor may be left out: `"error"`, or the very first one.
    """
    if remainder == "pad" or (batch.size and batch.size % num_replicas == 0):
        return True
    if remainder == "error" or batch.number == 0:
        raise ValueError(_indivisible(batch, num_replicas, remainder))
    return False


def padded_size(first_size: int, divisor: int) -> int:
    """What batches are padded to: the first one's size, rounded up; at least one each."""
    return max(-(-first_size // divisor) * divisor, divisor)


def padded(batch: HostBatch, full: int) -> HostBatch:
    """The batch with its last example repeated up to the full size; `size` stays the true one.

    What pads is real data, so that no log or norm blows up.

    Raises:
        ValueError: the batch is larger than that.
        TypeError: a leaf is an array of keys.
    """
    if batch.size > full:
        raise ValueError(
            f"Batch {batch.number} has {batch.size} examples, more than the first one's, rounded "
            f"up to {full}. All are padded to that size: the first batch is the largest."
        )
    _require_no_keys(batch)
    if batch.size == full:
        return batch
    return batch._replace(leaves=tuple(_pad(leaf, full) for leaf in batch.leaves))


def mask_of(batch: HostBatch, full: int) -> np.ndarray:
    """True for the examples of a padded batch."""
    return np.arange(full) < batch.size


def _require_no_keys(batch: HostBatch) -> None:
    for name, leaf in zip(batch.names, batch.leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{name} is {describe(leaf)}, keys, which the host cannot pad. Yield integers, "
                "and make the keys in the step; or batches that divide."
            )


def _pad(leaf: Any, full: int) -> np.ndarray:
    widths = [(0, full - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return np.pad(np.asarray(leaf), widths, mode="edge" if len(leaf) else "constant")


def _indivisible(batch: HostBatch, n: int, remainder: Remainder) -> str:
    what = f"{batch.names[0]} of batch {batch.number} is {describe(batch.leaves[0])}"
    if batch.size == 0:
        return (
            f"{what}: it has 0 examples. Every batch needs at least one for each replica, {n}; "
            "remainder='drop' leaves empty ones out."
        )
    below, above = batch.size // n * n, (batch.size // n + 1) * n
    nearest = f"{below} or {above}" if below else f"{above}"
    choices = (
        "remainder='drop' leaves out such a batch, but this is the first: nothing trains."
        if remainder == "drop"
        else "Or choose what happens to it: distribute_dataset(dataset, remainder='pad') "
        "yields (batch, mask), remainder='drop' leaves it out."
    )
    return (
        f"{what}: {batch.size} examples do not divide by {n} replicas. The nearest batch sizes "
        f"that do: {nearest}.\n{choices}"
    )
