"""Small arrays as one flat buffer, and apart again."""

from collections.abc import Sequence
from typing import Any

import jax

from mirror._src.utils.types import Array


def join(leaves: Sequence[Array]) -> Array:
    """One flat buffer of arrays of one dtype."""
    # By operations that keep 64 bits also where JAX has them switched off.
    return jax.lax.concatenate([jax.lax.reshape(leaf, (leaf.size,)) for leaf in leaves], 0)


def split(flat: Array, like: Sequence[Any]) -> list[Array]:
    """The arrays that a buffer was made of; `like` has their sizes and shapes."""
    parts, start = [], 0
    for leaf in like:
        part = jax.lax.slice(flat, (start,), (start + leaf.size,))
        parts.append(jax.lax.reshape(part, leaf.shape))
        start += leaf.size
    return parts
