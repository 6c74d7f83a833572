"""Training steps with planted mistakes, and whether `relate` says what the numbers say.

A step asks `Ops` for what it does across rows and replicas. A mistake replaces one of the answers.
`python -m tests.fuzz.mutants COUNT` checks this many mistakes of each step; 0 stands for all.
"""

import functools
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.types import REPLICA_AXIS
from mirror._src.jaxprs.relate import guess, relate
from mirror._src.jaxprs.relations import SAME, Relation, rows
from mirror._src.jaxprs.trace import trace
from tests.fuzz.equality import holds

Array = Any
_SIZES = ((2, 4), (3, 2), (2, 6))  # replicas, and rows of each
FEATURES, CLASSES, TOKENS = 12, 3, 4
_MOST_INPUTS = 4  # of which one shows a difference that others hide


def psum(tree: Any) -> Any:
    return jax.lax.psum(tree, REPLICA_AXIS)


def pmean(tree: Any) -> Any:
    return jax.lax.pmean(tree, REPLICA_AXIS)


def pmax(tree: Any) -> Any:
    return jax.lax.pmax(tree, REPLICA_AXIS)


def _index() -> Array:
    return jax.lax.axis_index(REPLICA_AXIS)


def _replicas() -> int:
    return int(jax.lax.axis_size(REPLICA_AXIS))


def _of_first(tree: Any) -> Any:
    return psum(jax.tree.map(lambda x: jnp.where(_index() == 0, x, 0), tree))


def _times(tree: Any, factor: Any) -> Any:
    return jax.tree.map(lambda x: x * factor, tree)


def _norm(tree: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))


def _clipped(tree: Any) -> Any:
    return _times(tree, jnp.minimum(1.0, 1e-2 / _norm(tree)))


def _own_statistics(h: Array) -> tuple[Array, Array]:
    return h.mean(0), h.var(0)


def _statistics(h: Array) -> tuple[Array, Array]:
    mean = pmean(h.mean(0))
    return mean, pmean((h**2).mean(0)) - mean**2


def _two_passes(h: Array) -> tuple[Array, Array]:
    mean = psum(h.sum(0)) / psum(len(h))
    return mean, psum(((h - mean) ** 2).sum(0)) / psum(len(h))


def _by_one_less(h: Array) -> tuple[Array, Array]:
    mean = pmean(h.mean(0))
    return mean, psum(((h - mean) ** 2).sum(0)) / (_replicas() * (len(h) - 1))


def _example_keys(x: Array) -> Array:
    positions = jnp.arange(len(x)) + _index() * len(x)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), positions)


def _noise(x: Array) -> Array:
    return jax.vmap(lambda key: jax.random.normal(key, x.shape[1:], x.dtype))(_example_keys(x))


def _noise_of(key: Array, x: Array) -> Array:
    return jax.random.normal(key, x.shape, x.dtype)


def _share(losses: Array, weights: Array) -> Array:
    return (losses * weights).sum() / psum(weights.sum())


