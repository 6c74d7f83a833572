"""Gradients of convolutions equal the gradients of one device, on each executor and layout.

`jax.vmap` turns a kernel's gradient into a grouped convolution, which XLA's partitioner computes
wrongly for pointwise kernels when it may split the rows over devices (JAX 0.10 to 0.12).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mirror
from tests.support.strategies import cpu_strategy, executors
from tests.support.tables import rows

AXIS = mirror.REPLICA_AXIS
EXECUTORS = {
    **executors(4),
    "2 on 2": lambda: cpu_strategy(2, replicas_per_device=2),
    "4 on 2": lambda: cpu_strategy(2, replicas_per_device=4),
}
# name: the kernel (spatial, in, out), the image's channels, and options of the convolution
KERNELS = {
    "1x1x1x1": ((1, 1, 1, 1), 1, {}),
    "1x1x1x4": ((1, 1, 1, 4), 1, {}),
    "1x1x16x32": ((1, 1, 16, 32), 16, {}),
    "3x3": ((3, 3, 3, 8), 3, {}),
    "pointwise, strided": ((1, 1, 2, 4), 2, {"strides": 2}),
    "strided": ((3, 3, 2, 4), 2, {"strides": 2}),
    "dilated": ((3, 3, 2, 4), 2, {"dilation": 2}),
    "grouped": ((3, 3, 2, 8), 4, {"groups": 2}),
    "grouped, pointwise": ((1, 1, 2, 8), 4, {"groups": 2}),
    "depthwise": ((3, 3, 1, 4), 4, {"groups": 4}),
    "1-D": ((3, 2, 4), 2, {}),
    "1-D, pointwise": ((1, 2, 4), 2, {}),
    "3-D": ((2, 2, 2, 1, 2), 1, {}),
    "3-D, pointwise": ((1, 1, 1, 2, 2), 2, {}),
    "transposed": ((3, 3, 4, 2), 4, {"transposed": True}),
    "transposed, pointwise": ((1, 1, 4, 2), 4, {"transposed": True}),
}


def convolution(x, kernel, strides=1, dilation=1, groups=1, transposed=False):
    spatial = x.ndim - 2
    letters = "DHW"[3 - spatial :]
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    if transposed:
        return lax.conv_transpose(x, kernel, (2,) * spatial, "SAME", dimension_numbers=layout)
    return lax.conv_general_dilated(
        x,
        kernel,
        (strides,) * spatial,
        "SAME",
        rhs_dilation=(dilation,) * spatial,
        dimension_numbers=layout,
        feature_group_count=groups,
    )


def images(name, count):
    shape, channels, _ = KERNELS[name]
    size = (5,) * (len(shape) - 2)
    return np.random.RandomState(1).randn(count, *size, channels).astype(np.float32)


def kernels():
    random = np.random.RandomState(0)
    return {name: random.randn(*shape).astype("f4") for name, (shape, _, _) in KERNELS.items()}


def gradients(params, batch):
    def loss(params):
        total = jnp.zeros(())
        for name, (_, _, options) in KERNELS.items():
            out = convolution(batch[name], params[name], **options)
            total += jnp.mean(jnp.tanh(out) ** 2) + 0.1 * jnp.sum(params[name] ** 2)
        return total

    return jax.grad(loss)(params)


REDUCTIONS = {
    "packed": lambda grads: mirror.all_reduce("mean", grads),
    "apart": lambda grads: lax.pmean(grads, AXIS),
    "each replica's own": lambda grads: jax.tree.map(lambda g: lax.all_gather(g, AXIS), grads),
}


# With several replicas on several devices, the partitioner chooses how to split the rows.
ROWS = [
    (layout, reduction)
    for layout in EXECUTORS
    for reduction in (REDUCTIONS if layout not in ("pmap", "staged") else ["packed"])
]


@pytest.mark.slow
@rows("layout, reduction", ROWS)
def test_convolution_gradients_equal_those_of_one_device(layout, reduction):
    strategy = EXECUTORS[layout]()
    n = strategy.num_replicas_in_sync
    batch = {name: images(name, 2 * n) for name in KERNELS}
    (own,) = strategy.distribute_dataset([batch])
    step = lambda params, batch: REDUCTIONS[reduction](gradients(params, batch))  # noqa: E731
    got = strategy.run(step, (kernels(), own))
    each = [
        jax.jit(gradients)(kernels(), {k: v[2 * i : 2 * i + 2] for k, v in batch.items()})
        for i in range(n)
    ]
    for name in KERNELS:
        parts = np.stack([np.asarray(grads[name]) for grads in each])
        wanted = parts if reduction == "each replica's own" else parts.mean(0)
        np.testing.assert_allclose(got[name], wanted, rtol=2e-4, atol=2e-5, err_msg=name)
