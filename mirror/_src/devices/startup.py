"""Whether JAX's backend has started, which fixes the configuration of devices, and who did it.

JAX has no public way to ask. But an option that must be set before the start refuses a new value
after it (JAX 0.10.2 to 0.12.0.1), and events that are recorded while it compiles carry the caller's
line on the stack. `tests/devices/test_config.py` tells when one of the two no longer holds.
"""

import contextlib
import os
import re
import threading
from collections.abc import Iterator

import jax

from mirror._src.utils.source_lines import line_of_user

_PROBE = "jax_cpu_get_local_topology_timeout_minutes"  # of clusters only: harmless if it is read
HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_NO_COMPUTATION = "something that computes nothing, such as jax.devices() or jax.device_put"
lock = threading.RLock()


def started() -> bool:
    """Whether JAX's backend has started. Does not start it."""
    with lock:
        value = jax.config.values[_PROBE]
        try:
            jax.config.update(_PROBE, value + 1)
        except RuntimeError:
            return True
        jax.config.update(_PROBE, value)
        return False


class _Witness:
    """Sees JAX trace and compile for the first time, and on whose behalf."""

    def __init__(self) -> None:
        self._last_before = ""
        self.seen = ""

    def __call__(self, event: str, duration_secs: float, **details: str | int) -> None:
        """The first event of a first computation comes before the start, the next one after it."""
        del event, duration_secs, details
        if self.seen:
            return
        line = line_of_user()
        if not started():
            self._last_before = line
        elif self._last_before == line:
            self.seen = f"It was started by {line}."
        else:
            after = self._last_before and f"after {self._last_before} and "
            self.seen = f"It was started {after}before {line}, by {_NO_COMPUTATION}."


_witness = _Witness()
jax.monitoring.register_event_duration_secs_listener(_witness)


def startup_cause() -> str:
    """A sentence that says what started the backend."""
    return _witness.seen or (f"It was started by {_NO_COMPUTATION}, or before mirror was imported.")


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around what may start the backend: remembers who asked."""
    with lock:
        fresh = not started()
        try:
            yield
        finally:
            if fresh and not _witness.seen and started():
                _witness.seen = f"It was started by {line_of_user()}."


def forced_host_devices() -> int | None:
    """How many host devices `XLA_FLAGS` asks for; the last of several wins, as in XLA."""
    found = re.findall(rf"{HOST_DEVICES_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else None
