"""What the commands of the command line have in common."""

import argparse
import sys
from collections.abc import Callable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

FAILED = 1
REFUSED = 2


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    text: tuple[str, str],
) -> argparse.ArgumentParser:
    """A command's parser, its text before and after the options printed as it is written."""
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


def complain(command: str, message: str, status: int) -> int:
    """Says on standard error what is wrong; returns the exit status."""
    print(f"mirror {command}: error: {message}", file=sys.stderr)
    return status


def positive(text: str) -> int:
    """An option's whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """An option's whole numbers from 1 on, separated by commas; the smallest first, each once."""
    return tuple(sorted(set(map(positive, text.split(",")))))
