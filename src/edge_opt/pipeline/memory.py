"""Memory of a variant, by estimate: weights in what each layer runs in, and the peak of activations (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from edge_opt.records import LayerPrecision, ModelProfile

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of weights, and of weights, inputs and activations at their peak; an estimate from shapes."""

    model_bytes: int
    peak_bytes: int


def footprint(
    model: nn.Module, profile: ModelProfile, layers: Sequence[LayerPrecision], effective: str, runtime: str
) -> Footprint:
    """What a variant keeps in memory, from its float32 model and what its layers really run in.

    A layer that is not named stays in float32, and beside int8 weights biases are kept in 32 bits. Eager torch holds
    tensors as long as Python does; the other runtimes plan, and drop each after its last use. Activations count in the
    widest precision that any layer runs in.
    """
    precision = {layer.path: layer.precision for layer in layers}
    model_bytes = profile.totals.buffer_bytes
    for name, parameter in model.named_parameters():
        found = precision.get(name.rpartition(".")[0], "fp32")
        is_wide = found == "int8" and parameter.dim() < 2
        model_bytes += parameter.numel() * (4 if is_wide else _BYTES.get(found, 4))
    width = max((_BYTES.get(name, 4) for name in effective.split("+")), default=4)
    activations = profile.peak.live_bytes if runtime == "torch" else profile.peak.planner_bytes
    return Footprint(model_bytes, model_bytes + profile.totals.input_bytes + activations * width // 4)
