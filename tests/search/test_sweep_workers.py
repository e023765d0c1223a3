"""Builds on the workers of a Dask cluster, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from edge_opt.errors import EdgeOptError
from edge_opt.search.build import Event, PhaseEnded, PhaseStarted
from edge_opt.search.space import Space
from edge_opt.search.sweep import candidate_folder, run_sweep
from edge_opt.search.workers import started
from sweep_control import address_in, end, finished, lines, start, table, wait_for_lines
from sweep_jobs import Arithmetic, WorkerKiller
from sweep_process import CONSTRAINTS, SPACE

HERE = Path(__file__).parents[1] / "support"

pytestmark = pytest.mark.usefixtures("own_machine")


@pytest.mark.slow
def test_two_workers_give_the_same_table_and_files_and_measuring_waits_for_all_builds(tmp_path: Path) -> None:
    told: list[Event] = []
    alone = run_sweep(Arithmetic(tmp_path / "a.log"), SPACE, folder=tmp_path / "a", constraints=CONSTRAINTS)
    spread = run_sweep(
        Arithmetic(tmp_path / "b.log"),
        SPACE,
        folder=tmp_path / "b",
        constraints=CONSTRAINTS,
        workers=2,
        on_event=told.append,
    )
    assert table(spread) == table(alone)
    for trial in spread.trials:
        weights = candidate_folder(tmp_path / "b", trial.candidate) / "model" / "weights.bin"
        assert weights.read_bytes() == trial.candidate.key.encode() * 100
    # The baseline is built and measured first, on this machine; then 11 builds, and only then 11 measurements.
    phases = [event.phase for event in told if isinstance(event, PhaseEnded)]
    assert phases == ["build", "measure"] + ["build"] * 11 + ["measure"] * 11
    assert most_at_once(told) == 2


def most_at_once(told: list[Event]) -> int:
    running, most = 0, 0
    for event in told:
        running += isinstance(event, PhaseStarted) - isinstance(event, PhaseEnded)
        most = max(most, running)
    return most


@pytest.mark.slow
def test_a_worker_killed_in_mid_candidate_costs_that_attempt_only(tmp_path: Path) -> None:
    space = Space((0.0, 0.5), ("fp32",), ("torch",))
    result = run_sweep(WorkerKiller(tmp_path / "marks", crashes=1), space, folder=tmp_path / "out", workers=1)
    assert [(trial.status, trial.attempts) for trial in result.trials] == [("done", 1), ("done", 2)]


@pytest.mark.slow
def test_a_candidate_that_always_kills_its_worker_is_a_row(tmp_path: Path) -> None:
    space = Space((0.0, 0.5), ("fp32",), ("torch",))
    result = run_sweep(WorkerKiller(tmp_path / "marks", crashes=9), space, folder=tmp_path / "out", workers=1)
    assert [(trial.failure, trial.reason, trial.attempts) for trial in result.trials] == [
        (None, "", 1),
        ("crashed", "each worker that built it was lost", 4),
    ]


@pytest.mark.slow
def test_a_sweep_with_workers_that_is_killed_leaves_nobody_behind_and_keeps_its_builds(tmp_path: Path) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = start(folder, log, pause_s=0.2, workers=2)
    # The baseline's two lines, four builds, and a fifth that runs: three at least were finished and kept.
    wait_for_lines(log, 7, process)
    end(process, signal.SIGKILL)
    assert len(finished(folder)) == 1
    before = {line.split()[1] for line in lines(log)[2:5]}
    result = run_sweep(Arithmetic(log), SPACE, folder=folder, constraints=CONSTRAINTS)
    assert len(result.trials) == SPACE.size
    assert [lines(log).count(f"build {key}") for key in before] == [1, 1, 1]


@pytest.mark.slow
def test_ctrl_c_at_the_terminal_ends_workers_without_a_word_of_theirs(tmp_path: Path) -> None:
    folder, log = tmp_path / "out", tmp_path / "log"
    process = start(folder, log, pause_s=0.5, workers=2, start_new_session=True)
    # The baseline's two lines, and a build that runs.
    wait_for_lines(log, 3, process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same again to go on" in said
    assert "Traceback" not in said
    assert not psutil.wait_procs(children, timeout=60)[1]


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A scheduler and two workers as people start them, each a process of its own."""
    dask = [sys.executable, "-m", "dask"]
    address = folder / "scheduler.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment, "cwd": folder}
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    commands = [[*dask, "scheduler", *local, "--port", "0", "--scheduler-file", str(address)]]
    commands += [[*dask, "worker", *local, "--scheduler-file", str(address), "--nthreads", "1", "--no-nanny"]] * 2
    processes = [subprocess.Popen(command, **quiet) for command in commands]  # type: ignore[call-overload]
    try:
        yield address_in(address), processes[0]
    finally:
        # Asked to close at the same time, Dask's processes may wait for each other.
        for process in processes:
            process.kill()
            process.wait(60)


@pytest.mark.slow
def test_the_workers_of_a_scheduler_give_the_same_table(tmp_path: Path) -> None:
    alone = run_sweep(Arithmetic(tmp_path / "a.log"), SPACE, folder=tmp_path / "a", constraints=CONSTRAINTS)
    (tmp_path / "dask").mkdir()
    with cluster(tmp_path / "dask") as (address, _):
        job = Arithmetic(tmp_path / "b.log")
        spread = run_sweep(job, SPACE, folder=tmp_path / "b", constraints=CONSTRAINTS, scheduler=address)
    assert table(spread) == table(alone)


@pytest.mark.slow
def test_a_scheduler_that_goes_away_is_said_and_the_sweep_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "dask").mkdir()
    job = Arithmetic(tmp_path / "log", pause_s=0.1)
    with cluster(tmp_path / "dask") as (address, scheduler):

        def listen(event: Event) -> None:
            # The baseline is built here; this is the first that a worker has built.
            if isinstance(event, PhaseEnded) and event.phase == "build" and event.candidate.pruning > 0:
                scheduler.kill()

        with pytest.raises(EdgeOptError, match="the Dask scheduler tcp://.* is gone; run again to go on"):
            run_sweep(job, SPACE, folder=tmp_path / "out", scheduler=address, on_event=listen)
    assert len(run_sweep(job, SPACE, folder=tmp_path / "out").trials) == SPACE.size


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.search.workers.PATIENCE_S", 0.5)
    with pytest.raises(EdgeOptError, match="no Dask scheduler answers at tcp://127.0.0.1:9"):
        run_sweep(Arithmetic(tmp_path / "log"), SPACE, folder=tmp_path, scheduler="tcp://127.0.0.1:9")


def test_workers_that_are_lost_while_they_start_are_started_again() -> None:
    tries: list[int] = []

    def start(failures: int) -> str:
        tries.append(1)
        if len(tries) <= failures:
            raise RuntimeError("Nanny failed to start.")
        return "cluster"

    assert started(lambda: start(2)) == "cluster" and len(tries) == 3
    tries.clear()
    with pytest.raises(EdgeOptError, match="cannot be started .*Nanny failed to start.*run again to go on"):
        started(lambda: start(9))
