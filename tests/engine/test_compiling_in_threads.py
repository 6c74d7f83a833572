"""A thread that traces and compiles a new program does not stop the other threads."""

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import inside
from tests.support.strategies import EXECUTORS, ONE, PAIRS, cpu_strategy, executor
from tests.support.tables import Made, rows

STRATEGIES = {
    **ONE,
    **EXECUTORS,
    **PAIRS,
    "sharded": functools.partial(cpu_strategy, 2, shard="optimizer"),
}
COMPILED = "/jax/core/compile/backend_compile_duration"
SECS = 60.0


# One XLA program, and several of which each is compiled.
TWO_KINDS = Made({name: EXECUTORS[name] for name in ("pmap", "staged")})


def own(strategy: mirror.Strategy, size: int) -> mirror.PerReplica:
    return strategy.distribute_values_from_function(
        lambda context: np.full(size, context.replica_id_in_sync_group + 1, np.float32)
    )


def mean(x: Any) -> Any:
    return mirror.all_reduce("mean", x)


def in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """Runs a call in a thread; the result or the error is in the future."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class Held:
    """A call of a step waits at a point, in its thread, until it is released."""

    def __init__(self) -> None:
        self.has_come, self.may_continue = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.has_come.set()
        assert self.may_continue.wait(SECS)


@contextlib.contextmanager
def held_compilations(is_held: Callable[[], bool]) -> Iterator[Held]:
    """Holds a thread when XLA has compiled a program, before JAX returns it."""
    held = Held()

    def listen(event: str, _: float, **__: Any) -> None:
        if event == COMPILED and is_held():
            held.wait()

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield held
    finally:
        held.may_continue.set()
        jax.monitoring.unregister_event_duration_listener(listen)


def only_in(ident: list[int]) -> Callable[[], bool]:
    return lambda: threading.get_ident() in ident


# Another thread continues


FORMS = ["same step", "other step", "other nnx step", "new step"]


def works(strategy: mirror.Strategy, form: str, held_step: Any) -> Callable[[], float]:
    """Returns a call in another thread, which has run before unless it is of a new step."""
    x = own(strategy, 3)
    if form == "same step":
        call = lambda: float(strategy.run(held_step, (x,)).sum())  # noqa: E731
    elif form == "other nnx step":
        with strategy.scope():
            count = nnx.Variable(jnp.zeros(3))

        def adds(count, x):
            count[...] += mean(x)

        def call() -> float:
            strategy.run(adds, (count, x))
            return 3 * (strategy.num_replicas_in_sync + 1) / 2

    else:
        other = lambda x: mean(x)  # noqa: E731
        call = lambda: float(strategy.run(other, (x,)).sum())  # noqa: E731
    if form != "new step":
        for _ in range(3):
            call()
    return call


@rows("form", FORMS)
@rows("phase", ["trace", "compilation"])
@rows("strategy", TWO_KINDS)
def test_other_threads_run_while_one_traces_or_compiles(strategy, phase, form):
    """They run before the thread is released, so nothing here depends on time."""
    me: list[int] = []

    def step(x):
        if phase == "trace" and x.shape == (5,):
            held.wait()
        return mean(x)

    expected = 3 * (strategy.num_replicas_in_sync + 1) / 2
    x = own(strategy, 5)
    is_held = only_in(me) if phase == "compilation" else lambda: False
    with held_compilations(is_held) as held:
        call = works(strategy, form, step)

        def run_slowly() -> Any:
            me.append(threading.get_ident())
            return strategy.run(step, (x,))

        slow = in_thread(run_slowly)
        assert held.has_come.wait(SECS)
        others = in_thread(lambda: [call() for _ in range(10)])
        assert others.result(SECS) == [expected] * 10
        assert not slow.done()
        held.may_continue.set()
        assert float(slow.result(SECS).sum()) == expected / 3 * 5
    assert call() == expected


@contextlib.contextmanager
def at_compilations(call: Callable[[], Any], name: str = "step") -> Iterator[list[Any]]:
    """Calls a function whenever XLA has compiled a step, and lists what it returns."""
    results: list[Any] = []

    def listen(event: str, _: float, fun_name: str = "", **__: Any) -> None:
        if event == COMPILED and name in fun_name:  # not the operations that place its arguments
            results.append(call())

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield results
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def require_no_lock_at_compilations(strategy, step, args):
    """Another thread runs a step in each compilation; the second call compiles nothing."""
    others = works(strategy, "other nnx step", None)
    run_other = lambda: in_thread(others).result(SECS)  # noqa: E731
    with at_compilations(run_other, step.__name__) as compilations:
        strategy.run(step, args)
    assert compilations
    with at_compilations(run_other, step.__name__) as compilations:
        strategy.run(step, args)
    assert not compilations


def plain(x):
    return mean(x * x), x + 1


def numbers(x):
    """Its constants have weak types, which results of collectives lose."""
    total = jax.lax.psum(1.0, mirror.REPLICA_AXIS) + jax.lax.psum(2, mirror.REPLICA_AXIS)
    largest = jax.lax.pmax(jnp.asarray(2.0) * 3, mirror.REPLICA_AXIS)
    return mean(x) * total + largest, total


def weak_types(x):
    """JAX's types of `0.0` and `1.0`, which go into collectives and loops."""
    total = jax.lax.scan(lambda c, _: (c + mean(c) + mean(x).sum(), c), 0.0, None, length=2)
    trips = jax.lax.while_loop(
        lambda c: mean(c[0]) < 2, lambda c: (c[0] + 1, mean(c[1]) * 2), (0, 1.0)
    )
    return total, trips, mean(1.0 * trips[1]) * 2, mean(mean(2.0) * 3 + mean(x))


