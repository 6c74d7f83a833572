"""Runs code in a process of its own, where JAX's backend has not started."""

import os
import pathlib
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"
_OURS = ("XLA_", "JAX_", "CUDA_", "PJRT_", "NPROC")
# As it was before any test: what runs ahead must not see what another test sets.
_CACHE = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")  # what all tests have compiled
INHERITED = {k: v for k, v in os.environ.items() if not k.startswith(_OURS) or k.startswith(_CACHE)}


def run(code: str, *, environment: dict[str, str] | None = None, timeout: int = 120) -> str:
    """What the code prints, standard error included; fails with it where the code fails.

    The environment is this one's without what configures JAX, and with what is given.
    """
    done = start(code, environment=environment, timeout=timeout)
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def start(
    code: str, *, environment: dict[str, str] | None = None, timeout: int = 120
) -> subprocess.CompletedProcess[str]:
    """The same, whatever the exit status."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**INHERITED, **(environment or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
