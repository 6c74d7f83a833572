"""Real data that needs no download: the 1797 handwritten digits that scikit-learn ships."""

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

from mirror._src.data.arrays import ArrayDataset
from mirror.data import from_arrays

NUM_CLASSES = 10
_NUM_TEST = 360


@dataclass(frozen=True)
class Digits:
    """Images and what they show.

    Attributes:
        image: float32 `(N, 8, 8, 1)`, 0 to 1.
        label: int32 `(N,)`, 0 to 9.
    """

    image: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def batches(self, size: int, *, shuffle: bool = False, seed: int = 0) -> ArrayDataset:
        """Global batches of that size, all images once; the last batch is what is left over.

        Each time it is iterated they come in another order, if they are to be shuffled.
        """
        arrays = {"image": self.image, "label": self.label}
        return from_arrays(arrays, size, shuffle=shuffle, seed=seed)


def load() -> tuple[Digits, Digits]:
    """1437 images to train on and 360 to test with; always the same ones."""
    pixels, label = load_digits(return_X_y=True)
    image = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(label))
    digits = [
        Digits(image[rows], label[rows].astype(np.int32)) for rows in np.split(order, [_NUM_TEST])
    ]
    return digits[1], digits[0]
