"""The processes agree on each step of a local input: how many examples each of them has read.

A process that has fewer batches than the others would leave them in a step that it never joins, and
a process with fewer examples would run another program. So each one says what it has read before
the step, through the coordination service and not through the devices. Process 0 compares, so that
there are two messages per process and step, not one per pair.
"""

import atexit
import functools
import hashlib
import json
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from mirror._src.base.errors import first_line
from mirror._src.cluster import consensus, store
from mirror._src.cluster.start import agreement_secs

_REPORT_SECS = 0.75  # for an error to be posted
_END_SECS = 2.0
_TEXT_LENGTH = 2000
_MOST_SHOWN = 8
_ERRORS: dict[str, type[Exception]] = {"RuntimeError": RuntimeError, "ValueError": ValueError}

_open: "weakref.WeakSet[StepExchange]" = weakref.WeakSet()


class Form(NamedTuple):
    """The properties of a part that must be equal in all processes.

    Attributes:
        settings: Options of the dataset.
        structure: Structure of the tree.
        leaves: Name, dtype on the devices and shape of an example, of each leaf.
    """

    settings: str
    structure: str
    leaves: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def lines(self) -> dict[str, str]:
        """The properties by name, for messages."""
        shapes = {
            name: f"{dtype}[{','.join(map(str, shape))}] per example"
            for name, dtype, shape in self.leaves
        }
        return {"options": self.settings, "structure": self.structure, **shapes}

    @classmethod
    def from_text(cls, text: str) -> "Form":
        """Returns the form of its JSON."""
        settings, structure, leaves = json.loads(text)
        return cls(settings, structure, tuple((n, d, tuple(shape)) for n, d, shape in leaves))


class Part(NamedTuple):
    """The part of a step that one process has read.

    Attributes:
        size: Number of examples; None if its data have ended.
        form: Digest of the form.
        checksum: Of the values, in the first step.
        error: Why the process cannot read.
        state: State of its data after the part, or None.
    """

    size: int | None
    form: str = ""
    checksum: int = 0
    error: str = ""
    state: dict[str, Any] | None = None


class Step(NamedTuple):
    """The parts of a step that all processes have read.

    Attributes:
        number: Number of the step in its pass, from 0.
        counts: Number of examples of each process; 0 if its data have ended.
        has_ended: Whether the data of some process have ended.
        sizes: The same, for messages.
        form: Digest of the form.
        is_same: Whether all processes have read the same values.
        states: State of the data of each process, which only the chief knows of others; None if a
            process has none.
    """

    number: int
    counts: Sequence[int]
    has_ended: bool
    sizes: str
    form: str
    is_same: bool
    states: Sequence[dict[str, Any] | None] | None

    @property
    def total(self) -> int:
        """Number of examples."""
        return sum(self.counts)


class ClosedError(Exception):
    """Raised in the thread that reads, if its loop has ended."""


