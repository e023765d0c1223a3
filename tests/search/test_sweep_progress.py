"""What people and machines are told about a sweep."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from edge_opt.cli import app
from edge_opt.cli.shell import Shell
from edge_opt.errors import InvalidInput, SweepInterrupted
from edge_opt.records.sweeps import Candidate, Trial
from edge_opt.search.space import Space
from edge_opt.search.sweep import run_sweep
from edge_opt.search.sweep_progress import (
    Event,
    Notice,
    PhaseEnded,
    PhaseStarted,
    SweepProgress,
    SweepStarted,
    TrialFinished,
    progress,
)
from sweep_jobs import Arithmetic, Misbehaving, figures

SPACE = Space((0.0, 0.1, 0.5), ("fp32",), ("onnxruntime",))

pytestmark = pytest.mark.usefixtures("own_machine")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(view: str, folder: Path, stream: io.StringIO) -> str:
    with progress(view, stream, clock=lambda: 0.0) as listener:  # type: ignore[arg-type]
        run_sweep(Misbehaving(), SPACE, folder=folder, retries=0, constraints=["latency_ms <= 2"], on_event=listener)
    return stream.getvalue()


def test_plain_lines_elsewhere_than_on_a_terminal(tmp_path: Path) -> None:
    lines = shown("auto", tmp_path, io.StringIO()).splitlines()
    assert lines[:4] == [
        "sweep: 3 candidates",
        "[1/3] prune 0 fp32 onnxruntime: accuracy 0.9800, 2.50 ms per sample, rejected by latency_ms <= 2 (it is 2.5); "
        "about 0 s left",
        "[2/3] prune 0.1 fp32 onnxruntime: raised: build: ValueError: channels must be divisible by 8; about 0 s left",
        "[3/3] prune 0.5 fp32 onnxruntime: crashed: build was ended by SIGABRT; see build.log",
    ]
    assert len(lines) == 4  # the recommendation is the result's, and is said once
    assert shown("auto", tmp_path, io.StringIO()).startswith("sweep: 3 candidates, 3 of them finished before\n")


def test_json_lines_for_machines(tmp_path: Path) -> None:
    events = [json.loads(line) for line in shown("json", tmp_path, io.StringIO()).splitlines()]
    assert [event["event"] for event in events][:5] == [
        "SweepStarted", "PhaseStarted", "PhaseEnded", "PhaseStarted", "PhaseEnded",
    ]  # fmt: skip
    first, second, third = [event["trial"] for event in events if event["event"] == "TrialFinished"]
    assert first["violations"] == [{"constraint": "latency_ms <= 2", "metric": "latency_ms", "value": 2.5, "limit": 2}]
    assert (second["failure"], third["failure"]) == ("raised", "crashed")
    assert events[-1]["best"] is None


def test_the_live_view_shows_counts_what_runs_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal gets lines
    said = shown("auto", tmp_path, Terminal())
    assert "running: build prune 0.1 fp32 onnxruntime" in said
    assert "3 of 3 done, 0 accepted, 2 failed" in said
    assert "best so far: none" in said


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown view 'loud'"), progress("loud"):  # type: ignore[arg-type]
        pass


def trial(pruning: float) -> Trial:
    candidate = Candidate(pruning, "fp32", "torch")
    return Trial(candidate, "done", figures(candidate), None, "", (), 1.0)


def test_the_time_left_follows_from_the_mean_duration_of_each_half() -> None:
    known, first, second = trial(0.0), trial(0.1), trial(0.2)
    told: list[tuple[Event, float]] = [
        (SweepStarted("sweep", 6, (known,), 2), 0.0),
        (PhaseStarted(first.candidate, "build", 1), 0.0),
        (PhaseStarted(second.candidate, "build", 1), 0.0),
        (PhaseEnded(first.candidate, "build"), 10.0),
        (PhaseEnded(second.candidate, "build"), 20.0),
        (PhaseStarted(first.candidate, "measure", 1), 20.0),
        (Notice("waiting"), 21.0),
    ]
    sums = SweepProgress()
    for event, now in told:
        sums.add(event, now)
    assert sums.seconds_left is None
    assert [started.phase for started, _ in sums.running.values()] == ["measure"]
    sums.add(PhaseEnded(first.candidate, "measure"), 24.0)
    sums.add(TrialFinished(first, 2, 6), 24.0)
    # 4 are left, one of them built: 3 builds of 15 s over 2 workers, and 4 measurements of 4 s one by one.
    assert sums.seconds_left == 3 * 15 / 2 + 4 * 4
    assert sums.done == 2
    # The faster of the two is not significantly less accurate.
    assert sums.best == first


def test_the_status_command_tells_how_far_a_sweep_is(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(SweepInterrupted):
        run_sweep(Arithmetic(tmp_path / "log"), SPACE, folder=tmp_path, on_event=stop)
    text = CliRunner().invoke(app, ["status", str(tmp_path)], env={"COLUMNS": "120"}).stdout.splitlines()
    assert text[0] == "sweep: 2 done (2 accepted), 0 failed, 1 left"
    assert text[1].split() == "State not running; run the same again to go on".split()
    assert "prune 0.1 fp32 onnxruntime: the fastest (2.25 ms per sample)" in text[2]
    record = json.loads(CliRunner().invoke(app, ["status", str(tmp_path), "--json"]).stdout)
    assert (record["done"], record["left"], record["is_running"]) == (2, 1, False)


def test_a_folder_without_a_sweep_is_wrong_use(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no sweep" in result.stderr


def test_an_interrupted_sweep_ends_the_command_with_130() -> None:
    shell = typer.Typer(cls=Shell)

    @shell.callback()
    def _group() -> None: ...

    @shell.command()
    def run() -> None:
        raise SweepInterrupted("stopped: 1 of 2")

    result = CliRunner().invoke(shell, ["run"])
    assert result.exit_code == 130
    assert result.stderr == "error: stopped: 1 of 2\n"
