"""Records of comparisons: models side by side, layer by layer, the first one the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge_opt.records.measurements import Comparison
from edge_opt.records.tracing import Shape

if TYPE_CHECKING:
    from pathlib import Path

Change = Literal["same", "changed", "renamed", "added", "removed", "absent"]
FigureUnit = Literal["count", "bytes", "time", "energy", "share", "rate"]


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """What one layer of one model costs itself; `unpriced` operators make its work a lower bound."""

    path: str
    kind: str
    call_number: int
    input_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    params: int
    param_bytes: int
    macs: int
    flops: int
    bytes_moved: int
    activation_bytes: int
    peak_live_bytes: int
    unpriced: int = 0
    measured_s: float | None = None
    predicted_s: float | None = None

    @property
    def label(self) -> str:
        """The path; a later call of the same module says which."""
        return self.path if self.call_number == 1 else f"{self.path} (call {self.call_number})"

    def looks_like(self, other: LayerFigures) -> bool:
        """Nothing differs but, perhaps, the name and the time."""
        return self._exact() == other._exact()

    def _exact(self) -> tuple[object, ...]:
        # The shapes of the model itself are its interface, which its first and last layer show already.
        shapes = (self.input_shapes, self.output_shapes) if self.path else ()
        return (
            self.kind, shapes, self.params, self.param_bytes, self.macs, self.flops, self.bytes_moved,
            self.activation_bytes, self.peak_live_bytes, self.unpriced,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparedLayer:
    """One layer in every model, in the models' order; None where a model does not have it."""

    layers: tuple[LayerFigures | None, ...]

    @property
    def any(self) -> LayerFigures:
        """The baseline's layer, or that of the first model that has it."""
        return next(layer for layer in self.layers if layer is not None)

    def change(self, model: int = 1) -> Change:
        """What became of the baseline's layer in a model; a layer may be renamed and changed, and is then renamed."""
        old, new = self.layers[0], self.layers[model]
        if old is None:
            return "absent" if new is None else "added"
        if new is None:
            return "removed"
        if (old.path, old.call_number) != (new.path, new.call_number):
            return "renamed"
        return "same" if old.looks_like(new) else "changed"

    @property
    def is_same(self) -> bool:
        """No model differs from the baseline here."""
        return all(self.change(model) == "same" for model in range(1, len(self.layers)))


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of the whole in every model; None where it is not known. A measured one is noisy."""

    name: str
    title: str
    unit: FigureUnit
    is_measured: bool
    values: tuple[float | None, ...]

    def difference(self, model: int = 1) -> float | None:
        """A model's figure minus the baseline's."""
        old, new = self.values[0], self.values[model]
        return None if old is None or new is None else new - old

    def relative(self, model: int = 1) -> float | None:
        """The difference as a share of the baseline's figure; None where that is zero or not known."""
        old, difference = self.values[0], self.difference(model)
        return None if not old or difference is None else difference / old


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Models against the first of them. `layers` is empty for sweep candidates, of which only totals are known.

    `latencies` has the verdict on each model after the first; None where one of the two was not measured.
    """

    names: tuple[str, ...]
    layers: tuple[ComparedLayer, ...]
    totals: tuple[ComparedFigure, ...]
    latencies: tuple[Comparison | None, ...]
    is_lower_bound: tuple[bool, ...]
    remarks: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """No layer and no exact figure differs, and no difference in latency was shown."""
        return (
            all(row.is_same for row in self.layers)
            and all(len(set(figure.values)) <= 1 for figure in self.totals if not figure.is_measured)
            and all(found is None or found.verdict == "equal" for found in self.latencies)
        )

    def aligned(self, model: int = 1) -> int:
        """How many layers the baseline and a model have in common."""
        return sum(row.layers[0] is not None and row.layers[model] is not None for row in self.layers)

    def layer_count(self, model: int = 0) -> int:
        return sum(row.layers[model] is not None for row in self.layers)

    def aligned_share(self, model: int = 1) -> float | None:
        """Aligned layers as a share of the larger model's; None where no layers are known."""
        largest = max(self.layer_count(0), self.layer_count(model))
        return self.aligned(model) / largest if largest else None

    def figure(self, name: str) -> ComparedFigure:
        """A figure of the whole by its name, such as "macs"."""
        return next(figure for figure in self.totals if figure.name == name)

    def save(self, path: str | Path) -> Path:
        """Write the comparison; the suffix chooses the format: .json (everything), .csv, .md, .html or .txt."""
        from edge_opt.report.compared import save

        return save(self, path)

    def __str__(self) -> str:
        from edge_opt.report.compared import render

        return render(self)

    def _repr_html_(self) -> str:
        from edge_opt.report.notebook import comparison_html

        return comparison_html(self)
