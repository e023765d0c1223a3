"""What a conversion came to: files, layers, kernels, agreement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from edge_opt import units
from edge_opt.records.devices import Precision
from edge_opt.records.shown import Record, Shown

UnseenKind = Literal["held out", "rolled"]
Runtime = Literal["torch", "onnxruntime", "openvino", "torch-compile", "litert", "executorch"]


@dataclass(frozen=True, slots=True)
class Exported(Shown):
    """An ONNX file in float32, ready to be quantised.

    Attributes:
        path: The file.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
        batch: The batch size that must be fed; None where any may be.
        size_bytes: Bytes of the file and of the weights beside it.
        remarks: What a reader should know.
    """

    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int | None
    size_bytes: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerPrecision(Record):
    """What one layer with weights or a product really runs in.

    Attributes:
        path: Path of the module; "" where the runtime's graph does not say.
        op: The operator, such as "Conv".
        precision: What it runs in; "unknown" where no kernel of the runtime could be found for it.
        reason: Why it is not what was asked; "" where it is.
        node: Name of the node in the file.
    """

    path: str
    op: str
    precision: str
    reason: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Kernel(Record):
    """One kernel that a runtime executed.

    Attributes:
        name: Its name in the runtime.
        op: The operator, such as "Conv".
        precision: What it runs in.
        path: Path of the module of its first node; "" where there is none.
        nodes: Nodes of the file that it stands for; none for one that was added, such as quantise or reorder.
        seconds: Seconds per run; None where the run was not timed.
    """

    name: str
    op: str
    precision: str
    path: str = ""
    nodes: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def only_converts(self) -> bool:
        """Whether it computes nothing of the model: it quantises, dequantises, casts or reorders a tensor."""
        is_arithmetic = self.op == "Eltwise" and self.name.startswith(("Subtract_", "Multiply_"))
        return not self.nodes and (self.op in _CONVERTING or is_arithmetic)


_CONVERTING = frozenset(
    "QuantizeLinear DequantizeLinear FakeQuantize Convert Cast Transpose Reorder ReorderInput ReorderOutput Reshape "
    "Squeeze Unsqueeze".split()
)


@dataclass(frozen=True, slots=True)
class BatchAgreement(Record):
    """A converted model against the original at one batch size.

    Attributes:
        samples: The batch size.
        difference: Mean difference over mean output, of the output that differs most; None where it was refused.
        output: Number of that output; None where it was refused.
        flips: Of the samples with a clear answer, the share that gets another one; None where there are none.
        refused: Why the runtime takes no batch of this size; "" where it does.
        worst_sample: Mean difference of the sample that differs most, over the mean output of all, or over its own
            where that is larger; None where outputs are not one for each sample.
    """

    samples: int
    difference: float | None
    output: int | None
    flips: float | None
    refused: str = ""
    worst_sample: float | None = None


@dataclass(frozen=True, slots=True)
class UnseenAgreement(Record):
    """Static int8 against the original on inputs that its ranges were found without.

    Attributes:
        kind: "held out": samples of the calibration, compared with a twin of the file whose ranges come from the other
            samples. "rolled": sequences of the calibration that begin with another token, compared with the file.
        source: The same in words, with their number.
        samples: How many they are.
        difference: Mean difference over mean output, of the output that differs most.
        error: Standard error of the difference, a share of the mean output, too: they are a few of many.
        output: Number of that output.
        flips: Of the samples with a clear answer, the share that gets another one; None where there are none.
        worst_sample: As that of `BatchAgreement`.
    """

    kind: UnseenKind
    source: str
    samples: int
    difference: float
    error: float
    output: int
    flips: float | None
    worst_sample: float | None


@dataclass(frozen=True, slots=True)
class Agreement(Shown):
    """A converted model against the original on the same inputs.

    Attributes:
        max_difference: Largest absolute difference of outputs.
        mean_difference: Mean absolute difference of outputs.
        scale: Mean absolute output of the original, to see the differences against.
        top1: Share of samples with the same largest output; None where the outputs are not rows of scores.
        samples: Samples that were compared.
        batches: Batches that were compared.
        source: Where the inputs come from, in words.
        by_batch: What was found at each batch size: one sample, the batches given, and a large one.
        accuracy_before: Share of labels that the original meets; None where the batches have no labels.
        accuracy: Share of labels that the converted model meets; None where the batches have no labels.
        unseen: Of static int8 that was compared on its calibration: what was found on inputs that the ranges never saw.
            Empty for all else, with `verify_on=` and with `allow=True`.
    """

    max_difference: float
    mean_difference: float
    scale: float
    top1: float | None
    samples: int
    batches: int
    source: str
    by_batch: tuple[BatchAgreement, ...] = ()
    accuracy_before: float | None = None
    accuracy: float | None = None
    unseen: tuple[UnseenAgreement, ...] = ()

    @property
    def relative_difference(self) -> float | None:
        """Mean difference over mean output, where it is largest: of all that the bound is held to.

        That is every output, at every batch size, on unseen inputs, too. None where nothing could be compared.
        """
        found = [*(entry.difference for entry in self.by_batch), *(entry.difference for entry in self.unseen)]
        return max((difference for difference in found if difference is not None), default=None)


@dataclass(frozen=True, slots=True)
class SparedPoint(Record):
    """One try of mixed precision: some layers in float, the others in int8.

    Attributes:
        spared: Paths of the layers in float.
        difference: Mean difference over mean output, of the output and the batch size that differ most.
        top1: Share of samples with the same largest output; None where the outputs are not rows of scores.
        accuracy: Share of labels that it meets; None where the batches have no labels.
    """

    spared: tuple[str, ...]
    difference: float
    top1: float | None
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Converted(Shown):
    """A model in another precision or runtime, verified.

    Attributes:
        precision: What was asked for.
        runtime: The runtime it is for.
        effective_precision: What its layers with weights run in: "int8", or "int8+fp32" where some stayed in float.
        layers: What each layer with weights runs in.
        kernels: Every kernel that the runtime executed; empty for torch, which has no graph.
        agreement: How far it agrees with the original.
        size_bytes: Bytes of the file and of the weights beside it.
        original_bytes: Bytes of the original's state dict.
        path: The file: ONNX, or for torch the state dict.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
        remarks: What a reader should know before using it.
        model: The torch module itself; None for the other runtimes.
        curve: With `spare="auto"`, what each number of layers in float gave; else empty.
    """

    precision: Precision
    runtime: Runtime
    effective_precision: str
    layers: tuple[LayerPrecision, ...]
    kernels: tuple[Kernel, ...]
    agreement: Agreement
    size_bytes: int
    original_bytes: int
    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    remarks: tuple[str, ...]
    model: Any = field(default=None, repr=False, compare=False)
    curve: tuple[SparedPoint, ...] = ()

    def _brief(self) -> str:
        kept = len(self.layers) - len(self.kept_layers)
        return (
            f"{self.precision} on {self.runtime}: runs in {self.effective_precision}, {kept} of {len(self.layers)} "
            f"layers as asked, {units.size(self.size_bytes)}, {self.path}"
        )

    @property
    def kept_layers(self) -> tuple[LayerPrecision, ...]:
        """Layers that do not run in the precision that was asked for, each with its reason."""
        return tuple(layer for layer in self.layers if layer.precision != self.precision)


@dataclass(frozen=True, slots=True)
class RunnerProfile(Shown):
    """Seconds of each kernel by the runtime's own profiler, which slows the run down: read shares, not a latency.

    Attributes:
        runtime: The runtime.
        kernels: Its kernels with their seconds per run.
        repeats: Runs that were profiled.
    """

    runtime: Runtime
    kernels: tuple[Kernel, ...]
    repeats: int

    @property
    def seconds(self) -> float:
        """All kernels together."""
        return sum(kernel.seconds or 0.0 for kernel in self.kernels)
