"""`Captures`: the variables that a step uses without receiving them as arguments."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import set_current_trace, take_current_trace

from mirror._src.engine.raw_value import read_value
from mirror._src.engine.storage import dtype_of, shape_of
from mirror._src.engine.variable import Variable


class Captures:
    """Variables that a step reads or writes without receiving them as arguments.

    Args:
        known: Variables captured by an earlier trace of the step, each with its stand-in in this
            trace.
        local: Variables of this trace, which need no stand-in.

    Attributes:
        discovered: Variables that this trace captured for the first time.
    """

    def __init__(self, known: Sequence[tuple[Variable, Variable]], local: Sequence[Any]) -> None:
        self._stand_ins = {id(variable): clone for variable, clone in known}
        self._local = set(map(id, local))
        with take_current_trace() as trace:
            self._trace = trace
        self.discovered: list[Variable] = []

    def stand_in(self, variable: Variable) -> Variable:
        """Returns the variable that replaces `variable` in the current trace."""
        value = read_value(variable)
        is_traced = isinstance(value, jax.core.Tracer)
        if is_traced or id(variable) in self._local or getattr(variable, "_can_update", False):
            return variable  # created inside the step, as by `jax.tree.map(f, v)`
        clone = self._stand_ins.get(id(variable))
        if clone is None:  # first use: the step will be traced again, with this variable as input
            self.discovered.append(variable)
            # The first use may be inside a nested transformation. In its trace the zeros would be
            # tracers that the rest of the step must not use.
            with set_current_trace(self._trace):
                zeros = jnp.zeros(shape_of(value), dtype_of(value))
                clone = cast(Variable, variable.copy(zeros))
            self._stand_ins[id(variable)] = clone
            self._local.add(id(clone))
        return clone
