"""The `mirror` command: runs a command, and returns the exit status.

Nothing here needs JAX. The module of a command is imported when the command runs.
"""

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mirror._src.base import interrupts
from mirror._src.base.optional import install_command
from mirror._src.tools.options import FAILED, USAGE_ERROR, add_commands, report_error
from mirror._version import __version__

_FOLDERS = {"doctor": "doctor.command"}  # the module of another command has its name
_HOST_DEVICES = "JAX_NUM_CPU_DEVICES"
_INTERRUPTED = 128 + signal.SIGINT
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_CLOSED_PIPE = 128 + signal.SIGPIPE  # the status of a program that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stdout is None:
        print("mirror: error: the output is closed", file=sys.stderr)
        return FAILED
    parser = _Parser(prog="mirror", description="MirroredStrategy for JAX.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands, others = add_commands(parser)
    _complete(parser)
    try:
        try:
            if set(arguments) <= {"--"}:
                parser.print_help()
                return 0
            _require_command(parser, arguments, commands, others)
            parsed, unknown = parser.parse_known_args(arguments)
            if unknown:
                _reject(parsed.parser if "parser" in parsed else parser, unknown, others)
            return _run(parsed)
        finally:
            sys.stdout.flush()  # here, because Python cannot report a failure at exit
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        if not _is_output_error(error):
            raise
        return _report_output_error(error)


def run_command(command: str, parsed: argparse.Namespace) -> int:
    """Runs a command that needs JAX; returns the exit status."""
    name = _FOLDERS.get(command, command.replace("-", "_"))
    module = importlib.import_module(f"mirror._src.tools.{name}")
    with interrupts.DeferredInterrupts(watches=True):
        return module.run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.command == "completion":
        return _print_completion(parsed.shell)
    if parsed.command == "launch":
        return importlib.import_module("mirror._src.tools.launch").run(parsed)
    number = os.environ.get(_HOST_DEVICES) or "1"
    if number != "-1" and not (number.isdecimal() and int(number) > 0):  # -1 is JAX's default
        message = f"{_HOST_DEVICES}={number} is not a positive integer. Unset it: unset "
        return report_error(parsed.command, message + _HOST_DEVICES, USAGE_ERROR)
    return run_command(parsed.command, parsed)


def _require_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    commands: Sequence[str],
    others: Mapping[str, str],
) -> None:
    """Ends the process if the command does not exist. No option before it has a value."""
    command = next((text for text in arguments if not text.startswith("-")), None)
    if command is not None and command not in commands:
        parser.error(f"unknown command {command!r}.{_guess(command, commands, others)}")


def _reject(
    parser: argparse.ArgumentParser, unknown: Sequence[str], others: Mapping[str, str]
) -> None:
    """Ends the process because of arguments that the command does not have."""
    options = re.findall(r"--[\w-]+", parser.format_usage())
    guess = _guess(unknown[0].partition("=")[0], options, others)
    parser.error(f"unrecognized arguments: {' '.join(unknown)}.{guess}")


def _guess(text: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    meant = others.get(text)
    close = difflib.get_close_matches(text, known, n=1) if meant not in known else [meant]
    return f" Did you mean {close[0]}?" if close else f" Choose from {', '.join(known)}."


def _complete(parser: argparse.ArgumentParser) -> None:
    """If the shell asks for completions, prints them and ends the process."""
    if "_ARGCOMPLETE" in os.environ:
        with contextlib.suppress(ModuleNotFoundError):  # uninstalled after the script was loaded
            importlib.import_module("argcomplete").autocomplete(parser)


def _print_completion(shell: str) -> int:
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ModuleNotFoundError:
        message = f"argcomplete is not installed. Install it: {install_command('completion')}"
        return report_error("completion", message, USAGE_ERROR)
    print(argcomplete.shellcode(["mirror"], shell=shell))
    return 0


class _Parser(argparse.ArgumentParser):
    """A parser that reports a failure to write the help, which argparse ignores (Python 3.11)."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)


class _Version(argparse.Action):
    """Prints the version; argparse ignores a failure to write it."""

    def __call__(self, parser: argparse.ArgumentParser, *details: object) -> None:
        del details
        print(f"mirror {__version__}")
        parser.exit()


def _is_output_error(error: OSError) -> bool:
    """Whether writing failed; an error of `open` names its file."""
    is_full = error.errno in _DISK_IS_FULL and error.filename is None
    return is_full or isinstance(error, BrokenPipeError)


def _report_output_error(error: OSError) -> int:
    """Ends the output; returns the exit status.

    The reader of a pipe may stop early, as `head` does, so a closed pipe is not reported.
    """
    is_pipe = isinstance(error, BrokenPipeError)
    _discard(sys.stdout)
    if is_pipe:
        _discard(sys.stderr)
        return _CLOSED_PIPE
    print(f"mirror: error: cannot write the output: {error.strerror}", file=sys.stderr)
    return FAILED


def _discard(stream: Any) -> None:
    """Discards what is still in the buffer: Python writes it at exit, and would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
