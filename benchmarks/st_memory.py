"""Activations and flash in ST Edge AI against ST's model zoo, on STM32H7, for nets that are known by their names.

    python benchmarks/st_memory.py ../shared/published

Prints every row, the median errors, and the same with the shares of `edge_opt.boards.st_edge_ai` chosen again without
each family of nets. Nets are Keras' own: depthwise convolutions with stride 2 have a padding in front.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import re
import sys
from collections.abc import Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.boards import st_edge_ai
from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator, TflmSubgraph, TflmTensor

GRID = {
    "CONV_2D": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "1x1": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    "DEPTHWISE_CONV_2D": (0.0, 0.5, 1.0),
    "MAX_POOL_2D": (0.5, 1.0),
}


class Net:
    """A quantized graph being written down; `at` is the tensor that the next operator reads."""

    def __init__(self, height: int, width: int, channels: int) -> None:
        self.tensors: list[TflmTensor] = []
        self.operators: list[TflmOperator] = []
        self.at = self.tensor((1, height, width, channels))

    def tensor(self, shape: Sequence[int], is_constant: bool = False, dtype: str = "int8", scales: int = 1) -> int:
        name = str(len(self.tensors))
        self.tensors.append(TflmTensor(name, tuple(shape), dtype, is_constant, False, scales, ()))
        return len(self.tensors) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensors[self.at].shape

    def op(self, op: str, inputs: Sequence[int], shape: Sequence[int], **options: Any) -> int:
        self.at = self.tensor(shape)
        tensors = tuple(self.tensors[index] for index in inputs)
        output = (self.tensors[self.at],)
        self.operators.append(TflmOperator(op, False, tensors, output, tuple(inputs), (self.at,), options))
        return self.at

    def conv(
        self, filters: int, kernel: int = 1, stride: int = 1, is_valid: bool = False, source: int | None = None
    ) -> int:
        """Add a convolution; no filters: a depthwise one."""
        start = self.at if source is None else source
        _, height, width, channels = self.tensors[start].shape
        trimmed = kernel - 1 if is_valid else 0
        wide = filters or channels
        shape = (wide, kernel, kernel, channels) if filters else (1, kernel, kernel, channels)
        inputs = (start, self.tensor(shape, True, scales=wide), self.tensor((wide,), True, "int32", wide))
        out = (1, ceil((height - trimmed) / stride), ceil((width - trimmed) / stride), wide)
        op = "CONV_2D" if filters else "DEPTHWISE_CONV_2D"
        return self.op(op, inputs, out, stride_h=stride, stride_w=stride, padding=int(is_valid))

    def pad(self, before: int, after: int) -> None:
        _, height, width, channels = self.shape
        amounts = self.tensor((4, 2), True, "int32", 0)
        self.op("PAD", (self.at, amounts), (1, height + before + after, width + before + after, channels))

    def depthwise(self, stride: int) -> None:
        if stride == 2:
            self.pad(0, 1)
        self.conv(0, 3, stride, is_valid=stride == 2)

    def pool(self, kernel: int, stride: int, op: str = "MAX_POOL_2D", is_valid: bool = True) -> int:
        _, height, width, channels = self.shape
        trimmed = kernel - 1 if is_valid else 0
        shape = (1, ceil((height - trimmed) / stride), ceil((width - trimmed) / stride), channels)
        return self.op(op, (self.at,), shape, stride_h=stride, stride_w=stride)

    def norm(self) -> None:
        for op in ("MUL", "ADD"):
            self.op(op, (self.at, self.tensor(self.shape[-1:], True)), self.shape)

    def classify(self, classes: int, has_mean: bool = True, is_conv: bool = False) -> TflmGraph:
        if has_mean:
            self.op("MEAN", (self.at, self.tensor((2,), True, "int32", 0)), (1, 1, 1, self.shape[-1]))
        if is_conv:
            self.conv(classes)
        elif classes:
            inputs = prod(self.shape)
            weights = self.tensor((classes, inputs), True)
            self.op("FULLY_CONNECTED", (self.at, weights, self.tensor((classes,), True, "int32")), (1, classes))
        self.op("SOFTMAX", (self.at,), self.shape)
        return self.graph()

    def graph(self) -> TflmGraph:
        subgraph = TflmSubgraph(tuple(self.tensors), tuple(self.operators), (0,), (self.at,))
        return TflmGraph("net", 0, 0, (subgraph,), ())


def rounded(width: float) -> int:
    """A width of MobileNet v2: a multiple of eight, not more than a tenth down."""
    multiple = max(8, int(width + 4) // 8 * 8)
    return multiple + 8 if multiple < 0.9 * width else multiple


V1 = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
FD = ((64, 2), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 4, (1024, 1))
V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
FIRE = ((16, 64, 0), (16, 64, 1), (32, 128, 0), (32, 128, 1), (48, 192, 0), (48, 192, 0), (64, 256, 0), (64, 256, 0))


def mobilenet_v1(net: Net, alpha: float, classes: int, blocks: Sequence[tuple[int, int]] = V1) -> TflmGraph:
    net.conv(int(32 * alpha), 3, 2)
    for filters, stride in blocks:
        net.depthwise(stride)
        net.conv(int(filters * alpha))
    return net.classify(classes, is_conv=classes == 1000)


def mobilenet_v2(net: Net, alpha: float, classes: int) -> TflmGraph:
    net.conv(rounded(32 * alpha), 3, 2)
    for expansion, filters, repeats, stride in V2:
        for number in range(repeats):
            before = net.at
            if expansion > 1:
                net.conv(net.shape[-1] * expansion)
            net.depthwise(1 if number else stride)
            net.conv(rounded(filters * alpha))
            if number:
                net.op("ADD", (before, net.at), net.shape)
    net.conv(rounded(1280 * max(1.0, alpha)))
    return net.classify(classes)


def squeezenet(net: Net, classes: int) -> TflmGraph:
    net.conv(64, 3, 2, is_valid=True)
    net.pool(3, 2)
    for squeezed, filters, is_pooled in FIRE:
        squeeze = net.conv(squeezed)
        left, right = net.conv(filters), net.conv(filters, 3, source=squeeze)
        net.op("CONCATENATION", (left, right), (*net.shape[:3], 2 * filters))
        if is_pooled:
            net.pool(3, 2)
    net.conv(classes)
    return net.classify(0)


def resnet8(net: Net) -> TflmGraph:
    net.conv(16, 3)
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        shortcut = net.at
        net.conv(filters, 3, stride)
        last = net.conv(filters, 3)
        if stride > 1:
            shortcut = net.conv(filters, 1, stride, source=shortcut)
        net.op("ADD", (shortcut, last), net.shape)
    net.pool(net.shape[1], 1, "AVERAGE_POOL_2D")
    return net.classify(10, has_mean=False)


def st_mnist(net: Net) -> TflmGraph:
    """ST's net for small images of digits and letters."""
    net.conv(16, 3, 2)
    net.conv(0, 3)
    net.conv(32, 3)
    net.conv(0, 3, 2)
    net.conv(64)
    return net.classify(36)


