"""Candidates that fail, each in its way, and sweeps that go on."""

from __future__ import annotations

import inspect
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import sweep_jobs
from edge_opt.errors import InvalidInput
from edge_opt.records.sweeps import Candidate, Trial
from edge_opt.search.isolation import Isolation, Limits, keep_fork_servers, pickle_job
from edge_opt.search.space import Space
from edge_opt.search.sweep import candidate_folder, run_sweep
from edge_opt.search.sweep_progress import Event, PhaseStarted
from sweep_jobs import Arithmetic, Flaky, Misbehaving, figures

MIB = 2**20
SLEEP_LINE = 1 + inspect.getsource(sweep_jobs).splitlines().index("            time.sleep(3600)")

pytestmark = pytest.mark.usefixtures("own_machine")


def test_a_sweep_finishes_with_a_row_for_each_way_to_fail(tmp_path: Path) -> None:
    levels = tuple(level / 10 for level in range(9))
    result = run_sweep(
        Misbehaving(),
        Space(levels, ("fp32",), ("torch",)),
        folder=tmp_path,
        memory_limit_bytes=250 * MIB,
        time_limit_s=6,
    )
    assert [(trial.failure, trial.reason) for trial in result.trials] == [
        (None, ""),
        ("raised", "build: ValueError: channels must be divisible by 8"),
        ("out of memory", "build used more memory than the limit of 250 MiB"),
        ("timed out", f"build took longer than the limit of 6 s, in build (sweep_jobs.py, line {SLEEP_LINE})"),
        ("no result", "accuracy is nan"),
        ("crashed", "build was ended by SIGABRT; see build.log"),
        ("crashed", "build was over without a result; see build.log"),
        ("no result", "build returned NoneType, not Mapping"),
        ("no result", "measure returned dict, not TrialMetrics"),
    ]
    assert all(trial.metrics is None for trial in result.trials[1:])
    assert result.best == result.trials[0].candidate.key
    # Only a crash may have come from outside, so only that was tried again.
    assert [trial.attempts for trial in result.trials] == [1, 1, 1, 1, 1, 2, 2, 1, 1]

    def log(row: int) -> str:
        return (candidate_folder(tmp_path, result.trials[row].candidate) / "build.log").read_text(encoding="utf-8")

    assert re.search(r"Traceback .*sweep_jobs\.py.*ValueError: channels", log(1), re.DOTALL)
    assert "about to hang" in log(3)
    assert "Fatal Python error: Aborted" in log(5)


def test_a_crash_is_tried_again_and_failed_rows_on_request(tmp_path: Path) -> None:
    space = Space((0.0, 0.5), ("fp32",), ("torch",))
    job = Flaky(tmp_path / "marks", crashes=2)
    first = run_sweep(job, space, folder=tmp_path / "out", retries=0)
    assert [(trial.status, trial.attempts) for trial in first.trials] == [("done", 1), ("failed", 1)]
    assert run_sweep(job, space, folder=tmp_path / "out", retries=0) == first
    # The second crash, and then the attempt that succeeds.
    again = run_sweep(job, space, folder=tmp_path / "out", retries=1, retry_failed=True)
    assert [(trial.status, trial.attempts) for trial in again.trials] == [("done", 1), ("done", 3)]


def test_a_given_baseline_is_a_row_and_does_not_run(tmp_path: Path) -> None:
    baseline = Candidate(0.0, "fp32", "torch")
    given = Trial(baseline, "done", replace(figures(baseline), accuracy=0.5), None, "", (), 3.0)
    space = Space((0.0, 0.5), ("fp32",), ("torch",))
    result = run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "out", baseline=given)
    assert result.baseline == result.trials[0] == given
    assert baseline.key not in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_baseline_beside_the_space_is_tried_and_is_no_row(tmp_path: Path) -> None:
    baseline = Candidate(0.0, "fp32", "torch")
    space = Space((0.5,), ("fp32",), ("torch",))
    result = run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "out", baseline=baseline)
    assert result.baseline.metrics == figures(baseline)
    assert [trial.candidate.pruning for trial in result.trials] == [0.5]


def test_a_space_without_a_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no unpruned fp32 candidate"):
        run_sweep(Arithmetic(tmp_path / "log"), Space((0.5,), ("fp32",), ("torch",)), folder=tmp_path)


def test_limits_and_counts_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    space, job = Space((0.0,), ("fp32",), ("torch",)), Arithmetic(tmp_path / "log")
    with pytest.raises(InvalidInput, match="the memory limit is 0"):
        run_sweep(job, space, folder=tmp_path, memory_limit_bytes=0)
    with pytest.raises(InvalidInput, match="trials is 0"):
        run_sweep(job, space, folder=tmp_path, trials=0)
    with pytest.raises(InvalidInput, match="say how many to try"):
        many = Space((0.0,), ("fp32",), ("torch",), {f"conv{i}": (0.0, 0.5) for i in range(20)})
        run_sweep(job, many, folder=tmp_path)
    with pytest.raises(InvalidInput, match="workers is -1"):
        run_sweep(job, space, folder=tmp_path, workers=-1)


