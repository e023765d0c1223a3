"""How long a training step takes on a target: the forward as predicted there, the rest in proportion to its work."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from edge_opt.boards.roofline import used_bandwidth
from edge_opt.boards.targets import Target, find_spec
from edge_opt.profiling import profile
from edge_opt.records import OpCost, Prediction, StepTime, TrainingStep
from edge_opt.trace.inputs import CallArguments

# Backward runs the same products as the forward with other operands, at another rate that was not fitted: the
# interval is widened by this much on either side.
_SPREAD = 2.0
_BASIS = (
    "the forward as predicted there; the backward by its FLOPs and bytes relative to the forward's, which no backward "
    "operator was timed for: within a factor of 2 beyond the forward's interval, a guess"
)


def step_times(
    step: TrainingStep, model: nn.Module, arguments: CallArguments, target: Target | Sequence[Target]
) -> tuple[StepTime, ...]:
    """The step on each target; the optimizer by the bytes it moves over the target's bandwidth."""
    profiled = profile(
        model, list(arguments.args) or None, kwargs=arguments.kwargs, mode="train", name=step.name, target=target
    )
    return tuple(_time(step, prediction) for prediction in profiled.predictions)


def _time(step: TrainingStep, prediction: Prediction) -> StepTime:
    if prediction.seconds is None:
        return StepTime(prediction.target, None, None, None, None, None, None, _BASIS, prediction.remarks)
    forward = step.accumulate * prediction.seconds
    backward = forward * _ratio(step.backward + step.recomputation, step.forward)
    bandwidth = used_bandwidth(find_spec(prediction.target), "cpu")
    update = None if bandwidth is None else step.update.bytes_moved / bandwidth.bytes_per_s
    remarks: tuple[str, ...] = ("the forward is predicted, the backward follows from its work",)
    if update is None:
        remarks += ("the optimizer's time is left out, for the bandwidth there is unknown",)
    whole = forward + backward + (update or 0.0)
    scale = whole / prediction.seconds
    low = None if prediction.low is None else prediction.low * scale / _SPREAD
    high = None if prediction.high is None else prediction.high * scale * _SPREAD
    return StepTime(prediction.target, whole, low, high, forward, backward, update, _BASIS, remarks)


def _ratio(work: OpCost, forward: OpCost) -> float:
    """Work relative to the forward's: by MACs, or by bytes where that is more."""
    by_macs = work.macs / forward.macs if forward.macs else 0.0
    by_bytes = work.bytes_moved / forward.bytes_moved if forward.bytes_moved else 0.0
    return max(by_macs, by_bytes)
