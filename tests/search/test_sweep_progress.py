"""What people and machines are told about a sweep."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from edge_opt._support.progress import report_progress
from edge_opt.cli import app
from edge_opt.cli.shell import Shell
from edge_opt.errors import InvalidInput, SweepInterrupted
from edge_opt.records.sweeps import Candidate, Trial
from edge_opt.search import sweep_progress
from edge_opt.search.space import Space
from edge_opt.search.sweep import run_sweep
from edge_opt.search.sweep_progress import (
    Event,
    Notice,
    PhaseEnded,
    PhaseStarted,
    StepStarted,
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
        "candidate 1 of 3, unpruned fp32 onnxruntime: accuracy 98.0 %, 2.50 ms (batch 1), rejected (latency_ms <= 2, "
        "measured 2.5); about 0 s left",
        "candidate 2 of 3, pruned 10 % fp32 onnxruntime: failed (raised: build: ValueError: channels must be divisible "
        "by 8); about 0 s left",
        "candidate 3 of 3, pruned 50 % fp32 onnxruntime: failed (crashed: build was ended by SIGABRT; see build.log); "
        "about 0 s left",
    ]
    assert len(lines) == 4  # the recommendation is the result's, and is said once
    assert shown("auto", tmp_path, io.StringIO()).startswith("sweep: 3 candidates, 3 of them finished before\n")


def test_a_log_is_not_silent_while_a_step_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_progress, "_TICK_S", 0.01)
    now, out = [0.0], io.StringIO()
    with progress("plain", out, clock=lambda: now[0]) as listener:
        listener(StepStarted("training Net: 12 epochs"))
        now[0] = 5.0  # loading the data
        report_progress("epoch 3 of 12, loss 0.6", 0.25)
        now[0] = 13.0
        time.sleep(0.1)
        assert out.getvalue() == "training Net: 12 epochs\n"
        report_progress("epoch 6 of 12, loss 0.5", 0.5)
        now[0] = 15.0
        deadline = time.monotonic() + 30
        while "so far" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert out.getvalue().splitlines()[1] == (
        # a quarter in 10 s, two quarters are left
        "  training Net: 12 epochs: epoch 6 of 12, loss 0.5 (15 s so far; about 20 s left in this step)"
    )


def test_the_baseline_outside_of_the_space_is_no_candidate_and_the_time_left_has_finals_and_report() -> None:
    eager, first = trial(0.0), trial(0.1)
    sums = SweepProgress()
    for event, now in [
        (SweepStarted("sweep", 2, (), 0, eager.candidate, after_s=30.0), 0.0),
        (PhaseStarted(eager.candidate, "build", 1), 0.0),
        (PhaseEnded(eager.candidate, "build"), 4.0),
        (PhaseStarted(eager.candidate, "measure", 1), 4.0),
        (PhaseEnded(eager.candidate, "measure"), 6.0),
        (TrialFinished(eager, 0, 2), 6.0),
    ]:
        sums.add(event, now)
    # two builds of 4 s, two measurements of 2 s, then 30 s
    assert (sums.done, sums.seconds_left) == (0, 2 * 4 + 2 * 2 + 30)
    sums.add(PhaseStarted(first.candidate, "build", 1), 6.0)
    assert sums.now == "building candidate 1 of 2 (pruned 10 % fp32 torch)"
    sums.add(StepStarted("finals: round 1 of 4", 20.0), 30.0)
    sums.now_s = 35.0
    assert (sums.now, sums.seconds_left, sums.share) == ("finals: round 1 of 4", 15.0, 35 / (35 + 15))


def test_json_lines_for_machines(tmp_path: Path) -> None:
    events = [json.loads(line) for line in shown("json", tmp_path, io.StringIO()).splitlines()]
    assert [event["event"] for event in events][:5] == [
        "SweepStarted", "PhaseStarted", "PhaseEnded", "PhaseStarted", "PhaseEnded",
    ]  # fmt: skip
    first, second, third = [event["trial"] for event in events if event["event"] == "TrialFinished"]
    assert first["violations"] == [{"constraint": "latency_ms <= 2", "metric": "latency_ms", "value": 2.5, "limit": 2}]
    assert (second["failure"], third["failure"]) == ("raised", "crashed")
    assert events[-1]["best"] is None


def test_the_live_view_shows_counts_and_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal gets lines
    said = shown("auto", tmp_path, Terminal())
    assert "building candidate 2 of 3 (pruned 10 % fp32 onnxruntime)" in said
    assert "3 of 3 candidates done, 2 failed" in said


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


def test_the_status_command_tells_how_far_a_sweep_is(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, TrialFinished) and event.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(SweepInterrupted):
        run_sweep(Arithmetic(tmp_path / "log"), SPACE, folder=tmp_path, on_event=stop)
    text = CliRunner().invoke(app, ["status", str(tmp_path)], env={"COLUMNS": "120"}).stdout.splitlines()
    assert text[0] == "sweep: 2 done (2 accepted), 0 failed, 1 left"
    assert text[1].split() == "State not running; run the same again to go on".split()
    assert "pruned 10 % fp32 onnxruntime is the fastest of 2 accepted candidates" in text[2]
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
