"""The startup test of the all-reduce: the faults it finds, and that it never hangs."""

import signal
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mirror._src.devices import device_checks
from mirror._src.devices.device_checks import all_reduce_fault, unresponsive_devices
from mirror._src.devices.replicas import ReplicaDevices
from tests.support import fresh, inside
from tests.support.messages import assert_message
from tests.support.tables import rows
from tests.support.waiting import wait_until

CPUS = tuple(jax.devices("cpu"))
REAL = device_checks._sums
LONG_SECS = 60  # ends a test that hangs


@pytest.fixture
def deadline(monkeypatch):
    """Makes the deadline pass when a condition on the results holds; returns the deadlines."""
    deadlines = []

    def passes_when(condition):
        def wait(results, timeout):
            deadlines.append(timeout)
            wait_until(lambda: condition(results))
            done = {result for result in results if result.done()}
            return types.SimpleNamespace(done=done)

        monkeypatch.setattr(device_checks, "wait", wait)
        return deadlines

    return passes_when


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(device_checks, "_faults", {})


@pytest.fixture
def held():
    """An event that work can wait for; it is set after the test."""
    event = threading.Event()
    yield event
    event.set()
    join_all()


def ours():
    return [thread for thread in threading.enumerate() if thread.name == "collective_check"]


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


@rows("count", [1, 2, 3, 8])
def test_check_passes_on_host_devices(count):
    assert all_reduce_fault(CPUS[:count]) is None
    assert all_reduce_fault(CPUS[:count][::-1]) is None
    assert unresponsive_devices(CPUS[:count]) == ()
    assert not ours()


@rows("count", [2, 3, 8])
@rows("size", device_checks._SIZES)
def test_check_runs_an_all_reduce(count, size):
    text = device_checks._compiled(ReplicaDevices(CPUS[:count]), size).as_text()
    assert " all-reduce(" in text
    assert not any(f" {other}(" in text for other in ("all-gather", "all-to-all"))


@rows("kind, largest", [("CPU", 2**20), ("GPU", 2**23)])
def test_accelerators_also_reduce_what_xlas_own_kernels_leave_to_nccl(monkeypatch, kind, largest):
    device_checks._faults.clear()
    sizes = inside.count_calls(device_checks, "_fetch", monkeypatch)
    monkeypatch.setattr(device_checks, "type_of", lambda device: kind)
    assert all_reduce_fault(CPUS[:2]) is None
    assert max(copy.size for copy in sizes) == largest


@rows("version, num_settings", {"0.10.2": ((0, 10, 2), 1), "0.12.0": ((0, 12, 0), 2)})
def test_advice_names_the_direct_transfers_of_the_installed_xla(monkeypatch, version, num_settings):
    monkeypatch.setattr(jax, "__version_info__", version)
    settings = device_checks.p2p_settings()
    assert [each.partition("=")[0] for each in settings] == [
        *("NCCL_P2P_DISABLE", "XLA_FLAGS")[:num_settings]
    ]


@rows("count", [1, 2, 8, 64])
def test_check_uses_exact_sums_of_different_values(count):
    rows = device_checks.known_rows(count, 2 * device_checks._PERIOD)
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


@rows("change", list(WRONG))
def test_wrong_sum_is_reported(change, monkeypatch):
    device_checks._faults.clear()
    monkeypatch.setattr(device_checks, "_sums", lies(change))
    assert_message(all_reduce_fault(CPUS[:3]), values=WRONG[change])


def test_missing_or_repeated_contribution_is_detected(monkeypatch):
    row = device_checks.known_rows(3, 8)[1]
    for change, got in [(-row, "4.0"), (row, "8.0")]:
        monkeypatch.setattr(device_checks, "_faults", {})
        monkeypatch.setattr(
            device_checks, "_sums", lies(lambda found, c=change: found[0][0].__iadd__(c))
        )
        assert_message(all_reduce_fault(CPUS[:3]), values=["/device:CPU:0", got, "6.0"])


@pytest.mark.parametrize(
    ("error", "text"),
    [(RuntimeError("NCCL operation failed"), "NCCL operation failed"), (OSError(), "OSError")],
)
def test_failure_is_reported_by_its_text(error, text, monkeypatch):
    monkeypatch.setattr(device_checks, "_sums", fails(error))
    assert all_reduce_fault(CPUS[:2]) == text


def test_stall_ends_at_the_deadline(held, deadline, monkeypatch, capfd):
    is_stuck = threading.Event()
    stalls = lambda devices, over: (is_stuck.set(), held.wait())  # noqa: E731
    monkeypatch.setattr(device_checks, "_sums", stalls)
    deadlines = deadline(lambda results: is_stuck.is_set())
    fault = all_reduce_fault(CPUS[:2], 0.25)
    assert_message(fault, values="0.25 s")
    assert deadlines == [0.25]
    (thread,) = ours()
    assert thread.daemon
    held.set()
    join_all()
    assert capfd.readouterr() == ("", "")
    assert all_reduce_fault(CPUS[:2]) == fault, "what comes late is late"


