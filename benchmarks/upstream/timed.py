"""Times functions in turns, for the programs of this folder. Imports JAX only."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def compare(title: str, fns: dict[str, Callable[..., Any]], *shapes: tuple[int, ...]) -> None:
    """Prints the least CPU milliseconds of each function, and checks that their results agree."""
    rng = np.random.RandomState(0)
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    compiled = {name: jax.jit(fn).lower(*args).compile() for name, fn in fns.items()}
    first, *others = (np.asarray(each(*args)) for each in compiled.values())
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-4 * np.abs(first).max())
    times: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(10):
        for name, each in compiled.items():
            start = time.process_time()
            jax.block_until_ready(each(*args))
            times[name].append(time.process_time() - start)
    print(f"{title} (JAX {jax.__version__}, {jax.default_backend()}, float32)")
    for name, found in times.items():
        print(f"  {name:32} {min(found) * 1e3:8.2f} ms")


def conv(x: Any, w: Any, groups: int = 1) -> Any:
    """Returns a convolution of images with the channels last."""
    return jax.lax.conv_general_dilated(
        x,
        w,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
