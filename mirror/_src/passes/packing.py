"""Packs small arrays into one flat buffer, and unpacks them."""

from collections.abc import Sequence
from typing import Any

import jax

from mirror._src.base.types import Array


def join(leaves: Sequence[Array]) -> Array:
    """Returns one flat buffer with the elements of arrays of the same dtype."""
    # jax.numpy would convert 64-bit arrays to 32 bits where JAX's x64 mode is disabled.
    return jax.lax.concatenate([jax.lax.reshape(leaf, (leaf.size,)) for leaf in leaves], 0)


def split(flat: Array, like: Sequence[Any]) -> list[Array]:
    """Splits a buffer into arrays with the sizes and shapes of `like`."""
    arrays, start = [], 0
    for leaf in like:
        array = jax.lax.slice(flat, (start,), (start + leaf.size,))
        arrays.append(jax.lax.reshape(array, leaf.shape))
        start += leaf.size
    return arrays
