"""Shared parts of the command line: parsers, exit statuses and error messages."""

import argparse
import sys
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

FAILED = 1
USAGE_ERROR = 2


class OptionError(ValueError):
    """Error for a command-line option that this machine cannot satisfy."""


def add_command(
    commands: Commands, name: str, summary: str, text: tuple[str, str]
) -> argparse.ArgumentParser:
    """Adds a command, and returns its parser.

    Args:
        commands: The commands of the `mirror` parser.
        name: Name of the command.
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
    parser.set_defaults(command=name, parser=parser)
    return parser


def report_error(command: str, message: str, status: int) -> int:
    """Prints an error message to standard error, and returns the exit status."""
    print(f"mirror {command}: error: {message}", file=sys.stderr)
    return status


def positive_int(text: str) -> int:
    """Parses a positive integer."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def non_negative_int(text: str) -> int:
    """Parses an integer of at least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a non-negative integer")
    return int(text)


def positive_ints(text: str) -> tuple[int, ...]:
    """Parses positive integers separated by commas; returns them sorted, without duplicates."""
    return tuple(sorted(set(map(positive_int, text.split(",")))))
