"""`mirror.Trainer` on n replicas trains like a hand-written loop on one device."""
# ruff: noqa: E501 (arguments and their message are one row)

import contextlib
import copy
import dataclasses
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import mirror
from tests.support import inside
from tests.support.compilations import compilations
from tests.support.messages import assert_message, raises
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import mostly_slow, rows
from tests.support.training import batches_of, fit

B = 4
N = 3 * B + 1
RNG = np.random.RandomState(0)
DATA = {
    "x": (RNG.randint(-4, 5, (N, 3)) / 8).astype(np.float32),
    "y": (RNG.randint(-8, 9, N) / 4).astype(np.float32),
    "k": np.arange(N),
}
LAYOUTS = {
    "8": (8, 1),  # some replicas have no example
    "3": pytest.param((3, 1), marks=pytest.mark.slow),  # divides no batch
    "2-on-2": pytest.param((2, 2), marks=pytest.mark.slow),
}


class Line(nnx.Module):
    def __init__(self, dtype=np.float32):
        self.w = nnx.Param(np.asarray([0.5, -0.25, 1.0], dtype))
        self.b = nnx.Param(np.asarray(0.125, dtype))

    def __call__(self, x):
        return x @ self.w + self.b


def squares(model, batch):
    """Squared errors, and metrics that do not depend on the model: rational ones."""
    losses = (model(batch["x"]) - batch["y"]) ** 2
    return losses, {"y": batch["y"], "odd": batch["k"] % 2 == 1, "number": batch["k"]}


def batches(count=N, size=B, data=DATA):
    return batches_of({name: value[:count] for name, value in data.items()}, size)


def by_hand(data, lr=1.0, w=(0.5, -0.25, 1.0), b=0.125):
    """Trains one device for one pass over whole batches, in NumPy; returns weights and mean loss."""
    w, total, count = np.asarray(w, np.float64), 0.0, 0
    for batch in data:
        x, error = batch["x"], batch["x"] @ w + b - batch["y"]
        total, count = total + np.sum(error**2), count + len(x)
        w, b = w - lr * 2 * error @ x / len(x), b - lr * 2 * error.mean()
    return w, b, total / count


def line(strategy=None, model=None, loss_fn=squares, lr=1.0, **kwargs):
    return mirror.Trainer(model or Line(), optax.sgd(lr), loss_fn, strategy=strategy, **kwargs)


def state_of(trainer):
    """Returns all state except the random keys, which never change."""
    return jax.tree.map(np.asarray, nnx.state((trainer.model, trainer.optimizer), no_keys))


def no_keys(_, value):
    return not isinstance(value, nnx.RngKey)


def reset(trainer, state):
    """Restores the state, and keeps the compiled programs."""
    nnx.update((trainer.model, trainer.optimizer), jax.tree.map(np.copy, state))


