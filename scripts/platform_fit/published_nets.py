"""Nets that published tables name, as lists of layers: no framework is needed to say what they cost.

Tables give a net's name, width and input; its layers follow from the paper. Batch norms and activations are part of the
layer before them, as in `edge_opt.boards.class_costs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from edge_opt.boards.class_costs import LayerWork, ModelWork, WorkKind, as_linear
from edge_opt.errors import InvalidInput


class _Layers:
    """A net being written down: every call appends a layer and moves on to its output."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        self.channels, self.height, self.width = channels, height, width
        self.works: list[LayerWork] = []

    @property
    def elements(self) -> int:
        return self.channels * self.height * self.width

    def conv(self, width: int, kernel: int = 1, stride: int = 1, groups: int = 1, is_padded: bool = True) -> None:
        """A square convolution; padded so that the output is the input over the stride, rounded up."""
        reads = self.elements
        trimmed = 0 if is_padded else kernel - 1
        self.height, self.width = ceil((self.height - trimmed) / stride), ceil((self.width - trimmed) / stride)
        places = self.height * self.width
        channels = self.channels // groups
        weights = width * channels * kernel * kernel
        work = LayerWork(
            "conv", len(self.works), weights * places, weights, reads, width * places, channels, groups,
            (kernel, kernel), stride, (self.height, self.width),
        )  # fmt: skip
        self.channels = width
        self.works.append(work)

    def depthwise(self, kernel: int, stride: int) -> None:
        self.conv(self.channels, kernel, stride, groups=self.channels)

    def pool(self, stride: int) -> None:
        reads = self.elements
        self.height, self.width = self.height // stride, self.width // stride
        self.works.append(LayerWork("pool", len(self.works), reads=reads, writes=self.elements))

    def global_pool(self) -> None:
        self.works.append(LayerWork("pool", len(self.works), reads=self.elements, writes=self.channels))
        self.height = self.width = 1

    def linear(self, width: int) -> None:
        weights = self.elements * width
        self.works.append(LayerWork("linear", len(self.works), weights, weights, self.elements, width))
        self.channels, self.height, self.width = width, 1, 1

    def add(self, inputs: int = 2) -> None:
        self.works.append(LayerWork("elementwise", len(self.works), reads=inputs * self.elements, writes=self.elements))

    def squeeze(self, hidden: int) -> None:
        """Squeeze and excitation: a mean, two linear layers, and a product with the whole."""
        channels, height, width = self.channels, self.height, self.width
        self.global_pool()
        self.linear(hidden)
        self.linear(channels)
        self.height, self.width = height, width
        self.works.append(
            LayerWork("elementwise", len(self.works), reads=self.elements + channels, writes=self.elements)
        )

    def workload(self, name: str) -> ModelWork:
        return ModelWork(name, tuple(self.works))


def rounded_width(width: float) -> int:
    """A layer's width as MobileNets round it: to a multiple of 8, and not more than a tenth down.

    Args:
        width: the width before rounding.

    >>> rounded_width(32 * 0.35), rounded_width(96 * 0.35)
    (16, 32)
    """
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * width else rounded


def mobilenet_v1(
    alpha: float, height: int, width: int | None = None, channels: int = 3, classes: int = 1000
) -> ModelWork:
    """MobileNet v1.

    Args:
        alpha: multiplier of all widths.
        height: of the input, in pixels.
        width: of the input, in pixels; the height unless given.
        channels: of the input.
        classes: of the classifier.
    """
    net = _Layers(channels, height, width or height)
    net.conv(int(32 * alpha), 3, 2)
    for out, stride in (
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    ):
        net.depthwise(3, stride)
        net.conv(int(out * alpha))
    net.global_pool()
    net.linear(classes)
    return net.workload(f"mobilenet_v1_{alpha:g}_{height}")


def vww_kept_by_st() -> ModelWork:
    """MLPerf Tiny's MobileNet v1 0.25 without the channels that ST's tool drops, because their weights are all zero.

    ST's project files in mlcommons/tiny_results_v1.2 report 4.65 of 7.49 million MACs, and 43 of 219 kB of weights.
    They do not say which channels: early layers are taken as whole, and the last ones have widths that give these MACs.
    """
    net = _Layers(3, 96, 96)
    net.conv(8, 3, 2)
    for out, stride in ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (80, 2), *[(80, 1)] * 5, (32, 2), (32, 1)):
        net.depthwise(3, stride)
        net.conv(out)
    net.global_pool()
    net.linear(2)
    return net.workload("vww_kept_by_st")


