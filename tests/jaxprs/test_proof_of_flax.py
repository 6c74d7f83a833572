"""The proof on Flax and optax: which steps it accepts, and which it rejects."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import mirror
from tests.support.messages import raises
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

pytestmark = pytest.mark.filterwarnings("ignore:.*compiled")  # each row has its own step


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(jax.nn.relu(self.conv1(x)))))


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            2, 8, dropout_rate=0.1, decode=False, deterministic=False, rngs=rngs
        )

    def __call__(self, x):
        return self.attention(x[None])


class Stack(nnx.Module):
    """Layers on one axis, run by a scan, as large models are written."""

    def __init__(self, rngs):
        split = nnx.split_rngs(splits=3)
        self.layers = split(nnx.vmap(Block, in_axes=0, out_axes=0))(rngs)

    def __call__(self, x):
        body = nnx.scan(nnx.remat(Block.__call__), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return body(self.layers, x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def loss_of(model, x):
    return (model(x) ** 2).mean()


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    grads, loss = mirror.all_reduce("mean", (grads, loss))
    optimizer.update(model, grads)
    return loss


def call(model, x):
    return model(x)


def features(model, x):
    return model.conv1(x)


def rounds(model, x):
    return nnx.fori_loop(0, 2, lambda _, c: (c[0], c[0].conv1(c[1])), (model, x))[1]


def cond_of_own(model, x):
    first = nnx.jit(features)
    return nnx.cond(x[0, 0] > 0, lambda m, x: first(m, x), lambda m, x: x, model, x)


def two_masks(model, x):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0, None))
    def mask(rngs, x):
        return nnx.Dropout(0.5)(x, rngs=rngs)

    return model(x) + mask(model.drop.rngs.fork(), x).mean()


FORWARDS = {
    "plain": (Net, call),
    "jit of remat": (Net, nnx.jit(nnx.remat(call))),
    "vmap": (Net, nnx.vmap(features, in_axes=(None, 0))),
    "scan of remat": (Stack, call),
    "fori_loop": (Net, rounds),
    "cond, mirrored": (Net, lambda m, x: nnx.cond(m.norm.use_running_average, call, call, m, x)),
    "cond of each replica's data": (Net, cond_of_own),
    "attention": (Attention, call),
    "split_rngs": (Net, two_masks),
}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def create(strategy, model_type=Net, optimizer=OPTIMIZERS["sgd"]):
    with strategy.scope():
        model = model_type(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param)


def data(num_replicas):
    rows = np.random.RandomState(0).randn(num_replicas, 4, 8).astype(np.float32)
    return mirror.PerReplica(list(rows))


def snapshot(*objects):
    state = nnx.to_pure_dict(nnx.state(objects))
    as_bits = lambda x: jax.random.key_data(x) if x.dtype == jax.random.key(0).dtype else x  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(as_bits(x)), state)


@pytest.mark.nightly
@rows("model_type, forward", FORWARDS)
def test_models_train_through_every_transformation(model_type, forward, two):
    with two.scope():
        model = model_type(nnx.Rngs(0))

    @mirror.per_replica_on_purpose  # batch statistics
    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda model: (forward(model, x) ** 2).mean())(model)
        grads, loss = mirror.all_reduce("mean", (grads, loss))
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return loss

    for _ in range(2):
        loss = two.run(step, (model, data(2)))
    assert isinstance(loss, jax.Array)
    two.check_mirrored(model)


@rows("make", OPTIMIZERS)
def test_linen_state_of_every_optimizer_trains(make, two):
    dense = linen.Dense(3)
    params = dense.init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
    state = train_state.TrainState.create(apply_fn=dense.apply, params=params, tx=make())

    def step(reduces, state, x):
        grads = jax.grad(lambda p: (state.apply_fn({"params": p}, x) ** 2).mean())(state.params)
        if reduces:
            grads = mirror.all_reduce("mean", grads)
        return mirror.ensure_mirrored(state.apply_gradients(grads=grads))

    after = two.run(step, (True, state, data(2)))
    two.check_mirrored(after)
    with raises(mirror.ReplicaDivergenceError, names=".params['kernel']"):
        two.run(step, (False, state, data(2)))


def forgetful(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


@pytest.mark.slow
@rows("name, num_replicas", [*((name, 2) for name in OPTIMIZERS), ("sgd", 1)])
@pytest.mark.filterwarnings("ignore:.* differs from one device")
def test_missing_all_reduce_names_the_variable_and_leaves_the_model_unchanged(name, num_replicas):
    strategy = cpu_strategy(num_replicas)
    model, optimizer = create(strategy, optimizer=OPTIMIZERS[name])
    x = data(num_replicas)
    before, structure = snapshot(model, optimizer), nnx.graphdef((model, optimizer))
    names = ["forgetful", "model.conv1.kernel", "x"]
    fix = 'grads = mirror.all_reduce("mean", grads)'
    with raises(mirror.ReplicaDivergenceError, names=names, fix=fix) as error:
        strategy.run(forgetful, (model, optimizer, x))
    assert "norm.mean" not in str(error.value)
    assert "rngs" not in str(error.value)
    assert nnx.graphdef((model, optimizer)) == structure
    jax.tree.map(np.testing.assert_array_equal, snapshot(model, optimizer), before)
    for _ in range(2):
        strategy.run(train, (model, optimizer, x))
    strategy.check_mirrored((model, optimizer))


def test_variable_written_by_some_replicas_is_rejected(two):
    def step(model, x):
        nnx.cond(x[0, 0] > 0, zero, lambda model: None, model)

    def zero(model):
        model.conv1.bias[...] = jnp.zeros(8)

    with raises(mirror.ReplicaDivergenceError, names=["step", "model.conv1.bias"]) as error:
        two.run(step, (create(two)[0], data(2)))
    assert "kernel" not in str(error.value)


@rows("change", ["split", "fold_in"])
def test_replaced_key_is_rejected_unless_replicas_agree(change, two):
    with two.scope():
        rngs = nnx.Rngs(0)

    def step(rngs):
        key = rngs.default.key.get_value()
        changed = {
            "split": lambda: jax.random.split(key)[0],
            "fold_in": lambda: jax.random.fold_in(key, jax.lax.axis_index(mirror.REPLICA_AXIS)),
        }
        rngs.default.key.set_value(changed[change]())

    with raises(mirror.ReplicaDivergenceError, names=["step", "rngs.default.key"]):
        two.run(step, (rngs,))

    def agreed(rngs):
        rngs.default.key.set_value(jax.random.key(7))

    two.run(agreed, (rngs,))
    np.testing.assert_array_equal(jax.random.key_data(rngs.default.key[...]), [0, 7])


UNTOUCHED = {
    "jit": nnx.jit(nnx.remat(call)),
    "cond": lambda m, x: nnx.cond(m.conv1.bias[0] == 0, call, call, m, x),
    "cond of own data": cond_of_own,
    "fori_loop": rounds,
}


@rows("read", UNTOUCHED)
def test_variables_that_are_only_read_keep_their_arrays(read, two):
    model, _ = create(two)

    @mirror.per_replica_on_purpose  # batch statistics
    def step(model, x):
        return read(model, x)

    two.run(step, (model, data(2)))  # arrays get their places
    reads = [model.conv1.kernel, model.conv1.bias, model.norm.scale, model.drop.rngs.key]
    before = [variable.get_raw_value() for variable in reads]
    two.run(step, (model, data(2)))
    for variable, value in zip(reads, before, strict=True):
        assert variable.get_raw_value() is value
