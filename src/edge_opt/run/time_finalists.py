"""Time the finalists of a run interleaved, in several processes, and again where one was disturbed; time on a board."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_opt._support.json import from_plain, to_plain
from edge_opt.compress import Runner, measure_runners, open_runner
from edge_opt.errors import InvalidInput, UnreadableProfile, first_line
from edge_opt.measuring.latency import wait_for_quiet
from edge_opt.measuring.ssh_board import Board, BoardUnavailable, TimingOrder, pack_inputs
from edge_opt.measuring.statistics import log_batch_minima, mean_and_half_width
from edge_opt.records.measurements import Latency
from edge_opt.records.sweeps import Candidate, Failure, Finalist, Finals, SweepResult
from edge_opt.run.config import RunConfig
from edge_opt.run.job import INPUTS, QUIET_WITHIN, PipelineJob, built_file, is_disturbed, proxy_source
from edge_opt.run.model_and_data import load_inputs
from edge_opt.runtimes.agreement import sized
from edge_opt.search.builders import JobSpec
from edge_opt.search.choose import factor, is_parent, not_worse, ranked_frontier, unpruned_steps
from edge_opt.search.isolation import Isolation, Limits, Outcome, pickle_job
from edge_opt.search.locks import measurement_lock
from edge_opt.search.store import Store
from edge_opt.search.sweep import candidate_folder
from edge_opt.search.sweep_progress import Listener, Notice, StepStarted

# So many of the accepted candidates that may win are finalists, and of those on the frontier; the baseline and the
# steps between it and the winner come on top.
_CONTENDERS = 6
_ON_THE_FRONTIER = 6
# Processes whose fastest blocks took at most so much longer than those of the fastest process saw a quiet machine.
_NEAR = 1.03
# So few of them are enough to leave the others out.
_ENOUGH = 3
# A finalist is timed this many times as long as a candidate, over all processes, and at most twice that.
_LONGER = 2.0
# Where memory lies is chance, once per process, and a shared machine has fast and slow moments. So several processes
# are wanted that saw a fast machine, and a few more are tried for that. A process is worth its start where a candidate
# is timed for this long.
_PROCESSES = 4
_MORE_PROCESSES = 3
_WORTH_A_PROCESS_S = 0.1
_FACT = "finals"
# Expected durations, for the time left: the start of a process, measuring a variant as a multiple of its least time,
# and what comes after the finals: scores on test data, the files and the page.
_START_S = 2.0
_PER_VARIANT = 3.0
REPORT_S = 8.0
# Runtimes that the script on the board knows.
BOARD_RUNTIMES = ("onnxruntime", "litert")

Entry = tuple[Candidate, Path | None, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Session:
    """The samples of one comparison. Those of all variants lie side by side in time.

    `wall` and `cpu` hold logarithms of seconds by the variant's key: of the fastest of each batch of samples in one
    process, or in whole processes. `lost` says who could not be timed, `remarks` what disturbed it.
    """

    wall: Mapping[str, Sequence[float]]
    cpu: Mapping[str, Sequence[float]]
    std_s: Mapping[str, float]
    p95_s: Mapping[str, float]
    is_contended: bool
    is_disturbed: bool
    lost: Sequence[str]
    remarks: Sequence[str]


def session_of(latencies: Mapping[str, Latency], lost: Sequence[str]) -> Session:
    """Return the session of one process: latencies by candidate key, and who could not be timed."""
    disturbed = [latency for latency in latencies.values() if is_disturbed(latency)]
    return Session(
        wall={key: log_batch_minima(latency.samples_s) for key, latency in latencies.items()},
        cpu={key: log_batch_minima(latency.cpu_samples_s) for key, latency in latencies.items()},
        std_s={key: float(np.std(latency.samples_s)) for key, latency in latencies.items()},
        p95_s={key: latency.p95_s for key, latency in latencies.items()},
        is_contended=any(latency.is_contended for latency in latencies.values()),
        is_disturbed=bool(disturbed),
        lost=list(dict.fromkeys(lost)),
        # What disturbed the session is reported once, for all candidates.
        remarks=disturbed[0].remarks[:1] if disturbed else (),
    )


def by_speed(sessions: Sequence[Session]) -> tuple[list[Session], int]:
    """Return the sessions, that of the fastest machine first, and how many of them saw it at its fastest or nearly so.

    The speed of a process is the mean over the fastest blocks of all variants that every process timed.
    """
    shared = [key for key in sessions[0].cpu if all(session.cpu.get(key) for session in sessions)] if sessions else []
    levels = [sum(min(session.cpu[key]) for key in shared) / max(1, len(shared)) for session in sessions]
    order = sorted(range(len(sessions)), key=levels.__getitem__)
    near = sum(level <= min(levels) + math.log(_NEAR) for level in levels)
    return [sessions[index] for index in order], near


def merged(sessions: Sequence[Session]) -> Session:
    """Return what several processes say together: each is one sample, and those that saw a slower machine are left out.

    Samples of one process share where its memory lies, so that only processes are independent of each other. Who was
    not timed in all of them is left out. A single session stays as it is.

    Args:
        sessions: Those of the processes; one or more.
    """
    if len(sessions) == 1:
        return sessions[0]
    ordered, near = by_speed(sessions)
    used = ordered[: max(near, _ENOUGH)]
    is_disturbed = near < min(_ENOUGH, len(sessions))
    keys = [key for key in used[0].wall if all(session.wall.get(key) for session in used)]
    return Session(
        {key: tuple(min(session.wall[key]) for session in used) for key in keys},
        {key: tuple(min(session.cpu[key]) for session in used if session.cpu[key]) for key in keys},
        {key: float(np.median([session.std_s[key] for session in used])) for key in keys},
        {key: float(np.median([session.p95_s[key] for session in used])) for key in keys},
        any(session.is_contended for session in used),
        is_disturbed,
        tuple(dict.fromkeys(remark for session in used for remark in session.lost)),
        (_cause(sessions, near),) if is_disturbed else (),
    )


def _cause(sessions: Sequence[Session], near: int) -> str:
    """Return why processes do not agree: what they saw of other programs, else what changes the speed of a core."""
    seen = next((remark for session in sessions if session.is_contended for remark in session.remarks), None)
    why = (
        seen or "no other program was seen, so the clock of the cores changed: heat, power saving or a virtual machine"
    )
    return f"only {near} of {len(sessions)} processes ran within {_NEAR - 1:.0%} of the fastest; {why}"


def select_finalists(result: SweepResult) -> tuple[Candidate, ...]:
    """Return who is compared: the baseline, possible winners, the frontier, and the steps to the likely winner."""
    ran = [(trial, trial.metrics) for trial in result.trials if trial.metrics is not None]
    accepted = [pair for pair in ran if pair[0].is_accepted]
    near = not_worse(accepted)[1] if accepted else []
    contenders = sorted(near, key=lambda pair: pair[1].ranked_latency_s)[:_CONTENDERS]
    frontier = ranked_frontier(result.trials)
    shown = [trial.candidate for trial in result.trials if trial.candidate.key in frontier][:_ON_THE_FRONTIER]
    baseline, winner = result.baseline.candidate, None if result.best is None else result.trial(result.best).candidate
    first = [baseline] if winner is None else [baseline, winner]
    between = () if winner is None else unpruned_steps(baseline, winner)
    listed = (*first, *(trial.candidate for trial, _ in contenders), *between, *shown)
    pruned = [candidate for candidate in listed if candidate.is_pruned]
    parents = [trial.candidate for trial, _ in ran if any(is_parent(trial.candidate, other) for other in pruned)]
    return tuple(dict.fromkeys((*listed, *parents)))


def finals_of(
    session: Session, entries: Sequence[Candidate], batch_size: int, threads: int, sessions: int
) -> Finals | None:
    """Return what a session says; None where the baseline, the first entry, could not be timed.

    CPU time is compared where other programs took the core away, unless several threads share the work: then it is no
    time that anybody waits for.
    """
    clock: Literal["wall", "cpu"] = "cpu" if session.is_contended and threads == 1 else "wall"
    logs = session.cpu if clock == "cpu" else session.wall
    first = logs.get(entries[0].key)
    if not first:
        return None
    finalists = tuple(
        _finalist(candidate, tuple(logs[candidate.key]), tuple(first), session)
        for candidate in entries
        if len(logs.get(candidate.key, ())) == len(first)
    )
    remarks = (*session.lost, *session.remarks)
    return Finals(batch_size, threads, clock, sessions, session.is_disturbed, remarks, finalists)


def _finalist(candidate: Candidate, logs: tuple[float, ...], first: tuple[float, ...], session: Session) -> Finalist:
    middle, half_width = mean_and_half_width(logs)
    half_width = min(half_width, 1.0)
    return Finalist(
        candidate=candidate,
        seconds=math.exp(middle),
        low=math.exp(middle - half_width),
        high=math.exp(middle + half_width),
        std_s=session.std_s[candidate.key],
        p95_s=session.p95_s[candidate.key],
        speedup=factor(first, logs),
        logs=logs,
    )


@dataclass(frozen=True)
class FinalistsJob:
    """Candidates of a job, timed interleaved in one process."""

    job: PipelineJob

    def compare(self, entries: Sequence[Entry], inputs: Path) -> Mapping[str, Any]:
        """Time one block of each per round, in random order, and return the session.

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
                    lost.append(f"{candidate.title} could not be timed: {first_line(error)}")
            seconds = _time_per_process(config)
            latencies = measure_runners(runners, *call, min_time_s=seconds, max_time_s=2 * seconds, rehearses=True)
        return asdict(session_of(latencies, lost))

    @contextmanager
    def _opened(self, candidate: Candidate, folder: Path | None, built: Mapping[str, Any]) -> Iterator[Runner]:
        job = self.job
        if folder is not None:
            with job.runner(candidate, folder, built) as runner:
                yield runner
            return
        splits, model = job.source.splits(), job.source.build()
        with tempfile.TemporaryDirectory() as aside:
            call = job.source.call(splits, model)
            exported = job.exported(candidate, model, call, rounds=False)
            converted = job.convert(candidate, model, splits, call, Path(aside), exported=exported)
            with open_runner(converted, threads=job.config.used_threads) as runner:
                yield runner


