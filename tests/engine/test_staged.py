"""The staged executor: memory, scheduling and errors."""

import gc
import threading
import tracemalloc
import weakref
from collections import Counter as Counts

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from mirror import REPLICA_AXIS, PerReplica
from tests.support import inside
from tests.support.compilations import assert_nothing_compiled, compilations
from tests.support.messages import assert_message, raises
from tests.support.models import MLP, batches, nnx_step
from tests.support.strategies import executor
from tests.support.tables import rows

CPUS = jax.devices("cpu")
N = 2


def psum(x):
    return jax.lax.psum(x, REPLICA_AXIS)


def pmean(x):
    return jax.lax.pmean(x, REPLICA_AXIS)


def staged(ops=None, num_devices=N, **kwargs):
    ops = mirror.ReductionToOneDevice() if ops is None else ops
    return mirror.MirroredStrategy(CPUS[:num_devices], ops, **kwargs)


def values(*shape, num_replicas=N):
    stacked = np.random.RandomState(0).randn(num_replicas, *shape).astype(np.float32)
    return PerReplica.from_stacked(stacked)


class Watching(mirror.CrossDeviceOps):
    """Reduces on the host, and reports each value."""

    def __init__(self, on_value=None, pack_bytes=0):
        self.pack_bytes = pack_bytes
        self.calls = []
        self.on_value = on_value

    def reduce_implementation(self, op, values):
        self.calls.append(op)
        watched = map(self.tell, values) if self.on_value else values
        return super().reduce_implementation(op, watched)

    def tell(self, value):
        self.on_value(value)
        return value


# Memory


def adam_state(strategy, size=61):
    with strategy.scope():
        model = nnx.Linear(size, size, use_bias=False, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def square_step(model, optimizer, x):
    grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, mirror.all_reduce("mean", grads))


def buffers(shape):
    """Returns the number of buffers of this shape per device."""
    arrays = [a for a in jax.live_arrays() if a.shape == shape and a.dtype == jnp.float32]
    shards = {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for array in arrays
        for shard in array.addressable_shards
    }
    return Counts(device for device, _ in shards)


def test_state_is_stored_once_and_donated():
    """During a collective each device holds one copy of the state and of each gradient."""
    held, gradients = [], []  # of a shape that no other test leaves behind

    def look(_):
        held.append(buffers((61, 61)))
        gradients.append(sum(a.shape == (N, 61, 61) for a in jax.live_arrays()))

    strategy = staged(Watching(look))
    state = adam_state(strategy)
    jax.block_until_ready(jax.live_arrays())
    inside.forget_eager_work()
    gc.collect()
    before = buffers((61, 61))
    assert set(before.values()) == {3}
    for _ in range(3):
        kernel, moment = state[0].kernel[...], state[1].opt_state[0].mu["kernel"][...]
        strategy.run(square_step, (*state, values(4, 61)))
        assert kernel.is_deleted()
        assert moment.is_deleted()
    assert all(each == before for each in held)
    assert set(gradients) == {0}  # its rows are separated before the first one is read
    assert buffers((61, 61)) == before
    strategy.check_mirrored(state)


def test_values_are_freed_after_the_last_stage_that_reads_them():
    held = []

    def look(_):
        held.append(sum(array.shape == (N, 7, 5) for array in jax.live_arrays()))

    def step(x):
        large = jnp.outer(x, jnp.arange(5.0))
        total = psum(large.sum())
        largest = psum((large * total).max())
        return psum(largest * x.sum())

    x = PerReplica.from_stacked(np.ones((N, 7), np.float32))
    staged(Watching(look)).run(step, (x,))
    assert held == [1, 1, 1, 1, 0, 0]


def test_shards_are_freed_when_the_host_has_read_them():
    """At most two exist at the same time, for any number of replicas."""
    alive, seen = [], []

    def look(value):
        assert not value.flags.writeable
        seen.append(weakref.ref(value))
        alive.append(sum(reference() is not None for reference in seen))

    strategy = staged(Watching(look), 8)
    strategy.run(psum, (values(8, num_replicas=8),))
    assert len(alive) == 8
    assert max(alive) <= 3  # the first, the previous and the next one
    gc.collect()
    assert not any(reference() is not None for reference in seen)


@rows("ops", [mirror.ReductionToOneDevice, Watching])
def test_host_uses_one_buffer_per_collective(ops):
    """Not one buffer per replica."""
    strategy, size = staged(ops(), 4), 1 << 20
    step = lambda x: psum(x)[:1]  # noqa: E731
    x = PerReplica.from_stacked(np.ones((4, size), np.float32))
    x = strategy.run(lambda x: x, (x,))
    strategy.run(step, (x,))
    tracemalloc.start()
    try:
        out = strategy.run(step, (x,))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert float(out[0]) == 4.0
    assert 4 * size <= peak < 1.2 * 4 * size


# Scheduling


def test_host_launches_all_lanes_before_waiting(monkeypatch):
    launches = inside.count_launches(monkeypatch)
    launches_before_read = []
    ops = Watching(lambda _: launches_before_read.append(len(launches)))
    with executor("staged in lanes", ops) as strategy:
        assert np.isfinite(strategy.run(lambda x: psum(x + psum(x)), (values(num_replicas=4),)))
    assert launches_before_read == [2] * 4 + [4] * 4
    assert len(launches) == 6


