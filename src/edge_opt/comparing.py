"""Models side by side, layer by layer, with the verdict on latency."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import Precision
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
    from edge_opt.boards.targets import Target


Pair = tuple[int | None, int | None]
_Key = Callable[[LayerFigures], Hashable]

# Below this share of layers found by name or by figures, "the third convolution" says nothing about which one is meant.
_RELATED = 0.25


def align(old: Sequence[LayerFigures], new: Sequence[LayerFigures]) -> list[Pair]:
    """Positions in both models side by side, every layer exactly once; None where the other has no such layer.

    The same path and type come first, also below another root (`module.conv1` is `conv1`); then layers that only
    changed their name; then, between those, layers of a type in order; at last those that changed their type.
    """
    found = _same(old, new, {}, lambda layer: (layer.path, layer.call_number, layer.kind))
    found |= _below_another_root(old, new, found)
    found |= _in_order(old, new, found, _figures)
    if len(found) >= _RELATED * min(len(old), len(new)):
        found |= _between(old, new, found)
        found |= _same(old, new, found, lambda layer: (layer.path, layer.call_number))
    else:
        found |= _same(old, new, found, _named)
    return list(_merged(found, len(old), len(new)))


def _figures(layer: LayerFigures) -> Hashable:
    """What identifies a layer whatever its name; without parameters one looks like the other."""
    return (layer.kind, layer.params, layer.output_shapes) if layer.params else None


def _named(layer: LayerFigures) -> Hashable:
    """Its path, unless that is the model itself or a mere position in a sequence."""
    step = layer.path.rpartition(".")[2]
    return None if not step or step.isdigit() else (layer.path, layer.call_number)


def _rest(layers: Sequence[LayerFigures], taken: set[int]) -> list[int]:
    return [position for position in range(len(layers)) if position not in taken]


def _same(old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int], key: _Key) -> dict[int, int]:
    """Layers not found yet whose key is the same; None is no key."""
    places = {key(new[position]): position for position in _rest(new, set(found.values()))}
    pairs = ((position, key(old[position])) for position in _rest(old, set(found)))
    return {position: places[name] for position, name in pairs if name is not None and name in places}


def _below_another_root(
    old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int]
) -> dict[int, int]:
    """Layers whose paths are the same once what all of a model's have in front is taken away."""
    left, right = _rest(old, set(found)), _rest(new, set(found.values()))
    ours, theirs = _root([old[position].path for position in left]), _root([new[position].path for position in right])
    if ours == theirs:
        return {}
    places = {(new[j].path[theirs:], new[j].call_number, new[j].kind): j for j in right}
    keys = ((i, (old[i].path[ours:], old[i].call_number, old[i].kind)) for i in left)
    return {i: places[key] for i, key in keys if key in places}


def _root(paths: Sequence[str]) -> int:
    """Length of the steps that all paths begin with; their last step is never one of them."""
    if not paths:
        return 0
    first, last = min(paths).split("."), max(paths).split(".")
    length = 0
    for ours, theirs in zip(first[:-1], last[:-1], strict=False):
        if ours != theirs:
            break
        length += len(ours) + 1
    return length


def _in_order(
    old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int], key: _Key
) -> dict[int, int]:
    """The longest run of layers not found yet that stand in the same order in both."""
    left = [i for i in _rest(old, set(found)) if key(old[i]) is not None]
    right = [j for j in _rest(new, set(found.values())) if key(new[j]) is not None]
    return _longest_common(left, right, [key(old[i]) for i in left], [key(new[j]) for j in right])


def _between(old: Sequence[LayerFigures], new: Sequence[LayerFigures], found: dict[int, int]) -> dict[int, int]:
    """Layers of the same type, in order, between two neighbours that are aligned."""
    more: dict[int, int] = {}
    anchors = [(-1, -1), *_rising(sorted(found.items())), (len(old), len(new))]
    taken = set(found.values())
    for (left, left_new), (right, right_new) in pairwise(anchors):
        ours = [i for i in range(left + 1, right) if i not in found]
        theirs = [j for j in range(left_new + 1, right_new) if j not in taken]
        more |= _longest_common(ours, theirs, [old[i].kind for i in ours], [new[j].kind for j in theirs])
    return more


