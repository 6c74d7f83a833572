"""Small arrays as one flat buffer, and apart again."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mirror._types import Array


def join(leaves: Sequence[Array]) -> Array:
    """One flat buffer of arrays of one dtype."""
    return jnp.concatenate([leaf.ravel() for leaf in leaves])


def split(flat: Array, like: Sequence[Any]) -> list[Array]:
    """The arrays that a buffer was made of; `like` has their sizes and shapes."""
    parts, start = [], 0
    for leaf in like:
        parts.append(jax.lax.slice(flat, (start,), (start + leaf.size,)).reshape(leaf.shape))
        start += leaf.size
    return parts
