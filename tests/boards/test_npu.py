"""NPUs of phones: channels in blocks, precisions and runtimes that were timed, and devices with the same chip."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
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
from edge_opt.report.profile_text import profile_markdown

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


def test_one_array_computes_every_kernel_and_linear_layers() -> None:
    # 64 x 64 channels, 8 x 8 places, 3 x 3 taps; then 8 x 8 vectors of 8 by 64 weights each
    assert amounts(nn.Conv2d(64, 64, 3, padding=1), 64)["conv1x1_macs"] == pytest.approx(64 * 64 * 64 * 9 / 1e6)
    assert amounts(nn.Linear(8, 64), 8)["conv1x1_macs"] == pytest.approx(64 * 8 * 64 / 1e6)


def test_a_free_activation_takes_no_time() -> None:
    work = model_work(eo.profile(nn.Sequential(nn.Conv2d(64, 64, 1), nn.SiLU()), (1, 64, 8, 8)))
    counts = [work.quantities(replace(BLOCKS, free=free))[CLASSES.index("layers")] for free in ((), ("activation",))]
    assert counts == [2, 1]


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
    assert any("no fit of its own: costs are those of qcs8550" in remark for remark in inferred.remarks)
    assert own.costs.covariance - base.costs.covariance == pytest.approx(SIBLING_SD**2)


def test_every_sibling_has_a_device_that_was_timed() -> None:
    names = {platform.device for platform in fitted_platforms()}
    assert {"galaxy-s22", "galaxy-s23", "galaxy-s24", "galaxy-s25", "galaxy-s26", "snapdragon-8-gen-3"} <= names


RB3 = "dragonwing-rb3-gen-2-vision-kit"  # an NPU without fp16


class Leaving(nn.Module):
    """Two layer norms of 4 x 8 elements, a lookup of tokens and a normalized result."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.second(self.linear(self.first(self.table(tokens))))
        return nn.functional.normalize(value, dim=-1)


@pytest.fixture(scope="module")
def leaving() -> ModelProfile:
    return eo.profile(Leaving(), eo.InputSpec((1, 4), dtype="int64"))


def left(profile: ModelProfile, device: str, runtime: str) -> dict[str, str]:
    there = eo.estimate(profile, device, "int8", runtime=runtime)
    return {item.operator: item.engine for item in there.departures}


def test_float_operators_leave_an_npu_of_integers(leaving: ModelProfile) -> None:
    assert left(leaving, RB3, "tflite") == {"LayerNorm": "cpu", "L2 normalization": "cpu"}
    assert left(leaving, RB3, "onnx") == {"L2 normalization": "cpu", "embedding of the input": "cpu"}
    assert left(leaving, RB3, "qnn") == {}
    assert left(leaving, "galaxy-s24", "tflite") == {}


def test_a_hand_over_takes_its_call_and_its_elements(leaving: ModelProfile) -> None:
    there = eo.estimate(leaving, RB3, "int8", runtime="tflite")
    norms, lengths = there.departures
    # 1.58 ms a call and 10.2 ns an element: 4 x 8 of each norm, one length of each of 4 tokens
    assert norms.seconds == pytest.approx((1.58e-3 + 32 * 10.2e-9,) * 2)
    assert lengths.seconds == pytest.approx((1.58e-3 + 4 * 10.2e-9,))
    work, platform = model_work(leaving), resolve_target(RB3, "int8", runtime="tflite").platform
    assert platform is not None and there.seconds is not None
    added_s = sum((*norms.seconds, *lengths.seconds))
    assert there.seconds == pytest.approx(fitted_time(work, platform).seconds + added_s)
    assert [layer.path for layer in there.layers if layer.engine == "cpu"] == ["", "first", "second"]
    assert there.cpu_layers == 3


def test_a_board_that_did_not_use_its_npu_for_some_models_says_how_often(profile: ModelProfile) -> None:
    def engine_line(device: str) -> str:
        there = replace(profile, predictions=(eo.estimate(profile, device, "fp16", runtime="tflite"),))
        return next(line for line in profile_markdown(there).splitlines() if "every layer on the NPU" in line)

    # 83 models of the table ran on some NPU in TFLite and fp16 and have a row of this board; 14 of these left it.
    assert "not used at all for 14 of 83 models" in engine_line("sa8650p-adp")
    assert "not used" not in engine_line("galaxy-s24")


def test_the_gpu_takes_the_only_layer_norm() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    there = eo.estimate(eo.profile(net, (1, 4, 8)), RB3, "int8", runtime="tflite")
    assert [item.engine for item in there.departures] == ["gpu"]
    assert there.cpu_layers == 0


def test_3d_convolutions_leave_with_their_macs() -> None:
    net = eo.profile(nn.Conv3d(2, 4, 3, padding=1, bias=False), (1, 2, 8, 8, 8))
    [item] = eo.estimate(net, RB3, "int8", runtime="tflite").departures
    # 8 x 8 x 8 places x 4 filters x 2 channels x 27, at 0.042 ns
    assert item.seconds == pytest.approx((1.58e-3 + 512 * 4 * 2 * 27 * 0.042e-9,))


