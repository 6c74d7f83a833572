"""Checks that the traces of a step for different input shapes execute the same collectives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.base.errors import ReplicaDivergenceError, counted, describe, listing
from mirror._src.jaxprs.collective_eqns import MIRRORING, is_collective
from mirror._src.jaxprs.ensure import ensured_p
from mirror._src.jaxprs.equations import called, jaxpr_of, walk
from mirror._src.jaxprs.marks import Mark
from mirror._src.jaxprs.user_lines import user_line
from mirror._src.passes.staging.ir import Branch, Collective, Loop, StagedJaxpr

_SHAPES = "shapes that differ between replicas"


def join_marks(programs: Sequence[ClosedJaxpr], marks: Sequence[Sequence[Mark]]) -> list[Mark]:
    """Returns the marks of the outputs of a step that was traced for several sets of shapes.

    A value that depends on a shape, such as the length of a replica's batch, is per-replica even if
    it is mirrored within each trace. So an output is mirrored only if all traces compute it by the
    same operations, from mirrored inputs and results of collectives.

    Args:
        programs: One trace per set of shapes.
        marks: The marks of the outputs of each trace.
    """
    table: dict[Any, int] = {}
    numberings = [_Numbering(table) for _ in programs]
    numbers = [n.outputs(program) for n, program in zip(numberings, programs, strict=True)]
    _require_ensured_alike(numberings)
    joined = []
    for candidates, same in zip(zip(*marks, strict=True), zip(*numbers, strict=True), strict=True):
        first = candidates[0]
        origins = [mark.origin for mark in candidates if mark.per_replica]
        is_same = len(set(same)) == 1
        origin = next(iter([*origins, *([] if is_same else [_SHAPES])]), None)
        joined.append(
            Mark(origin, first.source if is_same else None, first.reduced_by, first.assumed)
        )
    return joined


class _Numbering:
    """Value numbering: values that all traces compute in the same way get the same number.

    Two parameters of operations count as equal only if their structure is known to be equal. A
    parameter that cannot be compared equals only itself, so its results are per-replica.

    Args:
        table: The numbers of known values, shared between traces.
    """

    def __init__(self, table: dict[Any, int]) -> None:
        self.table = table
        self.num_collectives = 0
        self.ensured: list[tuple[JaxprEqn, list[int]]] = []
        self._alive: list[Any] = []  # an `id` is unique only while its object is alive

    def outputs(self, program: ClosedJaxpr) -> list[int]:
        inputs = [self.number("input", i) for i in range(len(program.jaxpr.invars))]
        return self.walk(program, inputs)

    def number(self, *key: Any) -> int:
        return self.table.setdefault(key, len(self.table))

    def walk(self, program: ClosedJaxpr | Jaxpr, arguments: Sequence[int]) -> list[int]:
        return walk(program, arguments, self.constant, self.equation)

    def constant(self, value: Any) -> int:
        if isinstance(value, jax.Array):
            self._alive.append(value)
            return self.number("array", id(value))
        array = np.asarray(value)
        return self.number("literal", array.dtype, array.shape, array.tobytes())

    def equation(self, eqn: JaxprEqn, inputs: list[int]) -> list[int]:
        count = range(len(eqn.outvars))
        if eqn.primitive is ensured_p:
            self.ensured.append((eqn, inputs))
            return inputs
        if is_collective(eqn):
            self.num_collectives += 1
            # An all-reduce or all-gather is mirrored whatever the operands are.
            operands = () if eqn.primitive.name in MIRRORING else tuple(inputs)
            return [self.number("collective", self.num_collectives, *operands, i) for i in count]
        if any(hasattr(atom.aval, "inner_aval") for atom in (*eqn.invars, *eqn.outvars)):
            # The variable of a `Ref` does not determine what was last written to it.
            return [self.number(self.identity(eqn), i) for i in count]
        program = called(eqn)
        if program is not None:
            return self.walk(program, inputs)
        key = self.key(eqn, inputs)
        return [self.number(key, f"output {i}") for i in count]

    def key(self, eqn: JaxprEqn, inputs: Sequence[Any]) -> Any:
        """Returns a key that is equal for operations that compute the same results."""
        return (eqn.primitive, self.params(eqn.params), *inputs)

    def params(self, params: Mapping[str, Any]) -> Any:
        """Returns a hashable form of an operation's parameters."""
        return tuple((name, self.form(params[name])) for name in sorted(params))

    def form(self, value: Any) -> Any:
        """Returns a hashable form of a parameter, equal only for parameters of the same meaning.

        A function, such as a host callback, may depend on the shapes of its trace. So it equals
        only itself.
        """
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self.form_of_program(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self.form, value))
        if isinstance(value, Mapping):
            return type(value), tuple((key, self.form(inner)) for key, inner in value.items())
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self.constant(value)
        if isinstance(value, float | complex):  # 0.0 == -0.0, and NaN != NaN
            return type(value), repr(value)
        try:
            hash(value)
        except TypeError:
            return self.identity(value)
        return type(value), value

    def form_of_program(self, program: ClosedJaxpr | Jaxpr) -> Any:
        """Returns a hashable form of an inner program, with variables numbered by occurrence."""
        jaxpr = jaxpr_of(program)
        consts = program.consts if isinstance(program, ClosedJaxpr) else ()
        numbers: dict[Any, Any] = {}

        def number(var: Any) -> Any:
            return numbers.setdefault(var, ("variable", len(numbers)))

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return "literal", self.constant(atom.val), self.form(atom.aval)
            return number(atom)

        def declare(var: Any) -> Any:
            return number(var), self.form(var.aval)

        return (
            "program",
            tuple(map(self.constant, consts)),
            tuple(map(declare, (*jaxpr.constvars, *jaxpr.invars))),
            tuple(
                (self.key(eqn, tuple(map(read, eqn.invars))), tuple(map(declare, eqn.outvars)))
                for eqn in jaxpr.eqns
            ),
            tuple(map(read, jaxpr.outvars)),
        )

    def identity(self, value: Any) -> Any:
        """Returns a key that is equal only for the same object."""
        self._alive.append(value)
        return "identity", id(value)


