"""Measures a step on all device counts in turns, so that background load affects all equally."""

import functools
import gc
import math
import time
from collections.abc import Sequence
from typing import Any, final

import jax

from mirror._src.base import interrupts
from mirror._src.base.measure import in_turns
from mirror._src.devices import backend
from mirror._src.engine.arguments import hoist_nested
from mirror._src.engine.per_replica import is_per_replica
from mirror._src.inspection.measurement import Batches, variables_of, wait
from mirror._src.strategy.strategy import Strategy
from mirror._src.tools.bench.scaling import Row, Scaling
from mirror._src.tools.bench.workload import Workload, WorkloadError

_ROUNDS = 10
_WARM_UP_STEPS = 3
_MOST_EXPLAINED_STEPS = 10


@final
class Candidate:
    """A workload on the devices of one strategy.

    Attributes:
        strategy: Runs the step.
        sizes: Batch size of each replica; `()` if no batch is split across the replicas.
    """

    def __init__(self, strategy: Strategy, workload: Workload) -> None:
        self.strategy = strategy
        self._workload = workload
        self._batches = Batches(workload.data)
        self._variables = variables_of(hoist_nested(workload.args, {}).objects)
        self.sizes: tuple[int, ...] = ()

    def warm_up(self) -> None:
        """Compiles the step.

        Raises:
            WorkloadError: If the step has no result whose computation could be awaited.
        """
        args = self._arguments()
        self.sizes = _sizes(args)
        results = self.strategy.run(self._workload.step, args)
        if not jax.tree.leaves(results) and not self._variables:
            raise WorkloadError(
                "The step returns nothing and changes none of its arguments, so its end cannot be "
                "detected. Return its loss."
            )
        self.time_steps(_WARM_UP_STEPS)

    def time_steps(self, steps: int) -> float:
        """Returns the seconds per step of some steps, waiting for the results of the last one."""
        start, results = time.perf_counter(), None
        for _ in range(steps):
            interrupts.check()
            results = self.strategy.run(self._workload.step, self._arguments())
        wait((results, [variable.get_raw_value() for variable in self._variables]))
        return (time.perf_counter() - start) / steps

    def row(self, secs: Sequence[float]) -> Row:
        """Returns the times together with what `strategy.explain` reports about the step."""
        step, args, data = self._workload
        steps = min(_MOST_EXPLAINED_STEPS, max(len(secs), 2))
        explanation = self.strategy.explain(step, args, data=data, steps=steps)
        names = tuple(map(backend.logical_name, self.strategy.devices))
        examples = sum(self.sizes) or None
        return Row(
            names,
            examples,
            tuple(secs),
            explanation.bound,
            explanation.verdict,
            explanation.memory,
        )

    def _arguments(self) -> tuple[Any, ...]:
        return (*self._workload.args, *self._batches.take())


def measure(name: str, candidates: Sequence[Candidate], steps: int, weak: bool) -> Scaling:
    """Measures how a step scales.

    Args:
        name: Name of the step.
        candidates: The step on an increasing number of devices, warmed up.
        steps: Least number of steps to measure on each; they are spread over ten rounds.
        weak: Whether the batch is the same per replica, rather than in total.

    Raises:
        WorkloadError: If the batches differ.
    """
    _require_same_batch(candidates, weak)
    per_turn = math.ceil(steps / _ROUNDS)
    rounds = math.ceil(steps / per_turn)
    gc.collect()
    secs = in_turns([functools.partial(c.time_steps, per_turn) for c in candidates], rounds)
    rows = []
    for candidate, candidate_secs in zip(candidates, secs, strict=True):
        interrupts.check()
        rows.append(candidate.row(candidate_secs))
    on_host = backend.type_of(candidates[0].strategy.devices[0]) == "CPU"
    return Scaling(name, weak, rounds * per_turn, on_host, tuple(rows))


def _sizes(args: Any) -> tuple[int, ...]:
    """Returns the batch size of each replica: the length of the first per-replica array."""
    for leaf in jax.tree.leaves(args, is_leaf=is_per_replica):
        if is_per_replica(leaf) and leaf.shapes[0]:
            return tuple(shape[0] for shape in leaf.shapes)
    return ()


def _require_same_batch(candidates: Sequence[Candidate], weak: bool) -> None:
    """Checks that all times are for the same work.

    Raises:
        WorkloadError: If the batches differ.
    """
    total = max if weak else sum
    sizes = {len(c.strategy.devices): total(c.sizes or (0,)) for c in candidates}
    if weak and not all(sizes.values()):
        raise WorkloadError(
            "--weak requires a batch that is split across the replicas. Return (step, args, data) "
            "with a list of batches."
        )
    if len(set(sizes.values())) == 1:
        return
    by_count = ", ".join(f"{size} on {n}" for n, size in sizes.items())
    if weak:
        raise WorkloadError(
            f"The times are not comparable: the batch per replica varies ({by_count} devices). "
            "Return (step, args, data), whose batches are repeated for every replica, or scale the "
            "batch with strategy.num_replicas_in_sync."
        )
    raise WorkloadError(
        f"The times are not comparable: the global batch grows with the devices ({by_count} "
        "devices). Return the same batch for every strategy, or pass --weak."
    )
