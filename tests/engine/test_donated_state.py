"""State that is an argument and a result stays mirrored, or the step is rejected."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.core import freeze
from flax.training.train_state import TrainState

import mirror
from mirror import PerReplica
from mirror.testing import assert_trains_like_one_device
from tests.support.messages import assert_message, raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import Made, rows


def batch_for(strategy):
    n = strategy.num_replicas_in_sync
    (batch,) = strategy.distribute_dataset([np.arange(6 * n, dtype=np.float32).reshape(2 * n, 3)])
    return batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    params: Any
    count: Any


class Pair(NamedTuple):
    params: Any
    count: Any


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(x)


def weights():
    return {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}


def loss(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def reduced(grads):
    return mirror.all_reduce("mean", grads)


def own(grads):
    return grads


def train(params, batch, reduce):
    grads = reduce(jax.grad(loss)(params, batch))
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def train_state():
    model = Dense()
    return TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), jnp.ones((1, 3)))["params"],
        tx=optax.adam(1e-2),
    )


def update_train_state(state, batch, reduce):
    value = lambda p: jnp.mean(state.apply_fn({"params": p}, batch) ** 2)  # noqa: E731
    return state.apply_gradients(grads=reduce(jax.grad(value)(state.params)))


def in_a(make):
    """A state with its weights in `params`, and its update."""

    def update(state, batch, reduce):
        return make(train(state.params, batch, reduce), state.count + 1)

    return lambda: make(weights(), jnp.int32(0)), update


# name: constructor, update, the name of a leaf
STATES = {
    "TrainState": (train_state, update_train_state, "state.params['Dense_0']['kernel']"),
    "registered dataclass": (*in_a(Registered), "state.params['w']"),
    "NamedTuple": (*in_a(Pair), "state.params['w']"),
    "dict": (weights, train, "state['w']"),
    "FrozenDict": (
        lambda: freeze(weights()),
        lambda p, b, r: freeze(train(p, b, r)),
        "state['w']",
    ),
    "array": (lambda: jnp.ones((3, 2)), lambda w, b, r: w - r(b.T @ b @ w), "state"),
    "TrainState in a tuple": (
        lambda: (train_state(), jnp.int32(0)),
        lambda s, b, r: (update_train_state(s[0], b, r), s[1] + 1),
        "state[0].params['Dense_0']['kernel']",
    ),
}
SHAPES = {
    "alone": (lambda new, batch: new, lambda out: out),
    "first": (lambda new, batch: (new, batch.mean()), lambda out: out[0]),
    "in a dict": (lambda new, batch: {"new": new, "x": batch.mean()}, lambda out: out["new"]),
}


def steps(name, shape="first"):
    _, update, _ = STATES[name]
    give, _ = SHAPES[shape]

    def step(state, batch):
        return give(update(state, batch, reduced), batch)

    def broken(state, batch):
        return give(update(state, batch, own), batch)

    return step, broken


# The proof is the same for all executors, and for one replica.
ROWS = [(2, name) for name in STATES] + [(1, "TrainState"), (1, "dict"), (1, "array")]
LAYOUTS = Made({"one": lambda: cpu_strategy(1), "two": lambda: cpu_strategy(2)})


@rows("shape", list(SHAPES))
@rows("n, name", ROWS)
def test_missing_all_reduce_of_donated_state_is_rejected_before_anything_runs(n, name, shape):
    strategy = cpu_strategy(n)
    make, _, leaf = STATES[name]
    _, broken = steps(name, shape)
    state = make()
    fix = ["all_reduce", "distribute_values_from_function"]
    with raises(mirror.ReplicaDivergenceError, names=["broken", leaf, "batch"], fix=fix):
        strategy.run(broken, (state, batch_for(strategy)), donate_argnums=0)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))


@rows("n, name", ROWS)
def test_state_that_is_not_donated_comes_back_per_replica(n, name):
    """It may be anything that has the structure of an argument, such as gradients.

    If it is passed again, it is state: a warning.
    """
    strategy = cpu_strategy(n)
    make, _, leaf = STATES[name]
    _, broken = steps(name)
    state, batch = make(), batch_for(strategy)
    assert strategy.inspect(broken, (state, batch)).in_step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for calls in range(4):
            state, _ = strategy.run(broken, (state, batch))
            assert len(caught) == (calls > 0 and n > 1)
    for warning in caught:
        fix = ["all_reduce", "distribute_values_from_function"]
        assert_message(str(warning.message), names=["broken", leaf, "batch"], fix=fix)
        assert warning.filename == __file__
    rows = {row.name: row.state for row in strategy.inspect(broken, (state, batch)).results}
    assert rows[leaf.replace("state", "result[0]", 1)] == "per-replica"


def test_children_of_a_donated_container_are_state(two):
    def step(state, batch):
        params, count = state["params"], state["count"] + 1
        return train(params, batch, own), count, batch.mean()

    args = ({"params": weights(), "count": jnp.int32(0)}, batch_for(two))
    with raises(mirror.ReplicaDivergenceError, names="state['params']['w']", fix="all_reduce"):
        two.run(step, args, donate_argnums=0)


@pytest.mark.slow
@rows("n, name", ROWS)
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_step_with_its_all_reduce_trains(n, name):
    strategy = cpu_strategy(n)
    make, _, _ = STATES[name]
    step, _ = steps(name)
    state, batch = make(), batch_for(strategy)
    for _ in range(3):
        state, value = strategy.run(step, (state, batch), donate_argnums=0)
    assert isinstance(value, PerReplica)
    strategy.check_mirrored(state)
    assert strategy.inspect(step, (state, batch)).in_step


@rows("n, name", ROWS)
def test_missing_all_reduce_fails_the_assert(n, name):
    strategy = cpu_strategy(n)
    make, _, leaf = STATES[name]
    _, broken = steps(name)
    with raises(AssertionError, names=["broken", leaf.removeprefix("state")], fix="all_reduce"):
        assert_trains_like_one_device(broken, (make(), batch_for(strategy)), strategy)


@rows("strategy", LAYOUTS)
def test_initially_per_replica_state_is_accepted(strategy):
    """Local SGD: each replica trains weights of its own."""
    _, broken = steps("dict")
    params = jax.tree.map(
        lambda leaf: strategy.distribute_values_from_function(lambda _: np.asarray(leaf)),
        weights(),
    )
    for _ in range(3):
        params, _ = strategy.run(broken, (params, batch_for(strategy)), donate_argnums=0)
    assert all(isinstance(leaf, PerReplica) for leaf in params.values())


def folded(key, batch):
    return mirror.get_replica_context().fold_in(key), batch


def sums(total, batch):
    return jax.tree.map(jnp.add, total, jax.grad(loss)(weights(), batch))


# name: step, the arguments of the first call, and of the second, which may have its result
NOT_DRIFTING = {
    "gradients of several calls": (
        sums,
        lambda batch: (weights(), batch),
        lambda batch, total: (total, batch),
    ),
    "keys": (
        folded,
        lambda batch: (jax.random.key(0), batch),
        lambda batch, new: (new[0], batch),
    ),
    "mirrored data, then a batch": (
        lambda x: x**2,
        lambda _: (np.ones((2, 3)),),
        lambda batch, _: (batch,),
    ),
    "values that differ from the start": (
        lambda x: x**2,
        lambda batch: (batch,),
        lambda _, new: (new,),
    ),
}


@rows("name", list(NOT_DRIFTING))
def test_values_per_replica_that_are_no_drift_do_not_warn(two, name):
    step, first, second = NOT_DRIFTING[name]
    batch = batch_for(two)
    two.run(step, second(batch, two.run(step, first(batch))))


@rows("strategy", LAYOUTS)
def test_gradients_beside_new_weights_are_not_state(strategy):
    def step(params, batch):
        grads = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, reduced(grads)), grads

    params = weights()
    for _ in range(2):
        params, grads = strategy.run(step, (params, batch_for(strategy)), donate_argnums=0)
    assert isinstance(grads["w"], PerReplica)


@rows("strategy", LAYOUTS)
def test_scalar_loss_beside_a_scalar_argument_is_not_state(strategy):
    def step(rate, batch):
        return (batch * rate).mean()

    batch = batch_for(strategy)
    assert isinstance(strategy.run(step, (jnp.float32(0.1), batch)), PerReplica)
    assert strategy.inspect(step, (jnp.float32(0.1), batch)).in_step


@pytest.mark.dev("equinox")
@rows("strategy", LAYOUTS)
def test_gradients_of_an_equinox_model_are_returned_per_replica(strategy):
    import equinox as eqx

    def gradients(model, batch):
        return eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(batch) ** 2))(model)

    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    grads = strategy.run(gradients, (model, batch_for(strategy)))
    assert isinstance(grads, eqx.nn.Linear)
    assert isinstance(grads.weight, PerReplica)
    mean = strategy.reduce("mean", grads)
    whole = gradients(model, np.arange(6 * strategy.num_replicas_in_sync).reshape(-1, 3) * 1.0)
    np.testing.assert_allclose(mean.weight, whole.weight, rtol=1e-5)


def test_report_heading_counts_per_replica_results(two):
    step, _ = steps("dict")
    report = two.inspect(step, (weights(), batch_for(two)))
    assert report.in_step
    assert_message(report.heading, names=["step", "per-replica"], values=[1, 2])


def test_gradients_beside_one_of_two_similar_models_are_not_state(two):
    """Distillation: the student comes back mirrored, with gradients; the teacher does not."""

    def step(student, teacher, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p.params - batch @ teacher.params) ** 2))(
            student
        )
        new = Pair(student.params - reduced(grads.params), student.count)
        return Registered(new.params, new.count), Registered(grads.params, student.count)

    make = lambda: Registered(jnp.ones((3, 2)), jnp.float32(0))  # noqa: E731
    new, grads = two.run(step, (make(), make(), batch_for(two)), donate_argnums=0)
    assert isinstance(grads.params, PerReplica)
    assert isinstance(new.params, jax.Array)


def test_values_that_the_message_asks_for_are_accepted_after_the_error(two):
    def step(state, batch):
        return {"w": state["w"] - batch.sum(0), "b": state["b"] + 1}

    (batch,) = two.distribute_dataset([np.ones((4, 3), np.float32)])
    first = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
    for _ in range(2):
        with raises(mirror.ReplicaDivergenceError, names="state['w']", fix="PerReplica"):
            two.run(step, (first, batch), donate_argnums=0)
        own = {"w": mirror.PerReplica([np.zeros(3, np.float32)] * 2), "b": first["b"]}
        new = two.run(step, (own, batch), donate_argnums=0)
        np.testing.assert_array_equal(new["w"].values[1], np.full(3, -2.0))
