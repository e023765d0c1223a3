"""The contest of a run: finalists timed in turns, in several processes, again where one was disturbed."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt._support.json import from_plain, to_plain
from edge_opt.compress import Runner, convert, measure_runners, open_runner
from edge_opt.errors import InvalidInput, UnreadableProfile, first_line
from edge_opt.measuring.latency import wait_for_quiet
from edge_opt.measuring.machine import usable_cores
from edge_opt.measuring.onnx_timing import TimingOrder
from edge_opt.measuring.statistics import quiet_logs
from edge_opt.records.measurements import Latency
from edge_opt.records.sweeps import Candidate, Finals, SweepResult
from edge_opt.run.job import INPUTS, QUIET_WITHIN, Bench, PipelineJob, built_file, is_disturbed, kept_inputs
from edge_opt.runtimes.agreement import sized
from edge_opt.search.board_worker import Board, packed_inputs
from edge_opt.search.build import Listener, Notice
from edge_opt.search.finals import Session, by_speed, entries_of, finals_of, merged, session_of
from edge_opt.search.locks import alone
from edge_opt.search.process import Isolation, Limits, packed
from edge_opt.search.store import Store
from edge_opt.search.sweep import candidate_folder

# Each variant is timed this many times as long as when it was timed alone, and at most twice that, over all processes.
_LONGER = 2.0
# Where memory happens to lie is one throw of the dice per process, and a machine that is shared has fast and slow
# seconds: so many processes that saw it fast are wanted, and so many more are tried for that. A process is worth its
# start where a variant is timed alone for this long.
_PROCESSES = 4
_MORE_PROCESSES = 3
_WORTH_A_PROCESS_S = 0.1
_FACT = "finals"

Entry = tuple[Candidate, Path | None, Mapping[str, Any]]


@dataclass(frozen=True)
class Contest:
    """Variants of a job, compared in a process of their own."""

    job: PipelineJob

    def compare(self, entries: Sequence[Entry], inputs: Path) -> Mapping[str, Any]:
        """Time a block of each in turn, in random order, and tell the parts of the session; all begin warm.

        A variant that was not built has no folder; it is made here if it can be.
        """
        bench, lost = self.job.bench, []
        call = sized([tuple(kept_inputs(inputs))], bench.deploy_batch)
        with ExitStack() as stack:
            runners: dict[str, Runner] = {}
            for candidate, folder, built in entries:
                try:
                    runner = stack.enter_context(self._opened(candidate, folder, built))
                    runner(*call)
                    runners[candidate.key] = runner
                except Exception as error:  # a variant that only explains the winner must not cost the comparison
                    lost.append(f"{candidate.label} could not be timed: {first_line(error)}")
            found = measure_runners(
                runners,
                *call,
                min_time_s=_share_of(bench),
                max_time_s=2 * _share_of(bench),
                rehearses=True,
            )
        return told_of(found, lost)

    @contextmanager
    def _opened(self, candidate: Candidate, folder: Path | None, built: Mapping[str, Any]) -> Iterator[Runner]:
        if folder is not None:
            with self.job.runner(candidate, folder, built) as runner:
                yield runner
            return
        splits, model = self.job.subject.splits(), self.job.subject.build()
        with tempfile.TemporaryDirectory() as aside:
            converted = convert(
                model,
                self.job.converted_with(candidate, self.job.subject.call(splits, model)),
                candidate.precision,
                candidate.runtime,
                calibration=self.job.subject.calls(splits, model) if candidate.precision == "int8" else None,
                calibration_batches=self.job.calibration_batches,
                reduce_range=self.job.reduce_range,
                folder=aside,
            )
            with open_runner(converted, threads=self.job.bench.used_threads) as runner:
                yield runner


def told_of(found: Mapping[str, Latency], lost: Sequence[str]) -> dict[str, Any]:
    """The parts of a session, as JSON holds them: latencies by the candidate's key, and who could not be timed."""
    return {
        "wall": {key: quiet_logs(latency.samples_s) for key, latency in found.items()},
        "cpu": {key: quiet_logs(latency.cpu_samples_s) for key, latency in found.items()},
        "std_s": {key: float(np.std(latency.samples_s)) for key, latency in found.items()},
        "p95_s": {key: latency.p95_s for key, latency in found.items()},
        "is_contended": any(latency.is_contended for latency in found.values()),
        "is_disturbed": any(is_disturbed(latency) for latency in found.values()),
        "lost": list(dict.fromkeys(lost)),
        "remarks": list(_said(found.values())),
    }


def _said(latencies: Any) -> Iterator[str]:
    """What disturbed the session, once for all variants: of scatter and width the first sentence will do."""
    found = [latency for latency in latencies if is_disturbed(latency)]
    for latency in found:
        yield from latency.remarks[:1]
        return


