"""Bounds the eager work on several host devices, which JAX before 0.12 needs: see `launch`.

There is no public way to see the eager work of other threads. JAX calls one function after each
compiled one, eager ops included: `jax._src.api._post_hook_state` (JAX 0.10 and 0.11), which its own
search for NaN uses. `tests/devices/test_launch.py` fails when it has gone. Delete this file with
support for JAX 0.11.
"""

import contextlib
import operator
import threading
from collections import deque
from typing import Any

import jax

from mirror._src.utils.types import Array

MOST_UNDER_WAY = 8
"""Launches of eager work; XLA lets 32 in, and each thread may add one."""
MOST_BYTES = 2**16
"""Of a result that is kept until it has ended; a larger one is waited for, so as not to keep it."""


_under_way: deque[Array] = deque()
_lock = threading.RLock()  # the garbage collector may run eager ops inside
_hook: Any = None  # what JAX calls after each compiled function, once eager work is counted


def bound_eager_work() -> None:
    """From now on waits after an eager op on several host devices while too many are under way."""
    global _hook
    if _hook is None:
        from jax._src import api

        _hook = api._post_hook_state
    if _hook.value is not None:  # ours, or JAX looks for NaN, and waits for every result itself
        return
    if _hook.get_global() is None:
        _hook.set_global(_count)
    if _hook.get_global() is _count:  # `with jax.debug_nans(...)` left a value of this thread's
        _hook.set_local(_count)


class Uncounted:
    """Inside, JAX does not count: `launch` bounds its own launches, and a hook would be in its way.

    A hook is Python, where an interrupt comes out before the results of a launch have a name.
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
    """Lets go of the results of eager work that has ended."""
    with _lock:
        while _under_way and _has_ended(_under_way[0]):
            _under_way.popleft()


def _count(function: object, args: object, kwargs: object, outputs: Any) -> None:
    """Counts what JAX has launched, and waits while there is too much of it."""
    del function, args, kwargs
    output = outputs if isinstance(outputs, jax.Array) else _small_array(outputs)
    if output is None or isinstance(output, jax.core.Tracer) or _needs_no_bound(output):
        return
    forget_finished()
    if output.nbytes > MOST_BYTES or not hasattr(output, "is_ready"):  # keys of jax.random
        _wait(output)
        return
    _under_way.append(output)
    while (oldest := _take_oldest()) is not None:
        _wait(oldest)


def _take_oldest() -> Array | None:
    with _lock:
        return _under_way.popleft() if len(_under_way) > MOST_UNDER_WAY else None


def _small_array(outputs: Any) -> Array | None:
    """One of several outputs, which end together: the first or the last, whichever is smaller."""
    leaves = jax.tree.leaves(outputs)
    ends = [leaf for leaf in (leaves[:1] + leaves[-1:]) if isinstance(leaf, jax.Array)]
    return min(ends, key=lambda leaf: leaf.size, default=None)


def _needs_no_bound(output: Array) -> bool:
    if output.is_deleted() or output.sharding.num_devices == 1:
        return True
    device: Any = next(iter(output.sharding.device_set))
    return bool(device.platform != "cpu")  # an accelerator has a queue of its own


def _has_ended(output: Any) -> bool:
    # In C, so that no other thread deletes it in between: `is_ready` of a deleted one is a
    # segmentation fault (JAX 0.10.2).
    return any(map(operator.call, (output.is_deleted, output.is_ready)))


def _wait(output: Array) -> None:
    with contextlib.suppress(Exception):  # it belongs to those who read the result
        output.block_until_ready()  # host sync, on purpose
