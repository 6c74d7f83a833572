"""The commands that need JAX. The parser in `mirror_cli` imports this module to run one."""

import argparse

from mirror._src.cli import devices
from mirror._src.cli.bench import command as bench
from mirror._src.cli.demo import command as demo
from mirror._src.cli.doctor import command as doctor
from mirror._src.cli.estimate import command as estimate
from mirror._src.utils import interrupts

_COMMANDS = {
    "demo": demo.run,
    "devices": devices.run,
    "bench": bench.run,
    "estimate-memory": estimate.run,
    "doctor": doctor.run,
}


def run(command: str, parsed: argparse.Namespace) -> int:
    """Runs a command; returns the exit status."""
    with interrupts.DeferredInterrupts(watches=True):
        return _COMMANDS[command](parsed)
