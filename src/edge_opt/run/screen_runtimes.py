"""Drop runtimes that are slow before anything is trained: the unpruned model is timed in each of them.

Each runtime converts in a process of its own, so that one that crashes or hangs costs its own candidates only. What is
converted is timed interleaved, in one process, and only pairs of precision and runtime near the fastest are kept. Where
two runtimes have the same kernels, the first that converts stands for both.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt import units
from edge_opt._support.files import write_whole
from edge_opt.compress import Runner, open_runner
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError, MeasurementFailed, first_line
from edge_opt.records.conversions import Exported
from edge_opt.records.sweeps import Candidate
from edge_opt.run.job import PipelineJob, run_phase
from edge_opt.run.model_and_data import torch_threads
from edge_opt.run.target_sweep import times_on_target
from edge_opt.runtimes.agreement import sized
from edge_opt.runtimes.export import export_quickly
from edge_opt.runtimes.model_call import model_call
from edge_opt.runtimes.protocol import measure_runners
from edge_opt.runtimes.registry import find_runtime
from edge_opt.search.locks import build_lock, measurement_lock
from edge_opt.search.space import Pair
from edge_opt.search.sweep_progress import Listener, Notice, StepStarted
from edge_opt.tasks.batches import example_inputs
from edge_opt.trace.inputs import CallArguments

FILE = "runtimes.json"
# Pairs that take at most this many times as long as the fastest are tried with every ratio, and not more than so many;
# the fastest in float is kept in any case, because int8 may lose accuracy. Eager torch is the baseline in any case.
KEPT_WITHIN = 1.3
KEPT_PAIRS = 2
_WINDOW_S = 0.1
Name = TypeVar("Name")


@dataclass(frozen=True)
class RuntimeJob:
    """The unpruned model in one runtime, or timed in all of them."""

    job: PipelineJob

    def convert(self, runtime: str, precisions: Sequence[str], folder: Path) -> dict[str, Any]:
        """Convert to each precision; return the files, and why others are missing."""
        job, splits = self.job, self.job.source.splits()
        files: dict[str, str] = {}
        reasons: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)  # by an attempt that was killed
        with torch_threads(job.config.used_build_threads), build_lock(folder=job.root):
            model = job.source.build()
            call, exported = job.source.call(splits, model), None
            for precision in precisions:
                try:
                    pair: Any = (precision, runtime)
                    exported = exported or _float_file(job, model, call, pair, folder)
                    with opened(job, splits, model, call, pair, exported, folder) as runner:
                        runner(*_deployed_inputs(job, call))
                        files[precision] = str(getattr(runner, "path", ""))
                except EdgeOptError as error:
                    reasons[precision] = f"it could not be converted: {first_line(error)}"
        return {"files": files, "reasons": reasons}

    def compare(self, files: Mapping[str, str]) -> dict[str, Any]:
        """Time the files, by "precision runtime", and eager torch, interleaved; return seconds by the same names."""
        job = self.job
        splits, model = job.source.splits(), job.source.build()
        inputs = _deployed_inputs(job, job.source.call(splits, model))
        threads = job.config.used_threads
        with ExitStack() as stack:
            runners: dict[str, Runner] = {}
            for name, path in files.items():
                precision, runtime = name.split()
                source: Any = model if find_runtime(runtime).runs_modules else path
                runners[name] = stack.enter_context(open_runner(source, runtime, threads=threads, precision=precision))
            return {"seconds": interleaved_seconds(job, runners, inputs)}


def choose_pairs(job: PipelineJob, root: Path, pairs: Sequence[Pair], on_event: Listener) -> dict[Pair, str]:
    """Return the pairs that are not worth trying, with the reason; the decision is stored and not taken again."""
    path, key = root / FILE, f"{job.cache.name} {list(pairs)} {job.config.targets}"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        dropped = {(pair[0], pair[1]): reason for *pair, reason in stored["dropped"]} if stored["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        dropped = None
    if dropped is None:
        if job.config.targets:
            splits = job.source.splits()
            times = times_on_target(job, splits, {"unpruned": job.source.build()}, pairs)
            # Predictions of two runtimes are less certain than times: the one with the best data is always tried.
            by_pair = {pair: seconds for (_, pair), seconds in times.items()}
            dropped = slower_pairs(by_pair, always=job.config.used_runtimes[0])
        else:
            on_event(StepStarted("screening: timing the unpruned model in each runtime"))
            dropped = _slow_pairs(job, root, pairs)
        content = {"key": key, "dropped": [[*pair, reason] for pair, reason in dropped.items()]}
        write_whole(path, json.dumps(content, indent=1))
    if dropped:
        text = "; ".join(f"{pair[0]} in {pair[1]}: {reason}" for pair, reason in dropped.items())
        on_event(Notice(f"not tried with every pruning ratio: {text}"))
    return dropped


def _slow_pairs(job: PipelineJob, root: Path, pairs: Sequence[Pair]) -> dict[Pair, str]:
    """Convert in every runtime, time what was converted, and return the pairs to drop, with the reason."""
    files: dict[str, str] = {}
    lost: dict[Pair, str] = {}
    converted: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        for runtime in dict.fromkeys(runtime for _, runtime in pairs):
            precisions = [precision for precision, other in pairs if other == runtime]
            described = find_runtime(runtime)
            if described.runs_modules:
                files |= {f"{precision} {runtime}": "" for precision in precisions if precision == "fp32"}
                continue
            if described.kernels in converted:
                reason = f"{converted[described.kernels]} has the same kernels; name {runtime} to try it"
                lost |= dict.fromkeys([(precision, runtime) for precision in precisions], reason)
                continue
            try:
                limit_s, arguments = job.config.time_limit_s, (runtime, precisions, Path(name) / runtime)
                outcome = run_phase(RuntimeJob(job), job.source, "convert", arguments, root / "baseline", limit_s)
            except MeasurementFailed as error:
                lost |= {(precision, runtime): str(error) for precision in precisions}
                continue
            lost |= {(precision, runtime): reason for precision, reason in outcome["reasons"].items()}
            files |= {f"{precision} {runtime}": path for precision, path in outcome["files"].items()}
            if outcome["files"]:
                converted[described.kernels or runtime] = runtime
        plain = run_phase(RuntimeJob(job), job.source, "compare", (files,), root / "baseline")["seconds"]
    names = {pair: f"{pair[0]} {pair[1]}" for pair in pairs}
    return slower_pairs({pair: plain[name] for pair, name in names.items() if name in plain}) | lost


def slower_pairs(times: Mapping[Pair, float], always: str | None = None) -> dict[Pair, str]:
    """Return precisions and runtimes that are not worth trying: neither near the fastest, nor the fastest float.

    With `always`, this runtime is kept in all precisions instead of the fastest float.

    >>> slow = slower_pairs({("fp32", "a"): 3e-3, ("int8", "a"): 1e-3, ("fp32", "b"): 4e-3, ("int8", "b"): 1.2e-3})
    >>> [(*pair, reason) for pair, reason in slow.items()]
    [('fp32', 'b', '4.00 ms unpruned, 4.0 times as long as int8 in a')]
    """
    order = sorted(times, key=lambda pair: times[pair])
    near = [pair for pair in order if times[pair] <= KEPT_WITHIN * times[order[0]]][:KEPT_PAIRS]
    floats = [pair for pair in order if pair[0] == "fp32"][:1]
    kept = {*near, *(floats if always is None else [pair for pair in order if pair[1] == always])}
    best = order[0] if order else None
    return {
        pair: f"{units.duration(times[pair])} unpruned, {times[pair] / times[best]:.1f} times as long as "
        f"{best[0]} in {best[1]}"
        for pair in times
        if best is not None and pair not in kept
    }


def quick_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs in which pruned models are timed before training: ONNX files, which are exported in a moment.

    Where the sweep has none of them, ONNX Runtime stands for the others; kernels of one CPU like the same widths.
    """
    quick = [pair for pair in pairs if starts_from_onnx(pair)]
    slow = [pair for pair in pairs if not find_runtime(pair[1]).runs_modules]
    return quick or ([("fp32", "onnxruntime")] if slow else list(pairs))


