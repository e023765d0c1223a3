"""Detection: torchvision's operators, by name, so that torchvision is not imported."""

from __future__ import annotations

from math import prod
from typing import Any

from edge_opt.cost.resampling import weighted_sum
from edge_opt.cost.rules import Work, cost_rule
from edge_opt.cost.sorting import sort_ops
from edge_opt.records import TensorInfo

# Corners of the overlap 4, its sides 2, both at least zero 2, its area 1; the union 2, the ratio 1, the comparison 1.
_OVERLAP_OPS = 4 + 2 + 2 + 1 + 2 + 1 + 1
_AREA_OPS = 3


@cost_rule("torchvision::nms", kind="detection")
def non_maximum_suppression(out: TensorInfo, boxes: TensorInfo, scores: TensorInfo, *_: Any) -> Work:
    """Scores sorted, areas, and every pair of boxes compared: the most there can be, when none is suppressed."""
    n = boxes.shape[0]
    return Work(other_ops=sort_ops(n, n) + _AREA_OPS * n + _OVERLAP_OPS * (n * (n - 1) // 2))


# A point of the grid: its two coordinates (multiply and add each), floors and distances (3 each), four weights.
_POINT_OPS = 2 * (2 + 3) + 4


@cost_rule("torchvision::roi_align", "torchvision::ps_roi_align", kind="detection")
def roi_align(
    out: Any, x: TensorInfo, rois: TensorInfo, scale: float, height: int, width: int, sampling_ratio: int = -1, *_: Any
) -> Work | None:
    """`sampling_ratio`² points a bin, four taps each, averaged. Without a ratio the points follow from the boxes."""
    if sampling_ratio <= 0:
        return None
    first = out[0] if isinstance(out, tuple) else out
    points = sampling_ratio**2
    per_bin = points * weighted_sum(4) + points  # sums of points, and the division
    return Work(other_ops=first.elements * per_bin + rois.shape[0] * height * width * points * _POINT_OPS)


@cost_rule("torchvision::roi_pool", "torchvision::ps_roi_pool", kind="detection")
def roi_pool(out: Any, *_: Any) -> Work | None:
    """How many elements fall into a bin follows from the boxes, which are values."""
    return None


@cost_rule("torchvision::deform_conv2d", kind="conv")
def deformable_convolution(
    out: TensorInfo, x: TensorInfo, weight: TensorInfo, offset: TensorInfo, mask: TensorInfo, bias: TensorInfo,
    *options: Any,
) -> Work:  # fmt: skip
    """A convolution on taps that are interpolated: four taps for each, scaled by the mask; weights for each offset."""
    taps = prod(weight.shape[2:])
    positions = out.shape[0] * prod(out.shape[2:])
    uses_mask = bool(options[-1]) if options else mask.elements > 0
    points = offset.elements // 2
    return Work(
        macs=out.elements * prod(weight.shape[1:]),
        other_ops=positions * taps * x.shape[1] * (weighted_sum(4) + uses_mask) + points * _POINT_OPS + out.elements,
    )