# What steps ask for. The first answer is right; the others are mistakes, but some of them are right
# too: those that make the same mistake on one device.
ANSWERS: dict[str, dict[str, Callable[..., Any]]] = {
    "sum": {
        "": psum,
        "a mean for a sum": pmean,
        "all-reduced twice": lambda t: psum(psum(t)),
        "a maximum for a sum": pmax,
        "no all-reduce": lambda t: t,
        "of the first replica": _of_first,
        "a mean of sums": lambda t: psum(pmean(t)),
    },
    "mean": {
        "": pmean,
        "a sum for a mean": psum,
        "all-reduced twice": lambda t: psum(pmean(t)),
        "a maximum for a mean": pmax,
        "no all-reduce": lambda t: t,
        "divided twice": lambda t: _times(pmean(t), 1 / _replicas()),
    },
    "max": {
        "": pmax,
        "a mean of maxima": pmean,
        "a sum of maxima": psum,
        "no all-reduce": lambda t: t,
        "a minimum of maxima": lambda t: jax.lax.pmin(t, REPLICA_AXIS),
    },
    "share": {
        "": _share,
        "weights of one replica": lambda v, w: (v * w).sum() / w.sum(),
        "rows of one replica": lambda v, w: (v * w).sum() / len(v),
        "one row less": lambda v, w: (v * w).sum() / (len(v) - 1),
        "no divisor": lambda v, w: (v * w).sum(),
        "a forgotten weight": lambda v, w: v.sum() / psum(len(v)),
        "padding that leaks": lambda v, w: v.sum() / psum(w.sum()),
        "padding in the divisor": lambda v, w: (v * w).sum() / psum(len(v)),
        "the largest": lambda v, w: (v * w).max(),
        "the first row": lambda v, w: v[0] * w[0],
        "half of the rows": lambda v, w: _share(v[: len(v) // 2], w[: len(v) // 2]),
        "a root of a sum": lambda v, w: jnp.sqrt((v * w).sum() + 1e-3),
        "divided by the replicas": lambda v, w: _share(v, w) / _replicas(),
        "a constant for each replica": lambda v, w: _share(v, w) + 0.1,
    },
    "clipped sum": {
        "": lambda t: _clipped(psum(t)),
        "clipped before the all-reduce": lambda t: psum(_clipped(t)),
        "clipped by a mean of norms": lambda t: _times(psum(t), 1 / (1 + pmean(_norm(t)))),
        "clipped by the norm of one": lambda t: _times(psum(t), 1 / (1 + _norm(t))),
        "clipped before and after": lambda t: _clipped(psum(_clipped(t))),
    },
    "decay": {
        "": lambda g, w: jax.tree.map(lambda g, w: psum(g) + 0.1 * w, g, w),
        "decay in the sum": lambda g, w: psum(jax.tree.map(lambda g, w: g + 0.1 * w, g, w)),
        "a share of the decay": lambda g, w: psum(
            jax.tree.map(lambda g, w: g + 0.1 * w / _replicas(), g, w)
        ),
        "decay of one replica": lambda g, w: jax.tree.map(lambda g, w: g + 0.1 * w, g, w),
    },
    "statistics": {
        "": _statistics,
        "in two passes": _two_passes,
        "statistics of one replica": _own_statistics,
        "a variance of one replica": lambda h: (pmean(h.mean(0)), h.var(0)),
        "a mean of variances": lambda h: (pmean(h.mean(0)), pmean(h.var(0))),
        "rows less one": _by_one_less,
        "without a gradient": lambda h: jax.lax.stop_gradient(_statistics(h)),
        "own without a gradient": lambda h: jax.lax.stop_gradient(_own_statistics(h)),
        "a sum for a mean": lambda h: (psum(h.mean(0)), _statistics(h)[1]),
    },
    "noise": {
        "": _noise,
        "one key for all replicas": lambda x: _noise_of(jax.random.key(3), x),
        "a key of the replica": lambda x: _noise_of(
            jax.random.fold_in(jax.random.key(3), _index()), x
        ),
        "keys by local positions": lambda x: jax.vmap(
            lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(3), i), x.shape[1:])
        )(jnp.arange(len(x))),
        "one sample for all rows": lambda x: jnp.broadcast_to(
            jax.random.normal(jax.random.key(3), x.shape[1:], x.dtype), x.shape
        ),
    },
    "candidates": {
        "": lambda h: (
            jax.lax.all_gather(h, REPLICA_AXIS, tiled=True),
            jnp.arange(len(h)) + _index() * len(h),
        ),
        "candidates of one replica": lambda h: (h, jnp.arange(len(h))),
        "labels of one replica": lambda h: (
            jax.lax.all_gather(h, REPLICA_AXIS, tiled=True),
            jnp.arange(len(h)),
        ),
        "gathered without a gradient": lambda h: (
            jax.lax.stop_gradient(jax.lax.all_gather(h, REPLICA_AXIS, tiled=True)),
            jnp.arange(len(h)) + _index() * len(h),
        ),
    },
}


class Ops:
    """The answers to a step: the right ones, except at one place.

    Attributes:
        asked: The places where the step has asked, with the question.
    """

    def __init__(self, place: str = "", mistake: str = "") -> None:
        self.place, self.mistake = place, mistake
        self.asked: dict[str, str] = {}

    def __call__(self, question: str, place: str, *operands: Any) -> Any:
        self.asked[place] = question
        return ANSWERS[question][self.mistake if place == self.place else ""](*operands)


