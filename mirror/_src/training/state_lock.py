"""`StateLock`: lets another thread read a training between two steps."""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import final


@final
class StateLock:
    """Whoever holds it finds model, optimizer and position as they are between two steps.

    The thread of `fit` holds it, except while it waits for data, evaluates or runs callbacks. It
    releases the lock at least once per launch, often for microseconds only, and a `threading.Lock`
    would then return to the same thread again and again. So threads receive the lock in the order
    in which they asked for it.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._queue: deque[tuple[int, threading.Lock]] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def held(self, timeout: float = -1) -> Iterator[bool]:
        """Holds the lock, again if this thread holds it already.

        Args:
            timeout: Maximum number of seconds to wait; -1 waits as long as necessary.

        Yields:
            Whether it is held.
        """
        if self.is_mine:
            yield True
            return
        is_held = self._acquire(timeout)
        try:
            yield is_held
        finally:
            if is_held and self.is_mine:  # not if an interrupt ended `released`
                self._release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Releases the lock for the time of a block, if this thread holds it."""
        if not self.is_mine:
            yield
            return
        self._release()
        try:
            yield
        finally:
            self._acquire()

    def _acquire(self, timeout: float = -1) -> bool:
        me = threading.get_ident()
        with self._mutex:
            if self._owner is None:
                self._owner = me
                return True
            turn = threading.Lock()
            turn.acquire()
            self._queue.append((me, turn))
        try:
            has_turn = turn.acquire(timeout=timeout)
        except BaseException:  # an interrupt
            if not self._withdraw(me, turn):
                self._release()
            raise
        return has_turn or not self._withdraw(me, turn)

    def _withdraw(self, me: int, turn: threading.Lock) -> bool:
        """Leaves the queue; returns False if this thread has received the lock meanwhile."""
        with self._mutex:
            if self._owner == me:
                return False
            self._queue.remove((me, turn))
            return True

    def _release(self) -> None:
        """Passes the lock to the thread that has waited longest."""
        with self._mutex:
            self._owner, turn = self._queue.popleft() if self._queue else (None, None)
            if turn is not None:
                turn.release()
