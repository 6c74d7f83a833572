"""Replica and cross-replica contexts, `run`, and replica contexts, compared with TensorFlow."""

import collections
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mirror
from tests.support.contexts import standing
from tests.support.messages import raises
from tests.support.steps import context, nothing, number, replica_id
from tests.support.strategies import EXECUTORS, LAYOUTS, cpu_strategy
from tests.support.tables import Made, rows
from tests.support.variables import copies, on_read, variable

# The stack of scopes


@rows("pair", Made(EXECUTORS))
def test_context_functions_follow_scope_and_replica(pair):
    seen, other = [], cpu_strategy(2)
    with pair.scope() as entered, pair.scope():
        assert entered is pair
        assert standing() == (pair, True, True, False)
        assert pair.run(lambda: seen.append(standing())) is None
        assert standing() == (pair, True, True, False)
        with raises(RuntimeError, values=[other, pair], fix=".scope"):
            other.scope().__enter__()
        assert standing() == (pair, True, True, False)
    with pytest.raises(KeyError), pair.scope():
        raise KeyError
    assert not mirror.has_strategy()
    assert set(seen) == {(pair, True, False, True)}


def test_run_and_reduce_enter_the_scope(two):
    values = two.run(number)
    with two.scope():
        assert two.reduce("sum", two.run(number)) == 3
    assert two.reduce("sum", values) == 3
    with cpu_strategy(3).scope() as other:
        with raises(RuntimeError, values=[two, other], fix=".run"):
            two.run(number)
        with raises(RuntimeError, values=[two, other], fix=".reduce"):
            two.reduce("sum", values)


def test_variable_is_usable_in_the_scope_of_another_strategy(two):
    """It can be read and assigned; arrays of two strategies do not mix, which is JAX's error."""
    with two.scope():
        v = variable(1.0, "sum")
    other = cpu_strategy(3)
    with other.scope():
        w = variable(5.0)
        assert np.asarray(v) == 1
        v.assign(2.0)
        with pytest.raises(ValueError, match="incompatible devices"):
            v + w
    assert v.devices() == set(two.devices)
    assert v.assign_add(w) == 7
    assert v.devices() == set(two.devices)


def test_default_strategy_runs_steps_and_collectives(two):
    default = mirror.get_strategy()
    x = default.run(number)
    assert isinstance(x, mirror.PerReplica)
    assert default.reduce("sum", x) == 1
    assert default.reduce("mean", np.float32([1, 2]), axis=0) == 1.5
    assert default.local_results(5) == (5,)
    assert default.run(lambda: context().all_reduce("sum", 3.0)) == 3
    np.testing.assert_array_equal(default.run(lambda: context().all_gather(jnp.ones(2))), [1, 1])
    for outer, inner in ((two, default), (default, two)):
        with outer.scope(), raises(RuntimeError, values=[inner, outer], fix=".scope"):
            inner.scope().__enter__()
    assert default.devices == (jax.devices()[0],)


# run


def test_step_runs_once_per_replica_on_its_device(eight):
    ids = eight.run(replica_id)
    np.testing.assert_array_equal(ids, range(8))
    assert [next(iter(x.devices())) for x in ids.values] == list(eight.devices)


