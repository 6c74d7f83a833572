"""The `mirror` command."""

import argparse
import signal
import sys
from collections.abc import Sequence

from mirror._src.cli import devices
from mirror._src.cli.bench import command as bench
from mirror._src.cli.demo import command as demo
from mirror._src.cli.doctor import command as doctor
from mirror._src.cli.estimate import command as estimate
from mirror._src.utils import interrupts
from mirror._version import __version__

_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        with interrupts.DeferredInterrupts():
            return parsed.run(parsed)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mirror", description="MirroredStrategy for JAX.")
    parser.add_argument("--version", action="version", version=f"mirror {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (demo, devices, bench, estimate, doctor):
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
