"""Time the finalists of a run interleaved, in several processes, and again where one was disturbed."""

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
from edge_opt.measuring.ssh_board import Board, BoardUnavailable, TimingOrder, pack_inputs
from edge_opt.measuring.statistics import log_batch_minima
from edge_opt.records.measurements import Latency
from edge_opt.records.sweeps import Candidate, Finals, SweepResult
from edge_opt.run.config import RunConfig
from edge_opt.run.job import INPUTS, QUIET_WITHIN, PipelineJob, built_file, is_disturbed
from edge_opt.run.model_and_data import load_inputs
from edge_opt.runtimes.agreement import sized
from edge_opt.search.builders import Listener, Notice
from edge_opt.search.finals import Session, by_speed, entries_of, finals_of, merged, session_of
from edge_opt.search.isolation import Isolation, Limits, pickle_job
from edge_opt.search.locks import measurement_lock
from edge_opt.search.store import Store
from edge_opt.search.sweep import WAITING_TO_MEASURE, candidate_folder

# A finalist is timed this many times as long as a candidate, over all processes, and at most twice that.
_LONGER = 2.0
# Where memory lies is chance, once per process, and a shared machine has fast and slow moments. So several processes
# are wanted that saw a fast machine, and a few more are tried for that. A process is worth its start where a candidate
# is timed for this long.
_PROCESSES = 4
_MORE_PROCESSES = 3
_WORTH_A_PROCESS_S = 0.1
_FACT = "finals"

Entry = tuple[Candidate, Path | None, Mapping[str, Any]]


@dataclass(frozen=True)
class FinalistsJob:
    """Candidates of a job, timed interleaved in one process."""

    job: PipelineJob

    def compare(self, entries: Sequence[Entry], inputs: Path) -> Mapping[str, Any]:
        """Time one block of each per round, in random order, and return the parts of the session.

        A candidate that was not built has no folder; it is converted here if possible.
        """
        config, lost = self.job.config, []
        call = sized([tuple(load_inputs(inputs))], config.deploy_batch)
        with ExitStack() as stack:
            runners: dict[str, Runner] = {}
            for candidate, folder, built in entries:
                try:
                    runner = stack.enter_context(self._opened(candidate, folder, built))
                    runner(*call)
                    runners[candidate.key] = runner
                except Exception as error:  # a candidate that only explains the winner must not cost the comparison
                    lost.append(f"{candidate.label} could not be timed: {first_line(error)}")
            seconds = _time_per_process(config)
            latencies = measure_runners(runners, *call, min_time_s=seconds, max_time_s=2 * seconds, rehearses=True)
        return session_parts(latencies, lost)

    @contextmanager
    def _opened(self, candidate: Candidate, folder: Path | None, built: Mapping[str, Any]) -> Iterator[Runner]:
        if folder is not None:
            with self.job.runner(candidate, folder, built) as runner:
                yield runner
            return
        source, config = self.job.source, self.job.config
        splits, model = source.splits(), source.build()
        with tempfile.TemporaryDirectory() as aside:
            converted = convert(
                model,
                self.job.conversion_inputs(candidate, source.call(splits, model)),
                candidate.precision,
                candidate.runtime,
                calibration=source.calibration(splits, model) if candidate.precision == "int8" else None,
                calibration_batches=config.calibration_batches,
                reduce_range=config.reduce_range,
                folder=aside,
            )
            with open_runner(converted, threads=config.used_threads) as runner:
                yield runner


def session_parts(latencies: Mapping[str, Latency], lost: Sequence[str]) -> dict[str, Any]:
    """Return the parts of a session as JSON values: latencies by candidate key, and who could not be timed."""
    disturbed = [latency for latency in latencies.values() if is_disturbed(latency)]
    return {
        "wall": {key: log_batch_minima(latency.samples_s) for key, latency in latencies.items()},
        "cpu": {key: log_batch_minima(latency.cpu_samples_s) for key, latency in latencies.items()},
        "std_s": {key: float(np.std(latency.samples_s)) for key, latency in latencies.items()},
        "p95_s": {key: latency.p95_s for key, latency in latencies.items()},
        "is_contended": any(latency.is_contended for latency in latencies.values()),
        "is_disturbed": bool(disturbed),
        "lost": list(dict.fromkeys(lost)),
        # What disturbed the session is reported once, for all candidates.
        "remarks": list(disturbed[0].remarks[:1]) if disturbed else [],
    }