def test_host_reads_replicas_in_order_across_lanes():
    read = []
    with executor("staged in lanes", Watching(read.append)) as strategy:
        strategy.run(psum, (PerReplica([np.float32(i) for i in range(4)]),))
    assert list(map(float, read)) == [0, 1, 2, 3]


# Loops on the host


def scanned(xs, **kwargs):
    def body(carry, x):
        total = psum(x)
        return carry / 2 + total, (carry, x * total)

    return jax.lax.scan(body, jnp.ones(2), xs, **kwargs)


def until(test, body, x):
    return jax.lax.while_loop(lambda c: test(c[0]), lambda c: (c[0] + 1, body(c[1])), (0, x))[1]


def twice(carry, _):
    return jax.lax.fori_loop(0, 2, lambda i, c: psum(c) / 2, carry), None


def solved(x):
    matvec = lambda v: 2 * v + psum(v * x**2)  # noqa: E731
    return jax.scipy.sparse.linalg.cg(matvec, psum(x), maxiter=2)[0]


LOOPS = {
    "scan": (scanned, 3),
    "reverse": (lambda x: scanned(x, reverse=True), 3),
    "no trips": (lambda x: scanned(x[:0]), 0),
    "one trip": (lambda x: scanned(x[:1]), 1),
    "unrolled": (lambda x: scanned(x, unroll=3), 3),
    "fori": (lambda x: jax.lax.fori_loop(0, 4, lambda i, c: c / 2 + psum(c), x), 4),
    "fori of none": (lambda x: jax.lax.fori_loop(2, 2, lambda i, c: psum(c), x), 0),
    "while": (lambda x: until(lambda i: i < 3, psum, x), 3),
    "while of none": (lambda x: until(lambda i: i < 0, psum, x), 0),
    "a collective condition": (lambda x: until(lambda i: psum(i) < 6, lambda x: x * 2, x), 4),
    "nested": (lambda x: jax.lax.scan(twice, x, None, 3)[0], 6),
    "cond": (lambda x: jax.lax.cond(psum(1) > 1, lambda: psum(x), lambda: x), 1),
    "conjugate gradients": (solved, 4),  # the right side, the first residual and two iterations
    "cond not taken": (lambda x: jax.lax.cond(psum(1) > 9, lambda: psum(x), lambda: x), 0),
}  # fmt: skip


@pytest.mark.slow
@rows("step, num_collectives", LOOPS)
def test_host_runs_every_iteration_of_a_loop(step, num_collectives):
    watching, x = Watching(), values(3, 2)
    got = staged(watching).run(step, (x,))
    assert len(watching.calls) == num_collectives
    wanted = mirror.MirroredStrategy(CPUS[:N]).run(step, (x,))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


def test_loop_with_a_mirrored_condition_may_depend_on_a_collective():
    """The number of trips is known only when the step runs."""

    def step(x):
        return jax.lax.fori_loop(0, psum(x).astype(jnp.int32), lambda i, c: c + psum(1.0), 0.0)

    strategy = staged()
    for values, trips in (([1.0, 2.0], 3), ([0.0, 0.0], 0), ([4.0, 1.0], 5)):
        out = strategy.run(step, (PerReplica([np.float32(v) for v in values]),))
        assert float(out) == 2.0 * trips


# What cannot be staged


def ref_across(x):
    ref = jax.new_ref(x)
    ref[...] = psum(x)
    return ref[...]


def stacks_keys(x):
    key = jax.random.key(0)
    body = lambda c, _: (psum(c), jax.random.fold_in(key, 1))  # noqa: E731
    return jax.lax.scan(body, x, None, 2)[0]


def loops_over_64_bits(x):
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        return jax.lax.fori_loop(0, 2, lambda i, c: c + psum(x[0] * i), wide.sum())


UNSTAGEABLE = {
    loops_over_64_bits: "jax_enable_x64",
    ref_across: "Ref",
    stacks_keys: "PRNG",
}


@rows("step", list(UNSTAGEABLE))
def test_error_names_the_line_that_cannot_be_split(step):
    names = ["test_staged.py", step.__name__, UNSTAGEABLE[step]]
    with raises(NotImplementedError, names=names, fix="mirror.AllReduce()"):
        staged().run(step, (values(3),))


# Errors


class Counter(nnx.Module):
    def __init__(self):
        self.total = nnx.Param(jnp.zeros(2))


class Failing(mirror.CrossDeviceOps):
    """Fails when told to."""

    error = None

    def reduce_implementation(self, op, values):
        first = next(values)
        if self.error is not None:
            raise self.error
        return super().reduce_implementation(op, iter([first, *values]))


def adds(model, x):
    model.total[...] += psum(x)