def st_fdmobilenet(net: Net, classes: int) -> TflmGraph:
    """ST's FdMobileNet, whose first layers are wider; no padding in front of a stride of 2."""
    net.conv(16, 3, 2)
    for filters, stride in ((48, 2), (80, 2), (64, 1), (96, 2), (64, 1), (128, 2), *[(128, 1)] * 4, (256, 1)):
        net.conv(0, 3, stride)
        net.conv(filters)
    return net.classify(classes, is_conv=True)


def st_yolo_lc(net: Net) -> TflmGraph:
    """ST's small YOLO; 30 values at each place: five anchors of one class."""
    for filters in (16, 32, 64, 128):
        net.conv(filters, 3, 2)
    for number, filters in enumerate((256, 256, 128, 256)):
        net.conv(0, 3)
        net.conv(filters)
        if number == 1:
            net.pool(2, 1, is_valid=False)
    net.conv(30)
    return net.graph()


def tiny_yolo_v2(net: Net) -> TflmGraph:
    for filters, stride in ((16, 2), (32, 2), (64, 2), (128, 2), (256, 2), (512, 1), (1024, 0), (512, 0)):
        net.conv(filters, 3)
        net.op("LEAKY_RELU", (net.at,), net.shape)
        if stride:
            net.pool(2, stride, is_valid=False)
    net.conv(30)
    return net.graph()


