"""Records of predictions: what a model would take on a target, how sure that is, and what it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_opt.records.hardware import Bound, Precision
from edge_opt.records.measurements import Energy

Basis = Literal["calibrated", "timed", "roofline"]


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """One module call, children apart; `low` and `high` hold the truth nine times in ten.

    `is_outside` says that an operator of it lies outside what was calibrated, or has no price; None that a figure is
    not known. `energy_j` is its part of the first of the prediction's energies: power times time where the power is
    known, else joules per operation and byte.
    """

    module: int
    path: str
    kind: str
    seconds: float | None
    low: float | None
    high: float | None
    bound: Bound
    is_outside: bool = False
    energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the whole model would take on `target`; its layers add up to `seconds`.

    `basis` is what the figure rests on: operators sampled on the target ("calibrated"), each operator of this model
    timed there once ("timed"), or a roofline with usual efficiencies ("roofline"), which is a rough estimate.
    `outside` names operators unlike anything that was sampled, or without a price; then `high` may be unknown. Every
    energy figure says where it comes from; the layers' add up to the first.
    """

    target: str
    basis: Basis
    precision: Precision
    seconds: float | None
    low: float | None
    high: float | None
    bound: Bound
    layers: tuple[LayerPrediction, ...]
    outside: tuple[str, ...]
    energies: tuple[Energy, ...]
    remarks: tuple[str, ...]
