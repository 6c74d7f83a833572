"""Runs a test with `processes=` in several new processes, each of which runs its body.

This process only starts them, waits for them and ends them. It does not run the fixtures of the
test, and needs no JAX.
"""

import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mirror._src.tools.job import POLL_SECS, Job, tf_configs
from mirror._src.tools.plugin.marks import Layout, layout_of, runs_elsewhere
from mirror._src.tools.plugin.member import TIMEOUT, VARIABLE
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


class _Member:
    """A process of a test, as its files and its exit status show it."""

    def __init__(self, index: int, directory: Path) -> None:
        self.index = index
        self.output_file, self.file = directory / f"output-{index}", directory / f"report-{index}"
        self.status: int | None = None  # negative after a signal, None before the end
        self.was_ended = False  # from here

    @property
    def output(self) -> str:
        """Its output so far, standard error included."""
        return self.output_file.read_text(encoding="utf-8", errors="replace")

    def reports(self, outcome: str | None = None) -> list[dict[str, Any]]:
        """Returns what it has reported so far; a line that is not complete is left out."""
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        reports = [json.loads(line) for line in lines if line.endswith("\n")]
        return [r for r in reports if outcome is None or r.get("outcome") == outcome]

    @property
    def has_reported_end(self) -> bool:
        """Whether its test has ended, although the process may still wait for the others."""
        return any("finished" in report for report in self.reports())

    @property
    def has_failed(self) -> bool:
        """Whether the test has failed, or the process has."""
        return bool(self.reports("failed")) or self.status not in (None, 0)

    @property
    def problem(self) -> str | None:
        """A description of its failure, or None."""
        failed = self.reports("failed")
        if failed:
            when = failed[0]["when"]
            return "exceeded its timeout" if when == TIMEOUT else f"failed in {when}"
        if self.was_ended:
            return None if self.has_reported_end else "had not ended"
        if self.status and self.status < 0:
            return f"was ended by {signal.Signals(-self.status).name}"
        if self.status:
            return f"ended with exit status {self.status}"
        has_run = any(r.get("when") == "call" for r in self.reports()) or self.reports("skipped")
        return None if has_run else "did not run the test"


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
        members = [_Member(i, directory) for i in range(count)]
        environment = _environment(layout.replicas // count)
        job = Job(
            [["-u", "-m", "pytest", *_arguments(item, directory / str(i))] for i in range(count)],
            [
                {**environment, "TF_CONFIG": config, VARIABLE: str(member.file)}
                for config, member in zip(configs, members, strict=True)
            ],
            [member.output_file for member in members],
            item.config.invocation_params.dir,
        )
        try:
            limit = _START_SECS + secs + GRACE_SECS if secs else None
            is_late, first = _wait(job, members, limit)
            _look_at(job, members)
        finally:
            job.end()
        for member in members:
            member.was_ended = member.status is None
        late = f" within {limit:g} s (its timeout is {secs:g} s)" if is_late else ""
        _conclude(item, members, first, late)


def _wait(job: Job, members: Sequence[_Member], limit: float | None) -> tuple[bool, int | None]:
    """Waits for the processes; returns whether the time was up, and which failed first.

    The stacks of those that are still in the test are in their output.
    """
    deadline = math.inf if limit is None else time.monotonic() + limit
    first, is_late = None, False
    while True:
        _look_at(job, members)
        failed = [member.index for member in members if member.has_failed]
        if failed and first is None:
            first = failed[0]
            deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_SECS)
        if all(member.status is not None for member in members):
            return False, first
        if failed and all(m.status is not None or m.has_reported_end for m in members):
            return False, first  # JAX would make them wait for each other
        if time.monotonic() > deadline:
            is_late = first is None
            break
        time.sleep(POLL_SECS)
    for member, process in zip(members, job.processes, strict=True):
        # Without the file, it does not know the signal yet.
        if member.status is None and not member.has_reported_end and member.file.exists():
            process.send_signal(signal.SIGUSR1)
    time.sleep(_STACKS_SECS)
    return is_late, first


def _look_at(job: Job, members: Sequence[_Member]) -> None:
    for member, status in zip(members, job.statuses(), strict=True):
        member.status = status


def _conclude(item: pytest.Item, ended: Sequence[_Member], first: int | None, late: str) -> None:
    """Passes, skips or fails the test."""
    problems = {m.index: m.problem for m in ended if m.problem is not None}
    if not problems:
        print(*(f"[{m.index}] {line}" for m in ended for line in m.output.splitlines()), sep="\n")
        skipped = [m.reports("skipped") for m in ended]
        if all(skipped):
            pytest.skip(skipped[0][0]["text"])
        return
    order = sorted(ended, key=lambda m: m.index != first)
    what = ", ".join(
        f"process {m.index} {problems[m.index]}{late}" for m in order if m.index in problems
    )
    parts = [f"{item.nodeid} in {len(ended)} processes: {what}."]
    for member in order:
        texts = [r["text"] for r in member.reports("failed")]
        title = f" process {member.index}: {problems.get(member.index, 'passed')} "
        parts += [f"{title:-^80}", *texts]
        if member.output.strip():
            parts += [f"{f' output of process {member.index} ':-^80}", member.output.rstrip()]
    pytest.fail("\n".join(parts), pytrace=False)


def _arguments(item: pytest.Item, directory: Path) -> list[str]:
    """Returns the arguments of pytest, which run this test only, as it would run here."""
    config, option = item.config, item.config.option
    _, separator, name = item.nodeid.partition("::")
    arguments = [f"{item.path}{separator}{name}", f"--rootdir={config.rootpath}"]
    # No options of the ini file may select other tests, or write the files of this run.
    arguments += ["-k", "", "-m", "", "--runxfail", "--capture=no"]
    arguments.append(f"--import-mode={option.importmode}")
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    if option.confcutdir is not None:
        arguments.append(f"--confcutdir={option.confcutdir}")
    plugins = dict.fromkeys(option.plugins or ())
    plugins.pop("no:terminal", None)  # of the workers of pytest-xdist
    repeated = {"-p": plugins, "-W": option.pythonwarnings, "-o": option.override_ini}
    arguments += [x for flag, values in repeated.items() for v in values or () for x in (flag, v)]
    if config.pluginmanager.hasplugin("cacheprovider"):
        arguments += ["-o", f"cache_dir={directory}/cache"]
    if config.pluginmanager.hasplugin("xdist"):
        arguments += ["-n", "0"]
    if getattr(option, "xmlpath", None):
        arguments.append(f"--junitxml={directory}/junit.xml")
    if option.basetemp:
        arguments.append(f"--basetemp={directory}-temp")
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


def _environment(devices: int) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST_")}
    inherited.pop("PYTEST_CURRENT_TEST", None)
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return {**inherited, **cpu}
