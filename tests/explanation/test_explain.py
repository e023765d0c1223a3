"""Explanations: every sentence follows from figures that the test puts in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt import compress
from edge_opt.explanation.explain import ModelVariant
from edge_opt.measuring.statistics import latency_of
from edge_opt.model import SmallCNN
from edge_opt.records.conversions import Agreement, Converted, Kernel, LayerPrecision, RunnerProfile
from edge_opt.records.measurements import Latency
from edge_opt.records.profiles import ModelProfile

SHAPE = (1, 1, 28, 28)


def static(*channels: int) -> ModelProfile:
    return eo.profile(SmallCNN(*channels), SHAPE)


def steady(seconds: float) -> Latency:
    return latency_of([seconds] * 50, [seconds] * 50, batch_size=1, target_precision=0.02)


def timed(**seconds: float) -> RunnerProfile:
    """Kernels by module; `added` stands for a kernel of the runtime's own."""
    kernels = [
        Kernel(name, "DequantizeLinear", "int8", seconds=spent)
        if name == "added"
        else Kernel(name, "Conv", "fp32", name, (name,), spent)
        for name, spent in seconds.items()
    ]
    return RunnerProfile("onnxruntime", tuple(kernels), 1)


def conversion(precision: Any, **precisions: str) -> Converted:
    return Converted(
        precision=precision,
        runtime="onnxruntime",
        effective_precision="+".join(sorted(set(precisions.values()), key=lambda name: name != precision)),
        layers=tuple(
            LayerPrecision(path, "Conv", found, "" if found == precision else "no kernel", path)
            for path, found in precisions.items()
        ),
        kernels=(),
        agreement=Agreement(0.0, 0.0, 1.0, 1.0, 1, 1, "example inputs"),
        size_bytes=1,
        original_bytes=4,
        path="model.onnx",
        inputs=("x",),
        outputs=("output",),
        remarks=(),
    )


def reason(found: Any, topic: str) -> Any:
    return next(item for item in found.reasons if item.topic == topic)


def topics(found: Any) -> list[str]:
    return [item.topic for item in found.reasons]


def test_without_times_nothing_is_said_about_time() -> None:
    found = eo.explain(static(), static(8, 16))
    # conv1 28x28x16x9, conv2 14x14x32x16x9, classifier 1568x10; halved channels
    before = 784 * 16 * 9 + 196 * 32 * 16 * 9 + 1568 * 10
    after = 784 * 8 * 9 + 196 * 16 * 8 * 9 + 784 * 10
    assert found.macs_ratio == after / before
    assert found.comparison is None and "nothing is said about speed" in found.headline
    assert f"MACs fell by {(1 - after / before) * 100:.1f} %" in found.headline
    assert all(row.seconds_before is None and row.saved_s is None for row in found.layers)
    assert not {"overhead", "memory", "shortfall", "slower layers"} & set(topics(found))
    assert topics(found)[-1] == "not measured"


def test_a_layer_that_lost_macs_and_not_time_is_named() -> None:
    found = eo.explain(
        ModelVariant(static(), latency=steady(1e-3), kernels=timed(conv1=100e-6, conv2=800e-6, classifier=50e-6)),
        ModelVariant(
            static(16, 16), latency=steady(0.9e-3), kernels=timed(conv1=100e-6, conv2=700e-6, classifier=50e-6)
        ),
    )
    short = reason(found, "shortfall")
    # conv2 lost half of its MACs: in proportion it would take 400 of its 800 us, and takes 700
    assert short.layers[0] == "conv2" and short.seconds >= 300e-6
    assert "conv2 (MACs -50 %, time -12 %" in short.sentence
    # conv1 costs what it did: 100 of 850 us
    assert reason(found, "unchanged layers").layers == ("conv1",)
    assert "100 µs, 11.8 %" in reason(found, "unchanged layers").sentence
    assert found.comparison is not None and found.comparison.ratio == pytest.approx(0.9)


def test_reasons_stand_in_order_of_what_they_cost() -> None:
    found = eo.explain(
        ModelVariant(static(), latency=steady(1e-3), kernels=timed(conv1=100e-6, conv2=800e-6)),
        ModelVariant(static(16, 16), latency=steady(1e-3), kernels=timed(conv1=100e-6, conv2=700e-6, added=30e-6)),
    )
    costs = [item.seconds for item in found.reasons if item.seconds is not None]
    assert costs == sorted(costs, reverse=True) and 30e-6 in costs
    assert "1 of 3 kernels (1 DequantizeLinear), 30.0 µs, 3.6 %" in reason(found, "conversions").sentence


def test_layers_that_became_slower_in_int8_are_named_and_float_ones_counted() -> None:
    profile = static()
    found = eo.explain(
        ModelVariant(
            profile,
            conversion("fp32", conv1="fp32", conv2="fp32", classifier="fp32"),
            steady(30e-6),
            timed(conv1=5e-6, conv2=18e-6, classifier=4e-6),
        ),
        ModelVariant(
            profile,
            conversion("int8", conv1="int8", conv2="int8", classifier="fp32"),
            steady(40e-6),
            timed(conv1=22e-6, conv2=10e-6, classifier=4e-6, added=9e-6),
        ),
    )
    assert found.comparison is not None and found.comparison.verdict == "slower"
    assert found.headline.startswith("It takes 1.33 times as long")
    assert found.reasons[0].topic == "time" and "1 layer by 8.00 µs, conv2 18.0 µs to 10.0 µs" in found.sentences[1]
    slower = reason(found, "slower layers")
    assert slower.layers == ("conv1",) and slower.seconds == pytest.approx(17e-6)
    kept = reason(found, "float layers")
    # the classifier's 15680 of 1031744 MACs
    assert "1 of 3 layers with 1.5 % of the MACs, classifier (no kernel)" in kept.sentence
    rows = {row.path: row for row in found.layers}
    assert rows["conv1"].bytes_after == rows["conv1"].bytes_before / 4
    assert rows["classifier"].bytes_after == rows["classifier"].bytes_before


