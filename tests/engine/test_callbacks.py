"""Host callbacks in steps: `run` raises their exception once, and nothing waits forever."""

import contextlib
import io
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mirror
from mirror import PerReplica
from tests.support.inside import launch_guard
from tests.support.messages import assert_message
from tests.support.strategies import ONE, PAIRS, cpu_strategy, executors
from tests.support.tables import Made, mostly_slow, rows

AXIS = mirror.REPLICA_AXIS
EXECUTORS = {**ONE, **PAIRS, **executors(4)}
STRATEGIES = Made(EXECUTORS)


class BadDataError(Exception):
    """The user's own."""


def look(value):
    if np.any(value == 0):
        raise BadDataError(f"value {float(value)}")


def look_at(value):
    look(value)
    return np.float32(2 * value)


OF_FLOAT = jax.ShapeDtypeStruct((), jnp.float32)
KINDS = {
    "debug": lambda x: (jax.debug.callback(look, x), x)[1],
    "pure": lambda x: jax.pure_callback(look_at, OF_FLOAT, x),
    "pure, vmap_method": lambda x: jax.pure_callback(
        look_at, OF_FLOAT, x, vmap_method="sequential"
    ),
    "io": lambda x: jax.experimental.io_callback(look_at, OF_FLOAT, x),
}
PLACES = {
    "top": lambda call, x: call(x),
    "jit": lambda call, x: jax.jit(call)(x),
    "scan": lambda call, x: lax.scan(lambda c, _: (call(x) + 0 * c, None), x, None, 2)[0],
    "cond": lambda call, x: lax.cond(x >= 0, call, lambda x: x, x),
}


def numbers(strategy, start):
    return PerReplica([np.float32(start + i) for i in range(strategy.num_replicas_in_sync)])


ALL = list(itertools.product(KINDS, PLACES))
# `jax.vmap` has no io_callback under a condition that differs between rows.
SOME = [("debug", "cond"), ("pure", "scan"), ("pure, vmap_method", "jit"), ("io", "top")]
ERRORS = [(executor, *each) for executor in EXECUTORS for each in SOME]
REST = [("pmap", *each) for each in ALL if each not in SOME]


@pytest.mark.parametrize("errors", mostly_slow(ERRORS + REST, *ERRORS))
def test_run_reraises_callback_errors_of_one_replica(subtests, errors):
    for executor, kind, place in errors:
        with subtests.test(executor=executor, kind=kind, place=place):
            check_run_reraises_callback_errors(EXECUTORS[executor](), kind, place)


def check_run_reraises_callback_errors(strategy, kind, place):
    def step(x):
        return lax.psum(PLACES[place](KINDS[kind], x), AXIS)

    wanted = np.asarray(strategy.run(step, (numbers(strategy, 1),)))
    with pytest.raises(BadDataError, match=r"value 0\.0"):
        strategy.run(step, (numbers(strategy, 0),))
    # The error belongs to that step; later steps, of the same program or another, are not affected.
    np.testing.assert_array_equal(strategy.run(step, (numbers(strategy, 1),)), wanted)
    n = strategy.num_replicas_in_sync
    assert float(strategy.run(lambda x: lax.psum(x, AXIS), (numbers(strategy, 0),))) == sum(
        range(n)
    )


@rows("place", ["top", "jit", "scan"])
@rows("strategy", STRATEGIES)
def test_each_replica_calls_without_operands_of_its_own(strategy, place):
    tickets = itertools.count()

    def step(x):
        take = lambda y: jax.experimental.io_callback(  # noqa: E731
            lambda y: y + np.float32(next(tickets)), OF_FLOAT, y
        )
        return x * 0 + PLACES[place](take, jnp.float32(0))

    found = [float(value) for value in strategy.run(step, (numbers(strategy, 0),)).values]
    n = strategy.num_replicas_in_sync
    assert next(tickets) == (2 * n if place == "scan" else n)
    assert len({*found}) == n


