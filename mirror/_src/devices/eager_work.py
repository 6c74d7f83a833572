"""Bounds the eager work in flight on several host devices, which JAX up to 0.12 needs.

See `launch`. JAX has no public way to observe the eager work of other threads, but it calls one
function after each compiled function, eager ops included: `jax._src.api._post_hook_state` (JAX 0.10
to 0.12), which JAX itself uses to search for NaNs. `tests/devices/test_launch.py` fails when JAX
removes it. Delete this file when no supported JAX needs it.
"""

import contextlib
import itertools
import threading
from collections import deque
from typing import Any

import jax

from mirror._src.base.types import Array
from mirror._src.devices.launches import has_finished

MOST_IN_FLIGHT = 8
"""Number of eager launches in flight. XLA accepts 32, and each thread may add one more."""
MOST_BYTES = 2**16
"""Size up to which a result is kept until it is ready; larger results are waited for instead."""


_in_flight: deque[Array] = deque()
_lock = threading.RLock()  # reentrant: the garbage collector may run eager ops while it is held
_hook: Any = None  # JAX's hook after each compiled function; set once eager work is counted


def bound_eager_work() -> None:
    """Makes later eager ops on several host devices wait while too many are in flight."""
    global _hook
    if _hook is None:
        from jax._src import api

        _hook = api._post_hook_state
    if _hook.value is not None:  # our hook; or JAX's search for NaNs, which waits for every result
        return
    if _hook.get_global() is None:
        _hook.set_global(_count)
    if _hook.get_global() is _count:  # `with jax.debug_nans(...)` left a value in this thread
        _hook.set_local(_count)


class Uncounted:
    """Context manager in which JAX does not call the hook.

    `launch` bounds its own launches. The hook is Python code: an interrupt raised inside it would
    lose the results of the launch before they are stored.
    """

    __slots__ = ("_is_off", "_local")

    def __enter__(self) -> None:
        self._is_off = _hook is not None and _hook.value is _count
        if self._is_off:
            self._local = _hook.swap_local(None)

    def __exit__(self, *args: object) -> None:
        if self._is_off:
            _hook.set_local(self._local)


def forget_finished() -> None:
    """Drops the references to results of finished eager work."""
    with _lock:
        for _ in [*itertools.takewhile(has_finished, _in_flight)]:
            _in_flight.popleft()


def _count(function: object, args: object, kwargs: object, outputs: Any) -> None:
    """Counts a launch, and waits while too many launches are in flight."""
    del function, args, kwargs
    output = outputs if isinstance(outputs, jax.Array) else _small_array(outputs)
    if output is None or isinstance(output, jax.core.Tracer) or _needs_no_bound(output):
        return
    forget_finished()
    if output.nbytes > MOST_BYTES or not hasattr(output, "is_ready"):  # keys of jax.random
        _wait(output)
        return
    _in_flight.append(output)
    while (oldest := _take_oldest()) is not None:
        _wait(oldest)


def _take_oldest() -> Array | None:
    with _lock:
        return _in_flight.popleft() if len(_in_flight) > MOST_IN_FLIGHT else None


def _small_array(outputs: Any) -> Array | None:
    """Returns the smaller of the first and the last output; all become ready together."""
    leaves = jax.tree.leaves(outputs)
    ends = [leaf for leaf in (leaves[:1] + leaves[-1:]) if isinstance(leaf, jax.Array)]
    return min(ends, key=lambda leaf: leaf.size, default=None)


def _needs_no_bound(output: Array) -> bool:
    if output.is_deleted() or output.sharding.num_devices == 1:
        return True
    device: Any = next(iter(output.sharding.device_set))
    return bool(device.platform != "cpu")  # each accelerator has its own queue


def _wait(output: Array) -> None:
    with contextlib.suppress(Exception):  # raised where the result is read
        output.block_until_ready()  # host sync, on purpose
