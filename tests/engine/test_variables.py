"""`mirror.Variable`, compared with `tf.Variable` under MirroredStrategy."""

import contextlib
import copy
import functools
import itertools
import pickle
import threading
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.messages import raises
from tests.support.steps import nothing, number, replica_id
from tests.support.strategies import cpu_strategy, each_executor
from tests.support.tables import mostly_nightly, rows
from tests.support.variables import copies, on_read, set_copies, variable

AGGREGATIONS = ["none", "sum", "mean", "only_first_replica"]


def plus_one(v):
    return v + 1


# Mirrored variables


def test_variable_is_a_flax_variable_with_one_copy_per_device(two):
    with two.scope():
        v = variable(1.0)
    assert isinstance(v, nnx.Variable)
    assert not isinstance(v[...], mirror.PerReplica)
    local = two.local_results(v)
    assert [next(iter(x.devices())) for x in local] == list(two.devices)
    assert list(map(float, local)) == [1, 1]


def test_variable_has_name_trainable_dtype_and_shape():
    """The name is as it was given, without TensorFlow's `:0`."""
    v = variable(1.0, name="foo")
    assert (v.name, v.trainable, v.dtype, v.shape) == ("foo", True, jnp.float32, ())
    assert variable(1).dtype == jnp.int32
    assert variable(1, dtype=jnp.float16).dtype == jnp.float16
    assert variable(np.ones((2, 3), np.int8)).shape == (2, 3)
    assert not variable(1.0, trainable=False).trainable
    assert variable(1.0).name is None
    with pytest.raises(AttributeError, match="Cannot set attribute name"):
        v.name = "bar"
    with raises(ValueError, names="'foo'", values="None (NoneType)"):
        variable(None, name="foo")
    with raises(ValueError, names="'bar'", values="'x' (str)"):
        variable("x", name="bar")
    with raises(TypeError, names=["Variable", "caching_device"]):
        variable(1.0, caching_device="CPU:0")


def test_initial_number_is_not_weakly_typed(two):
    """The first assignment would remove the weak type, and the second step would recompile."""
    v, traces = variable(1.0, "sum"), []
    assert not v[...].weak_type
    assert (v * jnp.float16(1)).dtype == jnp.float32

    def step():
        traces.append(0)
        v.assign_add(1.0)

    two.run(step)
    found = len(traces)
    assert found <= 3  # to find the variable, to prove, to compile
    for _ in range(3):
        two.run(step)
    assert len(traces) == found
    assert v == 9


def test_initial_value_is_created_once_and_copied(eight):
    made = []

    def initial():
        made.append(0)
        return jax.random.normal(jax.random.key(len(made)), (3,))

    with eight.scope():
        v, r = variable(initial), on_read("mean", initial)
    assert len(made) == 2
    for made_once in (v, r):
        assert len({tuple(x) for x in copies(eight, made_once)}) == 1
    eight.check_mirrored(v)
    assert variable(v).dtype == v.dtype
    np.testing.assert_array_equal(variable(v), v)


def test_variable_checks_synchronization_and_aggregation():
    assert variable(1.0).synchronization == "on_write"
    assert variable(1.0, synchronization="ON_READ", aggregation="SUM").is_on_read
    assert variable(1.0, aggregation=None).aggregation == "none"
    known = ["'auto'", "'on_write'", "'on_read'"]
    with raises(ValueError, names=["synchronization", "'v'"], values="'none'", fix=known):
        variable(1.0, name="v", synchronization="none")
    known = [repr(aggregation) for aggregation in AGGREGATIONS]
    with raises(ValueError, names=["aggregation", "'v'"], values="'max'", fix=known):
        variable(1.0, "max", name="v")
    with raises(ValueError, names="aggregation", values=3, fix=known):
        variable(1.0, 3)


@pytest.mark.parametrize("make", [variable, on_read], ids=["on_write", "on_read"])
def test_mean_of_integers_is_rejected(make):
    names = ["aggregation", "'v'"]
    for value, dtype in ((1, "int32"), (True, "bool")):
        with raises(ValueError, names=names, values=["'mean'", dtype], fix="dtype='float32'"):
            make(value=value, aggregation="mean", name="v")
    with raises(ValueError, names=names, values=["'sum'", "bool"], fix="'int32'"):
        make(value=True, aggregation="sum", name="v")


@rows("pair", each_executor)
def test_variable_must_be_created_outside_a_step(pair):
    """TensorFlow creates it in the first replica and copies it to the others."""
    with raises(RuntimeError, names=["'made'", "MirroredStrategy"]):
        pair.run(lambda: variable(1.0, name="made")[...])
    assert not mirror.has_strategy()


@rows("pair", each_executor)
def test_variable_reads_as_one_value(pair):
    with pair.scope():
        v = variable([1.0, 2.0])
        inside = v + 1
    for read in (v[...], v.get_value(), np.asarray(v), jnp.asarray(v), inside - 1, v.copy()[...]):
        np.testing.assert_array_equal(read, [1, 2])
    in_step = pair.run(lambda: (v[...], v + number()))
    np.testing.assert_array_equal(in_step[0], [1, 2])
    np.testing.assert_array_equal(in_step[1], [[2, 3], [3, 4]])


