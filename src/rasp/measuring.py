"""What rasp measures: the latency and the device memory of each module call, through `edge_opt.measure`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import edge_opt
from rasp.config import CFG

if TYPE_CHECKING:
    from edge_opt.records import ModelProfile, ModuleMemory


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures by index of a module call: its own seconds, when it ended, memory around it. `whole_s` is the model's."""

    own_s: dict[int, float]
    end_s: dict[int, float]
    whole_s: float
    memory: dict[int, ModuleMemory]


NOTHING = Measured({}, {}, math.nan, {})


def measured(
    model: nn.Module, inputs: Any, profile: ModelProfile, device: torch.device, timing: bool, memory: bool
) -> Measured:
    """Run the model as often as `CFG.profile` says, and read off what was asked for."""
    if not timing and not memory:
        return NOTHING
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
    # A container without a row spent its time between the layers, which no call owns.
    own_s = {call.index: by_module.get(call.index, 0.0) for call in profile.trace.modules} if timing else {}
    rows = found.memory.modules if found.memory is not None else ()
    return Measured(
        own_s,
        _ends(profile, own_s) if timing else {},
        found.latency.median_s,
        {row.module: row for row in rows},
    )


def _ends(profile: ModelProfile, own_s: dict[int, float]) -> dict[int, float]:
    """When each call ended, from the start of the forward: the time of all calls that began before it was over."""
    last = {call.index: call.index for call in profile.trace.modules}
    for call in reversed(profile.trace.modules):
        if call.parent is not None:
            last[call.parent] = max(last[call.parent], last[call.index])
    sums: list[float] = []
    total = 0.0
    for call in profile.trace.modules:
        total += own_s[call.index]
        sums.append(total)
    return {index: sums[end] for index, end in last.items()}
