"""`DriftHistory`: rejects arguments that were mirrored and come back per-replica."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from mirror._src.base.errors import ReplicaDivergenceError
from mirror._src.base.naming import code_of, name_of
from mirror._src.base.types import Array, StepFunction
from mirror._src.base.weak_table import WeakTable, reference
from mirror._src.engine.call import Call
from mirror._src.engine.drift import Drift, drift_message
from mirror._src.engine.program import StepProgram


class DriftHistory:
    """The arguments of earlier programs that may come back per-replica, and the reasons."""

    def __init__(self) -> None:
        # By code, so that it also holds for another function object with the same code.
        self._causes: WeakTable[dict[str, tuple[str, object]]] = WeakTable()
        self._drifted: WeakValueDictionary[int, Array] = WeakValueDictionary()

    def has(self, fn: StepFunction) -> bool:
        """Whether arguments of this function, or of one with the same code, may come back."""
        return self._causes.get(code_of(fn) or fn) is not None

    def expect_mirrored(self, call: Call, program: StepProgram, drifts: Sequence[Drift]) -> None:
        """Records arguments of a call that were mirrored and may come back per-replica."""
        program.drifting_results = sorted({i for drift in drifts for i in drift.results})
        program.drifted = self._drifted
        by_code = self._causes.set_default(code_of(call.fn) or call.fn, {})
        for drift in drifts:
            for name, why in drift.causes.items():
                # A single array may have the shape of another by chance: no function is recorded.
                by_code[name] = why, None if drift.is_bare else reference(call.fn)

    def has_returned(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Whether an argument is a per-replica result of a program that may be its state."""
        drifted = self._drifted
        return bool(drifted) and any(
            drifted.get(id(leaves[i])) is leaves[i] for i in call.layout.per_replica
        )

    def require_not_drifting(self, call: Call, leaves: Sequence[Any]) -> None:
        """Rejects a `PerReplica` in place of an argument that was mirrored in an earlier call.

        For another function with the same code (such as a `functools.partial`), for a single array,
        and after an argument was rejected once, only a recorded per-replica result is rejected: the
        message asks to pass a `PerReplica` where the replicas are intended to differ.

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
            if why and (is_result or fn == reference(call.fn)):
                causes[names[i]] = why
        if causes:
            known.update({name: (why, None) for name, why in causes.items()})
            raise ReplicaDivergenceError(drift_message(name_of(call.fn), causes))

    def clear(self) -> None:
        """Forgets all steps."""
        self._causes.clear()
