"""The part of the plugin that runs in the processes of a test with `processes=`."""

import faulthandler
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any, final

import pytest

VARIABLE = "MIRROR_PYTEST_PROCESS"  # the file for the reports
IS_MEMBER = VARIABLE in os.environ
NAME = "mirror-member"
TIMEOUT = "timeout"  # in place of a phase of the test


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Joins the other processes before any test file is imported, which may start JAX."""
    if not IS_MEMBER or config.pluginmanager.hasplugin(NAME):
        return
    reports = Path(os.environ[VARIABLE])
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)
    reports.touch()  # from now on, SIGUSR1 prints the stacks
    options = json.loads((reports.parent / "options").read_text(encoding="utf-8"))
    for name, value in options.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.pluginmanager.register(_Reporter(reports), NAME)
    from mirror import distributed  # loads JAX

    distributed.initialize()


@final
class _Reporter:
    """Passes the reports on to the parent, which shows them."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Leaves only what the test prints in the output of this process."""
        config.pluginmanager.unregister(name="terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Passes on an error in the file of the test."""
        if report.failed:
            self._write({"when": "collection", "outcome": "failed", "text": report.longreprtext})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Passes on the outcome of the test."""
        text = report.longreprtext
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        self._write({"when": report.when, "outcome": report.outcome, "text": text})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Says that the test has ended; the process may still wait for the others."""
        self._write({"finished": int(exitstatus)})

    def expire(self, text: str) -> None:
        """Reports that the test exceeded its timeout, and waits until the parent ends the process.

        If it exited, collectives of the others would fail before they report where they wait.
        """
        self._write({"when": TIMEOUT, "outcome": "failed", "text": text})
        self._write({"finished": int(pytest.ExitCode.TESTS_FAILED)})
        faulthandler.cancel_dump_traceback_later()
        threading.Event().wait()

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
