"""Figures as PNG."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import BY_NAME, SweepResult, TrialColumn
from edge_opt.report.figures import axes_of, bars, frontiers, is_wide
from edge_opt.report.sweep_files import sweep_rows
from edge_opt.text import printable, shorten

DPI = 180
BLUE, GREEN, RED, GREY, INK = "#0072b2", "#00875f", "#c84d00", "#a9b1b7", "#1c2126"
_MOST_BARS = 30
_LONGEST_NAME = 40


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure with one set of axes, in inches."""
    import_optional("matplotlib", "charts need", "plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color="#e3e6e8", linewidth=0.8)
    return figure, axes


def png(figure: Any) -> bytes:
    """Return the figure as a PNG of 180 dots per inch. Text is shown as it is, a dollar sign included."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    image = io.BytesIO()
    with warnings.catch_warnings():
        # A font without a character draws a box; that needs no warning.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(image, dpi=DPI)
    return image.getvalue()


def bar_chart(names: Sequence[str], values: Sequence[float], title: str, *, most: int = _MOST_BARS) -> bytes:
    """Return a PNG of horizontal bars, one per layer; of many layers the largest, and the sum of the others.

    Args:
        names: Names of the layers.
        values: Length of each bar.
        title: Text above, with the unit.
        most: Number of bars at most.

    >>> bar_chart(["conv1", "conv2"], [1.5, 3.0], "Multiply-accumulates by layer (millions)")[1:4]
    b'PNG'
    """
    largest = bars(names, values, most)
    if not largest.values:
        return words_png(title, "No layer has any.")
    figure, axes = canvas(8, 1.5 + 0.26 * len(largest.values))
    heights = range(len(largest.values))
    axes.barh(heights, largest.values, color=BLUE, height=0.7)
    axes.set_yticks(heights, [shorten(printable(name), _LONGEST_NAME) for name in largest.names], fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.margins(y=0.01)
    if largest.others:
        # As a bar it would dwarf every layer.
        axes.set_xlabel(f"{largest.others} others together: {largest.others_value:,.4g}", loc="left")
    return png(figure)


def words_png(title: str, sentence: str) -> bytes:
    """Return a PNG that says in words why there is no chart."""
    figure, axes = canvas(8, 4.5)
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=11)
    axes.text(0.5, 0.5, sentence, ha="center", va="center", wrap=True, fontsize=12, color=INK)
    return png(figure)


_SWEEP = {
    "accuracy_vs_latency.png": "latency_ms",
    "accuracy_vs_energy.png": "energy_j",
    "accuracy_vs_memory.png": "peak_memory_mb",
}

_ON_TARGET = {"latency_ms": "target_latency_ms", "energy_j": "target_energy_j", "peak_memory_mb": "target_ram_kib"}


def write_sweep_plots(result: SweepResult, folder: str | os.PathLike[str]) -> list[Path]:
    """Plot accuracy vs latency, energy and memory, and return the paths.

    If nothing ran, the pictures say so.
    """
    there = {} if result.target is None else _ON_TARGET
    named = {name.replace("accuracy", result.metric): there.get(column, column) for name, column in _SWEEP.items()}
    charts = {name: _cloud(result, BY_NAME[column]) for name, column in named.items()}
    try:
        return [write_whole(Path(folder) / name, content) for name, content in charts.items()]
    except OSError as error:
        raise InvalidInput(f"cannot write to {str(folder)!r}: {error.strerror or error}") from error


def _cloud(result: SweepResult, x: TrialColumn) -> bytes:
    y = axes_of(result)[0]
    rows = sweep_rows(result)
    title = f"{printable(result.name)}: {result.metric} vs {x.title.lower()}"
    ran = [row for row in rows if row["status"] == "done"]
    done = [row for row in ran if row[x.name] is not None]
    if not rows:
        return words_png(title, "The sweep is empty: no candidate was tried.")
    if not ran:
        return words_png(title, f"All {len(rows)} candidates failed; sweep_errors.csv and the report say why.")
    if not done:
        return words_png(title, f"{x.title} of no candidate is known.")
    figure, axes = canvas(8, 5)
    front = [rows[index] for index in frontiers(result)[f"{y.name}|{x.name}"]]
    if front:
        axes.plot(
            [row[x.name] for row in front], [row[y.name] for row in front], color=GREEN, zorder=2, label="frontier"
        )
    for name, color, marker in (("accepted", GREEN, "o"), ("rejected", RED, "x")):
        _points(axes, [row for row in done if row["accepted"] == (name == "accepted")], x, y, name, color, marker)
    for row, trial in zip(rows, result.trials, strict=True):
        if row in front:
            axes.annotate(
                trial.candidate.title,
                (row[x.name], row[y.name]),
                xytext=(5, -11),
                textcoords="offset points",
                fontsize=7,
            )
    if is_wide(x.name, done):
        _widen(axes)
    failed = len(rows) - len(ran)
    axes.set_title(title + (f" ({failed} failed)" if failed else ""), loc="left", fontsize=11)
    sources = ", ".join(sorted({printable(row["energy_source"]) for row in done}))
    axes.set_xlabel(f"{x.title} ({x.unit})" + (f" ({sources})" if x.name == "energy_j" else ""))
    way = "" if result.metric == "accuracy" else f" ({result.metric_direction} is better)"
    axes.set_ylabel(f"{y.title}{way}, with 95 % CI")
    axes.legend(frameon=False)
    return png(figure)


def _widen(axes: Any) -> None:
    """Make the axis logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _points(
    axes: Any, rows: Sequence[Mapping[str, Any]], x: TrialColumn, y: TrialColumn, name: str, color: str, marker: str
) -> None:
    if not rows:
        return

    def reach(axis: TrialColumn) -> list[list[float]] | None:
        if not axis.low:
            return None
        return [
            [max(0.0, row[axis.name] - row[axis.low]) for row in rows],
            [max(0.0, row[axis.high] - row[axis.name]) for row in rows],
        ]

    axes.errorbar(
        [row[x.name] for row in rows],
        [row[y.name] for row in rows],
        xerr=reach(x),
        yerr=reach(y),
        fmt=marker,
        color=color,
        ecolor=GREY,
        elinewidth=1,
        capsize=2,
        markersize=7,
        label=name,
        zorder=3,
    )
