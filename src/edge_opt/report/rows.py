"""Rows: what one line of a table is about, whatever the level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_opt.records import LayerCost, ModelProfile, OpCost, Shape
from edge_opt.report.predicted import NO_WORK, Predicted, predicted_by_call, predicted_whole, together


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: an operator, a module call, a module with all below it, or the whole model.

    `cost` is None where it is not known: the operator has no rule. `op` and `status` are those of operators only.
    `measured_s` is None where nothing was measured; a call that only passes work on has no time of its own. `predicted`
    is None where nothing was predicted, and at operators, which predictions do not name.
    """

    path: str
    type: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    cost: OpCost | None
    activation_bytes: int
    peak_live_bytes: int
    operators: int
    unpriced: int
    params: int = 0
    trainable_params: int = 0
    param_bytes: int = 0
    index: int = 0
    depth: int = 0
    calls: int = 1
    call_number: int = 1
    is_leaf: bool = True
    op: str = ""
    status: str = ""
    measured_s: float | None = None
    predicted: Predicted | None = None


def measured_seconds(profile: ModelProfile) -> dict[int, float]:
    """Seconds that each module call spends itself, by its index; empty where layers were not measured."""
    if profile.measurement is None or profile.measurement.layers is None:
        return {}
    return {layer.module: layer.seconds for layer in profile.measurement.layers.layers}


def call_row(layer: LayerCost, measured_s: float | None = None, predicted: Predicted | None = None) -> Row:
    """One module call with the work it does itself."""
    call = layer.call
    return Row(
        path=call.path,
        type=call.kind,
        inputs=call.input_shapes,
        outputs=call.output_shapes,
        cost=layer.cost,
        activation_bytes=layer.activation_bytes,
        peak_live_bytes=layer.peak_live_bytes,
        operators=layer.operators,
        unpriced=layer.unpriced,
        params=call.params,
        trainable_params=call.trainable_params,
        param_bytes=call.param_bytes,
        index=call.index,
        call_number=call.call_number,
        is_leaf=call.is_leaf,
        measured_s=measured_s,
        predicted=predicted,
    )


def call_rows(profile: ModelProfile) -> list[Row]:
    """Every module call, in order of the trace."""
    times, predicted = measured_seconds(profile), predicted_by_call(profile)
    nothing = NO_WORK if profile.predictions else None
    return [
        call_row(layer, times.get(layer.call.index), predicted.get(layer.call.index, nothing))
        for layer in profile.layers
    ]


def leaf_rows(profile: ModelProfile) -> list[Row]:
    """Every leaf call in order of execution, and every other call that works or holds parameters itself."""
    return [row for row in call_rows(profile) if row.is_leaf or row.operators or row.params or row.activation_bytes]


def operator_rows(profile: ModelProfile) -> list[Row]:
    """Every operator call in order of execution."""
    trace = profile.trace
    return [
        Row(
            path=operator.module,
            type=operator.kind,
            inputs=tuple(tensor.shape for tensor in operator.inputs),
            outputs=tuple(tensor.shape for tensor in operator.outputs),
            cost=None if operator.status == "unpriced" else operator.cost,
            activation_bytes=sum(trace.storages[number].nbytes for number in call.creates),
            peak_live_bytes=operator.live_bytes,
            operators=1,
            unpriced=int(operator.status == "unpriced"),
            index=operator.index,
            op=operator.op,
            status=operator.status,
        )
        for operator, call in zip(profile.operators, trace.ops, strict=True)
    ]


def root_row(profile: ModelProfile) -> Row:
    """The whole model in one row."""
    totals, root = profile.totals, profile.trace.modules[0]
    return Row(
        path=root.path,
        type=root.kind,
        inputs=root.input_shapes,
        outputs=root.output_shapes,
        cost=OpCost(totals.macs, totals.other_ops, totals.bytes_read, totals.bytes_written),
        activation_bytes=totals.activation_bytes,
        peak_live_bytes=profile.peak.live_bytes,
        operators=len(profile.trace.ops),
        unpriced=sum(item.count for item in profile.unpriced),
        params=totals.params,
        trainable_params=totals.trainable_params,
        param_bytes=totals.param_bytes,
        is_leaf=root.is_leaf,
        measured_s=None if profile.measurement is None else profile.measurement.latency.median_s,
        predicted=None if profile.prediction is None else predicted_whole(profile.prediction),
    )


def combined(rows: Sequence[Row]) -> Row:
    """Several rows as one: the first one's name and shapes, costs added up, the highest peak."""
    known = [row.cost for row in rows if row.cost is not None]
    times = [row.measured_s for row in rows if row.measured_s is not None]
    return replace(
        rows[0],
        cost=sum(known, OpCost()) if known else None,
        activation_bytes=sum(row.activation_bytes for row in rows),
        peak_live_bytes=max(row.peak_live_bytes for row in rows),
        operators=sum(row.operators for row in rows),
        unpriced=sum(row.unpriced for row in rows),
        params=sum(row.params for row in rows),
        trainable_params=sum(row.trainable_params for row in rows),
        param_bytes=sum(row.param_bytes for row in rows),
        measured_s=math.fsum(times) if times else None,
        predicted=together([row.predicted for row in rows]),
    )
