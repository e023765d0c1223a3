"""Runtimes that fuse: groups of a trace, what is learned of them, predictions, and one real net."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import edge_opt as eo
from calibrations import imaginary
from edge_opt.calibration.calibration_file import load_calibration, save_calibration
from edge_opt.calibration.fused_kernels import GroupTimes, groups_of, pattern, sample_of
from edge_opt.calibration.generated_networks import generated_networks
from edge_opt.calibration.predict import scales_of
from edge_opt.calibration.reference_networks import Reference
from edge_opt.calibration.self_check import summary
from edge_opt.errors import InvalidInput
from edge_opt.records.predictions import Calibration, CheckedNet, KernelGroupSample, RuntimeCalibration
from edge_opt.trace import trace

HEAD_FLOPS_PER_S, TAIL_BYTES_PER_S = 100e9, 10e9


def small(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 16, 1),
        nn.Hardswish(), nn.Flatten(), nn.Linear(16 * 64, 10),
    ).eval()  # fmt: skip


def samples(int8: bool = False) -> list[KernelGroupSample]:
    """What a runtime would have told: fused activations take nothing, pools and others their bytes."""
    known = []
    for width in range(8, 72, 2):
        for group in groups_of(trace(small(width), (1, 3, 16, 16)), scales_of(imaginary())):
            head_s = 0.0 if group.features is None else group.features.estimate_s / (2 if int8 else 1)
            sizes = zip(group.names, group.sizes, strict=True)
            tail_s = sum(size / TAIL_BYTES_PER_S for name, size in sizes if name not in ("batch_norm", "relu"))
            kernels = ("QuantizeLinear", "QLinearConv") if int8 else ("Conv",)
            known.append(sample_of(group, head_s, tail_s, kernels, f"net-{width}, batch 1", int(int8)))
    return known


def calibrated() -> Calibration:
    check = summary(tuple(CheckedNet(str(place), 1.0, 1.0) for place in range(8)), 1e-5, 0.1)
    platforms = tuple(
        RuntimeCalibration("onnxruntime", precision, 1, "1.0", check.created, 1.0, tuple(samples(precision == "int8")),
                           replace(check, deviation=0.08))
        for precision in ("fp32", "int8")
    )  # fmt: skip
    return replace(imaginary(), runtimes=platforms)


def test_a_group_is_a_head_with_what_follows_it() -> None:
    groups = groups_of(trace(small(), (1, 3, 16, 16)), scales_of(imaginary()))
    patterns = [pattern(group.op, group.names) for group in groups]
    assert patterns == ["", "conv2d + batch_norm + relu + max_pool2d", "conv2d + hardswish", "linear"]
    heads = [group.head for group in groups]
    assert heads[0] is None and heads == sorted(heads, key=lambda place: -1 if place is None else place)


def test_heads_take_what_they_took_and_tails_their_bytes() -> None:
    times = GroupTimes(samples())
    groups = groups_of(trace(small(33), (1, 3, 16, 16)), scales_of(imaginary()))
    [first] = [group for group in groups if "max_pool2d" in group.names]
    place = groups.index(first)
    # The pool reads and writes; norm and activation in front of it are part of the convolution.
    assert sum(times.tails_s(groups)[place]) == pytest.approx(first.sizes[2] / TAIL_BYTES_PER_S, rel=0.2)
    assert times.heads_s(groups)[place] == pytest.approx(first.features.estimate_s, rel=0.1)


def test_a_runtime_is_predicted_per_layer_without_converting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = save_calibration(calibrated(), tmp_path / "host.json")
    profile = eo.profile(small(20), (1, 3, 16, 16), target=path, runtime="onnxruntime", precision="int8")
    [there] = profile.predictions
    assert there.target == "imaginary/onnxruntime/int8, threads: 1" and there.precision == "int8"
    assert sum(layer.seconds for layer in there.layers) == pytest.approx(there.seconds)
    assert there.low < there.seconds < there.high
    assert {item.kernels for item in there.kernels} == {("QuantizeLinear", "QLinearConv")}
    # Four groups of two kernels, one of which only converts.
    assert any("of 6 kernels only convert" in remark for remark in there.remarks)
    fp32 = eo.predict(profile, load_calibration(path), "fp32", "onnxruntime")
    assert fp32.seconds > there.seconds


def test_int8_answers_without_a_runtime_and_what_was_not_calibrated_is_refused() -> None:
    calibration = calibrated()
    profile = eo.profile(small(), (1, 3, 16, 16))
    assert eo.predict(profile, calibration, "int8").target == "imaginary/onnxruntime/int8, threads: 1"
    assert eo.predict(profile, calibration).target == "imaginary"
    for wrong in ({"runtime": "openvino"}, {"runtime": "onnxruntime", "threads": 7}, {"precision": "bf16"}):
        with pytest.raises(InvalidInput, match="was not calibrated for.*edge-opt calibrate --runtime"):
            eo.predict(profile, calibration, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"runtimes": ["ncnn"]}, {"runtimes": ["onnxruntime"], "precisions": ["fp16"]}])
def test_what_cannot_be_calibrated_is_refused_before_anything_runs(wrong: dict[str, list[str]], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be calibrated"):
        eo.calibrate(path=tmp_path / "x.json", **wrong)  # type: ignore[arg-type]


def test_generated_networks_run() -> None:
    for net in generated_networks(3):
        with torch.inference_mode():
            assert net.build().eval()(net.inputs(1)).shape[0] == 1


def test_kernels_of_a_real_runtime_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
    from edge_opt.runtimes import calibrate_runtimes as measuring

    # However busy the machine is.
    monkeypatch.setattr(measuring, "_DISTURBED", float("inf"))
    net = Reference("tiny", "tiny", small, lambda batch: torch.randn(batch, 3, 16, 16), (1, 2))
    clock = SampleClock(1)
    for precision in ("fp32", "int8"):
        platform = measuring._Platform("onnxruntime", precision, 1, scales_of(imaginary()),
                                       measuring._Files(tmp_path), 100.0)  # fmt: skip
        measured = measuring._measured(platform, net, 2, ReferenceKernel(clock), clock)
        assert len(measured.samples) == len(measured.groups) == 4
        assert sum(item.head_s + item.tail_s for item in measured.samples) == pytest.approx(measured.seconds)
        heads = [item for item in measured.samples if item.group]
        assert all(item.kernels and item.head_s > 0 for item in heads)
        assert any("QLinear" in kernel for item in heads for kernel in item.kernels) == (precision == "int8")


def test_branches_that_quantizing_reorders_have_their_own_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
    from edge_opt.calibration.reference_networks import Residual
    from edge_opt.runtimes import calibrate_runtimes as measuring

    monkeypatch.setattr(measuring, "_DISTURBED", float("inf"))
    net = Reference(
        "branches",
        "residual",
        lambda: nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), Residual(64, 128, None, 2), Residual(128, 256, None, 2)),
        lambda batch: torch.randn(batch, 3, 58, 58),
        (1, 2),
    )
    clock = SampleClock(1)
    platform = measuring._Platform("onnxruntime", "int8", 1, scales_of(imaginary()), measuring._Files(tmp_path), 100.0)
    measured = measuring._measured(platform, net, 1, ReferenceKernel(clock), clock)
    assert measured is not None
    # In each block, in the order of the trace: 3x3 with stride 2, 3x3, and the 1x1 of the skip, of 1/18 of its MACs.
    heads = [item.head_s for item in measured.samples if item.group]
    assert len(heads) == 7
    for _, main_s, skip_s in (heads[1:4], heads[4:7]):
        assert skip_s < main_s / 2


def test_conversions_behind_a_head_that_nothing_follows_are_its_own() -> None:
    *_, last = groups_of(trace(small(), (1, 3, 16, 16)), scales_of(imaginary()))
    sample = sample_of(last, 3e-6, 2e-6, ("QGemm", "DequantizeLinear"), "net", 1)
    assert (last.names, sample.head_s, sample.tail_s) == ((), pytest.approx(3e-6 + 2e-6), 0.0)


def test_int8_of_transformers_is_dynamic_and_its_other_operators_stay_in_float() -> None:
    from edge_opt.calibration.reference_networks import Attention

    attended = nn.Sequential(Attention(16, 2, True, False), nn.GELU())
    recorded = trace(attended.eval(), (1, 4, 16))
    static, dynamic = (groups_of(recorded, scales_of(imaginary()), precision)[-1] for precision in ("fp32", "int8"))
    assert (static.names, dynamic.names) == (("gelu",), ("gelu, float",))
    assert pattern(dynamic.op, dynamic.names) == "linear + gelu"


def test_a_concatenation_of_partial_blocks_is_another_operator_for_the_regression() -> None:
    class Joined(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, width, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return torch.cat([y, y], 1)

    for width, names in ((16, ("cat",)), (24, ("cat, unblocked",))):
        group = groups_of(trace(Joined(width), (1, 3, 8, 8)), scales_of(imaginary()))[1]
        assert group.names == names
        assert pattern(group.op, group.names) == "conv2d + cat"
