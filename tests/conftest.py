"""Fixtures, and what every test leaves behind. The options are in `tests/support/selection.py`."""

import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.support import fast
from tests.support.packages import require_environment
from tests.support.sockets import shorten_paths
from tests.support.strict import HALF_WRITTEN

require_environment()
IS_MEMBER = "MIRROR_PYTEST_PROCESS" in os.environ  # of a test in several processes

# Many tests and processes compile the same small programs, so they share a compilation cache. JAX
# reads these variables when it is imported, and child processes inherit them.
_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="mirror-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # A process may read an entry of which another one has written the first half. JAX (0.10.2,
    # 0.12.0.1) then warns, and compiles. `filterwarnings` in pyproject.toml ignores it in tests,
    # this variable and `STRICT` in other processes.
    _WARNINGS = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [_WARNINGS, HALF_WRITTEN]))
    # Otherwise Matplotlib sets it while a test runs.
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ.setdefault("MPLCONFIGDIR", os.path.join(_CACHE, "matplotlib"))

shorten_paths()

# Compiling is most of the work here.
_FLAGS = os.environ.get("XLA_FLAGS", "").replace(fast.FLAGS, "").strip()  # workers inherit it
if fast.FLAGS and not IS_MEMBER:
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {fast.FLAGS}".strip()

# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

# pytest-xdist sets the width of a terminal for its workers, and users may set colors.
for _name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_name, None)

import jax  # noqa: E402
import pytest  # noqa: E402

# Without standard input (`<&-`), pytest's replacement for it fails when IPython looks at it, which
# Flax imports.
if sys.__stdin__ is None:
    sys.__stdin__ = open(os.devnull, encoding="utf-8")  # noqa: SIM115

# A job in the background of a script inherits that SIGINT is ignored, and `nohup` that SIGHUP is.
# Tests of signals would wait for one that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
jax.config.update("jax_platforms", "cpu")  # GPUs are for the processes of tests/laws/test_gpu.py
# Fewer LLVM optimizations make it faster, too. Jobs of several processes compile like this; other
# child processes (the demo, the soak test, the benchmarks) compile as users do.
jax.config.update("jax_disable_most_optimizations", True)
# Traces make many objects that live for a moment: with 700, a tenth of the time was spent here.
gc.set_threshold(10_000)

import mirror  # noqa: E402
from tests.support.inside import forget_strategies, open_scope  # noqa: E402
from tests.support.interrupts import repeated_until_interrupted  # noqa: E402
from tests.support.selection import (  # noqa: E402, F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    pytest_xdist_make_scheduler,
)
from tests.support.strategies import EXECUTORS, LAYOUTS, cpu_strategy  # noqa: E402

_LIBC = ctypes.CDLL(None)
THREAD_SECS = 5.0  # how long a thread may outlive its test


def pytest_unconfigure() -> None:
    """Deletes the compilation cache, in the process that created it."""
    if _CACHE is not None:
        shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Fails the suite if it did not get its devices."""
    if IS_MEMBER:  # a process of a test with `processes=`, which has its own number
        return
    count = len(jax.devices("cpu"))  # reads XLA_FLAGS
    os.environ.pop("XLA_FLAGS", None)
    if _FLAGS:
        os.environ["XLA_FLAGS"] = _FLAGS
    if count != 8:
        pytest.exit(f"the suite needs 8 host devices and got {count}", returncode=3)


class _Later:
    """A future whose call runs when its result is requested."""

    def __init__(self, call) -> None:
        self._future, self._call = Future(), call

    def result(self):
        if not self._future.done():
            try:
                self._future.set_result(self._call())
            except BaseException as error:
                self._future.set_exception(error)
        return self._future.result()


@pytest.fixture(scope="session")
def ahead(started_ahead) -> dict[str, dict[str, Any]]:
    """The `AHEAD` calls of the tested modules, which wait for other processes.

    They run one after the other, in the background of other tests. `result()` raises the error of
    a call. With pytest-xdist, each call runs in the worker that requests it.
    """
    return started_ahead


@pytest.fixture(scope="session", autouse=True)
def started_ahead(request) -> Iterator[dict[str, dict[str, Any]]]:
    """Starts the `AHEAD` calls of modules with a selected test that requests them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield {
            item.module.__name__: {name: _Later(call) for name, call in item.module.AHEAD.items()}
            for item in request.session.items
            if hasattr(item.module, "AHEAD")
        }
        return
    items = [item for item in request.session.items if not item.get_closest_marker("skip")]
    modules = dict.fromkeys(item.module for item in items if "ahead" in item.fixturenames)
    with ThreadPoolExecutor(1) as pool:
        yield {
            module.__name__: {name: pool.submit(call) for name, call in module.AHEAD.items()}
            for module in modules
            if hasattr(module, "AHEAD")
        }
        pool.shutdown(cancel_futures=True)


def pytest_collection_finish() -> None:
    """Leaves what exists before the first test to no garbage collection: one took a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs() -> Iterator[None]:
    """Drops the compiled programs of a test file at its end: all of them would be 5 GB."""
    yield
    gc.collect()  # strategies of the file, and with them their programs
    jax.clear_caches()
    gc.freeze()  # a step with constants has unfrozen everything
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)  # glibc keeps what is free, which is half of the memory


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Checks that a test leaves no environment variable, thread, scope or mesh behind."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    forget_strategies()
    yield
    assert open_scope() is None, "a scope was left open"
    assert jax.sharding.get_abstract_mesh().empty, "a mesh was left set"
    changed = {
        k: os.environ.get(k)
        for k in environment.keys() | os.environ.keys()
        if environment.get(k) != os.environ.get(k) and k != "PYTEST_CURRENT_TEST"
    }
    assert not changed, f"the environment was changed: {changed}"
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    deadline = time.monotonic() + THREAD_SECS
    for thread in left:  # those of Keras and Ray end a moment after what started them
        thread.join(max(deadline - time.monotonic(), 0))
    left = [thread for thread in left if thread.is_alive()]
    assert not left, f"threads were left running: {left}"


class _Labeled:
    """Subtests whose labels are text: pytest-xdist sends nothing else."""

    def __init__(self, subtests: pytest.Subtests) -> None:
        self._subtests = subtests

    def test(self, msg: Any = None, **labels: Any) -> Any:
        text = {name: str(label) for name, label in labels.items()}
        return self._subtests.test(None if msg is None else str(msg), **text)


@pytest.fixture
def subtests(subtests):
    """`subtests` of pytest, with labels of any type."""
    return _Labeled(subtests)


@pytest.fixture(params=LAYOUTS.values(), ids=[f"{name}-replicas" for name in LAYOUTS])
def strategy(request) -> mirror.MirroredStrategy:
    """One strategy per layout."""
    num_devices, replicas_per_device = request.param
    return cpu_strategy(num_devices, replicas_per_device=replicas_per_device)


@pytest.fixture(params=EXECUTORS.values(), ids=EXECUTORS)
def pair(request) -> mirror.MirroredStrategy:
    """Two replicas, by each executor."""
    return request.param()


@pytest.fixture
def two() -> mirror.MirroredStrategy:
    """Two replicas."""
    return cpu_strategy(2)


@pytest.fixture
def repeat_until_interrupted():
    """Calls a function again and again until a KeyboardInterrupt arrives, after some seconds."""
    with repeated_until_interrupted() as repeat:
        yield repeat


@pytest.fixture
def eight() -> mirror.MirroredStrategy:
    """Eight replicas."""
    return cpu_strategy(8)
