"""`check_mirrored`: compares the replicas' copies of mirrored arrays bit for bit."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.errors import ReplicaDivergenceError, listing
from mirror._src.base.keras_library import has_variables, variables_of
from mirror._src.base.naming import keys
from mirror._src.base.types import Array, PyTree
from mirror._src.engine.in_step import bind_all_reduce
from mirror._src.engine.on_read import is_on_read
from mirror._src.engine.per_replica import is_per_replica
from mirror._src.engine.reduce_op import ReduceOp
from mirror._src.engine.runner import Runner
from mirror._src.jaxprs.fingerprint import fingerprint


def check_mirrored(runner: Runner, tree: PyTree) -> None:
    """Implements `Strategy.check_mirrored`."""
    is_leaf = lambda leaf: is_per_replica(leaf) or is_on_read(leaf) or has_variables(leaf)  # noqa: E731
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    of_keras = [leaf for _, leaf in leaves if has_variables(leaf)]
    leaves = [(path, leaf) for path, leaf in leaves if not has_variables(leaf)]
    named = [
        (keys(path).lstrip(".") or "the value", leaf)
        for path, leaf in leaves
        if not is_on_read(leaf)  # an "on_read" variable may differ
    ]
    per_replica = [name for name, leaf in named if is_per_replica(leaf)]
    if per_replica:
        raise TypeError(
            "check_mirrored expects mirrored values, such as models, optimizers or reduced "
            "results. These leaves are PerReplica values, which may differ:\n"
            f"{listing(per_replica)}"
        )
    arrays = [(name, leaf) for name, leaf in named if isinstance(leaf, jax.Array)]
    arrays += _arrays_of_keras(of_keras)
    # A sharded array has a single copy, so there is nothing to compare.
    arrays = [(name, leaf) for name, leaf in arrays if not runner.replicas.is_sharded(leaf)]
    elsewhere = [name for name, leaf in arrays if not runner.replicas.is_mirrored(leaf)]
    if elsewhere:
        raise ValueError(
            f"These arrays are not mirrored on the strategy's devices:\n{listing(elsewhere)}\n"
            "Create them inside strategy.scope(), or pass them through strategy.run first."
            f"{_ADVICE_FOR_KERAS if of_keras else ''}"
        )
    if not arrays:
        return
    equal = np.asarray(runner.run(_compare_copies, ([leaf for _, leaf in arrays],), {}))
    differing = [name for (name, _), same in zip(arrays, equal, strict=True) if not same]
    if differing:
        raise ReplicaDivergenceError(
            f"The replicas' copies differ in {len(differing)} of {len(arrays)} arrays:\n"
            f"{listing(differing)}\nOnly some devices' copies were changed. Restore a checkpoint. "
            "To see every replica's copy, call strategy.local_results(x)."
        )


_ADVICE_FOR_KERAS = (
    " The first step of fit, evaluate or predict mirrors the variables of a Keras model again, "
    "after a method such as load_weights has assigned to them outside the scope."
)


def _arrays_of_keras(objects: Sequence[Any]) -> list[tuple[str, Array]]:
    """Returns the value of each variable, with its path.

    Raises:
        ValueError: If an object has no variables yet.
    """
    found: dict[int, tuple[str, Array]] = {}
    for each in objects:
        variables = variables_of(each)
        if not variables:
            raise ValueError(
                f"The Keras object {each.name!r} has no variables yet, so there is nothing to "
                "compare. Build it first: model.build(input_shape), or model.fit(...)."
            )
        found |= {id(variable): (variable.path, variable.value) for variable in variables}
    return list(found.values())


def _compare_copies(leaves: list[Array]) -> Array:
    """Returns for every leaf whether the fingerprints of all replicas are equal."""
    prints = jnp.stack([fingerprint(leaf) for leaf in leaves])
    least, most = bind_all_reduce(ReduceOp.MIN, prints), bind_all_reduce(ReduceOp.MAX, prints)
    return jnp.all(least == most, axis=-1)
