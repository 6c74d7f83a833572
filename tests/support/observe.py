"""Facts about the configuration of a process, for the programs `config_*.py`."""

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from mirror import config
from tests.support.inside import settings_in_words

OPTIONS = ("jax_num_cpu_devices", "jax_cuda_visible_devices", "jax_platforms")
L = config.LogicalDeviceConfiguration

facts: dict[str, Any] = {}
_log_lines: list[str] = []


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _log_lines.append(f"{record.levelname}: {record.getMessage()}")


def begin() -> list[config.PhysicalDevice]:
    """Collects the log lines of mirror; returns the physical devices, the CPU first.

    JAX does not find its plugins, so that it has only the CPU on a machine with GPUs too.
    """
    sys.modules["jax_plugins"] = None
    logging.getLogger("mirror").addHandler(_Listener())
    return config.list_physical_devices()


def snapshot() -> dict[str, Any]:
    """Returns everything that a setter may change."""
    devices = config.list_physical_devices()
    return {
        "options": dict(jax.config.values),
        "environment": dict(os.environ),
        "visible": config.get_visible_devices(),
        "logical": [config.get_logical_device_configuration(device) for device in devices],
        "growth": [config.get_memory_growth(device) for device in devices[1:]],
        "soft": config.get_soft_device_placement(),
        "words": settings_in_words(),
    }


def options() -> list[Any]:
    """Returns JAX's options for host devices, visible GPUs and platforms."""
    return [jax.config.values[name] for name in OPTIONS]


def memory() -> list[str | None]:
    """Returns the two environment variables that `mirror.config` may set."""
    return [
        os.environ.get(f"XLA_{n}") for n in ("PYTHON_CLIENT_PREALLOCATE", "CLIENT_MEM_FRACTION")
    ]


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    """Returns the error that a call raises, as `Kind: text`, and checks that it changed nothing."""
    before = snapshot()
    try:
        call(*arguments)
    except Exception as error:
        assert snapshot() == before, "half applied"
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unchanged(call: Callable[..., Any], *arguments: Any) -> bool:
    """Calls a function; returns whether it changed nothing."""
    before = snapshot()
    call(*arguments)
    return snapshot() == before


def log_lines() -> list[str]:
    """Returns the log lines since the last call."""
    lines = list(_log_lines)
    _log_lines.clear()
    return lines


def names(devices: list[Any]) -> list[str]:
    return [device.name for device in devices]


def this_line() -> str:
    """Returns the caller's line, as messages name it."""
    frame = sys._getframe(1)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def print_facts() -> None:
    print(f"FACTS {json.dumps(facts)}")
