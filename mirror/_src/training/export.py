"""`export`: the model of a trainer with its weights, as a StableHLO program or in ONNX."""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export as jax_export

from mirror._src.base.errors import expected
from mirror._src.base.naming import name_of
from mirror._src.base.optional import require
from mirror._src.base.types import PyTree
from mirror._src.data.batches import HostBatch, host_batch
from mirror._src.devices.transfer import move
from mirror._src.engine.mesh import outside_traces
from mirror._src.jaxprs.equations import equations, user_line
from mirror._src.jaxprs.primitives import CALLBACK
from mirror._src.training.checkpoints.files import write_file
from mirror._src.training.paths import named_errors, path_of_argument, shorten

_PLATFORMS = ("cpu", "cuda")
_KNOWN = {"cpu", "cuda", "rocm", "tpu"}


def export(
    path: str | Path,
    step: Callable[..., PyTree],
    fn: Callable[..., PyTree],
    model: nnx.Module,
    example: PyTree,
    batch_size: int | None,
    platforms: Sequence[str] | None,
) -> None:
    """Writes the program of a step of `prediction_step`, for batches like `example`.

    Args:
        path: The file, which appears when it is complete and on the disk. It contains a program in
            ONNX instead of StableHLO if its name ends so.
        step: The step.
        fn: The function that it applies, for messages.
        model: The model; it is not changed.
        example: A batch.
        batch_size: Number of rows of a batch, or None for any number.
        platforms: JAX's names of the platforms on which the program may run.

    Raises:
        ValueError: If the path is not one, or the program contains host callbacks or cannot be
            converted to ONNX.
    """
    target = path_of_argument("path", path)
    in_onnx = target.name.lower().endswith(".onnx")
    if isinstance(platforms, str) or not {*(platforms or ())} <= _KNOWN:
        raise ValueError(expected("platforms", platforms, f"a list of {sorted(_KNOWN)}"))
    if in_onnx and platforms is not None:
        raise ValueError("`platforms` does not apply to ONNX, which is for all. Omit it.")
    for package in ("jax2onnx", "onnxruntime") if in_onnx else ("flatbuffers",):
        require(package, "trainer.export", "onnx" if in_onnx else "train")
    graphdef, state = nnx.split(model)
    state = jax.tree.map(_on_one_device, state)

    def program(batch: PyTree) -> PyTree:
        rows = jax.tree.leaves(batch)[0].shape[0]
        return step(nnx.merge(graphdef, state), batch, jnp.ones(rows, bool))

    size = jax_export.symbolic_shape("batch")[0] if batch_size is None else batch_size
    batch = host_batch("example", example)
    specs = batch.map(
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
        if in_onnx:
            data = _onnx_of(fn, program, batch, specs)
        else:
            names = _PLATFORMS if platforms is None else platforms
            data = bytes(jax_export.export(compiled, platforms=names)(specs).serialize())
    with named_errors("write", target):
        write_file(target, [data])


def _onnx_of(
    fn: Callable[..., Any], program: Callable[[PyTree], PyTree], batch: HostBatch, specs: PyTree
) -> bytes:
    """Returns a program in ONNX that has computed the results of the example.

    Raises:
        ValueError: If jax2onnx or ONNX Runtime cannot, or with other results.
    """
    treedef: Any
    shapes, treedef = jax.tree.flatten(specs)
    words = [re.sub(r"\W+", "_", name.removeprefix("example")).strip("_") for name in batch.names]
    inputs = [word or "input" for word in words]
    rows = [shape.shape[0] if isinstance(shape.shape[0], int) else batch.size for shape in shapes]
    arrays = [
        np.resize(np.asarray(leaf, shape.dtype), (count, *leaf.shape[1:]))
        for leaf, shape, count in zip(batch.leaves, shapes, rows, strict=True)
    ]
    expected = jax.tree.leaves(jax.jit(program)(treedef.unflatten(arrays)))
    try:
        convert, runtime = map(importlib.import_module, ("jax2onnx", "onnxruntime"))
        flat = lambda *leaves: tuple(jax.tree.leaves(program(treedef.unflatten(leaves))))  # noqa: E731
        outputs = [f"output_{i}" for i in range(len(expected))]
        with _unchanged(jnp):
            model = convert.to_onnx(flat, shapes, input_names=inputs, output_names=outputs)
        data = bytes(model.SerializeToString())
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        session = runtime.InferenceSession(data, options)
        used = {each.name for each in session.get_inputs()}
        fed = {name: x for name, x in zip(inputs, arrays, strict=True) if name in used}
        for one, other in zip(session.run(None, fed), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())
    except Exception as error:
        raise ValueError(
            f"{name_of(fn)} cannot be converted to ONNX: {shorten(error)}. Export a StableHLO "
            "program: trainer.export('model.jax', example)."
        ) from error
    return data


@contextlib.contextmanager
def _unchanged(module: Any) -> Iterator[None]:
    """Restores what is replaced in a module: jax2onnx leaves its own `jnp.cumsum` (0.17.1)."""
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def _on_one_device(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    shard = leaf.addressable_shards[0]
    return shard.data if leaf.is_fully_replicated else move(leaf, shard.device)  # in slices


def _require_no_callbacks(fn: Callable[..., Any], program: Any) -> None:
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name in CALLBACK:
            raise ValueError(
                f"{name_of(fn)} cannot be exported, because {eqn.primitive.name} at "
                f"{user_line(eqn)} calls Python, which an exported program does not contain. "
                "Remove it, or pass a function without it: trainer.export(path, example, fn)."
            )
