"""Variants: pruned and fine-tuned models, made once per level and shared by every precision and runtime."""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt.compress import finetune, load_pruned, prune, save_pruned
from edge_opt.data import Splits
from edge_opt.files import write_whole
from edge_opt.pipeline.subject import Subject
from edge_opt.records import Candidate, Importance

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
