"""The job of a run: how one candidate is made, proved and timed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from edge_opt.compress import Runner, convert, measure_runner, open_runner
from edge_opt.errors import InvalidInput
from edge_opt.files import write_whole
from edge_opt.measure.environment import usable_cores
from edge_opt.pipeline.memory import footprint
from edge_opt.pipeline.scores import Accuracy, accuracy_of
from edge_opt.pipeline.subject import Subject, safetensors, weights_from
from edge_opt.pipeline.threads import computing_with
from edge_opt.pipeline.variants import Tuning, is_pruned, read_variant, variant_of
from edge_opt.profiling import profile
from edge_opt.records import Candidate, Converted, TrialMetrics

PRUNED = "pruned"
INPUTS = "inputs.safetensors"


@dataclass(frozen=True)
class Bench:
    """How variants are timed, and what energy is reckoned with."""

    threads: int | None = 1
    min_time_s: float = 0.4
    power_watts: float = 2.0

    @property
    def used_threads(self) -> int:
        return self.threads or usable_cores()


@dataclass(frozen=True)
class Reference:
    """The eager baseline, by which the others are judged."""

    accuracy: Accuracy
    macs: int
    params: int


@dataclass(frozen=True)
class PipelineJob:
    """Prune and fine-tune once per level, convert, verify, score on validation; then time, alone."""

    subject: Subject
    reference: Reference
    cache: Path
    tuning: Tuning = field(default_factory=Tuning)
    bench: Bench = field(default_factory=Bench)
    calibration_batches: int = 4
    reduce_range: bool | None = None
    build_threads: int = 1

    def build(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        """Make the candidate and find its accuracy; what `measure` needs stays in the folder."""
        # The same number on every machine: sums taken by more threads round otherwise.
        with computing_with(self.build_threads):
            return self._built(candidate, folder)

    def _built(self, candidate: Candidate, folder: Path) -> Mapping[str, Any]:
        splits = self.subject.splits()
        variant = variant_of(self.subject, splits, candidate, self.tuning, self.cache)
        if variant.folder is not None:
            shutil.copytree(variant.folder, folder / PRUNED)
        inputs = self.subject.example(splits)
        _keep_inputs(folder / INPUTS, inputs)
        converted = convert(
            variant.model,
            inputs,
            candidate.precision,
            candidate.runtime,
            calibration=splits.calibration if candidate.precision == "int8" else None,
            calibration_batches=self.calibration_batches,
            reduce_range=self.reduce_range,
            folder=folder,
        )
        with open_runner(converted, threads=self.bench.used_threads) as runner:
            scored = accuracy_of(runner, splits.validation)
        profiled = profile(variant.model, inputs)
        held = footprint(variant.model, profiled, converted.layers, converted.effective_precision, candidate.runtime)
        return {
            "correct": scored.correct,
            "samples": scored.samples,
            "size_bytes": converted.size_bytes,
            "model_bytes": held.model_bytes,
            "peak_memory_bytes": held.peak_bytes,
            "macs": profiled.totals.macs,
            "params": profiled.totals.params,
            "effective_precision": converted.effective_precision,
            "float_layers": [layer.path for layer in converted.kept_layers],
            "file": Path(converted.path).name,
            "remarks": [*variant.remarks, *converted.remarks],
        }

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        """Time batches and single samples of what was built."""
        inputs = _kept_inputs(folder / INPUTS)
        options = {"min_time_s": self.bench.min_time_s, "max_time_s": 2 * self.bench.min_time_s}
        with self.runner(candidate, folder, built) as runner:
            batch = measure_runner(runner, *inputs, **options)
            single = measure_runner(runner, *(value[:1] for value in inputs), **options)
        scored = Accuracy(built["correct"], built["samples"])
        low, high = scored.interval
        watts, reference = self.bench.power_watts, self.reference
        return TrialMetrics(
            accuracy=scored.share,
            accuracy_low=low,
            accuracy_high=high,
            accuracy_drop=reference.accuracy.share - scored.share,
            latency_s=batch.median_s,
            latency_low_s=batch.median_interval_s.low,
            latency_high_s=batch.median_interval_s.high,
            latency_std_s=batch.std_s,
            latency_p95_s=batch.p95_s,
            cpu_latency_s=batch.cpu_median_s,
            batch_size=len(inputs[0]),
            throughput=batch.throughput,
            model_bytes=built["model_bytes"],
            size_bytes=built["size_bytes"],
            peak_memory_bytes=built["peak_memory_bytes"],
            energy_j=watts * batch.median_s,
            energy_source=f"proxy: {watts:g} W given, times the median latency",
            macs=built["macs"],
            params=built["params"],
            macs_ratio=built["macs"] / max(reference.macs, 1),
            params_ratio=built["params"] / max(reference.params, 1),
            effective_precision=built["effective_precision"],
            float_layers=tuple(built["float_layers"]),
            single_latency_s=single.median_s,
            remarks=(*built["remarks"], *batch.remarks),
        )

    @contextmanager
    def runner(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> Iterator[Runner]:
        """What was built, opened again."""
        threads = self.bench.used_threads
        if candidate.runtime == "torch":
            with open_runner(self.eager(candidate, folder), threads=threads) as runner:
                yield runner
            return
        path = folder / str(built["file"])
        if not path.is_file():
            raise InvalidInput(f"{path} is gone since it was built; start afresh")
        with open_runner(path, candidate.runtime, threads=threads, precision=candidate.precision) as runner:
            yield runner

    def eager(self, candidate: Candidate, folder: Path) -> Converted:
        """The candidate's model as torch runs it."""
        # Its files are not needed; left to the end of the process they would stay, for ours end without clean-up.
        with tempfile.TemporaryDirectory() as aside:
            model, inputs = self.model(candidate, folder), _kept_inputs(folder / INPUTS)
            return convert(model, inputs, candidate.precision, "torch", folder=aside)

    def model(self, candidate: Candidate, folder: Path) -> torch.nn.Module:
        """The candidate's pruned model in float32."""
        return read_variant(self.subject, folder / PRUNED).model if is_pruned(candidate) else self.subject.build()


def _keep_inputs(path: Path, inputs: list[torch.Tensor]) -> None:
    write_whole(path, safetensors().save({f"{index}": value.contiguous() for index, value in enumerate(inputs)}))


def _kept_inputs(path: Path) -> list[torch.Tensor]:
    found = weights_from(path.read_bytes())
    return [found[f"{index}"] for index in range(len(found))]
