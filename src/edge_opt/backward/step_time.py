"""How long a training step takes on a target: the forward as predicted there, the rest in proportion to its work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import nn

from edge_opt.boards.roofline import used_bandwidth
from edge_opt.boards.targets import Found, Target, find_spec, find_targets
from edge_opt.calibration.reference_networks import REFERENCES
from edge_opt.profiling import profile
from edge_opt.records import Calibration, DeviceSpec, OpCost, Prediction, ReferenceRun, StepTime, TrainingStep
from edge_opt.trace.inputs import CallArguments

# Backward runs the same products as the forward with other operands, at another rate. Where no step was timed on the
# machine, the interval is widened by this much on either side.
_SPREAD = 2.0
_GUESS = (
    "the forward as predicted there; the backward by its FLOPs and bytes relative to the forward's, which no backward "
    "was timed for: within a factor of 2 beyond the forward's interval, a guess"
)
# So few timed steps say nothing about how far off another one is.
_FEWEST_STEPS = 5
_NINE_IN_TEN = 1.645  # standard deviations of a normal error


@dataclass(frozen=True, slots=True)
class _Rate:
    """Seconds of backward over what its work would take at the forward's rate, and the factor that nine in ten keep."""

    pace: float
    spread: float
    basis: str


def step_times(
    step: TrainingStep, model: nn.Module, arguments: CallArguments, target: Target | Sequence[Target]
) -> tuple[StepTime, ...]:
    """The step on each target; the optimizer by the bytes it moves over the target's bandwidth."""
    found = find_targets(target)
    profiled = profile(
        model, list(arguments.args) or None, kwargs=arguments.kwargs, mode="train", name=step.name, target=list(found)
    )
    return tuple(
        _time(step, prediction, find_spec(place), _rate(place))
        for prediction, place in zip(profiled.predictions, found, strict=True)
    )


def _rate(place: Found) -> _Rate:
    """How fast backwards run on a machine: as the steps of reference models did there, else as forwards do."""
    paces = _paces(place.references) if isinstance(place, Calibration) else ()
    if len(paces) < _FEWEST_STEPS:
        return _Rate(1.0, _SPREAD, _GUESS)
    logs = np.log(paces)
    spread = math.exp(_NINE_IN_TEN * float(np.std(logs, ddof=1)))
    basis = (
        f"the forward as predicted there; the backward by its FLOPs and bytes, at the pace of {len(paces)} reference "
        f"models that were trained there: nine in ten of them within a factor of {spread:.2f}"
    )
    return _Rate(math.exp(float(np.median(logs))), spread, basis)


def _paces(runs: Sequence[ReferenceRun]) -> tuple[float, ...]:
    """Of each reference model whose step was timed: how much longer its backward took than at the forward's rate."""
    trained = [run for run in runs if run.step_s is not None and run.step_s > run.seconds]
    return tuple(
        ((run.step_s or 0.0) - run.seconds) / (run.seconds * work)
        for run in trained
        if (work := _reference_work(run.name.rpartition(",")[0], run.batch)) is not None
    )


@lru_cache(maxsize=64)
def _reference_work(name: str, batch: int) -> float | None:
    """Work of a reference model's backward relative to its forward's; None where this version cannot trace it."""
    from edge_opt.backward.step_report import training_step

    reference = next((item for item in REFERENCES if item.name == name), None)
    if reference is None:
        return None
    model = reference.build()
    model.train()
    step = training_step(model, inputs=[reference.inputs(batch)], optimizer="sgd")
    return _ratio(step.backward, step.forward)


def _time(step: TrainingStep, prediction: Prediction, spec: DeviceSpec, rate: _Rate) -> StepTime:
    if prediction.seconds is None:
        return StepTime(prediction.target, None, None, None, None, None, None, rate.basis, prediction.remarks)
    forward = step.accumulate * prediction.seconds
    backward = forward * rate.pace * _ratio(step.backward + step.recomputation, step.forward)
    bandwidth = used_bandwidth(spec, "cpu")
    update = None if bandwidth is None else step.update.bytes_moved / bandwidth.bytes_per_s
    remarks: tuple[str, ...] = ("the forward is predicted, the backward follows from its work",)
    if update is None:
        remarks += ("the optimizer's time is left out, for the bandwidth there is unknown",)
    whole = forward + backward + (update or 0.0)
    scale = whole / prediction.seconds
    low = None if prediction.low is None else prediction.low * scale / rate.spread
    high = None if prediction.high is None else prediction.high * scale * rate.spread
    return StepTime(prediction.target, whole, low, high, forward, backward, update, rate.basis, remarks)


def _ratio(work: OpCost, forward: OpCost) -> float:
    """Work relative to the forward's: by MACs, or by bytes where that is more."""
    by_macs = work.macs / forward.macs if forward.macs else 0.0
    by_bytes = work.bytes_moved / forward.bytes_moved if forward.bytes_moved else 0.0
    return max(by_macs, by_bytes)
