"""A training step as a table, a JSON document and a page with its memory curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from edge_opt import units
from edge_opt._support.json import dumps_document, to_plain
from edge_opt.records.costs import OpCost
from edge_opt.records.training_steps import MemoryPoint, StepTime, TrainingLayer, TrainingStep
from edge_opt.report.profile_text import ROWS_AT_MOST
from edge_opt.report.sheets import Note, Sheet, Table, column, sheet, text_column
from edge_opt.text import html

FORMAT, VERSION = "edge_opt.training_step", 1
_DERIVED = (
    "forward_flops", "backward_flops", "recomputation_flops", "optimizer_flops", "flops", "peak_bytes",
    "first_peak_bytes", "peak_by_kind",
)  # fmt: skip
_COLORS = {
    "weights": "#4e79a7", "buffers": "#a0cbe8", "inputs": "#bab0ac", "gradients": "#f28e2b",
    "optimizer_state": "#b07aa1", "activations": "#59a14f", "temporaries": "#e15759",
}  # fmt: skip


def training_sheet(step: TrainingStep, top: int | None = None) -> Sheet:
    """Return the layers of a step, the `top` with most FLOPs or all, what to say of the whole, and the memory curve."""
    layers = sorted(step.layers, key=lambda layer: -layer.flops)[:top] if top else step.layers
    hidden = len(step.layers) - len(layers)
    more = [("More", f"{hidden} layers with fewer FLOPs; --top {len(step.layers)} shows all")] if hidden else []
    # The answer comes first: what the step needs.
    needs = f"peak {units.size(step.peak_bytes)} {_where(step.peak)}, {units.count(step.flops)} FLOPs"
    title = f"{step.name}, a training step with {step.optimizer}: {needs}"
    return Sheet(title, (_layer_table(layers),), (*_notes(step), *more), _curve_svg(step))


def _brief_training_sheet(step: TrainingStep) -> Sheet:
    """Return the sheet for a terminal: a step with many layers shows the largest."""
    return training_sheet(step, ROWS_AT_MOST if len(step.layers) > ROWS_AT_MOST else None)


def _layer_table(layers: Sequence[TrainingLayer]) -> Table:
    """Return one row per layer, one column per phase and kind of memory; a column without any figure is left out."""

    def flops(pick: Callable[[TrainingLayer], OpCost]) -> list[str]:
        return [units.count(2 * pick(it).macs) if pick(it).macs else "" for it in layers]

    def sizes(pick: Callable[[TrainingLayer], int]) -> list[str]:
        return [units.size(pick(it)) if pick(it) else "" for it in layers]

    figures = {
        "Trained": [units.count(it.trained_params) if it.trained_params else "" for it in layers],
        "Forward": flops(lambda it: it.forward),
        "Input grad": flops(lambda it: it.input_gradient),
        "Weight grad": flops(lambda it: it.weight_gradient),
        "Again": flops(lambda it: it.recomputation),
        "Kept": sizes(lambda it: it.kept_bytes),
        "Gradients": sizes(lambda it: it.gradient_bytes),
        "State": sizes(lambda it: it.state_bytes),
    }
    return (
        text_column("Layer", (it.path or f"({it.kind})" for it in layers), min_width=34),
        *(column(title, texts, place) for place, (title, texts) in enumerate(figures.items(), 1) if any(texts)),
    )


def _notes(step: TrainingStep) -> Iterator[Note]:
    """Yield what there is to say of a step, each with its label."""
    batches = f", gradients of {step.accumulate} batches added up" if step.accumulate > 1 else ""
    trained = f"{units.count(step.trained_params)} of {units.count(step.params)} parameters get a gradient"
    yield "Step", f"{step.name} with {step.optimizer}{batches}: {trained}"
    again = f", recomputation {units.count(step.recomputation_flops)}" if step.recomputation_flops else ""
    passes = f"forward {units.count(step.forward_flops)}, backward {units.count(step.backward_flops)}{again}"
    yield "FLOPs", f"{units.count(step.flops)}: {passes}; the optimizer {units.count(step.optimizer_flops)}"
    yield "Peak", f"{units.size(step.peak_bytes)} {_where(step.peak)}; first step {units.size(step.first_peak_bytes)}"
    kinds = ((kind.replace("_", " "), nbytes) for kind, nbytes in step.peak_by_kind.items() if nbytes)
    yield "Held then", ", ".join(f"{kind} {units.size(nbytes)}" for kind, nbytes in kinds)
    for remedy in step.remedies:
        flops = "" if remedy.flops is None else f", {units.count(remedy.flops)} FLOPs"
        yield "Would help", f"{remedy.change}: peak {units.size(remedy.peak_bytes)}{flops}"
    for time in step.times:
        yield "Time", _time(time)
    for remark in step.remarks:
        yield "Note", remark


def _time(time: StepTime) -> str:
    remarks = "; ".join(time.remarks)
    if time.seconds is None:
        return f"not known on {time.target}: {remarks}"
    interval = ""
    if time.low is not None and time.high is not None:
        interval = f" ({units.duration(time.low)} to {units.duration(time.high)})"
    return f"{units.duration(time.seconds)}{interval} on {time.target}; {remarks}"


def _where(point: MemoryPoint) -> str:
    return f"in the {point.phase}" + (f" of {point.layer}" if point.layer else "")


def training_document(step: TrainingStep) -> str:
    """Return the step as JSON, with the figures that follow from its fields."""
    derived = {name: getattr(step, name) for name in _DERIVED}
    return dumps_document(FORMAT, VERSION, {"version": VERSION, **derived, **to_plain(step)})


_LEFT, _TOP, _WIDTH, _HEIGHT = 76, 8, 644, 240
_TICKS = 4


def _curve_svg(step: TrainingStep) -> str:
    """Return memory along a step, stacked by kind, as a picture with the highest point marked."""
    totals = [point.memory.total for point in step.curve]
    highest, last = max(totals), max(len(totals) - 1, 1)

    def spot(place: int, value: float) -> str:
        return f"{_LEFT + _WIDTH * place / last:.1f},{_TOP + _HEIGHT * (1 - value / highest):.1f}"

    floor = [0.0] * len(totals)
    areas: dict[str, str] = {}
    for kind, color in _COLORS.items():
        roof = [base + point.memory.by_kind()[kind] for base, point in zip(floor, step.curve, strict=True)]
        if roof != floor:
            edges = [*map(spot, range(len(roof)), roof), *reversed([*map(spot, range(len(floor)), floor)])]
            areas[kind] = f'<polygon points="{" ".join(edges)}" fill="{color}"><title>{html(kind)}</title></polygon>'
        floor = roof
    x, y = spot(totals.index(highest), highest).split(",")
    said = html(f"peak {units.size(highest)} {_where(step.peak)}")
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 8} {_TOP + _HEIGHT + 62}" role="img" aria-label="memory along a step" '
        f'width="{_LEFT + _WIDTH + 8}" style="max-width: 100%; height: auto" font-size="12" fill="currentColor">'
        f"{_size_axis(highest)}{''.join(areas.values())}{_phase_axis(step, last)}"
        f'<circle cx="{x}" cy="{y}" r="3"/><text x="{_LEFT}" y="{_TOP + _HEIGHT + 36}">{said}</text>'
        f"{_legend(areas)}</svg>"
    )


def _size_axis(highest: int) -> str:
    """Return sizes in equal steps up to the peak, each with a thin line."""
    parts = []
    for tick in range(_TICKS + 1):
        y = _TOP + _HEIGHT * (1 - tick / _TICKS)
        size = html(units.size(highest * tick // _TICKS))
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity="0.2"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{size}</text>'
        )
    return "".join(parts)


# A phase is named where its name has room.
_NAMED_FROM = 60


def _phase_axis(step: TrainingStep, last: int) -> str:
    """Return where each phase begins, and its name; recomputation is part of the backward that asks for it."""
    phases = ["backward" if point.phase == "recomputation" else point.phase for point in step.curve]
    starts = [place for place, phase in enumerate(phases) if not place or phase != phases[place - 1]]
    parts = []
    for start, end in zip(starts, [*starts[1:], last], strict=True):
        x, width = _LEFT + _WIDTH * start / last, _WIDTH * (end - start) / last
        bottom = _TOP + _HEIGHT
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom + 6}" stroke="currentColor" opacity="0.4"/>'
        )
        if width >= _NAMED_FROM:
            parts.append(f'<text x="{x + 4:.1f}" y="{bottom + 16}">{html(phases[start])}</text>')
    return "".join(parts)


def _legend(kinds: Iterable[str]) -> str:
    """Return the kinds that there are, each beside its colour."""
    parts, x, y = [], _LEFT, _TOP + _HEIGHT + 46
    for kind in kinds:
        name = kind.replace("_", " ")
        parts.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_COLORS[kind]}"/>'
            f'<text x="{x + 14}" y="{y + 10}">{name}</text>'
        )
        x += 28 + 7 * len(name)
    return "".join(parts)


sheet(TrainingStep, brief=_brief_training_sheet, files={".json": training_document})(training_sheet)
