"""The launch guard: limits the launches in flight on several host devices before JAX 0.12.

All host devices share one pool of `max(cores, devices)` threads. JAX 0.10 and 0.11 can deadlock
there, and XLA aborts the process after 40 s:

- Each partition of a launch blocks a thread of the pool until the other partitions arrive. Launches
  that two threads dispatch at the same time can wait for each other. Dispatch therefore holds one
  lock, and few launches are in flight.
- XLA accepts 32 launches per device; further ones block threads of the pool. Eager ops of other
  threads fill that queue, so `eager_work` bounds them too.

A wider pool (`PJRT_NPROC`) would also prevent the deadlock, but XLA splits operations across it: on
2 cores, a step of a small CNN on 2 devices takes 1.2 to 1.5 times as long with a pool of 8. JAX
0.12 needs none of this.
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
    """Whether this JAX version can deadlock when launches on several host devices queue up."""
    return jax.__version_info__ < (0, 12)


def launch(
    program: Callable[..., Any], arguments: Sequence[Any], outputs: list[Any], *, bounded: bool
) -> None:
    """Runs a compiled program; its last output becomes ready when the launch has finished.

    Python raises an interrupt right after the call it arrived in, before the result is assigned.
    The outputs are therefore stored in a list by C code: a caller that donated its state can still
    write the new state back.

    Args:
        program: A compiled function of `arguments` that returns a sequence.
        arguments: Its arguments.
        outputs: An empty list, which receives the outputs.
        bounded: Whether the launch occupies several host devices and this JAX version needs the
            guard. The last output is then a token, which is never donated.
    """
    global _latest
    if not bounded:
        with _lock:  # every accelerator must see the launches in the same order
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


def in_flight() -> Iterator[Array]:
    """Yields an output of each known launch that may not have finished, oldest first."""
    yield from tuple(_in_flight)
    latest = _latest() if _latest is not None else None
    if latest is not None and not latest.is_deleted():
        yield latest


def _await_oldest() -> None:
    """Waits for the oldest launch, which stays counted if an interrupt arrives.

    Its error is suppressed here; it is raised where its results are read.
    """
    with contextlib.suppress(Exception):
        _in_flight[0].block_until_ready()  # host sync, on purpose
    _in_flight.popleft()
