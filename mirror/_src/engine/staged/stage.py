"""`compile_stage`: one stage of a staged program as a program of one lane."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from mirror._src.devices.replicas import Kind
from mirror._src.engine.compiled import MeshProgram
from mirror._src.engine.executor import ReplicaProgram
from mirror._src.engine.staged.lane import Lane
from mirror._src.jaxprs.trace import struct_of
from mirror._src.passes.lower.table import lowered, rules_for
from mirror._src.passes.program import Constant, Value
from mirror._src.passes.staging.ir import StagedJaxpr


def compile_stage(
    lane: Lane,
    staged: StagedJaxpr,
    number: int,
    program: ReplicaProgram,
    donated: Sequence[int],
    *,
    keeps_all: bool,
) -> MeshProgram:
    """Returns the program of one stage on one lane. XLA compiles it when it first runs.

    Args:
        lane: The lane.
        staged: The staged program.
        number: Index of the stage.
        program: The whole program.
        donated: Positions of the program's inputs that its last stage may donate.
        keeps_all: Whether to return mirrored outputs, which otherwise come from another lane.
    """
    stage = staged.stages[number]
    is_last = number == len(staged.stages) - 1
    mirrored = staged.mirrored_outputs if is_last else [False] * len(stage.outputs)
    pairs = list(zip(stage.outputs, mirrored, strict=True))
    if not keeps_all:
        pairs = [(atom, is_mirrored) for atom, is_mirrored in pairs if not is_mirrored]

    def run(*leaves: Any) -> list[Any]:
        values: dict[Value, Any] = dict(zip(stage.inputs, leaves, strict=True))

        def read(atom: Any) -> Any:
            return atom.value if isinstance(atom, Constant) else values[atom]

        for computation in stage.computations:
            results = computation.run(*map(read, computation.inputs))
            values.update(zip(computation.outputs, results, strict=True))
        return [jnp.asarray(read(atom)) for atom, _ in pairs]

    donated_values = {staged.inputs[i] for i in donated} if is_last else set[Value]()
    return lane.executor.compile_function(
        program.name if len(staged.stages) == 1 else f"{program.name}_stage_{number + 1}",
        lowered(run, rules_for(lane.replicas)),
        Kind.of(not value.is_mirrored for value in stage.inputs),
        Kind.of(not is_mirrored for _, is_mirrored in pairs),
        [i for i, value in enumerate(stage.inputs) if value in donated_values],
        [struct_of(value.aval) for value in stage.inputs],
        line=program.line,
        has_races=program.has_races,
    )