class Batch(NamedTuple):
    """Data with one row per example."""

    x: Array
    y: Array
    tokens: Array
    mask: Array


Weights = dict[str, Array]
Losses = Callable[[Ops, Weights, Batch], Array]


def cross_entropy(logits: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def layer(w: Weights, name: str, x: Array) -> Array:
    return x @ w[name] + w[name][0]


def _linear(_: Ops, w: Weights, b: Batch) -> Array:
    return cross_entropy(layer(w, "last", b.x), b.y)


def _regression(_: Ops, w: Weights, b: Batch) -> Array:
    return (layer(w, "last", b.x)[:, 0] - b.x[:, 1]) ** 2


def _huber(_: Ops, w: Weights, b: Batch) -> Array:
    error = layer(w, "last", b.x)[:, 0] - b.x[:, 1]
    return jnp.where(jnp.abs(error) < 1, 0.5 * error**2, jnp.abs(error) - 0.5)


def _mlp(_: Ops, w: Weights, b: Batch) -> Array:
    return cross_entropy(layer(w, "last", jax.nn.relu(layer(w, "first", b.x))), b.y)


def _rematerialized(_: Ops, w: Weights, b: Batch) -> Array:
    hidden = jax.checkpoint(lambda w, x: jnp.tanh(layer(w, "first", x)))(w, b.x)
    return cross_entropy(layer(w, "last", hidden), b.y)


def _normalized(do: Ops, w: Weights, b: Batch) -> Array:
    h = layer(w, "first", b.x)
    mean, variance = do("statistics", "norm", h)
    return cross_entropy(layer(w, "last", jax.nn.relu((h - mean) / jnp.sqrt(variance + 0.1))), b.y)


def _layer_norm(_: Ops, w: Weights, b: Batch) -> Array:
    h = layer(w, "first", b.x)
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 0.1)
    return cross_entropy(layer(w, "last", h), b.y)


def _images(b: Batch) -> Array:
    return b.x.reshape(-1, 2, 3, 2)


def _convolve(x: Array, kernel: Array) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


def _convolution(_: Ops, w: Weights, b: Batch) -> Array:
    h = jax.nn.relu(_convolve(_images(b), w["kernel"]))
    return cross_entropy(layer(w, "last", jnp.tile(h.mean((1, 2)), 3)), b.y)


def _pooled(_: Ops, w: Weights, b: Batch) -> Array:
    h = _convolve(_images(b), w["kernel"])
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, *[(1, 2, 3, 1)] * 2, "VALID")
    return cross_entropy(layer(w, "last", jnp.tile(h.reshape(len(h), -1), 3)), b.y)


def _normalized_images(do: Ops, w: Weights, b: Batch) -> Array:
    h = _convolve(_images(b), w["kernel"])
    mean, variance = do("statistics", "norm", h.mean((1, 2)))
    h = (h - mean[None, None]) / jnp.sqrt(variance + 0.1)
    return cross_entropy(layer(w, "last", jnp.tile(jax.nn.gelu(h).mean((1, 2)), 3)), b.y)


def _embedding(_: Ops, w: Weights, b: Batch) -> Array:
    return cross_entropy(layer(w, "last", w["table"][b.tokens].mean(1)), b.y)


def _language(_: Ops, w: Weights, b: Batch) -> Array:
    is_token = (b.tokens[:, 1:] > 0).astype(b.x.dtype)
    logits = layer(w, "words", w["table"][b.tokens[:, :-1]])
    return (cross_entropy(logits, b.tokens[:, 1:]) * is_token).sum(1)


def _attention(_: Ops, w: Weights, b: Batch) -> Array:
    h = w["table"][b.tokens]
    q, k, v = h @ w["first"], h @ w["second"], h
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / jnp.sqrt(FEATURES)
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v
    return cross_entropy(layer(w, "last", mixed[:, -1]), b.y)


