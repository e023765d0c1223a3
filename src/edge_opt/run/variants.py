"""Variants of a model: pruned and fine-tuned, as long as accuracy is missing, and with int8 rounding where that helps.

A variant is made once, in a folder of the cache that is named after what decides it, and read by every candidate that
starts from it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt._support.files import write_whole
from edge_opt.compress import finetune, load_pruned, prune
from edge_opt.data import Splits
from edge_opt.errors import MeasurementFailed
from edge_opt.pruning.recipe import SPEC_FILE, fingerprint, read_spec, save_cut
from edge_opt.records.compression import PruneSpec
from edge_opt.records.sweeps import MADE_WORSE, SHARES, Candidate
from edge_opt.run.config import RunConfig
from edge_opt.run.model_and_data import ModelAndData, ScoreSummary
from edge_opt.run.run_summary import pruning_target, used_rounding
from edge_opt.search.locks import exclusive
from edge_opt.tasks.batches import Task
from edge_opt.tasks.paired_scores import Score

FACTS = "facts.json"
# Ratios that `auto` chooses are trained for the configured epochs again while accuracy is missing and training gains,
# up to this multiple of them. The first epochs recover most: 4 of 12 were as accurate as 12 on a ResNet.
LONGEST = 3
# Drop of a metric between 0 and 1 after training, of others the share of their value, that counts as missing.
MISSING = 0.005
# Drop of int8 below its own float model from which on it is trained with int8 rounding.
INT8_LOSS = 0.005
# Drop on training data, below the 95 % interval of what it was, from which on fine-tuning has made a variant worse.
WORSE_BY = 0.01
# Training samples that are scored before and after fine-tuning, and validation samples before training.
FEW = 1000


@dataclass(frozen=True, slots=True)
class Variant:
    """A pruned model, the folder of its files, and remarks for the user."""

    model: nn.Module
    folder: Path | None
    remarks: tuple[str, ...]
    # Its score on validation after training, where that decided about more training.
    score: float | None = None
    # Epochs that it was trained on.
    epochs: int = 0


def trains_for_int8(candidate: Candidate, config: RunConfig) -> bool:
    """Return whether a candidate is trained with int8 rounding, whatever plain int8 loses."""
    return config.train_for_int8 is True and config.fine_tune_epochs > 0 and candidate.precision == "int8"


def trains_longer(config: RunConfig) -> bool:
    """Return whether training goes on where accuracy is missing: an equal training must have equal epochs."""
    return config.pruning_levels == "auto" and not config.fair


def variant_key(candidate: Candidate, config: RunConfig, rounds: bool) -> str:
    """Return a key that is the same for candidates that are pruned and trained alike.

    Everything else that decides a variant is in the name of the cache's folder.
    """
    # The model as it is depends on none of these.
    is_changed = candidate.is_pruned or rounds or config.fair
    settings = [used_rounding(config), config.fine_tune_epochs, trains_longer(config), rounds] if is_changed else []
    content = json.dumps([candidate.pruning, sorted(candidate.layer_pruning), *settings])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def variant_of(
    source: ModelAndData,
    splits: Splits,
    candidate: Candidate,
    cache: Path,
    baseline: ScoreSummary | None = None,
    rounds: bool | None = None,
) -> Variant:
    """Return the model of a candidate's pruning level: from the cache, or made now while other processes wait.

    Args:
        source: Model, data and configuration.
        splits: The data.
        candidate: The candidate.
        cache: Folder of variants.
        baseline: What the variant should reach; without it nothing is trained longer.
        rounds: Whether it is trained with int8 rounding; None as configured.
    """
    config = source.config
    rounds = trains_for_int8(candidate, config) if rounds is None else rounds
    is_trained_on = config.fair and config.fine_tune_epochs > 0
    if not candidate.is_pruned and not rounds and not is_trained_on:
        return Variant(source.build(), None, ())
    folder = cache / variant_key(candidate, config, rounds)
    with exclusive(folder):
        if not (folder / FACTS).is_file():
            _make_variant(source, splits, candidate, folder, baseline, rounds)
    return read_variant(source, folder)


def read_variant(source: ModelAndData, folder: Path) -> Variant:
    """Return the variant that an earlier process has written to a folder."""
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    model = load_pruned(folder, source.build).eval()
    return Variant(model, folder, tuple(facts["remarks"]), facts.get("score"), facts.get("epochs", 0))


def first_batches(part: Iterable[Any], samples: int = FEW) -> list[Any]:
    """Return the first batches, with at least this many samples."""
    batches: list[Any] = []
    for batch in part:
        batches.append(batch)
        if sample_count(batches) >= samples:
            break
    return batches


def sample_count(batches: Iterable[Any]) -> int:
    """Return how many samples batches have: the length of their first tensors."""
    tensors = ([leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)] for batch in batches)
    return sum(next((len(leaf) for leaf in leaves if leaf.dim()), 1) for leaves in tensors)


def scale_of(metric: str, value: float) -> float:
    """Return what drops are shares of: 1 for metrics between 0 and 1, else the value."""
    return 1.0 if metric in SHARES else abs(value)


def pruned_model(
    source: ModelAndData, splits: Splits, original: nn.Module, candidate: Candidate
) -> tuple[nn.Module, PruneSpec, list[str]]:
    """Return the candidate's model before training, its recipe, and the layers that lost less than requested."""
    config = source.config
    if not candidate.is_pruned:
        return original, PruneSpec(fingerprint(original), (), (), ()), []
    pruned = prune(
        original,
        source.example(splits, original),
        candidate.pruning,
        layers=dict(candidate.layer_pruning),
        importance=config.importance,
        round_to=config.round_to,
        target=pruning_target(config),
        loader=list(source.task().batches(original, splits.calibration)),
        seed=config.seed,
    )
    if not pruned.spec.kept:
        what = f"pruning {candidate.pruning:g} removes nothing: every layer is rounded back to the width it has"
        remark = f"{what}; take a larger ratio, or a smaller round_to"
        return pruned.model, pruned.spec, [remark]
    remarks = [
        f"{short.path} lost {short.achieved:.0%} of {short.asked:.0%}: {short.reason}" for short in pruned.shortfalls
    ]
    return pruned.model, pruned.spec, remarks


