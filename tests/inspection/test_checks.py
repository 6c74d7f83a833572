"""`check_mirrored` and `verify`: the errors they find, and that they change nothing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import PerReplica
from tests.support import inside
from tests.support.copies import mirrored, with_one_bit_flipped
from tests.support.messages import assert_message, raises
from tests.support.models import MLP, LocalBatchNorm, batches, losses_of, nnx_step
from tests.support.strategies import cpu_strategy, each_layout
from tests.support.tables import rows

DTYPES = [
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float8_e4m3fn", "bfloat16", "float16", "float32", "complex64"),
]
WIDE = ["int64", "uint64", "float64", "complex128"]


@rows("n", [2, 3, 8])
def test_check_mirrored_finds_one_flipped_bit(n):
    strategy = cpu_strategy(n)
    arrays = {dtype: np.ones((5, 3), jnp.dtype(dtype)) for dtype in DTYPES}
    same = {dtype: mirrored(strategy, [array] * n) for dtype, array in arrays.items()}
    strategy.check_mirrored(same)
    for dtype, replica in itertools.product(DTYPES, sorted({0, 1, n - 1})):
        broken = with_one_bit_flipped(strategy, arrays[dtype], replica, byte=13 * replica)
        values = [1, len(DTYPES)]
        with raises(mirror.ReplicaDivergenceError, names=f"['{dtype}']", values=values):
            strategy.check_mirrored({**same, dtype: broken})


@rows("dtype", WIDE)
def test_check_mirrored_finds_one_flipped_bit_in_64_bits(dtype):
    with jax.enable_x64(True):
        strategy = cpu_strategy(2)
        array = np.ones(5, dtype)
        strategy.check_mirrored(mirrored(strategy, [array] * 2))
        for byte in (0, 7, array.nbytes - 1):
            broken = with_one_bit_flipped(strategy, array, 1, byte)
            assert broken.dtype == dtype
            with raises(mirror.ReplicaDivergenceError, values=1, fix="local_results(x)"):
                strategy.check_mirrored(broken)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_check_mirrored_compares_prng_keys(impl, two):
    key = jax.random.key(0, impl=impl)
    two.check_mirrored(two._replicas.mirror(key))
    data = [np.asarray(jax.random.key_data(key)), np.asarray(jax.random.key_data(key))]
    data[1] = data[1] + np.uint32(1)
    with raises(mirror.ReplicaDivergenceError, names="['rng']", values=1):
        two.check_mirrored({"rng": jax.random.wrap_key_data(mirrored(two, data), impl=impl)})


def test_check_mirrored_finds_changes_that_cancel_in_a_sum(two):
    first, second = np.arange(8, dtype=np.uint32), np.arange(8, dtype=np.uint32)
    second[0], second[5] = first[5], first[0]
    with pytest.raises(mirror.ReplicaDivergenceError):
        two.check_mirrored(mirrored(two, [first, second]))


@rows("value", [np.nan, np.inf, -0.0])
def test_check_mirrored_accepts_equal_bits(value, two):
    two.check_mirrored(mirrored(two, [np.full(3, value, np.float32)] * 2))


def test_check_mirrored_distinguishes_signed_zeros(two):
    with pytest.raises(mirror.ReplicaDivergenceError):
        two.check_mirrored(mirrored(two, [np.float32(0.0), np.float32(-0.0)]))


@rows("tree", [{}, None, {"x": np.ones(3), "n": 3, "s": "text"}])
@rows("strategy", each_layout)
def test_check_mirrored_accepts_host_values(tree, strategy):
    strategy.check_mirrored(tree)


def test_check_mirrored_names_variables_of_models(eight):
    with eight.scope():
        model = MLP(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    eight.check_mirrored((model, optimizer))
    kernel = model.second.kernel
    kernel.set_value(with_one_bit_flipped(eight, kernel[...], 7, 40))
    with raises(mirror.ReplicaDivergenceError, names="[0].second.kernel", values=1):
        eight.check_mirrored((model, optimizer))


def test_check_mirrored_counts_many_differing_leaves(two):
    broken = with_one_bit_flipped(two, np.ones(2, np.float32), 1, 0)
    names = ["[0]", "[11]"]
    with raises(mirror.ReplicaDivergenceError, names=names, values=[14, 2]) as error:
        two.check_mirrored([broken] * 14)
    assert "[12]" not in str(error.value)


@rows("strategy", each_layout)
def test_check_mirrored_accepts_empty_arrays_and_scalars(strategy):
    with strategy.scope():
        strategy.check_mirrored([jnp.zeros((0, 3)), jnp.float32(1), jnp.zeros((0,), bool)])


def test_check_mirrored_rejects_other_values(two):
    with raises(TypeError, names=["['x']", "PerReplica"], fix="check_mirrored"):
        two.check_mirrored({"x": PerReplica([1.0, 2.0])})
    with raises(ValueError, names="['y']", fix=["strategy.scope()", "strategy.run"]):
        two.check_mirrored({"y": jnp.ones(3)})


# verify


def make_step(reduce):
    """A training step whose gradients are reduced in this way."""

    def step(model, optimizer, batch):
        def loss_fn(model):
            return losses_of(model(batch["image"]), batch["label"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, reduce(mirror.get_replica_context(), grads))
        return mirror.all_reduce("mean", loss)

    return step


SGD = optax.sgd(0.5)


class Normed(nnx.Module):
    """A network whose first bias has the gradient zero, but for rounding."""

    def __init__(self, rngs):
        self.first = nnx.Linear(12, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, axis_name=mirror.REPLICA_AXIS, rngs=rngs)
        self.second = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.first(x))))


def training(strategy, model_type=MLP, transform=SGD):
    with strategy.scope():
        model = model_type(rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    features = (12,)
    (batch,) = strategy.distribute_dataset(batches(features, 1))
    return model, optimizer, batch


WRONG = {
    "sum": lambda c, g: c.all_reduce("sum", g),
    "scaled twice": lambda c, g: jax.tree.map(
        lambda x: x / c.num_replicas_in_sync, c.all_reduce("mean", g)
    ),
    "max": lambda c, g: c.all_reduce("max", g),
    "scaled once": lambda c, g: jax.tree.map(lambda x: x / 2, c.all_reduce("sum", g)),
}


def state_of(*objects):
    return [
        np.array(x)
        for x in jax.tree.leaves(nnx.state(objects))
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]


@rows("n", [1, 3])
def test_verify_accepts_a_correct_step_without_changes(n):
    strategy = cpu_strategy(n)
    model, optimizer, batch = training(strategy)
    before = state_of(model, optimizer)
    report = strategy.verify(nnx_step, (model, optimizer, batch))
    for now, then in zip(state_of(model, optimizer), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert report.num_replicas == strategy.num_replicas_in_sync
    assert report.largest <= report.rtol == 1e-5
    names = [row.name for row in report.rows]
    assert names[0] == "result"
    assert {"model.first.kernel", "model.second.bias", "optimizer.step"} <= set(names)
    strategy.run(nnx_step, (model, optimizer, batch))
    strategy.check_mirrored((model, optimizer))


@rows("name", list(WRONG))
def test_verify_finds_a_wrongly_reduced_gradient_without_changes(name):
    strategy = cpu_strategy(3)
    model, optimizer, batch = training(strategy)
    before = state_of(model, optimizer)
    names, fix = ["rtol", "model.first.kernel"], ["sum", "mean"]
    with raises(mirror.VerifyError, names=names, values=[3, "1e-05"], fix=fix) as caught:
        strategy.verify(make_step(WRONG[name]), (model, optimizer, batch))
    assert "\n  result" not in str(caught.value)
    for now, then in zip(state_of(model, optimizer), before, strict=True):
        np.testing.assert_array_equal(now, then)


ROUNDED = {"sgd": SGD, "Adam": optax.adam(1e-3), "RMSprop": optax.rmsprop(1e-3)}


@rows("name", list(ROUNDED))
def test_verify_allows_what_rounding_decides(name):
    strategy = cpu_strategy(4)
    arguments = training(strategy, Normed, ROUNDED[name])
    report = strategy.verify(nnx_step, arguments)
    rounded = {row.name: row for row in report.rows if row.rounding}
    assert "model.first.bias" in rounded, "nothing tests the rounding"
    assert "model.second.kernel" not in rounded
    for row in rounded.values():
        assert 1e-5 < row.relative <= 10 * row.rounding
    (line,) = [line for line in str(report).splitlines() if "model.first.bias" in line]
    assert_message(line, values=f"{rounded['model.first.bias'].rounding:.1e}")
    assert f"{rounded['model.first.bias'].rounding:.1e}" in report._repr_html_()
    names = ["model.second.kernel" if name == "sgd" else "optimizer.opt_state.0.nu.second.kernel"]
    with raises(mirror.VerifyError, names=names):
        strategy.verify(make_step(WRONG["scaled twice"]), arguments)


@rows(
    "types, configured, expected",
    {
        "GPUs": (["GPU"] * 2, None, "highest"),
        "GPUs with a precision": (["GPU"] * 2, "tensorfloat32", "tensorfloat32"),
        "host devices": ([], None, None),
    },
)
def test_verify_multiplies_in_float32_on_gpus(types, configured, expected):
    """TF32, their default, amplifies other roundings, so that right steps failed (on an H100)."""
    found = []

    def step(x):
        found.append(jax.config.jax_default_matmul_precision)
        return x * 2

    with inside.pretended_types(types), jax.default_matmul_precision(configured):
        cpu_strategy(2).verify(step, (PerReplica([[1.0], [2.0]]),))
    assert set(found) == {expected}


def test_verify_finds_a_missing_reduction(two):
    names = ["step", "model.first.kernel"]
    with raises(mirror.ReplicaDivergenceError, names=names, fix="all_reduce"):
        two.verify(make_step(lambda c, g: g), training(two))


def test_verify_finds_local_batch_statistics(two):
    fix = "axis_name=mirror.REPLICA_AXIS"
    with raises(mirror.VerifyError, names="model.norm.var", fix=fix):
        two.verify(nnx_step, training(two, LocalBatchNorm))


def test_verify_uses_the_given_tolerance(two):
    def step(x):
        context = mirror.get_replica_context()
        return context.all_reduce("mean", x.mean()) * (1 + 1e-3 * context.num_replicas_in_sync)

    x = PerReplica([np.ones(4, np.float32)] * 2)
    assert two.verify(step, (x,), rtol=1e-2).largest == pytest.approx(1e-3, rel=1e-2)
    values = [0.0001, "1.0e-03"]
    with raises(mirror.VerifyError, names=["rtol", "result"], values=values):
        two.verify(step, (x,), rtol=1e-4)


def test_verify_compares_per_replica_results_with_rows(two):
    def step(x):
        return {"rows": 2 * x, "own": x.sum()}

    report = two.verify(step, (PerReplica([np.arange(3.0), np.arange(3.0)]),))
    rows = {row.name: row for row in report.rows}
    assert rows["result['rows']"].compared
    assert not rows["result['own']"].compared
    heading, first, second = str(report).splitlines()
    assert_message(heading, values=[2, "1e-05"])
    assert_message(first, names="result['own']")
    assert "0.0e+00" not in first
    assert_message(second, names="result['rows']", values="0.0e+00")
    assert first.index("result") == second.index("result"), "the columns are not aligned"


def test_verify_finds_rows_that_depend_on_the_whole_batch(two):
    x = PerReplica([np.arange(3.0), np.arange(3.0, 6)])
    with raises(mirror.VerifyError, names=["rtol", "result"], values=[2, "1e-05"]):
        two.verify(lambda x: x - x.mean(), (x,))


def test_verify_supports_steps_that_read_their_strategy(two):
    def step(x):
        context = mirror.get_replica_context()
        n = mirror.get_strategy().num_replicas_in_sync
        assert context.strategy is mirror.get_strategy()
        return context.all_reduce("sum", x.mean()) / n

    assert two.verify(step, (PerReplica([np.ones(2)] * 2),)).largest == 0.0


def test_verify_finds_objects_anywhere_in_the_arguments(two):
    model, optimizer, batch = training(two)

    def step(state, *, batch):
        return nnx_step(state["model"], state["optimizer"], batch)

    report = two.verify(step, ({"model": model, "optimizer": optimizer},), {"batch": batch})
    assert "state['model'].first.bias" in {row.name for row in report.rows}


def test_verify_rejects_batches_without_rows(two):
    with raises(ValueError, values="PerReplica(1., 2.)"):
        two.verify(lambda x: x, (PerReplica([1.0, 2.0]),))


DIFFERENCES = [
    ([1.0, 2.0], [1.0, 2.0], 0.0),
    ([1.0, 2.2], [1.0, 2.0], 0.1),
    ([np.nan, 2.0], [np.nan, 2.0], 0.0),
    ([np.nan, 2.0], [1.0, 2.0], np.inf),
    ([1.0, 2.0], [np.nan, 2.0], np.inf),
    ([np.inf, 2.0], [np.inf, 2.0], 0.0),
    ([np.inf, 2.0], [1.0, 2.0], np.inf),
    ([1.0], [1.0, 2.0], np.inf),
    ([], [], 0.0),
    ([0.0], [-0.0], 0.0),
    ([0.0, 0.0], [0.0, 0.0], 0.0),
    ([1 + 1j], [1 + 1j], 0.0),
    ([3], [4], np.inf),
    ([True], [True], 0.0),
]


@rows("a, b, wanted", DIFFERENCES)
def test_relative_difference_equals_expected_values(a, b, wanted):
    a, b = np.asarray(a), np.asarray(b)
    assert inside.relative_difference(a, b) == pytest.approx(wanted)
    assert isinstance(inside.relative_difference(a, b), float)
