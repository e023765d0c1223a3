"""The page over several runs, opened in a real browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import edge_opt as eo
from browser import Browser, Page
from edge_opt.cli import app
from edge_opt.errors import InvalidInput
from edge_opt.model import SmallCNN
from edge_opt.report.page import runs_in, write_runs
from edge_opt.report.sweep_files import sweep_document
from sweeps import done, failed, small_sweep, sweep

HOSTILE = "<img src=x onerror='hacked=1'>"


def write_run(folder: Path, epochs: int, width: int, cpu: str = "A") -> Path:
    folder.mkdir(parents=True)
    result = small_sweep() if epochs > 1 else sweep(done(0.0, "fp32", 5), failed(0.5))
    (folder / "sweep.json").write_text(sweep_document(result))
    eo.profile(SmallCNN(width, 2 * width), (1, 1, 28, 28)).save(folder / "profile.json")
    described = {"config": {"epochs": epochs, "seed": 0, "output_dir": str(folder)}, "machine": {"cpu": cpu}}
    (folder / "reproducibility.json").write_text(json.dumps(described))
    (folder / "report.html").write_text("as it was")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for place, (name, epochs, width) in enumerate((("first", 1, 16), ("second", 12, 16), (HOSTILE, 12, 8))):
        run = write_run(root / name, epochs, width)
        for file in run.iterdir():
            # Oldest first, whatever the disk's clock can tell apart.
            os.utime(file, (1_700_000_000 + place, 1_700_000_000 + place))
    return root


@pytest.fixture(scope="module")
def page(browser: Browser, root: Path) -> Iterator[Page]:
    opened = browser.page(write_runs([root]))
    yield opened
    opened.close()


def test_runs_stand_side_by_side_with_links_to_their_pages(page: Page, root: Path) -> None:
    assert page.run("data.runs.map((run) => run.name)") == ["first", "second", HOSTILE]
    links = page.run("[...document.querySelectorAll('#runs-table a')].map((link) => decodeURIComponent(link.pathname))")
    assert links == [str(root / name / "report.html") for name in ("first", "second", HOSTILE)]
    assert (root / "first" / "report.html").read_text() == "as it was"
    assert page.problems() == [] and page.run("window.hacked") is None


def test_what_changed_is_said_from_run_to_run(page: Page) -> None:
    first, second = page.run("data.changes.map((change) => change.items)")
    assert first == [["epochs", "1", "12"]]
    # 16 and 32 channels against 8 and 16; where the run was written is no change.
    assert {name for name, _, _ in second} == {"MACs", "parameters", "peak activations"}
    assert ["seed", "0"] in page.run("data.same")


def test_on_a_phone_what_changed_is_a_line_for_each_run(page: Page) -> None:
    page.resize(390, 844)
    cells = "[...document.querySelectorAll('#changes .grid tbody tr')][0].cells"
    assert page.run(f"[...{cells}].map((cell) => cell.dataset.label)") == ["Setting", "first", "second"]
    # Below each other, so that no column is narrower than a word.
    assert page.run(f"new Set([...{cells}].map((cell) => cell.getBoundingClientRect().left)).size") == 1
    page.resize(1280, 900)


def test_a_run_that_accepted_nothing_is_named(page: Page) -> None:
    assert "Nothing was accepted in first" in page.run("document.getElementById('verdict').textContent")


def test_candidates_of_all_runs_are_drawn(page: Page) -> None:
    page.draw_everything()
    assert page.run("document.querySelector('#runs-chart').data.map((trace) => trace.x.length)") == [1, 5, 5]
    assert page.run("document.querySelector('#written').innerText").count(eo.__version__) == 1


def test_times_of_two_machines_are_not_offered_for_comparison(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 12, 8, cpu=name) for name in ("A", "B")]
    assert "2 machines (A, B)" in write_runs(runs).read_text()


def test_the_command_takes_one_folder_or_several(tmp_path: Path) -> None:
    profiles = [eo.profile(SmallCNN(width), (1, 1, 28, 28)).save(tmp_path / f"{width}.json") for width in (4, 8)]
    done = CliRunner().invoke(app, ["report", *map(str, profiles), "--title", "Widths"])
    assert done.stdout.strip() == str(tmp_path / "runs.html")
    # A run without a page gets one.
    assert (tmp_path / "4.html").is_file()
    assert sorted(runs_in(tmp_path)) == profiles
    empty = tmp_path / "empty"
    empty.mkdir()
    assert runs_in(empty) == []
    with pytest.raises(InvalidInput, match="is not a run, and holds none"):
        write_runs([empty, profiles[0]])
