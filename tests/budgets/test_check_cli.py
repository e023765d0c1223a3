"""`edge-opt check` and `edge-opt compare`: exit codes, files and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.errors import InvalidInput
from edge_opt.model_comparison import find_trial
from edge_opt.records.sweeps import Candidate, SweepResult
from edge_opt.report.comparison import load_comparison
from edge_opt.report.sweep_files import sweep_document
from sweeps import done, small_sweep, sweep

NET = """
from torch import nn

def net(width=8):
    print("building")
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(width * 64, 10))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")  # names in full
    assert run("profile", "net.py:net", "-i", "1x3x8x8", "-o", "old.json").exit_code == 0
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_exit_code_0_within_the_budget(folder: Path) -> None:
    done = run("check", "old.json", "--budget", "macs <= 600M", "--budget", "peak_memory_mb <= 64")
    assert done.exit_code == 0, done.output
    assert "within 2 budgets" in done.stdout


def test_exit_code_1_when_broken_with_every_broken_line(folder: Path) -> None:
    done = run(
        "check", "net.py:net(width=16)", "-i", "1x3x8x8", "--budget", "macs <= 1k", "--budget", "params <= 1M",
        "--baseline", "old.json", "--max-increase", "peak_memory=5%",
    )  # fmt: skip
    assert done.exit_code == 1, done.output
    broken = [line.split("  ")[1] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert broken == ["macs <= 1k", "max increase peak_memory=5%"]
    assert "layers that grew most" in done.stdout and "2 of 3 budgets not kept" in done.stdout
    assert "building" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "old.json"), "no budget to check; add --budget"),
        (("check", "old.json", "--baseline", "old.json"), "no budget to check; add --budget"),
        (("check", "old.json", "--budget", "macs <= six"), "expected a number"),
        (("check", "old.json", "--budget", "mcas <= 6"), "closest: macs"),
        (("check", "old.json", "--max-increase", "macs=5%"), "--max-increase requires --baseline"),
        (("check", "old.json", "--budget", "macs <= 6", "--baseline", "gone.json"), "no file"),
        (("check", "net.py:net", "--budget", "macs <= 6"), "needs the shape of each of its inputs"),
        (("check", "old.json", "--budget", "macs <= 6", "--baseline", "other.json"), "schema version 99"),
        (("check", "old.json", "--budget", "macs <= 6", "--threads", "1"), "add --target or a budget on latency"),
        (("check", "old.json", "--budget", "predicted_ms <= 6", "--target", "abacus"), "no device"),
        (("check", "old.json", "--budget", "macs <= 6", "--precision", "int8"), "--precision int8 requires --target"),
        (("compare", "old.json"), "at least two"),
        (("compare", "old.json", "old.json", "--sort", "color"), "cannot sort by 'color'"),
        (("compare", "old.json", "old.json", "--top", "0"), "at least 1"),
        (("compare", "old.json", "old.json", "-o", "x.pdf"), "use one of .csv, .html, .json, .md, .txt"),
        (("compare", "old.json", "old.json", "--json", "--all"), "drop it"),
    ],
)
def test_exit_code_2_for_wrong_use(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    other = json.loads(Path("old.json").read_text())
    Path("other.json").write_text(json.dumps({**other, "schema_version": 99}))
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr and "Traceback" not in done.output


def test_the_caret_is_on_stderr(folder: Path) -> None:
    shown = run("check", "old.json", "--budget", "macs <= six").stderr.splitlines()
    assert shown[-2:] == ["  macs <= six", "          ^"]


def test_budgets_of_the_project(folder: Path) -> None:
    table = '[tool.edge-opt.budgets]\nmacs = "<= 600M"\nparams = "< 100"\n'
    (folder / "pyproject.toml").write_text(table)
    done = run("check", "old.json")
    assert done.exit_code == 1
    assert "ok    macs <= 600M" in done.stdout and "FAIL  params < 100" in done.stdout
    assert run("check", "old.json", "--budget", "macs <= 600M").exit_code == 0


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[tool.edge-opt.budgets]\nmcas = '<= 1'", "unknown metric 'mcas'; closest: macs"),
        ("[tool.edge-opt.budgets]\nmacs = 600", 'write a limit in quotes, such as macs = "<= 600"'),
        ("[tool.edge-opt.budgets]\nmacs = '= 600'", "expected <=, <, >= or >"),
        ("[tool.edge-opt]\nbudgets = 3", "is not a table"),
        ("[tool.edge-opt", "cannot read"),
    ],
)
def test_a_wrong_table_is_named(folder: Path, table: str, words: str) -> None:
    (folder / "pyproject.toml").write_text(table)
    done = run("check", "old.json")
    assert done.exit_code == 2
    assert words in done.stderr and "pyproject.toml" in done.stderr


