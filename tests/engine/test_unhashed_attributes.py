"""Static attributes without a hash, such as a list or a dict of options, and such steps."""

import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.messages import raises


@dataclasses.dataclass
class Config:
    scale: float
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


class Scaled(nnx.Module):
    def __init__(self, config: Any):
        self.config = config
        self.weight = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.weight[...] * scale_of(self.config) * x


def scale_of(config):
    if isinstance(config, list):
        return config[0]
    return config["scale"] if isinstance(config, dict) else config.scale


def set_scale(config, scale):
    if isinstance(config, list | dict):
        config[0 if isinstance(config, list) else "scale"] = scale
    else:
        config.scale = scale


def step(model, x):
    return mirror.all_reduce("sum", model(x).sum())


def pair(*shape):
    return mirror.PerReplica([jnp.ones(shape), jnp.ones(shape)])


CONFIGS = {
    "a list": lambda: [2.0, 3],
    "a dict": lambda: {"scale": 2.0, "activation": jnp.tanh},
    "a dataclass": lambda: Config(2.0),
    "nested": lambda: Config(2.0, [{3}, ([4], None), types.SimpleNamespace(x=jnp.tanh)]),
    "a namespace": lambda: types.SimpleNamespace(scale=2.0, of=scale_of),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_configuration_is_static_and_may_change_in_place(two, config, caplog):
    """As with `nnx.jit`, which does not notice a change in place."""
    model, other = Scaled(config()), Scaled(config())
    assert two.run(step, (model, pair(3))) == 12
    with compilations(caplog) as events:
        assert two.run(step, (other, pair(3))) == 12
        assert two.run(step, (model, pair(3))) == 12
    assert_nothing_compiled(events)
    set_scale(model.config, 5.0)
    assert two.run(step, (model, pair(3))) == 30
    assert two.run(step, (other, pair(4))) == 16  # of a trace that both have shared
    assert two.run(step, (model, pair(4))) == 40
    set_scale(model.config, 2.0)
    assert two.run(step, (model, pair(3))) == 12


def test_change_of_a_nested_list_is_noticed(two):
    def reads(model):
        return jnp.asarray(model.config.sizes[1]["a"][0])

    model = Scaled(Config(1.0, [0, {"a": [1]}]))
    assert two.run(reads, (model,)) == 1
    model.config.sizes[1]["a"][0] = 2
    assert two.run(reads, (model,)) == 2


def test_trainer_trains_a_model_with_a_list(two):
    def loss_fn(model, batch):
        return (model(batch["x"]) - 1) ** 2

    trainer = mirror.Trainer(Scaled([2.0]), optax.sgd(0.1), loss_fn, strategy=two)
    data = {"x": np.ones(5, np.float32)}
    trainer.fit(data, batch_size=5, progress=False)
    assert float(trainer.model.weight[...]) == pytest.approx(1 - 0.1 * 4)
    assert trainer.evaluate(data, batch_size=5)["loss"] == pytest.approx(0.04, abs=1e-6)
    assert trainer.model.config == [2.0]


def test_step_must_not_change_them(two):
    def appends(model):
        model.config.append(1.0)

    def sets(model):
        model.config = [4.0]

    def unsets(model):
        model.config = None

    model = Scaled([2.0])
    for changes in (appends, sets, unsets):
        with raises(ValueError, names=[changes.__name__, "config"], fix="nnx.Variable"):
            two.run(changes, (model,))
        assert model.config == [2.0]
        assert two.run(step, (model, pair(1))) == 4


@dataclasses.dataclass
class Times:
    factor: float

    def __call__(self, x):
        return mirror.all_reduce("sum", self.factor * x.sum())


def test_step_may_be_an_object_without_a_hash(two, caplog):
    first, second = Times(1.0), Times(2.0)
    assert [two.run(each, (pair(1),)) for each in (first, second)] == [2, 4]
    with compilations(caplog) as events:
        assert [two.run(each, (pair(1),)) for each in (second, first)] == [4, 2]
    assert_nothing_compiled(events)
    assert two.verify(first, (pair(1),)).largest == 0
    assert "collective" in str(two.inspect(first, (pair(1),)))


def test_values_that_cannot_be_compared_are_named(two):
    for value in ([Incomparable()], {"array": bytearray(2)}):
        with raises(TypeError, names="config", fix="frozen=True"):
            two.run(step, (Scaled(value), pair(1)))


class Incomparable:
    __hash__ = None

    def __eq__(self, other):
        return False
