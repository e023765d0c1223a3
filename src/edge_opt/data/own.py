"""Loaders of the user's own, by reference: `file.py:loaders`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from edge_opt.data.splits import Splits
from edge_opt.errors import DataNotFound, EdgeOptError, InvalidInput, first_line
from edge_opt.loading.references import find_object, parse_reference

_FORM = "a mapping or an object with `train` and `validation`, and if you like `calibration` and `test`"


class First:
    """The first batches of a loader, at each pass."""

    def __init__(self, loader: Iterable[Any], batches: int) -> None:
        self.loader, self.batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.loader), self.batches)


def own_splits(reference: str, calibration_batches: int, **offered: Any) -> Splits:
    """The parts that a user's function returns; it is given those of `offered` that it has parameters for."""
    parsed = parse_reference(reference)
    if parsed is None:
        raise DataNotFound(f"dataset is {reference!r}; it must be a known name or file.py:loaders")
    function = find_object(parsed)
    if not callable(function):
        return splits_of(function, reference, calibration_batches)
    wanted = inspect.signature(function).parameters
    given = {key: value for key, value in offered.items() if key in wanted} | parsed.arguments
    try:
        returned = function(**given)
    except EdgeOptError:
        raise
    except Exception as error:
        raise DataNotFound(f"{reference!r} raised {first_line(error)}") from error
    return splits_of(returned, reference, calibration_batches)


def splits_of(returned: Any, name: str, calibration_batches: int) -> Splits:
    """What a user's function returned, as the four parts; without `calibration`, the first batches of `train`."""
    if isinstance(returned, Splits):
        return returned
    read: Any = returned.get if isinstance(returned, Mapping) else lambda part: getattr(returned, part, None)
    parts: dict[str, Any] = {part: read(part) for part in ("train", "calibration", "validation", "test")}
    for part in ("train", "validation"):
        if parts[part] is None:
            raise InvalidInput(f"{name!r} has no {part!r} part; it must return {_FORM}")
    for part, loader in parts.items():
        if loader is not None and (not isinstance(loader, Iterable) or iter(loader) is loader):
            kind = type(loader).__name__
            raise InvalidInput(
                f"{part} of {name!r} is a {kind}; it must be a DataLoader or a list of (inputs, labels) batches, "
                "which can be read more than once"
            )
    calibration = parts["calibration"] if parts["calibration"] is not None else parts["train"]
    return Splits(name, parts["train"], First(calibration, calibration_batches), parts["validation"], parts["test"])
