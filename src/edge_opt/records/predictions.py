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

    `is_outside` says that an operator of it lies outside what was calibrated; None that a figure is not known.
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
    `outside` names operators unlike anything that was sampled. Every energy figure says where it comes from.
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
