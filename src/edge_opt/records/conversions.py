"""Results of a conversion: files, layers, kernels, agreement."""

from __future__ import annotations

from typing import Any, Literal

from edge_opt import units
from edge_opt.records.devices import Precision
from edge_opt.records.fields import Record, Shown, field, record

UnseenKind = Literal["held out", "rolled"]


@record
class Exported(Shown):
    """An ONNX file in float32, ready to be quantized."""

    path: str = field("The file.")
    inputs: tuple[str, ...] = field("Names of the inputs.")
    outputs: tuple[str, ...] = field("Names of the outputs.")
    batch: int | None = field("The batch size that must be fed; None where any may be.")
    size_bytes: int = field("Bytes of the file and of the weights beside it.")
    remarks: tuple[str, ...] = field("What a reader should know.", default=())


@record
class LayerPrecision(Record):
    """The precision in which one layer with weights or a product really runs."""

    path: str = field('Path of the module; "" where the runtime\'s graph does not say.')
    op: str = field('The operator, such as "Conv".')
    precision: str = field('What it runs in; "unknown" where no kernel of the runtime could be found for it.')
    reason: str = field('Why it is not what was asked; "" where it is.', default="")
    node: str = field("Name of the node in the file.", default="")


@record
class Kernel(Record):
    """One kernel that a runtime executed."""

    name: str = field("Its name in the runtime.")
    op: str = field('The operator, such as "Conv".')
    precision: str = field("What it runs in.")
    path: str = field('Path of the module of its first node; "" where there is none.', default="")
    nodes: tuple[str, ...] = field("Nodes of the file behind it; empty where the runtime added it.", default=())
    seconds: float | None = field("Seconds per run; None where the run was not timed.", default=None)

    @property
    def only_converts(self) -> bool:
        """Whether it computes nothing of the model: it quantizes, dequantizes, casts or reorders a tensor."""
        is_arithmetic = self.op == "Eltwise" and self.name.startswith(("Subtract_", "Multiply_"))
        return not self.nodes and (self.op in _CONVERTING or is_arithmetic)


_CONVERTING = frozenset(
    "QuantizeLinear DequantizeLinear FakeQuantize Convert Cast Transpose Reorder ReorderInput ReorderOutput Reshape "
    "Squeeze Unsqueeze".split()
)


@record
class BatchAgreement(Record):
    """A converted model against the original at one batch size."""

    samples: int = field("The batch size.")
    difference: float | None = field("Mean difference over mean output, largest of the outputs; None: refused.")
    output: int | None = field("Number of that output; None where it was refused.")
    flips: float | None = field("Share of samples with a clear top-1 that change it; None: there are none.")
    refused: str = field('Why the runtime takes no batch of this size; "" where it does.', default="")
    worst_sample: float | None = field("Relative difference of the worst sample; None: not by sample.", default=None)
    compared: int = field("Samples that were compared at this batch size, in all calls together.", default=0)


@record
class UnseenAgreement(Record):
    """Static int8 against the original on inputs that its ranges were found without."""

    kind: UnseenKind = field('"held out" samples, or "rolled" sequences that begin with another token.')
    source: str = field("The same in words, with their number.")
    samples: int = field("How many they are.")
    difference: float = field("Mean difference over mean output, of the output that differs most.")
    error: float = field("Standard error of the difference over the samples, as a share of the mean output.")
    output: int = field("Number of that output.")
    flips: float | None = field("Share of samples with a clear top-1 that change it; None: there are none.")
    worst_sample: float | None = field("As that of `BatchAgreement`.")


@record
class Agreement(Shown):
    """A converted model against the original on the same inputs."""

    max_difference: float = field("Largest absolute difference of outputs.")
    mean_difference: float = field("Mean absolute difference of outputs.")
    scale: float = field("Mean absolute output of the original, to see the differences against.")
    top1: float | None = field("Share of samples with the same top-1; None without classes.")
    samples: int = field("Samples that were compared.")
    batches: int = field("Batches that were compared.")
    source: str = field("Where the inputs come from, in words.")
    by_batch: tuple[BatchAgreement, ...] = field("Agreement at each batch size.", default=())
    accuracy_before: float | None = field("Accuracy of the original; None without labels.", default=None)
    accuracy: float | None = field("Accuracy of the converted model; None without labels.", default=None)
    unseen: tuple[UnseenAgreement, ...] = field("Static int8 on inputs that its ranges never saw.", default=())

    @property
    def relative_difference(self) -> float | None:
        """Mean difference over mean output, where it is largest: of all that the bound is held to.

        That is every output, at every batch size, and on unseen inputs. None where nothing could be compared.
        """
        differences = [*(entry.difference for entry in self.by_batch), *(entry.difference for entry in self.unseen)]
        return max((difference for difference in differences if difference is not None), default=None)


@record
class KeptFloatTrial(Record):
    """One try of mixed precision: some layers in float, the others in int8."""

    spared: tuple[str, ...] = field("Paths of the layers in float.")
    difference: float = field("Mean difference over mean output, of the output and the batch size that differ most.")
    top1: float | None = field("Share of samples with the same top-1; None without classes.")
    accuracy: float | None = field("Share of labels that it meets; None where the batches have no labels.")


@record
class Converted(Shown):
    """A model in another precision or runtime, verified."""

    precision: Precision = field("What was asked for.")
    runtime: str = field("The runtime it is for.")
    effective_precision: str = field('What layers with weights run in, such as "int8" or "int8+fp32".')
    layers: tuple[LayerPrecision, ...] = field("What each layer with weights runs in.")
    kernels: tuple[Kernel, ...] = field("Every kernel that the runtime executed; empty for torch, which has no graph.")
    agreement: Agreement = field("How far it agrees with the original.")
    size_bytes: int = field("Bytes of the file and of the weights beside it.")
    original_bytes: int = field("Bytes of the original's state dict.")
    path: str = field("The file: ONNX, or for torch the state dict.")
    inputs: tuple[str, ...] = field("Names of the inputs.")
    outputs: tuple[str, ...] = field("Names of the outputs.")
    remarks: tuple[str, ...] = field("What a reader should know before using it.")
    model: Any = field("The torch module itself; None for the other runtimes.", default=None, compare=False)
    curve: tuple[KeptFloatTrial, ...] = field('Results by number of float layers (`keep_float="auto"`).', default=())

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


@record
class RunnerProfile(Shown):
    """Seconds of each kernel by the runtime's own profiler, which slows the run down: read shares, not a latency."""

    runtime: str = field("The runtime.")
    kernels: tuple[Kernel, ...] = field("Its kernels with their seconds per run.")
    repeats: int = field("Runs that were profiled.")

    @property
    def seconds(self) -> float:
        """All kernels together."""
        return sum(kernel.seconds or 0.0 for kernel in self.kernels)
