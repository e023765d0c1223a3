"""Records of explanations: why a changed model is faster or is not, as rows and as sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge_opt.records.measurements import Comparison

if TYPE_CHECKING:
    import pandas as pd

Bottleneck = Literal["overhead", "memory", "compute", "unknown"]
Topic = Literal[
    "time", "conversions", "float layers", "slow precision", "overhead", "memory", "unchanged layers", "vector width",
    "shortfall", "slower layers", "runtime", "between layers", "noise", "structure", "not measured",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One layer before and after. None where the layer is not there, or its time was not measured.

    Bytes are static; where the layer is known to run in fewer bits, they are scaled to them, and one that is fused into
    another moves none. `precision` is what it
    runs in afterwards, None where no conversion says. `bottleneck` is by the best rates seen in these measurements.
    """

    path: str
    kind: str
    macs_before: int | None
    macs_after: int | None
    bytes_before: int | None
    bytes_after: int | None
    seconds_before: float | None
    seconds_after: float | None
    channels_before: int | None
    channels_after: int | None
    precision: str | None
    bottleneck: Bottleneck

    @property
    def saved_s(self) -> float | None:
        """Seconds saved; below zero where the layer became slower."""
        if self.seconds_before is None or self.seconds_after is None:
            return None
        return self.seconds_before - self.seconds_after


@dataclass(frozen=True, slots=True)
class Reason:
    """One cause with its figures in a sentence; `seconds` is what it costs, None where that was not measured."""

    topic: Topic
    sentence: str
    seconds: float | None = None
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the second model is faster than the first, or is not; reasons stand in order of importance.

    Ratios are after over before. `comparison` is None where no times were given; then nothing is said about time.
    """

    headline: str
    comparison: Comparison | None
    macs_ratio: float | None
    bytes_ratio: float | None
    layers: tuple[LayerChange, ...]
    reasons: tuple[Reason, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The headline and every reason."""
        return (self.headline, *(reason.sentence for reason in self.reasons))

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer."""
        import pandas as pd

        names = list(LayerChange.__dataclass_fields__)
        rows = [{**{name: getattr(row, name) for name in names}, "saved_s": row.saved_s} for row in self.layers]
        return pd.DataFrame(rows, columns=[*names, "saved_s"])

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"- {reason.sentence}" for reason in self.reasons)])