def test_files_for_the_pull_request_and_the_server(folder: Path) -> None:
    done = run("check", "old.json", "--budget", "macs <= 1", "-o", "out/c.md", "--junit", "out/c.xml", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["passed"] is False
    assert Path("out/c.md").read_text().startswith("### net: 1 of 1 budget not kept")
    assert 'failures="1"' in Path("out/c.xml").read_text()
    assert "saved to out/c.md" in done.stderr
    assert run("check", "old.json", "--budget", "macs <= 1", "--markdown", "summary").exit_code == 1
    assert Path("summary").read_text() == Path("out/c.md").read_text()


def test_a_training_budget_is_checked_on_a_model(folder: Path) -> None:
    # One image through the linear layer alone: 2 FLOPs for each of 10 x 512 weights, in the forward and twice after it.
    words = ("check", "net.py:net", "-i", "1x3x8x8", "--budget", f"train_flops >= {6 * 10 * 512}", "--optimizer")
    assert run(*words, "sgd").exit_code == 0
    assert "no optimizer named 'sdg'; closest: sgd" in run(*words, "sdg").stderr


def test_a_model_is_run_when_a_budget_needs_it(folder: Path) -> None:
    done = run("check", "net.py:net", "-i", "1x3x8x8", "--budget", "latency_s <= 60", "--min-time", "0.02")
    assert done.exit_code == 0, done.output


def test_a_predicted_budget_is_checked_on_a_model_and_on_a_profile(folder: Path) -> None:
    budget = ("--target", "jetson-nano", "--precision", "fp16", "--budget", "predicted_s <= 60")
    for subject in (("net.py:net", "-i", "1x3x8x8"), ("old.json",)):
        done = run("check", *subject, *budget)
        assert done.exit_code == 0, done.output
    assert run("check", "old.json", *budget[:-1], "predicted_ms <= 0").exit_code == 1


def test_compare_prints_what_differs(folder: Path) -> None:
    done = run("compare", "old.json", "net.py:net(width=4)", "-i", "1x3x8x8", "--sort", "params")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines() if line[:2] in ("0 ", "3 ")]
    # 4 of 8 x (27 + 1), and 10 x 64 x 4 + 10 of 10 x 64 x 8 + 10
    assert lines[0][:3] == ["3", "Linear", "changed"] and "2.57" in lines[0]
    assert lines[1][0] == "0" and "−50.0%" in lines[1]


def test_compare_writes_every_format(folder: Path) -> None:
    files = [f"out/c.{suffix}" for suffix in ("csv", "json", "md", "html", "txt")]
    done = run("compare", "old.json", "net.py:net(width=4)", "-i", "1x3x8x8", *(f"-o{file}" for file in files))
    assert done.exit_code == 0, done.output
    assert all(Path(file).stat().st_size for file in files)
    found = load_comparison("out/c.json")
    assert found.figure("macs").values[0] == eo.load("old.json").totals.macs
    assert json.loads(run("compare", "old.json", "old.json", "--json").stdout)["format"] == "edge_opt.comparison"


@pytest.fixture
def swept(folder: Path) -> SweepResult:
    result = small_sweep()
    for run_folder in ("run", "again"):
        (folder / run_folder).mkdir()
        (folder / run_folder / "sweep.json").write_text(sweep_document(result))
    return result


def test_compare_finds_candidates_by_label_key_and_role(swept: SweepResult) -> None:
    half = next(trial for trial in swept.trials if trial.candidate.label == "prune 0.5 int8 torch")
    names = ("run#prune 0.5 int8 torch", f"run/sweep.json#{half.candidate.key}", f"run#{half.candidate.key[:6]}")
    for name in names:
        found = json.loads(run("compare", name.partition("#")[0] + "#baseline", name, "--json").stdout)
        assert found["names"] == ["prune 0 fp32 torch", "prune 0.5 int8 torch"]
        macs = next(figure for figure in found["totals"] if figure["name"] == "macs")
        assert macs["values"] == [50_000_000, 25_000_000]
    best = swept.best
    assert best is not None
    done = run("compare", "run#best", "again#best", "--json")
    label = swept.trial(best).candidate.label
    assert json.loads(done.stdout)["names"] == [f"run#{label}", f"again#{label}"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run#baseline", "run#prune 9"), "one of: "),
        (("run#baseline", "run#"), "'' is not a candidate of the sweep 'net'"),
        (("run#baseline", "gone#best"), "no file 'gone"),
        (("run#baseline", "old.json"), "'old.json' is not a candidate"),
        (("run#baseline", "old.json#best"), "not a sweep"),
        (("run#baseline", "run#prune 0.75 int8 onnxruntime"), "has no figures"),
        (("run#baseline", "run#best", "--measure"), "drop --measure"),
    ],
)
def test_a_candidate_that_is_not_there_is_refused(swept: SweepResult, arguments: tuple[str, ...], words: str) -> None:
    done = run("compare", *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split()) and "Traceback" not in done.output


def test_an_ambiguous_candidate_is_refused_with_what_it_may_be() -> None:
    by_layer = [replace(done(0.5), candidate=Candidate(0.5, "fp32", "torch", (("a", share),))) for share in (0.1, 0.2)]
    with pytest.raises(InvalidInput, match="several") as raised:
        find_trial(sweep(*by_layer), "prune by layer fp32 torch")
    assert all(trial.candidate.key in str(raised.value) for trial in by_layer)
    with pytest.raises(InvalidInput, match="accepted no candidate"):
        find_trial(sweep(), "best")


def test_compare_of_a_profile_with_itself(folder: Path) -> None:
    assert "no differences" in run("compare", "old.json", "old.json").stdout
    assert "Flatten" in run("compare", "old.json", "old.json", "--all").stdout
