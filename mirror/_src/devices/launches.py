"""Launches that have not ended, for `mirror.debugging.watch` and the pytest plugin.

Without a watch, a launch costs one comparison more.
"""

import contextlib
import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax

from mirror._src.base import clock
from mirror._src.base.public_names import set_module
from mirror._src.base.types import Array

# Recorded at the end of each compilation, in its thread. A test fails when JAX renames it.
_COMPILED = "/jax/core/compile/backend_compile_duration"


@set_module("mirror")
class StalledError(RuntimeError):
    """Raised when a launch has not ended in time, with `watch(..., action="raise")`.

    The message is the report of `mirror.debugging.watch`. The launch itself cannot be stopped: as
    long as it has not ended, further steps raise this error too.

    >>> error = mirror.StalledError("step has not ended for 60 s")
    >>> isinstance(error, RuntimeError)
    True
    """


class Site(NamedTuple):
    """A place of a program where replicas meet, or where the host is called.

    Attributes:
        what: `"all-reduce"`, or the name of the callback.
        line: The user's line.
        key: The operation, by which a callback that runs is found; see `passes.callbacks`.
        is_callback: Whether it is a host callback.
    """

    what: str
    line: str
    key: object = None
    is_callback: bool = False


class Described(NamedTuple):
    """Description of a program or reduction, for reports.

    Attributes:
        name: Name of the step.
        line: Where the step is defined, such as `train.py:12`; empty if it is not the user's.
        devices: The device of each replica.
        replicas: The index of each of these replicas.
        sites: Returns the collectives and host callbacks of the program, in its order.
        spans_processes: Whether the devices belong to several processes.
    """

    name: str
    line: str = ""
    devices: Sequence[jax.Device] = ()
    replicas: Sequence[int] = ()
    sites: Callable[[], Sequence[Site]] = tuple
    spans_processes: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.line})" if self.line else self.name


@final
class Launch:
    """A launch that may not have ended.

    Attributes:
        number: Number of the launch since the watch began.
        joint_number: If it spans processes, its number among those since the process began, so that
            processes can compare it; else 0.
        described: What is launched.
        thread: The thread that launched it.
        began: When it was launched, in seconds of `clock.now`.
        phase: What happens: `"waiting"` for its turn, `"compiling"`, `"running"`.
        compiles: Whether it is compiled first.
        collective: Kind and line of a collective on the host; empty for a program.
        operands: For a collective on the host, the operands of the replicas that are still used.
    """

    def __init__(self, number: int, described: Described, *, compiles: bool = False) -> None:
        self.number = number
        self.joint_number = 0
        self.described = described
        self.thread = threading.current_thread()
        self.began = clock.now()
        self.phase = "waiting"
        self.compiles = compiles
        self.collective = ""
        self.operands: dict[int, weakref.ref[Array]] = {}
        self._is_over = False
        self._output: weakref.ref[Array] | None = None

    def starts(self) -> None:
        """Marks the launch as started."""
        self.phase = "compiling" if self.compiles else "running"

    def reads(self, collective: str, operands: Mapping[int, Any]) -> None:
        """It is a collective on the host, which waits for the operands of the replicas."""
        self.phase, self.collective = "running", collective
        self.operands = {i: weakref.ref(operand) for i, operand in operands.items()}

    def was_dispatched(self, outputs: Sequence[Any]) -> None:
        """It runs on the devices; its last output is ready when it has ended."""
        self.phase = "running"
        arrays = [output for output in outputs[::-1] if hasattr(output, "is_ready")]
        self._output = weakref.ref(arrays[0]) if arrays else None
        self._is_over = not arrays  # only random keys, which cannot be asked

    def ends(self) -> None:
        """It has ended or failed."""
        self._is_over = True

    @property
    def has_ended(self) -> bool:
        """Whether it has ended. Also true if its results were dropped, so that it is unknown."""
        if not self._is_over and self._output is not None:
            output = self._output()
            self._is_over = output is None or has_finished(output)
        return self._is_over

    def arrays(self) -> list[Any]:
        """Returns the arrays that are ready when it has ended, without those that were dropped."""
        references = [*self.operands.values(), *([self._output] if self._output else [])]
        return [array for array in (reference() for reference in references) if array is not None]

    @property
    def local_replicas(self) -> list[int]:
        """The replicas on devices of this process; it cannot ask the devices of others."""
        here = jax.process_index()
        pairs = zip(self.described.replicas, self.described.devices, strict=True)
        return [i for i, device in pairs if device.process_index == here]

    def missing(self) -> list[int]:
        """Returns this process's replicas that have not ended, or whose operand is not there."""
        if self.operands:
            alive = [(i, operand()) for i, operand in self.operands.items()]
            return [i for i, operand in alive if operand is not None and not has_finished(operand)]
        output = self._output() if self._output is not None else None
        shards = [] if output is None or output.is_deleted() else output.addressable_shards
        running = {shard.device for shard in shards if not has_finished(shard.data)}
        device_of = dict(zip(self.described.replicas, self.described.devices, strict=True))
        return [i for i in self.local_replicas if not shards or device_of[i] in running]


