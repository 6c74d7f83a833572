"""`watch`: reports launches that do not end, in a thread of its own."""

import atexit
import contextlib
import functools
import os
import sys
import threading
from typing import Any, Literal, TypeAlias, cast, final, get_args

from mirror._src.base import clock
from mirror._src.base.errors import require_secs
from mirror._src.base.interrupts import say
from mirror._src.base.public_names import set_module
from mirror._src.cluster.start import has_joined_others
from mirror._src.devices import launches
from mirror._src.devices.launches import Launch, LaunchLog, Stall
from mirror._src.inspection.stall_report import THREAD_NAME, Peers, in_words, report

Action: TypeAlias = Literal["report", "raise", "exit"]

EXIT_STATUS = 75
"""`EX_TEMPFAIL` of sysexits.h: run the job again."""
_XLA_ABORTS_SECS = 40
_BEFORE_ABORT_SECS = 30.0
_MOST_CHECKS_PER_LIMIT = 20
_RAISES_SECS = 10.0
_SHORTEST_INTERVAL_SECS, _LONGEST_INTERVAL_SECS = 0.02, 1.0


@set_module("mirror.debugging")
@final
class Watch:
    """A watch that `mirror.debugging.watch` has started; a context manager that ends it.

    Attributes:
        reports: The reports so far.

    >>> strategy = mirror.MirroredStrategy(["/cpu:0", "/cpu:1"])
    >>> with mirror.debugging.watch(secs=60) as watch:
    ...     total = strategy.run(lambda x: x + 1, (1,))
    >>> watch.reports
    []
    """

    def __init__(self, secs: float, action: Action) -> None:
        self.reports: list[str] = []
        self._secs = secs
        self._action = action
        self._log = launches.start_log()
        if action == "raise":
            self._log.stalls[self] = None
            _end_stalled_processes()
        self._is_over = threading.Event()
        self._stalled: Launch | None = None
        self._peers: Peers | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = ", closed" if self._is_over.is_set() else ""
        return f"Watch(secs={self._secs:g}, action={self._action!r}{state})"

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watch; a second call has no effect."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        self._log.stalls.pop(self, None)
        launches.stop_log()
        if self._peers is not None:
            atexit.unregister(self._peers.leave)
            self._peers.close()

    def _run(self) -> None:
        interval = min(
            max(self._secs / _MOST_CHECKS_PER_LIMIT, _SHORTEST_INTERVAL_SECS),
            _LONGEST_INTERVAL_SECS,
        )
        stopwatch = _Stopwatch(self._log, interval)
        while not clock.wait(self._is_over, interval):
            stalled, secs = stopwatch.look()
            if self._peers is None and has_joined_others():
                self._peers = Peers(self._secs)
                interval = min(interval, self._peers.interval)
                atexit.register(self._peers.leave)
            if self._peers is not None:
                self._peers.look(stalled, secs)
            if self._stalled is not None and self._stalled is not stalled:
                self._say_that_it_ended()
            if stalled is not None:
                self._handle(stalled, secs)
        if self._stalled is not None and self._stalled.has_ended:
            self._say_that_it_ended()

    def _handle(self, stalled: Launch, secs: float) -> None:
        """Reports a launch once, and acts when its time is over."""
        peers = self._peers
        is_over = secs >= self._secs
        is_new = self._stalled is not stalled
        if is_new and peers is not None and peers.is_compiling():
            return
        # XLA or JAX may end the process before the time is over.
        is_early = secs >= _BEFORE_ABORT_SECS and _may_abort(stalled)
        is_early |= peers is not None and peers.must_report()
        if is_new and (is_over or is_early):
            self._stalled = stalled
            others = peers.lines() if peers is not None else []
            self._say(report(stalled, secs, self._actions(stalled, is_over=is_over), others))
            if peers is not None:
                peers.has_reported(stalled)
        if not is_over or self._stalled is not stalled:
            return
        if self._action == "raise" and self._log.stalls[self] is None:
            _raised[:] = [(stalled, stalled.arrays())]
            self._log.stalls[self] = Stall(stalled, self.reports[-1])
            if _is_exiting.is_set():
                _end_if_stalled()
        elif self._action == "raise" and stalled.joint_number:
            # A launch of a program with gloo waits in native code for an earlier one.
            if secs >= self._secs + _RAISES_SECS and self._log.raised is not stalled:
                _end_if_stalled()
        elif self._action == "exit":
            if peers is not None:
                peers.await_reports(stalled)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(EXIT_STATUS)

    def _actions(self, stalled: Launch, *, is_over: bool) -> list[str]:
        lines = []
        end = self._peers.end_by_jax() if self._peers is not None else ""
        if end:
            lines.append(end)
        if _may_abort(stalled):
            lines.append(
                "If replicas wait in a collective on host devices, XLA ends the process "
                f"{_XLA_ABORTS_SECS} s after the first has arrived."
            )
        if stalled.described.spans_processes:
            lines.append(
                "Every process must make the same calls of the strategy in the same order. Look at "
                "the processes that have not reached this launch, and at their output."
            )
        lines.append(
            "Look at the callback or replica that has not arrived, and at the threads above: a "
            "callback or lock that waits for this step never returns."
        )
        if self._action == "exit":
            when = "now" if is_over else f"after {self._secs:g} s"
            lines.append(f"The process ends {when}, with status {EXIT_STATUS}.")
        elif self._action == "raise":
            lines.append("The next wait or step of mirror raises mirror.StalledError.")
        return lines

    def _say_that_it_ended(self) -> None:
        stalled, self._stalled = self._stalled, None
        assert stalled is not None
        if self._action == "raise":
            self._log.stalls[self] = None
        after = in_words(clock.now() - stalled.began)
        self._say(f"mirror: {stalled.described} has ended after all, {after} after its launch.")

    def _say(self, text: str) -> None:
        self.reports.append(text)
        say(text)


