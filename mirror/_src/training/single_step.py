"""A single training step of a `Trainer`, for `strategy.run`."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from mirror._src.training.loss_scale import LossScale
from mirror._src.training.trainer import Trainer


def step_of(
    trainer: Trainer,
) -> Callable[..., Any]:
    """Returns one training step of a trainer, for `strategy.run`.

    Its arguments are the model, the optimizer, a `(batch, mask)` pair from
    `distribute_dataset(data, remainder="pad")`, and the loss scale of a trainer that has one.
    Unlike `fit`, it does not pad to a multiple of `accumulate_steps`: it raises a `ValueError` if
    the batch cannot be split into that many pieces.
    """
    single, pieces = trainer._single_step, trainer.accumulate_steps

    def train_step(
        model: nnx.Module,
        optimizer: nnx.Optimizer[Any],
        padded: Any,
        loss_scale: LossScale | None = None,
    ) -> Any:
        batch, mask = padded
        if mask.size % pieces:
            multiple = pieces * trainer.strategy.num_replicas_in_sync
            raise ValueError(
                f"A replica's batch of {mask.size} examples cannot be split into "
                f"accumulate_steps={pieces} equal pieces. Use a batch size that is a multiple of "
                f"{multiple}."
            )
        return single(model, optimizer, batch, mask, loss_scale)

    return train_step
