"""One child process: does one job on its own number of devices, and prints the result as JSON."""

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import plan
from benchmarks.contenders import (
    Contender,
    Placement,
    deep_contenders,
    hand_written,
    mirror_nnx,
    row_contenders,
    staged_contenders,
    step_contenders,
    strategy_over,
)
from benchmarks.dispatch import dispatch_contenders
from benchmarks.memory import measure_memory
from benchmarks.models import BY_NAME, Model
from benchmarks.timing import advance, measure
from benchmarks.trainer import STEPS, trainer_contenders

# Adam makes rounding larger in each of the many steps before parameters are compared.
_RTOL_OF_EPOCHS = 1e-2


def _of_models(
    job: plan.Job, contenders: Callable[[Model, int], list[Contender]], **options: float
) -> dict:
    found = {}
    for name in job.names:
        found[name] = measure(contenders(BY_NAME[name], job.devices), job.timing, **options)
        gc.collect()
    return found


def run_steps(job: plan.Job) -> dict[str, Any]:
    return _of_models(job, step_contenders)


def run_dispatch(job: plan.Job) -> dict[str, Any]:
    return {str(n): measure(dispatch_contenders(n, job.devices), job.timing) for n in job.leaves}


def run_deep(job: plan.Job) -> dict[str, Any]:
    return {"deep": measure(deep_contenders(BY_NAME["deep"], job.devices), job.timing)}


def run_rows(job: plan.Job) -> dict[str, Any]:
    return {name: measure(row_contenders(BY_NAME[name]), job.timing) for name in job.names}


def run_staged(job: plan.Job) -> dict[str, Any]:
    return _of_models(job, staged_contenders)


def run_trainer(job: plan.Job) -> dict[str, Any]:
    """Milliseconds a step; a launch is an epoch."""
    found = _of_models(job, trainer_contenders, rtol=_RTOL_OF_EPOCHS)
    return {
        model: {name: [ms / STEPS for ms in each] for name, each in times.items()}
        for model, times in found.items()
    }


def run_memory(job: plan.Job) -> dict[str, Any]:
    return {name: measure_memory(name, job.devices) for name in job.names}


def run_first(job: plan.Job) -> dict[str, Any]:
    """Seconds until the first step is done: traced, compiled and run."""
    (name,), model, place = job.names, BY_NAME["narrow"], Placement(job.devices)
    if name == plan.MIRROR_NNX:
        contender = mirror_nnx(model, strategy_over(job.devices))
    else:
        contender = hand_written(name, model, place)
    jax.block_until_ready(jax.live_arrays())
    start = time.perf_counter()
    contender.launch()
    jax.block_until_ready(contender.arrays())
    return {name: time.perf_counter() - start, "second step": advance(contender, 1)}


RUNNERS = {
    "steps": run_steps,
    "dispatch": run_dispatch,
    "deep": run_deep,
    "rows": run_rows,
    "staged": run_staged,
    "trainer": run_trainer,
    "memory": run_memory,
    "first": run_first,
}


def main(text: str) -> None:
    """Does the job that the JSON text describes."""
    job = plan.Job.from_dict(json.loads(text))
    print(json.dumps({"jax": jax.__version__, "result": RUNNERS[job.kind](job)}))


if __name__ == "__main__":
    main(sys.argv[1])