def _make_variant(
    source: ModelAndData,
    splits: Splits,
    candidate: Candidate,
    folder: Path,
    baseline: ScoreSummary | None,
    rounds: bool,
) -> None:
    """Prune and fine-tune, and write the result to a folder."""
    config, original = source.config, source.build()
    epochs, score = 0, None
    if rounds and config.train_for_int8 == "auto" and candidate.is_pruned:
        # What the float variant has learned is not learned again.
        trained = variant_of(source, splits, replace(candidate, precision="fp32"), folder.parent, baseline, False)
        assert trained.folder is not None
        model, remarks, epochs = trained.model, [*trained.remarks], trained.epochs
        spec = read_spec(trained.folder / SPEC_FILE)
    else:
        model, spec, remarks = pruned_model(source, splits, original, candidate)
    # Where nothing is pruned, fine-tuning would only be more training of the parent, and no faster.
    if config.fine_tune_epochs and (spec.kept or rounds or config.fair):
        lesson = _Training(source, splits, original, baseline if trains_longer(config) else None, rounds)
        tuned = lesson.run(model)
        epochs = epochs + tuned.epochs
        model, score, remarks = tuned.model, tuned.score, [*remarks, *tuned.remarks]
    if epochs and not config.fair:
        remarks.append(f"trained for {epochs} epochs that the baseline was not; fair trains it equally long")
    facts: dict[str, Any] = {"remarks": remarks, "level": candidate.pruning, "layers": dict(candidate.layer_pruning),
                             "score": score, "epochs": epochs}  # fmt: skip
    # A folder cannot be replaced atomically. So it is written under another name and renamed: a process that is
    # killed meanwhile leaves a draft that is never read.
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    save_cut(model, spec, draft)
    write_whole(draft / FACTS, json.dumps(facts))
    shutil.rmtree(folder, ignore_errors=True)
    draft.replace(folder)


@dataclass(frozen=True)
class _Training:
    """The fine-tuning of one variant; with a baseline it goes on where accuracy is missing."""

    source: ModelAndData
    splits: Splits
    original: nn.Module
    baseline: ScoreSummary | None
    rounds: bool

    def run(self, model: nn.Module) -> Variant:
        """Return the trained model; the given one where training made it worse on its own data."""
        config, task, few = self.source.config, self.source.task(), first_batches(self.splits.train)
        before = _known_score(task, model, few)
        tuned = self._tuned(model, config.seed)
        after = _known_score(task, tuned, few)
        if before is not None and after is not None:
            name, (low, high) = task.metric.name, before.interval
            margin = WORSE_BY * scale_of(name, before.value)
            is_higher_better = task.metric.direction == "higher"
            if after.value < low - margin if is_higher_better else after.value > high + margin:
                what = f"{name} on training data went from {before.value:.4g} to {after.value:.4g}"
                return Variant(model, None, (f"{MADE_WORSE}; {what}, so it is left out",))
        score, rounds = self._score(task, tuned), 1
        while self._is_missing(score) and rounds < LONGEST:
            longer = self._tuned(tuned, config.seed + rounds)
            longer_score = self._score(task, longer)
            assert self.baseline is not None and score is not None and longer_score is not None
            if (longer_score < score) != (self.baseline.direction == "lower"):
                break
            tuned, score, rounds = longer, longer_score, rounds + 1
        return Variant(tuned, None, (), score, rounds * config.fine_tune_epochs)

    def _tuned(self, model: nn.Module, seed: int) -> nn.Module:
        config = self.source.config
        tuned = finetune(
            model.to(config.device),
            self.splits.train,
            epochs=config.fine_tune_epochs,
            learning_rate=config.learning_rate,
            teacher=self.original.to(config.device) if config.distillation else None,
            seed=seed,
            precision="int8" if self.rounds else None,
            **config.task,
        )
        model.cpu()
        return tuned.model.cpu().eval()

    def _score(self, task: Task, model: nn.Module) -> float | None:
        """Return the score on validation where it decides about more training."""
        return None if self.baseline is None else task.score(model, self.splits.validation, resamples=0).value

    def _is_missing(self, score: float | None) -> bool:
        if self.baseline is None or score is None:
            return False
        drop = self.baseline.value - score if self.baseline.direction == "higher" else score - self.baseline.value
        return drop > MISSING * scale_of(self.baseline.metric, self.baseline.value)


def _known_score(task: Task, model: nn.Module, batches: list[Any]) -> Score | None:
    """Return the score on these batches; None where they have none, such as an R² of one sample."""
    try:
        return task.score(model, batches)
    except MeasurementFailed:
        return None
