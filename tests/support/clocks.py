"""A clock that tests advance."""

import threading

from tests.support.waiting import wait_until

_STEP_SECS = 0.05


class FakeClock:
    """The clock of the package; threads that wait for it wait until a test advances it."""

    def __init__(self) -> None:
        self._secs = 1000.0
        self._waiting: dict[threading.Thread, float] = {}
        self._known: set[threading.Thread] = set()

    def now(self) -> float:
        """Returns the seconds so far."""
        return self._secs

    def wait(self, event: threading.Event, secs: float) -> bool:
        """Waits until an event, or until the clock has advanced."""
        thread, deadline = threading.current_thread(), self._secs + secs
        self._known.add(thread)
        while not event.is_set() and self._secs < deadline:
            self._waiting[thread] = deadline
            event.wait(0.001)
        self._waiting.pop(thread, None)
        return event.is_set()

    def jump(self, secs: float) -> None:
        """Advances the clock at once."""
        self._secs += secs

    def advance(self, secs: float) -> None:
        """Advances the clock in steps; after each, waits until all threads wait again."""
        for _ in range(round(secs / _STEP_SECS)):
            self._secs += _STEP_SECS
            wait_until(self._is_still)

    def is_awaited(self) -> bool:
        """Whether a thread waits for the clock."""
        return bool(self._waiting)

    def _is_still(self) -> bool:
        waiting = dict(self._waiting)
        return all(
            waiting.get(thread, 0.0) > self._secs for thread in self._known if thread.is_alive()
        )
