"""Trains a convolutional net on 1, 2, 4, 8 devices; prints total times and speed-ups.

    python -m benchmarks.towers [--devices 1,2,4,8] [--width 1.0] [--images 2000] [--epochs 1]

Each number of devices trains in its own process, with `tests/programs/p14_convolutional_net.py`.
Without a GPU it trains on host devices, which share the cores, so adding devices does not speed it
up.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Table

_ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = "tests.programs.p14_convolutional_net"
_DONE = re.compile(r"Devices: (\d+), total time: (\d+\.\d+) s")


def seconds(num_devices: int, options: Sequence[str]) -> float:
    """Returns the total time of the program on some devices, without compilation.

    Raises:
        RuntimeError: If the program fails, or there are not enough devices.
    """
    done = subprocess.run(
        [sys.executable, "-m", _PROGRAM, "--devices", str(num_devices), *options],
        env={"JAX_NUM_CPU_DEVICES": str(num_devices), **os.environ},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    match = _DONE.search(done.stdout)
    if done.returncode or not match or int(match[1]) != num_devices:
        raise RuntimeError(f"On {num_devices} devices: {done.stdout}\n{done.stderr[-3000:]}")
    return float(match[2])


def table(secs: dict[int, float]) -> Table:
    """Returns a table of times and of speed-ups over the fewest devices."""
    first = next(iter(secs.values()))
    rows = [[str(n), f"{total:.2f}", f"{first / total:.2f}"] for n, total in secs.items()]
    return Table("A convolutional net: total training time", ["devices", "s", "speed-up"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on every number of devices, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.towers", description=__doc__)
    parser.add_argument("--devices", default="1,2,4,8")
    options, rest = parser.parse_known_args(argv)
    counts = [int(n) for n in options.devices.split(",")]
    print(table({n: seconds(n, rest) for n in counts}).text())


if __name__ == "__main__":
    main()
