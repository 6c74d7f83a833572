"""One contender alone in its process: is told by lines on stdin when its turn is."""

import json
import sys
from dataclasses import replace
from typing import Any, TextIO

from benchmarks import contender, timing, workloads
from benchmarks.processes import claim_stdout

CHECK_STEPS = 5
_MOST_STEPS = 2000
_WARM_UP = 0.2  # of a turn: caches and clock speed have belonged to someone else
_LIBRARIES = ("tensorflow", "keras", "torch")

TURN = "turn"


def losses_of(made: contender.Contender) -> list[float]:
    """Returns the loss of the initial parameters, and after `CHECK_STEPS` steps."""
    made.advance(1)
    first = made.loss()
    made.advance(CHECK_STEPS - 1)
    made.advance(1)
    return [first, made.loss()]


def serve(made: contender.Contender, round_secs: float, orders: TextIO, answers: TextIO) -> None:
    """Answers with the losses, then with the milliseconds per step of every turn."""

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    losses = losses_of(made)
    steps = timing.steps_for([made], round_secs, made.fewest_steps, _MOST_STEPS)
    say(losses=losses, steps=steps)
    warm_up = max(round(steps * _WARM_UP), 1)
    for order in orders:
        if order.strip() != TURN:
            raise ValueError(f"{order!r} is not an order of the benchmark; {TURN!r} is.")
        timing.seconds(made, warm_up)
        say(ms=timing.seconds(made, steps) / steps * 1e3)


def main(text: str) -> None:
    """Makes the contender that the JSON text describes, and serves."""
    asked = json.loads(text)
    answers = claim_stdout()
    workload = workloads.BY_NAME[asked["model"]]
    workload = replace(workload, epsilon=workloads.SMALL_EPSILON)
    try:
        made = contender.create(asked["contender"], workload, asked["devices"])
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _LIBRARIES:
            raise
        print(json.dumps({"missing": error.name}), file=answers, flush=True)
        return
    try:
        serve(made, asked["round_secs"], sys.stdin, answers)
    finally:
        made.close()


if __name__ == "__main__":
    main(sys.argv[1])
