"""Values of unequal length outside a step: `PerReplica`, `reduce` and `gather`.

What `tf.distribute` does too is shown to be the same, or the test says how it differs.
"""

import copy
import logging
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirror
from mirror import PerReplica, ReductionToOneDevice
from tests.support.messages import raises
from tests.support.steps import context
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

pytestmark = pytest.mark.filterwarnings("ignore:.*compiled")  # each row has its own step
CPUS = jax.devices("cpu")
LAYOUTS = {
    "one each": cpu_strategy,
    "on the host": lambda n: cpu_strategy(n, cross_device_ops=ReductionToOneDevice()),
    "two on each": lambda n: cpu_strategy(n // 2, replicas_per_device=2),
    "all on one": lambda n: cpu_strategy(1, replicas_per_device=n),
}


@pytest.fixture(scope="module")
def made():
    """Strategies that are created once, with their compiled programs."""
    found = {}

    def make(layout, n):
        if (layout, n) not in found:
            found[layout, n] = LAYOUTS[layout](n)
        return found[layout, n]

    return make


def ragged(lengths, *tail, dtype=np.float32):
    """Returns random values of shape `(length, *tail)` per replica, and all of them joined."""
    rng = np.random.RandomState(0)
    rows = [rng.randn(length, *tail).astype(dtype) for length in lengths]
    return PerReplica(rows), np.concatenate(rows)


def one_and_two():
    return ragged((1, 2))[0]


def placed(strategy):
    """Values of lengths 1, 2, ... on the devices of the replicas."""
    return strategy.distribute_values_from_function(
        lambda context: np.ones(context.replica_id_in_sync_group + 1, np.float32)
    )


# The value


def test_unstacked_values_are_one_leaf_and_stay_separate():
    rows = [np.ones((1, 2), np.float32), np.zeros((3, 2), np.float32)]
    value = PerReplica(rows)
    assert value.num_replicas == 2
    assert value.shapes == ((1, 2), (3, 2))
    assert value.dtype == np.float32
    for mine, row in zip(value.values, rows, strict=True):
        np.testing.assert_array_equal(mine, row)
    (leaf,) = jax.tree.leaves(value)
    assert repr(leaf) == "UnstackedArrays(float32, (1, 2), (3, 2))"
    again = jax.tree.map(lambda leaf: leaf, value)
    assert isinstance(again, PerReplica)
    assert again.values == value.values
    assert jax.block_until_ready(value) is not None


def test_repr_of_unstacked_values_is_short(two):
    assert repr(PerReplica([[1.0], [2.0, 3.0]])) == "PerReplica([1.], [2., 3.])"
    large = PerReplica([np.zeros(20, np.float32), np.zeros(30, np.float32)])
    assert repr(large) == "PerReplica(float32[20], float32[30])"
    deleted = placed(two)
    deleted.values[1].delete()
    assert "deleted float32[2]" in repr(deleted)


def test_conversion_to_one_array_is_rejected():
    value = one_and_two()
    for read in (np.asarray, jnp.asarray, lambda x: x.stacked):
        with raises(ValueError, fix=["x.values", "gather(x, axis=0)"]):
            read(value)
    for compute in (lambda x: x + 1, float, len, lambda x: x[0]):
        with raises(TypeError, fix=["x.values", "strategy.run"]):
            compute(value)


def test_jax_rejects_unstacked_values():
    """As an argument of `jit`, it is named by its type and path."""
    value = one_and_two()
    with pytest.raises(
        TypeError, match=r"UnstackedArrays.* (path|to the function at path) a\.stacked"
    ):
        jax.jit(lambda a: a)(value)
    with pytest.raises(TypeError, match=r"UnstackedArrays.* is not a valid JAX type"):
        jax.grad(lambda a: 1.0)(value)
    with pytest.raises(TypeError, match="'UnstackedArrays' and 'int'"):
        jax.tree.map(lambda a: a * 2, value)


@rows("twin", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_unstacked_values_can_be_copied_and_pickled(twin, two):
    value = one_and_two()
    for one in (value, placed(two)):
        other = twin(one)
        for mine, row in zip(other.values, one.values, strict=True):
            np.testing.assert_array_equal(mine, row)
        joined = np.concatenate(one.values)
        np.testing.assert_array_equal(two.gather(other), joined)


def test_values_must_agree_in_all_but_lengths():
    for other, shown in [(np.ones(2, np.int32), "int32[2]"), (np.ones((2, 2)), "float64[2,2]")]:
        with raises(ValueError, values=["float64[1]", shown]):
            PerReplica([np.ones(1), other])


def test_values_are_placed_on_their_replicas(two):
    own = placed(two)
    assert [v.devices() for v in own.values] == [{CPUS[0]}, {CPUS[1]}]
    assert [v.shape for v in two.local_results(own)] == [(1,), (2,)]
    elsewhere = PerReplica([jax.device_put(v, CPUS[6]) for v in own.values])
    with two.scope():
        assert float(two.reduce("sum", elsewhere, axis=0)) == 3.0
        assert two.gather(elsewhere).devices() == set(two.devices)


def test_visualize_placement_shows_unstacked_values(two):
    value = placed(two)
    row = str(mirror.debugging.visualize_placement({"x": value})).splitlines()[1]
    assert "float32[1], float32[2]  12 bytes  /device:CPU:0, /device:CPU:1" in row


# Steps


@rows("layout", list(LAYOUTS))
def test_step_requires_one_shape_on_all_replicas(layout, made):
    """The error names the argument and all shapes; the next step runs."""
    strategy = made(layout, 4)
    value, _ = ragged((3, 1, 2, 2), 5)
    batch = {"image": PerReplica([np.ones((2, 5))] * 4), "label": value}

    def step(model, batch):
        return context().all_reduce("sum", batch["image"].sum())

    wanted = {"names": "batch['label']", "values": [(3, 5), (1, 5), (2, 5)]}
    fix = "strategy.distribute_dataset(data, remainder='pad')"
    for call in (strategy.run, strategy.inspect, strategy.verify, strategy.explain):
        with raises(ValueError, **wanted, fix=fix):
            call(step, (1.0, batch))
    batch["label"] = PerReplica([np.ones((2, 5))] * 4)
    assert float(strategy.run(step, (1.0, batch))) == 40


def test_error_of_a_step_fits_the_cause(two):
    """A wrong number of replicas and deleted values are named before the shapes."""
    with raises(ValueError, names="x", values=[3, 2], fix="distribute_dataset"):
        two.run(lambda x: x, (ragged((1, 2, 3))[0],))
    with raises(ValueError, names="PerReplica", values=[3, 2]):
        two.local_results(ragged((1, 2, 3))[0])
    value = placed(two)
    with raises(TypeError, names="PerReplica", fix="check_mirrored"):
        two.check_mirrored(value)
    value.values[1].delete()
    with raises(ValueError, names="x", fix="donate_argnums"):
        two.run(lambda x: x, (value,))
    for call in (two.gather, lambda value: two.reduce("sum", value, axis=0)):
        with raises(ValueError, names="value", fix="donate_argnums"):
            call(value)


# Reductions and gathers


@rows("layout", list(LAYOUTS))
@rows("lengths", [(3, 1, 2, 2), (0, 4)])
def test_reduce_and_gather_match_numpy(lengths, layout, made):
    strategy = made(layout, len(lengths))
    value, whole = ragged(lengths, 3)
    keep = PerReplica([np.asarray(row)[:, 0] > 0 for row in value.values])
    kept = whole[whole[:, 0] > 0]
    for op in ("sum", "mean", "min", "max"):
        np.testing.assert_allclose(
            strategy.reduce(op, value, axis=0), getattr(np, op)(whole, axis=0), 1e-5, 1e-6
        )
    np.testing.assert_allclose(strategy.reduce("mean", value, axis=(0, 1)), whole.mean(), 1e-5)
    np.testing.assert_allclose(
        strategy.reduce("mean", value, axis=0, where=keep), kept.mean(axis=0), 1e-5
    )
    across = PerReplica([np.asarray(row).T for row in value.values])
    np.testing.assert_array_equal(strategy.gather(across, axis=1), whole.T)


@rows("dtype", ["bool", "uint8", "int32", "bfloat16", "float16", "complex64"])
def test_gather_supports_other_dtypes_and_keys(dtype, two):
    rows = [np.ones(length).astype(jnp.dtype(dtype)) for length in (1, 2)]
    got = two.gather(PerReplica(rows))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.concatenate(rows))


def test_gather_supports_prng_keys(two):
    rows = [jax.random.split(jax.random.key(i), i + 1) for i in range(2)]
    got = two.gather(PerReplica(rows))
    data = [np.asarray(jax.random.key_data(row)) for row in rows]
    np.testing.assert_array_equal(jax.random.key_data(got), np.concatenate(data))


def test_leaves_may_differ_in_lengths(two):
    tree = {
        "a": ragged((1, 2))[0],
        "b": [ragged((2, 1), 2)[0], ragged((2, 2))[0]],
        "c": ragged((0, 3))[0],
    }
    joined = two.gather({**tree, "d": np.arange(2.0)})
    total = two.reduce("sum", tree, axis=0)
    for (path, found), value in zip(
        jax.tree_util.tree_leaves_with_path(total),
        jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PerReplica)),
        strict=True,
    ):
        wanted = np.concatenate(value.values)
        np.testing.assert_allclose(found, wanted.sum(axis=0), 1e-5, err_msg=str(path))
    np.testing.assert_array_equal(joined["b"][0], np.concatenate(tree["b"][0].values))
    np.testing.assert_array_equal(joined["d"], [0, 1, 0, 1])


