"""Rooflines equal hand arithmetic, per layer and as a whole, at every precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import edge_opt as eo
from edge_opt._support.json import from_plain, to_plain
from edge_opt.boards.catalog import spec_from
from edge_opt.boards.roofline import used_bandwidth
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import DeviceSpec, Roofline


def figure(value: float) -> dict[str, object]:
    return {"value": value, "source": "this test", "kind": "measured"}


def board(
    bandwidth: float | None = 1e9, overhead_s: float | None = None, gpu: dict[str, float] | None = None, **peaks: float
) -> DeviceSpec:
    """A CPU with the peaks given by precision, and a bandwidth of 1 GB/s unless told otherwise."""
    data: dict[str, object] = {
        "name": "board",
        "engine": "cpu",
        "bandwidth_bytes_per_s": {"unknown": "not measured"} if bandwidth is None else {"datasheet": figure(bandwidth)},
        "peak_ops_per_s": {
            "cpu": {name: figure(value) for name, value in peaks.items()},
            "gpu": {name: figure(value) for name, value in (gpu or {}).items()},
        },
    }
    if overhead_s is not None:
        data["overhead_s"] = figure(overhead_s)
    return spec_from(data, "board.toml")


LINEAR = eo.profile(nn.Linear(16, 8), (4, 16))
# Read: 4x16 inputs, 8x16 weights, 8 biases. Written: 4x8 outputs.
READ, WRITTEN = 4 * (64 + 128 + 8), 4 * 32
MACS = 4 * 16 * 8
FLOPS = 2 * MACS + 32  # and one addition per output for the bias


def test_a_linear_layer_follows_hand_arithmetic() -> None:
    roof = eo.roofline(LINEAR, board(bandwidth=1e9, fp32=4e9))
    point = roof.total
    assert (point.macs, point.flops, point.bytes_read, point.bytes_written) == (MACS, FLOPS, READ, WRITTEN)
    assert point.intensity == FLOPS / (READ + WRITTEN)
    assert roof.knee_flops_per_byte == 4e9 / 1e9
    assert point.memory_s == (READ + WRITTEN) / 1e9
    assert point.compute_s == FLOPS / 4e9
    # 928 bytes take 928 ns, 1056 operations 264 ns: memory is the limit, and compute waits for 72 % of the time.
    assert (point.bound, point.seconds) == ("memory", point.memory_s)
    assert point.bandwidth_utilization == 1.0
    assert point.compute_utilization == pytest.approx(264 / 928)
    assert point.attainable_flops_per_s == pytest.approx(FLOPS / (READ + WRITTEN) * 1e9)
    assert (point.overhead_s, point.is_lower_bound) == (None, False)


def test_a_slow_processor_makes_the_same_layer_compute_bound() -> None:
    point = eo.roofline(LINEAR, board(bandwidth=1e9, fp32=1e9)).total
    assert (point.bound, point.seconds, point.attainable_flops_per_s) == ("compute", FLOPS / 1e9, 1e9)


def test_exactly_at_the_knee_compute_is_the_limit() -> None:
    point = eo.roofline(LINEAR, board(bandwidth=READ + WRITTEN, fp32=FLOPS)).total
    assert (point.bound, point.seconds) == ("compute", 1.0)


def test_overhead_is_added_per_operator_and_can_be_the_limit() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Sigmoid())
    roof = eo.roofline(eo.profile(model, (4, 16)), board(bandwidth=1e9, overhead_s=1e-5, fp32=4e9))
    linear, sigmoid = roof.layers
    # The sigmoid reads and writes 128 bytes.
    assert linear.seconds == pytest.approx(928e-9 + 1e-5)
    assert sigmoid.seconds == pytest.approx(256e-9 + 1e-5)
    assert (linear.bound, roof.total.bound) == ("overhead", "overhead")
    assert roof.total.overhead_s == 2e-5
    # Fused, there is one operator to launch.
    assert roof.fused_total.overhead_s == 1e-5


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1)])
def test_bytes_and_peaks_follow_the_precision(precision: str, itemsize: int) -> None:
    spec = board(fp32=4e9, fp16=8e9, bf16=6e9, int8=16e9)
    roof = eo.roofline(LINEAR, spec, precision)  # type: ignore[arg-type]
    assert roof.total.bytes_moved == itemsize * (64 + 128 + 8 + 32)
    assert roof.peak_flops_per_s == spec.peak("cpu", precision)
    assert roof.total.flops == FLOPS


def test_a_half_model_is_as_large_at_fp32_as_a_float_model() -> None:
    half = eo.profile(nn.Linear(16, 8).half(), [((4, 16), "float16")])
    assert half.totals.bytes_read == READ // 2
    assert eo.roofline(half, board(fp32=1e9)).total.bytes_read == READ
    assert eo.roofline(half, board(fp16=1e9), "fp16").total.bytes_read == READ // 2


def test_indices_of_an_embedding_keep_their_size() -> None:
    profile = eo.profile(nn.Embedding(1000, 8), [((2, 5), "int64")])
    # 10 rows of 8 values read and written, 10 indices of 8 bytes read: only the rows shrink.
    single = eo.roofline(profile, board(fp32=1e9)).total
    quarter = eo.roofline(profile, board(int8=1e9), "int8").total
    assert (single.bytes_read, single.bytes_written) == (10 * 8 * 4 + 80, 10 * 8 * 4)
    assert (quarter.bytes_read, quarter.bytes_written) == (10 * 8 + 80, 10 * 8)


def test_masks_and_integer_results_keep_their_size() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(mask, 0.0).argmax(-1)

    profile = eo.profile(Masked(), [(4, 8), ((4, 8), "bool")])
    point = eo.roofline(profile, board(fp16=1e9), "fp16").total
    # masked_fill reads 32 halves and 32 booleans and writes 32 halves; argmax reads 32 halves, writes 4 int64.
    assert point.bytes_read == (64 + 32) + 64
    assert point.bytes_written == 64 + 4 * 8


def test_arithmetic_on_integers_is_movement() -> None:
    class Positions(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids + 1

    point = eo.roofline(eo.profile(Positions(), [((4, 8), "int64")]), board()).total
    assert (point.compute_s, point.seconds, point.bound) == (0.0, 2 * 32 * 8 / 1e9, "memory")


def test_products_of_integers_run_at_the_int8_peak() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch._int_mm(x, y)

    profile = eo.profile(Product(), [((32, 16), "int8"), ((16, 8), "int8")])
    point = eo.roofline(profile, board(fp32=1e9, int8=4e9)).total
    assert point.compute_s == 2 * 32 * 16 * 8 / 4e9


def test_layers_add_up_to_the_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    roof = eo.roofline(eo.profile(model, (2, 3, 8, 8)), board(fp32=5e9))
    for layers, total in ((roof.layers, roof.total), (roof.fused_layers, roof.fused_total)):
        assert total.seconds == pytest.approx(sum(layer.seconds or 0 for layer in layers))
        assert total.bytes_moved == sum(layer.bytes_moved for layer in layers)
        assert total.macs == sum(layer.macs for layer in layers)
        assert total.passes == sum(layer.passes for layer in layers)
    assert [layer.kind for layer in roof.layers] == ["Conv2d", "BatchNorm2d", "ReLU", "Linear"]


def test_operators_follow_each_other_so_their_times_add() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x).sigmoid()

    # The product takes 2x64^3 operations and moves 3x64x64 floats; the sigmoid 4x64x64 and 2x64x64 floats.
    point = eo.roofline(eo.profile(Two(), (64, 64)), board(bandwidth=1e9, fp32=4e9)).total
    product_s, sigmoid_s = 2 * 64**3 / 4e9, 2 * 4 * 64 * 64 / 1e9
    assert product_s > 3 * 4 * 64 * 64 / 1e9
    assert point.seconds == pytest.approx(product_s + sigmoid_s)
    assert point.bound == "compute"


@settings(max_examples=25, deadline=None)
@given(
    bandwidth=st.floats(1e6, 1e12),
    peak=st.floats(1e6, 1e14),
    sizes=st.tuples(*[st.integers(1, 64)] * 3),
    precision=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
)
def test_twice_the_bandwidth_and_compute_take_half_the_time(
    bandwidth: float, peak: float, sizes: tuple[int, int, int], precision: str
) -> None:
    rows, inner, outer = sizes
    profile = eo.profile(nn.Sequential(nn.Linear(inner, outer), nn.ReLU()), (rows, inner))
    once = eo.roofline(profile, board(bandwidth, overhead_s=0, **{precision: peak}), precision)  # type: ignore[arg-type]
    twice = eo.roofline(profile, board(2 * bandwidth, overhead_s=0, **{precision: 2 * peak}), precision)  # type: ignore[arg-type]
    for slow, fast in zip((*once.layers, once.fused_total), (*twice.layers, twice.fused_total), strict=True):
        assert slow.seconds is not None and fast.seconds == pytest.approx(slow.seconds / 2)
        assert slow.bound == fast.bound
    assert once.total.seconds is not None and once.fused_total.seconds is not None
    assert once.fused_total.seconds <= once.total.seconds * (1 + 1e-9)
    for point in (*once.layers, once.total, once.fused_total):
        assert point.bandwidth_utilization is not None and point.bandwidth_utilization <= 1 + 1e-9
        assert point.compute_utilization is not None and point.compute_utilization <= 1 + 1e-9


def test_without_a_bandwidth_everything_is_unknown_but_the_counts() -> None:
    roof = eo.roofline(LINEAR, board(bandwidth=None, fp32=1e9))
    assert (roof.bandwidth, roof.knee_flops_per_byte) == (None, None)
    assert (roof.total.bound, roof.total.seconds, roof.total.memory_s) == ("unknown", None, None)
    assert roof.total.attainable_flops_per_s is None
    assert roof.total.compute_s == FLOPS / 1e9
    assert roof.total.bytes_moved == READ + WRITTEN
    assert "unknown (not measured)" in roof.remarks[0]
    assert roof.total.bandwidth_utilization is None


def test_without_a_peak_at_this_precision_no_other_is_borrowed() -> None:
    roof = eo.roofline(LINEAR, board(fp32=1e9, gpu={"int8": 8e9}), "int8")
    assert (roof.total.bound, roof.total.seconds, roof.total.compute_s) == ("unknown", None, None)
    assert roof.total.memory_s == 232 / 1e9
    assert any("in int8 (cpu) is unknown" in remark and "int8 (gpu)" in remark for remark in roof.remarks)
    assert eo.roofline(LINEAR, board(fp32=1e9, gpu={"int8": 8e9}), "int8", engine="gpu").total.seconds is not None


def test_movement_needs_no_peak() -> None:
    class Padded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x])

    point = eo.roofline(eo.profile(Padded(), (4, 8)), board()).total
    assert (point.bound, point.seconds) == ("memory", 4 * (64 + 64) / 1e9)


def test_unpriced_operators_make_a_lower_bound_and_alone_an_unknown() -> None:
    @torch.library.custom_op("roofline_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @opaque.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Opaque(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.roofline_tests.opaque(x)  # type: ignore[no-any-return]

    roof = eo.roofline(eo.profile(nn.Sequential(nn.Linear(16, 8), Opaque()), (4, 16)), board(fp32=4e9))
    linear, alone = roof.layers
    assert (linear.is_lower_bound, linear.bound) == (False, "memory")
    assert (alone.is_lower_bound, alone.bound, alone.seconds) == (True, "unknown", None)
    assert (roof.total.is_lower_bound, roof.total.seconds) == (True, linear.seconds)
    assert any("lower bounds" in remark for remark in roof.remarks)


@pytest.mark.parametrize(
    ("name", "engine", "method", "bytes_per_s"),
    [
        ("raspberry-pi-4", "cpu", "stream_copy", 5.5273e9),
        ("raspberry-pi-zero-2-w", "cpu", "memcpy", 2 * 1.30e9),  # a copy reads and writes
        ("jetson-nano", "gpu", "datasheet", 25.6e9),  # what the CPU copies is not what the GPU moves
        ("jetson-nano", "cpu", "memcpy", 2 * 3.73e9),
        ("desktop-ddr4", "cpu", "datasheet", 51.2e9),
    ],
)
def test_the_bandwidth_is_measured_on_the_engine_before_it_is_on_paper(
    name: str, engine: str, method: str, bytes_per_s: float
) -> None:
    used = used_bandwidth(eo.device(name), engine)
    assert used is not None
    assert (used.method, used.bytes_per_s) == (method, bytes_per_s)
    assert used.figure.source and used.reading


def test_a_bandwidth_of_another_engine_is_not_borrowed() -> None:
    known = eo.device("jetson-orin-nano")
    measured = replace(known, bandwidths=tuple(item for item in known.bandwidths if item.engine == "cpu"))
    assert used_bandwidth(measured, "gpu") is None
    assert used_bandwidth(measured, "cpu") is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of fp32, fp16, bf16, int8"),
        ({"engine": "tpu"}, "engine is 'tpu'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        eo.roofline(LINEAR, "raspberry-pi-4", **arguments)  # type: ignore[arg-type]


def test_a_profile_counted_as_another_tool_counts_is_refused() -> None:
    with pytest.raises(InvalidInput, match="counts as thop does"):
        eo.roofline(eo.profile(nn.Linear(4, 4), (1, 4), convention="thop"), "raspberry-pi-4")


def test_a_roofline_goes_through_json_and_back() -> None:
    roof = eo.roofline(LINEAR, "raspberry-pi-4")
    assert from_plain(Roofline, to_plain(roof)) == roof
