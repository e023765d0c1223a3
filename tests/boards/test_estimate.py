"""Estimates for devices nobody calibrated: hand arithmetic, where the constants come from, published latencies."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import edge_opt as eo
from edge_opt.boards.catalog import spec_from
from edge_opt.boards.class_costs import CLASSES
from edge_opt.boards.estimate import (
    CALL_OPERATIONS,
    DENSE,
    DEPTHWISE,
    ELEMENTWISE,
    GROUPED,
    INTERVAL_FACTOR,
    LAUNCH_S,
    LAYER_INTERVAL_FACTOR,
    PAPER_BANDWIDTH,
    estimate,
)
from edge_opt.boards.fused_layers import passes
from edge_opt.boards.platform_file import fitted_platforms
from edge_opt.boards.roofline import used_bandwidth
from edge_opt.errors import InvalidInput
from edge_opt.measuring.energy import modeled
from edge_opt.model import SmallCNN
from edge_opt.records.devices import DeviceSpec, Precision
from edge_opt.records.profiles import ModelProfile
from zoo import torchvision_models

SOURCE = {"source": "test", "kind": "derived"}


def board(**changes: object) -> DeviceSpec:
    """1 GB/s measured, 10 GFLOP/s in fp32, 40 in int8, 2 µs per operator, 5 W under load."""
    data: dict[str, object] = {
        "name": "board",
        "engine": "cpu",
        "measured_bandwidth_bytes_per_s": {"cpu": {"traffic": {"value": 1e9, **SOURCE}}},
        "peak_ops_per_s": {"cpu": {"fp32": {"value": 10e9, **SOURCE}, "int8": {"value": 40e9, **SOURCE}}},
        "overhead_s": {"value": 2e-6, **SOURCE},
        "power_w": {"idle": {"value": 1.0, **SOURCE}, "load": {"value": 5.0, **SOURCE}},
    }
    return spec_from({**data, **changes}, "board.toml")


def without(spec: DeviceSpec, **changes: object) -> DeviceSpec:
    return replace(spec, **changes)  # type: ignore[arg-type]


def test_a_dense_layer_follows_hand_arithmetic() -> None:
    profile = eo.profile(nn.Linear(256, 512, bias=False), (64, 256))
    flops = 2 * 64 * 256 * 512
    moved = 4 * (64 * 256 + 256 * 512 + 64 * 512)
    assert flops / (10e9 * DENSE) > moved / 1e9  # so compute is the limit
    found = estimate(profile, board())
    assert found.seconds == pytest.approx(flops / (10e9 * DENSE) + 2e-6)
    assert (found.bound, found.basis, found.target, found.precision) == ("compute", "roofline", "board", "fp32")
    assert (found.low, found.high) == (found.seconds / INTERVAL_FACTOR, found.seconds * INTERVAL_FACTOR)
    (layer,) = found.layers
    assert (layer.low, layer.high) == (layer.seconds / LAYER_INTERVAL_FACTOR, layer.seconds * LAYER_INTERVAL_FACTOR)
    assert found.remarks[0].startswith("uncalibrated: ")


def test_depthwise_and_elementwise_work_have_their_own_efficiency() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.GELU())
    depthwise, gelu = estimate(eo.profile(model, (1, 32, 16, 16)), board(overhead_s={"value": 0, **SOURCE})).layers
    macs, values = 32 * 16 * 16 * 9, 32 * 16 * 16
    assert depthwise.seconds == pytest.approx(2 * macs / (10e9 * DEPTHWISE))
    flops = eo.profile(nn.GELU(), (1, 32, 16, 16)).totals.flops
    assert gelu.seconds == pytest.approx(max(flops / (10e9 * ELEMENTWISE), 2 * 4 * values / 1e9))


def test_a_grouped_convolution_is_not_depthwise() -> None:
    model = nn.Conv2d(64, 64, 3, padding=1, groups=4, bias=False)
    macs = 64 * 16 * 16 * 16 * 9
    found = estimate(eo.profile(model, (1, 64, 16, 16)), board(overhead_s={"value": 0, **SOURCE}))
    assert found.seconds == pytest.approx(2 * macs / (10e9 * GROUPED))


def test_int8_moves_a_quarter_and_computes_at_its_own_peak() -> None:
    profile = eo.profile(nn.Linear(64, 64, bias=False), (1, 64))
    moved = 64 + 64 * 64 + 64
    assert moved / 1e9 > 2 * 64 * 64 / (40e9 * DENSE)  # so memory is the limit
    found = estimate(profile, board(), "int8")
    assert found.seconds == pytest.approx(moved / 1e9 + 2e-6)
    assert estimate(profile, board(overhead_s={"value": 0, **SOURCE}), "int8").bound == "memory"


def test_a_bandwidth_on_paper_is_not_reached_in_full() -> None:
    paper = {"bandwidth_bytes_per_s": {"datasheet": {"value": 1e9, **SOURCE}}, "measured_bandwidth_bytes_per_s": {}}
    profile = eo.profile(nn.ReLU(), (1000,))
    moved = 2 * 4 * 1000
    assert estimate(profile, board()).seconds == pytest.approx(moved / 1e9 + 2e-6)
    assert estimate(profile, board(**paper)).seconds == pytest.approx(moved / (1e9 * PAPER_BANDWIDTH) + 2e-6)


@given(batch=st.integers(1, 64), width=st.integers(1, 64), factor=st.sampled_from([2.0, 3.0, 0.25]))
def test_twice_the_bandwidth_and_compute_and_half_the_overhead_take_half_the_time(
    batch: int, width: int, factor: float
) -> None:
    profile = eo.profile(nn.Sequential(nn.Linear(16, width), nn.ReLU()), (batch, 16))
    faster = board(
        measured_bandwidth_bytes_per_s={"cpu": {"traffic": {"value": factor * 1e9, **SOURCE}}},
        peak_ops_per_s={"cpu": {"fp32": {"value": factor * 10e9, **SOURCE}}},
        overhead_s={"value": 2e-6 / factor, **SOURCE},
    )
    slow, fast = estimate(profile, board()), estimate(profile, faster)
    assert slow.seconds is not None
    assert fast.seconds == pytest.approx(slow.seconds / factor)
    assert fast.bound == slow.bound


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_layers_add_up_to_the_whole_in_time_and_energy(precision: str) -> None:
    found = estimate(eo.profile(SmallCNN(), (4, 1, 28, 28)), "raspberry-pi-5", precision)  # type: ignore[arg-type]
    assert found.seconds == math.fsum(layer.seconds or 0 for layer in found.layers)
    assert sum(layer.energy_j or 0 for layer in found.layers) == pytest.approx(found.energies[0].joules)


def test_energy_is_power_times_time_and_a_table_each_under_its_name() -> None:
    profile = eo.profile(nn.Linear(256, 512, bias=False), (64, 256))
    found = estimate(profile, board())
    proxy, table = found.energies
    assert (proxy.source, proxy.joules) == ("proxy", 5.0 * found.seconds)
    assert "5 W (load; derived: test)" in proxy.note
    # 3.7 + 0.9 pJ a MAC; four bytes in five at 10/8 pJ, one at 640/4: 33 pJ a byte.
    macs, moved = 64 * 256 * 512, 4 * (64 * 256 + 256 * 512 + 64 * 512)
    assert (table.source, table.joules) == ("model", pytest.approx((4.6 * macs + 33 * moved) * 1e-12))
    assert "Horowitz" in table.note
    # int8: 0.2 + 0.03 pJ a MAC, a quarter of the bytes
    assert estimate(profile, board(), "int8").energies[1].joules == pytest.approx(
        (0.23 * macs + 33 * moved / 4) * 1e-12
    )


def test_the_table_agrees_with_the_meter_of_the_same_name() -> None:
    profile = eo.profile(SmallCNN(), (2, 1, 28, 28))
    assert estimate(profile, board()).energies[1].joules == pytest.approx(modeled(profile).joules)


def test_without_a_power_the_layers_carry_the_table() -> None:
    found = estimate(eo.profile(SmallCNN(), (1, 1, 28, 28)), without(board(), powers=()))
    assert [energy.source for energy in found.energies] == ["model"]
    assert sum(layer.energy_j or 0 for layer in found.layers) == pytest.approx(found.energies[0].joules)
    assert any("the power at work is unknown" in remark for remark in found.remarks)


def test_idle_power_is_not_the_power_of_a_model_at_work() -> None:
    idle = board(power_w={"idle": {"value": 1.0, **SOURCE}})
    assert [energy.source for energy in estimate(eo.profile(nn.ReLU(), (4,)), idle).energies] == ["model"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_without_a_peak_has_no_time(precision: Precision) -> None:
    profile = eo.profile(nn.Linear(256, 512, bias=False), (64, 256))
    found = estimate(profile, board(), precision)
    assert (found.seconds, found.low, found.high, found.bound) == (None, None, None, "unknown")
    assert any(f"in {precision} (cpu) is unknown, so there is no time; known peaks: fp32" in it for it in found.remarks)
    assert estimate(profile, board(), "int8").seconds is not None  # integers are widened to what is known


def test_without_any_peak_the_time_is_what_memory_takes() -> None:
    profile = eo.profile(nn.Linear(256, 512, bias=False), (64, 256))
    found = estimate(profile, without(board(), peaks=()))
    moved = 4 * (64 * 256 + 256 * 512 + 64 * 512)
    assert found.seconds == pytest.approx(moved / 1e9 + 2e-6)
    assert (found.low, found.high, found.bound) == (found.seconds / INTERVAL_FACTOR, None, "memory")
    assert any("this is what memory takes alone" in remark for remark in found.remarks)


@pytest.mark.parametrize("device", ["esp32-s3", "coral-usb", "hailo-8"])
def test_a_missing_bandwidth_is_named_and_what_to_type_in(device: str) -> None:
    found = estimate(eo.profile(SmallCNN(), (1, 1, 28, 28)), device)
    assert (found.seconds, found.bound) == (None, "unknown")
    (remark,) = [text for text in found.remarks if text.startswith(f"the bandwidth of {device} is unknown")]
    assert "edge-opt board my-board --time" in remark


def test_a_device_without_a_time_says_in_which_precision_it_has_one() -> None:
    found = estimate(eo.profile(SmallCNN(), (1, 1, 28, 28)), "stm32h747")
    assert found.seconds is None
    assert found.remarks[0].endswith("times with st-edge-ai are known in int8: --precision int8")


def test_every_step_of_a_recurrent_layer_is_a_launch_on_a_gpu_and_a_loop_on_a_cpu() -> None:
    profile = eo.profile(nn.LSTM(8, 16, num_layers=2, bidirectional=True), (50, 3, 8))
    (item,) = [item for item in passes(profile, "fp32") if item.macs]
    assert item.steps == 50 * 2 * 2
    gpu, cpu = (estimate(profile, device) for device in ("jetson-nano", without(board(), overhead_s=None)))
    assert gpu.seconds is not None and cpu.seconds is not None
    assert gpu.seconds >= 200 * LAUNCH_S > cpu.seconds


def test_a_call_takes_what_is_usual_where_the_device_has_no_figure() -> None:
    cpu = board(cores={"value": 4, **SOURCE})
    profile = eo.profile(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()).eval(), (1, 8, 64, 64))
    with_none = estimate(profile, without(cpu, overhead_s=None))
    no_cost = estimate(profile, board(overhead_s={"value": 0, **SOURCE}))
    # One call, as norm and activation are fused into the convolution, in which one core could have done so much.
    assert with_none.seconds == pytest.approx(no_cost.seconds + CALL_OPERATIONS / (10e9 / 4))
    assert with_none.high == with_none.seconds * INTERVAL_FACTOR
    assert any("per layer beside its work, which is usual for such a cpu" in remark for remark in with_none.remarks)


def test_threads_take_the_fast_cores_first() -> None:
    profile = eo.profile(nn.Linear(256, 512, bias=False), (64, 256))
    mixed = board(cores={"value": 6, **SOURCE}, fast_cores={"value": 2, **SOURCE}, fast_share={"value": 0.6, **SOURCE})
    flops = 2 * 64 * 256 * 512
    for threads, share in ((1, 0.3), (2, 0.6), (4, 0.6 + 0.4 * 2 / 4), (6, 1.0)):
        found = estimate(profile, mixed, threads=threads)
        assert found.seconds == pytest.approx(flops / (share * 10e9 * DENSE) + 2e-6)


def test_no_overhead_is_assumed_where_none_is_usual() -> None:
    bare = without(board(), overhead_s=None)  # how many cores it has is not known
    found = estimate(eo.profile(nn.ReLU(), (1000,)), bare)
    assert found.seconds == pytest.approx(8000 / 1e9)
    assert any(remark.startswith("overhead per operator is not known") for remark in found.remarks)
    # 8 µs, to which any overhead might add more than itself; a million values take 8 ms, to which it adds little.
    assert (found.low, found.high) == (found.seconds / INTERVAL_FACTOR, None)
    large = estimate(eo.profile(nn.ReLU(), (1_000_000,)), bare)
    assert large.high == large.seconds * INTERVAL_FACTOR


def test_an_operator_without_a_price_leaves_the_upper_end_open() -> None:
    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(x @ x)

    profile = eo.profile(Strange(), (8, 8))
    assert profile.unpriced
    found = estimate(profile, board())
    assert found.seconds is not None and found.low is not None
    assert (found.high, found.outside) == (None, tuple(item.op for item in profile.unpriced))
    assert [layer.is_outside for layer in found.layers] == [True]


def test_a_model_that_does_nothing_takes_no_time() -> None:
    found = estimate(eo.profile(nn.Identity(), (4,)), board())
    assert (found.seconds, found.low, found.high, found.layers) == (0.0, 0.0, 0.0, ())


def test_wrong_use_is_refused() -> None:
    profile = eo.profile(nn.Linear(4, 4), (1, 4))
    with pytest.raises(InvalidInput, match="precision is 'int3'; it must be one of fp32, fp16, bf16, int8"):
        estimate(profile, "raspberry-pi-4", "int3")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="engine is 'tpu'"):
        estimate(profile, "raspberry-pi-4", engine="tpu")  # type: ignore[arg-type]


# Where the constants come from.


def test_dense_products_reach_half_of_the_peak_in_the_catalogue() -> None:
    shares = [
        fp64.value / (fp32.value / 2)
        for spec in eo.devices()
        if (fp64 := spec.peak("cpu", "fp64"))
        and (fp32 := spec.peak("cpu", "fp32"))
        # 512 MiB hold no problem that HPL could run well on: the Zero 2 W reaches 2 % of its peak.
        and (not spec.ram_bytes or spec.ram_bytes[0].value >= 2**30)
    ]
    assert len(shares) == 5
    assert statistics.median(shares) == pytest.approx(DENSE, rel=0.05)
    assert 0.39 <= min(shares) <= max(shares) <= 0.65


def test_grouped_work_and_calls_cost_what_they_do_in_the_middle_of_the_fits() -> None:
    def costs(runtime: str, engine: str) -> list[dict[str, Any]]:
        return [
            {"device": platform.device, **dict(zip(CLASSES, np.exp(platform.costs.mean), strict=True))}
            for platform in fitted_platforms()
            if (platform.runtime, platform.engine, platform.precision) == (runtime, engine, "fp32")
            and (platform.threads or 1) <= 4
        ]

    cpus = costs("ncnn", "cpu")
    shares = [math.sqrt(cost["conv3x3_macs"] * cost["conv1x1_macs"]) / cost["conv_macs"] for cost in cpus]
    assert statistics.median(shares) == pytest.approx(GROUPED / DENSE, rel=0.05)
    known = {spec.name: spec for spec in eo.devices()}
    operations = [
        1e-3 * cost["layers"] * peak.value / cores.value * (1 if fast is None else 0.72 * 2)
        for cost in cpus
        if (spec := known.get(cost["device"])) is not None
        and (peak := spec.peak("cpu", "fp32"))
        and (cores := spec.cores)
        for fast in [spec.fast_cores]
    ]
    assert statistics.median(operations) == pytest.approx(CALL_OPERATIONS, rel=0.3)
    launches = [1e-3 * cost["layers"] for cost in costs("ncnn-vulkan", "gpu")]
    assert statistics.median(launches) == pytest.approx(LAUNCH_S, rel=0.05)


def test_a_copy_reaches_three_fifths_of_the_memory_s_peak_in_the_catalogue() -> None:
    shares = [
        used.bytes_per_s / paper.value
        for spec in eo.devices()
        if spec.engine == "cpu" and (paper := spec.bandwidth("datasheet")) and (used := used_bandwidth(spec, "cpu"))
        if used.method not in ("datasheet", "quoted")
    ]
    assert len(shares) == 3
    assert statistics.median(shares) == pytest.approx(PAPER_BANDWIDTH, rel=0.06)


class MobileNetV1(nn.Sequential):
    """Howard et al. 2017: depthwise and pointwise in turn, 224 pixels, `alpha` times the channels."""

    def __init__(self, alpha: float) -> None:
        def block(inner: int, outer: int, stride: int, groups: int = 1) -> nn.Sequential:
            kernel = 1 if groups == 1 and inner != 3 else 3
            return nn.Sequential(
                nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False),
                nn.BatchNorm2d(outer),
                nn.ReLU(),
            )

        plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
        inner = int(32 * alpha)
        layers: list[nn.Module] = [block(3, inner, 2)]
        for channels, stride in plan:
            outer = int(channels * alpha)
            layers += [block(inner, inner, stride, groups=inner), block(inner, outer, 1)]
            inner = outer
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 1000))


def grouped_and_dense_macs(profile: ModelProfile) -> tuple[int, int]:
    grouped = sum(
        layer.cost.macs
        for layer in profile.layers
        if layer.call.kind == "Conv2d" and is_grouped(profile, layer.call.index)
    )
    return grouped, profile.totals.macs - grouped


def is_grouped(profile: ModelProfile, module: int) -> bool:
    signatures = [profile.trace.signatures[call.signature] for call in profile.trace.ops if call.module == module]
    return any(signature.argument("groups", 1) > 1 for signature in signatures)


def test_two_published_latencies_give_the_rates_that_meet_the_third() -> None:
    known = {item.model: item.figure.value for item in eo.device("stm32h747").latencies}
    quarter, half, whole = (
        (
            *grouped_and_dense_macs(eo.profile(MobileNetV1(alpha), (1, 3, 224, 224))),
            known[f"mobilenet-v1-{name}-224"],
        )
        for alpha, name in ((0.25, "0.25"), (0.5, "0.5"), (1.0, "1.0"))
    )
    # Two equations, grouped × a + dense × b = seconds, for the smallest and the largest.
    determinant = quarter[0] * whole[1] - whole[0] * quarter[1]
    grouped_s = (quarter[2] * whole[1] - whole[2] * quarter[1]) / determinant
    dense_s = (quarter[0] * whole[2] - whole[0] * quarter[2]) / determinant
    assert half[0] * grouped_s + half[1] * dense_s == pytest.approx(half[2], rel=0.05)
    assert dense_s / grouped_s == pytest.approx(DEPTHWISE / DENSE, rel=0.05)


@pytest.mark.slow
def test_published_latencies_lie_within_the_interval() -> None:
    models = torchvision_models()
    ratios = []
    for device in ("raspberry-pi-4", "raspberry-pi-zero-2-w"):
        for item in eo.device(device).latencies:
            name = item.model
            options = {"init_weights": False} if name in ("googlenet", "vgg16") else {}
            options |= {"aux_logits": False} if name == "googlenet" else {}
            model = getattr(models, name)(weights=None, **options)
            pixels = 227 if name in ("squeezenet1_1", "alexnet") else 224
            # A changed device is known by its figures alone.
            found = estimate(eo.profile(model, (1, 3, pixels, pixels)), replace(eo.device(device), note="changed"))
            ratios.append(item.figure.value / (found.seconds or math.nan))
    assert len(ratios) == 21
    assert 1 / 1.9 < min(ratios) < max(ratios) < 1.9 < INTERVAL_FACTOR
