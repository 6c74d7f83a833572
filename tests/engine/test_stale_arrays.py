"""A captured array is a constant of the compiled step: one warning if its name is rebound."""

import dataclasses
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.messages import assert_message, raises
from tests.support.tables import rows

DATA = np.ones((4, 3), np.float32)
W = jnp.zeros(3)


def replica_mean(value):
    return mirror.all_reduce("mean", value)


def of_closure(strategy, batch, times):
    w = jnp.zeros(3)

    def step(batch):
        return w + replica_mean(batch.mean(0))

    for _ in range(times):
        w = strategy.run(step, (batch,))
    return w


def of_global(strategy, batch, times):
    global W
    W = jnp.zeros(3)

    def step(batch):
        return W + replica_mean(batch.mean(0))

    for _ in range(times):
        W = strategy.run(step, (batch,))
    return W


def of_object(strategy, batch, times):
    class Loop:
        def __init__(self):
            self.w = jnp.zeros(3)

        def step(self, batch):
            return self.w + replica_mean(batch.mean(0))

    loop = Loop()
    for _ in range(times):
        loop.w = strategy.run(loop.step, (batch,))
    return loop.w


def of_dict(strategy, batch, times):
    params = {"w": jnp.zeros(3)}

    def step(batch):
        return {"w": params["w"] + replica_mean(batch.mean(0))}

    for _ in range(times):
        params = strategy.run(step, (batch,))
    return params["w"]


def of_numpy(strategy, batch, times):
    w = np.zeros(3, np.float32)

    def step(batch):
        return w + replica_mean(batch.mean(0))

    for _ in range(times):
        w = np.asarray(strategy.run(step, (batch,)))
    return w


def in_place(dtype):
    """Returns a loop that changes an array of NumPy in place."""

    def loop(strategy, batch, times):
        w = np.zeros(3, dtype)

        def step(batch):
            return w + replica_mean(batch.mean(0))

        for _ in range(times):
            w[:] = strategy.run(step, (batch,))
        return w

    return loop


def in_inner_program(strategy, batch, times):
    w = np.zeros(3)

    def step(batch):
        return replica_mean(jax.jit(lambda row: w + row)(batch.mean(0)))

    for _ in range(times):
        w = np.asarray(strategy.run(step, (batch,)), np.float64)
    return w


def of_integers(strategy, batch, times):
    count = jnp.zeros(3, jnp.int32)

    def step(batch):
        return count + replica_mean(batch.mean(0)).astype(jnp.int32)

    for _ in range(times):
        count = strategy.run(step, (batch,))
    return count


def by_a_number(strategy, batch, times):
    rate = jnp.float32(1.0)

    def step(batch):
        return rate * replica_mean(batch.mean(0))

    for _ in range(times):
        strategy.run(step, (batch,))
        rate = 0.5


def after_some_calls(strategy, batch, times):
    rate = jnp.float32(1.0)

    def step(batch, w):
        return w + rate * replica_mean(batch.mean(0))

    w = jnp.zeros(3)
    for k in range(times):
        rate = jnp.float32(1.0 if k < 3 else 0.5)
        w = strategy.run(step, (batch, w))
    return w


def losses(model, batch):
    return model(batch[0])[:, 0]


def of_trainer(options, make=jnp.float32, change=None):
    """Returns a loop that trains with options that read a scale, and replaces or changes it."""

    def loop(strategy, batch, times):
        scale = make(1.0)

        def step(*args):
            return scale * args[-1]

        def of_model(*args):
            return scale * losses(*args)

        class Net(nnx.Linear):
            def __call__(self, *args, **kwargs):
                return scale * super().__call__(*args, **kwargs)

        kinds = {"loss_fn": losses, "tx": optax.sgd(0.1), "model": nnx.Linear}
        kinds |= options(step, of_model, Net)
        model = kinds.pop("model")(3, 1, rngs=nnx.Rngs(0))
        trainer = mirror.Trainer(model, strategy=strategy, **kinds)
        for _ in range(times):
            trainer.fit([(DATA, DATA[:, :1])], progress=False)
            if change is None:
                scale = make(float(jnp.asarray(scale)) / 2)
            else:
                change(scale)

    return loop


