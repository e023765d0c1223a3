"""explain(): why a variant is faster, or is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_opt import units
from edge_opt.boards.fused_layers import passes
from edge_opt.boards.ratios import PredictedVariant, predict_variant, ratio_of
from edge_opt.boards.targets import Target
from edge_opt.errors import InvalidInput
from edge_opt.explanation.helpful_changes import helpful_changes, layers_text
from edge_opt.explanation.target_reasons import target_headline, target_reasons
from edge_opt.measuring.machine import is_fast, vector_bytes
from edge_opt.measuring.statistics import compare_latencies
from edge_opt.pruning.ranking import fast_multiple
from edge_opt.records.compression import Bottleneck, Explanation, LayerChange, Reason, Topic
from edge_opt.records.conversions import Converted, Kernel, RunnerProfile
from edge_opt.records.devices import Precision
from edge_opt.records.fields import field, record
from edge_opt.records.measurements import Comparison, Latency
from edge_opt.records.profiles import ModelProfile

# Bytes per element of a layer that runs in it, over the four of the profile's float32.
_SHRUNK = {"int8": 0.25, "fp16": 0.5, "bf16": 0.5, "fp32": 1.0}
# A layer this close to the cheapest one per operator is made of overhead.
_NEAR_FLOOR = 3.0


@record
class ModelVariant:
    """One of the two models that `explain` compares."""

    profile: ModelProfile = field("Its profile; for a conversion, that of the model it was made of.")
    converted: Converted | None = field("What it was converted to, if it was.", default=None)
    latency: Latency | None = field(
        "Its latency, from a runner; that of the profile's measurement unless given.", default=None
    )
    kernels: RunnerProfile | None = field("Time of each kernel, from `compress.profile_runner`.", default=None)
    runtime: str = field('What ran it; "" is the runtime of the conversion, else torch.', default="")
    precision: Precision | None = field(
        "Precision on a target; default: that of the conversion, else what the profile computes in.", default=None
    )
    predicted: PredictedVariant | None = field(
        "What it takes on a target; `explain` predicts it. Times of layers are then these.", default=None
    )

    def on_target(self, target: Target, runtime: str | None = None, threads: int | None = None) -> ModelVariant:
        """Return the variant with what it takes on a target, as `profile(target=)` predicts it.

        Args:
            target: As in `profile`.
            runtime: Runtime there, such as "ncnn".
            threads: Threads of the runtime there.
        """
        converted = None if self.converted is None else self.converted.precision
        precision: Precision = self.precision or converted or self.profile.computes_in
        return replace(
            self, predicted=predict_variant(self.profile, target, precision, runtime=runtime, threads=threads)
        )

    @property
    def used_runtime(self) -> str:
        """The runtime that ran it."""
        return self.runtime or (self.converted.runtime if self.converted else "torch")

    @property
    def known_kernels(self) -> tuple[Kernel, ...]:
        """The kernels that ran, with their times where they were profiled."""
        return self.kernels.kernels if self.kernels else self.converted.kernels if self.converted else ()

    @property
    def kernel_names(self) -> dict[str, str]:
        """The kernels of each module path, as "QLinearConv int8"."""
        names: dict[str, dict[str, None]] = defaultdict(dict)
        for kernel in self.known_kernels:
            if kernel.nodes:
                names[kernel.path][f"{kernel.op} {kernel.precision}"] = None
        return {path: ", ".join(listed) for path, listed in names.items()}

    @property
    def measured_latency(self) -> Latency | None:
        """The latency that is given, or that was measured with the profile."""
        measurement = self.profile.measurement
        return self.latency or (measurement.latency if measurement else None)

    @property
    def seconds(self) -> dict[str, float]:
        """Time of each module path: on the target, else of the runtime's kernels or measured layers; empty without."""
        seconds: dict[str, float] = defaultdict(float)
        if self.predicted is not None:
            for item in self.predicted.prediction.layers:
                seconds[item.path] += item.seconds or 0.0
        elif self.kernels is not None:
            for kernel in self.kernels.kernels:
                if kernel.nodes:
                    seconds[kernel.path] += kernel.seconds or 0.0
        elif self.profile.measurement is not None and self.profile.measurement.layers is not None:
            for layer in self.profile.measurement.layers.layers:
                seconds[layer.path] += layer.seconds
        return dict(seconds)

    @property
    def precisions(self) -> dict[str, str]:
        """The precision of each module path, where a conversion or its kernels say; mixed ones are joined."""
        if self.predicted is not None:
            prediction = self.predicted.prediction
            return {layer.path: prediction.precision for layer in prediction.layers}
        precisions: dict[str, set[str]] = defaultdict(set)
        for layer in self.converted.layers if self.converted else ():
            precisions[layer.path].add(layer.precision)
        layer_paths = set(precisions)
        for kernel in self.known_kernels:
            if kernel.nodes and kernel.path not in layer_paths:
                precisions[kernel.path].add(kernel.precision)
        return {path: "+".join(sorted(kinds)) for path, kinds in precisions.items()}

    def is_fused(self, path: str) -> bool:
        """Return whether the runtime has no kernel for this module: another kernel does its work in the same pass.

        Args:
            path: Path of the module.
        """
        kernels = self.known_kernels
        return bool(kernels) and all(kernel.path != path for kernel in kernels if kernel.nodes)


