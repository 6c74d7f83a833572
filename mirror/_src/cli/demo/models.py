"""One convolutional net and its training step, written three times: nnx, Linen, plain pytree.

Each step is one replica's. It sums over its own images, `all_reduce` sums over the replicas, and
only then is divided by how many images there were in all: so any batch size is exact on any number
of replicas, padding included.

No dropout and no batch normalisation: with them n replicas would train a little differently from
one device, and the demo shows that they do not.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import mirror
from mirror._src.cli.demo.data import NUM_CLASSES
from mirror._src.cli.demo.options import Api

Array: TypeAlias = jax.Array
Batch: TypeAlias = dict[str, Array]
PyTree: TypeAlias = Any

_FEATURES = (32, 64)
IMAGE_SHAPE = (1, 8, 8, 1)
_FLAT = 4 * 4 * _FEATURES[1]


class Metrics(NamedTuple):
    """Sums over images, scalars each: of one replica, or `all_reduce`d of the whole batch."""

    loss: Array
    num_correct: Array
    num_images: Array


def count(logits: Array, batch: Batch, mask: Array) -> Metrics:
    """The metrics of one replica's images; those that pad the batch do not count.

    Args:
        logits: `(B, 10)`.
        batch: with the `label`s, `(B,)`.
        mask: `(B,)`, False for padding.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    correct = (logits.argmax(-1) == batch["label"]) & mask
    return Metrics(jnp.sum(losses, where=mask), correct.sum(), mask.sum())


def sum_over_all(tree: PyTree) -> PyTree:
    """From each replica's own sums those over all replicas."""
    context = mirror.get_replica_context()
    assert context is not None, "a step runs in a replica"
    return context.all_reduce("sum", tree)


def mean_over_all(grads: PyTree, metrics: Metrics) -> tuple[PyTree, Metrics]:
    """From each replica's sums the gradients of the mean loss, and the metrics, of all images."""
    grads, metrics = sum_over_all((grads, metrics))
    return jax.tree.map(lambda grad: grad / metrics.num_images, grads), metrics


class Training(abc.ABC):
    """A net with its optimizer, and how they take a step; made inside `strategy.scope()`."""

    @property
    @abc.abstractmethod
    def state(self) -> tuple[Any, ...]:
        """What the steps take before batch and mask: everything that is mirrored."""

    @property
    @abc.abstractmethod
    def step(self) -> Callable[..., Any]:
        """One replica's training step."""

    @abc.abstractmethod
    def train(self, strategy: mirror.Strategy, batch: Batch, mask: Array) -> Metrics:
        """Takes a step on every replica; the metrics are those before the step."""

    @abc.abstractmethod
    def test(self, strategy: mirror.Strategy, batch: Batch, mask: Array) -> Metrics:
        """The metrics of a batch; changes nothing."""


class CNN(nnx.Module):
    """Two convolutions and a linear layer, as an nnx module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, _FEATURES[0], (3, 3), rngs=rngs)
        self.second = nnx.Conv(*_FEATURES, (3, 3), strides=2, rngs=rngs)
        self.out = nnx.Linear(_FLAT, NUM_CLASSES, rngs=rngs)

    def __call__(self, image: Array) -> Array:
        """Images `(B, 8, 8, 1)` to logits `(B, 10)`."""
        x = nnx.relu(self.second(nnx.relu(self.first(image))))
        return self.out(x.reshape(len(x), -1))


def nnx_step(model: CNN, optimizer: nnx.Optimizer, batch: Batch, mask: Array) -> Metrics:
    """One replica's step; the model and the optimizer change in place."""

    def loss_fn(model: CNN) -> tuple[Array, Metrics]:
        metrics = count(model(batch["image"]), batch, mask)
        return metrics.loss, metrics

    grads, metrics = nnx.grad(loss_fn, has_aux=True)(model)
    grads, metrics = mean_over_all(grads, metrics)
    optimizer.update(model, grads)
    return metrics


def nnx_test_step(model: CNN, batch: Batch, mask: Array) -> Metrics:
    """One replica's share of a test batch."""
    return sum_over_all(count(model(batch["image"]), batch, mask))


@final
class ObjectTraining(Training):
    """Training of an nnx module, which `strategy.run` changes in place."""

    def __init__(self, tx: optax.GradientTransformation, seed: int) -> None:
        self.model = CNN(rngs=nnx.Rngs(seed))
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

    @property
    def state(self) -> tuple[Any, ...]:
        """The model and the optimizer."""
        return self.model, self.optimizer

    @property
    def step(self) -> Callable[..., Any]:
        """One replica's training step."""
        return nnx_step

    def train(self, strategy: mirror.Strategy, batch: Batch, mask: Array) -> Metrics:
        """Takes a step on every replica."""
        return strategy.run(nnx_step, (self.model, self.optimizer, batch, mask))

    def test(self, strategy: mirror.Strategy, batch: Batch, mask: Array) -> Metrics:
        """The metrics of a batch."""
        return strategy.run(nnx_test_step, (self.model, batch, mask))


