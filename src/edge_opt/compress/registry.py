"""The registry of precisions: who makes a model of one precision for one runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torch import nn

from edge_opt.compress.subject import Subject, Tensors
from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.records import Exported


@dataclass(frozen=True, slots=True)
class Job:
    """What a conversion has to go by; it writes into `folder` only, where nobody looks yet."""

    subject: Subject
    folder: Path
    calibration: list[Tensors] | None
    method: str
    spare: tuple[str, ...]
    reduce_range: bool | None
    exported: Exported | None
    filename: str


@dataclass(frozen=True, slots=True)
class Made:
    """A file, for torch with the module that it holds the weights of."""

    path: Path
    outputs: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    model: nn.Module | None = None


Maker = Callable[[Job], Made]
_MAKERS: dict[tuple[str, str], Maker] = {}
precisions: Mapping[tuple[str, str], Maker] = MappingProxyType(_MAKERS)
"""Every (precision, runtime) with its maker."""


def precision(name: str, *runtimes: str) -> Callable[[Maker], Maker]:
    """Register a maker of models in this precision for these runtimes; registering twice is an error.

    >>> from edge_opt import compress
    >>> compress.precision("fp32", "torch")(compress.precisions["fp32", "torch"])
    Traceback (most recent call last):
    edge_opt.errors.ConversionFailed: fp32 on torch is made by ...
    """

    def register(maker: Maker) -> Maker:
        for runtime in runtimes:
            known = _MAKERS.get((name, runtime))
            if known is not None:
                raise ConversionFailed(
                    f"{name} on {runtime} is made by {known.__module__}.{known.__qualname__} already; "
                    f"{maker.__module__}.{maker.__qualname__} cannot take its place"
                )
            _MAKERS[name, runtime] = maker
        return maker

    return register


def maker_of(name: str, runtime: str) -> Maker:
    """Who makes this; an unknown precision or runtime is refused with those there are."""
    names, runtimes = (list(dict.fromkeys(key[place] for key in _MAKERS)) for place in (0, 1))
    if name not in names:
        raise InvalidInput(f"unknown precision {name!r}; it is one of {', '.join(names)}")
    if runtime not in runtimes:
        raise InvalidInput(f"unknown runtime {runtime!r}; it is one of {', '.join(runtimes)}")
    if (name, runtime) not in _MAKERS:
        raise InvalidInput(f"nobody makes {name} for {runtime}; see compress.precisions")
    return _MAKERS[name, runtime]
