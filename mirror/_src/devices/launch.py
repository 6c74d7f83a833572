"""The launch guard: limits the launches in flight on several host devices.

All host devices share one pool of `max(cores, devices)` threads. JAX 0.10 and 0.11 can deadlock
there, and XLA aborts the process after 40 s:

- Each partition of a launch blocks a thread of the pool until the other partitions arrive. Launches
  that two threads dispatch at the same time can wait for each other. Dispatch therefore holds one
  lock, and few launches are in flight.
- XLA accepts 32 launches per device; further ones block threads of the pool. Eager ops of other
  threads fill that queue, so `eager_work` bounds them too.

A wider pool (`PJRT_NPROC`) would also prevent the deadlock, but XLA splits operations across it: on
2 cores, a step of a small CNN on 2 devices takes 1.2 to 1.5 times as long with a pool of 8.

JAX 0.12.0.1 can wait forever if other threads run eager collectives: the threads that dispatch wait
for a place in the queue of their device, which XLA limits to 32, and no launch runs. Without the
guard, 3 of 12 runs of `tests.support.soak --reduce 2 --eager 1` hung, and with it 0 of 14.
"""

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from mirror._src.base.types import Array
from mirror._src.devices import eager_work as eager
from mirror._src.devices import launches
from mirror._src.devices.launches import Described

_started_in: int | None = None  # the process in which the first strategy was created


def started_in() -> int:
    """Returns the id of the process in which strategies work, which is the first to call this."""
    global _started_in
    if _started_in is None:
        _started_in = os.getpid()
    return _started_in


def require_not_forked() -> None:
    """Checks that this process has not been forked since the first strategy was created.

    Raises:
        RuntimeError: If it has.
    """
    if os.getpid() != started_in():
        raise RuntimeError(
            f"Process {os.getpid()} was forked from process {started_in()}, in which JAX runs. A "
            "fork copies no threads, so a step would wait forever. Start the process with "
            'multiprocessing.get_context("spawn"), or use NumPy only in workers of a data loader.'
        )


MOST_IN_FLIGHT = 2
_FIRST_SLEEP_SECS, _LONGEST_SLEEP_SECS = 5e-5, 0.02

_lock = threading.RLock()
_in_flight: deque[Array] = deque()


def is_needed() -> bool:
    """Whether this JAX version can deadlock when launches on several host devices queue up."""
    return jax.__version_info__ < (0, 13)


def launch(
    program: Callable[..., Any],
    arguments: Sequence[Any],
    outputs: list[Any],
    described: Described,
    *,
    bounded: bool,
    compiles: bool = False,
) -> None:
    """Runs a compiled program; its last output becomes ready when the launch has finished.

    Python raises an interrupt right after the call it arrived in, before the result is assigned.
    The outputs are therefore stored in a list by C code: a caller that donated its state can still
    write the new state back.

    Args:
        program: A compiled function of `arguments` that returns a sequence.
        arguments: Its arguments.
        outputs: An empty list, which receives the outputs.
        described: What it is, for reports of launches that do not end.
        bounded: Whether the launch occupies several host devices and this JAX version needs the
            guard. The last output is then a token, which is never donated.
        compiles: Whether JAX compiles the program first, while other threads cannot launch.

    Raises:
        StalledError: If an earlier launch has stalled and a watch raises errors.
    """
    record = None
    if launches.log is not None:
        launches.log.require_no_stall()
        record = launches.log.begin(described, compiles=compiles)
    try:
        if bounded:
            eager.bound_eager_work()
            eager.forget_finished()
        with _lock:  # every accelerator must see the launches in the same order
            for _ in range(len(_in_flight) - MOST_IN_FLIGHT + 1) if bounded else ():
                _await_oldest()
            if record is not None:
                record.starts()
            try:
                with eager.Uncounted():
                    results = itertools.starmap(program, (arguments,))
                    outputs.extend(itertools.chain.from_iterable(results))
            finally:
                if bounded and outputs:
                    _in_flight.append(outputs[-1])
    finally:
        if record is not None:
            record.was_dispatched(outputs)


@contextlib.contextmanager
def recorded(
    described: Described, collective: str = "", operands: Mapping[int, Any] | None = None
) -> Iterator[None]:
    """Context manager around a compilation that no launch waits for, for reports.

    Args:
        described: The program that is compiled.
        collective: Kind and line of a collective on the host, if it is one instead.
        operands: Its operand of each replica.
    """
    if launches.log is None:
        yield
        return
    record = launches.log.begin(described, compiles=operands is None)
    if operands is None:
        record.starts()
    else:
        record.reads(collective, operands)
    try:
        yield
    finally:
        record.ends()


def wait_for(tree: Any) -> None:
    """Waits until arrays are ready, or until a watch raises an error because of a stall.

    Raises:
        StalledError: If a launch has stalled and a watch raises errors.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):  # not an array of NumPy
            wait(leaf)


def wait(array: Any) -> None:
    """Waits until an array is ready, or until a watch raises an error because of a stall.

    Python cannot raise an error in a thread that waits in native code, so with such a watch this
    asks again and again. It sleeps no longer than it has already waited.

    Raises:
        StalledError: If a launch has stalled and a watch raises errors.
    """
    secs = _FIRST_SLEEP_SECS
    while (log := launches.log) is not None and log.stalls and hasattr(array, "is_ready"):
        log.require_no_stall()
        if launches.has_finished(array):
            break
        time.sleep(secs)
        secs = min(2 * secs, _LONGEST_SLEEP_SECS)
    array.block_until_ready()


def _await_oldest() -> None:
    """Waits for the oldest launch, which stays counted if an interrupt arrives.

    Its error is suppressed here; it is raised where its results are read.
    """
    try:
        wait(_in_flight[0])  # host sync, on purpose
    except launches.StalledError:
        raise
    except Exception:
        pass
    _in_flight.popleft()
