"""Measures the rules of the pass `lower` against XLA's operations, in turns in one process.

    python -m benchmarks.lowering [--rounds 10] [--json]

prints for each case the CPU time of XLA's operation, divided by the time of its replacement. At
night, `tests/passes/test_lower_speed.py` requires 1.5: below it, XLA has caught up.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mirror

VARIABLE = "MIRROR_LOWERING"
Array = Any


class Case(NamedTuple):
    """An operation that a rule replaces.

    Attributes:
        rule: The module and function of the rule.
        fn: The operation.
        shapes: Shapes of its operands.
        wrt: The operand whose gradient is measured; `None` for the operation itself.
        in_loop: Whether it runs in a loop.
        dtype: Type of its operands.
    """

    rule: str
    fn: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    wrt: int | None = None
    in_loop: bool = False
    dtype: str = "float32"


def _conv(x: Array, w: Array, groups: int = 1, dilation: int = 1) -> Array:
    rank = x.ndim - 2
    letters = "DHW"[3 - rank :]
    return lax.conv_general_dilated(
        x,
        w,
        (1,) * rank,
        "SAME" if dilation == 1 else [(1, 2)] * rank,
        lhs_dilation=(dilation,) * rank,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )


def _pool(x: Array, window: int = 2, stride: int = 2) -> Array:
    dims, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, dims, strides, "VALID")


def _jvp(fn: Callable[..., Array], x: Array) -> Array:
    return jax.jvp(fn, [x], [x])[1]


_IMAGES = (32, 28, 28, 32)
_FILTERS = (3, 3, 1, 32)
_DEPTHWISE = functools.partial(_conv, groups=32)
CASES = {
    "max pooling": Case("pooling._pool", functools.partial(_pool, window=3, stride=1), [_IMAGES]),
    "max pooling, gradient": Case("pooling._select", _pool, [_IMAGES], 0),
    "8 channels, max pooling, gradient": Case("pooling._scatter", _pool, [(32, 28, 28, 8)], 0),
    "overlapping max pooling, gradient": Case(
        "pooling._scatter", functools.partial(_pool, window=3), [(32, 33, 33, 32)], 0
    ),
    "max pooling, jvp": Case("pooling._gather", functools.partial(_jvp, _pool), [_IMAGES]),
    "argmax": Case("arg_extremes", functools.partial(jnp.argmax, axis=-1), [(128, 32000)]),
    "depthwise": Case("convolutions._per_channel", _DEPTHWISE, [_IMAGES, _FILTERS]),
    "depthwise, input's gradient": Case(
        "convolutions._per_channel", _DEPTHWISE, [_IMAGES, _FILTERS], 0
    ),
    "1-D depthwise, kernel's gradient": Case(
        "convolutions._per_channel_kernel",
        functools.partial(_conv, groups=256),
        [(8, 128, 256), (4, 1, 256)],
        1,
    ),
    "one channel": Case("convolutions._per_channel", _conv, [(128, 28, 28, 1), (3, 3, 1, 16)]),
    "4 groups, kernel's gradient": Case(
        "convolutions._per_group",
        functools.partial(_conv, groups=4),
        [(16, 14, 14, 64), (3, 3, 16, 64)],
        1,
    ),
    "wide depthwise, kernel's gradient": Case(
        "convolutions._per_channel_kernel",
        functools.partial(_conv, groups=256),
        [(8, 14, 14, 256), (3, 3, 1, 256)],
        1,
    ),
    "3-D": Case("convolutions._in_planes", _conv, [(4, 12, 12, 12, 16), (3, 3, 3, 16, 16)]),
    "3-D, input's gradient": Case(
        "convolutions._in_planes", _conv, [(4, 12, 12, 12, 16), (3, 3, 3, 16, 16)], 0
    ),
    "3-D, kernel's gradient": Case(
        "convolutions._in_planes", _conv, [(4, 12, 12, 12, 16), (3, 3, 3, 16, 16)], 1
    ),
    "transposed, kernel's gradient": Case(
        "convolutions._per_place",
        functools.partial(_conv, dilation=2),
        [(32, 7, 7, 64), (3, 3, 64, 32)],
        1,
    ),
    "1x1, kernel's gradient": Case(
        "convolutions._per_place", _conv, [(32, 14, 14, 128), (1, 1, 128, 128)], 1
    ),
    "kernel's gradient in a loop": Case(
        "convolutions._channels_last", _conv, [(32, 14, 14, 16), (3, 3, 16, 32)], 1, in_loop=True
    ),
    "depthwise, kernel's gradient in a loop": Case(
        "convolutions._channels_last", _DEPTHWISE, [(4, 16, 16, 32), _FILTERS], 1, in_loop=True
    ),
    "bfloat16, kernel's gradient in a loop": Case(
        "convolutions._channels_last",
        _conv,
        [(32, 14, 14, 16), (3, 3, 16, 32)],
        1,
        in_loop=True,
        dtype="bfloat16",
    ),
}


def _gradient(fn: Callable[..., Array], number: int, *args: Array) -> Array:
    """Returns the gradient with respect to one operand; the last argument is the result's."""
    *operands, dy = args
    return jax.vjp(fn, *operands)[1](dy)[number]


def _twice(fn: Callable[..., Array], *args: Array) -> Array:
    """Returns the sum of a loop of two iterations."""
    like = jax.eval_shape(fn, *args)
    zeros = jnp.zeros(like.shape, like.dtype)
    return lax.scan(lambda total, _: (total + fn(*args), None), zeros, None, 2)[0]


def measure(case: Case, rounds: int) -> float:
    """Returns the CPU time of XLA's operation, divided by that of the rule: least of each."""
    rng = np.random.RandomState(0)
    args = [jnp.asarray(rng.standard_normal(s), case.dtype) for s in case.shapes]
    fn = case.fn
    if case.wrt is not None:
        dy = rng.standard_normal(jax.eval_shape(fn, *args).shape)
        args.append(jnp.asarray(dy, case.dtype))
        fn = functools.partial(_gradient, fn, case.wrt)
    if case.in_loop:
        fn = functools.partial(_twice, fn)
    calls = []
    for value in ("xla", ""):
        os.environ[VARIABLE] = value
        strategy = mirror.MirroredStrategy(jax.devices("cpu")[:1])
        call = functools.partial(strategy.run, lambda *args: fn(*args), tuple(args))
        jax.block_until_ready(call())
        calls.append(call)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for call, turns in zip(calls, times, strict=True):
            start = time.process_time()
            for _ in range(2):
                jax.block_until_ready(call())
            turns.append(time.process_time() - start)
    return min(times[0]) / min(times[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = {}
    for name, case in CASES.items():
        found[name] = measure(case, options.rounds)
        if not options.json:
            print(f"{name:42} {found[name]:6.1f}  {case.rule}", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
