"""`StepRunner`: runs training steps, in this process, in all of a job, or on servers."""

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import numpy as np
from flax import nnx

from mirror._src.base.types import PyTree
from mirror._src.data.padded import PaddedBatch
from mirror._src.engine.per_replica import PerReplica, is_per_replica
from mirror._src.engine.replica_context import require_cross_replica
from mirror._src.inspection.equality import warn_of
from mirror._src.inspection.memory import MemoryReport, memory_report
from mirror._src.inspection.verify import VerifyReport, exact_products, verify
from mirror._src.jaxprs.equations import equations
from mirror._src.strategy.strategy import Strategy
from mirror._src.training import steps
from mirror._src.training.objective import LOSS, Objective, Sums, number_of
from mirror._src.training.precision import LossScale
from mirror._src.training.progress import MOST_RUNNING

_LOOPS = {"scan", "while"}


class StepRunner(Protocol):
    """Runs the training steps of one model.

    The objects of this process have the current values while no step is under way: steps begin with
    them, and `synchronize` writes the results back.

    Attributes:
        multiple: The number of rows of a padded batch per replica must be a multiple of it.
        most_running: How many steps may be under way before their metrics are read.
        on_host: Whether it takes batches in NumPy.
        may_fail_later: Whether a step may fail after `run` has returned, as if it had not run.
        has_lost_values: Whether the values of steps that ended could not be written into the
            objects.
        checked_model: The model, which this process can trace, to check the padding of batches.
    """

    multiple: int
    most_running: int
    on_host: bool
    may_fail_later: bool
    has_lost_values: bool
    checked_model: nnx.Module

    def run(self, batch: PaddedBatch) -> Sums:
        """Starts a step; reading the sums waits for it."""
        ...

    def synchronize(self) -> None:
        """Waits for steps in other processes, and writes their values into the objects.

        Raises:
            Exception: The first error of a step.
        """
        ...

    def verify(self, batch: PaddedBatch, rtol: float) -> VerifyReport:
        """Compares a step with one device; the objects are not changed."""
        ...

    def lowered_text(self, batch: PaddedBatch | None) -> str:
        """Returns the program of a step: the compiler's input, or a report if it is staged.

        Raises:
            RuntimeError: If no step has run yet, so that there is no batch.
        """
        ...