def test_failing_ops_leave_the_model_unchanged():
    ops = Failing()
    strategy, model = staged(ops), Counter()
    x = PerReplica([np.ones(2, np.float32)] * 2)
    strategy.run(adds, (model, x))
    for error, kind in ((OSError("full"), RuntimeError), (KeyboardInterrupt(), KeyboardInterrupt)):
        ops.error = error
        with pytest.raises(kind) as caught:
            strategy.run(adds, (model, x))
        if kind is RuntimeError:
            names = ["Failing.reduce_implementation", "test_staged.py", "psum"]
            assert_message(caught, names=names, values=["OSError", "full", "sum", "float32[2]"])
        np.testing.assert_array_equal(model.total[...], 2.0)
    ops.error = None
    strategy.run(adds, (model, x))
    np.testing.assert_array_equal(model.total[...], 4.0)
    strategy.check_mirrored(model)


def fails_on(replica):
    def check(i):
        if i == replica:
            raise LookupError("mine")
        return np.float32(1)

    def step(model, x):
        i = jax.lax.axis_index(REPLICA_AXIS) + jnp.int32(x[0] * 0)
        like = jax.ShapeDtypeStruct((), np.float32)
        adds(model, x * jax.pure_callback(check, like, i))

    return step


@rows("replica", [0, 1])
def test_callback_errors_are_raised_unchanged(replica):
    strategy, model = staged(num_devices=4), Counter()
    x = values(2, num_replicas=4)
    with pytest.raises(LookupError, match="mine"):
        strategy.run(fails_on(replica), (model, x))
    np.testing.assert_array_equal(model.total[...], 0.0)
    strategy.run(fails_on(None), (model, x))
    np.testing.assert_allclose(model.total[...], np.asarray(x).sum(0), rtol=1e-6)


def test_error_names_buffers_deleted_during_the_step():
    given = []
    strategy = staged(Watching(lambda _: given[0].delete()))
    with strategy.scope():
        given.append(jnp.ones(2))

    def step(held, x):
        return psum(x) + held

    with raises(RuntimeError, names="step", values=2, fix="reduce_implementation"):
        strategy.run(step, (given[0], values(2)))


# Interrupts and threads


# An interrupt may strike in a callback of the garbage collector, where Python drops it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["staged", "staged in lanes"])
def test_interrupt_leaves_the_models_after_a_complete_step(name, repeat_until_interrupted):
    def step(models, x):
        for model in models:
            adds(model, x)

    models = [Counter() for _ in range(5)]
    with executor(name) as strategy:
        x = PerReplica([np.ones(2, np.float32)] * 4)
        strategy.run(step, (models, x))
        for i in range(40):
            secs = 0.001 + 0.0002 * i
            repeat_until_interrupted(secs, lambda: strategy.run(step, (models, x)))
            assert len({float(model.total[...][0]) for model in models}) == 1
        strategy.check_mirrored(models)
    assert not mirror.has_strategy()


def test_threads_run_steps_concurrently():
    strategy, errors = staged(num_devices=4), []
    x = PerReplica([np.ones(2, np.float32)] * 4)
    models = [Counter() for _ in range(3)]

    def loop(model):
        try:
            for _ in range(20):
                strategy.run(adds, (model, x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
        assert not thread.is_alive(), "it hangs"
    assert not errors
    for model in models:
        np.testing.assert_array_equal(model.total[...], 80.0)


# Compilation


@pytest.mark.slow
@rows("name", ["staged", "staged on 2", "staged in lanes"])
def test_second_step_compiles_nothing(name, caplog):
    """Neither a set of shapes seen before nor the second iteration of a loop compiles."""

    def step(model, x):
        x = jax.lax.fori_loop(0, 2, lambda i, c: c + pmean(c), x)
        adds(model, x.sum(0))
        return x

    model = Counter()
    with executor(name) as strategy:
        for size in (3, 5, 3):
            strategy.run(step, (model, values(size, 2, num_replicas=4)))
        with compilations(caplog) as events:
            for size in (3, 5, 3):
                strategy.run(step, (model, values(size, 2, num_replicas=4)))
    assert_nothing_compiled(events)


def test_step_is_traced_once_per_shape():
    traced = []

    def step(x):
        traced.append(x.shape)
        return psum(x.sum()), x

    strategy = staged(num_devices=4)
    for size in (3, 1, 3, 1):
        _, own = strategy.run(step, (values(size, num_replicas=4),))
        assert own.shapes == ((size,),) * 4
    assert traced == [(3,), (1,)]


def test_mirrored_leaf_may_change_its_shape():
    strategy = staged()

    def step(weights, x):
        return weights * psum(x)

    for size in (2, 3, 2):
        out = strategy.run(step, (np.ones(size, np.float32), PerReplica([1.0, 2.0])))
        np.testing.assert_array_equal(out, np.full(size, 3.0))


@pytest.mark.slow
@rows("name", ["staged on 2", "staged in lanes"])
def test_copies_of_replicas_are_bitwise_equal(name):
    """Lanes, which are compiled separately, give equal copies too."""
    with executor(name) as strategy:
        with strategy.scope():
            model = MLP(rngs=nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        for batch in strategy.distribute_dataset(batches((12,), 3)):
            loss = strategy.run(nnx_step, (model, optimizer, batch))
        strategy.check_mirrored((model, optimizer, loss))