def test_channels_beside_the_vector_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.explanation.explain.vector_bytes", lambda: 32)
    found = eo.explain(static(), static(12, 16))
    odd = reason(found, "vector width")
    # 32 bytes hold 8 numbers; 12 channels take two vectors of 8, 16 fill theirs, 10 classes did not change
    assert odd.layers == ("conv1",) and "conv1 uses 12 of 16; prune in steps of 8" in odd.sentence


def test_a_precision_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.measuring.machine.cpu_flags", lambda: frozenset({"avx2"}))
    profile = static()
    found = eo.explain(profile, ModelVariant(profile, conversion("fp16", conv1="fp16")))
    assert "no instructions for fp16" in reason(found, "slow precision").sentence
    assert "from torch to onnxruntime" in reason(found, "runtime").sentence


def test_small_and_memory_bound_layers_by_the_rates_seen() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    profile = eo.profile(model, (1, 16, 16, 16))
    times = RunnerProfile(
        "onnxruntime",
        # The convolution has the best FLOP rate, the ReLU the best byte rate: each is bound by what it is best at.
        tuple(
            Kernel(path, "Conv", "fp32", path, (path,), spent)
            for path, spent in (("0", 1e-4), ("1", 1e-6), ("2", 2e-6))
        ),
        1,
    )
    found = eo.explain(ModelVariant(profile, kernels=times), ModelVariant(profile, kernels=times))
    assert {row.path: row.bottleneck for row in found.layers}["0"] == "compute"
    assert {row.path: row.bottleneck for row in found.layers}["1"] == "memory"


def test_layers_of_one_model_only_are_told() -> None:
    one = eo.profile(nn.Sequential(nn.Linear(4, 4)), (1, 4))
    two = eo.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (1, 4))
    assert "There only after: 1 layer, 1" in reason(eo.explain(one, two), "structure").sentence
    assert "There only before: 1 layer, 1" in reason(eo.explain(two, one), "structure").sentence


def test_a_disturbed_measurement_is_said() -> None:
    noisy = replace(steady(1e-3), is_noisy=True, remarks=("samples scatter",))
    found = eo.explain(ModelVariant(static(), latency=noisy), ModelVariant(static(), latency=steady(1e-3)))
    assert "first model was disturbed: samples scatter" in reason(found, "noise").sentence


def test_the_table_has_one_row_per_layer() -> None:
    found = eo.explain(static(), static(8, 16))
    table = found.to_dataframe()
    assert list(table["path"]) == [row.path for row in found.layers]
    assert table["macs_after"].sum() == static(8, 16).totals.macs
    assert str(found).splitlines()[0] == found.headline and len(found.sentences) == 1 + len(found.reasons)


def test_a_real_int8_model_is_explained_by_its_kernels() -> None:
    torch.manual_seed(0)
    model, x = SmallCNN(), torch.randn(1, 1, 28, 28)
    exported = [
        compress.convert(model, SHAPE, precision, calibration=[torch.randn(8, 1, 28, 28)])
        for precision in ("fp32", "int8")
    ]
    runners = [compress.open_runner(done) for done in exported]
    latencies = [compress.measure_runner(runner, x, repeats=5) for runner in runners]
    kernels = [compress.profile_runner(runner, x, repeats=5) for runner in runners]
    variants = [ModelVariant(static(), *facts) for facts in zip(exported, latencies, kernels, strict=True)]
    found = eo.explain(*variants)
    rows = {row.path: row for row in found.layers}
    assert [rows[path].precision for path in ("conv1", "pool1", "conv2", "classifier")] == ["int8"] * 4
    assert rows["relu1"].bytes_after == 0  # fused into conv1
    assert all(rows[path].seconds_after for path in ("conv1", "conv2", "classifier"))
    assert "QuantizeLinear" in reason(found, "conversions").sentence


def test_layers_claim_nothing_where_the_whole_shows_no_difference() -> None:
    profile = static(16, 32)
    before = ModelVariant(profile, latency=steady(3e-3), kernels=timed(conv1=2e-3, conv2=1e-3))
    after = ModelVariant(profile, latency=steady(3e-3), kernels=timed(conv1=1e-3, conv2=2e-3))
    same = eo.explain(before, after)
    assert same.comparison is not None and same.comparison.verdict == "equal"
    assert not {"time", "slower layers", "shortfall"} & {reason.topic for reason in same.reasons}
    faster = eo.explain(before, replace(after, latency=steady(1e-3)))
    assert {"time", "slower layers"} <= {reason.topic for reason in faster.reasons}


def test_nothing_contradicts_the_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.measuring.machine.cpu_flags", lambda: frozenset({"avx2"}))
    profile = static()
    before = ModelVariant(profile, latency=steady(100e-6), kernels=timed(conv1=60e-6, conv2=30e-6))
    converted = conversion("int8", conv1="int8", conv2="int8")
    faster = ModelVariant(profile, converted, steady(55e-6), timed(conv1=30e-6, conv2=20e-6))
    assert "slow precision" not in topics(eo.explain(before, faster))
    slower = replace(faster, latency=steady(200e-6))
    assert "slow precision" in topics(eo.explain(before, slower))
    # the layers became faster by 40 us and the whole slower by 100 us: they are not compared
    assert not {"time", "slower layers"} & set(topics(eo.explain(before, slower)))
