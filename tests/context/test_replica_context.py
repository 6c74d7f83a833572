"""Where the caller stands, `run`, and what a replica does: TensorFlow's promises, one by one."""

import collections
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mirror
from tests.conftest import cpu_strategy
from tests.support.messages import raises
from tests.variables.test_variables import (
    EXECUTORS,
    copies,
    nothing,
    number,
    on_read,
    replica_id,
    variable,
)


@pytest.fixture(params=EXECUTORS.values(), ids=EXECUTORS)
def each(request) -> mirror.MirroredStrategy:
    """Two replicas, by each executor."""
    return request.param()


def standing():
    """The strategy, in a scope or replica, in cross-replica context, in a replica."""
    in_replica = mirror.get_replica_context() is not None
    cross = mirror.in_cross_replica_context()
    return mirror.get_strategy(), mirror.has_strategy(), cross, in_replica


def context():
    return mirror.get_replica_context()


# The stack of scopes


def test_outside_every_scope():
    default, *where = standing()
    assert where == [False, False, True]
    assert default.num_replicas_in_sync == context().num_replicas_in_sync == 1
    assert mirror.get_strategy() is default
    assert context().replica_id_in_sync_group == 0


def test_in_a_scope_in_a_replica_and_after(each):
    seen, other = [], cpu_strategy(2)
    with each.scope() as entered, each.scope():
        assert entered is each
        assert standing() == (each, True, True, False)
        assert each.run(lambda: seen.append(standing())) is None
        assert standing() == (each, True, True, False)
        with raises(RuntimeError, values=[other, each], fix=".scope"):
            other.scope().__enter__()
        assert standing() == (each, True, True, False)
    with pytest.raises(KeyError), each.scope():
        raise KeyError
    assert not mirror.has_strategy()
    assert set(seen) == {(each, True, False, True)}


def test_a_scope_object_can_be_entered_again(two):
    """In TensorFlow it cannot, and the strategy stays installed."""
    scope = two.scope()
    for _ in range(2):
        with scope:
            assert mirror.get_strategy() is two
        assert not mirror.has_strategy()


def test_calls_that_concern_all_replicas_are_refused_in_a_replica(each):
    calls = {
        "scope": lambda s: s.scope().__enter__(),
        "run": lambda s: s.run(number),
        "reduce": lambda s: s.reduce("sum", 1.0),
        "gather": lambda s: s.gather(np.ones(1)),
        "distribute_values_from_function": lambda s: s.distribute_values_from_function(
            lambda _: 1.0
        ),
    }

    def step():
        for callee in (each, cpu_strategy(2)):
            for method, call in calls.items():
                with raises(RuntimeError, values=[each], fix=f".{method}"):
                    call(callee)

    each.run(step)
    assert not mirror.has_strategy()


def test_run_and_reduce_enter_the_scope_themselves(each):
    values = each.run(number)
    with each.scope():
        assert each.reduce("sum", each.run(number)) == 3
    assert each.reduce("sum", values) == 3
    with cpu_strategy(3).scope() as other:
        with raises(RuntimeError, values=[each, other], fix=".run"):
            each.run(number)
        with raises(RuntimeError, values=[each, other], fix=".reduce"):
            each.reduce("sum", values)


def test_each_thread_has_its_own_scopes(two):
    found = []
    with two.scope():
        thread = threading.Thread(target=lambda: found.append(mirror.has_strategy()))
        thread.start()
        thread.join(30)
    assert found == [False]


def test_a_variable_in_the_scope_of_another_strategy(two):
    """It is read and assigned as everywhere; arrays of two strategies do not mix, as JAX says."""
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


def test_the_default_strategy(two):
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


def test_a_step_runs_once_on_each_replica_in_order_on_its_device(eight):
    ids = eight.run(replica_id)
    np.testing.assert_array_equal(ids, range(8))
    assert [next(iter(x.devices())) for x in ids.values] == list(eight.devices)


def test_results_of_several_threads_do_not_mix(each):
    found = {}

    def step(x):
        return context().all_reduce("sum", x * number())

    def work(i):
        found[i] = [float(each.run(step, (jnp.float32(i),))) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: [3.0 * i] * 5 for i in range(4)}


