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

from edge_opt.data.sources import SOURCES, Indices, Raw, Splits, digits, idx_dataset, part_indices
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


class First:
    """The first batches of a loader, at each pass."""

    def __init__(self, loader: Iterable[Any], batches: int) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.loader), self.batches)


def own_splits(reference: str, calibration_batches: int, has_samples: bool = False, **offered: Any) -> Splits:
    """The parts that a user's function returns; it is given those of `offered` that it has parameters for."""
    made: dict[str, Any] = {key: offered[key] for key in ("batch_size", "num_workers") if key in offered}
    made |= {"seed": offered.get("dataloader_seed", 0), "has_samples": has_samples}
    parsed = parse_reference(reference)
    if parsed is None:
        raise DataNotFound(f"dataset is {reference!r}; it must be a known name or file.py:loaders")
    function = find_object(parsed)
    if not callable(function):
        return splits_of(function, reference, calibration_batches, **made)
    wanted = inspect.signature(function).parameters
    given = {key: value for key, value in offered.items() if key in wanted} | parsed.arguments
    try:
        returned = function(**given)
    except EdgeOptError:
        raise
    except Exception as error:
        raise DataNotFound(f"{reference!r} raised {first_line(error)}") from error
    return splits_of(returned, reference, calibration_batches, **made)


def splits_of(
    returned: Any,
    name: str,
    calibration_batches: int,
    *,
    has_samples: bool = False,
    batch_size: int = 32,
    seed: int = 0,
    num_workers: int = 0,
) -> Splits:
    """What a user's function returned, as the four parts; without `calibration`, the first batches of `train`.

    A part that is a dataset becomes a loader. With `has_samples`, every part that is no loader holds samples, and its
    batches are lists of them, for the user's `collate`.
    """
    if isinstance(returned, Splits):
        return returned
    read: Any = returned.get if isinstance(returned, Mapping) else lambda part: getattr(returned, part, None)
    parts: dict[str, Any] = {part: read(part) for part in ("train", "calibration", "validation", "test")}
    for part in ("train", "validation"):
        if parts[part] is None:
            raise InvalidInput(f"{name!r} has no {part!r} part; it must return {_FORM}")
    for part, given in parts.items():
        if given is not None and _is_dataset(given, has_samples):
            is_shuffled = part == "train"
            parts[part] = _loader_of(given, batch_size, seed, num_workers, is_shuffled, as_lists=has_samples)
    for part, loader in parts.items():
        if loader is not None and (not isinstance(loader, Iterable) or iter(loader) is loader):
            kind = type(loader).__name__
            raise InvalidInput(
                f"{part} of {name!r} is a {kind}; it must be a DataLoader or a list of (inputs, labels) batches, "
                "which can be read more than once"
            )
    calibration = parts["calibration"] if parts["calibration"] is not None else parts["train"]
    return Splits(name, parts["train"], First(calibration, calibration_batches), parts["validation"], parts["test"])


def _is_dataset(part: Any, has_samples: bool) -> bool:
    """Whether a part holds samples one by one: a Dataset of torch, or anything indexed where samples are expected."""
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(part, (DataLoader, First, IterableDataset)):
        return False
    return isinstance(part, Dataset) or (has_samples and hasattr(part, "__getitem__") and hasattr(part, "__len__"))


def _loader_of(
    samples: Any, batch_size: int, seed: int, num_workers: int, is_shuffled: bool, *, as_lists: bool
) -> DataLoader[Any]:
    from torch.utils.data import DataLoader

    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        samples,
        batch_size,
        shuffle=is_shuffled,
        generator=generator,
        num_workers=num_workers,
        collate_fn=list if as_lists else None,
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
    has_samples: bool = False,
) -> Splits:
    """Train, calibration, validation and test parts that share no sample, the same for the same seed.

    Args:
        dataset: `digits`, `mnist`, `fashion-mnist`, or a function of your own as `file.py:loaders`.
        batch_size: Samples per batch.
        seed: Decides which samples are in which part.
        dataloader_seed: Decides the order of training samples; `seed` unless given.
        train_subset: Training samples; None is all that are left.
        val_subset: Validation samples; None is as many as the test part has.
        calibration_batches: Batches for the ranges of int8.
        num_workers: Processes that load data; 0 loads in this one.
        data_dir: Folder of idx files; None looks where packages put them.
        download: Whether to fetch mnist or fashion-mnist where it is not here.
        has_samples: Whether parts of your own that are no loaders hold samples, whose batches are lists of them: a
            `collate` then makes the batch.

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
            return own_splits(dataset, calibration_batches, has_samples, **offered)
    raw = digits() if dataset == "digits" else idx_dataset(dataset, folder, download)
    chosen = part_indices(
        raw.labels,
        seed=seed,
        validation=len(raw.test_labels) if val_subset is None else val_subset,
        calibration=calibration_batches * batch_size,
        train=train_subset,
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