def loops(x):
    def body(carry):
        i, y = carry
        return i + 1, y + mean(y)

    x = jax.lax.while_loop(lambda c: mean(c[1].sum()) < 100.0, body, (0, x))[1]
    x, totals = jax.lax.scan(lambda c, _: (c + mean(c), mean(c).sum()), x, length=2)
    x = jax.lax.fori_loop(0, 2, lambda i, c: c + i * mean(c), x)
    return jax.lax.cond(mean(x.sum()) > 0, lambda y: mean(y), lambda y: mean(-y), x), totals


ARRAY = np.arange(5.0, dtype=np.float32)


def captures(x):
    return mean(x * jnp.asarray(ARRAY)), mirror.all_gather(x, 0)


def keys(x):
    index = mirror.get_replica_context().replica_id_in_sync_group
    key = jax.random.fold_in(jax.random.key(0), index)
    return jax.random.split(key), mean(x + jax.random.uniform(key, x.shape))


def calls_back(x):
    jax.debug.callback(lambda _: None, x)
    return mean(x)


def adds_number(x, number):
    return mean((x * number).sum()) + number, mean(jnp.zeros(())) * number


STEPS = [plain, numbers, weak_types, loops, captures, keys, calls_back, adds_number]


@pytest.mark.parametrize(
    "name",
    [
        "pmap",
        pytest.param("staged", marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.nightly) for n in STRATEGIES if n not in TWO_KINDS),
    ],
)
@rows("step", STEPS)
def test_compiles_while_no_lock_is_held(name, step):
    strategy = STRATEGIES[name]()
    more = (2.0,) if step is adds_number else ()
    require_no_lock_at_compilations(strategy, step, (own(strategy, 5), *more))


@pytest.mark.slow
@rows("name", ["staged in lanes", "pmap", "vmap on 2"])
def test_compiles_on_several_lanes_while_no_lock_is_held(name):
    with executor(name) as strategy:
        weak = mirror.PerReplica([jnp.asarray(2.0)] * 4)  # weak types, of each replica
        require_no_lock_at_compilations(strategy, adds_number, (own(strategy, 5), weak))
        require_no_lock_at_compilations(strategy, weak_types, (weak,))


# The same program, errors and interrupts


@rows("strategy", TWO_KINDS)
def test_threads_with_the_same_new_shape_compile_it_once(strategy):
    traces: list[int] = []

    def step(x):
        traces.append(threading.get_ident())
        if len(traces) == 1:
            held.wait()
        return mean(x)

    x, held = own(strategy, 5), Held()
    with at_compilations(lambda: None) as compilations:
        first = in_thread(lambda: strategy.run(step, (x,)))
        assert held.has_come.wait(SECS)
        others = [in_thread(lambda: strategy.run(step, (x,))) for _ in range(3)]
        held.may_continue.set()
        results = [np.asarray(future.result(SECS)) for future in (first, *others)]
    np.testing.assert_array_equal(results, [results[0]] * 4)
    assert len(set(traces)) == 1
    one_thread = len(compilations)
    with at_compilations(lambda: None, "again") as compilations:
        strategy.run(renamed(step, "again"), (x,))
    assert one_thread == len(compilations)


def renamed(step: Any, name: str) -> Any:
    def again(x):
        return step(x)

    again.__name__ = name
    return again


class BrokenError(Exception):
    """The user's own."""


@rows("strategy", TWO_KINDS)
def test_error_in_a_trace_reaches_all_threads_that_need_it(strategy):
    is_broken, traces = True, []

    def step(x):
        traces.append(x.shape)
        if is_broken and x.shape == (5,):
            if len(traces) == 2:
                held.wait()
            raise BrokenError
        return mean(x)

    held, x, other = Held(), own(strategy, 5), own(strategy, 3)
    expected = (strategy.num_replicas_in_sync + 1) / 2
    assert float(strategy.run(step, (other,))[0]) == expected
    first = in_thread(lambda: strategy.run(step, (x,)))
    assert held.has_come.wait(SECS)
    second = in_thread(lambda: strategy.run(step, (x,)))
    assert float(strategy.run(step, (other,))[0]) == expected
    held.may_continue.set()
    for future in (first, second):
        with pytest.raises(BrokenError):
            future.result(SECS)
    is_broken = False
    assert float(strategy.run(step, (x,))[0]) == expected