@dataclass(slots=True)
class _LayerRow:
    """Costs of one layer, all of its calls together."""

    kind: str
    channels: int | None = None
    macs: int = 0
    flops: int = 0
    moved: int = 0
    operators: int = 0


def _rows(variant: ModelVariant) -> dict[str, _LayerRow]:
    """Return costs by path, calls of the same module together."""
    rows: dict[str, _LayerRow] = {}
    # The profile of a file has the bytes of the file's own types.
    precisions = variant.precisions if variant.converted and variant.predicted is None else {}
    is_channels_last = variant.profile.trace.modules[0].kind == "TfliteModel"
    for layer in variant.profile.layers:
        path, kind = layer.call.path, layer.call.kind
        shrunk = 0.0 if variant.is_fused(path) else _SHRUNK.get(precisions.get(path, "fp32"), 1.0)
        row = rows.setdefault(path, _LayerRow(kind))
        row.macs += layer.cost.macs
        row.flops += layer.cost.flops
        row.moved += round(layer.cost.bytes_moved * shrunk)
        row.operators += layer.operators
        shape = layer.call.output_shapes[0] if layer.call.output_shapes else ()
        is_image = kind.startswith("Conv") and len(shape) > 2 and not is_channels_last
        row.channels = shape[1] if is_image else shape[-1] if kind.startswith(("Conv", "Linear")) and shape else None
    if variant.predicted is not None:
        for row in rows.values():
            row.moved = 0
        for item in passes(variant.profile, variant.predicted.prediction.precision):
            rows[variant.profile.trace.modules[item.module].path].moved += item.bytes_read + item.bytes_written
    return {path: row for path, row in rows.items() if row.operators}


def layer_changes(before: ModelVariant, after: ModelVariant) -> tuple[LayerChange, ...]:
    """Return every layer of either model, in the order of the first; paths survive pruning and conversion."""
    old, new = _rows(before), _rows(after)
    old_s, new_s = before.seconds, after.seconds
    precisions, old_kernels, new_kernels = after.precisions, before.kernel_names, after.kernel_names
    if after.predicted is None:
        bottlenecks = _bottlenecks(new, new_s, _best_rates((old, old_s), (new, new_s)))
    else:
        # Of several calls of one layer, the longest says.
        calls = sorted(after.predicted.prediction.layers, key=lambda layer: layer.seconds or 0.0)
        bottlenecks = {layer.path: layer.bound for layer in calls}
    return tuple(
        LayerChange(
            path=path,
            kind=(new.get(path) or old[path]).kind,
            macs_before=old[path].macs if path in old else None,
            macs_after=new[path].macs if path in new else None,
            bytes_before=old[path].moved if path in old else None,
            bytes_after=new[path].moved if path in new else None,
            seconds_before=old_s.get(path),
            seconds_after=new_s.get(path),
            channels_before=old[path].channels if path in old else None,
            channels_after=new[path].channels if path in new else None,
            precision=precisions.get(path),
            bottleneck=bottlenecks.get(path, "unknown"),
            kernels_before=old_kernels.get(path, ""),
            kernels_after=new_kernels.get(path, ""),
        )
        for path in dict.fromkeys([*old, *new])
    )


