"""The store: what it keeps, what it refuses, what it puts aside; and the lock of its folder."""

from __future__ import annotations

import gzip
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from edge_opt.errors import FolderInUse, OtherSettings, UnreadableStore
from edge_opt.records.sweeps import Candidate, Trial
from edge_opt.run.config import RESULT_SCOPES, RunConfig
from edge_opt.search.locks import build_lock, folder_lock, measurement_lock, owner
from edge_opt.search.space import Space, plain_space
from edge_opt.search.store import SCHEMA, STORE_NAME, Built, ResultSource, Store
from edge_opt.search.sweep_progress import status
from sweep_jobs import figures

CANDIDATE = Candidate(0.1, "int8", "onnxruntime", (("conv1", 0.25),))
DONE = Trial(CANDIDATE, "done", figures(CANDIDATE), None, "", (), 1.5, attempts=2)


def filled(folder: Path) -> None:
    store = Store.open(folder, {"epochs": 3})
    store.save(DONE)
    store.close()


def backups(folder: Path) -> list[Path]:
    return [path for path in folder.glob("sweep.*.sqlite") if path.name != STORE_NAME]


def test_a_trial_comes_back_exactly_as_it_was(tmp_path: Path) -> None:
    filled(tmp_path)
    store = Store.open(tmp_path, {"epochs": 3})
    assert store.trials() == {CANDIDATE.key: DONE}
    store.close()


def test_attempts_are_counted_before_they_start_and_remembered(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {})
    assert store.count_attempt(CANDIDATE) == 1
    store.close()
    store = Store.open(tmp_path, {})
    assert store.count_attempt(CANDIDATE) == 2
    assert store.unfinished() == (CANDIDATE,)
    store.save(DONE)
    assert store.unfinished() == ()
    store.close()


def test_builds_are_kept_and_failed_rows_can_be_forgotten(tmp_path: Path) -> None:
    store = Store.open(tmp_path, {})
    store.save_build(CANDIDATE, Built({"accuracy": 0.5}, 2.0))
    assert store.build_of(CANDIDATE) == Built({"accuracy": 0.5}, 2.0)
    store.save(Trial(CANDIDATE, "failed", None, "raised", "measure: no", (), 1.0))
    assert store.forget_failed() == 1
    assert store.trials() == {}
    assert store.build_of(CANDIDATE) is None
    store.close()


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(OtherSettings, match=r"epochs was 3 and is 5 now; seed was not set and is 1 now"):
        Store.open(tmp_path, {"epochs": 5, "seed": 1})
    assert not backups(tmp_path)


def test_a_fresh_start_keeps_the_old_store_aside(tmp_path: Path) -> None:
    filled(tmp_path)
    said: list[str] = []
    store = Store.open(tmp_path, {"epochs": 5}, fresh=True, on_notice=said.append)
    assert store.trials() == {}
    store.close()
    (backup,) = backups(tmp_path)
    assert backup.name in said[0]
    backup.replace(tmp_path / STORE_NAME)
    assert Store.open_readonly(tmp_path).trials() == {CANDIDATE.key: DONE}


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def overwritten(path: Path) -> None:
    path.write_bytes(b"not a database at all, but long enough to be taken for one" * 100)


