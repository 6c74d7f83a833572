"""Launches of several kinds at the same time on 8 host devices, which must not wait for each other.

python -m tests.support.mixes NAME SECS

Each mix is a list of functions, which threads call again and again. Launches that wait for each
other end in XLA's abort, so `tests/chaos/test_launch_mixes.py` runs each in a process of its own.
"""

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from tests.support.inside import on_replicas

Work = Callable[[], object]
N = 8
LEAVES = 8
COLUMNS = 64


def step(state, batch):
    grads = mirror.all_reduce("mean", [w * batch.mean() for w in state])
    return [w - 1e-4 * g for w, g in zip(state, grads, strict=True)]


def strategy_on(num_devices: int = N, **options) -> mirror.MirroredStrategy:
    return mirror.MirroredStrategy(jax.devices("cpu")[:num_devices], **options)


def steps_of(strategy: mirror.Strategy, run_step=step) -> Work:
    """Returns a function that runs one step more, which nobody awaits."""
    n = strategy.num_replicas_in_sync
    state = [[np.full((COLUMNS, COLUMNS), i, np.float32) for i in range(LEAVES)]]
    batch = mirror.PerReplica([np.full(4, r, np.float32) for r in range(n)])

    def one() -> None:
        state[0] = strategy.run(run_step, (state[0], batch), donate_argnums=0)

    return one


def rows_on(strategy: mirror.Strategy) -> mirror.PerReplica:
    n = strategy.num_replicas_in_sync
    return on_replicas(mirror.PerReplica([np.full(256, r, np.float32) for r in range(n)]), strategy)


def mirrored_on(strategy: mirror.Strategy) -> list[jax.Array]:
    with strategy.scope():
        return [jnp.ones((256, 256)) * i for i in range(3)]


class Net(nnx.Module):
    def __init__(self):
        self.inside = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(16, 1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.out(nnx.relu(self.inside(x)))


BATCH = {"x": np.ones((16, 16), np.float32)}


def loss_fn(model, batch):
    return optax.l2_loss(model(batch["x"]))[:, 0]


def outputs(model, batch):
    return model(batch["x"])


def trainer_on(strategy: mirror.Strategy) -> mirror.Trainer:
    with strategy.scope():
        return mirror.Trainer(Net(), optax.adam(1e-3), loss_fn)


def fits(trainer: mirror.Trainer, callbacks=()) -> Work:
    return lambda: trainer.fit([BATCH] * 20, initial_epoch=0, callbacks=callbacks, progress=False)


def eager(num_threads: int) -> Callable[[], list[Work]]:
    def mix() -> list[Work]:
        strategy = strategy_on()
        w = mirrored_on(strategy)
        return [steps_of(strategy), *[lambda: (w[0] @ w[1]).sum() + w[2].mean()] * num_threads]

    return mix


def own_jit() -> list[Work]:
    strategy = strategy_on()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    fn = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "i"),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.sharding.PartitionSpec(),
        )
    )
    x = jax.device_put(np.ones((N, 512), np.float32), jax.sharding.NamedSharding(mesh, spec))
    return [steps_of(strategy), lambda: fn(x)]


def own_pmap() -> list[Work]:
    fn = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    x = np.ones((N, 512), np.float32)
    return [steps_of(strategy_on()), lambda: fn(x)]


def own_jit_of_mirrored() -> list[Work]:
    strategy = strategy_on()
    w = mirrored_on(strategy)
    norm = jax.jit(lambda w: sum(jnp.vdot(x, x) for x in w))
    return [steps_of(strategy), *[lambda: norm(w)] * 2]


def stacked() -> list[Work]:
    strategy = strategy_on()
    rows = rows_on(strategy)
    return [steps_of(strategy), *[lambda: rows.stacked.sum(0).mean()] * 2]


def threads_of_run() -> list[Work]:
    strategy = strategy_on()
    return [steps_of(strategy) for _ in range(8)]


def two_strategies() -> list[Work]:
    return [steps_of(strategy_on()), steps_of(strategy_on())]


def four_beside_eight() -> list[Work]:
    return [steps_of(strategy_on(4)), steps_of(strategy_on()), steps_of(strategy_on(4))]


def vmap_beside_pmap() -> list[Work]:
    return [
        steps_of(strategy_on(1, replicas_per_device=4)),
        steps_of(strategy_on(4, replicas_per_device=2)),
        steps_of(strategy_on()),
    ]


def staged_beside_pmap() -> list[Work]:
    staged = strategy_on(cross_device_ops=mirror.ReductionToOneDevice())
    return [steps_of(staged), steps_of(strategy_on())]


def data_parallel() -> list[Work]:
    model = mirror.DataParallel(Net())
    return [steps_of(strategy_on()), lambda: model(BATCH["x"])]


def explains() -> list[Work]:
    strategy = strategy_on()
    state = [np.ones((COLUMNS, COLUMNS), np.float32)] * 2
    arguments = (state, rows_on(strategy))
    return [steps_of(strategy), lambda: strategy.explain(step, arguments)]


def verifies() -> list[Work]:
    strategy = strategy_on()
    trainer = trainer_on(strategy)
    return [steps_of(strategy), lambda: trainer.verify([BATCH])]


