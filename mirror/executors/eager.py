"""Bounds the eager work on several host devices, which JAX before 0.12 needs: see `launch`.

There is no public way to see the eager work of other threads. JAX calls one function after each
compiled one, eager ops included: `jax._src.api._post_hook_state` (JAX 0.10 and 0.11), which its own
search for NaN uses. `tests/test_soak.py` fails when it has gone. Delete this file with support for
JAX 0.11.
"""

import contextlib
import threading
from collections import deque
from typing import Any

import jax

from mirror._types import Array

MOST_UNDER_WAY = 8
"""Launches of eager work; XLA lets 32 in, and each thread may add one."""


class _Thread(threading.local):
    launches = False


thread = _Thread()
"""Of this thread, whether it launches a program that is bounded in another way."""
_under_way: deque[Array] = deque()


def bound_eager_work() -> None:
    """From now on waits after an eager op on several host devices while too many are under way."""
    from jax._src import api

    hook: Any = api._post_hook_state
    if hook.value is None:  # else JAX looks for NaN, and waits for every result itself
        hook.set_global(_count)
        if hook.value is None:  # `with jax.debug_nans(...)` has left a value of this thread's own
            hook.set_local(_count)


def _count(function: object, args: object, kwargs: object, outputs: Any) -> None:
    """Counts what JAX has launched, and waits while there is too much of it."""
    del function, args, kwargs
    if thread.launches:
        return
    output = outputs if isinstance(outputs, jax.Array) else _first_array(outputs)
    if output is None or isinstance(output, jax.core.Tracer) or _is_alone(output):
        return
    _under_way.append(output)
    while len(_under_way) > MOST_UNDER_WAY:
        with contextlib.suppress(Exception):  # it belongs to those who read the result
            _under_way.popleft().block_until_ready()  # host sync, on purpose


def _first_array(outputs: Any) -> Array | None:
    leaves = jax.tree.leaves(outputs)
    return leaves[0] if leaves and isinstance(leaves[0], jax.Array) else None


def _is_alone(output: Array) -> bool:
    return output.is_deleted() or output.sharding.num_devices == 1
