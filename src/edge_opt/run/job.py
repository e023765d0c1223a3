"""One candidate of a run: built, proved, scored, timed."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt._support.extras import optional
from edge_opt._support.files import write_whole
from edge_opt.compress import Runner, convert, finetune, load_pruned, measure_runner, open_runner, prune, save_pruned
from edge_opt.data import Splits, load_splits
from edge_opt.errors import InvalidInput
from edge_opt.loading import load_model, parse_reference
from edge_opt.measuring.machine import usable_cores
from edge_opt.platforms.capacity import lifetimes_of, peak_memory
from edge_opt.profiling import profile
from edge_opt.records import Candidate, Converted, Importance, TrialMetrics
from edge_opt.run.scores import Accuracy, accuracy_of


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Compute with so many threads inside, the caller's number outside.

    >>> before = torch.get_num_threads()
    >>> with computing_with(1):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    found = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(found)


@dataclass(frozen=True)
class Subject:
    """A model by reference with its weights as safetensors, or a model itself; data by name and options, or itself.

    References and options reach any process and any machine; objects must be picklable. `batch_size` is that of what
    is profiled and timed; None is that of the first validation batch.
    """

    model: str | nn.Module
    data: Mapping[str, Any] | Splits
    weights: bytes = field(default=b"", repr=False)
    batch_size: int | None = None

    def build(self) -> nn.Module:
        """The trained model, each time a new one, in eval mode."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model).eval()
        model = load_model(self.model).model
        if self.weights:
            model.load_state_dict(weights_from(self.weights))
        return model.eval()

    def splits(self) -> Splits:
        """The four parts, the same in every process."""
        return self.data if isinstance(self.data, Splits) else load_splits(**self.data)

    def example(self, splits: Splits) -> list[torch.Tensor]:
        """Validation samples to profile and time with."""
        inputs: list[torch.Tensor] = []
        for batch in splits.validation:
            found = inputs_of(batch)
            inputs = [torch.cat(pair) for pair in zip(inputs, found, strict=True)] if inputs else found
            if self.batch_size is None or len(inputs[0]) >= self.batch_size:
                break
        if not inputs:
            raise InvalidInput("the validation part has no batches; at least one is needed")
        if self.batch_size is None:
            return inputs
        repeats = -(-self.batch_size // len(inputs[0]))
        return [torch.cat([value] * repeats)[: self.batch_size].clone() for value in inputs]


def absolute(reference: str) -> str:
    """A reference that means the same file in every process.

    >>> absolute("torchvision:resnet18"), absolute("net.py:Net") == f"{Path('net.py').resolve()}:Net"
    ('torchvision:resnet18', True)
    """
    parsed = parse_reference(reference)
    if parsed is None or not parsed.source.endswith(".py"):
        return reference
    return f"{Path(parsed.source).resolve()}{reference[len(parsed.source) :]}"


def weights_of(model: nn.Module) -> bytes:
    """A model's state as safetensors; tensors that are shared are written once for each name."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    content: bytes = safetensors().save(state)
    return content


def weights_from(content: bytes) -> dict[str, torch.Tensor]:
    """The state that `weights_of` wrote; nothing in it is executed."""
    state: dict[str, torch.Tensor] = safetensors().load(content)
    return state


def safetensors() -> Any:
    """safetensors for torch, or how to get it."""
    return optional("safetensors.torch", "a run needs", "run")


def inputs_of(batch: Any) -> list[torch.Tensor]:
    """The inputs of a batch of (inputs…, labels)."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise InvalidInput(f"a batch is a {type(batch).__name__}; loaders of a run must yield (inputs…, labels)")
    inputs = list(batch[:-1])
    if not all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in inputs):
        raise InvalidInput("inputs of a batch must be tensors whose first dimension is the sample")
    return inputs


FACTS = "facts.json"