@rows("pair", Made(EXECUTORS))
def test_results_of_several_threads_do_not_mix(pair):
    found = {}

    def step(x):
        return context().all_reduce("sum", x * number())

    def work(i):
        found[i] = [float(pair.run(step, (jnp.float32(i),))) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert found == {i: [3.0 * i] * 5 for i in range(4)}


@rows("args", [{"x": 1}, None, 3, mirror.PerReplica([1.0, 2.0])])
def test_args_must_be_a_tuple_or_list(two, args):
    shown, fix = [repr(args), type(args).__name__], "strategy.run(<lambda>, (x,))"
    with raises(TypeError, names="args", values=shown, fix=fix):
        two.run(lambda *x: x, args)


def test_kwargs_must_be_a_dict(two):
    with raises(TypeError, names="kwargs", values=[3, "int"], fix="dict"):
        two.run(lambda: 1, (), 3)
    assert two.run(lambda x: x + 1, [1], None) == 2


@rows("pair", Made(EXECUTORS))
def test_replicas_get_separate_containers(pair):
    x = mirror.PerReplica([1.0, 2.0])
    v, calls = variable(3.0), []
    given = {"x": [x, (x, 10.0)], "none": None, "name": "a", "v": v}

    def step(tree, *, scale):
        calls.append(0)
        assert (tree["none"], tree["name"]) == (None, "a")
        assert isinstance(tree["v"], mirror.Variable)
        tree["x"] = tree["x"][0] + tree["x"][1][0] + tree["x"][1][1] + tree["v"]
        return tree.pop("x") * scale

    for _ in range(3):
        np.testing.assert_array_equal(pair.run(step, (given,), {"scale": 2.0}), [30, 34])
    assert set(given) == {"x", "none", "name", "v"}
    assert len(calls) <= 2  # calls per trace: proof, compilation


Pair = collections.namedtuple("Pair", "first second")


@rows("pair", Made(EXECUTORS))
def test_results_keep_their_structure_and_mirrored_ones_are_plain(pair):
    """mirror proves equality; TensorFlow compares identities, and does not merge equal values."""
    result = pair.run(lambda: {"a": [1, (number(), None)], "b": Pair(jnp.ones(2), []), "c": {}})
    assert isinstance(result["b"], Pair)
    assert (result["b"].second, result["c"], result["a"][1][1]) == ([], {}, None)
    assert isinstance(result["a"][1][0], mirror.PerReplica)
    for plain in (result["a"][0], result["b"].first):
        assert isinstance(plain, jax.Array)
    with raises(TypeError, names=["<lambda>", "result['s']"], values=["'abc'", "str"]):
        pair.run(lambda: {"s": "abc"})


def test_variable_as_a_result_is_rejected(two):
    v = variable(1.0)
    for args, step in (((), lambda: {"v": v}), ((v,), lambda v: {"v": v})):
        with raises(TypeError, names=["<lambda>", "Variable", "result['v']"]):
            two.run(step, args)


def test_one_replica_has_the_same_types():
    """TensorFlow returns bare values then."""
    one = cpu_strategy(1)
    x = one.run(number)
    assert isinstance(x, mirror.PerReplica)
    np.testing.assert_array_equal(one.run(lambda x: x + 1, (x,)), [2])


@rows("count", [1, 3])
def test_values_of_another_number_of_replicas_are_rejected(two, count):
    """TensorFlow ignores superfluous values."""
    with raises(ValueError, names="x", values=[count, 2], fix="distribute_dataset"):
        two.run(lambda x: x, (mirror.PerReplica([1.0] * count),))


@rows("pair", Made(EXECUTORS))
def test_step_error_is_raised_unchanged(pair):
    class MineError(Exception):
        pass

    def step(fails):
        if fails:
            raise MineError("in the step")
        return number()

    with pytest.raises(MineError, match="in the step"):
        pair.run(step, (True,))
    np.testing.assert_array_equal(pair.run(step, (False,)), [1, 2])


def test_step_is_traced_once_per_static_value(two):
    calls = []

    def step(x, times):
        calls.append(times)
        return x * len(times)

    for times in ("ab", "abc", "ab", "abc"):
        assert two.run(step, (2.0, times)) == 2 * len(times)
    assert calls.count("ab") == calls.count("abc") <= 2
    found = len(calls)
    two.run(step, (3.0, "ab"))  # a number is an array
    assert len(calls) == found


def test_arithmetic_on_per_replica_results_is_rejected_outside(two):
    x = two.run(number)
    for use in (lambda: x + 1, lambda: float(x), lambda: x[0], lambda: len(x), lambda: bool(x)):
        with raises(TypeError, fix=["x.values", "strategy.run"]):
            use()
    with pytest.raises(TypeError):
        jnp.add(x, 1)


@rows("pair", Made(EXECUTORS))
def test_mirrored_results_are_plain_arrays(pair):
    x = pair.run(lambda: context().all_reduce("sum", number()))
    assert isinstance(x, jax.Array)
    assert (float(x + 1), float(jnp.sqrt(x * 3)), float(np.asarray(x))) == (4, 3, 3)


@pytest.mark.slow
@rows("pair", Made(EXECUTORS))
def test_random_values_differ_by_folded_key_and_rngs(pair):
    """TensorFlow's generators differ per replica; a JAX key is the same until it is folded."""
    rngs = nnx.Rngs(0)

    def step(key, rngs):
        draw = jax.random.uniform
        return draw(key), draw(context().fold_in(key)), draw(rngs.dropout())

    same, folded, own = pair.run(step, (jax.random.key(0), rngs))
    assert isinstance(same, jax.Array)
    for drawn in (folded, own):
        assert len(set(np.asarray(drawn).tolist())) == 2
    assert rngs.dropout.count[...] == 1
    pair.check_mirrored(rngs)
    again = pair.run(step, (jax.random.key(0), rngs))
    assert set(np.asarray(again[2]).tolist()).isdisjoint(np.asarray(own).tolist())


@rows("pair", Made(EXECUTORS))
def test_captured_variable_is_mirrored_and_a_flax_one_rejected(pair):
    """TensorFlow shares it: two replicas add one after the other."""
    v, plain = variable(1.0, "sum"), nnx.Variable(jnp.float32(1))
    pair.run(lambda: nothing(v.assign_add(1.0)))
    assert copies(pair, v) == [3, 3]
    with raises(ValueError, names=["<lambda>", "plain"], fix="strategy.run"):
        pair.run(lambda: plain[...] + 1)


def test_log_is_written_by_one_replica(two):
    """Not with several replicas per device, where both branches are executed."""
    said = []

    def step():
        say = lambda: jax.debug.callback(lambda x: said.append(float(x)), number())  # noqa: E731
        jax.lax.cond(replica_id() == 0, say, lambda: None)

    two.run(step)
    jax.effects_barrier()
    assert said == [1]


# The replica context


@rows("pair", Made(EXECUTORS))
def test_collectives_support_trees_dtypes_and_gradients(pair):
    tree = {"a": [jnp.arange(3), jnp.float16(2)], "b": (jnp.ones((2, 2)), True, 1j, np.uint8(3))}

    def step():
        total = context().all_reduce("sum", jax.tree.map(lambda x: x * number().astype(int), tree))
        mean = context().all_reduce("mean", {"x": number()})["x"]

        def loss(x):
            y = context().all_reduce("sum", {"x": x * x, "n": 1})["x"] * number()
            z = context().all_gather(x[None]) @ jnp.asarray([1.0, 10.0])
            return y + z

        return total, mean, jax.grad(loss)(number() + 1)

    total, mean, slope = pair.run(step)
    wanted = jax.tree.map(lambda x: 3 * x, tree)
    jax.tree.map(np.testing.assert_array_equal, total, wanted)
    assert total["a"][1].dtype == jnp.float16
    assert mean == 1.5
    np.testing.assert_array_equal(slope, [2 * 2 * 3 + 2, 2 * 3 * 3 + 20])


USES_OF_THE_AXIS = {
    "all_reduce": lambda row: context().all_reduce("sum", row),
    "all_gather": lambda row: context().all_gather(row),
    "replica_id": lambda row: row + replica_id(),
    "fold_in": lambda row: row + jax.random.normal(context().fold_in(jax.random.key(0))),
}


def of_rows(x, use, axis):
    return jax.vmap(use, axis_name=axis)(x)


@rows("name", list(USES_OF_THE_AXIS))
def test_axis_that_hides_the_replicas_is_rejected(two, name):
    """The rows of one replica would be reduced."""
    use = USES_OF_THE_AXIS[name]
    x = jnp.ones((3, 2))
    names = [f"'{mirror.REPLICA_AXIS}'", "jax.vmap"]
    with raises(ValueError, names=names, values=["2 replicas", 3], fix="axis_name='rows'"):
        two.run(of_rows, (x, use, mirror.REPLICA_AXIS))
    two.run(of_rows, (mirror.PerReplica([x, x]), use, "rows"))


@rows("pair", Made(EXECUTORS))
def test_collectives_work_in_uniform_loops_and_branches(pair):
    v = variable(2.0, "sum")

    def step(times, flag):
        reduce = context().all_reduce
        total, rows = jax.lax.scan(
            lambda c, x: (reduce("sum", c * 0 + x * number()), reduce("mean", x * number())),
            0.0,
            jnp.arange(3.0),
        )
        branch = jax.lax.cond(flag, lambda: reduce("sum", number()), lambda: 0.0)
        loop = jax.lax.fori_loop(0, times, lambda _, c: reduce("mean", c + number()), 0.0)
        v.assign_add(branch)
        return total, rows, branch, loop

    total, rows, branch, loop = pair.run(step, (3, jnp.asarray(True)))
    assert (float(total), float(branch), float(loop), float(v)) == (6, 3, 4.5, 8)
    np.testing.assert_array_equal(rows, [0, 1.5, 3])

    def divided():
        return jax.lax.cond(replica_id() == 0, lambda: context().all_reduce("sum", 1.0), float)

    with raises(mirror.ReplicaDivergenceError, fix='all_reduce("max", predicate)'):
        pair.run(divided)


def test_fold_in_gives_different_keys_and_keeps_the_original(eight):
    key = jax.random.key(3)
    folded = eight.run(lambda key: jax.random.key_data(context().fold_in(key)), (key,))
    assert len(np.unique(np.asarray(folded), axis=0)) == 8
    for i, row in enumerate(np.asarray(folded)):
        np.testing.assert_array_equal(row, jax.random.key_data(jax.random.fold_in(key, i)))


# Keys for examples


def noise(key, x):
    keys = mirror.example_keys(key, {"x": x, "y": x[:, 0]})
    return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)


