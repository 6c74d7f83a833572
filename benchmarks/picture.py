"""Draws the time of a step divided by the best by hand, a row per model and number of devices."""

import importlib
import textwrap
from pathlib import Path
from typing import Any

from benchmarks import plan
from benchmarks.record import Done, Record
from benchmarks.report import best_by_hand, by_model, measured
from benchmarks.stats import Times, ratio

# Colors by Okabe and Ito, for color-blind readers; markers repeat the information.
_STYLES: dict[str, dict[str, Any]] = {
    plan.MIRROR_PLAIN: {"color": "#D55E00", "marker": "o", "markersize": 7},
    plan.MIRROR_NNX: {"color": "#E69F00", "marker": "D", "markersize": 6},
    plan.TENSORFLOW: {"color": "#009E73", "marker": "P"},
    plan.KERAS: {"color": "#CC79A7", "marker": "X"},
    plan.TORCH: {"color": "#7F7F7F", "marker": "h"},
}
_LABELS = {
    plan.MIRROR_PLAIN: "mirror, plain pytrees",
    plan.MIRROR_NNX: "mirror, Flax NNX",
    plan.TENSORFLOW: "TensorFlow MirroredStrategy",
    plan.KERAS: "Keras 3 on JAX",
    plan.TORCH: "PyTorch DDP",
}
_SHIFTS = {plan.MIRROR_PLAIN: -0.14, plan.MIRROR_NNX: 0.14}  # so that their bars do not overlap
_MODELS = {
    "narrow": "MLP, 9 layers",
    "wide": "MLP, 3 wide layers",
    "cnn": "small CNN",
    "golbin": "CNN, 128 channels",
    "mobile": "MobileNet-like CNN",
    "leaves": "100 small matrices",
}
_WIDTH, _ROW_INCHES, _AROUND_INCHES = 8.0, 0.27, 1.7
_LETTERS_PER_INCH = 13
_TICKS = (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7)


def require_matplotlib() -> None:
    """Imports matplotlib.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'The picture requires matplotlib, which is not installed: pip install ".[bench]", '
            "or omit --picture."
        ) from None


def draw(record: Record, file: Path) -> None:
    """Draws the median ratios of the suite `own`, with the intervals of mirror as bars.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If the suite was not measured.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = rows_of([done for done in record.done if done.job.kind == "own"])
    if not rows:
        raise ValueError("The picture requires the suite `own`, which was not measured. Add it.")
    height = _ROW_INCHES * len(rows) + _AROUND_INCHES
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.axvline(1, color="black", linewidth=1)
    for place, (model, count, times) in enumerate(rows):
        _draw_row(panel, place, times, best_by_hand(times, count))
        if place and model != rows[place - 1][0]:
            panel.axhline(place - 0.5, color="#BBBBBB", linewidth=0.8)
    panel.set_yticks(range(len(rows)), [_label(model, count) for model, count, _ in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xscale("log")
    low, high = panel.dataLim.intervalx
    low, high = min(low, _TICKS[0]) * 0.9, max(high, _TICKS[-1]) * 1.05
    panel.axvspan(low, 1, color="#E69F00", alpha=0.12, linewidth=0)
    panel.set_xlim(low, high)
    panel.minorticks_off()
    panel.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    panel.grid(visible=True, axis="x", alpha=0.3)
    panel.set_xlabel("← faster    time of a step / time of the best hand-written JAX    slower →")
    handles, labels = panel.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(), unique.keys(), loc="outside lower center", ncols=3, frameon=False
    )
    title = textwrap.fill(record.title, round(_WIDTH * _LETTERS_PER_INCH))
    figure.suptitle(f"A training step, compared with the best by hand\n{title}", fontsize=10)
    figure.savefig(file, dpi=150)


def rows_of(done: list[Done]) -> list[tuple[str, int, Times]]:
    """Returns the model, the number of devices and the times of each row."""
    cells = {(model, n): part["times"] for model, n, part in by_model(done)}
    models = list(dict.fromkeys(model for model, _ in cells))
    ordered = sorted(cells, key=lambda cell: (models.index(cell[0]), cell[1]))
    return [(*cell, cells[cell]) for cell in ordered]


def _label(model: str, count: int) -> str:
    return f"{_MODELS.get(model, model)}, {count} device{'s' * (count > 1)}"


def _draw_row(panel: Any, place: int, times: Times, best: str) -> None:
    for name, style in _STYLES.items():
        if not (best and measured(times, name)):
            continue
        over = ratio(times, name, best)
        is_mirror = name in _SHIFTS
        bars = [[over.median - over.low], [over.high - over.median]] if is_mirror else None
        panel.errorbar(
            over.median,
            place + _SHIFTS.get(name, 0),
            xerr=bars,
            linestyle="none",
            label=_LABELS[name],
            elinewidth=1.2,
            zorder=3 if is_mirror else 2,
            **style,
        )
