"""Sums over replicas are computed inside products: the same values, without copies."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from tests.support import inside
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

ROWS, AXIS = 4, mirror.REPLICA_AXIS


def values(*shape, seed=0):
    return np.random.RandomState(seed).randn(*shape).astype("float32")


def mean(x):
    return jax.lax.pmean(x, AXIS)


def of_convolution(layout, strides=1, dilation=1, groups=1, make=jax.lax.conv_general_dilated):
    def step(w, x):
        def loss(w):
            spatial = x.ndim - 2
            out = make(
                x,
                w,
                (strides,) * spatial,
                "SAME",
                rhs_dilation=(dilation,) * spatial,
                dimension_numbers=layout,
                feature_group_count=groups,
            )
            return jnp.mean(out**2)

        return mean(jax.grad(loss)(w))

    return step


def dense(w, x):
    return mean(jax.grad(lambda w: jnp.mean(jax.nn.relu(x @ w) ** 2))(w))


def scaled(w, x):
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return mean(3.0 * grad / 7.0), jax.lax.psum(grad.T.reshape(-1, 2), AXIS)


def attention(w, x):
    def loss(w):
        q = jnp.einsum("btd,dhe->bthe", x, w)
        scores = jnp.einsum("bthe,bshe->bhts", q, q)
        return jnp.mean(jax.nn.softmax(scores) ** 2) + jnp.mean(q**2)

    return mean(jax.grad(loss)(w))


def used_twice(w, x):
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return mean(grad), jnp.sum(grad)


def recomputed(w, x):
    return mean(jax.grad(lambda w: jnp.mean(jax.checkpoint(jnp.tanh)(x @ w)))(w))


def own_kernels(w, x):
    """Sums of convolutions, of which replicas have other kernels, also with groups."""
    own = 0.05 * w * x[0, 0, 0, 0]
    conv = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=IMAGES)
    each = (
        conv(x, own, (1, 1), "SAME"),
        conv(x, own[:, :, :2], (1, 1), "SAME", feature_group_count=2),
    )
    return jax.lax.psum(each, AXIS)


def in_a_loop(w, x):
    """The weights stay mirrored; what is added to them becomes per-replica."""

    def body(carry, _):
        w, own = carry
        grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w + own) ** 2))(w)
        return (w - mean(grad), own + x[0, 0]), None

    return jax.lax.scan(body, (w, jnp.zeros(())), None, 3)[0]


def jitted(w, x):
    return mean(jax.jit(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w))))(w))


def half(w, x):
    w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return mean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w).astype(jnp.float32))


def pooled(w, x):
    def loss(w):
        y = (x @ w).reshape(-1, 4, 4, 1)
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(y**2)

    return mean(jax.grad(loss)(w))


@mirror.per_replica_on_purpose
def no_product(w, x):
    return mean(jnp.sum(x, 0)) + w[0], jax.lax.psum(jnp.int32(3), AXIS)


def in_a_context(w, x):
    with jax.threefry_partitionable(False):
        noise = jax.random.normal(jax.random.key(0), x.shape)
    return mean((x + noise) @ w)


def of_integers(w, x):
    a = (10 * x).astype(jnp.int32)
    return jax.lax.psum(jax.lax.div(a.T @ a, np.int32(2)), AXIS) + w.astype(jnp.int32)[0, 0]


def of_float16(w, x):
    a = (140 + 0 * x[:2, :2]).astype(jnp.float16)
    return jax.lax.psum((a.T @ a) * jnp.float16(0.25), AXIS) + 0 * w[0, 0].astype(jnp.float16)


def under_a_mapping_of_its_own(w, x):
    """Sums over other rows than the replicas', of values with no or a scalar trailing axis."""

    def total(rows):
        return jax.vmap(lambda row: jax.lax.psum(row, "inner"), axis_name="inner")(rows)

    whole = jax.lax.psum(x, AXIS).sum()
    kernel = jax.lax.conv_general_dilated(jnp.ones((1, 2, 5, 5)), w, (1, 1), "SAME")
    return (
        whole + total(jax.lax.broadcasted_iota(jnp.float32, (4, 3), 0).T).sum(),
        total(jnp.reshape(whole, (1,))),
        total((kernel * whole).reshape(-1)),
    )


