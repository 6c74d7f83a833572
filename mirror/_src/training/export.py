"""`export`: the model of a trainer as a StableHLO program with its weights, for JAX alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import export as jax_export

from mirror._src.base.naming import name_of
from mirror._src.base.optional import require
from mirror._src.base.types import PyTree
from mirror._src.data.batches import host_batch
from mirror._src.engine.mesh import outside_traces
from mirror._src.jaxprs.equations import equations
from mirror._src.jaxprs.primitives import CALLBACK
from mirror._src.jaxprs.user_lines import user_line
from mirror._src.training.checkpoints.files import write_file
from mirror._src.training.paths import path_of_argument


def exported(
    step: Callable[..., PyTree],
    fn: Callable[..., PyTree],
    model: nnx.Module,
    example: PyTree,
    batch_size: int | None,
    platforms: Sequence[str],
) -> bytes:
    """Returns the program of a step of `prediction_step`, for batches like `example`.

    Args:
        step: The step.
        fn: The function that it applies, for messages.
        model: The model; it is not changed.
        example: A batch.
        batch_size: Number of rows of a batch, or None for any number.
        platforms: JAX's names of the platforms on which the program may run.

    Raises:
        ValueError: If the program contains host callbacks.
    """
    require("flatbuffers", "trainer.export")
    graphdef, state = nnx.split(model)
    state = jax.tree.map(_on_one_device, state)

    def program(batch: PyTree) -> PyTree:
        rows = jax.tree.leaves(batch)[0].shape[0]
        return step(nnx.merge(graphdef, state), batch, jnp.ones(rows, bool))

    size = jax_export.symbolic_shape("batch")[0] if batch_size is None else batch_size
    specs = host_batch("example", example).map(
        lambda leaf: jax.ShapeDtypeStruct(
            (size, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype)
        )
    )
    with outside_traces(fn):
        compiled = jax.jit(program)
        try:
            traced = compiled.trace(specs)
        except Exception as error:
            if batch_size is None:
                error.add_note("For a model that needs the number of rows, pass batch_size=N.")
            raise
        _require_no_callbacks(fn, traced.jaxpr)
        return bytes(jax_export.export(compiled, platforms=platforms)(specs).serialize())


def _on_one_device(leaf: Any) -> Any:
    return leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf


def _require_no_callbacks(fn: Callable[..., Any], program: Any) -> None:
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name in CALLBACK:
            raise ValueError(
                f"{name_of(fn)} cannot be exported, because {eqn.primitive.name} at "
                f"{user_line(eqn)} calls Python, which an exported program does not contain. "
                "Remove it, or pass a function without it: trainer.export(path, example, fn)."
            )


def write(path: str | Path, program: bytes) -> None:
    """Writes the program to its path when it is complete and on the disk."""
    write_file(path_of_argument("path", path), [program])
