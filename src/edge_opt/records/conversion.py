"""Records of conversions: what was asked of a runtime, what it really runs, and how far it agrees with the original."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from edge_opt.records.hardware import Precision

Runtime = Literal["torch", "onnxruntime", "openvino"]


@dataclass(frozen=True, slots=True)
class Exported:
    """An ONNX file in float32, ready to be quantised. `batch` is None where any batch size may be fed."""

    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int | None
    size_bytes: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerPrecision:
    """What one layer with weights or a product really runs in; `reason` says why it is not what was asked.

    `path` is the module's; empty where the runtime's graph does not say. `precision` is "unknown" where no kernel of
    the runtime could be found for it.
    """

    path: str
    op: str
    precision: str
    reason: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel that a runtime executed, and the nodes of the file that it stands for; `path` is of the first.

    A kernel without nodes was added by the conversion or the runtime: quantise, dequantise, reorder. `seconds` is per
    run; None where the run was not timed.
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
class Agreement:
    """A converted model against the original on the same inputs.

    `top1` is the share of samples with the same largest output, None where the first output is not one row of scores
    per sample. `scale` is the mean absolute output of the original, to see the differences against.
    """

    max_difference: float
    mean_difference: float
    scale: float
    top1: float | None
    samples: int
    batches: int
    source: str

    @property
    def relative_difference(self) -> float | None:
        """Mean difference over mean output; None where the original's outputs are all zero."""
        return self.mean_difference / self.scale if self.scale else None


@dataclass(frozen=True, slots=True)
class Converted:
    """A model in another precision or runtime, verified.

    `effective_precision` is what its layers with weights run in, such as "int8", or "int8+fp32" where some stayed in
    float. `kernels` is every kernel that the runtime executed; empty for torch, which has no graph. `path` is the file:
    ONNX, or for torch the state dict; `model` is the torch module itself.
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

    @property
    def kept_layers(self) -> tuple[LayerPrecision, ...]:
        """Layers that do not run in the precision that was asked for, each with its reason."""
        return tuple(layer for layer in self.layers if layer.precision != self.precision)


@dataclass(frozen=True, slots=True)
class RunnerProfile:
    """Seconds of each kernel of one run, by the runtime's own profiler, which slows it down: shares, not a latency."""

    runtime: Runtime
    kernels: tuple[Kernel, ...]
    repeats: int

    @property
    def seconds(self) -> float:
        """All kernels together."""
        return sum(kernel.seconds or 0.0 for kernel in self.kernels)
