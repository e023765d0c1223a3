"""Latency layer by layer: what was recorded of a forward, laid over the latency of the unrecorded one. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_opt.measure.recorder import RecordedBlock, RecordingCost
from edge_opt.measure.statistics import resamples
from edge_opt.records import Interval, Latency, LayerCost, LayerLatencies, LayerLatency, OpCost

Floats = NDArray[np.float64]

# Bootstrap draws times blocks: twice as many would move the ends of an interval by less than their own noise.
_DRAWN = 200_000
_AT_ONCE = 64


def layer_latencies(
    layers: Sequence[LayerCost],
    plain: Latency,
    recorded: Latency,
    blocks: Sequence[RecordedBlock],
    cost: RecordingCost,
) -> LayerLatencies:
    """Seconds of each layer and of what lies between them; together they are the median of `plain` exactly.

    The recorded parts of a forward, taken where nothing held them up, divide the unrecorded latency among them. A row
    is a call that runs operators or has no children; time spent in other containers, in calling modules and outside of
    the model lies between the layers.
    """
    rows = _rows(layers, blocks)
    places = [row for row, _, _ in rows]
    parts_s = _parts(recorded.samples_s, blocks, cost)
    undisturbed_s = _lower_quartile(parts_s)
    whole_s = plain.median_s
    recorded_s = math.fsum(undisturbed_s)
    shares = undisturbed_s[places] / max(recorded_s, np.finfo(float).tiny)
    lows, highs = _bounds(parts_s, np.array(plain.samples_s), places)
    seconds = [float(share) * whole_s for share in shares]
    return LayerLatencies(
        tuple(
            LayerLatency(
                module=row,
                path=layers[row].call.path,
                kind=layers[row].call.kind,
                seconds=mine_s,
                interval_s=Interval(min(float(low), mine_s), max(float(high), mine_s)),
                share=float(share),
                macs_per_s=own.macs / mine_s if is_complete and mine_s else None,
                bytes_per_s=own.bytes_moved / mine_s if is_complete and mine_s else None,
            )
            for (row, own, is_complete), mine_s, share, low, high in zip(
                rows, seconds, shares, lows, highs, strict=True
            )
        ),
        between_layers_s=max(0.0, whole_s - math.fsum(seconds)),
        whole_s=whole_s,
        overhead_s=recorded.median_s - plain.median_s,
        recorded_s=recorded_s,
    )


def _rows(layers: Sequence[LayerCost], blocks: Sequence[RecordedBlock]) -> list[tuple[int, OpCost, bool]]:
    """The calls that get a row, each with its cost and whether that is complete.

    A call in the trace that never came (a fused encoder layer runs none of its children) was the work of its caller.
    """
    came = np.sum([block.calls for block in blocks], axis=0)[:-1] > 0
    homes: list[int] = []
    costs = [OpCost() for _ in layers]
    operators, unpriced = [0] * len(layers), [0] * len(layers)
    for index, layer in enumerate(layers):
        parent = layer.call.parent
        home = index if came[index] or parent is None else homes[parent]
        homes.append(home)
        costs[home] += layer.cost
        operators[home] += layer.operators
        unpriced[home] += layer.unpriced
    return [
        (index, costs[index], unpriced[index] == 0)
        for index, layer in enumerate(layers)
        if came[index] and (operators[index] or layer.call.is_leaf)
    ]


def _parts(forwards_s: Sequence[float], blocks: Sequence[RecordedBlock], cost: RecordingCost) -> Floats:
    """Seconds in each place by block, without the recorder's own; in the last place what belongs to no call."""
    own = np.stack([block.own_s for block in blocks])
    calls = np.stack([block.calls for block in blocks])
    children = np.stack([block.children for block in blocks])
    parts: Floats = np.maximum(own - calls * cost.inside_s - children * cost.in_caller_s, 0.0)
    forwards = np.array(forwards_s) - calls.sum(axis=1) * (cost.inside_s + cost.in_caller_s)
    parts[:, -1] = np.maximum(forwards - parts[:, :-1].sum(axis=1), 0.0)
    return parts


def _lower_quartile(samples: Floats) -> Floats:
    """Along the first axis. Half of the repeats may be held up by other programs, each in another layer."""
    position = (len(samples) - 1) // 4
    quartile: Floats = np.partition(samples, position, axis=0)[position]
    return quartile


def _bounds(parts_s: Floats, wholes_s: Floats, places: Sequence[int]) -> Floats:
    """Lows and highs of the seconds in `places`, over blocks drawn again; parts and wholes of a round stay together."""
    count = len(parts_s)
    drawn = resamples(count, min(1000, max(200, _DRAWN // count))).T
    quartiles = np.concatenate(
        [
            _lower_quartile(parts_s[:, first : first + _AT_ONCE][drawn])
            for first in range(0, parts_s.shape[1], _AT_ONCE)
        ],
        axis=1,
    )
    totals = np.maximum(quartiles.sum(axis=1), np.finfo(float).tiny)
    wholes = np.median(wholes_s[drawn], axis=0)
    bounds: Floats = np.percentile(quartiles[:, places] * (wholes / totals)[:, None], (2.5, 97.5), axis=0)
    return bounds