@dataclass(frozen=True)
class Referee:
    """Compares the finalists of a sweep; what was compared before is not compared again."""

    job: PipelineJob
    folder: Path
    limits: Limits
    on_event: Listener
    board: Board | None = None

    def __call__(self, result: SweepResult, isolation: Isolation, store: Store) -> Finals | None:
        """The finals of a result; None where there is nothing to compare, or it could not be done."""
        entries = entries_of(result)
        if result.baseline.metrics is None or result.best is None:
            return None
        kept = self._kept(store, entries)
        if kept is not None:
            return kept
        bench = self.job.bench
        session, count = self._session(entries, isolation, store)
        found = None
        if session is not None:
            found = finals_of(session, entries, bench.deploy_batch, bench.used_threads, count)
        if found is not None:
            builds = {entry.key: _build_mark(store, entry) for entry in entries}
            store.keep_fact(_FACT, {"builds": builds, "finals": to_plain(found)})
        return found

    def _kept(self, store: Store, entries: Sequence[Candidate]) -> Finals | None:
        """The comparison of an earlier run, if it was of these very builds and nothing disturbed it."""
        fact = store.fact(_FACT) or {}
        builds = fact.get("builds", {})
        if any(builds.get(entry.key) != _build_mark(store, entry) for entry in entries):
            return None
        try:
            found = from_plain(Finals, fact["finals"])
        except (UnreadableProfile, KeyError):
            return None
        return None if found.is_disturbed else found

    def _session(self, entries: Sequence[Candidate], isolation: Isolation, store: Store) -> tuple[Session | None, int]:
        """What several processes say together, and how many they were; one after the other, for all use one clock."""
        root = self.folder.absolute()
        arguments = (
            [self._entry(root, store, entry) for entry in entries],
            candidate_folder(root, entries[0]) / INPUTS,
        )
        if self.board is not None:
            told = self._timed_there(self.board, *arguments)
            return (None, 0) if told is None else (session_of(told), 1)
        job, found = packed(Contest(self.job)), list[Session]()
        wanted = _processes(self.job.bench)
        while by_speed(found)[1] < wanted and len(found) < wanted + _MORE_PROCESSES:
            with alone(lambda: self.on_event(Notice("waiting to measure: another sweep works on this machine"))):
                if found and found[-1].is_contended:
                    wait_for_quiet(QUIET_WITHIN * _share_of(self.job.bench), cores=usable_cores())
                outcome = isolation.run(job, "compare", arguments, root / "candidates", self.limits)
            if outcome.failure is not None:
                self.on_event(Notice(f"finalists could not be compared: {outcome.reason}"))
                break
            found.append(session_of(outcome.value))
        return (merged(found), len(found)) if found else (None, 0)

    def _timed_there(self, board: Board, entries: Sequence[Entry], inputs: Path) -> dict[str, Any] | None:
        """A session on the board: those that were built, in turns, in one process there."""
        bench, built = self.job.bench, [entry for entry in entries if entry[1] is not None]
        files = {
            f"{candidate.key}.onnx": built_file(folder, facts).read_bytes()
            for candidate, folder, facts in built
            if folder is not None
        }
        order = TimingOrder(
            tuple(files),
            (bench.deploy_batch,),
            threads=bench.threads or 0,
            min_time_s=_LONGER * bench.min_time_s,
            max_time_s=2 * _LONGER * bench.min_time_s,
            rehearses=True,
        )
        batch = packed_inputs([value.numpy() for value in kept_inputs(inputs)])
        try:
            found = board.time(order, files, batch, tell=self.on_event)
        except (InvalidInput, TimeoutError, ChildProcessError) as error:
            self.on_event(Notice(f"finalists could not be compared: {error}"))
            return None
        lost = [
            f"{candidate.label} was not built, and is not timed there" for candidate, folder, _ in entries if not folder
        ]
        return told_of({Path(item.file).stem: item.latency for item in found.timings}, lost)

    def _entry(self, root: Path, store: Store, candidate: Candidate) -> Entry:
        built, folder = store.build_of(candidate), candidate_folder(root, candidate)
        return (candidate, None, {}) if built is None or not folder.is_dir() else (candidate, folder, built.value)


def _build_mark(store: Store, candidate: Candidate) -> str:
    """The same for the same build: what it told, and the seconds that it took. A variant may be none of the builds."""
    built = store.build_of(candidate)
    content = None if built is None else [dict(built.value), built.seconds]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _processes(bench: Bench) -> int:
    """How many processes are to see a quiet machine."""
    return max(1, min(_PROCESSES, round(bench.min_time_s / _WORTH_A_PROCESS_S)))


def _share_of(bench: Bench) -> float:
    """Seconds for each variant in one of the processes."""
    return _LONGER * bench.min_time_s / _processes(bench)