@rows("strategy", STRATEGIES)
def test_failed_callback_leaves_state_unchanged(strategy):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

    def step(model, state, x):
        jax.debug.callback(look, x)
        model.w[...] = model.w[...] + lax.psum(x, AXIS)
        return state + 1

    model, state = Model(), jnp.zeros(3)
    args = (model, state, numbers(strategy, 0))
    for _ in range(2):
        with pytest.raises(BadDataError):
            strategy.run(step, args, donate_argnums=1)
    np.testing.assert_array_equal(model.w[...], [1, 1])
    np.testing.assert_array_equal(state, [0, 0, 0])
    strategy.run(step, (model, state, numbers(strategy, 1)), donate_argnums=1)
    strategy.check_mirrored(model)


@rows("strategy", STRATEGIES)
def test_several_callback_errors_are_raised_as_one_with_a_note(strategy):
    def step(x):
        jax.debug.callback(look, 0 * x)
        return lax.psum(x, AXIS)

    with pytest.raises(BadDataError) as error:
        strategy.run(step, (numbers(strategy, 1),))
    if strategy.num_replicas_in_sync > 1:
        assert_message(error.value.__notes__[0], values=4)


@rows("strategy", STRATEGIES)
def test_wrong_result_of_a_callback_of_one_replica_is_an_error(strategy, subtests):
    """JAX raises it into XLA, where the other replicas wait for this one."""
    wrong = {"shape": np.zeros(2), "dtype": True, "number of results": (0.0, 0.0)}
    now = np.float32(1)

    def step(x):
        answer = lambda v: now if v == 0 else v  # noqa: E731
        return lax.psum(jax.pure_callback(answer, OF_FLOAT, x), AXIS)

    strategy.run(step, (numbers(strategy, 0),))
    for name, now in wrong.items():  # noqa: B007
        with subtests.test(name), pytest.raises(ValueError, match="callback") as error:
            strategy.run(step, (numbers(strategy, 0),))
        assert_message(error.value, names=["test_callbacks.py"], values=["float32[]"])


METHODS = {
    "run": lambda s, x: s.run(lambda x: x * 2, (x,)),
    "reduce": lambda s, x: s.reduce("sum", x),
    "gather": lambda s, x: s.gather(PerReplica([np.ones(1)] * s.num_replicas_in_sync)),
    "check_mirrored": lambda s, x: s.check_mirrored(jnp.ones(2)),
    "inspect": lambda s, x: s.inspect(lambda x: x, (x,)),
}


@rows("method", list(METHODS))
@rows("executor", ["pmap", "vmap", "staged"])
def test_strategy_call_inside_a_callback_raises(executor, method):
    strategy = EXECUTORS[executor]()
    x = numbers(strategy, 1)
    errors = []

    def call(_):
        try:
            METHODS[method](strategy, x)
        except BaseException as error:
            errors.append(error)

    def step(x):
        jax.debug.callback(call, x)
        return lax.psum(x, AXIS)

    strategy.run(step, (x,))
    assert len(errors) == strategy.num_replicas_in_sync
    if method != "check_mirrored":  # it says first that the array is elsewhere
        name = method if method in ("reduce", "gather") else "<lambda>"
        for error in errors:
            assert_message(error, names=name, fix=["callback", "strategy.run"])
    assert all(isinstance(error, RuntimeError | ValueError) for error in errors)


class Terminal(io.StringIO):
    """A terminal that takes nothing until it may."""

    def __init__(self):
        super().__init__()
        self.texts, self.may_write = [], threading.Event()

    def write(self, text):
        assert self.may_write.wait(900)
        self.texts.append(text)
        return len(text)


