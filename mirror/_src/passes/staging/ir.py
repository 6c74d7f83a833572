"""The parts of a staged program: computations, collectives, loops, branches and stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn

from mirror._src.base.types import Array
from mirror._src.jaxprs.collective_eqns import kind_of
from mirror._src.passes.program import Atom, Value, values_of


@dataclass(eq=False)
class Computation:
    """A computation of one replica, without communication.

    Attributes:
        inputs: Its operands.
        outputs: Its results.
        run: Computes the results.
        has_effects: Whether it runs even if its results are not used.
        is_ordered: Whether its order among other ordered computations matters.
        eqn: The operation, if it is a single one.
        moves: Whether it only moves elements, so that it may follow a sum over replicas.
    """

    inputs: Sequence[Atom]
    outputs: list[Value]
    run: Callable[..., Sequence[Any]]
    has_effects: bool = False
    is_ordered: bool = False
    eqn: JaxprEqn | None = None
    moves: bool = False


@dataclass(eq=False)
class Collective:
    """A collective with one operand.

    Attributes:
        primitive: Name of the primitive.
        params: Parameters of the primitive.
        inputs: The operand.
        outputs: The result.
        lines: The user's lines; several if small collectives are packed.
    """

    primitive: str
    params: dict[str, Any]
    inputs: list[Atom]
    outputs: list[Value]
    lines: list[str]
    has_effects: bool = False
    is_ordered: bool = False

    @property
    def operand(self) -> Value:
        """The operand of each replica."""
        (value,) = values_of(self.inputs)
        return value

    @property
    def spans_all(self) -> bool:
        """Whether it is a collective of all replicas, not one within groups."""
        return self.params.get("axis_index_groups") is None

    @property
    def description(self) -> str:
        """Kind and lines, such as `all-reduce at train.py:12 in step`."""
        more = f" and {len(self.lines) - 1} more" if len(self.lines) > 1 else ""
        return f"{kind_of(self.primitive)} at {self.lines[0]}{more}"


@dataclass(eq=False)
class Loop:
    """A loop that contains collectives. The host runs it iteration by iteration.

    Attributes:
        inputs: The values that all iterations read, then the initial carry.
        outputs: The final carry.
        body: Computes the next carry from these inputs.
        test: Computes whether to continue from these inputs; `None` if `trips` is known.
        trips: Number of iterations, if known.
        line: The user's line.
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
    """A branch that contains collectives. Its first input is the index of the branch to run."""

    inputs: list[Atom]
    outputs: list[Value]
    branches: "list[StagedJaxpr]"
    line: str
    has_effects: bool = True
    is_ordered: bool = False


Communication: TypeAlias = Collective | Loop | Branch


@dataclass(eq=False)
class Stage:
    """Computations between two rounds of communication, and the round that follows them.

    Attributes:
        computations: The computations, in order.
        inputs: Values that the stage reads.
        outputs: Values that later stages, or the round that follows, read.
        communications: The round that follows.
        last_read: Values that are not read after this stage.
    """

    computations: list[Computation]
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)
    last_read: list[Value] = field(default_factory=list)


@dataclass(eq=False)
class StagedJaxpr:
    """A program split into stages. The last stage returns all outputs of the program, in order.

    Attributes:
        inputs: Inputs of the program.
        replica_id: The value of the replica's index.
        constants: Values of the constant arrays of the program, with the arrays.
        stages: The stages, in order.
        mirrored_outputs: For each output, whether it is returned as a mirrored array.
    """

    inputs: list[Value]
    replica_id: Value
    constants: list[tuple[Value, Array]]
    stages: list[Stage]
    mirrored_outputs: list[bool]