@pytest.mark.parametrize("args", [{"x": 1}, None, 3, mirror.PerReplica([1.0, 2.0])], ids=repr)
def test_args_is_a_tuple_or_a_list(two, args):
    shown, fix = [repr(args), type(args).__name__], "strategy.run(step, (model, batch))"
    with raises(TypeError, names="args", values=shown, fix=fix):
        two.run(lambda *x: x, args)
    with raises(TypeError, names="kwargs", values=[3, "int"], fix="dict"):
        two.run(lambda: 1, (), 3)
    assert two.run(lambda x: x + 1, [1], None) == 2


def test_each_replica_gets_its_own_containers(each):
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
        np.testing.assert_array_equal(each.run(step, (given,), {"scale": 2.0}), [30, 34])
    assert set(given) == {"x", "none", "name", "v"}
    assert len(calls) <= 2  # as it is traced: proved, compiled


Pair = collections.namedtuple("Pair", "first second")


def test_results_keep_their_structure_and_what_is_equal_is_plain(each):
    """Proved, where TensorFlow compares identities: equal values of its replicas stay apart."""
    result = each.run(lambda: {"a": [1, (number(), None)], "b": Pair(jnp.ones(2), []), "c": {}})
    assert isinstance(result["b"], Pair)
    assert (result["b"].second, result["c"], result["a"][1][1]) == ([], {}, None)
    assert isinstance(result["a"][1][0], mirror.PerReplica)
    for plain in (result["a"][0], result["b"].first):
        assert isinstance(plain, jax.Array)
    with raises(TypeError, names=["<lambda>", "result['s']"], values=["'abc'", "str"]):
        each.run(lambda: {"s": "abc"})


def test_replicas_of_unequal_lengths_return_one_structure(two):
    x = mirror.PerReplica([np.ones(1, np.float32), np.ones(2, np.float32)])
    with raises(ValueError, names="<lambda>", values=[0, 1]):
        two.run(lambda x: [x.sum()] * x.shape[0], (x,))


def test_a_variable_is_no_result(each):
    v = variable(1.0)
    for args, step in (((), lambda: {"v": v}), ((v,), lambda v: {"v": v})):
        with raises(TypeError, names=["<lambda>", "Variable", "result['v']"]):
            each.run(step, args)


def test_one_replica_has_the_same_types():
    """TensorFlow returns bare values then."""
    one = cpu_strategy(1)
    x = one.run(number)
    assert isinstance(x, mirror.PerReplica)
    np.testing.assert_array_equal(one.run(lambda x: x + 1, (x,)), [2])


@pytest.mark.parametrize("count", [1, 3])
def test_values_of_another_number_of_replicas_are_refused(each, count):
    """TensorFlow ignores what is too many."""
    with raises(ValueError, names="x", values=[count, 2], fix="distribute_dataset"):
        each.run(lambda x: x, (mirror.PerReplica([1.0] * count),))


def test_an_error_of_the_step_is_its_own(each):
    class MineError(Exception):
        pass

    def step(fails):
        if fails:
            raise MineError("in the step")
        return number()

    with pytest.raises(MineError, match="in the step"):
        each.run(step, (True,))
    np.testing.assert_array_equal(each.run(step, (False,)), [1, 2])


def test_a_step_is_traced_once_for_each_static_value(each):
    calls = []

    def step(x, times):
        calls.append(times)
        return x * len(times)

    for times in ("ab", "abc", "ab", "abc"):
        assert each.run(step, (2.0, times)) == 2 * len(times)
    assert calls.count("ab") == calls.count("abc") <= 2
    found = len(calls)
    each.run(step, (3.0, "ab"))  # a number is an array
    assert len(calls) == found


def test_values_of_the_replicas_are_not_computed_with_outside(each):
    x = each.run(number)
    for use in (lambda: x + 1, lambda: float(x), lambda: x[0], lambda: len(x), lambda: bool(x)):
        with raises(TypeError, fix=["strategy.reduce", "x.values", "strategy.run"]):
            use()
    with pytest.raises(TypeError):
        jnp.add(x, 1)


