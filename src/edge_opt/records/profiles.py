"""Records of a profile, of a comparison of two, and of a check against budgets."""

from __future__ import annotations

from collections import Counter
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, Literal

from edge_opt import units
from edge_opt.records.costs import LayerCost, Operator, OpPrice, PeakMemory, Shape, Totals, Trace, Unpriced
from edge_opt.records.fields import Record, Saved, Shown, by_name, field, record
from edge_opt.records.measurements import Comparison, Measurement
from edge_opt.records.predictions import DeviceMemory, Prediction
from edge_opt.records.training_steps import TrainingCost

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


Level = Literal["leaves", "modules", "operators", "root"]

SCHEMA_VERSION = 1


@record
class ModelProfile(Shown):
    """The cost of a model: its trace, the costs of its operators, and views of them."""

    name: str = field("Name of the model.")
    mode: Literal["eval", "train"] = field('Whether it was traced for inference ("eval") or for training.')
    convention: str = field('Who counts MACs and FLOPs: "edge_opt", or another tool.')
    trace: Trace = field("What the model called, on which shapes.")
    prices: tuple[OpPrice, ...] = field("One price per signature in `trace.signatures`.")
    layers: tuple[LayerCost, ...] = field("One row per module call, with the work it does itself.")
    totals: Totals = field("The whole model.")
    peak: PeakMemory = field("Most activation bytes alive at once, and where.")
    unpriced: tuple[Unpriced, ...] = field("Operators without a cost rule, most frequent first.")
    measurement: Measurement | None = field("What was measured here; None where the model was not run.", default=None)
    predictions: tuple[Prediction, ...] = field("What it would take on each target that was asked for.", default=())
    training: TrainingCost | None = field("Cost of a training step; None where no budget needs it.", default=None)
    schema_version: int = field("Version of the file format.", default=SCHEMA_VERSION)

    def _brief(self) -> str:
        shapes = ", ".join(map(units.shape, self.trace.modules[0].input_shapes)) if self.trace.modules else "nothing"
        names = ", ".join(prediction.target for prediction in self.predictions)
        targets = f", predicted for {names}" if names else ""
        return (
            f"{self.name} on {shapes}: {units.count(self.totals.macs)} MACs, {units.count(self.totals.params)} "
            f"parameters, peak {units.size(self.peak.live_bytes)}, {len(self.layers)} layers"
            f"{', measured' if self.measurement else ''}{targets}"
        )

    @property
    def peak_activation_bytes(self) -> int:
        """Most bytes of activations alive at once; weights and inputs are apart."""
        return self.peak.live_bytes

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for the first target; None without a target."""
        return self.predictions[0] if self.predictions else None

    @property
    def computes_in(self) -> Literal["fp32", "int8"]:
        """The precision that the model itself computes in: int8 where steps quantize, or most values are bytes."""
        if any(price.kind == "quantization" for price in self.prices):
            return "int8"
        sizes: Counter[str] = Counter()
        for signature in self.trace.signatures:
            for tensor in signature.outputs:
                sizes[tensor.dtype] += tensor.elements
        return "int8" if sizes and sizes.most_common(1)[0][0] in ("int8", "uint8", "qint8", "quint8") else "fp32"

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

    def device_memory(self, device: str = "cuda", settings: str = "") -> DeviceMemory:
        """Simulate the device's caching allocator during this forward pass; no such device is needed.

        Kernels' own workspaces (cuDNN, cuBLAS) and the CUDA context are not in it.

        Args:
            device: "cuda", the only allocator that is known.
            settings: As in the variable PYTORCH_CUDA_ALLOC_CONF, such as "max_split_size_mb:128"; empty, the
                default, is how torch behaves without it.
        """
        from edge_opt.boards.device_memory import device_memory

        return device_memory(self, device, settings)

    def to_dataframe(self, level: Level = "leaves") -> pd.DataFrame:
        """Return the profile as a table.

        Args:
            level: One row per leaf call ("leaves"), per module call, per operator, or one for the whole model ("root").
        """
        from edge_opt.report.table import dataframe

        return dataframe(self, level)

    def save(self, path: str | Path, level: Level = "leaves") -> Path:
        """Write the profile and return its path.

        Args:
            path: The file; its suffix chooses the format: .json (everything), .csv, .md, .txt, .html, or .trace.json, a
                time line of the measured layers, for Perfetto and Chrome.
            level: The rows of a table, as in `to_dataframe`.
        """
        from edge_opt.report.save import save

        return save(self, path, level=level)

    def log_to(self, writer: Any, step: int = 0, prefix: str = "") -> None:
        """Write the figures, and the table as text, to an experiment tracker.

        Args:
            writer: A TensorBoard SummaryWriter, the mlflow module, (MlflowClient(), run_id), or a run of Weights &
                Biases.
            step: The step that the figures belong to.
            prefix: Text in front of every name, such as "pruned/".
        """
        from edge_opt.report.save import log_to

        log_to(self, writer, step, prefix)


Change = Literal["same", "changed", "renamed", "added", "removed", "absent"]
FigureUnit = Literal["count", "bytes", "time", "energy", "share", "rate"]


@record
class LayerFigures(Record):
    """The cost of one layer of one model, without its children."""

    path: str = field('Path of the module; "" for the model itself.')
    kind: str = field('Class of the module, such as "Conv2d".')
    call_number: int = field("1 for the first call of this module, 2 for the second.")
    input_shapes: tuple[Shape, ...] = field("Shapes of its inputs.")
    output_shapes: tuple[Shape, ...] = field("Shapes of its outputs.")
    params: int = field("Parameters of its own.")
    param_bytes: int = field("Bytes of those parameters.")
    macs: int = field("Multiplications with an addition.")
    flops: int = field("Arithmetic operations, two per MAC.")
    bytes_moved: int = field("Bytes read and written.")
    activation_bytes: int = field("Bytes of the tensors that it makes.")
    peak_live_bytes: int = field("Most bytes of activations alive at once while it ran.")
    unpriced: int = field("Operators without a cost rule; with any, its work is a lower bound.", default=0)
    measured_s: float | None = field("Seconds per forward, measured; None where they were not.", default=None)
    predicted_s: float | None = field("Seconds per forward on the first target; None without one.", default=None)

    @property
    def label(self) -> str:
        """The path; a later call of the same module says which."""
        return self.path if self.call_number == 1 else f"{self.path} (call {self.call_number})"

    def looks_like(self, other: LayerFigures) -> bool:
        """Return whether nothing differs except, perhaps, the name and the time.

        Args:
            other: The layer to compare with.
        """
        return self._exact() == other._exact()

    def _exact(self) -> tuple[object, ...]:
        # The shapes of the model itself are its interface, which its first and last layer show already.
        shapes = (self.input_shapes, self.output_shapes) if self.path else ()
        return (
            self.kind, shapes, self.params, self.param_bytes, self.macs, self.flops, self.bytes_moved,
            self.activation_bytes, self.peak_live_bytes, self.unpriced,
        )  # fmt: skip


@record
class ComparedLayer(Record):
    """One layer in every model."""

    layers: tuple[LayerFigures | None, ...] = field("Its figures by model; None where a model lacks it.")

    @property
    def any(self) -> LayerFigures:
        """The baseline's layer, or that of the first model that has it."""
        return next(layer for layer in self.layers if layer is not None)

    def change(self, model: int = 1) -> Change:
        """Return how a model changed the baseline's layer; one that is renamed and changed counts as renamed.

        Args:
            model: Place of the model; 0 is the baseline.
        """
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


