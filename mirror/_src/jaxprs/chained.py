"""Finds the collectives that follow each other: of all replicas together, they are not a sum.

Workers compute the parts of a batch separately, and add up their results. That is right if each
result is one all-reduce of what the replicas compute. A second all-reduce depends on the first one,
which is over the replicas of one part.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.jaxprs.collective_eqns import (
    ALL_REDUCES,
    contains_collective,
    is_collective,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import Interpreter, inner_programs, is_ref, jaxpr_of

_MOST = 2


def chain_lengths(program: ClosedJaxpr | Jaxpr) -> list[int]:
    """Returns for each output how many all-reduces it depends on in a chain, at most two.

    Any other collective counts as two, and so does a value of a `Ref`.
    """
    return _Pass().call(program, [0] * len(jaxpr_of(program).invars))


class _Pass(Interpreter[int]):
    """Data-flow pass over one program."""

    def constant(self, _: Any) -> int:
        return 0

    def leaf(self, eqn: JaxprEqn, operands: list[int]) -> Sequence[int]:
        inner = map(jaxpr_of, inner_programs(eqn.params.values()))
        is_mutable = any(map(is_ref, (*eqn.invars, *eqn.outvars)))
        if is_mutable or any(map(contains_collective, inner)):
            return [_MOST] * len(eqn.outvars)
        before = max(operands, default=0)
        if not is_collective(eqn):
            return [before] * len(eqn.outvars)
        is_all_reduce = eqn.primitive.name in ALL_REDUCES and spans_whole_axis(eqn)
        added = 1 if is_all_reduce else _MOST
        return [min(_MOST, before + added)] * len(eqn.outvars)

    def chosen(self, predicate: int, cases: Sequence[int]) -> int:
        return max(predicate, *cases)