def assert_equal(got, wanted):
    """Bitwise."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def assert_by_hand(trainer, history, data, **kwargs):
    w, b, loss = by_hand(data, **kwargs)
    np.testing.assert_allclose(trainer.model.w[...], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trainer.model.b[...], b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)


@pytest.fixture(scope="module")
def compiled():
    """A trainer on two replicas and its initial state."""
    trainer = line(cpu_strategy(2))
    return trainer, state_of(trainer)


@pytest.fixture
def on_two(compiled):
    """An untrained trainer with compiled programs."""
    return untrained(*compiled)


def untrained(trainer, state):
    """Ends whatever was interrupted, and restores the state."""
    fit(trainer, batches(), initial_epoch=0)
    reset(trainer, state)
    return trainer


# One device on the whole batch


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def trained(request):
    """One trainer per layout, and its initial state."""
    num_devices, replicas_per_device = request.param
    trainer = line(cpu_strategy(num_devices, replicas_per_device=replicas_per_device))
    return trainer, state_of(trainer)


def test_fit_matches_one_device(trained, subtests):
    """With a learning rate of 1, the weights of one batch are the gradient."""
    for count in range(1, N + 1):
        with subtests.test(msg=f"{count} examples"):
            check_fit(*trained, count)


def check_fit(trainer, state, count):
    reset(trainer, state)
    data = batches(count)
    history = fit(trainer, data)
    assert_by_hand(trainer, history, data)
    metrics = {"y": DATA["y"], "odd": DATA["k"] % 2 == 1, "number": DATA["k"]}
    wanted = {name: [value[:count].mean(dtype=np.float64)] for name, value in metrics.items()}
    assert {name: history[name] for name in wanted} == wanted
    trainer.strategy.check_mirrored((trainer.model, trainer.optimizer))


def test_evaluate_and_predict_match_one_device(trained, subtests):
    for count in (1, 9, N):
        with subtests.test(msg=f"{count} examples"):
            check_evaluate_and_predict(*trained, count)


def check_evaluate_and_predict(trainer, state, count):
    reset(trainer, state)
    data, rows = batches(count), {name: value[:count] for name, value in DATA.items()}
    found = trainer.evaluate(data)
    assert next(iter(found)) == "loss"
    np.testing.assert_allclose(found["loss"], by_hand([rows])[2], rtol=1e-5)
    assert found["y"] == rows["y"].mean(dtype=np.float64)
    assert found["odd"] == (rows["k"] % 2).mean()
    assert found["number"] == rows["k"].mean()
    assert {type(value) for value in found.values()} == {float}
    same, (line, rest) = trainer.predict(data, each_row)
    assert_equal(same, rows)
    np.testing.assert_allclose(line, rows["x"] @ [0.5, -0.25, 1.0] + 0.125, rtol=1e-6)
    assert_equal(rest, {"half": rows["x"].astype(jnp.bfloat16), "one": np.ones((count, 2), bool)})
    dtypes = [leaf.dtype for leaf in jax.tree.leaves((same, rest))]
    assert dtypes == ["int32", "float32", "float32", "bfloat16", "bool"]
    assert_equal(state_of(trainer), state)


def each_row(model, batch):
    one = jnp.ones((len(batch["k"]), 2), bool)  # the same on all replicas
    return batch, (model(batch["x"]), {"half": batch["x"].astype(jnp.bfloat16), "one": one})


def test_trainer_compiles_each_program_once(two, caplog):
    """Whole and partial batches, several epochs, twice each."""
    for kwargs in ({}, {"steps_per_execution": 3}):
        trainer = line(two, **kwargs)
        with compilations(caplog) as events:
            fit(trainer, batches(), 3, validation_data=batches(9))
            trainer.predict(batches(), each_row)
        compiled = [event for event in events if event.startswith("Compiling jit(")]
        names = [event.removeprefix("Compiling jit(").partition(")")[0] for event in compiled]
        step = "train_steps" if kwargs else "train_step"
        steps = [name for name in names if name.endswith(("_step", "_steps"))]
        assert steps == [step, "evaluate_step", "predict_step"]
        with compilations(caplog) as events:
            fit(trainer, batches(10), 2, validation_data=batches())
            trainer.evaluate(batches(5))
            trainer.predict(batches(6), each_row)
        assert not events


def test_second_epoch_compiles_nothing(eight, caplog):
    class Listens(mirror.callbacks.Callback):
        def on_epoch_begin(self, fit):
            if fit.position.epoch == 1:
                self.heard = contextlib.ExitStack()
                self.events = self.heard.enter_context(compilations(caplog))

    listener = Listens()
    fit(line(eight), batches(), 2, callbacks=listener)
    listener.heard.close()
    assert not listener.events


# Microbatches and grouped steps


WAYS = {  # accumulate_steps, steps_per_execution, strategy
    "3-pieces": (3, 1, lambda: cpu_strategy(1)),
    "5-steps": (1, 5, lambda: cpu_strategy(2)),
    "3-pieces-2-steps": (3, 2, lambda: cpu_strategy(2)),
    "2-pieces-5-steps": (2, 5, lambda: cpu_strategy(8)),
    "vmap": (2, 2, EXECUTORS["vmap"]),
    "staged": (2, 2, EXECUTORS["staged"]),
    "staged-one-step": (1, 1, EXECUTORS["staged"]),
}


def test_accumulated_and_grouped_steps_match_one_device():
    """Also if the batches do not fill the last launch, or the examples the last microbatch."""
    check_way("2-pieces-5-steps")


@pytest.mark.slow
def test_more_accumulated_and_grouped_steps_match_one_device(subtests):
    for way in WAYS.keys() - {"2-pieces-5-steps"}:
        with subtests.test(msg=way):
            check_way(way)


def check_way(way):
    accumulate, at_once, strategy = WAYS[way]
    trainer = line(strategy(), accumulate_steps=accumulate, steps_per_execution=at_once)
    state = state_of(trainer)
    for count in (B, 7, N):
        reset(trainer, state)
        history = fit(trainer, batches(count))
        assert_by_hand(trainer, history, batches(count))
        assert history["number"] == [DATA["k"][:count].mean()]
        assert trainer.optimizer.step[...] == len(batches(count))


# What a test looks at does not depend on the padding that batch normalization counts.
ignores_padding = pytest.mark.filterwarnings(
    "ignore:The batch normalization at .* counts the padding"
)


class Net(nnx.Module):
    """Has state beside the parameters that a step changes."""

    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        # No bias: the normalization removes it, and its gradient is rounding noise.
        self.first = nnx.Linear(3, 4, use_bias=False, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.BatchNorm(4, rngs=rngs, param_dtype=dtype)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += 1
        return self.out(self.dropout(self.norm(self.first(x))))[:, 0]


# Enough rows for each replica to normalize its own without magnifying their rounding errors.
MANY = {
    "x": RNG.randn(60, 3).astype(np.float32),
    "y": RNG.randn(60).astype(np.float32),
    "k": np.arange(60),
}
MOMENTUM = optax.sgd(0.05, momentum=0.9)  # Adam would magnify it too


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The per-example losses of .* are b?float16")
def test_grouped_steps_equal_single_steps(subtests):
    """Normalization, dropout, counters, moments and metrics, with two dtypes in one model."""
    for executor, dtype in [("pmap", jnp.bfloat16), ("staged", jnp.float32)]:
        with subtests.test(msg=executor):
            check_grouped_steps_equal_single_steps(executor, dtype)


def check_grouped_steps_equal_single_steps(executor, dtype):
    found, data = [], batches(60, 16, MANY)
    for at_once in (1, 5):
        strategy = EXECUTORS[executor]()
        trainer = mirror.Trainer(
            Net(dtype),
            MOMENTUM,
            squares,
            strategy=strategy,
            steps_per_execution=at_once,
            require_equal=False,
        )
        history = fit(trainer, data, 2)
        found.append((state_of(trainer), dict(history)))
        assert trainer.model.first.kernel.dtype == dtype
        assert trainer.model.out.kernel.dtype == jnp.float32
        assert trainer.model.count[...] == 2 * len(data)
        assert trainer.model.dropout.rngs.count[...] == 2 * len(data)
    tolerance = {"rtol": 1e-2} if dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), *found)


@pytest.mark.filterwarnings("ignore:The per-example losses of .* are b?float16")
def test_small_floats_are_summed_in_float32(eight):
    """4096 losses of 1 are 4096 in float32; bfloat16 ends at 256."""

    def ones(model, batch):
        return jnp.ones(len(batch), jnp.bfloat16) + 0 * model.b, {"one": jnp.ones_like(batch)}

    trainer = line(eight, Line(jnp.bfloat16), ones, accumulate_steps=2)
    rows = np.ones(4096, jnp.bfloat16)
    assert dict(fit(trainer, [rows])) == {"loss": [1.0], "one": [1.0]}
    assert trainer.evaluate([rows, rows]) == {"loss": 1.0, "one": 1.0}


@pytest.mark.filterwarnings("ignore:The per-example losses of .* are b?float16")
def test_half_precision_gradients_do_not_overflow(two):
    """The sum of 1024 gradients of 128 is more than float16 has; their mean is not."""

    def steep(model, batch):
        return 128 * model.b + 0 * batch

    for accumulate in (1, 2):
        trainer = line(two, Line(np.float16), steep, lr=1 / 128, accumulate_steps=accumulate)
        fit(trainer, [np.ones(1023, np.float16)])
        assert trainer.model.b[...] == 0.125 - 1


def test_microbatches_are_normalized_separately():
    """Each microbatch updates the running statistics; the gradient is the mean over microbatches."""
    model, optimizer = (lambda m: (m, nnx.Optimizer(m, optax.sgd(0.1), wrt=nnx.Param)))(Normed())

    @nnx.jit
    def step(model, optimizer, pieces):
        mean_loss = nnx.grad(lambda model, piece: squares(model, piece)[0].mean())
        first, second = [mean_loss(model, piece) for piece in pieces]
        optimizer.update(model, jax.tree.map(lambda a, b: (a + b) / 2, first, second))

    step(model, optimizer, batches(2 * B))
    trainer = mirror.Trainer(
        Normed(), optax.sgd(0.1), squares, strategy=cpu_strategy(1), accumulate_steps=2
    )
    with pytest.warns(UserWarning, match="accumulate_steps") as caught:
        fit(trainer, batches(2 * B, 2 * B))
    assert_message(str(caught[0].message), names="accumulate_steps", values=2, fix="nnx.LayerNorm")
    got, wanted = nnx.state(trainer.model), nnx.state(model)
    assert trainer.model.norm.mean[...].any()
    compare = np.testing.assert_allclose
    jax.tree.map(lambda a, b: compare(a, b, rtol=1e-5, atol=1e-6), got, wanted)


class Normed(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jnp.asarray([0.5, -0.25, 1.0]))

    def __call__(self, x):
        return self.norm(x) @ self.w


@pytest.mark.parametrize("rows", mostly_slow([(1, 2), (2, 1)], (2, 1)))
def test_dropout_differs_between_microbatches_and_replicas(subtests, rows):
    for num_replicas, accumulate in rows:
        with subtests.test(msg=f"{num_replicas} replicas, {accumulate} pieces"):
            check_dropout_differs_between_microbatches_and_replicas(num_replicas, accumulate)


def check_dropout_differs_between_microbatches_and_replicas(num_replicas, accumulate):
    class Draws(nnx.Module):
        def __init__(self):
            self.w, self.dropout = nnx.Param(jnp.ones(())), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def loss_fn(model, batch):
        drawn = model.dropout(jnp.ones((len(batch), 64))) @ jnp.arange(64.0)
        return model.w * drawn, {f"row{i}": drawn * (batch == i) for i in range(2)}

    trainer = mirror.Trainer(
        Draws(),
        optax.sgd(0.1),
        loss_fn,
        strategy=cpu_strategy(num_replicas),
        accumulate_steps=accumulate,
    )
    history = fit(trainer, [np.arange(2)])
    assert history["row0"] != history["row1"]
    assert trainer.model.dropout.rngs.count[...] == accumulate
    first = trainer.evaluate([np.arange(2)])
    assert first == trainer.evaluate([np.arange(2)])
    assert first["row0"] == first["row1"] == np.arange(64).sum() / 2


# Models and optimizers


class Tree(nnx.Module):
    """Nested parameters, one of them under two names."""

    def __init__(self):
        self.parts = nnx.data({"w": nnx.Param(np.asarray([0.5, -0.25, 1.0], np.float32))})
        self.more = nnx.data([nnx.Param(np.float32(0.125))])
        self.same = self.more[0]
        self.scale = nnx.data(jnp.ones(()))  # an array that is not a variable

    w = property(lambda self: self.parts["w"])
    b = property(lambda self: self.same)

    def __call__(self, x):
        return (x @ self.parts["w"] + self.more[0]) * self.scale


class LinenLine(linen.Module):
    @linen.compact
    def __call__(self, x):
        w = self.param("w", lambda _: jnp.asarray([0.5, -0.25, 1.0]))
        return x @ w + self.param("b", lambda _: jnp.asarray(0.125))


def from_linen():
    return nnx.bridge.ToNNX(LinenLine(), rngs=nnx.Rngs(0)).lazy_init(DATA["x"])


@pytest.mark.parametrize("rows", mostly_slow([(Tree, 1), (from_linen, 2)], (Tree, 1)))
def test_trainer_trains_any_module(subtests, eight, rows):
    for create, at_once in rows:
        with subtests.test(msg=create.__name__):
            check_trainer_trains_any_module(eight, create, at_once)


def check_trainer_trains_any_module(eight, create, at_once):
    with eight.scope():
        trainer = line(model=create(), steps_per_execution=at_once)
    assert trainer.strategy is eight
    history = fit(trainer, batches())
    assert_by_hand(trainer, history, batches())
    assert len(trainer.predict(batches(), lambda model, batch: model(batch["x"]))) == N


def test_training_does_not_depend_on_creation_in_the_scope(subtests, two):
    for where in ["nothing", "model", "optimizer", "trainer", "fit"]:
        with subtests.test(msg=where):
            check_training_does_not_depend_on_creation_in_the_scope(two, where)


def check_training_does_not_depend_on_creation_in_the_scope(two, inside):
    def place(name):
        return two.scope() if inside == name else contextlib.nullcontext()

    with place("model"):
        model = Line()
    with place("optimizer"):
        optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    with place("trainer"):
        trainer = mirror.Trainer(model, optimizer, squares, strategy=two)
    assert trainer.optimizer is optimizer
    with place("fit"):
        history = fit(trainer, batches())
    assert_by_hand(trainer, history, batches())


def test_trainer_uses_one_device_without_a_scope():
    trainer = line()
    assert_by_hand(trainer, fit(trainer, batches()), batches())
    assert trainer.strategy.num_replicas_in_sync == 1


def only_b(path, value):
    return isinstance(value, nnx.Param) and path[-1] == "b"


@pytest.mark.parametrize("rows", mostly_slow([(1, False), (2, True)], (2, True)))
def test_wrt_keeps_other_variables_unchanged(subtests, two, rows):
    for at_once, has_optimizer in rows:
        with subtests.test(msg=f"{at_once=}, {has_optimizer=}"):
            model, kwargs = Line(), {"steps_per_execution": at_once}
            if has_optimizer:
                tx = nnx.Optimizer(model, optax.adam(1.0), wrt=only_b)
            else:
                tx, kwargs["wrt"] = optax.adam(1.0), only_b
            trainer = mirror.Trainer(model, tx, squares, strategy=two, **kwargs)
            fit(trainer, batches(), 2)
            assert_equal(np.asarray(model.w), Line().w[...])
            assert abs(model.b[...] - 0.125) > 0.1


@rows("options", {"": {}, "pieces": {"accumulate_steps": 2}, "group": {"steps_per_execution": 2}})
def test_callback_may_replace_the_optimizer_by_one_of_more_variables(two, options):
    class Unfreeze(mirror.callbacks.Callback):
        def on_epoch_begin(self, fit):
            if fit.position.epoch == 1:
                fit.trainer.optimizer = nnx.Optimizer(fit.trainer.model, tx, wrt=nnx.Param)

    tx, only_b = optax.sgd(0.1), nnx.PathContains("b")
    trainer = mirror.Trainer(Line(), tx, squares, wrt=only_b, strategy=two, **options)
    start = np.asarray(trainer.model.w[...])
    trainer.fit(batches(), progress=False)
    np.testing.assert_array_equal(trainer.model.w[...], start)
    trainer.fit(batches(), 2, callbacks=Unfreeze(), progress=False)
    one = mirror.Trainer(Line(), tx, squares, wrt=only_b, strategy=cpu_strategy(1))
    one.fit(batches(), progress=False)
    one.fit(batches(), progress=False)
    one = mirror.Trainer(one.model, tx, squares, strategy=cpu_strategy(1))
    one.fit(batches(), progress=False)
    np.testing.assert_allclose(trainer.model.w[...], one.model.w[...], rtol=1e-5)


@ignores_padding
def test_fit_keeps_the_mode_and_evaluate_uses_evaluation_mode(two):
    model = Normed()
    model.eval()
    trainer = line(two, model, lr=0.0, require_equal=False)
    first = fit(trainer, batches())
    assert not model.norm.mean[...].any()
    assert dict(first) == {name: [value] for name, value in trainer.evaluate(batches()).items()}
    model.train()
    second = fit(trainer, batches(), validation_data=batches())
    assert first["loss"] != second["loss"]
    assert not model.norm.use_running_average
    assert second["val_loss"] == [trainer.evaluate(batches())["loss"]] != second["loss"]


def test_metric_with_a_name_of_the_validation_is_rejected(two):
    """The value of the validation would replace its own in the history."""

    def loss_fn(model, batch):
        losses, _ = squares(model, batch)
        return losses, {"error": losses, "val_error": losses}

    trainer = line(two, loss_fn=loss_fn)
    assert "val_error" in fit(trainer, batches())
    with raises(ValueError, names=["'val_error'", "'error'", "validation_data"], fix="Rename it"):
        fit(trainer, batches(), validation_data=batches())


def test_copy_of_a_trainer_trains_separately(two):
    trainer = line(two)
    fit(trainer, batches())
    state = state_of(trainer)
    copied = copy.deepcopy(trainer)
    assert_equal(state_of(copied), state)
    for each in (copied, trainer):
        assert_equal(state_of(trainer), state)
        fit(each, batches())
    assert_equal(state_of(trainer), state_of(copied))


def test_verify_compares_with_one_device_without_changes(two):
    trainer = line(two, accumulate_steps=2)
    state = state_of(trainer)
    assert trainer.verify(batches())
    assert_equal(state_of(trainer), state)

    def wrong(model, batch):
        return (model(batch["x"]) - batch["x"].mean()) ** 2

    with raises(mirror.VerifyError, names="model.w", values=[2, "1e-05"]):
        line(two, loss_fn=wrong).verify(batches())


class Noisy(nnx.Module):
    """Adds noise, as a variational autoencoder does."""

    def __init__(self):
        self.w, self.rngs = nnx.Param(jnp.ones(3)), nnx.Rngs(0)

    def __call__(self, x, noise):
        return (x + noise) @ self.w


def of_rngs(model, x):
    return jax.random.normal(model.rngs(), x.shape)


def of_examples(model, x):
    draw = lambda key: jax.random.normal(key, x.shape[1:])  # noqa: E731
    return jax.vmap(draw)(mirror.example_keys(jax.random.key(0), x))


STATEFUL = [{"x": np.arange(36.0, dtype=np.float32).reshape(12, 3) % 5 / 5}] * 2


class Stateful(nnx.Module):
    """State that changes in each step, whatever the batch, as in BYOL."""

    def __init__(self, has_example_keys):
        self.w, self.key = nnx.Param(jnp.ones(3)), nnx.Variable(jax.random.key(0))
        self.raw_key = nnx.Variable(jax.random.PRNGKey(0))
        self.has_example_keys = has_example_keys
        self.average, self.steps = nnx.Variable(jnp.zeros(3)), nnx.Variable(jnp.int32(0))
        self.both, self.rngs = nnx.Variable(jnp.zeros(3)), nnx.Rngs(0)
        self.seen = mirror.Variable(0, synchronization="on_read", aggregation="sum")

    def __call__(self, x):
        self.raw_key[...] = jax.random.split(self.raw_key[...])[0]
        self.key[...], key = jax.random.split(self.key[...])
        noise = jnp.zeros(len(x))
        if self.has_example_keys:
            noise = jax.vmap(jax.random.normal)(mirror.example_keys(key, x))
        self.average[...] = (self.average[...] + jax.lax.stop_gradient(self.w[...])) / 2
        self.steps[...] += 1
        self.both[...] = self.both[...] / 2 + self.average[...]
        self.seen.assign_add(len(x))
        self.rngs.params()
        return x @ (self.w + self.both[...]) / self.steps[...] + noise


@rows("has_example_keys", [True, False])
def test_state_that_depends_on_no_example_changes_once_in_a_step(has_example_keys):
    """Also keys of which each example has its own; else the pieces would draw the same numbers."""
    states = []
    for n, pieces in ((1, 1), (1, 2), (2, 3)):
        options = {"strategy": cpu_strategy(n), "accumulate_steps": pieces}
        model = Stateful(has_example_keys)
        fit(mirror.Trainer(model, optax.sgd(0.1), lambda m, b: m(b["x"]) ** 2, **options), STATEFUL)
        assert model.steps[...] == len(STATEFUL)
        assert model.seen[...] == 12 * len(STATEFUL)
        assert model.rngs.params.count[...] == pieces * len(STATEFUL)
        states.append([model.w[...], model.average[...], model.both[...]])
        for key in (model.key[...], jax.random.wrap_key_data(model.raw_key[...])):
            first = jax.random.key(0)
            for _ in range((1 if has_example_keys else pieces) * len(STATEFUL)):
                first = jax.random.split(first)[0]
            assert key == first
    for found in states:
        for x, y in zip(found, states[0], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)


@rows("n, pieces", [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_noise_of_examples_does_not_depend_on_replicas_and_pieces(n, pieces):
    def verify(noise):
        def loss_fn(model, batch):
            return model(batch["x"], noise(model, batch["x"])) ** 2

        options = {"strategy": cpu_strategy(n), "accumulate_steps": pieces}
        return mirror.Trainer(Noisy(), optax.sgd(0.1), loss_fn, **options).verify(batches())

    assert verify(of_examples)
    if n * pieces == 1:
        assert verify(of_rngs)
        return
    fix = ["mirror.example_keys(key, batch)", "random numbers of nnx.Rngs"]
    with raises(mirror.VerifyError, names="model.w", fix=fix):
        verify(of_rngs)


# Epochs


def endless(start=0):
    while True:
        yield batches()[start % 4]
        start += 1


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)])
def at_once(request):
    """A trainer and its initial state."""
    trainer = line(cpu_strategy(2), lr=0.5, steps_per_execution=request.param)
    return trainer, state_of(trainer)


def test_steps_per_epoch_limits_an_epoch(at_once, subtests):
    """With endless data, and with data that ends during an epoch, for any steps per launch."""
    for limit in (1, 3, 5):
        with subtests.test(msg=f"{limit} steps"):
            check_limited_epochs(*at_once, limit)


def check_limited_epochs(trainer, state, limit):
    wanted = [batches()[i % 4] for i in range(2 * limit)]
    w, b, _ = by_hand(wanted, lr=0.5)
    losses = [_loss_of(wanted, i * limit, limit) for i in range(2)]
    for data in (endless(), batches()):
        reset(trainer, state)
        history = fit(trainer, data, 2, steps_per_epoch=limit)
        assert trainer.optimizer.step[...] == 2 * limit
        np.testing.assert_allclose(trainer.model.w[...], w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(trainer.model.b[...], b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
        examples = [sum(len(b["k"]) for b in wanted[i : i + limit]) for i in (0, limit)]
        numbers = [sum(b["k"].sum() for b in wanted[i : i + limit]) for i in (0, limit)]
        assert history["number"] == [a / b for a, b in zip(numbers, examples, strict=True)]


def _loss_of(data, first, count):
    w, b, _ = by_hand(data[:first], lr=0.5) if first else ((0.5, -0.25, 1.0), 0.125, None)
    return by_hand(data[first : first + count], lr=0.5, w=w, b=b)[2]


def test_initial_epoch_starts_the_count(two):
    class Shuffled:
        """Records the epochs it was set to."""

        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __iter__(self):
            return iter(batches())

    trainer, data = line(two, lr=0.1), Shuffled()
    history = fit(trainer, data, 4, initial_epoch=2)
    assert history.epochs == data.epochs == [2, 3]
    again = fit(trainer, data, 2)  # trains on
    assert again.epochs == [0, 1]
    assert history.epochs == [2, 3]
    assert again["loss"][0] < history["loss"][0]
    assert trainer.optimizer.step[...] == 16


def test_shuffled_dataset_has_the_same_epochs_on_any_number_of_replicas():
    def loss(n):
        data = mirror.data.from_arrays(DATA, B, shuffle=True, seed=3)
        trainer = line(cpu_strategy(n), lr=0.1)
        return fit(trainer, data, 2)["loss"], state_of(trainer)

    (one, state), (many, others) = loss(1), loss(8)
    np.testing.assert_allclose(one, many, rtol=1e-5)
    compare = np.testing.assert_allclose
    jax.tree.map(lambda a, b: compare(a, b, rtol=1e-5, atol=1e-6), state, others)


def test_fit_keeps_the_remainder_of_a_distributed_dataset(compiled, subtests):
    for remainder in ("error", "drop", "pad"):
        with subtests.test(msg=remainder):
            check_remainder(untrained(*compiled), remainder)


def check_remainder(on_two, remainder):
    data = on_two.strategy.distribute_dataset(batches(), remainder=remainder)
    if remainder == "error":
        with raises(ValueError, names="batch['k']", values=[3, 1, 2], fix="remainder='pad'"):
            fit(on_two, data)
        return
    count = N if remainder == "pad" else N - 1
    assert_by_hand(on_two, fit(on_two, data), batches(count))
    assert on_two.evaluate(data)["number"] == DATA["k"][:count].mean()
    _, (_, rest) = on_two.predict(data, each_row)
    assert len(rest["half"]) == count


def test_fit_evaluates_validation_data_after_each_epoch(on_two):
    class Evaluates(mirror.callbacks.Callback):
        """Uses the trainer during training."""

        found = []

        def on_step(self, fit):
            fit.trainer.predict(batches(3), each_row)

        def on_epoch_end(self, fit, logs):
            self.found.append(fit.trainer.evaluate(batches(9)))
            logs["own"] = 2.5

    trainer, state, observer = on_two, state_of(on_two), Evaluates()
    history = fit(trainer, batches(), 2, validation_data=batches(9), callbacks=observer)
    assert list(history) == [
        *("loss", "number", "odd", "y"),
        *(f"val_{m}" for m in observer.found[0]),
        "own",
    ]
    for i, found in enumerate(observer.found):
        assert {name: history[f"val_{name}"][i] for name in found} == found
    assert history["own"] == [2.5, 2.5]
    found = state_of(trainer)
    reset(trainer, state)
    fit(trainer, batches(), 2)
    assert_equal(found, state_of(trainer))


EMPTY = {name: value[:0] for name, value in DATA.items()}
VALIDATIONS: dict[str, tuple[Any, ...]] = {
    "another key": ([{"z": DATA["x"]}], KeyError, {"names": "x"}),
    "another shape": ([{**DATA, "x": DATA["y"][:, None]}], TypeError, {"values": ["(1,)", "(3,)"]}),
    "text": ([{**DATA, "x": DATA["x"].astype(str)}], TypeError, {"names": "batch['x']"}),
    "arrays": (mirror.data.from_arrays((DATA["x"], DATA["y"]), 4), TypeError, {"names": "tuple"}),
    "no batch": ([], ValueError, {"names": "validation_data"}),
}


def test_wrong_validation_data_are_an_error_at_the_first_step(compiled, subtests):
    """They raised their error after a whole epoch."""
    for name, (data, error, wanted) in VALIDATIONS.items():
        trainer = untrained(*compiled)
        stops = Once("on_step", 1, fail)
        with subtests.test(msg=name), raises(error, **wanted):
            fit(trainer, batches(), validation_data=data, callbacks=stops)
    history = fit(untrained(*compiled), batches(), validation_data=[EMPTY, *batches(9)])
    assert history["val_number"] == [4.0]


# Interrupted and resumed


class Once(mirror.callbacks.Callback):
    """Calls a function once, at one point of a training."""

    def __init__(self, hook, when, act):
        setattr(self, hook, self._act)
        self._when, self._act_once, self.calls = when, act, 0

    def _act(self, *arguments):
        self.calls += 1
        if self.calls == self._when:
            self._act_once(*arguments)


class Source:
    """Batches that call a function once, before one of them."""

    def __init__(self, when=0, act=None):
        self._when, self._act, self._calls = when, act, 0

    def __iter__(self):
        for batch in batches():
            self._calls += 1
            if self._calls == self._when:
                self._act()
            yield batch


def fail(*_):
    raise OSError("the disk is gone")


def interrupt(*_):
    raise KeyboardInterrupt


def press_ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)


INTERRUPTS = {  # the interrupted hook, which of its calls, and how
    "a step that fails": ("on_step", 3, fail),
    "a step": ("on_step", 3, interrupt),
    "Ctrl-C in the first step": ("on_step", 1, press_ctrl_c),
    "Ctrl-C in a step": ("on_step", 3, press_ctrl_c),
    "the first metrics": ("on_metrics", 1, fail),
    "metrics": ("on_metrics", 3, interrupt),
    "an epoch's beginning": ("on_epoch_begin", 2, interrupt),
    "an epoch's end": ("on_epoch_end", 1, interrupt),
    "Ctrl-C in an epoch's end": ("on_epoch_end", 1, press_ctrl_c),
    "the last epoch's end": ("on_epoch_end", 2, interrupt),
    "Ctrl-C in the last epoch's end": ("on_epoch_end", 2, press_ctrl_c),
    "the beginning": ("on_fit_begin", 1, fail),
    "the end": ("on_fit_end", 1, fail),
    "the data": ("data", 6, fail),
    "the first batch": ("data", 1, fail),
    "the validation": ("validation", 1, interrupt),
    "the last validation": ("validation", 6, fail),
}


@pytest.fixture(scope="module", params=[3, pytest.param(1, marks=pytest.mark.slow)])
def uninterrupted(request):
    """A trainer, its initial state, and the state after two epochs."""
    trainer = mirror.Trainer(
        Net(),
        optax.adam(0.01),
        squares,
        strategy=cpu_strategy(2),
        steps_per_execution=request.param,
        require_equal=False,
    )
    state = state_of(trainer)
    history = fit(trainer, Source(), 2, validation_data=Source())
    return trainer, state, state_of(trainer), dict(history)


@ignores_padding
def test_interrupted_training_resumes_exactly(uninterrupted, subtests):
    for name in INTERRUPTS:
        with subtests.test(msg=name):
            check_interrupted(name, *uninterrupted)


def check_interrupted(name, trainer, state, wanted, metrics):
    what, when, act = INTERRUPTS[name]
    reset(trainer, state)
    data, validation, callbacks = Source(), Source(), []
    if what == "data":
        data = Source(when, act)
    elif what == "validation":
        validation = Source(when, act)
    else:
        callbacks = [Once(what, when, act)]
    with pytest.raises(OSError if act is fail else KeyboardInterrupt):
        fit(trainer, data, 2, initial_epoch=0, validation_data=validation, callbacks=callbacks)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if what == "on_fit_end" or name == "Ctrl-C in the last epoch's end":  # it was all trained
        assert_equal(state_of(trainer), wanted)
        return
    history = fit(trainer, Source(), 2, validation_data=Source())
    assert_equal(state_of(trainer), wanted)
    assert dict(history) == metrics
    assert history.epochs == [0, 1]


@ignores_padding
def test_interrupted_training_saves_the_metrics_of_its_epoch(uninterrupted, tmp_path):
    trainer, state, wanted, metrics = uninterrupted
    reset(trainer, state)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(trainer, Source(), 2, initial_epoch=0, callbacks=[Once("on_step", 3, fail)])
    trainer.save(tmp_path)
    reset(trainer, state)
    trainer.restore(tmp_path)
    history = fit(trainer, Source(), 2, validation_data=Source())
    assert_equal(state_of(trainer), wanted)
    for name in ("loss", "number", "odd", "y"):
        assert history[name] == metrics[name]


@ignores_padding
def test_initial_epoch_abandons_an_interrupted_training(uninterrupted):
    trainer, state, wanted, metrics = uninterrupted
    for kwargs in ({"steps_per_epoch": 0}, {"callbacks": [3]}, {"epochs": 0}):
        reset(trainer, state)
        with pytest.raises(OSError, match="gone"):
            fit(trainer, Source(5, fail), 2, initial_epoch=0)
        with pytest.raises((TypeError, ValueError)):
            fit(trainer, **{"data": Source(), "initial_epoch": 0, **kwargs})
        assert (
            len(fit(trainer, Source(), 2)["loss"]) == 2
        )  # the rejected call has not started anything
        assert_equal(state_of(trainer), wanted)
    reset(trainer, state)
    with pytest.raises(OSError, match="gone"):
        fit(trainer, Source(5, fail), 2, initial_epoch=0)
    reset(trainer, state)
    history = fit(trainer, Source(), 2, initial_epoch=0, validation_data=Source())
    assert_equal(state_of(trainer), wanted)
    assert dict(history) == metrics


def test_callback_stops_the_training(on_two):
    done = 0
    for hook, when, epochs, steps in [
        ("on_step", 3, [], 3),
        ("on_epoch_end", 1, [0], 4),
        ("on_epoch_begin", 2, [0], 5),
        ("on_fit_begin", 1, [], 0),
    ]:
        history = fit(on_two, batches(), 3, callbacks=Once(hook, when, stop))
        assert history.epochs == epochs
        done += steps
        assert on_two.optimizer.step[...] == done


def stop(fit, *_):
    fit.stop("enough")
    fit.stop("more")
    assert fit.stopped == "enough"


# Several at once


def test_fit_rejects_nested_calls_and_continues(on_two):
    class Inside(mirror.callbacks.Callback):
        def on_step(self, outer):
            with raises(RuntimeError, names="trainer.fit", fix="trainer.evaluate"):
                fit(outer.trainer, batches())
            with raises(RuntimeError, names=["trainer.restore", "fit"], fix="trainer.evaluate"):
                outer.trainer.restore("nowhere")
            fit(other, batches())

    other = line(on_two.strategy)
    assert_by_hand(on_two, fit(on_two, batches(), callbacks=Inside()), batches())
    assert other.optimizer.step[...] == len(batches()) ** 2


def test_fit_works_in_another_thread():
    """Two threads may train at the same time, with one strategy or two."""
    strategies = [cpu_strategy(2), cpu_strategy(3)]
    trainers = [line(strategy) for strategy in (*strategies, strategies[0])]
    with ThreadPoolExecutor(3) as pool:
        histories = list(pool.map(lambda trainer: fit(trainer, batches()), trainers))
    for trainer, history in zip(trainers, histories, strict=True):
        assert_by_hand(trainer, history, batches())


def test_fit_leaves_foreign_ctrl_c_handlers_alone(on_two):
    trainer, found = on_two, []
    looks = Once("on_step", 1, lambda _: found.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=fit, args=(trainer, batches()), kwargs={"callbacks": looks})
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fit(trainer, batches(), callbacks=[Once("on_step", 1, press_ctrl_c)])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_second_ctrl_c_does_not_wait_for_the_step(on_two):
    def twice(*_):
        press_ctrl_c()
        press_ctrl_c()
        raise AssertionError("was not interrupted")

    with pytest.raises(KeyboardInterrupt):
        fit(on_two, batches(), callbacks=[Once("on_step", 1, twice)])


def test_fit_stops_reading_after_an_error(on_two):
    before = set(threading.enumerate())
    for kwargs in ({"callbacks": [Once("on_step", 1, fail)]}, {"validation_data": Source(1, fail)}):
        with pytest.raises(OSError, match="gone"):
            fit(on_two, batches(), initial_epoch=0, **kwargs)
    assert [t for t in set(threading.enumerate()) - before if t.is_alive()] == []


# Bad input


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "model not a module": ({"model": squares}, TypeError, {"names": ["model", "squares"], "fix": ["nnx.Module", "nnx.bridge.ToNNX"]}),
    "a Linen module": ({"model": LinenLine()}, TypeError, {"names": ["model", "LinenLine"], "fix": ["nnx.Module", "nnx.bridge.ToNNX", "lazy_init(x)"]}),
    "tx not an optimizer": ({"tx": 0.1}, TypeError, {"names": "tx", "values": [0.1, "float"], "fix": "optax.adam(0.1)"}),
    "a schedule": ({"tx": optax.constant_schedule(1)}, TypeError, {"names": "tx", "values": "function", "fix": "optax.adam(schedule)"}),
    "strategy not a strategy": ({"strategy": "gpu"}, TypeError, {"names": "strategy", "values": ["'gpu'", "str"], "fix": "mirror.MirroredStrategy()"}),
    "two wrt": ({"tx": "its own", "wrt": nnx.Param}, ValueError, {"names": "wrt", "values": repr(nnx.Param), "fix": "nnx.Optimizer"}),
    "zero microbatches": ({"accumulate_steps": 0}, ValueError, {"names": "accumulate_steps", "values": 0}),
    "fractional steps": ({"steps_per_execution": 0.5}, TypeError, {"names": "steps_per_execution", "values": "0.5 (float)"}),
    "bool steps": ({"steps_per_execution": True}, TypeError, {"names": "steps_per_execution", "values": "True (bool)"}),
}  # fmt: skip


def test_trainer_rejects_bad_arguments(subtests):
    for name in ARGUMENTS:
        with subtests.test(msg=name):
            kwargs, error, wanted = ARGUMENTS[name]
            arguments = {"model": Line(), "tx": optax.sgd(1.0), "loss_fn": squares, **kwargs}
            if arguments["tx"] == "its own":
                arguments["tx"] = nnx.Optimizer(arguments["model"], optax.sgd(1.0), wrt=nnx.Param)
            with raises(error, **wanted):
                mirror.Trainer(**arguments)


class Guard(mirror.callbacks.Callback):
    pass


guard = Guard()
FITS: dict[str, tuple[Any, ...]] = {
    "no epochs": ({"epochs": 0}, ValueError, {"names": "epochs", "values": 0}),
    "fractional epochs": ({"epochs": 1.5}, TypeError, {"names": "epochs", "values": "1.5 (float)"}),
    "initial epoch at the end": ({"epochs": 2, "initial_epoch": 2}, ValueError, {"names": ["initial_epoch", "epochs"], "values": 2}),
    "negative initial epoch": ({"initial_epoch": -1}, ValueError, {"names": "initial_epoch", "values": -1}),
    "no steps": ({"steps_per_epoch": 0}, ValueError, {"names": "steps_per_epoch", "values": 0}),
    "fractional steps": ({"steps_per_epoch": 0.5}, TypeError, {"names": "steps_per_epoch", "values": "0.5 (float)"}),
    "bool steps": ({"steps_per_epoch": True}, TypeError, {"names": "steps_per_epoch", "values": "True (bool)"}),
    "a class": ({"callbacks": [Guard]}, TypeError, {"names": "Guard", "fix": "Guard(...)"}),
    "only a class": ({"callbacks": Guard}, TypeError, {"names": "Guard", "fix": "Guard(...)"}),
    "a function": ({"callbacks": [fail]}, TypeError, {"names": "fail", "fix": "mirror.callbacks.Callback"}),
    "none": ({"callbacks": None}, TypeError, {"values": [None, "NoneType"], "fix": "mirror.callbacks.Callback"}),
    "twice": ({"callbacks": [guard, guard]}, ValueError, {"names": "callbacks"}),
    "no data": ({"data": []}, ValueError, {"names": "data", "fix": "batch"}),
    "no examples": ({"data": [{"x": np.zeros((0, 3))}]}, ValueError, {"names": "data", "fix": "batch"}),
    "exhausted iterator": ({"data": map(dict, batches()), "epochs": 2}, ValueError, {"fix": "iterator"}),
    "whole arrays": ({"data": DATA}, ValueError, {"values": "dict", "fix": "trainer.fit(data, batch_size=32)"}),
    "a file": ({"data": "train.csv"}, TypeError, {"names": "data", "values": ["'train.csv'", "str"], "fix": "trainer.fit((x, y), batch_size=32)"}),
    "ragged": ({"data": [{"x": DATA["x"], "y": DATA["y"][:3]}]}, ValueError, {"names": ["batch['x']", "batch['y']"], "values": ["float32[13,3]", "float32[3]"]}),
    "another structure": ({"data": [*batches(4), {"x": DATA["x"][:4]}]}, ValueError, {"names": ["batch['k']", "batch['y']"], "values": [1, 0]}),
    "no validation": ({"validation_data": []}, ValueError, {"names": "validation_data", "fix": "batch"}),
}  # fmt: skip


def test_fit_rejects_bad_arguments(compiled, subtests):
    for name, (kwargs, error, wanted) in FITS.items():
        trainer = untrained(*compiled)
        with subtests.test(msg=name), raises(error, **wanted):
            fit(trainer, **{"data": batches(), **kwargs})


def test_fit_rejects_exhausted_data(on_two):
    data = iter(batches())
    fit(on_two, data)
    for use in (fit, mirror.Trainer.evaluate, mirror.Trainer.verify):
        with raises(ValueError, names="data", fix="generator"):
            use(on_two, data)


def test_fit_cannot_resume_with_shorter_data(on_two):
    with pytest.raises(OSError, match="gone"):
        fit(on_two, Source(4, fail))
    with raises(ValueError, names="dataset", values=[3 * B, 3]):
        fit(on_two, batches(3))


def test_trainer_rejects_calls_in_other_scopes_and_replicas(on_two, eight):
    with eight.scope(), raises(RuntimeError, values=[on_two.strategy, eight], fix="scope"):
        fit(on_two, batches())
    foreign = eight.distribute_dataset(batches(), remainder="pad")
    with raises(ValueError, names="batch['k']", values=[8, 2], fix="distribute_dataset"):
        fit(on_two, foreign)

    def step():
        on_two.evaluate(batches())

    with raises(RuntimeError, values=[on_two.strategy], fix="replica"):
        on_two.strategy.run(step)


PREDICTIONS: dict[str, tuple[Any, ...]] = {
    "a scalar": (lambda model, batch: {"sum": model(batch["x"]).sum()}, ValueError, {"names": ["<lambda>", "result['sum']"], "values": [(), 2, "(2, ...)"]}),
    "a number": (lambda model, batch: 1.0, ValueError, {"names": ["<lambda>", "result"], "values": [(), 2, "(2, ...)"]}),
    "one row": (lambda model, batch: model(batch["x"])[:1], ValueError, {"names": ["<lambda>", "result"], "values": [(1,), 2, "(2, ...)"]}),
    "nothing": (lambda model, batch: None, ValueError, {"names": "<lambda>", "values": [None, "NoneType"]}),
    "no arrays": (lambda model, batch: {}, ValueError, {"names": "<lambda>", "values": ["{}", "dict"]}),
    "text": (lambda model, batch: "cat", TypeError, {"names": "result", "values": ["'cat'", "str"]}),
    "fn not callable": ("cat", TypeError, {"names": "fn", "values": ["'cat'", "str"], "fix": "(model, batch)"}),
}  # fmt: skip


def test_predict_rejects_outputs_that_are_not_per_example(subtests, on_two):
    for name in PREDICTIONS:
        with subtests.test(msg=name):
            fn, error, wanted = PREDICTIONS[name]
            with raises(error, **wanted):
                on_two.predict(batches(), fn)


def test_predict_rejects_rows_that_differ_between_batches(subtests, on_two):
    """NumPy would not join them, or as float64."""
    one = np.ones((4, 2), np.float32)
    for other, shown in ((one[:, :1], "float32[1]"), (one.astype(int), "int32[2]")):
        with subtests.test(msg=shown):
            values = ["float32[2]", shown]
            with raises(ValueError, names="result['x']", values=values, fix="Pad the inputs"):
                on_two.predict([{"x": one}, {"x": other}], lambda _, batch: batch)


PARTS = (slice(0, 4), slice(4, 5))


def test_predict_accepts_axes_of_length_zero(on_two):
    none = np.zeros((5, 0), np.float32)
    whole = {"x": DATA["x"][:5], "none": none}
    for data in ([whole], [{name: x[part] for name, x in whole.items()} for part in PARTS]):
        found = on_two.predict(data, lambda _, batch: {**batch, "made": batch["none"] + 1})
        np.testing.assert_array_equal(found["x"], whole["x"])
        assert found["none"].shape == found["made"].shape == (5, 0)


def test_predict_takes_functions_without_a_hash(on_two):
    @dataclasses.dataclass
    class Scaled:
        factors: list[float]

        def __call__(self, model, batch):
            return batch["x"] * self.factors[0]

    fn = Scaled([2.0])
    for data in (batches(), batches(5)):
        found = on_two.predict(data, fn)
        np.testing.assert_array_equal(found, 2 * DATA["x"][: len(found)])


def test_predict_rejects_empty_data(on_two):
    with raises(ValueError, names="data", fix="batch"):
        on_two.predict([], each_row)


def test_non_finite_loss_is_warned_of_once(two):
    def loss_fn(model, batch):
        return jnp.where(batch["k"] > 8, jnp.nan, 0) * model.b

    trainer = line(two, loss_fn=loss_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = trainer.fit(batches(), 2, progress=False)
    (warning,) = caught
    fix = "mirror.callbacks.NaNGuard()"
    assert_message(str(warning.message), names="loss", values=["nan", 3], fix=fix)
    assert warning.filename == __file__
    assert np.isnan(history["loss"]).all()


def test_lowered_text_is_unavailable_before_the_first_step(on_two):
    with raises(RuntimeError, fix=["step", "program"]):
        inside.lowered_text(on_two)
    texts = []
    at_once = Once("on_step", 1, lambda _: texts.append(inside.lowered_text(on_two)))
    fit(on_two, batches(), callbacks=at_once)
    assert "func.func" in texts[0]


@pytest.mark.slow
def test_fit_leaves_the_model_as_it_was_when_a_host_callback_of_the_loss_fails(subtests):
    for executor, strategy in EXECUTORS.items():
        with subtests.test(msg=executor):
            check_failed_host_callback(strategy())


def check_failed_host_callback(pair):
    fails, kept = [], []

    def look(losses):
        if fails:
            raise KeyError("bad example")
        return np.ones_like(losses)

    def loss_fn(model, batch):
        losses = optax.squared_error(model(batch["x"]), batch["y"])[:, 0]
        shape = jax.ShapeDtypeStruct(losses.shape, losses.dtype)
        losses_now = jax.lax.stop_gradient(losses)
        return losses * jax.pure_callback(look, shape, losses_now, vmap_method="sequential")

    class Fails(mirror.callbacks.Callback):
        def on_step(self, fit):
            kept[:] = map(np.asarray, jax.tree.leaves(nnx.state((model, fit.trainer.optimizer))))
            fails.extend([1] * (fit.position.step == 3))

    with pair.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    trainer = mirror.Trainer(model, optax.adam(0.1), loss_fn, strategy=pair)
    arrays = {"x": np.ones((40, 2), "float32"), "y": np.ones((40, 1), "float32")}
    with pytest.raises(KeyError, match="bad example"):
        trainer.fit(arrays, epochs=2, batch_size=8, callbacks=[Fails()], progress=False)
    state = jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer)))
    for now, then in zip(state, kept, strict=True):
        np.testing.assert_array_equal(np.asarray(now), then)
    fails.clear()
    trainer.fit(arrays, epochs=2, batch_size=8, progress=False)
    assert trainer._position.step == 10


# Optimizers that receive the loss


def with_optax(tx, data, *, needs_loss):
    """Trains one device with a transformation of optax; returns the parameters and the state."""

    @jax.jit
    def update(params, state, batch):
        loss_fn = lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(params)
        value = {"value": loss} if needs_loss else {}
        updates, state = tx.update(grads, state, params, **value)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.asarray([0.5, -0.25, 1.0]), "b": jnp.float32(0.125)}
    state = tx.init(params)
    for batch in data:
        params, state = update(params, state, batch)
    return params, state


@rows("n, options", [(2, {}), (4, {"steps_per_execution": 2})])
def test_optimizers_that_need_the_loss_receive_it(n, options):
    tx = optax.chain(optax.sgd(0.01), optax.contrib.reduce_on_plateau(0.5, 1, atol=0.5, rtol=0))
    data = batches(2 * B) * 3
    params, state = with_optax(tx, data, needs_loss=True)
    with cpu_strategy(n).scope():
        trainer = mirror.Trainer(Line(), tx, squares, **options)
    fit(trainer, data)
    assert float(state[1].scale) < 1
    np.testing.assert_allclose(trainer.optimizer.opt_state[1].scale[...], state[1].scale)
    np.testing.assert_allclose(trainer.model.w[...], params["w"], rtol=1e-5)


def every(params):
    return jax.tree.map(lambda _: True, params)


UNUSUAL = {  # and whether optax requires the loss
    "momo": (optax.contrib.momo(0.1), True),
    "polyak": (optax.masked(optax.polyak_sgd(), every), True),
    "sam": (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)), False),
    "multi_steps": (optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), False),
    "schedule_free": (optax.contrib.schedule_free_sgd(0.1), False),
}


@pytest.mark.parametrize("names", mostly_slow(UNUSUAL, "momo"))
def test_unusual_optimizers_are_those_of_optax(names, subtests):
    for name in names:
        with subtests.test(msg=name):
            tx, needs_loss = UNUSUAL[name]
            params, _ = with_optax(tx, batches(), needs_loss=needs_loss)
            with cpu_strategy(3).scope():
                trainer = mirror.Trainer(Line(), tx, squares)
            fit(trainer, batches())
            np.testing.assert_allclose(trainer.model.w[...], params["w"], rtol=1e-5)


def test_optimizers_that_reject_the_loss_do_not_receive_it():
    plain = optax.sgd(1.0)

    class Own(nnx.Optimizer):
        def update(self, model, grads):  # type: ignore[override]
            super().update(model, grads)

    strict = optax.GradientTransformationExtraArgs(
        plain.init, lambda updates, state, params=None: plain.update(updates, state, params)
    )
    weights = []
    for make in (lambda m: plain, lambda m: strict, lambda m: Own(m, plain, wrt=nnx.Param)):
        with cpu_strategy(2).scope():
            model = Line()
            trainer = mirror.Trainer(model, make(model), squares)
        fit(trainer, batches())
        weights.append(np.asarray(trainer.model.w[...]))
    np.testing.assert_array_equal(weights[1:], weights[:1] * 2)


OTHERS = {  # by what they lack
    "value_fn": lambda: optax.lbfgs(),
    "'grad'": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    "grad_fn": lambda: optax.contrib.sam(optax.sgd(1.0), optax.sgd(0.1), opaque_mode=True),
    "fast": lambda: optax.lookahead(optax.sgd(1.0), 2, 0.5),
}


def test_optimizers_that_need_more_than_the_loss_are_an_error(subtests):
    for lack, make in OTHERS.items():
        with subtests.test(msg=lack):
            with cpu_strategy(2).scope():
                trainer = mirror.Trainer(Line(), make(), squares)
            with pytest.raises(Exception, match=lack) as caught:
                fit(trainer, batches())
            assert "strategy.run(step, args)" in "".join(caught.value.__notes__)


def test_trained_model_is_used_on_one_device():
    """The lines of docs/troubleshooting.md."""
    with cpu_strategy(2).scope():
        trainer = mirror.Trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), "mse")
    fit(trainer, (DATA["x"], DATA["y"]), batch_size=B)
    x = jax.device_put(DATA["x"], jax.devices()[5])
    with pytest.raises(ValueError, match="Received incompatible devices for jitted computation"):
        trainer.model(x)
    wanted = trainer.model(jax.device_get(x))
    alone = nnx.merge(nnx.graphdef(trainer.model), jax.device_get(nnx.state(trainer.model)))
    assert alone(x).devices() == x.devices()
    np.testing.assert_allclose(alone(x), wanted, rtol=1e-6)