def test_mirrored_results_are_plain_arrays(each):
    x = each.run(lambda: context().all_reduce("sum", number()))
    assert isinstance(x, jax.Array)
    assert (float(x + 1), float(jnp.sqrt(x * 3)), float(np.asarray(x))) == (4, 3, 3)


def test_randomness_differs_by_a_folded_key_and_by_rngs(each):
    """TensorFlow's generators differ by themselves; a JAX key is the same until it is folded."""
    rngs = nnx.Rngs(0)

    def step(key, rngs):
        draw = jax.random.uniform
        return draw(key), draw(context().fold_in(key)), draw(rngs.dropout())

    same, folded, own = each.run(step, (jax.random.key(0), rngs))
    assert isinstance(same, jax.Array)
    for drawn in (folded, own):
        assert len(set(np.asarray(drawn).tolist())) == 2
    assert rngs.dropout.count[...] == 1
    each.check_mirrored(rngs)
    again = each.run(step, (jax.random.key(0), rngs))
    assert set(np.asarray(again[2]).tolist()).isdisjoint(np.asarray(own).tolist())


def test_a_variable_from_outside_is_mirrored_and_one_of_flax_refused(each):
    """TensorFlow shares it: two replicas add one after the other."""
    v, plain = variable(1.0, "sum"), nnx.Variable(jnp.float32(1))
    each.run(lambda: nothing(v.assign_add(1.0)))
    assert copies(each, v) == [3, 3]
    with raises(ValueError, names=["<lambda>", "plain"], fix="strategy.run"):
        each.run(lambda: plain[...] + 1)


def test_what_is_written_to_a_log_is_written_by_one_replica(two):
    """Not with several replicas on a device, where a branch is both ways taken."""
    said = []

    def step():
        say = lambda: jax.debug.callback(lambda x: said.append(float(x)), number())  # noqa: E731
        jax.lax.cond(replica_id() == 0, say, lambda: None)

    two.run(step)
    jax.effects_barrier()
    assert said == [1]


# The replica context


def test_what_a_replica_knows(each):
    def step():
        number = context().replica_id_in_sync_group
        assert isinstance(number, jax.core.Tracer)
        assert (number.dtype, number.shape) == (jnp.int32, ())
        assert context().num_replicas_in_sync == 2
        assert context().strategy is each
        assert context().devices == each.devices
        return number

    np.testing.assert_array_equal(each.run(step), [0, 1])


def test_a_context_ends_with_its_step(each):
    kept = []
    each.run(lambda: kept.append(context()))
    uses = [lambda c: c.all_reduce("sum", 1.0), lambda c: c.strategy, lambda c: c.devices]
    wanted = {"names": "ReplicaContext", "fix": "mirror.get_replica_context()"}
    for use in uses:
        with raises(RuntimeError, **wanted):
            use(kept[0])
        with raises(RuntimeError, **wanted):
            each.run(lambda use=use: use(kept[0]))


def test_collectives_of_trees_of_any_dtypes_and_their_gradients(each):
    tree = {"a": [jnp.arange(3), jnp.float16(2)], "b": (jnp.ones((2, 2)), True, 1j, np.uint8(3))}

    def step():
        total = context().all_reduce("sum", jax.tree.map(lambda x: x * number().astype(int), tree))
        mean = context().all_reduce("mean", {"x": number()})["x"]

        def loss(x):
            y = context().all_reduce("sum", {"x": x * x, "n": 1})["x"] * number()
            z = context().all_gather(x[None]) @ jnp.asarray([1.0, 10.0])
            return y + z

        return total, mean, jax.grad(loss)(number() + 1)

    total, mean, slope = each.run(step)
    wanted = jax.tree.map(lambda x: 3 * x, tree)
    jax.tree.map(np.testing.assert_array_equal, total, wanted)
    assert total["a"][1].dtype == jnp.float16
    assert mean == 1.5
    np.testing.assert_array_equal(slope, [2 * 2 * 3 + 2, 2 * 3 * 3 + 20])