@final
@dataclass(eq=False)
class Training:
    """The step, the loss and the objects of a runner.

    Attributes:
        strategy: The strategy of this process.
        objective: The loss.
        objects: Model, optimizer and perhaps the loss scale, by name. The trainer may replace them.
        step: Step `(model, optimizer, batch, mask, loss_scale=None)` of one replica.
        whole_step: The same step, which does not compute in pieces.
        evaluate_step: Step `(model, batch, mask)` of one replica.
        accumulate_steps: Number of pieces into which `step` splits a replica's batch.
    """

    strategy: Strategy
    objective: Objective
    objects: dict[str, Any]
    step: Callable[..., Sums]
    whole_step: Callable[..., Sums]
    evaluate_step: Callable[..., Sums]
    accumulate_steps: int
    _is_traced: bool = False

    def trace_once(self, batch: PaddedBatch) -> None:
        """Traces the loss in this process: labels are checked and warnings raised here."""
        if not self._is_traced:
            arguments = (self.objects["model"], batch.batch, batch.mask)
            self.strategy._runner.lower(self.evaluate_step, arguments, {})
            gradients = steps.gradients_of(self.objective, self.objects["optimizer"].wrt)
            self.strategy._runner.traced(gradients, arguments, {})
            self.warn_after_trace(self.evaluate_step, arguments)
            self._is_traced = True

    def warn_after_trace(self, step: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Issues the warnings about a loss that has just been traced."""
        runner = self.strategy._runner
        self.objective.warn_after_trace(lambda: runner.traced(step, arguments, {})[1].jaxpr)


@final
class LocalSteps:
    """Steps on the replicas of a strategy, in this process or in all processes of a job."""

    most_running = MOST_RUNNING
    on_host = may_fail_later = has_lost_values = False

    def __init__(self, training: Training, *, require_equal: bool | None = None) -> None:
        self._training, self._strategy = training, training.strategy
        self.checked_model = training.objects["model"]
        self._proved: set[Any] | None = set() if require_equal else None
        self.multiple = training.accumulate_steps
        self._group_step = steps.repeated(training.step)
        for step in (training.step, self._group_step):
            warn_of(step, is_on_purpose=require_equal is not None)

    def run(self, batch: PaddedBatch) -> Sums:
        """See `StepRunner.run`."""
        if self._proved is not None:
            self._require_equal(batch, self._proved)
        step, arguments = self._call(batch)
        sums: Sums = self._strategy.run(step, arguments)
        self._training.warn_after_trace(step, arguments)
        return sums

    def warned(self, batch: PaddedBatch) -> set[str]:
        """Returns the kinds of warnings about a step that has run; see `Runner.warned`."""
        return self._strategy._runner.warned(self._call(batch)[0])

    def _require_equal(self, batch: PaddedBatch, proved: set[Any]) -> None:
        """Checks that a step is proved to equal one device, once for batches of these shapes.

        Raises:
            ValueError: If it is not. The message names the operation.
        """
        tree: Any
        leaves, tree = jax.tree.flatten((batch.batch, batch.mask), is_leaf=is_per_replica)
        is_group = batch.mask.stacked.ndim == 3
        # The shapes of a replica's batch; only the shapes count.
        shapes = [(leaf.stacked.shape[1 + is_group :], leaf.dtype) for leaf in leaves]
        if (key := (tree, tuple(shapes))) in proved:
            return
        n = self._strategy.num_replicas_in_sync
        arrays = [PerReplica.from_stacked(np.zeros((n, *shape), dtype)) for shape, dtype in shapes]
        model, optimizer, *scales = self._training.objects.values()
        arguments = (model, optimizer, *tree.unflatten(arrays), *scales)
        report = self._strategy.inspect(self._training.step, arguments).equals_one_device
        if report.verdict != "equal":
            raise ValueError(f"require_equal=True, but:\n{report}")
        proved.add(key)

    def _call(self, batch: PaddedBatch) -> tuple[Callable[..., Sums], tuple[Any, ...]]:
        """Returns the step for a batch, or a group of them, and its arguments."""
        model, optimizer, *scales = self._training.objects.values()
        arguments = (model, optimizer, batch.batch, batch.mask)
        if batch.mask.stacked.ndim == 2:
            return self._training.step, (*arguments, *scales)
        numbers = np.int32(batch.first), np.int32(batch.num_batches)
        return self._group_step, (*arguments, *numbers, *scales)

    def memory(self, batch: PaddedBatch) -> MemoryReport:
        """Returns the memory of a step, which it compiles."""
        step, arguments = self._call(batch)
        runner = self._strategy._runner
        return memory_report(runner.examined(step, arguments, {}), runner.replicas)

    def synchronize(self) -> None:
        """See `StepRunner.synchronize`."""

    def verify(self, batch: PaddedBatch, rtol: float) -> VerifyReport:
        """See `StepRunner.verify`."""
        require_cross_replica(self._strategy, "verify", "Call it outside the step.")
        runners = self._strategy._runner, self._strategy._single_runner()
        step, arguments = self._call(batch)
        in_turn = self._strategy._runner_in_turn
        with exact_products(runners[0].replicas):
            return verify(*runners, step, arguments, {}, rtol, self._alone, in_turn)

    def _alone(self, tree: PyTree) -> tuple[Callable[..., Sums], PyTree]:
        """Returns the step of one device, which neither pads a batch nor splits it."""
        (model, optimizer, batch, mask, *scales), kwargs = tree
        is_example = np.asarray(mask.values[0])

        def examples(leaf: PerReplica) -> PerReplica:
            return PerReplica([np.asarray(leaf.values[0])[is_example]])

        batch, mask = jax.tree.map(examples, (batch, mask), is_leaf=is_per_replica)
        return self._training.whole_step, ((model, optimizer, batch, mask, *scales), kwargs)

    def lowered_text(self, batch: PaddedBatch | None) -> str:
        """See `StepRunner.lowered_text`."""
        if batch is None:
            raise RuntimeError(
                "Cannot return the program of the last step: train for a step first."
            )
        step, arguments = self._call(batch)
        if self._strategy._runner.is_staged:
            return str(self._strategy.inspect(step, arguments))
        return self._strategy._runner.lower(step, arguments, {}).as_text()


def flops_of(runner: StepRunner, batch: PaddedBatch | None) -> float:
    """Returns XLA's count of the operations of a step on each device, or 0 if it is unknown.

    XLA counts the body of a loop once.
    """
    if not isinstance(runner, LocalSteps) or runner._strategy._runner.is_staged or batch is None:
        return 0
    step, arguments = runner._call(batch)
    program = runner._strategy._runner.traced(step, arguments, {})[1].jaxpr
    if any(eqn.primitive.name in _LOOPS for eqn in equations(program.jaxpr)):
        return 0
    analysis = runner._strategy._runner.lower(step, arguments, {}).cost_analysis()
    return float((analysis or {}).get("flops", 0))


class RemoteStrategy(abc.ABC):
    """Base class of strategies that train in other processes."""

    @property
    @abc.abstractmethod
    def local(self) -> Strategy:
        """The strategy of this process, with which everything but training runs."""

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that compute an update."""

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and logs."""
        return self.local.is_chief

    @abc.abstractmethod
    def step_runner(self, training: Training) -> StepRunner:
        """Returns what runs the steps of a model."""


_ONLY_LOCAL = {
    "steps_per_execution": "Every step is a message. Omit it.",
    "loss_scale": "A step is skipped by all workers or none. "
    'Use precision="bfloat16", which needs none.',
    "stall_secs": "Steps run on the workers, which the strategy watches. Omit it.",
    "require_equal": "Servers join what the workers compute, which is not traced. "
    "Use trainer.verify.",
    "micro_batch": "Workers compute parts of a batch. Pass accumulate_steps.",
}


def require_local_options(kind: str, options: Mapping[str, Any]) -> None:
    """Rejects what a trainer cannot do if its steps run in other processes.

    Args:
        kind: Name of the strategy's class.
        options: Options of the trainer by name; None if one is not set.

    Raises:
        ValueError: If one of them is set.
    """
    for name, fix in _ONLY_LOCAL.items():
        value = options[name]
        if value is not None:
            option = name if isinstance(value, LossScale) else f"{name}={value!r}"
            raise ValueError(f"{kind} does not support {option}. {fix}")


def local_strategy(strategy: Strategy | RemoteStrategy) -> Strategy:
    """Returns the strategy of this process."""
    return strategy.local if isinstance(strategy, RemoteStrategy) else strategy


def host_batch(padded: PaddedBatch) -> tuple[PyTree, np.ndarray]:
    """Returns the rows of a batch of one replica and its mask, as NumPy arrays."""

    def rows(leaf: PerReplica) -> np.ndarray:
        return np.asarray(leaf.stacked)[0]

    batch, mask = jax.tree.map(rows, (padded.batch, padded.mask), is_leaf=is_per_replica)
    return batch, mask


def divisor_of(sums: Sums) -> float:
    """Returns what the gradient of a step was divided by: its examples, or their weights."""
    return float(number_of(sums.weights.get(LOSS, sums.count)))
