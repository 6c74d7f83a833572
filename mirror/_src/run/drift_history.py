"""Arguments that were mirrored before, and are refused when they come back per-replica."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from mirror._src.run.call import Call
from mirror._src.run.drift import Drift, drifting
from mirror._src.run.program import StepProgram
from mirror._src.utils.errors import ReplicaDivergenceError
from mirror._src.utils.naming import code_of, name_of
from mirror._src.utils.types import Array, StepFunction


class DriftHistory:
    """What is known of the programs so far: which arguments may come back per-replica, and why."""

    def __init__(self) -> None:
        self._causes: dict[Any, dict[str, tuple[str, StepFunction | None]]] = {}
        self._drifted: WeakValueDictionary[int, Array] = WeakValueDictionary()

    def has(self, fn: StepFunction) -> bool:
        """Whether arguments of this function, or of one with the same code, may come back so."""
        return (code_of(fn) or fn) in self._causes

    def expect_mirrored(self, call: Call, program: StepProgram, drifts: Sequence[Drift]) -> None:
        """Remembers arguments that were mirrored, and that may come back per-replica."""
        program.drifting_results = sorted({i for drift in drifts for i in drift.results})
        program.drifted = self._drifted
        by_code = self._causes.setdefault(code_of(call.fn) or call.fn, {})
        for drift in drifts:
            for name, why in drift.causes.items():
                # Of a bare array, another one may have the shape by chance.
                by_code[name] = why, None if drift.is_bare else call.fn

    def came_back(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Whether an argument is a result that may be state, and came back per-replica."""
        drifted = self._drifted
        return bool(self._causes) and any(
            drifted.get(id(leaves[i])) is leaves[i] for i in call.layout.per_replica
        )

    def require_not_drifting(self, call: Call, leaves: Sequence[Any]) -> None:
        """Refuses a `PerReplica` where the same function has had a mirrored array before.

        Of another function object with the same code, as `functools.partial` makes, and in the
        place of a bare array, only what came back from it is refused.

        Raises:
            ReplicaDivergenceError: It is a result that came back per-replica.
        """
        known = self._causes.get(code_of(call.fn) or call.fn)
        if not known:
            return
        names, causes = call.leaf_names, {}
        for i in call.layout.per_replica:
            why, fn = known.get(names[i], ("", None))
            came_back = self._drifted.get(id(leaves[i])) is leaves[i]
            if why and (came_back or fn is call.fn):
                causes[names[i]] = why
        if causes:
            raise ReplicaDivergenceError(drifting(name_of(call.fn), causes))

    def keep_only(self, steps: set[StepFunction]) -> None:
        """Forgets all other steps."""
        codes = {code_of(fn) or fn for fn in steps}
        self._causes = {code: d for code, d in self._causes.items() if code in codes}

    def clear(self) -> None:
        """Forgets all steps."""
        self._causes.clear()
