"""Programs of the TensorFlow guides, in `mirror`; and how a test plays one."""

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
    """What a program printed, the placement log included, and its global variables."""

    text: str
    values: dict[str, Any]


def play(name: str, *arguments: str) -> Played:
    """Runs a program as `python program.py arguments` would, in this process.

    What it switched on is off again afterwards. Log lines take mirror's own way to the standard
    error, also where a test runner handles those of the root.
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
