"""compare(): models layer by layer, with the verdict on latency."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records.measurements import Comparison, Interval, Verdict
from edge_opt.records.profiles import (
    ComparedFigure,
    ComparedLayer,
    FigureUnit,
    LayerFigures,
    ModelComparison,
    ModelProfile,
)
from edge_opt.records.sweeps import SHARES, SweepResult, Trial, TrialMetrics

if TYPE_CHECKING:
    from edge_opt.loading import ModelLike

Layers = Sequence[LayerFigures]
# Position of a layer in the old model -> position of the same layer in the new one.
Pairs = dict[int, int]

# With fewer layers matched by name or by figures, "the third convolution" does not say which one is meant.
_MIN_MATCHED = 0.25


def align(old: Layers, new: Layers) -> list[tuple[int | None, int | None]]:
    """Pair the layers of two models, every layer exactly once; None where the other model has no such layer.

    Layers are paired in this order: the same path and type, also below another root (`module.conv1` is `conv1`); the
    same figures under another name; the same type between two paired neighbours; the same path with another type.
    """
    pairs = _pair_by_key(old, new, {}, lambda layer: (layer.path, layer.call_number, layer.kind))
    pairs |= _pair_below_another_root(old, new, pairs)
    pairs |= _pair_by_figures(old, new, pairs)
    if len(pairs) >= _MIN_MATCHED * min(len(old), len(new)):
        pairs |= _pair_between_neighbours(old, new, pairs)
        pairs |= _pair_by_key(old, new, pairs, lambda layer: (layer.path, layer.call_number))
    else:
        pairs |= _pair_by_key(old, new, pairs, _named_path)
    return list(_merge(pairs, len(old), len(new)))


def _named_path(layer: LayerFigures) -> Hashable:
    """Return the path, unless it is the model itself or a mere number in a sequence."""
    step = layer.path.rpartition(".")[2]
    return None if not step or step.isdigit() else (layer.path, layer.call_number)


def _unpaired(old: Layers, new: Layers, pairs: Pairs) -> tuple[list[int], list[int]]:
    taken = set(pairs.values())
    return [i for i in range(len(old)) if i not in pairs], [j for j in range(len(new)) if j not in taken]


def _pair_by_key(old: Layers, new: Layers, pairs: Pairs, key: Callable[[LayerFigures], Hashable]) -> Pairs:
    """Pair layers whose keys are equal; None is no key."""
    old_rest, new_rest = _unpaired(old, new, pairs)
    positions = {key(new[j]): j for j in new_rest}
    keys = ((i, key(old[i])) for i in old_rest)
    return {i: positions[name] for i, name in keys if name is not None and name in positions}


def _pair_below_another_root(old: Layers, new: Layers, pairs: Pairs) -> Pairs:
    """Pair layers whose paths are equal without the prefix that all paths of a model share."""
    old_rest, new_rest = _unpaired(old, new, pairs)
    old_root, new_root = (
        _root_length([layers[position].path for position in rest])
        for layers, rest in ((old, old_rest), (new, new_rest))
    )
    if old_root == new_root:
        return {}
    positions = {(new[j].path[new_root:], new[j].call_number, new[j].kind): j for j in new_rest}
    keys = ((i, (old[i].path[old_root:], old[i].call_number, old[i].kind)) for i in old_rest)
    return {i: positions[key] for i, key in keys if key in positions}


def _root_length(paths: Sequence[str]) -> int:
    """Return the length of the steps that all paths begin with; a path's last step is never one of them."""
    parents = [path.split(".")[:-1] for path in paths]
    shared = takewhile(lambda steps: len(set(steps)) == 1, zip(*parents, strict=False))
    return sum(len(steps[0]) + 1 for steps in shared)


def _pair_by_figures(old: Layers, new: Layers, pairs: Pairs) -> Pairs:
    """Pair layers that only changed their name, in order; without parameters one layer looks like another."""
    old_rest, new_rest = _unpaired(old, new, pairs)
    return _common(
        [i for i in old_rest if old[i].params],
        [j for j in new_rest if new[j].params],
        lambda i: (old[i].kind, old[i].params, old[i].output_shapes),
        lambda j: (new[j].kind, new[j].params, new[j].output_shapes),
    )


def _pair_between_neighbours(old: Layers, new: Layers, pairs: Pairs) -> Pairs:
    """Pair layers of the same type, in order, between two paired neighbours."""
    more: Pairs = {}
    anchors = [(-1, -1), *_without_crossings(sorted(pairs.items())), (len(old), len(new))]
    old_rest, new_rest = map(set, _unpaired(old, new, pairs))
    for (left, new_left), (right, new_right) in pairwise(anchors):
        more |= _common(
            [i for i in range(left + 1, right) if i in old_rest],
            [j for j in range(new_left + 1, new_right) if j in new_rest],
            lambda i: old[i].kind,
            lambda j: new[j].kind,
        )
    return more


