"""Host devices do not deadlock, with any number of queued steps and threads."""

import functools
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import mirror
from tests.support import fresh, inside

guard, eager = inside.launch_guard(), inside.eager_guard()
Described = inside.launches().Described

CASES = {
    "one thread": ["--threads", "1"],
    "four threads": ["--threads", "4"],
    "four eager threads": ["--eager", "4", "--steps", "200"],
    "eight eager threads": ["--eager", "8", "--steps", "100"],
    "eager collectives": ["--reduce", "2", "--eager", "1", "--steps", "200"],
}
# As it was before any test.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}


def soak(*options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.soak", *options],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=fresh.ROOT,
        env=ENVIRONMENT,
        check=False,
    )


AHEAD = {case: functools.partial(soak, *options) for case, options in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "eager collectives" else pytest.mark.nightly)
        for case in CASES
    ],
)
def test_unawaited_steps_finish_with_equal_replicas(case, ahead):
    done = ahead[__name__][case].result()
    assert done.returncode == 0, done.stderr[-2000:]
    assert "replicas equal" in done.stdout


needs_guard = pytest.mark.skipif(not guard.is_needed(), reason="this JAX needs no guard")


@needs_guard
def test_launches_in_flight_are_bounded(eight):
    for _ in range(10):
        eight.reduce("sum", 1.0)
    assert 0 < len(guard._in_flight) <= guard.MOST_IN_FLIGHT


@needs_guard
def test_eager_work_on_several_devices_is_bounded(eight):
    eight.reduce("sum", 1.0)  # a launch starts the counting
    with eight.scope():
        x = jnp.zeros(())
    for _ in range(3):
        x = x + 1  # JAX calls nothing after calls that compile
    eager._in_flight.clear()
    for _ in range(3 * eager.MOST_IN_FLIGHT):
        x = x + 1
        assert 0 < len(eager._in_flight) <= eager.MOST_IN_FLIGHT
    alone = jnp.ones(())
    before = list(eager._in_flight)
    assert float(alone + alone) == 2
    assert list(map(id, eager._in_flight)) == list(map(id, before))
    assert float(x) == 3 + 3 * eager.MOST_IN_FLIGHT


@needs_guard
@pytest.mark.parametrize("kind", ["large", "small", "key", "deleted"])
def test_guard_releases_finished_results(eight, kind):
    """The guard waits for large results and keys; the next launch releases small ones."""
    eight.reduce("sum", 1.0)
    with eight.scope():
        x = jax.random.key(0) if kind == "key" else jnp.ones(2**16 if kind == "large" else 3)
    again = jax.jit(lambda x: x.reshape(1, -1))
    for _ in range(2):
        y = again(x)  # JAX calls nothing after the one that compiles
    jax.block_until_ready(y)
    if kind == "deleted":
        y.delete()
        eight.reduce("sum", 1.0)
    y = weakref.ref(y)
    if kind == "small":
        assert y() is not None
        eight.reduce("sum", 1.0)
    assert y() is None
    again(x)
    eight.reduce("sum", 1.0)


@needs_guard
@pytest.mark.parametrize("bounded", [True, False])
def test_no_python_runs_between_a_launch_and_its_outputs(eight, bounded):
    """An interrupt is raised in Python, and would lose the state that replaces a donated one."""
    with eight.scope():
        x = jnp.zeros(())
    eight.reduce("sum", 1.0)
    x + 1
    compiled = jax.jit(lambda x: (x + 1,))
    compiled(x)
    held: list = []
    guard.launch(compiled, (x,), held, Described("plus 1"), bounded=bounded)
    calls = []

    def record(frame, event, arg):
        if event in ("call", "c_call"):
            calls.append(arg.__name__ if event == "c_call" else frame.f_code.co_name)

    sys.setprofile(record)
    try:
        guard.launch(compiled, (x,), held, Described("plus 1"), bounded=bounded)
    finally:
        sys.setprofile(None)
    assert len(held) == 2
    launched = calls[calls.index("extend") :]
    assert launched[:2] == ["extend", "__exit__"]


@needs_guard
def test_debug_nans_takes_precedence(eight):
    with eight.scope():
        zero = jnp.zeros(())
    zero + zero
    with jax.debug_nans(True):
        eight.reduce("sum", 1.0)
        with pytest.raises(FloatingPointError):
            zero / zero
    jax.config.update("jax_debug_nans", True)
    try:
        eight.reduce("sum", 1.0)
        with pytest.raises(FloatingPointError):
            zero / zero
    finally:
        jax.config.update("jax_debug_nans", False)
    divide = jax.jit(lambda a, b: a / b)
    divide(zero + 1, zero + 1)
    jax.config.update("jax_debug_nans", True)
    try:
        with jax.debug_nans(False):
            eight.reduce("sum", 1.0)
        # In another thread: in this one, JAX no longer checks.
        with ThreadPoolExecutor(1) as pool, pytest.raises(FloatingPointError):
            pool.submit(divide, zero, zero).result()
    finally:
        jax.config.update("jax_debug_nans", False)
    eight.reduce("sum", 1.0)  # counts again
    eager._in_flight.clear()
    for _ in range(3):
        zero + zero
    assert eager._in_flight


@pytest.mark.skipif(guard.is_needed(), reason="this JAX needs the guard")
def test_newer_jax_is_not_guarded(eight):
    eight.reduce("sum", 1.0)
    assert not guard._in_flight
    assert not eager._in_flight


def test_one_device_is_not_bounded():
    before = list(guard._in_flight)
    mirror.OneDeviceStrategy("/cpu:0").reduce("sum", 1.0)
    assert list(guard._in_flight) == before


@needs_guard
def test_eager_work_is_bounded_before_a_first_step_compiles(monkeypatch):
    """Other threads continue while a step is compiled, and would fill the queues of the devices."""
    calls = inside.count_eager_bounds(monkeypatch)
    mirror.OneDeviceStrategy("/cpu:0")
    assert not calls
    mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    assert calls
