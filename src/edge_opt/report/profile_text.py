"""A profile as a sheet: a tree or a list of its layers, and sentences about the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from edge_opt import units
from edge_opt.boards.capacity import peak_memory
from edge_opt.errors import InvalidInput
from edge_opt.records.costs import Shape
from edge_opt.records.measurements import Energy, Latency, LayerLatencies, MeasuredMemory, Measurement
from edge_opt.records.microcontrollers import McuMemory, MemoryVerdict
from edge_opt.records.predictions import NPU_UNUSED, Departure, Prediction
from edge_opt.records.profiles import Level, ModelProfile
from edge_opt.report.sheets import OPTIONAL, Cell, Column, Note, Sheet, sheet_markdown, sheet_text
from edge_opt.report.table import (
    COLUMNS,
    SORT_COLUMNS,
    ProfileNode,
    ProfileRow,
    check_choice,
    columns,
    combined,
    cut,
    deepest_that_fits,
    in_target_precision,
    module_tree,
    root_row,
    rows_of,
    table,
    walk,
)
from edge_opt.text import printable

ROWS_AT_MOST = 50
_NOTEBOOK_ROWS = 2000
_FILE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a row under its label, behind the guides of a tree. The total and the remainder are not parts."""

    label: str
    row: ProfileRow
    guides: str = ""
    is_part: bool = True


def profile_sheet(
    profile: ModelProfile,
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
    level: Level = "modules",
    is_verbose: bool = False,
) -> Sheet:
    """Return the profile with every remark on its figures or the first ones only.

    Modules stand as a tree down to `depth`, what lies deeper folded into its ancestor; without a depth, as deep as a
    screen or so holds. `sort` makes it a list, largest first, whose rows add up; `top` keeps the first ones.
    """
    check_view(level, depth, sort, top)
    if sort == "time" and (profile.measurement is None or profile.measurement.layers is None):
        raise InvalidInput("cannot sort by time: layers were not measured; profile with measure=True")
    if sort == "predicted" and (profile.prediction is None or level == "operators"):
        cure = "choose another level" if profile.prediction else "profile with target="
        raise InvalidInput(f"cannot sort by predicted: there is no prediction of {level}; {cure}")
    notes = summary_lines(profile, is_verbose=is_verbose)
    if level == "root":
        return Sheet("", notes=tuple(notes))
    if level != "modules" or sort or top:
        lines = _list(profile, level, depth, sort, top)
    else:
        tree = module_tree(profile)
        deepest = max(node.row.depth for node in walk(tree))
        depth = deepest_that_fits(tree, ROWS_AT_MOST) if depth is None else depth
        lines = list(_branch(tree, profile.name, "", "", depth, _own_work(profile)))
        if depth < deepest:
            notes.insert(0, ("Folded", f"at depth {depth} of {deepest}; depth {deepest} shows every module"))
    return Sheet("", (_profile_table(profile, lines, level, sort),), tuple(notes))


def notebook_sheet(profile: ModelProfile) -> Sheet:
    """Return the tree of all modules, which notebooks fold, with sources and further remarks apart."""
    shown = profile_sheet(profile, depth=deepest_that_fits(module_tree(profile), _NOTEBOOK_ROWS))
    more = tuple(line for line in summary_lines(profile) if line not in shown.notes)
    parts = (Sheet("Remarks and sources", notes=more, is_folded=True),) if more else ()
    notes = tuple(note for note in shown.notes if note[0] != "More")
    return replace(shown, title=profile.name, notes=notes, parts=parts)


def profile_markdown(profile: ModelProfile, level: Level = "leaves") -> str:
    """Return all columns of one level, with the summary under them."""
    shown = (
        Column(
            column.title,
            tuple(Cell(column.text(value)) for value in values),
            "left" if column.kind in ("text", "flag") else "right",
        )
        for column, values in table(profile, level)
    )
    return sheet_markdown(Sheet(profile.name, (tuple(shown),), tuple(summary_lines(profile))))


def profile_text(profile: ModelProfile, level: Level = "leaves") -> str:
    """Return what the terminal shows, at full depth."""
    depth = len(profile.layers) if level == "modules" else None
    return sheet_text(profile_sheet(profile, depth, level=level), _FILE_WIDTH) + "\n"


