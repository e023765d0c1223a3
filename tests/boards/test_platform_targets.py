"""Fitted platforms as targets: chosen by runtime and threads, in every answer, and the roofline where there is none."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.boards.estimate import estimate
from edge_opt.boards.platform_file import fitted_platforms, save_platform
from edge_opt.boards.targets import best_known, find_spec, named_target, resolve_target
from edge_opt.cli import app
from edge_opt.errors import InvalidDevice, InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.records.profiles import ModelProfile
from edge_opt.run.config import RunConfig
from edge_opt.run.run_summary import check_target

SHAPE = (1, 1, 28, 28)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return eo.profile(SmallCNN(), SHAPE)


def test_the_best_known_platform_answers_and_is_named(profile: ModelProfile) -> None:
    found = estimate(profile, "raspberry-pi-4")
    assert (found.basis, found.target) == ("fitted", "raspberry-pi-4")
    for part in (
        "raspberry-pi-4/cpu-4/ncnn/fp32",
        "23 published times",
        "ncnn of 2023",
        "4 threads",
        "median error 10.2%",
        "BSD",
    ):
        assert part in found.remarks[0]
    assert found.seconds is not None and found.low is not None and found.high is not None
    assert found.seconds == math.fsum(layer.seconds or 0 for layer in found.layers)
    assert all((layer.low, layer.high) == (None, None) for layer in found.layers)
    assert found.energies[0].source == "proxy"


def test_runtime_and_threads_choose_and_flow_through_every_function(profile: ModelProfile) -> None:
    asked = estimate(profile, "raspberry-pi-4", runtime="tflite", threads=1)
    assert "raspberry-pi-4/cpu-1/tflite/fp32" in asked.remarks[0]
    there = {"runtime": "tflite", "threads": 1}
    assert eo.profile(SmallCNN(), SHAPE, target="pi4", **there).prediction.seconds == asked.seconds  # type: ignore[arg-type, union-attr]
    compared = eo.compare_targets(SmallCNN(), SHAPE, "pi4", runtime="tflite", threads=1)
    assert compared.targets[0].prediction.seconds == asked.seconds
    line = [
        "profile",
        "edge_opt.model:SmallCNN",
        "-i",
        "1x1x28x28",
        "-t",
        "pi4",
        "--runtime",
        "tflite",
        "--threads",
        "1",
    ]
    done = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "raspberry-pi-4/cpu-1/tflite/fp32" in done.stdout


def test_more_threads_than_one_take_less(profile: ModelProfile) -> None:
    large = eo.profile(nn.Conv2d(64, 64, 3), (1, 64, 56, 56))
    one, four = (estimate(large, "raspberry-pi-5", runtime="ncnn", threads=count).seconds for count in (1, 4))
    assert one is not None and four is not None and four < one


def test_a_precision_engine_or_change_that_was_not_fitted_leaves_the_roofline(profile: ModelProfile) -> None:
    assert estimate(profile, "raspberry-pi-4", "fp16").basis == "roofline"
    assert estimate(profile, "jetson-agx-orin").remarks[0].startswith("platform jetson-agx-orin/gpu")
    assert estimate(profile, "jetson-agx-orin", engine="cpu").remarks[0].startswith("platform jetson-agx-orin/cpu-12")
    mine = replace(eo.device("raspberry-pi-4"), overhead_s=None, note="overclocked")
    assert estimate(profile, mine).basis == "roofline"
    with pytest.raises(InvalidInput, match="no times of raspberry-pi-4 are known with any runtime"):
        estimate(profile, mine, runtime="ncnn")


@pytest.mark.parametrize(
    ("options", "closest"),
    [
        ({"runtime": "tensorrt"}, "raspberry-pi-4/cpu-4/ncnn/fp32"),
        ({"runtime": "ncn"}, "raspberry-pi-4/cpu-4/ncnn/fp32"),
        ({"runtime": "tflite", "threads": 4}, "raspberry-pi-4/cpu-1/tflite/fp32"),
        ({"runtime": "xnnpack", "precision": "int8", "threads": 1}, "raspberry-pi-4/cpu-4/xnnpack/int8"),
        ({"runtime": "ncnn", "threads": 3}, "raspberry-pi-4/cpu-4/ncnn/fp32"),
    ],
)
def test_a_runtime_without_times_names_the_closest(
    profile: ModelProfile, options: dict[str, str], closest: str
) -> None:
    with pytest.raises(InvalidInput, match=f"closest: {closest};"):
        estimate(profile, "raspberry-pi-4", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no times of jetson-nano are known with any runtime"):
        estimate(profile, "jetson-nano", runtime="ncnn")


def test_threads_scale_the_peaks_of_a_roofline_and_not_its_bandwidth() -> None:
    bound = eo.profile(nn.Linear(512, 512, bias=False), (512, 512))
    whole, half = (estimate(bound, "intel-n100", threads=count) for count in (None, 2))
    assert whole.bound == half.bound == "compute"
    assert whole.seconds is not None and half.seconds is not None
    # the N100 has 4 cores
    assert half.seconds == pytest.approx(2 * whole.seconds, rel=0.05)
    assert "peaks of 2 of 4 cores" in half.remarks[-1]
    moved = eo.profile(nn.ReLU(), (1, 64, 256, 256))
    assert estimate(moved, "intel-n100", threads=3).seconds == estimate(moved, "intel-n100").seconds
    with pytest.raises(InvalidInput, match="has 4 core"):
        estimate(bound, "intel-n100", threads=5)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(InvalidInput, match="threads"):
            estimate(bound, "intel-n100", threads=wrong)  # type: ignore[arg-type]
    assert any("threads are of a CPU" in remark for remark in estimate(bound, "jetson-nano", threads=2).remarks)
    # fitted with one and four threads only
    assert estimate(bound, "raspberry-pi-5", threads=2).basis == "roofline"


def test_a_device_outside_the_catalogue_answers_by_its_times(profile: ModelProfile) -> None:
    names = {platform.device for platform in fitted_platforms()}
    assert all(named_target(name).name for name in sorted(names)[::9])
    found = estimate(profile, "orange-pi-zero-2")
    assert (found.basis, found.target) == ("fitted", "orange-pi-zero-2")
    assert find_spec("orange-pi-zero-2").ram_bytes == ()
    fit = eo.compare_targets(SmallCNN(), SHAPE, "orange-pi-zero-2").targets[0]
    assert fit.fits is None


def test_a_platform_is_a_target_by_name_record_and_file(profile: ModelProfile, tmp_path: Path) -> None:
    name = "raspberry-pi-4/cpu-1/ncnn/fp32"
    platform = resolve_target("raspberry-pi-4", runtime="ncnn", threads=1).platform
    assert platform is not None
    path = save_platform(platform, tmp_path / "mine.toml")
    for target in (name, platform):
        found = estimate(profile, target)
        assert (found.target, found.basis) == (name, "fitted")
    again = estimate(profile, path)
    assert again.seconds == pytest.approx(found.seconds, rel=1e-3)
    assert find_spec(platform).name == "raspberry-pi-4"
    with pytest.raises(InvalidInput, match="threads is 4, and the platform .* is for 1"):
        estimate(profile, platform, threads=4)
    with pytest.raises(InvalidInput, match="precision is int8"):
        eo.profile(SmallCNN(), SHAPE, target=name, precision="int8")
    with pytest.raises(InvalidInput, match="given twice"):
        eo.profile(SmallCNN(), SHAPE, target=[name, platform])
    path.write_text(path.read_text().replace("runtime = ", "runtimes = "))
    with pytest.raises(InvalidDevice, match="runtime"):
        named_target(path)
    with pytest.raises(InvalidInput, match=r"end in \.toml"):
        save_platform(platform, tmp_path / "mine.json")


def test_a_model_of_free_operators_takes_nothing() -> None:
    assert estimate(eo.profile(nn.Identity(), (1, 4)), "raspberry-pi-4").basis == "roofline"


def test_attention_is_outside_ncnn_and_wide() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    found = estimate(eo.profile(layer, (1, 50, 64)), "raspberry-pi-5")
    assert "product_macs" in found.outside
    assert found.high is not None and found.seconds is not None and found.high > 2.4 * found.seconds
    assert any("outside the fit" in remark for remark in found.remarks)


def test_runtime_and_threads_need_a_target() -> None:
    for name, value in (("runtime", "ncnn"), ("threads", 2)):
        with pytest.raises(InvalidInput, match=f"{name}= requires target="):
            eo.profile(SmallCNN(), SHAPE, **{name: value})  # type: ignore[arg-type]


def test_errors_choose_the_runtime_and_all_big_cores_the_threads() -> None:
    # Published of the RK3588 with ncnn: 1, 4 big, all 8 and 4 little cores; of the Pi 4: ncnn and others.
    best = resolve_target("rk3588").platform
    assert best is not None and best.name == "rk3588/cpu-4/ncnn/fp32"
    one, four = (resolve_target("raspberry-pi-4", runtime="ncnn", threads=threads).platform for threads in (1, 4))
    assert one is not None and four is not None
    assert (one.error or 0) < (four.error or 0)
    slower = replace(four, runtime="other", name="other", error=2 * (four.error or 0))
    assert best_known([slower, one, four])[0] is four
    better = replace(slower, error=(one.error or 0) / 2)
    assert best_known([four, one, better])[0] is better
    single = replace(one, cores="big")
    assert best_known([single, four])[0] is four


@pytest.mark.parametrize("asked", [{"runtime": "ncnn"}, {"threads": 2}])
def test_a_runtime_without_a_target_is_refused(profile: ModelProfile, asked: dict[str, Any]) -> None:
    [name] = asked
    with pytest.raises(InvalidInput, match=f"{name}=.* requires target="):
        eo.check(profile, "macs <= 1G", **asked)
    with pytest.raises(InvalidInput, match=f"target_{name} .* no target"):
        check_target(RunConfig(**{f"target_{name}": asked[name]}))
    with pytest.raises(InvalidInput, match=f"{name}= requires target= and latency_target="):
        eo.compress.prune(SmallCNN(), (1, 1, 28, 28), 0.5, target="raspberry-pi-4", **asked)


def test_a_run_refuses_a_runtime_that_its_target_has_no_times_of_before_it_trains() -> None:
    with pytest.raises(InvalidInput, match="closest: raspberry-pi-4/cpu-4/ncnn"):
        check_target(RunConfig(target="raspberry-pi-4", target_runtime="tensorrt"))
