"""Records of targets side by side: does the model fit, how long it takes, what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_opt.records.hardware import BatchFit, Precision
from edge_opt.records.predictions import Prediction
from edge_opt.records.tracing import Shape

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that one forward needs at a precision: weights, buffers, inputs and the peak of live activations."""

    weight_bytes: int
    buffer_bytes: int
    input_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.buffer_bytes + self.input_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class TargetFit:
    """One target: what was predicted there, and whether the model fits.

    `ram_bytes` has every size the device is sold with, smallest first; it is empty where none is known. `batch` is the
    largest that fits the smallest of them; None where that cannot be told, and a remark says why. `fits` says
    whether the smallest holds the model; None where no size is known.
    """

    prediction: Prediction
    fits: bool | None
    needed_bytes: int
    ram_bytes: tuple[int, ...]
    batch: BatchFit | None
    remarks: tuple[str, ...]

    @property
    def fitting_ram_bytes(self) -> tuple[int, ...]:
        """The sizes of RAM that hold the model."""
        return tuple(size for size in self.ram_bytes if self.needed_bytes <= size)


@dataclass(frozen=True, slots=True)
class TargetComparison:
    """A model on several targets, in the order they were asked for."""

    model: str
    inputs: tuple[Shape, ...]
    precision: Precision
    memory: MemoryNeed
    targets: tuple[TargetFit, ...]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per target; exact numbers, None where a figure is not known."""
        from edge_opt.report.targets import dataframe

        return dataframe(self)

    def __str__(self) -> str:
        from edge_opt.report.targets import render

        return render(self)
