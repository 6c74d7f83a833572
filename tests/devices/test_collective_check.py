"""The all-reduce is tested before it is used: what is found, and that nothing hangs on it."""

import contextlib
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirror._src.devices import collective_check as selftest
from mirror._src.devices.collective_check import all_reduce_fault, stuck
from mirror._src.devices.replicas import ReplicaDevices
from tests.support import fresh
from tests.support.messages import assert_message

CPUS = tuple(jax.devices("cpu"))
REAL = selftest._sums
LONG_SECS = 30  # nothing that works, on a busy machine, takes as long


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(selftest, "_faults", {})


@pytest.fixture
def held():
    """An event that work may wait for, and that no test leaves unset."""
    event = threading.Event()
    yield event
    event.set()
    join_all()


def ours():
    return [thread for thread in threading.enumerate() if thread.name == "selftest"]


def join_all():
    for thread in ours():
        thread.join(LONG_SECS)
    assert not ours()


def lies(change):
    """`_sums`, but with the copies changed."""

    def sums(devices, over):
        found = [[copy.copy() for copy in copies] for copies in REAL(devices, over)]
        change(found)
        return found

    return sums


def fails(error):
    def work(*arguments):
        raise error

    return work


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_it_works_on_host_devices(count):
    assert all_reduce_fault(CPUS[:count]) is None
    assert all_reduce_fault(CPUS[:count][::-1]) is None
    assert stuck(CPUS[:count]) == ()
    assert not ours()


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("size", selftest._SIZES)
def test_it_is_an_all_reduce(count, size):
    text = selftest._compiled(ReplicaDevices(CPUS[:count]), size).as_text()
    assert " all-reduce(" in text
    assert not any(f" {other}(" in text for other in ("all-gather", "all-to-all"))


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_the_sums_are_exact_and_the_devices_differ(count):
    rows = selftest._rows(count, 2 * selftest._PERIOD)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows.sum(axis=0), rows.astype(np.int64).sum(axis=0))
    np.testing.assert_array_equal(rows[::-1].sum(axis=0), rows.sum(axis=0))
    assert rows.sum(axis=0).max() < 2**24
    assert len(set(rows[:, 0])) == count


def wrong_on_the_second(found):
    found[1][1][17] = 3


def nan_on_the_last(found):
    found[0][2][7] = np.nan


def misplaced(found):
    found[1][0] = np.roll(found[1][0], 2**16)


