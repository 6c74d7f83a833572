"""Fixtures, and the options `--slow`, `--dev`, `--gpu`, `--notebooks` and `--nightly`."""

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Many tests and processes compile the same small programs, so they share a compilation cache. JAX
# reads these variables when it is imported, and child processes inherit them.
_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="mirror-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

# pytest-xdist sets the width of a terminal for its workers, and users may set colors.
for _name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_name, None)

import jax  # noqa: E402
import pytest  # noqa: E402

# A job in the background of a script inherits that SIGINT is ignored, and `nohup` that SIGHUP is.
# Tests of signals would wait for one that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
jax.config.update("jax_platforms", "cpu")  # GPUs are for the processes of tests/laws/test_gpu.py
# Compiling is most of the work here, and faster with fewer LLVM optimizations. Child processes (the
# demo, the soak test, the benchmarks) compile with all of them, as users do.
jax.config.update("jax_disable_most_optimizations", True)

import mirror  # noqa: E402
from mirror._src.context.scopes import current_frame  # noqa: E402
from pytest_mirror.member import IS_MEMBER  # noqa: E402
from tests.support.durations import SLOW_TESTS  # noqa: E402
from tests.support.interrupts import repeated_until_interrupted  # noqa: E402
from tests.support.packages import is_installed  # noqa: E402
from tests.support.strategies import EXECUTORS, LAYOUTS, cpu_strategy  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--slow`, `--dev`, `--gpu`, `--notebooks` and `--nightly`."""
    parser.addoption("--slow", action="store_true", help="run the tests of slow_tests.txt too")
    parser.addoption("--dev", action="store_true", help="fail without the packages of `dev`")
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, on JAX's GPUs")
    parser.addoption("--notebooks", action="store_true", help="execute the notebooks")
    parser.addoption("--nightly", action="store_true", help="run the rows of tables that take long")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers for `--slow`, `--dev`, `--notebooks` and `--nightly`."""
    config.addinivalue_line("markers", "slow: is in slow_tests.txt; left out by default")
    config.addinivalue_line("markers", "dev(*packages): needs packages of the extra `dev`")
    config.addinivalue_line("markers", "notebooks: executes a notebook; left out by default")
    config.addinivalue_line("markers", "nightly: random, exhaustive or long; left out by default")


def pytest_unconfigure() -> None:
    """Deletes the compilation cache, in the process that created it."""
    if _CACHE is not None:
        shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the slow tests, and skips marked tests without their option."""
    slow = set(SLOW_TESTS.read_text().splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    for name in ("slow", "gpu", "notebooks", "nightly"):
        if not config.getoption(f"--{name}"):
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(pytest.mark.skip(reason=f"runs with --{name}"))
    if not config.getoption("--dev"):
        for item in items:
            for package in missing_packages(item):
                reason = f'needs {package}: pip install -e ".[dev]"'
                item.add_marker(pytest.mark.skip(reason=reason))


def missing_packages(item: pytest.Item) -> list[str]:
    """Returns the packages of the marks `dev` that are not installed."""
    return [
        name for mark in item.iter_markers("dev") for name in mark.args if not is_installed(name)
    ]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--dev`, fails a test whose packages are missing."""
    if item.config.getoption("--dev") and (missing := missing_packages(item)):
        pytest.fail(f'needs {", ".join(missing)}: pip install -e ".[dev]"', pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> None:
    """Fails the suite if it did not get its devices."""
    if IS_MEMBER:  # a process of a test with `processes=`, which has its own number
        return
    count = len(jax.devices("cpu"))
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


@pytest.fixture(scope="session", autouse=True)
def ahead(request) -> Iterator[dict[str, dict[str, Any]]]:
    """The `AHEAD` calls of the tested modules, which wait for other processes.

    They run one after the other, in the background of other tests. `result()` raises the error of
    a call. With pytest-xdist, each call runs in the worker that requests it.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield {
            item.module.__name__: {name: _Later(call) for name, call in item.module.AHEAD.items()}
            for item in request.session.items
            if hasattr(item.module, "AHEAD")
        }
        return
    items = [item for item in request.session.items if not item.get_closest_marker("skip")]
    modules = dict.fromkeys(item.module for item in items)
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


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    """Checks that a test leaves no environment variable, thread, scope or mesh behind."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    assert current_frame() is None, "a scope was left open"
    assert jax.sharding.get_abstract_mesh().empty, "a mesh was left set"
    changed = {
        k: os.environ.get(k)
        for k in environment.keys() | os.environ.keys()
        if environment.get(k) != os.environ.get(k) and k != "PYTEST_CURRENT_TEST"
    }
    assert not changed, f"the environment was changed: {changed}"
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    assert not left, f"threads were left running: {left}"


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