def fd_mobilenet(alpha: float, height: int, classes: int = 1000) -> ModelWork:
    """FD-MobileNet: MobileNet v1 that reduces its input by 32 within its first twelve layers.

    Args:
        alpha: multiplier of all widths.
        height: and width of the input, in pixels.
        classes: of the classifier.
    """
    net = _Layers(3, height, height)
    net.conv(int(32 * alpha), 3, 2)
    for out, stride in ((64, 2), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 4, (1024, 1)):
        net.depthwise(3, stride)
        net.conv(int(out * alpha))
    net.global_pool()
    net.linear(classes)
    return net.workload(f"fd_mobilenet_{alpha:g}_{height}")


def mobilenet_v2(alpha: float, height: int, width: int | None = None, classes: int = 1000) -> ModelWork:
    """MobileNet v2.

    Args:
        alpha: multiplier of all widths.
        height: of the input, in pixels.
        width: of the input, in pixels; the height unless given.
        classes: of the classifier.
    """
    net = _Layers(3, height, width or height)
    net.conv(rounded_width(32 * alpha), 3, 2)
    for expansion, out, repeats, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(repeats):
            before = net.channels
            if expansion > 1:
                net.conv(before * expansion)
            net.depthwise(3, stride if number == 0 else 1)
            net.conv(rounded_width(out * alpha))
            if number:
                net.add()
    net.conv(rounded_width(1280 * max(1.0, alpha)))
    net.global_pool()
    net.linear(classes)
    return net.workload(f"mobilenet_v2_{alpha:g}_{height}")


_V3_LARGE = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)  # fmt: skip
_V3_SMALL = (
    (3, 16, 16, 1, 0, 2), (3, 72, 24, 0, 0, 2), (3, 88, 24, 0, 0, 1), (5, 96, 40, 1, 1, 2), (5, 240, 40, 1, 1, 1),
    (5, 240, 40, 1, 1, 1), (5, 120, 48, 1, 1, 1), (5, 144, 48, 1, 1, 1), (5, 288, 96, 1, 1, 2), (5, 576, 96, 1, 1, 1),
    (5, 576, 96, 1, 1, 1),
)  # fmt: skip


def mobilenet_v3(is_large: bool, height: int = 224) -> ModelWork:
    """MobileNet v3, large or small; its hard swishes are passes of their own.

    Args:
        is_large: the large one of the two.
        height: and width of the input, in pixels.
    """
    net = _Layers(3, height, height)
    net.conv(16, 3, 2)
    net.add(1)
    for kernel, expanded, out, has_squeeze, is_swish, stride in _V3_LARGE if is_large else _V3_SMALL:
        before = net.channels
        if expanded != before:
            net.conv(expanded)
            if is_swish:
                net.add(1)
        net.depthwise(kernel, stride)
        if is_swish:
            net.add(1)
        if has_squeeze:
            net.squeeze(rounded_width(expanded / 4))
        net.conv(out)
        if stride == 1 and before == out:
            net.add()
    net.conv(net.channels * 6)
    net.add(1)
    net.global_pool()
    net.linear(1280 if is_large else 1024)
    net.linear(1000)
    return net.workload(f"mobilenet_v3_{'large' if is_large else 'small'}")


def squeezenet_v11(height: int, classes: int = 1000) -> ModelWork:
    """SqueezeNet 1.1.

    Args:
        height: and width of the input, in pixels.
        classes: of the classifier, which is a convolution.
    """
    net = _Layers(3, height, height)
    net.conv(64, 3, 2, is_padded=False)
    net.pool(2)
    for squeezed, expanded, is_pooled in (
        (16, 64, 0), (16, 64, 1), (32, 128, 0), (32, 128, 1), (48, 192, 0), (48, 192, 0), (64, 256, 0), (64, 256, 0),
    ):  # fmt: skip
        net.conv(squeezed)
        net.conv(expanded)
        net.channels = squeezed
        net.conv(expanded, 3)
        net.channels = 2 * expanded
        net.works.append(LayerWork("move", len(net.works), reads=net.elements, writes=net.elements))
        if is_pooled:
            net.pool(2)
    net.conv(classes)
    net.global_pool()
    return net.workload(f"squeezenet_v11_{height}")


def resnet50_v2(height: int, classes: int = 1000) -> ModelWork:
    """ResNet-50 with activations first; its batch norms before a convolution are passes of their own.

    Args:
        height: and width of the input, in pixels.
        classes: of the classifier.
    """
    net = _Layers(3, height, height)
    net.conv(64, 7, 2)
    net.pool(2)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if block == blocks - 1 and stage < 3 else 1
            net.add(1)
            before = (net.channels, net.height, net.width)
            if block == 0:
                net.conv(4 * width)
                net.channels, net.height, net.width = before
            net.conv(width)
            net.conv(width, 3, stride)
            net.conv(4 * width)
            net.add()
    net.add(1)
    net.global_pool()
    net.linear(classes)
    return net.workload(f"resnet50_v2_{height}")


