"""Values of unequal length: `PerReplica`, `run`, `reduce`, `gather`, and training on them.

What `tf.distribute` does too is shown to be the same, or the test says how it differs.
"""

import copy
import logging
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import mirror
from mirror import PerReplica, ReductionToOneDevice
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.messages import assert_message, raises
from tests.support.models import MLP, LinenMLP, LocalBatchNorm, batches, losses_of
from tests.support.steps import context
from tests.support.strategies import cpu_strategy
from tests.support.tables import rows

pytestmark = pytest.mark.filterwarnings("ignore:.*compiled")  # each row has its own step
CPUS = jax.devices("cpu")
LENGTHS = [(3, 1, 2, 2), (0, 4), (1, 1, 1, 5), (2, 2)]
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
    deleted = two.run(lambda x: x, (one_and_two(),))
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
    for one in (value, two.run(lambda x: x, (value,))):
        other = twin(one)
        for mine, row in zip(other.values, value.values, strict=True):
            np.testing.assert_array_equal(mine, row)
        joined = np.concatenate(value.values)
        np.testing.assert_array_equal(two.gather(other), joined)


def test_values_must_agree_in_all_but_lengths():
    for other, shown in [(np.ones(2, np.int32), "int32[2]"), (np.ones((2, 2)), "float64[2,2]")]:
        with raises(ValueError, values=["float64[1]", shown]):
            PerReplica([np.ones(1), other])


def test_values_are_placed_on_their_replicas(two):
    own = two.distribute_values_from_function(
        lambda context: np.ones(context.replica_id_in_sync_group + 1, np.float32)
    )
    assert [v.devices() for v in own.values] == [{CPUS[0]}, {CPUS[1]}]
    elsewhere = PerReplica([jax.device_put(v, CPUS[6]) for v in own.values])
    for value in (own, elsewhere):
        got = two.run(lambda x: x * 2, (value,))
        assert [v.devices() for v in got.values] == [{CPUS[0]}, {CPUS[1]}]
        assert repr(got) == "PerReplica([2.], [2., 2.])"
    with two.scope():
        assert float(two.reduce("sum", elsewhere, axis=0)) == 3.0
        assert float(two.run(lambda x: context().all_reduce("sum", x.sum()), (got,))) == 6.0


def test_visualize_placement_shows_unstacked_values(two):
    value = two.run(lambda x: x, (one_and_two(),))
    row = str(mirror.debugging.visualize_placement({"x": value})).splitlines()[1]
    assert "float32[1], float32[2]  12 bytes  /device:CPU:0, /device:CPU:1" in row


# Steps, reductions and gathers

# Few lengths on each layout, and all lengths on two of them.
TABLE = [("two on each", (0, 4)), ("on the host", LENGTHS[0]), ("all on one", LENGTHS[0])]
TABLE += [("one each", lengths) for lengths in LENGTHS]
TABLE += [("two on each", lengths) for lengths in LENGTHS if lengths != (0, 4)]


def everything(x):
    """Mirrored and per-replica results, with and without the length."""
    replica = context()
    return {
        "joined": replica.all_gather(x),
        "sum": replica.all_reduce("sum", x.sum(axis=0)),
        "most": replica.all_reduce("max", x.shape[0]),
        "joined along 1": replica.all_gather(x.T, axis=-1),
        "own": x * 2,
        "length": x.shape[0],
        "id": replica.replica_id_in_sync_group,
        "one": 1.0,
    }