def test_collectives_in_loops_and_branches_that_all_replicas_take(each):
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

    total, rows, branch, loop = each.run(step, (3, jnp.asarray(True)))
    assert (float(total), float(branch), float(loop), float(v)) == (6, 3, 4.5, 8)
    np.testing.assert_array_equal(rows, [0, 1.5, 3])

    def divided():
        return jax.lax.cond(replica_id() == 0, lambda: context().all_reduce("sum", 1.0), float)

    with raises(mirror.ReplicaDivergenceError, fix='all_reduce("max", condition)'):
        each.run(divided)


def test_keys_that_are_folded_differ_and_the_key_stays(eight):
    key = jax.random.key(3)
    folded = eight.run(lambda key: jax.random.key_data(context().fold_in(key)), (key,))
    assert len(np.unique(np.asarray(folded), axis=0)) == 8
    for i, row in enumerate(np.asarray(folded)):
        np.testing.assert_array_equal(row, jax.random.key_data(jax.random.fold_in(key, i)))


# Keys for examples


def noise(key, x):
    keys = mirror.example_keys(key, {"x": x, "y": x[:, 0]})
    return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)


def test_example_keys_are_those_of_the_global_batch(strategy):
    key, x = jax.random.key(0), np.zeros((24, 2), np.float32)
    (rows,) = strategy.distribute_dataset([x])
    np.testing.assert_array_equal(
        np.concatenate(strategy.run(noise, (key, rows)).values), noise(key, x)
    )


def test_example_keys_of_batches_of_unequal_lengths(two):
    key = jax.random.key(0)
    rows = mirror.PerReplica([np.zeros((n, 2), np.float32) for n in (1, 3)])
    got = two.run(noise, (key, rows))
    np.testing.assert_array_equal(np.concatenate(got.values), noise(key, np.zeros((4, 2))))


@pytest.mark.parametrize(
    ("batch", "shown"),
    [({}, [None]), (1.0, [()]), ([np.ones(2), np.ones(3)], [(2,), (3,)])],
    ids=["nothing", "scalar", "unequal"],
)
def test_example_keys_need_one_batch_axis(batch, shown):
    with raises(ValueError, values=shown, fix="example_keys"):
        mirror.example_keys(jax.random.key(0), batch)


# Values made for each replica


def test_values_from_a_function(each):
    """They lie on the replicas' devices, where TensorFlow leaves them."""
    seen = []

    def make(value_context):
        seen.append(value_context)
        i = value_context.replica_id_in_sync_group
        return {"x": np.full(2, i, np.float32), "same": 7, "more": [jnp.float16(i)]}

    tree = each.distribute_values_from_function(make)
    assert seen == [mirror.ValueContext(0, 2), mirror.ValueContext(1, 2)]
    assert isinstance(tree["x"], mirror.PerReplica)
    assert isinstance(tree["same"], mirror.PerReplica)
    local = each.local_results(tree)
    assert [(x["same"], x["more"][0]) for x in local] == [(7, 0), (7, 1)]
    assert [next(iter(x["x"].devices())) for x in local] == list(each.devices)
    np.testing.assert_array_equal(each.run(lambda t: t["x"] + t["same"], (tree,)), [[7, 7], [8, 8]])


def test_values_from_a_function_of_unequal_lengths_and_of_one_replica(two):
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


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_from_a_function_that_do_not_fit_are_refused(two, name):
    make, kind, shown = BAD_VALUES[name]
    with raises(kind, values=shown):
        two.distribute_values_from_function(make)


def test_local_results_of_trees(each):
    """A plain value counts once for each replica, in a tree or not; TensorFlow gives one."""
    x = each.run(number)
    mirrored = each.run(lambda: jnp.float32(5))
    found = each.local_results({"x": x, "m": [mirrored], "s": "ab", "none": None})
    for i, tree in enumerate(found):
        assert (tree["x"], tree["m"][0], tree["s"], tree["none"]) == (i + 1, 5, "ab", None)
        assert tree["m"][0].devices() == {each.devices[i]}
    assert each.local_results(5) == (5, 5)
    assert each.local_results([]) == ([], [])
    with raises(ValueError, names="PerReplica", values=[3, 2]):
        each.local_results(mirror.PerReplica([1.0] * 3))
    with each.scope():
        assert copies(each, on_read("sum", 1)) == [1, 1]
