"""What lies between operators: Python, and the calls of modules."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from edge_opt.devices.calibration.alone import best_seconds
from edge_opt.devices.calibration.clock import OperatorClock

_LAYERS = 200
_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds per operator and per module call beside what operators take themselves; never below zero."""

    operator_s: float
    module_s: float


def measured_overheads() -> Overheads:
    """From rows of modules that do nothing, and of modules that call one tiny operator each."""
    x = torch.ones(8)
    nothing = nn.Sequential(*(nn.Identity() for _ in range(_LAYERS))).eval()
    tiny = nn.Sequential(*(nn.ReLU(inplace=True) for _ in range(_LAYERS))).eval()
    with torch.inference_mode():
        module_s = best_seconds(lambda: nothing(x), _REPEATS) / (_LAYERS + 1)
        whole_s = best_seconds(lambda: tiny(x), _REPEATS) / _LAYERS
        inside_s = min(_recorded(tiny, x) for _ in range(_REPEATS)) / _LAYERS
    return Overheads(max(0.0, whole_s - module_s - inside_s), module_s)


def _recorded(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds that the operators of one forward take by the clock that times them in place."""
    clock = OperatorClock(time.perf_counter_ns)
    with clock:
        model(x)
    return sum(clock.nanoseconds) / 1e9