WRONG = {
    # the device, what it got, the sum, the element, of how many
    wrong_on_the_second: ["/device:CPU:1", "3.0", "57.0", 17, 1048576],
    nan_on_the_last: ["/device:CPU:2", "nan", "27.0", 7, 8],
    misplaced: ["/device:CPU:0", "2166.0", "6.0", 0, 1048576],
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_sum_is_said(change, monkeypatch):
    monkeypatch.setattr(selftest, "_sums", lies(change))
    assert_message(all_reduce_fault(CPUS[:3]), values=WRONG[change])


def test_a_contribution_left_out_or_added_twice_is_seen(monkeypatch):
    row = selftest._rows(3, 8)[1]
    for change, got in [(-row, "4.0"), (row, "8.0")]:
        monkeypatch.setattr(selftest, "_faults", {})
        monkeypatch.setattr(
            selftest, "_sums", lies(lambda found, c=change: found[0][0].__iadd__(c))
        )
        assert_message(all_reduce_fault(CPUS[:3]), values=["/device:CPU:0", got, "6.0"])


@pytest.mark.parametrize(
    ("error", "text"),
    [(RuntimeError("NCCL operation failed"), "NCCL operation failed"), (OSError(), "OSError")],
)
def test_a_failure_is_its_text(error, text, monkeypatch):
    monkeypatch.setattr(selftest, "_sums", fails(error))
    assert all_reduce_fault(CPUS[:2]) == text


def test_a_stall_ends_at_the_deadline(held, monkeypatch, capfd):
    monkeypatch.setattr(selftest, "_sums", lambda devices, over: held.wait())
    before = time.monotonic()
    fault = all_reduce_fault(CPUS[:2], 0.25)
    assert_message(fault, values="0.25 s")
    assert 0.25 <= time.monotonic() - before < LONG_SECS
    (thread,) = ours()
    assert thread.daemon
    held.set()
    join_all()
    assert capfd.readouterr() == ("", "")
    assert all_reduce_fault(CPUS[:2]) == fault, "what comes late is late"


def test_a_stall_on_the_devices_leaves_no_thread(held, monkeypatch, capfd):
    """The computation is still under way, and nobody waits for it."""

    def stalls(replicas, size):
        def copy(rows):
            return jax.pure_callback(lambda x: held.wait() and np.asarray(x), rows, rows)

        axis = replicas.stacked.spec
        return jax.jit(jax.shard_map(copy, mesh=replicas.mesh, in_specs=axis, out_specs=axis))

    monkeypatch.setattr(selftest, "_compiled", stalls)
    assert_message(all_reduce_fault(CPUS[:2], 0.5), values="0.5 s")
    join_all()
    assert not held.is_set()
    assert capfd.readouterr() == ("", "")


def test_nothing_is_launched_after_the_deadline(held, monkeypatch):
    """A compilation that took too long."""
    launched = []
    monkeypatch.setattr(selftest, "_compiled", lambda *_: held.wait() and launched.append)
    assert_message(all_reduce_fault(CPUS[:2], 0.2), values="0.2 s")
    held.set()
    join_all()
    assert not launched


def test_the_answer_is_kept(monkeypatch):
    asked = []

    def counts(devices, over):
        asked.append(devices)
        return REAL(devices, over)

    monkeypatch.setattr(selftest, "_sums", counts)
    for devices in [CPUS[:2], CPUS[:3], CPUS[:2], CPUS[:3]]:
        assert all_reduce_fault(devices) is None
    assert asked == [CPUS[:2], CPUS[:3]]
    monkeypatch.setattr(selftest, "_sums", fails(RuntimeError("broken")))
    assert all_reduce_fault(CPUS[:2]) is None
    assert all_reduce_fault(CPUS[:4]) == all_reduce_fault(CPUS[:4]) == "broken"


def test_threads_that_ask_at_once_test_once(monkeypatch):
    asked, answers, barrier = [], [], threading.Barrier(4)

    def slow(devices, over):
        asked.append(devices)
        time.sleep(0.1)
        raise RuntimeError("broken")

    def ask():
        barrier.wait()
        answers.append(all_reduce_fault(CPUS[:2]))

    monkeypatch.setattr(selftest, "_sums", slow)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [CPUS[:2]]
    assert answers == ["broken"] * 4


@contextlib.contextmanager
def interrupted_after(secs):
    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(secs, interrupt)
    timer.start()
    yield
    timer.join()


@pytest.mark.parametrize("ask", [all_reduce_fault, stuck])
def test_an_interrupt_comes_out_at_once(ask, held, monkeypatch):
    for name in ("_sums", "_compute"):
        monkeypatch.setattr(selftest, name, lambda devices, over: over.wait() and held.wait())
    before = time.monotonic()
    with interrupted_after(0.2), pytest.raises(KeyboardInterrupt):
        ask(CPUS[:2], 600)
    assert time.monotonic() - before < LONG_SECS
    monkeypatch.undo()
    held.set()
    assert not ask(CPUS[:2]), "it left an answer, or the lock"
    selftest._faults.clear()


def test_devices_that_are_stuck_or_broken(held, monkeypatch):
    real = selftest._compute

    def compute(device, over):
        if device == CPUS[1]:
            held.wait()
        if device == CPUS[2]:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        real(device, over)

    before = time.monotonic()
    for device in CPUS[:4]:  # compiled: those that work answer in time
        real(device, threading.Event())
    monkeypatch.setattr(selftest, "_compute", compute)
    assert stuck(CPUS[:4], 0.9) == CPUS[1:3]
    assert time.monotonic() - before < LONG_SECS


OTHER = jax.sharding.Mesh(np.asarray(CPUS[4:6]), ("other",))
CONTEXTS = {
    "mesh": lambda: jax.set_mesh(OTHER),
    "default_device": lambda: jax.default_device(CPUS[5]),
    "transfer_guard": lambda: jax.transfer_guard("disallow_explicit"),
    "debug_nans": lambda: jax.debug_nans(True),
    "x64": lambda: jax.enable_x64(True),
    "disable_jit": lambda: jax.disable_jit(),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_of_the_caller_do_not_matter(name):
    with CONTEXTS[name]():
        assert all_reduce_fault(CPUS[:3]) is None
        assert stuck(CPUS[:3]) == ()


def test_it_may_be_asked_while_jax_traces():
    def step(x):
        assert all_reduce_fault(CPUS[:3]) is None
        return x

    jax.jit(step)(jnp.ones(2))
    jax.grad(step)(1.0)


CONFIG = {
    "jax_default_device": CPUS[5],
    "jax_transfer_guard": "disallow_explicit",
    "jax_transfer_guard_host_to_device": "disallow_explicit",
    "jax_transfer_guard_device_to_host": "disallow_explicit",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_enable_x64": True,
    "jax_disable_jit": True,
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
}


@pytest.mark.parametrize("name", CONFIG)
def test_what_is_set_for_all_threads_does_not_matter(name):
    before = jax.config.values[name]
    jax.config.update(name, CONFIG[name])
    try:
        assert all_reduce_fault(CPUS[:3]) is None
        assert stuck(CPUS[:3]) == ()
    finally:
        jax.config.update(name, before)


def test_a_stall_does_not_keep_the_interpreter():
    """Neither one in Python nor one in XLA, which blocks the thread that launches it."""
    code = """
        import time, jax, numpy as np
        jax.config.update("jax_platforms", "cpu")
        from mirror._src.devices import collective_check as selftest
        from mirror._src.devices.replicas import ReplicaDevices
        devices = tuple(jax.devices())
        real = selftest._sums
        selftest._sums = lambda devices, over: time.sleep(600)
        print(selftest.all_reduce_fault(devices, 0.2))
        selftest._sums = real
        selftest._faults.clear()
        def forever(rows):
            x = rows[0, :1] * np.ones((400, 400), np.float32)
            return jax.lax.fori_loop(0, 10**9, lambda i, x: x @ x * 1e-3, x)
        rows = jax.ShapeDtypeStruct((1, 8), np.float32, sharding=ReplicaDevices(devices).stacked)
        compiled = jax.jit(forever).lower(rows).compile()
        selftest._compiled = lambda replicas, size: compiled
        print(selftest.all_reduce_fault(devices, 0.5))
    """
    said = fresh.run(code, timeout=60)
    first, second = said.splitlines()
    assert_message(first, values="0.2 s")
    assert_message(second, values="0.5 s")