def test_stall_on_the_devices_leaves_no_thread(held, deadline, monkeypatch, capfd):
    """The computation is still running, and no thread waits for it."""
    is_stuck = threading.Event()

    def block(x):
        is_stuck.set()
        held.wait()
        return np.asarray(x)

    def stalls(replicas, size):
        axis = replicas.stacked.spec
        copy = lambda rows: jax.pure_callback(block, rows, rows)  # noqa: E731
        return jax.jit(jax.shard_map(copy, mesh=replicas.mesh, in_specs=axis, out_specs=axis))

    monkeypatch.setattr(device_checks, "_compiled", stalls)
    deadline(lambda results: is_stuck.is_set())
    assert_message(all_reduce_fault(CPUS[:2], 0.5), values="0.5 s")
    join_all()
    assert not held.is_set()
    assert capfd.readouterr() == ("", "")


def test_nothing_is_launched_after_the_deadline(held, deadline, monkeypatch):
    """A compilation that took too long."""
    launched, compiles = [], threading.Event()

    def compile_slowly(*arguments):
        compiles.set()
        held.wait()
        return launched.append

    monkeypatch.setattr(device_checks, "_compiled", compile_slowly)
    deadline(lambda results: compiles.is_set())
    assert_message(all_reduce_fault(CPUS[:2], 0.2), values="0.2 s")
    held.set()
    join_all()
    assert not launched


def test_result_is_cached(monkeypatch):
    asked = []

    def counts(devices, over):
        asked.append(devices)
        return REAL(devices, over)

    monkeypatch.setattr(device_checks, "_sums", counts)
    for devices in [CPUS[:2], CPUS[:3], CPUS[:2], CPUS[:3]]:
        assert all_reduce_fault(devices) is None
    assert asked == [CPUS[:2], CPUS[:3]]
    monkeypatch.setattr(device_checks, "_sums", fails(RuntimeError("broken")))
    assert all_reduce_fault(CPUS[:2]) is None
    assert all_reduce_fault(CPUS[:4]) == all_reduce_fault(CPUS[:4]) == "broken"


def test_concurrent_threads_share_one_check(monkeypatch, held):
    asked, answers, barrier = [], [], threading.Barrier(5)

    def slow(devices, over):
        asked.append(devices)
        held.wait()
        raise RuntimeError("broken")

    def ask():
        barrier.wait()
        answers.append(all_reduce_fault(CPUS[:2]))

    monkeypatch.setattr(device_checks, "_sums", slow)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait()
    wait_until(lambda: asked)
    held.set()
    for thread in threads:
        thread.join()
    assert asked == [CPUS[:2]]
    assert answers == ["broken"] * 4


@pytest.mark.parametrize("ask", [all_reduce_fault, unresponsive_devices])
def test_interrupt_is_raised_immediately(ask, held, monkeypatch):
    def stalls(devices, over):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        over.wait()
        held.wait()

    for name in ("_sums", "_compute"):
        monkeypatch.setattr(device_checks, name, stalls)
    with pytest.raises(KeyboardInterrupt):
        ask(CPUS[:1], 600)
    monkeypatch.undo()
    held.set()
    assert not ask(CPUS[:1]), "it left an answer, or the lock"
    device_checks._faults.clear()


def test_stuck_and_broken_devices_are_distinguished(held, deadline, monkeypatch):
    real = device_checks._compute

    def compute(device, over):
        if device == CPUS[1]:
            held.wait()
        if device == CPUS[2]:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        real(device, over)

    monkeypatch.setattr(device_checks, "_compute", compute)
    deadlines = deadline(lambda results: len([r for r in results if r.done()]) == 3)
    assert unresponsive_devices(CPUS[:4], 0.9) == CPUS[1:3]
    assert deadlines == [0.9]


OTHER = jax.sharding.Mesh(np.asarray(CPUS[4:6]), ("other",))
CONTEXTS = {
    "mesh": lambda: jax.set_mesh(OTHER),
    "default_device": lambda: jax.default_device(CPUS[5]),
    "transfer_guard": lambda: jax.transfer_guard("disallow_explicit"),
    "debug_nans": lambda: jax.debug_nans(True),
    "x64": lambda: jax.enable_x64(True),
    "disable_jit": lambda: jax.disable_jit(),
}


@rows("name", list(CONTEXTS))
def test_check_ignores_contexts_of_the_caller(name):
    device_checks._faults.clear()
    with CONTEXTS[name]():
        assert all_reduce_fault(CPUS[:3]) is None
        assert unresponsive_devices(CPUS[:3]) == ()


def test_check_works_while_jax_traces():
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


@rows("name", list(CONFIG))
def test_check_ignores_global_settings(name):
    device_checks._faults.clear()
    before = jax.config.values[name]
    jax.config.update(name, CONFIG[name])
    try:
        assert all_reduce_fault(CPUS[:3]) is None
        assert unresponsive_devices(CPUS[:3]) == ()
    finally:
        jax.config.update(name, before)


@pytest.mark.slow
def test_stall_does_not_keep_the_interpreter_alive():
    """Neither one in Python nor one in XLA, which blocks the thread that launches it."""
    said = fresh.run_program("check_stalls")
    first, second = said.splitlines()
    assert_message(first, values="0.2 s")
    assert_message(second, values="0.5 s")
