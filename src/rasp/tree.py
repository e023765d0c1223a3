"""Module calls as a tree, with what was measured of each."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    found = NOTHING
    if timing or (memory and not simulated):
        found = _run(model, inputs, profile, device, timing, memory and not simulated)
    if not (memory and simulated):
        return found
    on_cuda = profile.device_memory("cuda")
    by_call = {row.module: row for row in on_cuda.modules}
    notes = (f"device memory is {on_cuda.source}", *on_cuda.notes)
    return replace(found, memory=by_call, memory_source=on_cuda.source, notes=notes)


def _run(
    model: nn.Module, inputs: Any, profile: ModelProfile, device: torch.device, timing: bool, memory: bool
) -> Measured:
    if CFG.profile.verbose:
        runs = f"{CFG.profile.warmup_batches} + {CFG.profile.num_batches} batches" if timing else "one batch"
        print(f"rasp: {runs} on {device}", file=sys.stderr)
    found = edge_opt.measure(
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
    by_module = {row.module: row.seconds for row in found.layers.layers} if found.layers is not None else {}
    own_s = {call.index: by_module.get(call.index, 0.0) for call in profile.trace.modules} if timing else {}
    if timing:
        # What lies between the modules is the model's own: without it the times would not add up to the whole.
        own_s[0] += max(0.0, found.latency.median_s - math.fsum(own_s.values()))
        own_s = _down_to(profile.trace, own_s, CFG.profile.timing_max_depth)
    rows = found.memory.modules if found.memory is not None else ()
    source = found.memory.source if found.memory is not None else ""
    return Measured(
        own_s,
        _ends(profile, own_s) if timing else {},
        found.latency.median_s,
        {row.module: row for row in rows},
        f"measured: {source}" if source else "",
    )


def _down_to(trace: Trace, own_s: dict[int, float], most: int) -> dict[int, float]:
    """Times with those of modules below a depth given to the module at that depth; -1: every depth is timed."""
    if most < 0:
        return own_s
    depth: dict[int, int] = {}
    kept: dict[int, float] = {}
    holder: dict[int, int] = {}
    for call in trace.modules:
        depth[call.index] = 0 if call.parent is None else depth[call.parent] + 1
        is_kept = call.parent is None or depth[call.index] <= most
        holder[call.index] = call.index if is_kept else holder[call.parent or 0]
        kept[call.index] = 0.0 if is_kept else math.nan
        kept[holder[call.index]] += own_s[call.index]
    return kept


def _ends(profile: ModelProfile, own_s: dict[int, float]) -> dict[int, float]:
    """When each call ended, from the start of the forward: the time of all calls that began before it was over."""
    last = {call.index: call.index for call in profile.trace.modules}
    for call in reversed(profile.trace.modules):
        if call.parent is not None:
            last[call.parent] = max(last[call.parent], last[call.index])
    sums: list[float] = []
    total = 0.0
    for call in profile.trace.modules:
        total += 0.0 if math.isnan(own_s[call.index]) else own_s[call.index]
        sums.append(total)
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
        """This node and all beneath it, in the order in which the calls began."""
        yield self
        for child in self.children:
            yield from child.walk()


def build_tree(profile: ModelProfile, measured: Measured = NOTHING) -> Node:
    """The module calls of a profile, counted and measured; the root is the model itself."""
    root = _Builder(profile, measured).node(0)[0]
    return _folded(root, CFG.profile.compute_max_depth)


def _folded(node: Node, depth: int) -> Node:
    """The tree without what lies deeper, whose work the node at that depth takes over; -1: nothing is folded."""
    if depth < 0 or not node.children:
        return node
    if depth:
        return replace(node, children=tuple(_folded(child, depth - 1) for child in node.children))
    times = [found.own_s for found in node.walk() if not math.isnan(found.own_s)]
    return replace(
        node,
        children=(),
        own=node.total,
        params=sum(found.params for found in node.walk()),
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
        """The node of one call, and the parameters read in it: elements by storage."""
        call = self.profile.trace.modules[index]
        below = [self.node(child) for child in self.children[index]]
        children = tuple(child for child, _ in below)
        reads = _parameters_read(self.profile.trace, self.ops[index])
        for _, more in below:
            reads.update(more)
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


def _parameters_read(trace: Trace, ops: Sequence[OpCall]) -> dict[int, int]:
    return {
        storage: tensor.elements
        for op in ops
        for storage, tensor in zip(op.reads, trace.signatures[op.signature].inputs, strict=True)
        if trace.storages[storage].role == "parameter"
    }


def _params(call: ModuleCall, children: tuple[Node, ...], reads: dict[int, int]) -> int:
    """The parameters that stand with this call and are read.

    edge_opt gives a call its own parameters and those of children that never ran; reads tell the two apart.
    """
    if call.is_leaf or not call.params:
        return call.params
    below = sum(node.params for child in children for node in child.walk())
    return max(0, min(call.params, sum(reads.values()) - below))