OPERATORS = """
v + 2; 2 + v; v - 2; 2 - v; v * 2; v / 2; 7 // v; v // 2; v % 2; v ** 2; 2 ** v; v @ v; -v; abs(v);
v < 2; v <= 2; v > 2; v >= 2; v == 2; v != 2; v != v; v & 1; v | 4; v ^ 1; v << 1; ~v; v + v; v[0];
v[1:]; v.sum(); v.T; v.at[0].set(9); v.mean(); v.astype("float32"); v.copy()[...]; v.shape[0];
len(v); v.ndim; jnp.sum(v); jnp.dot(v, v); jnp.sin(v); jnp.where(v > 1, v, -v); jnp.stack([v, v]);
jnp.asarray(v); jax.nn.relu(v); jnp.stack(list(v)); copy.deepcopy(v)[...];
jax.tree.map(lambda x: 2 * x, v)[...]; jax.jit(lambda x: 2 * x[...])(v)"""


def test_operators_work_outside_and_inside_a_step(two):
    """In a step too, including functions of JAX that treat the variable as a tree."""
    expressions = [e.strip() for e in OPERATORS.split(";")]
    known = {"jnp": jnp, "jax": jax, "copy": copy}

    def evaluate(v):
        return [jnp.asarray(eval(e, {**known, "v": v})) for e in expressions]

    held = variable([0, 0, 0])
    step = lambda: evaluate(held)  # noqa: E731
    for value in (jnp.asarray([1, 2, 3]), jnp.asarray([4, 2, 1])):
        held.assign(value)
        found = zip(expressions, evaluate(value), evaluate(held), two.run(step), strict=True)
        for expression, wanted, eager, in_step in found:
            np.testing.assert_array_equal(eager, wanted, err_msg=expression)
            np.testing.assert_array_equal(in_step, wanted, err_msg=expression)


def test_variable_converts_to_numbers_and_truth():
    """`float`, `int` and `len` work; TensorFlow rejects them."""
    v, r = variable(2.5), on_read("sum", 3)
    assert (float(v), int(v), float(r), int(r), [0, 1, 2, 3][r]) == (2.5, 2, 3.0, 3, 3)
    assert v
    assert not variable(0.0)
    assert bool(r)
    assert list(variable([1, 2])) == [1, 2]
    assert 2 in variable([1, 2])
    with pytest.raises(TypeError, match="unhashable"):
        hash(v)
    with pytest.raises(ValueError, match="truth value of an array"):
        bool(variable([1, 2]))
    with pytest.raises(NotImplementedError, match=r"Use `variable\[\.\.\.\] \+= x`"):
        v += 1


@rows("aggregation", AGGREGATIONS)
def test_assign_outside_a_step_writes_all_copies(eight, aggregation):
    """And the variable is returned."""
    with eight.scope():
        v = variable(1.0, aggregation)
        assert v.assign_add(5.0) is v
    assert copies(eight, v) == [6.0] * 8
    assert v.assign_sub(jnp.float32(2)) is v
    assert copies(eight, v) == [4.0] * 8
    assert v.assign(np.float32(3)).assign_add(v) is v
    v[...] += 1
    assert copies(eight, v) == [7.0] * 8
    eight.check_mirrored(v)


def test_assign_outside_a_step_rejects_per_replica_values(two):
    """TensorFlow lets the copies diverge."""
    values = mirror.PerReplica([1.0, 2.0])
    for made in (variable(0.0, "sum", name="v"), on_read("sum", name="v")):
        for write in (made.assign, made.assign_add, made.set_value):
            with raises(
                mirror.ReplicaDivergenceError,
                names="'v'",
                values="PerReplica(1., 2.)",
                fix="strategy.reduce('mean', x)",
            ):
                write(values)
        assert made == 0


@rows("pair", each_executor)
def test_assign_without_aggregation_requires_a_mirrored_value(pair):
    """TensorFlow lets the copies diverge."""
    v = variable(7.0, name="mine")
    names = ["mine", "axis_index"]
    with raises(mirror.ReplicaDivergenceError, names=names, fix="all_reduce"):
        pair.run(lambda: v.assign(number())[...])
    assert v == 7
    pair.run(lambda: nothing(v.assign(mirror.all_reduce("sum", number()))))
    assert v == 3


#           aggregation           assign  assign_add  assign_sub
RESULTS = {
    "sum": (3.0, 13.0, 7.0),
    "mean": (1.5, 11.5, 8.5),
    "only_first_replica": (1.0, 11.0, 9.0),
}


@rows("pair", each_executor)
def test_assign_in_a_step_applies_the_aggregation(pair):
    table = {a: [variable(10.0, a) for _ in range(3)] for a in RESULTS}

    def step():
        for assigned, added, subtracted in table.values():
            assigned.assign(number())
            added.assign_add(number())
            subtracted.assign_sub(number())

    pair.run(step)
    for aggregation, variables in table.items():
        assert tuple(map(float, variables)) == RESULTS[aggregation]
        pair.check_mirrored(variables)


def test_assign_in_a_step_applies_the_aggregation_on_eight_replicas(eight):
    total, mean, first = (variable(1.0, a) for a in RESULTS)
    eight.run(lambda: nothing([v.assign_add(number()) for v in (total, mean, first)]))
    assert [float(v) for v in (total, mean, first)] == [37, 5.5, 2]


