"""Runs a test with `processes=` in several new processes, each of which runs its body.

This process only starts them, waits for them and ends them. It does not run the fixtures of the
test, and needs no JAX.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mirror._src.tools.job import tf_configs
from mirror._src.tools.plugin.marks import Layout, layout_of, runs_elsewhere
from mirror._src.tools.plugin.member import VARIABLE
from mirror._src.tools.plugin.timeout import GRACE_SECS, timeout_of

_START_SECS = 60.0  # to import JAX and the tests, and to connect
_AFTER_FAILURE_SECS = 5.0  # for the others to fail, too; then they wait for the one that failed
_STACKS_SECS = 0.5
_OPTIONS_BEFORE_CONFTEST = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Notes which options exist before conftest.py files add their own, which are passed on."""
    early_config.stash[_OPTIONS_BEFORE_CONFTEST] = frozenset(
        vars(early_config.known_args_namespace)
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Makes a test with `processes=` run in them, and its fixtures, too."""
    layout = layout_of(item)
    if layout is None or not runs_elsewhere(item):
        return
    item.setup = lambda: None  # type: ignore[method-assign]
    item.runtest = lambda: _run(item, layout)  # type: ignore[method-assign]


class _Process:
    """A process of a test.

    Attributes:
        index: Its index in the job.
        was_ended: Whether it was ended from here.
    """

    def __init__(self, index: int, arguments: Sequence[str], directory: Path, **options: Any):
        self.index, self.was_ended = index, False
        self._output, self.file = directory / f"output-{index}", directory / f"report-{index}"
        environment = {**options["environment"], VARIABLE: f"{os.getpid()}:{self.file}"}
        with self._output.open("wb") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-u", "-m", "pytest", *arguments],
                env=environment,
                cwd=options["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its data loaders are ended with it
            )

    @property
    def status(self) -> int | None:
        """Exit status, negative after a signal; None before the end."""
        return self._popen.poll()

    @property
    def output(self) -> str:
        """Its output so far, standard error included."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def reports(self) -> list[dict[str, Any]]:
        """Returns what it has reported so far; a line that is not complete is left out."""
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def has_finished(self) -> bool:
        """Whether its test has ended, although the process may still wait for the others."""
        return self.status is not None or any("finished" in report for report in self.reports())

    @property
    def has_failed(self) -> bool:
        """Whether the test has failed, or the process has."""
        failed = any(report.get("outcome") == "failed" for report in self.reports())
        return failed or self.status not in (None, 0)

    @property
    def is_skipped(self) -> str | None:
        """The reason if the test was skipped."""
        found = [r["text"] for r in self.reports() if r.get("outcome") == "skipped"]
        return found[0] if found else None

    @property
    def problem(self) -> str | None:
        """A description of its failure, or None."""
        reports = self.reports()
        failed = [r["when"] for r in reports if r.get("outcome") == "failed"]
        if failed:
            return f"failed in {failed[0]}"
        if not self.was_ended and (self.status or 0) < 0:
            return f"was ended by {signal.Signals(-(self.status or 0)).name}"
        if not self.was_ended and self.status:
            return f"ended with exit status {self.status}"
        if self.was_ended and not any("finished" in r for r in reports):
            return "had not ended"
        if not any(r.get("when") == "call" for r in reports) and self.is_skipped is None:
            return None if self.was_ended else "did not run the test"
        return None

    def end(self) -> None:
        """Ends the process and its children."""
        self.was_ended = self.was_ended or self.status is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def print_stacks(self) -> None:
        """Makes the process print the stacks of its threads, into its output."""
        if self.file.exists():  # otherwise it does not know the signal yet
            self._popen.send_signal(signal.SIGUSR1)


def _run(item: pytest.Item, layout: Layout) -> None:
    count = layout.processes
    assert count is not None
    assert layout.replicas is not None
    secs = timeout_of(item)
    with (
        tempfile.TemporaryDirectory(prefix="mirror-pytest-") as name,
        tf_configs(count) as configs,
    ):
        directory = Path(name)
        (directory / "options").write_text(
            json.dumps(_options_of_conftest(item.config)), encoding="utf-8"
        )
        started: list[_Process] = []
        try:
            for i, config in enumerate(configs):
                started.append(
                    _Process(
                        i,
                        _arguments(item, directory / str(i)),
                        directory,
                        environment=_environment(config, layout.replicas // count),
                        cwd=item.config.invocation_params.dir,
                    )
                )
            limit = _START_SECS + secs + GRACE_SECS if secs else None
            is_late, first = _wait(started, limit)
        finally:
            for process in started:
                process.end()
        late = f" within {limit:g} s (its timeout is {secs:g} s)" if is_late else ""
        _conclude(item, started, first, late)


def _wait(started: Sequence[_Process], limit: float | None) -> tuple[bool, int | None]:
    """Waits for the processes; returns whether the time was up, and which failed first.

    The stacks of those that are still in the test are in their output.
    """
    start, first = time.monotonic(), None
    deadline = None if limit is None else start + limit
    is_late = False
    while any(process.status is None for process in started):
        failed = [process.index for process in started if process.has_failed]
        if failed and first is None:
            first = failed[0]
            after = time.monotonic() + _AFTER_FAILURE_SECS
            deadline = after if deadline is None else min(deadline, after)
        if failed and all(process.has_finished for process in started):
            return False, first  # JAX would make them wait for each other
        if deadline is not None and time.monotonic() > deadline:
            is_late = first is None
            break
        time.sleep(0.05)
    for process in started:
        if not process.has_finished:
            process.print_stacks()
    if is_late or first is not None:
        time.sleep(_STACKS_SECS)
    failed = [process.index for process in started if process.has_failed]
    return is_late, first if first is not None or not failed else failed[0]


def _conclude(item: pytest.Item, ended: Sequence[_Process], first: int | None, late: str) -> None:
    """Passes, skips or fails the test."""
    problems = {p.index: p.problem for p in ended if p.problem is not None}
    outputs = [f"[{p.index}] {line}" for p in ended for line in p.output.splitlines()]
    if not problems and first is None:
        print(*outputs, sep="\n")
        reasons = [p.is_skipped for p in ended]
        if all(reason is not None for reason in reasons):
            pytest.skip(reasons[0] or "")
        return
    order = sorted(ended, key=lambda p: p.index != first)
    what = ", ".join(
        f"process {p.index} {problems[p.index]}{late}" for p in order if p.index in problems
    )
    parts = [f"{item.nodeid} in {len(ended)} processes: {what}."]
    for process in order:
        texts = [r["text"] for r in process.reports() if r.get("outcome") == "failed"]
        title = f" process {process.index}: {problems.get(process.index, 'passed')} "
        parts += [f"{title:-^80}", *texts]
        if process.output.strip():
            parts += [f"{f' output of process {process.index} ':-^80}", process.output.rstrip()]
    pytest.fail("\n".join(parts), pytrace=False)


def _arguments(item: pytest.Item, directory: Path) -> list[str]:
    """Returns the arguments of pytest, which run this test only, as it would run here."""
    config, option = item.config, item.config.option
    _, separator, name = item.nodeid.partition("::")
    arguments = [f"{item.path}{separator}{name}", f"--rootdir={config.rootpath}"]
    # No options of the ini file may select other tests, or write the files of this run.
    arguments += [
        "-k",
        "",
        "-m",
        "",
        "--runxfail",
        "--capture=no",
        f"--import-mode={option.importmode}",
    ]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    if option.confcutdir is not None:
        arguments.append(f"--confcutdir={option.confcutdir}")
    for plugin in dict.fromkeys(option.plugins or ()):
        if plugin != "no:terminal":  # of the workers of pytest-xdist
            arguments += ["-p", plugin]
    for warning in option.pythonwarnings or ():
        arguments += ["-W", warning]
    for value in option.override_ini or ():
        arguments += ["-o", value]
    if config.pluginmanager.hasplugin("cacheprovider"):
        arguments += ["-o", f"cache_dir={directory}/cache"]
    if config.pluginmanager.hasplugin("xdist"):
        arguments += ["-n", "0"]
    if getattr(option, "xmlpath", None):
        arguments.append(f"--junitxml={directory}/junit.xml")
    if option.basetemp:
        arguments.append(f"--basetemp={directory}/temp")
    if getattr(option, "tbstyle", None):
        arguments.append(f"--tb={option.tbstyle}")
    return arguments


def _options_of_conftest(config: pytest.Config) -> dict[str, Any]:
    """Returns the options of conftest.py files, which may select what a test does."""
    before = config.stash.get(_OPTIONS_BEFORE_CONFTEST, None)
    if before is None:
        return {}
    values = {k: v for k, v in vars(config.option).items() if k not in before}
    kinds = (str, int, float, bool, list, type(None))
    return {k: v for k, v in values.items() if isinstance(v, kinds)}


def _environment(config: str, devices: int) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST_")}
    inherited.pop("PYTEST_CURRENT_TEST", None)
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return {**inherited, **cpu, "TF_CONFIG": config}
