"""Measures the cost of the placement log: never on, on, and off again.

    python -m benchmarks.placement_log

It measures an eager op, a jitted function and a step of two replicas, in turns in one process.
"never on" and "off again" use separate functions; only the functions of "off again" have been
called while the log was on. The eager op is the same for both, so compare it with "before".
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mirror
from benchmarks import stats

NEVER, ON, AGAIN = "never on", "on", "off again"
WORK = {"eager a + b": 200, "jitted call": 200, "strategy.run": 20}


def contenders() -> dict[str, Callable[[], Any]]:
    """Returns a call of each kind, with its own functions and arrays."""
    a, b = jnp.arange(64.0), jnp.ones(64)
    jitted = jax.jit(lambda a, b: a * b + 1)
    strategy = mirror.MirroredStrategy(jax.devices("cpu")[:2])
    with strategy.scope():
        state = jnp.ones(64)

    def step(x: jax.Array) -> jax.Array:
        return mirror.all_reduce("mean", x)

    return {
        "eager a + b": lambda: a + b,
        "jitted call": lambda: jitted(a, b),
        "strategy.run": lambda: strategy.run(step, (state,)),
    }


def microseconds(fn: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        result = fn()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / times * 1e6


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns microseconds per call by kind and arm, one number per round.

    Before the log is switched on for the first time, the two sets of functions are compared with
    each other, which shows the noise.
    """
    never, again = contenders(), contenders()
    times: dict[str, dict[str, list[float]]] = {k: {} for k in WORK}
    for kind, count in WORK.items():
        for fn in (never[kind], again[kind]):
            microseconds(fn, count)

    def record(arm: str, kind: str, fn: Callable[[], Any]) -> None:
        times[kind].setdefault(arm, []).append(microseconds(fn, WORK[kind]))

    for _ in range(rounds):
        for kind in WORK:
            record("before, itself", kind, again[kind])
            record("before", kind, never[kind])
    for number in range(rounds):
        mirror.debugging.set_log_device_placement(True)
        for kind in WORK:
            record(ON, kind, again[kind])
        mirror.debugging.set_log_device_placement(False)
        order = [(NEVER, never), (AGAIN, again)]
        for kind in WORK:
            for arm, calls in order[:: 1 if number % 2 else -1]:
                record(arm, kind, calls[kind])
    return times


def format_estimate(value: stats.Estimate) -> str:
    return f"{value.median:.3f} [{value.low:.3f}, {value.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    jax.config.update("jax_num_cpu_devices", 2)
    logging.getLogger("mirror").addHandler(logging.NullHandler())  # without the terminal
    times = measure(rounds)
    print(f"{'':14}{'before':>9}{NEVER:>10}{ON:>10}{AGAIN:>11}   ratios to 'never on'")
    for kind, by_arm in times.items():
        medians = [statistics.median(by_arm[arm]) for arm in ("before", NEVER, ON, AGAIN)]
        on, again = (stats.ratio(by_arm, arm, NEVER) for arm in (ON, AGAIN))
        noise = stats.ratio(by_arm, "before, itself", "before")
        print(
            f"{kind:14}{medians[0]:9.2f}{medians[1]:10.2f}{medians[2]:10.2f}{medians[3]:11.2f}   "
            f"on {on.median:.2f}, off again {format_estimate(again)}, "
            f"noise {format_estimate(noise)}"
        )


if __name__ == "__main__":
    main()
