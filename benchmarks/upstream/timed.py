"""Times functions in turns, for the programs of this folder. Imports JAX only."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def compare(
    title: str,
    fns: dict[str, Callable[..., Any]],
    *shapes: tuple[int, ...],
    options: Sequence[dict[str, str]] = (),
    clock: Callable[[], float] = time.process_time,
) -> None:
    """Prints the least CPU milliseconds of each function, and checks that their results agree.

    `options` are the compiler's, for each function. Another clock is `time.perf_counter`.
    """
    rng = np.random.RandomState(0)
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    each_options = options or [{}] * len(fns)
    compiled = {
        name: jax.jit(fn).lower(*args).compile(each)
        for (name, fn), each in zip(fns.items(), each_options, strict=True)
    }
    first, *others = (np.asarray(each(*args)) for each in compiled.values())
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-4 * np.abs(first).max())
    times: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(10):
        for name, each in compiled.items():
            start = clock()
            jax.block_until_ready(each(*args))
            times[name].append(clock() - start)
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