def test_gathers_work_inside_jit_scan_vmap_and_grad(two):
    rows = [np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)]
    whole = np.concatenate(rows)
    weights = np.array([10.0, 20.0, 30.0, 40.0], np.float32)

    def step(x):
        gather = context().all_gather
        in_jit = jax.jit(lambda y: gather(y) * 2)
        carry, _ = jax.lax.scan(lambda c, _: (c + gather(x).sum(), None), 0.0, None, length=2)
        return {
            "first": gather(x),
            "column": gather(x[:, None]),
            "jit": [in_jit(x), in_jit(x + 1)],
            "scan": carry,
            "vmap": jax.vmap(lambda r: gather(x * r))(jnp.arange(2.0)),
            "grad": jax.grad(jax.checkpoint(lambda y: (gather(y) * weights).sum()))(x),
        }

    got = two.run(step, (PerReplica(rows),))
    np.testing.assert_array_equal(got["first"], whole)
    np.testing.assert_array_equal(got["column"], whole[:, None])
    np.testing.assert_array_equal(got["jit"], [whole * 2, (whole + 1) * 2])
    np.testing.assert_allclose(got["scan"], 2 * whole.sum(), 1e-6)
    np.testing.assert_array_equal(got["vmap"], [whole * 0, whole])
    assert [g.tolist() for g in got["grad"].values] == [[20.0, 40.0], [60.0, 80.0]]


