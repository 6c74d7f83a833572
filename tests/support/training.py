"""Trainings without a progress bar, and their data."""

from collections.abc import Iterable
from typing import Any

import numpy as np

import mirror


def fit(trainer: mirror.Trainer, data: Iterable, epochs: int = 1, **kwargs: Any) -> mirror.History:
    return trainer.fit(data, epochs, progress=False, **kwargs)


def batches_of(arrays: dict[str, np.ndarray], size: int) -> list[dict[str, np.ndarray]]:
    """Splits the rows of the arrays into batches; the last one may be smaller."""
    count = len(next(iter(arrays.values())))
    return [
        {name: value[i : i + size] for name, value in arrays.items()} for i in range(0, count, size)
    ]
