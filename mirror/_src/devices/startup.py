"""Whether JAX's backend has started, which fixes the device configuration, and what started it.

JAX has no public API for this. But an option that must be set before the start cannot be updated
after it (JAX 0.10.2 to 0.12.0.1), and the events that JAX records while it traces and compiles have
the user's line on the stack. `tests/devices/test_config.py` fails if either no longer holds.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax

from mirror._src.base.source_lines import line_of_user

_PROBE = "jax_cpu_get_local_topology_timeout_minutes"  # only clusters read it
_NO_COMPUTATION = "a call that computes nothing, such as jax.devices() or jax.device_put"
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


class _StartupListener:
    """Records which line of the user's code starts the backend.

    JAX records the first event of a program's first computation before the backend starts, and the
    next event after it. If both come from the same line, this line started the backend.
    """

    def __init__(self) -> None:
        self.is_registered = False
        self.cause = ""
        self._line_before = ""

    def __call__(self, event: str, duration_secs: float, **details: str | int) -> None:
        del event, duration_secs, details
        if self.cause:
            return
        line = line_of_user()
        if not started():
            self._line_before = line
        elif self._line_before == line:
            self.cause = f"JAX was initialized by {line}."
        else:
            after = self._line_before and f"after {self._line_before} and "
            self.cause = f"JAX was initialized {after}before {line}, by {_NO_COMPUTATION}."


_listener = _StartupListener()


def watch_startup() -> None:
    """Records from now on what starts the backend.

    Called by the first setter of `mirror.config` that changes something, not when `mirror` is
    imported: an import must not register listeners.
    """
    with lock:
        if not _listener.is_registered:
            jax.monitoring.register_event_duration_secs_listener(_listener)
            _listener.is_registered = True


def startup_cause(first_call: str = "mirror.config was first used") -> str:
    """Returns a sentence that says what started the backend.

    Args:
        first_call: What started it unless it had happened earlier.
    """
    if _listener.cause:
        return _listener.cause
    if _listener.is_registered:
        return f"JAX was initialized by {_NO_COMPUTATION}."
    return (
        f"JAX was initialized before {first_call}, for example by creating an array or by "
        "jax.devices()."
    )


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Context manager around code that may start the backend; records the user's line."""
    with lock:
        was_started = started()
        try:
            yield
        finally:
            if not was_started and not _listener.cause and started():
                _listener.cause = f"JAX was initialized by {line_of_user()}."