@rows("strategy", TWO_KINDS)
def test_error_of_the_compiler_reaches_all_threads_that_need_it(strategy):
    held, calls = Held(), []

    def fail() -> None:
        calls.append(threading.get_ident())
        if len(calls) == 1:
            held.wait()
        raise BrokenError

    def step(x):
        return mean(x)

    x = own(strategy, 5)
    with at_compilations(fail):
        first = in_thread(lambda: strategy.run(step, (x,)))
        assert held.has_come.wait(SECS)
        second = in_thread(lambda: strategy.run(step, (x,)))
        held.may_continue.set()
        for future in (first, second):
            with pytest.raises(BrokenError):
                future.result(SECS)
    assert float(strategy.run(step, (x,))[0]) == (strategy.num_replicas_in_sync + 1) / 2


@rows("phase", ["trace", "compilation"])
@rows("strategy", TWO_KINDS)
def test_interrupt_of_a_new_program_does_not_stop_other_threads(strategy, phase):
    """Neither a thread that waits for the same program, nor the next call."""
    interrupts = [True]

    def interrupt() -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and interrupts and interrupts.pop():
            waiting.append(in_thread(lambda: strategy.run(step, (x,))))
            signal.raise_signal(signal.SIGINT)

    def listen(event: str, _: float, fun_name: str = "", **__: Any) -> None:
        if event == COMPILED and phase == "compilation" and "step" in fun_name:
            interrupt()

    def step(x):
        if phase == "trace":
            interrupt()
        return mean(x)

    waiting: list[Future[Any]] = []
    x, expected = own(strategy, 5), (strategy.num_replicas_in_sync + 1) / 2
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step, (x,))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert float(waiting[0].result(SECS)[0]) == expected
    assert float(in_thread(lambda: strategy.run(step, (x,))).result(SECS)[0]) == expected
    assert float(strategy.run(step, (x,))[0]) == expected


@pytest.mark.slow
@rows("strategy", TWO_KINDS)
def test_shapes_of_other_threads_do_not_displace_a_new_program(strategy):
    """Another thread may run the step with its own shape whenever no lock is held."""

    def step(x):
        index = mirror.get_replica_context().replica_id_in_sync_group
        return x + mean(1.0 * index)

    xs = {size: np.ones(size, np.float32) for size in (3, 5)}  # mirrored, not per-replica

    def run_other() -> None:
        if threading.current_thread() is threading.main_thread():
            in_thread(lambda: strategy.run(step, (xs[3],))).result(SECS)

    with inside.when_programs_are_found(strategy, run_other):
        for _ in range(3):
            assert strategy.run(step, (xs[5],)).shape == (5,)


# State


@pytest.mark.slow
@rows("strategy", TWO_KINDS)
def test_threads_that_train_one_model_with_new_shapes_lose_no_update(strategy):
    with strategy.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
        count = nnx.Variable(jnp.zeros((), jnp.int32))

    def step(model, optimizer, count, x):
        grads = nnx.grad(lambda model: model(jnp.stack([x, x], 1)).mean())(model)
        optimizer.update(model, mean(grads))
        count[...] += 1

    num_steps, sizes = 6, (1, 2, 3, 4)
    xs = [own(strategy, size) for size in sizes]

    def train(x: Any) -> None:
        for _ in range(num_steps):
            strategy.run(step, (model, optimizer, count, x))

    for future in [in_thread(functools.partial(train, x)) for x in xs]:
        future.result(SECS)
    assert int(count[...]) == int(optimizer.step[...]) == num_steps * len(sizes)
    strategy.check_mirrored((model, optimizer, count))


@rows("strategy", TWO_KINDS)
def test_model_that_another_thread_trains_during_a_compilation_keeps_both_updates(strategy):
    """The new program runs on the state of its launch, not on that of its trace."""
    me: list[int] = []
    with strategy.scope():
        count = nnx.Variable(jnp.zeros(()))

    def step(count, x):
        count[...] += x.shape[0]

    xs = {size: own(strategy, size) for size in (3, 5)}
    with held_compilations(only_in(me)) as held:
        strategy.run(step, (count, xs[3]))

        def run_slowly() -> None:
            me.append(threading.get_ident())
            strategy.run(step, (count, xs[5]))

        slow = in_thread(run_slowly)
        assert held.has_come.wait(SECS)
        for _ in range(4):
            strategy.run(step, (count, xs[3]))
        assert float(count[...]) == 15
        held.may_continue.set()
        slow.result(SECS)
    assert float(count[...]) == 20