def _require_ensured_alike(numberings: Sequence[_Numbering]) -> None:
    for (eqn, mine), *others in zip(*(n.ensured for n in numberings), strict=False):
        numbers = zip(mine, *(theirs for _, theirs in others), strict=True)
        pairs = zip(eqn.params["names"], numbers, strict=True)
        differing = [name for name, same in pairs if len(set(same)) > 1]
        if differing:
            raise ReplicaDivergenceError(
                f"ensure_mirrored at {user_line(eqn)}: replicas may hold different values of\n"
                f"{listing(differing)}\nThey are computed from {_SHAPES}. Reduce each value that "
                'depends on a shape: n = mirror.all_reduce("sum", x.shape[0])'
            )


def require_alike(staged: Sequence[StagedJaxpr], replicas: Sequence[Sequence[int]]) -> None:
    """Rejects a step whose replicas would execute different collectives for different shapes.

    Args:
        staged: The staged step for each set of shapes.
        replicas: The replicas that have those shapes.

    Raises:
        ValueError: If the collectives differ. The message names the collective and the replicas.
    """
    params = _Numbering({}).params
    for other, ids in zip(staged[1:], replicas[1:], strict=True):
        _require_alike(staged[0], other, replicas[0][0], ids[0], params)


def _require_alike(
    one: StagedJaxpr,
    other: StagedJaxpr,
    first: int,
    second: int,
    params: Callable[[Mapping[str, Any]], Any],
) -> None:
    mine = [communication for stage in one.stages for communication in stage.communications]
    theirs = [communication for stage in other.stages for communication in stage.communications]
    for a, b in zip(mine, theirs, strict=False):
        if _signature(a, params) != _signature(b, params):
            raise ValueError(
                f"Replicas {first} and {second} have different input shapes and would execute "
                f"different collectives: {_describe(a, first)}; {_describe(b, second)}. Operands "
                "of a collective must have the same shape on all replicas. Reduce over the batch "
                "axis first, or use mirror.all_gather(x), which supports unequal lengths."
            )
        for inner, counterpart in zip(_inner(a), _inner(b), strict=True):
            _require_alike(inner, counterpart, first, second, params)
    per_stage = [[len(stage.communications) for stage in staged.stages] for staged in (one, other)]
    if per_stage[0] != per_stage[1]:
        raise ValueError(
            f"Replicas {first} and {second} have different input shapes and would execute "
            f"different collectives: {counted(len(mine), 'collective')} on one, {len(theirs)} on "
            "the other, or in a different order. Do not make a collective conditional on a shape."
        )


def _signature(communication: Any, params: Callable[[Mapping[str, Any]], Any]) -> Any:
    if isinstance(communication, Collective):
        aval = communication.operand.aval
        return communication.primitive, params(communication.params), aval.shape, aval.dtype
    if isinstance(communication, Loop):
        return "loop", communication.trips, communication.test is None
    return "branch", len(communication.branches)


def _inner(communication: Any) -> list[StagedJaxpr]:
    if isinstance(communication, Loop):
        return [communication.body, *([communication.test] if communication.test else [])]
    return communication.branches if isinstance(communication, Branch) else []


def _describe(communication: Any, replica: int) -> str:
    if isinstance(communication, Collective):
        operand = describe(communication.operand.aval)
        return f"{operand} in the {communication.description} on replica {replica}"
    if isinstance(communication, Branch):
        kind = "a branch"
    else:
        kind = f"a loop of {communication.trips} trips" if communication.trips else "a loop"
    return f"{kind} at {communication.line} on replica {replica}"