_HAS_ENDED = operator.attrgetter("has_ended")


def has_finished(output: Any) -> bool:
    """Whether an array is ready or deleted, without waiting."""
    # Both calls run in C, so that no other thread can delete the array in between: `is_ready` of a
    # deleted array is a segmentation fault (JAX 0.10.2).
    return any(map(operator.call, (output.is_deleted, output.is_ready)))


class Stall(NamedTuple):
    """A launch that has not ended in time.

    Attributes:
        launch: The launch.
        report: The message of the error.
    """

    launch: Launch
    report: str


@final
class LaunchLog:
    """The launches of a process that is watched.

    Attributes:
        stalls: For each watch that raises errors, the stall to raise; `None` without one.
        raised: The launch of the last stall that has been raised.
    """

    def __init__(self) -> None:
        self.stalls: dict[object, Stall | None] = {}
        self.raised: Launch | None = None
        self._launches: deque[Launch] = deque()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def begin(self, described: Described, *, compiles: bool = False) -> Launch:
        """Adds a launch, and forgets the first ones if they have ended."""
        launch = Launch(next(self._numbers), described, compiles=compiles)
        with self._lock:
            for _ in [*itertools.takewhile(_HAS_ENDED, self._launches)]:
                self._launches.popleft()
            self._launches.append(launch)
            if described.spans_processes:
                launch.joint_number = joint[-1].joint_number + 1 if joint else 1
                joint.append(launch)
        return launch

    def unfinished(self) -> list[Launch]:
        """Returns the launches that have not ended, oldest first."""
        with self._lock:
            return [*itertools.filterfalse(_HAS_ENDED, self._launches)]

    def compiled(self, event: str, duration_secs: float, **details: str | int) -> None:
        """Listens to JAX: a program was compiled in this thread, and runs now."""
        del duration_secs, details
        if event == _COMPILED:
            me = threading.current_thread()
            for launch in self.unfinished():
                if launch.thread is me and launch.phase == "compiling":
                    launch.phase = "running"

    def require_no_stall(self) -> None:
        """Raises the error of a watch, which withdraws it when the launch has ended or it closes.

        Raises:
            StalledError: If a launch has stalled.
        """
        for stall in tuple(self.stalls.values()):
            if stall is not None:
                self.raised = stall.launch
                raise StalledError(stall.report)


joint: deque[Launch] = deque(maxlen=8)
"""The last launches that span processes. They are counted during watches only."""

log: LaunchLog | None = None
"""The log during a watch, or else `None`."""

_users = 0
_users_lock = threading.Lock()


def start_log() -> LaunchLog:
    """Starts to log launches, until `stop_log` has been called as often."""
    global log, _users
    with _users_lock:
        if log is None:
            log = LaunchLog()
            jax.monitoring.register_event_duration_secs_listener(log.compiled)
        _users += 1
        return log


def stop_log() -> None:
    """Stops logging, unless another watch needs the log."""
    global log, _users
    with _users_lock:
        _users -= 1
        if log is not None and not _users:
            with contextlib.suppress(AssertionError):  # the user has removed all listeners
                jax.monitoring.unregister_event_duration_listener(log.compiled)
            log = None
