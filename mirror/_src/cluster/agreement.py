"""The processes agree on a program before it first runs, without using the devices.

Processes that run different programs cannot use the devices to find that out: their collectives
would wait for each other, or add up what does not belong together.
"""

import hashlib
import itertools
import json
import threading
import time
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mirror._src.base.errors import ProgramMismatchError
from mirror._src.cluster import consensus, store
from mirror._src.cluster.ledger import FIRST, ledger
from mirror._src.cluster.start import processes

_PIECE = 2**20  # characters per message; the service accepts a few MiB
_TEXT_SECS = 60.0
_SAME = "same"

_topic = consensus.Topic("program")
_lock = threading.Lock()  # two threads must not take each other's numbers


class Program(NamedTuple):
    """The description of a program in one process.

    Attributes:
        name: Name of the step.
        lines: The parts that must be equal in all processes.
        locations: Returns the user's line of each of the lines, or "".
    """

    name: str
    lines: Sequence[str]
    locations: Callable[[], Sequence[str]]


class Difference(NamedTuple):
    """A difference between this process and another one.

    Attributes:
        number: Number of the program in this process.
        name: Name of its step.
        me: Index of this process.
        other: Index of the other process.
        other_name: Name of the other step.
        lines: Pairs of lines that differ, each with its location, of this and the other process.
            "" if a process has fewer lines.
    """

    number: int
    name: str
    me: int
    other: int
    other_name: str
    lines: Sequence[tuple[tuple[str, str], tuple[str, str]]]


def find_difference(program: Program, timeout_secs: float, when: str = FIRST) -> Difference | None:
    """Compares a program with the programs of the other processes; every process must call it.

    Args:
        program: The program of this process.
        timeout_secs: Time to wait for the other processes.
        when: Why it is compared, for their messages.

    Returns:
        None if all are the same. Otherwise a difference, in every process.

    Raises:
        ProgramMismatchError: If a process does not arrive in time.
        RuntimeError: If the coordinator cannot be reached.
    """
    with _lock:
        ledger.note("new", f"{program.name} {when}")
        number = _topic.number
        digest = hashlib.sha256("\n".join(program.lines).encode()).hexdigest()
        mine, deadline = f"{digest} {program.name}", time.monotonic() + timeout_secs
        try:
            decision = _topic.decide(mine, _judge, deadline)
        except consensus.AbsentError as error:
            ledger.canceled += 1
            text = _absent_message(program.name, number, error.processes, timeout_secs)
            raise ProgramMismatchError(error.reason or text) from None
        if decision == _SAME:
            return None
        return _difference(program, number, f"program/{number}", digest, int(decision))


def _judge(texts: Sequence[str]) -> str:
    """Returns `_SAME`, or the index of a process that differs from process 0."""
    digests = [text.partition(" ")[0] for text in texts]
    return next((str(i) for i, digest in enumerate(digests) if digest != digests[0]), _SAME)


def _difference(program: Program, number: int, root: str, digest: str, other: int) -> Difference:
    """Exchanges the lines, which only happens now, and returns those that differ."""
    me, deadline = store.process_index(), time.monotonic() + _TEXT_SECS
    _post_text(f"{root}/text/{me}", json.dumps([program.lines, list(program.locations())]))
    first = store.get(f"{root}/0", deadline) or ""
    is_like_first = first.partition(" ")[0] == digest
    other = other if is_like_first else 0
    name = (store.get(f"{root}/{other}", deadline) or "").partition(" ")[2]
    lines, locations = json.loads(_read_text(f"{root}/text/{other}", deadline) or "[[], []]")
    mine = zip(program.lines, program.locations(), strict=True)
    theirs = zip(lines, locations, strict=True)
    pairs = itertools.zip_longest(mine, theirs, fillvalue=("", ""))
    different = [(a, b) for a, b in pairs if a[0] != b[0]]
    return Difference(number, program.name, me, other, name, different)


def _post_text(key: str, text: str) -> None:
    packed = b85encode(zlib.compress(text.encode())).decode()
    pieces = [packed[i : i + _PIECE] for i in range(0, len(packed), _PIECE)]
    for i, piece in enumerate(pieces):
        store.set(f"{key}/{i}", piece)
    store.set(f"{key}/count", str(len(pieces)))


def _read_text(key: str, deadline: float) -> str | None:
    count = store.get(f"{key}/count", deadline)
    if count is None:
        return None
    pieces = [store.get(f"{key}/{i}", deadline) or "" for i in range(int(count))]
    return zlib.decompress(b85decode("".join(pieces))).decode()


def _absent_message(name: str, number: int, absent: Sequence[int], timeout_secs: float) -> str:
    return (
        f"Process {store.process_index()} is about to run {name}, its new program number {number}. "
        f"{processes(absent).capitalize()} {'has' if len(absent) == 1 else 'have'} not reached a "
        f"new program within {timeout_secs:g} s: either they run something else, such as a call "
        "that is only made if strategy.is_chief, or they are stuck; their output says what they "
        "do. Make the same calls of the strategy on every process. If they are only slow, wait "
        "longer: mirror.distributed.initialize(agreement_secs=...)."
    )
