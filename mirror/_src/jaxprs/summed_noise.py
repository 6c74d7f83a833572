"""Noise that is summed: random numbers added to values that only go into an all-reduce.

Private gradients are an example. With the same key, all replicas add the same numbers. With a key
per replica, the sum contains the noise of every replica, which is too much: it belongs after the
all-reduce. Any other noise, as in dropout and augmentation, needs a key per replica.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, is_replica_source
from mirror._src.jaxprs.equations import StraightInterpreter
from mirror._src.jaxprs.primitives import (
    ADDITION,
    CASTING,
    ELEMENTWISE,
    JOINING,
    LINEAR,
    PASSING,
    SAMPLER,
    SHAPING,
    op_of,
)
from mirror._src.jaxprs.user_lines import line_within

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
    walk = _Pass()
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


class _Pass(StraightInterpreter[_Facts]):
    """Search in one program. Noise inside loops and branches does not count as summed.

    Attributes:
        summed: Lines of the noise that is summed over the replicas.
        other: Lines of the noise that is used in another way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.summed: set[str] = set()
        self.other: set[str] = set()

    def constant(self, _: Any) -> _Facts:
        return _Facts()

    def leaf(self, eqn: JaxprEqn, operands: list[_Facts]) -> list[_Facts]:
        if eqn.primitive.name in PASSING:
            return operands
        return [self._result(eqn, operands)] * len(eqn.outvars)

    def _result(self, eqn: JaxprEqn, operands: list[_Facts]) -> _Facts:
        name = eqn.primitive.name
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
