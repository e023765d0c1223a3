"""Classes of work: a model as some twenty quantities, each of which has one cost on a platform.

The time of a model is taken as the sum of quantities times costs. A quantity is an amount of one class of work, such as
the MACs of 1x1 convolutions. A platform's costs are fitted to published times (`class_fit`); this module only counts.

Three choices make the quantities fit what runtimes do:

* Layers are counted as a runtime would run them: batch norms and simple activations (ReLU and its kin, sigmoid) that
  follow a convolution or linear layer are part of it.
* A convolution of 3x3 with stride 1 is computed in tiles (Winograd). Its output counts in whole tiles of 4x4, so 7x7
  counts as 8x8.
* Tensors that fit a cache are almost free to pass on. A tensor of n elements counts as n * n / (n + c), with c the
  runtime's `cache_elements`: all of a large tensor, little of a small one, and all of every tensor where c is 0.

What a runtime does with groups and caches is in `Habits`, so that one definition serves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_opt.errors import InvalidInput
from edge_opt.records.costs import OpCall, OpSignature
from edge_opt.records.display import Record
from edge_opt.records.profiles import ModelProfile

Vector = NDArray[np.float64]
WorkKind = Literal["conv", "linear", "product", "elementwise", "pool", "move", "detection"]

# Every class, with the one whose cost it takes where no fitted row has it. None: it stands for itself.
PARENTS: Mapping[str, str | None] = {
    "conv3x3_macs": "conv1x1_macs",
    "conv3x3_elements": "conv1x1_elements",
    "conv1x1_macs": None,
    "conv1x1_elements": None,
    "conv_macs": "conv1x1_macs",
    "conv_elements": "conv1x1_elements",
    "first_macs": "conv_macs",
    "first_elements": "conv_elements",
    "depthwise_macs": "conv_macs",
    "depthwise_elements": "conv1x1_elements",
    "grouped_macs": "conv_macs",
    "linear_weights": "weights",
    "product_macs": "conv1x1_macs",
    "attention_macs": "product_macs",
    "weights": "conv1x1_elements",
    "elementwise_elements": "conv1x1_elements",
    "pooled_elements": "elementwise_elements",
    "moved_elements": "elementwise_elements",
    "layers": None,
    "detections": "layers",
}
CLASSES: tuple[str, ...] = tuple(PARENTS)
# Counts are in millions, so that costs are in ms per million, but for these, which are counted one by one.
_COUNTED = ("layers", "detections")
_UNIT = np.array([1.0 if name in _COUNTED else 1e-6 for name in CLASSES])
_AT = {name: position for position, name in enumerate(CLASSES)}

TILE = 4
# Convolutions larger than 1x1 read their weights anew for every few outputs. From flash outside the chip a MAC then
# costs this much more: YOLOv2-tiny and YOLOv8n on an STM32H747, which no cost was fitted to, take 1.8 and 1.6 times
# what they would (ST's model zoo). 1x1 convolutions read them once: MobileNets of four and six megabytes take no
# longer.
OUTSIDE_FLASH = 1.75
# A layer that reads this many channels or fewer is an image's or a sound's first: no kernel can fill its lanes.
FIRST_CHANNELS = 4
_FUSED = ("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "leaky_relu", "threshold", "sigmoid")
_SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split", "slice")
_PASSES = ("elementwise", "activation", "norm", "softmax")
_MOVES = ("movement", "embedding", "interpolation")


@dataclass(frozen=True, slots=True)
class Habits:
    """How a family of runtimes and processors runs layers, as far as quantities depend on it.

    `cache_elements`: a tensor of this many elements counts half. 6e5 is right for phones and boards, 0 for
    microcontrollers. `splits_groups`: whether a convolution in groups is run as that many convolutions, each a call of
    its own, as ncnn does; otherwise its MACs are a class of their own. `flash_weights`: a model with more weights than
    these reads them from memory outside the chip; 0 where there is no such difference.
    """

    cache_elements: float = 6e5
    splits_groups: bool = True
    flash_weights: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """One layer as a runtime runs it, what is fused into it included.

    `module` is the number of the module call it belongs to, or its position where there are no modules. `reads` and
    `writes` are elements of activations; `kernel` is empty for what is no convolution; `rows` is how many vectors a
    linear layer is applied to. `is_attention` marks products of two activations, `is_recurrent` what goes step by step.
    """

    kind: WorkKind
    module: int
    macs: int = 0
    weights: int = 0
    reads: int = 0
    writes: int = 0
    channels: int = 0
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: int = 1
    places: tuple[int, ...] = ()
    rows: int = 1
    is_attention: bool = False
    is_recurrent: bool = False


@dataclass(frozen=True, slots=True)
class Workload(Record):
    """A model as a list of layers, and the operators that no class describes."""

    name: str
    works: tuple[Work, ...]
    outside: tuple[str, ...] = ()

    def quantities(self, habits: Habits) -> Vector:
        """Amounts of every class in the whole model, in the order of CLASSES: millions, but layers one by one.

        Args:
            habits: how the runtime runs layers; a platform's record has them.
        """
        total: Vector = self.layer_quantities(habits).sum(axis=0)
        return total

    def layer_quantities(self, habits: Habits) -> Vector:
        """The same for each layer: one row per entry of `works`.

        Args:
            habits: as for `quantities`.
        """
        if not self.works:
            return np.zeros((1, len(CLASSES)))
        is_outside = 0 < habits.flash_weights < sum(work.weights for work in self.works)
        works = (_read_again(work) for work in self.works) if is_outside else self.works
        return np.array([_quantities(work, habits) for work in works])


def workload(profile: ModelProfile) -> Workload:
    """The layers of a profiled model, as a runtime with fused kernels would run them.

    Args:
        profile: what `edge_opt.profile` returns, with our own counts. Its batch is part of it: eight images are eight
            times the work.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> [work.kind for work in workload(eo.profile(SmallCNN(), (1, 1, 28, 28))).works]
    ['conv', 'pool', 'conv', 'pool', 'linear']
    """
    if profile.convention != "edge_opt":
        raise InvalidInput(
            f"the profile counts as {profile.convention} does, and class costs need our own counts; "
            "profile again without convention="
        )
    return _Reader(profile).workload()


class _Reader:
    """One pass over a trace: operators become layers, and what a runtime fuses is dropped."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.works: list[Work] = []
        self.outside: dict[str, None] = {}
        # Storages that a convolution or linear layer wrote last, so that a batch norm or ReLU on them is part of it.
        self.open: set[int] = set()

    def workload(self) -> Workload:
        for call in self.profile.trace.ops:
            self.read(call)
        return Workload(self.profile.name, tuple(self.works), tuple(self.outside))

    def read(self, call: OpCall) -> None:
        price, signature = self.profile.prices[call.signature], self.profile.trace.signatures[call.signature]
        op = signature.op.removeprefix("aten.").removesuffix("_")
        if price.status == "unpriced":
            self.outside[signature.op] = None
        elif price.status == "free":
            if op in _SPLITS and _is_cut(signature):
                self.works.append(Work("move", call.module, reads=_read(signature), writes=_written(signature)))
        elif not signature.inputs or op.startswith("dropout"):
            pass  # a constant, which an export folds, or nothing at all in inference
        elif self.is_fused(call, op):
            self.open.update(call.creates)
        else:
            self.append(call, signature, price.kind, price.cost.macs)

    def is_fused(self, call: OpCall, op: str) -> bool:
        return bool(call.reads) and call.reads[0] in self.open and (op.endswith("batch_norm") or op in _FUSED)

    def append(self, call: OpCall, signature: OpSignature, kind: str, macs: int) -> None:
        written = call.creates or call.reads[:1]
        self.open.difference_update(written)
        base = Work("move", call.module, macs=macs, reads=_read(signature), writes=_written(signature))
        if kind == "conv":
            self.works.append(_convolution(signature, base))
            self.open.update(written)
        elif kind in ("matmul", "attention", "recurrent"):
            self.works.append(self.product(call, signature, kind, base))
            self.open.update(written)
        elif kind in _PASSES:
            self.works.append(replace(base, kind="elementwise"))
        elif kind in ("pooling", "reduction"):
            self.works.append(replace(base, kind="pool"))
        elif kind in _MOVES:
            self.works.append(replace(base, reads=base.writes))
        else:
            self.outside[signature.op] = None
            self.works.append(replace(base, kind="elementwise"))

    def product(self, call: OpCall, signature: OpSignature, kind: str, base: Work) -> Work:
        storages = self.profile.trace.storages
        weights = sum(
            tensor.elements
            for tensor, storage in zip(signature.inputs, call.reads, strict=True)
            if storages[storage].role == "parameter" and len(tensor.shape) >= 2
        )
        if kind == "recurrent":  # step by step: every weight is read again for each
            return replace(base, kind="linear", weights=base.macs, rows=1, is_recurrent=True)
        if kind == "attention" or not weights:
            return replace(base, kind="product", is_attention=True)
        rows = max(1, base.macs // weights)
        return replace(base, kind="linear", weights=weights, rows=rows, reads=base.reads - weights)


def _is_cut(signature: OpSignature) -> bool:
    """A part of an image's channels, which runtimes copy; a token out of a sequence is found by its address."""
    source = signature.inputs[0]
    return len(source.shape) == 4 and signature.outputs[0].elements < source.elements


def _read(signature: OpSignature) -> int:
    return sum(tensor.elements for tensor in signature.inputs if len(tensor.shape) > 1)


def _written(signature: OpSignature) -> int:
    return sum(tensor.elements for tensor in signature.outputs)


def _convolution(signature: OpSignature, base: Work) -> Work:
    x, weight, out = signature.inputs[0], signature.inputs[1], signature.outputs[0]
    groups = signature.argument("groups", 1)
    groups = groups if isinstance(groups, int) else 1
    is_transposed = "transpose" in signature.op or signature.argument("transposed", False) is True
    batch = x.shape[0] if len(x.shape) == len(weight.shape) else 1
    channels = weight.shape[0] // groups if is_transposed else weight.shape[1]
    work = replace(
        base,
        kind="conv",
        weights=weight.elements,
        reads=x.elements,
        writes=out.elements,
        channels=channels,
        groups=groups,
        kernel=weight.shape[2:],
        # A transposed one has stride 1 in no kernel that is meant here.
        stride=2 if is_transposed else _stride(signature.argument("stride", 1)),
        places=out.shape[-len(weight.shape[2:]) :],
    )
    return as_linear(work, batch)


def as_linear(work: Work, batch: int) -> Work:
    """The convolution, or a linear layer where it is 1x1 on a single place, as squeeze-and-excitation has them.

    Args:
        work: A convolution.
        batch: How many vectors it is applied to.
    """
    if work.groups == 1 and prod(work.kernel) == 1 and prod(work.places) == 1:
        return replace(work, kind="linear", rows=batch, kernel=(), places=())
    return work


def _stride(value: Any) -> int:
    values = value if isinstance(value, (tuple, list)) and value else (value,)
    return max(int(item) for item in values)


def _quantities(work: Work, habits: Habits) -> Vector:
    """One layer's amounts of every class."""
    found: dict[str, float] = {"layers": 1}
    passed = _passed(work.reads, habits.cache_elements) + _passed(work.writes, habits.cache_elements)
    if work.kind == "conv":
        kind = _conv_class(work)
        tiles = _tile_share(work.places) if kind == "conv3x3" else 1.0
        is_grouped = work.groups > 1 and kind != "depthwise"
        macs = "grouped_macs" if is_grouped and not habits.splits_groups else f"{kind}_macs"
        found |= {macs: work.macs * tiles, f"{kind}_elements": passed, "weights": work.weights}
        if is_grouped and habits.splits_groups:
            found["layers"] = work.groups
    elif work.kind == "linear" and work.rows == 1:
        found["linear_weights"] = work.weights
    elif work.kind == "linear":
        found |= {"product_macs": work.macs, "weights": work.weights}
    elif work.kind == "product":
        found["attention_macs"] = work.macs
    elif work.kind == "detection":
        found["detections"] = 1
    else:
        passing = {"elementwise": "elementwise_elements", "pool": "pooled_elements"}
        found[passing.get(work.kind, "moved_elements")] = passed
    row = np.zeros(len(CLASSES))
    for name, value in found.items():
        row[_AT[name]] = value
    scaled: Vector = row * _UNIT
    return scaled


def _read_again(work: Work) -> Work:
    """The layer with its MACs at what they cost where its weights are outside the chip, in MACs inside it."""
    is_larger = work.kind == "conv" and prod(work.kernel) > 1 and work.groups == 1
    return replace(work, macs=round(OUTSIDE_FLASH * work.macs)) if is_larger else work


def _conv_class(work: Work) -> str:
    if work.groups > 1 and work.channels <= 2:
        return "depthwise"
    if work.channels <= FIRST_CHANNELS:
        return "first"
    if prod(work.kernel) == 1:
        return "conv1x1"
    return "conv3x3" if work.kernel == (3, 3) and work.stride == 1 else "conv"


def _passed(elements: int, cache_elements: float) -> float:
    return elements * elements / (elements + cache_elements) if elements else 0.0


def _tile_share(places: Sequence[int]) -> float:
    """Outputs that whole tiles compute, over those that are asked for.

    >>> _tile_share((7, 7)) == 8 * 8 / (7 * 7)
    True
    """
    return prod(-(-place // TILE) * TILE for place in places) / prod(places)
