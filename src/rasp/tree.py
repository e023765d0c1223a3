"""Module calls as a tree, with what was measured of each."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import edge_opt
from edge_opt.cost.conventions.rasp import Count, count_layers
from edge_opt.records.fields import Record
from rasp.config import CFG

if TYPE_CHECKING:
    from edge_opt import ModelProfile
    from edge_opt.records.costs import ModuleCall, Trace
    from edge_opt.records.measurements import Measurement, ModuleMemory


@dataclass(frozen=True, slots=True)
class Measured(Record):
    """Figures by index of a module call: its own seconds, when it ended, memory around it. `whole_s` is the model's.

    `memory_source` says where the memory is from; `notes` what must be known of it.
    """

    own_s: dict[int, float]
    end_s: dict[int, float]
    whole_s: float
    memory: dict[int, ModuleMemory]
    memory_source: str = ""
    notes: tuple[str, ...] = ()


NOTHING = Measured({}, {}, math.nan, {})


def measured(
    model: nn.Module,
    inputs: Any,
    profile: ModelProfile,
    device: torch.device,
    timing: bool,
    memory: bool,
    is_simulated: bool,
) -> Measured:
    """Run the model on `device` as often as `CFG.profile` says, and return the times and memory asked for.

    `profile` is of the same model and inputs. `is_simulated`: CUDA's memory is meant and CUDA is not there, so it
    follows from the trace instead of a run.
    """
    figures = NOTHING
    if timing or (memory and not is_simulated):
        settings = CFG.profile
        if settings.verbose:
            runs = f"{settings.warmup_batches} + {settings.num_batches} batches" if timing else "one batch"
            print(f"rasp: {runs} on {device}", file=sys.stderr)
        measurement = edge_opt.measure(
            model,
            inputs,
            device=device,
            layers=timing,
            memory=memory and not is_simulated,
            energy=None,
            profile=profile,
            repeats=settings.num_batches if timing else 1,
            warmup=settings.warmup_batches if timing else 0,
        )
        usage = measurement.memory
        figures = Measured(
            *(_call_times(profile.trace, measurement) if timing else ({}, {})),
            measurement.latency.median_s,
            {} if usage is None else {row.module: row for row in usage.modules},
            "" if usage is None or not usage.source else f"measured: {usage.source}",
        )
    if not (memory and is_simulated):
        return figures
    on_cuda = profile.device_memory("cuda")
    by_call = {row.module: row for row in on_cuda.modules}
    notes = (f"device memory is {on_cuda.source}", *on_cuda.notes)
    return replace(figures, memory=by_call, memory_source=on_cuda.source, notes=notes)


def _call_times(trace: Trace, measurement: Measurement) -> tuple[dict[int, float], dict[int, float]]:
    """Return each call's own seconds, and when it ended."""
    rows = () if measurement.layers is None else measurement.layers.layers
    own_s = dict.fromkeys(range(len(trace.modules)), 0.0) | {row.module: row.seconds for row in rows}
    # Time between the modules is the model's own: without it the times would not add up to the whole.
    own_s[0] += max(0.0, measurement.latency.median_s - math.fsum(own_s.values()))
    own_s = _down_to(trace, own_s, CFG.profile.timing_max_depth)
    return own_s, _ends(trace, own_s)


def _down_to(trace: Trace, own_s: dict[int, float], max_depth: int) -> dict[int, float]:
    """Give the times of modules below a depth to the module at that depth; -1: every depth is timed."""
    if max_depth < 0:
        return own_s
    depth: dict[int, int] = {}
    kept: dict[int, float] = {}
    holder: dict[int, int] = {}
    for call in trace.modules:
        depth[call.index] = 0 if call.parent is None else depth[call.parent] + 1
        is_kept = call.parent is None or depth[call.index] <= max_depth
        holder[call.index] = call.index if is_kept else holder[call.parent or 0]
        kept[call.index] = 0.0 if is_kept else math.nan
        kept[holder[call.index]] += own_s[call.index]
    return kept