@rows("pair", each_executor)
def test_assigned_number_counts_once_per_replica(pair):
    """TensorFlow rejects it for a sum, and fails for 0."""
    numbers = (5.0, 0.0, np.float32(5))
    made = [(x, [variable(1.0, a) for a in AGGREGATIONS]) for x in numbers]
    pair.run(lambda: nothing([v.assign(x) for x, variables in made for v in variables]))
    for x, variables in made:
        assert [float(v) for v in variables] == [x, 2 * x, x, x]


@rows("pair", each_executor)
def test_step_reads_its_own_assignments(pair):
    total, mine = variable(1.0, "sum"), on_read("sum")

    def step():
        before = total[...]
        total.assign_add(number())
        returned = total.assign_add(number())[...]
        mine.assign_add(number())
        mine.assign_add(mine)
        total[...] *= 2
        return before, returned, total + 0, mine + 0

    before, returned, after, own = pair.run(step)
    assert (float(before), float(returned), float(after)) == (1, 7, 14)
    np.testing.assert_array_equal(own, [2, 4])
    assert total == 14
    assert mine == 6


def scanned(v):
    jax.lax.scan(lambda c, x: (c, v.assign_add(x)[...]), 0.0, jnp.arange(3.0))


def branched(v):
    jax.lax.cond(v[...] > 0, lambda: v.assign_add(1.0)[...], lambda: v[...])


def repeated(v):
    jax.lax.fori_loop(0, 3, lambda _, c: c + v.assign_add(1.0)[...], 0.0)


def jitted(v):
    jax.jit(lambda x: v.assign_add(x)[...])(1.0)


def graded(v):
    jax.grad(lambda x: x * v.assign_add(1.0)[...])(2.0)


def mapped(v):
    jax.vmap(lambda x: x + v.assign_add(1.0)[...])(jnp.arange(3.0))


def written(v):
    jax.jit(lambda x: v.set_value(v + x))(1.0)


@rows("inner", [scanned, branched, repeated, jitted, graded, mapped, written])
def test_assign_in_an_inner_transformation_is_rejected(two, inner):
    """It would be lost when the transformation ends: in a step, passed or captured, and outside."""
    for v in (variable(1.0, "sum", name="v"), on_read("sum", 1.0, name="v")):
        if inner is not branched:
            with raises(RuntimeError, names="'v'", fix="jax.jit"):
                inner(v)
        with raises(RuntimeError, names="'v'", fix="jax.jit"):
            two.run(inner, (v,))
        with raises(RuntimeError, names="'v'", fix="jax.jit"):
            two.run(lambda v=v: inner(v))
        assert v == 1


@rows("pair", each_executor)
def test_assign_accepts_results_of_an_inner_transformation(pair):
    v, seen = variable(2.0, "sum"), variable(0.0, "mean")

    def step():
        total, _ = jax.lax.scan(lambda c, x: (c + x * v, None), 0.0, jnp.arange(4.0))
        slope = jax.grad(lambda x: x * v[...] ** 2)(number())
        branch = jax.lax.cond(v[...] > 1, lambda: v[...], lambda: 0.0)
        mapped = jax.vmap(lambda x: x * v[...])(jnp.arange(2.0)).sum()
        jitted = jax.jit(lambda x: x + v[...])(1.0)
        seen.assign(total)
        v.assign_add(number())
        return total, slope, branch, mapped, jitted

    assert list(map(float, pair.run(step))) == [12, 4, 2, 2, 3]
    assert (float(v), float(seen)) == (5, 12)


BAD = {
    "shape": (np.ones(2, np.float32), ValueError, {"values": ["float32[2]", ()]}),
    "dtype": (
        jnp.int32(1),
        ValueError,
        {"values": ["int32[]", "float32"], "fix": "x.astype('float32')"},
    ),
    "complex": (
        1j,
        TypeError,
        {"values": ["1j (complex)", "float32"], "fix": "jnp.asarray(x).astype('float32')"},
    ),
    "string": ("x", TypeError, {"values": "'x' (str)"}),
    "none": (None, TypeError, {"values": "None (NoneType)"}),
}


@rows("name", list(BAD))
def test_assign_rejects_another_shape_or_dtype(two, name):
    value, kind, wanted = BAD[name]
    for v in (variable(1.0, "sum", name="v"), on_read("sum", 1.0, name="v")):
        for write in (v.assign, v.assign_add, v.assign_sub):
            with raises(kind, names="'v'", **wanted):
                write(value)
            with raises(kind, names="'v'", **wanted):
                two.run(lambda write=write: write(value)[...])
        assert v == 1


def test_assign_in_an_nnx_transformation_that_receives_the_variable(two):
    for make in (contextlib.nullcontext, two.scope):
        with make():
            model = nnx.Dict(count=variable(1.0))
        nnx.jit(lambda model: model.count.assign_add(2.0) is None)(model)
        assert model.count[...] == 3


def test_assign_converts_numbers():
    assert variable(1.0).assign(2) == 2
    assert variable(1).assign(True) == 1
    fix = "jnp.asarray(x).astype('int32')"
    with raises(TypeError, names="'n'", values=["2.5 (float)", "int32"], fix=fix):
        variable(1, name="n").assign(2.5)