@final
class StepExchange:
    """The agreement on the steps of one pass.

    Args:
        root: Key of the pass, equal in all processes.
        what: The dataset, for messages.

    Attributes:
        what: The dataset, for messages.
    """

    def __init__(self, root: str, what: str) -> None:
        self._root, self.what = root, what
        self._me = store.process_index()
        self._topic = consensus.Topic(root, self._gone)
        self._forms: dict[str, Form] = {}
        self._is_canceled = threading.Event()
        self._busy = threading.RLock()
        self._has_posted = False
        self._closed_since: float | None = None
        self._states: list[dict[str, Any] | None] = []  # the chief's, for its checkpoints
        if self._me == 0:
            consensus.sweep()
        _open.add(self)

    def agree(
        self, size: int, form: Form, checksum: int = 0, state: dict[str, Any] | None = None
    ) -> Step:
        """Says that this process has read its part of the next step; every process must come.

        After the part, its data have a state.

        Raises:
            RuntimeError: If a process cannot read, has stopped reading, or does not arrive in time.
            ValueError: If the parts have different forms, or a process has no part at all.
            ClosedError: If the loop of this process has ended.
        """
        text = json.dumps(form)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest not in self._forms:
            self._forms[digest] = form
            with self._busy:
                self._require_open()
                store.set_default(f"{self._root}/form/{digest}", text)
        step = self._exchange(Part(size, digest, checksum, state=state))
        assert step is not None
        return step

    def end(self, state: dict[str, Any] | None = None) -> Step | None:
        """Says that the data of this process have ended, in a state; every process must come.

        Returns:
            The step of the other processes; None if the data of all processes have ended.

        Raises:
            RuntimeError: As `agree`.
            ValueError: As `agree`.
            ClosedError: As `agree`.
        """
        return self._exchange(Part(None, state=state))

    def fail(self, error: Exception) -> None:
        """Says that this process cannot read its part, so that the others raise an error."""
        text = f"{type(error).__name__}: {first_line(error)}"[:_TEXT_LENGTH]
        with self._busy:
            self._require_open()
            self._has_posted = True
            if self._me == 0:
                self._topic.announce(json.dumps(self._failure(0, text, self._topic.number)))
            else:
                self._topic.post(json.dumps(Part(None, error=text)))

    def form(self, digest: str) -> Form:
        """Returns a form that some process has posted in this pass.

        Raises:
            RuntimeError: If it is not found.
        """
        if digest not in self._forms:
            with self._busy:
                text = store.get(f"{self._root}/form/{digest}", time.monotonic() + _END_SECS)
            if text is None:  # it was posted before the step
                raise RuntimeError(f"Process {self._me} cannot read the shapes of {self.what}.")
            self._forms[digest] = Form.from_text(text)
        return self._forms[digest]

    def cancel(self) -> None:
        """Ends the waiting of another thread, because the loop has ended."""
        self._is_canceled.set()

    def close(self) -> None:
        """Says that this process reads no further; its keys are deleted once all have said so."""
        _open.discard(self)
        with self._busy:
            if self._has_posted and not _has_exited.is_set():
                self._topic.close()
            self._is_canceled.set()

    def join(self, timeout: float) -> None:
        """Waits until no thread uses the store."""
        if self._busy.acquire(timeout=timeout):
            self._busy.release()

    def _exchange(self, part: Part) -> Step | None:
        with self._busy:
            self._require_open()
            self._has_posted = True
            number, deadline = self._topic.number, time.monotonic() + agreement_secs()
            try:
                decision = json.loads(self._topic.decide(json.dumps(part), self._judge, deadline))
            except consensus.AbsentError as error:
                reason = error.reason or self._absence(error.processes[0], number)
                raise RuntimeError(reason) from None
        if "error" in decision:
            raise _ERRORS[decision["kind"]](decision["error"])
        if not decision:
            return None
        if decision["states"]:
            decision["states"] = self._states or [
                part.state if i == self._me else None for i in range(store.process_count())
            ]
        return Step(number, **decision)

    def _judge(self, texts: Sequence[str]) -> str:
        parts = [Part(*json.loads(text)) for text in texts]
        self._states = [part.state for part in parts]
        return json.dumps(self._compared(parts, self._topic.number - 1))

    def _compared(self, parts: Sequence[Part], number: int) -> dict[str, Any]:
        """Returns the decision: an error, the fields of a `Step`, or nothing at the end."""
        batch = f"batch {number} of {self.what}"
        for i, part in enumerate(parts):
            if part.error:
                return self._failure(i, part.error, number)
        ended = [i for i, part in enumerate(parts) if part.size is None]
        if len(ended) == len(parts):
            return {}
        if ended and number == 0:
            return {
                "kind": "ValueError",
                "error": f"Process {ended[0]} has no batch in this pass over {self.what}, but "
                "other processes have. Yield an empty batch, for example "
                "{'x': np.zeros((0, 3), 'float32')}, where a process has no examples.",
            }
        forms = {part.form: i for i, part in reversed(list(enumerate(parts))) if part.form}
        first, *others = sorted(forms, key=lambda form: forms[form])
        if others:
            return {
                "kind": "ValueError",
                "error": self._difference(batch, forms[first], first, forms[others[0]], others[0]),
            }
        return {
            "counts": [part.size or 0 for part in parts],
            "has_ended": bool(ended),
            "sizes": _shown(parts),
            "form": first,
            "states": all(part.state for part in parts) or None,
            "is_same": all(p.size for p in parts) and len({p.checksum for p in parts}) == 1,
        }

    def _failure(self, process: int, error: str, number: int) -> dict[str, Any]:
        return {
            "kind": "RuntimeError",
            "error": f"Process {process} could not read its part of batch {number} of "
            f"{self.what}: {error.rstrip('.')}. All processes stop here; the output of process "
            f"{process} shows where it failed.",
        }

    def _difference(self, batch: str, a: int, form_a: str, b: int, form_b: str) -> str:
        lines_a, lines_b = self.form(form_a).lines, self.form(form_b).lines
        names = [n for n in {**lines_a, **lines_b} if lines_a.get(n) != lines_b.get(n)]
        if len(names) > 1 and "structure" in names:
            names.remove("structure")  # the leaves say more
        shown = [
            f"  {name}: {lines_a.get(name, 'missing')} on process {a}, "
            f"{lines_b.get(name, 'missing')} on process {b}"
            for name in names[:_MOST_SHOWN]
        ]
        return (
            f"The parts of {batch} in processes {a} and {b} do not belong together:\n"
            + "\n".join(shown)
            + "\nEvery process must yield batches with the same keys, dtypes and shapes of an "
            "example, and distribute its dataset with the same options."
        )

    def _gone(self, processes: Sequence[int]) -> str:
        """Returns why there is no point in waiting for these processes any longer, or ""."""
        self._require_open()
        closed = [i for i in processes if self._topic.has_closed(i)]
        if not closed:
            return ""
        # An exception in its loop closes the pass before it is reported.
        self._closed_since = self._closed_since or time.monotonic()
        if time.monotonic() < self._closed_since + _REPORT_SECS:
            return ""
        return (
            f"Process {closed[0]} has stopped iterating over {self.what}, but process "
            f"{self._me} waits for batch {self._topic.number - 1}. With input='local', every "
            "process must take the same number of batches: end the loop after the same batch on "
            "all of them."
        )

    def _absence(self, process: int, number: int) -> str:
        return (
            f"Process {process} has not read batch {number} of {self.what} within "
            f"{agreement_secs():g} s, for which process {self._me} waits. With input='local', "
            "every process must iterate over the dataset, not only the chief. If reading is only "
            "slow, wait longer: mirror.distributed.initialize(agreement_secs=...)."
        )

    def _require_open(self) -> None:
        if self._is_canceled.is_set():
            raise ClosedError


def _shown(parts: Sequence[Part]) -> str:
    """Returns `4 on process 0, 3 on process 1, none left on process 2`."""
    shown = [
        f"{'none left' if part.size is None else part.size} on process {i}"
        for i, part in enumerate(parts[:_MOST_SHOWN])
    ]
    more = len(parts) - _MOST_SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


_has_exited = threading.Event()


@functools.cache
def close_at_exit() -> None:
    """Makes sure that no thread uses the store once JAX has closed it, at the end of the process.

    Called in a job of several processes, so that it ends the threads before JAX's own function.
    """
    atexit.register(_end_all)


def _end_all() -> None:
    _has_exited.set()
    exchanges = list(_open)
    for exchange in exchanges:
        exchange.cancel()
    deadline = time.monotonic() + _END_SECS
    for exchange in exchanges:
        exchange.join(max(deadline - time.monotonic(), 0.01))
