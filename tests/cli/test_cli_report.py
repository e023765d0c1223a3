"""`edge-opt report`: a run folder, a profile or a sweep as one page; anything else is refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.errors import MissingExtra
from edge_opt.model import SmallCNN
from edge_opt.report import page as html
from edge_opt.report.sweep_files import sweep_document
from sweeps import sensitivity_of, small_sweep


def report(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def data_of(path: Path) -> dict[str, object]:
    """What a page embeds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    data: dict[str, object] = json.loads(found[1])
    return data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    eo.profile(SmallCNN(), (1, 1, 28, 28)).save(folder / "profile.json")
    (folder / "sweep.json").write_text(sweep_document(small_sweep()))
    (folder / "reproducibility.json").write_text('{"seed": 3}')
    (folder / "sensitivity.json").write_text(json.dumps(sensitivity_of({"conv1": 0.1}).to_dict()))
    (folder / "summary.json").write_text('{"best": null}')
    return folder


def test_a_run_becomes_a_page_in_its_folder(run: Path) -> None:
    done = report(run)
    assert (done.exit_code, done.stdout) == (0, f"{run / 'report.html'}\n")
    data = data_of(run / "report.html")
    assert data["title"] == "SmallCNN"
    assert all(data[part] for part in ("profile", "sweep", "sensitivity", "reproducibility", "summary"))


@pytest.mark.parametrize("name", ["profile.json", "sweep.json", "reproducibility.json"])
def test_a_run_with_one_file_is_enough(name: str, run: Path, tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    partial.mkdir()
    (run / name).rename(partial / name)
    assert report(partial).exit_code == 0
    assert data_of(partial / "report.html")[name.partition(".")[0]]


def test_one_profile_or_one_sweep_is_taken_too(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "p.html"
    done = report(run / "profile.json", "-o", output, "--target", "raspberry-pi-5", "--title", "Mine")
    assert (done.exit_code, done.stdout) == (0, f"{output}\n")
    data = data_of(output)
    assert data["title"] == "Mine"
    assert [device["name"] for device in data["profile"]["roofline"]["devices"]] == ["raspberry-pi-5"]  # type: ignore[index]
    assert report(run / "sweep.json").exit_code == 0
    assert data_of(run / "sweep.html")["sweep"]


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for source, words in ((tmp_path, "is not a run"), (tmp_path / "gone", "no folder or file")):
        done = report(source)
        assert (done.exit_code, done.stdout) == (2, "")
        assert words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["profile.json", "sweep.json", "reproducibility.json", "sensitivity.json"])
def test_a_file_that_is_cut_off_is_named(name: str, run: Path) -> None:
    text = (run / name).read_text()
    (run / name).write_text(text[: len(text) // 2])
    done = report(run)
    assert done.exit_code == 2
    assert name in done.stderr and "cut off" in done.stderr and done.stderr.count("\n") == 1
    assert not (run / "report.html").exists()


def test_a_sensitivity_that_is_none_is_named_with_what_it_lacks(run: Path) -> None:
    (run / "sensitivity.json").write_text('{"conv1": 0.1}')
    done = report(run)
    assert done.exit_code == 2
    assert "sensitivity.json' is not a sensitivity" in done.stderr and done.stderr.count("\n") == 1


def test_what_a_sensitivity_found_is_on_the_page(run: Path) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(16, 1, 28, 28), torch.arange(16) % 10)
    found = eo.sensitivity(SmallCNN(), [batch], prune=(0.25, 0.5), precisions=("int8",))
    (run / "sensitivity.json").write_text(json.dumps(found.to_dict()))
    assert report(run).exit_code == 0
    shown: Any = data_of(run / "report.html")["sensitivity"]
    assert shown["measure"] == "Accuracy drop"
    assert shown["changes"] == ["pruned 25 %", "pruned 50 %", "int8"]
    cells = {
        (layer, change): loss
        for layer, losses in zip(shown["layers"], shown["losses"], strict=True)
        for change, loss in zip(shown["changes"], losses, strict=True)
        if loss is not None
    }
    expected = {
        (row.path, f"pruned {float(row.amount):.0%}".replace("%", " %") if row.change == "prune" else "int8"): row
        for row in found.rows
    }
    assert len(found.rows) == len(cells) and cells.keys() == expected.keys()
    assert all(cells[place] == -row.score_change for place, row in expected.items())


def test_a_device_that_nobody_knows_is_refused(run: Path) -> None:
    done = report(run, "--device", "abacus")
    assert done.exit_code == 2 and "no device named 'abacus'" in done.stderr


def test_without_plotly_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(html, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[report\]'"):
        eo.profile(SmallCNN(), (1, 1, 28, 28)).save(tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["net.onnx", "net.tflite", "net.pt2"])
def test_a_damaged_model_is_one_sentence_and_no_page(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xff")
    done = CliRunner().invoke(app, ["report", str(tmp_path / name), "--trust"])
    assert done.exit_code == 2
    assert "cannot be read" in " ".join(done.stderr.split())
    assert not list(tmp_path.glob("*.html"))
