"""compare(): profiles, models, saved profiles or sweep candidates against the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from edge_opt.compare.models import compare_profiles
from edge_opt.compare.trials import compare_trials
from edge_opt.errors import InvalidInput
from edge_opt.records import Comparison, ModelComparison, ModelProfile, Precision, Trial

if TYPE_CHECKING:
    from edge_opt.devices.targets import Target

Subject = Any  # a ModelProfile, an nn.Module, the path of a saved profile, or a Trial


def compare(
    *models: Subject,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
) -> ModelComparison:
    """Models layer by layer against the first of them: profiles, paths of saved ones, nn.Modules with `inputs`, trials.

    Layers are aligned by path, then by figures, position and type. Measured latencies are compared with allowance for
    noise; the rest is exact.

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
    **options: Any,
) -> ModelProfile:
    """The profile of whatever stands for one: itself, a path of a saved one, or a model with its inputs."""
    if isinstance(subject, (str, PathLike)):
        from edge_opt.report.writers import load

        subject = load(subject)
    if isinstance(subject, ModelProfile):
        if target is None:
            return subject
        from edge_opt.profiling import with_predictions

        return with_predictions(subject, target, precision)
    from torch import nn

    if not isinstance(subject, nn.Module):
        raise InvalidInput(
            f"a {type(subject).__name__} is no model; give a ModelProfile, the path of a saved one, or an nn.Module"
        )
    if inputs is None and not kwargs:
        raise InvalidInput(f"{type(subject).__name__} needs inputs to be profiled; give their shapes, as in profile()")
    from edge_opt.profiling import profile

    return profile(subject, inputs, kwargs=kwargs, target=target, precision=precision, **options)


def compared_latency(baseline: ModelProfile, other: ModelProfile) -> Comparison | None:
    """The verdict on two measured latencies, with allowance for noise; None where one was not measured."""
    if baseline.measurement is None or other.measurement is None:
        return None
    from edge_opt.measure.statistics import compare_latencies

    return compare_latencies(baseline.measurement.latency, other.measurement.latency)
