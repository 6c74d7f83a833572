"""The launch guard: how many programs with exchanges may be under way on host devices.

XLA's host client deadlocks, and after 40 s aborts the process, when launches with collectives pile
up on forced host devices (JAX 0.10.2 and 0.11; 0.12.0.1 was not seen to): each device's part of a
launch holds one thread of a shared pool until all parts have met. A few launches in flight, all
dispatched under one lock, cannot starve each other. The guard is one for the process, because the
thread pool is. It can go when the oldest supported JAX no longer hangs in the soak test without it.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mirror._types import Array

MOST_IN_FLIGHT = 2

_lock = threading.RLock()
_in_flight: deque[Array] = deque()


def launch(
    program: Callable[..., Any], leaves: Sequence[Any], outputs: list[Any], *, bounded: bool
) -> None:
    """Runs a compiled program; its last output is a token that is ready when the launch is done.

    An interrupt comes out right after the call that it met, before its result has a name. So the
    outputs are put into a list by C code: whoever gave its state up to the program can still write
    the new state back.

    Args:
        program: a compiled function of `leaves` that returns a sequence.
        leaves: its arguments.
        outputs: an empty list; holds the outputs from the moment they are there.
        bounded: wait until fewer than `MOST_IN_FLIGHT` launches are under way. Devices that are
            no host devices have queues of their own and need no bound.
    """
    with _lock:
        while bounded and len(_in_flight) >= MOST_IN_FLIGHT:
            _await_oldest()
        try:
            outputs.extend(itertools.chain.from_iterable(itertools.starmap(program, (leaves,))))
        finally:
            if bounded and outputs:
                _in_flight.append(outputs[-1])


def _await_oldest() -> None:
    """Waits for the oldest launch; an interrupt leaves it counted.

    What it failed with belongs to those who read its results, not to whoever launches next.
    """
    with contextlib.suppress(Exception):
        _in_flight[0].block_until_ready()  # host sync, on purpose
    _in_flight.popleft()
