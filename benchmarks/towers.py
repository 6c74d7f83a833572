"""A convolutional net trained on 1, 2, 4, 8 devices: total times and speed-ups, as a table.

    python -m benchmarks.towers [--devices 1,2,4,8] [--width 1.0] [--images 2000] [--epochs 1]

Each number of devices trains in a process of its own: the program is
`tests/programs/p14_convolutional_net.py`. Where JAX has no GPU, it trains on forced host devices,
which share the cores: there more devices are not faster.
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
    """The total time of the program on so many devices, compiling not included.

    Raises:
        RuntimeError: it failed, or there are not so many devices.
    """
    done = subprocess.run(
        [sys.executable, "-m", _PROGRAM, "--devices", str(num_devices), *options],
        env={"JAX_NUM_CPU_DEVICES": str(num_devices), **os.environ},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = _DONE.search(done.stdout)
    if done.returncode or not found or int(found[1]) != num_devices:
        raise RuntimeError(f"On {num_devices} devices: {done.stdout}\n{done.stderr[-3000:]}")
    return float(found[2])


def table(secs: dict[int, float]) -> Table:
    """Times, and speed-ups over the fewest devices."""
    first = next(iter(secs.values()))
    rows = [[str(n), f"{each:.2f}", f"{first / each:.2f}"] for n, each in secs.items()]
    return Table("A convolutional net: total time of training", ["devices", "s", "speed-up"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on each number of devices, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.towers", description=__doc__)
    parser.add_argument("--devices", default="1,2,4,8")
    options, rest = parser.parse_known_args(argv)
    counts = [int(n) for n in options.devices.split(",")]
    print(table({n: seconds(n, rest) for n in counts}).text())


if __name__ == "__main__":
    main()
