"""Real 8x8 images of digits, in place of the data sets that the guides download."""

from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits


class Digits(NamedTuple):
    """Images `(N, 8, 8, 1)`, float32 from 0 to 1, and labels `(N,)`, int32."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits() -> Digits:
    """Returns 500 images for training and 150 for testing."""
    data = load_digits()
    images = (data.images[:650, :, :, None] / 16).astype("float32")
    labels = data.target[:650].astype("int32")
    return Digits(images[:500], labels[:500], images[500:], labels[500:])
