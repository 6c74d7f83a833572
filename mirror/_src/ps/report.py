"""`ParameterServerReport`: where variables are, how much travels, and what was lost."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from mirror._src.base.errors import bytes_in_words
from mirror._src.base.modules import set_module
from mirror._src.ps.placement import Placement


@set_module("mirror.ps")
@final
class ParameterServerReport:
    """Report of a `ParameterServerStrategy`; print it.

    Attributes:
        placement: For each variable, the servers that hold its rows, as `(server, start, stop)`.
        bytes_per_server: Bytes of the variables on each server.
        bytes_per_update: Bytes that one worker pulls and pushes for an update. With `sparse`, of
            which every batch touches other rows, the mean over the updates so far.
        bytes_moved: Bytes that the servers have sent and received since they were started.
        num_updates: Updates that the servers have made.
        staleness: How many gradients were applied that many updates after their values were read.
            Each server counts for itself; these are the counts of the server whose gradients were
            the most late.
        lost_workers: Number of times that a worker was lost.
        rejoined_workers: Number of times that a worker returned.
        lost_servers: Number of times that a server was lost.
    """

    def __init__(
        self,
        placement: Placement | None,
        statistics: Sequence[Mapping[str, Any]],
        losses: Mapping[str, int],
        num_workers: int,
    ) -> None:
        holders = {} if placement is None else placement.holders
        self.placement = {
            name: tuple((server, part.start, part.stop) for server, part in held)
            for name, held in holders.items()
        }
        empty = [0] * len(statistics)
        self.bytes_per_server = empty if placement is None else placement.nbytes()
        self.bytes_per_update = 2 * sum(self.bytes_per_server)
        if placement is not None and placement.tables:
            self.bytes_per_update = round(sum(map(_bytes_per_part, statistics)))
        self.bytes_moved = sum(_bytes(each, "out") + _bytes(each, "in") for each in statistics)
        self.num_updates = max((each.get("version", 0) for each in statistics), default=0)
        counts = [dict(each.get("staleness", {})) for each in statistics]
        self.staleness: dict[int, int] = max(counts, key=_lateness, default={})
        self.lost_workers, self.rejoined_workers = losses["workers"], losses["rejoined"]
        self.lost_servers = losses["servers"]
        self._num_workers = num_workers

    def __repr__(self) -> str:
        lines = [
            f"{len(self.bytes_per_server)} parameter servers, {self._num_workers} workers",
            *(
                f"  ps {server}: {bytes_in_words(count)}"
                for server, count in enumerate(self.bytes_per_server)
            ),
            f"Each worker receives and sends {bytes_in_words(self.bytes_per_update)} per update.",
            f"Updates: {self.num_updates}. Staleness of gradients: "
            + (", ".join(f"{k}: {n}" for k, n in self.staleness.items()) or "none applied"),
            f"Lost: {self.lost_workers} workers, of which {self.rejoined_workers} returned; "
            f"{self.lost_servers} servers.",
        ]
        for name, held in self.placement.items():
            where = ", ".join(f"ps {server} [{start}:{stop}]" for server, start, stop in held)
            lines.append(f"  {name}: {where}")
        return "\n".join(lines)


def _lateness(counts: Mapping[int, int]) -> tuple[int, int]:
    """Returns the largest staleness, and the sum of all."""
    return max(counts, default=0), sum(late * count for late, count in counts.items())


def _bytes(statistics: Mapping[str, Any], way: str) -> int:
    return int(statistics.get(f"bytes_{way}", 0))


def _bytes_per_part(statistics: Mapping[str, Any]) -> float:
    """Returns the mean of what a server sent for a pull and received in a push."""
    pulls, pushes = (max(1, statistics.get(name, 0)) for name in ("pulls", "pushes"))
    return _bytes(statistics, "out") / pulls + _bytes(statistics, "in") / pushes