@rows("pair", each_executor)
def test_assign_keeps_dtypes_and_exact_integers(pair):
    """A sum of complex numbers works everywhere; a sum of booleans is rejected at creation."""
    big = 2**30 - 1
    made = {
        (jnp.int32, "sum"): 3,
        (jnp.int32, "only_first_replica"): 1,
        (jnp.int8, "only_first_replica"): 1,
        (jnp.uint8, "only_first_replica"): 1,
        (jnp.bool_, "only_first_replica"): True,
        (jnp.float16, "mean"): 1.5,
        (jnp.bfloat16, "sum"): 3.0,
        (jnp.complex64, "sum"): 3j,
    }
    table = {key: variable(0, key[1], dtype=key[0]) for key in made}
    exact = variable(0, "sum")

    def step():
        for (dtype, _), v in table.items():
            value = number() * 1j if dtype is jnp.complex64 else number()
            v.assign(value.astype(dtype))
        exact.assign(big + replica_id())

    pair.run(step)
    for key, wanted in made.items():
        assert table[key].dtype == key[0]
        assert table[key] == wanted, key
    assert int(exact) == 2 * big + 1


@rows("pair", each_executor)
def test_item_assignment_writes_all_copies(pair):
    """TensorFlow's `v[0].assign` writes to one copy only; its scatter is `v.at[i].add` here."""
    with pair.scope():
        v = variable([1.0, 2.0, 3.0], "sum", name="v")
    v[0] = 9.0
    assert copies(pair, v) == [[9, 2, 3]] * 2

    def step():
        v[1] = 7.0
        rows = jnp.zeros_like(v[...]).at[replica_id()].add(number())
        v.assign_add(rows)

    pair.run(step)
    assert copies(pair, v) == [[10, 9, 3]] * 2

    def forgets():
        v[0] = number()

    with raises(
        mirror.ReplicaDivergenceError, names=["v", "axis_index"], fix=["all_reduce", "aggregation="]
    ):
        pair.run(forgets)
    assert copies(pair, v) == [[10, 9, 3]] * 2


def test_copies_and_pickles_are_independent_variables(two):
    with two.scope():
        v, r, none = variable(1.0, "sum", name="v"), on_read("sum", 3, name="r"), on_read()
    set_copies(two, none)
    for twin_of in (copy.deepcopy, copy.copy, lambda x: x.copy(), nnx.clone):
        for original in (v, r):
            twin = twin_of(original)
            assert type(twin) is mirror.Variable
            assert twin.get_metadata() == original.get_metadata()
            assert twin.assign(5) == 5
            assert (float(v), float(r)) == (1, 6)
    assert copies(two, copy.deepcopy(none)) == [3, 5]
    held = copy.deepcopy({"a": v, "b": [v]})
    assert held["a"] is held["b"][0]
    for original in (v, r):
        loaded = pickle.loads(pickle.dumps(original))
        assert float(loaded) == float(original)
        assert loaded.get_metadata() == original.get_metadata()
    assert copies(two, pickle.loads(pickle.dumps(none))) == [3, 5]


@rows("pair", each_executor)
def test_gradients_are_per_replica(pair):
    """And with respect to the value; `nnx.grad` takes variables that are passed."""
    v = variable(2.0, "sum")

    def captured():
        return jax.grad(lambda x: x * x * number())(v[...])

    def passed(w):
        return nnx.grad(lambda w: w[...] * w[...] * number())(w)[...]

    np.testing.assert_array_equal(pair.run(captured), [4, 8])
    np.testing.assert_array_equal(pair.run(passed, (v,)), [4, 8])
    assert jax.grad(lambda x: x * x)(v[...]) == 4
    with pytest.raises(ValueError, match="from different trace level"):
        pair.run(lambda: nnx.grad(lambda w: w[...])(v)[...])


# Per-replica (on_read) variables


def test_on_read_is_not_trainable_by_default():
    assert not on_read().trainable
    assert on_read(trainable=True).trainable


@rows("pair", each_executor)
def test_on_read_is_aggregated_outside_and_per_replica_in_a_step(pair):
    with pair.scope():
        none, total, mean, first = made = [on_read(a, name=a) for a in AGGREGATIONS]
    set_copies(pair, *made)
    for v in made:
        assert copies(pair, v) == [3, 5]
        assert v.shape == ()
        np.testing.assert_array_equal(pair.run(plus_one, (v,)), [4, 6])
    for v, wanted in ((total, 8), (mean, 4), (first, 3)):
        assert [float(x) for x in (v[...], v.get_value(), v + 0, v.copy()[...])] == [wanted] * 4
        assert np.asarray(v) == wanted
    for read in (
        lambda: none[...],
        lambda: none + 1,
        lambda: np.asarray(none),
        lambda: float(none),
    ):
        fix = ["strategy.local_results(v)", "aggregation='sum'"]
        with raises(ValueError, names="'none'", values="'on_read'", fix=fix):
            read()
    assert "PerReplica(3., 5.)" in repr(none)
    assert "value=Array(8., dtype=float32)" in repr(total)
    assert "PerReplica" in repr(nnx.state({"none": none}))


@rows("pair", each_executor)
def test_on_read_assign_in_a_step_writes_per_replica(pair):
    with pair.scope():
        made = [on_read(a) for a in AGGREGATIONS]
    set_copies(pair, *made)

    def step():
        for v in made:
            v.assign_add(2.0)
            v.assign_sub(number())
            v[...] += 1

    pair.run(step)
    assert [copies(pair, v) for v in made] == [[5, 6]] * 4


