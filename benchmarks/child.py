"""Child process that measures one job and prints each part of the result as a line of JSON."""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import plan
from benchmarks.devices import first_devices, use_default
from benchmarks.dispatch import dispatch_contenders
from benchmarks.first import measure_first
from benchmarks.jax_contender import JaxContender
from benchmarks.memory import measure_memory
from benchmarks.models import BY_NAME, Model
from benchmarks.paired import measure
from benchmarks.processes import claim_stdout
from benchmarks.slices import measure_alone
from benchmarks.starts import measure_starts
from benchmarks.through_mirror import (
    deep_contenders,
    row_contenders,
    staged_contenders,
    step_contenders,
)
from benchmarks.trainer import STEPS, trainer_contenders

# Adam amplifies rounding errors in each of the many steps before the parameters are compared.
_RTOL_OF_EPOCHS = 1e-3

Parts = Iterator[tuple[str, Any]]
Contenders = Callable[[Model, int], list[JaxContender]]


def _by_model(job: plan.Job, contenders: Contenders, **options: Any) -> Parts:
    for name in job.names:
        yield name, measure(contenders(BY_NAME[name], job.devices), job.timing, **options)
        gc.collect()


def run_steps(job: plan.Job) -> Parts:
    return _by_model(job, step_contenders)


def run_dispatch(job: plan.Job) -> Parts:
    for leaves in job.leaves:
        yield str(leaves), measure(dispatch_contenders(leaves, job.devices), job.timing)


def run_deep(job: plan.Job) -> Parts:
    yield "deep", measure(deep_contenders(BY_NAME["deep"], job.devices), job.timing)


def run_rows(job: plan.Job) -> Parts:
    return _by_model(job, lambda model, _: row_contenders(model))


def run_staged(job: plan.Job) -> Parts:
    return _by_model(job, staged_contenders)


def run_trainer(job: plan.Job) -> Parts:
    """Yields milliseconds per step, although a launch is an epoch."""
    for model, times in _by_model(job, trainer_contenders, rtol=_RTOL_OF_EPOCHS, fewest=1):
        yield model, {name: [ms / STEPS for ms in epochs] for name, epochs in times.items()}


def run_memory(job: plan.Job) -> Parts:
    for name in job.names:
        yield name, measure_memory(name, job.devices)


def run_slices(job: plan.Job) -> Parts:
    (name,), (way,) = job.names, job.contenders
    yield name, measure_alone(name, way, job.devices)


def run_first(job: plan.Job) -> Parts:
    (name,) = job.names
    yield name, measure_first(name, job.devices)


def run_starts(job: plan.Job) -> Parts:
    for name in job.names:
        yield name, measure_starts(name, job.devices)


RUNNERS: dict[str, Callable[[plan.Job], Parts]] = {
    "steps": run_steps,
    "dispatch": run_dispatch,
    "deep": run_deep,
    "rows": run_rows,
    "staged": run_staged,
    "trainer": run_trainer,
    "memory": run_memory,
    "first": run_first,
    "starts": run_starts,
    "slices": run_slices,
}


def main(text: str) -> None:
    """Measures the job that the JSON text describes."""
    answers = claim_stdout()
    job = plan.Job.from_dict(json.loads(text))
    jax.config.update("jax_enable_compilation_cache", False)  # first calls show the compiler
    if not job.on_host:
        use_default()
    for name, part in RUNNERS[job.kind](job):
        kind = first_devices(1)[0].device_kind
        answer = {"name": name, "part": part, "device": kind}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
