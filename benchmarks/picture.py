"""Draws time per step against the number of devices, one panel per model."""

import importlib
import itertools
import math
import textwrap
from pathlib import Path
from typing import Any

from benchmarks import plan
from benchmarks.record import Done, Record
from benchmarks.report import by_model, measured
from benchmarks.stats import Times, flat, median

# Colors by Okabe and Ito, for color-blind readers; markers and dashes repeat the information.
_STYLES: dict[str, dict[str, Any]] = {
    plan.MIRROR_PLAIN: {"color": "#D55E00", "marker": "o", "linewidth": 2.4},
    plan.MIRROR_NNX: {"color": "#E69F00", "marker": "D", "linewidth": 2.4},
    plan.PMAP: {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    plan.SHARD_MAP: {"color": "#56B4E9", "marker": "^", "linestyle": "--"},
    plan.JIT: {"color": "#000000", "marker": "v", "linestyle": "--"},
    plan.ONE_DEVICE: {"color": "#000000", "marker": "*", "linestyle": "none", "markersize": 10},
    plan.TENSORFLOW: {"color": "#009E73", "marker": "P", "linestyle": ":"},
    plan.KERAS: {"color": "#CC79A7", "marker": "X", "linestyle": ":"},
    plan.TORCH: {"color": "#7F7F7F", "marker": "h", "linestyle": ":"},
}
_LABELS = {
    plan.MIRROR_PLAIN: "mirror, plain pytrees",
    plan.MIRROR_NNX: "mirror, Flax NNX",
    plan.PMAP: "jax.pmap",
    plan.SHARD_MAP: "jit(shard_map)",
    plan.JIT: "jit with shardings",
    plan.ONE_DEVICE: "jit, one device",
    plan.TENSORFLOW: "TensorFlow MirroredStrategy",
    plan.KERAS: "Keras 3 on JAX",
    plan.TORCH: "torch DDP",
}
_PANELS = {
    "narrow": "narrow: MLP 784-[64]*8-10, batch 64",
    "wide": "wide: MLP 784-512-512-10, batch 256",
    "cnn": "cnn: two convolutions, batch 128",
    "leaves": "leaves: 100 matrices of 64x64, batch 64",
}
_COLUMNS, _PANEL_INCHES, _AROUND_INCHES = 2, (5.2, 3.7), 1.5
_LETTERS_PER_INCH, _LEGEND_INCHES = 15, 2.6
_SPREAD = 0.025  # horizontal offset, in octaves, so that markers do not overlap


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
    """Draws the medians of the suite `own`, with the quartiles as error bars.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        ValueError: If the suite was not measured.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = cells_of([done for done in record.done if done.job.kind == "own"])
    if not cells:
        raise ValueError("The picture requires the suite `own`, which was not measured. Add it.")
    columns = min(_COLUMNS, len(cells))
    rows = -(-len(cells) // columns)
    width, height = _PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + _AROUND_INCHES
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    shown: dict[str, Any] = {}
    for panel, model in itertools.zip_longest(panels, cells):
        if model is None:
            panel.set_axis_off()
        else:
            shown.update(_draw_panel(panel, model, cells[model]))
    names = [name for name in _STYLES if name in shown]
    figure.legend(
        [shown[name] for name in names],
        [_LABELS[name] for name in names],
        loc="outside lower center",
        ncols=min(3, int(width / _LEGEND_INCHES)),
        frameon=False,
        handlelength=3.2,
    )
    title = textwrap.fill(record.title, round(width * _LETTERS_PER_INCH))
    figure.suptitle(
        f"Time per training step, each contender in its own process\n{title}", fontsize=9
    )
    figure.savefig(file, dpi=150)


def cells_of(done: list[Done]) -> dict[str, dict[int, Times]]:
    """Returns the times of each model on each number of devices."""
    cells: dict[str, dict[int, Times]] = {}
    for model, n, part in by_model(done):
        cells.setdefault(model, {})[n] = part["times"]
    return cells


def _draw_panel(panel: Any, model: str, by_count: dict[int, Times]) -> dict[str, Any]:
    counts = sorted(by_count)
    drawn = {}
    for place, (name, style) in enumerate(_STYLES.items()):
        present = [n for n in counts if measured(by_count[n], name)]
        if not present:
            continue
        medians = [median(by_count[n][name]) for n in present]
        bars = zip(*(_quartile_distances(by_count[n][name]) for n in present), strict=True)
        shift = 2 ** (_SPREAD * (place - len(_STYLES) / 2))
        drawn[name] = panel.errorbar(
            [n * shift for n in present],
            medians,
            yerr=list(map(list, bars)),
            **{"linewidth": 1.4, "markersize": 5.5, **style},
            elinewidth=0.8,
            capsize=0,
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(counts, [str(n) for n in counts])
    panel.minorticks_off()
    _label_times(panel)
    panel.set_title(_PANELS.get(model, model), fontsize=10)
    panel.set_xlabel("devices")
    panel.set_ylabel("ms per step")
    panel.grid(visible=True, alpha=0.3)
    return drawn


def _quartile_distances(values: Any) -> tuple[float, float]:
    """Returns the distances of the quartiles from the median."""
    numbers = sorted(flat(values))
    last, middle = len(numbers) - 1, median(numbers)
    return middle - numbers[last // 4], numbers[last - last // 4] - middle


def _label_times(panel: Any) -> None:
    """Labels the axis with 1, 2, 5, 10, 20, ... instead of powers of ten."""
    low, high = panel.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
