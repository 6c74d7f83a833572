"""The exchanges of a step, one by one: what travels, how often, and whose line it is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from mirror._types import Array
from mirror.program.evaluate import bind
from mirror.program.exchanges import in_word, is_exchange, op_of
from mirror.program.inner import equations, nested_equations
from mirror.program.proof import line_within

_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True)
class ExchangeRow:
    """One exchange of a step.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, or JAX's name of it.
        op: `"sum"`, `"max"`, `"min"`. A mean is a sum that is divided afterwards; with a minimum or
            maximum goes another exchange, of where there are NaNs.
        num_leaves: how many arrays travel in it; packed ones are counted.
        num_bytes: what each replica brings, once.
        line: the user's line.
        loop: `"scan"` or `"while"` where it stands in a loop, else nothing.
        trips: how often it runs in a step; `None`: in a `while`, nobody knows.
    """

    kind: str
    op: str
    num_leaves: int
    num_bytes: int
    line: str
    loop: str = ""
    trips: int | None = 1
    eqn: JaxprEqn | None = field(default=None, repr=False, compare=False)

    @property
    def in_words(self) -> str:
        """`all-reduce (sum)`."""
        return f"{self.kind} ({self.op})" if self.op else self.kind

    @property
    def often(self) -> str:
        """How often it runs, in words."""
        if not self.loop:
            return "once"
        return f"in a {self.loop}" + (f", {self.trips} times" if self.trips is not None else "")

    @property
    def least_trips(self) -> int:
        """How often it runs, as far as is known: once in a `while`."""
        return 1 if self.trips is None else self.trips

    def again(self, operands: Sequence[Array]) -> list[Any]:
        """The same exchange of other arrays, inside a replica."""
        assert self.eqn is not None
        return bind(self.eqn, operands)

    @property
    def avals(self) -> list[Any]:
        """Shapes and dtypes of what each replica brings."""
        assert self.eqn is not None
        return [atom.aval for atom in self.eqn.invars]


def exchanges_of(jaxpr: Jaxpr, line: str | None = None) -> Iterator[ExchangeRow]:
    """The exchanges of a program, in its order; all at one line, if one is told."""
    makers = {var: eqn for eqn in equations(jaxpr) for var in eqn.outvars}
    for eqn, around in nested_equations(jaxpr):
        if is_exchange(eqn):
            loops = [outer for outer in around if outer.primitive.name in _LOOPS]
            avals: list[Any] = [atom.aval for atom in eqn.invars]
            yield ExchangeRow(
                in_word(eqn.primitive.name),
                op_of(eqn.primitive.name),
                sum(_num_packed(atom, makers) for atom in eqn.invars),
                sum(num_bytes(aval) for aval in avals),
                line or line_within(eqn, around),
                loops[-1].primitive.name if loops else "",
                _trips(loops),
                eqn,
            )


def _num_packed(atom: Any, makers: Mapping[Any, JaxprEqn]) -> int:
    """How many arrays a buffer is made of: they come out of a barrier and are joined flat."""

    def maker(value: Any) -> JaxprEqn | None:
        return None if isinstance(value, Literal) else makers.get(value)

    def is_packed(value: Any) -> bool:
        made = maker(value)
        if made is not None and made.primitive.name == "reshape":
            made = maker(made.invars[0])
        return made is not None and made.primitive.name == "optimization_barrier"

    made = maker(atom)
    if made is None or made.primitive.name != "concatenate":
        return 1
    return len(made.invars) if all(map(is_packed, made.invars)) else 1


def num_bytes(aval: Any) -> int:
    """The bytes of one array of this shape and dtype."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def _trips(loops: Sequence[JaxprEqn]) -> int | None:
    if any(loop.primitive.name == "while" for loop in loops):
        return None
    return math.prod(loop.params["length"] for loop in loops)