@dataclass(frozen=True)
class Tuning:
    """How models are pruned and trained after it."""

    importance: Importance = "l1"
    round_to: int = 1
    fine_tune_epochs: int = 2
    learning_rate: float = 1e-3
    distillation: bool = False
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """A pruned model, where its files are, and what should be said about it."""

    model: nn.Module
    folder: Path | None
    remarks: tuple[str, ...]


def level_of(candidate: Candidate) -> str:
    """The same for candidates that are pruned alike."""
    content = json.dumps([candidate.pruning, sorted(candidate.layer_pruning)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_pruned(candidate: Candidate) -> bool:
    """Whether anything is to be removed at all."""
    return candidate.pruning > 0 or any(share > 0 for _, share in candidate.layer_pruning)


def variant_of(subject: Subject, splits: Splits, candidate: Candidate, tuning: Tuning, cache: Path) -> Variant:
    """The model of a candidate's level: from the cache, or made now while others of its level wait."""
    if not is_pruned(candidate):
        return Variant(subject.build(), None, ())
    folder = cache / level_of(candidate)
    with _one_at_a_time(folder):
        if not (folder / FACTS).is_file():
            _make(subject, splits, candidate, tuning, folder)
    return read_variant(subject, folder)


def read_variant(subject: Subject, folder: Path) -> Variant:
    """The model that an earlier process has left in a folder."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return Variant(load_pruned(folder, subject.build).eval(), folder, tuple(facts["remarks"]))


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """The lock goes with its process, also with one that is killed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(subject: Subject, splits: Splits, candidate: Candidate, tuning: Tuning, folder: Path) -> None:
    original = subject.build()
    pruned = prune(
        original,
        subject.example(splits),
        candidate.pruning,
        layers=dict(candidate.layer_pruning),
        importance=tuning.importance,
        round_to=tuning.round_to,
        loader=splits.calibration,
        seed=tuning.seed,
    )
    remarks = [
        f"{short.path} lost {short.achieved:.0%} of {short.asked:.0%}: {short.reason}" for short in pruned.shortfalls
    ]
    if tuning.fine_tune_epochs:
        tuned = finetune(
            pruned.model.to(tuning.device),
            splits.train,
            epochs=tuning.fine_tune_epochs,
            learning_rate=tuning.learning_rate,
            teacher=original.to(tuning.device) if tuning.distillation else None,
            seed=tuning.seed,
            progress=False,
        )
        pruned = replace(pruned, model=tuned.model.cpu())
    facts: dict[str, Any] = {"remarks": remarks, "level": candidate.pruning, "layers": dict(candidate.layer_pruning)}
    # Complete, or not there at all: a process that is killed leaves a draft that nobody looks at.
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    save_pruned(pruned, draft)
    write_whole(draft / FACTS, json.dumps(facts))
    shutil.rmtree(folder, ignore_errors=True)
    draft.replace(folder)


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
        held = peak_memory(
            profiled,
            lifetimes=lifetimes_of(candidate.runtime),
            layers={layer.path: layer.precision for layer in converted.layers},
        )
        return {
            "correct": scored.correct,
            "samples": scored.samples,
            "size_bytes": converted.size_bytes,
            "model_bytes": held.weight_bytes + held.buffer_bytes,
            "peak_memory_bytes": held.total_bytes,
            "peak_memory_kind": held.kind,
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
            peak_memory_kind=built["peak_memory_kind"],
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
        if candidate.runtime in ("torch", "torch-compile"):
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
            return convert(model, inputs, candidate.precision, candidate.runtime, folder=aside)

    def model(self, candidate: Candidate, folder: Path) -> torch.nn.Module:
        """The candidate's pruned model in float32."""
        return read_variant(self.subject, folder / PRUNED).model if is_pruned(candidate) else self.subject.build()


def _keep_inputs(path: Path, inputs: list[torch.Tensor]) -> None:
    write_whole(path, safetensors().save({f"{index}": value.contiguous() for index, value in enumerate(inputs)}))


def _kept_inputs(path: Path) -> list[torch.Tensor]:
    found = weights_from(path.read_bytes())
    return [found[f"{index}"] for index in range(len(found))]
