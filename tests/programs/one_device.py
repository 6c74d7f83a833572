"""Checks of what a device does at run time, on the first GPU or, with small sizes, on a CPU.

python -m tests.programs.one_device                prints the devices of JAX as JSON
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mirror
from tests.support.waiting import wait_until

MIB = 2**20


class Net(nnx.Module):
    """Dense layers with ReLU in between."""

    def __init__(self, sizes, rngs, **options):
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs, **options) for i, o in pairs])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def losses_of(model, batch):
    """Per-example losses."""
    x, y = batch
    logits = model(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def training_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: losses_of(m, batch).mean())(model)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def batches(count: int, size: int, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    x = random.normal(size=(count, size, width)).astype(np.float32)
    return list(zip(x, (x.sum(-1) > 0).astype(np.int32), strict=True))


def objects(strategy: mirror.Strategy, *sizes: int) -> tuple[Net, nnx.Optimizer]:
    with strategy.scope():
        model = Net(sizes, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train(strategy: mirror.Strategy, count: int = 20) -> tuple[list[float], Net]:
    """Returns the losses of some steps, which are verified against one device, and the model."""
    jax.config.update("jax_default_matmul_precision", "highest")
    model, optimizer = objects(strategy, 8, 32, 3)
    data = batches(count, 24, 8)
    (first,) = strategy.distribute_dataset(data[:1])
    strategy.verify(training_step, (model, optimizer, first), rtol=1e-3)
    losses = [
        float(strategy.run(training_step, (model, optimizer, batch)))
        for batch in strategy.distribute_dataset(data)
    ]
    strategy.check_mirrored((model, optimizer))
    return losses, model


def on_one(kind: str, **options: Any) -> mirror.MirroredStrategy:
    return mirror.MirroredStrategy([f"/device:{kind}:0"], **options)


# Memory


def held_bytes(device: jax.Device) -> int:
    """Bytes of a device that are in use; a CPU counts none, so there the live arrays are."""
    gc.collect()
    stats = device.memory_stats()
    if stats is not None:
        return stats["bytes_in_use"]
    return sum(array.nbytes for array in jax.live_arrays() if device in array.devices())


def memory(kind: str) -> None:
    """Does not grow from step to step, and is what `explain` estimates. First: peaks stay."""
    size, sizes = (1024, (1024, *[4096] * 3, 10)) if kind == "GPU" else (64, (64, 256, 256, 10))
    strategy = on_one(kind)
    device = jax.local_devices(backend=kind.lower())[0]
    before = held_bytes(device)
    (batch,) = strategy.distribute_dataset(batches(1, size, sizes[0]))
    arguments = (*objects(strategy, *sizes), batch)

    def after(steps: int) -> int:
        for _ in range(steps):
            loss = strategy.run(training_step, arguments)
        loss.block_until_ready()
        return held_bytes(device) - before

    first, later = after(5), after(50)
    stats = device.memory_stats()  # before `explain`, which copies the state
    estimate = strategy.explain(training_step, arguments, steps=3).memory
    arrays = estimate.peak_bytes - (estimate.result_bytes or 0) - (estimate.temporary_bytes or 0)
    assert later <= first + arrays // 50, (first, later, arrays)
    assert 0.9 * arrays <= later <= 1.2 * arrays + MIB, (later, arrays)
    if stats is not None:  # XLA's search for the fastest kernels takes more
        peak = stats["peak_bytes_in_use"] - before
        assert peak <= 2 * estimate.peak_bytes + 256 * MIB, (peak, estimate.peak_bytes)
        assert estimate.peak_bytes <= 2 * peak, (peak, estimate.peak_bytes)


# Steps


def asynchrony(kind: str) -> None:
    """The result of the last of three long steps is not ready when `run` returns."""
    width, rounds = (4096, 100) if kind == "GPU" else (512, 60)

    def step(weight, x):
        y = jax.lax.fori_loop(0, rounds, lambda _, y: jnp.tanh(y @ weight), x)
        return mirror.all_reduce("mean", y.mean())

    strategy = on_one(kind)
    with strategy.scope():
        weight = jnp.full((width, width), 1 / width)
    (x,) = strategy.distribute_dataset([np.ones((width, width), np.float32)])
    for _ in range(4):
        jax.block_until_ready(strategy.run(step, (weight, x)))
    results = [strategy.run(step, (weight, x)) for _ in range(3)]
    assert not results[-1].is_ready(), "run waits for its results"
    jax.block_until_ready(results[-1])
    assert all(result.is_ready() for result in results), "a step overtook another one"


def repeated(kind: str) -> None:
    """With `replicas=`, a step has the same bits again, compiled anew too; see one-to-eight.md.

    The gradient adds rows at repeated indices, which GPUs do in any order.
    """

    def step(table, ids, rows):
        grads = jax.grad(lambda table: ((table[ids] - rows) ** 2).mean())(table)
        return table - mirror.all_reduce("mean", grads)

    random = np.random.default_rng(0)
    data = (
        random.integers(0, 50, 100_000, dtype=np.int32),
        random.normal(size=(100_000, 64)).astype(np.float32),
    )
    found = []
    for _ in range(2):
        strategy = on_one(kind, replicas=2)
        (batch,) = strategy.distribute_dataset([data])
        with strategy.scope():
            table = jnp.zeros((50, 64))
        found += [np.asarray(strategy.run(step, (table, *batch))) for _ in range(3)]
    one, *others = found
    assert np.isfinite(one).all()
    assert one.any()
    for other in others:
        np.testing.assert_array_equal(one, other)


def verification(kind: str) -> None:
    """GPUs round the operands of products to TF32, which amplifies the roundings of layers."""
    strategy = on_one(kind, replicas_per_device=4)
    arguments = objects(strategy, 64, 256, 256, 256, 256, 8)
    (batch,) = strategy.distribute_dataset(batches(1, 32, 64))
    assert strategy.verify(training_step, (*arguments, batch)).largest < 1e-5


def explanation(kind: str) -> None:
    strategy = on_one(kind)
    arguments = objects(strategy, 8, 32, 3)
    data = strategy.distribute_dataset(batches(4, 24, 8))
    found = strategy.explain(training_step, arguments, data=data, steps=5)
    assert len(found.devices) == 1
    assert found.steps == 5
    assert found.verdict
    assert json.dumps(found.to_dict())


LAYOUTS: dict[str, Callable[[str], mirror.Strategy]] = {
    "with the CPU": lambda kind: mirror.MirroredStrategy([f"/{kind}:0".lower(), "/cpu:0"]),
    "staged": lambda kind: mirror.MirroredStrategy(None, mirror.ReductionToOneDevice()),
    "reduced on the device": lambda kind: mirror.MirroredStrategy(
        None, mirror.ReductionToOneDevice(f"/{kind}:0".lower())
    ),
    "two replicas": lambda kind: on_one(kind, replicas_per_device=2),
    "four replicas": lambda kind: on_one(kind, replicas_per_device=4),
}


def layouts(kind: str) -> None:
    """All layouts train as one device."""
    alone, _ = train(mirror.OneDeviceStrategy(f"/{kind}:0".lower()))
    for name, make in LAYOUTS.items():
        if name == "with the CPU" and kind == "CPU":
            continue
        losses, _ = train(make(kind))
        np.testing.assert_allclose(losses, alone, rtol=1e-3, err_msg=name)


# Host callbacks, stalls and interrupts


def callbacks(kind: str) -> None:
    """Values arrive, and an error of a callback is raised by `run`."""
    seen: list[float] = []

    def look(x):
        seen.append(float(x))
        if x < 0:
            raise ValueError("a callback that rejects")

    def twice(x):
        return np.asarray(2 * x)

    def step(x):
        total = mirror.all_reduce("sum", x.sum())
        jax.debug.callback(look, total)
        return jax.pure_callback(twice, jax.ShapeDtypeStruct((), jnp.float32), total)

    strategy = on_one(kind)
    assert float(strategy.run(step, (np.ones(3, np.float32),))) == 6
    assert seen == [3]
    error = None
    try:
        jax.block_until_ready(strategy.run(step, (-np.ones(3, np.float32),)))
    except Exception as caught:
        error = caught
    assert "a callback that rejects" in str(error), error
    assert float(strategy.run(step, (np.ones(3, np.float32),))) == 6


def watch(kind: str) -> None:
    """A callback that does not return is reported while it does not."""
    is_open = threading.Event()

    def block(x):
        assert is_open.wait(120)
        return np.asarray(x)

    def step(x):
        x = jax.pure_callback(block, jax.ShapeDtypeStruct((), jnp.float32), x.sum())
        return mirror.all_reduce("sum", x)

    strategy, results = on_one(kind), []

    def run():
        results.append(float(strategy.run(step, (np.ones(3, np.float32),))))

    is_open.set()
    run()  # compiles
    is_open.clear()
    with mirror.debugging.watch(secs=1) as stalls, contextlib.ExitStack() as ended:
        thread = threading.Thread(target=run)
        ended.callback(thread.join)
        ended.callback(is_open.set)
        thread.start()
        wait_until(lambda: bool(stalls.reports), 120)
        assert len(results) == 1
    assert "one_device.py" in stalls.reports[0]
    assert "pure_callback" in stalls.reports[0]
    assert results == [3, 3]


def interrupt(kind: str) -> None:
    """After Ctrl-C among launches, the state is complete and can be trained on."""
    strategy = on_one(kind)
    model, optimizer = objects(strategy, 64, 256, 3)
    (batch,) = strategy.distribute_dataset(batches(1, 64, 64))
    launches = []
    strategy.run(training_step, (model, optimizer, batch))

    def press():
        wait_until(lambda: len(launches) >= 20, 120)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        while True:
            launches.append(strategy.run(training_step, (model, optimizer, batch)))
    except KeyboardInterrupt:
        pass
    thread.join()
    count = int(optimizer.step[...])
    assert count - 1 - len(launches) in (0, 1), (count, len(launches))
    loss = float(strategy.run(training_step, (model, optimizer, batch)))
    assert np.isfinite(loss)
    assert loss <= float(launches[0])
    assert int(optimizer.step[...]) == count + 1
    strategy.check_mirrored((model, optimizer))


def endless(kind: str) -> None:
    """Trains until Ctrl-C, which it gets after 50 launches and does not handle."""
    gc.disable()  # with Python 3.11, JAX's callback of the collector loses an exception
    strategy = on_one(kind)
    arguments = (*objects(strategy, 64, 256, 3), *batches(1, 64, 64))
    launches: list[Any] = []

    def press():
        wait_until(lambda: len(launches) >= 50, 120)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    while True:
        launches.append(strategy.run(training_step, arguments))


# Trainer


def trainer(kind: str, **options: Any) -> mirror.Trainer:
    with on_one(kind).scope():
        return mirror.Trainer(Net((8, 32, 3), nnx.Rngs(0)), optax.adam(1e-2), losses_of, **options)


def fitted(trained: mirror.Trainer, epochs: int, **options: Any) -> list[float]:
    history = trained.fit(batches(12, 24, 8), epochs=epochs, progress=False, **options)
    return history["loss"]


def launches_of_several_steps(kind: str) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")
    expected = fitted(trainer(kind), 2)
    assert expected[1] < expected[0]
    for options in ({"steps_per_execution": 4}, {"steps_per_execution": 5}):
        np.testing.assert_allclose(fitted(trainer(kind, **options), 2), expected, rtol=1e-4)
    (accumulated, _) = fitted(trainer(kind, accumulate_steps=2), 2)
    np.testing.assert_allclose(accumulated, expected[0], rtol=1e-4)


def checkpoints(kind: str) -> None:
    """A restored trainer continues as the other one would have."""
    expected = fitted(trainer(kind), 2)
    with tempfile.TemporaryDirectory() as folder:
        saved = mirror.callbacks.Checkpoint(f"{folder}/ckpt", every_epochs=1)
        fitted(trainer(kind), 1, callbacks=saved)
        again = trainer(kind)
        again.restore(f"{folder}/ckpt")
        np.testing.assert_allclose(fitted(again, 2), expected, rtol=1e-4)


def loss_scale(kind: str) -> None:
    """Steps that overflow in float16 are skipped, and the scale shrinks until they do not."""
    trained = trainer(kind, precision="float16", loss_scale=mirror.LossScale(2.0**24))
    losses = fitted(trained, 3)
    assert np.isfinite(losses).all(), losses
    assert losses[-1] < losses[0]
    assert trained.loss_scale is not None
    assert float(trained.loss_scale.current[...]) < 2.0**24


def keras(kind: str) -> None:
    import keras  # an optional package

    strategy = on_one(kind)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=loss)
    x, y = (np.concatenate(part) for part in zip(*batches(12, 24, 8), strict=True))
    losses = model.fit(x, y, batch_size=24, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    (kernel, *_) = model.trainable_variables
    assert {device.platform for device in kernel.value.devices()} == {kind.lower()}


CHECKS: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        *(memory, asynchrony, repeated, verification, explanation, layouts),
        *(callbacks, watch, interrupt, launches_of_several_steps, checkpoints, loss_scale, keras),
    )
}


def problems(kind: str) -> dict[str, str]:
    """Returns the problem of each check on the first device of a kind; "" if it passes."""
    found = {}
    for name, check in CHECKS.items():
        try:
            check(kind)
        except Exception:
            found[name] = traceback.format_exc()
        else:
            found[name] = ""
    return found


if __name__ == "__main__":
    shown = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    print(json.dumps({**shown, "devices": [device.platform for device in jax.devices()]}))