@rows("pair", each_executor)
def test_on_read_assign_outside_splits_a_sum_exactly(pair):
    """TensorFlow rounds 7 to 6."""
    with pair.scope():
        total, mean, first = (on_read(a) for a in AGGREGATIONS[1:])
        count = on_read("sum", 0)
    for v in (total, mean, first):
        assert v.assign(8.0) is v
        assert v == 8
    assert [copies(pair, v) for v in (total, mean, first)] == [[4, 4], [8, 8], [8, 8]]
    for value in (7, -7, 0, 2**31 - 1, -(2**31)):
        assert int(count.assign(value)) == value
        assert sum(copies(pair, count)) == value
    count[...] = 9
    assert copies(pair, count) == [5, 4]


def test_on_read_assign_outside_splits_a_sum_across_eight_replicas(eight):
    with eight.scope():
        count = on_read("sum", 27)
        mean = on_read("mean", 3.0)
    assert int(count) == 27 * 8  # created in the scope: the value per replica
    assert copies(eight, count.assign(27)) == [6] + [3] * 7
    assert mean == 3


@rows("pair", each_executor)
def test_on_read_sum_rejects_assign_add_outside_a_step(pair):
    with pair.scope():
        total, mean, first = (on_read(a, name=a) for a in AGGREGATIONS[1:])
    set_copies(pair, total, mean, first)
    for add in (total.assign_add, total.assign_sub):
        names = [add.__name__, "'sum'"]
        with raises(ValueError, names=names, values="'on_read'", fix="v.assign(v[...] + x)"):
            add(10.0)
    for v in (mean, first):
        assert copies(pair, v.assign_add(10.0)) == [13, 15]
        assert copies(pair, v.assign_sub(1.0)) == [12, 14]
    assert (float(mean), float(first)) == (13, 12)


@rows("pair", each_executor)
def test_on_read_without_aggregation_rejects_assign_outside_a_step(pair):
    """TensorFlow writes, then raises."""
    with pair.scope():
        none = on_read(name="mine")
    set_copies(pair, none)
    for write in (none.assign, none.assign_add, none.set_value):
        with raises(ValueError, names="'mine'", values="'on_read'", fix="aggregation='sum'"):
            write(8.0)
    assert copies(pair, none) == [3, 5]


def test_reduce_uses_the_given_op(two):
    with two.scope():
        first, none = on_read("only_first_replica"), on_read()
        v = variable(2.0)
    set_copies(two, first, none)
    for r in (first, none):
        assert [float(two.reduce(op, r)) for op in ("sum", "mean", "min", "max")] == [8, 4, 3, 5]
    found = two.reduce("sum", {"r": none, "v": [v, 1.0]})
    assert jax.tree.map(float, found) == {"r": 8, "v": [4, 2]}
    np.testing.assert_array_equal(two.gather({"v": variable([1, 2])})["v"], [1, 2, 1, 2])
    assert two.run(lambda: two.num_replicas_in_sync) == 2


@rows("pair", each_executor)
def test_all_reduce_in_a_step_accepts_variables(pair):
    """One explicit method replaces TensorFlow's `variable_sync_on_read_context`."""
    with pair.scope():
        v, r = variable(2.0), on_read("only_first_replica")
    set_copies(pair, r)

    def step():
        reduce = mirror.all_reduce
        return [
            *(reduce(op, x[...]) for op in ("sum", "mean") for x in (v, r)),
            reduce("sum", {"r": r})["r"][...],
            mirror.all_gather(r[...][None]),
        ]

    *reduced, gathered = pair.run(step)
    assert list(map(float, reduced)) == [4, 8, 2, 4, 8]
    np.testing.assert_array_equal(gathered, [3, 5])


@rows("pair", each_executor)
def test_local_results_returns_copies_of_variables(pair):
    with pair.scope():
        v, r = variable(2.0), on_read()
    set_copies(pair, r)
    found = pair.local_results({"v": v, "r": [r, 7], "none": None})
    assert jax.tree.map(float, found) == tuple(
        {"v": 2, "r": [own, 7], "none": None} for own in (3, 5)
    )


# Checkpoints: what a variable's copies are on the host


def test_variable_is_saved_once_and_restored_into_every_copy(two):
    with two.scope():
        v = variable([1.0, 2.0], "sum", name="v")
    two.run(lambda: nothing(v.assign_sub(jnp.ones(2) - number())))
    saved = np.asarray(v)
    np.testing.assert_array_equal(saved, [2, 3])
    other = cpu_strategy(3)
    for scope in (two.scope(), other.scope()):
        restored = variable([0.0, 0.0])
        with scope:
            restored.assign(saved)
        for strategy in (two, other):
            strategy.run(plus_one, (restored,))
            assert copies(strategy, restored) == [[2, 3]] * strategy.num_replicas_in_sync
    plain = nnx.Variable(jnp.zeros(2))
    plain[...] = saved
    v.assign(plain)
    with raises(ValueError, names="'v'", values=["float32[3]", (2,)]):
        v.assign(np.ones(3, np.float32))


