"""What a fresh process sees of its configuration, as facts for `tests/devices/test_config.py`."""

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401  (the programs use it)

import mirror as mirror
from mirror import config
from mirror._src.devices import settings
from mirror._src.devices.startup import started as started

OPTIONS = ("jax_num_cpu_devices", "jax_cuda_visible_devices", "jax_platforms")
L = config.LogicalDeviceConfiguration

facts: dict[str, Any] = {}
_said: list[str] = []


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _said.append(f"{record.levelname}: {record.getMessage()}")


def listen() -> None:
    logging.getLogger("mirror").addHandler(_Listener())


def snapshot() -> dict[str, Any]:
    """Everything that a setter may change."""
    devices = config.list_physical_devices()
    return {
        "options": dict(jax.config.values),
        "environment": dict(os.environ),
        "visible": config.get_visible_devices(),
        "logical": [config.get_logical_device_configuration(device) for device in devices],
        "growth": [config.get_memory_growth(device) for device in devices[1:]],
        "soft": config.get_soft_device_placement(),
        "words": settings.in_words(),
    }


def options() -> list[Any]:
    """Of JAX: host devices, visible GPUs, platforms."""
    return [jax.config.values[name] for name in OPTIONS]


def memory() -> list[str | None]:
    """The two environment variables that `mirror.config` may set."""
    return [
        os.environ.get(f"XLA_{n}") for n in ("PYTHON_CLIENT_PREALLOCATE", "CLIENT_MEM_FRACTION")
    ]


def refused(call: Callable[..., Any], *arguments: Any) -> str:
    """What the call raises, as `Kind: text`; it may have changed nothing."""
    before = snapshot()
    try:
        call(*arguments)
    except Exception as error:
        assert snapshot() == before, "half applied"
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unchanged(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether the call raises nothing and changes nothing."""
    before = snapshot()
    call(*arguments)
    return snapshot() == before


def said() -> list[str]:
    """The log lines since it was last asked."""
    lines = list(_said)
    _said.clear()
    return lines


def names(devices: list[Any]) -> list[str]:
    return [device.name for device in devices]


def here() -> str:
    """The caller's line, as messages name it."""
    return f"<string>:{sys._getframe(1).f_lineno}"


def tell() -> None:
    print(f"FACTS {json.dumps(facts)}")
