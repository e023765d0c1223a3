"""Platforms that ship with fitted costs, and boards from a few typed times."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import published_nets as nets
import pytest
from torch import nn

import edge_opt as eo
from edge_opt.boards.class_costs import CLASSES, ModelWork
from edge_opt.boards.platform_file import (
    FOLDER,
    PRIORS,
    Platform,
    family_names,
    fitted_platforms,
    platform_family,
    platform_from,
    platform_text,
    tomllib,
)
from edge_opt.boards.platforms import FittedTime, fit_platform, fitted_time, suggest_next, work_of
from edge_opt.boards.targets import resolve_target
from edge_opt.errors import InvalidInput, UnknownDevice
from edge_opt.model import SmallCNN
from edge_opt.records.profiles import ModelProfile

BUNDLED = [
    nets.mobilenet_v1(1.0, 224),
    nets.mobilenet_v2(1.0, 224),
    nets.squeezenet_v11(224),
    nets.mobilenet_v3(True),
    nets.resnet50_v2(224),
    nets.mobilenet_v2(0.35, 160),
]


def platform_of(device: str, **asked: Any) -> Platform:
    platform = resolve_target(device, **asked).platform
    assert platform is not None
    return platform


def time_of(net: ModelWork | ModelProfile, platform: Platform) -> FittedTime:
    return fitted_time(work_of(net), platform)


def seconds_on(platform: Platform, net: ModelWork) -> float:
    return time_of(net, platform).seconds


def test_enough_platforms_give_a_time_in_float_and_in_int8() -> None:
    found = fitted_platforms()
    assert sum(platform.precision == "fp32" for platform in found) >= 60
    assert sum(platform.precision == "int8" for platform in found) >= 30
    assert all(seconds_on(platform, BUNDLED[0]) > 0 for platform in found)


def test_every_file_has_a_source_its_rows_and_a_name_of_its_own() -> None:
    found = fitted_platforms()
    assert len({platform.name for platform in found}) == len(found)
    files = {path.stem for path in FOLDER.glob("*_*.toml")}
    assert files <= {platform.name.replace("/", "_") for platform in found}
    for platform in found:
        assert platform.source
        assert platform.rows >= 2 or platform.origin == "core"
        assert platform.day
        assert platform.kind in family_names()
        assert np.all(np.isfinite(platform.costs.mean))
        assert np.all(np.diag(platform.costs.covariance) > 0)


def test_boards_that_people_ask_for_are_there_and_known_well() -> None:
    for device in ("raspberry-pi-zero-2-w", "raspberry-pi-4", "raspberry-pi-5", "rk3588"):
        for threads in (1, 4):
            platform = platform_of(device, runtime="ncnn", threads=threads)
            assert platform.error is not None
            assert platform.error < 0.25
            assert platform.factor is not None


@pytest.mark.parametrize("platform", fitted_platforms()[::25], ids=lambda platform: platform.name)
def test_a_file_reads_back_as_it_was(platform: Platform) -> None:
    again = platform_from(tomllib.loads(platform_text(platform)))
    assert np.allclose(again.costs.mean, platform.costs.mean, atol=1e-3)
    assert np.allclose(again.costs.covariance, platform.costs.covariance, atol=1e-3)
    assert replace(again, costs=platform.costs).name == platform.name
    assert (again.rows, again.notes, again.threads) == (platform.rows, platform.notes, platform.threads)


def test_the_priors_know_every_class() -> None:
    for kind in map(platform_family, family_names()):
        assert len(kind.prior.mean) == len(CLASSES)
        assert kind.spread.noise > 0
    assert (FOLDER / PRIORS).exists()


def test_layers_add_up_to_the_whole_and_bear_their_names() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    found = eo.estimate(profile, platform_of("raspberry-pi-4", threads=1))
    assert found.seconds and found.low and found.high
    assert math.fsum(layer.seconds or 0.0 for layer in found.layers) == found.seconds
    assert {"conv1", "conv2", "classifier"} <= {layer.path for layer in found.layers}
    assert found.low < found.seconds < found.high
    assert found.high / found.seconds == pytest.approx(found.seconds / found.low)
    assert any("only whole models" in remark for remark in found.remarks)


def test_a_faster_board_takes_less_and_more_threads_take_less() -> None:
    net = BUNDLED[0]
    slow, fast = (
        platform_of(device, runtime="ncnn", threads=4) for device in ("raspberry-pi-zero-2-w", "raspberry-pi-5")
    )
    assert seconds_on(fast, net) < seconds_on(slow, net) / 4
    one = platform_of("raspberry-pi-4", runtime="ncnn", threads=1)
    four = platform_of("raspberry-pi-4", runtime="ncnn", threads=4)
    assert seconds_on(four, net) < seconds_on(one, net)


def test_what_a_fit_has_never_seen_is_outside_and_wide() -> None:
    platform = platform_of("stm32h747", precision="int8")
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    found = time_of(eo.profile(layer, (1, 50, 64)), platform)
    assert found.outside
    assert found.high / found.low >= 7.0**2 * 0.999


def test_attention_on_ncnn_was_never_held_out_and_is_wide() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    found = time_of(eo.profile(layer, (1, 50, 64)), platform_of("raspberry-pi-5", runtime="ncnn", threads=4))
    assert "product_macs" in found.outside
    assert found.high / found.seconds >= 2.5 * 0.999


def test_a_recurrent_net_was_never_timed_and_is_wide_unless_little_of_the_time_is_its() -> None:
    platform = platform_of("raspberry-pi-5", runtime="ncnn", threads=4)
    found = time_of(eo.profile(nn.LSTM(40, 128, 2), (100, 1, 40)), platform)
    assert found.outside == ("recurrent layers",)
    assert found.high / found.seconds >= 7.0 * 0.999
    little = nn.Sequential(nn.Conv1d(256, 256, 9), nn.GRU(28, 4))
    assert time_of(eo.profile(little, (256, 36)), platform).outside == ()


def test_a_device_without_fit_names_the_closest() -> None:
    with pytest.raises(UnknownDevice, match="raspberry-pi-4"):
        platform_of("raspberry-pi-44")
    with pytest.raises(InvalidInput, match="ncnn"):
        platform_of("raspberry-pi-4", runtime="tensorrt")


def test_typed_times_of_a_known_board_give_its_times_back() -> None:
    truth = platform_of("raspberry-pi-5", runtime="ncnn", threads=4)
    times = [(net, seconds_on(truth, net)) for net in BUNDLED[:5]]
    mine = fit_platform("mine", times, threads=4)
    guess = time_of(BUNDLED[5], mine)
    assert guess.low < seconds_on(truth, BUNDLED[5]) < guess.high
    assert mine.origin == "typed"
    assert not mine.contradictions


def test_one_time_is_wide_and_says_so_and_five_are_narrower() -> None:
    truth = platform_of("raspberry-pi-4", runtime="ncnn", threads=4)
    times = [(net, seconds_on(truth, net)) for net in BUNDLED[:5]]
    one, five = fit_platform("mine", times[:1]), fit_platform("mine", times)
    assert any("one time only" in note for note in one.notes)
    first, later = (time_of(BUNDLED[5], platform) for platform in (one, five))
    assert later.high / later.low < first.high / first.low


def test_a_board_that_is_twice_as_slow_as_the_one_it_is_like_comes_out_so() -> None:
    base = platform_of("raspberry-pi-4", runtime="ncnn", threads=4)
    mine = fit_platform("mine", [(net, 2 * seconds_on(base, net)) for net in BUNDLED[:4]], like=base, threads=4)
    assert seconds_on(mine, BUNDLED[4]) / seconds_on(base, BUNDLED[4]) == pytest.approx(2, rel=0.1)
    assert any("like raspberry-pi-4" in note for note in mine.notes)


def test_no_time_at_all_needs_a_board_that_it_is_like() -> None:
    with pytest.raises(InvalidInput, match="like="):
        fit_platform("mine", [])
    mine = fit_platform("mine", [], like="raspberry-pi-5", threads=4)
    assert mine.origin == "core"
    like = platform_of("raspberry-pi-5", threads=4)
    assert seconds_on(mine, BUNDLED[0]) == pytest.approx(seconds_on(like, BUNDLED[0]))
    assert time_of(BUNDLED[0], mine).high > time_of(BUNDLED[0], like).high


@pytest.mark.parametrize("wrong", [0.0, -0.1, float("nan")])
def test_times_that_cannot_be_are_refused_by_name(wrong: float) -> None:
    with pytest.raises(InvalidInput, match="squeezenet_v11_224"):
        fit_platform("mine", [(BUNDLED[2], wrong)])


def test_a_time_that_contradicts_the_others_is_named() -> None:
    truth = platform_of("raspberry-pi-4", runtime="ncnn", threads=4)
    times = [(net, seconds_on(truth, net) * (6 if net is BUNDLED[1] else 1)) for net in BUNDLED]
    mine = fit_platform("mine", times, like=truth, threads=4)
    assert len(mine.contradictions) == 1
    assert mine.contradictions[0].startswith("mobilenet_v2_1_224")
    assert "more" in mine.contradictions[0]


def test_the_net_that_is_suggested_shrinks_the_interval_most() -> None:
    truth = platform_of("raspberry-pi-4", runtime="ncnn", threads=4)
    mine = fit_platform("mine", [(BUNDLED[0], seconds_on(truth, BUNDLED[0]))])
    found = suggest_next(mine, BUNDLED[1:])
    assert [item.factor_then for item in found] == sorted(item.factor_then for item in found)
    assert found[0].factor_then < found[0].factor_now
    with pytest.raises(InvalidInput, match="candidates"):
        suggest_next(mine, [])


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(InvalidInput, match="nothing to estimate"):
        time_of(ModelWork("empty", ()), fitted_platforms()[0])