@pytest.mark.slow
@rows("name", ["1", "3", "2-on-2", "3-on-1"])
def test_example_keys_equal_those_of_the_global_batch(name):
    num_devices, replicas_per_device = LAYOUTS[name]
    strategy = cpu_strategy(num_devices, replicas_per_device=replicas_per_device)
    key, x = jax.random.key(0), np.zeros((24, 2), np.float32)
    (rows,) = strategy.distribute_dataset([x])
    np.testing.assert_array_equal(
        np.concatenate(strategy.run(noise, (key, rows)).values), noise(key, x)
    )


@rows(
    "batch, shown",
    [({}, [None]), (1.0, [()]), ([np.ones(2), np.ones(3)], [(2,), (3,)])],
)
def test_example_keys_require_one_batch_axis(batch, shown):
    with raises(ValueError, values=shown, fix="example_keys"):
        mirror.example_keys(jax.random.key(0), batch)


@rows("impl", ["rbg", "unsafe_rbg"])
def test_keys_whose_numbers_depend_on_other_keys_are_no_example_keys(impl, two):
    """One device samples otherwise: `jax.vmap` samples with the first one."""
    key = jax.random.key(0, impl=impl)
    fix = "jax.random.key(0, impl='threefry2x32')"
    with raises(ValueError, names="example_keys", values=f"'{impl}'", fix=fix):
        mirror.example_keys(key, np.ones(2))

    def sampled(keys):
        numbers = jax.vmap(lambda key: jax.random.uniform(key))(keys)
        return mirror.all_reduce("sum", numbers.sum())

    for each, verdict in ((jax.random.key(0), "equal"), (key, "different")):
        keys = jax.random.split(each, 4)
        (batch,) = two.distribute_dataset([keys])
        assert two.inspect(sampled, (batch,)).equals_one_device.verdict == verdict


