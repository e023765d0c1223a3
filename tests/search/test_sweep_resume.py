"""Sweeps that are ended at any moment, and go on."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from edge_opt.errors import FolderInUse, OtherSettings, SweepInterrupted
from edge_opt.records.sweeps import SweepResult
from edge_opt.search.space import Space
from edge_opt.search.sweep import run_sweep
from edge_opt.search.sweep_progress import Event, TrialFinished, status
from sweep_control import end, finished, lines, start, table, wait_for_lines
from sweep_jobs import Arithmetic
from sweep_process import CONSTRAINTS, SPACE

pytestmark = pytest.mark.usefixtures("own_machine")


@pytest.mark.slow
def test_a_sweep_killed_five_times_ends_with_the_same_table_and_repeats_nothing(tmp_path: Path) -> None:
    folder, log = tmp_path / "killed", tmp_path / "log"
    chance = random.Random(6)
    begun: list[tuple[set[str], int]] = []
    for _ in range(5):
        process = start(folder, log, pause_s=0.03)
        wait_for_lines(log, len(lines(log)) + chance.randint(1, 4), process)
        time.sleep(chance.uniform(0, 0.06))
        end(process, signal.SIGKILL)
        begun.append((finished(folder), len(lines(log))))
    resumed = run_sweep(Arithmetic(log), SPACE, folder=folder, constraints=CONSTRAINTS)
    whole = run_sweep(Arithmetic(tmp_path / "other"), SPACE, folder=tmp_path / "whole", constraints=CONSTRAINTS)

    assert table(resumed) == table(whole)
    assert 0 < len(begun[-1][0]) < SPACE.size
    for done, position in begun:
        assert not [line for line in lines(log)[position:] if line.split()[1] in done]


def test_a_finished_sweep_runs_nothing_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = run_sweep(Arithmetic(log), SPACE, folder=tmp_path / "out")
    # A build and a measurement each.
    assert len(lines(log)) == 2 * SPACE.size
    assert run_sweep(Arithmetic(log), SPACE, folder=tmp_path / "out") == first
    assert len(lines(log)) == 2 * SPACE.size


def test_constraints_may_change_and_a_space_may_grow_without_running_anything_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    small = Space((0.0, 0.2), ("fp32",), ("torch", "onnxruntime"))
    run_sweep(Arithmetic(log), small, folder=tmp_path, constraints=["latency_ms <= 3"])
    grown = run_sweep(Arithmetic(log), SPACE, folder=tmp_path, constraints=["latency_ms <= 1"])
    assert len(lines(log)) == 2 * SPACE.size
    # 10 ms x what is kept, 4 times faster on onnxruntime and twice as fast again in int8.
    assert {trial.candidate.label for trial in grown.accepted} == {
        "prune 0.2 int8 onnxruntime",  # 10 x 0.8 / 8 = 1.0
        "prune 0.4 int8 onnxruntime",  # 10 x 0.6 / 8 = 0.75
        "prune 0.6 int8 onnxruntime",  # 10 x 0.4 / 8 = 0.5
        "prune 0.6 fp32 onnxruntime",  # 10 x 0.4 / 4 = 1.0
    }
    # What is rejected is on no frontier.
    accepted = {trial.candidate.key for trial in grown.accepted}
    assert grown.frontiers and all(set(keys) <= accepted for _, keys in grown.frontiers)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    space = Space((0.0,), ("fp32",), ("torch",))
    run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path, settings={"epochs": 3})
    with pytest.raises(OtherSettings, match="epochs was 3 and is 4 now"):
        run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path, settings={"epochs": 4})


def test_a_sweep_of_some_candidates_draws_the_same_after_an_interruption(tmp_path: Path) -> None:
    layers = {"conv1": (0.0, 0.1, 0.2, 0.3), "conv2": (0.0, 0.5)}
    space = Space([level / 20 for level in range(10)], ("fp32", "int8"), ("torch", "onnxruntime"), layers)

    def sweep(name: str, stop_after: int | None = None) -> SweepResult:
        def listen(event: Event) -> None:
            if isinstance(event, TrialFinished) and event.done == stop_after:
                raise KeyboardInterrupt

        return run_sweep(
            Arithmetic(tmp_path / f"{name}.log"),
            space,
            folder=tmp_path / name,
            constraints=["latency_ms <= 2"],
            trials=12,
            seed=3,
            on_event=listen,
        )

    with pytest.raises(SweepInterrupted, match="5 of 12 candidates are finished"):
        sweep("parts", stop_after=5)
    whole, parts = sweep("whole"), sweep("parts")
    assert table(parts) == table(whole)
    assert len({trial.candidate.key for trial in whole.trials}) == 12
    # The baseline is tried beside those that were drawn, if it was not drawn itself.
    tried = {line.split()[1] for line in lines(tmp_path / "parts.log")}
    assert len(lines(tmp_path / "parts.log")) == 2 * len(tried) <= 2 * 13


def test_former_options_of_a_sweep_warn_and_change_nothing(tmp_path: Path) -> None:
    space = Space((0.0,), ("fp32",), ("torch",))
    with pytest.warns(FutureWarning, match=r"run_sweep\(sampler\) has no effect since 0.3, use run_sweep\(trials\)"):
        result = run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "out", sampler="nsga2")
    assert [trial.status for trial in result.trials] == ["done"]


def test_ctrl_c_ends_the_running_child_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = start(folder, log, pause_s=0.2)
    wait_for_lines(log, 4, process)
    said = end(process, signal.SIGINT)
    assert process.returncode == 130
    assert "candidates are finished and kept in" in said
    assert "run the same command again to continue" in said
    assert "Traceback" not in said
    # The third line is the build of the second candidate: the first was finished.
    assert finished(folder)


def test_a_second_run_is_refused_while_the_first_lives_and_no_longer(tmp_path: Path) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = start(folder, log, pause_s=30)
    try:
        wait_for_lines(log, 1, process)
        with pytest.raises(FolderInUse, match=f"process {process.pid} on"):
            run_sweep(Arithmetic(log), SPACE, folder=folder)
        found = status(folder)
        assert (found.pid, found.total, found.done, found.unfinished) == (
            process.pid,
            SPACE.size,
            0,
            ("prune 0 fp32 torch",),
        )
    finally:
        end(process, signal.SIGKILL)
    assert not status(folder).is_running
    result = run_sweep(Arithmetic(log), SPACE, folder=folder)
    assert len(result.trials) == SPACE.size
    # The attempt that was killed is counted, and only that.
    assert [trial.attempts for trial in result.trials] == [2] + [1] * (SPACE.size - 1)