def _recurrent(_: Ops, w: Weights, b: Batch) -> Array:
    def cell(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(h @ w["first"] + x)
        return h, h.sum(-1)

    x = jnp.swapaxes(w["table"][b.tokens], 0, 1)
    h, _ = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
    return cross_entropy(layer(w, "last", h), b.y)


def _gated(_: Ops, w: Weights, b: Batch) -> Array:
    def cell(h: Array, x: Array) -> tuple[Array, None]:
        gate = jax.nn.sigmoid(layer(w, "second", h))
        return gate * h + (1 - gate) * jnp.tanh(layer(w, "first", x)), None

    x = jnp.swapaxes(w["table"][b.tokens], 0, 1)
    h, _ = jax.lax.scan(cell, jnp.zeros((len(b.x), FEATURES), b.x.dtype), x)
    return cross_entropy(layer(w, "last", h), b.y)


def _deep(_: Ops, w: Weights, b: Batch) -> Array:
    kernels = jnp.stack([w["first"], w["second"]])
    h, _ = jax.lax.scan(lambda h, k: (h + jnp.tanh(h @ k), None), b.x, kernels)
    return cross_entropy(layer(w, "last", h), b.y)


def _autoencoder(_: Ops, w: Weights, b: Batch) -> Array:
    return ((jnp.tanh(layer(w, "first", b.x)) @ w["first"].T - b.x) ** 2).mean(-1)


def _variational(do: Ops, w: Weights, b: Batch) -> Array:
    mean, log = layer(w, "first", b.x), 0.1 * layer(w, "second", b.x)
    z = mean + jnp.exp(log) * do("noise", "noise", mean)
    divergence = 0.5 * (jnp.exp(2 * log) + mean**2 - 1 - 2 * log).sum(-1)
    return ((z @ w["second"].T - b.x) ** 2).sum(-1) + divergence


def _dropout(do: Ops, w: Weights, b: Batch) -> Array:
    h = layer(w, "first", b.x)
    return cross_entropy(layer(w, "last", jnp.where(do("noise", "noise", h) > 0, 2 * h, 0)), b.y)


def _diffusion(do: Ops, w: Weights, b: Batch) -> Array:
    noise = do("noise", "noise", b.x)
    return ((layer(w, "first", 0.8 * b.x + 0.6 * noise) - noise) ** 2).mean(-1)


def _contrastive(do: Ops, w: Weights, b: Batch) -> Array:
    h = layer(w, "first", b.x)
    h = h / jnp.sqrt((h**2).sum(-1, keepdims=True) + 0.1)
    others, labels = do("candidates", "negatives", h)
    return cross_entropy(h @ others.T * 5, labels)


def _policy(do: Ops, w: Weights, b: Batch) -> Array:
    mean, variance = do("statistics", "advantages", b.x[:, :1])
    advantage = ((b.x[:, :1] - mean) / jnp.sqrt(variance + 0.1))[:, 0]
    ratio = jnp.exp(-cross_entropy(layer(w, "last", b.x), b.y))
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)


def _focal(_: Ops, w: Weights, b: Batch) -> Array:
    p = jnp.exp(-cross_entropy(layer(w, "last", b.x), b.y))
    return -((1 - p) ** 2) * jnp.log(p)


def _smoothed(_: Ops, w: Weights, b: Batch) -> Array:
    targets = 0.9 * jax.nn.one_hot(b.y, CLASSES, dtype=b.x.dtype) + 0.1 / CLASSES
    return -(targets * jax.nn.log_softmax(layer(w, "last", b.x))).sum(-1)


def _distilled(_: Ops, w: Weights, b: Batch) -> Array:
    teacher = jax.lax.stop_gradient(jax.nn.softmax(layer(w, "last", jnp.tanh(b.x))))
    return -(teacher * jax.nn.log_softmax(layer(w, "last", b.x))).sum(-1)


def _ranked(_: Ops, w: Weights, b: Batch) -> Array:
    scores = jnp.sort(b.x * w["first"][0], -1)
    return jax.nn.relu(1 - scores[:, -1] + scores[:, 0])


def _several(_: Ops, w: Weights, b: Batch) -> Array:
    h = jnp.tanh(layer(w, "first", b.x))
    return cross_entropy(layer(w, "last", h), b.y) + 0.5 * (h.sum(-1) - b.x[:, 0]) ** 2


def _each_row(_: Ops, w: Weights, b: Batch) -> Array:
    def loss(x: Array, y: Array) -> Array:
        return cross_entropy(layer(w, "last", x[None])[0], y)

    return jax.lax.map(lambda each: loss(*each), (b.x, b.y))


