"""Which leaves of a call are arrays that the calls before it returned or were passed."""

import operator
from collections.abc import Sequence
from typing import Any
from weakref import ref

Ref = ref[Any]


class Familiar:
    """Where the leaves of calls are arrays that need no look: most of them come back.

    Compared by identity, and not by `id`, which may call an audit hook in Python: 0.8 us each.

    Args:
        leaves: Those of a call, all of them looked at.
        plain: Positions of those that are not the replicas' own.
        returned: The mirrored arrays that the program returned last.
        before: The leaves of an earlier call that was looked at.

    Attributes:
        strange: Positions of all others of them.
    """

    def __init__(
        self,
        leaves: list[Any],
        plain: Sequence[int],
        returned: Sequence[Ref],
        before: Sequence[Ref],
    ) -> None:
        sources = {id(reference()): k for k, reference in enumerate(returned)}
        new: list[int] = []
        self._sources: list[int] = []
        same: list[int] = []
        self.strange: list[int] = []
        for i in plain:
            source = sources.get(id(leaves[i]))
            if source is not None:
                new.append(i)
                self._sources.append(source)
            elif before and before[i]() is leaves[i]:
                same.append(i)
            else:
                self.strange.append(i)
        self._positions = new + same
        self._kept = [ref(leaves[i]) for i in same]

    def are_back(self, leaves: list[Any], returned: list[Ref]) -> bool:
        """Whether the leaves are what was returned last, and what they were, but for `strange`."""
        return all(
            map(
                operator.is_,
                map(leaves.__getitem__, self._positions),
                map(operator.call, [*map(returned.__getitem__, self._sources), *self._kept]),
            )
        )
