"""The table of primitives knows every primitive of JAX, and of the programs of the other laws."""

import importlib
import warnings
from collections import Counter

import jax
import jax.extend.core.primitives as jax_primitives
import pytest
from jax.extend.core import Primitive

import mirror
from mirror._src.jaxprs import primitives
from mirror._src.jaxprs.equations import equations
from tests.fuzz.generate import PROFILES, generate
from tests.fuzz.laws import inputs_of, inspected
from tests.support.conformance import STEPS
from tests.support.strategies import cpu_strategy

# What a program imports besides the dependencies of `mirror`.
REAL = {"equinox_cnn": "equinox", "equinox_stateful": "equinox", "haiku_transformer": "haiku"}
REAL |= {"vqvae": "haiku"}
REAL |= dict.fromkeys(("flax_imagenet", "flax_imagenet_dynamic_scale", "nnx_mnist", "nanogpt"))
REAL |= dict.fromkeys(("ppo", "lora", "ema", "lbfgs"))
QUICK = ("lora", "lbfgs", "ema", "ppo")


@pytest.fixture
def seen(monkeypatch):
    """The primitives of what the package traces."""
    names, traced = set(), jax.make_jaxpr

    def make_jaxpr(*args, **settings):
        trace = traced(*args, **settings)

        def recorded(*leaves):
            program = trace(*leaves)
            names.update(eqn.primitive.name for eqn in equations(program.jaxpr))
            return program

        return recorded

    monkeypatch.setattr(jax, "make_jaxpr", make_jaxpr)
    return names


def assert_known(names):
    assert names, "nothing was traced"
    unknown = sorted(names - primitives.PRIMITIVES.keys())
    assert not unknown, (
        f"{', '.join(unknown)}: add a name to the row of its kind in {primitives.__file__}. A pass "
        "treats a primitive that is not there like a function of which it knows nothing."
    )


def test_each_primitive_is_in_one_row():
    names = Counter(name for row, _ in primitives._ROWS for name in row.split())
    assert [name for name, count in names.items() if count > 1] == []


def test_every_public_primitive_of_jax_is_known():
    found = vars(jax_primitives).values()
    assert_known({value.name for value in found if isinstance(value, Primitive)})


def test_primitives_of_random_programs_are_known(seen):
    strategy = cpu_strategy(4)
    for profile in PROFILES:
        for seed in range(12):
            program = generate(profile, seed)
            inspected(strategy, program, inputs_of(program, 0))
    assert_known(seen)
    assert len(seen) > 50


def test_primitives_of_conformance_steps_are_known(seen):
    strategy = cpu_strategy(4)
    for step, arguments in STEPS.values():
        inspect(strategy, step, arguments())
    assert_known(seen)
    assert len(seen) > 50


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in REAL]
)
def test_primitives_of_real_programs_are_known(seen, name):
    if REAL[name]:
        pytest.importorskip(REAL[name])
    program = importlib.import_module(f"tests.real_programs.{name}").PROGRAM
    strategy = mirror.MirroredStrategy(jax.devices("cpu")[:4], axis_name=program.axis_name)
    with pytest.raises(Stopped):
        program.train(FirstStep(strategy), program.step)
    assert_known(seen)


class Stopped(Exception):
    """The first step was inspected."""


class FirstStep:
    """A strategy that inspects a step, and does not run it."""

    def __init__(self, strategy):
        self.distribute_dataset = strategy.distribute_dataset
        self.strategy = strategy

    def run(self, step, arguments, **_):
        inspect(self.strategy, step, arguments)
        raise Stopped


def inspect(strategy, step, arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        strategy.inspect(step, arguments)


def test_unknown_primitive_is_named_with_the_file_to_edit():
    with pytest.raises(AssertionError, match=r"nameless_p: add .*primitives\.py"):
        assert_known({"add", "nameless_p"})
