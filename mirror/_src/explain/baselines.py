"""Baselines for a step: an empty step, one replica on the whole batch, the collectives alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mirror._src.checks.trial import copy_of, whole_batch, with_objects
from mirror._src.explain.collectives import CollectiveRow
from mirror._src.explain.trial import Batches, Trial, idle_times, placed_on, variables_of
from mirror._src.program.axis import axis_name
from mirror._src.run.arguments import hoist_nested
from mirror._src.run.runner import Runner
from mirror._src.utils.types import Array, PyTree, StepFunction
from mirror._src.values.per_replica import PerReplica, is_numeric, is_per_replica, on_replicas
from mirror._src.variables.on_read import collapse


class Runners(NamedTuple):
    """What runs the programs that are measured.

    Attributes:
        many: the strategy's runner.
        scratch: another one over the same devices, for programs that nobody runs again.
        single: that of one replica.
    """

    many: Runner
    scratch: Runner
    single: Runner


def empty_trial(scratch: Runner, trial: Trial, batch: tuple[PyTree, ...]) -> Trial:
    """The step without its work: as many arrays in and out, of one number each."""
    replicas, changed = scratch.replicas, trial.changed

    def small(leaf: Any) -> Any:
        if is_per_replica(leaf):
            return on_replicas(PerReplica([np.zeros(1, leaf.dtype)] * len(replicas)), replicas)
        if isinstance(leaf, jax.Array | np.ndarray) and is_numeric(leaf.dtype):
            return replicas.mirror(np.zeros(1, leaf.dtype))
        return leaf

    def step(*args: Any, **kwargs: Any) -> list[Array]:
        inside = variables_of(hoist_nested(args, kwargs).objects)
        for variable, changes in zip(inside, changed, strict=True):
            if changes:
                zeros = jax.tree.map(jnp.zeros_like, variable.get_raw_value())
                variable.set_raw_value(zeros)
        return [jnp.zeros(1)] * trial.num_results

    step.__name__ = "nothing"
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
    """Seconds a step of one replica with the whole batch, or why there is no such figure."""
    hoisted = hoist_nested(args, kwargs)
    leaves = jax.tree.leaves(hoisted.tree, is_leaf=is_per_replica)
    if not any(map(is_per_replica, leaves)):
        return None, "no batch is split over the replicas"
    if len(runners.many.replicas) == 1:
        return None, "there is one replica"
    try:
        whole = jax.tree.map(whole_batch, hoisted.tree, is_leaf=is_per_replica)
        objects = copy_of(hoisted.objects)
        collapse(objects)
        placed = placed_on(with_objects(whole, objects), runners.single.replicas)
        trial = Trial(runners.single, fn, *placed)
        trial.warm_up(())
        (found,) = idle_times(Batches(None), [trial], steps)
        return found.run, ""
    except (ValueError, TypeError, jax.errors.JaxRuntimeError) as error:
        return None, f"one replica cannot run it: {str(error).splitlines()[0]}"


def collective_secs(scratch: Runner, rows: Sequence[CollectiveRow], steps: int) -> float:
    """Seconds a step's collectives take by themselves, each as often as it runs."""
    if len(scratch.replicas) == 1:
        return 0.0
    by_trips: dict[int, list[CollectiveRow]] = {}
    for row in rows:
        # PRNG keys are small; a gather after a reduce-scatter is timed as their all-reduce.
        if row.avals and all(is_numeric(aval.dtype) for aval in row.avals):
            by_trips.setdefault(row.least_trips, []).append(row)
    return sum(trips * _together(scratch, group, steps) for trips, group in by_trips.items())


def _together(scratch: Runner, rows: Sequence[CollectiveRow], steps: int) -> float:
    """Seconds that collectives take one after the other, without what any program takes."""
    avals = [aval for row in rows for aval in row.avals]

    def make() -> list[Array]:
        number = jax.lax.axis_index(axis_name())
        return [jnp.full(aval.shape, number, aval.dtype) for aval in avals]

    def communication(buffers: list[Array]) -> list[Array]:
        got: list[Array] = []
        for row in rows:
            # Each waits for the one before: else the executor would let several travel together.
            start = len(got)
            mine = buffers[start : start + len(row.avals)]
            mine, got = jax.lax.optimization_barrier((mine, got))
            got = [*got, *row.again(mine)]
        return [_first(out) for out in jax.lax.optimization_barrier(got)]

    def stay(buffers: list[Array]) -> list[Array]:
        return [_first(out) for out in jax.lax.optimization_barrier(buffers)]

    buffers = scratch.run(make, (), {})
    trials = [Trial(scratch, step, (buffers,), {}) for step in (communication, stay)]
    for trial in trials:
        trial.warm_up(())
    talking, staying = idle_times(Batches(None), trials, steps)
    return max(0.0, talking.run - staying.run)


def _first(array: Array) -> Array:
    """Its first number, so that results take no time."""
    return array.ravel()[:1]
