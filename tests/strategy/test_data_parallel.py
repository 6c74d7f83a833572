"""`DataParallel` computes the same as its module, for any batch, in any loop."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support.inside import pretended_types
from tests.support.messages import assert_message, raises
from tests.support.tables import rows


class Net(nnx.Module):
    """Has batch normalization and dropout, which depend on how a batch is split."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)  # the norm removes it
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x, *, relu=True):
        x = self.drop(self.norm(self.first(x)))
        return {"logits": self.second(jax.nn.relu(x) if relu else x)}


def batch(size):
    rng = np.random.RandomState(size)
    return rng.randn(size, 4).astype(np.float32), rng.randn(size, 2).astype(np.float32)


def assert_equal(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "device_ids"), [(8, None), (5, [3, 1])])
def test_outputs_equal_those_of_the_module(size, device_ids):
    plain, wrapped = Net(nnx.Rngs(0)), mirror.DataParallel(Net(nnx.Rngs(0)), device_ids)
    x, _ = batch(size)
    for relu in (True, False):
        got = wrapped(x, relu=relu)
        wanted = nnx.jit(lambda plain, x, relu=relu: plain(x, relu=relu))(plain, x)
        assert isinstance(got["logits"], jax.Array)
        assert got["logits"].shape == (size, 2)
        assert_equal(got, wanted)
    assert_equal(nnx.state(wrapped.module), nnx.state(plain))


def train(model, sizes, jit):
    """Runs some steps of a plain training loop; returns the losses."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer, x, y):
        loss_fn = lambda model: jnp.mean((model(x)["logits"] - y) ** 2)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    step = nnx.jit(step) if jit else step
    return [float(step(model, optimizer, *batch(size))) for size in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_data_parallel_trains_like_the_module(jit):
    plain, wrapped = Net(nnx.Rngs(0)), mirror.DataParallel(Net(nnx.Rngs(0)), [0, 1])
    sizes = [4, 3] if jit else [4]
    np.testing.assert_allclose(train(wrapped, sizes, jit), train(plain, sizes, jit), rtol=1e-4)
    for a, b in zip(*map(jax.tree.leaves, (nnx.state(wrapped), nnx.state(plain))), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5)


def test_optimizer_may_wrap_the_module_itself():
    wrapped = mirror.DataParallel(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), [0, 1])
    optimizer = nnx.Optimizer(wrapped.module, optax.sgd(0.1), wrt=nnx.Param)
    x, y = batch(4)
    before = np.array(wrapped.module.kernel[...])
    grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(wrapped)
    optimizer.update(wrapped.module, grads["module"])
    assert not np.array_equal(before, np.asarray(wrapped.module.kernel[...]))


class AddOne(nnx.Module):
    def __call__(self, x):
        return x + 1


@pytest.mark.parametrize(("size", "rows"), [(8, 2), (6, 6)])
def test_divisible_batches_are_split(size, rows, caplog):
    x = np.arange(2.0 * size, dtype=np.float32).reshape(size, 2)
    with caplog.at_level("INFO", "mirror"):
        got = mirror.DataParallel(AddOne(), [0, 1, 2, 3])(x)
    np.testing.assert_array_equal(np.asarray(got), x + 1)
    assert got.sharding.shard_shape(got.shape) == (rows, 2)
    said = [message for message in caplog.messages if "DataParallel" in message]
    assert bool(said) == (rows == size)
    for message in said:
        assert_message(message, names="DataParallel", values=[6, 4])


@rows("copied", {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))})
def test_copies_use_the_same_devices(copied):
    wrapped = mirror.DataParallel(Net(nnx.Rngs(0)), ["/cpu:1", "/cpu:2"])
    x, _ = batch(4)
    twin, outer = copied(wrapped), copied(nnx.Dict(inner=wrapped))
    assert twin.devices == outer["inner"].devices == tuple(jax.devices()[1:3])
    assert set(twin.module.second.kernel[...].devices()) == set(twin.devices)
    wanted = wrapped(x)
    assert_equal(twin(x), wanted)
    assert_equal(outer["inner"](x), wanted)
    assert_equal(nnx.state(twin.module, nnx.BatchStat), nnx.state(wrapped.module, nnx.BatchStat))
    twin.module.second.kernel[...] *= 0
    assert np.asarray(wrapped.module.second.kernel[...]).any()


def test_calls_compile_once():
    shapes = []

    class Counting(nnx.Linear):
        def __call__(self, inputs, out_sharding=None):
            shapes.append(inputs.shape)
            return super().__call__(inputs)

    wrapped = mirror.DataParallel(Counting(4, 2, rngs=nnx.Rngs(0)), [0, 1])
    for size in (4, 4, 4, 6, 6):
        wrapped(batch(size)[0])
    assert shapes == [(4, 4), (6, 4)]


@rows(
    "transform",
    {
        "gradient of the inputs": lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
        "jit": lambda f, x: jax.jit(lambda x: f(x))(x),
        "rows": lambda f, x: jax.vmap(lambda row: f(row[None])[0])(x),
        "loop": lambda f, x: jax.lax.scan(lambda _, x: (None, f(x)), None, x[None])[1],
    },
)
def test_transformed_function_may_capture_the_wrapper(transform):
    plain = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    wrapped = mirror.DataParallel(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), [0, 1])
    for size in (4, 3):
        x = jnp.asarray(batch(size)[0])
        assert_equal(transform(wrapped, x), transform(plain, x))


def test_state_and_batches_may_be_on_any_device():
    last = jax.devices("cpu")[7]
    with jax.default_device(last):
        module = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    wrapped = mirror.DataParallel(module, [0, 1])
    x = jax.device_put(batch(4)[0], last)
    wanted = np.asarray(wrapped(x))
    module.kernel.set_value(jax.device_put(module.kernel[...], last))
    np.testing.assert_array_equal(np.asarray(wrapped(x)), wanted)
    assert wrapped.devices == tuple(jax.devices("cpu")[:2])


def test_arguments_without_rows_go_to_all_devices():
    class Scale(nnx.Module):
        def __call__(self, x, factor, shift=None):
            return x * factor + (0 if shift is None else shift[0])

    wrapped = mirror.DataParallel(Scale(), [0, 1])
    got = wrapped(np.ones((4, 2), np.float32), jnp.float32(3), shift=np.ones(3, np.float32))
    np.testing.assert_array_equal(np.asarray(got), np.full((4, 2), 4.0))


@rows(
    "module, device_ids, error, wanted",
    [
        (3, None, TypeError, {"names": "module", "values": [3, "int"], "fix": "nnx.Module"}),
        ("net", [0, 9], ValueError, {"names": "device_ids", "values": ["[0, 9]", 9, 8]}),
        ("net", [0, -1], ValueError, {"names": "device_ids", "values": ["[0, -1]", -1, 8]}),
        ("net", [], ValueError, {"names": "devices", "values": "[]", "fix": "None"}),
        ("net", [0, "/cpu:0"], ValueError, {"values": "(/device:CPU:0, /device:CPU:0)"}),
    ],
)
def test_data_parallel_rejects_invalid_modules(module, device_ids, error, wanted):
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0)) if module == "net" else module
    with raises(error, **wanted):
        mirror.DataParallel(module, device_ids)


def test_devices_of_several_types_are_rejected():
    wanted = {"names": "device_ids", "fix": "mirror.MirroredStrategy"}
    with pretended_types(["CPU", "GPU"]), raises(ValueError, **wanted):
        mirror.DataParallel(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [0, 1])
