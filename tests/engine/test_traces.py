"""Facts about one trace do not leak: inner `jax.jit` caches, rebound names, numbers, threads."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mirror
from mirror import PerReplica
from tests.support import fresh
from tests.support.messages import raises
from tests.support.strategies import EXECUTORS, cpu_strategy
from tests.support.tables import Made, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*compiled")  # each row has its own step


def values_of(length):
    return PerReplica([np.full(length, i, np.float32) for i in range(2)])


def test_program_ends_without_a_word():
    """Python clears modules before the program's own objects, in an order of its own."""
    code = """
        import logging
        import numpy as np
        import mirror
        logging.getLogger("mirror").addHandler(logging.NullHandler())
        mirror.debugging.set_log_device_placement(True)
        strategy = mirror.MirroredStrategy(["/cpu:0"])
        def step(x):
            return mirror.all_reduce("sum", x)
        strategy.run(step, (np.float32(1),))
    """
    assert "Exception ignored" not in fresh.run(code)


@pytest.mark.filterwarnings("ignore:(?=.*<lambda>).*compiled")  # new steps, on purpose
def test_gather_in_a_users_jit_uses_the_length_of_its_call(two):
    inner = jax.jit(lambda x: mirror.all_gather(x))
    for length in (3, 2, 3):
        step = lambda x: inner(x)  # noqa: E731 (a step of its own, on purpose)
        values = values_of(length)
        np.testing.assert_array_equal(two.run(step, (values,)), np.concatenate(values.values))


@rows("collects", [True, False])
def test_cycles_are_not_collected_in_a_trace(two, collects):
    """A full collection takes as long as the trace of 50 layers."""
    inside_step = []
    step = lambda x: (inside_step.append(gc.isenabled()), mirror.all_reduce("sum", x))[1]  # noqa: E731
    (gc.enable if collects else gc.disable)()
    try:
        two.run(step, (values_of(3),))
        after = gc.isenabled()
    finally:
        gc.enable()
    assert inside_step == [False]
    assert after == collects


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?=.*<lambda>).*compiled")
def test_example_keys_in_a_users_jit_are_those_of_the_global_batch(two):
    key = jax.random.key(1)
    draw = jax.jit(lambda x: jax.vmap(jax.random.uniform)(mirror.example_keys(key, x)))
    for length in (3, 2):
        step = lambda x: draw(x)  # noqa: E731
        found = np.concatenate(two.run(step, (values_of(length),)).values)
        np.testing.assert_array_equal(found, draw(np.zeros(2 * length, np.float32)))


@rows("pair", Made(EXECUTORS))
def test_variable_read_in_a_users_jit_is_current(pair):
    with pair.scope():
        v = mirror.Variable(2.0)
    read = jax.jit(lambda: v[...] * 1)
    first, second = (lambda: read() + 0), (lambda x: read() + x)
    assert float(pair.run(first)) == 2
    v.assign(5.0)
    assert float(pair.run(first)) == 5
    assert float(pair.run(second, (np.float32(1),))) == 6
    assert pair.run(second, (np.ones(3, np.float32),)).tolist() == [6, 6, 6]


@rows("pair", Made(EXECUTORS))
def test_variable_read_in_a_users_jit_is_proved(pair):
    with pair.scope():
        own = mirror.Variable(0.0, synchronization="on_read", aggregation="sum")
        m = mirror.Variable(0.0, name="m")
    pair.run(
        lambda: [own.assign(1.0 * mirror.get_replica_context().replica_id_in_sync_group), 0][1]
    )
    read = jax.jit(lambda: own[...] * 1)
    fix = 'all_reduce("mean", grads)'
    with raises(mirror.ReplicaDivergenceError, names=["<lambda>", "m"], fix=fix):
        pair.run(lambda: [m.assign(read()), None][1])
    assert float(m) == 0


@rows("pair", Made(EXECUTORS))
def test_rebound_variable_is_replaced(pair):
    class Loop:
        def step(self):
            self.count.assign_add(1)
            return self.count[...]

    loop, counts = Loop(), []
    for _ in range(3):
        with pair.scope():
            loop.count = mirror.Variable(0)
        counts += [int(pair.run(loop.step)) for _ in range(2)]
        assert int(loop.count) == 2
    assert counts == [1, 2] * 3


@rows("pair", Made(EXECUTORS))
def test_array_of_a_captured_variable_is_not_donated(pair):
    x = jnp.arange(3.0)
    with pair.scope():
        v = mirror.Variable(x)
    before = v[...]
    for _ in range(2):
        pair.run(lambda: [v.assign_add(jnp.ones(3)), None][1])
    np.testing.assert_array_equal(before, [0, 1, 2])
    np.testing.assert_array_equal(x, [0, 1, 2])
    np.testing.assert_array_equal(v[...], [2, 3, 4])


def test_number_and_array_compile_separately(two):
    half = jnp.ones(2, jnp.bfloat16)
    step = lambda c: half * c  # noqa: E731
    for _ in range(2):
        assert two.run(step, (2.0,)).dtype == jnp.bfloat16
        assert two.run(step, (np.float32(2),)).dtype == jnp.float32


def test_threads_capture_a_variable_concurrently(two):
    with two.scope():
        counts = [mirror.Variable(0), mirror.Variable(0)]
    errors = []

    def step():
        for count in counts:
            count.assign_add(1)

    def loop():
        try:
            two.run(step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert not errors
    assert [int(count) for count in counts] == [4, 4]


def test_threads_run_steps_on_one_object(two):
    v = nnx.Variable(jnp.float32(0))

    def step(v):
        v[...] = v[...] + 1

    def loop():
        for _ in range(5):
            two.run(step, (v,))

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert float(v[...]) == 15


def test_ordered_callbacks_stay_in_order():
    """On one device: JAX has none on several."""
    strategy, seen = cpu_strategy(1, cross_device_ops=mirror.ReductionToOneDevice()), []

    def step(x):
        total = jax.lax.psum(x, mirror.REPLICA_AXIS)
        jax.debug.callback(lambda v: seen.append(("total", float(v))), total, ordered=True)
        jax.debug.callback(lambda v: seen.append(("own", float(v))), x, ordered=True)
        return total

    strategy.run(step, (PerReplica([np.float32(1)]),))
    jax.effects_barrier()
    assert [name for name, _ in seen] == ["total", "own"]


def test_order_of_callbacks_on_several_devices_is_refused_in_words(two):
    def step(x):
        return jax.lax.scan(
            lambda c, _: (jax.debug.print("{}", c, ordered=True), c)[::-1], x, None, 2
        )

    with pytest.raises(ValueError, match=r"test_traces\.py.* have 2\. Remove ordered=True"):
        two.run(step, (np.float32(1),))


def test_linear_solve_without_collectives_is_staged():
    strategy = EXECUTORS["staged"]()

    def step(a):
        a = jax.lax.pmean(a, mirror.REPLICA_AXIS)
        return jax.scipy.sparse.linalg.cg(lambda v: v * a, a)[0]

    a = PerReplica([np.ones(3, np.float32), np.full(3, 3, np.float32)])
    np.testing.assert_allclose(strategy.run(step, (a,)), np.ones(3), rtol=1e-5)


def test_host_values_of_64_bits_may_have_unequal_lengths(two):
    values = PerReplica([np.ones(1), np.ones(2)])
    assert two.reduce("sum", values, axis=0) == 3
    assert two.gather(values, 0).tolist() == [1, 1, 1]
