"""The collectives of a step, one by one: what travels, how often, and whose line it is."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mirror._src.program.collective_eqns import contains_collective, in_word, is_collective, op_of
from mirror._src.program.evaluate import bind
from mirror._src.program.flat import Operation, Packing, flatten, in_order
from mirror._src.program.jaxprs import inner_programs, jaxpr_of
from mirror._src.program.shards import Shards, packs_of
from mirror._src.program.user_lines import line_within
from mirror._src.utils.types import Array

_SCATTER = "reduce-scatter"
_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a step.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"` in a sharded update, or JAX's name.
        op: `"sum"`, `"max"`, `"min"`. A mean is a sum that is divided afterwards; with a minimum or
            maximum goes another collective, of where there are NaNs.
        num_leaves: how many arrays travel in it.
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
    eqns: tuple[JaxprEqn, ...] = field(default=(), repr=False, compare=False)

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
        """The same collective of other arrays, inside a replica."""
        rest = iter(operands)
        return [out for eqn in self.eqns for out in bind(eqn, [next(rest) for _ in eqn.invars])]

    @property
    def avals(self) -> list[Any]:
        """Shapes and dtypes of what each replica brings."""
        return [atom.aval for eqn in self.eqns for atom in eqn.invars]


def collectives_of(
    program: ClosedJaxpr | Jaxpr,
    pack_bytes: int,
    line: str | None = None,
    around: tuple[JaxprEqn, ...] = (),
    scattered: Sequence[JaxprEqn] = (),
) -> Iterator[CollectiveRow]:
    """The collectives of a program, in its order.

    Args:
        program: The program.
        pack_bytes: Which all-reduces travel together, as of `Lowering`.
        line: The line that is reported for all of them, instead of the user's.
        around: The operations that the program stands inside of.
        scattered: All-reduces that are reduce-scatters in a sharded update.
    """
    slices = set(map(id, scattered))

    def key_of(operation: Operation) -> Hashable:
        key = Packing(pack_bytes).key_of(operation)
        return key and (key, id(operation.eqn) in slices)

    flat = flatten([program], _holds_collective)
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
            _SCATTER if id(eqns[0]) in slices else in_word(eqns[0].primitive.name),
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
    """The all-gathers of what a sharded update leaves whole."""
    return [
        CollectiveRow(
            in_word("all_gather"),
            "",
            len(pack),
            sum(value.num_bytes for value in pack) // num_replicas,
            line,
        )
        for pack in packs_of(shards.gathered, pack_bytes)
    ]


def _holds_collective(eqn: JaxprEqn, _: object) -> bool:
    return any(
        contains_collective(jaxpr_of(inner)) for inner in inner_programs(eqn.params.values())
    )


def num_bytes(aval: Any) -> int:
    """The bytes of one array of this shape and dtype."""
    return math.prod(aval.shape) * aval.dtype.itemsize


def _trips(loops: Sequence[JaxprEqn]) -> int | None:
    if any(loop.primitive.name == "while" for loop in loops):
        return None
    return math.prod(loop.params["length"] for loop in loops)
