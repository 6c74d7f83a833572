"""`ensure_mirrored`: requires the proof that values inside a step are mirrored."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mirror._src.base.types import PyTree

# A separate primitive keeps its names through every transformation, takes no part in derivatives,
# and prevents dead code elimination from removing single leaves.
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
    """Returns its argument, and makes `run` reject the step if one of its leaves is per-replica.

    Use it for state that is an argument and a result of the step: wrap the values that must be the
    same on all replicas. Outside `run` it has no effect.

    Args:
        tree: Pytree of arrays.

    Returns:
        The same tree.

    Raises:
        ReplicaDivergenceError: From `run`, if a leaf is not proved to be mirrored. The message
            names the leaves.

    >>> def step(weights, grads):
    ...     grads = mirror.all_reduce("mean", grads)
    ...     return mirror.ensure_mirrored({"w": weights["w"] - 0.1 * grads["w"]})
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = tuple(jax.tree_util.keystr(path) or "the value" for path, _ in paths)
    return treedef.unflatten(ensured_p.bind(*leaves, names=names) if leaves else leaves)