def test_layers_on_the_cpu_are_a_budget(leaving: ModelProfile) -> None:
    def kept(device: str) -> bool:
        there = replace(leaving, predictions=(eo.estimate(leaving, device, "int8", runtime="tflite"),))
        return eo.check(there, "cpu_layers <= 0").passed

    assert not kept(RB3) and kept("galaxy-s24")


def test_a_cpu_has_no_count_of_layers_that_left(profile: ModelProfile) -> None:
    assert eo.estimate(profile, "raspberry-pi-4").cpu_layers is None


class Scaled(nn.Module):
    """A table of 32 x 8 that follows from weights alone, added to an input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Parameter(torch.zeros(32, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + (self.table * self.gain).sigmoid()


def test_what_follows_from_weights_is_folded() -> None:
    work = model_work(eo.profile(Scaled(), (1, 32, 8)))
    assert [layer.is_constant for layer in work.works] == [True, True, False]
    assert work.quantities(BLOCKS)[CLASSES.index("layers")] == 1
    assert work.quantities(KernelConventions())[CLASSES.index("layers")] == 3  # an eager runtime computes it again


def test_work_that_was_never_measured_has_no_time() -> None:
    net = eo.profile(nn.LSTM(64, 128, batch_first=True), (1, 50, 64))
    there = eo.estimate(net, "galaxy-s24", "fp16", runtime="qnn")
    assert there.seconds is None and there.low is None and there.high is None
    assert "recurrent layers" in there.outside
    assert there.remarks[0].startswith("outside what was measured there: recurrent layers")
    assert all(layer.seconds is None for layer in there.layers)


class Spectrum(nn.Module):
    """Work that no class of costs describes, and nothing else."""

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(sound).abs()


@pytest.mark.parametrize("model", [Spectrum(), nn.LSTM(64, 1024, batch_first=True)])
def test_unknown_work_has_neither_a_time_nor_a_count_of_layers_that_left(model: nn.Module) -> None:
    there = eo.estimate(eo.profile(model, (1, 50, 64)), "galaxy-s24", "fp16", runtime="qnn")
    assert there.seconds is None and there.cpu_layers is None
    assert there.remarks[0].startswith("outside what was measured there")


def test_several_devices_side_by_side_say_what_leaves() -> None:
    tokens = eo.InputSpec((1, 4), dtype="int64")
    text = str(eo.compare_targets(Leaving(), tokens, ("galaxy-s24", RB3), precision="int8", runtime="tflite"))
    # Two layer norms and the normalized result of the model itself. Long names of devices are shortened.
    assert "CPU layers" in text
    assert re.findall(r"s {2,}(\d) {2,}", text) == ["0", "3"]


def test_a_device_by_its_ratio_to_another_says_so(profile: ModelProfile) -> None:
    base, own = (
        eo.estimate(profile, name, "int8", runtime="qnn") for name in ("galaxy-s26", "snapdragon-8-elite-gen-6-qrd")
    )
    assert base.seconds is not None and own.seconds == pytest.approx(0.96 * base.seconds)
    assert any("0.96 times those of galaxy-s26" in remark for remark in own.remarks)


QUANTIZED = {(runtime, precision) for runtime in ("qnn", "onnx") for precision in ("int8", "w8a16")}
LAPTOP = QUANTIZED | {("qnn", "fp16"), ("onnx", "fp16")}
PHONE = LAPTOP | {("tflite", "fp16"), ("tflite", "int8")}
CAR = {(runtime, precision) for runtime, precision in PHONE if runtime != "onnx"}
SMALL = QUANTIZED | {("tflite", "int8")}
# Every device of Qualcomm's table, by its name there, and the runtimes and precisions that it has rows in.
TIMED = {
    **dict.fromkeys(("galaxy-s22", "galaxy-s24", "galaxy-s25", "galaxy-s26", "qcs8550", "snapdragon-xr2-gen-2"), PHONE),
    **dict.fromkeys(("snapdragon-8-elite-gen-6-qrd", "snapdragon-8-elite-extreme-gen-6-qrd"), PHONE),
    **dict.fromkeys(("arduino-ventuno-q", "dragonwing-iq-9075-evk", "dragonwing-q-8750"), PHONE),
    **dict.fromkeys(("snapdragon-x-elite-crd", "snapdragon-x2-elite-crd", "dragonwing-iq-x7181"), LAPTOP),
    **dict.fromkeys(("sa7255p-adp", "sa8255p-adp", "sa8295p-adp", "sa8650p-adp", "sa8775p-adp"), CAR),
    **dict.fromkeys(("dragonwing-q-6690-mtp", "dragonwing-q-7790", "snapdragon-7-gen-4-qrd", RB3), SMALL),
}


def test_exactly_the_runtimes_and_precisions_with_rows_have_a_figure() -> None:
    assert len(TIMED) == 23
    for device, timed in TIMED.items():
        known = {(item.runtime, item.precision) for item in fitted_platforms(device) if item.engine == "npu"}
        assert known == timed, device
