"""Dependence analysis: which outputs of a program are an input plus something else.

A step that updates a metric with a batch computes `before + increment`. Summing the increments over
the replicas is correct only if the increment does not depend on `before`. One pass over the jaxpr
proves this for all inputs at the same time. Loops are iterated to a fixpoint. The results of an
operation that the pass does not know depend on every operand in an unknown way.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.jaxprs.collective_eqns import is_stateful
from mirror._src.jaxprs.equations import Interpreter, is_ref, with_inner
from mirror._src.jaxprs.primitives import dtype_of, shape_of


class Dependence(enum.Enum):
    """Ways in which an output of a program can depend on an input.

    Attributes:
        INDEPENDENT: The output does not depend on the input, in its data or in its control flow.
        ADDED: The output is the input plus something that is independent of the input.
        OTHER: The output may depend on the input in any other way.
    """

    INDEPENDENT = "independent"
    ADDED = "added"
    OTHER = "other"


# Dependence of one value on the inputs, by index. INDEPENDENT inputs are omitted.
# ADDED ignores the shape: it holds for the elements in row-major order.
_Marks: TypeAlias = Mapping[int, Dependence]
_NONE: _Marks = {}

_RESHAPING = frozenset({"reshape", "squeeze", "broadcast_in_dim"})


def dependence(
    program: ClosedJaxpr, inputs: Sequence[int], outputs: Sequence[int]
) -> list[Dependence]:
    """Returns how each output depends on the input at the same position.

    Args:
        program: The program to analyze.
        inputs: Indices of inputs.
        outputs: Indices of outputs, one per index in `inputs`.

    Returns:
        One `Dependence` per pair. INDEPENDENT and ADDED are proved; OTHER means not proved.
    """
    jaxpr = program.jaxpr
    marks: list[_Marks] = [_NONE] * len(jaxpr.invars)
    dtypes = {index: dtype_of(jaxpr.invars[index]) for index in inputs}
    for index in inputs:
        is_number = jnp.issubdtype(dtypes[index], jnp.number)
        marks[index] = {index: Dependence.ADDED if is_number else Dependence.OTHER}
    after = _Pass(dtypes).call(program, marks)
    dependences = []
    for index, output in zip(inputs, outputs, strict=True):
        same_shape = shape_of(jaxpr.invars[index]) == shape_of(jaxpr.outvars[output])
        mark = after[output] if same_shape else _other(after[output])
        dependences.append(mark.get(index, Dependence.INDEPENDENT))
    return dependences


@dataclass(eq=False)
class _Pass(Interpreter[_Marks]):
    """Dependence pass over a program.

    Attributes:
        dtypes: Dtypes of the tracked inputs, by index.
        control: Inputs that decide whether the current operation runs.
        stored: Inputs that state outside the values depends on: a `Ref`, or the host.
    """

    dtypes: Mapping[int, Any]
    control: frozenset[int] = frozenset()
    stored: frozenset[int] = frozenset()

    def constant(self, _: Any) -> _Marks:
        return _NONE

    def equation(self, eqn: JaxprEqn, operands: list[_Marks]) -> Sequence[_Marks]:
        if not (any(operands) or self.control or self.stored):
            return [_NONE] * len(eqn.outvars)
        return super().equation(eqn, operands)

    def leaf(self, eqn: JaxprEqn, operands: list[_Marks]) -> Sequence[_Marks]:
        eqns = with_inner(eqn)
        if any(is_stateful(e) or any(map(is_ref, (*e.invars, *e.outvars))) for e in eqns):
            self.stored |= self.control.union(*operands)
            return [_other({*self.stored}.union(*operands))] * len(eqn.outvars)
        return [self.computed(eqn, operands)] * len(eqn.outvars)

    def computed(self, eqn: JaxprEqn, marks: Sequence[_Marks]) -> _Marks:
        """Returns the dependence of the results of an operation without inner control flow."""
        name = eqn.primitive.name
        if name == "select_n":
            return self.chosen(marks[0], marks[1:])
        if name in ("add", "add_any"):
            return _sum(eqn, marks, terms=(0, 1))
        if name in ("sub", "scatter-add", "scatter-sub"):
            return _sum(eqn, marks, terms=(0,))
        if name == "scatter" and _overwrites(eqn):
            return marks[2]
        if name in _RESHAPING and len(marks) == 1 and _keeps_elements(eqn):
            return marks[0]
        if name == "convert_element_type" and len(marks) == 1:
            return self.converted(dtype_of(eqn.invars[0]), dtype_of(eqn.outvars[0]), marks[0])
        return _other(_inputs(marks))

    def converted(self, before: Any, after: Any, marks: _Marks) -> _Marks:
        """Returns the dependence after a conversion, which must not round the tracked inputs."""
        is_float = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (before, after))
        lost = {k for k in marks if not (is_float and np.can_cast(self.dtypes[k], after))}
        return {**marks, **_other(lost)} if before != after else marks

    def chosen(self, predicate: _Marks, cases: Sequence[_Marks]) -> _Marks:
        result = dict(cases[0])
        for case in cases:
            differing = {k for k in _inputs((result, case)) if result.get(k) is not case.get(k)}
            result.update(_other(differing))
        return {**result, **_other(predicate)}

    def slice_of(self, array: _Marks) -> _Marks:
        return _other(array)

    def state(self) -> frozenset[int]:
        return self.stored

    @contextmanager
    def under(self, predicate: _Marks, _eqn: JaxprEqn) -> Iterator[None]:
        saved = self.control
        self.control = saved.union(predicate)
        yield
        self.control = saved


def _sum(eqn: JaxprEqn, marks: Sequence[_Marks], terms: Sequence[int]) -> _Marks:
    """Returns the dependence of a sum: ADDED through one term, if no other operand depends."""
    result = dict(_other(_inputs(marks)))
    (out,) = eqn.outvars
    for term in terms:
        others = _inputs(mark for i, mark in enumerate(marks) if i != term)
        if shape_of(eqn.invars[term]) == shape_of(out):
            result.update((k, how) for k, how in marks[term].items() if k not in others)
    return result


def _inputs(marks: Iterable[_Marks]) -> set[int]:
    """Returns the inputs that any of the values depends on."""
    return set().union(*marks)


def _other(inputs: Iterable[int]) -> _Marks:
    """Returns an unknown dependence on these inputs."""
    return dict.fromkeys(inputs, Dependence.OTHER)


def _keeps_elements(eqn: JaxprEqn) -> bool:
    """Whether the result has the elements of the only operand, in row-major order."""
    before: Any = eqn.invars[0].aval
    after: Any = eqn.outvars[0].aval
    if before.size != after.size or before.dtype != after.dtype:
        return False
    return eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None


def _overwrites(eqn: JaxprEqn) -> bool:
    """Whether a `scatter` replaces its whole operand, as `x[...] = y` does."""
    operand, _, updates = eqn.invars
    numbers, shape = eqn.params["dimension_numbers"], shape_of(updates)
    is_whole = len(numbers.update_window_dims) == len(shape) and shape_of(operand) == shape
    is_same = is_whole and dtype_of(operand) == dtype_of(updates)
    return is_same and not numbers.scatter_dims_to_operand_dims