TRAINERS = {
    "loss": lambda step, of_model, net: {"loss_fn": of_model},
    "penalty": lambda step, of_model, net: {"penalty": lambda model: step(1.0)},
    "weight": lambda step, of_model, net: {"sample_weight": lambda batch: step(batch[1][:, 0])},
    "metric": lambda step, of_model, net: {
        "loss_fn": "mse",
        "metrics": {"m": lambda outputs, labels: step(outputs)[:, 0]},
    },
    "schedule": lambda step, of_model, net: {"tx": optax.adam(step)},
    "method": lambda step, of_model, net: {"model": net},
}
CASES = {
    **{name: (of_trainer(row), "'scale'", "mirror.Variable") for name, row in TRAINERS.items()},
    "closure": (of_closure, "'w'", "def step(w, batch), and strategy.run(step, (w, batch))"),
    "global": (of_global, "'W'", "def step(W, batch), and strategy.run(step, (W, batch))"),
    "attribute": (of_object, "'self.w'", "def step(w, batch), and strategy.run(step, (w, batch))"),
    "item": (of_dict, "'params['w']'", "def step(params, batch)"),
    "numpy": (of_numpy, "'w'", "def step(w, batch)"),
    **{
        f"{dtype}, in place": (in_place(dtype), "'w'", "def step(w, batch)")
        for dtype in ("float32", "float64", "int32", "int64", "bool")
    },
    "inner program": (in_inner_program, "'w'", "def step(w, batch)"),
    "integers": (of_integers, "'count'", "def step(count, batch)"),
    "number": (by_a_number, "'rate'", "def step(rate, batch)"),
    "later": (after_some_calls, "'rate'", "def step(rate, batch, w)"),
}


@rows("loop, path, fix", CASES)
def test_rebound_array_is_one_warning(two, loop, path, fix):
    (batch,) = two.distribute_dataset([DATA])
    with pytest.warns(UserWarning, match="constant of the compiled step") as caught:
        loop(two, batch, 9)
    (warning,) = caught
    assert warning.filename == __file__
    assert_message(str(warning.message).replace('"', "'"), names=["step", path], fix=fix)


@rows("name", list(TRAINERS))
def test_replaced_variable_is_read_or_a_warning(two, name):
    """A trainer's functions are traced again; where nothing tells what they read, it warns."""
    (batch,) = two.distribute_dataset([DATA])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_trainer(TRAINERS[name], mirror.Variable)(two, batch, 5)
    assert len(caught) == (name in ("schedule", "method"))
    for each in caught:
        assert each.filename == __file__
        assert_message(str(each.message), names="'scale'", fix="scale.assign(value)")


@rows("name", list(TRAINERS))
def test_assigned_variable_warns_of_nothing(two, name):
    (batch,) = two.distribute_dataset([DATA])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        change = lambda scale: scale.assign(scale[...] / 2)  # noqa: E731
        of_trainer(TRAINERS[name], mirror.Variable, change)(two, batch, 5)


def test_arrays_that_stay_as_they_are_warn_of_nothing(two):
    (batch,) = two.distribute_dataset([DATA])
    mean = two.run(lambda batch: replica_mean(batch.mean(0)), (batch,))
    history, scales = [], [jnp.ones(3), np.ones(3)]
    unused, shape = jnp.zeros(3), np.array([3])

    def step(batch):
        return replica_mean((batch - mean) * scales[0] * scales[1]).reshape(-1, *shape)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            history.append(two.run(step, (batch,)))
            mean = mean + 0  # the same values, such as of a cell of a notebook that runs again
            unused, scales[1] = unused + 1, np.ones(3, np.float32)
            shape += 1
    assert float(unused[0]) == 9
    np.testing.assert_array_equal(history[-1], history[0])


class Part:
    __slots__ = ("rate", "unset")

    def __init__(self):
        self.rate = 1.0


