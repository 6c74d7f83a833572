"""Programs that tests run: the TensorFlow guides in `mirror`, and others in their own processes."""

import contextlib
import io
import logging
import pathlib
import runpy
import sys
from dataclasses import dataclass
from typing import Any

import mirror

HERE = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Played:
    """The output of a program, with its placement log, and its global variables."""

    text: str
    values: dict[str, Any]


def play(name: str, *arguments: str) -> Played:
    """Runs a program as `python program.py arguments` would, in this process.

    Its switches are reset afterwards. Log lines reach the standard error through mirror's own
    handler, even if a test runner handles the log lines of the root logger.
    """
    printed, logger = io.StringIO(), logging.getLogger("mirror")
    argv, propagate = sys.argv, logger.propagate
    sys.argv, logger.propagate = [name, *arguments], False
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            values = runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv, logger.propagate = argv, propagate
        mirror.debugging.set_log_device_placement(False)
        mirror.config.set_soft_device_placement(False)
    return Played(printed.getvalue(), values)
