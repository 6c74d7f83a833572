"""Counts the messages with which processes agree, by running that code with a store in memory."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

from mirror._src.distributed import agreement, hello, store

_SECS = 60.0


class Messages(NamedTuple):
    """Messages between processes and the coordination service, which process 0 runs.

    Attributes:
        total: Messages of all processes.
        of_first: Messages of process 0, which it sends one after the other.
        num_bytes: Bytes of keys and texts of all messages.
    """

    total: int
    of_first: int
    num_bytes: int


class _Counted:
    """A store that answers as if all processes had said the same."""

    def __init__(self) -> None:
        self.count = 0
        self.num_bytes = 0
        self.last = ""

    def post(self, key: str, text: str) -> None:
        self.last = text
        self._add(f"mirror/{key}", text)

    def read(self, key: str, deadline: float) -> str:
        del deadline
        text = "same" if key.endswith("verdict") else self.last
        self._add(f"mirror/{key}", text)
        return text

    def delete(self, key: str) -> None:
        self._add(f"mirror/{key}", "")

    def _add(self, key: str, text: str) -> None:
        self.count += 1
        self.num_bytes += len(key) + len(text)


@contextlib.contextmanager
def _process(index: int, count: int) -> Iterator[_Counted]:
    counted = _Counted()
    with mock.patch.multiple(
        store,
        process_index=lambda: index,
        process_count=lambda: count,
        post=counted.post,
        read=counted.read,
        delete=counted.delete,
    ):
        yield counted


def _count(num_processes: int, act: Callable[[], object]) -> Messages:
    """Returns the messages of all processes; all but process 0 send equal numbers."""
    numbers = []
    for index in (0, num_processes - 1):
        with _process(index, num_processes) as counted:
            act()
        numbers.append(counted)
    first, other = numbers
    rest = num_processes - 1
    total = first.count + rest * other.count
    return Messages(total, first.count, first.num_bytes + rest * other.num_bytes)


def agreement_on_program(num_processes: int, name: str = "train_step") -> Messages:
    """Returns the messages before a program first runs, if all processes have proved the same."""
    program = agreement.Program(name, ["a line"], lambda: [""])

    def act() -> None:
        # From the third program on, process 0 deletes what the last but one has left.
        with mock.patch.object(agreement, "_numbers", itertools.count(2)):
            difference = agreement.find_difference(program, _SECS)
        assert difference is None

    return _count(num_processes, act)


def comparison_at_start(num_processes: int, devices: int) -> Messages:
    """Returns the messages that compare versions, settings and devices at the start."""
    ids = [2048 * num_processes + i for i in range(devices)]  # as long as the ids of JAX
    mine = {"devices": f"{devices} x GPU", "ids": ids}

    def act() -> None:
        hello.require_same_settings(time.monotonic() + _SECS)
        hello.exchange("devices", mine, time.monotonic() + _SECS)

    return _count(num_processes, act)
