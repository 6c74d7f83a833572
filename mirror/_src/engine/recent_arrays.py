"""Finds the leaves of a call that need no check: recent launches returned or received them.

They are on the replicas' devices and share no memory with other arrays, except with those that the
user has created from them since. Most leaves of a call are such arrays. To check one takes longer:
reading `leaf.sharding` of 55 leaves takes 205 us (JAX 0.12).

All loops over leaves run in C, because there are hundreds in every step. They compare by `is`:
`id(x)` calls the audit hooks, and `filelock`, which JAX 0.12 imports, installs one that is written
in Python and takes 0.8 us. References are weak: strong ones would keep the buffers of earlier steps
allocated. A new array may have the address of a freed one, so what a reference returns is compared.
"""

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final
from weakref import ref

import jax

from mirror._src.devices.transfer import any_deleted

Ref = ref[Any]

_MAX_RUNS = 128
_FIRST_SIZE = 1024  # references that may be to freed arrays
_DEAD: Ref = ref(type("Freed", (), {})())  # of an array that a table does not have; returns None
address = object.__hash__


@final
class WeakArrays:
    """Arrays by key, without those that have been freed.

    Unlike `WeakValueDictionary`, it runs no code when an array is freed: Python drops an exception
    there, so a Ctrl-C would be lost (1.6 % of them, in a loop of short steps).
    """

    def __init__(self) -> None:
        self._references: dict[int, Ref] = {}
        self._max_size = _FIRST_SIZE

    def get(self, key: int) -> Any:
        """Returns the array of a key, or None."""
        return self._references.get(key, _DEAD)()

    def add(self, array: Any, *keys: int) -> None:
        """Adds an array, or replaces those that the keys have."""
        self._references.update(dict.fromkeys(keys, ref(array)))
        if len(self._references) > self._max_size:
            pairs = list(self._references.items())
            self._references = {key: found for key, found in pairs if found() is not None}
            self._max_size = 2 * len(self._references) + _FIRST_SIZE


@final
class Run:
    """The mirrored arrays that one launch has returned, as weak references.

    Args:
        references: The references.

    Attributes:
        size: Number of references, before they were dropped.
        is_dropped: Whether the arrays have been donated.
    """

    def __init__(self, references: list[Ref]) -> None:
        self.references = references
        self.size = len(references)
        self.is_dropped = False

    def forget_freed(self) -> None:
        """Drops the references to arrays that have been freed."""
        arrays = map(operator.call, self.references)
        are_alive = map(operator.is_not, arrays, itertools.repeat(None))
        self.references = list(itertools.compress(self.references, are_alive))
        self.size = len(self.references)
        vars(self).pop("table", None)

    def drop(self) -> None:
        """Drops all references, because the arrays have been donated."""
        self.is_dropped, self.references = True, []
        vars(self).pop("table", None)

    @functools.cached_property  # most runs are never searched
    def table(self) -> dict[int, Ref]:
        """The references by address."""
        addresses = map(address, map(operator.call, self.references))
        return dict(zip(addresses, self.references, strict=True))


@final
class RecentArrays:
    """The mirrored arrays that recent launches of a strategy have returned.

    It holds results, not programs: whether an array is a result must not depend on when Python
    frees a program, because the processes of a job would compare different values.
    """

    def __init__(self) -> None:
        self._runs: deque[Run] = deque(maxlen=_MAX_RUNS)  # newest first
        self._size, self._max_size = 0, _FIRST_SIZE

    def add(self, run: Run) -> None:
        """Adds the results of a launch."""
        if not run.references:
            return
        while self._runs and self._runs[0].is_dropped:  # most often, by the launch of `run`
            self._size -= self._runs.popleft().size
        # Python's garbage collector visits all references: a step with 400 leaves took 1.5 ms
        # instead of 0.5 ms. A run without references stays: see above.
        if self._size > self._max_size:
            for each in self._runs:
                if each.references:
                    each.forget_freed()
            self._size = sum(each.size for each in self._runs)
            self._max_size = 2 * self._size + _FIRST_SIZE
        self._runs.appendleft(run)
        self._size += run.size

    def exclude(self, leaves: Sequence[Any], positions: Sequence[int]) -> Sequence[int]:
        """Returns the positions whose leaves are not recent results."""
        arrays = list(map(leaves.__getitem__, positions))
        if True not in map(isinstance, arrays, itertools.repeat(jax.Array)):
            return positions  # numbers and arrays of NumPy
        addresses = set(map(address, arrays))
        for run in self._runs:
            if not positions:
                break
            if run.table.keys().isdisjoint(addresses):
                continue
            found: Any = map(run.table.get, map(address, arrays), itertools.repeat(_DEAD))
            is_new = list(map(operator.is_not, map(operator.call, found), arrays))
            positions = list(itertools.compress(positions, is_new))
            arrays = list(itertools.compress(arrays, is_new))
        return positions


