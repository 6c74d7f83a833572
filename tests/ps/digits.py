"""A small network, its training step and its data, for the tests with parameter servers."""

import jax
import numpy as np
import optax
from flax import nnx

import mirror


class Net(nnx.Module):
    """A perceptron; a list and two digits in a name are what sorts differently as text."""

    def __init__(self, rngs, width=32, has_noise=False):
        self.layers = nnx.List([nnx.Linear(16, width, rngs=rngs), nnx.Linear(width, 8, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, rngs=rngs) if has_noise == "norm" else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if has_noise == "dropout" else None

    def __call__(self, x):
        x = self.layers[0](x)
        if self.norm is not None:
            x = self.norm(x)
        x = jax.nn.relu(x)
        if self.dropout is not None:
            x = self.dropout(x)
        return self.layers[1](x)


def train_step(model, optimizer, batch):
    def mean_loss(model):
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = nnx.value_and_grad(mean_loss)(model)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=(n, 16)).astype(np.float32), "y": rng.integers(0, 8, n)}
        for n in sizes
    ]


def create(strategy, tx, **kwargs):
    with strategy.scope():
        model = Net(nnx.Rngs(0), **kwargs)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def arrays(*objects):
    """Returns all arrays of objects by name, keys as their data."""
    found = {}
    for number, obj in enumerate(objects):
        for path, leaf in nnx.to_flat_state(nnx.state(obj)):
            value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
            for inside, array in jax.tree_util.tree_leaves_with_path(value):
                if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                    array = jax.random.key_data(array)
                found[number, path, jax.tree_util.keystr(inside)] = np.asarray(array)
    return found


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(np.abs(a[k].astype(np.float64) - b[k]).max(initial=0) for k in a)


def are_equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def on_replicas(count, tx, data, step=train_step, **kwargs):
    """Trains with `MirroredStrategy`, and returns objects and the results of the step."""
    strategy = mirror.MirroredStrategy([f"/cpu:{i}" for i in range(count)])
    model, optimizer = create(strategy, tx, **kwargs)
    results = [
        strategy.run(step, (model, optimizer, jax.tree.map(lambda x: split(x, count), b)))
        for b in data
    ]
    return (model, optimizer), results


def split(array, count):
    return mirror.PerReplica(list(np.array_split(array, count)))
