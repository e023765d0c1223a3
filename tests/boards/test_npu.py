"""NPUs of phones: channels in blocks, precisions and runtimes that were timed, and devices with the same chip."""

from __future__ import annotations

import math

import pytest
from torch import nn

import edge_opt as eo
from edge_opt.boards.class_costs import CLASSES, KernelConventions
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.platform_file import SIBLING_SD, Platform, fitted_platforms
from edge_opt.boards.platforms import bundled_nets, fitted_time
from edge_opt.boards.targets import resolve_target
from edge_opt.errors import InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.records.profiles import ModelProfile

BLOCKS = KernelConventions(cache_elements=0.0, splits_groups=False, lanes=32)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return eo.profile(SmallCNN(), (1, 1, 28, 28))


def platform_of(precision: str, runtime: str) -> Platform:
    platform = resolve_target("galaxy-s24", precision, runtime=runtime).platform
    assert platform is not None
    return platform


def amounts(layer: nn.Module, channels: int) -> dict[str, float]:
    row = model_work(eo.profile(layer, (1, channels, 8, 8))).quantities(BLOCKS)
    return {name: float(value) for name, value in zip(CLASSES, row, strict=True) if value}


def test_channels_fill_blocks_of_32_in_memory_and_64_in_the_multipliers() -> None:
    row = amounts(nn.Conv2d(16, 48, 1, bias=False), 16)
    # 16 channels move as 32 and 48 as 64; both multiply as 64, on 8 x 8 places
    assert row["conv1x1_elements"] == pytest.approx((32 + 64) * 64 / 1e6)
    assert row["conv1x1_macs"] == pytest.approx(64 * 64 * 64 / 1e6)
    assert row["weights"] == pytest.approx(16 * 48 / 1e6)


def test_a_depthwise_convolution_fills_its_filters_alone() -> None:
    row = amounts(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), 16)
    assert row["depthwise_macs"] == pytest.approx(64 * 9 * 64 / 1e6)


def test_whole_blocks_cost_what_they_are() -> None:
    row = amounts(nn.Conv2d(64, 128, 1, bias=False), 64)
    assert row["conv1x1_macs"] == pytest.approx(64 * 128 * 64 / 1e6)


@pytest.mark.parametrize("runtime", ["qnn", "onnx", "tflite"])
def test_int8_is_faster_than_fp16(runtime: str) -> None:
    net = bundled_nets()["resnet50"]
    half, small = (platform_of(precision, runtime) for precision in ("fp16", "int8"))
    assert fitted_time(net, small).seconds < fitted_time(net, half).seconds


def test_a_small_model_takes_what_handing_it_over_takes(profile: ModelProfile) -> None:
    platform = platform_of("int8", "qnn")
    layer_s = math.exp(platform.costs.mean[CLASSES.index("layers")]) / 1000
    there = eo.estimate(profile, platform, "int8")
    # 5 layers, and the call counts as 30
    assert there.seconds is not None and there.seconds > 35 * layer_s
    assert math.fsum(layer.seconds or 0.0 for layer in there.layers) == there.seconds


@pytest.mark.parametrize(("runtime", "precision"), [("qnn", "fp32"), ("tflite", "w8a16"), ("ncnn", "int8")])
def test_what_was_never_timed_has_no_figure(profile: ModelProfile, runtime: str, precision: str) -> None:
    with pytest.raises(InvalidInput, match="no times of galaxy-s24"):
        eo.estimate(profile, "galaxy-s24", precision, runtime=runtime)  # type: ignore[arg-type]


def test_the_roofline_of_a_phone_without_figures_says_which_precisions_were_timed(profile: ModelProfile) -> None:
    there = eo.estimate(profile, "galaxy-s24")
    assert there.seconds is None
    assert any("fp16" in remark for remark in there.remarks)


def test_a_device_with_the_rows_of_another_has_its_times(profile: ModelProfile) -> None:
    one, two = (eo.estimate(profile, name, "int8", runtime="qnn") for name in ("galaxy-s25", "dragonwing-q-8750"))
    assert (one.seconds, one.low) == (two.seconds, two.low)


def test_a_device_with_the_same_npu_is_less_certain(profile: ModelProfile) -> None:
    known, inferred = (eo.estimate(profile, name, "int8", runtime="qnn") for name in ("qcs8550", "galaxy-s23"))
    assert inferred.seconds == known.seconds
    base, own = (resolve_target(name, "int8", runtime="qnn").platform for name in ("qcs8550", "galaxy-s23"))
    assert base is not None and own is not None
    assert own.rows == 0 and own.origin == "core"
    assert own.costs.covariance - base.costs.covariance == pytest.approx(SIBLING_SD**2)


def test_every_sibling_has_a_device_that_was_timed() -> None:
    names = {platform.device for platform in fitted_platforms()}
    assert {"galaxy-s22", "galaxy-s23", "galaxy-s24", "galaxy-s25", "galaxy-s26", "snapdragon-8-gen-3"} <= names
