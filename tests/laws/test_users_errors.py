"""What leaves `run`, `verify` and `fit` is the user's own exception, with notes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.strategies import cpu_strategy


class OwnError(ValueError):
    """An error that only its own arguments construct."""

    def __init__(self, code, *, where):
        super().__init__(code, where)
        self.code, self.where = code, where


class NamelessError(LookupError):
    """An error whose text cannot be shown."""

    def __str__(self):
        raise RuntimeError("no text")


class Hostile:
    """An object that fails whenever anything but its type is looked at."""

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return self is other

    def __repr__(self):
        raise RuntimeError("no representation")

    def __getattr__(self, name):
        raise RuntimeError(f"no attribute {name}")


ERRORS = {
    **{
        kind.__name__: lambda kind=kind: kind("my own error")
        for kind in (
            *(ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError),
            *(NotImplementedError, ZeroDivisionError, AssertionError, NameError, OSError),
            *(StopIteration, RecursionError, UnicodeError, Exception),
        )
    },
    "own": lambda: OwnError(3, where="here"),
    "without a text": NamelessError,
    "like Flax": lambda: ValueError("a variable of another trace level"),
    "like JAX": lambda: NameError("unbound name"),
}


def arguments(strategy):
    """Returns one argument of each kind that a step may receive."""
    (batch,) = strategy.distribute_dataset([np.ones((4, 3), np.float32)])
    return {
        "array": jnp.ones((2, 3)),
        "NumPy array": np.ones((2, 3), np.float32),
        "bfloat16": jnp.ones(3, jnp.bfloat16),
        "int4": jnp.ones(3, jnp.int4),
        "number": 3,
        "bool": True,
        "text": "relu",
        "None": None,
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 4),
        "legacy key": jax.random.PRNGKey(0),
        "nnx": nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        "nnx with keys": nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        "optimizer": nnx.Optimizer(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), optax.sgd(1), wrt=nnx.Param),
        "Equinox": eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)),
        "per-replica": batch,
        "per-replica keys": mirror.PerReplica(list(jax.random.split(jax.random.key(0), 2))),
        "containers": {"a": [jax.random.key(0), (None, np.int8(1))]},
        "function": jnp.tanh,
        "object": object(),
        "hostile object": Hostile(),
    }


def leaves_unchanged(error, call, *args):
    before = error.args, type(error)
    with pytest.raises(Exception) as caught:  # noqa: PT011  any: it is compared below
        call(*args)
    assert caught.value is error, f"{type(caught.value).__name__} replaced the user's error"
    assert (error.args, type(error)) == before


def test_run_and_verify_raise_the_error_of_the_step(subtests):
    strategy = cpu_strategy(2)
    for kind, argument in arguments(strategy).items():
        for name, make in ERRORS.items():
            # `verify` explains as `run` does; keys have failed in an explanation.
            is_chosen = kind == "key" or name == next(iter(ERRORS))
            for method in (strategy.run, strategy.verify)[: 1 + is_chosen]:
                error = make()

                def step(x, error=error):
                    raise error

                with subtests.test(msg=f"{kind}, {name}, {method.__name__}"):
                    leaves_unchanged(error, method, step, (argument,))


def test_fit_raises_the_error_of_the_loss(subtests):
    strategy = cpu_strategy(2)
    data = [{"x": np.ones((4, 3), np.float32), "key": np.zeros((4, 2), np.uint32)}]
    for name, make in ERRORS.items():
        error = make()

        def loss_fn(model, batch, error=error):
            raise error

        with strategy.scope():
            model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            trainer = mirror.Trainer(model, optax.sgd(0.1), loss_fn)
        for method in (trainer.fit, trainer.evaluate):
            with subtests.test(msg=f"{name}, {method.__name__}"):
                leaves_unchanged(error, method, data)
