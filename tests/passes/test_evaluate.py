"""A step is traced once: every executor and every report evaluates the proved program."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import mirror
from mirror import PerReplica
from tests.support import inside
from tests.support.messages import raises
from tests.support.strategies import ONE, PAIRS, cpu_strategy, executors
from tests.support.tables import Made, rows

AXIS = mirror.REPLICA_AXIS
EXECUTORS = {**ONE, **PAIRS, **executors(2)}
STRATEGIES = Made({name: make for name, make in EXECUTORS.items() if name not in ("one", "pairs")})


def own(strategy, shape=(3,)):
    """A per-replica value: replica i has i + 1 everywhere."""
    n = strategy.num_replicas_in_sync
    return PerReplica([np.full(shape, i + 1, np.float32) for i in range(n)])


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.first(x)))


def counting_step():
    calls = []

    @mirror.per_replica_on_purpose  # batch statistics
    def step(net, optimizer, x):
        calls.append(1)

        def loss(net):
            return jnp.mean(lax.scan(lambda c, _: (jnp.tanh(c), None), net(x), None, 2)[0] ** 2)

        value, grads = nnx.value_and_grad(loss)(net)
        context = mirror.get_replica_context()
        optimizer.update(net, context.all_reduce("mean", grads))
        return context.all_reduce("mean", value), value

    return step, calls


def arguments(strategy):
    net = Net()
    return net, nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param), own(strategy, (5, 3))


@rows("strategy", STRATEGIES)
def test_users_function_runs_once(strategy):
    step, calls = counting_step()
    args = arguments(strategy)
    for _ in range(3):
        strategy.run(step, args)
    assert len(calls) == 1


def test_unchanged_operations_are_not_traced_again(two):
    types = []
    same = Primitive("same")
    same.def_abstract_eval(lambda aval: types.append(aval) or aval)
    mlir.register_lowering(same, lambda _, value: [value])

    def step(m, x):
        unused = same.bind(jnp.cos(x))
        total = mirror.all_reduce("mean", same.bind(x + m["w"]))
        kept = mirror.ensure_mirrored({"w": jnp.sin(total)})  # its results are its operands
        return kept["w"] * 2, m["w"] + kept["w"], total, list(unused.shape)

    x, w = own(two), jnp.full(3, 2.0)
    double, new, total, _ = two.run(step, ({"w": w}, x))
    assert len(types) == 1  # of the same type
    np.testing.assert_allclose(total, np.full(3, 3.5))
    np.testing.assert_allclose(double, 2 * np.sin(np.full(3, 3.5)), rtol=1e-6)
    np.testing.assert_allclose(new, 2 + np.sin(np.full(3, 3.5)), rtol=1e-6)


def test_reports_reuse_the_trace(two):
    step, calls = counting_step()
    args = arguments(two)
    two.inspect(step, args)
    two.run(step, args)
    two.inspect(step, args)
    assert len(calls) == 1


@rows("strategy", STRATEGIES)
def test_donation_does_not_trace_again(strategy):
    calls = []

    def step(w, x):
        calls.append(1)
        return w + lax.psum(x, AXIS)

    w = strategy.run(step, (np.zeros(3, np.float32), own(strategy)))
    w = strategy.run(step, (w, own(strategy)), donate_argnums=0)
    strategy.run(step, (w, own(strategy)), donate_argnums=0)
    assert len(calls) == 1


@rows("strategy", Made(EXECUTORS))
def test_verify_adds_the_trace_of_one_replica_with_the_whole_batch(strategy):
    calls = []

    def step(w, x):
        calls.append(x.shape)
        return w + lax.pmean(x.mean(0), AXIS)

    args = (np.zeros(3, np.float32), own(strategy, (2, 3)))
    strategy.run(step, args)
    strategy.verify(step, args)
    strategy.verify(step, args)
    n = strategy.num_replicas_in_sync
    assert calls == [(2, 3), (2 * n, 3)]


@pytest.mark.slow
def test_explain_traces_only_its_two_programs():
    strategy = cpu_strategy(2)
    step, calls = counting_step()
    args = arguments(strategy)
    strategy.explain(step, args, steps=2)
    assert len(calls) == 2  # on all replicas, and on one with the whole batch


def test_users_function_runs_once_per_shape():
    calls = []

    def step(x):
        calls.append(x.shape)
        return lax.psum(x.sum(), AXIS)

    strategy = cpu_strategy(3)
    for n in (3, 2, 3, 2):
        assert float(strategy.run(step, (PerReplica([np.ones(n, np.float32)] * 3),))) == 3 * n
    assert calls == [(3,), (2,)]


def changed_precision():
    return jax.default_matmul_precision("highest")


@rows("context", {"precision": changed_precision, "64 bits": lambda: jax.enable_x64(True)})
@rows("strategy", STRATEGIES)
def test_changed_context_is_traced_and_proved_again(strategy, context):
    reduces = [True]
    calls = []

    def step(x):
        calls.append(1)
        return mirror.ensure_mirrored(lax.psum(x, AXIS) if reduces[0] else x)

    x = own(strategy)
    strategy.run(step, (x,))
    with context():
        strategy.run(step, (x,))
        assert len(calls) == 2
        strategy.run(step, (x,))
    strategy.run(step, (x,))
    assert len(calls) == 2, "each context keeps its program"
    reduces[0] = False
    jax.clear_caches()
    with pytest.raises(mirror.ReplicaDivergenceError):
        strategy.run(step, (x,))


@rows("strategy", STRATEGIES)
def test_local_sgd_may_reduce_at_every_second_call(strategy):
    """Side effects happen once, when the function is traced, for all steps and replicas."""
    calls = []

    def step(model, x):
        calls.append(1)
        grad = x * model.w[...]
        if len(calls) % 2:
            grad = lax.pmean(grad, AXIS)
        model.w[...] = model.w[...] - 0.1 * grad

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

    model = Model()
    for _ in range(4):
        strategy.run(step, (model, own(strategy)))
    strategy.check_mirrored(model)
    assert len(calls) == 1


def tables(table, x):
    i = lax.axis_index(AXIS)
    return {
        "static index": table[0] + x,
        "static gather": jnp.asarray(table)[jnp.array([0, 1])].sum() + x,
        "set": jnp.asarray(table).at[0].set(7.0).sum() + x,
        "where": jnp.where(x > 1, table[:3], 0),
        "traced index": jnp.asarray(table)[i] + x,
        "scan": lax.scan(lambda c, t: (c + t, None), x, table)[0],
        "alone": table * 2,
        # Beside a collective, these are operations of their own in a stage.
        "sum": lax.psum(x, AXIS),
        "jit": jax.jit(lambda t: 2 * t)(table),
        "carry": lax.scan(lambda c, _: (jnp.roll(2 * c, 1), None), table, None, 2)[0],
        "vmap": jax.vmap(lambda x: lax.scan(lambda c, t: (c + x * t, c), x, table)[1])(x),
    }


@rows("strategy", Made(EXECUTORS))
def test_captured_arrays_act_like_arguments(strategy):
    values = np.arange(5, dtype=np.float32)
    with strategy.scope():
        mirrored = jnp.asarray(values)
    captured = {"scope": mirrored, "one device": jax.device_put(values), "host": values}
    x = own(strategy)
    got = strategy.run(lambda x: {place: tables(t, x) for place, t in captured.items()}, (x,))
    wanted = strategy.run(tables, (values, x))
    for place, found in got.items():
        for name, value in wanted.items():
            assert type(found[name]) is type(value), (place, name)
            np.testing.assert_array_equal(found[name], value, err_msg=f"{place}: {name}")


@rows("strategy", Made(EXECUTORS))
def test_captured_array_can_be_deleted_after_the_first_step(strategy):
    table = jax.device_put(np.arange(3, dtype=np.float32))
    step = lambda x: x + table  # noqa: E731
    first = np.asarray(strategy.run(step, (own(strategy),)))
    table.delete()
    np.testing.assert_array_equal(strategy.run(step, (own(strategy),)), first)


@rows("where", ["jit", "scan", "remat", "cond"])
def test_captured_model_is_rejected_at_any_depth(two, where):
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    read = lambda x: model.kernel[...].sum() * x  # noqa: E731
    inner = {
        "jit": jax.jit(read),
        "scan": lambda x: lax.scan(lambda c, _: (read(c), None), x, None, 1)[0],
        "remat": jax.checkpoint(read),
        "cond": lambda x: lax.cond(x.sum() > 0, read, lambda x: x, x),
    }[where]
    with raises(ValueError, names=["<lambda>", "'model'"], fix="strategy.run"):
        two.run(lambda x: inner(lax.psum(x, AXIS)), (own(two),))


MODULE = types.ModuleType("settings_of_a_user")


class Reader:
    """A step that reads a model in a method, which only the code of the method names."""

    def read(self, x):
        return MODULE.model(x)

    def __call__(self, x):
        return self.read(x)


def of_a_default(x, model=None, *, scale=1.0):
    return model(x) * scale


@rows(
    "name, make",
    {
        "a module": ("MODULE.model", lambda model: lambda x: MODULE.model(x)),
        "a method": ("MODULE.model", lambda model: Reader().read),
        "an object with __call__": ("MODULE.model", lambda model: Reader()),
        "an object that is called": ("MODULE.model", lambda model: bind(Reader())),
        "a default": ("model", lambda model: bind(with_default(model))),
        "a partial": ("model", lambda model: functools.partial(of_a_default, model=model)),
    },
)
def test_captured_model_is_named_wherever_the_code_names_it(two, name, make):
    MODULE.model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with raises(ValueError, names=f"'{name}'", fix="strategy.run"):
        two.run(make(MODULE.model), (own(two),))


def bind(inner):
    return lambda x: inner(x)


def with_default(model):
    return lambda x, model=model: model(x)


def test_step_may_start_a_thread_that_runs_another_step():
    import threading

    strategy = cpu_strategy(2)
    found = []

    def step(x):
        thread = threading.Thread(target=lambda: found.append(strategy.run(lambda: jnp.ones(()))))
        thread.start()
        thread.join(900)
        assert not thread.is_alive(), "the other step waits for this one"
        return x * 2

    strategy.run(step, (own(strategy),))
    assert [float(value) for value in found] == [1.0]


def test_messages_and_profiles_use_the_users_names():
    strategy = cpu_strategy(2)

    def my_step(x):
        with jax.named_scope("my_scope"):
            return lax.psum(jnp.sin(x), AXIS)

    text = inside.lowered(strategy, my_step, (own(strategy),)).as_text(debug_info=True)
    assert "my_scope" in text
    assert "test_evaluate.py" in text

    def leaks(x):
        return float(x[0])

    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"^leaks .*test_evaluate\.py"):
        strategy.run(leaks, (own(strategy),))


@rows("strategy", Made(EXECUTORS))
def test_results_keep_64_bits_that_a_step_enables(strategy):
    def step(x):
        with jax.enable_x64(True):
            first = jax.lax.argmax(x, 0, jnp.int64)
            return jnp.asarray(x, jnp.float64) + 1e-12, first

    found, first = strategy.run(step, (own(strategy),))
    assert (found.dtype, first.dtype) == (jnp.float64, jnp.int64)


def test_error_names_disabled_64_bit_dtypes(two):
    with jax.enable_x64(True):
        w = jnp.asarray(np.ones(3))
    with raises(ValueError, names="w", values="float64[3]", fix="x.astype('float32')"):
        two.run(lambda w, x: lax.psum(x, AXIS) * w, (w, own(two)))


def test_captured_ref_is_rejected(two):
    ref = jax.new_ref(jnp.ones(3))
    with raises(TypeError, names=["<lambda>", "jax.Ref"], fix="ref[...]"):
        two.run(lambda x: ref[...].sum() + x, (own(two),))
    with raises(TypeError, names=["ref", "jax.Ref"], fix="ref[...]"):
        two.run(lambda ref, x: ref[...].sum() + x, (ref, own(two)))
