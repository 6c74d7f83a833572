"""Finds how results, gradients and moving variables of a scheduled step are joined."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mirror._src.base.naming import keys
from mirror._src.engine.call import Call
from mirror._src.engine.step import TracedStep
from mirror._src.ps.joins import Join, find_joins

_SCALE = "received[2][2]"  # the name of `Part.scale` among the arguments of the step
_KINDS = ("result", "gradient", "variable")
_REJECTED = {
    "result": {Join.NONE},
    "gradient": {Join.NONE, Join.MAX, Join.MIN, Join.SUM},
    "variable": {Join.NONE, Join.MAX, Join.MIN, Join.SUM},
}
_WHY = (
    "The workers compute the {count} parts of a batch separately. All that is known of the whole "
    "batch is what mirror.all_reduce returns, and its sums and products with constants. "
)
_MESSAGES = {
    "result": (
        "{fn} returns {name}, which it computes from reduced or gathered values, for example as "
        "the ratio of two sums or the square root of a mean. " + _WHY + "Return the reduced "
        "values, and compute it from what `fetch` returns."
    ),
    "gradient": (
        "{fn} computes the gradient of {name} from reduced or gathered values, for example by "
        "clipping the norm of a mean or dividing it by another sum. " + _WHY + "Clip before "
        "all_reduce, on each replica, or divide by a number that is an argument of the step."
    ),
    "variable": (
        "{fn} computes the variable {name} from a sum, a maximum or another function of reduced "
        "values. " + _WHY + "The changes of a variable on the parts are averaged: assign "
        'all_reduce("mean", x).'
    ),
}


class Found(NamedTuple):
    """The join of one leaf of what a traced step returned.

    Attributes:
        kind: "result", "gradient" or "variable".
        name: The user's name.
        join: The join.
    """

    kind: str
    name: str
    join: Join


def joins_of_step(
    call: Call, traced: TracedStep, num_replicas: int, *, is_fetched: bool
) -> list[Found]:
    """Returns the joins of a traced step that returns results, gradients and moving variables.

    Args:
        call: A call of the step, with the model, the optimizer, what was received, and the batch.
        traced: Its trace.
        num_replicas: Number of the replicas of a worker.
        is_fetched: Whether each worker has its own arguments, also those without rows.
    """
    step, program = traced.step, traced.jaxpr
    inputs = []
    for i, (name, is_own) in enumerate(zip(call.input_names, step.per_replica, strict=True)):
        is_key = jnp.issubdtype(step.avals[i].dtype, jax.dtypes.prng_key)
        is_argument = i >= step.num_state and name.startswith("leaves")
        if name == _SCALE:
            inputs.append(Join.SCALE)
        else:
            is_own = is_own or is_key or (is_fetched and is_argument)
            inputs.append(Join.OWN if is_own else Join.SAME)
    dynamic = iter(find_joins(program, inputs, num_replicas))
    leaves = step.out_tree.unflatten(range(step.out_tree.num_leaves))
    found = []
    for path, i in jax.tree_util.tree_flatten_with_path(leaves)[0]:
        kind, rest = _KINDS[path[0].idx], path[1:]
        name = "result" + keys(rest) if kind == "result" else rest[0].key
        found.append(Found(kind, name, Join.SAME if i in step.static_results else next(dynamic)))
    return found


def require_own_sums(fn_name: str, found: Sequence[Found], num_parts: int) -> None:
    """Requires that a step of a `Trainer` sums what its parts compute separately.

    The only collective is then the sum of the trainer, after the loss function.

    Raises:
        ValueError: If a sum depends on another collective.
    """
    if any(each.kind == "result" and each.join is Join.NONE for each in found):
        raise ValueError(
            f"{fn_name} reduces or gathers over the replicas, for example with mirror.all_reduce "
            f"or nnx.BatchNorm(axis_name=...). The workers compute the {num_parts} parts of a "
            "batch separately: this would be over the part of one worker alone. Compute the loss "
            "of each example from this example; or schedule a step of your own with "
            "mirror.ps.ClusterCoordinator; or train with mirror.MirroredStrategy."
        )


def require_joins(fn_name: str, found: Sequence[Found], num_parts: int) -> tuple[str, ...]:
    """Returns the value of the `Join` of each leaf of the result of a step.

    Args:
        fn_name: Name of the step.
        found: The joins of what it computes.
        num_parts: Number of the parts of its batch.

    Raises:
        ValueError: If something cannot be joined. The message names it.
    """
    for kind, name, join in found:
        if join in _REJECTED[kind]:
            raise ValueError(_MESSAGES[kind].format(fn=fn_name, name=name, count=num_parts))
    return tuple(each.join.value for each in found if each.kind == "result")
