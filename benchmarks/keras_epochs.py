"""Measures what an epoch of Keras costs under a scope: against Keras alone, and its DataParallel.

    python -m benchmarks.keras_epochs [--workloads wide,cnn,small] [--devices 1,2,4,8] [--rounds 12]

On one device, a model that is created in the scope of a strategy is compared with a model of Keras
alone; on several host devices, with `keras.distribution.DataParallel`. Both train with `fit` on
arrays in memory. They take turns, first in one process, then each in a process of its own: the two
can differ, because contenders of one process share its thread pools.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from benchmarks import stats
from benchmarks.processes import Child, ChildError
from benchmarks.timing import in_order
from benchmarks.workloads import BY_NAME

_CHILD = "benchmarks.keras_epochs_child"
_LIMIT_SECS = 120.0
_RTOL = 1e-3
SCOPE, ALONE, PARALLEL = "scope", "Keras alone", "DataParallel"
LIMITS = {ALONE: 1.05, PARALLEL: 1.0}


def measure(
    workload: str, num_devices: int, rounds: int, steps: int, *, in_one_process: bool
) -> dict[str, list[float]]:
    """Returns the milliseconds per step of each round, by contender.

    Raises:
        ValueError: If the contenders train to different losses.
        ChildError: If a process hangs, or ends with an error.
    """
    names = [SCOPE, ALONE if num_devices == 1 else PARALLEL]
    groups = [names] if in_one_process else [[name] for name in names]
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for group in groups:
            request = {"workload": workload, "contenders": group, "steps": steps}
            child = Child(_CHILD, request, num_devices, {"KERAS_BACKEND": "jax"})
            children |= dict.fromkeys(group, stack.enter_context(child))

        def take(name: str) -> tuple[float, float]:
            try:
                children[name].ask(name)
                answer = children[name].answer(_LIMIT_SECS)
            except ChildError as error:
                raise ChildError(f"in the turn of {name}, its process {error}") from None
            return answer["ms"], answer["loss"]

        losses = {name: take(name)[1] for name in names}
        low, high = min(losses.values()), max(losses.values())
        if not high - low <= _RTOL * abs(high):
            raise ValueError(f"The contenders train to different losses: {losses}.")
        for name in names:
            take(name)  # warm up
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            for name in in_order(names, number):
                times[name].append(take(name)[0])
    return times


def line(times: dict[str, list[float]]) -> str:
    """Returns medians and the ratio with its interval."""
    base = next(name for name in times if name != SCOPE)
    found = stats.ratio(times, SCOPE, base)
    medians = ", ".join(f"{name} {stats.median(values):.2f} ms" for name, values in times.items())
    return (
        f"{medians}: {found.median:.2f} [{found.low:.2f}, {found.high:.2f}], "
        f"limit {LIMITS[base]:g}: {found.at_most(LIMITS[base])}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints ratios with their 95 % intervals."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.keras_epochs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", default="wide,cnn,small", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--devices", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60, help="of an epoch, which is a turn")
    options = parser.parse_args(argv)
    failures = 0
    for workload in options.workloads.split(","):
        for num_devices in map(int, options.devices.split(",")):
            for in_one_process in (True, False):
                where = "one process" if in_one_process else "own processes"
                print(f"{workload}, {num_devices} devices, {where}: ", end="", flush=True)
                try:
                    times = measure(
                        *(workload, num_devices, options.rounds, options.steps),
                        in_one_process=in_one_process,
                    )
                except ChildError as error:
                    failures += 1
                    print(error)
                else:
                    print(line(times))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
