"""Measures `mirror` against hand-written JAX and other libraries; see benchmarks/README.md.

python -m benchmarks [--devices 1,2,4,8] [--models narrow,cnn] [--quick] [--json FILE]
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan, record
from benchmarks.own_process import Cell
from benchmarks.picture import draw, require_matplotlib
from benchmarks.processes import Child, ChildError
from benchmarks.record import Done
from benchmarks.tables import text

_PART_LIMIT_SECS = 240.0
_LIMIT_SECS_PER_ROUND = 5.0


def run_job(job: plan.Job, log: Callable[[str], None]) -> Done:
    """Measures a job; failures are part of the result.

    Args:
        job: What to measure.
        log: Is called immediately with the reason for a failure.
    """
    if job.kind == "own":
        return Done(job, {job.names[0]: Cell(job, log).measure()})
    result: dict[str, Any] = {}
    device = ""
    limit = _PART_LIMIT_SECS + _LIMIT_SECS_PER_ROUND * job.timing.rounds
    num_devices = job.devices if job.on_host else None
    with Child("benchmarks.child", job.to_dict(), num_devices) as child:
        for _ in job.names or job.leaves or ("deep",):
            try:
                answer = child.answer(limit)
            except ChildError as error:
                log(str(error))
                return Done(job, result, str(error), device)
            result[answer["name"]], device = answer["part"], answer["device"]
    return Done(job, result, device=device)


def is_broken(done: Sequence[Done]) -> bool:
    """Whether a measurement failed for another reason than a package that is not installed."""
    reasons = [result.lost for result in done]
    for result in done:
        if result.job.kind == "own":
            for cell in result.result.values():
                reasons += cell["lost"].values()
    return any(reason and not reason.startswith("not installed") for reason in reasons)


def _chosen(what: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(names: str) -> tuple[str, ...]:
        chosen = tuple(names.split(","))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown}; known: {', '.join(known)}")
        return chosen

    return parse


def _positive_ints(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive")
    return numbers


def _positive_int(text: str) -> int:
    (number,) = _positive_ints(text)
    return number


def parse(argv: Sequence[str] | None) -> tuple[plan.Settings, argparse.Namespace]:
    """Parses the command line; returns the settings, and the options for the output."""
    default = plan.Settings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, known in [
        ("models", plan.MODELS),
        ("suites", plan.SUITES),
        ("contenders", plan.OWN_PROCESS),
    ]:
        chosen, text = _chosen(name[:-1], known), f"default: {','.join(known)}"
        if name == "suites":
            chosen, text = _chosen("suite", (*known, plan.GPU)), f"{text}; {plan.GPU} for one GPU"
        parser.add_argument(f"--{name}", type=chosen, help=text)
    parser.add_argument("--devices", type=_positive_ints, help="default: 1,2,4,8")
    parser.add_argument(
        "--repeats",
        type=_positive_int,
        metavar="ROUNDS",
        help=f"rounds of the paired suites, default {default.timing.rounds}",
    )
    parser.add_argument(
        "--own-repeats",
        type=_positive_int,
        metavar="ROUNDS",
        help=f"rounds per start of the own processes, default {default.own_timing.rounds}",
    )
    parser.add_argument(
        "--starts",
        type=_positive_int,
        metavar="N",
        help=f"starts of the own processes, default {default.own_timing.starts}",
    )
    parser.add_argument("--quick", action="store_true", help="less than two minutes, less precise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the raw measurements")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="file for a picture of the suite `own`"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(argv)
    settings = default.quick() if options.quick else default
    names = ("devices", "models", "suites", "contenders")
    selected = {name: getattr(options, name) for name in names}
    return replace(
        settings,
        gpu_models=options.models or settings.gpu_models,
        timing=_changed(settings.timing, rounds=options.repeats),
        own_timing=_changed(settings.own_timing, rounds=options.own_repeats, starts=options.starts),
        **{name: value for name, value in selected.items() if value is not None},
    ), options


def _changed(timing: plan.Timing, **changes: int | None) -> plan.Timing:
    return replace(timing, **{k: v for k, v in changes.items() if v is not None})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all jobs in order, prints the tables, and returns the exit status.

    The JSON file is written after every job, so that an interrupted run keeps its measurements.
    """
    settings, options = parse(argv)
    if options.picture:
        require_matplotlib()
    start = time.perf_counter()

    def log(line: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {line}", file=sys.stderr, flush=True)

    run = record.start(sys.argv[1:] if argv is None else argv)
    for job in settings.jobs():
        log(str(job))
        run.done.append(run_job(job, log))
        if options.json:
            run.save(options.json)
    print(text(run, markdown=options.markdown))
    if options.picture:
        draw(run, options.picture)
    log("done")
    return int(is_broken(run.done))


if __name__ == "__main__":
    sys.exit(main())
