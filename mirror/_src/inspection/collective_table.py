"""Lists the collectives of a step: operands, number of executions, and the user's line."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.base.types import Array
from mirror._src.jaxprs.atoms import num_bytes
from mirror._src.jaxprs.collective_eqns import contains_collective, is_collective, kind_of
from mirror._src.jaxprs.equations import inner_programs, jaxpr_of
from mirror._src.jaxprs.flat import Operation, Packing, flatten, in_order
from mirror._src.jaxprs.primitives import op_of
from mirror._src.jaxprs.user_lines import line_within
from mirror._src.passes.evaluate import bind
from mirror._src.passes.shards import Shards, packs_of

_SCATTER = "reduce-scatter"
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
        eqns: Equations of the collective in the traced step.
    """

    kind: str
    op: str
    num_leaves: int
    num_bytes: int
    line: str
    loop: str = ""
    trips: int | None = 1
    eqns: tuple[JaxprEqn, ...] = field(default=(), repr=False, compare=False)

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

    def execute(self, operands: Sequence[Array]) -> list[Any]:
        """Executes the collective on other arrays, inside a replica."""
        rest = iter(operands)
        return [out for eqn in self.eqns for out in bind(eqn, [next(rest) for _ in eqn.invars])]

    @property
    def avals(self) -> list[Any]:
        """Shapes and dtypes of the operands on each replica."""
        return [atom.aval for eqn in self.eqns for atom in eqn.invars]


def collectives_of(
    program: ClosedJaxpr | Jaxpr,
    pack_bytes: int,
    line: str | None = None,
    around: tuple[JaxprEqn, ...] = (),
    scattered: Sequence[JaxprEqn] = (),
) -> Iterator[CollectiveRow]:
    """Yields the collectives of a program, in program order.

    Args:
        program: The program.
        pack_bytes: Size limit for packing small all-reduces into one, as in `Lowering`.
        line: Line to report for all collectives, instead of the user's.
        around: Equations that enclose the program, outermost first.
        scattered: All-reduces that a sharded update executes as reduce-scatters.
    """
    scattered_ids = set(map(id, scattered))

    def key_of(operation: Operation) -> Hashable:
        key = Packing(pack_bytes).key_of(operation)
        return key and (key, id(operation.eqn) in scattered_ids)

    flat = flatten([program], _contains_inner_collective)
    numbers = {operation: i for i, operation in enumerate(flat.operations)}
    packs = in_order(flat.operations, key_of)
    for pack in sorted(packs, key=lambda pack: numbers[pack[0]]):
        within = (*around, *pack[0].around)
        eqns = tuple(operation.eqn for operation in pack)
        if not is_collective(eqns[0]):
            for inner in inner_programs(eqns[0].params.values()):
                if contains_collective(jaxpr_of(inner)):
                    inside = (*within, eqns[0])
                    yield from collectives_of(inner, pack_bytes, line, inside)
            continue
        loops = [outer for outer in within if outer.primitive.name in _LOOPS]
        avals: list[Any] = [atom.aval for eqn in eqns for atom in eqn.invars]
        yield CollectiveRow(
            _SCATTER if id(eqns[0]) in scattered_ids else kind_of(eqns[0].primitive.name),
            op_of(eqns[0].primitive.name),
            len(avals),
            sum(map(num_bytes, avals)),
            line or line_within(eqns[0], within),
            loops[-1].primitive.name if loops else "",
            _trips(loops),
            eqns,
        )


def gathers_of(
    shards: Shards, num_replicas: int, pack_bytes: int, line: str
) -> list[CollectiveRow]:
    """Returns the all-gathers after a sharded update, for arrays that are not sharded."""
    return [
        CollectiveRow(
            kind_of("all_gather"),
            "",
            len(pack),
            sum(value.num_bytes for value in pack) // num_replicas,
            line,
        )
        for pack in packs_of(shards.gathered, pack_bytes)
    ]


def _contains_inner_collective(eqn: JaxprEqn, _: object) -> bool:
    return any(
        contains_collective(jaxpr_of(inner)) for inner in inner_programs(eqn.params.values())
    )


def _trips(loops: Sequence[JaxprEqn]) -> int | None:
    if any(loop.primitive.name == "while" for loop in loops):
        return None
    return math.prod(loop.params["length"] for loop in loops)
