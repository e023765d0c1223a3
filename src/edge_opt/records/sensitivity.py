"""Records of sensitivity: what happens to a model when one of its layers is pruned or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas as pd

Change = Literal["prune", "quantize"]


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """One layer changed, all others as they were.

    `amount` is the share of channels removed ("0.5") or the precision ("int8"). `score_change` is after minus before.
    `output_error` is the distance of the outputs over their length, `disagreement` the share of samples with another
    first answer; None where outputs are not (samples, classes). `removed` is what was really removed, also in layers
    that are coupled with this one.
    """

    path: str
    kind: str
    change: Change
    amount: str
    score: float
    score_change: float
    output_error: float
    disagreement: float | None
    removed: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What each layer's change costs, measured on `samples` samples; `unchanged` says which layers could not be.

    Pruning is real: the layer and what is coupled with it lose their least important channels. Quantization is
    simulated in floating point: weights per channel, inputs per tensor between their smallest and largest value.
    """

    metric: str
    baseline: float
    samples: int
    rows: tuple[LayerSensitivity, ...]
    unchanged: tuple[tuple[str, str], ...]

    def worst_first(self) -> tuple[LayerSensitivity, ...]:
        """The rows, those that hurt most in front: by score, among equals by error of the outputs."""
        return tuple(sorted(self.rows, key=lambda row: (row.score_change, -row.output_error)))

    def spare(self, change: Change | None = None, most: int = 3) -> tuple[str, ...]:
        """The layers that hurt most when changed, at most so many; those that cost nothing are not among them."""
        hurting = [row for row in self.worst_first() if change in (None, row.change)]
        return tuple(dict.fromkeys(row.path for row in hurting if row.score_change < 0))[:most]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and change, in the model's order."""
        from edge_opt.report.sensitivity import sensitivity_dataframe

        return sensitivity_dataframe(self)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON holds it."""
        from edge_opt.report.codec import to_plain

        plain: dict[str, Any] = to_plain(self)
        return plain

    def __str__(self) -> str:
        from edge_opt.report.sensitivity import sensitivity_text

        return sensitivity_text(self)
