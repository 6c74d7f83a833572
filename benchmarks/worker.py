"""Process of a single contender, which takes a turn for every line on standard input."""

import json
import sys
from dataclasses import replace
from typing import Any, TextIO

from benchmarks import contender, timing, workloads
from benchmarks.processes import claim_stdout

CHECK_STEPS = 5
_MOST_STEPS = 2000
_WARM_UP = 0.2  # fraction of a turn; another process used the caches before
_LIBRARIES = ("tensorflow", "keras", "torch")

TURN = "turn"


def losses_of(candidate: contender.Contender) -> list[float]:
    """Returns the loss of the initial parameters, and after `CHECK_STEPS` steps."""
    candidate.advance(1)
    first = candidate.loss()
    candidate.advance(CHECK_STEPS - 1)
    candidate.advance(1)
    return [first, candidate.loss()]


def serve(
    candidate: contender.Contender, round_secs: float, orders: TextIO, answers: TextIO
) -> None:
    """Sends the losses, and then the milliseconds per step of every turn."""

    def send(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    losses = losses_of(candidate)
    steps = timing.steps_for([candidate], round_secs, candidate.fewest_steps, _MOST_STEPS)
    send(losses=losses, steps=steps)
    warm_up = max(round(steps * _WARM_UP), 1)
    for order in orders:
        if order.strip() != TURN:
            raise ValueError(f"The order must be {TURN!r}, got {order!r}.")
        timing.seconds(candidate, warm_up)
        send(ms=timing.seconds(candidate, steps) / steps * 1e3)


def main(text: str) -> None:
    """Creates the contender that the JSON text describes, and serves its turns."""
    request = json.loads(text)
    answers = claim_stdout()
    workload = workloads.BY_NAME[request["model"]]
    workload = replace(workload, epsilon=workloads.SMALL_EPSILON)
    try:
        candidate = contender.create(request["contender"], workload, request["devices"])
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _LIBRARIES:
            raise
        print(json.dumps({"missing": error.name}), file=answers, flush=True)
        return
    try:
        serve(candidate, request["round_secs"], sys.stdin, answers)
    finally:
        candidate.close()


if __name__ == "__main__":
    main(sys.argv[1])
