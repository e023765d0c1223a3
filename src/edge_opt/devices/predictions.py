"""Predictions for targets: from a calibration, from operators timed here, or estimated from figures."""

from __future__ import annotations

from collections.abc import Sequence

from edge_opt.devices.energies import with_energies
from edge_opt.devices.estimate import estimate
from edge_opt.devices.targets import Found
from edge_opt.records import DeviceSpec, ModelProfile, Precision, Prediction


def predictions(profile: ModelProfile, targets: Sequence[Found], precision: Precision) -> tuple[Prediction, ...]:
    """What the model would take on each target, with its energy."""
    return tuple(_prediction(profile, target, precision) for target in targets)


def timed_prediction(profile: ModelProfile) -> Prediction:
    """What the model would take here, from timing each of its distinct operators, with its energy."""
    from edge_opt.devices.predict import time_operators

    return _with_energies(time_operators(profile), profile)


def _prediction(profile: ModelProfile, target: Found, precision: Precision) -> Prediction:
    if isinstance(target, DeviceSpec):
        return estimate(profile, target, precision)
    from edge_opt.devices.predict import predict

    return _with_energies(predict(profile, target, precision), profile)


def _with_energies(found: Prediction, profile: ModelProfile) -> Prediction:
    return found if found.energies else with_energies(found, profile, None)
