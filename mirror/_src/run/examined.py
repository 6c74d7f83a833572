"""A call that is ready to run, for reports: its arrays or their types, its trace, its program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mirror._src.devices.replicas import Kind
from mirror._src.executors.executor import MeshProgram
from mirror._src.program.jaxprs import arrays_in
from mirror._src.run.call import Call
from mirror._src.run.program import StepProgram
from mirror._src.run.step import TracedStep
from mirror._src.utils.errors import describe


class ExaminedStep(NamedTuple):
    """A call that is ready to run.

    Attributes:
        call: The call.
        traced: Its trace.
        leaves: What goes into the program: the arrays, or their types where there are no arrays.
        kinds: How the replicas hold each of them.
        lowered: The program lowered, not yet compiled; `None` if it is several, run in stages.
    """

    call: Call
    traced: TracedStep
    leaves: Sequence[Any]
    kinds: Sequence[Kind]
    lowered: jax.stages.Lowered | None


def examined_call(
    call: Call, traced: TracedStep, program: StepProgram, leaves: Sequence[Any]
) -> ExaminedStep:
    """Returns a call with its trace and its program."""
    compiled = program.compiled
    lowered = compiled.lower(leaves) if isinstance(compiled, MeshProgram) else None
    return ExaminedStep(call, traced, leaves, program.kinds, lowered)


class ArrayEscapedError(ValueError):
    """A step uses an array of a trace that has ended."""


def require_no_escaped_arrays(traced: TracedStep) -> None:
    """Rejects a step that uses an array of another trace.

    Raises:
        ArrayEscapedError: If there is one; the message is its type.
    """
    for jaxpr in traced.jaxprs:
        for array in arrays_in(jaxpr):
            if isinstance(array, jax.core.Tracer):
                raise ArrayEscapedError(describe(array))
