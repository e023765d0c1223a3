"""The profile of a model: every figure there is, and the views people ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from edge_opt.records.costs import LayerCost, Operator, OpPrice, PeakMemory, Totals, Unpriced
from edge_opt.records.measurements import Measurement
from edge_opt.records.tracing import Trace

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

Level = Literal["leaves", "modules", "operators", "root"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What a model costs: the trace, its prices, and the views people ask for."""

    name: str
    mode: Literal["eval", "train"]
    convention: str
    trace: Trace
    prices: tuple[OpPrice, ...]
    layers: tuple[LayerCost, ...]
    totals: Totals
    peak: PeakMemory
    unpriced: tuple[Unpriced, ...]
    measurement: Measurement | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def peak_activation_bytes(self) -> int:
        """Most bytes of activations alive at once; weights and inputs are apart."""
        return self.peak.live_bytes

    @property
    def coverage(self) -> float:
        """Share of operator calls that are priced or free; 1.0 means that nothing was left out."""
        missing = sum(item.count for item in self.unpriced)
        return 1.0 - missing / len(self.trace.ops) if self.trace.ops else 1.0

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Every operator call in order of execution, free ones included."""
        trace = self.trace
        return tuple(
            Operator(
                call.index,
                trace.signatures[call.signature].op,
                self.prices[call.signature].kind,
                self.prices[call.signature].status,
                trace.modules[call.module].path,
                trace.signatures[call.signature].inputs,
                trace.signatures[call.signature].outputs,
                self.prices[call.signature].cost,
                call.live_bytes,
            )
            for call in trace.ops
        )

    def to_dataframe(self, level: Level = "leaves") -> pd.DataFrame:
        """The profile as a table: one row per leaf call, module, operator, or one for the whole model."""
        from edge_opt.report.tables import dataframe

        return dataframe(self, level)

    def save(self, path: str | Path, level: Level = "leaves") -> Path:
        """Write the profile; the suffix chooses the format: .json (everything), .csv, .md, .txt, .html."""
        from edge_opt.report.writers import save

        return save(self, path, level)

    def log_to(self, writer: Any, step: int = 0, prefix: str = "") -> None:
        """Write the figures to a TensorBoard SummaryWriter, to the mlflow module, or to (MlflowClient(), run_id)."""
        from edge_opt.report.trackers import log_to

        log_to(self, writer, step, prefix)

    def _repr_html_(self) -> str:
        from edge_opt.report.notebook import profile_html

        return profile_html(self)

    def __str__(self) -> str:
        from edge_opt.report.terminal import render

        return render(self)
