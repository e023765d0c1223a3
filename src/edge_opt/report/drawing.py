"""Figures on a canvas of their own: no window, no global state of matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from edge_opt.errors import MissingExtra
from edge_opt.report.series import Bars, bars
from edge_opt.report.text import printable

DPI = 180
BLUE, ORANGE, GREEN, RED, GREY, INK = "#0072b2", "#d98200", "#00875f", "#c84d00", "#a9b1b7", "#1c2126"
_MOST_BARS = 30
_LONGEST_NAME = 40


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure with one set of axes, in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("charts need matplotlib; run `pip install 'edge-opt[plots]'`") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(visible=True, color="#e3e6e8", linewidth=0.8)
    return figure, axes


def png(figure: Any) -> bytes:
    """The figure as a PNG of 180 dots per inch. Text is shown as it is, a dollar sign included."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    image = io.BytesIO()
    with warnings.catch_warnings():
        # A font without some sign draws a box in its place, which is no reason to talk.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(image, dpi=DPI)
    return image.getvalue()


def label(name: str) -> str:
    """A name that fits beside an axis: its end, which tells layers apart."""
    text = printable(name)
    return text if len(text) <= _LONGEST_NAME else f"…{text[1 - _LONGEST_NAME :]}"


def bar_chart(names: Sequence[str], values: Sequence[float], title: str, *, most: int = _MOST_BARS) -> bytes:
    """A PNG of horizontal bars, one per layer; of many layers the largest, and the sum of the others in words.

    >>> bar_chart(["conv1", "conv2"], [1.5, 3.0], "Multiply-accumulates by layer (millions)")[1:4]
    b'PNG'
    """
    return bars_png(bars(names, values, title=title, most=most))


def bars_png(found: Bars, divisor: float = 1.0, title: str = "") -> bytes:
    """Bars as a PNG; values are divided by `divisor` first."""
    title = title or found.title
    if not found.values:
        return words_png(title, "No layer has any.")
    figure, axes = canvas(8, 1.5 + 0.26 * len(found.values))
    places = range(len(found.values))
    axes.barh(places, [value / divisor for value in found.values], color=BLUE, height=0.7)
    axes.set_yticks(places, [label(name) for name in found.names], fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.margins(y=0.01)
    if found.others:
        # As a bar it would dwarf every layer.
        axes.set_xlabel(f"{found.others} smaller together: {found.others_value / divisor:,.4g}", loc="left")
    return png(figure)


def words_png(title: str, sentence: str) -> bytes:
    """A PNG that says in words why there is no chart."""
    figure, axes = canvas(8, 4.5)
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=11)
    axes.text(0.5, 0.5, sentence, ha="center", va="center", wrap=True, fontsize=12, color=INK)
    return png(figure)