LOSSES: dict[str, Losses] = {
    name[1:]: loss
    for name, loss in dict(globals()).items()
    if getattr(loss, "__annotations__", {}).get("b") is Batch
    and list(loss.__annotations__.values())[:2] == [Ops, Weights]
}
Outputs = list[Array]
Step = Callable[[Ops, Weights, Batch], Outputs]


def _of_losses(losses: Losses, do: Ops, w: Weights, b: Batch) -> Outputs:
    """A step of gradient descent, with decay of the weights, and three metrics."""

    def share(w: Weights) -> tuple[Array, Array]:
        every = losses(do, w, b)
        return do("share", "loss", every, b.mask), every

    (value, every), grads = jax.value_and_grad(share, has_aux=True)(w)
    grads = do("decay", "decay", grads, w)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
    metrics = [do("sum", "value", value), do("max", "largest", every.max())]
    return [*jax.tree.leaves(new), *metrics, do("mean", "metric", every.mean())]


def _with_adam(losses: Losses, do: Ops, w: Weights, b: Batch) -> Outputs:
    """A step of Adam with clipped gradients."""

    def share(w: Weights) -> Array:
        return do("share", "loss", losses(do, w, b), b.mask)

    value, grads = jax.value_and_grad(share)(w)
    grads = do("clipped sum", "clip", grads)
    new = jax.tree.map(lambda w, g: w - 0.1 * g / (jnp.sqrt(g**2) + 1e-3), w, grads)
    count = do("sum", "count", (b.mask > 0).sum())
    return [
        *jax.tree.leaves(new),
        do("sum", "value", value),
        count,
        do("sum", "mask", b.mask.sum()),
    ]


