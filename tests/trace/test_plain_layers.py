"""Plain layers, which tell the tape their operator themselves: the trace is the one that torch's dispatcher gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edge_opt as eo
from edge_opt.errors import TraceFailed
from edge_opt.records.costs import Trace


def images(*layers: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(*layers), (2, 8, 9, 9)


def rows(*layers: nn.Module) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(*layers), (3, 8)


def single(layer: nn.Conv2d) -> nn.Conv2d:
    """A layer whose stride somebody has set by hand."""
    layer.stride = 2  # type: ignore[assignment]
    return layer


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: rows(nn.Linear(8, 4), nn.Linear(4, 2, bias=False)),
    "convolution": lambda: images(nn.Conv2d(8, 4, 3), nn.Conv2d(4, 4, 1, bias=False)),
    "stride and padding": lambda: images(nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=(0, 2))),
    "dilation and groups": lambda: images(nn.Conv2d(8, 4, 3, dilation=2), nn.Conv2d(4, 4, 3, groups=4, bias=False)),
    "stride as a number": lambda: images(single(nn.Conv2d(8, 4, 3, stride=2))),
    "padding by name or circular": lambda: images(
        nn.Conv2d(8, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    ),
    "batch norm": lambda: images(
        nn.BatchNorm2d(8), nn.BatchNorm2d(8, eps=1e-3, momentum=None, affine=False),
        nn.BatchNorm2d(8, track_running_stats=False),
    ),
    "layer norm": lambda: rows(
        nn.LayerNorm(8), nn.LayerNorm(8, eps=1e-6), nn.LayerNorm(8, bias=False),
        nn.LayerNorm(8, elementwise_affine=False),
    ),
    "relu": lambda: images(nn.ReLU(), nn.ReLU(inplace=True)),
    "weight norm": lambda: rows(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), nn.ReLU()),
}  # fmt: skip


def traced(build: Callable[[], tuple[nn.Module, tuple[int, ...]]], mode: str) -> Trace:
    torch.manual_seed(0)
    model, shape = build()
    return eo.profile(model, shape, mode=mode).trace


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_the_trace_is_the_same_as_through_torch(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced(CASES[name], mode)
    monkeypatch.setattr("edge_opt.trace.module_calls.straight", lambda module, forward, tape: forward)
    assert found == traced(CASES[name], mode)


def test_a_function_that_someone_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    original = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: original(original(x, weight), weight, bias))
    # two products of 3 rows by 8 x 8 instead of one
    assert eo.profile(nn.Linear(8, 8), (3, 8)).totals.macs == 2 * 3 * 8 * 8


class Mixed(nn.Module):
    """A layer within what casts or maps: its operator is another one there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 4), how

    def forward(self, x: torch.Tensor) -> Any:
        if self.how == "vmap":
            return torch.vmap(self.linear)(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x)


@pytest.mark.parametrize("how", ["vmap", "autocast"])
def test_what_stands_between_a_layer_and_its_operator_is_heard(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = eo.profile(Mixed(how), (3, 8)).trace
    monkeypatch.setattr("edge_opt.trace.module_calls.straight", lambda module, forward, tape: forward)
    assert found == eo.profile(Mixed(how), (3, 8)).trace


def test_a_wrong_shape_is_refused_in_the_same_words() -> None:
    with pytest.raises(TraceFailed, match=r"module '0' \(Linear\) refused its input \(3, 9\): .*same reduction dim"):
        eo.profile(nn.Sequential(nn.Linear(8, 4)), (3, 9))
    with pytest.raises(TraceFailed, match=r"expected 4D input \(got 2D input\)"):
        eo.profile(nn.Sequential(nn.BatchNorm2d(8)), (3, 8))
