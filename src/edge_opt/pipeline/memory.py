"""Memory of a variant, by estimate: weights in what each layer runs in, and the peak of activations (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_opt.records import LayerPrecision, ModelProfile

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of weights, and of weights, inputs and activations at their peak; an estimate from shapes."""

    model_bytes: int
    peak_bytes: int


def footprint(profile: ModelProfile, layers: Sequence[LayerPrecision], effective: str, runtime: str) -> Footprint:
    """What a variant keeps in memory, from the float32 profile of its model and what its layers really run in.

    Eager torch holds tensors as long as Python does; the other runtimes plan, and drop each after its last use.
    Activations count in the widest precision that any layer runs in; a layer that is not named stays in float32.
    """
    own = {layer.path: _BYTES.get(layer.precision, 4) for layer in layers}
    totals = profile.totals
    saved = sum(
        layer.call.param_bytes * (4 - own[layer.call.path]) // 4 for layer in profile.layers if layer.call.path in own
    )
    model_bytes = totals.param_bytes + totals.buffer_bytes - saved
    width = max((_BYTES.get(name, 4) for name in effective.split("+")), default=4)
    activations = profile.peak.live_bytes if runtime == "torch" else profile.peak.planner_bytes
    return Footprint(model_bytes, model_bytes + totals.input_bytes + activations * width // 4)