@dataclasses.dataclass(eq=False)
class Options:
    scale: float = 1.0
    rates: Any = dataclasses.field(default_factory=lambda: {"adam": [0.1, 0.2]})
    calls: int = 0
    part: Part = dataclasses.field(default_factory=Part)
    namespace: Any = dataclasses.field(default_factory=lambda: types.SimpleNamespace(depth=1))
    mask: Any = None
    seed: Any = 1
    weight: Any = dataclasses.field(default_factory=lambda: jnp.ones(3))
    table: Any = dataclasses.field(default_factory=lambda: np.ones(3))
    parent: Any = None


def make_scaled():
    def scaled(batch, options):
        options.calls += 1  # as the step is traced
        options.last = batch
        batch = batch * options.scale * options.rates["adam"][1] * options.part.rate
        return batch * options.weight * options.table if batch.shape[-1] == 3 else batch

    return scaled


CHANGES = {
    "attribute": (lambda options: setattr(options, "scale", 0.0), "options.scale", "1.0", "0.0"),
    "item": (
        lambda options: options.rates["adam"].__setitem__(1, 3.0),
        "options.rates['adam'][1]",
        "0.2",
        "3.0",
    ),
    "slot": (lambda options: setattr(options.part, "rate", 2.0), "options.part.rate", "1.0", "2.0"),
    "object": (
        lambda options: setattr(options.namespace, "depth", 2),
        "options.namespace.depth",
        "1",
        "2",
    ),
    "number for None": (lambda options: setattr(options, "mask", 2), "options.mask", "None", "2"),
    "None for a number": (
        lambda options: setattr(options, "seed", None),
        "options.seed",
        "1",
        "None",
    ),
    "array for None": (
        lambda options: setattr(options, "mask", jnp.ones(3)),
        "options.mask",
        "None",
        "float32[3]",
    ),
    "array": (
        lambda options: setattr(options, "weight", jnp.zeros(3)),
        "options.weight",
        "float32[3]",
        "",
    ),
    "numpy": (
        lambda options: setattr(options, "table", np.zeros(3)),
        "options.table",
        "float32[3]",
        "",
    ),
    "numpy, in place": (
        lambda options: options.table.fill(2),
        "options.table",
        "float32[3]",
        "",
    ),
}


@rows("change, path, old, new", CHANGES)
def test_changed_attribute_of_an_argument_is_one_warning(two, change, path, old, new):
    (batch,) = two.distribute_dataset([DATA])
    options, scaled = Options(), make_scaled()
    options.parent = options
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            two.run(scaled, (batch, options))
        change(options)
    with pytest.warns(UserWarning, match="constant of the compiled step") as caught:
        two.run(scaled, (batch, options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.run(scaled, (batch, options))
    (warning,) = caught
    assert warning.filename == __file__
    assert_message(
        str(warning.message),
        names=["scaled", path],
        values=[old, new],
        fix=f"strategy.run(scaled, ({path.split('.')[1].partition('[')[0]}, batch, options))",
    )


def test_attributes_that_the_step_writes_or_does_not_read_warn_of_nothing(two):
    options, scaled = Options(), make_scaled()
    options.losses = options.history = np.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(9):
            for columns in (3, 4):  # the step is traced twice, and counts each trace
                (batch,) = two.distribute_dataset([np.ones((4, columns), np.float32)])
                options.losses = two.run(scaled, (batch, options))
            options.history += k
            options.weight, options.table = jnp.ones(3), np.ones(3)


def test_model_in_a_static_argument_is_rejected(two):
    (batch,) = two.distribute_dataset([DATA])
    options = Options(weight=nnx.Linear(3, 1, rngs=nnx.Rngs(0)))

    def of_weight(batch, options):
        return options.weight(batch)

    with raises(ValueError, names="'options.weight'", fix="(weight, batch, options)"):
        two.run(of_weight, (batch, options))


def test_attributes_of_a_new_object_are_used(two):
    (batch,) = two.distribute_dataset([DATA])
    scaled = make_scaled()
    for scale in (1.0, 3.0):
        options = Options()
        options.scale = scale
        np.testing.assert_allclose(two.run(scaled, (batch, options)).values[0], 0.2 * scale)
