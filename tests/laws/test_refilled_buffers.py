"""Every way to feed data, with a source that overwrites its buffer, equals a list of batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.strategies import cpu_strategy

SIZES = (8, 8, 8, 5, 8, 8, 3, 8)  # a source whose rows n does not divide, too


def batches(sizes):
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(size, 3)).astype("f4"), "y": rng.normal(size=size).astype("f4")}
        for size in sizes
    ]


class Refilled:
    """A loader with one buffer, which it fills again for every batch and spoils before."""

    def __init__(self, sizes):
        self._batches = batches(sizes)
        self._buffers = {"x": np.empty((8, 3), "f4"), "y": np.empty(8, "f4")}

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        for batch in self._batches:
            size = len(batch["y"])
            for name, buffer in self._buffers.items():
                buffer[:size] = batch[name]
            yield {name: buffer[:size] for name, buffer in self._buffers.items()}
            for buffer in self._buffers.values():
                buffer[:] = np.nan


def generator(sizes):
    return (batch for batch in Refilled(sizes))


def in_torch(sizes):
    torch = pytest.importorskip("torch")
    return ({k: torch.from_numpy(v) for k, v in batch.items()} for batch in Refilled(sizes))


def from_dlpack(sizes):
    return (jax.tree.map(jax.dlpack.from_dlpack, batch) for batch in Refilled(sizes))


class Wrapped:
    def __init__(self, array):
        self.array, self.shape, self.ndim, self.dtype = array, array.shape, array.ndim, array.dtype

    def __getitem__(self, index):
        return Wrapped(self.array[index])

    def __array__(self, dtype=None, copy=None):
        return self.array


def wrapped(sizes):
    return (jax.tree.map(Wrapped, batch) for batch in Refilled(sizes))


def total(batch, mask=1.0):
    rows = batch["x"].sum(-1) + batch["y"]
    return mirror.all_reduce("sum", (rows * mask).sum())


def distributed(strategy, source, **options):
    dataset = strategy.distribute_dataset(source, **options)
    return [float(strategy.run(total, (batch,))) for batch in dataset]


def padded(strategy, source, **options):
    dataset = strategy.distribute_dataset(source, remainder="pad", **options)
    return [float(strategy.run(total, pair)) for pair in dataset]


def collected(strategy, source):
    """All batches are taken before the first one is used."""
    every = list(strategy.distribute_dataset(source, remainder="drop"))
    return [float(strategy.run(total, (batch,))) for batch in every]


def peeked(strategy, source):
    dataset = strategy.distribute_dataset(source, remainder="drop")
    shapes = dataset.element_spec["x"].shape
    seen = [float(np.asarray(batch["x"]).sum()) for batch in dataset.peek(2)]
    return shapes, seen, [float(strategy.run(total, (batch,))) for batch in dataset]


def per_replica(strategy, source):
    dataset = strategy.distribute_datasets_from_function(lambda context: source)
    return [float(strategy.reduce("sum", batch, axis=0)["y"]) for batch in dataset]


def from_function(strategy, source):
    found = iter(source)
    value = strategy.distribute_values_from_function(lambda context: next(found)["x"])
    return np.stack(value.values).tolist()


def of_unequal_lengths(strategy, source):
    rows, reading = [], iter(source)
    for size in (2, 3):
        batch = next(reading)
        value = mirror.PerReplica([batch["x"][:size], batch["x"][size : 2 * size + 1]])
        next(reading)
        rows.append([row.tolist() for row in map(np.asarray, value.values)])
    return rows


def added(batch):
    return batch["x"].sum() + batch["y"].sum()


def arguments(strategy, source):
    """The results are read when the loader has overwritten all batches."""
    if not isinstance(source, list | Refilled):
        source = Refilled(SIZES)  # `run` accepts no tensors of torch
    results = [strategy.run(added, (batch,)) for batch in source]
    return [float(result) for result in results]


def loss_fn(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]) ** 2


def trained(strategy, source, *, options=None, **settings):
    with strategy.scope():
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        trainer = mirror.Trainer(model, optax.sgd(0.1), loss_fn, **settings)
    history = trainer.fit(source, **{"epochs": 1, "progress": False, **(options or {})})
    return [history["loss"], *map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param)))]


def evaluated(strategy, source):
    with strategy.scope():
        trainer = mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), loss_fn)
    return trainer.evaluate(source)["loss"]


WAYS = {
    "dropped": functools.partial(distributed, remainder="drop"),
    "without prefetch": functools.partial(distributed, remainder="drop", prefetch=0),
    "far ahead": functools.partial(distributed, remainder="drop", prefetch=4),
    "padded": padded,
    "padded without prefetch": functools.partial(padded, prefetch=0),
    "collected": collected,
    "peeked": peeked,
    "per replica": per_replica,
    "values from a function": from_function,
    "unequal lengths": of_unequal_lengths,
    "arguments": arguments,
    "fit": trained,
    "fit, 2 steps a launch": functools.partial(trained, steps_per_execution=2),
    "fit, 3 steps a launch": functools.partial(trained, steps_per_execution=3),
    "fit, pieces": functools.partial(trained, accumulate_steps=2),
    "evaluate": evaluated,
}
ONE_PASS = {
    "generator": generator,
    "torch": in_torch,
    "dlpack": from_dlpack,
    "wrapped": wrapped,
}


class Scaled(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, rows, values):
        return jnp.zeros_like(rows) + values[-1] * self.scale


def assigned(values):
    variable = mirror.Variable(jnp.zeros_like(values))
    return variable.assign(values)[...]


TAKEN_ONCE = {
    "a variable": lambda values: mirror.Variable(values)[...],
    "assign": assigned,
    "add_n": lambda values: mirror.add_n([values]),
    "DataParallel": lambda values: parallel(Scaled())(np.zeros(4, "f4"), values),
}


def parallel(model):
    return mirror.DataParallel(model, device_ids=["/cpu:0"])


@pytest.mark.slow
def test_values_can_be_overwritten_while_devices_are_busy(two, subtests):
    """JAX reads a host array in a thread of the pool that also runs the devices."""
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda i, x: jnp.sin(x) + x.sum(), x))
    operands = [jax.device_put(np.ones(1 << 18, "f4"), device) for device in jax.devices()]
    for name, take in TAKEN_ONCE.items():
        with subtests.test(msg=name):
            for _ in range(4):
                values = np.zeros((1 << 20) + 1, "f4")[1:]  # JAX may share aligned memory
                busy = [work(operand) for operand in operands]
                taken = take(values)
                values[-1] = 1
                assert np.asarray(taken)[-1] == 0
                jax.block_until_ready(busy)


def test_overwritten_buffers_do_not_change_any_result(two, subtests):
    for name, way in WAYS.items():
        wanted = way(two, batches(SIZES))
        for kind, source in {"loader": Refilled, **ONE_PASS}.items():
            with subtests.test(msg=f"{name}, {kind}"):
                found = way(two, source(SIZES))
                jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_batches_larger_than_the_first_are_exact(subtests):
    """The padded size grows; one device sees the same batches unpadded."""
    for sizes in ((3, 8), (1, 5, 8, 2)):
        wanted = trained(cpu_strategy(1), batches(sizes))
        for replicas in (2, 3):
            for settings in ({}, {"steps_per_execution": 2}, {"accumulate_steps": 2}):
                with subtests.test(msg=f"{sizes} on {replicas}, {settings}"):
                    found = trained(cpu_strategy(replicas), Refilled(sizes), **settings)
                    jax.tree.map(
                        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
                        found,
                        wanted,
                    )


def test_padding_grows_in_a_loop(two):
    dataset = two.distribute_dataset(batches((3, 5, 8, 1)), remainder="pad")
    masks = [mask for _, mask in dataset]
    assert [int(jnp.sum(mask.stacked)) for mask in masks] == [3, 5, 8, 1]
    assert [mask.stacked.size for mask in masks] == [4, 8, 8, 8]
