"""Reads the checkpoint of the chief in every process of a job, also if only the chief has it.

The chief selects the checkpoint, so that all processes restore the same one. A process that has the
same files reads them; if one does not, the chief sends the arrays to all. Before that, an error of
one process is raised by all of them: otherwise the others would wait in a collective.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from mirror._src.cluster import consensus, store
from mirror._src.cluster.start import agreement_secs
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.checkpoints import files, snapshot
from mirror._src.training.checkpoints.directory import find_checkpoint
from mirror._src.training.progress import Position

_logger = logging.getLogger("mirror")
_PIECE = 2**24  # bytes per collective
_KINDS = (FileNotFoundError, NotADirectoryError, OSError, MemoryError, TypeError, ValueError)
_numbers = itertools.count()  # every process makes the same calls of `restore`

Arrays = Mapping[str, files.Value]


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
        num_bytes: Bytes of the header and of the whole checkpoint, or None without it.
        fault: An error, because of which it cannot restore any.
    """

    requested: str
    model: str
    num_bytes: Sequence[int] | None
    fault: Sequence[Any] | None = None


class _Decision(NamedTuple):
    """The end of the agreement: each reads its files, all receive bytes, or all raise an error."""

    num_bytes: Sequence[int] | None = None
    fault: Sequence[Any] | None = None


@final
@dataclass(eq=False)
class BroadcastRestore:
    """A checkpoint that every process of a job restores. Each creates it, and calls `read` once.

    Args:
        strategy: Strategy of the job.
        directory: Directory of checkpoints. Only the chief's must exist.
        step: Step of the checkpoint, `"last"` or `"best"`.
        described: Descriptions of the model and the optimizer, by name; see `snapshot`.
    """

    strategy: Strategy
    directory: str | os.PathLike[str]
    step: int | str
    described: Mapping[str, str]

    def __post_init__(self) -> None:
        # A topic for each call, because calls that fail make different numbers of decisions.
        self._topic = consensus.Topic(f"restore/{next(_numbers)}")
        self._is_chief = store.is_chief()

    def read(self) -> tuple[Position, Arrays]:
        """Returns the position and the arrays.

        Raises:
            RuntimeError: If a process does not call it in time, or the processes differ in `step`.
            FileNotFoundError: If the chief has no such checkpoint.
            ValueError: If the chief's checkpoint is damaged or does not match the model.
        """
        if self._is_chief:
            consensus.sweep()
        try:
            with contextlib.closing(self._topic):
                return self._read()
        except consensus.AbsentError as error:
            raise _absence(error) from None

    def _read(self) -> tuple[Position, Arrays]:
        if self._is_chief:
            offer = self._make_offer()
        else:
            deadline = time.monotonic() + agreement_secs()
            offer = _Offer(*json.loads(self._topic.await_decision(deadline)))
        _raise(offer.fault)
        header, arrays, error = b"", None, None
        try:  # all processes read at the same time
            header, arrays = self._read_offered(offer)
        except Exception as mine:
            error = mine
        parts = [np.frombuffer(header, np.uint8), *map(files.bytes_of, (arrays or {}).values())]
        sizes = None if arrays is None else [len(header), sum(part.size for part in parts)]
        fault = None if error is None else _fault(error)
        decision = self._decide(_Answer(repr(self.step), _digest(self.described), sizes, fault))
        if error is not None:
            raise error
        _raise(decision.fault)
        if decision.num_bytes is not None:
            whole = self._broadcast(decision.num_bytes[1], parts)
            return _parse(whole, decision.num_bytes[0])
        assert arrays is not None
        return Position.from_dict(json.loads(header)[0]), arrays

    def _make_offer(self) -> _Offer:
        try:
            found = find_checkpoint(self.directory, self.step)
            with found.readable():
                Position.from_dict(found.position)
            snapshot.require_match(self.described, found.entries)
        except Exception as error:
            self._topic.announce(json.dumps(_Offer(0, "", _fault(error))))
            raise
        offer = _Offer(found.step, _digest([found.position, found.entries]))
        self._topic.announce(json.dumps(offer))
        return offer

    def _read_offered(self, offer: _Offer) -> tuple[bytes, Arrays | None]:
        """Returns position and entries as JSON, and the arrays, or None if this process lacks them.

        The chief has the checkpoint; another process may not, or a damaged one.
        """
        try:
            found = find_checkpoint(self.directory, offer.step)
            contents = [found.position, found.entries]
            if _digest(contents) == offer.digest:
                return json.dumps(contents).encode(), found.read()
        except (OSError, ValueError) as error:
            if self._is_chief:
                raise
            _logger.debug("Process 0 sends the checkpoint: %s", error)
        return b"", None

    def _decide(self, mine: _Answer) -> _Decision:
        """Returns the decision of the chief on the answers of all processes."""
        if self._is_chief and mine.fault is not None:
            decision = _Decision(fault=mine.fault)
            self._topic.announce(json.dumps(decision))
            return decision
        # The chief may have to wait for others as long.
        deadline = time.monotonic() + agreement_secs() * (1 if self._is_chief else 2)
        return _Decision(*json.loads(self._topic.decide(json.dumps(mine), _judge, deadline)))

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
            piece[:] = np.asarray(self.strategy.reduce("sum", self._rows(piece, zeros)))
        return whole[:num_bytes]

    def _rows(self, first: np.ndarray, others: np.ndarray) -> Any:
        """Returns the array of the first replica and of all others, as a `PerReplica`."""
        return self.strategy.distribute_values_from_function(
            lambda context: others if context.replica_id_in_sync_group else first
        )


def _judge(texts: Sequence[str]) -> str:
    """Returns the decision on the answers: why no process can restore, or who needs the bytes."""
    answers = [_Answer(*json.loads(text)) for text in texts]
    chief = answers[0]
    fault: Sequence[Any] | None = None
    for i, answer in enumerate(answers):
        fault = fault or answer.fault
        if fault is None and answer.requested != chief.requested:
            text = (
                f"process {i} restores step={answer.requested}, and process 0 "
                f"step={chief.requested}. Pass the same step on every process"
            )
            fault = _Fault(0, "RuntimeError", text)
        if fault is None and answer.model != chief.model:
            text = (
                f"processes 0 and {i} have models or optimizers with different names, shapes or "
                "dtypes. Create the same Trainer on every process"
            )
            fault = _Fault(0, "RuntimeError", text)
    lacking = [i for i, answer in enumerate(answers) if answer.num_bytes is None]
    if lacking and fault is None:
        _logger.info("Sending the checkpoint to processes %s", lacking)
    return json.dumps(_Decision(chief.num_bytes if lacking else None, fault))


def _fault(error: Exception) -> _Fault:
    return _Fault(store.process_index(), type(error).__name__, str(error).rstrip("."))


def _raise(fault: Sequence[Any] | None) -> None:
    """Raises the error of another process."""
    if fault is not None:
        process, name, text = fault
        kind = next((kind for kind in _KINDS if kind.__name__ == name), RuntimeError)
        raise kind(f"trainer.restore failed on process {process}: {text}.")


def _absence(error: consensus.AbsentError) -> RuntimeError:
    reason = error.reason or (
        f"processes {error.processes} have not called trainer.restore within "
        f"{agreement_secs():g} s. Call it on every process; if they only read slowly, wait longer: "
        "mirror.distributed.initialize(agreement_secs=...)."
    )
    return RuntimeError(f"trainer.restore failed: {reason}")


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
