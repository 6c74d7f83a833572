"""The launch guard: how many programs may be under way on several host devices of JAX before 0.12.

All host devices share one pool of `max(cores, devices)` threads. JAX 0.10 and 0.11 deadlock there,
and XLA ends the process after 40 s:

- Each part of a launch waits for the others on a thread of the pool. Launches that two threads
  dispatch at once wait for each other. So one lock is held to dispatch, and few are in flight.
- XLA lets 32 launches per device in, and the next ones wait on threads of the pool. Eager ops of
  other threads fill that queue, so `eager` bounds them too.

A wider pool (`PJRT_NPROC`) would do as well, but operations are split over it: on 2 cores a step of
a small CNN on 2 devices takes 1.2 to 1.5 of its time on a pool of 8. JAX 0.12 needs none of this.
"""

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mirror._src.devices import eager_work as eager
from mirror._src.utils.types import Array

MOST_IN_FLIGHT = 2

_lock = threading.RLock()
_in_flight: deque[Array] = deque()
_latest: weakref.ref[Array] | None = None


def is_needed() -> bool:
    """Whether this JAX deadlocks where launches on several host devices pile up."""
    return jax.__version_info__ < (0, 12)


def launch(
    program: Callable[..., Any], arguments: Sequence[Any], outputs: list[Any], *, bounded: bool
) -> None:
    """Runs a compiled program; the last leaf of its outputs is ready when the launch has ended.

    An interrupt comes out right after the call that it met, before its result has a name. So the
    outputs are put into a list by C code: whoever donated its state to the program can still write
    the new state back.

    Args:
        program: A compiled function of `arguments` that returns a sequence.
        arguments: Its arguments.
        outputs: An empty list; holds the outputs from the moment they are there.
        bounded: Whether the launch occupies several host devices and this JAX needs the guard.
            The last output is a token then, which nobody donates.
    """
    global _latest
    if not bounded:
        with _lock:  # accelerators meet in the order of the launches, which is one for all
            _call(program, arguments, outputs)
        if outputs and isinstance(outputs[-1], jax.Array):
            _latest = weakref.ref(outputs[-1])
        return
    eager.bound_eager_work()
    eager.forget_finished()
    with _lock:
        while len(_in_flight) >= MOST_IN_FLIGHT:
            _await_oldest()
        try:
            _call(program, arguments, outputs)
        finally:
            if outputs:
                _in_flight.append(outputs[-1])


def _call(program: Callable[..., Any], arguments: Sequence[Any], outputs: list[Any]) -> None:
    with eager.Uncounted():
        outputs.extend(itertools.chain.from_iterable(itertools.starmap(program, (arguments,))))


def under_way() -> Iterator[Array]:
    """One output of each launch that may not have ended, oldest first, as far as they are known."""
    yield from tuple(_in_flight)
    latest = _latest() if _latest is not None else None
    if latest is not None and not latest.is_deleted():
        yield latest


def _await_oldest() -> None:
    """Waits for the oldest launch; an interrupt leaves it counted.

    What it failed with belongs to those who read its results, not to whoever launches next.
    """
    with contextlib.suppress(Exception):
        _in_flight[0].block_until_ready()  # host sync, on purpose
    _in_flight.popleft()
