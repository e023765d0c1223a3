"""Sweeps as processes that tests start, watch and end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from edge_opt.records.sweeps import SweepResult
from edge_opt.search.store import Store

PATIENCE_S = 60


def lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def start(
    folder: Path, log: Path, pause_s: float, workers: int = 0, start_new_session: bool = False
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            str(Path(__file__).with_name("sweep_process.py")),
            str(folder),
            str(log),
            str(pause_s),
            str(workers),
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=start_new_session,
    )


def wait_for_lines(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(lines(log)) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(lines(log)) >= count or process.poll() == 0


def end(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """End a process by a signal; nothing that it has started may stay."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive
    return said


def table(result: SweepResult) -> SweepResult:
    """A result without what a clock or an interruption leaves in it."""
    return replace(
        result,
        baseline=replace(result.baseline, seconds=0.0, attempts=1),
        trials=tuple(replace(trial, seconds=0.0, attempts=1) for trial in result.trials),
    )


def finished(folder: Path) -> set[str]:
    return set(Store.open_readonly(folder).trials()) if (folder / "sweep.sqlite").exists() else set()


def address_in(scheduler_file: Path) -> str:
    """The address that a scheduler of Dask writes to a file; the file is there before all of it is written."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return str(json.loads(scheduler_file.read_text(encoding="utf-8"))["address"])
        except (OSError, ValueError):
            assert time.monotonic() < deadline, f"no scheduler has written {scheduler_file.name}"
            time.sleep(0.05)