def reduces() -> list[Work]:
    strategy = strategy_on()
    rows = rows_on(strategy)
    return [steps_of(strategy), *[lambda: strategy.reduce("sum", rows, axis=0)] * 8]


def gathers() -> list[Work]:
    strategy = strategy_on()
    rows = rows_on(strategy)
    return [steps_of(strategy), *[lambda: strategy.gather(rows, axis=0)] * 8]


class Predicts(mirror.callbacks.Callback):
    def on_step(self, fit):
        fit.trainer.predict([BATCH], outputs)


def predicts_in_a_callback() -> list[Work]:
    strategy = strategy_on()
    return [steps_of(strategy), fits(trainer_on(strategy), [Predicts()])]


def evaluates_in_threads() -> list[Work]:
    strategy = strategy_on()
    other = trainer_on(strategy)  # that of `fit` may be used by the thread of `fit` only
    return [fits(trainer_on(strategy)), *[lambda: other.evaluate([BATCH])] * 3]


def prefetches_and_checks() -> list[Work]:
    strategy = strategy_on()
    state = [[np.ones((COLUMNS, COLUMNS), np.float32)] * 2]

    def epoch() -> None:
        for batch in strategy.distribute_dataset([np.ones((16, 4), np.float32)] * 8):
            state[0] = strategy.run(step, (state[0], batch), donate_argnums=0)
            strategy.check_mirrored(state[0])

    return [epoch, steps_of(strategy)]


def creates_in_the_scope() -> list[Work]:
    strategy = strategy_on()

    def create() -> None:
        with strategy.scope():
            Net()
            jnp.arange(100.0).reshape(10, 10).sum()

    return [steps_of(strategy), create, create]


def optax_outside() -> list[Work]:
    strategy = strategy_on()
    w, tx = mirrored_on(strategy), optax.adam(1e-3)
    state = [(w, tx.init(w))]

    def update() -> None:
        weights, opt = state[0]
        updates, opt = tx.update(weights, opt, weights)
        state[0] = optax.apply_updates(weights, updates), opt

    return [steps_of(strategy), update]


def device_put_storm() -> list[Work]:
    strategy, x = strategy_on(), np.ones((256, 256), np.float32)
    counter = itertools.count()
    devices = jax.devices("cpu")

    def put() -> None:
        on_one = jax.device_put(x, devices[next(counter) % N])
        jax.device_put(on_one, strategy._replicas.mirrored)

    return [steps_of(strategy), *[put] * 3]


def host_callbacks() -> list[Work]:
    def calls_back(state, batch):
        shape = jax.ShapeDtypeStruct((), np.float32)
        factor = jax.pure_callback(lambda x: np.float32(x), shape, batch.mean())
        jax.debug.callback(lambda x: None, factor)
        return step(state, batch * factor)

    strategy = strategy_on()
    return [steps_of(strategy, calls_back), steps_of(strategy), steps_of(strategy_on(4))]


def random_outside() -> list[Work]:
    strategy = strategy_on()
    with strategy.scope():
        key = [jax.random.key(0)]

    def split() -> None:
        key[0], other = jax.random.split(key[0])
        jax.random.normal(other, (64, 64))

    return [steps_of(strategy), split]


def strategies_come_and_go() -> list[Work]:
    def come_and_go() -> None:
        steps_of(strategy_on(4))()
        gc.collect()

    return [steps_of(strategy_on()), come_and_go]


MIXES: dict[str, Callable[[], list[Work]]] = {
    **{f"eager work in {k} threads": eager(k) for k in (0, 2, 4, 8)},
    "own jit with psum": own_jit,
    "own pmap": own_pmap,
    "own jit of mirrored arrays": own_jit_of_mirrored,
    "reductions of stacked": stacked,
    "8 threads of run": threads_of_run,
    "two strategies": two_strategies,
    "4 of 8 devices beside 8": four_beside_eight,
    "vmap beside pmap": vmap_beside_pmap,
    "staged beside pmap": staged_beside_pmap,
    "DataParallel": data_parallel,
    "explain": explains,
    "verify": verifies,
    "reduce in 8 threads": reduces,
    "gather in 8 threads": gathers,
    "predict in a callback": predicts_in_a_callback,
    "evaluate in threads": evaluates_in_threads,
    "prefetch and check_mirrored": prefetches_and_checks,
    "creation in the scope": creates_in_the_scope,
    "optax outside": optax_outside,
    "device_put storm": device_put_storm,
    "host callbacks": host_callbacks,
    "random keys outside": random_outside,
    "strategies come and go": strategies_come_and_go,
}


def run(name: str, secs: float) -> list[int]:
    """Runs a mix; returns how often each of its functions was called."""
    works = MIXES[name]()
    for work in works:
        work()  # compiles, outside of the time
    counts, errors, end = [0] * len(works), [], time.monotonic() + secs

    def repeat(i: int) -> None:
        try:
            while time.monotonic() < end and not errors:
                works[i]()
                counts[i] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return counts


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", N)
    print("calls:", *run(sys.argv[1], float(sys.argv[2])))
