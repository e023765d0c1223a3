"""One candidate of a run: built, proved, scored, timed."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import importlib
import json
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from edge_opt._support.extras import import_optional
from edge_opt._support.files import write_whole
from edge_opt._support.json import from_plain, to_plain
from edge_opt._support.output_tensors import flat_tensors
from edge_opt.boards.capacity import lifetimes_of, peak_memory
from edge_opt.compress import Runner, convert, export_onnx, finetune, load_pruned, measure_runner, open_runner, prune
from edge_opt.data import Splits, load_splits
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.loading import import_source, load_model, parse_reference
from edge_opt.measuring.allocator import ResidentGrowth
from edge_opt.measuring.energy import measure_energy
from edge_opt.measuring.latency import wait_for_quiet
from edge_opt.measuring.machine import usable_cores
from edge_opt.measuring.onnx_timing import TimingOrder, TimingResult
from edge_opt.measuring.statistics import relative_half_width
from edge_opt.profiling import profile
from edge_opt.pruning.pruned_files import save_cut
from edge_opt.pruning.ranking import RoundTo
from edge_opt.pruning.recipe import fingerprint
from edge_opt.records.compression import Importance, PruneSpec
from edge_opt.records.conversions import Converted, Exported
from edge_opt.records.measurements import Latency
from edge_opt.records.sweeps import Candidate, TrialMetrics
from edge_opt.run.scores import Figure, figure_of, paired_drop
from edge_opt.runtimes.agreement import sized
from edge_opt.runtimes.runners import BY_ONNX_FILE, IN_TORCH, PACKAGES
from edge_opt.search.board_worker import packed_inputs
from edge_opt.tasks.batches import (
    FlatCalls,
    StandIn,
    TaskSettings,
    example_inputs,
    joined_calls,
    samples_of,
    sized_call,
)
from edge_opt.trace.inputs import CallArguments
from edge_opt.training_steps.step_report import training_step


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
    """A model by reference with its state, or a model itself; data by name and options, or itself.

    References and options reach any process and any machine; objects must be picklable. `made` is what the reference
    made, pickled; where it cannot be pickled, its factory is called again and gets `weights`. `batch_size` is that of
    what is profiled and timed; None is that of the first validation batch. `task` says what is scored and how it is
    called.
    """

    model: str | nn.Module
    data: Mapping[str, Any] | Splits
    weights: bytes = field(default=b"", repr=False)
    made: bytes = field(default=b"", repr=False)
    batch_size: int | None = None
    task: TaskSettings = field(default_factory=TaskSettings)

    def build(self) -> nn.Module:
        """The trained model, each time a new one, in eval mode."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model).eval()
        if self.made:
            import_source(self.model)
            return cast("nn.Module", pickle.loads(self.made)).eval()
        model = load_model(self.model).model
        if self.weights:
            model.load_state_dict(weights_from(self.weights))
        return model.eval()

    def holding(self, model: nn.Module) -> Subject:
        """The subject with this model for what its reference makes."""
        if isinstance(self.model, nn.Module):
            return self
        try:
            found = replace(self, made=pickle.dumps(model))
            found.build()
        except Exception:  # whatever a class of the user's raises: there is another way
            return replace(self, weights=weights_of(model))
        return found

    def splits(self) -> Splits:
        """The four parts, the same in every process."""
        return self.data if isinstance(self.data, Splits) else load_splits(**self.data)

    def call(self, splits: Splits, model: nn.Module | None = None) -> CallArguments:
        """The arguments of one call with validation samples, to profile and time with."""
        task, asked = self.task.build(), self.build() if model is None else model
        found: CallArguments | None = None
        for raw in splits.validation:
            call = task.call(asked, raw)
            found = call if found is None else joined_calls(found, call)
            if self.batch_size is None or samples_of(found) >= self.batch_size:
                break
        if found is None:
            raise InvalidInput("the validation part has no batches; at least one is needed")
        return found if self.batch_size is None else sized_call(found, self.batch_size)

    def example(self, splits: Splits, model: nn.Module | None = None) -> Any:
        """That call as `profile`, `prune` and `convert` take their inputs."""
        return example_inputs(self.call(splits, model))

    def samples(
        self, part: Iterable[Any], model: nn.Module, most: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The first samples of a part: tensors that a runner takes, and tensors that its answers are held against."""
        task = self.task.build()
        raw = next(iter(part))
        call, batch = task.call(model, raw), next(task.batches(model, [raw]))
        count = min(most, samples_of(call))
        first = sized_call(call, count)
        inputs = [leaf for leaf in tree_leaves((first.args, first.kwargs)) if isinstance(leaf, torch.Tensor)]
        return inputs, [leaf[:count] if leaf.dim() else leaf for leaf in flat_tensors(batch.labels)]

    def calls(self, splits: Splits, model: nn.Module) -> FlatCalls:
        """The calibration part as flat tensors, in the order of the model's inputs."""
        return FlatCalls(self.task.build(), model, splits.calibration)


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
    return import_optional("safetensors.torch", "a run needs", "run")


FACTS = "facts.json"


@dataclass(frozen=True)
class Tuning:
    """How models are pruned and trained after it."""

    importance: Importance = "auto"
    round_to: RoundTo = "auto"
    fine_tune_epochs: int = 2
    learning_rate: float = 1e-3
    distillation: bool = False
    device: str = "cpu"
    seed: int = 0
    train_for_int8: bool = False

    def rounds(self, candidate: Candidate) -> bool:
        """Whether a candidate is trained with the rounding of int8."""
        return self.train_for_int8 and candidate.precision == "int8" and self.fine_tune_epochs > 0


@dataclass(frozen=True, slots=True)
class Variant:
    """A pruned model, where its files are, and what should be said about it."""

    model: nn.Module
    folder: Path | None
    remarks: tuple[str, ...]


def level_of(candidate: Candidate, tuning: Tuning) -> str:
    """The same for candidates that are pruned and trained alike."""
    made = [tuning.round_to, tuning.fine_tune_epochs, tuning.rounds(candidate)]
    content = json.dumps([candidate.pruning, sorted(candidate.layer_pruning), *made])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def variant_of(subject: Subject, splits: Splits, candidate: Candidate, tuning: Tuning, cache: Path) -> Variant:
    """The model of a candidate's level: from the cache, or made now while others of its level wait."""
    if not candidate.is_pruned and not tuning.rounds(candidate):
        return Variant(subject.build(), None, ())
    folder = cache / level_of(candidate, tuning)
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


def _cut(
    subject: Subject, splits: Splits, original: nn.Module, candidate: Candidate, tuning: Tuning
) -> tuple[nn.Module, PruneSpec, list[str]]:
    """The candidate's model before training, its recipe, and which layers lost less than asked."""
    if not candidate.is_pruned:
        return original, PruneSpec(fingerprint(original), (), (), ()), []
    pruned = prune(
        original,
        subject.example(splits, original),
        candidate.pruning,
        layers=dict(candidate.layer_pruning),
        importance=tuning.importance,
        round_to=tuning.round_to,
        loader=list(subject.task.build().batches(original, splits.calibration)),
        seed=tuning.seed,
    )
    if not pruned.spec.kept:
        what = f"pruning {candidate.pruning:g} removes nothing: every layer is rounded back to the width it has"
        return pruned.model, pruned.spec, [f"{what}; take a larger share, or a smaller round_to"]
    remarks = [
        f"{short.path} lost {short.achieved:.0%} of {short.asked:.0%}: {short.reason}" for short in pruned.shortfalls
    ]
    return pruned.model, pruned.spec, remarks


def _make(subject: Subject, splits: Splits, candidate: Candidate, tuning: Tuning, folder: Path) -> None:
    original = subject.build()
    model, spec, remarks = _cut(subject, splits, original, candidate, tuning)
    # Where nothing is cut, there is nothing to heal: it would be the parent with more training, and no faster.
    if tuning.fine_tune_epochs and (spec.kept or tuning.rounds(candidate)):
        tuned = finetune(
            model.to(tuning.device),
            splits.train,
            epochs=tuning.fine_tune_epochs,
            learning_rate=tuning.learning_rate,
            teacher=original.to(tuning.device) if tuning.distillation else None,
            seed=tuning.seed,
            progress=False,
            precision="int8" if tuning.rounds(candidate) else None,
            **vars(subject.task),
        )
        model = tuned.model.cpu()
    facts: dict[str, Any] = {"remarks": remarks, "level": candidate.pruning, "layers": dict(candidate.layer_pruning)}
    # Complete, or not there at all: a process that is killed leaves a draft that nobody looks at.
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    save_cut(model, spec, draft)
    write_whole(draft / FACTS, json.dumps(facts))
    shutil.rmtree(folder, ignore_errors=True)
    draft.replace(folder)


PRUNED = "pruned"
INPUTS = "inputs.safetensors"


@dataclass(frozen=True)
class Bench:
    """How variants are timed, at which batch they are ranked, and what energy is reckoned with."""

    threads: int | None = 1
    min_time_s: float = 0.4
    power_watts: float = 2.0
    deploy_batch: int = 1

    @property
    def used_threads(self) -> int:
        return self.threads or usable_cores()


@dataclass(frozen=True)
class Reference:
    """The eager baseline, by which the others are judged."""

    accuracy: Figure
    macs: int
    params: int


def fine_tuning_cost(model: nn.Module, inputs: Any) -> dict[str, int | None]:
    """FLOPs and peak of one step of fine-tuning, with its optimizer; None where the step cannot be traced."""
    try:
        step = training_step(model, inputs, optimizer="adamw")
    except EdgeOptError:
        return {"train_flops": None, "train_peak_memory_bytes": None}
    return {"train_flops": step.flops, "train_peak_memory_bytes": step.peak_bytes}


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
        call = self.subject.call(splits, variant.model)
        inputs = example_inputs(call)
        keep_call(folder / INPUTS, call)
        converted = convert(
            variant.model,
            self.converted_with(candidate, call),
            candidate.precision,
            candidate.runtime,
            calibration=self.subject.calls(splits, variant.model) if candidate.precision == "int8" else None,
            calibration_batches=self.calibration_batches,
            reduce_range=self.reduce_range,
            exported=self._exported(candidate, variant.model, inputs),
            folder=folder,
        )
        task = self.subject.task.build()
        with open_runner(converted, threads=self.bench.used_threads) as runner:
            scored = figure_of(task.score(StandIn(runner, variant.model, call), splits.validation))
        profiled = profile(variant.model, inputs)
        held = peak_memory(
            profiled,
            lifetimes=lifetimes_of(candidate.runtime),
            layers={layer.path: layer.precision for layer in converted.layers},
        )
        return {
            "score": asdict(scored),
            "size_bytes": converted.size_bytes,
            "model_bytes": held.weight_bytes + held.buffer_bytes,
            "peak_memory_bytes": held.total_bytes,
            "peak_memory_kind": held.kind,
            **fine_tuning_cost(variant.model, inputs),
            "macs": profiled.totals.macs,
            "params": profiled.totals.params,
            "effective_precision": converted.effective_precision,
            "float_layers": [layer.path for layer in converted.kept_layers],
            "file": Path(converted.path).name,
            "remarks": [*variant.remarks, *converted.remarks],
        }

    def _exported(self, candidate: Candidate, model: nn.Module, inputs: Any) -> Exported | None:
        """The float file of a level, made once for all that are converted from it; None where none is, or it fails."""
        if candidate.runtime not in BY_ONNX_FILE or candidate.precision not in ("fp32", "int8"):
            return None
        folder = self.cache / f"{level_of(candidate, self.tuning)}-onnx"
        known = folder / FACTS
        with _one_at_a_time(folder):
            if not known.is_file():
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    made = export_onnx(model, inputs, folder / f"{type(model).__name__}.fp32.onnx")
                except EdgeOptError:
                    return None  # converting tells what is wrong, in the row that it is wrong in
                write_whole(known, json.dumps(to_plain(made)))
        return from_plain(Exported, json.loads(known.read_text(encoding="utf-8")))

    def converted_with(self, candidate: Candidate, call: CallArguments) -> Any:
        """The inputs that a candidate is converted for."""
        # Files of edge runtimes may have one batch only; then it is that of the deployment.
        is_edge = candidate.runtime in ("litert", "executorch")
        return example_inputs(sized_call(call, self.bench.deploy_batch) if is_edge else call)

    def measure(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> TrialMetrics:
        """Time what was built, in batches, in the batch that is deployed and in single samples; see what it holds."""
        inputs = kept_inputs(folder / INPUTS)
        batch_size, deploy_batch = len(inputs[0]), self.bench.deploy_batch
        importlib.import_module(PACKAGES.get(candidate.runtime, candidate.runtime))
        growth = ResidentGrowth()
        with self.runner(candidate, folder, built) as runner:
            held = growth.peak_while(lambda: runner(*inputs))
            times = {
                size: self._timed(runner, sized([tuple(inputs)], size))
                for size in dict.fromkeys((batch_size, deploy_batch, 1))
            }
            energy = self._energy(lambda: runner(*inputs), times[batch_size])
        return self._figures(built, batch_size, times, held, energy)

    def timing(self, folder: Path, built: Mapping[str, Any]) -> tuple[TimingOrder, dict[str, bytes], bytes]:
        """What a board is to time of a candidate that was built: the order, its file and its inputs."""
        inputs, name = kept_inputs(folder / INPUTS), str(built["file"])
        order = TimingOrder(
            (name,),
            tuple(dict.fromkeys((len(inputs[0]), self.bench.deploy_batch, 1))),
            threads=self.bench.threads or 0,
            min_time_s=self.bench.min_time_s,
            max_time_s=2 * self.bench.min_time_s,
        )
        return order, {name: built_file(folder, built).read_bytes()}, packed_inputs([each.numpy() for each in inputs])

    def metrics(self, built: Mapping[str, Any], found: TimingResult) -> TrialMetrics:
        """The figures of a candidate that a board has timed; a meter of this machine says nothing about it."""
        name = str(built["file"])
        times = {item.size: item.latency for item in found.timings if item.file == name}
        batch_size = found.timings[0].size
        energy = self.bench.power_watts * times[batch_size].median_s, self._proxy
        figures = self._figures(built, batch_size, times, found.memory_bytes, energy)
        return replace(figures, machine=found.machine)

    def _figures(
        self,
        built: Mapping[str, Any],
        batch_size: int,
        times: Mapping[int, Latency],
        held: int | None,
        energy: tuple[float | None, str],
    ) -> TrialMetrics:
        """What is known of a candidate: from its build, and from its times at each batch."""
        deploy_batch = self.bench.deploy_batch
        batch, deployed = times[batch_size], times[deploy_batch]
        sizes = {"latency_ms": batch_size, "deploy_latency_ms": deploy_batch, "single_latency_ms": 1}
        scored, reference = Figure(**built["score"]), self.reference
        drop = paired_drop(reference.accuracy, scored)
        return TrialMetrics(
            accuracy=scored.value,
            accuracy_low=scored.low,
            accuracy_high=scored.high,
            accuracy_drop=reference.accuracy.drop(scored),
            accuracy_drop_low=None if drop is None else drop[0],
            accuracy_drop_high=None if drop is None else drop[1],
            metric=scored.metric,
            metric_direction=scored.direction,
            replicates=tuple(scored.replicates),
            latency_s=batch.median_s,
            latency_low_s=batch.median_interval_s.low,
            latency_high_s=batch.median_interval_s.high,
            latency_std_s=batch.std_s,
            latency_p95_s=batch.p95_s,
            cpu_latency_s=batch.cpu_median_s,
            batch_size=batch_size,
            throughput=batch.throughput,
            model_bytes=built["model_bytes"],
            size_bytes=built["size_bytes"],
            peak_memory_bytes=built["peak_memory_bytes"],
            peak_memory_kind=built["peak_memory_kind"],
            measured_memory_bytes=held,
            train_flops=built.get("train_flops"),
            train_peak_memory_bytes=built.get("train_peak_memory_bytes"),
            energy_j=energy[0],
            energy_source=energy[1],
            macs=built["macs"],
            params=built["params"],
            macs_ratio=built["macs"] / max(reference.macs, 1),
            params_ratio=built["params"] / max(reference.params, 1),
            effective_precision=built["effective_precision"],
            float_layers=tuple(built["float_layers"]),
            single_latency_s=times[1].median_s,
            deploy_batch=deploy_batch,
            deploy_latency_s=deployed.median_s,
            deploy_latency_low_s=deployed.median_interval_s.low,
            deploy_latency_high_s=deployed.median_interval_s.high,
            is_disturbed=is_disturbed(deployed),
            disturbed_times=tuple(name for name, size in sizes.items() if is_disturbed(times[size])),
            answers=scored.answers,
            remarks=(*built["remarks"], *dict.fromkeys((*batch.remarks, *deployed.remarks))),
        )

    def _timed(self, runner: Runner, inputs: Sequence[torch.Tensor]) -> Latency:
        """The latency of these inputs; a disturbed one is measured again when the machine is quieter."""
        options = {"min_time_s": self.bench.min_time_s, "max_time_s": 2 * self.bench.min_time_s}
        found = measure_runner(runner, *inputs, **options)
        if not is_disturbed(found):
            return found
        wait_for_quiet(QUIET_WITHIN * self.bench.min_time_s, cores=usable_cores())
        again = measure_runner(runner, *inputs, **options)
        return min((again, found), key=lambda each: (is_disturbed(each), relative_half_width(each.samples_s)))

    def _energy(self, forward: Callable[[], object], latency: Latency) -> tuple[float | None, str]:
        """Joules of one batch and where they come from: a meter where there is one, else the given power."""
        found, _ = measure_energy(
            forward, latency, power_watts=self.bench.power_watts, min_time_s=self.bench.min_time_s
        )
        if found is None:
            return None, "not known"
        if found.source == "proxy":
            return found.joules, self._proxy
        return found.joules, f"{found.source}: {found.note}"

    @property
    def _proxy(self) -> str:
        return f"proxy: {self.bench.power_watts:g} W given, times the median latency"

    @contextmanager
    def runner(self, candidate: Candidate, folder: Path, built: Mapping[str, Any]) -> Iterator[Runner]:
        """What was built, opened again."""
        threads = self.bench.used_threads
        if candidate.runtime in IN_TORCH:
            with open_runner(self.eager(candidate, folder), threads=threads) as runner:
                yield runner
            return
        path = built_file(folder, built)
        with open_runner(path, candidate.runtime, threads=threads, precision=candidate.precision) as runner:
            yield runner

    def eager(self, candidate: Candidate, folder: Path) -> Converted:
        """The candidate's model as torch runs it."""
        # Its files are not needed; left to the end of the process they would stay, for ours end without clean-up.
        with tempfile.TemporaryDirectory() as aside:
            model, inputs = self.model(candidate, folder), example_inputs(kept_call(folder / INPUTS))
            return convert(model, inputs, candidate.precision, candidate.runtime, folder=aside)

    def score(self, candidate: Candidate, folder: Path, built: Mapping[str, Any], loader: Iterable[Any]) -> Figure:
        """What the candidate scores on a part of the data, as it was built."""
        model, call = self.model(candidate, folder), kept_call(folder / INPUTS)
        with self.runner(candidate, folder, built) as runner:
            return figure_of(self.subject.task.build().score(StandIn(runner, model, call), loader))

    def model(self, candidate: Candidate, folder: Path) -> torch.nn.Module:
        """The candidate's model in float32, pruned and trained as it is."""
        kept = folder / PRUNED
        return read_variant(self.subject, kept).model if kept.is_dir() else self.subject.build()


def built_file(folder: Path, built: Mapping[str, Any]) -> Path:
    """The file that a build has left; it is a mistake if it is gone."""
    path = folder / str(built["file"])
    if not path.is_file():
        raise InvalidInput(f"{path} is gone since it was built; start afresh")
    return path


# A quiet moment is waited for this many times as long as a measurement takes at least.
QUIET_WITHIN = 5.0


def is_disturbed(latency: Latency) -> bool:
    """Whether other programs or noise were in the way of a measurement."""
    return latency.is_contended or latency.is_noisy


STRUCTURE = "inputs.json"


def keep_call(path: Path, call: CallArguments) -> None:
    """Write the tensors of a call, in the order that runners take them, and the structure they stand in beside."""
    leaves, spec = tree_flatten((list(call.args), call.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [None if isinstance(leaf, torch.Tensor) else [leaf] for leaf in leaves]
    write_whole(path, safetensors().save({f"{index}": value.contiguous() for index, value in enumerate(tensors)}))
    write_whole(path.with_name(STRUCTURE), json.dumps({"spec": treespec_dumps(spec), "leaves": others}))


def kept_call(path: Path) -> CallArguments:
    """The call that `keep_call` wrote."""
    known = json.loads(path.with_name(STRUCTURE).read_text(encoding="utf-8"))
    tensors = iter(kept_inputs(path))
    leaves = [next(tensors) if other is None else other[0] for other in known["leaves"]]
    args, kwargs = tree_unflatten(leaves, treespec_loads(known["spec"]))
    return CallArguments(tuple(args), kwargs)


def kept_inputs(path: Path) -> list[torch.Tensor]:
    """The batch that a build kept for timing."""
    found = weights_from(path.read_bytes())
    return [found[f"{index}"] for index in range(len(found))]