def check_view(level: str, depth: int | None, sort: str | None, top: int | None) -> None:
    """Refuse what cannot be shown, before any work is done."""
    columns(level)
    if depth is not None and depth < 0:
        raise InvalidInput(f"depth is {depth}; it must be 0 (the model alone) or more")
    if depth is not None and level != "modules":
        raise InvalidInput(f"depth folds the tree of modules, and the level is {level!r}; drop one of the two")
    check_choice(SORT_COLUMNS, sort, top)


def _sorted_by(key: str, profile: ModelProfile) -> Callable[[ProfileRow], float]:
    """Return how to read what rows are sorted by; what is not known counts as nothing."""
    get = COLUMNS[SORT_COLUMNS[key]].get
    return lambda row: get(row, profile) or 0.0


def _list(profile: ModelProfile, level: Level, depth: int | None, sort: str | None, top: int | None) -> list[Line]:
    """Return rows that add up, in order or largest first; `top` alone means the most MACs, the others in one line."""
    work = _own_work(profile)
    rows = cut(module_tree(profile), depth) if level == "modules" else rows_of(profile, level)
    if sort is not None or top is not None:
        rows = sorted(rows, key=_sorted_by(sort or "macs", profile), reverse=True)
    lines = [Line(_label(row, profile.name), row if row.is_leaf else _own(row, work)) for row in rows[:top]]
    if top is not None and len(rows) > top:
        others = replace(combined(rows[top:]), path="", type="", outputs=(), op="", calls=1)
        lines.append(Line(f"… {len(rows) - top} more", others, is_part=False))
    return lines


def _label(row: ProfileRow, name: str) -> str:
    if row.op:
        return row.op.removeprefix("aten.")
    label = row.path or name
    if not row.is_leaf:
        label += " (own work)"
    if row.call_number > 1:
        label += f" (call {row.call_number})"
    return label if row.calls == 1 else f"{label} ({units.TIMES}{row.calls})"


def _own_work(profile: ModelProfile) -> dict[str, str]:
    """Return what each module does itself, by path: "attention", or where nothing is multiplied "elementwise, norm"."""
    kinds: dict[str, Counter[str]] = {}
    for operator in profile.operators:
        if operator.status != "free":
            kinds.setdefault(operator.module, Counter())[operator.kind] += operator.cost.macs
    return {
        path: ", ".join(kind for kind, count in macs.items() if count or not any(macs.values()))
        for path, macs in kinds.items()
    }


def _own(row: ProfileRow, work: dict[str, str]) -> ProfileRow:
    return replace(row, type=work.get(row.path, ""), outputs=())


def _branch(node: ProfileNode, label: str, guides: str, below: str, depth: int, work: dict[str, str]) -> Iterator[Line]:
    """Yield the node's line and, down to `depth`, those of its children.

    A module with MACs or parameters outside its children gets a line for them, or what stands below would not add up.
    """
    calls = f" ({units.TIMES}{node.row.calls})" if node.row.calls > 1 else ""
    yield Line(label + calls, node.row, guides, is_part=bool(guides))
    if node.row.depth >= depth or not node.children:
        return
    prefix = f"{node.row.path}." if node.row.path else ""
    own = node.own.params > 0 or (node.own.cost is not None and node.own.cost.macs > 0)
    for position, child in enumerate(node.children):
        is_last = position == len(node.children) - 1 and not own
        guide, indent = ("└ ", "  ") if is_last else ("├ ", "│ ")
        name = child.row.path.removeprefix(prefix)
        yield from _branch(child, name, below + guide, below + indent, depth, work)
    if own:
        yield Line("(own work)", _own(node.own, work), below + "└ ")


_BAR_WIDTH = 5
# The column that the share beside the MACs refers to; peaks and intensities do not add up, so they have no share.
_SHARES = {
    "macs": "MACs %", "flops": "FLOPs %", "params": "Params %", "bytes": "Moved %", "activations": "Activ. %",
    "time": "Time %", "predicted": "Pred. %",
}  # fmt: skip


