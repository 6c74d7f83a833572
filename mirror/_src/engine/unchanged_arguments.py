"""`ArgumentHistory`: finds the leaves of a call that a recent call received or returned.

Most leaves are: state is what the last call of a program returned, and constants are passed in
every call. Such leaves need no check of their own. The alternative, to read `leaf.sharding` of
every leaf, takes 205 us for 55 leaves (JAX 0.12).
"""

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final
from weakref import ref

Ref = ref[Any]
_MAX_RUNS = 16

# Three choices below are deliberate:
# - `is`, not a comparison of ids: in Python, `id(x)` calls the audit hooks. `filelock`, which JAX
#   0.12 imports, installs one that is written in Python: 0.8 us per leaf and call. Where a table
#   is needed, `object.__hash__` gives the address without the hooks.
# - Weak references, not the arrays or their ids. Strong references would keep the buffers of
#   earlier steps allocated. The id of a freed array may belong to a new array, which must be
#   checked; a dead weak reference returns None, which is never a leaf.
# - The results of a program, not the program: whether an array is a result must not depend on when
#   Python frees a program, because the processes of a job would note different values.
_address = object.__hash__


@final
class RunResults:
    """The mirrored arrays that one run returned, as weak references.

    Args:
        arrays: The arrays.
    """

    __slots__ = ("_by_address", "references")

    def __init__(self, arrays: Iterable[Any] = ()) -> None:
        self.references: list[Ref] = list(map(ref, arrays))
        self._by_address: dict[int, Ref] | None = None  # most runs are never searched

    @property
    def by_address(self) -> dict[int, Ref]:
        """The references by address, which a later array may have: compare what they return."""
        if self._by_address is None:
            addresses = map(_address, map(operator.call, self.references))
            self._by_address = dict(zip(addresses, self.references, strict=True))
        return self._by_address


@final
class RecentResults:
    """The mirrored arrays that recent runs of a program returned.

    They share no memory with other arrays, except with those that the user created from them since.

    Attributes:
        runs: The runs, oldest first.
    """

    def __init__(self) -> None:
        self.runs: deque[RunResults] = deque([RunResults()], _MAX_RUNS)

    def add(self, arrays: Iterable[Any]) -> None:
        """Adds the results of a run."""
        self.runs.append(RunResults(arrays))


def exclude_results(
    programs: Sequence[RecentResults], leaves: list[Any], positions: Sequence[int]
) -> list[int]:
    """Returns the positions whose leaves are not recent results of the programs.

    The last run of each program is searched first, because most state comes from one of them.
    """
    addresses = dict(zip(positions, map(_address, map(leaves.__getitem__, positions)), strict=True))
    ages = itertools.zip_longest(*(reversed(program.runs) for program in programs))
    for run in itertools.chain.from_iterable(ages):
        if not addresses:
            return []
        known = run.by_address if run is not None else {}
        if known.keys().isdisjoint(addresses.values()):
            continue
        for i, address in list(addresses.items()):
            if address in known and known[address]() is leaves[i]:
                del addresses[i]
    return list(addresses)


@final
class ArgumentHistory:
    """Finds the leaves of successive calls of a program that may be new.

    Args:
        mirrored: Positions of the leaves that are not per-replica.

    Attributes:
        mirrored: These positions.
    """

    def __init__(self, mirrored: Sequence[int]) -> None:
        self.mirrored = mirrored
        self._expected: _ExpectedLeaves | None = None
        self._previous: dict[int, Ref] = {}
        self._num_updates = 0

    def find(self, leaves: list[Any]) -> "_ExpectedLeaves | None":
        """Returns what is expected of a call, or None if a leaf is not what was expected there."""
        expected = self._expected
        return expected if expected is not None and expected.are_there(leaves) else None

    def update(
        self,
        leaves: list[Any],
        programs: Sequence[RecentResults],
        is_rare: Callable[[int], bool],
    ) -> None:
        """Expects of later calls what this call has, if few calls have been unexpected.

        Args:
            leaves: Leaves of a call, all of them checked.
            programs: Results of recent programs.
            is_rare: Whether something that happened in a number of calls may happen again.
        """
        if is_rare(self._num_updates):
            self._expected = _ExpectedLeaves(leaves, self.mirrored, programs, self._previous)
            self._previous = {i: ref(leaves[i]) for i in self.mirrored}
            self._num_updates += 1


@final
class _ExpectedLeaves:
    """Positions at which the leaves of successive calls are expected to be known arrays.

    Args:
        leaves: Leaves of a call, all of them checked.
        mirrored: Positions of the leaves that are not per-replica.
        programs: Results of recent programs, the program that is called first.
        previous: Leaves of an earlier call that was checked, by position.

    Attributes:
        new_positions: The positions in `mirrored` whose leaves are new in every call.
        foreign_positions: The positions in `mirrored` with results of other programs.
    """

    def __init__(
        self,
        leaves: list[Any],
        mirrored: Sequence[int],
        programs: Sequence[RecentResults],
        previous: Mapping[int, Ref],
    ) -> None:
        positions: list[int] = []
        self._results: list[tuple[RecentResults, list[int]]] = []
        self._constants: list[Ref] = []
        self.foreign_positions: list[int] = []
        missing = {i: _address(leaves[i]) for i in mirrored}
        for program in programs:
            references = program.runs[-1].references
            indices = {_address(reference()): k for k, reference in enumerate(references)}
            mine = [i for i, address in missing.items() if address in indices]
            if mine:
                self._results.append((program, [indices[missing.pop(i)] for i in mine]))
                positions += mine
                self.foreign_positions += mine if program is not programs[0] else []
        for i in list(missing):
            if previous and previous[i]() is leaves[i]:
                del missing[i]
                positions.append(i)
                self._constants.append(ref(leaves[i]))
        self._positions = positions
        self.new_positions = list(missing)

    def are_there(self, leaves: list[Any]) -> bool:
        """Whether all leaves, except those at `new_positions`, are the expected arrays.

        The comparison runs in C, because a Python loop over hundreds of leaves would be too slow
        for every step.
        """
        expected: list[Ref] = []
        for program, indices in self._results:
            expected += map(program.runs[-1].references.__getitem__, indices)
        return all(
            map(
                operator.is_,
                map(leaves.__getitem__, self._positions),
                map(operator.call, expected + self._constants),
            )
        )
