"""Prefetching: runs an iterator in a background thread, ahead of the loop that reads it."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

from mirror._src.base.naming import place_of_user, warn_at
from mirror._src.base.tracebacks import api_boundary

T = TypeVar("T")
_MOST_WAIT_SECS = 0.5


@final
class PrefetchIterator(Iterator[T]):
    """An iterator whose next items are produced while the loop processes the current one.

    An exception of the source is raised in the loop, once, in place of the item. The thread ends
    with the source, or when this object is released, as after `break` or an interrupt.

    Args:
        source: Iterator to run in the thread.
        ahead: Maximum number of items to have ready.
        cancel: Called in the loop when it ends, so that the source waits no longer.
    """

    def __init__(
        self, source: Iterator[T], ahead: int, cancel: Callable[[], None] = lambda: None
    ) -> None:
        self._queue = _Queue(ahead)
        thread = threading.Thread(
            target=_fill,
            args=(source, self._queue, place_of_user()),
            name="mirror prefetch",
            daemon=True,
        )
        self.close = weakref.finalize(self, _end, self._queue, thread, cancel)
        thread.start()

    @api_boundary
    def __next__(self) -> T:
        item: T
        item, error = self._queue.take()
        if error is None:
            return item
        self.close()
        raise error


class _Queue:
    """The items that are ready, passed from the thread to the loop."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._items: deque[tuple[Any, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, item: Any, error: BaseException | None = None) -> bool:
        """Waits for room and adds an item; returns False if the loop no longer reads."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._ahead)
            if not self.closed:
                self._items.append((item, error))
                self._changed.notify_all()
            return not self.closed

    def take(self) -> tuple[Any, BaseException | None]:
        """Waits for an item; at the end, every call returns `StopIteration`."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._items)
            if not self._items:
                return None, StopIteration()
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Wakes up both threads, and drops all items."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


def _fill(source: Iterator[Any], queue: _Queue, place: tuple[str, int]) -> None:
    warn_at(place)
    try:
        for item in source:
            if not queue.put(item):
                return
        queue.put(None, StopIteration())
    except BaseException as error:
        queue.put(None, error)
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def _end(queue: _Queue, thread: threading.Thread, cancel: Callable[[], None]) -> None:
    queue.close()
    cancel()
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_MOST_WAIT_SECS)  # a source may block forever; do not block with it
