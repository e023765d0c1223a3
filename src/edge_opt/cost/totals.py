"""Operators summed to layers and to totals, and the peak of activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from edge_opt.records.costs import LayerCost, OpCost, OpPrice, PeakMemory, Totals, Trace, Unpriced


def layer_costs(trace: Trace, prices: Sequence[OpPrice]) -> tuple[LayerCost, ...]:
    """Return one row per module call with the work it does itself; the rows add up to the whole."""
    count = len(trace.modules)
    sums = [[0, 0, 0, 0, 0, 0, 0, 0] for _ in range(count)]
    storages = trace.storages
    for call in trace.ops:
        price = prices[call.signature]
        cost = price.cost
        row = sums[call.module]
        row[0] += cost.macs
        row[1] += cost.other_ops
        row[2] += cost.bytes_read
        row[3] += cost.bytes_written
        for number in call.creates:
            row[4] += storages[number].nbytes
        if call.live_bytes > row[5]:
            row[5] = call.live_bytes
        row[6] += 1
        row[7] += price.status == "unpriced"
    return tuple(
        [LayerCost(module, OpCost(*row[:4]), *row[4:]) for module, row in zip(trace.modules, sums, strict=True)]
    )


def total_costs(trace: Trace, layers: Sequence[LayerCost]) -> Totals:
    """Return the totals of the model."""
    cost = sum((layer.cost for layer in layers), OpCost())
    return Totals(
        macs=cost.macs,
        flops=cost.flops,
        other_ops=cost.other_ops,
        params=trace.params,
        trainable_params=trace.trainable_params,
        param_bytes=trace.param_bytes,
        buffer_bytes=trace.buffer_bytes,
        input_bytes=trace.input_bytes,
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        bytes_read=cost.bytes_read,
        bytes_written=cost.bytes_written,
        is_lower_bound=any(layer.unpriced for layer in layers),
    )


def unpriced_operators(trace: Trace, prices: Sequence[OpPrice]) -> tuple[Unpriced, ...]:
    """Return the operators without a rule by operator and module, most frequent first."""
    counts = Counter(
        (trace.signatures[call.signature].op, trace.modules[call.module].path)
        for call in trace.ops
        if prices[call.signature].status == "unpriced"
    )
    return tuple(Unpriced(op, path, count) for (op, path), count in counts.most_common())


def peak_activations(trace: Trace) -> PeakMemory:
    """Return the most activation bytes alive at once, at which operator and in which module."""
    if not trace.ops:
        return PeakMemory(0, None, "", 0)
    at_peak = max(trace.ops, key=lambda call: call.live_bytes)
    return PeakMemory(at_peak.live_bytes, at_peak.index, trace.modules[at_peak.module].path, planner_bound(trace))


def planner_bound(trace: Trace, saved: Sequence[int] = ()) -> int:
    """Return the peak when each activation is freed right after the last operator that uses it.

    Args:
        trace: The operators and storages.
        saved: Bytes by which each storage is smaller than it was traced, at another precision.
    """
    last_use = [0] * len(trace.storages)
    for call in trace.ops:
        index = call.index
        for number in call.reads:
            last_use[number] = index
        for number in call.creates:
            last_use[number] = index
    # A difference array: bytes allocated minus bytes freed before each operator. Its running sum is what is alive, so
    # one pass over the storages and one over the operators suffice, instead of one pass over all per operator.
    # A storage that outlives the run (`died` is None) is a result of the model, and no planner may free it.
    change = [0] * (len(trace.ops) + 1)
    for number, storage in enumerate(trace.storages):
        if storage.role == "activation" and storage.born is not None:
            nbytes = storage.nbytes - (saved[number] if saved else 0)
            change[storage.born] += nbytes
            if storage.died is not None:
                change[last_use[number] + 1] -= nbytes
    peak = alive = 0
    for step in change:
        alive += step
        if alive > peak:
            peak = alive
    return peak
