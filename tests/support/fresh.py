"""Runs code in a new process, in which JAX's backend has not started."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import textwrap
from types import ModuleType

from tests.support.strict import STRICT

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"
LIMIT_SECS = 900  # only ends a process that hangs: under load, one may take minutes
_OURS = ("XLA_", "JAX_", "CUDA_", "PJRT_", "NPROC")
# The environment before any test: calls that run ahead must not see what another test sets.
_CACHE = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")  # the shared compilation cache
INHERITED = {k: v for k, v in os.environ.items() if not k.startswith(_OURS) or k.startswith(_CACHE)}


def stand_in(name: str) -> ModuleType:
    """Returns a new copy of a module of `stand_ins`."""
    return module_of(STAND_INS / f"{name}.py")


def module_of(file: pathlib.Path) -> ModuleType:
    """Returns a new copy of the module in a file, which need not be importable."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(code: str, *, environment: dict[str, str] | None = None, timeout: int = LIMIT_SECS) -> str:
    """Returns what the code prints, standard error included; fails with it if the code fails.

    It inherits the environment without the variables that configure JAX, plus `environment`.
    """
    return _output_of(start(code, environment=environment, timeout=timeout))


def run_program(
    name: str, *, environment: dict[str, str] | None = None, timeout: int = LIMIT_SECS
) -> str:
    """Returns what a file of `tests/programs` prints, like `run`."""
    return _output_of(start_program(name, environment=environment, timeout=timeout))


def start_program(
    name: str, *, environment: dict[str, str] | None = None, timeout: int = LIMIT_SECS
) -> subprocess.CompletedProcess[str]:
    """Runs a file of `tests/programs` to its end, whatever the exit status."""
    file = str(PROGRAMS / f"{name}.py")
    environment = {**INHERITED, **(environment or {})}
    # A script does not have the working directory on its path, as `-c` does.
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
    return _start([file], {**environment, "PYTHONPATH": path}, timeout)


def start(
    code: str, *, environment: dict[str, str] | None = None, timeout: int = LIMIT_SECS
) -> subprocess.CompletedProcess[str]:
    """Runs code to its end, whatever the exit status."""
    return _start(["-c", textwrap.dedent(code)], environment, timeout)


def _start(
    arguments: list[str], environment: dict[str, str] | None, timeout: int
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *STRICT, *arguments],
        env={**INHERITED, **(environment or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def _output_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