def nothing_to_pool(w, x):
    empty = x[:, :0]
    pooled = jax.lax.reduce_window(empty, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")
    return pooled, mean(w)


IMAGES = ("NHWC", "HWIO", "NHWC")
CHANNELS_FIRST = ("NCHW", "OIHW", "NCHW")
SEQUENCES = ("NHC", "HIO", "NHC")
# name: the step, the shapes of `w` and of each replica's `x`, whether no copies may be left
STEPS = {
    "dense": (dense, (8, 3), (5, 8), True),
    "scaled, transposed, reshaped": (scaled, (8, 4), (5, 8), False),
    "attention": (attention, (8, 2, 4), (3, 5, 8), True),
    "in a loop": (in_a_loop, (8, 3), (5, 8), True),
    "inside jax.jit": (jitted, (8, 3), (5, 8), True),
    "recomputed": (recomputed, (8, 3), (5, 8), True),
    "max pooling": (pooled, (8, 16), (5, 8), True),
    "used twice": (used_twice, (8, 3), (5, 8), False),
    "half precision": (half, (8, 4), (16, 8), False),
    "in a context": (in_a_context, (8, 3), (5, 8), False),
    "integers": (of_integers, (8, 3), (5, 8), False),
    "float16": (of_float16, (8, 3), (5, 8), False),
    "a mapping of its own": (under_a_mapping_of_its_own, (3, 2, 3, 3), (5, 8), False),
    "nothing to pool": (nothing_to_pool, (3,), (3, 4), False),
    "no product": (no_product, (3,), (5, 3), False),
    "images": (of_convolution(IMAGES), (3, 3, 4, 6), (3, 8, 8, 4), True),
    "images, strides": (of_convolution(IMAGES, strides=2), (3, 3, 4, 6), (3, 8, 8, 4), True),
    "images, dilation": (of_convolution(IMAGES, dilation=2), (3, 3, 4, 6), (3, 8, 8, 4), True),
    "channels first": (of_convolution(CHANNELS_FIRST), (6, 4, 3, 3), (3, 4, 8, 8), True),
    "own kernels": (own_kernels, (3, 3, 4, 6), (3, 8, 8, 4), False),
    "sequences": (of_convolution(SEQUENCES), (3, 4, 6), (3, 8, 4), True),
    "depthwise": (of_convolution(IMAGES, groups=4), (3, 3, 1, 8), (3, 8, 8, 4), True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*same random numbers")
@rows("step, shape, row, merged", STEPS)
def test_rewritten_sums_keep_values_and_avoid_copies(step, shape, row, merged):
    w, x = values(*shape), values(ROWS, *row, seed=1)
    strategy = cpu_strategy(1, replicas_per_device=ROWS)
    by_hand = jax.vmap(step, in_axes=(None, 0), axis_name=AXIS, axis_size=ROWS)
    plain = jax.jit(lambda w, x: [row[0] for row in jax.tree.leaves(by_hand(w, x))])
    args = (w, mirror.PerReplica(list(x)))
    for got, wanted in zip(first_of(strategy.run(step, args)), plain(w, x), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
    if merged:
        assert not holds_copies(inside.lowered(strategy, step, args), w)
        assert holds_copies(plain.lower(w, x), w)


def first_of(results):
    """Returns the results of the first replica."""
    is_own = lambda leaf: isinstance(leaf, mirror.PerReplica)  # noqa: E731
    leaves = jax.tree.leaves(results, is_leaf=is_own)
    return [leaf.values[0] if is_own(leaf) else leaf for leaf in leaves]


def holds_copies(lowered, w):
    """Whether a value of the compiled program has the size of one gradient per row."""
    sizes = re.findall(r"f32\[([\d,]+)\]", lowered.compile().as_text())
    return ROWS * w.size in {math.prod(map(int, size.split(","))) for size in sizes}
