"""`Position`: the progress of a training, which a checkpoint stores and a resumed run starts at."""

import copy
from typing import Any

from mirror._src.base.errors import require_int
from mirror._src.training.history import History
from mirror._src.training.meter import Meter
from mirror._src.training.objective import Sums

_COUNTS = ("step", "epoch", "epoch_step", "passes", "samples")
_MOST_COUNT = 2**63


class Position:
    """The progress of a training: everything a checkpoint stores besides the arrays.

    During `fit`, only its `TrainingRun` changes the position; all others read it.

    Attributes:
        step: Number of updates, over all epochs.
        epoch: The current epoch, from 0.
        epoch_step: Number of updates in the current epoch.
        passes: Number of complete passes over the data.
        samples: Number of examples of the current pass that have been used.
        meter: Metrics of the current epoch.
        history: Metrics of the completed epochs.
        callbacks: States of the callbacks, by name.
    """

    def __init__(self) -> None:
        self.step = 0
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Starts a new training of the same model."""
        self.epoch = self.passes = epoch
        self.epoch_step = self.samples = 0
        self.meter, self.history = Meter(), History()
        self.callbacks: dict[str, Any] = {}

    def advance(self, num_steps: int, num_examples: int, sums: Sums) -> None:
        """Counts a launch."""
        before = {name: getattr(self, name) for name in _COUNTS}
        self.step += num_steps
        self.epoch_step += num_steps
        self.samples += num_examples
        self.meter.add(self.step, sums, before)

    def drop_failed(self) -> None:
        """Returns to the position before the first launch that failed, if one has."""
        for name, count in (self.meter.drop_failed() or {}).items():
            setattr(self, name, count)

    def next_epoch(self) -> None:
        """Counts an epoch as complete."""
        self.epoch += 1
        self.epoch_step = 0
        self.meter = Meter()

    def next_pass(self) -> None:
        """Counts a pass over the data as complete."""
        self.passes += 1
        self.samples = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the position as JSON."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            "meter": self.meter.to_dict(),
            "history": self.history.to_dict(),
            "callbacks": self.callbacks,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Position":
        """Returns the position of a `to_dict` result.

        Raises:
            ValueError: If it is not the result of `to_dict`.
        """
        position = cls()
        for name in _COUNTS:
            count = state.get(name)
            if type(count) is not int or not 0 <= count < _MOST_COUNT:
                raise ValueError(f"{name} of its position is {count!r}, not a number of {name}")
            setattr(position, name, count)
        for name, read in _PARTS.items():
            try:
                setattr(position, name, read(state[name]))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"the {name} of its position is invalid: {error!r}") from error
        return position


def _callbacks(states: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(state, dict) for state in states.values()):
        raise ValueError("a state is not a dict")
    return dict(states)


_PARTS = {
    "meter": Meter.from_dict,
    "history": History.from_dict,
    "callbacks": _callbacks,
}


def starting_position(
    position: Position, resumes: bool, epochs: int, initial_epoch: int | None
) -> Position:
    """Returns the position to start from. The trainer's own stays unchanged until `fit` starts.

    Args:
        position: The trainer's own.
        resumes: Whether to resume from it, unless there is an `initial_epoch`.
        epochs: As for `Trainer.fit`.
        initial_epoch: As for `Trainer.fit`.

    Raises:
        TypeError: If `epochs` or `initial_epoch` is not an integer.
        ValueError: If one of them is out of range, or there would be nothing to train.
    """
    require_int("epochs", epochs)
    position = copy.copy(position)
    if initial_epoch is not None:
        require_int("initial_epoch", initial_epoch, least=0)
        if initial_epoch >= epochs:
            raise ValueError(
                f"`initial_epoch` must be less than `epochs`, got initial_epoch={initial_epoch} and"
                f" epochs={epochs}. `epochs` is the epoch to stop at, not a number to add."
            )
        position.begin(int(initial_epoch))
    elif not resumes:
        position.begin(0)
    return position
