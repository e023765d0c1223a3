"""Datasets by name or of one's own, in four parts that share no sample."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edge_opt.data.sources import SOURCES, Splits, digits, idx_dataset, part_indices
from edge_opt.errors import DataNotFound, EdgeOptError, InvalidInput, first_line
from edge_opt.loading import find_object, parse_reference

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch, and restore the three afterwards, also after an error.

    >>> with seeded(3):
    ...     first = random.random()
    >>> with seeded(3):
    ...     first == random.random()
    True
    """
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


_FORM = "a mapping or an object with `train` and `validation`, and if you like `calibration` and `test`"


class FirstBatches:
    """The first batches of a loader, at each pass."""

    def __init__(self, loader: Iterable[Any], batches: int) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.loader), self.batches)


def own_splits(reference: str, calibration_batches: int, parts_are_datasets: bool = False, **offered: Any) -> Splits:
    """Return the parts of a user's function; it is called with those of `offered` that it has parameters for."""
    options: dict[str, Any] = {key: offered[key] for key in ("batch_size", "num_workers") if key in offered}
    options |= {"seed": offered.get("dataloader_seed", 0), "parts_are_datasets": parts_are_datasets}
    parsed = parse_reference(reference)
    if parsed is None:
        raise DataNotFound(f"dataset is {reference!r}; it must be a known name or file.py:loaders")
    function = find_object(parsed)
    if not callable(function):
        return splits_of(function, reference, calibration_batches, **options)
    parameters = inspect.signature(function).parameters
    arguments = {key: value for key, value in offered.items() if key in parameters} | parsed.arguments
    try:
        returned = function(**arguments)
    except EdgeOptError:
        raise
    except Exception as error:
        raise DataNotFound(f"{reference!r} raised {first_line(error)}") from error
    return splits_of(returned, reference, calibration_batches, **options)


def splits_of(
    returned: Any,
    name: str,
    calibration_batches: int,
    *,
    parts_are_datasets: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    num_workers: int = 0,
) -> Splits:
    """Return the four parts of what a user's function returned; without `calibration`, the first batches of `train`.

    A part that is a dataset becomes a loader. With `parts_are_datasets`, every part that is not a loader holds samples,
    and its batches are lists of them, for the user's `collate`.
    """
    if isinstance(returned, Splits):
        return returned
    read: Any = returned.get if isinstance(returned, Mapping) else lambda part: getattr(returned, part, None)
    parts: dict[str, Any] = {part: read(part) for part in ("train", "calibration", "validation", "test")}
    for part in ("train", "validation"):
        if parts[part] is None:
            raise InvalidInput(f"{name!r} has no {part!r} part; it must return {_FORM}")
    for part, samples in parts.items():
        if samples is not None and _is_dataset(samples, parts_are_datasets):
            collate = list if parts_are_datasets else None
            parts[part] = _loader(samples, batch_size, seed, num_workers, part == "train", collate)
    for part, loader in parts.items():
        if loader is not None and (not isinstance(loader, Iterable) or iter(loader) is loader):
            kind = type(loader).__name__
            raise InvalidInput(
                f"{part} of {name!r} is a {kind}; it must be a DataLoader or a list of (inputs, labels) batches, "
                "which can be read more than once"
            )
    calibration = parts["calibration"] if parts["calibration"] is not None else parts["train"]
    return Splits(
        name, parts["train"], FirstBatches(calibration, calibration_batches), parts["validation"], parts["test"]
    )


def _is_dataset(part: Any, parts_are_datasets: bool) -> bool:
    """Whether a part holds samples one by one: a Dataset of torch, or anything indexed where samples are expected."""
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(part, (DataLoader, FirstBatches, IterableDataset)):
        return False
    return isinstance(part, Dataset) or (
        parts_are_datasets and hasattr(part, "__getitem__") and hasattr(part, "__len__")
    )


def _loader(
    samples: Any, batch_size: int, seed: int, num_workers: int, shuffle: bool, collate: Any = None
) -> DataLoader[Any]:
    from torch.utils.data import DataLoader

    # A generator of its own: other random numbers do not change the order of samples.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        samples, batch_size, shuffle=shuffle, generator=generator, num_workers=num_workers, collate_fn=collate
    )


DATASETS = ("digits", *SOURCES)


def load_splits(
    dataset: str,
    *,
    batch_size: int = 32,
    seed: int = 0,
    dataloader_seed: int | None = None,
    train_subset: int | None = None,
    val_subset: int | None = None,
    calibration_batches: int = 4,
    num_workers: int = 0,
    data_dir: str | Path | None = None,
    download: bool = False,
    parts_are_datasets: bool = False,
) -> Splits:
    """Return train, calibration, validation and test parts that share no sample, the same for the same seed.

    Args:
        dataset: `digits`, `mnist`, `fashion-mnist`, or a function of your own as `file.py:loaders`.
        batch_size: Samples per batch.
        seed: Decides which samples are in which part.
        dataloader_seed: Decides the order of training samples; `seed` unless given.
        train_subset: Training samples; None takes all remaining ones.
        val_subset: Validation samples; None is as many as the test part has.
        calibration_batches: Batches for the ranges of int8.
        num_workers: Processes that load data; 0 loads in this one.
        data_dir: Folder of idx files; None looks where packages put them.
        download: Whether to fetch mnist or fashion-mnist where it is not here.
        parts_are_datasets: Whether parts of your own that are not loaders hold samples. Their batches are lists of
            samples, from which a `collate` makes the batch.

    >>> splits = load_splits("digits", train_subset=500)
    >>> splits.sizes()
    {'train': 500, 'calibration': 128, 'validation': 359, 'test': 359}
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
            return own_splits(dataset, calibration_batches, parts_are_datasets, **offered)
    raw = digits() if dataset == "digits" else idx_dataset(dataset, folder, download)
    chosen = part_indices(
        raw.labels,
        seed=seed,
        validation=len(raw.test_labels) if val_subset is None else val_subset,
        calibration=calibration_batches * batch_size,
        train=train_subset,
    )
    from torch.utils.data import TensorDataset

    def loader(images: torch.Tensor, labels: torch.Tensor, shuffle: bool = False) -> DataLoader[Any]:
        return _loader(TensorDataset(images, labels), batch_size, shuffle_seed, num_workers, shuffle)

    images, labels = torch.from_numpy(raw.images), torch.from_numpy(raw.labels)
    parts = {part: loader(images[rows], labels[rows], part == "train") for part, rows in chosen.items()}
    test = loader(torch.from_numpy(raw.test_images), torch.from_numpy(raw.test_labels))
    # Test samples are numbered after the others, because they come from a source of their own.
    indices = {**chosen, "test": len(raw.labels) + np.arange(len(raw.test_labels), dtype=np.int64)}
    return Splits(dataset, parts["train"], parts["calibration"], parts["validation"], test, raw.checksums, indices)
