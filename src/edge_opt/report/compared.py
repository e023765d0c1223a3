"""A comparison as files and on the terminal."""

from __future__ import annotations

import csv
import io
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from edge_opt import units
from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.files import write_whole
from edge_opt.records import ComparedLayer, LayerFigures, ModelComparison
from edge_opt.report import differences as words
from edge_opt.report.codec import from_plain, to_plain
from edge_opt.report.differences import LAYER_FIGURES, LayerFigure, chosen_rows, known_figures, letter
from edge_opt.report.grid import Cell, Strip, grid
from edge_opt.report.markup import comparison_page
from edge_opt.report.text import markdown, printable, spreadsheet

FORMAT = "edge_opt.comparison"
_SHOWN_IN_A_REQUEST = 20
_WIDTH = 120


def save(comparison: ModelComparison, path: str | os.PathLike[str]) -> Path:
    """Write the comparison and return the path; the file is replaced as a whole, or left as it was."""
    content = writer_for(path)(comparison)
    try:
        return write_whole(path, content)
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def writer_for(path: str | os.PathLike[str]) -> Callable[[ModelComparison], str]:
    """The writer that the path's suffix chooses."""
    suffix = Path(path).suffix.lower()
    if suffix not in _WRITERS:
        what = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise InvalidInput(f"cannot write {str(path)!r}: it has {what}; use one of {', '.join(sorted(_WRITERS))}")
    return _WRITERS[suffix]


def document(comparison: ModelComparison) -> str:
    """Everything, as JSON that `load_comparison` reads back exactly."""
    return json.dumps({"format": FORMAT, **to_plain(comparison)}, indent=1, allow_nan=False) + "\n"


def load_comparison(path: str | os.PathLike[str]) -> ModelComparison:
    """Read a comparison that `save` wrote as .json; it equals the one that was saved."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableProfile(
            f"cannot read {str(path)!r}: {error}; comparison.save('NAME.json') writes one"
        ) from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise UnreadableProfile(f'{str(path)!r} is not a comparison: it lacks "format": "{FORMAT}"')
    return from_plain(ModelComparison, data)


def as_csv(comparison: ModelComparison) -> str:
    """One line per layer, every layer; exact numbers of each model, and the differences from the first."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    others = range(1, len(comparison.names))
    figures = [
        f"{figure.key}_{what}"
        for figure in LAYER_FIGURES
        for what in (*(letter(n) for n in range(len(comparison.names))), *(f"difference_{letter(n)}" for n in others))
    ]
    heads = [f"{what}_{letter(n)}" for n in range(len(comparison.names)) for what in ("path", "type")]
    lines.writerow([*heads, *(f"change_{letter(n)}" for n in others), *figures])
    for row in comparison.layers:
        names = [spreadsheet(text) for layer in row.layers for text in (("", "") if layer is None else _names(layer))]
        numbers: list[float | None] = []
        for figure in LAYER_FIGURES:
            values = [None if layer is None else figure.read(layer) for layer in row.layers]
            numbers += [*values, *(_difference(values[0], values[n]) for n in others)]
        lines.writerow([*names, *(row.change(n) for n in others), *numbers])
    return out.getvalue()


def _names(layer: LayerFigures) -> tuple[str, str]:
    return layer.label, layer.kind


