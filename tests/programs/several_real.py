"""Trains real programs and models in one process of several; prints the bits of what they train.

python -m tests.programs.several_real [NAME ...]
"""

import hashlib
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mirror

print("from", mirror.__file__)
mirror.distributed.initialize()  # before the imports, which create arrays

from tests.real_programs import harness  # noqa: E402
from tests.support.inside import next_agreement  # noqa: E402
from tests.support.models import OPTIMIZERS, TRAININGS, batches  # noqa: E402

REAL = sorted(path.stem for path in pathlib.Path(harness.__file__).parent.glob("[a-z]*.py"))
REAL.remove("harness")


def real(name):
    program = importlib.import_module(f"tests.real_programs.{name}").PROGRAM
    strategy = mirror.MultiWorkerMirroredStrategy(axis_name=program.axis_name)
    assert strategy.num_replicas_in_sync == 4
    state, metrics = program.train(strategy, program.step, 2)
    mirrored = [part for place, part in enumerate(state) if place not in program.split]
    strategy.check_mirrored(mirrored)
    return metrics, program.arrays(state)


def model(name):
    training, features = TRAININGS[name]
    training = training(OPTIMIZERS["adam"])
    strategy = mirror.MultiWorkerMirroredStrategy()
    with strategy.scope():
        state = training.create()
    losses = []
    for batch in strategy.distribute_dataset(batches(features, 2)):
        state, loss = training.step(strategy, state, batch)
        losses.append(loss)
    return losses, training.parameters(state)


@jax.custom_vjp
def clipped(x):
    return x**2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(2 * x * g, -1, 1),))


def of_jax(loss_of):
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: loss_of(w, x))(w)
        loss, grad = mirror.all_reduce("mean", (loss, grad))
        return w - 0.1 * grad, loss

    strategy = mirror.MultiWorkerMirroredStrategy()
    w = np.float32([0.5, -1, 2])
    for _ in range(2):
        x = mirror.PerReplica.from_stacked(np.arange(24, dtype=np.float32).reshape(4, 2, 3) / 10)
        w, loss = strategy.run(step, (w, x))
    return loss, w


OF_JAX = {
    "scan": lambda w, x: jax.lax.scan(lambda c, row: (c + (row * w).sum() ** 2, None), 0.0, x)[0],
    "custom_vjp": lambda w, x: clipped(x * w).sum(),
    "jit": lambda w, x: jax.jit(lambda y: jnp.tanh(y).sum())(x * w),
}
TABLE = {
    **{name: lambda name=name: real(name) for name in REAL},
    **{name: lambda name=name: model(name) for name in TRAININGS},
    **{name: lambda loss=loss: of_jax(loss) for name, loss in OF_JAX.items()},
}
for name in sys.argv[1:] or TABLE:
    before = next_agreement()
    leaves = jax.tree.leaves(TABLE[name](), is_leaf=harness.is_per_replica)
    digest, count = hashlib.sha256(), 0
    for leaf in leaves:
        if harness.is_per_replica(leaf) or not getattr(leaf, "is_fully_replicated", True):
            continue  # each process has its own
        keys = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        digest.update(np.asarray(jax.random.key_data(leaf) if keys else leaf).tobytes())
        count += 1
    assert count
    assert next_agreement() > before, "nothing was agreed on"
    print("trained:", name, count, digest.hexdigest()[:16], flush=True)