def taking(positions: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns a function that returns the items of a list at some positions."""
    first, count = positions[0] if positions else 0, len(positions)
    if positions == list(range(first, first + count)):  # the usual case, and fast
        return operator.itemgetter(slice(first, first + count))
    return operator.itemgetter(*positions)


@final
class KnownLeaves:
    """The leaves that successive calls of a program are expected to have.

    State is what the last launch of the program has returned, and constants are passed in every
    call.

    Attributes:
        last: Mirrored results of the last launch of the program.
        num_surprises: Number of calls that were not as expected.
    """

    def __init__(self) -> None:
        self.last = Run([])
        self.num_surprises = 0
        self._last: list[Ref] = []  # also those to freed arrays
        self._state: Ref = _DEAD  # weak: it may be a whole trained model
        # Takes the expected leaves of a call, results and then constants. None before `expect`.
        self._expected: Callable[[list[Any]], Sequence[Any]] | None = None
        self._sources: list[int] = []  # of results, in the last launch
        self._results = taking([])  # takes them
        self._constants: list[Ref] = []
        self._new: list[int] = []  # positions of the other leaves
        self._previous: dict[int, Ref] = {}  # leaves of an earlier call, by position

    def record_launch(self, results: Iterable[Any], state: Any, donated: Any) -> None:
        """Records a launch.

        Args:
            results: Its mirrored results.
            state: The list of leaves that it has written.
            donated: The first leaf that the user has donated to it, or None.
        """
        # Before there are new references, or they would often start a garbage collection.
        last, sources = self._last, self._sources
        if donated is not None and sources and last[sources[0]]() is donated:
            last[:] = [_DEAD] * len(last)
            self.last.drop()
        self._last = list(map(ref, results))
        self.last = Run(self._last)
        self._state = ref(state) if state is not None else _DEAD

    def find(self, leaves: list[Any], state: list[Any]) -> Sequence[int] | None:
        """Returns the positions of the leaves that are not expected; None if nothing is.

        If another program wrote the objects' state, one of the leaves may now be part of it, and
        would be donated: nothing is expected then.
        """
        if self._expected is None or (state and self._state() is not state):
            return None
        results = self._results(self._last)
        expected = map(operator.call, itertools.chain(results, self._constants))
        if not all(map(operator.is_, self._expected(leaves), expected)):
            return None
        return self._new

    def expect(self, leaves: list[Any], mirrored: Sequence[int]) -> None:
        """Expects of later calls what this one has. All of its leaves have been checked.

        Args:
            leaves: Leaves of a call, before its launch.
            mirrored: Positions of the mirrored ones.
        """
        results = map(operator.call, self._last)
        indices = {address(array): k for k, array in enumerate(results) if array is not None}
        known: dict[int, int] = {}
        constants: dict[int, Ref] = {}
        for i in mirrored:
            # `pop`: an array at two positions is expected at one of them.
            if (k := indices.pop(address(leaves[i]), None)) is not None:
                known[i] = k
            elif self._previous.get(i, _DEAD)() is leaves[i]:
                constants[i] = self._previous[i]
        self._expected, self._sources = taking([*known, *constants]), list(known.values())
        self._results, self._constants = taking(self._sources), list(constants.values())
        self._new = [i for i in mirrored if i not in known and i not in constants]
        self._previous = {i: ref(leaves[i]) for i in mirrored}


@final
class MirroredCopies:
    """The copies of plain arrays that the last call of a program received, by position.

    A call that passes the same arrays uses the copies. A copy is freed with its original.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[int, Ref, Any]] = {}

    def use(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves with copies in place of the arrays that the last call had, too."""
        if not self._copies or not (kept := list(self._copies.values())):  # freed at any time
            return leaves
        positions, originals, copies = zip(*kept, strict=True)
        if any_deleted(copies):
            return leaves
        passed = map(leaves.__getitem__, positions)
        are_same = list(map(operator.is_, passed, map(operator.call, originals)))
        if True not in are_same:
            self._copies.clear()
            return leaves
        leaves = list(leaves)
        for i, copy in itertools.compress(zip(positions, copies, strict=True), are_same):
            leaves[i] = copy
        return leaves

    def keep(self, leaves: Sequence[Any], placed: Sequence[Any], positions: Iterable[int]) -> None:
        """Keeps the copies at some positions, and no others."""
        self._copies.clear()
        for i in positions:
            leaf, copy = leaves[i], placed[i]
            if copy is not leaf and isinstance(leaf, jax.Array):
                drop: Any = functools.partial(self._copies.pop, i)  # in C: see `WeakArrays`
                self._copies[i] = i, ref(leaf, drop), copy
