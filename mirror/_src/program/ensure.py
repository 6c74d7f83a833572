"""`ensure_mirrored`: a mark in the step at which the proof must hold."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mirror._src.utils.types import PyTree

# A primitive of its own: it goes through every transformation with its names, never takes part in
# a derivative, and dead code elimination cannot take one leaf of it.
ensured_p = Primitive("ensure_mirrored")
ensured_p.multiple_results = True
ensured_p.def_impl(lambda *values, **_: list(values))
ensured_p.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(ensured_p, lambda _, *values, **__: list(values))
ad.primitive_jvps[ensured_p] = lambda primals, tangents, names: (
    ensured_p.bind(*primals, names=names),
    list(tangents),
)
batching.primitive_batchers[ensured_p] = lambda values, axes, names: (
    ensured_p.bind(*values, names=names),
    list(axes),
)


def ensure_mirrored(tree: PyTree) -> PyTree:
    """Returns its tree, and makes `run` refuse a step in which a leaf of it is per-replica.

    For state that goes in as an argument and comes out as a result: put it around what must stay
    the same on all replicas. Outside `run` it does nothing.

    Args:
        tree: arrays.

    Returns:
        The same tree.

    Raises:
        ReplicaDivergenceError: from `run`, naming the leaves that are not proved to be mirrored.

    >>> def step(weights, grads):
    ...     grads = mirror.get_replica_context().all_reduce("mean", grads)
    ...     return mirror.ensure_mirrored({"w": weights["w"] - 0.1 * grads["w"]})
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = tuple(jax.tree_util.keystr(path) or "the value" for path, _ in paths)
    return treedef.unflatten(ensured_p.bind(*leaves, names=names) if leaves else leaves)
