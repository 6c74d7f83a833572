"""The parser of the command line, made from `commands.toml`; exit statuses and error messages."""

import argparse
import importlib.resources
import math
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirror._src.base.optional import install_command

FAILED = 1
USAGE_ERROR = 2
_INSTALL = re.compile(r"INSTALL\((\w+)\)")


class OptionError(ValueError):
    """Error for a command-line option that this machine cannot satisfy."""


def report_error(command: str, message: str, status: int) -> int:
    """Prints an error message to standard error, and returns the exit status."""
    print(f"mirror {command}: error: {message}", file=sys.stderr)
    return status


def read_commands() -> dict[str, dict[str, Any]]:
    """Returns the texts and options of the commands, by name."""
    text = importlib.resources.files(__package__).joinpath("commands.toml").read_text("utf-8")
    return tomllib.loads(_INSTALL.sub(lambda match: install_command(match[1]), text))


def add_commands(parser: argparse.ArgumentParser) -> tuple[list[str], dict[str, str]]:
    """Adds all commands; returns their names, and what names in other launchers stand for."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    tables = read_commands()
    others: dict[str, str] = {}
    for name, table in tables.items():
        others |= dict.fromkeys(table.get("others", ()), name)
        command = commands.add_parser(
            name,
            help=table["summary"],
            usage=table.get("usage"),
            description=table["text"],
            epilog=table["end"],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=name, parser=command)
        groups: dict[str, Any] = {}  # of options that exclude each other
        for option, details in table["options"].items():
            others |= dict.fromkeys(details.pop("others", ()), option)
            group = details.pop("group", "")
            if group and group not in groups:
                groups[group] = command.add_mutually_exclusive_group()
            if "type" in details:
                details["type"] = _TYPES[details["type"]]
            groups.get(group, command).add_argument(option, **details)
    return list(tables), others


def _integer(what: str, least: int = 0, most: float = math.inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return parse


# A demo on 2,000 devices did not end in 100 s.
_MOST = 1024
_device_count = _integer(f"a number of devices from 1 to {_MOST}", 1, _MOST)


def _device_counts(text: str) -> tuple[int, ...]:
    """Parses numbers of devices separated by commas; returns them sorted, without duplicates."""
    return tuple(sorted(set(map(_device_count, text.split(",")))))


def _count_or_names(text: str) -> int | tuple[str, ...]:
    """Parses a number of devices, or device names separated by commas."""
    if not any(character.isalpha() for character in text):
        return _device_count(text)
    return tuple(name.strip() for name in text.split(","))


def _positions(text: str) -> tuple[int, ...]:
    """Parses positions of arguments, counted from 0 and separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positions such as 0 or 0,1")
    return tuple(sorted(set(map(int, parts))))


_TYPES: dict[str, Callable[[str], Any]] = {
    "count_or_names": _count_or_names,
    "device_count": _device_count,
    "device_counts": _device_counts,
    "non_negative_int": _integer("a non-negative integer"),
    "path": Path,
    "positions": _positions,
    "positive_int": _integer("a positive integer", 1),
    "process_count": _integer(f"a number of processes from 1 to {_MOST}", 1, _MOST),
    "replica_count": _integer(f"a number of replicas from 1 to {_MOST}", 1, _MOST),
    "seconds": _integer("a number of seconds from 1 to 1000000000", 1, 10**9),
    "seed": _integer(f"an integer from 0 to {2**32 - 1}", 0, 2**32 - 1),
}
