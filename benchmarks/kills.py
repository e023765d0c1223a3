"""Kill -9 at random moments: the sweep, a fork server, a forked child, the scheduler.

    python benchmarks/kills.py [KILLS] [SEED]

An eighth are killed in whole runs of `edge-opt run`: while it imports, trains, screens runtimes (converts and compares
them) and pruning ratios, builds, measures, times the finalists and scores. The others are killed in small jobs of
twelve candidates. One folder after the other, until so many processes were killed. After each folder: every candidate
has its row, none has failed, no stored result was computed again, and no process is left 3 s after its sweep was
killed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from edge_opt.search.store import Store
from kills import KilledSweep, role_of
from sweep_control import finished

ROLES = ("parent", "fork_server", "child")
# Phases of a run, with the log that each begins.
PHASES = {
    "start": "", "train": "baseline/train.log", "convert": "baseline/convert.log", "compare": "baseline/compare.log",
    "screen": "baseline/screen.log", "build": "candidates/*/build.log", "measure": "candidates/*/measure.log",
    "finals": "candidates/compare.log", "score": "candidates/*/score.log",
}  # fmt: skip
SETTINGS = ("epochs=2", "fine_tune_epochs=1", "train_subset=300", "min_time_s=0.02")
_END_WITHIN_S = 3.0


class KilledRun:
    """One folder of `edge-opt run`, continued until it is whole."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.kills, self.rows, self._chance = folder, Counter[str](), 0, chance
        self._log = folder.with_suffix(".log")
        self._kept: dict[Path, float] = {}

    def run(self, most: int) -> None:
        """Kill up to so many, one in each phase, then let the run come to its end."""
        process, begun = self._start(), time.time()
        for phase in self._chosen(most):
            while process.poll() not in (0, 1) and not self._is_in(phase, begun):
                if process.poll() is not None:  # its training was killed; the next run does it
                    process = self._start()
                time.sleep(0.02)
            time.sleep(self._chance.uniform(0, 0.5))
            if process.poll() is not None:
                break
            below = psutil.Process(process.pid).children(recursive=True)
            roles = {role_of(child): child for child in below}
            roles["parent"] = psutil.Process(process.pid)
            role = self._chance.choice([role for role in ROLES if role in roles])
            self._remember()
            try:
                roles[role].kill()
            except psutil.NoSuchProcess:
                continue
            self.kills[f"{role} in {phase}"] += 1
            begun = time.time()
            if role == "parent":
                process.wait()
                alive = psutil.wait_procs(below, timeout=_END_WITHIN_S)[1]
                assert not alive, alive
                process = self._start()
        code = process.wait()
        if code not in (0, 1):
            code = self._start().wait()
        assert code in (0, 1), self._log.read_text(encoding="utf-8")
        store = Store.open_readonly(self.folder)
        trials = store.trials()
        store.close()
        assert all(trial.status == "done" for trial in trials.values()), trials
        self.rows = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))["study_rows"]
        assert len(trials) >= self.rows >= 4, trials
        dropped = (self.folder / "runtimes.json").read_text(encoding="utf-8")
        assert "crashed" not in dropped and "could not be compared" not in self._log.read_text(encoding="utf-8")
        assert all(path.stat().st_mtime == moment for path, moment in self._kept.items()), self._kept

    def _chosen(self, most: int) -> list[str]:
        """Return so many phases in their order, drawn at random."""
        drawn = self._chance.sample(list(PHASES), min(most, len(PHASES)))
        return [phase for phase in PHASES if phase in drawn]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "edge_opt", "run", "-o", str(self.folder)]
        command += [word for setting in SETTINGS for word in ("--set", setting)]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def _is_in(self, phase: str, since: float) -> bool:
        """Return whether a phase has begun after that moment: each begins a log."""
        logs = self.folder.glob(PHASES[phase]) if PHASES[phase] else []
        return phase == "start" or any(path.exists() and path.stat().st_ctime > since for path in logs)

    def _remember(self) -> None:
        """What is stored by now must not be built or measured again: its logs stay as they are."""
        for key in finished(self.folder):
            for log in (self.folder / "candidates" / key).glob("*.log"):
                if log.stem in ("build", "measure"):
                    self._kept.setdefault(log, log.stat().st_mtime)


def kill_runs(folder: Path, wanted: int, chance: random.Random) -> int:
    """Kill so many processes of whole runs; return how many rows there were."""
    begun, total, number, rows = time.monotonic(), Counter[str](), 0, 0
    while total.total() < wanted:
        number += 1
        run = KilledRun(folder / f"run{number}", chance)
        run.run(wanted - total.total())
        total += run.kills
        rows += run.rows
        shown = ", ".join(f"{role} {count}" for role, count in sorted(total.items()))
        print(f"{total.total():4} kills ({shown}) in {number} runs, {time.monotonic() - begun:.0f} s", flush=True)
    return rows


def main(kills: int, seed: int) -> None:
    chance, begun, total, rows = random.Random(seed), time.monotonic(), Counter[str](), 0
    wanted = kills - kills // 8
    with tempfile.TemporaryDirectory(prefix="edge-opt-kills-") as name:
        os.environ["XDG_RUNTIME_DIR"] = name  # with locks of its own it does not wait for other sweeps
        rows += kill_runs(Path(name), kills - wanted, chance)
        number = 0
        while total.total() < wanted:
            number += 1
            workers = 2 * (number % 2)
            sweep = KilledSweep(Path(name) / str(number), chance, workers=workers)
            left = wanted - total.total()
            if number % 4 == 0:
                sweep.run_until_scheduler_is_killed()
            sweep.run(ROLES, min(left, 12))
            total += sweep.kills
            rows += 12
            shown = ", ".join(f"{role} {count}" for role, count in sorted(total.items()))
            print(f"{total.total():4} kills ({shown}) in {number} sweeps, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{rows} rows, none lost, none failed, nothing kept was run again, no process left")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
