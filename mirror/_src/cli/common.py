"""Shared parts of the command line: parsers, exit statuses and error messages."""

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from mirror._src.utils.errors import first_line
from mirror._src.utils.optional import require

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

FAILED = 1
USAGE_ERROR = 2


class OptionError(ValueError):
    """Error for a command-line option that this machine cannot satisfy."""


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: tuple[str, str],
) -> argparse.ArgumentParser:
    """Adds a command, and returns its parser.

    Args:
        commands: The commands of the `mirror` parser.
        name: Name of the command.
        run: Runs the command and returns the exit status.
        summary: One line for `mirror --help`.
        text: Text before and after the list of options. Line breaks are kept.
    """
    description, epilog = text
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def report_error(command: str, message: str, status: int) -> int:
    """Prints an error message to standard error, and returns the exit status."""
    print(f"mirror {command}: error: {message}", file=sys.stderr)
    return status


def report_step_failure(command: str, step: str, error: Exception) -> int:
    """Prints the traceback of the user's step and a summary, and returns the exit status."""
    traceback.print_exc()
    message = f"{step} failed: {type(error).__name__}: {first_line(error)}"
    return report_error(command, message, FAILED)


def positive_int(text: str) -> int:
    """Parses a positive integer."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def positive_ints(text: str) -> tuple[int, ...]:
    """Parses positive integers separated by commas; returns them sorted, without duplicates."""
    return tuple(sorted(set(map(positive_int, text.split(",")))))


def require_writable(file: Path) -> None:
    """Rejects a `--plot` file that cannot be written, before any work is done.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        OptionError: If the format is unknown, or the directory does not exist.
    """
    figure = require("matplotlib.figure").Figure()
    formats = figure.canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise OptionError(
            f"--plot {file}: the suffix of {file.name!r} is not a supported format "
            f"({', '.join(sorted(formats))}). For example: --plot {file.with_suffix('.png')}"
        )
    if file.is_dir():
        raise OptionError(f"--plot {file}: {file} is a directory. Pass the name of a file.")
    if not file.parent.is_dir():
        raise OptionError(
            f"--plot {file}: the directory {file.parent} does not exist. Create it, or pass a file "
            "in an existing directory."
        )