def _profile_table(profile: ModelProfile, lines: Sequence[Line], level: Level, sort: str | None) -> tuple[Column, ...]:
    rows = [line.row for line in lines]
    is_operators = level == "operators"

    def figures(name: str, drop_order: int = 0) -> Column:
        # The column that the list is sorted by is never dropped.
        order = 0 if sort is not None and SORT_COLUMNS[sort] == name else drop_order
        return Column(COLUMNS[name].title, tuple(_figure(profile, row, name) for row in rows), drop_order=order)

    def texts(title: str, pick: Callable[[ProfileRow], str], drop_order: int, min_width: int | None = None) -> Column:
        cells = tuple(Cell(printable(pick(row)), style="cyan") for row in rows)
        return Column(title, cells, "left", min_width, drop_order)

    def bound(row: ProfileRow) -> str:
        return row.predicted.bound if row.predicted and row.predicted.seconds != 0 else ""

    names = tuple(Cell(printable(line.label), line.guides) for line in lines)
    if is_operators:
        head = [
            Column("#", tuple(Cell(str(row.index) if row.op else "", style="dim") for row in rows)),
            Column("Operator", names, "left", 18),
            texts("Kind", lambda row: row.type, 2, 10),
            texts("Module", lambda row: row.path, 1, 18),
            texts("Output", lambda row: _output(row.outputs), 3),
        ]
    else:
        head = [
            # A tree shows the end of each path behind its guides; a list needs room for whole paths.
            Column("Module", names, "left", 20 if any(line.guides for line in lines) else 34),
            texts("Type", lambda row: row.type, 2, 12),
            texts("Output", lambda row: _output(row.outputs), 3),
            figures("params"),
        ]
        if profile.measurement is not None and profile.measurement.layers is not None:
            head.append(figures("measured_s"))
        if profile.prediction is not None:
            head += [figures("predicted_s"), texts("Bound by", bound, 1)]
            if profile.prediction.departures:
                head.append(texts("Engine", lambda row: row.predicted.engine if row.predicted else "", 1))
    return (
        *head,
        figures("macs"),
        *_shares(profile, lines, sort or "macs"),
        figures("flops", 7),
        figures("bytes_moved", 5),
        figures("live_bytes" if is_operators else "peak_live_bytes", 4),
        figures("activation_bytes", OPTIONAL),
        figures("intensity", OPTIONAL + 1),
    )


_COSTS = ("macs", "flops", "bytes_moved", "intensity")


def _figure(profile: ModelProfile, row: ProfileRow, name: str) -> Cell:
    """Return a figure; a cost with unpriced operators in it is only a lower bound, and a quotient of two is unknown."""
    value = COLUMNS[name].get(row, profile)
    if value is None and name == "measured_s":
        return Cell("")
    if (name in _COSTS and (row.unpriced or row.cost is None)) or (value is None and name == "predicted_s"):
        return Cell("?" if value is None else f"≥ {COLUMNS[name].text(value)}", style="yellow")
    return Cell(COLUMNS[name].text(value), style="" if value else "dim")


def _output(shapes: Sequence[Shape]) -> str:
    more = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return units.shape(shapes[0]) + more if shapes else ""


def _shares(profile: ModelProfile, lines: Sequence[Line], key: str) -> list[Column]:
    """Return each row's share of the whole as a number, and as a bar that is full for the largest part."""
    key = key if key in _SHARES else "macs"
    read = _sorted_by(key, profile)
    whole = read(root_row(profile))
    if not whole:
        return []
    shares = [read(line.row) / whole for line in lines]
    longest = max((value for line, value in zip(lines, shares, strict=True) if line.is_part), default=0.0) or 1.0
    percents = tuple(Cell(units.percent(value) if value else "") for value in shares)
    bars = tuple(
        Cell(_bar(value / longest) if line.is_part else "", style="green")
        for line, value in zip(lines, shares, strict=True)
    )
    number = Column(_SHARES[key], percents)
    return [number, Column("", bars, "left", drop_order=6)] if any(bar.text for bar in bars) else [number]