@record
class ComparedFigure(Record):
    """One figure of the whole in every model."""

    name: str = field('Its name with its unit, such as "latency_s".')
    title: str = field("Its name for people.")
    unit: FigureUnit = field("What kind of figure it is.")
    is_measured: bool = field("Whether it was measured, and is noisy; else it is exact.")
    values: tuple[float | None, ...] = field("The figure in the models' order; None where it is not known.")

    def difference(self, model: int = 1) -> float | None:
        """Return a model's figure minus the baseline's; None where one is not known.

        Args:
            model: Place of the model; 0 is the baseline.
        """
        old, new = self.values[0], self.values[model]
        return None if old is None or new is None else new - old

    def relative(self, model: int = 1) -> float | None:
        """Return the difference as a share of the baseline's figure; None where that is zero or not known.

        Args:
            model: Place of the model; 0 is the baseline.
        """
        old, difference = self.values[0], self.difference(model)
        return None if not old or difference is None else difference / old


@record
class ModelComparison(Saved):
    """Models against the first of them, the baseline; `save` also writes .csv."""

    names: tuple[str, ...] = field("Names of the models.")
    layers: tuple[ComparedLayer, ...] = field("The layers side by side; empty for sweep candidates.")
    totals: tuple[ComparedFigure, ...] = field("Figures of the whole models.")
    latencies: tuple[Comparison | None, ...] = field("Comparison of each model after the first; None: not measured.")
    is_lower_bound: tuple[bool, ...] = field("By model: whether an operator has no cost rule.")
    remarks: tuple[str, ...] = field("Where the models were not profiled alike.", default=())

    @property
    def is_empty(self) -> bool:
        """No layer and no exact figure differs, and no difference in latency was shown."""
        return (
            all(row.is_same for row in self.layers)
            and all(len(set(figure.values)) <= 1 for figure in self.totals if not figure.is_measured)
            and all(latency is None or latency.verdict == "equal" for latency in self.latencies)
        )

    def aligned(self, model: int = 1) -> int:
        """Return how many layers the baseline and a model have in common.

        Args:
            model: Place of the model; 0 is the baseline.
        """
        return sum(row.layers[0] is not None and row.layers[model] is not None for row in self.layers)

    def layer_count(self, model: int = 0) -> int:
        """Return how many layers a model has.

        Args:
            model: Place of the model; 0 is the baseline.
        """
        return sum(row.layers[model] is not None for row in self.layers)

    def aligned_share(self, model: int = 1) -> float | None:
        """Return aligned layers as a share of the larger model's; None where no layers are known.

        Args:
            model: Place of the model; 0 is the baseline.
        """
        largest = max(self.layer_count(0), self.layer_count(model))
        return self.aligned(model) / largest if largest else None

    def figure(self, name: str) -> ComparedFigure:
        """Return a figure of the whole models; one that is not known for any of them is refused.

        Args:
            name: Its name, such as "macs".
        """
        return by_name("figure", name, ((figure.name, figure) for figure in self.totals))


