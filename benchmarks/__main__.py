"""Measures `mirror` against hand-written JAX, and prints tables. See benchmarks/README.md.

python -m benchmarks [--devices 1,2,4,8] [--models narrow,cnn] [--quick] [--markdown]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan
from benchmarks.report import tables

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_THREADS_PER_DEVICE = 4
_ROOT = Path(__file__).resolve().parent.parent


class ChildFailedError(RuntimeError):
    """A child process ended with an error."""


def child_environment(num_devices: int) -> dict[str, str]:
    """The environment in which JAX has so many host devices, and threads enough for them."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith(_COUNT_FLAG)]
    return {
        **os.environ,
        "XLA_FLAGS": " ".join([*kept, f"{_COUNT_FLAG}={num_devices}"]),
        "PJRT_NPROC": str(max(_THREADS_PER_DEVICE * num_devices, os.cpu_count() or 1)),
        "JAX_PLATFORMS": "cpu",
    }


def run_job(job: plan.Job) -> dict[str, Any]:
    """Does a job in a process of its own.

    Raises:
        ChildFailedError: the process failed; the message holds the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", json.dumps(job.to_dict())],
        env=child_environment(job.devices),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildFailedError(
            f"{job} ended with {done.returncode}:\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _chosen(what: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {what} {unknown}; there are {', '.join(known)}")
        return names

    return parse


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(map(int, text.split(",")))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return counts


def parse(argv: Sequence[str] | None) -> tuple[plan.Settings, argparse.Namespace]:
    """The settings that the command line asks for, and how to print."""
    default = plan.Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--devices", type=_counts, help="default: 1,2,4,8")
    models, suites = _chosen("model", plan.MODELS), _chosen("suite", plan.SUITES)
    parser.add_argument("--models", type=models, help=f"default: {','.join(plan.MODELS)}")
    parser.add_argument("--suites", type=suites, help=f"default: {','.join(plan.SUITES)}")
    parser.add_argument("--repeats", type=int, default=default.timing.rounds, metavar="ROUNDS")
    parser.add_argument("--quick", action="store_true", help="under a minute, less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all measurements, as they are")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    options = parser.parse_args(argv)
    timing = replace(default.timing, rounds=options.repeats)
    settings = replace(default, timing=timing)
    settings = settings.quick() if options.quick else settings
    asked = {name: getattr(options, name) for name in ("devices", "models", "suites")}
    return replace(settings, **{k: v for k, v in asked.items() if v is not None}), options


def main(argv: Sequence[str] | None = None) -> None:
    """Runs all jobs, one after the other, and prints the tables."""
    settings, options = parse(argv)
    done, start, version, cores = [], time.perf_counter(), "", os.cpu_count()
    for job in settings.jobs():
        secs = time.perf_counter() - start
        named = " ".join(map(str, job.names or job.leaves))
        print(f"[{secs:4.0f} s] {job.kind}, {job.devices} devices {named}", file=sys.stderr)
        answer = run_job(job)
        version = answer["jax"]
        done.append((job, answer["result"]))
    title = f"JAX {version}, Python {sys.version.split()[0]}, {cores} cores"
    shown = [t.markdown() if options.markdown else t.text() for t in tables(done)]
    print("\n\n".join([title, *shown]))
    print(f"[{time.perf_counter() - start:4.0f} s] done", file=sys.stderr)
    if options.json:
        jobs = [{"job": job.to_dict(), "result": result} for job, result in done]
        options.json.write_text(json.dumps({"title": title, "jobs": jobs}, indent=1))


if __name__ == "__main__":
    main()
