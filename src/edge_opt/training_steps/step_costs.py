"""The cost of a traced step: work by layer and phase, memory by kind along the step, and its time on a target."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from torch import nn

from edge_opt.boards.roofline import used_bandwidth
from edge_opt.boards.targets import ResolvedTarget, Target, resolve_targets
from edge_opt.calibration.operator_bench import relative_work
from edge_opt.cost import price
from edge_opt.profiling import profile
from edge_opt.records.costs import OUTSIDE, OpCost, OpSignature
from edge_opt.records.predictions import Calibration, Prediction
from edge_opt.records.training_steps import MemoryByKind, MemoryPoint, StepTime, TrainingLayer, TrainingStep
from edge_opt.trace.inputs import CallArguments
from edge_opt.training_steps.step_trace import Phase, StepOp, StepPlan, StepSegment, TracedStep

# Where the work of a phase is shown; that of the backward is divided.
_COLUMNS = {
    Phase.FORWARD: "forward", Phase.LOSS: "forward", Phase.RECOMPUTATION: "recomputation", Phase.OPTIMIZER: "update",
}  # fmt: skip
_MOST_POINTS = 600


class StepCosts:
    """Sums over the operators of a traced step, with `batches` batches per step of the optimizer."""

    def __init__(self, trace: TracedStep, batches: int) -> None:
        self.trace, self.batches = trace, batches
        self._to_weights = _weight_gradients(trace)
        self.unpriced: Counter[str] = Counter()
        self._sums: dict[tuple[str, str], list[int]] = {}
        for segment in trace.segments:
            if segment.name.startswith("batch:") or segment.name == "optimizer step":
                times = batches if segment.name.startswith("batch") else 1
                for index in range(segment.first, segment.last):
                    self._add(index, trace.ops[index], times)
        self.by_layer = {key: OpCost(*parts) for key, parts in self._sums.items() if key[1] != "update"}
        self.by_phase: dict[str, OpCost] = defaultdict(OpCost)
        for (_, column), parts in self._sums.items():
            self.by_phase[column] += OpCost(*parts)

    def _add(self, index: int, op: StepOp, times: int) -> None:
        verdict = price(op.signature)
        path = LOSS if op.module_call is None else self.trace.modules[op.module_call].path
        if verdict.status == "unpriced":
            name = op.signature.op
            self.unpriced[f"{name} in {path or 'the model'}" if name.startswith(OUTSIDE) else name] += 1
        cost = verdict.cost
        phase = op.phase
        column = _COLUMNS.get(phase)
        if column is None:
            share = _input_share(op.signature)
            if share is not None:
                first, cost = _split(cost, share)
                self._add_to((path, "input_gradient"), first, times)
            column = "weight_gradient" if share is not None or index in self._to_weights else "input_gradient"
        self._add_to((path, column), cost, times)

    def _add_to(self, row: tuple[str, str], cost: OpCost, times: int) -> None:
        # Sums of plain numbers: a record for each of thousands of additions would be felt.
        sums = self._sums.get(row)
        if sums is None:
            sums = self._sums[row] = [0, 0, 0, 0]
        sums[0] += times * cost.macs
        sums[1] += times * cost.other_ops
        sums[2] += times * cost.bytes_read
        sums[3] += times * cost.bytes_written

    def layers(self) -> tuple[TrainingLayer, ...]:
        """Return one row per module that did something, in the order of their first call; the loss comes last."""
        trace = self.trace
        kept = kept_by_layer(trace)
        gradients, states = _by_owner(trace, trace.gradients), _by_owner(trace, trace.states)
        kinds: dict[str, str] = {}
        for call in trace.modules:
            kinds.setdefault(call.path, call.kind)
        kinds[LOSS] = "loss"
        with_work = {path for path, _ in self.by_layer} | kept.keys() | gradients.keys()
        return tuple(
            TrainingLayer(
                "" if path == LOSS else path,
                kind,
                trace.trained.get(path, 0),
                forward=self._work(path, "forward"),
                input_gradient=self._work(path, "input_gradient"),
                weight_gradient=self._work(path, "weight_gradient"),
                recomputation=self._work(path, "recomputation"),
                kept_bytes=kept.get(path, 0),
                gradient_bytes=gradients.get(path, 0),
                state_bytes=states.get(path, 0),
            )
            for path, kind in kinds.items()
            if path in with_work
        )

    def _work(self, path: str, column: str) -> OpCost:
        return self.by_layer.get((path, column), OpCost())


LOSS = "\0loss"  # no module has this path


def _input_share(signature: OpSignature) -> float | None:
    """Return the part of an operator that computes gradients of inputs, where it computes those of weights too."""
    if signature.op == "aten.convolution_backward":
        mask = signature.args[10]
        return mask[0] / (mask[0] + mask[1]) if mask[0] or mask[1] else None
    return 0.5 if signature.op == "aten.mkldnn_rnn_layer_backward" else None


def _split(cost: OpCost, share: float) -> tuple[OpCost, OpCost]:
    """Return a share of a cost, and the rest."""
    parts = (cost.macs, cost.other_ops, cost.bytes_read, cost.bytes_written)
    first = [round(part * share) for part in parts]
    return OpCost(*first), OpCost(*(part - taken for part, taken in zip(parts, first, strict=True)))


def _weight_gradients(trace: TracedStep) -> set[int]:
    """Find operators of the backward whose results end in gradients of their own layer's parameters, and nowhere else.

    Followed from the end: a storage goes to weights where it is a gradient, or is only summed or shaped to one by the
    layer that made it. What another layer reads, or another product, is the gradient of an input.
    """
    to_weights: set[int] = set()
    goes: dict[int, bool] = {}
    makers = {number: op.module_call for op in trace.ops for number in op.creates}
    for segment in trace.segments:
        if not segment.name.endswith("backward"):
            continue
        for index in range(segment.last - 1, segment.first - 1, -1):
            op = trace.ops[index]
            written = op.creates or (op.reads[:1] if op.signature.op.endswith("_") else ())
            if not written:
                continue
            verdict = all(goes.get(number, number in trace.gradients) for number in written)
            if verdict:
                to_weights.add(index)
            is_passed_on = verdict and not price(op.signature).cost.macs
            for number in op.reads:
                is_its_own = is_passed_on and _belongs(trace, op.module_call, makers.get(number))
                goes[number] = goes.get(number, True) and is_its_own
    return to_weights


def _belongs(trace: TracedStep, call: int | None, maker: int | None) -> bool:
    """Return whether a call is the maker's own, or computes the maker's weights as a parametrization does."""
    if call == maker or call is None or maker is None:
        return call == maker
    path, owner = trace.modules[call].path, trace.modules[maker].path
    return path == owner or path.startswith(f"{owner}.parametrizations." if owner else "parametrizations.")


def kept_by_layer(trace: TracedStep) -> dict[str, int]:
    """Return bytes of activations that outlive the forward, by the module whose backward needs them last."""
    keeper: dict[int, int | None] = {}
    forward, backward = trace.segments[0], trace.segments[1]
    for op in trace.ops[forward.first : forward.last]:
        for number in op.creates:
            keeper[number] = op.module_call
    for op in trace.ops[backward.first : backward.last]:
        for number in op.reads:
            if number in keeper and op.phase is Phase.BACKWARD:
                keeper[number] = op.module_call
    kept: dict[str, int] = {}
    for number, call in keeper.items():
        storage = trace.storages[number]
        if storage.died is None or storage.died >= forward.last:
            path = LOSS if call is None else trace.modules[call].path
            kept[path] = kept.get(path, 0) + storage.nbytes
    return kept


def _by_owner(trace: TracedStep, numbers: Mapping[int, str]) -> dict[str, int]:
    nbytes: Counter[str] = Counter()
    for number, path in numbers.items():
        nbytes[path] += trace.storages[number].nbytes
    return nbytes


_KINDS = ("gradients", "optimizer_state", "activations", "temporaries")


class StepMemory:
    """Bytes alive along a traced step, by kind."""

    def __init__(self, trace: TracedStep, plan: StepPlan) -> None:
        self.trace = trace
        self._fixed = (trace.param_bytes, trace.buffer_bytes, trace.input_bytes)
        self._lines = {kind: list(accumulate(changes)) for kind, changes in self._changes().items()}
        named = {segment.name: segment for segment in trace.segments}
        self._state_bytes = sum(trace.storages[number].nbytes for number in trace.states)
        live = [op.live_bytes for op in trace.ops]
        states = self._lines["optimizer_state"]
        # In the long run, state is there that was not yet born when an operator was traced.
        later = [nbytes + self._state_bytes - born for nbytes, born in zip(live, states, strict=False)]
        self._totals = {False: live, True: later}
        fresh = [named["batch: forward"], named["batch: backward"]]
        again = [named[name] for name in ("next batch: forward", "next batch: backward") if name in named]
        is_added_up = plan.accumulate > 1
        self._first = [*fresh, *(again if is_added_up else []), named["first optimizer step"]]
        usual = fresh if plan.set_to_none else again
        self._usual = [*usual, *(again if is_added_up and plan.set_to_none else []), named["optimizer step"]]

    def _changes(self) -> dict[str, list[int]]:
        trace = self.trace
        changes = {kind: [0] * (len(trace.ops) + 1) for kind in _KINDS}
        ends = {
            index: segment.last
            for segment in trace.segments
            if segment.name.endswith("forward")
            for index in range(segment.first, segment.last)
        }
        for number, storage in enumerate(trace.storages):
            if storage.born is None:
                continue
            kind = "temporaries"
            if number in trace.gradients:
                kind = "gradients"
            elif number in trace.states:
                kind = "optimizer_state"
            elif storage.born in ends and (storage.died is None or storage.died >= ends[storage.born]):
                kind = "activations"
            changes[kind][min(storage.born, len(trace.ops))] += storage.nbytes
            if storage.died is not None:
                changes[kind][storage.died] -= storage.nbytes
        return changes

    def first_peak(self) -> MemoryPoint:
        """Return the fullest moment of the first step."""
        return self._highest(self._first, False)

    def peak(self) -> MemoryPoint:
        """Return the fullest moment of any later step."""
        return self._highest(self._usual, True)

    def held_at_peak(self, paths: Sequence[str]) -> dict[str, int]:
        """Return the bytes at the peak that the forward of each module made: a checkpoint of it saves no more."""
        trace = self.trace
        peak = max(self._indices(self._usual), key=self._totals[True].__getitem__)
        held = dict.fromkeys(paths, 0)
        # The call of a block is found through its callers: layers that blocks share have the path of the first one.
        blocks: list[str | None] = []
        for call in trace.modules:
            outer = None if call.parent is None else blocks[call.parent]
            blocks.append(outer or (call.path if call.path in held else None))
        for segment in trace.segments:
            if not segment.name.endswith("forward"):
                continue
            for op in trace.ops[segment.first : segment.last]:
                block = None if op.module_call is None else blocks[op.module_call]
                if block is not None:
                    held[block] += sum(
                        storage.nbytes
                        for storage in (trace.storages[number] for number in op.creates)
                        if storage.born is not None and storage.born <= peak
                        if storage.died is None or peak < storage.died
                    )
        return held

    def curve(self) -> tuple[MemoryPoint, ...]:
        """Return a later step from beginning to end; of long ones the highest moment of each stretch."""
        indices, totals = self._indices(self._usual), self._totals[True]
        width = -(-len(indices) // _MOST_POINTS)
        stretches = (range(first, min(first + width, len(indices))) for first in range(0, len(indices), width))
        positions = (max(stretch, key=lambda position: totals[indices[position]]) for stretch in stretches)
        return tuple(self._point(indices[position], position, True) for position in positions)

    def _indices(self, segments: Sequence[StepSegment]) -> list[int]:
        return [index for segment in segments for index in range(segment.first, segment.last)]

    def _highest(self, segments: Sequence[StepSegment], has_states: bool) -> MemoryPoint:
        indices, totals = self._indices(segments), self._totals[has_states]
        along = [totals[index] for index in indices]
        position = along.index(max(along))
        return self._point(indices[position], position, has_states)

    def _point(self, index: int, position: int, has_states: bool) -> MemoryPoint:
        op, lines = self.trace.ops[index], self._lines
        gradients, states = lines["gradients"][index], lines["optimizer_state"][index]
        activations = lines["activations"][index]
        # By position, as there are hundreds. What operators hold inside is part of what was alive.
        memory = MemoryByKind(
            *self._fixed, gradients, self._state_bytes if has_states else states, activations,
            op.live_bytes - gradients - states - activations,
        )  # fmt: skip
        layer = "" if op.module_call is None else self.trace.modules[op.module_call].path
        return MemoryPoint(position, op.phase.name.lower(), layer, memory)


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


def step_times(
    step: TrainingStep, model: nn.Module, arguments: CallArguments, target: Target | Sequence[Target]
) -> tuple[StepTime, ...]:
    """Return the step on each target; the optimizer by the bytes it moves over the target's bandwidth."""
    targets = resolve_targets(target)
    profiled = profile(
        model, list(arguments.args) or None, kwargs=arguments.kwargs, mode="train", name=step.name, target=targets
    )
    return tuple(
        _time(step, prediction, resolved) for prediction, resolved in zip(profiled.predictions, targets, strict=True)
    )


