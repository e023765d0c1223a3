"""Which layers leave an NPU: rules by operator, runtime, precision and NPU, and what each hand-over costs.

The rules were read off the layer counts of Qualcomm's AI Hub (0.65.0) and hold for every row of the nets that can be
built here (benchmarks/npu.py). They come down to one fact. Four of the timed NPUs compute with integers alone, and a
converter that has no integer form of an operator leaves it in float32. NPUs with fp16 run such an operator themselves,
and so does every NPU with QNN's own converter, which has integer forms of all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edge_opt.boards.platform_file import Platform
from edge_opt.records.costs import OpCall, OpSignature
from edge_opt.records.predictions import Departure
from edge_opt.records.profiles import ModelProfile


@dataclass(frozen=True)
class HandOver:
    """What float layers cost beside an integer NPU: of a hand-over, an element and a MAC that the CPU computes.

    Solved from times in TFLite minus those in QNN, where nothing leaves: SegFormer and SAM 2's encoder (30 and 25 layer
    norms), and two video ResNets (20 and 37 3-D convolutions). OSNet, with one hand-over, takes 0.43 to 0.75 ms more.
    """

    call_s: float
    element_s: float
    mac_s: float


INTEGER_NPUS = {
    "dragonwing-q-6690-mtp": HandOver(1.16e-3, 5.7e-9, 0.035e-9),
    "dragonwing-q-7790": HandOver(0.41e-3, 3.4e-9, 0.029e-9),
    "dragonwing-rb3-gen-2-vision-kit": HandOver(1.58e-3, 10.2e-9, 0.042e-9),
    "snapdragon-7-gen-4-qrd": HandOver(0.41e-3, 3.4e-9, 0.029e-9),
}
# The interval of a time with hand-overs is at least a factor of this: YOLO-World's text encoder, which the costs were
# not solved from, takes 0.6 to 0.9 times what they say.
HAND_OVER_FACTOR = 2.0


@dataclass(frozen=True)
class PlacementRule:
    """An operator that an integer NPU does not run in some runtimes and precisions, and what to write instead."""

    title: str
    is_meant: Callable[[ModelProfile, OpCall, OpSignature], bool]
    runtimes: tuple[str, ...]
    precisions: tuple[str, ...]
    reason: str
    rewrite: str


def _is_layer_norm(profile: ModelProfile, call: OpCall, signature: OpSignature) -> bool:
    return signature.op in ("aten.layer_norm", "aten.native_layer_norm")


def _is_3d(profile: ModelProfile, call: OpCall, signature: OpSignature) -> bool:
    return profile.prices[call.signature].kind == "conv" and len(signature.inputs[1].shape) == 5


def _is_length(profile: ModelProfile, call: OpCall, signature: OpSignature) -> bool:
    """Return whether it is the Euclidean length of a vector, as `functional.normalize` and CLIP compute it."""
    is_root = signature.op == "aten.pow" and signature.argument("exponent") == 0.5
    return is_root or signature.op in ("aten.linalg_vector_norm", "aten.norm")


def _is_lookup(profile: ModelProfile, call: OpCall, signature: OpSignature) -> bool:
    """Return whether it looks up embeddings of the model's own input; those of constants are folded."""
    roles = [profile.trace.storages[number].role for number in call.reads]
    return signature.op == "aten.embedding" and "input" in roles


RULES = (
    PlacementRule(
        "LayerNorm", _is_layer_norm, ("tflite",), ("int8",),
        "TFLite has ten float32 operators for it",
        "BatchNorm, or runtime qnn or onnx, which keep it on the NPU",
    ),
    PlacementRule(
        "3-D convolution", _is_3d, ("tflite",), ("int8",),
        "TFLite has it in float32 alone (tensorflow issue 79439)",
        "a 2-D convolution per frame and a 1-D one over time, or runtime qnn or onnx",
    ),
    PlacementRule(
        "L2 normalization", _is_length, ("tflite", "onnx"), ("int8", "w8a16"),
        "its length stays in float32",
        "normalize after the model, or runtime qnn",
    ),
    PlacementRule(
        "embedding of the input", _is_lookup, ("onnx",), ("int8", "w8a16"),
        "its table stays in float32",
        "pass embeddings as input, or runtime qnn",
    ),
)  # fmt: skip


def departures(profile: ModelProfile, platform: Platform) -> tuple[Departure, ...]:
    """Return what leaves the NPU of a platform, by operator; empty where everything stays, or for another engine.

    Args:
        profile: The model and its inputs.
        platform: Device, runtime and precision.
    """
    costs = INTEGER_NPUS.get(platform.device)
    if platform.engine != "npu" or costs is None:
        return ()
    return tuple(_departures(profile, platform, costs))


def _departures(profile: ModelProfile, platform: Platform, costs: HandOver) -> Iterator[Departure]:
    for rule in RULES:
        if platform.runtime not in rule.runtimes or platform.precision not in rule.precisions:
            continue
        by_module: dict[int, float] = {}
        for call in profile.trace.ops:
            signature = profile.trace.signatures[call.signature]
            if rule.is_meant(profile, call, signature):
                elements = sum(tensor.elements for tensor in signature.outputs)
                work_s = costs.mac_s * profile.prices[call.signature].cost.macs or costs.element_s * elements
                by_module[call.module] = by_module.get(call.module, 0.0) + costs.call_s + work_s
        if by_module:
            # TFLite gives one stretch of float layers to the GPU, and the others to the CPU.
            is_gpu = rule.title == "LayerNorm" and len(by_module) == 1
            # With ONNX Runtime, hand-overs take less than the error of the prediction.
            seconds = tuple(by_module.values()) if platform.runtime == "tflite" else (0.0,) * len(by_module)
            yield Departure(
                rule.title, "gpu" if is_gpu else "cpu", tuple(by_module), seconds, rule.reason, rule.rewrite
            )
