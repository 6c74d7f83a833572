"""What the demo was asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

Api: TypeAlias = Literal["nnx", "linen", "plain"]
APIS: tuple[Api, ...] = get_args(Api)
TrainerName: TypeAlias = Literal["fit", "loop"]
TRAINERS: tuple[TrainerName, ...] = get_args(TrainerName)
ExecutorName: TypeAlias = Literal["pmap", "vmap", "staged"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)


class OptionError(ValueError):
    """An option that this machine cannot honour; the message names it and what it can be."""


@dataclass(frozen=True)
class Options:
    """The command line of `mirror demo`, checked.

    Attributes:
        devices: how many devices, or their names; `None` means all GPUs, or a few host devices
            without one.
        replicas_per_device: how many replicas on each of them.
        executor: what runs the step; `None`: whatever suits the devices.
        epochs: how many times to go through the training images.
        api: how the net is written.
        trainer: who trains: `mirror.Trainer`, or a loop written by hand over `strategy.run`.
        batch_size: how many images all replicas take together in a step.
        seed: of the initial parameters and of the order of the images.
        plot: the picture file to write the curves to.
    """

    devices: int | tuple[str, ...] | None = None
    replicas_per_device: int = 1
    executor: ExecutorName | None = None
    epochs: int = 15
    api: Api = "nnx"
    trainer: TrainerName = "fit"
    batch_size: int = 64
    seed: int = 0
    plot: Path | None = None
