"""`mirror completion`: prints the script that completes `mirror` in a shell."""

import argparse
import contextlib
import importlib
import os

from mirror_cli.common import USAGE_ERROR, Commands, add_command, report_error
from mirror_cli.install import install_command

SHELLS = ("bash", "zsh", "fish")
_TEXT = """\
Prints a script for your shell. With it, the Tab key completes the commands of
mirror and their options.
"""
_END = f"""\
examples:
  eval "$(mirror completion bash)"      in ~/.bashrc
  eval "$(mirror completion zsh)"       in ~/.zshrc, after compinit
  mirror completion fish | source       in ~/.config/fish/config.fish

exit status:
  0  success
  2  the shell is not supported, or argcomplete is not installed

It requires the package argcomplete: {install_command("completion")}
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    summary = "print a script that completes mirror's options in bash, zsh or fish"
    parser = add_command(commands, "completion", summary, (_TEXT, _END))
    parser.add_argument("shell", choices=SHELLS, help="the shell to print a script for")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ModuleNotFoundError:
        message = f"argcomplete is not installed. Install it: {install_command('completion')}"
        return report_error("completion", message, USAGE_ERROR)
    print(argcomplete.shellcode(["mirror"], shell=parsed.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """If the shell asks for completions, prints them and ends the process."""
    if "_ARGCOMPLETE" in os.environ:
        with contextlib.suppress(ModuleNotFoundError):  # uninstalled after the script was loaded
            importlib.import_module("argcomplete").autocomplete(parser)
