"""Settings: which keys of a configuration the figures of a candidate depend on, and what follows from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_opt.config import RunConfig
from edge_opt.data import Splits
from edge_opt.loading.references import parse_reference
from edge_opt.pipeline.job import Bench
from edge_opt.pipeline.subject import absolute
from edge_opt.pipeline.variants import Tuning
from edge_opt.search.space import Space

# The space, budgets, limits and the deployment may change between two runs on a folder; these may not.
_TRAINING = ("seed", "dataloader_seed", "dataset", "batch_size", "train_subset", "val_subset", "calibration_batches",
             "epochs", "learning_rate")  # fmt: skip
_VARIANTS = ("fine_tune_epochs", "distillation", "importance", "round_to", "quantization_backend", "min_time_s",
             "threads", "power_watts")  # fmt: skip

# x86 adds products of eight bits in sixteen unless it has VNNI: weights get seven bits. None looks at this machine.
REDUCED_RANGE = {"auto": None, "x86": True, "fbgemm": True, "onednn": True, "qnnpack": False}


def training_settings(config: RunConfig, splits: Splits) -> dict[str, Any]:
    """What the baseline depends on: keys, the data itself, and the model's file."""
    found: dict[str, Any] = {key: getattr(config, key) for key in _TRAINING}
    return {
        **found,
        "model": config.model_reference,
        "model_sha256": _file_digest(config.model_reference),
        "data_sha256": dict(splits.fingerprints()),
    }


def sweep_settings(config: RunConfig, splits: Splits) -> dict[str, Any]:
    """What a candidate's figures depend on."""
    return {**training_settings(config, splits), **{key: getattr(config, key) for key in _VARIANTS}}


def digest(settings: Mapping[str, Any]) -> str:
    """A short name for settings; the same for the same ones.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _file_digest(reference: str) -> str | None:
    parsed = parse_reference(reference)
    path = Path(parsed.source) if parsed else Path(reference)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def data_options(config: RunConfig) -> dict[str, Any]:
    """The configuration as `load_splits` takes it, the same in every process."""
    keys = ("batch_size", "seed", "dataloader_seed", "train_subset", "val_subset", "calibration_batches",
            "num_workers", "download")  # fmt: skip
    folder = None if config.data_dir is None else str(Path(config.data_dir).resolve())
    return {key: getattr(config, key) for key in keys} | {"dataset": absolute(config.dataset), "data_dir": folder}


def tuning(config: RunConfig) -> Tuning:
    return Tuning(
        importance=config.importance,
        round_to=config.round_to,
        fine_tune_epochs=config.fine_tune_epochs,
        learning_rate=config.learning_rate,
        distillation=config.distillation,
        device=config.device,
        seed=config.seed,
    )


def bench(config: RunConfig) -> Bench:
    return Bench(config.threads, config.min_time_s, config.power_watts)


def space(config: RunConfig) -> Space:
    """Everything the configuration allows; eager torch first, because the baseline is that."""
    runtimes = sorted(config.runtimes, key=lambda name: name != "torch")
    return Space(config.pruning_levels, config.precisions, runtimes, config.layer_pruning)