def test_gather_joins_values_that_differ_along_one_axis(two):
    """Sizes 0, 2 and 4 on three replicas give 6, on all of them."""
    three = cpu_strategy(3)
    for strategy, lengths in [(two, (1, 2)), (three, (0, 2, 4))]:
        value, whole = ragged(lengths)
        got = strategy.gather({"a": value, "b": [value]})
        for found in (got["a"], got["b"][0]):
            np.testing.assert_array_equal(found, whole)
            assert found.devices() == set(strategy.devices)
    value = PerReplica([np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)])
    with raises(ValueError, values=[0, (1, 2), (2, 3)], fix="strategy.gather(x, axis=0)"):
        two.gather(value)
    with raises(ValueError, values=[(1, 2), (2, 3)], fix="reduce(op, x, axis=0)"):
        two.reduce("sum", value, axis=0)
    assert float(two.reduce("sum", value, axis=(0, -1))) == 8


@pytest.mark.slow
@rows("layout", ["one each", "on the host"])
def test_gradients_flow_through_a_gather(layout, made):
    """The gradient is summed over all replicas, and each replica gets its part."""

    def weighted(x, c):
        return (context().all_gather(x, 1) * c).sum()

    equal = made(layout, 2).run(
        jax.grad(weighted), (PerReplica([np.ones((1, 1), np.float32)] * 2), PerReplica([1.0, 2.0]))
    )
    np.testing.assert_array_equal(equal, [[[3]], [[3]]])