def osnet(alpha: float, height: int, width: int, features: int = 512) -> ModelWork:
    """OSNet, which tells persons apart: blocks of four streams of separable convolutions, each gated.

    Args:
        alpha: multiplier of all widths.
        height: of the input, in pixels.
        width: of the input, in pixels.
        features: that the last layer gives.
    """
    first, *stages = (int(channels * alpha) for channels in (64, 256, 384, 512))
    net = _Layers(3, height, width)
    net.conv(first, 7, 2)
    net.pool(2)
    for number, out in enumerate(stages):
        for _ in range(2):
            _omni_scale_block(net, out)
        if number < 2:
            net.conv(out)
            net.pool(2)
    net.conv(stages[-1])
    net.global_pool()
    net.linear(features)
    return net.workload(f"osnet_{alpha:g}_{height}")


def _omni_scale_block(net: _Layers, out: int) -> None:
    before, middle = net.channels, out // 4
    net.conv(middle)
    for depth in (1, 2, 3, 4):
        for _ in range(depth):
            net.conv(middle)
            net.depthwise(3, 1)
        net.squeeze(max(1, middle // 16))
    net.add(4)
    net.conv(out)
    if before != out:
        net.channels = before
        net.conv(out)
    net.add()


def resnet8(height: int = 32, classes: int = 10) -> ModelWork:
    """MLPerf Tiny's ResNet for small images.

    Args:
        height: and width of the input, in pixels.
        classes: of the classifier.
    """
    net = _Layers(3, height, height)
    net.conv(16, 3)
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        before = (net.channels, net.height, net.width)
        net.conv(width, 3, stride)
        net.conv(width, 3)
        if stride > 1:
            after = (net.channels, net.height, net.width)
            net.channels, net.height, net.width = before
            net.conv(width, 1, stride)
            net.channels, net.height, net.width = after
        net.add()
    net.global_pool()
    net.linear(classes)
    return net.workload("resnet8")


def ds_cnn(classes: int = 12) -> ModelWork:
    """MLPerf Tiny's keyword spotter: 49 frames of ten coefficients, a 10x4 convolution, four separable ones of 64.

    Args:
        classes: of the classifier.
    """
    net = _Layers(1, 49, 10)
    reads, weights = net.elements, 64 * 10 * 4
    net.channels, net.height, net.width = 64, 25, 5
    places = net.height * net.width
    net.works.append(
        LayerWork("conv", 0, weights * places, weights, reads, 64 * places, 1, 1, (10, 4), 2, (net.height, net.width))
    )
    for _ in range(4):
        net.depthwise(3, 1)
        net.conv(64)
    net.global_pool()
    net.linear(classes)
    return net.workload("ds_cnn")


def autoencoder() -> ModelWork:
    """MLPerf Tiny's anomaly detector: linear layers from 640 inputs to eight, and back."""
    net = _Layers(640, 1, 1)
    for width in (128, 128, 128, 128, 8, 128, 128, 128, 128, 640):
        net.linear(width)
    return net.workload("autoencoder")


def nasbench201_workload(cell: str) -> ModelWork:
    """A NAS-Bench-201 net for 32x32 images, from its cell, such as `|nor_conv_3x3~0|+|none~0|skip_connect~1|+...`.

    Args:
        cell: the operators of the six edges, each with the node that it comes from. A node is the sum of its edges.
    """
    nodes = _cell_nodes(cell)
    works: list[LayerWork] = [_square_conv(0, 3, 16, 3, 32)]
    size, width = 32, 16
    for stage in range(3):
        if stage:
            width, size = 2 * width, size // 2
            works += _residual(len(works), width, size)
        for _ in range(5):
            works += _cell_works(len(works), nodes, width, size)
    works.append(_pass(len(works), width * size * size, 1))
    works.append(LayerWork("pool", len(works), reads=width * size * size, writes=width))
    works.append(LayerWork("linear", len(works), macs=width * 10, weights=width * 10, reads=width, writes=10))
    return ModelWork(cell, tuple(works))


def _cell_nodes(cell: str) -> list[list[tuple[str, int]]]:
    try:
        return [
            [(op, int(source)) for op, source in (edge.split("~") for edge in node.strip("|").split("|"))]
            for node in cell.split("+")
        ]
    except ValueError as error:
        raise InvalidInput(f"the cell is {cell!r}; write edges as |operator~node|, nodes joined by +") from error


def _square_conv(number: int, channels: int, width: int, kernel: int, size: int, stride: int = 1) -> LayerWork:
    weights, places = channels * width * kernel * kernel, size * size
    return LayerWork(
        "conv", number, weights * places, weights, channels * places * stride * stride, width * places, channels,
        kernel=(kernel, kernel), stride=stride, places=(size, size),
    )  # fmt: skip


def _pass(number: int, elements: int, inputs: int) -> LayerWork:
    return LayerWork("elementwise", number, reads=inputs * elements, writes=elements)


def _residual(first: int, width: int, size: int) -> list[LayerWork]:
    """ResNet's basic block with stride 2, its shortcut an average pool and a 1x1 convolution."""
    elements = width * size * size
    return [
        _pass(first, 2 * elements, 1),
        _square_conv(first + 1, width // 2, width, 3, size, stride=2),
        _square_conv(first + 2, width, width, 3, size),
        LayerWork("pool", first + 3, reads=2 * elements, writes=elements // 2),
        _square_conv(first + 4, width // 2, width, 1, size),
        _pass(first + 5, elements, 2),
    ]


def _cell_works(first: int, nodes: Sequence[Sequence[tuple[str, int]]], width: int, size: int) -> list[LayerWork]:
    """One cell. Nodes that the last one does not read are not run; what reads a node of zeros is, as times tell."""
    needed = {len(nodes)}
    for number in range(len(nodes), 0, -1):
        if number in needed:
            needed |= {source for op, source in nodes[number - 1] if op != "none"}
    works: list[LayerWork] = []
    elements = width * size * size
    rectified: set[int] = set()
    for number, edges in enumerate(nodes, 1):
        if number not in needed:
            continue
        terms = [(op, source) for op, source in edges if op != "none"]
        for op, source in terms:
            if op.startswith("nor_conv"):
                if source not in rectified:
                    works.append(_pass(first + len(works), elements, 1))
                    rectified.add(source)
                works.append(_square_conv(first + len(works), width, width, int(op[-1]), size))
            elif op.startswith("avg_pool"):
                works.append(LayerWork("pool", first + len(works), reads=elements, writes=elements))
        if len(terms) > 1:
            works += [_pass(first + len(works), elements, 2)] * (len(terms) - 1)
    return works


def is_constant(cell: str) -> bool:
    """Whether a cell's output does not depend on its input: a converter then leaves almost nothing to run.

    Args:
        cell: as for `nasbench201_workload`.

    >>> is_constant("|none~0|+|none~0|nor_conv_3x3~1|+|none~0|none~1|skip_connect~2|")
    True
    """
    depends = [True]
    for edges in _cell_nodes(cell):
        depends.append(any(op != "none" and depends[source] for op, source in edges))
    return not depends[-1]


def ncnn_workload(name: str, layers: Iterable[Mapping[str, Any]]) -> ModelWork:
    """The layers of one of ncnn's benchmark nets, from a list that was derived from its `.param` file.

    Args:
        name: the net's name in ncnn's benchmark, for errors and reports.
        layers: one mapping per layer: `t` its type, `iN` and `oN` elements in and out, `macs`, `params`, and for
            convolutions `ci`, `co`, `k`, `s`, `g`, `h`, `w`.
    """
    works: list[LayerWork] = []
    for number, layer in enumerate(layers):
        works.extend(_ncnn_works(number, layer))
    return ModelWork(name, tuple(works))


_NCNN_KINDS: Mapping[str, WorkKind] = {
    "act": "elementwise",
    "elt": "elementwise",
    "norm": "elementwise",
    "pool": "pool",
}


def _ncnn_works(number: int, layer: Mapping[str, Any]) -> list[LayerWork]:
    kind = layer["t"]
    base = LayerWork("move", number, layer["macs"], layer["params"], layer["iN"], layer["oN"])
    if kind == "conv":
        work = base._replace(
            kind="conv", channels=layer["ci"] // layer["g"], groups=layer["g"], kernel=tuple(layer["k"]),
            stride=layer["s"], places=(layer["h"], layer["w"]),
        )  # fmt: skip
        return [as_linear(work, 1)]
    if kind in ("fc", "gemm"):
        return [base._replace(kind="linear", rows=layer["rows"])]
    if kind == "mha":  # four projections, and two products of activations
        attention = 2 * layer["L"] ** 2 * layer["E"]
        projections = base._replace(kind="linear", rows=layer["L"], macs=layer["macs"] - attention)
        return [projections, LayerWork("product", number, macs=attention, is_attention=True)]
    if kind == "det":
        # Boxes and their suppression; priors are made from shapes, and YOLO's heads only pass over their input.
        return [base._replace(kind="detection")] if layer.get("n") == "DetectionOutput" else [_head(base, layer)]
    if kind == "move":
        return [base._replace(reads=base.writes)]
    if kind not in _NCNN_KINDS:
        raise InvalidInput(f"layer {number} has the type {kind!r}; known are conv, fc, gemm, mha, det, move and "
                           f"{', '.join(_NCNN_KINDS)}")  # fmt: skip
    return [base._replace(kind=_NCNN_KINDS[kind])]


def _head(base: LayerWork, layer: Mapping[str, Any]) -> LayerWork:
    return base._replace(reads=0 if layer.get("n") == "PriorBox" else base.reads)