def resnet50_v2(net: Net, classes: int) -> TflmGraph:
    net.pad(3, 3)
    net.conv(64, 7, 2, is_valid=True)
    net.pad(1, 1)
    net.pool(3, 2)
    for stage, (filters, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if block == blocks - 1 and stage < 3 else 1
            start = net.at
            net.norm()
            normed = net.at
            shortcut = net.conv(4 * filters, source=normed) if block == 0 else start
            if block and stride == 2:
                net.at = start
                shortcut = net.pool(1, 2)
            net.conv(filters, source=normed)
            if stride == 2:
                net.pad(1, 1)
            net.conv(filters, 3, stride, is_valid=stride == 2)
            net.op("ADD", (shortcut, net.conv(4 * filters)), net.shape)
    net.norm()
    return net.classify(classes)


def graph_of(model: str, dataset: str, size: str) -> TflmGraph | None:
    """The net of a row; None where its name does not say what it is."""
    height, width, channels = map(int, re.findall(r"\d+", size))
    family, alpha = model.split("/")[1].split(":")[0], re.search(r"_a(\d)(\d\d)", model)
    scale = float(f"{alpha[1]}.{alpha[2]}") if alpha else 1.0
    classes = {"food101": 101, "deepsportradar": 5}.get(
        dataset.lower(), 5 if "fft" in model or "tfs" in model else 1000
    )
    net = Net(height, width, channels)
    if "ST Fd" in model:
        return st_fdmobilenet(net, classes)
    if family == "st_mnistv1":
        return st_mnist(net)
    if family == "st_yololcv1":
        return st_yolo_lc(net)
    if family == "yolov2t":
        return tiny_yolo_v2(net)
    if family in ("mobilenetv1", "fdmobilenet"):
        is_fast = family == "fdmobilenet"
        return mobilenet_v1(net, 0.25 if is_fast else scale, classes, FD if is_fast else V1)
    if family == "mobilenetv2":
        return mobilenet_v2(net, scale, classes)
    if family == "squeezenetv11":
        return squeezenet(net, classes)
    if "resnet8" in model:
        return resnet8(net)
    return resnet50_v2(net, classes) if family == "resnet50v2" else None


def main() -> None:
    """Print rows and medians."""
    with gzip.open(Path(sys.argv[1]) / "st_memory.csv.gz", "rt", encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file) if row["series"] == "STM32H7" and row["format"] == "Int8"]
    rows = []
    for row in table:
        graph = graph_of(row["model"], row["dataset"], row["input"])
        if graph is not None:
            rows.append((row, row["model"].split("/")[1].split(":")[0], graph))
    flash = []
    for row, _, graph in rows:
        memory, ram = st_edge_ai.st_memory(graph), float(row["activation_ram_kib"] or row["internal_ram_kib"])
        total = float(row["total_flash_kib"] or "nan")
        flash.append((memory.weight_bytes + memory.code_bytes) / 1024 / total - 1)
        print(f"{row['model'][-48:]:48} {row['input']:10} RAM {ram:8.1f} KiB, "
              f"{memory.activation_bytes / 1024 / ram - 1:+6.1%}; weights {memory.weight_bytes / 1024:9.2f} of "
              f"{float(row['weights_flash_kib']):9.2f} KiB, flash {flash[-1]:+6.1%}")  # fmt: skip
    print(f"{len(rows)} of {len(table)} rows; median error of flash {np.nanmedian(np.abs(flash)):.1%}")
    shipped = dict(st_edge_ai._SHARED)
    print(f"median error of activations {np.median(np.abs(errors(rows))):.1%}, worst {max(errors(rows), key=abs):+.1%}")
    choices = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    table_of_errors = []
    for choice in choices:
        st_edge_ai._SHARED.update(choice)
        table_of_errors.append(np.abs(errors(rows)))
    st_edge_ai._SHARED.update(shipped)
    everything, families = np.array(table_of_errors), np.array([family for _, family, _ in rows])
    held_out: list[float] = []
    for family in dict.fromkeys(families):
        known = everything[:, families != family]
        best = int(np.argmin(np.median(known, axis=1) + 0.2 * known.mean(axis=1)))
        unseen = everything[best, families == family]
        held_out += list(unseen)
        print(f"  without {family}: {list(choices[best].values())}, median {np.median(unseen):.1%}")
    print(f"median error of activations by families left out {np.median(held_out):.1%}")


def errors(rows: Sequence[tuple[dict[str, str], str, TflmGraph]]) -> list[float]:
    """Relative errors of the activations."""
    return [
        st_edge_ai.st_memory(graph).activation_bytes
        / 1024
        / float(row["activation_ram_kib"] or row["internal_ram_kib"])
        - 1
        for row, _, graph in rows
    ]


if __name__ == "__main__":
    main()
