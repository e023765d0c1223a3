"""load_splits(): a dataset by name or reference, as four loaders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edge_opt.data.own import own_splits
from edge_opt.data.seeding import seeded
from edge_opt.data.sources import SOURCES, Raw, digits, idx_dataset
from edge_opt.data.splits import Indices, Splits, part_indices

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

DATASETS = ("digits", *SOURCES)


def load_splits(
    dataset: str,
    *,
    batch_size: int = 32,
    seed: int = 0,
    dataloader_seed: int | None = None,
    train_subset: int | None = None,
    val_subset: int = 300,
    calibration_batches: int = 4,
    num_workers: int = 0,
    data_dir: str | Path | None = None,
    download: bool = False,
) -> Splits:
    """Train, calibration, validation and test parts that share no sample, the same for the same seed.

    `dataset` is `digits`, `mnist`, `fashion-mnist`, or a function of your own as `file.py:loaders`.

    >>> splits = load_splits("digits", train_subset=500)
    >>> splits.sizes()
    {'train': 500, 'calibration': 128, 'validation': 300, 'test': 359}
    """
    shuffle_seed = seed if dataloader_seed is None else dataloader_seed
    folder = None if data_dir is None else Path(data_dir)
    if dataset not in DATASETS:
        offered = {
            "batch_size": batch_size,
            "seed": seed,
            "dataloader_seed": shuffle_seed,
            "train_subset": train_subset,
            "val_subset": val_subset,
            "num_workers": num_workers,
            "data_dir": folder,
        }
        with seeded(shuffle_seed):
            return own_splits(dataset, calibration_batches, **offered)
    raw = digits() if dataset == "digits" else idx_dataset(dataset, folder, download)
    chosen = part_indices(
        raw.labels, seed=seed, validation=val_subset, calibration=calibration_batches * batch_size, train=train_subset
    )
    return _loaders(dataset, raw, chosen, batch_size, shuffle_seed, num_workers)


def _loaders(
    name: str, raw: Raw, chosen: Mapping[str, Indices], batch_size: int, shuffle_seed: int, num_workers: int
) -> Splits:
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = torch.from_numpy(raw.images), torch.from_numpy(raw.labels)

    def loader(images: torch.Tensor, labels: torch.Tensor, shuffled: bool = False) -> DataLoader[Any]:
        # A generator of its own: what else draws random numbers does not change the order of samples.
        generator = torch.Generator().manual_seed(shuffle_seed)
        data = TensorDataset(images, labels)
        return DataLoader(data, batch_size, shuffle=shuffled, generator=generator, num_workers=num_workers)

    parts = {part: loader(images[rows], labels[rows], part == "train") for part, rows in chosen.items()}
    test = loader(torch.from_numpy(raw.test_images), torch.from_numpy(raw.test_labels))
    # Test samples are numbered behind the others: they come from a source of their own.
    indices = {**chosen, "test": len(raw.labels) + np.arange(len(raw.test_labels), dtype=np.int64)}
    return Splits(name, parts["train"], parts["calibration"], parts["validation"], test, raw.checksums, indices)
