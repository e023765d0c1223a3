"""Builds side by side: in local processes, and on the workers of a Dask scheduler."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.search.builders import check_scheduler
from edge_opt.search.space import Space
from edge_opt.search.sweep import candidate_folder, run_sweep
from edge_opt.search.sweep_progress import Event, PhaseEnded, PhaseStarted
from kills import dask_cluster
from sweep_control import end, finished, lines, start, table, wait_for_lines
from sweep_jobs import Arithmetic, ServerKiller
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
def test_a_killed_build_beside_another_costs_that_attempt_only(tmp_path: Path) -> None:
    space = Space((0.0, 0.5), ("fp32",), ("torch",))
    result = run_sweep(ServerKiller(tmp_path / "marks", crashes=1), space, folder=tmp_path / "out", workers=2)
    assert [(trial.status, trial.attempts) for trial in result.trials] == [("done", 1), ("done", 2)]


@pytest.mark.slow
def test_a_sweep_with_workers_opens_no_port(tmp_path: Path) -> None:
    own_ports = listening_ports(psutil.Process())
    ports_during_builds: set[int] = set()

    def record_ports(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == "build" and event.candidate.pruning:
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                # A worker may end between being listed and being asked; then it has no port any more.
                with contextlib.suppress(psutil.NoSuchProcess):
                    ports_during_builds.update(listening_ports(process))

    run_sweep(Arithmetic(tmp_path / "log", pause_s=0.1), SPACE, folder=tmp_path, workers=2, on_event=record_ports)
    assert ports_during_builds == own_ports


def listening_ports(process: psutil.Process) -> set[int]:
    return {
        connection.laddr.port
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


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
    assert "run the same command again to continue" in said
    assert "Traceback" not in said
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.slow
def test_the_workers_of_a_scheduler_give_the_same_table(tmp_path: Path) -> None:
    alone = run_sweep(Arithmetic(tmp_path / "a.log"), SPACE, folder=tmp_path / "a", constraints=CONSTRAINTS)
    (tmp_path / "dask").mkdir()
    with dask_cluster(tmp_path / "dask", workers=2) as (address, _):
        job = Arithmetic(tmp_path / "b.log")
        spread = run_sweep(job, SPACE, folder=tmp_path / "b", constraints=CONSTRAINTS, scheduler=address, insecure=True)
    assert table(spread) == table(alone)


@pytest.mark.slow
def test_a_scheduler_that_goes_away_is_said_and_the_sweep_goes_on_without(tmp_path: Path) -> None:
    (tmp_path / "dask").mkdir()
    job = Arithmetic(tmp_path / "log", pause_s=0.1)
    with dask_cluster(tmp_path / "dask", workers=2) as (address, scheduler):

        def listen(event: Event) -> None:
            # The baseline is built here; this is the first that a worker has built.
            if isinstance(event, PhaseEnded) and event.phase == "build" and event.candidate.pruning > 0:
                scheduler.kill()

        with pytest.raises(EdgeOptError, match="the Dask scheduler tcp://.* is gone"):
            run_sweep(job, SPACE, folder=tmp_path / "out", scheduler=address, insecure=True, on_event=listen)
    assert len(run_sweep(job, SPACE, folder=tmp_path / "out").trials) == SPACE.size


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_opt.search.builders.CONNECT_WITHIN_S", 0.5)
    with pytest.raises(EdgeOptError, match="no Dask scheduler answers at tcp://127.0.0.1:9"):
        run_sweep(Arithmetic(tmp_path / "log"), SPACE, folder=tmp_path, scheduler="tcp://127.0.0.1:9", insecure=True)


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:8786", "tcp://127.0.0.1:8786"])
def test_a_scheduler_without_encryption_needs_consent(address: str) -> None:
    with pytest.raises(InvalidInput, match="--insecure"):
        check_scheduler(address, insecure=False)
    check_scheduler(address, insecure=True)
    check_scheduler("tls://host:8786", insecure=False)
    with pytest.raises(InvalidInput, match="tls://HOST:PORT"):
        check_scheduler("host:8786", insecure=True)
