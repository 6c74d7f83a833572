"""The launches of a job, compared by process 0 while they run.

Each process notes its launches that span processes, and the values that it passes and that no
launch has returned. A thread posts them about twice a second; see `failures`. No step waits.
"""

import itertools
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

from mirror._src.base.errors import listing
from mirror._src.cluster import store

_ROOT = "ledger"
_FREE = 32  # changes of the program that are compared before the launch
_LAUNCHES = 512  # later, one change in this number of launches
FIRST = "for the first time"  # after the label of a step, if its program has not run before


class Digest(Protocol):
    """A checksum that may still be computed."""

    def is_ready(self) -> bool:
        """Whether `value` does not wait."""

    def value(self) -> str:
        """Returns the checksum."""


class Entry(NamedTuple):
    """A launch.

    Attributes:
        program: What must be equal in all processes.
        label: The name for messages.
        values: Checksums of the values that no launch returned, by the user's names.
    """

    program: str
    label: str
    values: Mapping[str, Digest]


class Difference(NamedTuple):
    """A difference between the launches of two processes.

    Attributes:
        kind: `"program"` or `"value"`.
        text: The message for all processes.
    """

    kind: str
    text: str


_NO_VALUES: Mapping[str, Digest] = {}


@final
class Ledger:
    """The launches of this process, and in process 0 also the posts of the others.

    Attributes:
        count: Number of launches that have begun.
        canceled: Number of those that another process did not join in time.
        last: The label of the last one.
        divergence: What this process has found to differ in its data since then, or "".
    """

    def __init__(self) -> None:
        self._new: deque[Entry] = deque()  # appended by any thread, taken by one
        self._waiting: deque[tuple[int, Entry]] = deque()
        self._taken = 0
        self.count = self.canceled = 0
        self._program = ""
        self._num_compared = self._compared_at = 0
        self._rounds = itertools.count()
        self._comparison: Comparison | None = None
        self.last = self.divergence = ""

    def note(self, program: str, label: str, values: Mapping[str, Digest] = _NO_VALUES) -> None:
        """Notes a launch, right before it begins."""
        self._new.append(Entry(program, label, values))
        self.count += 1
        self.last, self.divergence = label, ""

    @property
    def num_joined(self) -> int:
        """Number of launches that have begun, without those that were canceled."""
        return self.count - self.canceled

    def changes_program(self, program: str) -> bool:
        """Whether the processes compare this program before its launch.

        They do so if it is another one than before: the first times, and then after many launches,
        so that it costs little. It must depend on nothing but the launches.
        """
        if program == self._program:
            return False
        self._program = program
        if self._num_compared >= _FREE and self.count - self._compared_at < _LAUNCHES:
            return False
        self._num_compared += 1
        self._compared_at = self.count
        return True

    @property
    def is_settled(self) -> bool:
        """Whether everything has been posted."""
        return not self._new and not self._waiting

    def exchange(self) -> Difference | None:
        """Posts what is new; returns a difference in process 0. For one thread at a time.

        Raises:
            RuntimeError: If the coordinator cannot be reached.
        """
        text = self._take()
        me = store.process_index()
        if text is not None:
            store.set(f"{_ROOT}/{next(self._rounds)}/{me}", json.dumps(text))
        if me != 0:
            return None
        self._comparison = self._comparison or Comparison(store.process_count())
        return self._comparison.add(store.get_all(_ROOT))

    def _take(self) -> dict[str, Any] | None:
        """Returns the new launches as JSON, equal ones in succession as one."""
        runs: list[list[Any]] = []
        while self._new:
            entry = self._new.popleft()
            self._taken += 1
            if entry.values:
                self._waiting.append((self._taken, entry))
            if runs and runs[-1][0] == entry.program:
                runs[-1][2] += 1
            else:
                runs.append([entry.program, entry.label, 1])
        values: list[Any] = []
        while self._waiting:
            number, (_, label, digests) = self._waiting[0]
            if not all(digest.is_ready() for digest in digests.values()):
                break
            texts = {name: digest.value() for name, digest in digests.items()}
            values.append([number, label, texts])
            self._waiting.popleft()
        if not runs and not values:
            return None
        known = self._waiting[0][0] - 1 if self._waiting else self._taken
        return {"runs": runs, "values": values, "known": known}


