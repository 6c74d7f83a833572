"""The parser of the `mirror` command, and its exit status."""

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mirror_cli import bench, completion, demo, devices, doctor, estimate, launch
from mirror_cli.common import USAGE_ERROR, report_error
from mirror_cli.output import is_output_error, report_output_error

COMMANDS = {
    "demo": demo,
    "devices": devices,
    "launch": launch,
    "bench": bench,
    "estimate-memory": estimate,
    "doctor": doctor,
    "completion": completion,
}
# What other launchers call the commands and options.
_ELSEWHERE = {
    **dict.fromkeys(("run", "torchrun", "exec", "start"), "launch"),
    **dict.fromkeys(
        ("-n", "-np", "--nproc_per_node", "--nproc-per-node", "--num_processes", "--num-processes"),
        "--devices",
    ),
    **dict.fromkeys(("--num_gpus", "--num-gpus", "--gpus", "--gpu"), "--devices"),
    **dict.fromkeys(("--max_restarts", "--max-restarts"), "--restarts"),
}
_HOST_DEVICES = "JAX_NUM_CPU_DEVICES"
_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = make_parser()
    completion.complete(parser)
    try:
        try:
            return _run(parser, sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()  # here, because Python cannot report a failure at exit
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        if not is_output_error(error):
            raise
        return report_output_error(error)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser with all commands."""
    parser = _Parser(prog="mirror", description="MirroredStrategy for JAX.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS.values():
        command.add(commands)
    return parser


def _run(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    if set(arguments) <= {"--"}:
        parser.print_help()
        return 0
    _require_known_command(parser, arguments)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        _reject(parsed.parser if "parser" in parsed else parser, unknown)
    if "run" in parsed:
        return parsed.run(parsed)
    number = os.environ.get(_HOST_DEVICES) or "1"
    if number != "-1" and not (number.isdecimal() and int(number) > 0):  # -1 is JAX's default
        message = f"{_HOST_DEVICES}={number} is not a positive integer. Unset it: unset "
        return report_error(parsed.command, message + _HOST_DEVICES, USAGE_ERROR)
    commands = importlib.import_module("mirror._src.tools.commands")
    return commands.run(parsed.command, parsed)


def _require_known_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Ends the process if the command does not exist. No option before it has a value."""
    command = next((text for text in arguments if not text.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        parser.error(f"unknown command {command!r}.{_guess(command, COMMANDS)}")


def _reject(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Ends the process because of arguments that the command does not have."""
    options = re.findall(r"--[\w-]+", parser.format_usage())
    option = unknown[0].partition("=")[0]
    parser.error(f"unrecognized arguments: {' '.join(unknown)}.{_guess(option, options)}")


def _guess(text: str, known: Iterable[str]) -> str:
    known = list(known)
    meant = _ELSEWHERE.get(text)
    if meant in known:
        return f" Did you mean {meant}?"
    close = difflib.get_close_matches(text, known, n=1)
    return f" Did you mean {close[0]}?" if close else f" Choose from {', '.join(known)}."


class _Parser(argparse.ArgumentParser):
    """A parser that reports a failure to write the help, which argparse ignores (Python 3.11)."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)


class _Version(argparse.Action):
    """Prints the version, which is read from the file because importing `mirror` loads JAX."""

    def __call__(self, parser: argparse.ArgumentParser, *details: object) -> None:
        del details
        spec = importlib.util.find_spec("mirror")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        file = f"{spec.submodule_search_locations[0]}/_version.py"
        print(f"mirror {runpy.run_path(file)['__version__']}")
        parser.exit()