def _backward_pace(calibration: Calibration | None) -> tuple[float, float, str]:
    """Return how fast backwards run on a machine: as the steps of reference models did there, else as forwards do.

    That is the seconds of a backward over what its work would take at the forward's rate, the factor within which nine
    in ten are, and what both rest on.
    """
    paces = [
        (run.step_s - run.seconds) / (run.seconds * run.backward_work)
        for run in (() if calibration is None else calibration.references)
        if run.step_s is not None and run.step_s > run.seconds and run.backward_work
    ]
    if len(paces) < _FEWEST_STEPS:
        return 1.0, _SPREAD, _GUESS
    logs = np.log(paces)
    spread = math.exp(_NINE_IN_TEN * float(np.std(logs, ddof=1)))
    basis = (
        f"the forward as predicted there; the backward by its FLOPs and bytes, at the pace of {len(paces)} reference "
        f"models that were trained there: nine in ten of them within a factor of {spread:.2f}"
    )
    return math.exp(float(np.median(logs))), spread, basis


def _time(step: TrainingStep, prediction: Prediction, target: ResolvedTarget) -> StepTime:
    (pace, spread, basis), spec = _backward_pace(target.calibration), target.spec
    if prediction.seconds is None:
        return StepTime(prediction.target, None, None, None, None, None, None, basis, prediction.remarks)
    forward = step.accumulate * prediction.seconds
    backward = forward * pace * relative_work(step.backward + step.recomputation, step.forward)
    bandwidth = used_bandwidth(spec, target.platform.engine if target.platform else spec.engine)
    update = None if bandwidth is None else step.update.bytes_moved / bandwidth.bytes_per_s
    remarks: tuple[str, ...] = ("the forward is predicted, the backward follows from its work",)
    if update is None:
        remarks += ("the optimizer's time is not included: the bandwidth of the target is unknown",)
    whole = forward + backward + (update or 0.0)
    scale = whole / prediction.seconds
    low = None if prediction.low is None else prediction.low * scale / spread
    high = None if prediction.high is None else prediction.high * scale * spread
    return StepTime(prediction.target, whole, low, high, forward, backward, update, basis, remarks)
