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
class Conv:
    """A convolution with ReLU, and 2x2 max pooling if `is_pooled`."""

    inputs: int
    features: int
    size: int = _KERNEL
    stride: int = 1
    is_depthwise: bool = False
    is_pooled: bool = False
    padding: Literal["SAME", "VALID"] = "SAME"

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.inputs if self.is_depthwise else 1

    def side(self, side: int) -> int:
        """Returns the side of the result for an image with this side."""
        side = side - self.size + 1 if self.padding == "VALID" else -(-side // self.stride)
        return side // _POOLING if self.is_pooled else side


@dataclass(frozen=True)
class Workload:
    """A model with its initial parameters and one global batch of random data.

    Attributes:
        kind: `mlp`, dense layers with ReLU in between; `cnn`, convolutions, then an `mlp`; `chain`,
            residual layers `x + 0.1 * tanh(x @ w)`.
        sizes: For an `mlp`, the sizes of input, layers and output. For a `cnn`, side and channels
            of the images, sizes of the hidden layers, number of classes. For a `chain`, the number
            of layers and their width.
        batch_size: Size of the global batch.
        epsilon: Epsilon of Adam.
        convs: The convolutions of a `cnn`.
        is_averaged: Whether the dense layers get the mean over all positions, not all of them.
        loss_rtol: By how much losses may differ between libraries after some steps.
    """

    kind: Literal["mlp", "cnn", "chain"]
    sizes: tuple[int, ...]
    batch_size: int
    epsilon: float = EPSILON
    convs: tuple[Conv, ...] = ()
    is_averaged: bool = False
    loss_rtol: float = 1e-3

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
        return _map(lambda shape: _sample(rng, shape), _SHAPES[self.kind](self))

    @property
    def dense_sizes(self) -> tuple[int, ...]:
        """Sizes of the input and output of the dense layers of a `cnn`."""
        side = self.last_side
        flat = self.convs[-1].features * (1 if self.is_averaged else side**2)
        return (flat, *self.sizes[2:])

    @property
    def last_side(self) -> int:
        """Side of the images after the convolutions."""
        side = self.sizes[0]
        for conv in self.convs:
            side = conv.side(side)
        return side


def _sample(rng: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    scale = 0.0 if len(shape) == 1 else np.prod(shape[:-1]) ** -0.5
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _map(fn: Callable[[tuple[int, ...]], np.ndarray], tree: Any) -> Any:
    return {k: _map(fn, tree[k]) for k in sorted(tree)} if isinstance(tree, dict) else fn(tree)


def _dense(inputs: int, outputs: int) -> Params:
    return {"kernel": (inputs, outputs), "bias": (outputs,)}


def _mlp_shapes(workload: Workload) -> Params:
    pairs = itertools.pairwise(workload.sizes)
    return {"layers": {i: _dense(*pair) for i, pair in enumerate(pairs)}}


def _cnn_shapes(workload: Workload) -> Params:
    shapes = [(c.size, c.size, c.inputs // c.groups, c.features) for c in workload.convs]
    pairs = itertools.pairwise(workload.dense_sizes)
    return {
        "convs": {i: {"kernel": shape, "bias": shape[-1:]} for i, shape in enumerate(shapes)},
        "layers": {i: _dense(*pair) for i, pair in enumerate(pairs)},
    }


def _chain_shapes(workload: Workload) -> Params:
    length, width = workload.sizes
    return {"weights": dict.fromkeys(range(length), (width, width))}


_SHAPES = {"mlp": _mlp_shapes, "cnn": _cnn_shapes, "chain": _chain_shapes}


def _pooled(*channels: int, padding: Literal["SAME", "VALID"] = "SAME") -> tuple[Conv, ...]:
    pairs = itertools.pairwise(channels)
    return tuple(Conv(i, o, is_pooled=True, padding=padding) for i, o in pairs)


def _separable(inputs: int, *channels: int) -> tuple[Conv, ...]:
    """Returns a convolution, then pairs of a depthwise and a 1x1 convolution, as in MobileNet."""
    convs = [Conv(inputs, channels[0])]
    for i, (before, after) in enumerate(itertools.pairwise(channels)):
        convs += [Conv(before, before, stride=1 + i % 2, is_depthwise=True)]
        convs += [Conv(before, after, size=1)]
    return tuple(convs)


BY_NAME: dict[str, Workload] = {
    "narrow": Workload("mlp", (784, *[64] * 8, 10), 64),
    "wide": Workload("mlp", (784, 512, 512, 10), 256),
    "large": Workload("mlp", (784, 4096, 4096, 10), 4096),
    "cnn": Workload("cnn", (28, 1, 64, 10), 128, convs=_pooled(1, 8, 16)),
    # Parameters that differ by 1e-5 lead to losses that differ by 6e-3: many gradients are tiny.
    "golbin": Workload(
        "cnn",
        (28, 1, 1024, 256, 10),
        64,
        convs=_pooled(1, 64, 128, 128, padding="VALID"),
        loss_rtol=2e-2,
    ),
    "mobile": Workload(
        "cnn",
        (32, 3, 10),
        32,
        convs=_separable(3, 16, 32, 64, 64, 128, 128),
        is_averaged=True,
    ),
    "leaves": Workload("chain", (100, 64), 64),
    "small": Workload("mlp", (32, *[32] * 20, 10), 32),
    "deep": Workload("mlp", (*[16] * 101,), 64),
}
