"""Reads the checkpoint of the chief in every process of a job, also if only the chief has it.

The chief selects the checkpoint, so that all processes restore the same one. A process that has the
same files reads them; if one does not, the chief sends the arrays to all. Before that, an error of
one process is raised by all of them: otherwise the others would wait in a collective.
"""

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, final

import numpy as np

from mirror._src.cluster import store
from mirror._src.cluster.start import agreement_secs
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.checkpoints import files, snapshot
from mirror._src.training.checkpoints.directory import CheckpointHandle, find_checkpoint
from mirror._src.training.checkpoints.files import KeyData
from mirror._src.training.progress import Position

_logger = logging.getLogger("mirror")
_PIECE = 2**24  # bytes per collective
_KINDS = (FileNotFoundError, NotADirectoryError, OSError, MemoryError, TypeError, ValueError)
_numbers = itertools.count()  # every process makes the same calls of `restore`

Arrays = Mapping[str, np.ndarray | KeyData]


class _Fault(NamedTuple):
    """An error of a process: its index, the name of the error's type, and its text."""

    process: int
    kind: str
    text: str


class _Offer(NamedTuple):
    """The checkpoint that the chief has selected: its step and digest, or an error instead."""

    step: int
    digest: str
    fault: Sequence[Any] | None = None


class _Answer(NamedTuple):
    """The answer of a process to the offer.

    Attributes:
        requested: The argument `step` of its call.
        model: Digest of the names, shapes and dtypes of its model and optimizer.
        has_it: Whether it has read the same checkpoint.
        fault: An error, because of which it cannot restore any.
    """

    requested: str
    model: str
    has_it: bool
    fault: Sequence[Any] | None = None


class _Verdict(NamedTuple):
    """The end of the agreement: each reads its files, all receive bytes, or all raise an error."""

    num_bytes: Sequence[int] = ()
    fault: Sequence[Any] | None = None