_raised: list[tuple[Launch, list[Any]]] = []  # the last launch that raised an error, and its arrays
_is_exiting = threading.Event()  # no error can be raised then: JAX waits for launches


def _may_abort(launch: Launch) -> bool:
    """Whether XLA ends the process if a replica of this launch does not arrive."""
    described = launch.described
    if described.spans_processes:  # replicas meet in gloo, which waits (JAX 0.10.2, 0.12)
        return False
    devices = set(described.devices)
    if len(devices) < 2 or next(iter(devices)).platform != "cpu":
        return False
    return not all(site.is_callback for site in described.sites())


@functools.cache
def _end_stalled_processes() -> None:
    """From now on, ends the process at its exit if a launch has raised an error and not ended.

    JAX, which waits for launches at exit, was imported before, so this is called before.
    """
    atexit.register(_end_if_stalled)


def _end_if_stalled() -> None:
    _is_exiting.set()
    for stalled, arrays in _raised:
        if not all(map(launches.has_finished, arrays)):
            say(
                f"mirror: {stalled.described} still has not ended. The process ends without it, "
                f"with status {EXIT_STATUS}."
            )
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(EXIT_STATUS)


class _Stopwatch:
    """Measures for how long nothing has changed.

    The time in which the process did not run, such as the sleep of a laptop, does not count.
    """

    def __init__(self, log: LaunchLog, interval: float) -> None:
        self._log = log
        self._most = 2 * interval
        self._last = clock.now()
        self._oldest: Launch | None = None
        self._secs = 0.0

    def look(self) -> tuple[Launch | None, float]:
        """Returns the oldest launch that runs, and how long it has been the oldest, in seconds."""
        now = clock.now()
        passed, self._last = min(now - self._last, self._most), now
        unfinished = self._log.unfinished()
        if any(launch.phase == "compiling" for launch in unfinished):
            unfinished = []
        oldest = next((launch for launch in unfinished if launch.phase == "running"), None)
        if oldest is None and unfinished:
            oldest = unfinished[0]
        self._secs = self._secs + passed if oldest is self._oldest and oldest is not None else 0.0
        self._oldest = oldest
        return oldest, self._secs


def watch(secs: float = 60.0, action: Action = "report") -> Watch:
    """Reports steps and reductions that do not end.

    If the oldest launch has not ended for `secs` seconds, one report on standard error says which
    step it is (function and line), which replicas and devices have not ended, which host callback
    has not returned, which collective the others wait in, and what each thread does. The time in
    which JAX compiles does not count. On several host devices, where XLA aborts the process if a
    replica misses a collective for 40 s, the report appears after 30 s at the latest.

    In several processes, start it on each of them at the same place: the report then also names the
    processes that have not reached the step, and what they do. It appears before JAX ends this
    process because another one is silent.

    A watch costs microseconds per step. A thread that holds Python's interpreter lock in native
    code also stops the watch.

    Args:
        secs: Number of seconds to wait.
        action: What to do after the report. `"report"` does nothing more. `"raise"` raises
            `mirror.StalledError` where mirror waits for the devices, and in each further step; a
            thread that waits in JAX, as in `float(loss)`, cannot be interrupted. `"exit"` ends the
            process at once with status 75, so that a launcher starts it again.

    Returns:
        A context manager that ends the watch. Without `with`, the watch ends with the process, or
        with its `close()`.

    Raises:
        ValueError: If `secs` is not positive or finite, or `action` is unknown.
        TypeError: If `secs` is not a number.

    >>> watch = mirror.debugging.watch(secs=60)
    >>> watch
    Watch(secs=60, action='report')
    >>> watch.close()
    """
    return Watch(require_secs("secs", secs), require_action(action))


def require_action(action: str) -> Action:
    """Returns an action.

    Raises:
        ValueError: If it is unknown.
    """
    if action in get_args(Action):
        return cast(Action, action)
    raise ValueError(f"`action` must be {', '.join(map(repr, get_args(Action)))}, got {action!r}.")
