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


def run_job(job: plan.Job, say: Callable[[str], None]) -> Done:
    """Measures a job; whatever goes wrong is a part of what comes back.

    Args:
        job: What to measure.
        say: Is told at once of what cannot be measured.
    """
    if job.kind == "own":
        return Done(job, {job.names[0]: Cell(job, say).measure()})
    result: dict[str, Any] = {}
    limit = _PART_LIMIT_SECS + _LIMIT_SECS_PER_ROUND * job.timing.rounds
    with Child("benchmarks.child", job.to_dict(), job.devices) as child:
        for _ in job.names or job.leaves or ("deep",):
            try:
                answer = child.answer(limit)
            except ChildError as error:
                say(str(error))
                return Done(job, result, str(error))
            result[answer["name"]] = answer["part"]
    return Done(job, result)


def is_broken(done: Sequence[Done]) -> bool:
    """Whether something was not measured that could have been."""
    reasons = [each.lost for each in done]
    for each in done:
        if each.job.kind == "own":
            reasons += [reason for cell in each.result.values() for reason in cell["lost"].values()]
    return any(reason and not reason.startswith("not installed") for reason in reasons)


def _chosen(what: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(names: str) -> tuple[str, ...]:
        chosen = tuple(names.split(","))
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown}; known: {', '.join(known)}")
        return chosen

    return parse


def _counts(counted: str) -> tuple[int, ...]:
    counts = tuple(map(int, counted.split(",")))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{counted}: at least 1")
    return counts


def _at_least_one(counted: str) -> int:
    (count,) = _counts(counted)
    return count


def parse(argv: Sequence[str] | None) -> tuple[plan.Settings, argparse.Namespace]:
    """Returns the settings that the command line asks for, and how to print."""
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
        parser.add_argument(
            f"--{name}", type=_chosen(name[:-1], known), help=f"default: {','.join(known)}"
        )
    parser.add_argument("--devices", type=_counts, help="default: 1,2,4,8")
    parser.add_argument(
        "--repeats",
        type=_at_least_one,
        metavar="ROUNDS",
        help=f"rounds of paired suites, default {default.timing.rounds}",
    )
    parser.add_argument(
        "--own-repeats",
        type=_at_least_one,
        metavar="ROUNDS",
        help=f"rounds of each start of own processes, default {default.own_timing.rounds}",
    )
    parser.add_argument(
        "--starts",
        type=_at_least_one,
        metavar="N",
        help=f"how often own processes are started, default {default.own_timing.starts}",
    )
    parser.add_argument("--quick", action="store_true", help="under two minutes, less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all measurements, as they are")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="of the suite own")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    options = parser.parse_args(argv)
    settings = default.quick() if options.quick else default
    asked = {name: getattr(options, name) for name in ("devices", "models", "suites", "contenders")}
    return replace(
        settings,
        timing=_changed(settings.timing, rounds=options.repeats),
        own_timing=_changed(settings.own_timing, rounds=options.own_repeats, starts=options.starts),
        **{name: value for name, value in asked.items() if value is not None},
    ), options


def _changed(timing: plan.Timing, **asked: int | None) -> plan.Timing:
    return replace(timing, **{k: v for k, v in asked.items() if v is not None})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all jobs, one after the other, prints the tables, and returns the exit status.

    The file is written after every job, so that an interrupted run leaves its numbers.
    """
    settings, options = parse(argv)
    if options.picture:
        require_matplotlib()
    start = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {line}", file=sys.stderr, flush=True)

    run = record.start(sys.argv[1:] if argv is None else argv)
    for job in settings.jobs():
        say(str(job))
        run.done.append(run_job(job, say))
        if options.json:
            run.save(options.json)
    print(text(run, markdown=options.markdown))
    if options.picture:
        draw(run, options.picture)
    say("done")
    return int(is_broken(run.done))


if __name__ == "__main__":
    sys.exit(main())
