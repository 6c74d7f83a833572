"""One training step of a `Trainer` by itself, for `strategy.run`."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from mirror._src.training.trainer import Trainer
from mirror._src.utils.types import PyTree


def step_of(
    trainer: Trainer,
) -> Callable[[nnx.Module, nnx.Optimizer[Any], tuple[PyTree, Any]], Any]:
    """Returns one training step of a trainer, for `strategy.run`.

    Its arguments are the model, the optimizer and a batch with its mask, as
    `distribute_dataset(data, remainder="pad")` yields them. It raises a `ValueError` if
    `accumulate_steps` does not divide the batch of a replica, which `fit` pads.
    """
    single, pieces = trainer._single_step, trainer.accumulate_steps

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer[Any], padded: Any) -> Any:
        batch, mask = padded
        if mask.size % pieces:
            multiple = pieces * trainer.strategy.num_replicas_in_sync
            raise ValueError(
                f"A replica's batch has {mask.size} examples, which accumulate_steps={pieces} does "
                f"not divide. Use a batch size that is a multiple of {multiple}."
            )
        return single(model, optimizer, batch, mask)

    return train_step
