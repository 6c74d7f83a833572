"""Measuring: all counts of devices in turn within each round, so that a busy moment meets all."""

import gc
import math
import time
from collections.abc import Sequence
from typing import Any, final

import jax

from mirror._src.cli.bench.scaling import Row, Scaling
from mirror._src.cli.bench.workload import Workload, WorkloadError
from mirror._src.devices import backend
from mirror._src.explain.trial import Batches, variables_of, wait
from mirror._src.run.arguments import hoist_nested
from mirror._src.strategy.strategy import Strategy
from mirror._src.utils import interrupts
from mirror._src.values.per_replica import is_per_replica

_ROUNDS = 10
_WARM_UP_STEPS = 3
_MOST_EXPLAINED_STEPS = 10


@final
class Contender:
    """A step on some devices.

    Attributes:
        strategy: what runs it.
        sizes: how many examples each replica has in a step; `()`: no batch is split over them.
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
            WorkloadError: it leaves nothing to wait for.
        """
        args = self._arguments()
        self.sizes = _sizes(args)
        results = self.strategy.run(self._workload.step, args)
        if not jax.tree.leaves(results) and not self._variables:
            raise WorkloadError(
                "The step returns nothing and changes no model it is given, so nobody knows when "
                "it is done. Return its loss."
            )
        self.turn(_WARM_UP_STEPS)

    def turn(self, steps: int) -> float:
        """Seconds a step, everything awaited after so many."""
        start, results = time.perf_counter(), None
        for _ in range(steps):
            interrupts.check()
            results = self.strategy.run(self._workload.step, self._arguments())
        wait((results, [variable.get_raw_value() for variable in self._variables]))
        return (time.perf_counter() - start) / steps

    def row(self, secs: Sequence[float]) -> Row:
        """What was measured, and why it is so."""
        step, args, data = self._workload
        steps = min(_MOST_EXPLAINED_STEPS, max(len(secs), 2))
        found = self.strategy.explain(step, args, data=data, steps=steps)
        names = tuple(map(backend.logical_name, self.strategy.devices))
        examples = sum(self.sizes) or None
        return Row(names, examples, tuple(secs), found.bound, found.verdict, found.memory)

    def _arguments(self) -> tuple[Any, ...]:
        return (*self._workload.args, *self._batches.take())


def measure(name: str, contenders: Sequence[Contender], steps: int, weak: bool) -> Scaling:
    """How the step scales.

    Args:
        name: what was asked for.
        contenders: the step on more and more devices, warmed up.
        steps: how many of each to measure, at least; they are spread over ten rounds.
        weak: whether each replica, and not all together, has the same batch.

    Raises:
        WorkloadError: the batches are not the same.
    """
    _require_same_batch(contenders, weak)
    each = math.ceil(steps / _ROUNDS)
    rounds = math.ceil(steps / each)
    secs: list[list[float]] = [[] for _ in contenders]
    gc.collect()
    for number in range(rounds):
        pairs = list(zip(contenders, secs, strict=True))
        for contender, taken in reversed(pairs) if number % 2 else pairs:
            taken.append(contender.turn(each))
    rows = []
    for contender, taken in zip(contenders, secs, strict=True):
        interrupts.check()
        rows.append(contender.row(taken))
    on_host = backend.type_of(contenders[0].strategy.devices[0]) == "CPU"
    return Scaling(name, weak, rounds * each, on_host, tuple(rows))


def _sizes(args: Any) -> tuple[int, ...]:
    """How many examples each replica has: rows of the first value that has rows."""
    for leaf in jax.tree.leaves(args, is_leaf=is_per_replica):
        if is_per_replica(leaf) and leaf.shapes[0]:
            return tuple(shape[0] for shape in leaf.shapes)
    return ()


def _require_same_batch(contenders: Sequence[Contender], weak: bool) -> None:
    """Refuses to compare times of different work.

    Raises:
        WorkloadError: the batches are not the same.
    """
    sizes = {len(c.strategy.devices): max(c.sizes, default=0) for c in contenders}
    if not weak:
        sizes = {len(c.strategy.devices): sum(c.sizes) for c in contenders}
    if weak and not all(sizes.values()):
        raise WorkloadError(
            "--weak: no batch is split over the replicas, so it cannot grow with them. Return "
            "(step, args, data), data a list of batches."
        )
    if len(set(sizes.values())) == 1:
        return
    found = ", ".join(f"{size} on {n}" for n, size in sizes.items())
    what = "each replica has another batch" if weak else "the batch grows with the devices"
    fix = (
        "Return (step, args, data), and its batches are repeated for each replica; or make the "
        "batch larger yourself, by strategy.num_replicas_in_sync."
        if weak
        else "Make it the same for any strategy, or pass --weak."
    )
    raise WorkloadError(f"Times of different work: {what}, {found} devices. {fix}")
