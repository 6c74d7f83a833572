"""Plants one fault at a time in a copy of a tree, and runs the tests that should find it."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutation.faults import Fault

ESCAPED = "ESCAPED"
HANG = "hang"
_IGNORED = (".git", ".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "shared")
_FAILED = re.compile(r"^(?:FAILED|ERROR|SUBFAILED).*?(tests/\S+\.py(?:::[^\s\[]+)?)", re.MULTILINE)
_PASSED, _FAILURES, _NOTHING_RUN = 0, 1, 5
_ALL = ["--slow", "--dev"]  # the tests that `.ci/run` runs
_PLANTS = "not planted"  # tests that plant faults themselves look for the text that is replaced


class Outcome(NamedTuple):
    """What the tests said of a fault.

    Attributes:
        caught: The test that failed, `HANG` with the file that did not end, or `ESCAPED`.
        output: The end of what the last run of pytest printed.
    """

    caught: str
    output: str = ""

    @property
    def file(self) -> str:
        """The file of the test, or what else there is to say."""
        return self.caught.partition("::")[0]


class Copy:
    """A copy of a tree in a temporary folder, in which one fault at a time is planted."""

    def __init__(self, base: Path, target: Path, limit_secs: float) -> None:
        self.root = target / "tree"
        self._limit_secs = limit_secs
        shutil.copytree(base, self.root, ignore=shutil.ignore_patterns(*_IGNORED), symlinks=True)
        # For the process from which those of the tests fork, before it starts.
        os.environ.update(
            PYTHONPATH=str(self.root),
            # Shared by all runs, which compile mostly the same programs; see tests/conftest.py.
            JAX_COMPILATION_CACHE_DIR=str(target / "programs"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.05",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )

    def outcome(self, fault: Fault) -> Outcome:
        """Plants the fault, and runs its tests until one fails.

        Raises:
            LookupError: If the tree does not have the text to replace exactly once, or none of the
                tests.
        """
        files = [file for file in fault.tests if (self.root / file).exists()]
        if not files:
            raise LookupError(f"{fault.name}: the tree has none of {', '.join(fault.tests)}")
        choices = [(files, f"({fault.likely}) and {_PLANTS}")] if fault.likely else []
        choices += [([file], _PLANTS) for file in files]
        runs = [] if fault.is_slow else [(chosen, [], words) for chosen, words in choices]
        runs += [(chosen, _ALL, words) for chosen, words in choices]
        with self._planted(fault):
            for chosen, options, words in runs:
                outcome = self._run(chosen, options, words)
                if outcome.caught != ESCAPED:
                    return outcome
        return Outcome(ESCAPED)

    def failing(self, tests: Iterable[str]) -> list[str]:
        """Returns the tests that fail without a fault: what they catch says nothing."""
        status, output = self._pytest([*tests, *_ALL])
        suspects = _FAILED.findall(output) or tests if status != _PASSED else []
        return [
            test for test in dict.fromkeys(suspects) if self._pytest([test, *_ALL])[0] != _PASSED
        ]

    @contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        file = self.root / fault.file
        text = file.read_text()
        if text.count(fault.old) != 1:
            count = text.count(fault.old)
            raise LookupError(f"{fault.name}: {fault.old!r} occurs {count} times in {fault.file}")
        self._write(file, text.replace(fault.old, fault.new))
        try:
            yield
        finally:
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # A file of the same size and second would be taken for the one that was compiled.
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()

    def _run(self, files: list[str], options: Iterable[str], expression: str) -> Outcome:
        status, output = self._pytest([*files, *options, "-x", "-k", expression])
        end = output[-3000:]
        if status is None:
            return Outcome(f"{files[0]}::{HANG}", end)
        if status in (_PASSED, _NOTHING_RUN):
            return Outcome(ESCAPED, end)
        found = _FAILED.search(output)
        if found is None and status == _FAILURES:
            return Outcome(files[0], end)
        return Outcome(found[1] if found else f"{files[0]}::crash", end)

    def _pytest(self, arguments: list[str]) -> tuple[int | None, str]:
        """Returns the exit status, `None` after the limit, and what pytest printed."""
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
        with tempfile.NamedTemporaryFile("r") as output:
            call = (str(self.root), [*options, *arguments], output.name)
            process = _FORKS.Process(target=_run_pytest, args=call)
            process.start()
            process.join(self._limit_secs)
            status = process.exitcode
            with contextlib.suppress(ProcessLookupError):  # and what it has started
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return status, output.read()


# What takes long to import is imported once, in the process from which all others fork.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["jax", "jax.numpy", "flax.nnx", "flax.linen", "optax", "pytest"])


def _run_pytest(root: str, arguments: list[str], output: str) -> None:
    """Runs `python -m pytest` in a process that has forked, in the folder `root`."""
    os.setsid()
    os.chdir(root)
    sys.dont_write_bytecode = False  # or else each run compiles everything again
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the folder `root` has its own
    is_ours = lambda path: (Path(path) / "tests/mutation").is_dir()  # noqa: E731
    sys.path[:] = [root, *(path for path in sys.path if not is_ours(path))]
    descriptor = os.open(output, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import pytest

    status = int(pytest.main(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def escaped_now(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Returns the faults that were caught before and escape now, with the file that caught them."""
    return {
        name: file
        for name, file in before.items()
        if file != ESCAPED and after.get(name) == ESCAPED
    }