# Per-replica values from a function


@rows("pair", Made(EXECUTORS))
def test_values_from_a_function_are_placed_per_replica(pair):
    """Values are placed on the replicas' devices; TensorFlow leaves them where they are."""
    seen = []

    def make(value_context):
        seen.append(value_context)
        i = value_context.replica_id_in_sync_group
        return {"x": np.full(2, i, np.float32), "same": 7, "more": [jnp.float16(i)]}

    tree = pair.distribute_values_from_function(make)
    assert seen == [mirror.ValueContext(0, 2), mirror.ValueContext(1, 2)]
    assert isinstance(tree["x"], mirror.PerReplica)
    assert isinstance(tree["same"], mirror.PerReplica)
    local = pair.local_results(tree)
    assert [(x["same"], x["more"][0]) for x in local] == [(7, 0), (7, 1)]
    assert [next(iter(x["x"].devices())) for x in local] == list(pair.devices)
    np.testing.assert_array_equal(pair.run(lambda t: t["x"] + t["same"], (tree,)), [[7, 7], [8, 8]])


@rows("pair", Made(EXECUTORS))
def test_keys_from_a_function_differ(pair):
    keys = pair.distribute_values_from_function(
        lambda c: jax.random.key(c.replica_id_in_sync_group)
    )
    samples = pair.run(lambda key: jax.random.uniform(key, (3,)), (keys,))
    for i, sample in enumerate(pair.local_results(samples)):
        np.testing.assert_array_equal(sample, jax.random.uniform(jax.random.key(i), (3,)))