def _rising(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pairs without those that would cross an earlier one."""
    highest = -1
    for i, j in pairs:
        if j > highest:
            highest = j
            yield i, j


def _longest_common(
    left: Sequence[int], right: Sequence[int], left_keys: Sequence[Hashable], right_keys: Sequence[Hashable]
) -> dict[int, int]:
    """The longest common subsequence of two lists of keys, as pairs of the positions that belong to them."""
    lengths = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in reversed(range(len(left))):
        for j in reversed(range(len(right))):
            lengths[i][j] = (
                lengths[i + 1][j + 1] + 1
                if left_keys[i] == right_keys[j]
                else max(lengths[i + 1][j], lengths[i][j + 1])
            )
    pairs: dict[int, int] = {}
    i = j = 0
    while i < len(left) and j < len(right):
        if left_keys[i] == right_keys[j]:
            pairs[left[i]] = right[j]
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs


def _merged(found: dict[int, int], old_count: int, new_count: int) -> Iterator[Pair]:
    """Every layer once: the old ones in their order, each new one behind what it follows in its own model."""
    partner = {j: i for i, j in found.items()}
    following: dict[int, list[int]] = {}
    place = -1
    for j in range(new_count):
        place = partner.get(j, place)
        if j not in partner:
            following.setdefault(place, []).append(j)
    for i in range(-1, old_count):
        if i >= 0:
            yield i, found.get(i)
        yield from ((None, j) for j in following.get(i, ()))


def layer_figures(profile: ModelProfile) -> tuple[LayerFigures, ...]:
    """Every leaf call in order of execution, and every other call that works or holds parameters itself."""
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


Read = Callable[[ModelProfile], float | None]


def _measured(read: Read) -> Read:
    return lambda profile: None if profile.measurement is None else read(profile)


def _memory(profile: ModelProfile) -> float | None:
    found = profile.measurement and profile.measurement.memory
    return found.peak_bytes if found else None


def _energy(profile: ModelProfile) -> float | None:
    found = profile.measurement and profile.measurement.energy
    return found.joules if found else None


def _resident(profile: ModelProfile) -> int:
    return profile.totals.param_bytes + profile.totals.buffer_bytes + profile.totals.input_bytes


_TOTALS: tuple[tuple[str, str, FigureUnit, bool, Read], ...] = (
    ("params", "Parameters", "count", False, lambda profile: profile.totals.params),
    ("macs", "MACs", "count", False, lambda profile: profile.totals.macs),
    ("flops", "FLOPs", "count", False, lambda profile: profile.totals.flops),
    ("param_bytes", "Weights", "bytes", False, lambda profile: profile.totals.param_bytes),
    ("bytes_moved", "Bytes moved", "bytes", False, lambda p: p.totals.bytes_read + p.totals.bytes_written),
    ("activation_bytes", "Activations", "bytes", False, lambda profile: profile.totals.activation_bytes),
    ("peak_activation_bytes", "Peak activations", "bytes", False, lambda profile: profile.peak.live_bytes),
    ("peak_memory_bytes", "Peak memory", "bytes", False, lambda profile: _resident(profile) + profile.peak.live_bytes),
    ("latency_s", "Latency, measured", "time", True, _measured(lambda p: p.measurement.latency.median_s)),  # type: ignore[union-attr]
    ("measured_memory_bytes", "Memory, measured", "bytes", True, _memory),
    ("energy_j", "Energy", "energy", True, _energy),
)


def compare_profiles(
    profiles: Sequence[ModelProfile], latencies: Sequence[Comparison | None] | None = None
) -> ModelComparison:
    """Profiles against the first of them; `latencies` are the verdicts on the others, None where there are none.

    >>> from edge_opt.records.profiles import ModelProfile
    >>> compare_profiles([])
    Traceback (most recent call last):
    edge_opt.errors.InvalidInput: 0 models cannot be compared; give at least two
    """
    if len(profiles) < 2:
        raise InvalidInput(f"{len(profiles)} model{'s' * (len(profiles) != 1)} cannot be compared; give at least two")
    totals = (
        ComparedFigure(name, title, unit, is_measured, tuple(read(profile) for profile in profiles))
        for name, title, unit, is_measured, read in _TOTALS
    )
    rows = _aligned([layer_figures(profile) for profile in profiles])
    return ModelComparison(
        names=_distinct([profile.name for profile in profiles]),
        layers=rows,
        totals=tuple(figure for figure in totals if any(value is not None for value in figure.values)),
        latencies=tuple(latencies or (None,) * (len(profiles) - 1)),
        is_lower_bound=tuple(profile.totals.is_lower_bound for profile in profiles),
        remarks=profiled_differently(profiles),
    )


def _aligned(models: Sequence[Sequence[LayerFigures]]) -> tuple[ComparedLayer, ...]:
    """Rows over all models: each model is aligned with the rows found so far, so that two may share an added layer."""
    rows: list[tuple[LayerFigures | None, ...]] = [(layer,) for layer in models[0]]
    for width, layers in enumerate(models[1:], start=1):
        known = [next(layer for layer in row if layer is not None) for row in rows]
        rows = [
            (*((None,) * width if i is None else rows[i]), None if j is None else layers[j])
            for i, j in align(known, layers)
        ]
    return tuple(map(ComparedLayer, rows))


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names; where several are alike, with their place."""
    return tuple(name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1))


