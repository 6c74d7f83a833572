"""Measures every contender alone in a fresh process; the processes take turns."""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks import plan, workloads
from benchmarks.processes import Child, ChildError
from benchmarks.timing import in_order
from benchmarks.worker import CHECK_STEPS, TURN

START_LIMIT_SECS = 600.0
TURN_LIMIT_SECS = 60.0
_SETTLE_SECS = 0.02  # until the threads of the previous process stop spinning
_BACKENDS = {plan.KERAS: "jax", plan.TENSORFLOW: "tensorflow"}


class Cell:
    """Measurements of one model on one number of devices.

    Args:
        job: What to measure.
        log: Is called immediately with the reason for a failure.

    Attributes:
        times: Milliseconds per step by contender, one list per start.
        losses: Losses of the initial parameters and after some steps, by contender.
        lost: Reason of the failure, by contender that was not measured, or not completely.
    """

    def __init__(self, job: plan.Job, log: Callable[[str], None]) -> None:
        self._job, self._log = job, log
        self._rtol = workloads.BY_NAME[job.names[0]].loss_rtol
        self.times: dict[str, list[list[float]]] = {name: [] for name in job.contenders}
        self.losses: dict[str, list[float]] = {}
        self.lost: dict[str, str] = {}

    def measure(self) -> dict[str, Any]:
        """Measures all starts; returns the attributes as a dict for JSON."""
        for start in range(self._job.timing.starts):
            self._measure_start(start)
        return {"times": self.times, "losses": self.losses, "lost": self.lost}

    def _measure_start(self, start: int) -> None:
        """Starts the processes, which compile at the same time, and then lets them take turns."""
        with ExitStack() as stack:
            workers = {}
            for name in self._present(start):
                workers[name] = stack.enter_context(self._worker(name))
                self.times[name].append([])
            self._require_losses(workers)
            for number in range(self._job.timing.rounds):
                for name in in_order(list(workers), number):
                    if name in workers and not self._turn(name, workers[name]):
                        del workers[name]

    def _present(self, start: int) -> list[str]:
        """Returns the contenders of a start; rivals and failed ones only in the first."""
        excluded = {name for name, reason in self.lost.items() if reason.startswith("not ")}
        present = [name for name in self._job.contenders if name not in excluded]
        return [name for name in present if start == 0 or name not in plan.RIVALS]

    def _worker(self, name: str) -> Child:
        request = {
            "contender": name,
            "model": self._job.names[0],
            "devices": self._job.devices,
            "round_secs": self._job.timing.round_secs,
        }
        extra = environment_of(name, self._job.devices)
        return Child("benchmarks.worker", request, self._job.devices, extra)

    def _require_losses(self, workers: dict[str, Child]) -> None:
        """Waits until all workers are ready, and removes workers whose losses are wrong."""
        losses_by_name: dict[str, list[float]] = {}
        for name, worker in list(workers.items()):
            try:
                answer = worker.answer(START_LIMIT_SECS)
            except ChildError as error:
                self._lose(name, str(error))
                del workers[name]
                continue
            if "missing" in answer:
                self._lose(name, "not installed")
                del workers[name]
            else:
                losses_by_name[name] = answer["losses"]
        self.losses.update(losses_by_name)
        judge = reference(losses_by_name)
        for name, losses in losses_by_name.items():
            if reason := difference(losses, losses_by_name[judge], judge, self._rtol):
                self._lose(name, reason)
                del workers[name]

    def _turn(self, name: str, worker: Child) -> bool:
        time.sleep(_SETTLE_SECS)
        try:
            worker.ask(TURN)
            self.times[name][-1].append(worker.answer(TURN_LIMIT_SECS)["ms"])
        except ChildError as error:
            self._lose(name, str(error))
            return False
        return True

    def _lose(self, name: str, reason: str) -> None:
        self.lost[name] = reason
        self._log(f"{name}: {reason}")


def environment_of(name: str, num_devices: int) -> dict[str, str]:
    """Returns variables that users of a rival set: the backend of Keras, threads of torchrun."""
    if name in _BACKENDS:
        return {"KERAS_BACKEND": _BACKENDS[name]}
    if name == plan.TORCH and num_devices > 1:
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {}


def reference(losses: dict[str, list[float]]) -> str:
    """Returns the contender whose losses are the reference, preferably a hand-written one."""
    by_hand = (plan.SHARD_MAP, plan.JIT, plan.PMAP, plan.ONE_DEVICE)
    return next((name for name in (*by_hand, *losses) if name in losses), "")


def difference(losses: list[float], expected: list[float], judge: str, rtol: float) -> str:
    """Returns a description of the difference between two contenders' losses; empty if equal."""
    for steps, loss, right in zip((0, CHECK_STEPS), losses, expected, strict=True):
        if not math.isclose(loss, right, rel_tol=rtol):
            return (
                f"not the same training: the loss after {steps} steps is {loss:.6g}, but "
                f"{right:.6g} for {judge}"
            )
    return ""
