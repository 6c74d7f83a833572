"""The commands that need JAX. The parser in `mirror_cli` imports this module to run one."""

import argparse

from mirror._src.base import interrupts
from mirror._src.tools import devices
from mirror._src.tools.bench import command as bench
from mirror._src.tools.demo import command as demo
from mirror._src.tools.doctor import command as doctor
from mirror._src.tools.estimate import command as estimate

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
