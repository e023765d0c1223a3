"""Classes of work: a model as some twenty quantities, each of which has one cost on a platform.

The time of a model is taken as the sum of quantities times costs. A quantity is an amount of one class of work, such as
the MACs of 1x1 convolutions. A platform's costs are fitted to published times (`class_fit`); `fused_layers` reads the
layers of a profile; this module only counts.

Three choices make the quantities fit what runtimes do:

* Layers are counted as a runtime would run them: batch norms and simple activations (ReLU and its kin, sigmoid) that
  follow a convolution or linear layer are part of it.
* A convolution of 3x3 with stride 1 is computed in tiles (Winograd). Its output counts in whole tiles of 4x4, so 7x7
  counts as 8x8.
* Tensors that fit a cache are almost free to pass on. A tensor of n elements counts as n * n / (n + c), with c the
  runtime's `cache_elements`: all of a large tensor, little of a small one, and all of every tensor where c is 0.

What a runtime does with groups and caches is in `KernelConventions`, so that one definition serves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_opt.records.display import Record

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


@dataclass(frozen=True, slots=True)
class KernelConventions:
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
class LayerWork:
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


def as_linear(work: LayerWork, batch: int) -> LayerWork:
    """Return the convolution, or a linear layer where it is 1x1 on a single place, as squeeze-and-excitation has them.

    Args:
        work: A convolution.
        batch: How many vectors it is applied to.
    """
    if work.groups == 1 and prod(work.kernel) == 1 and prod(work.places) == 1:
        return replace(work, kind="linear", rows=batch, kernel=(), places=())
    return work


@dataclass(frozen=True, slots=True)
class ModelWork(Record):
    """A model as a list of layers, and the operators that no class describes."""

    name: str
    works: tuple[LayerWork, ...]
    outside: tuple[str, ...] = ()

    def quantities(self, conventions: KernelConventions) -> Vector:
        """Amounts of every class in the whole model, in the order of CLASSES: millions, but layers one by one.

        Args:
            conventions: how the runtime runs layers; a platform's record has them.
        """
        total: Vector = self.layer_quantities(conventions).sum(axis=0)
        return total

    def layer_quantities(self, conventions: KernelConventions) -> Vector:
        """The same for each layer: one row per entry of `works`.

        Args:
            conventions: as for `quantities`.
        """
        if not self.works:
            return np.zeros((1, len(CLASSES)))
        is_outside = 0 < conventions.flash_weights < sum(work.weights for work in self.works)
        works = (_read_again(work) for work in self.works) if is_outside else self.works
        return np.array([_quantities(work, conventions) for work in works])


def _quantities(work: LayerWork, conventions: KernelConventions) -> Vector:
    """One layer's amounts of every class."""
    found: dict[str, float] = {"layers": 1}
    passed = _passed(work.reads, conventions.cache_elements) + _passed(work.writes, conventions.cache_elements)
    if work.kind == "conv":
        kind = _conv_class(work)
        tiles = _tile_share(work.places) if kind == "conv3x3" else 1.0
        is_grouped = work.groups > 1 and kind != "depthwise"
        macs = "grouped_macs" if is_grouped and not conventions.splits_groups else f"{kind}_macs"
        found |= {macs: work.macs * tiles, f"{kind}_elements": passed, "weights": work.weights}
        if is_grouped and conventions.splits_groups:
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


def _read_again(work: LayerWork) -> LayerWork:
    """The layer with its MACs at what they cost where its weights are outside the chip, in MACs inside it."""
    is_larger = work.kind == "conv" and prod(work.kernel) > 1 and work.groups == 1
    return replace(work, macs=round(OUTSIDE_FLASH * work.macs)) if is_larger else work


def _conv_class(work: LayerWork) -> str:
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
