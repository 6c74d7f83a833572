"""`Trainer(micro_batch=...)`: the number of pieces into which a replica splits its batch."""

import bisect
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, final

from mirror._src.base.errors import bytes_in_words, counted, require_int
from mirror._src.data.padded import PaddedBatch
from mirror._src.devices.backend import logical_name
from mirror._src.devices.replicas import ReplicaDevices
from mirror._src.engine.choice import usable_bytes
from mirror._src.inspection.memory import MemoryReport

MicroBatchArgument: TypeAlias = int | Literal["auto"] | None

_logger = logging.getLogger("mirror")


@final
class MicroBatch:
    """The number of examples that a replica computes at a time.

    Args:
        size: The number, or `"auto"` for the largest that fits.
        memory_limit: Bytes of each device that a step may use. Defaults to a share of its memory.
        replicas: The devices.

    Raises:
        ValueError: If a number is out of range, or the limit is missing and unknown.
        TypeError: If an argument has the wrong type.
    """

    def __init__(self, size: Any, memory_limit: Any, replicas: ReplicaDevices) -> None:
        self._size, self._limit = size, 0
        self._chosen: dict[Any, int] = {}
        if size != "auto":
            require_int("micro_batch", size, fix='Or pass "auto".')
            if memory_limit is not None:
                raise ValueError('`memory_limit` requires micro_batch="auto". Omit it.')
            return
        if replicas.spans_processes:
            raise ValueError(
                'micro_batch="auto" cannot choose for several processes, which would have to agree '
                "on the estimate of one. Pass the number of examples: micro_batch=16."
            )
        if memory_limit is not None:
            require_int("memory_limit", memory_limit, fix="It is in bytes: 8 * 2**30.")
            self._limit = int(memory_limit)
            return
        for device in replicas.distinct:
            limit = usable_bytes(device)
            if limit is None:
                raise ValueError(
                    f'micro_batch="auto" requires a limit, because {logical_name(device)} does not '
                    "report its memory. Pass the bytes: Trainer(..., memory_limit=8 * 2**30)."
                )
            self._limit = min(self._limit or limit, limit)

    def num_pieces(self, padded: PaddedBatch, estimate: Callable[[int], MemoryReport]) -> int:
        """Returns the number of pieces of a batch, once for batches of these shapes.

        Args:
            padded: The batch.
            estimate: Returns the memory of a step with a number of pieces, which it compiles.

        Raises:
            ValueError: If no number fits, or the memory is unknown.
        """
        rows = padded.mask.stacked.shape[-1]
        if self._size != "auto":
            return -(-rows // self._size)
        key = padded.types
        if key not in self._chosen:
            self._chosen[key] = self._choose(rows, estimate)
        return self._chosen[key]

    def _choose(self, rows: int, estimate: Callable[[int], MemoryReport]) -> int:
        reports: dict[int, MemoryReport] = {}

        def fits(pieces: int) -> bool:
            report = reports[pieces] = estimate(pieces)
            if report.temporary_bytes is None:
                raise ValueError(
                    f'micro_batch="auto" cannot estimate the memory: {report.unknown_because}. '
                    "Pass the number of examples: micro_batch=16."
                )
            return report.peak_bytes <= self._limit

        choices = sorted({-(-rows // size) for size in range(1, rows + 1)})
        index = 0 if fits(1) else bisect.bisect_left(choices, True, lo=1, key=fits)
        report, limit = reports[max(reports)], bytes_in_words(self._limit)
        if index == len(choices):
            raise ValueError(
                "A step that computes one example at a time needs an estimated "
                f"{bytes_in_words(report.peak_bytes)} per device, more than {limit}. "
                f"{report.advice}"
            )
        pieces = choices[index]
        _logger.info(
            'micro_batch="auto": %s per replica at a time, an estimated %s of %s per device',
            counted(-(-rows // pieces), "example"),
            bytes_in_words(reports[pieces].peak_bytes),
            limit,
        )
        return pieces
