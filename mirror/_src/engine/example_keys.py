"""`example_keys`: PRNG keys that do not depend on the number of replicas."""

import jax
import jax.numpy as jnp

from mirror._src.base.types import Array, PyTree
from mirror._src.engine.scopes import current_frame


def example_keys(key: Array, batch: PyTree) -> Array:
    """Returns one PRNG key per example, derived from its position in the global batch.

    Dropout, noise and augmentation that use these keys are the same on one device as on eight. In
    contrast, per-replica keys (`replica_context.fold_in`, `nnx.Rngs`) give different samples for
    every number of replicas. Outside a step, `batch` is the global batch.

    Args:
        key: A PRNG key, the same on all replicas. Pass a new one in every step.
        batch: Pytree of this replica's arrays, each of shape `(B, ...)`.

    Returns:
        An array of keys with shape `(B,)`. Use `jax.vmap` to sample with them.

    Raises:
        ValueError: If `batch` contains no arrays, a scalar, or arrays that differ in leading size.

    >>> def dropout(x, key, rate=0.1):  # inside a step
    ...     keys = mirror.example_keys(key, x)
    ...     sample = lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:])
    ...     return jnp.where(jax.vmap(sample)(keys), x / (1 - rate), 0)
    >>> dropout(jnp.ones((2, 3)), jax.random.key(0)).shape
    (2, 3)
    """
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(str(jnp.shape(leaf)) for leaf in jax.tree.leaves(batch))
        raise ValueError(
            "The arrays passed to example_keys must have a leading batch axis of the same size, "
            f"got shapes: {shapes or None}."
        )
    ((size,),) = sizes
    return jax.vmap(jax.random.fold_in, (None, 0))(key, _positions(size))


def _positions(size: int) -> Array:
    """Returns the positions of this replica's examples in the global batch."""
    frame = current_frame()
    if frame is None or frame.replica is None:
        return jnp.arange(size)
    return frame.replica._positions(size)