def _bar(part: float) -> str:
    halves = round(part * 2 * _BAR_WIDTH)
    return "━" * (halves // 2) + "╸" * (halves % 2)


def measured_lines(measured: Measurement) -> list[Note]:
    """Return what was measured: labels with one sentence each."""
    lines = [("Latency", _latency(measured.latency))]
    if measured.layers is not None:
        lines.append(("Layers", _layers(measured.layers)))
    if measured.is_slower_fresh and measured.fresh_latency_s is not None:
        fresh = units.duration(measured.fresh_latency_s)
        lines.append(("New memory", f"{fresh} where a forward maps its memory first; the latency is of kept memory"))
    if measured.training is not None:
        step = measured.training
        backward, forward = units.duration(step.backward_s), units.duration(step.forward_s)
        lines.append(("Step", f"{units.duration(step.whole_s)}: forward {forward}, backward {backward}; no optimizer"))
    if measured.memory is not None:
        lines.append(("Measured", _memory(measured.memory)))
    if measured.energy is not None:
        lines.append(("Energy", energy_sentence(measured.energy)))
    elif measured.energy_refusals:
        reasons = "; ".join(f"{refusal.meter}: {refusal.reason}" for refusal in measured.energy_refusals)
        lines.append(("Energy", f"not known ({reasons})"))
    return lines + [("Note", remark) for remark in measured.latency.remarks]


def _latency(latency: Latency) -> str:
    low, high = units.duration(latency.median_interval_s.low), units.duration(latency.median_interval_s.high)
    others = f"minimum {units.duration(latency.minimum_s)}, p95 {units.duration(latency.p95_s)}"
    median = f"{units.duration(latency.median_s)} measured here (median, 95 % interval {low} to {high}; {others})"
    return f"{median}; {latency.throughput:.4g} samples per second"


def _layers(layers: LayerLatencies) -> str:
    inside = layers.whole_s - layers.between_layers_s
    recording = f"recording added {units.duration(max(layers.overhead_s, 0.0))}, which is taken out"
    return f"{units.duration(inside)} in layers, {units.duration(layers.between_layers_s)} between them; {recording}"


def _memory(memory: MeasuredMemory) -> str:
    where = memory.peak_module or "the model's own forward"
    peak = f"{units.size(memory.peak_bytes)} at the allocator's peak, in {memory.peak_op} of {where}"
    scratch = f"{units.size(memory.scratch_bytes)} of it operators' scratch"
    return f"{peak} ({scratch}); {units.size(memory.tensor_peak_bytes)} at the peak of tensors alone"


def energy_sentence(energy: Energy, *, is_short: bool = False) -> str:
    """Return joules with what kind of figure they are, and where it comes from unless it is to be short."""
    kind = {"proxy": "a proxy", "model": "a model"}.get(energy.source, f"measured by {energy.source}")
    if is_short and energy.source in ("proxy", "model"):
        return f"{units.energy(energy.joules)} per forward, {kind}, not measured"
    # Many notes say themselves what kind they are of.
    how = f"a {energy.note}" if energy.note.startswith(energy.source) else f"{kind}: {energy.note}"
    return f"{units.energy(energy.joules)} per forward, {how}"


# The basis of a prediction, and its word for operators that the basis does not cover.
_BASES = {
    "calibrated": ("from operators sampled there", "outside what was sampled"),
    "timed": ("each of its operators timed there once", "outside what was sampled"),
    "fitted": ("from costs fitted to times of whole models there", "outside the fit"),
    "roofline": ("an uncalibrated estimate", "without a cost rule"),
    "vendor": ("the vendor's estimate", "left to the CPU"),
}


def predicted_lines(predictions: Sequence[Prediction], *, is_verbose: bool = True) -> list[Note]:
    """Return labels with one sentence each; with several targets each sentence names its own.

    Where it is to be short: one line about energy, the platform whose times it rests on, and remarks only where they
    say why there is no time.
    """
    lines: list[Note] = []
    hidden = 0
    for prediction in predictions:
        of = f"{prediction.target}: " if len(predictions) > 1 else ""
        lines.append(("Predicted", prediction_sentence(prediction)))
        lines += [("Leaves", f"{of}{departure_sentence(item)}") for item in prediction.departures]
        if prediction.engine == "npu" and prediction.seconds is not None and not prediction.departures:
            odds = "".join(f"; {remark}" for remark in prediction.remarks if remark.startswith(NPU_UNUSED))
            lines.append(("Engine", f"{of}every layer on the NPU, by the rules that are known{odds}"))
        energies = prediction.energies if is_verbose else prediction.energies[:1]
        is_unsaid = prediction.seconds is None and not prediction.outside
        remarks = prediction.remarks if is_verbose else prediction.remarks[: int(is_unsaid)]
        lines += [("Energy", f"{of}{energy_sentence(energy, is_short=not is_verbose)}") for energy in energies]
        if prediction.basis == "fitted" and prediction.seconds is not None and not is_verbose:
            # The board, the runtime with its date, and the threads: what it is a time of.
            lines += [("Note", f"{of}{remark.partition(';')[0]}") for remark in prediction.remarks[:1]]
        lines += [("Note", f"{of}{remark}") for remark in remarks]
        hidden += len(prediction.energies) - len(energies) + len(prediction.remarks) - len(remarks)
    if hidden:
        what = "remark" if hidden == 1 else "remarks"
        lines.append(("More", f"{hidden} {what} and sources: -o FILE.md, or .prediction.remarks in Python"))
    return lines


def fits_lines(profile: ModelProfile) -> list[Note]:
    """Return whether each device that was predicted for holds the model; nothing where its RAM is not known."""
    lines = []
    for prediction in profile.predictions:
        if prediction.mcu is not None:
            mcu = prediction.mcu
            lines += [(verdict.memory, verdict_sentence(mcu, verdict)) for verdict in mcu.verdicts]
            place = f", fullest at {mcu.peak_operator}" if mcu.peak_operator else ""  # empty where graphs call others
            lines.append(("Kernels", f"{mcu.kernels}; arena {mcu.arena_bytes} bytes{place}"))
            lines.append(("RAM peak", mcu.peak_text))
            if mcu.advice:
                now = units.size(mcu.head_bytes)
                lines.append(("Lower it", f"activations and scratch, {now} now, with {'; '.join(mcu.advice)}"))
        elif prediction.ram_bytes:
            answer, needed = fit_of(profile, prediction)
            parts = f"{units.size(needed)} in {prediction.precision} (weights, input, activations)"
            ram = f"{prediction.target} has {units.sizes(prediction.ram_bytes)}"
            lines.append(("Fits", f"{answer}: {parts}, and {ram}"))
    return lines


def verdict_sentence(mcu: McuMemory, verdict: MemoryVerdict) -> str:
    """Return whether one memory of a microcontroller suffices, what is left, and what it consists of."""
    return f"{'yes' if verdict.fits else 'no'}: {verdict.text}; {mcu.parts_text(verdict.memory)}"


def fit_of(profile: ModelProfile, prediction: Prediction) -> tuple[str, int]:
    """Return whether the RAM of a device holds the model, and the bytes that the model needs there."""
    needed, sizes = peak_memory(profile, prediction.precision).total_bytes, prediction.ram_bytes
    holding = [size for size in sizes if needed <= size]
    answer = "yes" if len(holding) == len(sizes) else f"only in {units.size(holding[0])}" if holding else "no"
    return answer, needed


def prediction_sentence(prediction: Prediction) -> str:
    """Return the whole in one sentence: target, time with its interval, bound and basis."""
    what = f"on {prediction.target} in {prediction.precision_label}"
    if prediction.seconds is None:
        why = next(iter(prediction.remarks), "") if prediction.outside else "a figure of the device is missing"
        return f"not known {what}: {why}"
    basis, beyond = _BASES[prediction.basis]
    outside = f"; {beyond}: {', '.join(prediction.outside)}" if prediction.outside else ""
    interval = "no interval"
    if prediction.low is not None:
        low = units.duration(prediction.low)
        high = None if prediction.high is None else units.duration(prediction.high)
        interval = f"90 % interval from {low}, open above" if high is None else f"90 % interval {low} to {high}"
    return f"{units.duration(prediction.seconds)} {what} ({interval}), bound by {prediction.bound}; {basis}{outside}"


def departure_sentence(item: Departure) -> str:
    """Return what leaves an accelerator, for whom, at what cost, why, and what would stay."""
    count, seconds = len(item.modules), sum(item.seconds)
    cost = f"{units.duration(seconds)} for it" if seconds else "cost below the error of the prediction"
    where = f"{count} layer{'s' * (count != 1)} with {item.operator}, computed by the {item.engine}"
    return f"{where}: {cost}. {item.reason[:1].upper()}{item.reason[1:]}. Would stay: {item.rewrite}"


_NAMED_AT_MOST = 5


def summary_lines(profile: ModelProfile, *, is_verbose: bool = True) -> list[Note]:
    """Return labels with one sentence each. With unpriced operators every total says that it is a lower bound."""
    shown = in_target_precision(profile)
    totals = shown.totals
    bound = "≥ " if totals.is_lower_bound else ""
    read, written = units.size(totals.bytes_read), units.size(totals.bytes_written)
    is_known = totals.intensity is not None and not totals.is_lower_bound
    intensity = f"; {units.ratio(totals.intensity)} FLOPs per byte" if is_known else ""
    operators, missing = len(profile.trace.ops), sum(item.count for item in profile.unpriced)
    coverage = f"100% of {operators} operators"
    if missing:
        coverage = f"{units.percent(profile.coverage)}: {operators - missing} of {operators} operators"
    others = f"{bound}{units.count(totals.other_ops)} of them outside MACs"
    lines = [
        ("Compute", f"{bound}{units.count(totals.macs)} MACs, {bound}{units.count(totals.flops)} FLOPs ({others})"),
        ("Parameters", _parameters(shown)),
        ("Traffic", f"{bound}{read} read, {bound}{written} written{intensity}"),
        ("Peak memory", _peak(shown)),
        ("Coverage", coverage),
    ]
    if shown is not profile:
        as_given = shown.totals.input_bytes == profile.totals.input_bytes
        others = "; inputs count as they are passed" if as_given else ""
        lines.append(("Precision", f"bytes are those of {profile.predictions[0].precision}, as on the target{others}"))
    if profile.measurement is not None:
        lines += measured_lines(profile.measurement)
    lines += fits_lines(profile)
    lines += predicted_lines(profile.predictions, is_verbose=is_verbose)
    if profile.unpriced:
        lines.append(("Unpriced", _unpriced(profile)))
    if profile.convention != "edge_opt":
        lines.append(("Convention", f"counted as {profile.convention} counts"))
    if profile.mode == "train":
        lines.append(("Mode", "train: dropout and batch statistics as in training; the backward pass is not included"))
    return lines + [("Note", note) for note in profile.trace.notes]


def _parameters(profile: ModelProfile) -> str:
    totals = profile.totals
    buffers = f"; buffers {units.size(totals.buffer_bytes)}" if totals.buffer_bytes else ""
    if not totals.params:
        return f"none{buffers}"
    trainable = "all" if totals.trainable_params == totals.params else units.count(totals.trainable_params)
    return f"{units.count(totals.params)} ({units.size(totals.param_bytes)}), {trainable} trainable{buffers}"


def _peak(profile: ModelProfile) -> str:
    peak = profile.peak
    if peak.op_index is None:
        return "no operator ran"
    where = peak.module or "the model's own forward"
    size, planned = units.size(peak.live_bytes), units.size(peak.planner_bytes)
    inputs = units.size(profile.totals.input_bytes)
    return f"{size} of activations, at {where} (planner bound {planned}); inputs {inputs}"


def _unpriced(profile: ModelProfile) -> str:
    counts: Counter[str] = Counter()
    for item in profile.unpriced:
        counts[item.op] += item.count
    named = [op if count == 1 else f"{op} {units.TIMES}{count}" for op, count in counts.most_common(_NAMED_AT_MOST)]
    if len(counts) > len(named):
        named.append(f"and {len(counts) - len(named)} more")
    total = sum(counts.values())
    return f"{total} operator{'s' * (total != 1)} unpriced: {', '.join(named)} — totals are lower bounds"
