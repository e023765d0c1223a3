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
from edge_opt.records.display import Record
from rasp.config import CFG

if TYPE_CHECKING:
    from edge_opt import ModelProfile
    from edge_opt.records.costs import ModuleCall, OpCall, Trace
    from edge_opt.records.measurements import ModuleMemory


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
    simulated: bool = False,
) -> Measured:
    """Run the model as often as `CFG.profile` says, and read off what was asked for.

    Args:
        model: The model, which is run on `device`.
        inputs: What it is run on.
        profile: The same model and inputs, traced.
        device: Where it is run.
        timing: Whether module calls are timed.
        memory: Whether the memory around them is wanted.
        simulated: CUDA's memory is meant and CUDA is not there: it follows from the trace instead of a run.
    """
    figures = NOTHING
    if timing or (memory and not simulated):
        figures = _run(model, inputs, profile, device, timing, memory and not simulated)
    if not (memory and simulated):
        return figures
    on_cuda = profile.device_memory("cuda")
    by_call = {row.module: row for row in on_cuda.modules}
    notes = (f"device memory is {on_cuda.source}", *on_cuda.notes)
    return replace(figures, memory=by_call, memory_source=on_cuda.source, notes=notes)


def _run(
    model: nn.Module, inputs: Any, profile: ModelProfile, device: torch.device, timing: bool, memory: bool
) -> Measured:
    if CFG.profile.verbose:
        runs = f"{CFG.profile.warmup_batches} + {CFG.profile.num_batches} batches" if timing else "one batch"
        print(f"rasp: {runs} on {device}", file=sys.stderr)
    measurement = edge_opt.measure(
        model,
        inputs,
        device=device,
        layers=timing,
        memory=memory,
        energy=None,
        profile=profile,
        repeats=CFG.profile.num_batches if timing else 1,
        warmup=CFG.profile.warmup_batches if timing else 0,
    )
    whole_s = measurement.latency.median_s
    own_s: dict[int, float] = {}
    if timing:
        rows = measurement.layers.layers if measurement.layers is not None else ()
        own_s = dict.fromkeys(range(len(profile.trace.modules)), 0.0) | {row.module: row.seconds for row in rows}
        # Time between the modules is the model's own: without it the times would not add up to the whole.
        own_s[0] += max(0.0, whole_s - math.fsum(own_s.values()))
        own_s = _down_to(profile.trace, own_s, CFG.profile.timing_max_depth)
    usage = measurement.memory
    by_call = {} if usage is None else {row.module: row for row in usage.modules}
    source = "" if usage is None or not usage.source else f"measured: {usage.source}"
    return Measured(own_s, _ends(profile.trace, own_s) if timing else {}, whole_s, by_call, source)


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
class Node(Record):
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
    children: tuple[Node, ...]
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

    def walk(self) -> Iterator[Node]:
        """Yield this node and all beneath it, in the order in which the calls began."""
        yield self
        for child in self.children:
            yield from child.walk()


def build_tree(profile: ModelProfile, measured: Measured = NOTHING) -> Node:
    """Return the module calls of a profile, counted and measured; the root is the model itself."""
    return _folded(_Builder(profile, measured).node(0)[0], CFG.profile.compute_max_depth)


def _folded(node: Node, depth: int) -> Node:
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


class _Builder:
    """A profile's operators and calls, sorted by the module call they belong to."""

    def __init__(self, profile: ModelProfile, measured: Measured) -> None:
        self.profile = profile
        self.measured = measured
        self.counts = count_layers(profile, CFG.counting)
        self.ops: dict[int, list[OpCall]] = defaultdict(list)
        for op in profile.trace.ops:
            self.ops[op.module].append(op)
        self.children: dict[int, list[int]] = defaultdict(list)
        for call in profile.trace.modules:
            if call.parent is not None:
                self.children[call.parent].append(call.index)

    def node(self, index: int) -> tuple[Node, dict[int, int]]:
        """Return the node of one call, and the parameters read in it: elements by storage."""
        trace = self.profile.trace
        call = trace.modules[index]
        below = [self.node(child) for child in self.children[index]]
        children = tuple(child for child, _ in below)
        reads = {
            storage: tensor.elements
            for op in self.ops[index]
            for storage, tensor in zip(op.reads, trace.signatures[op.signature].inputs, strict=True)
            if trace.storages[storage].role == "parameter"
        }
        for _, child_reads in below:
            reads.update(child_reads)
        own, dtype = self.counts[index]
        return Node(
            index,
            f".{call.path}",
            call.kind,
            _joined(call.input_shapes),
            _joined(call.output_shapes),
            _params(call, children, reads),
            own,
            dtype,
            children,
            self.measured.own_s.get(index, math.nan),
            self.measured.end_s.get(index, math.nan),
            self.measured.memory.get(index),
            self.measured.memory_source if index in self.measured.memory else "",
        ), reads


def _joined(shapes: tuple[tuple[int, ...], ...]) -> Shapes:
    return shapes[0] if len(shapes) == 1 else shapes


def _params(call: ModuleCall, children: tuple[Node, ...], reads: dict[int, int]) -> int:
    """Return how many parameters belong to this call and are read.

    edge_opt gives a call its own parameters and those of children that never ran; reads tell the two apart.
    """
    if call.is_leaf or not call.params:
        return call.params
    below = sum(node.params for child in children for node in child.walk())
    return max(0, min(call.params, sum(reads.values()) - below))
