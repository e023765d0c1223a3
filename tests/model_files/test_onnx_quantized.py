"""Quantised files at their real widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import edge_opt as eo
from edge_opt.model_files.file_model import load_onnx
from onnx_graphs import node, write

SCALE = np.array(0.1, np.float32)
ZERO = np.array(0, np.int8)


def qdq(path: Path, middle: list[object], **weights: object) -> eo.ModelProfile:
    """A convolution of bytes between steps from and to floats."""
    nodes = [
        node("QuantizeLinear", "x s z", "xq"), node("DequantizeLinear", "xq s z", "xf"),
        node("DequantizeLinear", "w s z", "wf"), node("DequantizeLinear", "b s", "bf"), *middle,
        node("QuantizeLinear", "c s z", "cq"), node("DequantizeLinear", "cq s z", "y"),
    ]  # fmt: skip
    given = {"w": np.ones((8, 4, 3, 3), np.int8), "b": np.ones(8, np.int32), "s": SCALE, "z": ZERO, **weights}
    return eo.profile(load_onnx(write(path, nodes, {"x": (1, 4, 10, 10)}, ["y"], given)), (1, 4, 10, 10))


@pytest.mark.parametrize("middle", [
    [node("Conv", "xf wf bf", "c")],
    [node("Conv", "xf wf bf", "r"), node("Relu", "r", "c")],
])  # fmt: skip
def test_a_convolution_between_steps_is_one_of_bytes(tmp_path: Path, middle: list[object]) -> None:
    found = qdq(tmp_path / "m.onnx", middle)
    [conv] = [one for one in found.operators if one.kind == "conv"]
    assert [one.dtype for one in conv.inputs] == ["int8", "int8", "int32"]
    assert (conv.outputs[0].dtype, conv.outputs[0].nbytes) == ("int8", 8 * 8 * 8)
    assert found.totals.macs == 8 * 64 * 4 * 9
    assert found.totals.param_bytes == 8 * 4 * 9 + 8 * 4  # weights of one byte, biases of four
    assert [one.op for one in found.operators if one.kind == "quantization"] == [
        "onnx_file.quantize",
        "onnx_file.dequantize",
    ]


def test_weights_alone_in_bytes_are_widened_before_use(tmp_path: Path) -> None:
    nodes = [node("DequantizeLinear", "w s z", "wf"), node("MatMul", "x wf", "y")]
    weights = {"w": np.ones((16, 4), np.int8), "s": SCALE, "z": ZERO}
    found = eo.profile(load_onnx(write(tmp_path / "m.onnx", nodes, {"x": (2, 16)}, ["y"], weights)), (2, 16))
    widened = next(one for one in found.operators if one.op == "onnx_file.dequantize")
    assert (widened.inputs[0].nbytes, widened.outputs[0].nbytes) == (64, 4 * 64)
    assert (found.totals.macs, found.totals.param_bytes) == (2 * 16 * 4, 64)


def test_operators_of_bytes_keep_their_widths(tmp_path: Path) -> None:
    nodes = [node("QLinearConv", "x s z w s z s z b", "y")]
    weights = {"w": np.ones((8, 4, 3, 3), np.int8), "b": np.ones(8, np.int32), "s": SCALE, "z": ZERO}
    path = write(tmp_path / "m.onnx", nodes, {"x": (1, 4, 10, 10)}, ["y"], weights, types={"x": TensorProto.INT8})
    found = eo.profile(load_onnx(path), [((1, 4, 10, 10), "int8")])
    assert found.operators[0].outputs[0].nbytes == 8 * 64
    assert found.totals.macs == 8 * 64 * 4 * 9


def test_products_of_integers_grow_to_four_bytes(tmp_path: Path) -> None:
    nodes = [node("DynamicQuantizeLinear", "x", "q s z"), node("MatMulInteger", "q w z", "i"),
             node("Cast", "i", "y", to=1)]  # fmt: skip
    path = write(tmp_path / "m.onnx", nodes, {"x": (2, 16)}, ["y"], {"w": np.ones((16, 4), np.int8)})
    found = eo.profile(load_onnx(path), (2, 16))
    product = next(one for one in found.operators if one.kind == "matmul")
    assert [one.dtype for one in product.inputs] == ["uint8", "int8"]
    assert (product.outputs[0].dtype, product.cost.macs) == ("int32", 2 * 16 * 4)


def test_files_of_onnxruntimes_quantiser_are_read(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = write(tmp_path / "m.onnx", [node("MatMul", "x w", "a"), node("Add", "a b", "y")], {"x": ("N", 16)}, ["y"],
                 {"w": (16, 4), "b": (4,)})  # fmt: skip
    quantize_dynamic(path, str(tmp_path / "q.onnx"), weight_type=QuantType.QInt8)
    found = eo.profile(load_onnx(tmp_path / "q.onnx"), (3, 16))
    assert (found.totals.macs, found.totals.params, found.totals.param_bytes) == (3 * 64, 64 + 4, 64 + 4 * 4)
