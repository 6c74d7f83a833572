"""Origins of the values of a program: probabilities, lost updates, and noise that is summed.

Noise is summed if random numbers are added to values that only go into an all-reduce. Private
gradients are an example. With the same key, all replicas add the same numbers. With a key per
replica, the sum contains the noise of every replica, which is too much: it belongs after the
all-reduce. Any other noise, as in dropout and augmentation, needs a key per replica.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from mirror._src.jaxprs.collective_eqns import (
    ALL_REDUCES,
    has_effects,
    is_replica_source,
    name_of,
    spans_whole_axis,
)
from mirror._src.jaxprs.equations import (
    StraightInterpreter,
    called,
    inner_programs,
    jaxpr_of,
    line_within,
)
from mirror._src.jaxprs.marks import ensured_p
from mirror._src.jaxprs.primitives import (
    ADDITION,
    CASTING,
    ELEMENTWISE,
    JOINING,
    LINEAR,
    PASSING,
    PICKING,
    SAMPLER,
    SHAPING,
    SIMPLE,
    op_of,
)

_MOVING = PASSING | SHAPING | JOINING
_KEEPS_SAMPLES = _MOVING | ELEMENTWISE | SAMPLER
_LINEAR = _MOVING | CASTING | ADDITION | LINEAR | {"mul", "div"}

_Lines = frozenset[str]
_NONE: _Lines = frozenset()


def summed_noise(program: ClosedJaxpr, per_replica: Sequence[bool]) -> set[str]:
    """Returns the lines that sample numbers of which every use is summed over the replicas.

    Args:
        program: The replica program.
        per_replica: For each input, whether replicas may hold different values.
    """
    walk = _NoisePass()
    outputs = walk.call(program, [_Facts(differs) for differs in per_replica])
    return walk.summed - walk.other.union(*(facts.carried for facts in outputs))


class _Facts(NamedTuple):
    """Facts about a value.

    Attributes:
        differs: Whether it is per-replica.
        samples: For a mirrored value, the lines that sampled the numbers it was computed from.
        carried: For a per-replica value, the lines of the noise that was added to it.
    """

    differs: bool = False
    samples: _Lines = frozenset()
    carried: _Lines = frozenset()


@dataclass(eq=False)
class _NoisePass(StraightInterpreter[_Facts]):
    """Search in one program. Noise inside loops and branches does not count as summed.

    Attributes:
        summed: Lines of the noise that is summed over the replicas.
        other: Lines of the noise that is used in another way.
    """

    summed: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)

    def constant(self, _: Any) -> _Facts:
        return _Facts()

    def leaf(self, eqn: JaxprEqn, operands: list[_Facts]) -> list[_Facts]:
        return [self._result(eqn, operands)] * len(eqn.outvars)

    def _result(self, eqn: JaxprEqn, operands: list[_Facts]) -> _Facts:
        name = name_of(eqn)
        samples = _NONE.union(*(each.samples for each in operands))
        carried = _NONE.union(*(each.carried for each in operands))
        if name in ALL_REDUCES:
            (self.summed if op_of(name) == "sum" else self.other).update(carried)
            return _Facts()
        if not any(each.differs for each in operands) and not is_replica_source(eqn):
            if name in SAMPLER:
                samples = frozenset({line_within(eqn, self.within)})
            return _Facts(samples=samples if name in _KEEPS_SAMPLES else _NONE)
        if name in _LINEAR and _is_linear(name, operands):
            if name in ADDITION:
                carried |= samples
            else:
                self.other |= samples
            return _Facts(True, carried=carried)
        self.other |= samples | carried
        return _Facts(True)


def _is_linear(name: str, operands: Sequence[_Facts]) -> bool:
    """Whether an operation is linear in its per-replica operands."""
    if name not in ("mul", "div"):
        return True
    differ = [each.differs for each in operands]
    return differ == [True, False] or (name == "mul" and differ == [False, True])


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
    walk = _Pass()
    inputs = [_Value() for _ in program.jaxpr.invars]
    outputs = walk.call(program, inputs)
    positions = {value: i for i, value in enumerate(inputs)}
    reduced: dict[_Value, _Value] = {}
    updates: list[tuple[_Value, _Value, _Value]] = []
    for value in walk.values:
        assert value.eqn is not None
        source = next((reduced[each] for each in value.operands if each in reduced), None)
        if value.name in ALL_REDUCES and spans_whole_axis(value.eqn):
            source = value
        if source is None:
            continue
        reduced[value] = source
        if value.name in ADDITION:
            olds = [each for each in value.operands if each in positions]
            shapes = [program.jaxpr.invars[positions[old]].aval for old in olds]
            pairs = zip(olds, shapes, strict=True)
            updates += [(value, old, source) for old, aval in pairs if _fits(value.eqn, aval)]
    if not updates:
        return []
    effects = [value for value in walk.values if value.eqn and has_effects(value.eqn.effects)]
    live = _live([*outputs, *effects])
    kept = {old for value, old, _ in updates if value in live}
    return [
        LostUpdate(positions[old], source.line, value.line)
        for value, old, source in updates
        if old not in kept and value not in live
    ]


def _may_lose_sums(jaxpr: Jaxpr, are_used: Sequence[bool]) -> bool:
    """Whether a sum may reach neither an output that is used nor an effect."""
    used_outputs = itertools.compress(jaxpr.outvars, are_used)
    live = {atom for atom in used_outputs if not isinstance(atom, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update([atom for atom in eqn.invars if not isinstance(atom, Literal)])
        elif eqn.primitive.name in ADDITION:
            return True
        if eqn.primitive.name in SIMPLE:
            continue
        is_call, used = called(eqn) is not None, [var in live for var in eqn.outvars]
        for inner in map(jaxpr_of, inner_programs(eqn.params.values())):  # or a loop or branch
            reached = used if is_call else [True] * len(inner.outvars)
            if not (is_call or all(used)) or _may_lose_sums(inner, reached):
                return True
    return False


@dataclass(eq=False)
class _Value:
    """A value, and where it comes from.

    Attributes:
        eqn: The operation that computes it; `None` for an input or a constant.
        operands: The operands of the operation.
        within: The calls around it, outermost first.
    """

    eqn: JaxprEqn | None = None
    operands: Sequence["_Value"] = ()
    within: tuple[JaxprEqn, ...] = ()

    @property
    def name(self) -> str:
        """Name of the primitive; empty for an input or a constant."""
        return self.eqn.primitive.name if self.eqn is not None else ""

    @property
    def line(self) -> str:
        """The user's line that computes it."""
        assert self.eqn is not None
        return line_within(self.eqn, self.within)


