"""Which tests run, where, why the others do not, and how much memory the processes took.

The marks are declared here only. A test with a mark of `OPTIONS` is deselected without its option;
a test that needs a package is skipped without it, and fails with `--dev`.
"""

import re
import resource
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.packages import MODULES, advice, is_installed

OPTIONS = {  # a mark, which is also an option, and what it means
    "slow": "takes over two seconds, or is one of many rows",
    "nightly": "is random, exhaustive or very long",
    "notebooks": "executes a notebook",
    "gpu": "needs a GPU that JAX can use, and fails without one",
    "gpu_aot": "compiles for GPUs, which need not exist; it needs the extra `gpu-aot`",
}
_REPORTS = pytest.StashKey[dict[str, Any]]()  # by process: the tests left out and the peak memory


def option_of(mark: str) -> str:
    """Returns the option that runs the tests with a mark."""
    return f"--{mark.replace('_', '-')}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option per mark, and `--dev`."""
    for name, meaning in OPTIONS.items():
        parser.addoption(option_of(name), action="store_true", help=f"run each test that {meaning}")
    parser.addoption("--dev", action="store_true", help="fail, not skip, without a test's packages")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks."""
    config.stash[_REPORTS] = {}
    for name, meaning in OPTIONS.items():
        config.addinivalue_line(
            "markers", f"{name}: {meaning}; deselected without {option_of(name)}"
        )
    config.addinivalue_line("markers", "dev(*packages): needs packages of the extra `dev`")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects marked tests without their option, and skips tests whose packages are missing."""
    missing_options = [name for name in OPTIONS if not config.getoption(option_of(name))]
    kept: list[pytest.Item] = []
    left_out: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        names = [option_of(name) for name in missing_options if item.get_closest_marker(name)]
        if item.get_closest_marker("nightly"):  # a nightly row of a slow test needs one option
            names = [name for name in names if name != "--slow"]
        (left_out[" ".join(names)] if names else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=[i for each in left_out.values() for i in each])
    items[:] = kept
    _own_report(config)["left_out"] = {names: len(each) for names, each in left_out.items()}
    if not config.getoption("--dev"):
        for item in items:
            for package in missing_packages(item):
                item.add_marker(pytest.mark.skip(reason=advice(package, "dev")))


def missing_packages(item: pytest.Item) -> list[str]:
    """Returns the packages of the marks `dev` that are not installed."""
    return [
        name for mark in item.iter_markers("dev") for name in mark.args if not is_installed(name)
    ]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--dev`, fails a test whose packages are missing."""
    if item.config.getoption("--dev") and (missing := missing_packages(item)):
        pytest.fail(advice(", ".join(missing), "dev"), pytrace=False)


# A package of the extra `test` is missing


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skips a file that imports a missing package, instead of failing the whole collection."""
    report = yield
    package = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr))
    if report.outcome == "failed" and package and _is_missing(collector.config, package[1]):
        report.outcome, report.result = "skipped", []
        report.longrepr = (str(collector.path), 0, f"Skipped: {advice(package[1], 'test')}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skips a test that imports a missing package."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, ModuleNotFoundError) and report.outcome == "failed":
        package = (error.name or "").split(".")[0]
        if _is_missing(item.config, package):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"Skipped: {advice(package, 'test')}")
    return report


def _is_missing(config: pytest.Config, package: str) -> bool:
    is_known = package in MODULES.values()
    return is_known and not is_installed(package) and not config.getoption("--dev")


class OneCluster(LoadFileScheduling):
    """Gives one worker all files that share Ray's cluster, which takes half a minute to start."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "a cluster of Ray" if file.startswith("tests/ps/test_ray_") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Replaces the scheduler of `--dist loadfile`."""
    return OneCluster(config, log) if config.getoption("dist") == "loadfile" else None


# The end of the run


def _own_report(config: pytest.Config) -> dict[str, Any]:
    worker = getattr(config, "workerinput", {}).get("workerid", "this process")
    return config.stash[_REPORTS].setdefault(worker, {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Measures the memory of this process; a worker sends its report to the process that prints."""
    report = _own_report(session.config)
    report["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["mirror"] = report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receives the report of a worker of pytest-xdist."""
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    if "mirror" in output:
        node.config.stash[_REPORTS][node.gateway.id] = output["mirror"]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints how many tests were left out, by option, and the peak memory of each process."""
    reports = config.stash[_REPORTS]
    left_out = max((r.get("left_out", {}) for r in reports.values()), key=len, default={})
    if left_out:
        counts = (f"{count:,} without {options}" for options, count in sorted(left_out.items()))
        terminalreporter.write_line(f"left out: {', '.join(counts)}")
    peaks = ", ".join(
        f"{r['peak']:.1f} GB in {name}" for name, r in sorted(reports.items()) if "peak" in r
    )
    if peaks:
        terminalreporter.write_line(f"peak memory: {peaks}")
