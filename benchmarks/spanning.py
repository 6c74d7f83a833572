"""Measures what several processes cost on one machine: 2 x 2 host devices against 1 x 4.

    python -m benchmarks.spanning [--rounds 30] [--steps 40]

The jobs train 30 matrices of 16 KiB. They take turns, so that background load affects all. The
processes of a job exchange gradients by JAX's collectives for CPUs, gloo over 127.0.0.1. "by hand"
is `jit(shard_map)` with one all-reduce of all gradients in one buffer; other layouts by hand reduce
within processes first. "2 x 1, 2 replicas each" has the same replicas on one device per process.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import stats
from benchmarks.processes import Child
from benchmarks.timing import in_order
from mirror._src.tools.job import tf_configs

_WORKER = "benchmarks.spanning_worker"
_LIMIT_SECS = 120.0
_RTOL = 1e-4
RATIO_LIMIT, AGREEMENT_LIMIT_SECS = 1.3, 0.02


class Layout(NamedTuple):
    """A job of several processes.

    Attributes:
        processes: Number of processes.
        devices: Number of devices of each process.
        replicas_per_device: Number of replicas on each device.
        by_hand: How a step that is written in JAX reduces gradients, a key of
            `benchmarks.spanning_worker.REDUCTIONS`; "" for mirror.
    """

    processes: int
    devices: int
    replicas_per_device: int = 1
    by_hand: str = ""


LAYOUTS = {
    "1 x 4": Layout(1, 4),
    "2 x 2": Layout(2, 2),
    "4 x 1": Layout(4, 1),
    "2 x 2, by hand": Layout(2, 2, by_hand="all"),
    "2 x 2, by hand, in two steps": Layout(2, 2, by_hand="two steps"),
    "2 x 2, by hand, by one device": Layout(2, 2, by_hand="one device"),
    "2 x 1, 2 replicas each": Layout(2, 1, replicas_per_device=2),
}


class Job:
    """The processes of one layout.

    Args:
        layout: One of `LAYOUTS`.
        pack_bytes: Option of `mirror.AllReduce`.

    Attributes:
        agreements: Duration of the agreement in each process, or None without one.
        loss: Loss of the last step.
    """

    def __init__(self, layout: str, pack_bytes: int | None = None) -> None:
        processes, devices, replicas_per_device, by_hand = LAYOUTS[layout]
        self.children: list[Child] = []
        self.loss = float("nan")
        request = {
            "pack_bytes": pack_bytes,
            "replicas_per_device": replicas_per_device,
            "by_hand": by_hand,
        }
        with contextlib.ExitStack() as stack:
            configs = stack.enter_context(tf_configs(processes)) if processes > 1 else [""]
            for config in configs:
                child = Child(_WORKER, request, devices, {"TF_CONFIG": config})
                self.children.append(stack.enter_context(child))
            answers = self._answers()
            self.agreements = [answer["agreement_secs"] for answer in answers]
            self._stack = stack.pop_all()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        # All processes end together: the first to end waits for the others.
        for child in self.children:
            child.close_input()
        self._stack.close()

    def take(self, steps: int) -> float:
        """Takes some steps in all processes; returns the milliseconds per step of the slowest."""
        for child in self.children:
            child.ask(str(steps))
        return max(answer["ms"] for answer in self._answers())

    def _answers(self) -> list[dict[str, Any]]:
        answers = [child.answer(_LIMIT_SECS) for child in self.children]
        (self.loss,) = {answer["loss"] for answer in answers}  # mirrored: the same bits
        return answers


def measure(
    layouts: Sequence[str], rounds: int, steps: int, pack_bytes: int | None = None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the milliseconds per step of each round, and the slowest agreement, by layout.

    Raises:
        ValueError: If the layouts train to different losses.
    """
    with contextlib.ExitStack() as stack:
        jobs = {name: stack.enter_context(Job(name, pack_bytes)) for name in layouts}
        times: dict[str, list[float]] = {name: [] for name in layouts}
        for job in jobs.values():
            job.take(steps)  # warm up
        _require_same({name: job.loss for name, job in jobs.items()})
        for number in range(rounds):
            for name in in_order(list(layouts), number):
                times[name].append(jobs[name].take(steps))
        agreements = {
            name: max(secs for secs in job.agreements)
            for name, job in jobs.items()
            if None not in job.agreements
        }
    return times, agreements


def _require_same(losses: dict[str, float]) -> None:
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= _RTOL * abs(high):
        raise ValueError(f"The layouts train to different losses: {losses}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints ratios with their 95 % intervals."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spanning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--layouts",
        default="1 x 4;2 x 2;2 x 2, by hand;2 x 1, 2 replicas each",
        help="separated by semicolons; the first is the reference",
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="per turn")
    parser.add_argument("--pack-bytes", type=int, help="0 does not pack (default: mirror's)")
    options = parser.parse_args(argv)
    layouts = options.layouts.split(";")
    times, agreements = measure(layouts, options.rounds, options.steps, options.pack_bytes)
    for name in layouts:
        ratio = stats.ratio(times, name, layouts[0])
        verdict = ratio.at_most(RATIO_LIMIT)
        print(
            f"{name}: {stats.median(times[name]):.2f} ms per step, "
            f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] of {layouts[0]}"
            + ("" if name == layouts[0] else f", limit {RATIO_LIMIT}: {verdict}")
        )
    if {"2 x 2", "2 x 2, by hand"} <= times.keys():
        ratio = stats.ratio(times, "2 x 2", "2 x 2, by hand")
        print(f"2 x 2: {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] of by hand")
    for name, secs in agreements.items():
        verdict = "holds" if secs <= AGREEMENT_LIMIT_SECS else "BROKEN"
        limit = AGREEMENT_LIMIT_SECS * 1e3
        print(f"{name}: agreement {secs * 1e3:.1f} ms, limit {limit:.0f} ms: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
