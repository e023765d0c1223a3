"""Facts that a user of the shipped model needs: shapes, preprocessing, classes, sample counts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from edge_opt.data import Splits
from edge_opt.tasks.metrics import count_samples

_LAYOUTS = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCDHW"}


def input_specification(inputs: Sequence[Any], batch: int | str = "batch") -> list[dict[str, Any]]:
    """Return shape, type, layout and range of each input; the range is that of the samples.

    `batch` is the only batch that the file takes, else the name of that dimension.

    >>> import torch
    >>> input_specification([torch.zeros(2, 3, 8, 8)])[0]["shape"]
    ['batch', 3, 8, 8]
    """
    return [
        {
            "name": f"input_{index}",
            "shape": [batch, *value.shape[1:]],
            "type": str(value.dtype).removeprefix("torch."),
            "layout": _LAYOUTS.get(value.dim()) if value.is_floating_point() else None,
            "range": [float(value.min()), float(value.max())] if value.numel() else None,
        }
        for index, value in enumerate(inputs)
    ]


def _datasets(part: Any) -> Iterator[Any]:
    """Yield the dataset of a loader, and those that it is a part of."""
    dataset = getattr(part, "dataset", None)
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _attribute(splits: Splits, *names: str) -> Any:
    """Return the first of these attributes that a dataset has, from the data that models are chosen on outwards."""
    parts = (splits.test, splits.validation, splits.train)
    datasets = (dataset for part in parts for dataset in _datasets(part))
    values = (getattr(dataset, name, None) for dataset in datasets for name in names)
    return next((value for value in values if value is not None), None)


def class_names(splits: Splits) -> list[str] | None:
    """Return the names of the classes in the order of the scores; None where the dataset does not provide them."""
    classes = _attribute(splits, "classes", "class_names")
    return [str(name) for name in classes] if isinstance(classes, (list, tuple)) else None


def preprocessing(splits: Splits) -> dict[str, Any] | None:
    """Return mean, standard deviation, resize and crop of the dataset's transforms; None where it has none."""
    transform = _attribute(splits, "transform", "transforms")
    steps = list(getattr(transform, "transforms", [] if transform is None else [transform]))
    known: dict[str, Any] = {"steps": [" ".join(str(step).split()) for step in steps]} if steps else {}
    for step in steps:
        if hasattr(step, "mean") and hasattr(step, "std"):
            known |= {"mean": _numbers(step.mean), "std": _numbers(step.std)}
        name = {"Resize": "resize", "CenterCrop": "center_crop"}.get(type(step).__name__)
        if name is not None and hasattr(step, "size"):
            known[name] = _numbers(step.size)
    for name in ("mean", "std"):
        value = _attribute(splits, name)
        if name not in known and value is not None and not callable(value):
            known[name] = _numbers(value)
    return known or None


def _numbers(value: Any) -> list[float]:
    values = value.tolist() if hasattr(value, "tolist") else value
    return [float(item) for item in values] if isinstance(values, Iterable) else [float(values)]


def save_tokenizer(splits: Splits, folder: Path) -> None:
    """Save the tokenizer of the dataset, where it has one that can be saved."""
    tokenizer = _attribute(splits, "tokenizer")
    if callable(getattr(tokenizer, "save_pretrained", None)):
        tokenizer.save_pretrained(str(folder / "tokenizer"))


def sample_counts(splits: Splits) -> dict[str, int]:
    """Return the samples of each part: as we made them, else by their datasets or lists of batches."""
    counts = dict(splits.sizes())
    for name in ("train", "calibration", "validation", "test"):
        part = getattr(splits, name)
        dataset = next(_datasets(part), None)
        if name not in counts and isinstance(dataset, Sized):
            counts[name] = len(dataset)
        elif name not in counts and isinstance(part, (list, tuple)):
            counts[name] = sum(map(_samples_in, part))
    return counts


def _samples_in(batch: Any) -> int:
    return count_samples(next(iter(batch.values())) if isinstance(batch, Mapping) else batch[-1])


def without_folders(text: str) -> str:
    """Return a reference without the folders of this machine.

    >>> without_folders("/home/me/nets/net.py:Net"), without_folders("torchvision:resnet18")
    ('net.py:Net', 'torchvision:resnet18')
    """
    path, colon, name = text.rpartition(":")
    if Path(path).is_absolute():
        return f"{Path(path).name}{colon}{name}"
    return Path(text).name if text[:1] == "/" else text


def reproducing_command(command: Sequence[str]) -> str:
    """Return the command as people type it, without the folders of this machine."""
    words = [without_folders(word) for word in command]
    return shlex.join(words)
