"""Passes over the data of a `Trainer`: one after the other for `fit`, or a single whole pass."""

from collections.abc import Generator
from typing import Any, final

from mirror._src.base import interrupts
from mirror._src.base.closing import closing
from mirror._src.data.distribute import DistributedDataset
from mirror._src.data.padded import PaddedBatch, PaddedDataset

NO_DATA = (
    "The data yielded no batch. Pass batches with at least one example; an exhausted generator "
    "yields nothing more."
)


@final
class Stream:
    """The launches of one pass over the data after the other."""

    def __init__(self, data: PaddedDataset) -> None:
        self._data = data
        self._batches: Any = None
        self._rest: PaddedBatch | None = None

    def next_launch(self, number: int, most: int | None) -> PaddedBatch | None:
        """Returns the next launch, or None at the end of the pass.

        Args:
            number: Number of the pass, which shuffling datasets receive with `set_epoch`.
            most: Maximum number of batches; the rest of a larger group is the next launch. None
                takes the whole group.
        """
        if self._batches is None:
            self._data.set_epoch(number)
            self._batches = iter(self._data)
        launch, self._rest = self._rest or next(self._batches, None), None
        if launch is not None and most is not None and most < launch.num_batches:
            launch, self._rest = launch.split(most)
        return launch

    def close(self) -> None:
        """Ends the pass and releases the data."""
        batches, self._batches, self._rest = self._batches, None, None
        if batches is not None:
            batches.close()


def whole_pass(
    data: DistributedDataset[Any], *, most: int | None = None, **options: Any
) -> Generator[PaddedBatch]:
    """Yields the batches of one pass, all or the first `most`.

    Args:
        data: The dataset.
        most: Maximum number of batches.
        options: Arguments of `DistributedDataset.padded`.

    Raises:
        ValueError: If there is no batch.
    """
    num_batches = 0
    batches = iter(data.padded(**options))
    with closing("closing the data", batches.close):
        while most is None or num_batches < most:
            with interrupts.immediate():
                padded = next(batches, None)
            if padded is None:
                break
            num_batches += 1
            yield padded
            interrupts.check()
    if not num_batches:
        raise ValueError(NO_DATA)
