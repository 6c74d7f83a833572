"""`summary`: the layers of a model with their output shapes, and the memory of a training."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mirror._src.base.errors import bytes_in_words, counted, describe
from mirror._src.base.naming import keys
from mirror._src.base.terminal import Table
from mirror._src.base.types import PyTree
from mirror._src.data.batches import array_of, shape_on_devices
from mirror._src.inspection.placement_table import bytes_by_device
from mirror._src.strategy.strategy import Strategy

_MOST_OUTPUTS = 3


def summary(
    model: nnx.Module,
    optimizer: nnx.Optimizer[Any],
    strategy: Strategy,
    batch: PyTree,
    call: Callable[[Any, PyTree], Any],
) -> Table:
    """Returns a table of the layers, and of the memory; see `Trainer.summary`.

    Args:
        model: The model; it is not changed.
        optimizer: Its optimizer.
        strategy: The strategy that trains it.
        batch: A global batch, on the host.
        call: Function of a model and a batch, such as the loss.
    """
    shapes = output_shapes(model, batch, call)
    rows: list[tuple[str, ...]] = []
    variables = list(_variables(model))
    for path, module in nnx.iter_modules(model):
        own = [value for at, value in variables if at == path]
        if own or path in shapes:
            size, num_bytes = sum(x.size for x in own), sum(x.nbytes for x in own)
            rows.append(
                (
                    ".".join(map(str, path)) or "model",
                    type(module).__name__,
                    shapes.get(path, ""),
                    f"{size:,}" if own else "",
                    bytes_in_words(num_bytes) if own else "",
                )
            )
    rows.sort(key=lambda row: row[0] != "model")
    rows += _totals(model, optimizer, strategy)
    return Table(("layer", "type", "output", "parameters", "bytes"), rows)


def num_parameters(model: nnx.Module) -> int:
    """Returns the number of values in the parameters of a model, from their shapes alone."""
    return sum(map(np.size, jax.tree.leaves(nnx.state(model, nnx.Param))))  # numbers, too


def output_shapes(
    model: nnx.Module, batch: PyTree, call: Callable[[Any, PyTree], Any]
) -> dict[tuple[Any, ...], str]:
    """Returns the types of what the modules return, by their paths, without computing anything.

    The layers of a copy are given classes that record their calls, so that neither the model nor
    its classes change. The copy is in evaluation mode, in which it needs no random keys.
    """
    recorded: dict[tuple[Any, ...], str] = {}
    graphdef, state = nnx.split(model)

    def traced(state: PyTree, batch: PyTree) -> int:
        copy = nnx.merge(graphdef, state)
        copy.eval()
        for path, module in list(nnx.iter_modules(copy)):
            if callable(module):
                module.__class__ = _recording(type(module), path, recorded)
        call(copy, batch)
        return 0

    jax.eval_shape(traced, state, jax.tree_util.tree_map_with_path(_spec, batch))
    return recorded


def _recording(
    kind: type[Any], path: tuple[Any, ...], recorded: dict[tuple[Any, ...], str]
) -> type[Any]:
    """Returns a subclass whose calls are recorded under a path."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        leaves = [describe(leaf) for leaf in jax.tree.leaves(result)]
        omitted = ["..."] if len(leaves) > _MOST_OUTPUTS else []
        recorded[path] = ", ".join(leaves[:_MOST_OUTPUTS] + omitted)
        return result

    return type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})


def _spec(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    array = array_of("batch" + keys(path), leaf)
    return shape_on_devices(array.shape, array.dtype)


def _variables(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the path of the module and the array of each variable but random keys."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if not isinstance(variable, nnx.RngState):
            parents = [at for at, _ in nnx.iter_modules(model) if at == path[: len(at)]]
            owner = max(parents, key=len)
            for leaf in _arrays(variable):
                yield owner, leaf


def _arrays(tree: PyTree) -> list[Any]:
    """Returns the arrays of a tree; the first step makes arrays of numbers, as `nnx.Param(1.5)`."""
    leaves = jax.tree.leaves(tree)
    return [leaf if hasattr(leaf, "nbytes") else jnp.asarray(leaf) for leaf in leaves]


def _totals(
    model: nnx.Module, optimizer: nnx.Optimizer[Any], strategy: Strategy
) -> Iterator[tuple[str, ...]]:
    trainable = _arrays(nnx.state(model, optimizer.wrt))
    everything = [leaf for _, leaf in _variables(model)]
    num_trainable = sum(leaf.size for leaf in trainable)
    num_others = sum(leaf.size for leaf in everything) - num_trainable
    num_bytes = sum(leaf.nbytes for leaf in trainable)
    others = sum(leaf.nbytes for leaf in everything) - num_bytes
    yield ("trainable", "", "", f"{num_trainable:,}", bytes_in_words(num_bytes))
    yield ("not trainable", "", "", f"{num_others:,}", bytes_in_words(others))
    replicas = counted(strategy.num_replicas_in_sync, "replica")
    devices = counted(len(set(strategy.devices)), "device")
    yield ("model per device", replicas, devices, "", _per_device(model))
    shards = "sharded by steps" if strategy.shard != "none" else ""
    yield ("optimizer per device", "", shards, "", _per_device(optimizer))


def _per_device(tree: Any) -> str:
    """Returns the bytes that each device stores, or a range if they differ."""
    sizes = sorted(set(bytes_by_device(tree).values())) or [0]
    return " to ".join(map(bytes_in_words, dict.fromkeys((sizes[0], sizes[-1]))))