@dataclass(frozen=True)
class FinalistTimer:
    """Times the finalists of a sweep; builds that were compared before are not compared again."""

    job: PipelineJob
    folder: Path
    on_event: Listener
    board: Board | None = None

    def __call__(self, result: SweepResult, isolation: Isolation, store: Store) -> Finals | None:
        """Return the finals of a result; None where there is nothing to compare, or comparing failed."""
        if result.baseline.metrics is None or result.best is None:
            return None
        entries, config = select_finalists(result), self.job.config
        # The same for the same builds: what each build returned, and the seconds that it took.
        marks = {entry.key: _build_mark(store, entry) for entry in entries}
        stored = _stored(store, marks)
        if stored is not None:
            return stored
        root = self.folder.absolute()
        built = [self._entry(root, store, entry) for entry in entries]
        inputs = candidate_folder(root, entries[0]) / INPUTS
        if self.board is None:
            sessions = self._sessions(built, inputs, isolation)
        else:
            sessions = self._sessions_on_board(self.board, built, inputs)
        if not sessions:
            return None
        finals = finals_of(merged(sessions), entries, config.deploy_batch, config.used_threads, len(sessions))
        if finals is not None:
            store.save_metadata(_FACT, {"builds": marks, "finals": to_plain(finals)})
        return finals

    def _sessions(self, entries: Sequence[Entry], inputs: Path, isolation: Isolation) -> list[Session]:
        """Return what several processes measured, one after the other."""
        sessions, config = list[Session](), self.job.config
        spec = JobSpec(pickle_job(FinalistsJob(self.job)), Limits(config.memory_limit_bytes))
        wanted, folder = _processes(config), self.folder.absolute() / "candidates"
        begun = time.monotonic()
        while by_speed(sessions)[1] < wanted and len(sessions) < wanted + _MORE_PROCESSES:
            done, spent_s = len(sessions), time.monotonic() - begun
            round_s = spent_s / done if done else finals_seconds(config, len(entries)) / wanted
            # A disturbed round is repeated, so that there may be more.
            text = f"finals: {len(entries)} variants interleaved, round {done + 1} of {max(wanted, done + 1)}"
            self.on_event(StepStarted(text, round_s * max(1, wanted - done) + REPORT_S))
            with measurement_lock(lambda holder: self.on_event(Notice(f"waiting to measure: {holder}"))):
                if sessions and sessions[-1].is_contended:
                    wait_for_quiet(QUIET_WITHIN * _time_per_process(config))
                outcome = spec.run(isolation, "compare", (entries, inputs), folder)
            if outcome.failure is not None:
                self.on_event(Notice(f"finalists could not be compared: {outcome.reason}"))
                break
            sessions.append(Session(**outcome.value))
        return sessions

    def _sessions_on_board(self, board: Board, entries: Sequence[Entry], inputs: Path) -> list[Session]:
        """Time those that were built on the board, interleaved, in one process there."""
        built = [(candidate, built_file(folder, facts)) for candidate, folder, facts in entries if folder is not None]
        files = {f"{candidate.key}{path.suffix}": path.read_bytes() for candidate, path in built}
        config = self.job.config
        order = _timing_order(config, files, [config.deploy_batch], _LONGER * config.min_time_s)
        batch = pack_inputs([value.numpy() for value in load_inputs(inputs)])
        try:
            timed = board.time(order, files, batch)
        except (InvalidInput, BoardUnavailable, TimeoutError, ChildProcessError) as error:
            self.on_event(Notice(f"finalists could not be compared: {error}"))
            return []
        lost = [f"{candidate.title} was not built, and is not timed" for candidate, folder, _ in entries if not folder]
        return [session_of({Path(item.file).stem: item.latency for item in timed.timings}, lost)]

    def _entry(self, root: Path, store: Store, candidate: Candidate) -> Entry:
        built, folder = store.build_of(candidate), candidate_folder(root, candidate)
        return (candidate, None, {}) if built is None or not folder.is_dir() else (candidate, folder, built.value)


