"""The options of the plugin, the mark `mirror` and the fixture `strategy`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from mirror._src.tools.plugin.member import IS_MEMBER

if TYPE_CHECKING:
    import mirror


EXECUTORS = ("pmap", "vmap", "staged")
MARKED_SECS = 300.0  # default timeout of tests with the mark
_TOO_LONG_SECS = 1e9  # timers reject longer times
_MARK = (
    "mirror(replicas, executors, processes, timeout): run the test once per number of replicas and "
    f"per executor ({', '.join(EXECUTORS)}), in the fixture `strategy`, or in several processes; "
    f"end it if it takes longer than timeout seconds (default: {MARKED_SECS:g}; 0: no limit)."
)
_KEYWORDS = ("replicas", "executors", "processes", "timeout")
_LAYOUT = {"replicas", "executors", "processes"}


@dataclass(frozen=True)
class Settings:
    """The options of the run.

    Attributes:
        devices: Number of host devices to create; `None` creates none.
        secs: Timeout of a test in seconds; `None` if not set, 0 for no limit.
        stderr: A file descriptor of the standard error that pytest does not capture.
    """

    devices: int | None
    secs: float | None
    stderr: int


SETTINGS = pytest.StashKey[Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the command-line options, and ini options with the same meaning."""
    group = parser.getgroup("mirror", "mirror: replicas on several devices")
    devices = "number of host devices to run on, created before JAX starts"
    secs = "end the run and print all stacks if a test takes longer than this; 0: no limit"
    group.addoption("--mirror-devices", metavar="N", help=devices)
    group.addoption("--mirror-timeout", metavar="SECS", help=secs)
    parser.addini("mirror_devices", devices)
    parser.addini("mirror_timeout", secs)


def pytest_configure(config: pytest.Config) -> None:
    """Parses the options, and creates the host devices.

    pytest calls it after the first conftest.py, which may set environment variables. It captures no
    output at this time, so file descriptor 2 is the real standard error.
    """
    config.addinivalue_line("markers", _MARK)
    devices, devices_option = _option(config, "devices")
    secs, secs_option = _option(config, "timeout")
    if devices is not None and not (devices.isdecimal() and int(devices)):
        raise pytest.UsageError(f"{devices_option}: expected a positive integer, e.g. 8.")
    if secs is not None and not is_secs(_parse_float(secs)):
        raise pytest.UsageError(
            f"{secs_option}: expected a number of seconds, e.g. 60, or 0 for no limit."
        )
    num_devices = None if devices is None else int(devices)
    if num_devices is not None and not IS_MEMBER:  # which has its part of the replicas
        _force_host_devices(num_devices, devices_option)
    config.stash[SETTINGS] = Settings(num_devices, _parse_float(secs), os.dup(2))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Closes the file descriptor of the standard error."""
    settings = config.stash.get(SETTINGS, None)
    if settings is not None:
        os.close(settings.stderr)
        del config.stash[SETTINGS]


def _option(config: pytest.Config, name: str) -> tuple[str | None, str]:
    """Returns the value of an option, and the option as the user wrote it, for messages."""
    value = config.getoption(f"mirror_{name}")
    if value is not None:
        return value, f"--mirror-{name}={value}"
    value = config.getini(f"mirror_{name}")
    file = config.inipath.name if config.inipath else "the ini file"
    return value or None, f"mirror_{name}={value} in {file}"


def _force_host_devices(count: int, option: str) -> None:
    from mirror._src.tools.plugin import support  # loads JAX

    try:
        support.force_host_devices(count, option)
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


def _parse_float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def is_secs(value: Any) -> bool:
    """Whether a value is a duration in seconds that timers accept; 0 is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < _TOO_LONG_SECS


@dataclass(frozen=True)
class Layout:
    """The replicas of a test, and the executor or the processes that run them.

    Attributes:
        executor: One of `EXECUTORS`; it has no meaning with several processes.
        replicas: Number of replicas; `None` means one per device.
        processes: Number of processes that run the test; `None` means this one.
    """

    executor: str
    replicas: int | None
    processes: int | None = None

    def __str__(self) -> str:
        if self.processes is not None:
            return f"{self.processes}-processes-{self.replicas}"
        return f"{self.executor}-{'all' if self.replicas is None else self.replicas}"

    @property
    def num_devices(self) -> int:
        """Number of devices required."""
        return 1 if self.executor == "vmap" or self.replicas is None else self.replicas


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes a marked test by its layouts; an invalid mark is a collection error."""
    layouts = _layouts(metafunc.definition, metafunc.fixturenames)
    if layouts:
        metafunc.parametrize("_mirror_layout", layouts, ids=str)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Checks the marks of tests that pytest does not generate, such as methods of a `TestCase`."""
    _layouts(item, getattr(item, "fixturenames", ()))