@pytest.mark.parametrize(
    "table", [TABLE[:2], pytest.param(TABLE[2:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_step_runs_on_unequal_lengths(table, made, subtests):
    for layout, lengths in table:
        with subtests.test(f"{layout}, {lengths}"):
            require_right_results(layout, lengths, made)


def require_right_results(layout, lengths, made):
    n = len(lengths)
    strategy = made(layout, n)
    value, whole = ragged(lengths, 3)
    for _ in range(2):
        got = strategy.run(everything, (value,))
    np.testing.assert_array_equal(got["joined"], whole)
    np.testing.assert_array_equal(got["joined along 1"], whole.T)
    np.testing.assert_allclose(got["sum"], whole.sum(axis=0), 1e-5)
    assert int(got["most"]) == max(lengths)
    mirrored = ["joined", "joined along 1", "sum", "most", "one"]
    for name in mirrored:
        assert isinstance(got[name], jax.Array), name
        assert got[name].devices() == set(strategy.devices), name
        strategy.check_mirrored(got[name])
    for mine, row, device in zip(got["own"].values, value.values, strategy.devices, strict=True):
        np.testing.assert_array_equal(mine, np.asarray(row) * 2)
        assert mine.devices() == {device}
    np.testing.assert_array_equal(got["id"], range(n))
    if len(set(lengths)) > 1:
        assert [int(length) for length in got["length"].values] == list(lengths)

    # Results are passed in again.
    np.testing.assert_array_equal(strategy.gather(got["own"]), whole * 2)
    assert len(strategy.local_results(got["own"])) == n
    back = strategy.run(everything, (got["own"],))
    np.testing.assert_array_equal(back["joined"], whole * 2)


@pytest.mark.slow
@rows("lengths", [(3, 1, 2, 2), (0, 4)])
def test_reduce_and_gather_match_numpy(lengths, made):
    strategy = made("on the host" if len(lengths) == 2 else "one each", len(lengths))
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
    value, whole = ragged((1, 2))
    weights = np.array([10.0, 20.0, 30.0], np.float32)

    def step(x):
        gather = context().all_gather
        in_jit = jax.jit(lambda y: gather(y) * 2)
        carry, _ = jax.lax.scan(lambda c, _: (c + gather(x).sum(), None), 0.0, None, length=2)
        return {
            "first": gather(x),
            "column": gather(x[:, None]),
            "equal": gather(jnp.ones(2)),
            "jit": [in_jit(x), in_jit(x + 1)],
            "scan": carry,
            "vmap": jax.vmap(lambda r: gather(x * r))(jnp.arange(2.0)),
            "grad": jax.grad(jax.checkpoint(lambda y: (gather(y) * weights).sum()))(x),
        }

    got = two.run(step, (value,))
    np.testing.assert_array_equal(got["first"], whole)
    np.testing.assert_array_equal(got["column"], whole[:, None])
    np.testing.assert_array_equal(got["equal"], np.ones(4))
    np.testing.assert_array_equal(got["jit"], [whole * 2, (whole + 1) * 2])
    np.testing.assert_allclose(got["scan"], [2 * whole.sum()] * 2, 1e-6)
    np.testing.assert_array_equal(got["vmap"], [whole * 0, whole])
    assert [g.tolist() for g in got["grad"].values] == [[20.0], [40.0, 60.0]]


def test_all_gather_joins_unequal_lengths_in_a_replica(two):
    """Sizes 0, 2 and 4 on three replicas give 6, on all of them."""
    three = cpu_strategy(3)
    for strategy, lengths in [(two, (1, 2)), (three, (0, 2, 4))]:
        value, whole = ragged(lengths)
        tree = {"a": value, "b": [value]}
        got = strategy.run(lambda t: context().all_gather(t), (tree,))
        for found in (got["a"], got["b"][0]):
            np.testing.assert_array_equal(found, whole)
            assert found.devices() == set(strategy.devices)
    value = PerReplica([np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)])
    for call in (two.gather, lambda x: two.run(lambda x: context().all_gather(x), (x,))):
        with raises(ValueError, values=[0, 1, (1, 2), (2, 3)], fix="all_gather"):
            call(value)


@pytest.mark.slow
@rows("layout", ["one each", "on the host"])
def test_gradients_flow_through_a_gather(layout, made):
    """The gradient is summed over all replicas, and each replica gets its part."""
    strategy = made(layout, 2)

    def weighted(x, c, axis=0):
        return (context().all_gather(x, axis) * c).sum()

    equal = strategy.run(
        lambda x, c: jax.grad(weighted)(x, c, 1),
        (PerReplica([np.ones((1, 1), np.float32)] * 2), PerReplica([1.0, 2.0])),
    )
    np.testing.assert_array_equal(equal, [[[3]], [[3]]])
    value = PerReplica([np.ones(1, np.float32), np.full(2, 2, np.float32)])
    got = strategy.run(jax.grad(weighted), (value, np.array([10.0, 20.0, 30.0], np.float32)))
    assert [g.tolist() for g in got.values] == [[20.0], [40.0, 60.0]]


@pytest.mark.slow
def test_gradients_through_a_gather_equal_those_of_one_device(made):
    """Gradients of a loss that each replica computes from all values; each counts it once."""
    strategy = made("one each", 4)
    value, whole = ragged((3, 1, 2, 2), 2)

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
        value = PerReplica([np.ones((2, 1), dtype), np.ones((2, 3), dtype)])
        assert two.run(step, (value,)).shape == (2, 4)
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


def test_gather_checks_its_axis(two):
    value = PerReplica([np.array([0, 10], np.int32), np.array([1], np.int32)])
    np.testing.assert_array_equal(two.gather(value, axis=0), [0, 10, 1])
    np.testing.assert_array_equal(two.gather(value, axis=-1), [0, 10, 1])
    with raises(RuntimeError, fix=[".gather", "mirror.all_gather"]):
        two.run(lambda x: two.gather(x), (value,))
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


# Rules that all replicas must follow


def communications_by_length(x):
    total = context().all_reduce("sum", x.sum())
    return context().all_reduce("sum", total * 2) if x.shape[0] == 1 else total


UNLIKE: dict[str, tuple[Any, ...]] = {  # a step, whether its line is named, other names
    "a sum of the batch": (
        lambda x: context().all_reduce("sum", x),
        True,
        {"names": "<lambda>", "values": [0, 1, "float32[1]", "float32[2]"], "fix": "all_gather(x)"},
    ),
    "JAX's own all-gather": (
        lambda x: jax.lax.all_gather(x, mirror.REPLICA_AXIS),
        True,
        {"names": "<lambda>", "values": [0, 1], "fix": "all_gather(x)"},
    ),
    "one more": (communications_by_length, False, {"values": [0, 1, 2]}),
    "one gather more": (
        lambda x: context().all_gather(x) if x.shape[0] == 1 else x,
        False,
        {"values": 1, "fix": "all_gather"},
    ),
    "as many trips as rows": (
        lambda x: jax.lax.scan(lambda c, r: (context().all_reduce("sum", c + r), None), 0.0, x)[0],
        True,
        {"names": "<lambda>", "values": [0, 1, 2]},
    ),
    "until the rows end": (
        lambda x: jax.lax.while_loop(
            lambda c: c[0] < x.shape[0],
            lambda c: (c[0] + 1, context().all_reduce("sum", c[1])),
            (0, 1.0),
        ),
        True,
        {"names": "<lambda>", "values": [False, True, 0, 1], "fix": "all_reduce('max', condition)"},
    ),
    "another structure": (
        lambda x: (x,) if x.shape[0] == 1 else x,
        False,
        {"names": "<lambda>", "values": [0, 1]},
    ),
}


@rows("step, is_line_named, wanted", UNLIKE)
def test_replicas_with_different_collectives_are_rejected(step, is_line_named, wanted, two):
    """Nothing waits, and the next step runs; in TensorFlow every later collective fails as well."""
    with raises(ValueError, **wanted) as error:
        two.run(step, (one_and_two(),))
    if is_line_named:
        assert_message(error, names=f"test_unstacked.py:{step.__code__.co_firstlineno}")
    ones = PerReplica([np.ones(2)] * 2)
    assert float(two.run(lambda x: context().all_reduce("sum", x.sum()), (ones,))) == 4.0


def test_values_that_depend_on_a_length_are_per_replica(two):
    def step(x):
        total = context().all_reduce("sum", x.shape[0])
        return x.shape[0] * 1.0, jnp.ones(x.shape[0]).sum(), total, jnp.float32(2)

    own, computed, total, constant = two.run(step, (one_and_two(),))
    assert [float(v) for v in own.values] == [float(v) for v in computed.values] == [1.0, 2.0]
    assert (int(total), float(constant)) == (3, 2.0)
    equal, *_ = two.run(step, (PerReplica([np.ones(2, np.float32)] * 2),))
    assert float(equal) == 2.0
    fix = ["ensure_mirrored", 'all_reduce("sum", x.shape[0])']
    with raises(mirror.ReplicaDivergenceError, fix=fix):
        two.run(lambda x: mirror.ensure_mirrored(jnp.float32(x.shape[0])), (one_and_two(),))


def test_variable_that_depends_on_a_length_is_rejected(two):
    class Counts(nnx.Module):
        def __init__(self):
            self.seen = nnx.Param(jnp.zeros(()))

    with two.scope():
        model = Counts()

    def step(model, x, *, reduced):
        seen = jnp.float32(x.shape[0])
        model.seen[...] += context().all_reduce("sum", seen) if reduced else seen

    with raises(mirror.ReplicaDivergenceError, names=["step", "model.seen"], fix="all_reduce"):
        two.run(step, (model, one_and_two()), {"reduced": False})
    assert float(model.seen[...]) == 0
    two.run(step, (model, one_and_two()), {"reduced": True})
    assert float(model.seen[...]) == 3


def test_bad_values_are_named(two):
    with raises(ValueError, names="x", values=[3, 2], fix="distribute_dataset"):
        two.run(lambda x: x, (ragged((1, 2, 3))[0],))
    with raises(ValueError, names="PerReplica", values=[3, 2]):
        two.local_results(ragged((1, 2, 3))[0])
    value = two.run(lambda x: x, (one_and_two(),))
    with raises(TypeError, names="PerReplica", fix="check_mirrored"):
        two.check_mirrored(value)
    value.values[1].delete()
    with raises(ValueError, names="x", fix="donate_argnums"):
        two.run(lambda x: x, (value,))


def test_combinations_of_lengths_compile_once(two, caplog):
    traced = []

    def step(x):
        traced.append(x.shape[0])
        return context().all_reduce("sum", x.sum()), context().all_gather(x)

    combinations = [ragged(lengths)[0] for lengths in [(1, 2), (2, 1), (2, 2)]]
    for value in combinations:
        two.run(step, (value,))
    assert {1, 2} == set(traced)
    traced.clear()
    with compilations(caplog) as events:
        for value in [*combinations, ragged((1, 2))[0]]:
            two.run(step, (value,))
    assert_nothing_compiled(events)
    assert not traced


def test_log_names_the_executor(caplog):
    with caplog.at_level(logging.INFO, "mirror"):
        strategy = cpu_strategy(2)
        assert "StagedJaxpr" not in caplog.text
        strategy.run(lambda x: x, (one_and_two(),))
    assert_message(caplog.text, names="StagedExecutor", values="(/device:CPU:0, /device:CPU:1)")
    assert any(line.count("/device:CPU:0") == 2 for line in caplog.messages)  # reduces on it


# Training

RAGGED = (3, 1, 2, 2)
WHOLE = batches((12,), 3, 8)


def split(batch, lengths):
    ends = np.cumsum(lengths)[:-1]
    return {name: PerReplica(np.split(leaf, ends)) for name, leaf in batch.items()}


def mean_loss(losses):
    """This replica's part of the mean over the whole batch."""
    return losses.sum() / context().all_reduce("sum", losses.shape[0])


def nnx_step(model, optimizer, batch):
    def loss_fn(model):
        return mean_loss(losses_of(model(batch["image"]), batch["label"]))

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    grads, loss = context().all_reduce("sum", (grads, loss))
    optimizer.update(model, grads)
    return loss


def nnx_trained(strategy, lengths, num_steps=20):
    with strategy.scope():
        model = MLP(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    losses = [
        float(strategy.run(nnx_step, (model, optimizer, split(WHOLE[i % 3], lengths))))
        for i in range(num_steps)
    ]
    strategy.check_mirrored(model)
    return losses, nnx.to_pure_dict(nnx.state(model))


@pytest.fixture(scope="module")
def one_device():
    """Trains one device on the whole batches."""
    return nnx_trained(cpu_strategy(1), (8,))


@pytest.mark.nightly
@rows("layout", ["on the host", "two on each"])
def test_nnx_trains_as_one_device_on_the_whole_batch(layout, made, one_device):
    losses, weights = nnx_trained(made(layout, 4), RAGGED)
    wanted_losses, wanted = one_device
    np.testing.assert_allclose(losses, wanted_losses, 2e-5)
    for mine, other in zip(jax.tree.leaves(weights), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, 1e-4, 1e-5)


def linen_trained(strategy, lengths):
    model = LinenMLP()

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return mean_loss(losses_of(logits, batch["label"]))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        grads, loss = context().all_reduce("sum", (grads, loss))
        return mirror.ensure_mirrored(state.apply_gradients(grads=grads)), loss

    with strategy.scope():
        params = model.init(jax.random.key(0), jnp.zeros((1, 12)))["params"]
        tx = optax.sgd(0.1)
        state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for i in range(20):
        state, loss = strategy.run(step, (state, split(WHOLE[i % 3], lengths)), donate_argnums=0)
    return float(loss), state.params


@pytest.mark.nightly
def test_linen_trains_as_one_device_on_the_whole_batch(made):
    loss, params = linen_trained(made("one each", 4), RAGGED)
    wanted_loss, wanted = linen_trained(cpu_strategy(1), (8,))
    np.testing.assert_allclose(loss, wanted_loss, 2e-5)
    for mine, other in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, 1e-4, 1e-5)


@pytest.mark.slow
def test_lengths_may_change_between_steps(two):
    """The last batch of an epoch is shorter; equal batches in between run as usual."""
    with two.scope():
        model = MLP(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    twin = MLP(nnx.Rngs(0))
    alone = nnx.Optimizer(twin, optax.sgd(0.1), wrt=nnx.Param)
    one = cpu_strategy(1)
    batch = WHOLE[0]
    for sizes in [(4, 4), (4, 0), (4, 4)]:
        part = {name: leaf[: sum(sizes)] for name, leaf in batch.items()}
        loss = two.run(nnx_step, (model, optimizer, split(part, sizes)))
        wanted = one.run(nnx_step, (twin, alone, split(part, (sum(sizes),))))
        np.testing.assert_allclose(float(loss), float(wanted), 1e-5)


def test_batch_statistics_are_averaged(two):
    """Each replica normalizes its own rows; the running statistics are the replicas' mean."""
    batch = WHOLE[0]["image"]

    def step(model, x):
        return model(x)

    with two.scope():
        model = LocalBatchNorm(nnx.Rngs(0))
    two.run(step, (model, split({"x": batch}, (6, 2))["x"]))
    hidden = [rows @ np.asarray(model.first.kernel[...]) for rows in (batch[:6], batch[6:])]
    mean, var = (np.mean([f(rows, axis=0) for rows in hidden], axis=0) for f in (np.mean, np.var))
    np.testing.assert_allclose(model.norm.mean[...], 0.01 * mean, 1e-4, 1e-6)
    np.testing.assert_allclose(model.norm.var[...], 0.99 + 0.01 * var, 1e-4)
    two.check_mirrored(model)


@pytest.mark.slow
def test_verify_joins_ragged_batches(two):
    with two.scope():
        model = MLP(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    batch = split(WHOLE[0], (5, 3))
    report = two.verify(nnx_step, (model, optimizer, batch))
    assert report.largest < 1e-5
    assert "model.first.kernel" in str(report)

    def mean_of_means(x):
        return context().all_reduce("mean", x.mean())

    with raises(mirror.VerifyError, names=["result", "rtol"], values=[2, "1e-05"]):
        two.verify(mean_of_means, (batch["image"],))
    rows = two.verify(lambda x: x.sum(axis=1), (batch["image"],)).rows
    assert [row.compared for row in rows] == [True]


def test_one_replica_and_equal_lengths_are_not_staged(caplog):
    with caplog.at_level(logging.INFO, "mirror"):
        one = cpu_strategy(1)
        value = PerReplica([np.ones(3, np.float32)])
        np.testing.assert_array_equal(one.run(lambda x: context().all_gather(x), (value,)), 1)
        rows = [jax.device_put(np.ones(2, np.float32), CPUS[7]) for _ in range(2)]
        cpu_strategy(2).run(lambda x: x, (PerReplica(rows),))
    assert "StagedJaxpr" not in caplog.text


def test_buffers_of_unequal_values_are_kept(two):
    """Donating them frees nothing, as other stages may read them; they stay usable."""
    value = two.run(lambda x: x, (one_and_two(),))
    doubled = two.run(lambda x: x * 2, (value,), donate_argnums=0)
    for mine, half in zip(doubled.values, value.values, strict=True):
        np.testing.assert_array_equal(mine, np.asarray(half) * 2)
