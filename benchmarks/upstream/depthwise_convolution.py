"""XLA:CPU computes depthwise convolutions in scalar loops."""

import jax.numpy as jnp
from timed import compare, conv


def by_slices(x, w):
    """The sum over the kernel's positions of shifted images, each times its weights."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    h, width = x.shape[1:3]
    places = [(i, j) for i in range(3) for j in range(3)]
    return sum(padded[:, i : i + h, j : j + width] * w[i, j, 0] for i, j in places)


compare(
    "depthwise 3x3 convolution",
    {"convolution": lambda x, w: conv(x, w, 32), "sum of slices": by_slices},
    (32, 28, 28, 32),
    (3, 3, 1, 32),
)
