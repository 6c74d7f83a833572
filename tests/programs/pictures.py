"""Generated 28x28 pictures: a pattern per class, plus noise."""

import numpy as np

NUM_CLASSES = 10


def pictures(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Images `(count, 28, 28, 1)`, float32, and labels `(count,)`, int32."""
    patterns = np.random.default_rng(0).random((NUM_CLASSES, 28, 28, 1), np.float32)
    rng = np.random.default_rng(seed + 1)
    label = rng.integers(0, NUM_CLASSES, count, np.int32)
    noise = rng.random((count, 28, 28, 1), np.float32)
    return {"image": (patterns[label] + noise) / 2, "label": label}