@rows("pair", each_executor)
def test_on_read_variable_is_saved_aggregated(pair, eight):
    with pair.scope():
        total, mean, first, none = made = [on_read(a) for a in [*AGGREGATIONS[1:], "none"]]
    set_copies(pair, *made)
    saved = [np.asarray(v) for v in (total, mean, first)]
    assert [float(x) for x in saved] == [8, 4, 3]
    with raises(ValueError, values="'on_read'", fix="strategy.local_results(v)"):
        np.asarray(none)
    for strategy in (pair, eight):
        with strategy.scope():
            restored = [on_read(a) for a in AGGREGATIONS[1:]]
        for v, value in zip(restored, saved, strict=True):
            assert float(v.assign(value)) == value
        n = strategy.num_replicas_in_sync
        assert [copies(strategy, v)[-1] for v in restored] == [8 / n, 4, 3]
    assert float(variable(0.0).assign(saved[0])) == 8


# Variables in a step


class Counter:
    def __init__(self):
        self.seen = variable(0.0, "sum", name="seen")

    def step(self):
        return self.seen.assign_add(1.0)[...]

    def __call__(self):
        return self.step()


COUNTER = Counter()


def count_global():
    return COUNTER.step()


def test_captured_variable_is_found_anywhere(two):
    counter = Counter()

    def nested():
        def inner():
            return counter.seen.assign_add(1.0)

        return inner()[...]

    steps = [
        nested,
        counter.step,
        counter,
        functools.partial(Counter.step, counter),
        functools.partial(lambda v=None: v.assign_add(1.0)[...], v=counter.seen),
        lambda v=counter.seen: v.assign_add(1.0)[...],
    ]
    for i, step in enumerate(steps):
        assert float(two.run(step)) == 4 * i + 2
        assert float(two.run(step)) == 4 * i + 4
    for i in range(3):
        assert float(two.run(count_global)) == 2 * i + 2
    COUNTER.seen.assign(0.0)
    assert float(two.run(count_global)) == 2


def test_rebound_name_reads_the_new_variable(two):
    counter, v = Counter(), variable(0.0, "sum")

    def step():
        return v.assign_add(1.0)[...], counter.step()

    assert list(map(float, two.run(step))) == [2, 2]
    before = v, counter.seen
    v, counter.seen = variable(10.0, "sum"), variable(20.0, "sum")
    for i in (2, 4):
        assert list(map(float, two.run(step))) == [10 + i, 20 + i]
    assert [float(x) for x in before] == [2, 2]


class Holder:
    """An object that contains variables at several depths."""

    def __init__(self):
        self.items, self.inner = {"a": [None]}, types.SimpleNamespace(v=None)
        self.history = []

    def of_item(self, *_):
        return self.items["a"][0][...]

    def of_last(self, *_):
        return self.history[-1][...]

    def of_inner(self, *_):
        return self.inner.v[...]

    def rebind(self, value):
        global REBOUND
        REBOUND = self.items["a"][0] = self.inner.v = variable(value, "sum")
        self.history.append(REBOUND)


HOLDER, REBOUND = Holder(), None


def of_helper():
    return REBOUND[...]


FUNCTIONS = {
    "an item of an attribute": HOLDER.of_item,
    "an attribute of an attribute": HOLDER.of_inner,
    "the last item": HOLDER.of_last,
    "a global's item": lambda *_: HOLDER.items["a"][0][...],
    "a helper's global": lambda *_: of_helper(),
    "a jitted method": jax.jit(HOLDER.of_inner),
}


@rows("step", FUNCTIONS)
def test_replaced_item_reads_the_new_variable(two, step):
    for value in (1.0, 2.0, 3.0):
        HOLDER.rebind(value)
        assert [float(two.run(step)) for _ in range(3)] == [value] * 3


ROLES = ("loss", "penalty", "weight")
IN_ROLES = itertools.product(ROLES, FUNCTIONS)
QUICK = zip(itertools.cycle(ROLES), FUNCTIONS, strict=False)


@pytest.mark.parametrize("cases", mostly_nightly(IN_ROLES, *QUICK))
def test_functions_of_a_trainer_read_the_new_variable(two, cases, subtests):
    def losses(model, x):
        return 0 * model(x)[:, 0]

    def trainer(role, function):
        loss_fn, options = {
            "loss": (lambda *args: losses(*args) + function(), {}),
            "penalty": (losses, {"penalty": lambda model: function()}),
            "weight": (
                lambda *args: losses(*args) + 1,
                {"sample_weight": lambda x: 0 * x[:, 0] + function()},
            ),
        }[role]
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        return mirror.Trainer(model, optax.sgd(0.1), loss_fn, strategy=two, **options)

    for role, name in cases:
        with subtests.test(role=role, function=name):
            HOLDER.rebind(0.0)
            each = trainer(role, FUNCTIONS[name])
            for value in (1.0, 2.0, 3.0):
                HOLDER.rebind(value)
                assert each.fit([np.ones((2, 1), "f4")] * 3, progress=False)["loss"] == [value]


@rows("pair", each_executor)
def test_jitted_helper_reads_the_current_value(pair):
    """JAX traces it once for its shapes, and remembers that."""
    v = variable(1.0, "sum")
    helper = jax.jit(lambda x: x * v[...])
    steps = [lambda: helper(2.0) + v, lambda: helper(2.0) - v]
    for value in (1.0, 3.0):
        v.assign(value)
        assert [float(pair.run(step)) for step in steps] == [3 * value, value]