def _in_pieces(losses: Losses, do: Ops, w: Weights, b: Batch) -> Outputs:
    """A step that adds up the gradients of two pieces of the batch."""
    weight = psum(b.mask.sum())

    def share(w: Weights, b: Batch) -> Array:
        return (
            do("share", "loss", losses(do, w, b), b.mask)
            if do.place == "loss"
            else (losses(do, w, b) * b.mask).sum() / weight
        )

    def add(carry: Any, piece: Batch) -> tuple[Any, Array]:
        value, grads = jax.value_and_grad(share)(w, piece)
        return jax.tree.map(jnp.add, carry, (value, grads)), value

    do.asked["loss"] = "share"
    pieces = jax.tree.map(lambda x: x.reshape(2, len(x) // 2, *x.shape[1:]), b)
    zeros = jnp.zeros((), b.x.dtype), jax.tree.map(jnp.zeros_like, w)
    (value, grads), values = jax.lax.scan(add, zeros, pieces)
    grads = do("decay", "decay", grads, w)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
    return [*jax.tree.leaves(new), do("sum", "value", value), do("sum", "values", values.sum())]


def _private(losses: Losses, do: Ops, w: Weights, b: Batch) -> Outputs:
    """A step with clipped gradients of each example."""

    def gradient(example: Batch) -> Any:
        one = jax.tree.map(lambda x: x[None], example)
        return _clipped(jax.grad(lambda w: losses(do, w, one)[0])(w))

    grads = jax.tree.map(lambda g: g.sum(0), jax.vmap(gradient)(b))
    noise = jax.random.normal(jax.random.key(0), (FEATURES, FEATURES), b.x.dtype)
    grads = do("decay", "decay", grads, w)
    new = jax.tree.map(lambda w, g: w - 0.1 * g, w, grads)
    metrics = [do("mean", "norm", (b.x**2).mean()), do("max", "largest", b.x.max())]
    return [*jax.tree.leaves(new), new["first"] + noise, *metrics, do("sum", "mask", b.mask.sum())]


def _clusters(do: Ops, w: Weights, b: Batch) -> Outputs:
    """A step of k-means."""
    centers = w["table"]
    nearest = jnp.argmin(((b.x[:, None] - centers) ** 2).sum(-1), -1)
    sums = do("sum", "sums", jnp.zeros_like(centers).at[nearest].add(b.x * b.mask[:, None]))
    counts = do("sum", "counts", jnp.zeros(len(centers), b.x.dtype).at[nearest].add(b.mask))
    new = jnp.where(counts[:, None] > 0, sums / jnp.maximum(counts, 1)[:, None], centers)
    distance = do("mean", "distance", jnp.abs(b.x - centers[nearest]).mean())
    return [new, distance, do("max", "largest", b.x.max(0)), do("sum", "mask", b.mask.sum())]


def _covariance(do: Ops, w: Weights, b: Batch) -> Outputs:
    """A regression by its normal equations."""
    mean, variance = do("statistics", "norm", b.x)
    x = (b.x - mean) / jnp.sqrt(variance + 0.1) * b.mask[:, None]
    products = do("sum", "products", x.T @ x) + jnp.eye(FEATURES, dtype=x.dtype)
    return [
        jnp.linalg.solve(products, do("sum", "targets", x.T @ b.x[:, 0])),
        w["first"] @ products,
    ]


def _evaluation(do: Ops, w: Weights, b: Batch) -> Outputs:
    """Metrics of a classifier."""
    logits = layer(w, "last", b.x)
    is_right = (jnp.argmax(logits, -1) == b.y).astype(b.x.dtype)
    pairs = jnp.zeros((CLASSES, CLASSES), b.x.dtype).at[b.y, jnp.argmax(logits, -1)].add(b.mask)
    confusion = do("sum", "confusion", pairs)
    accuracy = do("sum", "accuracy", do("share", "share", is_right, b.mask))
    recall = jnp.diag(confusion) / jnp.maximum(confusion.sum(1), 1)
    return [confusion, recall, accuracy, do("max", "largest", cross_entropy(logits, b.y).max())]


def _moments(do: Ops, w: Weights, b: Batch) -> Outputs:
    """Running statistics, and data that they normalize."""
    mean, variance = do("statistics", "norm", b.x)
    running = 0.9 * w["first"][0] + 0.1 * mean, 0.9 * w["first"][1] + 0.1 * variance
    score = (((b.x - running[0]) / jnp.sqrt(jnp.abs(running[1]) + 0.1)) ** 3).mean()
    return [*running, do("mean", "score", score), do("sum", "total", b.x.sum(0))]


STEPS: dict[str, Step] = {
    **{name: functools.partial(_of_losses, loss) for name, loss in LOSSES.items()},
    **{f"{n} with Adam": functools.partial(_with_adam, LOSSES[n]) for n in ("mlp", "attention")},
    **{f"{n} in pieces": functools.partial(_in_pieces, LOSSES[n]) for n in ("mlp", "recurrent")},
    **{f"private {n}": functools.partial(_private, LOSSES[n]) for n in ("linear", "mlp")},
    "clusters": _clusters,
    "covariance": _covariance,
    "evaluation": _evaluation,
    "moments": _moments,
}


def weights(seed: int) -> Weights:
    """Returns the weights that the steps use."""
    rng = np.random.default_rng(seed)
    square = FEATURES, FEATURES
    shapes = {"first": square, "second": square, "last": (FEATURES, CLASSES)}
    shapes |= {"table": (5, FEATURES), "words": (FEATURES, 5), "kernel": (2, 2, 2, 4)}
    return {name: rng.normal(size=shape) * 0.4 for name, shape in sorted(shapes.items())}


def batch(seed: int, size: int) -> Batch:
    """Returns the batch of one device."""
    rng = np.random.default_rng(seed)
    mask = (rng.random(size) < 0.7).astype(float)
    mask[::2] = 1.0  # of each replica, at least one row
    y = rng.integers(CLASSES, size=size).astype(np.int32)
    tokens = rng.integers(5, size=(size, TOKENS)).astype(np.int32)
    return Batch(rng.normal(size=(size, FEATURES)), y, tokens, mask)


def related(
    step: Callable[..., Outputs], n: int, size: int, *, alone: bool = False
) -> list[Relation]:
    """Returns what is proved about the outputs of a step on n replicas with `size` rows each.

    Or, from the program of a replica `alone`, what is guessed.
    """
    w = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights(0))
    treedef = jax.tree.structure((w, batch(0, 1)))

    def flat(*leaves: Any) -> Outputs:
        return step(*treedef.unflatten(leaves))

    def types(size: int) -> list[Any]:
        own = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in batch(0, size)]
        return [*jax.tree.leaves(w), *own]

    programs = trace(flat, types(size), n), trace(flat, types(n * size), 1)
    inputs = [SAME] * len(w) + [rows(0)] * len(Batch._fields)
    if alone:
        return guess(programs[0], inputs, n, {size})
    return relate(*programs, inputs, n)


