"""The options of `mirror demo`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

ExecutorName: TypeAlias = Literal["pmap", "vmap", "staged"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)


@dataclass(frozen=True)
class Options:
    """The parsed options of `mirror demo`.

    Attributes:
        devices: Number of devices, or their names. `None` selects all GPUs, or four host devices
            on a machine without GPUs.
        replicas_per_device: Number of replicas on each device.
        executor: Runs the step. `None` selects the executor that suits the devices.
        epochs: Number of passes over the training images.
        batch_size: Number of images in a global batch.
        seed: Seed of the initial parameters and of the order of the images.
        plot: Picture file for the curves of loss and accuracy.
    """

    devices: int | tuple[str, ...] | None = None
    replicas_per_device: int = 1
    executor: ExecutorName | None = None
    epochs: int = 15
    batch_size: int = 64
    seed: int = 0
    plot: Path | None = None
