"""`Captures`: the variables that a step uses without receiving them as arguments."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import set_current_trace, take_current_trace

from mirror._src.variables.raw_value import read_value
from mirror._src.variables.storage import dtype_of, shape_of
from mirror._src.variables.variable import Variable


class Captures:
    """The variables that a step reads or writes without being passed them.

    Args:
        known: those that are known already, each with what stands for it in this trace.
        own: the variables of this trace, which stand for themselves.
    """

    def __init__(self, known: Sequence[tuple[Variable, Variable]], own: Sequence[Any]) -> None:
        self._stand_ins = {id(variable): clone for variable, clone in known}
        self._own = set(map(id, own))
        with take_current_trace() as trace:
            self._trace = trace
        self.found: list[Variable] = []

    def stand_in(self, variable: Variable) -> Variable:
        """What stands for a variable in the trace under way."""
        held = read_value(variable)
        traced = isinstance(held, jax.core.Tracer)
        if traced or id(variable) in self._own or getattr(variable, "_can_update", False):
            return variable  # it was made in the step, as `jax.tree.map(f, v)` does
        known = self._stand_ins.get(id(variable))
        if known is None:  # met for the first time: the step will be traced again, with it
            self.found.append(variable)
            with set_current_trace(self._trace):  # the step's: it may be met in an inner one first
                value = jnp.zeros(shape_of(held), dtype_of(held))
                known = cast(Variable, variable.copy(value))
            self._stand_ins[id(variable)] = known
            self._own.add(id(known))
        return known
