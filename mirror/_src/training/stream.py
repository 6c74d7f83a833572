"""The data of a `Trainer`: passes over a dataset, cut into epochs for `fit`, or one whole pass."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, final

import numpy as np

from mirror._src.data.distribute import DistributedDataset
from mirror._src.data.padded import PaddedBatch, PaddedDataset
from mirror._src.training.position import Position
from mirror._src.utils import interrupts
from mirror._src.utils.errors import describe

NO_DATA = (
    "The data yielded no batch. Pass batches of at least one example; a generator that has been "
    "used up yields nothing more."
)


class Launch(NamedTuple):
    """The batches of a group that are trained with in one launch: all, unless an epoch ends there.

    Attributes:
        padded: the group.
        first: which of its batches is the first.
        num_batches: how many of them there are.
        num_examples: in these.
    """

    padded: PaddedBatch
    first: int
    num_batches: int
    num_examples: int

    def cut(self, count: int) -> tuple["Launch", "Launch"]:
        """Its first batches, and the others."""
        end = self.first + count
        num_examples = int(np.asarray(self.padded.mask)[:, self.first : end].sum())
        rest = self.num_batches - count, self.num_examples - num_examples
        one = self._replace(num_batches=count, num_examples=num_examples)
        return one, Launch(self.padded, end, *rest)


@final
class Stream:
    """Batches, epoch by epoch, from where a position says.

    An epoch is a pass over the data, or `steps_per_epoch` batches, whatever passes they lie in.
    """

    def __init__(
        self,
        data: PaddedDataset,
        length: int | None,
        steps_per_epoch: int | None,
        position: Position,
    ) -> None:
        if steps_per_epoch is not None and (
            isinstance(steps_per_epoch, bool)
            or not isinstance(steps_per_epoch, int | np.integer)
            or steps_per_epoch < 1
        ):
            raise ValueError(
                f"steps_per_epoch={describe(steps_per_epoch)} is no number of batches from 1 on."
            )
        self._position = position
        self._data = data
        self._limit = steps_per_epoch
        self.steps_per_epoch = steps_per_epoch or length
        self._batches: Any = None
        self._left: Launch | None = None

    def epoch(self) -> Iterator[Launch]:
        """The rest of the epoch's batches."""
        position = self._position
        while self._limit is None or position.epoch_step < self._limit:
            launch = self._next()
            if launch is not None:
                yield launch
            elif not position.samples:
                raise ValueError(NO_DATA)
            elif self._limit is None:
                return
            else:
                self._end_pass()

    def end_epoch(self) -> None:
        """The epoch is over, and with it the pass, unless epochs are counted in steps."""
        if self._limit is None:
            self._end_pass()

    def _next(self) -> Launch | None:
        """What the last epoch left of a group, or the next one; no more than the epoch takes."""
        launch, self._left = self._left, None
        if launch is None and (padded := next(self._pass(), None)):
            launch = Launch(padded, 0, padded.num_batches, padded.num_examples)
        wanted = self._limit and self._limit - self._position.epoch_step
        if launch is not None and wanted and wanted < launch.num_batches:
            launch, self._left = launch.cut(wanted)
        return launch

    def _pass(self) -> Iterator[PaddedBatch]:
        if self._batches is None:
            self._data.set_epoch(self._position.passes)
            self._batches = iter(self._data)
        return self._batches

    def _end_pass(self) -> None:
        self._position.next_pass()
        self.close()

    def close(self) -> None:
        """Lets go of the data."""
        batches, self._batches, self._left = self._batches, None, None
        if batches is not None:
            batches.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def length_of(data: Any) -> int | None:
    """How many batches there are, where the data knows."""
    try:
        return len(data)
    except TypeError:
        return None


def whole_pass(data: DistributedDataset, **options: Any) -> Generator[PaddedBatch]:
    """All batches of one pass; `options` are those of `DistributedDataset.padded`.

    Raises:
        ValueError: there is no batch.
    """
    empty = True
    with contextlib.closing(iter(data.padded(**options))) as found:
        for padded in found:
            empty = False
            yield padded
            interrupts.check()
    if empty:
        raise ValueError(NO_DATA)
