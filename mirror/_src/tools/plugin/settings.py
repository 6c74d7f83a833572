"""Command-line and ini options of the plugin; creates the host devices when pytest starts."""

import os
from dataclasses import dataclass
from typing import Any

import pytest

from mirror._src.tools.plugin.member import IS_MEMBER

EXECUTORS = ("pmap", "vmap", "staged")
MARKED_SECS = 300.0  # default timeout of tests with the mark
_TOO_LONG_SECS = 1e9  # timers reject longer times
_MARK = (
    "mirror(replicas, executors, processes, timeout): run the test once per number of replicas and "
    f"per executor ({', '.join(EXECUTORS)}), in the fixture `strategy`, or in several processes; "
    f"end it if it takes longer than timeout seconds (default: {MARKED_SECS:g}; 0: no limit)."
)


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