@dataclass(frozen=True)
class FinalistTimer:
    """Times the finalists of a sweep; builds that were compared before are not compared again."""

    job: PipelineJob
    folder: Path
    limits: Limits
    on_event: Listener
    board: Board | None = None

    def __call__(self, result: SweepResult, isolation: Isolation, store: Store) -> Finals | None:
        """Return the finals of a result; None where there is nothing to compare, or comparing failed."""
        entries = entries_of(result)
        if result.baseline.metrics is None or result.best is None:
            return None
        stored = self._stored(store, entries)
        if stored is not None:
            return stored
        config = self.job.config
        session, count = self._session(entries, isolation, store)
        if session is None:
            return None
        finals = finals_of(session, entries, config.deploy_batch, config.used_threads, count)
        if finals is not None:
            builds = {entry.key: _build_mark(store, entry) for entry in entries}
            store.keep_fact(_FACT, {"builds": builds, "finals": to_plain(finals)})
        return finals

    def _stored(self, store: Store, entries: Sequence[Candidate]) -> Finals | None:
        """Return the comparison of an earlier run, if it was of the same builds and undisturbed."""
        fact = store.fact(_FACT) or {}
        builds = fact.get("builds", {})
        if any(builds.get(entry.key) != _build_mark(store, entry) for entry in entries):
            return None
        try:
            finals = from_plain(Finals, fact["finals"])
        except (UnreadableProfile, KeyError):
            return None
        return None if finals.is_disturbed else finals

    def _session(self, entries: Sequence[Candidate], isolation: Isolation, store: Store) -> tuple[Session | None, int]:
        """Return what several processes measured, one after the other, and how many they were."""
        root = self.folder.absolute()
        arguments = (
            [self._entry(root, store, entry) for entry in entries],
            candidate_folder(root, entries[0]) / INPUTS,
        )
        if self.board is not None:
            parts = self._timed_on_board(self.board, *arguments)
            return (None, 0) if parts is None else (session_of(parts), 1)
        job, sessions = pickle_job(FinalistsJob(self.job)), list[Session]()
        wanted = _processes(self.job.config)
        while by_speed(sessions)[1] < wanted and len(sessions) < wanted + _MORE_PROCESSES:
            with measurement_lock(lambda: self.on_event(Notice(WAITING_TO_MEASURE))):
                if sessions and sessions[-1].is_contended:
                    wait_for_quiet(QUIET_WITHIN * _time_per_process(self.job.config), cores=usable_cores())
                outcome = isolation.run(job, "compare", arguments, root / "candidates", self.limits)
            if outcome.failure is not None:
                self.on_event(Notice(f"finalists could not be compared: {outcome.reason}"))
                break
            sessions.append(session_of(outcome.value))
        return (merged(sessions), len(sessions)) if sessions else (None, 0)

    def _timed_on_board(self, board: Board, entries: Sequence[Entry], inputs: Path) -> dict[str, Any] | None:
        """Time those that were built on the board, interleaved, in one process there."""
        config = self.job.config
        built = [(candidate, built_file(folder, facts)) for candidate, folder, facts in entries if folder is not None]
        files = {f"{candidate.key}{path.suffix}": path.read_bytes() for candidate, path in built}
        order = TimingOrder(
            tuple(files),
            (config.deploy_batch,),
            threads=config.threads or 0,
            min_time_s=_LONGER * config.min_time_s,
            max_time_s=2 * _LONGER * config.min_time_s,
        )
        batch = pack_inputs([value.numpy() for value in load_inputs(inputs)])
        try:
            timed = board.time(order, files, batch)
        except (InvalidInput, BoardUnavailable, TimeoutError, ChildProcessError) as error:
            self.on_event(Notice(f"finalists could not be compared: {error}"))
            return None
        lost = [f"{candidate.label} was not built, and is not timed" for candidate, folder, _ in entries if not folder]
        return session_parts({Path(item.file).stem: item.latency for item in timed.timings}, lost)

    def _entry(self, root: Path, store: Store, candidate: Candidate) -> Entry:
        built, folder = store.build_of(candidate), candidate_folder(root, candidate)
        return (candidate, None, {}) if built is None or not folder.is_dir() else (candidate, folder, built.value)


def _build_mark(store: Store, candidate: Candidate) -> str:
    """Return a digest that is the same for the same build: its facts and the seconds that it took."""
    built = store.build_of(candidate)
    content = None if built is None else [dict(built.value), built.seconds]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _processes(config: RunConfig) -> int:
    """Return how many processes should see a quiet machine."""
    return max(1, min(_PROCESSES, round(config.min_time_s / _WORTH_A_PROCESS_S)))


def _time_per_process(config: RunConfig) -> float:
    """Return the seconds for each candidate in one of the processes."""
    return _LONGER * config.min_time_s / _processes(config)
