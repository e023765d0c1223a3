"""Vision: resampling of images, boxes and regions of interest.

A weighted sum of t taps is t multiplications and t - 1 additions. Operators of torchvision are given by their names, so
that it is not imported.
"""

from __future__ import annotations

from math import prod
from typing import Any

from edge_opt.cost.movement import sort_ops
from edge_opt.cost.rules import Work, aten, cost_rule, operator_name, per_output
from edge_opt.records.costs import TensorInfo


def weighted_sum(taps: int) -> int:
    """Return the operations of a sum of products."""
    return 2 * taps - 1 if taps else 0


for _operator, _taps in (
    (aten.upsample_linear1d, 2), (aten.upsample_bilinear2d, 4), (aten.upsample_trilinear3d, 8),
    (aten.upsample_bicubic2d, 16),
):  # fmt: skip
    cost_rule(_operator, kind="interpolation")(per_output(operator_name(_operator), weighted_sum(_taps)))


def antialias_taps(size: int, out: int, support: float, align_corners: bool, scale: float | None) -> list[int]:
    """Return the taps of each output along one dimension.

    The filter reaches `support` inputs to either side, and is stretched by the factor of reduction. Windows are those
    of torch's UpSampleKernel.cpp (`_compute_indices_min_size_weights_aa`).
    """
    step = 1 / scale if scale else size / out
    if align_corners:
        step = (size - 1) / (out - 1) if out > 1 else 0.0
    reach = support * max(step, 1.0)
    taps = []
    for index in range(out):
        center = step * (index + 0.5)
        first = max(int(center - reach + 0.5), 0)
        taps.append(max(min(int(center + reach + 0.5), size) - first, 0))
    return taps


def _antialiased(support: float) -> Any:
    def rule(
        out: TensorInfo, x: TensorInfo, output_size: Any, align_corners: bool = False, scale_h: Any = None,
        scale_w: Any = None,
    ) -> Work:  # fmt: skip
        """Columns first, then rows, each output a weighted sum over its own window."""
        height, width = x.shape[-2:]
        new_height, new_width = out.shape[-2:]
        lines = prod(x.shape[:-2])
        across = antialias_taps(width, new_width, support, align_corners, scale_w)
        down = antialias_taps(height, new_height, support, align_corners, scale_h)
        return Work(
            other_ops=lines * height * sum(map(weighted_sum, across)) + lines * new_width * sum(map(weighted_sum, down))
        )

    return rule


for _name, _support in (("bilinear", 1.0), ("bicubic", 2.0), ("lanczos", 3.0)):
    cost_rule(f"aten::_upsample_{_name}2d_aa", kind="interpolation")(_antialiased(_support))

# From -1 … 1 to a position in the input: ((x + 1) · size - 1) / 2.
_POSITION_OPS = 4
# Four cubic polynomials: twice ((a·x - b)·x·x + 1), twice ((a·x - b)·x + c)·x - d, and their three distances.
_CUBIC_OPS = 2 * 5 + 2 * 6 + 3
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2


def location_ops(dims: int, mode: int) -> int:
    """Return the operations for each point of a grid, whatever the channels: its position, and the weights of its taps.

    Nearest rounds; linear takes the floor and two distances a dimension, and multiplies them for each corner; cubic
    takes the floor, the distance and four polynomials a dimension.
    """
    if mode == _NEAREST:
        return dims * (_POSITION_OPS + 1)
    if mode == _BICUBIC:
        return dims * (_POSITION_OPS + 2 + _CUBIC_OPS)
    return dims * (_POSITION_OPS + 3) + (1 << dims) * (dims - 1)


@cost_rule(aten.grid_sampler_2d, aten.grid_sampler_3d, aten._grid_sampler_2d_cpu_fallback, kind="interpolation")
def grid_sample(out: TensorInfo, x: TensorInfo, grid: TensorInfo, mode: int = 0, *_: Any) -> Work:
    """Weights for each point, then a weighted sum for each point and channel: 4 or 8 taps linear, 16 bicubic.

    Nearest takes one element as it is.
    """
    dims = grid.shape[-1]
    points = grid.elements // dims
    taps = {_BILINEAR: 2**dims, _NEAREST: 1, _BICUBIC: 4**dims}[mode]
    sums = 0 if mode == _NEAREST else weighted_sum(taps)
    return Work(other_ops=points * location_ops(dims, mode) + out.elements * sums)


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


# How many elements fall into a bin follows from the boxes, which are values.
cost_rule("torchvision::roi_pool", "torchvision::ps_roi_pool", kind="detection")(lambda *_: None)


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