def _best_rates(*sides: tuple[Mapping[str, _LayerRow], Mapping[str, float]]) -> tuple[float, float]:
    """Return FLOPs and bytes per second of the layers that did best at each."""
    timed = [(row, seconds[path]) for rows, seconds in sides for path, row in rows.items() if seconds.get(path)]
    return (
        max((row.flops / spent for row, spent in timed), default=0.0),
        max((row.moved / spent for row, spent in timed), default=0.0),
    )


def _bottlenecks(
    rows: Mapping[str, _LayerRow], seconds: Mapping[str, float], best: tuple[float, float]
) -> dict[str, Bottleneck]:
    """Return what bounds each timed layer: the cost of calling it, memory, or arithmetic."""
    timed = {path: spent for path, spent in seconds.items() if spent and path in rows}
    floor = min((spent / rows[path].operators for path, spent in timed.items()), default=0.0)
    bottlenecks: dict[str, Bottleneck] = {}
    for path, spent in timed.items():
        row = rows[path]
        attainable = max(row.flops / best[0] if best[0] else 0.0, row.moved / best[1] if best[1] else 0.0)
        if not attainable or (spent < _NEAR_FLOOR * floor * row.operators and attainable < spent / 2):
            bottlenecks[path] = "overhead"
        else:
            bottlenecks[path] = "memory" if row.moved * best[0] > row.flops * best[1] else "compute"
    return bottlenecks


_NAMED = 4
# Reasons that say of layers that they became faster or slower.
_CLAIMS: tuple[Topic, ...] = ("time", "slower layers", "shortfall")
# A layer that lost more than this share of its time gained by the change.
_GAINED = 0.1
# Less than this share of the time is not worth a sentence.
_WORTH_SAYING = 0.02


