"""`DriftHistory`: rejects arguments that were mirrored and come back per-replica."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from mirror._src.run.call import Call
from mirror._src.run.drift import Drift, drift_message
from mirror._src.run.program import StepProgram
from mirror._src.utils.errors import ReplicaDivergenceError
from mirror._src.utils.naming import code_of, name_of
from mirror._src.utils.types import Array, StepFunction


class DriftHistory:
    """The arguments of earlier programs that may come back per-replica, and the reasons."""

    def __init__(self) -> None:
        self._causes: dict[Any, dict[str, tuple[str, StepFunction | None]]] = {}
        self._drifted: WeakValueDictionary[int, Array] = WeakValueDictionary()

    def has(self, fn: StepFunction) -> bool:
        """Whether arguments of this function, or of one with the same code, may come back."""
        return (code_of(fn) or fn) in self._causes

    def expect_mirrored(self, call: Call, program: StepProgram, drifts: Sequence[Drift]) -> None:
        """Records arguments of a call that were mirrored and may come back per-replica."""
        program.drifting_results = sorted({i for drift in drifts for i in drift.results})
        program.drifted = self._drifted
        by_code = self._causes.setdefault(code_of(call.fn) or call.fn, {})
        for drift in drifts:
            for name, why in drift.causes.items():
                # A single array may have the shape of another by chance: no function is recorded.
                by_code[name] = why, None if drift.is_bare else call.fn

    def has_returned(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Whether an argument is a per-replica result of a program that may be its state."""
        drifted = self._drifted
        return bool(self._causes) and any(
            drifted.get(id(leaves[i])) is leaves[i] for i in call.layout.per_replica
        )

    def require_not_drifting(self, call: Call, leaves: Sequence[Any]) -> None:
        """Rejects a `PerReplica` in place of an argument that was mirrored in an earlier call.

        For another function with the same code (such as a `functools.partial`), and for a single
        array, only a recorded per-replica result is rejected.

        Raises:
            ReplicaDivergenceError: If there is such an argument.
        """
        known = self._causes.get(code_of(call.fn) or call.fn)
        if not known:
            return
        names, causes = call.leaf_names, {}
        for i in call.layout.per_replica:
            why, fn = known.get(names[i], ("", None))
            is_result = self._drifted.get(id(leaves[i])) is leaves[i]
            if why and (is_result or fn is call.fn):
                causes[names[i]] = why
        if causes:
            raise ReplicaDivergenceError(drift_message(name_of(call.fn), causes))

    def keep_only(self, steps: set[StepFunction]) -> None:
        """Forgets all other steps."""
        codes = {code_of(fn) or fn for fn in steps}
        self._causes = {code: d for code, d in self._causes.items() if code in codes}

    def clear(self) -> None:
        """Forgets all steps."""
        self._causes.clear()