def _ends(trace: Trace, own_s: dict[int, float]) -> dict[int, float]:
    """Return when each call ended since the start of the forward: the time of all calls that began before its end."""
    last = {call.index: call.index for call in trace.modules}
    for call in reversed(trace.modules):
        if call.parent is not None:
            last[call.parent] = max(last[call.parent], last[call.index])
    times = (own_s[call.index] for call in trace.modules)
    sums = list(accumulate(0.0 if math.isnan(time) else time for time in times))
    return {index: sums[end] for index, end in last.items()}


Shapes = tuple[Any, ...]
"""One tensor's shape, or a tuple of shapes where there are several tensors."""


@dataclass(frozen=True, slots=True)
class ModuleNode(Record):
    """One call of one module. `own` and `params` leave out its children, which have nodes of their own.

    `params` stand with the first call of their module, and are those the run reads: a head that is only used in
    training is not among them. `dtype` is that of most of the call's arithmetic; None where there is none. What was
    measured: its own seconds, when it ended since the start of the forward, and device memory around it, with where
    that is from.
    """

    index: int
    name: str
    type: str
    in_shape: Shapes
    out_shape: Shapes
    params: int
    own: Count
    dtype: str | None
    children: tuple[ModuleNode, ...]
    own_s: float = math.nan
    end_s: float = math.nan
    memory: ModuleMemory | None = None
    memory_source: str = ""

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def total(self) -> Count:
        """The call with everything beneath it."""
        return sum((node.own for node in self.walk()), Count())

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this node and all beneath it, in the order in which the calls began."""
        yield self
        for child in self.children:
            yield from child.walk()


def build_tree(profile: ModelProfile, measured: Measured) -> ModuleNode:
    """Return the module calls of a profile, counted and measured; the root is the model itself."""
    trace = profile.trace
    counts = count_layers(profile, CFG.counting)
    # The parameters that the operators of a call read: elements by storage.
    reads: dict[int, dict[int, int]] = defaultdict(dict)
    for op in trace.ops:
        for storage, tensor in zip(op.reads, trace.signatures[op.signature].inputs, strict=True):
            if trace.storages[storage].role == "parameter":
                reads[op.module][storage] = tensor.elements
    nodes: dict[int, ModuleNode] = {}
    below: dict[int, list[int]] = defaultdict(list)
    # A call stands behind its parent: from the end, the children of each are there before it.
    for call in reversed(trace.modules):
        children = tuple(nodes[child] for child in reversed(below[call.index]))
        for child in children:
            reads[call.index] |= reads[child.index]
        own, dtype = counts[call.index]
        nodes[call.index] = ModuleNode(
            call.index,
            f".{call.path}",
            call.kind,
            _joined(call.input_shapes),
            _joined(call.output_shapes),
            _params(call, children, reads[call.index]),
            own,
            dtype,
            children,
            measured.own_s.get(call.index, math.nan),
            measured.end_s.get(call.index, math.nan),
            measured.memory.get(call.index),
            measured.memory_source if call.index in measured.memory else "",
        )
        if call.parent is not None:
            below[call.parent].append(call.index)
    return _folded(nodes[0], CFG.profile.compute_max_depth)


def _folded(node: ModuleNode, depth: int) -> ModuleNode:
    """Return the tree down to a depth; the nodes there take over the work beneath them; -1: nothing is folded."""
    if depth < 0 or not node.children:
        return node
    if depth:
        return replace(node, children=tuple(_folded(child, depth - 1) for child in node.children))
    times = [part.own_s for part in node.walk() if not math.isnan(part.own_s)]
    return replace(
        node,
        children=(),
        own=node.total,
        params=sum(part.params for part in node.walk()),
        own_s=math.fsum(times) if times else math.nan,
    )


def _joined(shapes: tuple[tuple[int, ...], ...]) -> Shapes:
    return shapes[0] if len(shapes) == 1 else shapes


def _params(call: ModuleCall, children: tuple[ModuleNode, ...], reads: dict[int, int]) -> int:
    """Return how many parameters belong to this call and are read.

    edge_opt gives a call its own parameters and those of children that never ran; reads tell the two apart.
    """
    if call.is_leaf or not call.params:
        return call.params
    below = sum(node.params for child in children for node in child.walk())
    return max(0, min(call.params, sum(reads.values()) - below))
