"""XLA:CPU computes convolutions with `batch_group_count > 1` in scalar loops.

JAX uses them for the kernel's gradient of a convolution with groups.
"""

import jax
import jax.numpy as jnp
from timed import compare, conv

GROUPS = 4


def kernel_gradient(x, w, dy, groups=GROUPS):
    return jax.vjp(lambda w: conv(x, w, groups), w)[1](dy)[0]


def per_group(x, w, dy):
    """One convolution without groups for each of them."""
    parts = zip(*(jnp.split(each, GROUPS, -1) for each in (x, w, dy)), strict=True)
    return jnp.concatenate([kernel_gradient(*part, groups=1) for part in parts], -1)


compare(
    "kernel's gradient of a 3x3 convolution with 4 groups",
    {"batch_group_count=4": kernel_gradient, "four convolutions": per_group},
    (16, 14, 14, 64),
    (3, 3, 16, 64),
    (16, 14, 14, 64),
)
