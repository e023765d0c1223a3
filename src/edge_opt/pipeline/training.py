"""The baseline: trained once, kept, and found again by the next run on the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from edge_opt.compress import finetune
from edge_opt.config import RunConfig
from edge_opt.data import Splits
from edge_opt.data.seeding import seeded
from edge_opt.errors import InvalidConfig
from edge_opt.files import write_whole
from edge_opt.loading.models import load_model
from edge_opt.pipeline.scores import Accuracy, accuracy_of
from edge_opt.pipeline.subject import weights_from, weights_of

WEIGHTS = "model.safetensors"
FACTS = "training.json"


@dataclass(frozen=True, slots=True)
class Trained:
    """The baseline, in eval mode, with its weights as bytes and its accuracy on validation."""

    model: nn.Module
    weights: bytes
    accuracy: Accuracy


def baseline(config: RunConfig, splits: Splits, folder: Path, key: str, tell: Callable[[str], None]) -> Trained:
    """The trained model of a configuration: from the folder if an earlier run left it there under the same key."""
    with seeded(config.seed):
        model = load_model(config.model_reference).model
    kept = _kept(folder, key)
    if kept is not None:
        model.load_state_dict(weights_from(kept[0]))
        return Trained(model.eval(), *kept)
    check_device(config.device)
    tell(f"training {type(model).__name__} on {splits.name}: {config.epochs} epochs")
    tuned = finetune(
        model.to(config.device),
        splits.train,
        epochs=config.epochs,
        learning_rate=config.learning_rate,
        seed=config.seed,
    )
    model = tuned.model.cpu().eval()
    weights, accuracy = weights_of(model), accuracy_of(model, splits.validation)
    write_whole(folder / WEIGHTS, weights)
    # Written last: with it, everything is there.
    facts = {"key": key, "correct": accuracy.correct, "samples": accuracy.samples, "epochs": config.epochs}
    write_whole(folder / FACTS, json.dumps(facts))
    return Trained(model, weights, accuracy)


def check_device(name: str) -> None:
    """Refuse a device that torch does not see here."""
    kind, _, index = name.partition(":")
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(kind, 1)
    if int(index or 0) >= count:
        raise InvalidConfig(f"device is {name!r}, and torch sees {count} of that kind here; write device: cpu")


def _kept(folder: Path, key: str) -> tuple[bytes, Accuracy] | None:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if facts["key"] != key:
            return None
        return (folder / WEIGHTS).read_bytes(), Accuracy(facts["correct"], facts["samples"])
    except (OSError, ValueError, KeyError):
        return None
