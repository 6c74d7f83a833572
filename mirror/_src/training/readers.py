"""`Readers`: other threads that evaluate or save a trainer, whose steps donate its arrays."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import final

from mirror._src.base import interrupts
from mirror._src.passes.callbacks import in_callback


@final
class Readers:
    """Keeps the arrays that a thread reads from being donated by a step of another thread.

    A step of `fit` deletes the arrays that it updates. A method that reads them in another thread
    therefore copies them between two steps. If it began before `fit`, it reads the arrays
    themselves, and `fit` waits for it before the first step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._trains: int | None = None  # the thread of `fit`
        self._reads: Counter[int] = Counter()  # threads that read the arrays themselves

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Context manager around `fit`: waits for other threads that have begun to read."""
        me = threading.get_ident()
        self._trains = me
        try:
            with interrupts.immediate(), self._changed:
                self._changed.wait_for(lambda: not self._reads.keys() - {me})
            yield
        finally:
            self._trains = None

    @contextlib.contextmanager
    def reading(self, method: str) -> Iterator[bool]:
        """Context manager around a method that reads the arrays.

        Args:
            method: Name of the method, for the message.

        Yields:
            Whether it must copy them between two steps, because another thread trains.

        Raises:
            RuntimeError: If it is called inside a host callback of a step.
        """
        if in_callback():
            raise RuntimeError(
                f"trainer.{method}() was called inside a host callback of a step, which waits for "
                "the callback to return, while its arrays are being updated. Call it from the "
                "on_step(self, fit) method of a mirror.callbacks.Callback, or after the step."
            )
        me = threading.get_ident()
        with self._changed:
            must_copy = self._trains not in (None, me)
            if not must_copy:
                self._reads[me] += 1
        try:
            yield must_copy
        finally:
            if not must_copy:
                with self._changed:
                    self._reads[me] -= 1
                    self._reads += Counter()  # drops the zeros
                    self._changed.notify_all()
