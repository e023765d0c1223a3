"""`edge-opt profile --target`: predicted columns for one, side by side for several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt._support.json import from_plain
from edge_opt.cli import app
from edge_opt.model import SmallCNN
from edge_opt.records.predictions import TargetComparison

SMALL = ["profile", "edge_opt.model:SmallCNN", "-i", "1x1x28x28"]


def run(*arguments: str, columns: int = 120) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*SMALL, *arguments], env={"COLUMNS": str(columns)})
    return done.exit_code, done.stdout, done.stderr


def test_one_target_adds_columns_and_a_sentence() -> None:
    code, out, _ = run("--target", "raspberry-pi-4")
    assert code == 0
    header = out.splitlines()[0]
    assert "Predicted" in header and "Bound by" in header
    assert "on raspberry-pi-4 in fp32" in " ".join(out.split())


def test_several_targets_stand_side_by_side() -> None:
    code, out, _ = run("--target", "raspberry-pi-4", "--target", "jetson-nano", "-t", "rp2040")
    assert code == 0
    header, _, *rows = out.splitlines()
    for title in ("Target", "Fits", "Time", "90 % interval", "Bound by", "Est. energy", "Batch", "Basis"):
        assert title in header
    assert [row.split()[0] for row in rows[:3]] == ["raspberry-pi-4", "jetson-nano", "rp2040"]
    assert "rp2040: the bandwidth is unknown" in out


def test_in_a_narrow_terminal_the_basis_goes_first() -> None:
    _, out, _ = run("--target", "raspberry-pi-4", "--target", "jetson-nano", columns=80)
    header = out.splitlines()[0]
    assert "90 % interval" in header and "Est. energy" in header and "Basis" not in header
    assert max(map(len, out.splitlines())) <= 80


def test_json_holds_the_comparison_or_the_whole_profile(tmp_path: Path) -> None:
    code, out, _ = run("-t", "pi4", "-t", "jetson-nano", "--precision", "fp16", "--json")
    assert code == 0
    data = json.loads(out)
    assert (data.pop("format"), data.pop("schema_version")) == ("edge_opt.targets", 1)
    found = from_plain(TargetComparison, data)
    assert found == eo.compare_targets(SmallCNN(), (1, 1, 28, 28), ["pi4", "jetson-nano"], precision="fp16")
    assert [fit["fits"] for fit in data["targets"]] == [True, True]
    code, out, _ = run("-t", "pi4", "--json")
    (tmp_path / "p.json").write_text(out)
    assert code == 0 and eo.load(tmp_path / "p.json").predictions[0].target == "raspberry-pi-4"


def test_a_list_by_predicted_time_has_its_share() -> None:
    code, out, _ = run("-t", "pi4", "--sort", "predicted", "--top", "2")
    assert code == 0
    assert "Pred. %" in out.splitlines()[0]
    assert out.splitlines()[2].startswith("conv2")


def test_the_table_of_layers_is_saved_with_its_prediction(tmp_path: Path) -> None:
    code, _, _ = run("-t", "pi4", "-o", str(tmp_path / "p.csv"))
    assert code == 0
    assert "predicted_s" in (tmp_path / "p.csv").read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-t", "raspbery-pi-4"], "no device named 'raspbery-pi-4'; closest: raspberry-pi-4"),
        (["-t", "absent.toml"], "no file 'absent.toml'"),
        (["-t", "pi4", "-t", "raspberry-pi-4"], "the target raspberry-pi-4 is given twice"),
        (["-t", "pi4", "--precision", "int3"], "--precision is 'int3'; it must be one of fp32, fp16, bf16, int8"),
        (["--precision", "int8"], "--precision int8 requires --target, such as --target raspberry-pi-4"),
        (["-t", "host"], "this host has not been calibrated; run `edge-opt calibrate`"),
        (["--sort", "predicted"], "cannot sort by predicted"),
        (["-t", "pi4", "-t", "nano", "--measure"], "--measure works with one --target only"),
        (["-t", "pi4", "-t", "nano", "-o", "p.json"], "--output works with one --target only"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # where no calibration of this host is
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_device_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text('name = "board"\nengine = "cpu"\n')
    code, _, err = run("-t", str(path))
    assert code == 2 and "bandwidth_bytes_per_s is missing" in err
    path.write_text(
        'name = "board"\nengine = "cpu"\n[bandwidth_bytes_per_s]\nunknown = "nobody said"\n'
        '[peak_ops_per_s.cpu]\nfp32 = { value = -1, source = "test", kind = "derived" }\n'
    )
    code, _, err = run("-t", str(path))
    assert code == 2 and "peak_ops_per_s.cpu.fp32.value is -1" in err
