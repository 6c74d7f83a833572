"""XLA:CPU changes the layout of convolutions to its fast kernel's in the entry computation only.

In a loop or branch, the gradients of convolutions, whose layout differs, run in scalar loops.
"""

import jax
import jax.numpy as jnp
from jax import lax
from timed import compare, conv


def kernel_gradient(x, w, dy):
    return jax.vjp(lambda w: conv(x, w), w)[1](dy)[0]


def transposed(x, w, dy):
    """The same convolution, with operands in the layout of XLA's kernel."""
    del w
    x = x.transpose(3, 1, 2, 0)  # channels, height, width, examples
    dy = dy.transpose(1, 2, 0, 3)
    layout = ("NHWC", "HWIO", "NHWC")
    dw = lax.conv_general_dilated(x, dy, (1, 1), [(1, 1)] * 2, dimension_numbers=layout)
    return dw.transpose(1, 2, 0, 3)


def in_loop(fn):
    def looped(x, w, dy):
        return lax.fori_loop(0, 2, lambda _, total: total + fn(x, w, dy), jnp.zeros_like(w)) / 2

    return looped


compare(
    "kernel's gradient of a 3x3 convolution",
    {
        "outside a loop, once": kernel_gradient,
        "in a loop, twice": in_loop(kernel_gradient),
        "in a loop, twice, transposed": in_loop(transposed),
    },
    (32, 14, 14, 16),
    (3, 3, 16, 32),
    (32, 14, 14, 32),
)
