"""The parts of a staged program, the stage of each, and what is kept from one stage to the next.

The parts are computations, collectives, loops, branches and stages.
"""

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
class _Communication:
    """A collective, loop or branch.

    Attributes:
        inputs: Its operands.
        outputs: Its results.
        has_effects: Whether it runs even if its results are not used.
        is_ordered: Whether its order among computations matters.
    """

    inputs: list[Atom]
    outputs: list[Value]
    has_effects = True
    is_ordered = False


@dataclass(eq=False)
class Collective(_Communication):
    """A collective with one operand.

    Attributes:
        primitive: Name of the primitive.
        params: Parameters of the primitive.
        lines: The user's lines; several if small collectives are packed.
    """

    primitive: str
    params: dict[str, Any]
    lines: list[str]
    has_effects = False

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
class Loop(_Communication):
    """A loop that contains collectives. The host runs it iteration by iteration.

    Its operands are the values that all iterations read, then the initial carry, and its results
    the final carry.

    Attributes:
        body: Computes the next carry from these inputs.
        test: Computes whether to continue from these inputs; `None` if `trips` is known.
        trips: Number of iterations, if known.
        line: The user's line.
    """

    body: "StagedJaxpr"
    test: "StagedJaxpr | None"
    trips: int
    line: str


@dataclass(eq=False)
class Branch(_Communication):
    """A branch that contains collectives. Its first input is the index of the branch to run."""

    branches: "list[StagedJaxpr]"
    line: str


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


def drop_unused(
    steps: Sequence[Computation | Communication], outputs: Sequence[Atom]
) -> list[Computation | Communication]:
    """Returns the steps without those that have no effects and whose results are not used."""
    used, kept = set(values_of(outputs)), list[Computation | Communication]()
    for step in reversed(steps):
        if step.has_effects or not used.isdisjoint(step.outputs):
            kept.append(step)
            used.update(values_of(step.inputs))
    return kept[::-1]


def levels_of(steps: Sequence[Computation | Communication]) -> dict[Any, int]:
    """Returns the number of rounds of communication that each step and value depends on."""
    levels: dict[Any, int] = {}
    ordered = 0
    for step in steps:
        level = max((levels.get(value, 0) for value in values_of(step.inputs)), default=0)
        if step.is_ordered:
            level = ordered = max(level, ordered)
        levels[step] = level
        levels.update(dict.fromkeys(step.outputs, level + (not isinstance(step, Computation))))
    return levels


def schedule_stages(
    steps: list[Computation | Communication], outputs: Sequence[Atom]
) -> list[Stage]:
    """Returns the stages of a program."""
    levels = levels_of(steps)
    last = max([0, *(levels[value] for step in steps for value in step.outputs)])
    _delay(steps, outputs, levels, last)
    stages = [Stage([]) for _ in range(last + 1)]
    for step in steps:
        stage = stages[levels[step]]
        if isinstance(step, Computation):
            stage.computations.append(step)
        else:
            stage.communications.append(step)
    _connect(stages, outputs)
    return stages


# Why not run every computation as early as possible: a momentum decay, m = 0.9 * m, does not depend
# on the gradients, so it would run in the first stage, and its result, as large as the state, would
# stay alive across the all-reduce. A computation is therefore delayed to the stage that first reads
# its results, if the inputs that must be kept for it are smaller than these results. In the example
# the update reads 0.9 * m after the all-reduce. Only m must be kept, which is stored anyway.
def _delay(
    steps: list[Computation | Communication],
    outputs: Sequence[Atom],
    levels: dict[Any, int],
    last: int,
) -> None:
    """Moves computations to later levels where that keeps fewer bytes between stages."""
    # Backward: the latest level at which each computation is possible.
    latest: dict[Value, int] = dict.fromkeys(values_of(outputs), last)
    possible: dict[Computation, int] = {}
    for step in reversed(steps):
        level = levels[step]
        if isinstance(step, Computation) and not step.has_effects:
            level = possible[step] = min([latest.get(value, last) for value in step.outputs])
        for value in values_of(step.inputs):
            latest[value] = min(latest.get(value, last), level)
    # Forward: a computation moves there unless more bytes of its inputs must then be kept. An input
    # of the program, or a result of a collective, is kept anyway.
    computed_at: dict[Value, int] = {}
    for step in steps:
        if isinstance(step, Computation) and step in possible:
            values = values_of(step.inputs)
            soonest = max((computed_at.get(v, levels.get(v, 0)) for v in values), default=0)
            kept = {v for v in values if computed_at.get(v, last) < possible[step]}
            kept_bytes = sum(value.num_bytes for value in kept)
            is_smaller = kept_bytes < sum(value.num_bytes for value in step.outputs)
            levels[step] = max(soonest, possible[step] if is_smaller else 0)
            computed_at.update(dict.fromkeys(step.outputs, levels[step]))
        elif isinstance(step, Computation):
            computed_at.update(dict.fromkeys(step.outputs, levels[step]))


def _connect(stages: list[Stage], outputs: Sequence[Atom]) -> None:
    """Sets the inputs, outputs and last reads of the stages."""
    later: set[Value] = set()
    for stage in reversed(stages):
        is_last = stage is stages[-1]
        computed = {value: None for step in stage.computations for value in step.outputs}
        after = set(later)
        sent = {value for step in stage.communications for value in values_of(step.inputs)}
        stage.outputs = list(outputs) if is_last else [v for v in computed if v in after | sent]
        read = [value for step in stage.computations for value in values_of(step.inputs)]
        read += values_of(outputs) if is_last else []
        stage.inputs = list(dict.fromkeys(value for value in read if value not in computed))
        kept = {*stage.inputs, *sent, *values_of(stage.outputs)}
        stage.last_read = [value for value in kept if value not in after]
        later |= set(stage.inputs) | sent
