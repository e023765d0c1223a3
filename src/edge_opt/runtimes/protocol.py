"""What a conversion goes by, what it makes, and who makes which precision for which runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from torch import nn

from edge_opt.errors import ConversionFailed, InvalidInput
from edge_opt.quantization.onnx_files import Tensors
from edge_opt.records.conversions import Exported, LayerPrecision
from edge_opt.runtimes.model_call import Subject
from edge_opt.runtimes.runners import SUFFIXES


@dataclass(frozen=True, slots=True)
class Job:
    """What a conversion has to go by; it writes into `folder` only, where nobody looks yet.

    `hold_out` asks static int8 for a twin, too, whose ranges leave out a part of the calibration.
    """

    subject: Subject
    folder: Path
    calibration: list[Tensors] | None
    method: str
    spare: tuple[str, ...]
    reduce_range: bool | None
    exported: Exported | None
    filename: str
    scheme: str = "static"
    group_size: int = 32
    balance: float = 0.0
    correct_bias: bool = False
    hold_out: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A file, for torch with the module that it holds the weights of.

    `reference` is the float file beside it whose nodes have the same names, and `batch` the only batch it takes, if so.
    `layers` is what the maker knows of them, where no kernels can be asked. `twin` writes a file like it whose ranges
    were found without the batches `held_out`.
    """

    path: Path
    outputs: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    model: nn.Module | None = None
    reference: Path | None = None
    batch: int | None = None
    layers: tuple[LayerPrecision, ...] | None = None
    held_out: tuple[Tensors, ...] = ()
    twin: Callable[[], Path] | None = None


Maker = Callable[[Job], Made]
_MAKERS: dict[tuple[str, str], Maker] = {}
precisions: Mapping[tuple[str, str], Maker] = MappingProxyType(_MAKERS)


def precision(name: str, *runtimes: str) -> Callable[[Maker], Maker]:
    """Register a maker of models in a precision for some runtimes; registering twice is an error.

    Args:
        name: The precision, such as "int8".
        runtimes: The runtimes that it makes files for.

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
    names, found = (list(dict.fromkeys(key[place] for key in _MAKERS)) for place in (0, 1))
    runtimes = list(dict.fromkeys([*(name for name in SUFFIXES if name in found), *found]))
    if name not in names:
        raise InvalidInput(f"unknown precision {name!r}; it is one of {', '.join(names)}")
    if runtime not in runtimes:
        raise InvalidInput(f"unknown runtime {runtime!r}; it is one of {', '.join(runtimes)}")
    if (name, runtime) not in _MAKERS:
        raise InvalidInput(f"nobody makes {name} for {runtime}; see compress.precisions")
    return _MAKERS[name, runtime]


def check_spared(model: nn.Module, spare: Iterable[str]) -> tuple[str, ...]:
    """The layers to keep in float; every one must be a module of the model."""
    wanted = (spare,) if isinstance(spare, str) else tuple(spare)
    paths = [path for path, _ in model.named_modules() if path]
    for path in wanted:
        if path not in paths:
            close = get_close_matches(path, paths, n=3, cutoff=0.4) or paths[:3]
            raise InvalidInput(f"there is no layer {path!r} to spare; closest: {', '.join(close)}")
    return wanted
