"""Own process: each contender alone in a fresh process; the processes take turns."""

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks import plan
from benchmarks.processes import Child, ChildError
from benchmarks.timing import in_order
from benchmarks.worker import CHECK_STEPS, TURN

LOSS_RTOL = 1e-3
START_LIMIT_SECS = 600.0
TURN_LIMIT_SECS = 60.0
_SETTLE_SECS = 0.02  # threads of the process that had its turn stop spinning
_BACKENDS = {plan.KERAS: "jax", plan.TENSORFLOW: "tensorflow"}


class Cell:
    """One model on one number of devices.

    Attributes:
        times: For each contender the milliseconds per step, one list per start.
        losses: For each contender the loss of the initial parameters and after some steps.
        lost: For each contender that was not measured, or not to the end, the reason.
        say: Is told at once of every reason.
    """

    def __init__(self, job: plan.Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self.times: dict[str, list[list[float]]] = {name: [] for name in job.contenders}
        self.losses: dict[str, list[float]] = {}
        self.lost: dict[str, str] = {}

    def measure(self) -> dict[str, Any]:
        """Returns times, losses, and who was lost, as JSON has them."""
        for start in range(self._job.timing.starts):
            self._measure_start(start)
        return {"times": self.times, "losses": self.losses, "lost": self.lost}

    def _measure_start(self, start: int) -> None:
        """Starts the processes, which compile side by side; then lets them take turns."""
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
        """Rivals start once; who was not there at the first start, is not at the next."""
        gone = {name for name, reason in self.lost.items() if reason.startswith("not ")}
        present = [name for name in self._job.contenders if name not in gone]
        return [name for name in present if start == 0 or name not in plan.RIVALS]

    def _worker(self, name: str) -> Child:
        asked = {
            "contender": name,
            "model": self._job.names[0],
            "devices": self._job.devices,
            "round_secs": self._job.timing.round_secs,
        }
        extra = environment_of(name, self._job.devices)
        return Child("benchmarks.worker", asked, self._job.devices, extra)

    def _require_losses(self, workers: dict[str, Child]) -> None:
        """Waits until all are ready, and leaves those out that train to another loss."""
        found: dict[str, list[float]] = {}
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
                found[name] = answer["losses"]
        self.losses.update(found)
        judge = reference(found)
        for name, losses in found.items():
            if reason := differs(losses, found[judge], judge):
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
        self._say(f"{name}: {reason}")


def environment_of(name: str, num_devices: int) -> dict[str, str]:
    """Returns what users of a rival set: Keras's backend; torchrun's threads for several ranks."""
    if name in _BACKENDS:
        return {"KERAS_BACKEND": _BACKENDS[name]}
    if name == plan.TORCH and num_devices > 1:
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {}


def reference(found: dict[str, list[float]]) -> str:
    """Returns whose losses are right: a hand-written contender's, or the first one's."""
    by_hand = (plan.SHARD_MAP, plan.JIT, plan.PMAP, plan.ONE_DEVICE)
    return next((name for name in (*by_hand, *found) if name in found), "")


def differs(losses: list[float], expected: list[float], judge: str) -> str:
    """Returns in what the losses differ from the expected ones, if they do."""
    for steps, loss, right in zip((0, CHECK_STEPS), losses, expected, strict=True):
        if not math.isclose(loss, right, rel_tol=LOSS_RTOL):
            return (
                f"not the same training: a loss of {loss:.6g} after {steps} steps, "
                f"where {judge} has {right:.6g}"
            )
    return ""
