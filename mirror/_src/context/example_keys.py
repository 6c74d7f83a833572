"""Randomness that depends on the example, not on the replica it happens to be on."""

from typing import Any

import jax
import jax.numpy as jnp

from mirror._src.collectives.in_step import gather
from mirror._src.context.scopes import current_frame
from mirror._src.utils.types import Array, PyTree


def example_keys(key: Array, batch: PyTree) -> Array:
    """A PRNG key for each example of this replica's batch, made of its place in the global batch.

    Dropout, noise and augmentation drawn with them are the same on one device as on eight, where a
    key for each replica (`replica_context.fold_in`, `nnx.Rngs`) draws anew for each number of
    replicas. Outside `run` the batch is the global one.

    Args:
        key: a PRNG key, the same on all replicas; a new one each step.
        batch: this replica's arrays, with one leading batch axis.

    Returns:
        Keys of shape `(B,)`. Draw with `jax.vmap`.

    Raises:
        ValueError: no arrays, or leading axes that differ.

    >>> def dropout(x, key, rate=0.1):  # inside a step
    ...     keys = mirror.example_keys(key, x)
    ...     draw = lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:])
    ...     return jnp.where(jax.vmap(draw)(keys), x / (1 - rate), 0)
    >>> dropout(jnp.ones((2, 3)), jax.random.key(0)).shape
    (2, 3)
    """
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(str(jnp.shape(leaf)) for leaf in jax.tree.leaves(batch))
        raise ValueError(
            f"example_keys of a batch of shapes {shapes or None}: its arrays need one leading "
            "batch axis."
        )
    ((size,),) = sizes
    places = jnp.arange(size) + _first_place(size)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, places)


def _first_place(size: int) -> Any:
    """How many examples of the global batch lie on the replicas before this one."""
    frame = current_frame()
    if frame is None or frame.replica is None:
        return 0
    replica_id = frame.replica.replica_id_in_sync_group
    if not frame.replica.lengths_may_differ:
        return replica_id * size
    every = gather(jnp.asarray([size], jnp.int32), 0)
    return jnp.sum(jnp.where(jnp.arange(every.shape[0]) < replica_id, every, 0))
