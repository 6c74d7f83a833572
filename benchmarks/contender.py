"""Base class of all contenders. Imports only the standard library."""

import abc
import importlib

from benchmarks import plan
from benchmarks.workloads import Workload


class Contender(abc.ABC):
    """One implementation of a training step, with its state and its batch.

    Attributes:
        name: One of the names in `plan`.
        fewest_steps: Least number of steps in a turn.
    """

    name: str
    fewest_steps = 3

    @abc.abstractmethod
    def advance(self, steps: int) -> None:
        """Takes some steps, and waits until all results are computed."""

    @abc.abstractmethod
    def loss(self) -> float:
        """Returns the loss of the last step, before its update."""

    def close(self) -> None:  # noqa: B027
        """Stops processes that the contender has started."""


_MODULES = {
    **dict.fromkeys((plan.MIRROR_NNX, plan.MIRROR_PLAIN), "benchmarks.through_mirror"),
    **dict.fromkeys((*plan.HAND_WRITTEN, plan.ONE_DEVICE), "benchmarks.by_hand"),
    plan.TENSORFLOW: "benchmarks.rivals.tensorflow_mirrored",
    plan.KERAS: "benchmarks.rivals.keras_on_jax",
    plan.TORCH: "benchmarks.rivals.torch_ddp",
}


def create(name: str, workload: Workload, num_devices: int) -> Contender:
    """Returns a contender by name; imports only the library of this contender.

    Raises:
        ModuleNotFoundError: If its library is not installed.
    """
    return importlib.import_module(_MODULES[name]).create(name, workload, num_devices)
