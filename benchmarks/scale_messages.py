"""Counts the messages with which processes agree, by running that code with a store in memory."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

from mirror._src.cluster import agreement, consensus, start, store
from mirror._src.training import agreed_stop

_SECS = 60.0


class Messages(NamedTuple):
    """Messages between processes and the coordination service, which process 0 runs.

    Attributes:
        total: Messages of all processes.
        of_first: Messages of process 0, which it sends one after the other.
        texts_of_first: Texts that process 0 receives in them.
        num_bytes: Bytes of keys and texts of all messages.
    """

    total: int
    of_first: int
    texts_of_first: int
    num_bytes: int


class MemoryStore:
    """A store for processes that run one after the other, process 0 first.

    The others have always said the same as the process that runs, as if it had come last.

    Attributes:
        index: The process that runs.
        messages: Number of messages of each process.
        texts: Number of texts that each process has received.
        num_bytes: Bytes of the messages of each process.
    """

    def __init__(self, num_processes: int) -> None:
        self.index = 0
        self.num_processes = num_processes
        self.messages = dict.fromkeys(range(num_processes), 0)
        self.texts = dict.fromkeys(range(num_processes), 0)
        self.num_bytes = dict.fromkeys(range(num_processes), 0)
        self._content: dict[str, str] = {}
        self._changes = threading.Condition()

    def set(self, key: str, text: str) -> None:
        """See `store.set`."""
        with self._changes:
            self._content[key] = text
            self._count(1, len(text), key)
            self._changes.notify_all()

    def set_default(self, key: str, text: str) -> None:
        """See `store.set_default`."""
        with self._changes:
            self._content.setdefault(key, text)
            self._count(1, len(text), key)
            self._changes.notify_all()

    def get(self, key: str, deadline: float, *, stops: bool = True) -> str:
        """Returns a text, which a process has posted before."""
        del deadline, stops
        return self.wait(key)

    def wait(self, key: str) -> str:
        """See `store.wait`."""
        with self._changes:
            if not self._changes.wait_for(lambda: key in self._content, _SECS):
                raise AssertionError(f"{key} has not been posted")
            text = self._content[key]
            self.texts[self.index] += 1
            self._count(1, len(text), key)
            return text

    def get_all(self, directory: str) -> dict[str, str]:
        """Returns the text of this process for all processes."""
        with self._changes:
            text = self._content[f"{directory}/{self.index}"]
            texts = {str(i): text for i in range(self.num_processes)}
            self.texts[self.index] += len(texts)
            self._count(1, len(texts) * len(text), *(f"{directory}/{i}" for i in texts))
            return texts

    def delete(self, key: str) -> None:
        """Counts a message."""
        with self._changes:
            self._count(1, 0, key)

    def _count(self, messages: int, num_bytes: int, *keys: str) -> None:
        self.messages[self.index] += messages
        self.num_bytes[self.index] += num_bytes + sum(len(f"mirror/{key}") for key in keys)


@contextlib.contextmanager
def installed(messages: MemoryStore) -> Iterator[None]:
    """Context manager in which processes use this store."""
    names = ("set", "set_default", "get", "wait", "get_all", "delete")
    with mock.patch.multiple(
        store,
        process_index=lambda: messages.index,
        process_count=lambda: messages.num_processes,
        **{name: getattr(messages, name) for name in names},
    ):
        yield


def _count(num_processes: int, act: Callable[[], object]) -> Messages:
    """Returns the messages of all processes; all but process 0 send equal numbers."""
    messages = MemoryStore(num_processes)
    last = num_processes - 1
    with installed(messages):
        for messages.index in (0, last):
            act()

    def of_all(counts: dict[int, int]) -> int:
        return counts[0] + last * counts[last]

    return Messages(
        of_all(messages.messages),
        messages.messages[0],
        messages.texts[0],
        of_all(messages.num_bytes),
    )


def agreement_on_program(num_processes: int, name: str = "train_step") -> Messages:
    """Returns the messages before a program first runs, if all processes have proved the same."""
    program = agreement.Program(name, ["a line"], lambda: [""])

    def act() -> None:
        topic = consensus.Topic("program")
        topic.number = 1  # from the second program on, process 0 deletes what the last one has left
        with mock.patch.object(agreement, "_topic", topic):
            difference = agreement.find_difference(program, _SECS)
        assert difference is None

    return _count(num_processes, act)


def comparison_at_start(num_processes: int, devices: int) -> Messages:
    """Returns the messages that compare versions, settings and devices at the start."""
    ids = [2048 * num_processes + i for i in range(devices)]  # as long as the ids of JAX
    mine = {"devices": f"{devices} x GPU", "ids": ids}

    def act() -> None:
        start.require_same_settings(time.monotonic() + _SECS)
        consensus.gather("devices", mine, time.monotonic() + _SECS)

    return _count(num_processes, act)


def agreed_end(num_processes: int) -> Messages:
    """Returns the messages of `fit` if process 0 requests to stop, and all stop together."""

    def act() -> None:
        with mock.patch.object(agreed_stop, "_numbers", itertools.count()):
            stop = agreed_stop.AgreedStop()
        if store.process_index() == 0:
            stop.ask("stop", "enough")
        while stop.may_launch():
            pass
        stop.close()

    return _count(num_processes, act)