@final
class BroadcastRestore:
    """A checkpoint that every process of a job restores. Each creates it, and calls `read` once.

    Args:
        strategy: Strategy of the job.
        directory: Directory of checkpoints. Only the chief's must exist.
        step: Step of the checkpoint, `"last"` or `"best"`.
        described: Descriptions of the model and the optimizer, by name; see `snapshot`.
    """

    def __init__(
        self,
        strategy: Strategy,
        directory: str | os.PathLike[str],
        step: int | str,
        described: Mapping[str, str],
    ) -> None:
        self._strategy, self._directory, self._step = strategy, directory, step
        self._described = described
        self._number = next(_numbers)
        self._me = store.process_index()

    def read(self) -> tuple[Position, Arrays]:
        """Returns the position and the arrays.

        Raises:
            RuntimeError: If a process does not call it in time, or the processes differ in `step`.
            FileNotFoundError: If the chief has no such checkpoint.
            ValueError: If the chief's checkpoint is damaged or does not match the model.
        """
        return self._read_and_offer() if store.is_chief() else self._follow()

    def _read_and_offer(self) -> tuple[Position, Arrays]:
        try:
            found = find_checkpoint(self._directory, self._step)
            with found.readable():
                position = Position.from_dict(found.position)
            snapshot.require_match(self._described, found.entries)
        except Exception as error:
            self._post("offer", _Offer(0, "", self._fault(error)))
            raise
        self._post("offer", _Offer(found.step, _digest([found.entries, found.position])))
        try:
            arrays = found.read()  # all processes read at the same time
        except Exception as error:
            self._post("verdict", _Verdict(fault=self._fault(error)))
            raise
        answers = self._answers()
        fault = self._first_fault(answers)
        lacking = [i for i, answer in answers.items() if answer is not None and not answer.has_it]
        about = json.dumps([found.position, found.entries]).encode()
        parts = [np.frombuffer(about, np.uint8), *map(files.bytes_of, arrays.values())]
        sizes = [len(about), sum(part.size for part in parts)] if lacking else []
        self._post("verdict", _Verdict(sizes, fault))
        if self._number:
            store.delete(f"restore/{self._number - 1}/")  # all have answered, so all have read it
        self._raise(fault)
        if lacking:
            _logger.info("Sending the checkpoint for step %s to processes %s", found.step, lacking)
            self._broadcast(sizes[1], parts)
        return position, arrays

    def _follow(self) -> tuple[Position, Arrays]:
        offer = _Offer(*self._await("offer", agreement_secs()))
        self._raise(offer.fault)
        found, arrays, fault = None, None, None
        try:
            found, arrays = self._read_same(offer)
        except Exception as error:
            fault = self._fault(error)
            raise
        finally:
            has_it = arrays is not None
            model = _digest(self._described)
            self._post(str(self._me), _Answer(repr(self._step), model, has_it, fault))
        # The chief may have to wait for others as long.
        verdict = _Verdict(*self._await("verdict", 2 * agreement_secs()))
        self._raise(verdict.fault)
        if verdict.num_bytes:
            return _parse(self._broadcast(verdict.num_bytes[1]), verdict.num_bytes[0])
        assert found is not None
        assert arrays is not None
        return Position.from_dict(found.position), arrays

    def _read_same(self, offer: _Offer) -> tuple[CheckpointHandle | None, Arrays | None]:
        """Reads the offered checkpoint, if this process has it and it is not damaged."""
        try:
            found = find_checkpoint(self._directory, offer.step)
            if _digest([found.entries, found.position]) == offer.digest:
                return found, found.read()
        except (OSError, ValueError) as error:
            _logger.debug("Process 0 sends the checkpoint: %s", error)
        return None, None

    def _answers(self) -> dict[int, _Answer | None]:
        count, deadline = store.process_count(), time.monotonic() + agreement_secs()
        texts = store.read_each(f"restore/{self._number}", count, deadline, {0: ""})
        return {i: _Answer(*json.loads(texts[i])) if i in texts else None for i in range(1, count)}

    def _first_fault(self, answers: Mapping[int, _Answer | None]) -> Sequence[Any] | None:
        """Returns why no process can restore the checkpoint, or None."""
        absent = [i for i, answer in answers.items() if answer is None]
        if absent:
            return _Fault(0, "RuntimeError", _absence(absent))
        mine = _Answer(repr(self._step), _digest(self._described), has_it=True)
        for i, answer in answers.items():
            assert answer is not None
            if answer.fault is not None:
                return answer.fault
            if answer.requested != mine.requested:
                text = (
                    f"process {i} restores step={answer.requested}, and process 0 "
                    f"step={mine.requested}. Pass the same step on every process"
                )
                return _Fault(0, "RuntimeError", text)
            if answer.model != mine.model:
                text = (
                    f"processes 0 and {i} have models or optimizers with different names, shapes "
                    "or dtypes. Create the same Trainer on every process"
                )
                return _Fault(0, "RuntimeError", text)
        return None

    def _broadcast(self, num_bytes: int, parts: Iterable[np.ndarray] = ()) -> np.ndarray:
        """Returns the bytes of the chief, in every process. A collective per 16 MiB.

        The bits are added up as integers, and all replicas but the chief's first have zeros.
        """
        size = min(_PIECE, -(-num_bytes // 4) * 4)
        whole = np.zeros(-(-num_bytes // size) * size, np.uint8)
        if store.is_chief():
            np.concatenate(list(parts), out=whole[:num_bytes])
        zeros = np.zeros(size // 4, np.uint32)
        for start in range(0, whole.size, size):
            piece = whole[start : start + size].view(np.uint32)
            piece[:] = np.asarray(self._strategy.reduce("sum", self._rows(piece, zeros)))
        return whole[:num_bytes]

    def _rows(self, first: np.ndarray, others: np.ndarray) -> Any:
        """Returns the array of the first replica and of all others, as a `PerReplica`."""
        return self._strategy.distribute_values_from_function(
            lambda context: others if context.replica_id_in_sync_group else first
        )

    def _fault(self, error: Exception) -> _Fault:
        return _Fault(self._me, type(error).__name__, str(error).rstrip("."))

    def _raise(self, fault: Sequence[Any] | None) -> None:
        if fault is not None:
            _raise(_Fault(*fault))

    def _post(self, name: str, what: tuple[Any, ...]) -> None:
        store.post(f"restore/{self._number}/{name}", json.dumps(what))

    def _await(self, name: str, secs: float) -> Any:
        text = store.read(f"restore/{self._number}/{name}", time.monotonic() + secs)
        if text is None:
            raise RuntimeError(f"trainer.restore failed: {_absence([0])}.")
        return json.loads(text)


def _raise(fault: _Fault) -> NoReturn:
    kind = next((kind for kind in _KINDS if kind.__name__ == fault.kind), RuntimeError)
    raise kind(f"trainer.restore failed on process {fault.process}: {fault.text}.")


def _absence(absent: Sequence[int]) -> str:
    return (
        f"processes {list(absent)} have not called trainer.restore within {agreement_secs():g} s. "
        "Call it on every process; if they only read slowly, wait longer: "
        "mirror.distributed.initialize(agreement_secs=...)"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _parse(whole: np.ndarray, num_about: int) -> tuple[Position, Arrays]:
    """Returns the position and the arrays in the bytes of a checkpoint."""
    position, entries = json.loads(whole[:num_about].tobytes())
    arrays, start = {}, num_about
    for name, entry in entries.items():
        end = start + files.num_bytes(entry)
        arrays[name] = files.from_bytes(name, whole[start:end].copy(), entry)  # aligned
        start = end
    return Position.from_dict(position), arrays
