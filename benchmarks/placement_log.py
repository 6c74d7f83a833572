"""What the placement log costs: before it was ever switched on, while it is on, and off again.

    python -m benchmarks.placement_log

An eager op, a jitted function and a step of two replicas, in one process, in turn. "never on" and
"off again" have functions of their own: those of the second have been called under the log. The
eager op is JAX's own, and so the same for both: compare it with "before".
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
    """One of each kind, of functions and arrays of its own."""
    a, b = jnp.arange(64.0), jnp.ones(64)
    jitted = jax.jit(lambda a, b: a * b + 1)
    strategy = mirror.MirroredStrategy(jax.devices("cpu")[:2])
    with strategy.scope():
        state = jnp.ones(64)

    def step(x: jax.Array) -> jax.Array:
        return mirror.get_replica_context().all_reduce("mean", x)

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
    """Microseconds a call of each kind, for each arm, one number for each round.

    Before the log is switched on for the first time, the arms are measured against each other:
    that is the noise.
    """
    never, again = contenders(), contenders()
    times: dict[str, dict[str, list[float]]] = {k: {} for k in WORK}
    for kind, count in WORK.items():
        for fn in (never[kind], again[kind]):
            microseconds(fn, count)

    def one(arm: str, kind: str, fn: Callable[[], Any]) -> None:
        times[kind].setdefault(arm, []).append(microseconds(fn, WORK[kind]))

    for _ in range(rounds):
        for kind in WORK:
            one("before, itself", kind, again[kind])
            one("before", kind, never[kind])
    for number in range(rounds):
        mirror.debugging.set_log_device_placement(True)
        for kind in WORK:
            one(ON, kind, again[kind])
        mirror.debugging.set_log_device_placement(False)
        order = [(NEVER, never), (AGAIN, again)]
        for kind in WORK:
            for arm, made in order[:: 1 if number % 2 else -1]:
                one(arm, kind, made[kind])
    return times


def in_words(found: stats.Estimate) -> str:
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    jax.config.update("jax_num_cpu_devices", 2)
    logging.getLogger("mirror").addHandler(logging.NullHandler())  # the terminal is not measured
    times = measure(rounds)
    print(f"{'':14}{'before':>9}{NEVER:>10}{ON:>10}{AGAIN:>11}   ratios to 'never on'")
    for kind, found in times.items():
        medians = [statistics.median(found[arm]) for arm in ("before", NEVER, ON, AGAIN)]
        on, again = (stats.ratio(found, arm, NEVER) for arm in (ON, AGAIN))
        noise = stats.ratio(found, "before, itself", "before")
        print(
            f"{kind:14}{medians[0]:9.2f}{medians[1]:10.2f}{medians[2]:10.2f}{medians[3]:11.2f}   "
            f"on {on.median:.2f}, off again {in_words(again)}, noise {in_words(noise)}"
        )


if __name__ == "__main__":
    main()