def explain(
    before: ModelProfile | ModelVariant,
    after: ModelProfile | ModelVariant,
    *,
    paired: bool = False,
    target: Target | None = None,
    runtime: str | None = None,
    threads: int | None = None,
) -> Explanation:
    """Explain why one model is faster than another or not: savings, unchanged parts, and added work.

    Without measured times, only counts are compared. With a target, times are predicted there as `profile(target=)`
    does, and the three changes that would help most are named with their predicted gain.

    Args:
        before: The first model: its profile, or a `compress.ModelVariant` with its conversion, latency and kernels.
        after: The second model, likewise; for a conversion both profiles may be the same one.
        paired: Whether the latencies were measured interleaved, as `compress.measure_runners` does.
        target: Target as in `profile`. Precisions there are those of the variants, or of int8 files.
        runtime: Runtime on the target, such as "ncnn"; default: the one with the most accurate data.
        threads: Threads of the runtime on the target; default: those of the most accurate data.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> explanation = explain(eo.profile(SmallCNN(), (1, 1, 28, 28)), eo.profile(SmallCNN(8, 16), (1, 1, 28, 28)))
    >>> print(explanation.headline)
    MACs fell by 71.9 % and bytes moved by 50.7 %; no times were given, so nothing is said about speed
    """
    old, new = (ModelVariant(each) if isinstance(each, ModelProfile) else each for each in (before, after))
    if target is not None:
        old, new = (side if side.predicted else side.on_target(target, runtime, threads) for side in (old, new))
    elif runtime is not None or threads is not None:
        raise InvalidInput("runtime= and threads= are of a target; add target=, such as target='raspberry-pi-4'")
    changes = layer_changes(old, new)
    macs = _ratio(old.profile.totals.macs, new.profile.totals.macs)
    moved = _ratio(sum(row.bytes_before or 0 for row in changes), sum(row.bytes_after or 0 for row in changes))
    costs = _costs(macs, moved)
    if old.predicted is not None and new.predicted is not None:
        latency = ratio_of(old.predicted, new.predicted)
        multiple, whose = fast_multiple(new.predicted.target), f"which {latency.target} runs fast"
        reasons = [
            *target_reasons(old.predicted, new.predicted),
            *_time_reasons(changes, new),
            *_odd_widths(changes, multiple, whose),
            # Layers that a runtime computes with the one before them have no time of their own.
            *_structure([row for row in changes if row.seconds_before or row.seconds_after]),
        ]
        ordered = tuple(sorted(reasons, key=_importance))
        helpful = helpful_changes(new.predicted)
        return Explanation(target_headline(latency, costs), None, macs, moved, changes, ordered, latency, helpful)
    old_latency, new_latency = old.measured_latency, new.measured_latency
    compared = None
    if old_latency is not None and new_latency is not None:
        compared = compare_latencies(old_latency, new_latency, paired=paired)
    reasons = [
        *_precision_reasons(new, changes, compared),
        *_added(new),
        *_time_reasons(changes, new),
        *_odd_widths(changes, vector_bytes() // 4, "the lanes of this CPU's vectors"),
        *_structure(changes),
        *_circumstances(old, new),
    ]
    if compared is not None and _contradicts(compared, old, new):
        # Parts of a whole that shows no difference show none either: what they differ by is noise.
        reasons = [reason for reason in reasons if reason.topic not in _CLAIMS]
        if compared.verdict != "equal":
            reasons.append(Reason("noise", "Times of single layers do not add up to this, so they are not compared"))
    reasons.sort(key=_importance)
    headline = _headline(costs, compared, old_latency, new_latency)
    return Explanation(headline, compared, macs, moved, changes, tuple(reasons))


def _importance(reason: Reason) -> tuple[bool, float]:
    """Order savings first, then reasons with a time, longest first; the rest keeps its order."""
    return reason.topic != "time", -(reason.seconds or 0.0)


def _contradicts(compared: Comparison, old: ModelVariant, new: ModelVariant) -> bool:
    """Return whether the times of the parts, added up, say something else than those of the whole."""
    before, after = (side.kernels.seconds if side.kernels else sum(side.seconds.values()) for side in (old, new))
    if compared.verdict == "equal" or not (before and after):
        return compared.verdict == "equal"
    change = after / before - 1
    return change > _WORTH_SAYING if compared.verdict == "faster" else change < -_WORTH_SAYING


def _ratio(old: float, new: float) -> float | None:
    return new / old if old else None


def _fell(ratio: float | None) -> str:
    if ratio is None:
        return "are not known"
    if abs(ratio - 1) < 0.0005:
        return "stayed the same"
    return f"{'fell' if ratio < 1 else 'rose'} by {abs(1 - ratio) * 100:.1f} %"


def _costs(macs: float | None, moved: float | None) -> str:
    fell = [_fell(ratio) for ratio in (macs, moved)]
    both_fell = all(words.startswith("fell") for words in fell)
    return f"MACs {fell[0]} and bytes moved {fell[1].removeprefix('fell ') if both_fell else fell[1]}"


def _headline(costs: str, compared: Comparison | None, old: Latency | None, new: Latency | None) -> str:
    if compared is None or old is None or new is None:
        return f"{costs}; no times were given, so nothing is said about speed"
    is_cpu = compared.clock == "cpu"
    times = [units.duration(side.cpu_median_s if is_cpu else side.median_s) for side in (old, new)]
    low, high = compared.ratio_interval.low, compared.ratio_interval.high
    change = {
        "faster": f"It takes {(1 - compared.ratio) * 100:.1f} % less time",
        "slower": f"It takes {compared.ratio:.2f} times as long",
        "equal": "No difference in time was shown",
    }[compared.verdict]
    clock = "CPU time" if is_cpu else "time"
    return f"{change} ({clock} {times[0]} before, {times[1]} after, ratio {low:.2f} to {high:.2f}); {costs}"


def _precision_reasons(
    new: ModelVariant, changes: Sequence[LayerChange], compared: Comparison | None
) -> Iterable[Reason]:
    done = new.converted
    if done is None:
        return
    kept = [layer for layer in done.kept_layers if layer.precision != "unknown"]
    if kept:
        paths = tuple(dict.fromkeys(layer.path for layer in kept))
        total = sum(row.macs_after or 0 for row in changes)
        share = sum(row.macs_after or 0 for row in changes if row.path in paths) / total if total else 0.0
        kinds = "+".join(sorted({layer.precision for layer in kept}))
        why = "; ".join(dict.fromkeys(layer.reason for layer in kept))
        yield Reason(
            "float layers",
            f"In {kinds} instead of {done.precision}: {len(kept)} of {len(done.layers)} layers with "
            f"{share * 100:.1f} % of the MACs, {_named(paths)} ({why})",
            sum(row.seconds_after or 0.0 for row in changes if row.path in paths) or None,
            paths,
        )
    # Where it is faster all the same, this is not a reason.
    is_faster = compared is not None and compared.verdict == "faster"
    for name in () if is_faster else done.effective_precision.split("+"):
        if name in ("fp16", "bf16", "int8") and is_fast(name) is False:
            yield Reason("slow precision", f"This CPU has no instructions for {name}: fewer bits save memory, not time")


def _added(new: ModelVariant) -> Iterable[Reason]:
    """Report kernels that compute nothing: quantize, dequantize, reorder."""
    known = new.known_kernels
    added = [kernel for kernel in known if kernel.only_converts]
    if not added:
        return
    what = ", ".join(f"{count} {op}" for op, count in Counter(kernel.op for kernel in added).most_common())
    spent = sum(kernel.seconds or 0.0 for kernel in added) if new.kernels else None
    cost = ""
    if new.kernels and spent is not None and new.kernels.seconds:
        cost = f", {units.duration(spent)}, {spent / new.kernels.seconds * 100:.1f} % of all kernels' time"
    yield Reason(
        "conversions", f"Converting and reordering tensors: {len(added)} of {len(known)} kernels ({what}){cost}", spent
    )


def _time_reasons(changes: Sequence[LayerChange], new: ModelVariant) -> Iterable[Reason]:
    timed = [row for row in changes if row.seconds_after is not None]
    total = sum(row.seconds_after or 0.0 for row in timed)
    if not total:
        return

    def share_reason(topic: Topic, what: str, rows: Sequence[LayerChange]) -> Iterable[Reason]:
        spent = sum(row.seconds_after or 0.0 for row in rows)
        if spent >= _WORTH_SAYING * total:
            share = f"{units.duration(spent)}, {spent / total * 100:.1f} % of all layers' time"
            longest = tuple(row.path for row in sorted(rows, key=lambda row: -(row.seconds_after or 0.0)))
            which = f"{len(rows)} of {len(timed)} layers, {share} ({_named(longest)})"
            yield Reason(topic, f"{what}: {which}", spent, longest)

    small, waiting = ([row for row in timed if row.bottleneck == bound] for bound in ("overhead", "memory"))
    overhead = "Calling them costs more than their arithmetic"
    if new.predicted is None:
        small = [row for row in small if (row.saved_s or 0.0) <= _GAINED * (row.seconds_before or 0.0)]
        overhead = "Too small to gain, as calling them costs more than their arithmetic"
    yield from share_reason("overhead", overhead, small)
    yield from share_reason("memory", "Waiting for memory rather than arithmetic", waiting)
    unchanged = [
        row
        for row in timed
        if row.bytes_after and row.macs_before == row.macs_after and row.bytes_before == row.bytes_after
    ]
    if len(unchanged) < len(timed):
        yield from share_reason("unchanged layers", "Unchanged in MACs and bytes", unchanged)
    yield from _time_changes(changes)
    layers = new.profile.measurement.layers if new.profile.measurement and new.kernels is None else None
    if layers is not None and layers.between_layers_s >= 5 * _WORTH_SAYING * layers.whole_s:
        share = layers.between_layers_s / layers.whole_s * 100
        spent = units.duration(layers.between_layers_s)
        yield Reason("between layers", f"Between layers: {spent}, {share:.1f} % of the time", layers.between_layers_s)


def _time_changes(changes: Sequence[LayerChange]) -> Iterable[Reason]:
    """Report layers that became faster, those that became slower, and those that lost MACs and not as much time.

    Kernels of a new precision may lose to the old ones.
    """
    saved = [(row.saved_s or 0.0, row) for row in changes]
    slower = [(-seconds, row) for seconds, row in saved if row.seconds_before and -seconds > 0.1 * row.seconds_before]
    lagging = []
    for row in changes:
        if row.macs_before and row.macs_after is not None and row.seconds_before and row.seconds_after is not None:
            expected = row.seconds_before * row.macs_after / row.macs_before
            if row.macs_after < row.macs_before and row.seconds_after > 1.1 * expected:
                lagging.append((row.seconds_after - expected, row))
    topics: tuple[tuple[Topic, str, list[tuple[float, LayerChange]]], ...] = (
        ("time", "Faster than before: {} by {}", [(seconds, row) for seconds, row in saved if seconds > 0]),
        ("slower layers", "Slower than before: {} by {}", slower),
        ("shortfall", "More MACs lost than time: {} {} short of proportion", lagging),
    )
    for topic, what, rows in topics:
        if rows:
            rows.sort(key=lambda item: -item[0])
            seconds = sum(seconds for seconds, _ in rows)
            listed = _listed([_lag(row) if topic == "shortfall" else _times(row) for _, row in rows])
            text = f"{what.format(layers_text(len(rows)), units.duration(seconds))}, {listed}"
            yield Reason(topic, text, None if topic == "time" else seconds, tuple(row.path for _, row in rows))


def _odd_widths(changes: Sequence[LayerChange], multiple: int, whose: str) -> Iterable[Reason]:
    """Report channels beside a multiple of what kernels compute at once. Accumulators have 32 bits in every precision.

    `whose` says where the multiple comes from.
    """
    odd = [
        (row.path, row.channels_after)
        for row in changes
        if row.channels_after
        and row.channels_before not in (None, row.channels_after)
        and row.channels_after % multiple
    ]
    if odd:
        listed = [f"{path} uses {channels} of {-(-channels // multiple) * multiple}" for path, channels in odd]
        yield Reason(
            "vector width",
            f"Channels beside multiples of {multiple}, {whose}: {layers_text(len(odd))}, {_listed(listed)}; "
            f"prune in steps of {multiple}",
            None,
            tuple(path for path, _ in odd),
        )


def _structure(changes: Sequence[LayerChange]) -> Iterable[Reason]:
    removed = tuple(row.path for row in changes if row.macs_after is None)
    added = tuple(row.path for row in changes if row.macs_before is None)
    for paths, what in ((removed, "before"), (added, "after")):
        if paths:
            yield Reason("structure", f"There only {what}: {layers_text(len(paths))}, {_named(paths)}", None, paths)


def _circumstances(old: ModelVariant, new: ModelVariant) -> Iterable[Reason]:
    old_latency, new_latency = old.measured_latency, new.measured_latency
    runtimes = [side.used_runtime for side in (old, new)]
    if runtimes[0] != runtimes[1]:
        yield Reason(
            "runtime",
            f"The runtime changed from {runtimes[0]} to {runtimes[1]}, which alone changes the time; "
            f"compare with fp32 on {runtimes[1]} to see what the precision brings",
        )
    if old_latency is None or new_latency is None:
        yield Reason("not measured", "Figures are of shapes alone; measure both models to learn what became faster")
        return
    for what, latency in (("first", old_latency), ("second", new_latency)):
        if latency.is_noisy or latency.is_contended:
            yield Reason("noise", f"The measurement of the {what} model was disturbed: {'; '.join(latency.remarks)}")


def _times(row: LayerChange) -> str:
    before, after = units.duration(row.seconds_before or 0.0), units.duration(row.seconds_after or 0.0)
    kernels = (row.kernels_before, row.kernels_after)
    named = f" ({' → '.join(kernels)})" if all(kernels) and kernels[0] != kernels[1] else ""
    return f"{row.path or 'the model itself'} {before} to {after}{named}"


def _lag(row: LayerChange) -> str:
    macs, seconds = (row.macs_before, row.macs_after), (row.seconds_before, row.seconds_after)
    changes = [f"{((new or 0) / old - 1) * 100:+.0f} %" if old else units.DASH for old, new in (macs, seconds)]
    return f"{row.path} (MACs {changes[0]}, time {changes[1]}, {row.bottleneck}-bound)"


def _named(paths: Sequence[str]) -> str:
    return _listed([path or "the model itself" for path in paths])


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:_NAMED]) + (f" and {len(items) - _NAMED} more" if len(items) > _NAMED else "")