@pytest.mark.slow
def test_gradients_through_a_gather_equal_those_of_one_device(made):
    """Gradients of a loss that each replica computes from all values; each counts it once."""
    strategy = made("one each", 4)
    value, whole = ragged((2, 2, 2, 2), 2)

    def loss(x, y):
        return jnp.sum(jnp.tanh(x @ x.T)) + (y * 0).sum()

    got = strategy.run(
        lambda x: jax.grad(lambda y: loss(context().all_gather(y), y) / 4)(x), (value,)
    )
    wanted = jax.grad(lambda x: loss(x, x))(whole)
    np.testing.assert_allclose(np.concatenate(got.values), wanted, 1e-5, 1e-6)


def test_gather_supports_every_axis(two):
    """Negative axes count from the end, for every dtype. A scalar has no axis to gather along."""

    def step(x):
        return context().all_gather(x, -1)

    for dtype in (np.float32, np.int32, bool):
        assert two.run(step, (PerReplica([np.ones((2, 2), dtype)] * 2),)).shape == (2, 4)
        value = PerReplica([np.ones((2, 1), dtype), np.ones((2, 3), dtype)])
        assert two.gather(value, -1).shape == (2, 4)
    for strategy in (two, cpu_strategy(1)):
        with raises(ValueError, values=[0, ()], fix=["all_gather", "x[None]"]):
            strategy.run(lambda: context().all_gather(jnp.ones(())))


def test_reduce_without_an_axis_requires_equal_lengths(two):
    with raises(ValueError, values=[(1,), (2,)], fix="reduce(op, x, axis=0)"):
        two.reduce("sum", one_and_two())


def test_reduce_with_an_axis_counts_each_element(two):
    value = PerReplica([np.zeros(1, np.float32), np.ones(2, np.float32)])
    assert float(two.reduce("sum", value, axis=0)) == 2.0
    assert float(two.reduce("mean", value, axis=0)) == np.float32(2 / 3)
    four = PerReplica([np.full(i + 1, i, np.int32) for i in range(4)])
    assert int(cpu_strategy(4).reduce("sum", four, axis=0)) == 20
    some = PerReplica([np.zeros(0, np.float32), np.full(2, 4, np.float32)])
    assert float(two.reduce("mean", some, axis=0)) == 4.0
    none = PerReplica([np.zeros(0, np.float32)] * 2)
    assert np.isnan(two.reduce("mean", none, axis=0))
    with raises(ValueError, names="where", values=[3, 2]):
        two.reduce("mean", some, axis=0, where=PerReplica([np.ones(1, bool)] * 3))


def test_gather_checks_its_axis(two):
    value = PerReplica([np.array([0, 10], np.int32), np.array([1], np.int32)])
    np.testing.assert_array_equal(two.gather(value, axis=0), [0, 10, 1])
    np.testing.assert_array_equal(two.gather(value, axis=-1), [0, 10, 1])
    with raises(RuntimeError, fix=[".gather", "mirror.all_gather"]):
        two.run(lambda: two.gather(value))
    with raises(TypeError, names="axis", values=None, fix="int"):
        two.gather(value, axis=None)
    for strategy in (two, cpu_strategy(1)):
        n = strategy.num_replicas_in_sync
        with raises(ValueError, names="axis", values=[0, ()]):
            strategy.gather(PerReplica([1.0] * n))


def test_gather_repeats_a_mirrored_value(two):
    """A plain value too, which TensorFlow returns unchanged."""
    for value in (np.array([1, 2]), two.reduce("max", PerReplica([np.array([1, 2])] * 2))):
        np.testing.assert_array_equal(two.gather(value), [1, 2, 1, 2])


def test_gather_works_leaf_by_leaf(two):
    """TensorFlow returns only the part of replica 0."""
    got = two.gather({"a": PerReplica([np.ones(1), np.ones(1)]), "b": (one_and_two(),)})
    assert (got["a"].shape, got["b"][0].shape) == ((2,), (3,))


def test_one_replica_and_equal_lengths_are_not_staged(caplog):
    with caplog.at_level(logging.INFO, "mirror"):
        one = cpu_strategy(1)
        value = PerReplica([np.ones(3, np.float32)])
        np.testing.assert_array_equal(one.run(lambda x: context().all_gather(x), (value,)), 1)
        rows = [jax.device_put(np.ones(2, np.float32), CPUS[7]) for _ in range(2)]
        cpu_strategy(2).run(lambda x: x, (PerReplica(rows),))
        cpu_strategy(2).gather(one_and_two())
    assert "staged" not in caplog.text
