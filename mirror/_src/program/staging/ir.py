"""The parts of a cut program: values, operations, collectives, loops, branches and stages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from mirror._src.program.collective_eqns import in_word
from mirror._src.utils.types import Array

REDUCTIONS = {"psum": "sum", "pmax": "max", "pmin": "min"}


class Value:
    """One value of the flat program.

    Attributes:
        aval: shape and dtype, on one replica.
        mirrored: whether it lies on the devices as one mirrored array; else as rows.
    """

    __slots__ = ("aval", "mirrored")

    def __init__(self, aval: Any, *, mirrored: bool = False) -> None:
        self.aval = aval
        self.mirrored = mirrored

    @property
    def num_bytes(self) -> int:
        """How large it is on one replica."""
        return self.aval.size * self.aval.dtype.itemsize


class Constant(NamedTuple):
    """A number that stands in the program itself."""

    value: Any


Atom: TypeAlias = Value | Constant


@dataclass(eq=False)
class Operation:
    """What a replica computes by itself."""

    inputs: Sequence[Atom]
    outputs: list[Value]
    run: Callable[..., Sequence[Any]]
    has_effects: bool = False
    is_ordered: bool = False


@dataclass(eq=False)
class Collective:
    """Where replicas communicate.

    Attributes:
        kind: the primitive's name.
        params: its parameters.
        inputs: one operand.
        outputs: one result.
        lines: the user's lines; several where small collectives travel together.
    """

    kind: str
    params: dict[str, Any]
    inputs: list[Atom]
    outputs: list[Value]
    lines: list[str]
    has_effects: bool = False
    is_ordered: bool = False

    @property
    def operand(self) -> Value:
        """What each replica brings."""
        (value,) = values_of(self.inputs)
        return value

    @property
    def in_words(self) -> str:
        """`all-reduce at train.py:12 in step`."""
        more = f" and {len(self.lines) - 1} more" if len(self.lines) > 1 else ""
        return f"{in_word(self.kind)} at {self.lines[0]}{more}"


@dataclass(eq=False)
class Loop:
    """A loop with collectives inside, which the host runs iteration by iteration.

    Attributes:
        inputs: what all iterations read, then the carry.
        outputs: the carry at the end.
        body: from both to the next carry.
        test: from both to whether to go on; `None` where the number of trips is known.
        trips: that number.
        line: the user's line.
    """

    inputs: list[Atom]
    outputs: list[Value]
    body: "StagedJaxpr"
    test: "StagedJaxpr | None"
    trips: int
    line: str
    has_effects: bool = True
    is_ordered: bool = False


@dataclass(eq=False)
class Branch:
    """A choice with collectives inside; the first input says which."""

    inputs: list[Atom]
    outputs: list[Value]
    branches: "list[StagedJaxpr]"
    line: str
    has_effects: bool = True
    is_ordered: bool = False


Communication: TypeAlias = Collective | Loop | Branch


@dataclass(eq=False)
class Stage:
    """What is computed between two rounds of collectives, and the round that follows.

    Attributes:
        operations: in order.
        inputs: the values it reads.
        outputs: the values it leaves for later.
        communications: what replicas do together when it is done.
        last_read: values that nobody reads after those.
    """

    operations: list[Operation]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    last_read: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class StagedJaxpr:
    """A program cut into stages. The last stage leaves all of the program's outputs, in order.

    Attributes:
        inputs: the program's inputs.
        replica_id: stands for the replica's number.
        held: arrays that the program holds, and what stands for each.
        stages: in order.
        mirrored_outputs: for each output, whether it is left as a mirrored array.
    """

    inputs: list[Value]
    replica_id: Value
    held: list[tuple[Value, Array]]
    stages: list[Stage]
    mirrored_outputs: list[bool]


def values_of(atoms: Iterable[Atom]) -> list[Value]:
    """The atoms that are no numbers."""
    return [atom for atom in atoms if isinstance(atom, Value)]
