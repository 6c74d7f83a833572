"""Verdicts of process 0 on what all processes say.

Every process posts one text and reads one verdict, so the number of messages grows with the number
of processes, not with the number of pairs.
"""

import json
import time
from collections.abc import Callable, Sequence

from mirror._src.cluster import store

_MARGIN_SECS = 5.0
_ABSENT, _JUDGED = "absent", "judged"


class AbsentError(RuntimeError):
    """Raised in every process that has arrived if others do not arrive by the deadline.

    Attributes:
        processes: Indices of the processes that have not arrived.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        super().__init__(f"processes {list(processes)} have not arrived")
        self.processes = list(processes)


def verdict(
    directory: str, mine: str, judge: Callable[[Sequence[str]], str], deadline: float
) -> str:
    """Returns the verdict on the texts of all processes; every process must call it.

    Args:
        directory: Directory of the store, used for one verdict only. The text of process i is under
            key i.
        mine: The text of this process.
        judge: Returns the verdict on the texts, which are in order of the processes. Only process 0
            calls it.
        deadline: When to stop waiting, as of `time.monotonic`.

    Raises:
        AbsentError: If a process does not arrive by the deadline.
        RuntimeError: If the coordinator cannot be reached.
    """
    me, count = store.process_index(), store.process_count()
    store.post(f"{directory}/{me}", mine)
    if me == 0:
        texts = store.read_each(directory, count, deadline, {me: mine})
        absent = [i for i in range(count) if i not in texts]
        said = f"{_ABSENT} {json.dumps(absent)}"
        if not absent:
            said = f"{_JUDGED} {judge([texts[i] for i in range(count)])}"
        store.post(f"{directory}/verdict", said)
    else:
        said = _said(directory, count, deadline)
    kind, _, details = said.partition(" ")
    if kind == _ABSENT:
        raise AbsentError(json.loads(details))
    return details


def decide_alone(directory: str, text: str) -> None:
    """Posts the verdict without waiting for any process. Only for process 0."""
    store.post(f"{directory}/verdict", f"{_JUDGED} {text}")


def _said(directory: str, count: int, deadline: float) -> str:
    """Returns the message of process 0."""
    key = f"{directory}/verdict"
    said = store.read(key, deadline)
    if said is None:
        come = store.read_all(directory)
        absent = [i for i in range(count) if str(i) not in come]
        if not absent:  # the verdict is on its way
            said = store.read(key, time.monotonic() + _MARGIN_SECS)
        if said is None:
            raise AbsentError(absent or [0])
    return said
