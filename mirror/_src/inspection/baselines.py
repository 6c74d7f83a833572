"""Baselines of a step: an empty step, the whole batch on one replica, the collectives alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.base.dtypes import is_numeric
from mirror._src.base.errors import first_line
from mirror._src.base.types import Array, PyTree, StepFunction
from mirror._src.engine.arguments import hoist_nested
from mirror._src.engine.on_read import collapse
from mirror._src.engine.per_replica import PerReplica, is_per_replica, on_replicas
from mirror._src.engine.runner import Runner
from mirror._src.inspection.collective_table import CollectiveRow
from mirror._src.inspection.measurement import Batches, Trial, idle_times, placed_on, variables_of
from mirror._src.inspection.trial_objects import copy_of, gathered, whole_batch, with_objects


class Runners(NamedTuple):
    """Runners of the measured programs.

    Attributes:
        many: Runner of the strategy.
        scratch: Second runner on the same devices, for programs that are run only here.
        single: Runner of a strategy with one replica.
    """

    many: Runner
    scratch: Runner
    single: Runner


def empty_trial(scratch: Runner, trial: Trial, batch: tuple[PyTree, ...]) -> Trial:
    """Returns a step that computes nothing, with the same number of arrays of one element each."""
    replicas, changed = scratch.replicas, trial.changed

    def small(leaf: Any) -> Any:
        if is_per_replica(leaf):
            zeros = PerReplica.from_stacked(np.zeros((len(replicas), 1), leaf.dtype))
            return on_replicas(zeros, replicas)
        if isinstance(leaf, jax.Array | np.ndarray) and is_numeric(leaf.dtype):
            return replicas.mirror(np.zeros(1, leaf.dtype))
        return leaf

    def step(*args: Any, **kwargs: Any) -> list[Array]:
        variables = variables_of(hoist_nested(args, kwargs).objects)
        for variable, is_changed in zip(variables, changed, strict=True):
            if is_changed:
                zeros = jax.tree.map(jnp.zeros_like, variable.get_raw_value())
                variable.set_raw_value(zeros)
        return [jnp.zeros(1)] * trial.num_results

    step.__name__ = "empty_step"
    args, kwargs = trial.arguments(batch)
    hoisted = hoist_nested(args, kwargs)
    objects = copy_of(hoisted.objects)
    for variable in variables_of(objects):
        value = variable.get_raw_value()
        variable.set_raw_value(jax.tree.map(small, value, is_leaf=is_per_replica))
    tree = jax.tree.map(small, hoisted.tree, is_leaf=is_per_replica)
    empty = Trial(scratch, step, *with_objects(tree, objects))
    empty.warm_up(())
    return empty


def one_replica_secs(
    runners: Runners,
    fn: StepFunction,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    steps: int,
) -> tuple[float | None, str]:
    """Returns the seconds per step on one replica with the whole batch, or why it is unknown."""
    hoisted = hoist_nested(args, kwargs)
    leaves = jax.tree.leaves(hoisted.tree, is_leaf=is_per_replica)
    if not any(map(is_per_replica, leaves)):
        return None, "no batch is split across the replicas"
    if len(runners.many.replicas) == 1:
        return None, "the strategy has only one replica"
    tree = gathered(runners.scratch, hoisted.tree)
    try:
        whole = jax.tree.map(whole_batch, tree, is_leaf=is_per_replica)
        objects = copy_of(hoisted.objects)
        collapse(objects)
        placed = placed_on(with_objects(whole, objects), runners.single.replicas)
        trial = Trial(runners.single, fn, *placed)
        trial.warm_up(())
        (times,) = idle_times(Batches(None), [trial], steps)
        return times.run, ""
    except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        return None, f"one replica cannot run it: {first_line(error)}"


def collective_secs(scratch: Runner, rows: Sequence[CollectiveRow], steps: int) -> float:
    """Returns the seconds that all collectives of a step take without the computation."""
    if len(scratch.replicas) == 1:
        return 0.0
    by_trips: dict[int, list[CollectiveRow]] = {}
    for row in rows:
        # PRNG keys are small and skipped.
        if row.avals and all(is_numeric(aval.dtype) for aval in row.avals):
            by_trips.setdefault(row.least_trips, []).append(row)
    return sum(trips * _time_group(scratch, group, steps) for trips, group in by_trips.items())


def _time_group(scratch: Runner, rows: Sequence[CollectiveRow], steps: int) -> float:
    """Returns the seconds that these collectives take in sequence, without the launch overhead."""
    avals = [aval for row in rows for aval in row.avals]

    def make() -> list[Array]:
        number = jax.lax.axis_index(scratch.replicas.axis_name)
        return [jnp.full(aval.shape, number, aval.dtype) for aval in avals]

    def communication(buffers: list[Array]) -> list[Array]:
        results: list[Array] = []
        for row in rows:
            # Without the barrier, the executor would pack independent collectives into one.
            start = len(results)
            operands = buffers[start : start + len(row.avals)]
            operands, results = jax.lax.optimization_barrier((operands, results))
            results = [*results, *row.execute(operands, scratch.replicas.axis_name)]
        return [_first(out) for out in jax.lax.optimization_barrier(results)]

    def no_communication(buffers: list[Array]) -> list[Array]:
        return [_first(out) for out in jax.lax.optimization_barrier(buffers)]

    buffers = scratch.run(make, (), {})
    trials = [Trial(scratch, step, (buffers,), {}) for step in (communication, no_communication)]
    for trial in trials:
        trial.warm_up(())
    with_collectives, without = idle_times(Batches(None), trials, steps)
    return max(0.0, with_collectives.run - without.run)


def _first(array: Array) -> Array:
    """Returns the first element, so that returning results takes no time."""
    return array.ravel()[:1]