def _build_mark(store: Store, candidate: Candidate) -> str:
    """Return a digest that is the same for the same build."""
    built = store.build_of(candidate)
    content = None if built is None else [dict(built.value), built.seconds]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _stored(store: Store, marks: Mapping[str, str]) -> Finals | None:
    """Return the comparison of an earlier run, if it was of the same builds and undisturbed."""
    stored = store.metadata(_FACT) or {}
    if not marks.items() <= stored.get("builds", {}).items():
        return None
    try:
        finals = from_plain(Finals, stored["finals"])
    except (UnreadableProfile, KeyError):
        return None
    return None if finals.is_disturbed else finals


def _processes(config: RunConfig) -> int:
    """Return how many processes should see a quiet machine."""
    return max(1, min(_PROCESSES, round(config.min_time_s / _WORTH_A_PROCESS_S)))


def finals_seconds(config: RunConfig, variants: int) -> float:
    """Return how long the finals of so many variants are expected to take."""
    return _processes(config) * (_START_S + variants * _PER_VARIANT * _time_per_process(config))


def _time_per_process(config: RunConfig) -> float:
    """Return the seconds for each candidate in one of the processes."""
    return _LONGER * config.min_time_s / _processes(config)


def _timing_order(config: RunConfig, files: Iterable[str], sizes: Iterable[int], min_time_s: float) -> TimingOrder:
    """Return what a board is to time: these files in batches of these sizes."""
    threads = config.threads or 0
    return TimingOrder(
        tuple(files), tuple(dict.fromkeys(sizes)), threads=threads, min_time_s=min_time_s, max_time_s=2 * min_time_s
    )


