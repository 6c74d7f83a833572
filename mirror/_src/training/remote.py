"""`RemoteStrategy`: a strategy whose training steps run in other processes, for a `Trainer`."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from mirror._src.base.types import PyTree
from mirror._src.data.padded import PaddedBatch
from mirror._src.engine.per_replica import is_per_replica
from mirror._src.inspection.verify import VerifyReport
from mirror._src.strategy.strategy import Strategy
from mirror._src.training.exact import number_of
from mirror._src.training.objective import LOSS, Sums


class RemoteTraining(abc.ABC):
    """The training of one model with one step, in other processes.

    The objects of this process have the current values while no step runs: steps begin with them,
    and `synchronize` writes the results back.

    Attributes:
        multiple: The number of rows of a padded batch must be a multiple of it.
        most_running: How many steps may be under way before their metrics are read.
        has_lost_values: Whether the values of steps that ended could not be written into the
            objects.
    """

    multiple: int
    most_running: int
    has_lost_values: bool

    @abc.abstractmethod
    def run(self, batch: PyTree, mask: Any) -> Sums:
        """Starts a step with a padded batch of NumPy arrays; reading the sums waits for it."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits for all steps, and writes the values into the model and the optimizer.

        Raises:
            Exception: The first error of a step.
        """

    @abc.abstractmethod
    def verify(self, batch: PyTree, mask: Any, rtol: float) -> VerifyReport:
        """Compares a step with one device; the objects are not changed."""


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

    @property
    def _spans_processes(self) -> bool:
        """Whether several processes run this program."""
        return self.local._spans_processes

    @abc.abstractmethod
    def remote_training(
        self,
        step: Callable[..., Sums],
        model: nnx.Module,
        optimizer: nnx.Optimizer[Any],
        divisor: Callable[[Sums], float],
    ) -> RemoteTraining:
        """Returns the training of a model.

        Args:
            step: Step `(model, optimizer, batch, mask)` of one replica.
            model: The model.
            optimizer: The optimizer of the model.
            divisor: Returns what the gradient of a step was divided by, given its sums.
        """


def local_strategy(strategy: Strategy | RemoteStrategy) -> Strategy:
    """Returns the strategy of this process."""
    return strategy.local if isinstance(strategy, RemoteStrategy) else strategy


def require_local_options(
    kind: str, *, steps_per_execution: int, loss_scale: object, stall_secs: float | None
) -> None:
    """Rejects what a trainer cannot do if its steps run in other processes.

    Raises:
        ValueError: If one of the options is set.
    """
    fixes = {
        f"steps_per_execution={steps_per_execution}": (
            steps_per_execution > 1,
            "Every step is a message. Omit it.",
        ),
        "loss_scale": (
            loss_scale is not None,
            'A step is skipped by all workers or none. Use precision="bfloat16", which needs none.',
        ),
        f"stall_secs={stall_secs}": (
            stall_secs is not None,
            "Steps run on the workers, which the strategy watches. Omit it.",
        ),
    }
    for option, (is_set, fix) in fixes.items():
        if is_set:
            raise ValueError(f"{kind} does not support {option}. {fix}")


def host_batch(padded: PaddedBatch) -> tuple[PyTree, np.ndarray]:
    """Returns the rows of a batch of one replica and its mask, as NumPy arrays."""

    def rows(leaf: Any) -> np.ndarray:
        return np.asarray(leaf)[0]

    batch, mask = jax.tree.map(rows, (padded.batch, padded.mask), is_leaf=is_per_replica)
    return batch, mask


def divisor_of(sums: Sums) -> float:
    """Returns what the gradient of a step was divided by: its examples, or their weights."""
    return float(number_of(sums.weights.get(LOSS, sums.count)))
