"""Operator times: what a calibration says an operator takes, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_opt.devices.boosting import Array, BoostedTrees
from edge_opt.devices.features import GROUPS, Described, describe, scales_of
from edge_opt.records import Calibration, OperatorSample

# An estimate this many times beyond the samples of an operator is outside of them.
_REACH = 4.0
_ALONE, _IN_PLACE = 1.0, 0.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What was sampled of one operator: its usual deviation from the first estimate, and the span of estimates."""

    deviation: float
    least_s: float
    most_s: float


class OperatorTimes:
    """Learned from samples: the logarithm of what an operator takes over what a first estimate says it would."""

    def __init__(self, samples: Sequence[OperatorSample], calibration: Calibration) -> None:
        self.scales = scales_of(calibration)
        described = [describe(sample.signature, sample.distances, self.scales) for sample in samples]
        deviations = np.array(
            [np.log(sample.seconds / item.estimate_s) for sample, item in zip(samples, described, strict=True)]
        )
        self._known = _known(described, deviations)
        self._usual = {
            group: float(np.median(values))
            for group in GROUPS
            if len(values := deviations[[item.group == group for item in described]])
        }
        # For a group without samples: what is usual elsewhere is better than nothing.
        self._elsewhere = float(np.median(list(self._usual.values()))) if self._usual else 0.0
        self._models: dict[str, BoostedTrees] = {}
        for group in GROUPS:
            chosen = np.array([index for index, item in enumerate(described) if item.group == group])
            if group == "view" or not len(chosen):
                continue
            rows = self._rows([described[index] for index in chosen])
            rows[:, -1] = [_IN_PLACE if samples[index].origin else _ALONE for index in chosen]
            self._models[group] = BoostedTrees().fit(rows, deviations[chosen], np.ones(len(chosen)))

    def seconds(self, described: Sequence[Described]) -> Array:
        """Seconds of each operator, in place."""
        result = np.array([item.estimate_s for item in described])
        for group in {item.group for item in described}:
            chosen = [index for index, item in enumerate(described) if item.group == group]
            model = self._models.get(group)
            if model is None:
                result[chosen] *= np.exp(self._usual.get(group, self._elsewhere))
            else:
                result[chosen] *= np.exp(model.predict(self._rows([described[index] for index in chosen])))
        return result

    def is_outside(self, item: Described) -> bool:
        """Whether nothing like this operator was sampled."""
        known = self._known.get((item.group, item.op))
        if item.group == "view":
            return False
        return known is None or not known.least_s / _REACH <= item.estimate_s <= known.most_s * _REACH

    def _rows(self, described: Sequence[Described]) -> Array:
        usual = self._usual
        return np.array(
            [
                (*item.numbers, known.deviation if known else usual.get(item.group, 0.0), _IN_PLACE)
                for item in described
                for known in (self._known.get((item.group, item.op)),)
            ]
        )


def _known(described: Sequence[Described], deviations: Array) -> dict[tuple[str, str], _Known]:
    members: dict[tuple[str, str], list[int]] = {}
    for index, item in enumerate(described):
        members.setdefault((item.group, item.op), []).append(index)
    return {
        key: _Known(
            float(np.median(deviations[indices])),
            min(described[index].estimate_s for index in indices),
            max(described[index].estimate_s for index in indices),
        )
        for key, indices in members.items()
    }


_learned: dict[int, tuple[Calibration, OperatorTimes]] = {}


def operator_times(calibration: Calibration) -> OperatorTimes:
    """The times learned from a calibration; learned once while it is in use."""
    # By identity: a calibration's own hash would visit thousands of samples.
    found = _learned.get(id(calibration))
    if found is None:
        _learned.clear()
        found = _learned[id(calibration)] = (calibration, OperatorTimes(calibration.samples, calibration))
    return found[1]