def test_values_from_a_function_may_have_unequal_lengths(two):
    ragged = two.distribute_values_from_function(lambda c: np.ones(c.replica_id_in_sync_group + 1))
    assert ragged.shapes == ((1,), (2,))
    assert [next(iter(x.devices())) for x in ragged.values] == list(two.devices)
    assert two.reduce("sum", ragged, axis=0) == 3
    one = cpu_strategy(1).distribute_values_from_function(lambda _: 1.0)
    assert isinstance(one, mirror.PerReplica)
    assert two.distribute_values_from_function(lambda _: None) is None


BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "structure": (
        lambda c: [1.0] * (c.replica_id_in_sync_group + 1),
        ValueError,
        [0, "PyTreeDef([*])", 1, "PyTreeDef([*, *])"],
    ),
    "dtype": (
        lambda c: [1, 1.0][c.replica_id_in_sync_group],
        ValueError,
        ["int64[]", "float64[]"],
    ),
    "axes": (
        lambda c: np.ones([2] * c.replica_id_in_sync_group),
        ValueError,
        ["float64[]", "float64[2]"],
    ),
    "string": (lambda c: "x", TypeError, ["'x'", "str"]),
}


@rows("make, kind, shown", BAD_VALUES)
def test_values_from_a_function_must_agree(two, make, kind, shown):
    with raises(kind, values=shown):
        two.distribute_values_from_function(make)


@rows("pair", Made(EXECUTORS))
def test_local_results_support_trees(pair):
    """A plain value is repeated per replica, in a tree or not; TensorFlow returns one."""
    x = pair.run(number)
    mirrored = pair.run(lambda: jnp.float32(5))
    found = pair.local_results({"x": x, "m": [mirrored], "s": "ab", "none": None})
    for i, tree in enumerate(found):
        assert (tree["x"], tree["m"][0], tree["s"], tree["none"]) == (i + 1, 5, "ab", None)
        assert tree["m"][0].devices() == {pair.devices[i]}
    assert pair.local_results(5) == (5, 5)
    assert pair.local_results([]) == ([], [])
    with raises(ValueError, names="PerReplica", values=[3, 2]):
        pair.local_results(mirror.PerReplica([1.0] * 3))
    with pair.scope():
        assert copies(pair, on_read("sum", 1)) == [1, 1]
