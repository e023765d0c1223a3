"""The fused view: what lies between a product and its norm and activation never reaches memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import edge_opt as eo
from edge_opt.boards.fused_layers import fused_passes, passes
from edge_opt.records.profiles import ModelProfile

X, W, Y = 2 * 3 * 8 * 8, 8 * 3 * 9 + 8, 2 * 8 * 8 * 8  # inputs, weights with bias, outputs of the convolution
NORM = 4 * 8  # scale, shift, mean and variance of 8 channels


def moved(profile: ModelProfile) -> list[tuple[int, int]]:
    """Values read and written by each pass of the fused view."""
    return [(item.bytes_read // 4, item.bytes_written // 4) for item in fused_passes(profile, "fp32")]


def convolution() -> nn.Conv2d:
    return nn.Conv2d(3, 8, 3, padding=1)


@pytest.mark.parametrize("inplace", [False, True])
def test_convolution_norm_and_activation_are_one_pass(inplace: bool) -> None:
    model = nn.Sequential(convolution(), nn.BatchNorm2d(8), nn.ReLU(inplace))
    profile = eo.profile(model, (2, 3, 8, 8))
    apart = [(item.bytes_read // 4, item.bytes_written // 4) for item in passes(profile, "fp32")]
    assert apart == [(X + W, Y), (Y + NORM, Y), (Y, Y)]
    assert moved(profile) == [(X + W + NORM, Y)]
    roof = eo.roofline(profile, "raspberry-pi-4")
    (layer,) = roof.fused_layers
    assert (layer.path, layer.includes, layer.passes) == ("0", ("1", "2"), 1)
    assert layer.flops == roof.total.flops
    assert (roof.total.passes, roof.fused_total.passes) == (3, 1)


def test_a_fused_pass_takes_the_longer_of_all_its_moving_and_all_its_computing() -> None:
    roof = eo.roofline(eo.profile(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), (64, 256)), "raspberry-pi-4")
    fused = roof.fused_total
    assert fused.memory_s is not None and fused.compute_s is not None
    assert fused.seconds == max(fused.memory_s, fused.compute_s)
    # The linear layer is limited by compute, and the activation rides along for its own operations only.
    assert fused.compute_s == (2 * 64 * 256 * 256 + 2 * 64 * 256) / 48e9
    assert fused.bound == "compute"


def test_at_another_precision_the_same_tensors_are_left_out() -> None:
    profile = eo.profile(nn.Sequential(convolution(), nn.ReLU()), (2, 3, 8, 8))
    (only,) = fused_passes(profile, "int8")
    assert (only.bytes_read, only.bytes_written) == (X + W, Y)


def test_a_head_whose_result_nobody_reads_is_a_pass_of_its_own() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.one(x), self.two(x)

    # 1 x 4 inputs, weights with biases, outputs
    assert moved(eo.profile(TwoHeads(), (1, 4))) == [(4 + 10, 2), (4 + 15, 3)]


def test_a_result_that_somebody_else_reads_is_still_written() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = convolution()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return F.relu(y) + y

    assert moved(eo.profile(Residual(), (2, 3, 8, 8))) == [(X + W, Y), (Y, Y), (2 * Y, Y)]


def test_a_result_that_the_model_returns_is_still_written() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = convolution()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.conv(x)
            return y, F.relu(y)

    assert moved(eo.profile(Both(), (2, 3, 8, 8))) == [(X + W, Y), (Y, Y)]


def test_an_activation_by_hand_reads_its_input_twice_and_stays_apart() -> None:
    class Swish(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = convolution()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return y * torch.sigmoid(y)

    assert moved(eo.profile(Swish(), (2, 3, 8, 8))) == [(X + W, Y), (Y, Y), (2 * Y, Y)]


def test_a_norm_that_needs_statistics_of_its_input_stays_apart() -> None:
    for norm in (nn.GroupNorm(2, 8), nn.BatchNorm2d(8, track_running_stats=False)):
        profile = eo.profile(nn.Sequential(convolution(), norm), (2, 3, 8, 8))
        assert len(fused_passes(profile, "fp32")) == 2
    training = eo.profile(nn.Sequential(convolution(), nn.BatchNorm2d(8)), (2, 3, 8, 8), mode="train")
    assert len(fused_passes(training, "fp32")) >= 2


def test_only_what_directly_follows_is_fused() -> None:
    model = nn.Sequential(convolution(), nn.MaxPool2d(2), nn.ReLU())
    assert moved(eo.profile(model, (2, 3, 8, 8))) == [(X + W, Y), (Y, Y // 4), (Y // 4, Y // 4)]


def test_a_view_between_them_does_not_matter() -> None:
    model = nn.Sequential(convolution(), nn.Flatten(), nn.ReLU())
    assert moved(eo.profile(model, (2, 3, 8, 8))) == [(X + W, Y)]


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["conv", "norm", "relu", "relu_", "pool", "group"]), min_size=1, max_size=8),
    precision=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
)
def test_fusing_moves_less_and_computes_the_same(kinds: list[str], precision: str) -> None:
    layers: dict[str, nn.Module] = {
        "conv": nn.Conv2d(4, 4, 3, padding=1),
        "norm": nn.BatchNorm2d(4),
        "relu": nn.ReLU(),
        "relu_": nn.ReLU(inplace=True),
        "pool": nn.AvgPool2d(3, 1, 1),
        "group": nn.GroupNorm(2, 4),
    }
    profile = eo.profile(nn.Sequential(nn.Conv2d(4, 4, 1), *(layers[kind] for kind in kinds)), (1, 4, 6, 6))
    apart, fused = passes(profile, precision), fused_passes(profile, precision)  # type: ignore[arg-type]
    assert sum(item.flops for item in fused) == sum(item.flops for item in apart)
    assert sum(item.macs for item in fused) == sum(item.macs for item in apart)
    assert all(item.bytes_read >= 0 and item.bytes_written >= 0 for item in fused)
    saved = sum(item.bytes_read + item.bytes_written for item in apart) - sum(
        item.bytes_read + item.bytes_written for item in fused
    )
    # Every tensor here has the same size, and each that stays inside a pass saves one write and one read.
    itemsize = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}[precision]
    assert saved == (len(apart) - len(fused)) * 2 * 4 * 36 * itemsize
