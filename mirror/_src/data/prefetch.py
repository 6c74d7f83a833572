"""Running an iterator ahead of the loop that reads it, in a thread of its own."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, final

_MOST_WAIT_SECS = 5.0


@final
class PrefetchIterator(Iterator[Any]):
    """An iterator whose next items are made while the last one is worked on.

    What the source raises comes out in the loop, once, in its place. The thread ends with the
    source, and with this object: when the loop lets go of it, as after `break` or an interrupt.

    Args:
        source: what is iterated, in the thread.
        ahead: how many items to have ready at most.
    """

    def __init__(self, source: Iterator[Any], ahead: int) -> None:
        self._line = _Line(ahead)
        thread = threading.Thread(
            target=_fill, args=(source, self._line), name="mirror prefetch", daemon=True
        )
        self.close = weakref.finalize(self, _end, self._line, thread)
        thread.start()

    def __next__(self) -> Any:
        item, error = self._line.take()
        if error is None:
            return item
        self.close()
        raise error


class _Line:
    """The items that are ready, between the two threads."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._items: deque[tuple[Any, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, item: Any, error: BaseException | None = None) -> bool:
        """Waits for room; false where nobody reads any more."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._ahead)
            if not self.closed:
                self._items.append((item, error))
                self._changed.notify_all()
            return not self.closed

    def take(self) -> tuple[Any, BaseException | None]:
        """Waits for an item; the end comes as `StopIteration`, again and again."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._items)
            if not self._items:
                return None, StopIteration()
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Lets both threads go."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


def _fill(source: Iterator[Any], line: _Line) -> None:
    try:
        for item in source:
            if not line.put(item):
                return
        line.put(None, StopIteration())
    except BaseException as error:
        line.put(None, error)
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def _end(line: _Line, thread: threading.Thread) -> None:
    line.close()
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(_MOST_WAIT_SECS)  # a source that blocks for ever must not block its reader
