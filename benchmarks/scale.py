"""Computes how training scales to many processes, from programs compiled for as many devices.

    python -m benchmarks.scale                                 # 8, 64, 512 processes; two minutes
    python -m benchmarks.scale --processes 8,64 --devices 1,8
    python -m benchmarks.scale --markdown --picture benchmarks/scale.png

A training step with 30 square matrices is lowered and compiled for a mesh of host devices, each in
place of a process's device; nothing runs. Collectives and their bytes are counted in the compiled
program. Bytes per link are computed for a ring, messages by running the code of the agreement with
a store in memory. No network is measured.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import scale_messages
from benchmarks.picture import require_matplotlib
from benchmarks.processes import Child, ChildError
from benchmarks.report import Table

_PROGRAM = "benchmarks.scale_program"
_WIDTHS = {"30 x 16 KiB": 64, "30 x 16 MiB": 2048}
_MOST_DEVICES = 2048  # host devices of one process, for which JAX compiles (0.10.2, 0.12.0.1)
_LIMIT_SECS = 300.0
_MIB = 2.0**20


@dataclass(frozen=True)
class Row:
    """One model on one number of processes.

    Attributes:
        model: Name of the model.
        processes: Number of processes.
        devices: Number of devices of each process.
        program: Answer of `benchmarks.scale_program`.
    """

    model: str
    processes: int
    devices: int
    program: dict[str, Any]

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.processes * self.devices

    @property
    def counted(self) -> dict[str, Any]:
        """Collectives of the compiled program, or of the lowered one if it was not compiled."""
        return self.program.get("compiled", self.program["lowered"])

    @property
    def ring_rounds(self) -> int:
        """Number of messages, one after the other, of an all-reduce on a ring."""
        return 2 * (self.replicas - 1)

    @property
    def link_bytes(self) -> float:
        """Bytes that each link of a ring carries per step, in one direction."""
        return ring_bytes(self.counted["num_bytes"], self.replicas)


def ring_bytes(num_bytes: int, replicas: int) -> float:
    """Returns the bytes that each link of a ring carries for an all-reduce, in one direction.

    >>> ring_bytes(100, 2), ring_bytes(100, 4)
    (100.0, 150.0)
    """
    return 2 * (replicas - 1) / replicas * num_bytes


def measure(processes: Sequence[int], devices: Sequence[int]) -> tuple[list[Row], dict[str, float]]:
    """Returns a row per model and number of processes, and the seconds of a message."""
    rows = []
    for model, width in _WIDTHS.items():
        for m in devices:
            for n in processes:
                request = {"width": width, "compiles": n * m <= _MOST_DEVICES}
                rows.append(Row(model, n, m, _ask(request, n * m)))
                print(f"{model}, {n} x {m}: done", file=sys.stderr, flush=True)
    return rows, _ask({}, 1)


def _ask(request: dict[str, Any], num_devices: int) -> dict[str, Any]:
    """Returns the answer of a process.

    Raises:
        ChildError: If it fails.
    """
    with Child(_PROGRAM, request, num_devices) as child:
        return child.answer(_LIMIT_SECS)


def program_table(rows: Sequence[Row]) -> Table:
    """Returns the table of collectives and compile times."""
    columns = [
        "processes x devices",
        "gradients",
        "all-reduces (arrays)",
        "MiB per replica",
        "MiB per link",
        "ring rounds",
        "lower, s",
        "compile, s",
    ]
    cells = []
    for row in rows:
        counted, compile_secs = row.counted, row.program.get("compile_secs")
        cells.append(
            [
                f"{row.processes} x {row.devices}",
                row.model,
                f"{counted['operations']} ({counted['arrays']})",
                f"{counted['num_bytes'] / _MIB:.2f}",
                f"{row.link_bytes / _MIB:.2f}",
                f"{row.ring_rounds:,}",
                f"{row.program['lower_secs']:.2f}",
                "not compiled" if compile_secs is None else f"{compile_secs:.2f}",
            ]
        )
    return Table("A training step", columns, cells)


def message_table(
    processes: Sequence[int], devices: Sequence[int], secs: dict[str, float]
) -> Table:
    """Returns the table of messages through the coordination service."""
    columns = [
        "processes x devices",
        "messages per program",
        "KiB per program",
        "process 0, ms",
        "messages at the start",
        "MiB at the start",
        "messages to stop",
    ]
    cells = []
    for m in devices:
        for n in processes:
            program = scale_messages.agreement_on_program(n)
            start = scale_messages.comparison_at_start(n, m)
            cells.append(
                [
                    f"{n} x {m}",
                    f"{program.total:,}",
                    f"{program.num_bytes / 2**10:.1f}",
                    f"{first_secs(program, secs) * 1e3:.1f}",
                    f"{start.total:,}",
                    f"{start.num_bytes / _MIB:.2f}",
                    f"{scale_messages.agreed_end(n).total:,}",
                ]
            )
    return Table("Messages of the agreement", columns, cells)


def first_secs(messages: scale_messages.Messages, secs: dict[str, float]) -> float:
    """Returns the time that process 0 needs for its messages, and the texts that it receives."""
    return messages.of_first * secs["read_secs"] + messages.texts_of_first * secs["text_secs"]


def draw(rows: Sequence[Row], secs: dict[str, float], file: Path) -> None:
    """Draws bytes per link, compile times and the messages of the agreement."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    links, times, messages = figure.subplots(1, 3)
    styles = [("#D55E00", "o"), ("#0072B2", "s")]  # by Okabe and Ito
    for model, (color, marker) in zip(_WIDTHS, styles, strict=True):
        mine = sorted((row for row in rows if row.model == model), key=lambda row: row.replicas)
        style = {"color": color, "marker": marker, "label": model}
        links.plot([r.replicas for r in mine], [r.link_bytes / _MIB for r in mine], **style)
        one = {r.replicas: r.program["lower_secs"] for r in mine}
        times.plot(list(one), list(one.values()), linestyle="--", **{**style, "label": None})
        both = {
            r.replicas: one[r.replicas] + r.program["compile_secs"]
            for r in mine
            if "compile_secs" in r.program
        }
        times.plot(list(both), list(both.values()), **style)
    counts = sorted({row.processes for row in rows})
    traffic = [scale_messages.agreement_on_program(n) for n in counts]
    milliseconds = [first_secs(each, secs) * 1e3 for each in traffic]
    messages.plot(counts, milliseconds, color="#009E73", marker="D")
    links.set(title="Bytes per link and step (ring)", xlabel="replicas", ylabel="MiB")
    links.set_yscale("log")
    times.set(title="Lowering (dashed), with compiling (solid)", xlabel="replicas", ylabel="s")
    times.set_ylim(bottom=0)
    messages.set(title="Agreement, computed", xlabel="processes", ylabel="ms")
    messages.set_ylim(bottom=0)
    for panel in (links, times, messages):
        panel.set_xscale("log", base=2)
        panel.grid(visible=True, alpha=0.3)
        panel.xaxis.set_major_formatter("{x:g}")
    links.legend(title="gradients", frameon=False)
    figure.savefig(file, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    """Computes everything, and prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", default="8,64,512")
    parser.add_argument("--devices", default="1,8", help="devices of each process")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    if options.picture:
        require_matplotlib()
    processes = [int(n) for n in options.processes.split(",")]
    devices = [int(m) for m in options.devices.split(",")]
    try:
        rows, secs = measure(processes, devices)
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    for table in (program_table(rows), message_table(processes, devices, secs)):
        print(table.markdown() if options.markdown else table.text(), end="\n\n")
    post, read, text = (secs[name] * 1e6 for name in ("post_secs", "read_secs", "text_secs"))
    print(
        f"A message on this machine: post {post:.0f} us, read {read:.0f} us; each text of a "
        f"directory {text:.1f} us more."
    )
    if options.picture:
        draw(rows, secs, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
