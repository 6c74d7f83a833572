"""Trainers of a small network, for the tests of `Trainer` with parameter servers."""

import numpy as np
import optax
from flax import nnx

import mirror
from tests.ps.digits import Net, arrays, largest_difference

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(3e-3),
}
SMALL = mirror.ps.FixedShardsPartitioner(3)


def loss_fn(model, batch):
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses, {"accuracy": logits.argmax(-1) == batch["y"]}


def data(count=74, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 3, count).astype(np.float32)
    x = rng.normal(size=(count, 16)).astype(np.float32)
    return {"x": x, "y": np.abs(x[:, :8]).argmax(1), "weight": weights}


def create(strategy, name="adam", loss=loss_fn, has_noise=False, **options):
    with strategy.scope():
        return mirror.Trainer(Net(nnx.Rngs(0), has_noise=has_noise), _tx(name), loss, **options)


def _tx(name):
    return OPTIMIZERS[name] if isinstance(name, str) else name


def on_one_device(*args, **options):
    return create(mirror.OneDeviceStrategy("/cpu:0"), *args, **options)


def fit(trainer, **options):
    """Trains with batches of 24, 24, 24 and 2 examples."""
    options = {"epochs": 2, "batch_size": 24, "progress": False} | options
    return trainer.fit(options.pop("data", data()), **options)


def values(trainer):
    return arrays(trainer.model, trainer.optimizer)


def require_same(trainer, other, tolerance=1e-5):
    """Requires equal weights, optimizer states and histories."""
    assert largest_difference(values(trainer), values(other)) <= tolerance
    history, wanted = (each._position.history for each in (trainer, other))
    assert history.epochs == wanted.epochs
    assert list(history) == list(wanted)
    for name in history:
        np.testing.assert_allclose(history[name], wanted[name], atol=tolerance)
