"""`edge-opt board`: a platform from typed times; `edge-opt devices NAME`: the platforms that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.boards.platforms import bundled_nets
from edge_opt.cli import app
from edge_opt.model import SmallCNN
from zoo import torchvision_models


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


def test_a_board_from_two_times_is_a_target(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    code, out, err = run(
        "board", "my-board", "--like", "pi5", "--time", "squeezenet1_1=21.4", "--time", "resnet18=55", "--threads", "4",
        "-o", str(path),
    )  # fmt: skip
    assert code == 0
    assert "my-board: from 2 typed times" in out
    assert "like raspberry-pi-5/cpu-4/ncnn/fp32" in out
    assert " next (1x3x224x224): the usual interval goes from a factor of" in out
    assert f"saved to {path}" in err
    found = eo.profile(SmallCNN(), (1, 1, 28, 28), target=path).prediction
    assert found is not None
    assert (found.basis, found.target) == ("fitted", "my-board")
    code, out, _ = run("profile", "edge_opt.model:SmallCNN", "-i", "1x1x28x28", "-t", str(path))
    assert code == 0
    assert "on my-board in fp32" in out


def test_json_tells_what_to_time_next_and_what_contradicts(tmp_path: Path) -> None:
    times = [f"--time={net}" for net in ("squeezenet1_1=21.4", "resnet18=55", "mobilenet_v2=900", "vgg16=400")]
    code, out, _ = run("board", "b", "--like", "raspberry-pi-5", *times, "-o", str(tmp_path / "b.toml"), "--json")
    assert code == 0
    data = json.loads(out)
    assert data["rows"] == 4
    assert data["contradictions"][0].startswith("mobilenet_v2: 900 ms")
    assert not {"squeezenet1_1", "resnet18"} & {item["net"] for item in data["time_next"]}


def test_a_net_of_ones_own_is_a_reference_with_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "b.toml"
    code, out, _ = run("board", "b", "--time", "edge_opt.model:SmallCNN@1x1x28x28=0.4", "-o", str(path))
    assert code == 0
    assert "one time only" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--time", "sqeezenet1_1=3"],
            "no net named 'sqeezenet1_1' is bundled for 1x3x224x224; closest: squeezenet1_1",
        ),
        (["--time", "resnet18=0"], "the time of resnet18 is 0 s"),
        (["--time", "resnet18=-2"], "the time of resnet18 is -0.002 s"),
        (["--time", "resnet18=inf"], "the time of resnet18 is inf s"),
        (["--time", "resnet18"], "--time 'resnet18' cannot be read; write NET=MS"),
        (["--time", "resnet18=fast"], "cannot be read"),
        (["--time", "resnet18=0ms"], "the time of resnet18 is 0 s"),
        ([], "no time is given"),
        (["--like", "raspberry-pi-55"], "no device named 'raspberry-pi-55'; closest: raspberry-pi-5"),
        (["--time", "resnet18=3", "--precision", "int4"], "precision is 'int4'"),
        (["--time", "resnet18=3", "--threads", "0"], "threads is 0"),
        (["--time", "resnet18=3", "-o", "b.json"], "let its name end in .toml"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    code, out, err = run("board", "b", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["a/b", "../b", "a\\b"])
def test_a_name_with_a_slash_is_refused_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    code, out, err = run("board", name, "--time", "resnet18=55")
    assert (code, out) == (2, "")
    assert "has a slash in it; -o says where its file goes" in err
    assert not list(tmp_path.rglob("*.toml"))


def test_devices_lists_the_platforms_of_one(tmp_path: Path) -> None:
    code, out, _ = run("devices", "raspberry-pi-4")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["raspberry-pi-4/cpu-1/ncnn/fp32", "fitted", "fp32", "4.0%", "23"] in [row[:5] for row in rows]
    # 58.93 ms were published at 1.5 GHz; the prediction is for 1.8 GHz.
    [squeezenet] = [row for row in rows if row[:1] == ["squeezenet1_1"]]
    assert squeezenet[1:8] == ["ncnn", "2022-01-17", "4", "1.50", "GHz", "58.9", "ms"]
    assert squeezenet[-3:-1] == ["1.34", "no"] and "3 of 11 published times lie in the 90 % interval" in " ".join(
        out.split()
    )
    assert "raspberry-pi-5/cpu-4/ncnn/fp32 fitted fp16" in " ".join(run("devices", "raspberry-pi-5")[1].split())
    assert ["raspberry-pi-4/cpu/roofline/fp32", "roofline"] in [row[:2] for row in rows]
    assert "no time" in run("devices", "hailo-8")[1]
    assert " fitted " in run("devices", "orange-pi-zero-2")[1]


def test_platforms_have_a_basis_or_say_why_not() -> None:
    found = eo.platforms()
    assert sum(item.basis == "fitted" and item.precision == "fp32" for item in found) >= 60
    assert sum(item.basis == "fitted" and item.precision == "int8" for item in found) >= 30
    assert {item.device for item in found} >= {spec.name for spec in eo.devices()}
    assert all(item.source for item in found)
    assert len({item.name for item in found}) == len(found)
    assert eo.platforms("pi4")[0].name == "raspberry-pi-4/cpu-4/ncnn/fp32"


def test_the_nets_to_time_next_are_written(tmp_path: Path) -> None:
    torchvision_models()
    times = [f"--time={net}=50" for net in bundled_nets() if net != "squeezenet1_1"]
    code, out, _ = run(
        "board", "b", "--like", "raspberry-pi-5", *times, "--threads", "4", "-o", str(tmp_path / "b.toml"),
        "--export", str(tmp_path / "nets"),
    )  # fmt: skip
    assert code == 0
    file = tmp_path / "nets" / "squeezenet1_1.onnx"
    # 1.24 million weights of four bytes
    assert file.stat().st_size > 4 * 1.2e6
    assert f"wrote {file}" in out
    assert "--time squeezenet1_1=MS --runtime NAME --threads 4" in out
