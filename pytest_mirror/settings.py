"""What a run is told: the options, the ini file; and the host devices, which are forced at once."""

import os
from dataclasses import dataclass
from typing import Any

import pytest

EXECUTORS = ("pmap", "vmap", "staged")
MARKED_SECS = 300.0  # the timeout of tests with the mark, where nobody says another
_TOO_LONG_SECS = 1e9  # clocks take no more
_MARK = (
    "mirror(replicas, executors, timeout): run the test once for each number of replicas and each "
    f"executor ({', '.join(EXECUTORS)}), in the fixture `strategy`; end the run if the test takes "
    f"longer than timeout seconds (default: {MARKED_SECS:g}; 0: never)."
)


@dataclass(frozen=True)
class Settings:
    """What the run was told.

    Attributes:
        devices: how many host devices to force; `None`: none.
        secs: how long any test may take; `None`: nobody said, 0: for ever.
        stderr: a file descriptor of the standard error that pytest does not capture.
    """

    devices: int | None
    secs: float | None
    stderr: int


SETTINGS = pytest.StashKey[Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options, and the same in the ini file."""
    group = parser.getgroup("mirror", "mirror: replicas on several devices")
    devices = "run on so many host devices, forced before JAX starts"
    secs = "end the run, with all stacks, where a test takes longer than this; 0: never"
    group.addoption("--mirror-devices", metavar="N", help=devices)
    group.addoption("--mirror-timeout", metavar="SECS", help=secs)
    parser.addini("mirror_devices", devices)
    parser.addini("mirror_timeout", secs)


def pytest_configure(config: pytest.Config) -> None:
    """Forces the host devices, after the first conftest.py: what it sets in the environment counts.

    It runs while pytest captures nothing, so the standard error is the real one.
    """
    config.addinivalue_line("markers", _MARK)
    devices, asked_by = _said(config, "devices")
    secs, secs_by = _said(config, "timeout")
    if devices is not None and not (devices.isdecimal() and int(devices)):
        raise pytest.UsageError(f"{asked_by} is no number of devices. Say 1 or more, e.g. 8.")
    if secs is not None and not is_secs(_number(secs)):
        raise pytest.UsageError(f"{secs_by} is no time in seconds. Say e.g. 60, or 0 for no limit.")
    num_devices = None if devices is None else int(devices)
    if num_devices is not None:
        _force(num_devices, asked_by)
    config.stash[SETTINGS] = Settings(num_devices, _number(secs), os.dup(2))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Closes what was opened."""
    settings = config.stash.get(SETTINGS, None)
    if settings is not None:
        os.close(settings.stderr)
        del config.stash[SETTINGS]


def _said(config: pytest.Config, name: str) -> tuple[str | None, str]:
    """What the option or the ini file says, and who says it, in words."""
    value = config.getoption(f"mirror_{name}")
    if value is not None:
        return value, f"--mirror-{name}={value}"
    value = config.getini(f"mirror_{name}")
    file = config.inipath.name if config.inipath else "the ini file"
    return value or None, f"mirror_{name}={value} in {file}"


def _force(count: int, asked_by: str) -> None:
    from mirror._src.testing import plugin_support  # brings JAX

    try:
        plugin_support.force_host_devices(count, asked_by)
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def is_secs(value: Any) -> bool:
    """Whether it is a time; 0 counts."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < _TOO_LONG_SECS