def _difference(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else new - old


def as_markdown(comparison: ModelComparison) -> str:
    """For a pull request: totals in one table, the layers that changed most folded under it."""
    names = [markdown(name) for name in comparison.names]
    lines = [f"### {' → '.join(names)}", ""]
    if comparison.is_empty:
        return "\n".join([*lines, "No differences.", ""])
    head = ["", names[0], *(part for name in names[1:] for part in (name, "change"))]
    lines += [_line(head), _line(["---", *["--:"] * (len(head) - 1)])]
    for figure in comparison.totals:
        cells = [f"**{figure.title}**", words.text(figure.unit, figure.values[0])]
        for model in range(1, len(names)):
            cells += [words.text(figure.unit, figure.values[model]), units.change(figure.relative(model))]
        lines.append(_line(cells))
    lines += ["", *(f"- {markdown(note)}" for note in words.notes(comparison)), ""]
    return "\n".join([*lines, *_folded(comparison)])


def _folded(comparison: ModelComparison) -> Iterator[str]:
    rows = chosen_rows(comparison, top=_SHOWN_IN_A_REQUEST)
    if not rows:
        return
    changed = len(chosen_rows(comparison))
    largest = f"; the {len(rows)} that differ most" if len(rows) < changed else ""
    yield f"<details><summary>{changed} layer{'s' * (changed != 1)} differ{largest}</summary>\n"
    figures = [figure for figure in known_figures(comparison) if figure.key in ("macs", "params", "time", "peak")]
    yield _line(["Layer", "Type", "", *(figure.title for figure in figures)])
    yield _line(["---", "---", "---", *("--:" for _ in figures)])
    for row in rows:
        texts = [words.label(row), words.kind(row), words.changes(row)]
        yield _line([*map(markdown, texts), *(_arrow(row, figure) for figure in figures)])
    yield "\n</details>\n"


def _arrow(row: ComparedLayer, figure: LayerFigure) -> str:
    """The figure in each model, with the change of the last."""
    values = [None if layer is None else figure.read(layer) for layer in row.layers]
    shown = list(dict.fromkeys(words.text(figure.unit, value) for value in values))
    old, new = values[0], values[-1]
    change = f" ({units.change((new - old) / old)})" if old and new is not None and old != new else ""
    return " → ".join(shown) + change


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def render(comparison: ModelComparison, width: int = _WIDTH) -> str:
    """The comparison as text, as `show` prints it."""
    out = io.StringIO()
    show(comparison, Console(file=out, width=width, color_system=None, legacy_windows=False))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def show(
    comparison: ModelComparison,
    console: Console,
    *,
    sort: str | None = None,
    top: int | None = None,
    everything: bool = False,
) -> None:
    """Print the layers that differ, or all, then the totals, then what is to be said about them."""
    rows = chosen_rows(comparison, sort, top, everything=everything)
    for model, name in enumerate(comparison.names):
        console.print(Text.assemble((letter(model), "bold"), f"  {printable(name)}"), soft_wrap=True)
    console.print()
    if comparison.is_empty and not everything:
        console.print(Text("no differences"))
        return
    if rows:
        for line in grid(_layer_strips(comparison, rows, sort, console.width), console.width):
            console.print(line, soft_wrap=True)
        console.print()
    for line in grid(_total_strips(comparison), console.width):
        console.print(line, soft_wrap=True)
    console.print()
    for note in words.notes(comparison):
        for part in textwrap.wrap(printable(note), console.width, break_on_hyphens=False):
            console.print(Text(part), soft_wrap=True)


def _layer_strips(
    comparison: ModelComparison, rows: tuple[ComparedLayer, ...], sort: str | None, width: int
) -> list[Strip]:
    def texts(header: str, pick: Callable[[ComparedLayer], str], floor: int | None) -> Strip:
        return Strip(header, tuple(Cell(printable(pick(row))) for row in rows), "left", floor)

    strips = [texts("Layer", words.label, 20), texts("Type", words.kind, 10), texts("", words.changes, None)]
    # What the list is sorted by comes first, and is shown whatever the width; then as many figures as fit.
    for place, figure in enumerate(sorted(known_figures(comparison), key=lambda figure: figure.key != sort)):
        more = [
            Strip(f"{figure.title} {letter(model)}", tuple(_cell(row, figure, model) for row in rows))
            for model in range(len(comparison.names))
        ]
        if place and sum(strip.narrowest + 2 for strip in (*strips, *more)) - 2 > width:
            break
        strips += more
    return strips


def _cell(row: ComparedLayer, figure: LayerFigure, model: int) -> Cell:
    layer, baseline = row.layers[model], row.layers[0]
    value = None if layer is None else figure.read(layer)
    old = None if baseline is None else figure.read(baseline)
    if value is None or layer is None:
        return Cell(units.DASH, style="dim")
    shown = (
        f"{'≥ ' * bool(layer.unpriced and figure.key in ('macs', 'flops', 'bytes'))}{words.text(figure.unit, value)}"
    )
    if model == 0 or not old or value == old:
        return Cell(shown, style="dim" if model and value == old else "")
    return Cell(f"{shown} {units.change((value - old) / old)}", style="red" if value > old else "green")


def _total_strips(comparison: ModelComparison) -> list[Strip]:
    figures = comparison.totals
    strips = [Strip("Total", tuple(Cell(figure.title) for figure in figures), "left")]
    for model in range(len(comparison.names)):
        cells = tuple(Cell(words.text(figure.unit, figure.values[model])) for figure in figures)
        strips.append(Strip(letter(model), cells))
        if model:
            differences = (words.signed(figure.unit, figure.difference(model)) for figure in figures)
            strips.append(Strip(f"{letter(model)} − A", tuple(map(Cell, differences)), rank=1))
            strips.append(Strip("", tuple(Cell(units.change(figure.relative(model))) for figure in figures)))
    return strips


_WRITERS: dict[str, Callable[[ModelComparison], str]] = {
    ".json": document,
    ".csv": as_csv,
    ".md": as_markdown,
    ".html": comparison_page,
    ".txt": lambda comparison: render(comparison) + "\n",
}