@rows("pair", each_executor)
def test_variable_used_by_some_calls_only_is_updated(pair):
    v = variable(0.0, "sum")

    def step(counts):
        return v.assign_add(1.0)[...] if counts else 0.0

    for counts, wanted in ((False, 0), (True, 2), (False, 0), (True, 4)):
        assert float(pair.run(step, (counts,))) == wanted
    assert v == 4


@rows("pair", each_executor)
def test_variable_may_be_captured_and_passed(pair):
    v, r = variable(0.0, "sum"), on_read("sum")

    def step(tree, w):
        tree["v"].assign_add(1.0)
        v.assign_add(1.0)
        r.assign_add(1.0)
        return w[...] + v

    for i in (1, 2):
        assert float(pair.run(step, ({"v": v, "r": r}, v))) == 8 * i
    assert (float(v), float(r)) == (8, 4)


def test_steps_strategies_and_modules_share_a_variable(two, eight):
    class Model(nnx.Module):
        def __init__(self):
            self.seen = variable(0.0, "sum")

    model = Model()
    seen = model.seen
    for _ in range(2):
        two.run(lambda: nothing(seen.assign_add(1.0)))
        eight.run(lambda model: nothing(model.seen.assign_add(1.0)), (model,))
    assert seen == 20
    assert copies(eight, model.seen) == [20] * 8


@rows("pair", each_executor)
def test_variable_may_be_first_read_in_an_inner_transformation(pair):
    v, w, u = variable(2.0, "sum"), variable(3.0), on_read("sum", 1.0)

    def step(x):
        once = jax.jit(lambda x: x * v[...])(x)
        _, rows = jax.lax.scan(lambda c, x: (c, x * w[...]), 0.0, jnp.arange(3.0))
        slope = jax.grad(lambda x: x * u[...])(x)
        for each_ in (v, w, u):
            each_.assign_add(1.0)
        return once, rows, slope, v + w

    for i in range(2):
        once, rows, _, total = pair.run(step, (1.0,))
        assert (float(once), float(total)) == (2 + 2 * i, 8 + 3 * i)
        np.testing.assert_array_equal(rows, [0, 3 + i, 6 + 2 * i])
    assert (float(v), float(w), float(u)) == (6, 5, 5)


@rows("pair", each_executor)
def test_failed_step_leaves_variables_unchanged(pair):
    v, r = variable(1.0, "sum"), on_read("sum", 1.0)
    errors = [KeyError("mine"), KeyboardInterrupt(), None]

    def step():
        v.assign_add(100.0)
        r.assign_add(100.0)
        if errors[0]:
            raise errors[0]

    for kind in (KeyError, KeyboardInterrupt):
        with pytest.raises(kind):
            pair.run(step)
        assert (float(v), float(r)) == (1, 1)
        errors.pop(0)
    pair.run(step)
    assert (float(v), float(r)) == (201, 201)


def test_threads_use_their_own_variables(two):
    """A variable that two threads assign needs a lock of the user, like all shared state."""
    held = [(variable(0.0, "sum"), on_read("sum", 0)) for _ in range(2)]
    start, lock = threading.Barrier(2), threading.Lock()
    together, problems = variable(0.0, "sum"), []

    def shared():
        together.assign_add(1.0)

    def work(v, r):
        def step():
            v.assign_add(1.0)
            r.assign_add(2)
            return v[...]

        try:
            start.wait(900)
            for _ in range(5):
                two.run(step)
                with lock:
                    two.run(shared)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=item) for item in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert not problems
    assert [(float(v), int(r)) for v, r in held] == [(10, 20)] * 2
    assert together == 20


def test_variable_is_used_with_another_number_of_replicas(two, eight):
    """A mirrored variable is mirrored again; values of two replicas do not fit eight."""
    with two.scope():
        v, r = variable(1.0, "sum", name="v"), on_read("sum", 3, name="r")
    for strategy in (eight, two, eight):
        strategy.run(lambda: nothing(v.assign_add(1.0)))
        assert v.devices() == set(strategy.devices)
    assert v == 1 + 8 + 2 + 8
    for call in (lambda: eight.run(lambda: r[...]), lambda: eight.run(lambda r: r[...], (r,))):
        with raises(ValueError, names="'r'", values=[2, 8, "/device:CPU:0"], fix="scope"):
            call()
    assert r == 6


def test_variable_is_plain_outside_every_strategy():
    v, r = variable(1.0, "sum"), on_read("mean", 2.0)
    assert v.assign_add(1.0) == 2
    assert r.assign_add(1.0) == 3
    with mirror.get_strategy().scope():
        assert r.assign_sub(1.0) == 2
    mirror.get_strategy().run(lambda: nothing([v.assign_add(1.0), r.assign_add(1.0)]))
    assert (float(v), float(r)) == (3, 3)


# In modules


class Model(nnx.Module):
    def __init__(self, rngs=None):
        self.weight = variable(jnp.ones(3), name="weight")
        self.bias = nnx.Param(jnp.zeros(()))
        self.count = on_read("sum", 0, name="count")
        self.loss = on_read("mean", name="loss")

    def __call__(self, x):
        return x @ self.weight[...] + self.bias


def trained(wrt):
    def step(model, optimizer, batch):
        loss_fn = lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model)
        loss_own = loss
        grads, loss = mirror.all_reduce("mean", (grads, loss))
        optimizer.update(model, grads)
        model.count.assign_add(len(batch["x"]))
        model.loss.assign(loss_own)
        return loss

    return step