def garbled_row(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE trials SET trial = '{\"candidate\": 1'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("damage", [cut_short, overwritten, garbled_row])
def test_a_damaged_store_is_said_and_kept_aside(damage: object, tmp_path: Path) -> None:
    filled(tmp_path)
    damage(tmp_path / STORE_NAME)  # type: ignore[operator]
    before = (tmp_path / STORE_NAME).read_bytes()
    with pytest.raises(UnreadableStore, match="damaged"):
        Store.open_readonly(tmp_path)
    said: list[str] = []
    store = Store.open(tmp_path, {"epochs": 3}, on_notice=said.append)
    assert store.trials() == {}
    store.close()
    (backup,) = backups(tmp_path)
    assert backup.read_bytes() == before
    assert "it is damaged" in said[0]
    assert backup.name in said[0]


def version(path: Path, number: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {number}")
    connection.commit()
    connection.close()


def test_an_older_schema_is_said_and_kept_aside(tmp_path: Path) -> None:
    filled(tmp_path)
    version(tmp_path / STORE_NAME, 0)
    said: list[str] = []
    Store.open(tmp_path, {}, on_notice=said.append).close()
    assert f"it is of schema 0, and this edge_opt reads {SCHEMA}" in said[0]
    assert len(backups(tmp_path)) == 1


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    version(tmp_path / STORE_NAME, 99)
    with pytest.raises(UnreadableStore, match="newer edge_opt"):
        Store.open(tmp_path, {})
    assert not backups(tmp_path)


def test_a_store_of_0_2_0_is_reported_on_and_resumed(tmp_path: Path) -> None:
    recorded = Path(__file__).parents[1] / "recordings" / "files_of_0_2" / "sweep.sqlite.gz"
    (tmp_path / STORE_NAME).write_bytes(gzip.decompress(recorded.read_bytes()))
    before = status(tmp_path)
    assert (before.name, before.total, before.done, before.accepted) == ("SmallCNN", 6, 6, 6)
    # The settings of that run, as today's configuration spells them.
    config = RunConfig(epochs=2, fine_tune_epochs=1, min_time_s=0.05)
    settings, defaults = config.subset(*RESULT_SCOPES), RunConfig().subset(*RESULT_SCOPES)
    with closing(Store.open_readonly(tmp_path)) as store:
        sources = {name: ResultSource(*plain) for name, plain in store.metadata("sources").items()}
    store = Store.open(tmp_path, settings, sources, defaults=defaults)
    assert len(store.trials()) == 6 and store.build_of(Candidate(0.5, "int8", "onnxruntime")) is not None
    store.close()
    assert not backups(tmp_path)
    with pytest.raises(OtherSettings, match="epochs was 2 and is 3 now"):
        Store.open(tmp_path, {**settings, "epochs": 3}, defaults=defaults)


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    assert owner(tmp_path) is None
    with folder_lock(tmp_path):
        found = owner(tmp_path)
        assert found is not None
        with pytest.raises(FolderInUse, match=f"process {found.pid} on"), folder_lock(tmp_path):
            pass
    assert owner(tmp_path) is None
    with folder_lock(tmp_path):
        pass


def test_timing_waits_for_builds_and_builds_wait_for_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    happened: list[str] = []
    waits, may_end = threading.Event(), threading.Event()

    def build(name: str, ready: threading.Event) -> None:
        with build_lock():
            happened.append(f"{name} begins")
            ready.set()
            may_end.wait(30)
            happened.append(f"{name} ends")

    def measure() -> None:
        with measurement_lock(lambda _: waits.set()):
            happened.append("timing")

    first_runs, second_runs = threading.Event(), threading.Event()
    threads = [threading.Thread(target=build, args=("first", first_runs)), threading.Thread(target=measure)]
    threads[0].start()
    assert first_runs.wait(30)
    threads[1].start()
    assert waits.wait(30)
    may_end.set()
    for thread in threads:
        thread.join(30)
    build("second", second_runs)
    assert happened == ["first begins", "first ends", "timing", "second begins", "second ends"]


def test_builds_go_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    waits, said = threading.Event(), list[str]()

    def measure() -> None:
        with measurement_lock(lambda holder: (said.append(holder), waits.set())):  # type: ignore[func-returns-value]
            pass

    with build_lock(folder=Path("long")):
        with build_lock(folder=Path("short")):
            pass
        waiting = threading.Thread(target=measure)
        waiting.start()
        assert waits.wait(30)
    waiting.join(30)
    assert said[0].startswith("the sweep in long (process ")  # the other one has ended


def test_a_folder_without_a_sweep_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnreadableStore, match="holds no sweep"):
        Store.open_readonly(tmp_path)


def test_the_status_counts_what_a_run_that_goes_on_counts(tmp_path: Path) -> None:
    space = Space((0.0, 0.5), ("int8",), ("onnxruntime",))
    baseline = Candidate(0.0, "fp32", "torch")
    store = Store.open(tmp_path, {})
    plan = {"name": "net", "total": space.size, "metric": "accuracy", "constraints": [], "space": plain_space(space)}
    store.save_metadata("plan", plan)
    # The baseline is not of the space; one of the two candidates that are is finished.
    for candidate in (baseline, space[0]):
        store.save(Trial(candidate, "done", figures(candidate), None, "", (), 1.0))
    found = status(tmp_path)
    assert (found.done, found.left, found.best) == (1, 1, space[0].key)
    # When all is done, the winner is the one of the last comparison.
    store.save(Trial(space[1], "done", figures(space[1]), None, "", (), 1.0))
    store.save_metadata("verdict", {"best": space[1].key, "recommendation": "it won the last comparison"})
    found = status(tmp_path)
    assert (found.left, found.best, found.recommendation) == (0, space[1].key, "it won the last comparison")
    # What that comparison rejected is not counted as accepted, as the end of the run does not.
    store.save_metadata("verdict", {"best": space[1].key, "recommendation": "", "accepted": [space[1].key]})
    assert (status(tmp_path).done, status(tmp_path).accepted) == (2, 1)
    store.close()