@final
class StateTraining(Training):
    """Training of a state that is a pytree: an argument of the step, and a result.

    Args:
        state: the first one.
        step: one replica's step, from state, batch and mask to the next state and metrics.
        test_step: from state, batch and mask to metrics.
    """

    def __init__(
        self, state: PyTree, step: Callable[..., Any], test_step: Callable[..., Metrics]
    ) -> None:
        self._state = state
        self._step = step
        self._test_step = test_step

    @property
    def state(self) -> tuple[Any, ...]:
        """Parameters and optimizer state."""
        return (self._state,)

    @property
    def step(self) -> Callable[..., Any]:
        """One replica's training step."""
        return self._step

    def train(self, strategy: mirror.Strategy, batch: Batch, mask: Array) -> Metrics:
        """Takes a step on every replica; the old state's memory becomes the new one's."""
        self._state, metrics = strategy.run(
            self._step, (self._state, batch, mask), donate_argnums=0
        )
        return metrics

    def test(self, strategy: mirror.Strategy, batch: Batch, mask: Array) -> Metrics:
        """The metrics of a batch."""
        return strategy.run(self._test_step, (self._state, batch, mask))


class LinenCNN(linen.Module):
    """The same net in Linen."""

    @linen.compact
    def __call__(self, image: Array) -> Array:
        """Images `(B, 8, 8, 1)` to logits `(B, 10)`."""
        x = linen.relu(linen.Conv(_FEATURES[0], (3, 3))(image))
        x = linen.relu(linen.Conv(_FEATURES[1], (3, 3), strides=2)(x))
        return linen.Dense(NUM_CLASSES)(x.reshape(len(x), -1))


def linen_state(tx: optax.GradientTransformation, seed: int) -> TrainState:
    """New parameters and optimizer state."""
    model = LinenCNN()
    params = model.init(jax.random.key(seed), jnp.zeros(IMAGE_SHAPE))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def linen_step(state: TrainState, batch: Batch, mask: Array) -> tuple[TrainState, Metrics]:
    """One replica's step."""

    def loss_fn(params: PyTree) -> tuple[Array, Metrics]:
        metrics = count(state.apply_fn({"params": params}, batch["image"]), batch, mask)
        return metrics.loss, metrics

    grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params)
    grads, metrics = mean_over_all(grads, metrics)
    return mirror.ensure_mirrored(state.apply_gradients(grads=grads)), metrics


def linen_test_step(state: TrainState, batch: Batch, mask: Array) -> Metrics:
    """One replica's share of a test batch."""
    return sum_over_all(
        count(state.apply_fn({"params": state.params}, batch["image"]), batch, mask)
    )


def plain_net(params: PyTree, image: Array) -> Array:
    """The same net as a function: images `(B, 8, 8, 1)` to logits `(B, 10)`."""
    x = image
    for stride, layer in ((1, params["first"]), (2, params["second"])):
        x = jax.lax.conv_general_dilated(
            x, layer["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["bias"])
    return x.reshape(len(x), -1) @ params["out"]["kernel"] + params["out"]["bias"]


def plain_params(seed: int) -> PyTree:
    """New parameters, in a dict."""
    shapes = {
        "first": (3, 3, 1, _FEATURES[0]),
        "second": (3, 3, *_FEATURES),
        "out": (_FLAT, NUM_CLASSES),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    init = jax.nn.initializers.lecun_normal()
    return {
        name: {"kernel": init(key, shape), "bias": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def plain_state(tx: optax.GradientTransformation, seed: int) -> PyTree:
    """New parameters and optimizer state, in a dict."""
    params = plain_params(seed)
    return {"params": params, "moments": tx.init(params)}


def plain_steps(
    tx: optax.GradientTransformation,
) -> tuple[Callable[..., tuple[PyTree, Metrics]], Callable[..., Metrics]]:
    """One replica's training step and test step, with that optimizer."""

    def plain_step(state: PyTree, batch: Batch, mask: Array) -> tuple[PyTree, Metrics]:
        def loss_fn(params: PyTree) -> tuple[Array, Metrics]:
            metrics = count(plain_net(params, batch["image"]), batch, mask)
            return metrics.loss, metrics

        grads, metrics = jax.grad(loss_fn, has_aux=True)(state["params"])
        grads, metrics = mean_over_all(grads, metrics)
        updates, moments = tx.update(grads, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return mirror.ensure_mirrored({"params": params, "moments": moments}), metrics

    def plain_test_step(state: PyTree, batch: Batch, mask: Array) -> Metrics:
        return sum_over_all(count(plain_net(state["params"], batch["image"]), batch, mask))

    return plain_step, plain_test_step


def make_training(api: Api, tx: optax.GradientTransformation, seed: int) -> Training:
    """A new net, written in that way."""
    if api == "nnx":
        return ObjectTraining(tx, seed)
    if api == "linen":
        return StateTraining(linen_state(tx, seed), linen_step, linen_test_step)
    return StateTraining(plain_state(tx, seed), *plain_steps(tx))
