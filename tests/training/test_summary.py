"""`trainer.summary`, and the reprs of what a training is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import mostly_slow

X = np.ones((8, 3), np.float32)
Y = np.arange(8) % 2


class Net(nnx.Module):
    """Layers in a list, a layer that is called twice, state, random keys and a parameter."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs, axis_name=mirror.REPLICA_AXIS)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 2, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(self.drop(self.norm(self.blocks[1](x)))) * self.scale


def new(n=2, strategy=None, **kwargs):
    with (strategy or cpu_strategy(n)).scope():
        loss = "sparse_categorical_crossentropy"
        return mirror.Trainer(Net(nnx.Rngs(0)), optax.adam(0.1), loss, **kwargs)


def cells(table):
    return {row[0]: row[1:] for row in table.rows}


DATA = {
    "arrays": (X, Y),
    "batches": [(X[:5], Y[:5])],
    "from_arrays": mirror.data.from_arrays((X, Y), 5, shuffle=True),
}


@pytest.mark.parametrize("rows", mostly_slow(DATA, "from_arrays"))
def test_summary_shows_layers_and_totals(subtests, rows):
    for kind in rows:
        with subtests.test(msg=kind):
            size = 8 if kind == "arrays" else 5
            rows = cells(new().summary(DATA[kind]))
            assert rows["model"] == ("Net", f"float32[{size},2]", "2", "8 bytes")
            assert rows["blocks.0"] == ("Linear", f"float32[{size},4]", "16", "64 bytes")
            assert rows["blocks.1"] == ("Linear", f"float32[{size},4]", "20", "80 bytes")
            assert rows["norm"] == ("BatchNorm", f"float32[{size},4]", "16", "64 bytes")
            assert rows["drop"] == ("Dropout", f"float32[{size},4]", "", "")
            assert next(iter(rows)) == "model"
            trainable = 2 + 16 + 20 + 8 + 10
            assert rows["trainable"][2:] == (str(trainable), f"{4 * trainable} bytes")
            assert rows["not trainable"][2:] == ("8", "32 bytes")
            assert rows["model per device"][:2] == ("2 replicas", "2 devices")


def test_summary_counts_what_is_stored_on_a_device():
    """Before the first step, and after it, when the update may be sharded."""
    strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"], shard="optimizer")

    class Wide(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros((256, 64)))

        def __call__(self, x):
            return x @ self.w

    with strategy.scope():
        trainer = mirror.Trainer(Wide(), optax.adam(0.1), "mse")
    data = (np.ones((4, 256), np.float32), np.ones((4, 64), np.float32))
    trainer.fit(data, batch_size=4, progress=False)
    rows = cells(trainer.summary(data))
    assert rows["model per device"][-1] == "64.0 KiB"
    assert rows["optimizer per device"][1] == "sharded by steps"
    stored = [
        shard.data.nbytes
        for leaf in jax.tree.leaves(nnx.state(trainer.optimizer))
        for shard in leaf.addressable_shards
        if shard.device == strategy.devices[0]
    ]
    assert sum(stored) < 70 * 1024
    assert rows["optimizer per device"][-1] == f"{sum(stored) / 1024:.1f} KiB"


def test_parameters_that_are_numbers_count_as_arrays():
    """The first step makes arrays of them."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.scale = nnx.Param(1.5)

        def __call__(self, x):
            return self.linear(x) * self.scale

    with cpu_strategy(2).scope():
        trainer = mirror.Trainer(Scaled(), optax.adam(0.1), "mse")
    assert repr(trainer).startswith("Trainer(Scaled, 5 parameters, ")
    data = (X, np.ones((8, 1), np.float32))
    before = trainer.summary(data)
    trainer.fit(data, batch_size=4, progress=False)
    for name in ("model", "trainable"):
        assert cells(before)[name] == cells(trainer.summary(data))[name]


def test_summary_changes_and_computes_nothing():
    trainer, data = new(), mirror.data.from_arrays((X, Y), 4, shuffle=True)
    leaves = jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer)))
    kinds = [type(module) for _, module in nnx.iter_modules(trainer.model)]
    first = [batch[1].tolist() for batch in data]
    data.set_epoch(0)
    trainer.summary(data)
    after = jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer)))
    assert all(a is b for a, b in zip(leaves, after, strict=True))
    assert [type(module) for _, module in nnx.iter_modules(trainer.model)] == kinds
    assert "__call__" in vars(nnx.Linear)
    assert nnx.Linear(3, 1, rngs=nnx.Rngs(0))(X).shape == (8, 1)
    assert [batch[1].tolist() for batch in data] == first
    assert not trainer.model.drop.deterministic


def test_summary_of_a_function_of_the_batch():
    def loss_fn(model, batch):
        return model(batch["x"]).sum(-1)

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    trainer = mirror.Trainer(model, optax.sgd(0.1), loss_fn, strategy=cpu_strategy(1))
    assert "float32[8,2]" in repr(trainer.summary({"x": X}))
    assert "<table>" in trainer.summary({"x": X})._repr_html_()


def test_summary_after_an_error_leaves_the_model_as_it_was():
    trainer = new()
    with pytest.raises(TypeError):
        trainer.summary((X[:, :2], Y))
    assert type(trainer.model) is Net
    assert type(trainer.model.out) is nnx.Linear
    trainer.summary((X, Y))


def test_summary_rejects_what_it_would_consume():
    with raises(TypeError, names="data", fix="trainer.summary(next(iter(data)))"):
        new().summary(iter([(X, Y)]))
    with raises(ValueError, fix="at least one example"):
        new().summary([])


# One line each


@pytest.mark.slow
def test_repr_of_a_trainer():
    trainer = new()
    name = "Trainer(Net, 56 parameters, MirroredStrategy(2 replicas), epoch 0, step 0)"
    assert repr(trainer) == name
    trainer.fit((X, Y), 3, batch_size=4, progress=False)
    assert repr(trainer).endswith("epoch 3, step 6)")


def test_repr_of_a_trainer_has_the_size_of_a_new_model():
    trainer = new()
    trainer.model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    assert repr(trainer).startswith("Trainer(Linear, 8 parameters, ")


def test_repr_of_a_run_and_a_dataset():
    class Shows(mirror.callbacks.Callback):
        def on_step(self, fit):
            shown.append(repr(fit))
            fit.stop("enough")
            shown.append(repr(fit))
            shown.append(repr(fit.trainer))

    shown = []
    new().fit((X, Y), 3, batch_size=4, callbacks=Shows(), progress=False)
    assert shown[0] == "FitLoop(epoch 0 of 3, step 1)"
    assert shown[1] == "FitLoop(epoch 0 of 3, step 1, stopped: enough)"
    assert shown[2].endswith("epoch 0, step 1)")
    distribute = cpu_strategy(2).distribute_dataset
    assert repr(distribute([X, X])) == (
        "DistributedDataset(list of 2 batches, 2 replicas, remainder='error')"
    )
    assert "generator" in repr(distribute(x for x in [X]))
    assert "ArrayDataset of 2 batches" in repr(distribute(DATA["from_arrays"], remainder="pad"))


def test_repr_of_a_replica_context():
    contexts = []

    def step():
        contexts.append(mirror.get_replica_context())
        contexts.append(repr(contexts[0]))

    cpu_strategy(2).run(step)
    assert contexts[1] == "ReplicaContext(2 replicas)"
    assert repr(contexts[0]) == "ReplicaContext(2 replicas, its step has finished)"
    assert repr(mirror.get_replica_context()) == "ReplicaContext(1 replica)"
