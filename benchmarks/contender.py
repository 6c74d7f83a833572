"""What every contender can do, whatever it is written in. Imports no library but Python's own."""

import abc
import importlib

from benchmarks import plan
from benchmarks.workloads import Workload


class Contender(abc.ABC):
    """One way to run a training step; it holds its state and its batch.

    Attributes:
        name: One of the names in `plan`.
        fewest_steps: How many steps a turn has at least.
    """

    name: str
    fewest_steps = 3

    @abc.abstractmethod
    def advance(self, steps: int) -> None:
        """Takes some steps, and returns when everything is computed."""

    @abc.abstractmethod
    def loss(self) -> float:
        """Returns the loss of the last step's batch, before that step's update."""

    def close(self) -> None:  # noqa: B027
        """Ends what the contender has started."""


_MODULES = {
    **dict.fromkeys((plan.MIRROR_NNX, plan.MIRROR_PLAIN), "benchmarks.through_mirror"),
    **dict.fromkeys((*plan.HAND_WRITTEN, plan.ONE_DEVICE), "benchmarks.by_hand"),
    plan.TENSORFLOW: "benchmarks.rivals.tensorflow_mirrored",
    plan.KERAS: "benchmarks.rivals.keras_on_jax",
    plan.TORCH: "benchmarks.rivals.torch_ddp",
}


def create(name: str, workload: Workload, num_devices: int) -> Contender:
    """Returns the contender of that name; imports its library, and no other contender's.

    Raises:
        ModuleNotFoundError: If its library is not installed.
    """
    return importlib.import_module(_MODULES[name]).create(name, workload, num_devices)
