"""Lists the collectives of a step: operands, number of executions, and the user's line."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn

from mirror._src.base.dtypes import num_bytes
from mirror._src.base.types import Array
from mirror._src.jaxprs.collective_eqns import contains_collective
from mirror._src.jaxprs.equations import inner_programs, jaxpr_of
from mirror._src.jaxprs.primitives import op_of
from mirror._src.jaxprs.user_lines import line_within
from mirror._src.passes.evaluate import Lowering
from mirror._src.passes.pack import packed
from mirror._src.passes.program import Operation, Program, Settings

_AFTER = "strategy.run, after the step"
_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a step.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"` in a sharded update, or the name of
            another JAX primitive.
        op: `"sum"`, `"max"`, `"min"`, or empty. A mean is a sum that is divided afterwards. A
            minimum or maximum comes with a second collective, which propagates NaNs.
        num_leaves: Number of arrays in the collective.
        num_bytes: Bytes that each replica contributes to one execution.
        line: The user's line.
        loop: `"scan"` or `"while"` if the collective is inside a loop, else empty.
        trips: Number of executions per step. `None` inside a `while` loop, where it is unknown.
        operations: The collectives of the program, which share a buffer.
    """

    kind: str
    op: str
    num_leaves: int
    num_bytes: int
    line: str
    loop: str = ""
    trips: int | None = 1
    operations: tuple[Operation, ...] = field(default=(), repr=False, compare=False)

    @property
    def in_words(self) -> str:
        """Kind and operation, such as `all-reduce (sum)`."""
        return f"{self.kind} ({self.op})" if self.op else self.kind

    @property
    def often(self) -> str:
        """Number of executions per step, in words."""
        if not self.loop:
            return "once"
        return f"in a {self.loop}" + (f", {self.trips} times" if self.trips is not None else "")

    @property
    def least_trips(self) -> int:
        """Number of executions per step; 1 for a `while` loop, whose trip count is unknown."""
        return 1 if self.trips is None else self.trips

    def execute(self, operands: Sequence[Array], axis_name: str) -> list[Any]:
        """Executes the collective on other arrays, inside a replica."""
        run, rest = Lowering({}, {}, axis=axis_name), iter(operands)
        return [
            result
            for operation in self.operations
            for result in run.evaluate(operation, [next(rest) for _ in operation.sent])
        ]

    @property
    def avals(self) -> list[Any]:
        """Shapes and dtypes of the operands on each replica."""
        return [atom.aval for operation in self.operations for atom in operation.sent]


def collectives_of(
    program: Program,
    pack_bytes: int,
    after: Collection[int] = (),
    around: tuple[JaxprEqn, ...] = (),
) -> Iterator[CollectiveRow]:
    """Yields the collectives of a flat program, in its order.

    Args:
        program: The program after the passes.
        pack_bytes: Size limit for packing in loops and branches, as for `Lowering`.
        after: The `id`s of the equations that `run` adds after the step.
        around: Equations that enclose the program, outermost first.
    """
    for operation in program.operations:
        within = (*around, *operation.around)
        if operation.body is not None:
            body = operation.body
            yield from collectives_of(body, pack_bytes, after, (*within, operation.eqn))
            continue
        members = operation.members
        first = members[0]
        if not first.collective:
            for inner in inner_programs(first.eqn.params.values()):
                if operation.kind == "equation" and contains_collective(jaxpr_of(inner)):
                    inside = packed(inner, Settings(pack_bytes=pack_bytes))
                    yield from collectives_of(inside, pack_bytes, after, (*within, first.eqn))
            continue
        loops = [outer for outer in within if outer.primitive.name in _LOOPS]
        is_gather = first.kind == "gather"
        sent = [atom for each in members for atom in each.sent]
        is_last = is_gather and first.outputs[0] in program.outputs
        is_after = is_last or id(first.eqn) in after
        yield CollectiveRow(
            first.collective,
            "" if is_gather else op_of(first.eqn.primitive.name),
            len(sent),
            sum(num_bytes(atom.aval) for atom in sent),
            _AFTER if is_after else line_within(first.eqn, within),
            loops[-1].primitive.name if loops else "",
            _trips(loops),
            members,
        )


def _trips(loops: Sequence[JaxprEqn]) -> int | None:
    if any(loop.primitive.name == "while" for loop in loops):
        return None
    return math.prod(loop.params["length"] for loop in loops)