# On one device, JAX runs a small program in the thread that calls it. The staged executor reads the
# results of each stage.
@rows("strategy", Made({name: EXECUTORS[name] for name in ("pairs", "pmap")}))
def test_prints_do_not_block_a_step(strategy):
    def step(x):
        jax.debug.print("{}", x)
        return lax.psum(x, AXIS)

    terminal = Terminal()
    with contextlib.redirect_stdout(terminal):
        result = strategy.run(step, (numbers(strategy, 1),))
        terminal.may_write.set()
        result.block_until_ready()
        jax.effects_barrier()
    said = sorted(float(text) for text in terminal.texts if text.strip())
    assert said == [i + 1.0 for i in range(strategy.num_replicas_in_sync)]


FORMATS = {  # and whether they print a number and a vector
    "{:d} {}": False,
    "{} {:.3f}": False,
    "{:{width}.1f} {!r:>20}": True,
    "{0.weak_type} {1.shape} {name:>5}": True,
}


@rows("strategy", STRATEGIES)
def test_print_that_cannot_format_its_values_leaves_the_state(strategy, subtests):
    """JAX raises the error when it prints, after the launch has donated the state."""
    for text, fits in FORMATS.items():
        model = nnx.Linear(1, 3, rngs=nnx.Rngs(0))
        before = np.asarray(model.bias[...])

        def step(model, x):
            more = {k: v for k, v in {"width": 8, "name": "bias"}.items() if k in text}
            jax.debug.print(text, x, model.bias[...], **more)
            model.bias[...] += lax.psum(x, AXIS)

        args = (model, numbers(strategy, 1))
        with subtests.test(text), contextlib.redirect_stdout(io.StringIO()):
            if fits:
                strategy.run(step, args)
                jax.effects_barrier()
                assert np.all(np.asarray(model.bias[...]) > before)
                continue
            with pytest.raises(ValueError, match="format") as error:
                strategy.run(step, args)
            assert_message(error.value, names=["test_callbacks.py", text], values=["float32[3]"])
            np.testing.assert_array_equal(model.bias[...], before)


@pytest.mark.skipif(not launch_guard().is_needed(), reason="this JAX needs no guard")
def test_callback_error_is_raised_by_its_own_launch():
    """An error of another program, for example: reading its results raises it."""

    class Failed:
        def block_until_ready(self):
            raise RuntimeError("of another step")

    strategy = cpu_strategy(2)
    step = lambda x: lax.psum(x, AXIS)  # noqa: E731
    assert float(strategy.run(step, (numbers(strategy, 1),))) == 3
    jax.effects_barrier()
    with launch_guard()._lock:
        launch_guard()._in_flight.extend([Failed(), Failed()])
    for _ in range(4):
        assert float(strategy.run(step, (numbers(strategy, 1),))) == 3


def test_threads_run_failing_and_healthy_steps_concurrently():
    strategy, other = cpu_strategy(2), cpu_strategy(2)
    wrong = []

    def failing(x):
        jax.debug.callback(look, x)
        return lax.psum(x, AXIS)

    def healthy(x):
        return lax.psum(x, AXIS)

    def loop(strategy, step, start):
        for _ in range(10):
            try:
                found = float(strategy.run(step, (numbers(strategy, start),)))
                if step is failing or found != 3:
                    wrong.append(found)
            except BadDataError:
                if step is healthy:
                    wrong.append("an error of another step")

    threads = [
        threading.Thread(target=loop, args=args)
        for args in [(strategy, failing, 0), (other, healthy, 1), (strategy, healthy, 1)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(900)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@rows("strategy", STRATEGIES)
def test_results_of_callbacks_have_the_bits_of_the_step(strategy):
    """XLA calls in threads that do not know `jax.enable_x64` of the thread that runs the step."""
    jax.config.update("jax_enable_x64", True)
    try:
        with jax.enable_x64(False):
            step = lambda x: lax.psum(jax.pure_callback(np.float64, OF_FLOAT, x), AXIS)  # noqa: E731
            total = strategy.run(step, (numbers(strategy, 1),))
    finally:
        jax.config.update("jax_enable_x64", False)
    n = strategy.num_replicas_in_sync
    assert (total.dtype, float(total)) == (np.float32, n * (n + 1) / 2)
