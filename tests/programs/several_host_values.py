"""What a host writes between two launches, the same in all processes or not; prints what is found.

The thread that compares is off: the processes compare after each row, and none ends.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from tests.support import inside

ledger = inside.ledger()
inside.failures().Failures._exchange = lambda self: None
strategy = mirror.MultiWorkerMirroredStrategy()
me, n = mirror.distributed.process_index(), strategy.num_replicas_in_sync
batch = mirror.PerReplica.from_stacked(np.ones((n, 4, 3), np.float32))
data = {"x": np.ones((40, 3), np.float32), "y": np.ones((40, 1), np.float32)}


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.scale = mirror.Variable(1.0)

    def __call__(self, x):
        return self.linear(x) * self.scale[...]


def optimizer():
    return optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)


with strategy.scope():
    net = Net()
    state = nnx.Optimizer(net, optimizer(), wrt=nnx.Param)
    trainer = mirror.Trainer(
        nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optimizer(), "mean_squared_error", labels="y"
    )

    twins = [nnx.Linear(3, 1, rngs=nnx.Rngs(i)) for i in range(2)]


def shrink(twin, x):
    twin.kernel[...] -= 0.1 * mirror.all_reduce("mean", x.mean()) * twin.kernel[...]


def train(net, state, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(net)
    state.update(net, mirror.all_reduce("mean", grads))
    return mirror.all_reduce("mean", loss)


def plain(w, x, lr):
    g = mirror.all_reduce("mean", (w * x).mean())
    return w - lr * g


def scaled(w, x):
    return w * x.mean()


def halved(w):
    return w / 2


weights = {"w": np.ones(3, np.float32)}
large = np.ones(2**15, np.float32)
kept, steps = {}, []


def run(lr, x=batch):
    weights["w"] = strategy.run(plain, (weights["w"], x, lr), donate_argnums=0)


def train_once():
    float(strategy.run(train, (net, state, batch)))


def number(value):
    run(0.1 * value)


def numpy_scalar(value):
    run(np.float32(0.1 * value))


def numpy_array(value):
    run(np.full(3, 0.1 * value, np.float32))


def integer(value):
    run(int(value))


def jax_array(value):
    run(jnp.float32(0.1 * value))


def kept_array(value):
    for _ in range(3):
        strategy.run(scaled, (kept.setdefault(value, jnp.full(3, value)), batch))


def large_array(value):
    changed = large.copy()
    changed[20_000] = value
    strategy.run(scaled, (changed, batch))


def changed_result(value):
    weights["w"] = weights["w"] * value
    run(0.1)


def assign(value):
    net.scale.assign(value)
    train_once()


def nnx_assignment(value):
    net.linear.bias[...] = jnp.full(1, value)
    train_once()


def nnx_eager(value):
    net.linear.bias[...] = net.linear.bias[...] * value
    train_once()


def hyperparameter(value):
    state.opt_state.hyperparams["learning_rate"][...] = jnp.float32(0.1 * value)
    train_once()


def fit_callback(write, value):
    class Writes(mirror.callbacks.Callback):
        steps = 0

        def on_step(self, fit):
            self.steps += 1
            if self.steps == 4:
                write(value)

    trainer.fit(data, epochs=1, batch_size=4, callbacks=Writes(), progress=False)


def callback_hyperparameter(value):
    def write(value):
        rate = trainer.optimizer.opt_state.hyperparams["learning_rate"]
        rate[...] = jnp.float32(0.1 * value)

    fit_callback(write, value)


def callback_bias(value):
    def write(value):
        trainer.model.bias[...] = jnp.full(1, value)

    fit_callback(write, value)


def results_of_another_program(value):
    for _ in range(3):
        weights["w"] = strategy.run(halved, (weights["w"],))
        run(0.1)
        strategy.run(scaled, (weights["w"], batch))


def results_of_a_dropped_step(value):
    def step(w):
        return w / 2

    weights["w"] = strategy.run(step, (weights["w"],))
    if me:
        steps.append(step)  # which Python frees in the other process
    del step
    gc.collect()
    run(0.1)


def both(a, b, x):
    mean = mirror.all_reduce("mean", x.mean())
    return a - mean, b + mean


def swapped_results(value):
    """The second process of `differs` does not swap; in `same`, both do."""
    a, b = kept.get("pair", (np.zeros(3, np.float32), np.ones(3, np.float32)))
    for i in range(3):
        if i == 1 and value < 1.3:
            a, b = b, a
        a, b = strategy.run(both, (a, b, batch))
    kept["pair"] = a, b


def earlier_result(value):
    results = [weights["w"]]
    for _ in range(3):
        results.append(strategy.run(halved, (results[-1],)))
    strategy.run(halved, (results[1 if value < 1.3 else 2],))


def known_constant(value):
    rates = kept.setdefault("rates", [jnp.float32(0.1), jnp.float32(0.2)])
    for i in range(4):
        strategy.run(plain, (weights["w"], batch, rates[i % 2 if i < 2 else int(value < 1.3)]))


def swapped_variables(value):
    if value < 1.3:
        a, b = twins[0].kernel, twins[1].kernel
        a[...], b[...] = b[...], a[...]
    for twin in twins:
        strategy.run(shrink, (twin, batch))


def nothing(value):
    run(0.1)
    train_once()


ROWS = [
    *(number, integer, numpy_scalar, numpy_array, jax_array, kept_array, large_array),
    *(changed_result, assign, nnx_eager, nnx_assignment, hyperparameter, callback_hyperparameter),
    *(callback_bias, results_of_another_program, results_of_a_dropped_step, swapped_results),
    *(earlier_result, known_constant, swapped_variables, nothing),
]


def compared():
    """Returns the message of a difference, or "", in process 0."""
    jax.block_until_ready([weights["w"], net.linear.bias[...]])
    found = [ledger.exchange()]
    while not ledger.is_settled:
        found.append(ledger.exchange())
    mirror.distributed.barrier("posted", 60)
    found += [ledger.exchange() for _ in range(20)]  # also of the other launches of this row
    mirror.distributed.barrier("compared", 60)
    return "".join(difference.text for difference in found if difference is not None)


for row in ROWS:
    weights["w"] = np.ones(3, np.float32)
    for name, value in [("warm", 1.5), ("same", 1.25), ("differs", 0.5 + me)]:
        row(value)
        text = compared()
        if me == 0:
            print(f"<{row.__name__} {name}>{text}</{row.__name__} {name}>", flush=True)
