"""Noise that is summed: random numbers added to values that only go into an all-reduce.

Private gradients are an example. With the same key, all replicas add the same numbers. With a key
per replica, the sum contains the noise of every replica, which is too much: it belongs after the
all-reduce. Any other noise, as in dropout and augmentation, needs a key per replica.
"""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr

from mirror._src.jaxprs.atoms import Value, values_of
from mirror._src.jaxprs.collective_eqns import ALL_REDUCES, is_replica_source
from mirror._src.jaxprs.equations import called
from mirror._src.jaxprs.flat import Operation, flatten
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


def summed_noise(program: ClosedJaxpr, per_replica: Sequence[bool]) -> set[str]:
    """Returns the lines that sample numbers of which every use is summed over the replicas.

    Args:
        program: The replica program.
        per_replica: For each input, whether replicas may hold different values.
    """
    flat = flatten([program], lambda eqn, _: called(eqn) is not None)
    differing = {value for value, own in zip(flat.inputs, per_replica, strict=True) if own}
    noise: dict[Value, _Lines] = {}  # mirrored values that were computed from samples
    carriers: dict[Value, _Lines] = {}  # per-replica values to which noise was added
    summed: set[str] = set()
    other: set[str] = set()
    for operation in flat.operations:
        name, operands = operation.name, values_of(operation.inputs)
        samples = _union(noise, operands)
        carried = _union(carriers, operands)
        if name in ALL_REDUCES:
            (summed if op_of(name) == "sum" else other).update(carried)
            continue
        differs = not differing.isdisjoint(operands) or is_replica_source(operation.eqn)
        if not differs:
            if name in SAMPLER:
                samples = frozenset({line_within(operation.eqn, operation.around)})
            if samples and name in _KEEPS_SAMPLES:
                noise.update(dict.fromkeys(operation.outputs, samples))
            continue
        differing.update(operation.outputs)
        if name in _LINEAR and _is_linear(operation, differing):
            if name in ADDITION:
                carried |= samples
            else:
                other |= samples
            carriers.update(dict.fromkeys(operation.outputs, carried))
        else:
            other |= samples | carried
    for value in values_of(flat.outputs):
        other |= carriers.get(value, frozenset())
    return summed - other


def _is_linear(operation: Operation, differing: set[Value]) -> bool:
    """Whether an operation is linear in its per-replica operands."""
    if operation.name not in ("mul", "div"):
        return True
    are_own = [each in differing for each in operation.inputs]
    return are_own == [True, False] or (operation.name == "mul" and are_own == [False, True])


def _union(of: dict[Value, _Lines], operands: Sequence[Value]) -> _Lines:
    empty: _Lines = frozenset()
    return empty.union(*(of.get(value, empty) for value in operands))
