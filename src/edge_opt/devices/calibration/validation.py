"""Validation: how far off predictions are on reference models that were held out for the purpose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge_opt.devices.features import GROUPS, describe
from edge_opt.devices.operator_times import OperatorTimes
from edge_opt.records import Calibration, GroupDeviation, ReferenceRun

_FOLDS = 4
_NINE_IN_TEN = 1.645
_UNKNOWN_DEVIATION = 0.3  # where there was nothing to hold out
_FEWEST = 8


def validated(calibration: Calibration) -> Calibration:
    """The calibration with its own errors: each part of the reference models predicted from all the others."""
    wholes: list[float] = []
    parts: dict[str, list[float]] = {group: [] for group in GROUPS}
    # Both batches of a model are held out together, or one would tell about the other.
    models = list(dict.fromkeys(_model(run) for run in calibration.references))
    for fold in range(min(_FOLDS, len(models) if len(models) > 1 else 0)):
        held = {run.name for run in calibration.references if models.index(_model(run)) % _FOLDS == fold}
        learned = OperatorTimes([item for item in calibration.samples if item.origin not in held], calibration)
        for name in sorted(held):
            own = [item for item in calibration.samples if item.origin == name]
            described = [describe(item.signature, item.distances, learned.scales) for item in own]
            expected, found = np.array([item.seconds for item in own]), learned.seconds(described)
            wholes.append(float(np.log(found.sum() / expected.sum())))
            for item, error in zip(described, np.log(found / expected), strict=True):
                parts[item.group].append(float(error))
    return replace(
        calibration,
        whole_deviation=_deviation(wholes),
        deviations=tuple(GroupDeviation(group, _deviation(errors)) for group, errors in parts.items()),
    )


def _model(run: ReferenceRun) -> str:
    return run.name.rpartition(",")[0]


def _deviation(errors: list[float]) -> float:
    """The standard deviation of a normal error that would have nine in ten within the same bounds."""
    if len(errors) < _FEWEST:
        return _UNKNOWN_DEVIATION
    return float(np.quantile(np.abs(errors), 0.9)) / _NINE_IN_TEN