_BOARD_FAILURES: dict[type[Exception], Failure] = {TimeoutError: "timed out", ChildProcessError: "crashed"}


def measure_on_board(
    board: Board, job: PipelineJob, candidate: Candidate, folder: Path, built: Mapping[str, Any]
) -> Outcome:
    """Time one candidate on a board. One that cannot be timed there is a failure, and the sweep goes on."""
    begun, config = time.monotonic(), job.config
    try:
        inputs, name = load_inputs(folder / INPUTS), str(built["file"])
        batch_size = len(inputs[0])
        order = _timing_order(config, [name], (batch_size, config.deploy_batch, 1), config.min_time_s)
        file, batch = built_file(folder, built).read_bytes(), pack_inputs([each.numpy() for each in inputs])
        timed = board.time(order, {name: file}, batch)
        times = {item.size: item.latency for item in timed.timings}
        # A meter of this machine says nothing about the board.
        energy = config.power_watts * times[batch_size].median_s, proxy_source(config)
        metrics = job.metrics(built, batch_size, times, timed.memory_bytes, energy)
        return Outcome(to_plain(replace(metrics, machine=timed.machine)), seconds=time.monotonic() - begun)
    except (InvalidInput, BoardUnavailable, TimeoutError, ChildProcessError) as error:
        failure = _BOARD_FAILURES.get(type(error), "raised")
        return Outcome(failure=failure, reason=str(error), seconds=time.monotonic() - begun)
