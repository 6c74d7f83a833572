"""Processes that differ in one thing, by argument: prints the errors of all of them."""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside

mirror.distributed.initialize(agreement_secs=float(os.environ.get("AGREEMENT_SECS", "60")))
strategy = mirror.MultiWorkerMirroredStrategy()
me, n = mirror.distributed.process_index(), strategy.num_replicas_in_sync
other = me == mirror.distributed.process_count() - 1  # the last process differs
launches = inside.count_all_launches(pytest.MonkeyPatch())


def rows(size, dtype=np.float32):
    return mirror.PerReplica.from_stacked(np.ones((n, size, 3), dtype))


def model_of(width=4, seed=0):
    with strategy.scope():
        model = nnx.Sequential(
            nnx.Linear(3, width, rngs=nnx.Rngs(seed)), nnx.Linear(width, 1, rngs=nnx.Rngs(seed + 1))
        )
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def step_of(scale=1.0, reversed_order=False):
    def step(model, optimizer, x):
        context = mirror.get_replica_context()
        loss, grads = nnx.value_and_grad(lambda m: scale * jnp.mean(m(x) ** 2))(model)
        if reversed_order:
            grads = context.all_reduce("mean", grads)
            loss = context.all_reduce("mean", loss)
        else:
            loss = context.all_reduce("mean", loss)
            grads = context.all_reduce("mean", grads)
        optimizer.update(model, grads)
        return loss

    return step


def same():
    os.environ.pop("MIRROR_LOWERING", None)
    return step_of(), (*model_of(), rows(4))


def batch_size():
    return step_of(), (*model_of(), rows(6 if other else 4))


def loss_scale():
    return step_of(2.0 if other else 1.0), (*model_of(), rows(4))


def width():
    return step_of(), (*model_of(5 if other else 4), rows(4))


def order():
    return step_of(reversed_order=other), (*model_of(), rows(4))


def function():
    return (lambda *_: jnp.ones(()), ()) if other else same()


def dtype():
    return step_of(), (*model_of(), rows(4, np.float16 if other else np.float32))


def seed():
    return step_of(), (*model_of(seed=int(other)), rows(4))


def number():
    return lambda x, rate: (x * rate).sum(), (rows(4), 0.1 if other else 0.2)


def constant():
    table = np.arange(5.0) + other
    return lambda x: x.sum() + jnp.asarray(table).sum(), (rows(4),)


def flag():
    return lambda x, is_max: x.max() if is_max else x.sum(), (rows(4), other)


def text():
    return lambda x, how: getattr(x, how)(), (rows(4), "max" if other else "sum")


def lowering():
    if other:
        os.environ["MIRROR_LOWERING"] = "xla"
    return step_of(), (*model_of(), rows(4))


def read(batches):
    for _ in strategy.distribute_dataset(batches, prefetch=0):
        time.sleep(0.5)  # both have read the first batch long before the last
    return same()


def shuffle():
    """Another order of the examples in the last process."""
    return read(mirror.data.from_arrays(np.arange(48.0), 8, shuffle=True, seed=int(other)))


def batch_of_jax():
    return read([jnp.ones((24 if other else 12, 3))] * 6)


def byte_order():
    """The same numbers in all processes."""
    return read([np.arange(36, dtype=">f4" if other else "<f4").reshape(12, 3)])


for name in sys.argv[1:]:
    before = None
    try:
        step, args = globals()[name]()
        jax.block_until_ready([x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)])
        before = len(launches)
        result = strategy.run(step, args)
    except (mirror.ProgramMismatchError, mirror.ReplicaDivergenceError) as error:
        assert before in (None, len(launches)), "something has run"
        print(f"<{name}> {type(error).__name__} {error}</{name}>", flush=True)
    else:
        assert len(launches) == before + 1
        print(f"<{name}> ran</{name}>", flush=True)