@dataclass(eq=False)
class _Pass(StraightInterpreter[_Value]):
    """Records the values of one program. Loops and branches are operations.

    Attributes:
        values: The results of all operations, in order.
    """

    values: list[_Value] = field(default_factory=list)
    passing = frozenset({ensured_p.name})  # which computes nothing

    def constant(self, _: Any) -> _Value:
        return _Value()

    def leaf(self, eqn: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        num = len(eqn.outvars)  # one without results may have effects
        results = [_Value(eqn, operands, tuple(self.within)) for _ in range(num or 1)]
        self.values += results
        return results[:num]


def _fits(eqn: JaxprEqn, old: Any) -> bool:
    """Whether the result could replace an input: an array of floats of the same shape."""
    new: Any = eqn.outvars[0].aval
    return bool(new.shape == old.shape and new.dtype.kind not in "biu")


def _live(roots: Iterable[_Value]) -> set[_Value]:
    """Returns the values that others are computed from."""
    live, waiting = set[_Value](), list(roots)
    while waiting:
        value = waiting.pop()
        if value not in live:
            live.add(value)
            waiting += value.operands
    return live


def activation_of(program: ClosedJaxpr | Jaxpr, name: str) -> str | None:
    """Returns the function that computed a value of `checkpoint_name`: "softmax" or "sigmoid"."""
    walk = _Pass()
    walk.call(program, [_Value() for _ in jaxpr_of(program).invars])
    for value in walk.values:
        assert value.eqn is not None
        if value.name == "name" and value.eqn.params["name"] == name:
            return _activation(value.operands[0])
        for inner in inner_programs(value.eqn.params.values()):
            if (found := activation_of(inner, name)) is not None:
                return found
    return None


def _activation(value: _Value) -> str | None:
    value = _source(value)
    if value.name == "logistic":
        return "sigmoid"
    if value.name != "div":
        return None
    above, below = map(_source, value.operands)
    if below.name == "reduce_sum" and above.name == "exp":
        summed = _source(below.operands[0])
        is_same = summed.name == "exp" and summed.operands[0] is above.operands[0]
        return "softmax" if is_same else None
    if below.name == "add" and not above.name:  # 1 / (1 + exp(-x))
        names = [found.name for each in below.operands if (found := _source(each)).name]
        return "sigmoid" if names == ["exp"] else None
    return None


def _source(value: _Value) -> _Value:
    """Returns the value before changes of its shape or dtype."""
    while value.name in _UNCHANGED:
        value = value.operands[0]
    return value
