"""Trains nnx, Linen and plain pytrees in one process of several, and on one device.

python several_conformance.py FILE BATCH_SIZE ...

Prints each row with its largest difference to one device and the digest of its bits, and writes the
weights of all rows, and what is proved about the steps, to FILE. A single process has a
`MirroredStrategy`.
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import mirror

mirror.distributed.initialize()
is_alone = mirror.distributed.process_count() == 1
many = mirror.MirroredStrategy() if is_alone else mirror.MultiWorkerMirroredStrategy()
assert many.num_replicas_in_sync == 4
one = mirror.OneDeviceStrategy("/cpu:0")
proofs = {}  # of the first batch
ROWS, EPOCHS = 21, 2
OPTIMIZERS = {"sgd": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(0.01)}
# Of 8, 10 and 3, the last batch has 5 rows, 1 and 3: for some replicas, none.
BATCH_SIZES = tuple(map(int, sys.argv[2:]))
random = np.random.default_rng(0)
DATA = {
    "x": random.normal(size=(ROWS, 6)).astype(np.float32),
    "y": random.integers(0, 3, ROWS).astype(np.int32),
}


def losses_of(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def summed(total, mask, grads):
    """The mean loss and its gradients over all rows that are not padding."""
    total, count, grads = mirror.all_reduce("sum", (total, mask.sum(), grads))
    return total / count, jax.tree.map(lambda grad: grad / count, grads)


class Net(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def nnx_training(strategy, tx):
    with strategy.scope():
        model = Net()
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(model, optimizer, batch, mask):
        loss_fn = lambda m: (losses_of(m(batch["x"]), batch["y"]) * mask).sum()  # noqa: E731
        loss, grads = summed(*_swapped(nnx.value_and_grad(loss_fn)(model), mask))
        optimizer.update(model, grads)
        return loss

    def advance(batch, mask):
        arguments = (model, optimizer, batch, mask)
        proofs.setdefault(strategy, str(strategy.inspect(step, arguments)))
        return strategy.run(step, arguments)

    return advance, lambda: nnx.to_pure_dict(nnx.state(model))


def _swapped(found, mask):
    total, grads = found
    return total, mask, grads


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(jnp.tanh(linen.Dense(8)(x)))


def linen_params():
    return LinenNet().init(jax.random.key(0), np.ones((1, 6), np.float32))


def plain_params():
    noise = np.random.default_rng(1)
    return {"w": noise.normal(size=(6, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}


def pure_training(params, apply):
    def training(strategy, tx):
        start = jax.tree.map(np.asarray, params())
        with strategy.scope():
            held = [jax.tree.map(jnp.asarray, start)]
            held.append(tx.init(held[0]))

        def step(params, state, batch, mask):
            loss_fn = lambda p: (losses_of(apply(p, batch["x"]), batch["y"]) * mask).sum()  # noqa: E731
            loss, grads = summed(*_swapped(jax.value_and_grad(loss_fn)(params), mask))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        def advance(batch, mask):
            proofs.setdefault(strategy, str(strategy.inspect(step, (*held, batch, mask))))
            *held[:], loss = strategy.run(step, (*held, batch, mask), donate_argnums=(0, 1))
            return loss

        return advance, lambda: held[0]

    return training


def trainer_training(strategy, tx):
    """`mirror.Trainer`, which pads by itself; see `train`."""
    with strategy.scope():
        trainer = mirror.Trainer(
            Net(), tx, lambda m, b: losses_of(m(b["x"]), b["y"]), strategy=strategy
        )
    return trainer, lambda: nnx.to_pure_dict(nnx.state(trainer.model, nnx.Param))


TRAININGS = {
    "nnx": nnx_training,
    "linen": pure_training(linen_params, LinenNet().apply),
    "plain": pure_training(plain_params, lambda p, x: x @ p["w"] + p["b"]),
    "trainer": trainer_training,
}


def train(strategy, training, tx, size):
    """Returns the weights and the losses, on the host."""
    advance, weights = training(strategy, tx)
    if isinstance(advance, mirror.Trainer):
        history = advance.fit(DATA, EPOCHS, batch_size=size, shuffle=False, progress=False)
        losses = history["loss"]
    else:
        cut = [{k: v[i : i + size] for k, v in DATA.items()} for i in range(0, ROWS, size)]
        batches = strategy.distribute_dataset(cut, remainder="pad")
        losses = [float(advance(*batch)) for _ in range(EPOCHS) for batch in batches]
    strategy.check_mirrored(weights())
    found = jax.tree_util.tree_flatten_with_path(weights())[0]
    trained = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}
    return {**trained, "losses": np.asarray(losses, np.float64)}


def difference(a, b):
    """The largest one, relative to the largest magnitude of each array."""
    assert a.keys() == b.keys()
    return max(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max() for name in a)


saved = {}
for kind, training in TRAININGS.items():
    for name, tx in OPTIMIZERS.items():
        for size in BATCH_SIZES:
            proofs.clear()
            trained = train(many, training, tx, size)
            alone = train(one, training, tx, size)
            assert not any(np.isnan(value).any() for value in trained.values())
            assert alone["losses"][-1] != alone["losses"][0]
            bits = hashlib.sha256(b"".join(v.tobytes() for v in trained.values())).hexdigest()
            row = f"{kind}-{name}-{size}"
            print(f"row {row} {difference(trained, alone):.2e} {bits[:16]}", flush=True)
            if many in proofs:
                saved[f"{row} proof"] = np.asarray(proofs[many])
            saved |= {f"{row} {name}": value for name, value in trained.items()}
if many.is_chief:
    np.savez(sys.argv[1], **saved)