def _without_crossings(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    highest = -1
    for i, j in pairs:
        if j > highest:
            highest = j
            yield i, j


def _common(
    old: Sequence[int], new: Sequence[int], old_key: Callable[[int], Hashable], new_key: Callable[[int], Hashable]
) -> Pairs:
    """Pair positions with equal keys that stand in the same order in both lists."""
    # autojunk would ignore kinds that are frequent, and in a network of 200 layers the convolutions are.
    matcher = SequenceMatcher(None, list(map(old_key, old)), list(map(new_key, new)), autojunk=False)
    return {
        old[block.a + offset]: new[block.b + offset]
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _merge(pairs: Pairs, old_count: int, new_count: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield every layer once: the old ones in their order, each added one behind the layer that it follows."""
    partners = {j: i for i, j in pairs.items()}
    added_behind: dict[int, list[int]] = {}
    predecessor = -1
    for j in range(new_count):
        predecessor = partners.get(j, predecessor)
        if j not in partners:
            added_behind.setdefault(predecessor, []).append(j)
    for i in range(-1, old_count):
        if i >= 0:
            yield i, pairs.get(i)
        yield from ((None, j) for j in added_behind.get(i, ()))


def layer_figures(profile: ModelProfile) -> tuple[LayerFigures, ...]:
    """Return every leaf call in order of execution, and every other call that computes or owns parameters itself."""
    measured = profile.measurement.layers.layers if profile.measurement and profile.measurement.layers else ()
    seconds = {layer.module: layer.seconds for layer in measured}
    predicted = {layer.module: layer.seconds for layer in profile.prediction.layers} if profile.prediction else {}
    return tuple(
        LayerFigures(
            path=layer.call.path,
            kind=layer.call.kind,
            call_number=layer.call.call_number,
            input_shapes=layer.call.input_shapes,
            output_shapes=layer.call.output_shapes,
            params=layer.call.params,
            param_bytes=layer.call.param_bytes,
            macs=layer.cost.macs,
            flops=layer.cost.flops,
            bytes_moved=layer.cost.bytes_moved,
            activation_bytes=layer.activation_bytes,
            peak_live_bytes=layer.peak_live_bytes,
            unpriced=layer.unpriced,
            measured_s=seconds.get(layer.call.index),
            predicted_s=predicted.get(layer.call.index),
        )
        for layer in profile.layers
        if layer.call.is_leaf or layer.operators or layer.call.params or layer.activation_bytes
    )


def _measured(*names: str) -> Callable[[ModelProfile], float | None]:
    """Return a function that reads a measured figure, such as `measurement.energy.joules`; None where it is missing."""

    def read(profile: ModelProfile) -> float | None:
        value: Any = profile.measurement
        for name in names:
            value = None if value is None else getattr(value, name)
        return None if value is None else float(value)

    return read


def _peak_memory_bytes(profile: ModelProfile) -> int:
    totals = profile.totals
    return totals.param_bytes + totals.buffer_bytes + totals.input_bytes + profile.peak.live_bytes


# Name, title, unit, whether it is measured, and how it is read from a profile or the metrics of a trial.
_Figure = tuple[str, str, FigureUnit, bool, Callable[[Any], float | None]]
_TOTALS: tuple[_Figure, ...] = (
    ("params", "Parameters", "count", False, lambda profile: profile.totals.params),
    ("macs", "MACs", "count", False, lambda profile: profile.totals.macs),
    ("flops", "FLOPs", "count", False, lambda profile: profile.totals.flops),
    ("param_bytes", "Weights", "bytes", False, lambda profile: profile.totals.param_bytes),
    ("bytes_moved", "Bytes moved", "bytes", False, lambda p: p.totals.bytes_read + p.totals.bytes_written),
    ("activation_bytes", "Activations", "bytes", False, lambda profile: profile.totals.activation_bytes),
    ("peak_activation_bytes", "Peak activations", "bytes", False, lambda profile: profile.peak.live_bytes),
    ("peak_memory_bytes", "Peak memory", "bytes", False, _peak_memory_bytes),
    ("latency_s", "Latency, measured", "time", True, _measured("latency", "median_s")),
    ("measured_memory_bytes", "Memory, measured", "bytes", True, _measured("memory", "peak_bytes")),
    ("energy_j", "Energy", "energy", True, _measured("energy", "joules")),
)


def compare_profiles(
    profiles: Sequence[ModelProfile], latencies: Sequence[Comparison | None] | None = None
) -> ModelComparison:
    """Compare profiles with the first of them; `latencies` are the verdicts on the others, None where there is none.

    >>> compare_profiles([])
    Traceback (most recent call last):
    edge_opt.errors.InvalidInput: 0 models cannot be compared; give at least two
    """
    if len(profiles) < 2:
        raise InvalidInput(f"{len(profiles)} model{'s' * (len(profiles) != 1)} cannot be compared; give at least two")
    names = [profile.name for profile in profiles]
    numbered = (name if names.count(name) == 1 else f"{name} ({n})" for n, name in enumerate(names, start=1))
    return ModelComparison(
        names=tuple(numbered),
        layers=_aligned([layer_figures(profile) for profile in profiles]),
        totals=_figures(_TOTALS, profiles),
        latencies=tuple(latencies or (None,) * (len(profiles) - 1)),
        is_lower_bound=tuple(profile.totals.is_lower_bound for profile in profiles),
        remarks=profiled_differently(profiles),
    )


def _figures(table: Iterable[_Figure], subjects: Sequence[Any]) -> tuple[ComparedFigure, ...]:
    """Return the figures of a table that at least one of the profiles or trials has."""
    figures = (
        ComparedFigure(name, title, unit, is_measured, tuple(map(read, subjects)))
        for name, title, unit, is_measured, read in table
    )
    return tuple(figure for figure in figures if any(value is not None for value in figure.values))


def _aligned(models: Sequence[Sequence[LayerFigures]]) -> tuple[ComparedLayer, ...]:
    """Return one row for each layer of any model.

    Each model is aligned with all rows so far, so that two models may share a layer that the first one lacks.
    """
    rows: list[tuple[LayerFigures | None, ...]] = [(layer,) for layer in models[0]]
    for width, layers in enumerate(models[1:], start=1):
        aligned_so_far = [next(layer for layer in row if layer is not None) for row in rows]
        rows = [
            (*((None,) * width if i is None else rows[i]), None if j is None else layers[j])
            for i, j in align(aligned_so_far, layers)
        ]
    return tuple(map(ComparedLayer, rows))


def profiled_differently(profiles: Sequence[ModelProfile]) -> tuple[str, ...]:
    """Return a remark for each setting in which the profiles differ, because the models then may not."""
    first, remarks = profiles[0], []
    for other in profiles[1:]:
        for setting, old, new in (
            ("inputs", _inputs(first), _inputs(other)),
            ("mode", first.mode, other.mode),
            ("convention", first.convention, other.convention),
            ("machine", _machine(first), _machine(other)),
        ):
            if old and new and old != new:
                remarks.append(f"{other.name} was profiled differently: {setting} {new} instead of {old}")
    return tuple(dict.fromkeys(remarks))


def _inputs(profile: ModelProfile) -> str:
    return ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes)


def _machine(profile: ModelProfile) -> str:
    if profile.measurement is None:
        return ""
    environment = profile.measurement.environment
    return f"{environment.cpu} on {environment.device} with {environment.threads} threads"


_MAX_CHOICES = 12

_TRIAL_TOTALS: tuple[_Figure, ...] = (
    ("latency_s", "Latency, measured", "time", True, lambda trial: trial.latency_s),
    ("throughput", "Samples per second", "rate", True, lambda trial: trial.throughput),
    ("size_bytes", "Size of the file", "bytes", False, lambda trial: trial.size_bytes),
    ("peak_memory_bytes", "Peak memory", "bytes", False, lambda trial: trial.peak_memory_bytes),
    ("energy_j", "Energy", "energy", True, lambda trial: trial.energy_j),
    ("params", "Parameters", "count", False, lambda trial: trial.params),
    ("macs", "MACs", "count", False, lambda trial: trial.macs),
)


def compare_trials(trials: Sequence[Trial]) -> ModelComparison:
    """Compare candidates of a sweep with the first of them."""
    if len(trials) < 2:
        raise InvalidInput(f"{len(trials)} candidate{'s' * (len(trials) != 1)} cannot be compared; give at least two")
    measured = [_metrics(trial) for trial in trials]
    batches = {metrics.batch_size for metrics in measured}
    return ModelComparison(
        names=tuple(trial.candidate.label for trial in trials),
        layers=(),
        totals=_figures((_score(measured), *_TRIAL_TOTALS), measured),
        latencies=tuple(_verdict(measured[0], other) for other in measured[1:]),
        is_lower_bound=(False,) * len(trials),
        remarks=(f"latencies are of batches of {sorted(batches)}",) if len(batches) > 1 else (),
    )


def _score(measured: Sequence[TrialMetrics]) -> _Figure:
    """Return the quality metric of all candidates; refuse candidates that are scored by different metrics."""
    names = {metrics.metric for metrics in measured}
    if len(names) > 1:
        raise InvalidInput(f"the candidates are scored by {' and '.join(sorted(names))}; compare those of one metric")
    [name] = names
    unit: FigureUnit = "share" if name in SHARES else "count"
    return name, name.capitalize(), unit, False, lambda metrics: metrics.accuracy


def find_trial(result: SweepResult, name: str) -> Trial:
    """Find a candidate by its key or the beginning of it, by its label, or as "baseline" or "best"."""
    if name == "baseline":
        return result.baseline
    if name == "best":
        if result.best is None:
            raise InvalidInput(f"the sweep {result.name!r} accepted no candidate, so none is the best; name another")
        return result.trial(result.best)
    labels = {trial.candidate.key: trial.candidate.label for trial in (result.baseline, *result.trials)}
    wanted = " ".join(name.split())
    matching = [key for key, label in labels.items() if wanted in (key, label)]
    matching = matching or [key for key in labels if wanted and key.startswith(wanted)]
    if len(matching) == 1:
        return result.trial(matching[0])
    choices = "; ".join(f"{key} ({labels[key]})" for key in (matching or list(labels))[:_MAX_CHOICES])
    problem = "may be any of several" if matching else "is not a candidate"
    raise InvalidInput(f"{name!r} {problem} of the sweep {result.name!r}; write baseline, best, or one of: {choices}")


def _metrics(trial: Trial) -> TrialMetrics:
    if trial.metrics is None:
        raise InvalidInput(
            f"the candidate {trial.candidate.label!r} has no figures: it {trial.failure or 'failed'} ({trial.reason}); "
            "compare candidates that ran"
        )
    return trial.metrics


def _verdict(old: TrialMetrics, new: TrialMetrics) -> Comparison | None:
    """Compare two latencies by their intervals alone, which is conservative: a sweep does not keep the samples."""
    if not (old.latency_s and old.latency_low_s and old.latency_high_s):
        return None
    if not (new.latency_s and new.latency_low_s and new.latency_high_s):
        return None
    ratio = Interval(new.latency_low_s / old.latency_high_s, new.latency_high_s / old.latency_low_s)
    verdict: Verdict = "slower" if ratio.low > 1 else "faster" if ratio.high < 1 else "equal"
    return Comparison(verdict, new.latency_s / old.latency_s, ratio, "wall")


def compare(
    *models: ModelLike | ModelProfile | Trial,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    trust: bool = False,
) -> ModelComparison:
    """Compare models layer by layer with the first of them, the baseline.

    Layers are aligned by path, then by figures, position and type. Measured latencies are compared with allowance for
    noise; the rest is exact.

    Args:
        models: Profiles, or models as `profile` takes them: modules, references or files; or trials of a sweep.
        inputs: As in `profile`, the same for every model that is not profiled yet.
        kwargs: Arguments of those models by name.
        names: Names for tables, one per model; the profiles' own unless given.
        trust: Whether a .pt2 file may be opened, which can execute code from it.

    >>> from torch import nn
    >>> comparison = compare(nn.Linear(16, 8), nn.Linear(16, 4), inputs=(1, 16))
    >>> comparison.figure("macs").values, comparison.figure("macs").relative()
    ((128, 64), -0.5)
    """
    if names is not None and len(names) != len(models):
        raise InvalidInput(f"{len(names)} names for {len(models)} models; give one for each")
    trials = [model for model in models if isinstance(model, Trial)]
    if trials and len(trials) < len(models):
        raise InvalidInput("a sweep candidate has no layers; compare candidates with candidates, not with profiles")
    if trials:
        comparison = compare_trials(trials)
    else:
        from edge_opt.profiling import profile_or_saved  # here, because it needs torch

        subjects = (model for model in models if not isinstance(model, Trial))
        profiles = [profile_or_saved(model, inputs, kwargs, trust=trust) for model in subjects]
        comparison = compare_profiles(profiles, [compared_latency(profiles[0], other) for other in profiles[1:]])
    return comparison if names is None else replace(comparison, names=tuple(names))


def compared_latency(baseline: ModelProfile, other: ModelProfile) -> Comparison | None:
    """Return the verdict on two measured latencies, with allowance for noise; None where one was not measured."""
    if baseline.measurement is None or other.measurement is None:
        return None
    from edge_opt.measuring.statistics import compare_latencies

    return compare_latencies(baseline.measurement.latency, other.measurement.latency)