def evaluated(step: Callable[..., Outputs], n: int, size: int, seed: int) -> tuple[Any, Any]:
    """Returns the outputs of the replicas, stacked, and those of one device."""
    w, whole = jax.tree.map(jnp.asarray, (weights(seed), batch(seed, n * size)))
    own = jax.tree.map(lambda x: x.reshape(n, size, *x.shape[1:]), whole)
    many = jax.vmap(step, (None, 0), axis_name=REPLICA_AXIS, axis_size=n)
    one = jax.vmap(step, (None, 0), axis_name=REPLICA_AXIS, axis_size=1)
    single = one(w, jax.tree.map(lambda x: x[None], whole))
    return list(map(np.asarray, many(w, own))), [np.asarray(x)[0] for x in single]


def mistakes(name: str) -> list[tuple[str, str]]:
    """Returns the places of a step, each with a mistake that can be made there."""
    ops = Ops()
    related(functools.partial(STEPS[name], ops), *_SIZES[0])
    pairs = [(p, m) for p, question in ops.asked.items() for m in ANSWERS[question] if m]
    np.random.default_rng(zlib.crc32(name.encode())).shuffle(pairs)
    return [(str(p), str(m)) for p, m in pairs]


def check(name: str, place: str, mistake: str, tally: Counter[str]) -> None:
    """Fails if what is proved about a step is false, or if a difference is called equal.

    Args:
        name: The step.
        place: The place of the mistake; empty for the right step.
        mistake: The mistake.
        tally: Counts the steps by their verdicts.
    """
    n, size = _SIZES[zlib.crc32(f"{name} {place} {mistake}".encode()) % len(_SIZES)]
    step = functools.partial(STEPS[name], Ops(place, mistake))
    title = f"{name}: {mistake or 'right'} at {place}, {n} replicas of {size} rows"
    with jax.enable_x64(True):
        found = related(step, n, size)
    differs = [False] * len(found)
    for seed in range(_MOST_INPUTS):
        with jax.enable_x64(True):
            many, one = evaluated(step, n, size, seed)
        for i, relation in enumerate(found):
            assert holds(relation, many[i], one[i]), f"{title}: output {i} is not {relation}"
            differs[i] = differs[i] or not holds(SAME, many[i], one[i])
        hidden = [i for i, x in enumerate(found) if x.is_different and not differs[i]]
        if not hidden:
            break
    assert not hidden, f"{title}: output {hidden[0]} equals one device, {found[hidden[0]]}"
    if not mistake:
        assert not any(differs), f"{title}: outputs {np.flatnonzero(differs)} differ"
    tally[_verdict(found, differs=any(differs))] += 1


def _verdict(found: Sequence[Relation], *, differs: bool) -> str:
    if all(relation.is_equal for relation in found):
        return "equal"
    verdict = "different" if any(relation.is_different for relation in found) else "unknown"
    return verdict if differs else f"equal in numbers, but {verdict}"


def guessed(name: str, place: str, mistake: str) -> tuple[bool, bool]:
    """Returns whether a step is proved to differ, and whether that is the guess."""
    n, size = 2, 10  # which no constant of the steps equals
    step = functools.partial(STEPS[name], Ops(place, mistake))
    with jax.enable_x64(True):
        found = [related(step, n, size, alone=alone) for alone in (False, True)]
    proved, guessed = [any(x.is_different for x in each) for each in found]
    return proved, guessed


def main(arguments: Sequence[str]) -> None:
    """Checks all steps, and mistakes of each, and prints what was proved."""
    count = int(arguments[0]) or None
    total: Counter[str] = Counter()
    for name in arguments[1:] or STEPS:
        tally: Counter[str] = Counter()
        for place, mistake in [("", ""), *mistakes(name)[:count]]:
            try:
                check(name, place, mistake, tally)
            except AssertionError as error:
                print("FALSE", error)
        print(name, dict(tally), flush=True)
        total += tally
    print(dict(total.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
