"""Draws docs/same_bits.svg: the hash of the same training on four sizes of machine.

    python docs/same_bits.py

trains on eight, four, two and one host devices, with `replicas=8` and without.
"""

import hashlib
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import mirror

FILE = Path(__file__).with_suffix(".svg")
COUNTS = (8, 4, 2, 1)
SAME, DIFFERENT, LINE = "#2e7d32", "#c62828", "#3949ab"


def digest(devices: int, replicas: int | None) -> str:
    """Returns the hash of the weights after a training."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 20)).astype(np.float32), rng.integers(0, 3, 400)
    rngs = nnx.Rngs(0)
    with mirror.MirroredStrategy(devices, replicas=replicas).scope():
        first, last = nnx.Linear(20, 64, rngs=rngs), nnx.Linear(64, 3, rngs=rngs)
        model = nnx.Sequential(first, nnx.relu, last)
        trainer = mirror.Trainer(model, optax.adam(0.01), "sparse_categorical_crossentropy")
    trainer.fit((x, y), epochs=2, batch_size=40, progress=False)
    weights = jax.tree.leaves(nnx.state(trainer.model))
    return hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in weights)).hexdigest()[:8]


def machine(count: int, left: int, fixed: str, free: str) -> list[str]:
    """Returns a machine with its devices, and the hashes below it."""
    text = '<text text-anchor="middle" x="{}" y="{}" {}>{}</text>'
    mono = 'font-family="monospace" font-size="17" fill="{}"'
    middle = left + 90
    parts = [
        f'<rect x="{left}" y="20" width="180" height="90" rx="8" fill="#e8eaf6" stroke="{LINE}"/>',
        text.format(middle, 44, 'font-weight="bold"', f"{count} device{'s' * (count > 1)}"),
        text.format(middle, 150, mono.format(SAME), fixed),
        text.format(middle, 200, mono.format(DIFFERENT), free),
    ]
    for i in range(count):
        x = middle - 10 * count + 20 * i
        parts.append(f'<rect x="{x + 2}" y="66" width="16" height="26" rx="3" fill="{LINE}"/>')
    return parts


def main() -> None:
    """Trains, and writes the picture."""
    mirror.config.set_num_cpu_devices(max(COUNTS))
    title = "The weights after a training have one hash on 8, 4, 2 and 1 devices with replicas=8"
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 220" width="940" height="220" '
        'font-family="system-ui, sans-serif" font-size="15" fill="#1a1a2e" role="img">',
        f"<title>{title}</title>",
        '<rect width="940" height="220" rx="10" fill="#ffffff"/>',
        '<text x="20" y="150">replicas=8</text>',
        '<text x="20" y="200">without</text>',
    ]
    for place, count in enumerate(COUNTS):
        found = digest(count, max(COUNTS)), digest(count, None)
        lines += machine(count, 120 + 200 * place, *found)
    FILE.write_text("\n".join([*lines, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