@final
class Comparison:
    """Compares the posts of all processes, each with the process that was first.

    Args:
        count: Number of processes.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._round = [0] * count
        self._oldest_round = 0
        self._at = [0] * count  # launches that are compared
        self._known = [0] * count  # launches whose values are here
        self._runs: deque[tuple[int, str, str, int]] = deque()  # end, program, label, process
        self._values: dict[int, dict[int, dict[str, str]]] = {}  # by number and process
        self._labels: dict[int, str] = {}  # by number

    def add(self, posts: Mapping[str, str]) -> Difference | None:
        """Adds the posts that are new, by their keys; returns the first difference."""
        for key in sorted(posts, key=lambda key: int(key.partition("/")[0])):
            number, _, process = key.partition("/")
            if int(number) != self._round[int(process)]:
                continue  # read before
            self._round[int(process)] += 1
            post = json.loads(posts[key])
            for run in post["runs"]:
                difference = self._compare_run(int(process), *run)
                if difference is not None:
                    return difference
            for launch, label, digests in post["values"]:
                self._labels[launch] = label
                self._values.setdefault(launch, {})[int(process)] = digests
            self._known[int(process)] = post["known"]
        while self._oldest_round < min(self._round):
            store.delete(f"{_ROOT}/{self._oldest_round}/")
            self._oldest_round += 1
        return self._compare_values()

    def _compare_run(self, process: int, program: str, label: str, count: int) -> Difference | None:
        end = self._at[process] + count
        for until, expected, other_label, other in self._runs:
            if until <= self._at[process]:
                continue
            if expected != program:
                return _programs_differ(self._at[process] + 1, {other: other_label, process: label})
            self._at[process] = min(until, end)
            if self._at[process] == end:
                break
        if self._at[process] < end:
            self._runs.append((end, program, label, process))
            self._at[process] = end
        while self._runs and self._runs[0][0] <= min(self._at) and len(self._runs) > 1:
            self._runs.popleft()
        return None

    def _compare_values(self) -> Difference | None:
        for number in sorted(self._values):
            if number > min(self._known):
                return None
            of_process, label = self._values.pop(number), self._labels.pop(number)
            first = of_process.get(0, {})
            for process in range(1, self._count):
                theirs = of_process.get(process, {})
                names = [n for n in {**first, **theirs} if first.get(n) != theirs.get(n)]
                if names:
                    return _values_differ(number, label, process, names)
        return None


def _programs_differ(number: int, labels: Mapping[int, str]) -> Difference:
    what = ", ".join(f"process {i} runs {labels[i]}" for i in sorted(labels))
    advice = (
        "Make the same calls of the strategy in the same order on every process, also evaluate and "
        "predict: move them out of `if strategy.is_chief:`, and call them from one thread only, "
        "because the order of two threads may differ."
    )
    known, new = sorted(labels.values(), key=len)
    if new.startswith(f"{known} {FIRST}"):
        advice = (
            "One process compiles the step again, probably because its arguments have other "
            "shapes. Pass the same shapes on every process: read the same global batches, or use "
            'input="local" with remainder="pad".'
        )
    return Difference(
        "program",
        f"The processes run different programs as launch {number}: {what}. Their collectives "
        f"may have been mixed, so that results since then are wrong. {advice}",
    )


def _values_differ(number: int, label: str, process: int, names: Sequence[str]) -> Difference:
    return Difference(
        "value",
        f"Process 0 and process {process} have passed different values to {label}, launch "
        f"{number}:\n{listing(names)}\nThe replicas differ since then. Compute what you pass or "
        "assign between two steps from the same data on every process, such as an all-reduced "
        "loss; assign it on every process; and restore a checkpoint.",
    )


ledger = Ledger()
"""The ledger of this process."""
