"""A training step as a table, a JSON document and a page with its memory curve."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from edge_opt import units
from edge_opt._support.files import by_suffix, write_whole
from edge_opt._support.json import to_plain
from edge_opt.records import MemoryPoint, TrainingLayer, TrainingStep
from edge_opt.report.comparison import cell, page, table
from edge_opt.report.terminal import ROWS_AT_MOST, Cell, Strip, print_sentences, print_table, rendered
from edge_opt.text import html, markdown

FORMAT, VERSION = "edge_opt.training_step", 1
_HEADERS = ("Layer", "Trained", "Forward", "Input grad", "Weight grad", "Again", "Kept", "Gradients", "State")
_COLORS = {
    "weights": "#4e79a7", "buffers": "#a0cbe8", "inputs": "#bab0ac", "gradients": "#f28e2b",
    "optimizer_state": "#b07aa1", "activations": "#59a14f", "temporaries": "#e15759",
}  # fmt: skip


def show_training(step: TrainingStep, console: Console, top: int | None = None) -> None:
    """Print the layers, then what there is to say of the whole."""
    if top is None and len(step.layers) > ROWS_AT_MOST:
        top = ROWS_AT_MOST
    layers = sorted(step.layers, key=lambda layer: -layer.flops)[:top] if top else step.layers
    if layers:
        print_table(console, layer_strips(layers))
    print_sentences(console, list(sentences(step)))
    if hidden := len(step.layers) - len(layers):
        print_sentences(console, [("More", f"{hidden} layers with fewer FLOPs; --top {len(step.layers)} shows all")])


def layer_strips(layers: Sequence[TrainingLayer]) -> list[Strip]:
    """One row per layer, one column per phase and kind of memory."""
    columns = zip(*(_row(layer) for layer in layers), strict=True)
    return [
        Strip(header, tuple(map(Cell, cells)), "left" if place == 0 else "right", 16 if place == 0 else None, place)
        for place, (header, cells) in enumerate(zip(_HEADERS, columns, strict=True))
        if place == 0 or any(cells)
    ]


def training_text(step: TrainingStep, width: int | None = None) -> str:
    """The step as plain text, as `show_training` prints it."""
    return rendered(lambda console: show_training(step, console), width=width)


def _row(layer: TrainingLayer) -> tuple[str, ...]:
    name = layer.path or f"({layer.kind})"
    macs = (layer.forward.macs, layer.input_gradient.macs, layer.weight_gradient.macs, layer.recomputation.macs)
    sizes = (layer.kept_bytes, layer.gradient_bytes, layer.state_bytes)
    flops = (units.count(2 * count) if count else "" for count in macs)
    return (
        name,
        units.count(layer.trained_params) if layer.trained_params else "",
        *flops,
        *(units.size(nbytes) if nbytes else "" for nbytes in sizes),
    )


def sentences(step: TrainingStep) -> Iterator[tuple[str, str]]:
    """What there is to say of a step, each with its label."""
    batches = f", gradients of {step.accumulate} batches added up" if step.accumulate > 1 else ""
    yield (
        "Step",
        (
            f"{step.name} with {step.optimizer}{batches}: {units.count(step.trained_params)} of "
            f"{units.count(step.params)} parameters get a gradient"
        ),
    )
    again = f", recomputation {units.count(step.recomputation_flops)}" if step.recomputation_flops else ""
    yield (
        "FLOPs",
        (
            f"{units.count(step.flops)}: forward {units.count(step.forward_flops)}, backward "
            f"{units.count(step.backward_flops)}{again}; the optimizer {units.count(step.optimizer_flops)}"
        ),
    )
    yield "Peak", f"{units.size(step.peak_bytes)} {_where(step.peak)}; first step {units.size(step.first_peak_bytes)}"
    yield (
        "Held then",
        ", ".join(
            f"{kind.replace('_', ' ')} {units.size(nbytes)}" for kind, nbytes in step.peak_by_kind.items() if nbytes
        ),
    )
    for remedy in step.remedies:
        flops = "" if remedy.flops is None else f", {units.count(remedy.flops)} FLOPs"
        yield "Would help", f"{remedy.change}: peak {units.size(remedy.peak_bytes)}{flops}"
    for time in step.times:
        yield "Time", _time(time)
    for remark in step.remarks:
        yield "Note", remark


def _time(time: object) -> str:
    seconds, low, high = (getattr(time, name) for name in ("seconds", "low", "high"))
    target = getattr(time, "target", "")
    remarks = "; ".join(getattr(time, "remarks", ()))
    if seconds is None:
        return f"not known on {target}: {remarks}"
    interval = f" ({units.duration(low)} to {units.duration(high)})" if low is not None and high is not None else ""
    return f"{units.duration(seconds)}{interval} on {target}; {remarks}"


def _where(point: MemoryPoint) -> str:
    return f"in the {point.phase}" + (f" of {point.layer}" if point.layer else "")


def training_document(step: TrainingStep) -> str:
    """The step as JSON, with the figures that follow from its fields."""
    derived = {
        "forward_flops": step.forward_flops, "backward_flops": step.backward_flops,
        "recomputation_flops": step.recomputation_flops, "optimizer_flops": step.optimizer_flops,
        "flops": step.flops, "peak_bytes": step.peak_bytes, "first_peak_bytes": step.first_peak_bytes,
        "peak_by_kind": step.peak_by_kind,
    }  # fmt: skip
    document = {"format": FORMAT, "version": VERSION, **derived, **to_plain(step)}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def training_page(step: TrainingStep) -> str:
    """The step as one HTML page that needs nothing else."""
    facts = [[cell(label, "name"), cell(text, "name")] for label, text in sentences(step)]
    rows = [
        [cell(text, "name" if place == 0 else "") for place, text in enumerate(_row(layer))] for layer in step.layers
    ]
    return page(
        step.name, table(["", ""], facts), "<h2>Memory along a step</h2>", curve_svg(step), table(_HEADERS, rows)
    )


def curve_svg(step: TrainingStep) -> str:
    """Memory along a step, stacked by kind, as a picture; the highest point is marked."""
    width, height = 720, 240
    totals = [point.memory.total for point in step.curve]
    highest, last = max(totals), max(len(totals) - 1, 1)
    floor = [0.0] * len(totals)
    parts: list[str] = []
    for kind, color in _COLORS.items():
        roof = [base + point.memory.by_kind()[kind] for base, point in zip(floor, step.curve, strict=True)]
        if roof != floor:
            upper = [
                f"{width * place / last:.1f},{height * (1 - value / highest):.1f}" for place, value in enumerate(roof)
            ]
            lower = [
                f"{width * place / last:.1f},{height * (1 - value / highest):.1f}" for place, value in enumerate(floor)
            ]
            outline = " ".join([*upper, *reversed(lower)])
            parts.append(f'<polygon points="{outline}" fill="{color}"><title>{html(kind)}</title></polygon>')
        floor = roof
    place = totals.index(highest)
    names = "".join(
        f'<text x="{8 + 100 * index}" y="{height + 36}" font-size="11" fill="{color}">{kind.replace("_", " ")}</text>'
        for index, (kind, color) in enumerate(_COLORS.items())
    )
    return (
        f'<svg viewBox="0 0 {width} {height + 44}" role="img" aria-label="memory along a step" width="{width}">'
        + "".join(parts)
        + f'<circle cx="{width * place / last:.1f}" cy="2" r="3" fill="currentColor"/>'
        f'<text x="4" y="{height + 16}" font-size="12" fill="currentColor">peak {html(units.size(highest))} '
        f"{html(_where(step.peak))}</text>{names}</svg>"
    )


def training_markdown(step: TrainingStep) -> str:
    """The layers, then what there is to say, in Markdown."""
    lines = ["| " + " | ".join(_HEADERS) + " |", "|" + "---|" * len(_HEADERS)]
    lines += ["| " + " | ".join(map(markdown, _row(layer))) + " |" for layer in step.layers]
    lines += ["", *(f"- **{label}**: {markdown(text)}" for label, text in sentences(step))]
    return "\n".join(lines) + "\n"


_WRITERS: dict[str, Callable[[TrainingStep], str]] = {
    ".json": training_document,
    ".html": training_page,
    ".md": training_markdown,
    ".txt": lambda step: training_text(step) + "\n",
}


def training_writer(path: str | os.PathLike[str]) -> Callable[[TrainingStep], str]:
    """What writes a file of that name; an ending that nobody writes is refused."""
    return by_suffix(path, _WRITERS)


def save_training_step(step: TrainingStep, path: str | os.PathLike[str]) -> Path:
    """Write the step, by the name's ending."""
    return write_whole(path, training_writer(path)(step))
