"""`ExaminedStep`: a call with its trace and program, for reports."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mirror._src.base.errors import describe
from mirror._src.devices.replicas import Kind
from mirror._src.engine.call import Call
from mirror._src.engine.compiled import MeshProgram
from mirror._src.engine.program import StepProgram
from mirror._src.engine.replica_function import TracedStep
from mirror._src.jaxprs.equations import arrays_in


class ExaminedStep(NamedTuple):
    """A call that is ready to run.

    Attributes:
        call: The call.
        traced: Its trace.
        leaves: Inputs of the program: arrays, or shapes and dtypes of arrays that do not exist.
        kinds: For each input, whether it is per-replica, mirrored or sharded.
        lowered: The lowered program, not yet compiled; `None` for a staged program.
    """

    call: Call
    traced: TracedStep
    leaves: Sequence[Any]
    kinds: Sequence[Kind]
    lowered: jax.stages.Lowered | None


def examine(
    call: Call, traced: TracedStep, program: StepProgram, leaves: Sequence[Any]
) -> ExaminedStep:
    """Returns a call with its trace and its program."""
    compiled = program.compiled
    lowered = compiled.lower(leaves) if isinstance(compiled, MeshProgram) else None
    return ExaminedStep(call, traced, leaves, program.kinds, lowered)


class ArrayEscapedError(ValueError):
    """Raised if a step uses an array of another trace."""


def require_no_escaped_arrays(traced: TracedStep) -> None:
    """Rejects a step that uses an array of another trace.

    Raises:
        ArrayEscapedError: If it uses one. The message is the array's shape and dtype.
    """
    for array in arrays_in(traced.jaxpr):
        if isinstance(array, jax.core.Tracer):
            raise ArrayEscapedError(describe(array))