def test_what_only_saves_time_may_be_missing(tmp_path: Path) -> None:
    space = Space((0.0,), ("fp32",), ("torch",))
    done = run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "out", preload=["?no_such_module"])
    assert [trial.status for trial in done.trials] == ["done"]


def test_a_job_that_no_other_process_can_import_is_refused(tmp_path: Path) -> None:
    class Local(Misbehaving):
        pass

    with pytest.raises(InvalidInput, match="define it at the top of a module"):
        run_sweep(Local(), Space((0.0,), ("fp32",), ("torch",)), folder=tmp_path)
    with pytest.raises(InvalidInput, match="cannot import no_such_module"):
        run_sweep(Misbehaving(), Space((0.0,), ("fp32",), ("torch",)), folder=tmp_path, preload=["no_such_module"])


def fork_servers() -> list[psutil.Process]:
    """The processes that the jobs of these tests are forked from, and those forked from them."""
    children = psutil.Process().children(recursive=True)
    # By what they have imported: one that other tests have started may still be there.
    return [child for child in children if any('"sweep_jobs"' in word for word in child.cmdline())]


def test_halves_run_in_processes_of_their_own_that_end(tmp_path: Path) -> None:
    seen: list[list[psutil.Process]] = []

    def listen(event: Event) -> None:
        if isinstance(event, PhaseStarted):
            seen.append(fork_servers())

    run_sweep(Arithmetic(tmp_path / "log"), Space((0.0, 0.5), ("fp32",), ("torch",)), folder=tmp_path, on_event=listen)
    # Between the halves there is one process: that from which they are forked.
    assert [len(processes) for processes in seen[1:]] == [1, 1, 1]
    assert not psutil.wait_procs(seen[-1], timeout=30)[1]


def test_closing_ends_what_runs(tmp_path: Path) -> None:
    isolation = Isolation(["sweep_jobs"])
    outcome = isolation.run(
        pickle_job(Misbehaving()), "build", (Candidate(0.3, "fp32", "torch"), tmp_path), tmp_path, Limits(seconds=0.3)
    )
    assert outcome.failure == "timed out"
    (fork_server,) = fork_servers()
    isolation.close()
    assert not psutil.wait_procs([fork_server], timeout=30)[1]


def test_a_lost_nursery_is_a_crash_and_is_replaced(tmp_path: Path) -> None:
    job, candidate = pickle_job(Misbehaving()), Candidate(0.0, "fp32", "torch")
    with Isolation(["sweep_jobs"]) as isolation:
        assert isolation.run(job, "build", (candidate, tmp_path), tmp_path, Limits()).failure is None
        (fork_server,) = fork_servers()
        fork_server.kill()
        fork_server.wait(30)
        assert isolation.run(job, "build", (candidate, tmp_path), tmp_path, Limits()).failure is None


def test_sweeps_of_one_run_fork_from_one_process(tmp_path: Path) -> None:
    space = Space((0.0, 0.5), ("fp32",), ("torch",))
    with keep_fork_servers():
        run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "first", preload=["?nowhere"])
        begun = fork_servers()
        run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "second")
        assert len(begun) == 1 and fork_servers() == begun
        # What it did not import, it imports then.
        run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "third", preload=["csv"])
        assert fork_servers() == begun
    assert not psutil.wait_procs(begun, timeout=30)[1]
    assert not fork_servers()


def test_a_process_that_began_ahead_imports_what_a_sweep_adds(tmp_path: Path) -> None:
    space = Space((0.0,), ("fp32",), ("torch",))
    with keep_fork_servers("sweep_jobs"):
        (ahead,) = fork_servers()
        with pytest.raises(InvalidInput, match="cannot import nowhere"):
            run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "first", preload=["nowhere"])
    assert not psutil.wait_procs([ahead], timeout=30)[1]
    with keep_fork_servers("sweep_jobs"):
        (ahead,) = fork_servers()
        run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "second", preload=["csv", "?nowhere"])
        assert fork_servers() == [ahead]
    assert not psutil.wait_procs([ahead], timeout=30)[1]


def test_a_process_that_still_imports_ends_at_once_when_nobody_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweep_jobs_slow.py").write_text("import time; time.sleep(60)", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    begun = time.monotonic()
    with keep_fork_servers("sweep_jobs_slow"):
        pass
    assert time.monotonic() - begun < 1.5


def test_data_that_starts_threads_costs_one_process_not_one_per_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import threading, time", "def load(_):", "    threading.Thread(target=time.sleep, args=(60,)).start()"]
    (tmp_path / "sweep_jobs_thread.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    space, seen = Space((0.0,), ("fp32",), ("torch",)), []
    with keep_fork_servers():
        for name in ("first", "second"):
            job = Arithmetic(tmp_path / "log")
            run_sweep(job, space, folder=tmp_path / name, preload=["?sweep_jobs_thread:load data"])
            seen.append(fork_servers())
    assert len(seen[0]) == 1 and seen[0] == seen[1]


def test_after_an_error_no_process_is_kept(tmp_path: Path) -> None:
    space = Space((0.0,), ("fp32",), ("torch",))
    with pytest.raises(InvalidInput, match="cannot import nowhere"), keep_fork_servers():
        run_sweep(Arithmetic(tmp_path / "log"), space, folder=tmp_path / "out", preload=["nowhere"])
    assert not fork_servers()
