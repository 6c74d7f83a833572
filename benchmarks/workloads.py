"""Models and batches in NumPy, from which every contender builds them in its own library."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

LEARNING_RATE = 1e-3
# Adam's epsilon. If parameters are compared, it must exceed rounding errors, which the usual 1e-8
# amplifies to whole steps of the learning rate. If losses are compared, it must be small, because
# Keras adds it before the bias correction, so that a large epsilon changes the training.
EPSILON, SMALL_EPSILON = 1e-5, 1e-8
RESIDUAL = 0.1  # scale of the residual branch of a layer in a chain
_KERNEL, _POOLING = 3, 2

Params = dict[Any, Any]


@dataclass(frozen=True)
class Workload:
    """A model with its initial parameters and one global batch of random data.

    Attributes:
        kind: `mlp`, dense layers with ReLU in between; `cnn`, two 3x3 convolutions with ReLU and
            2x2 pooling and two dense layers; `chain`, residual layers `x + 0.1 * tanh(x @ w)`.
        sizes: For an `mlp`, the sizes of input, layers and output. For a `cnn`, side and channels
            of the images, channels of both convolutions, size of the hidden layer, number of
            classes. For a `chain`, the number of layers and their width.
        batch_size: Size of the global batch.
        epsilon: Epsilon of Adam.
    """

    kind: Literal["mlp", "cnn", "chain"]
    sizes: tuple[int, ...]
    batch_size: int
    epsilon: float = EPSILON

    @property
    def features(self) -> tuple[int, ...]:
        """Shape of one input."""
        if self.kind == "cnn":
            side, channels = self.sizes[:2]
            return (side, side, channels)
        return (self.sizes[1],) if self.kind == "chain" else (self.sizes[0],)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.sizes[-1]

    def batch(self) -> dict[str, np.ndarray]:
        """Returns a global batch of random data, the same in every call."""
        rng = np.random.RandomState(0)
        shape = (self.batch_size, *self.features)
        return {
            "image": rng.standard_normal(shape).astype(np.float32),
            "label": rng.randint(0, self.classes, self.batch_size).astype(np.int32),
        }

    def initial_params(self) -> Params:
        """Returns the initial parameters: nested dicts, zero biases, LeCun kernels."""
        rng = np.random.RandomState(1)
        return _map(lambda shape: _sample(rng, shape), _SHAPES[self.kind](self.sizes))


def _sample(rng: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    scale = 0.0 if len(shape) == 1 else np.prod(shape[:-1]) ** -0.5
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _map(fn: Callable[[tuple[int, ...]], np.ndarray], tree: Any) -> Any:
    return {k: _map(fn, tree[k]) for k in sorted(tree)} if isinstance(tree, dict) else fn(tree)


def _dense(inputs: int, outputs: int) -> Params:
    return {"kernel": (inputs, outputs), "bias": (outputs,)}


def _conv(inputs: int, outputs: int) -> Params:
    return {"kernel": (_KERNEL, _KERNEL, inputs, outputs), "bias": (outputs,)}


def _mlp_shapes(sizes: tuple[int, ...]) -> Params:
    pairs = itertools.pairwise(sizes)
    return {"layers": {i: _dense(*pair) for i, pair in enumerate(pairs)}}


def _cnn_shapes(sizes: tuple[int, ...]) -> Params:
    side, channels, first, second, hidden, classes = sizes
    flat = (side // _POOLING**2) ** 2 * second
    return {
        "convs": {0: _conv(channels, first), 1: _conv(first, second)},
        "hidden": _dense(flat, hidden),
        "out": _dense(hidden, classes),
    }


def _chain_shapes(sizes: tuple[int, ...]) -> Params:
    length, width = sizes
    return {"weights": dict.fromkeys(range(length), (width, width))}


_SHAPES = {"mlp": _mlp_shapes, "cnn": _cnn_shapes, "chain": _chain_shapes}

BY_NAME: dict[str, Workload] = {
    "narrow": Workload("mlp", (784, *[64] * 8, 10), 64),
    "wide": Workload("mlp", (784, 512, 512, 10), 256),
    "large": Workload("mlp", (784, 4096, 4096, 10), 4096),
    "cnn": Workload("cnn", (28, 1, 8, 16, 64, 10), 128),
    "leaves": Workload("chain", (100, 64), 64),
    "small": Workload("mlp", (32, *[32] * 20, 10), 32),
    "deep": Workload("mlp", (*[16] * 101,), 64),
}
