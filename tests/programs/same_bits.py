"""Prints the hash of what programs compute with a fixed number of replicas, on several devices."""

import contextlib
import functools
import hashlib
import importlib
import pathlib
import random
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from tests.real_programs import harness
from tests.support import conformance
from tests.support.models import CLASSES, OPTIMIZERS, TRAININGS, batches


def real(name, strategy_of, steps):
    program = importlib.import_module(f"tests.real_programs.{name}").PROGRAM
    strategy = strategy_of(4, axis_name=program.axis_name)
    state, metrics = program.train(strategy, program.step, steps)
    return metrics, program.arrays(state)


def model(name, strategy_of, steps):
    kind, _, optimizer = name.partition(" ")
    training, features = TRAININGS[kind]
    training = training(OPTIMIZERS[optimizer or "adam"])
    strategy = strategy_of(8)
    with strategy.scope():
        state = training.create()
    losses = []
    for batch in strategy.distribute_dataset(batches(features, steps)):
        state, loss = training.step(strategy, state, batch)
        losses.append(loss)
    return losses, training.parameters(state)


def collectives(name, strategy_of, _):
    step, args = conformance.STEPS[name]
    return strategy_of(conformance.N).run(step, args())


def fitted(strategy, directory=None, **kwargs):
    """Uneven batches and dropout; returns the trainer after two epochs."""
    rng = np.random.default_rng(0)
    data = {
        "image": rng.normal(size=(100, *Noisy.features)).astype("f4"),
        "label": rng.integers(0, CLASSES, 100),
    }
    with strategy.scope():
        trainer = mirror.Trainer(Noisy(nnx.Rngs(0)), optax.adamw(1e-2), losses)
    if directory is not None and any(directory.iterdir()):
        trainer.restore(directory)
    trainer.fit(data, epochs=2, batch_size=24, progress=False, **kwargs)
    return trainer


class Noisy(nnx.Module):
    features = (12,)

    def __init__(self, rngs):
        self.first = nnx.Linear(12, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.gelu(self.norm(self.first(x)))))


def losses(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def whole(trainer):
    return nnx.state((trainer.model, trainer.optimizer))


class StopsAt(mirror.callbacks.Callback):
    """Ends `fit` after a step, with a checkpoint."""

    def __init__(self, step):
        self.left = step

    def on_step(self, fit):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def trainer(_, strategy_of, __):
    return whole(fitted(strategy_of(8)))


def history(name, _, __):
    """Stops in the middle of epochs, each time resumed on another number of devices."""
    chance = random.Random(name)
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        for _ in range(3):
            strategy = mirror.MirroredStrategy(chance.choice([1, 2, 4, 8]), replicas=8)
            saves = mirror.callbacks.Checkpoint(directory, every_steps=1, asynchronous=False)
            with contextlib.suppress(KeyboardInterrupt):
                fitted(strategy, directory, callbacks=[saves, StopsAt(chance.choice([1, 2, 3]))])
        last = mirror.MirroredStrategy(chance.choice([1, 2, 4, 8]), replicas=8)
        return whole(fitted(last, directory))


def digest(result):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(result, is_leaf=harness.is_per_replica):
        for part in leaf.values if harness.is_per_replica(leaf) else [leaf]:
            if hasattr(part, "dtype") and jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
                part = jax.random.key_data(part)
            found.update(np.asarray(part).tobytes())
    return found.hexdigest()[:12]


@functools.cache
def strategies():
    """Returns strategies by their number of devices, whose programs several histories use."""
    most = mirror.MirroredStrategy(8, replicas=8)
    return {8: most, **{n: most.resize(n) for n in (4, 2, 1)}}


def resizes(name, _, __):
    """Continues on another number of devices after each step."""
    chance = random.Random(name)
    training = TRAININGS["nnx-MLP"][0](OPTIMIZERS["adam"])
    with strategies()[8].scope():
        state = training.create()
    losses = []
    for batch in batches(TRAININGS["nnx-MLP"][1], 6):
        strategy = strategies()[chance.choice([1, 2, 4, 8]) if name != "resizes" else 8]
        (batch,) = strategy.distribute_dataset([batch])
        state, loss = training.step(strategy, state, batch)
        losses.append(loss)
    return losses, training.parameters(state)


def contrastive(_, strategy_of, steps):
    """Two weights, updated with the same divisors: XLA simplified one of the updates only."""
    rng, optimizer = np.random.default_rng(0), optax.adam(1e-2)
    params = {name: jnp.asarray(0.3 * rng.normal(size=(33, 7)), "f4") for name in "ab"}

    def step(params, state, x):
        def loss(params):
            keys = mirror.all_gather(x @ params["a"])
            return jax.nn.logsumexp(5 * (jnp.tanh(x) @ params["b"]) @ keys.T, axis=1).mean()

        grads = mirror.all_reduce("mean", jax.grad(loss)(params))
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    strategy, state = strategy_of(4), optimizer.init(params)
    batches = list(rng.normal(size=(steps, 24, 33)).astype("f4"))
    for batch in strategy.distribute_dataset(batches):
        params, state = strategy.run(step, (params, state, batch))
    return params, state


TABLES = {
    "contrastive": contrastive,
    **dict.fromkeys(conformance.STEPS, collectives),
    **dict.fromkeys(TRAININGS, model),
    "trainer": trainer,
    "history": history,
    "resizes": resizes,
}


def main(programs, steps=3):
    """Prints a line for each program and number of devices."""
    for name, counts in programs.items():
        run = TABLES.get(name, TABLES.get(name.partition(" ")[0], real))
        for count in counts:
            strategy_of = lambda replicas, **kwargs: mirror.MirroredStrategy(  # noqa: E731
                min(count, replicas), replicas=replicas, **kwargs
            )
            print("bits", name, digest(run(name, strategy_of, steps)), sep="|", flush=True)