def profiled_differently(profiles: Sequence[ModelProfile]) -> tuple[str, ...]:
    """Where the profiles were not made alike, so that a difference may not be the model's."""
    first, remarks = profiles[0], []
    for other in profiles[1:]:
        for what, old, new in (
            ("inputs", _inputs(first), _inputs(other)),
            ("mode", first.mode, other.mode),
            ("convention", first.convention, other.convention),
            ("machine", _machine(first), _machine(other)),
        ):
            if old and new and old != new:
                remarks.append(f"{other.name} was profiled differently: {what} {new} instead of {old}")
    return tuple(dict.fromkeys(remarks))


def _inputs(profile: ModelProfile) -> str:
    return ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes)


def _machine(profile: ModelProfile) -> str:
    if profile.measurement is None:
        return ""
    environment = profile.measurement.environment
    return f"{environment.cpu} on {environment.device} with {environment.threads} threads"


_NAMED_AT_MOST = 12

_TRIAL_TOTALS: tuple[tuple[str, str, FigureUnit, bool, Callable[[TrialMetrics], float | None]], ...] = (
    ("latency_s", "Latency, measured", "time", True, lambda trial: trial.latency_s),
    ("throughput", "Samples per second", "rate", True, lambda trial: trial.throughput),
    ("size_bytes", "Size of the file", "bytes", False, lambda trial: trial.size_bytes),
    ("peak_memory_bytes", "Peak memory", "bytes", False, lambda trial: trial.peak_memory_bytes),
    ("energy_j", "Energy", "energy", True, lambda trial: trial.energy_j),
    ("params", "Parameters", "count", False, lambda trial: trial.params),
    ("macs", "MACs", "count", False, lambda trial: trial.macs),
)


def compare_trials(trials: Sequence[Trial]) -> ModelComparison:
    """Candidates of a sweep against the first of them."""
    if len(trials) < 2:
        raise InvalidInput(f"{len(trials)} candidate{'s' * (len(trials) != 1)} cannot be compared; give at least two")
    found = [_metrics(trial) for trial in trials]
    totals = (
        _scored(found),
        *(
            ComparedFigure(name, title, unit, is_measured, tuple(read(metrics) for metrics in found))
            for name, title, unit, is_measured, read in _TRIAL_TOTALS
        ),
    )
    batches = {metrics.batch_size for metrics in found}
    return ModelComparison(
        names=tuple(trial.candidate.label for trial in trials),
        layers=(),
        totals=tuple(figure for figure in totals if any(value is not None for value in figure.values)),
        latencies=tuple(_verdict(found[0], other) for other in found[1:]),
        is_lower_bound=(False,) * len(trials),
        remarks=(f"latencies are of batches of {sorted(batches)}",) if len(batches) > 1 else (),
    )


def _scored(found: Sequence[TrialMetrics]) -> ComparedFigure:
    """What candidates score, by the name of their metric; trials of two metrics have nothing in common there."""
    names = {metrics.metric for metrics in found}
    if len(names) > 1:
        raise InvalidInput(f"the candidates are scored by {' and '.join(sorted(names))}; compare those of one metric")
    [name] = names
    unit: FigureUnit = "share" if name in SHARES else "count"
    return ComparedFigure(name, name.capitalize(), unit, False, tuple(metrics.accuracy for metrics in found))