def model_times(
    job: PipelineJob, splits: Splits, models: Mapping[Name, nn.Module], pairs: Sequence[Pair]
) -> dict[tuple[Name, Pair], float]:
    """Return seconds of each in the call that is deployed, interleaved; one that is not converted is left out.

    Where a target decides, they are those that are predicted for it.
    """
    if job.config.targets:
        return times_on_target(job, splits, models, pairs)
    with ExitStack() as stack:
        runners: dict[str, tuple[tuple[Name, Pair], Runner]] = {}
        for name, model in models.items():
            call = job.source.call(splits, model)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            exported: Exported | None = None
            for pair in pairs:
                try:
                    # Files of ONNX come from one quick export.
                    if exported is None and starts_from_onnx(pair):
                        exported = _float_file(job, model, call, pair, folder)
                    runner = stack.enter_context(opened(job, splits, model, call, pair, exported, folder))
                except EdgeOptError:
                    continue
                runners[str(len(runners))] = (name, pair), runner
        if not runners:
            return {}
        inputs = _deployed_inputs(job, call)
        seconds = interleaved_seconds(job, {key: runner for key, (_, runner) in runners.items()}, inputs)
    return {named: seconds[key] for key, (named, _) in runners.items() if key in seconds}


def interleaved_seconds(
    job: PipelineJob, runners: Mapping[str, Runner], inputs: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Return the seconds of each runner in a short interleaved timing."""
    with measurement_lock(folder=job.root):
        latencies = measure_runners(runners, *inputs, min_time_s=_WINDOW_S, max_time_s=2 * _WINDOW_S)
    # One thread computes as long as its CPU time. Others only make a block longer, so the shortest one counts.
    # Where a hypervisor takes the processor away, Linux subtracts that, and the CPU time of a short block may be 0.
    is_alone = job.config.used_threads == 1 and all(each.cpu_minimum_s > 0 for each in latencies.values())
    return {key: each.cpu_minimum_s if is_alone else each.minimum_s for key, each in latencies.items()}


def _float_file(job: PipelineJob, model: nn.Module, call: CallArguments, pair: Pair, folder: Path) -> Exported | None:
    """Return a float file that both precisions start from: a quick one of ONNX, or the one that candidates use."""
    if starts_from_onnx(pair):
        return export_quickly(model_call(model.eval(), example_inputs(call)), folder / "quick.onnx")
    return job.exported(Candidate(0.0, *pair), model, call, rounds=False)


def _deployed_inputs(job: PipelineJob, call: CallArguments) -> tuple[torch.Tensor, ...]:
    """Return the tensors of the call that is deployed."""
    tensors = [value for value in tree_leaves((call.args, call.kwargs)) if isinstance(value, torch.Tensor)]
    return tuple(sized([tuple(tensors)], job.config.deploy_batch))


def starts_from_onnx(pair: Pair) -> bool:
    return find_runtime(pair[1]).runs_onnx and pair[0] in ("fp32", "int8")


def opened(
    job: PipelineJob,
    splits: Splits,
    model: nn.Module,
    call: CallArguments,
    pair: Pair,
    exported: Exported | None,
    folder: Path,
) -> AbstractContextManager[Runner]:
    """Open a model in a precision and a runtime, to be timed and no more."""
    precision, runtime = pair
    threads = job.config.used_threads
    exported = None if find_runtime(runtime).runs_modules or precision not in ("fp32", "int8") else exported
    if exported is not None and precision == "fp32":
        return open_runner(exported.path, runtime, threads=threads, precision=precision)
    # Before training a model may well disagree with itself in int8; only its time is asked for.
    options = {"calibration_batches": 1, "exported": exported, "max_difference": True}
    aside = folder / f"{precision}-{runtime}"
    converted = job.convert(Candidate(0.0, precision, runtime), model.eval(), splits, call, aside, **options)
    return open_runner(converted, threads=threads)