Outcome = Literal["holds", "broken", "undecided", "unknown"]
Relation = Literal["<=", "<", ">=", ">"]
_COMPARISONS = {"<=": le, "<": lt, ">=": ge, ">": gt}


@record
class Budget(Record):
    """A limit on one figure."""

    metric: str = field('Name of the figure with its unit, such as "latency_ms".')
    relation: Relation = field("Whether the figure may not be above or below the limit, or not reach it.")
    limit: float = field("The limit in the unit of the metric.")
    text: str = field("How the budget was written.")

    @property
    def is_ceiling(self) -> bool:
        """The figure may not be more; otherwise it may not be less."""
        return self.relation in ("<=", "<")

    def holds(self, value: float) -> bool:
        """Return whether a value keeps within the budget; NaN never does.

        Args:
            value: The figure in the metric's unit.
        """
        return bool(_COMPARISONS[self.relation](value, self.limit))


@record
class Increase(Record):
    """By how much a figure may grow over a baseline: a share of it, or an amount."""

    metric: str = field("Name of the figure with its unit.")
    share: float | None = field("Share of the baseline's figure; None where an amount is given.")
    amount: float | None = field("Amount in the metric's unit; None where a share is given.")
    text: str = field("How it was written.")


@record
class Contribution(Record):
    """One layer's part in a figure, in the metric's unit."""

    path: str = field("Path of the layer.")
    kind: str = field('Class of the layer, such as "Conv2d".')
    value: float = field("Its part now.")
    baseline: float | None = field("Its part in the baseline; None without one.")


@record
class CheckedBudget(Record):
    """One budget and what came of it."""

    budget: Budget = field("The budget.")
    outcome: Outcome = field('"undecided": the limit is between `low` and `high`; "unknown": no figure.')
    value: float | None = field("The figure in the metric's unit; None where it is not known.")
    low: float | None = field("The least that the figure may be; None where it is exact.")
    high: float | None = field("The most that the figure may be; None where it is exact.")
    baseline: float | None = field("The baseline's figure; None without one.")
    reason: str = field('Why it is undecided or unknown; "" otherwise.')
    layers: tuple[Contribution, ...] = field("Layers that grew most, else the largest; empty if it holds.")


@record
class CheckResult(Saved):
    """Every budget with its outcome; one that is unknown fails. `save` also writes .xml (JUnit)."""

    name: str = field("Name of the model.")
    baseline_name: str | None = field("Name of the baseline; None without one.")
    budgets: tuple[CheckedBudget, ...] = field("The budgets, in the order given.")
    on_undecided: Literal["pass", "fail"] = field("Whether budgets that are undecided pass or fail.")
    remarks: tuple[str, ...] = field("Where model and baseline were not profiled alike.", default=())

    @property
    def failures(self) -> tuple[CheckedBudget, ...]:
        """The budgets for which the check fails."""
        failing = ("broken", "unknown", "undecided") if self.on_undecided == "fail" else ("broken", "unknown")
        return tuple(budget for budget in self.budgets if budget.outcome in failing)

    @property
    def passed(self) -> bool:
        return not self.failures
