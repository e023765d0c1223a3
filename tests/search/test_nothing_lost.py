"""Kills, full disks, locked stores: nothing is lost, and each is one sentence."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from edge_opt.cli import app
from edge_opt.errors import EdgeOptError, NotSaved, UnreadableStore
from edge_opt.records.sweeps import Candidate
from edge_opt.run.config import RunConfig
from edge_opt.run.job import run_phase
from edge_opt.run.model_and_data import ModelAndData
from edge_opt.search.isolation import _START, Isolation, Limits, pickle_job
from edge_opt.search.locks import build_lock, folder_lock, measurement_lock, run_folder
from edge_opt.search.space import Space
from edge_opt.search.store import STORE_NAME, Store
from edge_opt.search.sweep import run_sweep
from kills import KilledSweep
from sweep_control import lines
from sweep_jobs import Family, Large, Littering, ServerKiller

pytestmark = pytest.mark.usefixtures("own_machine")
SPACE = Space((0.0, 0.5), ("fp32",), ("torch",))


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_and_leave_nobody(tmp_path: Path) -> None:
    sweep = KilledSweep(tmp_path / "sweep", random.Random(3), pause_s=0.1)
    sweep.run(("parent", "fork_server", "child"), kills=6)
    assert sweep.kills.total() == 6


def test_a_crashed_build_starts_again_in_a_clean_folder(tmp_path: Path) -> None:
    result = run_sweep(Littering(tmp_path / "marks", crashes=1), SPACE, folder=tmp_path / "out")
    assert [(trial.status, trial.attempts) for trial in result.trials] == [("done", 1), ("done", 2)]


def test_a_phase_of_the_run_starts_again_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise a runtime whose conversion was killed would never be tried in that folder again.
    monkeypatch.setattr("edge_opt.run.job.preload", lambda source: ["sweep_jobs"])  # others take seconds
    job, source = ServerKiller(tmp_path / "marks", crashes=1), ModelAndData.from_config(RunConfig())
    arguments = (Candidate(0.5, "fp32", "torch"), tmp_path)
    assert run_phase(job, source, "build", arguments, tmp_path / "out") == {}


def test_a_killed_nursery_takes_along_what_a_build_has_started(tmp_path: Path) -> None:
    note = tmp_path / "note"
    started: list[psutil.Process] = []

    def kill_nursery() -> None:
        while not note.exists() or not note.read_text(encoding="utf-8"):
            time.sleep(0.01)
        fork_server, grandchild = map(int, note.read_text(encoding="utf-8").split())
        started.append(psutil.Process(grandchild))
        os.kill(fork_server, signal.SIGKILL)

    killer = threading.Thread(target=kill_nursery)
    killer.start()
    with Isolation(["sweep_jobs"]) as isolation:
        candidate = Candidate(0.0, "fp32", "torch")
        outcome = isolation.run(pickle_job(Family(note)), "build", (candidate, tmp_path), tmp_path, Limits(seconds=60))
    killer.join()
    assert (outcome.failure, outcome.was_killed) == ("crashed", True)
    assert not psutil.wait_procs(started, timeout=30)[1]


DYING = """
import os, signal, time
from edge_opt.search.isolation import _ServerProcess
for pause in (0.3, 0.1, 0.05, 0.02, 0.01, 0.0):
    server = _ServerProcess(["slow_import"])
    extended = _ServerProcess(["json"])
    extended.wait_until_ready()
    extended.add(["slow_import"])
    print(extended.process.pid)
    print(server.process.pid, flush=True)
    time.sleep(pause)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_server_that_still_imports_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text("import time; time.sleep(60)", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    started = subprocess.run([sys.executable, "-c", DYING], env=environment, capture_output=True, text=True, timeout=60)
    assert started.returncode == -signal.SIGKILL
    servers = [int(line) for line in started.stdout.split()]
    assert len(servers) == 12
    deadline = time.monotonic() + 3
    while any(map(psutil.pid_exists, servers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in servers if psutil.pid_exists(pid)]


BESIDE = """
import os, signal, sys, threading, time
from pathlib import Path
from edge_opt.search.isolation import Isolation, Limits, pickle_job
from sweep_jobs import Patient
folder = Path(sys.argv[1])
with Isolation(["sweep_jobs", "~slow_import"]) as isolation:
    job = pickle_job(Patient(folder / "pids"))
    running = threading.Thread(target=isolation.run, args=(job, "train", (), folder, Limits()), daemon=True)
    running.start()
    while not ((folder / "imports").is_file() and (folder / "pids").is_file() and (folder / "pids").read_text()):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_imports_beside_its_child_ends_with_its_parent_and_takes_the_child_along(tmp_path: Path) -> None:
    lines = "import pathlib, time; pathlib.Path(__file__).with_name('imports').touch(); time.sleep(60)"
    (tmp_path / "slow_import.py").write_text(lines, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1] / "support"), *sys.path])
    command = [sys.executable, "-c", BESIDE, str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pids = [int(word) for word in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert len(pids) == 3  # the server, its child, and what the child started
    deadline = time.monotonic() + 3
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


FULL = """
import resource, sys
from pathlib import Path
from edge_opt.errors import NotSaved
from edge_opt.search.sweep import run_sweep
from edge_opt.search.space import Space
from sweep_jobs import Large
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
try:
    space = Space((0.0, 0.5), ("fp32",), ("torch",))
    run_sweep(Large(Path(sys.argv[1]) / "log"), space, folder=Path(sys.argv[1]) / "out")
except NotSaved as error:
    sys.exit(str(error))
"""


def test_a_disk_that_takes_no_more_is_one_sentence_and_no_failed_row(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    (sentence,) = ended.stderr.strip().splitlines()
    assert "File too large" in sentence
    assert "run again to continue: finished candidates are kept" in sentence
    store = Store.open_readonly(tmp_path / "out")
    assert [trial.status for trial in store.trials().values()] == ["done"]
    store.close()
    result = run_sweep(Large(tmp_path / "log"), SPACE, folder=tmp_path / "out")
    assert [trial.status for trial in result.trials] == ["done", "done"]
    # The baseline was built once.
    assert lines(tmp_path / "log").count(f"build {result.trials[0].candidate.key}") == 1


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = CliRunner().invoke(app, ["init", str(tmp_path / "file" / "run.yaml")])
    assert ended.exit_code == 2
    assert "File exists" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_locked_store_is_waited_for_then_said_and_never_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_opt.search.store._PATIENCE_S", 0.1)
    Store.open(tmp_path, {}).close()
    other = sqlite3.connect(tmp_path / STORE_NAME)
    other.execute("BEGIN EXCLUSIVE")
    said: list[str] = []
    with pytest.raises(UnreadableStore, match="is locked by another program; close that and run again"):
        Store.open(tmp_path, {}, on_notice=said.append)
    assert "waiting for up to" in said[0]
    other.rollback()
    other.close()
    Store.open(tmp_path, {}).close()
    assert [path.name for path in tmp_path.glob("sweep*")] == [STORE_NAME]


def test_a_store_that_cannot_be_opened_is_said_and_never_set_aside(tmp_path: Path) -> None:
    (tmp_path / STORE_NAME).mkdir()
    with pytest.raises(UnreadableStore, match="cannot be opened"):
        Store.open(tmp_path, {})
    assert [path.name for path in tmp_path.glob("sweep*")] == [STORE_NAME]


def test_a_store_that_cannot_be_written_to_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {})
    store._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(NotSaved, match="attempt to write a readonly database.*run again to go on"):
        store.count_attempt(Candidate(0.0, "fp32", "torch"))
    store.close()


def test_locks_are_where_nobody_else_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_folder() == tmp_path / "edge-opt"
    assert run_folder().stat().st_mode & 0o777 == 0o700
    run_folder().chmod(0o777)
    with pytest.raises(EdgeOptError, match="not a folder that only you may enter"):
        run_folder()
    # A run directory that others may enter is none.
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "edge-opt").rmdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "open"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # In a shared /tmp another user could take the name first.
    assert run_folder().parent in (Path(f"/run/user/{os.getuid()}"), tmp_path / "home" / ".cache" / "edge-opt")


def test_without_a_home_the_folder_of_locks_has_no_name_to_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "edge-opt-run-taken").mkdir(mode=0o777)
    (tmp_path / "edge-opt-run-taken").chmod(0o777)
    if not Path(f"/run/user/{os.getuid()}").exists():
        assert run_folder() == run_folder() != tmp_path / "edge-opt-run-taken"
        assert run_folder().parent == tmp_path and run_folder().stat().st_mode & 0o777 == 0o700


def test_a_fork_server_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    for name in ("ctypes", "json", "signal", "encodings"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')", encoding="utf-8")
    words = [sys.executable, "-c", _START, "[]", "[]", str(os.getpid())]
    subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "executed").exists()


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    (run_folder() / "gate.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), build_lock():
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_build_that_waits_for_a_measurement_is_announced(tmp_path: Path) -> None:
    waits, said = threading.Event(), list[str]()

    def on_wait(holder: str) -> None:
        said.append(holder)
        waits.set()

    with folder_lock(tmp_path), measurement_lock():
        building = threading.Thread(target=lambda: build_lock(on_wait).__enter__())
        building.start()
        assert waits.wait(30)
    building.join(30)
    # The other sweep, its folder and since when.
    assert re.fullmatch(rf"the sweep in {tmp_path} \(process {os.getpid()}\) measures .* since \d\d:\d\d:\d\d", said[0])


def test_failed_rows_are_tried_again_on_request_by_every_command_that_sweeps() -> None:
    for command in ("run", "sweep"):
        assert "--retry-failed" in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
