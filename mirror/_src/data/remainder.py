"""Batches that cannot be split evenly across the replicas: rejected, dropped or padded."""

from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import describe, expected
from mirror._src.data.batches import HostBatch

Remainder: TypeAlias = Literal["error", "drop", "pad"]


def require_remainder(remainder: Any) -> None:
    """Checks the argument `remainder`.

    Raises:
        ValueError: If it is unknown.
    """
    if remainder not in get_args(Remainder):
        raise ValueError(expected("remainder", remainder, "one of 'error', 'drop', 'pad'"))


def is_kept(batch: HostBatch, num_replicas: int, remainder: Remainder) -> bool:
    """Whether the batch is distributed.

    Raises:
        ValueError: If it cannot be split evenly, and `remainder` is `"error"` or it is the first.
    """
    if remainder == "pad" or (batch.size and batch.size % num_replicas == 0):
        return True
    if remainder == "error" or batch.number == 0:
        raise ValueError(_indivisible(batch, num_replicas, remainder))
    return False


def padded_size(first_size: int, divisor: int) -> int:
    """Returns the padded batch size: the first size rounded up to a multiple, at least one."""
    return max(-(-first_size // divisor) * divisor, divisor)


def grown(size: int, needed: int, divisor: int) -> int:
    """Returns the padded size of the next batch: few different ones in a pass.

    The first batch determines it. If a later one is larger, it is doubled, so that the step is
    compiled again only a few times.

    Args:
        size: The padded size so far; 0 before the first batch.
        needed: Size of the next batch.
        divisor: The padded size is a multiple of this.
    """
    if not size:
        return padded_size(needed, divisor)
    while size < needed:
        size *= 2
    return size


def reject_keys(batch: HostBatch) -> None:
    """Rejects arrays of PRNG keys.

    Raises:
        TypeError: If a leaf is one.
    """
    for name, leaf in zip(batch.names, batch.leaves, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"{name} is {describe(leaf)}: PRNG keys cannot be padded. Yield integer seeds and "
                "create the keys in the step, or use a batch size that can be split evenly."
            )


def padded(leaf: Any, full: int) -> np.ndarray:
    """Repeats the last row up to the full size, which cannot introduce NaN or Inf."""
    widths = [(0, full - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return np.pad(np.asarray(leaf), widths, mode="edge" if len(leaf) else "constant")


def _indivisible(batch: HostBatch, n: int, remainder: Remainder) -> str:
    what = f"{batch.names[0]} in batch {batch.number} is {describe(batch.leaves[0])}"
    if batch.size == 0:
        return (
            f"{what}, which has 0 examples. Every batch needs at least {n}, one per replica. Set "
            "remainder='drop' to skip empty batches."
        )
    advice = (
        ". remainder='drop' would skip this batch, but it is the first: nothing would be trained."
        if remainder == "drop"
        else ", or set `remainder`: distribute_dataset(dataset, remainder='pad') yields "
        "(batch, mask); remainder='drop' skips the batch."
    )
    return (
        f"{what}: {batch.size} examples cannot be split evenly across {n} replicas. Use a batch "
        f"size of {nearest_multiples(batch.size, n)}{advice}"
    )


def nearest_multiples(size: int, n: int) -> str:
    """Returns the multiples of `n` on both sides of a size, for messages: `8 or 12`."""
    below = size // n * n
    return f"{below} or {below + n}" if below else str(n)