def find_trial(result: SweepResult, name: str) -> Trial:
    """A candidate by its key or the beginning of it, by its label, or as "baseline" or "best"."""
    if name == "baseline":
        return result.baseline
    if name == "best":
        if result.best is None:
            raise InvalidInput(f"the sweep {result.name!r} has no best candidate, for none was accepted; name another")
        return result.trial(result.best)
    labels = {trial.candidate.key: trial.candidate.label for trial in (result.baseline, *result.trials)}
    wanted = " ".join(name.split())
    found = [key for key, label in labels.items() if wanted in (key, label)]
    found = found or [key for key in labels if wanted and key.startswith(wanted)]
    if len(found) == 1:
        return result.trial(found[0])
    known = "; ".join(f"{key} ({labels[key]})" for key in (found or list(labels))[:_NAMED_AT_MOST])
    problem = "may be any of several" if found else "is no candidate"
    raise InvalidInput(f"{name!r} {problem} of the sweep {result.name!r}; write baseline, best, or one of: {known}")


def _metrics(trial: Trial) -> TrialMetrics:
    if trial.metrics is None:
        raise InvalidInput(
            f"the candidate {trial.candidate.label!r} has no figures: it {trial.failure or 'failed'} ({trial.reason}); "
            "compare candidates that ran"
        )
    return trial.metrics


def _verdict(old: TrialMetrics, new: TrialMetrics) -> Comparison | None:
    """A difference that the two intervals leave room for; samples are not kept, so it is a careful one."""
    if min(old.latency_low_s, new.latency_low_s) <= 0:
        return None
    ratio = Interval(new.latency_low_s / old.latency_high_s, new.latency_high_s / old.latency_low_s)
    verdict: Verdict = "slower" if ratio.low > 1 else "faster" if ratio.high < 1 else "equal"
    return Comparison(verdict, new.latency_s / old.latency_s, ratio, "wall")


Subject = Any  # a ModelProfile, an nn.Module, the path of a saved profile, or a Trial


def compare(
    *models: Subject,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> ModelComparison:
    """Models layer by layer against the first of them, the baseline.

    Layers are aligned by path, then by figures, position and type. Measured latencies are compared with allowance for
    noise; the rest is exact.

    Args:
        models: Profiles, paths of saved ones, or models with `inputs`; or trials of a sweep.
        inputs: As in `profile`, the same for every model that is not profiled yet.
        kwargs: Arguments of those models by name.
        names: Names for tables, one per model; the profiles' own unless given.

    >>> from torch import nn
    >>> found = compare(nn.Linear(16, 8), nn.Linear(16, 4), inputs=(1, 16))
    >>> found.figure("macs").values, found.figure("macs").relative()
    ((128, 64), -0.5)
    """
    if names is not None and len(names) != len(models):
        raise InvalidInput(f"{len(names)} names for {len(models)} models; give one for each")
    trials = [model for model in models if isinstance(model, Trial)]
    if trials and len(trials) < len(models):
        raise InvalidInput(
            "a sweep candidate has no layers; compare candidates with candidates, profiles with profiles"
        )
    if trials:
        found = compare_trials(trials)
    else:
        profiles = [as_profile(model, inputs, kwargs) for model in models]
        found = compare_profiles(profiles, [compared_latency(profiles[0], other) for other in profiles[1:]])
    return found if names is None else replace(found, names=tuple(names))


def as_profile(
    subject: Subject,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Target | None = None,
    precision: Precision = "fp32",
    runtime: str | None = None,
    threads: int | None = None,
    **options: Any,
) -> ModelProfile:
    """The profile of whatever stands for one: itself, a path of a saved one, or a model with its inputs."""
    if isinstance(subject, (str, PathLike)):
        from edge_opt.report.save import load

        subject = load(subject)
    if isinstance(subject, ModelProfile):
        if target is None:
            return subject
        from edge_opt.profiling import with_predictions

        return with_predictions(subject, target, precision, runtime, threads)
    from torch import nn

    if not isinstance(subject, nn.Module):
        raise InvalidInput(
            f"a {type(subject).__name__} is no model; give a ModelProfile, the path of a saved one, or an nn.Module"
        )
    if inputs is None and not kwargs:
        raise InvalidInput(f"{type(subject).__name__} needs inputs to be profiled; give their shapes, as in profile()")
    from edge_opt.profiling import profile

    there: dict[str, Any] = {"target": target, "precision": precision, "runtime": runtime, "threads": threads}
    return profile(subject, inputs, kwargs=kwargs, **there, **options)


def compared_latency(baseline: ModelProfile, other: ModelProfile) -> Comparison | None:
    """The verdict on two measured latencies, with allowance for noise; None where one was not measured."""
    if baseline.measurement is None or other.measurement is None:
        return None
    from edge_opt.measuring.statistics import compare_latencies

    return compare_latencies(baseline.measurement.latency, other.measurement.latency)