def mark_keywords(node: pytest.Item) -> dict[str, Any]:
    """Returns the checked keywords of all marks; the mark closest to the test takes precedence."""
    keywords: dict[str, Any] = {}
    for mark in node.iter_markers("mirror"):
        if mark.args:
            _fail(node, f"{mark.args[0]!r} needs a keyword. Use one of: {', '.join(_KEYWORDS)}")
        for name, value in mark.kwargs.items():
            if name not in _KEYWORDS:
                _fail(node, f"unknown keyword {name!r}. Use one of: {', '.join(_KEYWORDS)}")
            keywords.setdefault(name, value)
    if "timeout" in keywords and not is_secs(keywords["timeout"]):
        secs = keywords["timeout"]
        _fail(node, f"`timeout` must be a number of seconds, or 0 for no limit, got {secs!r}")
    for name in ("replicas", "executors", "processes"):
        if name in keywords:
            keywords[name] = _as_values(node, name, keywords[name])
    return keywords


def _as_values(node: pytest.Item, name: str, value: Any) -> Sequence[Any]:
    """Checks a keyword with one or several values, and returns a tuple."""
    values = tuple(value) if isinstance(value, list | tuple | range) else (value,)
    for item in values:
        if name == "executors" and item not in EXECUTORS:
            _fail(node, f"unknown executor {item!r}. Use one of: {', '.join(EXECUTORS)}")
        is_count = isinstance(item, int) and not isinstance(item, bool) and item >= 1
        if name != "executors" and not is_count:
            _fail(node, f"`{name}` must be one or several integers >= 1, got {value!r}")
    if not values or len(set(values)) < len(values):
        what = "contains duplicates" if values else "is empty"
        _fail(node, f"{name}={value!r} {what}. List every value once, or omit {name}")
    return values


def _layouts(node: pytest.Item, fixtures: Sequence[str]) -> list[Layout]:
    """Returns the layouts in the order of the mark, which is the same in every xdist worker."""
    keywords = mark_keywords(node)
    if not keywords.keys() & _LAYOUT:
        return []
    if "_mirror_layout" not in fixtures:
        if any(m.name == "mirror" and m.kwargs.keys() - {"timeout"} for m in node.own_markers):
            _fail(node, "the test does not use the fixture `strategy`. Add it as an argument")
        return []  # the mark of a class or a module does not apply to this test
    if keywords.keys() >= {"processes", "executors"}:
        _fail(
            node,
            f"processes={keywords['processes']!r} cannot be combined with "
            f"executors={keywords['executors']!r}, because several processes have one executor. "
            "Omit executors, or write a test of its own for them",
        )
    layouts = [
        Layout(executor, replicas, processes)
        for processes in keywords.get("processes", [None])
        for executor in keywords.get("executors", ["pmap"])
        for replicas in keywords.get("replicas", [processes])
    ]
    for replicas, processes in ((each.replicas, each.processes) for each in layouts):
        if processes and replicas and replicas % processes:
            _fail(
                node,
                f"`replicas` must be a multiple of processes={processes}, got {replicas}, "
                "because every process has the same number of devices. For example "
                f"replicas={processes * 2}",
            )
    return layouts


def layout_of(item: pytest.Item) -> Layout | None:
    """Returns the layout of a test whose mark has replicas, executors or processes."""
    callspec = getattr(item, "callspec", None)
    layout = None if callspec is None else callspec.params.get("_mirror_layout")
    return layout if isinstance(layout, Layout) else None


def runs_elsewhere(item: pytest.Item) -> bool:
    """Whether a test runs in processes that this one starts."""
    layout = layout_of(item)
    return layout is not None and layout.processes is not None and not IS_MEMBER


def _fail(node: pytest.Item, why: str) -> None:
    pytest.fail(f"@pytest.mark.mirror on {node.nodeid}: {why}.", pytrace=False)


@pytest.fixture
def _mirror_layout() -> Layout | None:
    """The default if a mark has no layouts."""
    return None


@pytest.fixture
def strategy(
    request: pytest.FixtureRequest, _mirror_layout: Layout | None
) -> "Iterator[mirror.Strategy]":
    """A strategy with the layout of the mark; by default over all devices.

    With `--mirror-devices`, the replicas run on host devices, even if there are accelerators. With
    `processes=`, it is a `mirror.MultiWorkerMirroredStrategy` over the host devices of all of them.
    """
    from mirror._src.tools.plugin import support  # loads JAX

    with support.logged_launches():  # for the report of a test that exceeds its timeout
        yield _strategy(request, _mirror_layout)


def _strategy(request: pytest.FixtureRequest, layout: Layout | None) -> "mirror.Strategy":
    from mirror import MirroredStrategy, MultiWorkerMirroredStrategy
    from mirror._src.tools.plugin import support

    if layout is not None and layout.processes is not None:
        return MultiWorkerMirroredStrategy()
    on_host = request.config.stash[SETTINGS].devices is not None
    devices = support.devices_for_tests(on_host=on_host)
    if layout is None:
        return MirroredStrategy(devices if on_host else None)
    needed = layout.num_devices
    if len(devices) < needed:
        pytest.fail(
            f"{request.node.nodeid} requires {needed} devices, but only {len(devices)} are "
            f"available: {', '.join(map(str, devices))}. To use host devices, run pytest with "
            f"--mirror-devices={needed}.",
            pytrace=False,
        )
    return support.make_strategy(layout.executor, layout.replicas, devices)
