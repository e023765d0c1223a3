"""Ratios of two variants on one target: their value is that of the estimates, their interval is narrower."""

from __future__ import annotations

import math

import pytest
from torch import nn

import edge_opt as eo
from edge_opt.boards.ratios import WIDTH_NOISE, WIDTH_QUANTILE, probability_below, ratio_width, variant_on
from edge_opt.boards.targets import resolve_target
from edge_opt.errors import InvalidInput

PI = "raspberry-pi-4"


def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def wide() -> eo.ModelProfile:
    return eo.profile(net(64), (1, 3, 64, 64))


@pytest.fixture(scope="module")
def narrow() -> eo.ModelProfile:
    return eo.profile(net(32), (1, 3, 64, 64))


def test_the_ratio_is_that_of_the_two_estimates(wide: eo.ModelProfile, narrow: eo.ModelProfile) -> None:
    ratio = eo.latency_ratio(wide, narrow, PI, precision="int8", before_precision="fp32")
    before, after = eo.estimate(wide, PI).seconds, eo.estimate(narrow, PI, "int8").seconds
    assert before is not None and after is not None
    assert (ratio.before_s, ratio.after_s) == (before, after)
    assert ratio.ratio == after / before


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_ratio_is_surer_than_the_times(wide: eo.ModelProfile, narrow: eo.ModelProfile, precision: str) -> None:
    ratio = eo.latency_ratio(wide, narrow, PI, precision=precision, before_precision="fp32")
    sides = eo.estimate(wide, PI), eo.estimate(narrow, PI, precision)
    independent = math.hypot(*(math.log(side.high / side.low) / 2 for side in sides))
    assert 0 < math.log(ratio.high / ratio.low) / 2 < independent


def test_a_variant_over_itself_is_exactly_one(wide: eo.ModelProfile) -> None:
    ratio = eo.latency_ratio(wide, wide, PI)
    assert (ratio.low, ratio.ratio, ratio.high) == (1.0, 1.0, 1.0)
    assert not ratio.is_decided


def test_nets_with_the_same_shares_differ_by_the_noise_alone() -> None:
    # Twice the same layers: every class has the same share, so that the distance is zero.
    target = resolve_target(PI)
    assert target.platform is not None
    one = variant_on(eo.profile(nn.Sequential(nn.Conv2d(8, 8, 3)), (1, 8, 20, 20)), target)
    twice = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, padding=1))
    two = variant_on(eo.profile(twice, (1, 8, 20, 20)), target)
    assert one is not None and two is not None
    width, basis = ratio_width(one, two)
    noise = WIDTH_QUANTILE * WIDTH_NOISE * target.platform.noise_ratio
    assert noise <= width < 1.5 * noise
    assert basis == "one platform"


def test_times_of_two_runtimes_are_independent(wide: eo.ModelProfile) -> None:
    pair = [variant_on(wide, resolve_target(PI, runtime=name, threads=4)) for name in ("ncnn", "xnnpack")]
    assert pair[0] is not None and pair[1] is not None
    width, basis = ratio_width(pair[0], pair[1])
    assert width == math.hypot(pair[0].time.width, pair[1].time.width)
    assert basis == "independent"


def test_a_target_without_a_time_is_refused(wide: eo.ModelProfile) -> None:
    with pytest.raises(InvalidInput, match="no time in fp32"):
        eo.latency_ratio(wide, wide, "hailo-8")


@pytest.mark.parametrize(("t", "probability"), [(0.7407, 0.75), (1.5332, 0.9), (2.1318, 0.95), (3.7469, 0.99)])
def test_probabilities_are_those_of_students_t_with_four_degrees_of_freedom(t: float, probability: float) -> None:
    # The interval of 1 from 1/e to e is 2.1318 standard units wide on each side; quantiles are those of printed tables.
    limit = math.exp(t / 2.1318)
    below = probability_below(limit, 1.0, 1 / math.e, math.e)
    above = probability_below(1 / limit, 1.0, 1 / math.e, math.e)
    assert below == pytest.approx(probability, abs=1e-4)
    assert above == pytest.approx(1 - probability, abs=1e-4)


def test_an_open_interval_has_no_probability() -> None:
    assert probability_below(2.0, 1.0, 0.5, None) is None
    assert probability_below(2.0, 1.0, 1.0, 1.0) == 1.0
