"""Origins of the values of a program: outputs that are probabilities, and lost updates."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.jaxprs.atoms import Atom, Value, values_of
from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, spans_whole_axis
from mirror._src.jaxprs.equations import called, inner_programs, jaxpr_of
from mirror._src.jaxprs.flat import FlatProgram, Operation, flatten
from mirror._src.jaxprs.primitives import ADDITION, CASTING, PASSING, PICKING, SHAPING
from mirror._src.jaxprs.user_lines import line_within

_UNCHANGED = PASSING | SHAPING | PICKING | CASTING


class LostUpdate(NamedTuple):
    """A new value of an input that was computed from an all-reduce and reaches no output.

    Attributes:
        input: Position of the input.
        collective: The user's line of the all-reduce.
        line: The user's line that computes the new value.
    """

    input: int
    collective: str
    line: str


def lost_updates(program: ClosedJaxpr) -> list[LostUpdate]:
    """Returns the updates of inputs, such as `w - 0.1 * gradient`, that reach no output.

    An input that the step also returns changed, in another way, is not lost.
    """
    outputs = program.jaxpr.outvars
    if not _may_lose_sums(program.jaxpr, [True] * len(outputs)):  # the usual case, and fast
        return []
    flat = _flat(program)
    positions = {value: i for i, value in enumerate(flat.inputs)}
    reduced: dict[Value, Operation] = {}
    updates: list[tuple[Operation, Value, Operation]] = []
    for operation in flat.operations:
        operands = values_of(operation.inputs)
        source = next((reduced[value] for value in operands if value in reduced), None)
        if operation.name in ALL_REDUCES and spans_whole_axis(operation.eqn):
            source = operation
        if source is None:
            continue
        reduced.update(dict.fromkeys(operation.outputs, source))
        if operation.name in ADDITION:
            olds = [value for value in operands if value in positions]
            updates += [(operation, old, source) for old in olds if _fits(operation, old)]
    if not updates:
        return []
    live = _live(flat)
    kept = {old for operation, old, _ in updates if live.issuperset(operation.outputs)}
    return [
        LostUpdate(positions[old], _line(source), _line(operation))
        for operation, old, source in updates
        if old not in kept and live.isdisjoint(operation.outputs)
    ]


def _may_lose_sums(jaxpr: Jaxpr, are_used: Sequence[bool]) -> bool:
    """Whether a sum may reach neither an output that is used nor an effect."""
    live = set(_variables(itertools.compress(jaxpr.outvars, are_used)))
    for eqn in reversed(jaxpr.eqns):
        used = [var in live for var in eqn.outvars]
        if any(used) or eqn.effects:
            live.update(_variables(eqn.invars))
        elif eqn.primitive.name in ADDITION:
            return True
        program = called(eqn)
        if program is not None:
            if _may_lose_sums(jaxpr_of(program), used):
                return True
            continue
        for inner in map(jaxpr_of, inner_programs(eqn.params.values())):  # a loop or branch
            if not all(used) or _may_lose_sums(inner, [True] * len(inner.outvars)):
                return True
    return False


def _variables(atoms: Iterable[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _fits(operation: Operation, old: Value) -> bool:
    """Whether the result could replace the input: an array of floats of the same shape."""
    new = operation.outputs[0].aval
    return bool(new.shape == old.aval.shape and new.dtype.kind not in "biu")


def _live(flat: FlatProgram) -> set[Value]:
    """Returns the values that outputs or effects depend on."""
    live = set(values_of(flat.outputs))
    for operation in reversed(flat.operations):
        if operation.has_effects or not live.isdisjoint(operation.outputs):
            live.update(values_of(operation.inputs))
    return live


def _line(operation: Operation) -> str:
    return line_within(operation.eqn, operation.around)


def _flat(program: ClosedJaxpr | Jaxpr) -> FlatProgram:
    return flatten([program], lambda eqn, _: called(eqn) is not None)


def activation_of(program: ClosedJaxpr | Jaxpr, name: str) -> str | None:
    """Returns the function that computed a value of `checkpoint_name`: "softmax" or "sigmoid"."""
    flat = _flat(program)
    producers = {value: op for op in flat.operations for value in op.outputs}
    for operation in flat.operations:
        if operation.name == "name" and operation.eqn.params["name"] == name:
            return _activation(operation.inputs[0], producers)
        for inner in _loops(operation.eqn):
            if (found := activation_of(inner, name)) is not None:
                return found
    return None


def _loops(eqn: JaxprEqn) -> Iterator[ClosedJaxpr | Jaxpr]:
    if called(eqn) is None:
        yield from inner_programs(eqn.params.values())


def _activation(atom: Atom, producers: dict[Value, Operation]) -> str | None:
    operation = _source(atom, producers)
    if operation is None:
        return None
    if operation.name == "logistic":
        return "sigmoid"
    if operation.name != "div":
        return None
    above, below = (_source(each, producers) for each in operation.inputs)
    if below is None:
        return None
    if below.name == "reduce_sum" and above is not None and above.name == "exp":
        summed = _source(below.inputs[0], producers)
        is_same = summed is not None and summed.name == "exp" and summed.inputs == above.inputs
        return "softmax" if is_same else None
    if below.name == "add" and above is None:  # 1 / (1 + exp(-x))
        names = [op.name for each in below.inputs if (op := _source(each, producers))]
        return "sigmoid" if names == ["exp"] else None
    return None


def _source(atom: Atom, producers: dict[Value, Operation]) -> Operation | None:
    """Returns the operation that computed a value, before changes of its shape or dtype."""
    while isinstance(atom, Value) and (operation := producers.get(atom)) is not None:
        if operation.name not in _UNCHANGED:
            return operation
        atom = operation.inputs[0]
    return None
