"""Raw measurements of a run, with machine and versions, saved as JSON."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plan import Job

_PACKAGES = (
    *("mirror-jax", "jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes"),
    *("tensorflow", "tensorflow-cpu", "keras", "torch"),
)
_VARIABLES = ("XLA_FLAGS", "PJRT_NPROC", "NPROC", "OMP_NUM_THREADS")
_PREFIXES = ("JAX_", "TF_ENABLE_", "TF_NUM_", "TF_XLA_", "KERAS_", "MKL_")
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Done:
    """A job and its result.

    Attributes:
        job: The job.
        result: By model, by number of leaves, or by contender; see `benchmarks/README.md`.
        lost: The reason if a part of the result is missing, else empty.
        device: JAX's name of the measured device; empty in the suite `own`.
    """

    job: Job
    result: dict[str, Any]
    lost: str = ""
    device: str = ""


@dataclass
class Record:
    """A run of the benchmark.

    Attributes:
        machine: Cores, CPU, Python, and relevant environment variables.
        versions: Versions by package; without packages that are not installed.
        done: All jobs, in order.
    """

    machine: dict[str, Any]
    versions: dict[str, str]
    done: list[Done] = field(default_factory=list)

    @property
    def title(self) -> str:
        """One line with versions and machine."""
        names = {"tensorflow-cpu": "TensorFlow", "tensorflow": "TensorFlow", "keras": "Keras"}
        names = {"jax": "JAX", **names, "torch": "torch"}
        versions = {names[k]: v for k, v in self.versions.items() if k in names}
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        cores, cpu = self.machine["cores"], self.machine["cpu"]
        return f"{packages}; Python {self.machine['python']}, {cores} cores, {cpu}"

    def save(self, file: Path) -> None:
        """Writes everything as JSON."""
        data = {
            "machine": self.machine,
            "versions": self.versions,
            "jobs": [{**asdict(done), "job": done.job.to_dict()} for done in self.done],
        }
        file.write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> "Record":
        """Returns the run saved in a file."""
        data = json.loads(file.read_text())
        done = [Done(**{**entry, "job": Job.from_dict(entry["job"])}) for entry in data["jobs"]]
        return cls(data["machine"], data["versions"], done)


def start(command: Sequence[str]) -> Record:
    """Returns the record of a run that starts now on this machine."""
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
        "environment": environment,
        "command": list(command),
        "commit": _commit(),
    }
    return Record(machine, versions())


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages."""
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _cpu_model() -> str:
    """Returns the name of the CPU, on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _commit() -> str:
    """Returns the measured commit; empty outside a clone."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
