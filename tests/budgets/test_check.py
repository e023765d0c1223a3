"""A check says which budgets are kept, which are not and why, and what noise leaves open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.budgets import PROFILE_METRICS
from edge_opt.budgets.budget_metrics import parse_budget, parse_increase
from edge_opt.budgets.check import check_profile
from edge_opt.errors import BudgetError, InvalidInput, UnreadableProfile
from edge_opt.records.measurements import Comparison, Interval
from edge_opt.records.profiles import CheckResult, ModelProfile
from edge_opt.report.check_sheets import as_junit, document
from edge_opt.report.sheets import sheet_markdown, sheet_of

SHAPE = (1, 3, 8, 8)


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 10))


def macs(width: int) -> int:
    # 8 x 8 outputs of 3 x 3 x 3 weights for each channel; then all of them for each of 10 classes
    return 64 * 27 * width + 64 * width * 10


@pytest.fixture(scope="module")
def small() -> ModelProfile:
    return eo.profile(net(8), SHAPE, name="small")


@pytest.fixture(scope="module")
def large() -> ModelProfile:
    return eo.profile(net(16), SHAPE, name="large")


@pytest.fixture(scope="module")
def measured() -> ModelProfile:
    return eo.profile(net(8), SHAPE, name="measured", measure={"min_time_s": 0.02, "layers": False})


def with_latency(profile: ModelProfile, median_s: float, low: float, high: float) -> ModelProfile:
    measurement = profile.measurement
    assert measurement is not None
    latency = replace(measurement.latency, median_s=median_s, median_interval_s=Interval(low, high))
    return replace(profile, measurement=replace(measurement, latency=latency))


def outcomes(result: CheckResult) -> list[str]:
    return [found.outcome for found in result.budgets]


def test_a_limit_is_kept_up_to_the_last_mac(small: ModelProfile) -> None:
    result = eo.check(small, f"macs <= {macs(8)}", f"macs < {macs(8)}", f"macs <= {macs(8) - 1}", "coverage >= 100%")
    assert outcomes(result) == ["holds", "broken", "broken", "holds"]
    assert [found.budget.text for found in result.failures] == [f"macs < {macs(8)}", f"macs <= {macs(8) - 1}"]
    assert not result.passed


def test_without_a_baseline_the_largest_layers_are_named(small: ModelProfile) -> None:
    (found,) = eo.check(small, "macs <= 1").budgets
    assert [(layer.path, layer.value, layer.baseline) for layer in found.layers] == [
        ("0", 64 * 27 * 8, None),
        ("3", 64 * 8 * 10, None),
    ]


def test_with_a_baseline_the_layers_that_grew_are_named(small: ModelProfile, large: ModelProfile) -> None:
    (found,) = eo.check(large, "macs <= 1", baseline=small).budgets
    assert found.baseline == macs(8) and found.value == macs(16)
    assert [(layer.path, layer.baseline, layer.value) for layer in found.layers] == [
        ("0", 64 * 27 * 8, 64 * 27 * 16),
        ("3", 64 * 8 * 10, 64 * 16 * 10),
    ]


def test_an_increase_is_a_share_or_an_amount(small: ModelProfile, large: ModelProfile) -> None:
    growth = macs(16) - macs(8)
    allowed = {"macs": f"{growth}", "flops": "99%", "params": 1.1, "peak_memory": "5%"}
    result = eo.check(large, baseline=small, max_increase=allowed)
    # everything but the ten biases of the classes doubles
    assert outcomes(result) == ["holds", "broken", "holds", "broken"]
    assert result.budgets[1].budget.limit == pytest.approx(small.totals.flops * 1.99)
    assert result.budgets[1].budget.text == "max increase flops=99%"


def test_nothing_grew_is_no_increase(small: ModelProfile) -> None:
    assert eo.check(small, baseline=small, max_increase={"peak_memory": 0, "macs": "0%"}).passed


@pytest.mark.parametrize(
    ("text", "character", "words"),
    [
        ("peak_memory", "", "expected ="),
        ("peak_memory=", "", "peak_memory_mb=1"),
        ("peak_memory=5", "", "expected a percentage"),
        ("peak=5%", "p", "closest: "),
        ("macs=x", "x", "expected a number"),
        ("macs=5 % more", "%", "expected k, M, G or T"),
        ("macs=5M more", "m", "nothing more"),
        ("=5%", "=", "name of a metric"),
    ],
)
def test_an_increase_that_cannot_be_read_is_pointed_at(text: str, character: str, words: str) -> None:
    with pytest.raises(BudgetError, match=words) as caught:
        parse_increase(text)
    assert text[caught.value.position : caught.value.position + 1] == character


@pytest.mark.parametrize(
    ("limit_ms", "outcome"), [(9, "broken"), (10, "undecided"), (11, "undecided"), (12, "holds"), (13, "holds")]
)
def test_an_interval_that_holds_the_limit_decides_nothing(measured: ModelProfile, limit_ms: int, outcome: str) -> None:
    profile = with_latency(measured, 0.011, 0.010, 0.012)
    text = f"latency_ms <= {limit_ms}"
    result = eo.check(profile, text)
    assert outcomes(result) == [outcome]
    assert result.passed == (outcome != "broken")
    assert eo.check(profile, text, on_undecided="fail").passed == (outcome == "holds")


def test_an_increase_of_latency_allows_for_noise(measured: ModelProfile) -> None:
    before, after = with_latency(measured, 0.010, 0.0099, 0.0101), with_latency(measured, 0.0104, 0.0103, 0.0105)
    noisy = Comparison("equal", 1.04, Interval(0.98, 1.10), "wall")
    increases = [parse_increase(text) for text in ("latency=5%", "latency=11%", "latency_ms=0.5")]
    result = check_profile(after, [], baseline=before, increases=increases, latency=noisy)
    # 9.8 to 11.0 ms against 10.5, 11.1 and 10.5
    assert outcomes(result) == ["undecided", "holds", "undecided"]
    slower = Comparison("slower", 1.2, Interval(1.1, 1.3), "wall")
    assert outcomes(check_profile(after, [], baseline=before, increases=increases[:1], latency=slower)) == ["broken"]


def test_a_latency_has_not_increased_over_itself(measured: ModelProfile) -> None:
    (found,) = eo.check(measured, baseline=measured, max_increase={"latency": "0%"}).budgets
    assert found.outcome == "undecided" and found.value == found.baseline


class Unpriced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(x @ x)


def test_a_lower_bound_never_keeps_a_ceiling() -> None:
    profile = eo.profile(Unpriced(), (4, 4))
    assert profile.totals.is_lower_bound
    result = eo.check(profile, "macs <= 1k", "macs <= 1", "macs >= 64", "macs >= 65", "params <= 0", "unpriced <= 0")
    # 4 x 4 x 4 MACs are known, and the decomposition's come on top
    assert outcomes(result) == ["undecided", "broken", "holds", "undecided", "holds", "broken"]
    assert "lower bound" in result.budgets[0].reason
    assert "64 or more" in str(result)


def test_a_figure_that_is_not_known_keeps_no_budget(small: ModelProfile) -> None:
    result = eo.check(small, "latency_ms <= 1000", "energy_j <= 1000")
    assert outcomes(result) == ["unknown", "unknown"]
    assert not result.passed
    assert "measure=True" in result.budgets[0].reason


def test_a_model_is_measured_when_a_budget_needs_it() -> None:
    model = net(8)
    result = eo.check(model, "latency_s <= 60", inputs=SHAPE, measure={"min_time_s": 0.02, "layers": False})
    assert outcomes(result) == ["holds"]
    assert outcomes(eo.check(model, "latency_s <= 60", inputs=SHAPE, measure=False)) == ["unknown"]


@pytest.mark.parametrize("name", PROFILE_METRICS)
def test_every_metric_has_a_figure_or_says_that_it_is_not_known(name: str, measured: ModelProfile) -> None:
    value = PROFILE_METRICS[name].value(measured)
    predicted = ("predicted", "cpu_layers", "ram", "flash")
    families = ("energy", "measured_memory", *predicted, "train_flops", "train_peak_memory")
    assert (value is None) <= (PROFILE_METRICS[name].family in families)
    (found,) = eo.check(measured, f"{name} >= 0").budgets
    assert found.outcome == ("unknown" if value is None else "holds")


def with_prediction(
    profile: ModelProfile, seconds: float | None, low: float | None, high: float | None
) -> ModelProfile:
    found = eo.profile(profile, target="raspberry-pi-4").prediction
    assert found is not None
    return replace(profile, predictions=(replace(found, seconds=seconds, low=low, high=high),))


@pytest.mark.parametrize(
    ("limit_ms", "high", "outcome"),
    [(9, 0.008, "holds"), (8, 0.008, "holds"), (5, 0.008, "undecided"), (1, 0.008, "broken"), (9, None, "undecided")],
)
def test_the_interval_of_a_prediction_decides(
    small: ModelProfile, limit_ms: int, high: float | None, outcome: str
) -> None:
    (found,) = eo.check(with_prediction(small, 0.004, 0.002, high), f"predicted_ms <= {limit_ms}").budgets
    assert (found.outcome, found.value, found.low) == (outcome, 4, 2)
    assert ("calibrate the target" in found.reason) == (outcome == "undecided")


def test_a_prediction_that_is_open_above_says_from_where(small: ModelProfile) -> None:
    shown = str(eo.check(with_prediction(small, 0.004, 0.002, None), "predicted_ms <= 1"))
    assert "4.00 ms  2.00 ms or more" in shown
    assert ["0", "Conv2d", "51.0", "µs"] in [line.split() for line in shown.splitlines()]  # its predicted part


def test_a_model_and_a_saved_profile_are_predicted_for_a_target(small: ModelProfile, tmp_path: Path) -> None:
    path = small.save(tmp_path / "small.json")
    found = [
        eo.check(subject, "predicted_us > 0", inputs=SHAPE, target="jetson-nano", precision="fp16").budgets[0].value
        for subject in (net(8), small, path)
    ]
    expected = eo.profile(net(8), SHAPE, target="jetson-nano", precision="fp16").prediction
    assert expected is not None and expected.seconds is not None
    assert found == [pytest.approx(expected.seconds * 1e6)] * 3


def test_what_was_not_predicted_keeps_no_budget(small: ModelProfile) -> None:
    (found,) = eo.check(small, "predicted_ms <= 1000").budgets
    assert found.outcome == "unknown" and "--target" in found.reason
    (found,) = eo.check(with_prediction(small, None, None, None), "predicted_ms <= 1000").budgets
    assert found.outcome == "unknown" and "raspberry-pi-4 gives no time" in found.reason
    with pytest.raises(InvalidInput, match="target="):
        eo.check(small, "macs <= 1G", precision="int8")


def test_a_baseline_is_predicted_for_the_same_target(small: ModelProfile, large: ModelProfile) -> None:
    other = eo.profile(small, target="jetson-nano")
    increases = {"predicted_ms": "5%"}
    here = eo.profile(large, target="raspberry-pi-4")
    (found,) = eo.check(here, baseline=other, max_increase=increases).budgets
    assert found.outcome == "unknown" and "no predicted_ms for raspberry-pi-4 (fp32, fitted)" in found.reason
    (found,) = eo.check(large, baseline=other, max_increase=increases, target="raspberry-pi-4").budgets
    assert found.baseline is not None and found.value is not None and found.baseline < found.value


def test_units_of_a_metric_agree(small: ModelProfile) -> None:
    resident = small.totals.param_bytes + small.totals.buffer_bytes + small.totals.input_bytes
    expected = resident + small.peak.live_bytes
    assert PROFILE_METRICS["peak_memory_bytes"].value(small) == expected
    assert PROFILE_METRICS["peak_memory_kb"].value(small) == expected / 1024
    assert PROFILE_METRICS["peak_memory_mb"].value(small) == expected / 1024**2


def test_a_saved_profile_and_a_model_will_do(small: ModelProfile, tmp_path: Path) -> None:
    path = small.save(tmp_path / "small.json")
    assert eo.check(path, "macs <= 1G").passed
    assert eo.check(str(path), "macs <= 1G", baseline=path).passed
    assert eo.check(net(8), "macs <= 1G", inputs=SHAPE).passed


def test_wrong_use_is_refused(small: ModelProfile, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no budget to check"):
        eo.check(small)
    with pytest.raises(InvalidInput, match="needs a baseline"):
        eo.check(small, max_increase={"macs": "5%"})
    with pytest.raises(InvalidInput, match="no inputs given"):
        eo.check(net(8), "macs <= 1")
    with pytest.raises(InvalidInput, match="must be a torch.nn.Module"):
        eo.check({}, "macs <= 1")
    with pytest.raises(BudgetError, match="unknown metric 'accuracy'"):
        eo.check(small, parse_budget("accuracy >= 0.9"))
    with pytest.raises(InvalidInput, match="on_undecided"):
        eo.check(small, "macs <= 1", on_undecided="maybe")  # type: ignore[arg-type]
    old = tmp_path / "old.json"
    old.write_text(small.save(tmp_path / "p.json").read_text().replace('"schema_version": 1', '"schema_version": 0'))
    with pytest.raises(UnreadableProfile, match="version 0.*1"):
        eo.check(small, "macs <= 1", baseline=old)


def test_the_text_has_value_limit_and_layers(small: ModelProfile, large: ModelProfile) -> None:
    text = str(eo.check(large, "macs <= 20k", "params <= 1M", "macs <= 30k", baseline=small))
    assert text.splitlines() == [
        "large: 2 of 3 budgets not kept",
        "      Budget         Value      Limit    Over  Baseline   Growth",
        "─" * 64,
        "FAIL  macs <= 20k   37.9 k  <= 20.0 k  +89.4%    18.9 k  +100.0%",
        "ok    params <= 1M  10.7 k  <= 1.00 M  −98.9%    5.35 k   +99.8%",
        "FAIL  macs <= 30k   37.9 k  <= 30.0 k  +26.3%    18.9 k  +100.0%",
        "",
        "layers that grew most",
        "Layer  Type               macs",
        "──────────────────────────────",
        "0      Conv2d  13.8 k → 27.6 k",
        "3      Linear  5.12 k → 10.2 k",
    ]


def test_a_limit_missed_by_one_is_seen(large: ModelProfile) -> None:
    # 27 x 16 x 64 of the convolution and 1024 x 10 of the linear layer
    text = str(eo.check(large, f"macs <= {27 * 16 * 64 + 10_240 - 1}"))
    assert "37,888" in text and "<= 37,887" in text


def test_markdown_has_a_line_for_each_budget(large: ModelProfile) -> None:
    text = sheet_markdown(sheet_of(eo.check(large, "macs <= 20k", "params <= 1M")))
    assert text.startswith("### large: 1 of 2 budgets not kept")
    assert r"| **FAIL** | macs \<= 20k | 37.9 k | \<= 20.0 k | +89.4% |" in text
    assert r"| ok | params \<= 1M | 10.7 k | \<= 1.00 M | −98.9% |" in text
    assert text.count("<details><summary>largest layers</summary>") == 1


def test_junit_has_a_case_for_each_budget(measured: ModelProfile) -> None:
    profile = with_latency(measured, 0.011, 0.010, 0.012)
    texts = ("macs <= 1", "params <= 1M", "latency_ms <= 11", "energy_j <= 1")
    root = ElementTree.fromstring(as_junit(eo.check(profile, *texts)))
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("4", "2", "1")
    cases = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert cases == {"macs <= 1": ["failure"], "params <= 1M": [], "latency_ms <= 11": ["skipped"],
                     "energy_j <= 1": ["failure"]}  # fmt: skip
    strict = ElementTree.fromstring(as_junit(eo.check(profile, *texts, on_undecided="fail")))
    assert (strict.get("failures"), strict.get("skipped")) == ("3", "0")


def test_files_by_suffix(small: ModelProfile, tmp_path: Path) -> None:
    result = eo.check(small, "macs <= 1")
    for suffix in ("json", "md", "xml", "html", "txt"):
        assert result.save(tmp_path / f"check.{suffix}").stat().st_size > 0
    with pytest.raises(InvalidInput, match=r"'\.pdf'.*\.html, \.json, \.md, \.txt, \.xml"):
        result.save(tmp_path / "check.pdf")
    plain = json.loads(document(result))
    assert (plain["passed"], plain["budgets"][0]["value"]) == (False, macs(8))


def test_memory_blames_weights_or_activations_whichever_matters_more() -> None:
    wide = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8))
    heavy = eo.check(eo.profile(wide, (1, 8)), "peak_memory_bytes <= 1").budgets[0]
    # 4 bytes for each weight and bias, far more than one sample's activations
    assert {(layer.path, layer.value) for layer in heavy.layers} == {("0", 4 * 9 * 512), ("1", 4 * 513 * 8)}
    hungry = eo.check(eo.profile(wide, (4096, 8)), "peak_memory_bytes <= 1").budgets[0]
    # 4 bytes for each of 512 features of 4096 samples, and 8 more while the second layer runs
    assert hungry.layers[0].value == 4 * 4096 * (512 + 8)


def test_a_training_step_has_budgets() -> None:
    # Two samples through 8·4 weights: forward and the gradient of the weights, 2 FLOPs per MAC each.
    budgets = ("train_flops <= 255", "train_peak_memory_bytes <= 1000")
    broken, kept = eo.check(nn.Linear(8, 4), *budgets, inputs=(2, 8), optimizer="sgd").budgets
    assert broken.outcome == "broken" and broken.value == 2 * 2 * (2 * 8 * 4)
    # Weights and biases, their gradients, the batch, the output, its sum, and the gradient of the sum.
    assert kept.outcome == "holds" and kept.value is not None and kept.value >= 2 * 36 * 4 + 2 * 8 * 4
    saved = eo.profile(nn.Linear(8, 4), (2, 8))
    (unknown,) = eo.check(saved, "train_flops <= 255").budgets
    assert unknown.outcome == "unknown" and "check the model itself" in unknown.reason
