"""Launches that do not end: the report, the actions, and no false alarm."""

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mirror
from tests.support import fresh, inside
from tests.support.clocks import FakeClock
from tests.support.messages import assert_message, raises
from tests.support.tables import rows
from tests.support.waiting import wait_until

launches, watch_module = inside.launches(), inside.watch_module()
Described = launches.Described

HERE = os.path.basename(__file__)
CPUS = [f"/cpu:{i}" for i in range(4)]
LAYOUTS = {
    "pmap": lambda: mirror.MirroredStrategy(CPUS),
    "shard": lambda: mirror.MirroredStrategy(CPUS, shard="optimizer"),
    "vmap": lambda: mirror.MirroredStrategy(CPUS[:1], replicas_per_device=4),
    "vmap on devices": lambda: mirror.MirroredStrategy(CPUS[:2], replicas_per_device=2),
    "staged": lambda: mirror.MirroredStrategy(CPUS, mirror.ReductionToOneDevice()),
    "one replica": lambda: mirror.MirroredStrategy(CPUS[:1]),
}
NAMES_REPLICA = {"pmap", "shard", "staged"}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of the watch, which only tests advance: a slow machine is no stall."""
    fake = FakeClock()
    inside.use_clock(fake, monkeypatch)
    return fake


class Gate:
    """A callback that blocks on one replica until `open` is called."""

    def __init__(self, clock, replica=0):
        self.clock, self.replica = clock, replica
        self.is_entered, self.is_open = threading.Event(), threading.Event()

    def __call__(self, replica):
        if replica == self.replica:
            self.is_entered.set()
            assert self.is_open.wait(900)
        return np.float32(0)

    def open(self):
        self.is_open.set()

    @contextlib.contextmanager
    def opened_by(self, watch):
        """Lets time pass while the callback blocks, until the watch has reported; then opens."""
        with self.while_time_passes(lambda: bool(watch.reports)):
            yield

    @contextlib.contextmanager
    def while_time_passes(self, condition):
        """Lets time pass while the callback blocks, until a condition holds; then opens."""

        def pass_time():
            assert self.is_entered.wait(900)
            while not condition():
                self.clock.advance(0.05)
            self.open()

        thread = threading.Thread(target=pass_time, name="opens the gate")
        thread.start()
        try:
            yield
        finally:
            thread.join()


def line_after(text):
    """Returns the place of the first line of this file that contains a comment."""
    with open(__file__) as file:
        numbers = [i for i, line in enumerate(file, 1) if f"# {text}" in line]
    return f"{HERE}:{numbers[0]}"


def gated_step(gate):
    def step(x):  # the step
        context = mirror.get_replica_context()
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        replica = context.replica_id_in_sync_group
        x += jax.pure_callback(gate, zero, replica, vmap_method="sequential")  # the callback
        return context.all_reduce("sum", x)  # the collective

    return step


def argument(strategy):
    return mirror.PerReplica([np.float32(1)] * strategy.num_replicas_in_sync)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_report_names_step_replica_collective_and_threads(layout, capfd, clock):
    strategy = LAYOUTS[layout]()
    replica = 0 if layout == "one replica" else 2
    gate = Gate(clock, replica)
    with mirror.debugging.watch(secs=0.3) as watch, gate.opened_by(watch):
        total = strategy.run(gated_step(gate), (argument(strategy),))
    assert float(total) == strategy.num_replicas_in_sync
    first, ended = watch.reports
    callback = line_after("the callback")
    assert_message(first, values=[f"step ({line_after('the step')})", callback])
    assert "in __call__: assert self.is_open.wait(900)" in first
    assert "(opens the gate):" in first
    assert "(MainThread):" in first
    if layout != "one replica":
        assert_message(first, values=[f"all-reduce at {line_after('the collective')}"])
    if layout in NAMES_REPLICA:
        assert re.search(r"replica 2\b", first)
    assert f"step ({line_after('the step')}) has ended after all" in ended
    error = capfd.readouterr().err
    assert first in error
    assert ended in error


ZERO = jax.ShapeDtypeStruct((), jnp.float32)
KINDS = {
    "pure_callback": lambda gate, replica: jax.pure_callback(gate, ZERO, replica),
    "io_callback": lambda gate, replica: jax.experimental.io_callback(gate, ZERO, replica),
    "debug_callback": lambda gate, replica: jax.debug.callback(lambda i: gate(i) and None, replica),
}


@rows("in_loop", [False, True])
@rows("layout", ["pmap", "staged"])
@rows("kind", list(KINDS))
def test_report_names_each_kind_of_callback(kind, layout, in_loop, clock):
    strategy, gate = LAYOUTS[layout](), Gate(clock, 1)

    def step(x):
        context = mirror.get_replica_context()
        replica = context.replica_id_in_sync_group

        def body(i, x):
            result = KINDS[kind](gate, replica)
            return x if result is None else x + result

        x = jax.lax.fori_loop(0, 2, body, x) if in_loop else body(0, x)
        return context.all_reduce("sum", x)

    with mirror.debugging.watch(secs=0.3) as watch, gate.opened_by(watch):
        total = strategy.run(step, (argument(strategy),))
    assert float(total) == 4.0
    of = " of replica 1" if layout == "pmap" else ""
    expected = f"the {kind}{of} at {HERE}:"
    assert expected in watch.reports[0]


def test_report_says_that_other_threads_wait_for_their_turn(clock):
    gate = Gate(clock)
    others = []

    def other(x):
        others.append(1)
        return x + 1

    def have_begun():
        return len(launches.log.unfinished()) == 2

    threads = []
    with mirror.debugging.watch(secs=0.4) as watch:
        for step in (gated_step(gate), other):
            run = functools.partial(LAYOUTS["one replica"]().run, step, (1.0,))
            threads.append(threading.Thread(target=run))
            threads[-1].start()
            assert gate.is_entered.wait(900)
        wait_until(have_begun)
        with gate.opened_by(watch):
            pass
        for thread in threads:
            thread.join()
    assert_message(watch.reports[0], values=["step (", "other (", "waits for its turn"])


@rows("layout", ["pmap", "vmap on devices", "staged"])
def test_stall_raises_until_the_launch_has_ended(layout, clock):
    strategy, gate, raised = LAYOUTS[layout](), Gate(clock, 1), threading.Event()
    step, arguments = gated_step(gate), (argument(strategy),)
    with mirror.debugging.watch(0.3, "raise") as watch:
        with gate.while_time_passes(raised.is_set):
            try:
                with raises(mirror.StalledError, values=["step (", "has not ended for 0."]):
                    strategy.run(step, arguments)
                with raises(mirror.StalledError, values=["step ("]):
                    strategy.run(step, arguments)
            finally:
                raised.set()
        wait_until(lambda: not launches.log.unfinished())
        clock.advance(0.1)
        # A stall and its end; in stages, the second call may launch and stall as well.
        stalls = [report for report in watch.reports if "has not ended" in report]
        assert len(watch.reports) == 2 * len(stalls)
        assert len(stalls) == 1 or layout == "staged"
        assert float(strategy.run(step, arguments)) == 4.0
    assert len(watch.reports) == 2 * len(stalls)


def test_each_stall_is_raised_or_ends_the_process(monkeypatch, clock):
    """Also after an earlier stall has been raised, and its launch has ended."""
    ends = threading.Event()
    monkeypatch.setattr(watch_module, "_end_if_stalled", ends.set)
    monkeypatch.setattr(launches, "joint", launches.deque(maxlen=8))
    with mirror.debugging.watch(0.2, "raise") as watch:
        for number in (1, 2):
            stalled = launches.log.begin(Described("step", "train.py:5", spans_processes=True))
            stalled.starts()
            clock.advance(0.3)
            assert len(watch.reports) == 2 * number - 1
            assert not ends.is_set()
            if number == 1:
                with raises(mirror.StalledError, values=["step (train.py:5), launch 1"]):
                    launches.log.require_no_stall()
                clock.advance(30.0)
                assert not ends.is_set()  # the user's code knows of it
                stalled.ends()
                clock.advance(0.1)
                assert len(watch.reports) == 2
        clock.advance(9.0)
        assert not ends.is_set()
        clock.advance(5.0)
        assert ends.is_set()  # nobody has asked the log: the thread waits in native code
        stalled.ends()


def test_earlier_launches_are_waited_for_in_slices(clock):
    """A step without callbacks does not wait for its own launch, but for earlier ones."""
    strategy, gate, raised = LAYOUTS["pmap"](), Gate(clock, 1), threading.Event()

    def block():
        with contextlib.suppress(mirror.StalledError):
            strategy.run(gated_step(gate), (argument(strategy),))

    def other(x):
        return mirror.all_reduce("mean", x)

    other_strategy, blocked = LAYOUTS["pmap"](), threading.Thread(target=block)
    other_strategy.run(other, (argument(strategy),))
    with mirror.debugging.watch(0.3, "raise"):
        blocked.start()
        assert gate.is_entered.wait(900)
        with gate.while_time_passes(raised.is_set):
            try:
                with raises(mirror.StalledError, values=["step ("]):
                    for _ in range(10_000):  # at most 32 are in flight
                        other_strategy.run(other, (argument(strategy),))
            finally:
                raised.set()
        blocked.join()


def ends_with(action, secs):
    return subprocess.run(
        [sys.executable, str(fresh.PROGRAMS / "stalled_step.py"), action, str(secs)],
        env={**fresh.INHERITED, "PYTHONPATH": str(fresh.ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("action", [pytest.param("exit", marks=pytest.mark.nightly), "raise"])
def test_stalled_process_ends_with_its_status(action):
    done = ends_with(action, 1)
    assert done.returncode == watch_module.EXIT_STATUS == 75, done.stderr
    assert "replica 1" in done.stderr
    assert ("mirror.StalledError" in done.stderr) == (action == "raise")
    assert "status 75" in done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(jax.__version_info__ >= (0, 13), reason="XLA may have changed its limit")
def test_report_precedes_the_abort_of_xla():
    """XLA waits 40 s, so that a watch of 60 s reports after 30."""
    done = ends_with("report", 60)
    assert done.returncode == -6, done.stderr
    assert "has not ended for 30 s" in done.stderr
    assert done.stderr.index("has not ended") < done.stderr.index("Termination timeout")


@rows("compiles", [True, False])
def test_compiling_does_not_count(compiles, clock):
    def program(arrays):
        clock.advance(0.8)
        return [arrays]

    with mirror.debugging.watch(secs=0.2) as watch:
        described = Described("slow")
        inside.launch_guard().launch(
            program, [jnp.ones(3)], [], described, bounded=False, compiles=compiles
        )
    assert len(watch.reports) == (0 if compiles else 2)


def test_jax_tells_when_it_has_compiled():
    """The first run of a step counts from then on; fails if JAX renames the event."""
    phases = []

    def look():
        (entry,) = launches.log.unfinished()
        phases.append(entry.phase)
        return np.float32(0)

    def step(x):
        return x + jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32))

    strategy = LAYOUTS["one replica"]()
    with mirror.debugging.watch(60):
        for _ in range(2):
            strategy.run(step, (1.0,))
    assert phases == ["running", "running"]


def test_time_in_which_the_process_was_stopped_does_not_count(clock):
    log = launches.LaunchLog()
    log.begin(Described("step")).starts()
    stopwatch = watch_module._Stopwatch(log, 1.0)
    secs = []
    for pause in (1, 1, 3600, 1):
        clock.jump(pause)
        secs.append(stopwatch.look()[1])
    assert secs == [0.0, 1.0, 3.0, 4.0]


@rows("layout", ["pmap", "staged", "vmap"])
def test_steps_that_end_are_not_reported(layout, clock):
    """Many short launches, unawaited and with results dropped."""
    strategy = LAYOUTS[layout]()

    def step(x):
        return x * 1.0, mirror.all_reduce("mean", x)

    x = argument(strategy)
    strategy.run(step, (x,))
    with mirror.debugging.watch(secs=0.25) as watch:
        for _ in range(4):
            for _ in range(5):
                x, mean = strategy.run(step, (x,))
            jax.block_until_ready((x.stacked, mean))
            clock.advance(0.2)
    assert watch.reports == []


def test_nobody_watches_by_default(monkeypatch):
    """A launch without a watch makes no record."""
    monkeypatch.setattr(launches, "log", None)
    monkeypatch.setattr(launches, "Launch", None)
    strategy = LAYOUTS["pmap"]()
    assert strategy.run(lambda x: x + 1, (1,)) == 2


def test_watches_end_and_may_be_nested():
    before, log = set(threading.enumerate()), launches.log
    outer = mirror.debugging.watch(60)
    with mirror.debugging.watch(60, "raise") as inner:
        assert launches.log is not None
    assert repr(inner) == "Watch(secs=60, action='raise', closed)"
    outer.close()
    outer.close()
    assert launches.log is log
    assert set(threading.enumerate()) <= before


@rows(
    "arguments, error, values",
    [
        ({"secs": 0}, ValueError, ["secs", "0"]),
        ({"secs": -1}, ValueError, ["secs", "-1"]),
        ({"secs": float("nan")}, ValueError, ["secs", "nan"]),
        ({"secs": float("inf")}, ValueError, ["secs", "inf"]),
        ({"secs": "60"}, TypeError, ["secs", "'60'"]),
        ({"secs": True}, TypeError, ["secs", "True"]),
        ({"secs": None}, TypeError, ["secs", "None"]),
        ({"action": "stop"}, ValueError, ["action", "'stop'", "'report', 'raise', 'exit'"]),
        ({"action": None}, ValueError, ["action", "None"]),
    ],
)
def test_wrong_arguments_are_rejected(arguments, error, values):
    before = set(threading.enumerate())
    with raises(error, values=values):
        mirror.debugging.watch(**arguments)
    assert set(threading.enumerate()) <= before


def trainer_with(gate, layout, **options):
    calls = []

    def block(replica):
        calls.append(replica)
        if len(calls) > 8:  # the third step of four replicas
            gate(replica)
        return np.float32(0)

    def loss_fn(model, batch):  # the loss
        replica = mirror.get_replica_context().replica_id_in_sync_group
        zero = jax.ShapeDtypeStruct((), jnp.float32)
        waits = jax.pure_callback(block, zero, replica, vmap_method="sequential")
        return optax.squared_error(model(batch["x"]), batch["y"])[:, 0] + waits

    strategy = LAYOUTS[layout]()
    with strategy.scope():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return mirror.Trainer(model, optax.sgd(0.1), loss_fn, strategy=strategy, **options)


ARRAYS = {"x": np.ones((40, 2), "float32"), "y": np.ones((40, 1), "float32")}
METHODS = {
    "fit": lambda trainer: trainer.fit(ARRAYS, 9, batch_size=4, progress=False),
    "evaluate": lambda trainer: trainer.evaluate(ARRAYS, batch_size=4),
}


@pytest.mark.parametrize("layout", ["pmap", "staged"])
@pytest.mark.parametrize("method", METHODS)
def test_trainer_raises_for_a_step_that_does_not_end(method, layout, clock):
    gate, raised = Gate(clock, 1), threading.Event()
    trainer = trainer_with(gate, layout, stall_secs=0.4)
    values = ["has not ended", "block", f"({line_after('the loss')})"]
    with gate.while_time_passes(raised.is_set):
        try:
            with raises(mirror.StalledError, values=values):
                METHODS[method](trainer)
        finally:
            raised.set()
    assert launches.log is None or not launches.log.stalls
    METHODS[method](trainer)  # it trains on


def test_evaluation_within_fit_is_watched_once(monkeypatch, clock):
    watches = []

    def watch(*arguments):
        watches.append(arguments)
        return contextlib.nullcontext()

    monkeypatch.setattr(inside.trainer_module(), "watch", watch)
    gate = Gate(clock)
    gate.open()
    trainer = trainer_with(gate, "pmap", stall_secs=5)
    trainer.fit(ARRAYS, 2, batch_size=8, validation_data=ARRAYS, progress=False)
    trainer.predict(ARRAYS, lambda model, batch: model(batch["x"]), batch_size=8)
    assert watches == [(5.0, "raise"), (5.0, "raise")]


@rows("secs", [0, "60", False])
def test_trainer_rejects_wrong_stall_secs(secs):
    with raises((TypeError, ValueError), values=["stall_secs", repr(secs)]):
        mirror.Trainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), print, stall_secs=secs)


def test_closed_standard_error_does_not_end_the_watch(monkeypatch, clock):
    strategy, gate = LAYOUTS["pmap"](), Gate(clock, 1)
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with mirror.debugging.watch(secs=0.3) as watch, gate.opened_by(watch):
        strategy.run(gated_step(gate), (argument(strategy),))
    assert len(watch.reports) == 2


def test_step_may_be_any_callable(clock):
    """A partial has the line of its function; a callable of a library has none."""
    strategy, gate = LAYOUTS["pmap"](), Gate(clock, 1)
    with mirror.debugging.watch(secs=0.3) as watch, gate.opened_by(watch):
        strategy.run(functools.partial(gated_step(gate)), (argument(strategy),))
    assert f"step ({line_after('the step')})" in watch.reports[0]
    assert strategy.run(jnp.negative, (1,)) == -1