def batch(size):
    rng = np.random.RandomState(0)
    x = rng.randn(size, 3).astype(np.float32)
    return {"x": x, "y": x @ np.asarray([1.0, -2.0, 3.0], np.float32)}


WRT = (mirror.Variable, nnx.Param)
TRAINABLE = nnx.Any(
    *(nnx.All(t, lambda _, v: v.get_metadata().get("trainable", True)) for t in WRT)
)


def test_variables_are_trained_by_an_optimizer_and_count(two):
    """Eight replicas and one train the same."""
    step = trained(TRAINABLE)
    found = {}
    for name, strategy in {"two": two, "one": cpu_strategy(1)}.items():
        with strategy.scope():
            model = Model()
            optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=TRAINABLE)
        data = strategy.distribute_dataset([batch(8)] * 3)
        losses = [float(strategy.run(step, (model, optimizer, rows))) for rows in data]
        assert int(model.count) == 24
        np.testing.assert_allclose(float(model.loss), losses[-1], rtol=1e-6)
        assert losses[-1] < losses[0]
        strategy.check_mirrored((model, optimizer))
        report = strategy.verify(step, (model, optimizer, next(iter(data))))
        assert {"model.weight", "model.count"} <= {row.name for row in report.rows}
        assert int(model.count) == 24
        found[name] = (*losses, *np.asarray(model.weight))
    np.testing.assert_allclose(found["two"], found["one"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:<lambda> computes the same on all")
def test_graph_of_a_large_model_is_split_once_until_it_changes(two, monkeypatch):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.seen = variable(0.0, "mean")

        def __call__(self, x):
            self.seen.assign_add(1.0)
            return x + self.attention(self.norm(x))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(4)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    split = []
    Structure = inside.structure_of_nnx()
    made = Structure.__init__

    def counted(self, objects):
        split.append(0)
        made(self, objects)

    monkeypatch.setattr(Structure, "__init__", counted)
    with two.scope():
        model, x = Stack(nnx.Rngs(0)), jnp.ones((1, 2, 4))
    step = lambda model, x: model(x).mean()  # noqa: E731
    two.run(step, (model, x))
    split.clear()
    for _ in range(3):
        two.run(step, (model, x))
    assert not split
    assert [float(block.seen) for block in model.blocks] == [4] * 4
    model.blocks.pop()
    two.run(step, (model, x))
    assert split
    assert [float(block.seen) for block in model.blocks] == [5] * 3


def test_filters_states_and_trees_support_variables(two):
    with two.scope():
        model = Model()
    state = nnx.state(model, mirror.Variable)
    assert set(state) == {"weight", "count", "loss"}
    merged = nnx.merge(*nnx.split(copy.deepcopy(model)))
    assert copies(two, merged.count) == [0, 0]
    assert type(merged.weight) is mirror.Variable
    doubled = jax.tree.map(lambda x: 2 * x, nnx.state(model))
    np.testing.assert_array_equal(doubled["weight"], [2, 2, 2])
    assert doubled["count"] == 0
    set_copies(two, model.count)
    assert copies(two, jax.tree.map(lambda x: 2 * x, model).count) == [6, 10]
    host = {
        "/".join(map(str, path)): np.asarray(v) for path, v in nnx.to_flat_state(nnx.state(model))
    }
    assert host["count"] == 8
    assert host["weight"].shape == (3,)
    assert "Variable" in repr(model)
    nnx.update(model, nnx.state(merged))
    assert int(model.count) == 0
    two.run(lambda model: nothing(model.count.assign_add(1)), (model,))
    assert int(model.count) == 2


@pytest.fixture
def mixed() -> Iterator[mirror.MirroredStrategy]:
    """CPU:0 is a simulated GPU: no mesh spans the devices."""
    with inside.pretended_types(["GPU"]):
        yield mirror.MirroredStrategy(["GPU:0", "CPU:0"])


def test_variables_work_on_several_device_types(mixed):
    with mixed.scope():
        v, r = variable(1.0, "sum"), on_read("sum", 0)
        none = on_read()

    def step():
        v.assign_add(number())
        r.assign_add(replica_id() + 1)
        none.assign(number())
        return v[...], r[...]

    total, own = mixed.run(step)
    mixed.run(step)
    assert (float(v), int(r), float(total)) == (7, 6, 4)
    np.testing.assert_array_equal(own, [1, 2])
    assert copies(mixed, r) == [2, 4]
    assert copies(mixed, r.assign(9)) == [5, 4]
    assert copies(mixed, none) == [1, 2]
    assert copies(mixed, copy.deepcopy(none)) == [1, 2]
    assert mixed.reduce("max", none) == 2
    mixed.check_mirrored((v, r))


def test_placement_log_supports_variables(two, caplog):
    mirror.debugging.set_log_device_placement(True)
    try:
        with two.scope():
            v, r = variable(1.0, "sum", name="v"), on_read("sum", 0, name="r")

        def step():
            v.assign_add(number())
            r.assign_add(1)
            return jnp.sum(v) + r

        two.run(step)
        assert v.assign_add(1.0) == 5
        assert int(r) == 2
    finally:
        mirror.debugging.set_log_device_placement(False)
