"""`Position`: where a training stands, and where it starts."""

import copy
from typing import Any

from mirror._src.training.history import History
from mirror._src.training.meter import Meter
from mirror._src.training.objective import Sums
from mirror._src.utils.errors import require_int

_NUMBERS = ("step", "epoch", "epoch_step", "passes", "samples")


class Position:
    """Where a training stands: what a checkpoint holds beside the arrays.

    Attributes:
        step: how many updates there were, over all epochs.
        epoch: the epoch under way, from 0.
        epoch_step: how many updates of it.
        passes: how many times the data has been gone through before this pass.
        samples: how many examples of this pass have been trained with.
        meter: the metrics of this epoch.
        history: those of the ones before.
        callbacks: what they want to be held, by name.
    """

    def __init__(self) -> None:
        self.step = 0
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """A new training, of the same model."""
        self.epoch = self.passes = epoch
        self.epoch_step = self.samples = 0
        self.meter, self.history = Meter(), History()
        self.callbacks: dict[str, Any] = {}

    def advance(self, num_steps: int, num_examples: int, sums: Sums) -> None:
        """A launch has been made."""
        self.step += num_steps
        self.epoch_step += num_steps
        self.samples += num_examples
        self.meter.add(self.step, sums)

    def next_epoch(self) -> None:
        """The epoch has ended."""
        self.epoch += 1
        self.epoch_step = 0
        self.meter = Meter()

    def next_pass(self) -> None:
        """The data has ended."""
        self.passes += 1
        self.samples = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {
            **numbers,
            "meter": self.meter.to_dict(),
            "history": self.history.to_dict(),
            "callbacks": self.callbacks,
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Position":
        """The position that `to_dict` gave."""
        position = cls()
        for name in _NUMBERS:
            setattr(position, name, int(found[name]))
        position.meter = Meter(**found["meter"])
        position.history = History.from_dict(found["history"])
        position.callbacks = dict(found["callbacks"])
        return position


def starting_position(
    position: Position, goes_on: bool, epochs: int, initial_epoch: int | None
) -> Position:
    """The position to start from. The trainer's own is as it was until the training begins.

    Args:
        position: the trainer's own.
        goes_on: whether that training goes on, unless there is an `initial_epoch`.
        epochs: as for `Trainer.fit`.
        initial_epoch: as for `Trainer.fit`.

    Raises:
        TypeError: `epochs` or `initial_epoch` is no number.
        ValueError: it is below what it must be, or nothing would be trained.
    """
    require_int("epochs", epochs)
    position = copy.copy(position)
    if initial_epoch is not None:
        require_int("initial_epoch", initial_epoch, least=0)
        if initial_epoch >= epochs:
            raise ValueError(
                f"initial_epoch={initial_epoch} with epochs={epochs}: nothing would be trained."
                " epochs is the number of the epoch to end at, not how many to train."
            )
        position.begin(int(initial_epoch))
    elif not goes_on:
        position.begin(0)
    return position
