"""The 1797 handwritten digits of scikit-learn, which need no download."""

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

from mirror._src.data.arrays import ArrayDataset
from mirror.data import from_arrays

SIDE = 8
_NUM_TEST = 360


@dataclass(frozen=True)
class Digits:
    """Images and their labels.

    Attributes:
        image: float32 of shape `(N, 8, 8, 1)`, from 0 to 1.
        label: int32 of shape `(N,)`, from 0 to 9.
    """

    image: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.label)

    def batches(self, size: int, *, shuffle: bool = False, seed: int = 0) -> ArrayDataset:
        """Returns global batches of all images; the last batch may be smaller.

        With `shuffle`, every pass over them has a different order.
        """
        arrays = {"image": self.image, "label": self.label}
        return from_arrays(arrays, size, shuffle=shuffle, seed=seed)


def load() -> tuple[Digits, Digits]:
    """Returns 1437 training images and 360 test images, always the same ones."""
    pixels, label = load_digits(return_X_y=True)
    image = (pixels / 16).astype(np.float32).reshape(-1, SIDE, SIDE, 1)
    order = np.random.default_rng(0).permutation(len(label))
    test, train = (
        Digits(image[rows], label[rows].astype(np.int32)) for rows in np.split(order, [_NUM_TEST])
    )
    return train, test
