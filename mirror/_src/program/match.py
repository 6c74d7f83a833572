"""Checks that the traces of a step for different input shapes execute the same collectives."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.program.collective_eqns import is_collective
from mirror._src.program.ensure import ensured_p
from mirror._src.program.jaxprs import called, jaxpr_of, walk
from mirror._src.program.marks import Mark
from mirror._src.program.primitives import MIRRORING
from mirror._src.program.staging.ir import Branch, Collective, Loop, StagedJaxpr
from mirror._src.program.user_lines import user_line
from mirror._src.utils.errors import ReplicaDivergenceError, describe, listing

_SHAPES = "shapes that differ between the replicas"


def join_marks(programs: Sequence[ClosedJaxpr], marks: Sequence[Sequence[Mark]]) -> list[Mark]:
    """What is known of each output of a step that was traced for several sets of shapes.

    What depends on a shape, the length of a replica's batch, say, is per-replica, whatever each
    trace says by itself. So an output is mirrored only if all traces compute it alike: by the same
    operations from mirrored inputs and from what the collectives gave.

    Args:
        programs: a trace for each set of shapes.
        marks: for each trace, what the proof says of its outputs.
    """
    table: dict[Any, int] = {}
    counters = [_Numbering(table) for _ in programs]
    numbers = [c.outputs(program) for c, program in zip(counters, programs, strict=True)]
    _require_ensured_alike(counters)
    joined = []
    for of_output, same in zip(zip(*marks, strict=True), zip(*numbers, strict=True), strict=True):
        origins = [mark.origin for mark in of_output if mark.per_replica]
        alike = len(set(same)) == 1
        origin = next(iter([*origins, *([] if alike else [_SHAPES])]), None)
        source = of_output[0].source if alike else None
        joined.append(Mark(origin, source, of_output[0].behind, of_output[0].assumed))
    return joined


class _Numbering:
    """Gives equal numbers to values that are computed alike, in whatever trace."""

    def __init__(self, table: dict[Any, int]) -> None:
        self.table = table
        self.num_collectives = 0
        self.ensured: list[tuple[JaxprEqn, list[int]]] = []
        self.kept: list[Any] = []

    def outputs(self, program: ClosedJaxpr) -> list[int]:
        inputs = [self.number("input", i) for i in range(len(program.jaxpr.invars))]
        return self.walk(program, inputs)

    def number(self, *key: Any) -> int:
        return self.table.setdefault(key, len(self.table))

    def walk(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[int]) -> list[int]:
        return walk(program, arguments, self.held, self.equation)

    def held(self, value: Any) -> int:
        if isinstance(value, jax.Array):
            self.kept.append(value)
            return self.number("array", id(value))
        array = np.asarray(value)
        return self.number("literal", str(array.dtype), array.shape, array.tobytes())

    def equation(self, eqn: JaxprEqn, inputs: list[int]) -> list[int]:
        count = range(len(eqn.outvars))
        if eqn.primitive is ensured_p:
            self.ensured.append((eqn, inputs))
            return inputs
        if is_collective(eqn):
            self.num_collectives += 1
            # What reduces or gathers gives all replicas the same, whatever each has brought.
            brought = () if eqn.primitive.name in MIRRORING else tuple(inputs)
            return [self.number("collective", self.num_collectives, *brought, i) for i in count]
        if any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars)):
            # A `Ref` holds what was written to it last, which its variable does not show.
            return [self.number(self.alone(eqn), i) for i in count]
        program = called(eqn)
        if program is not None:
            return self.walk(program, inputs)
        key = self.key(eqn, inputs)
        return [self.number(key, f"output {i}") for i in count]

    def key(self, eqn: JaxprEqn, inputs: Sequence[Any]) -> Any:
        """What two operations have in common exactly if they compute alike.

        Parameters are compared by structure. A function of the user's, that of a host callback,
        say, may know the shapes of its trace: it is equal to itself alone.
        """
        params = sorted(eqn.params.items())
        return (
            eqn.primitive,
            tuple((name, self.form(value)) for name, value in params),
            *inputs,
        )

    def form(self, value: Any) -> Any:
        """A parameter as something hashable, equal for parameters of the same meaning."""
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self.form_of_program(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self.form, value))
        if isinstance(value, Mapping):
            return type(value), tuple((key, self.form(inner)) for key, inner in value.items())
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self.held(value)
        if isinstance(value, float | complex):
            return type(value), repr(value)
        try:
            hash(value)
        except TypeError:
            return self.alone(value)
        return type(value), value

    def form_of_program(self, program: ClosedJaxpr | Jaxpr) -> Any:
        """An inner program, its variables numbered in the order in which they occur."""
        jaxpr = jaxpr_of(program)
        consts = program.consts if isinstance(program, ClosedJaxpr) else ()
        numbers: dict[Any, Any] = {}

        def place(var: Any) -> Any:
            return numbers.setdefault(var, ("variable", len(numbers)))

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return "literal", self.held(atom.val), atom.aval.str_short()
            return place(atom)

        def aval(var: Any) -> Any:
            return place(var), var.aval.str_short(), getattr(var.aval, "weak_type", False)

        return (
            "program",
            tuple(map(self.held, consts)),
            tuple(map(aval, (*jaxpr.constvars, *jaxpr.invars))),
            tuple(
                (self.key(eqn, tuple(map(read, eqn.invars))), tuple(map(aval, eqn.outvars)))
                for eqn in jaxpr.eqns
            ),
            tuple(map(read, jaxpr.outvars)),
        )

    def alone(self, value: Any) -> Any:
        """Something that is equal to nothing else."""
        self.kept.append(value)  # an id is one value's only while the value lives
        return "alone", id(value)


def _require_ensured_alike(counters: Sequence[_Numbering]) -> None:
    for (eqn, mine), *others in zip(*(counter.ensured for counter in counters), strict=False):
        numbers = zip(mine, *(theirs for _, theirs in others), strict=True)
        pairs = zip(eqn.params["names"], numbers, strict=True)
        differing = [name for name, same in pairs if len(set(same)) > 1]
        if differing:
            raise ReplicaDivergenceError(
                f"ensure_mirrored at {user_line(eqn)}: replicas may hold different values of\n"
                f"{listing(differing)}\ncomputed from {_SHAPES}. Reduce what depends on a shape: "
                'n = mirror.get_replica_context().all_reduce("sum", x.shape[0])'
            )


def require_alike(staged: Sequence[StagedJaxpr], replicas: Sequence[Sequence[int]]) -> None:
    """Refuses a step in which replicas of different shapes would communicate differently.

    Args:
        staged: the step cut, for each set of shapes.
        replicas: which replicas have those.

    Raises:
        ValueError: they would; the message names the collective and the replicas.
    """
    for other, ids in zip(staged[1:], replicas[1:], strict=True):
        _require_alike(staged[0], other, replicas[0][0], ids[0])


def _require_alike(one: StagedJaxpr, other: StagedJaxpr, first: int, second: int) -> None:
    mine = [communication for stage in one.stages for communication in stage.communications]
    theirs = [communication for stage in other.stages for communication in stage.communications]
    for a, b in zip(mine, theirs, strict=False):
        if _signature(a) != _signature(b):
            raise ValueError(
                f"Replicas {first} and {second} differ in shape, and communicate differently: "
                f"{_brings(a, first)}; {_brings(b, second)}. What travels must have one shape on "
                "all replicas: reduce over the batch first, or join unequal lengths by "
                "mirror.get_replica_context().all_gather(x)."
            )
        for inner, counterpart in zip(_inner(a), _inner(b), strict=True):
            _require_alike(inner, counterpart, first, second)
    per_stage = [[len(stage.communications) for stage in staged.stages] for staged in (one, other)]
    if per_stage[0] != per_stage[1]:
        raise ValueError(
            f"Replicas {first} and {second} have different input shapes and would execute "
            f"different collectives: {len(mine)} collectives or loops on one, {len(theirs)} on "
            "the other, or in a different order. Do not make a collective conditional on a shape."
        )


def _signature(communication: Any) -> Any:
    if isinstance(communication, Collective):
        params = sorted((k, str(v)) for k, v in communication.params.items())
        return (
            communication.kind,
            params,
            communication.operand.aval.shape,
            communication.operand.aval.dtype,
        )
    if isinstance(communication, Loop):
        return "loop", communication.trips, communication.test is None
    return "branch", len(communication.branches)


def _inner(communication: Any) -> list[StagedJaxpr]:
    if isinstance(communication, Loop):
        return [communication.body, *([communication.test] if communication.test else [])]
    return communication.branches if isinstance(communication, Branch) else []


def _brings(communication: Any, replica: int) -> str:
    if isinstance(communication, Collective):
        operand = describe(communication.operand.aval)
        return f"the {communication.in_words} is of {operand} on replica {replica}"
    what = (
        f"a loop of {communication.trips} trips"
        if isinstance(communication, Loop) and communication.trips
        else "a choice"
    )
    return f"at {communication.line} there is {what} on replica {replica}"
