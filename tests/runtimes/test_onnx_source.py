"""An `.onnx` file is quantised without its model, and compared with itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import edge_opt as eo
from edge_opt import compress
from edge_opt.errors import InvalidInput
from edge_opt.model_files.file_model import OnnxModel, load_onnx
from onnx_graphs import node, write

BATCHES = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def net(path: Path, opset: int = 17) -> OnnxModel:
    """Two convolutions and a product, without names of modules."""
    dice = np.random.default_rng(0)
    shapes = {"w": (8, 3, 3, 3), "b": (8,), "v": (8, 8, 3, 3), "h": (8, 4)}
    nodes = [
        node("Conv", "x w b", "c"), node("Relu", "c", "r"), node("Conv", "r v", "d"),
        node("GlobalAveragePool", "d", "p"), node("Flatten", "p", "f"), node("MatMul", "f h", "y"),
    ]  # fmt: skip
    nodes[0].name = "stem"
    weights = {name: dice.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return load_onnx(write(path, nodes, {"x": ("N", 3, 8, 8)}, ["y"], weights, opset=opset))


@pytest.mark.parametrize("opset", [11, 17])
def test_static_int8_of_a_file(tmp_path: Path, opset: int) -> None:
    done = compress.convert(
        net(tmp_path / "net.onnx", opset), (1, 3, 8, 8), calibration=BATCHES, output=tmp_path / "out"
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["net.int8.onnx"]
    assert [(layer.path, layer.precision) for layer in done.layers] == [
        ("stem", "int8"), ("Conv_2", "int8"), ("MatMul_5", "int8"),
    ]  # fmt: skip
    assert [entry.samples for entry in done.agreement.by_batch if not entry.refused] == [1, 8, 512]
    assert done.original_bytes == (tmp_path / "net.onnx").stat().st_size
    found = eo.profile(load_onnx(done.path), (1, 3, 8, 8)).totals
    # 6x6 of 8 channels, 4x4 of 8 channels, and the product
    assert found.macs == 36 * 8 * 27 + 16 * 8 * 72 + 8 * 4
    assert found.param_bytes == 8 * 27 + 8 * 4 + 8 * 72 + 8 * 4  # biases have four bytes each


def test_a_layer_of_a_file_is_spared_by_its_path(tmp_path: Path) -> None:
    done = compress.convert(net(tmp_path / "net.onnx"), (1, 3, 8, 8), calibration=BATCHES, keep_float=["Conv_2"])
    assert {layer.path: layer.precision for layer in done.layers}["Conv_2"] == "fp32"


def test_dynamic_int8_needs_no_calibration(tmp_path: Path) -> None:
    done = compress.convert(net(tmp_path / "net.onnx"), (2, 3, 8, 8), scheme="dynamic")
    assert {layer.path: layer.precision for layer in done.layers}["MatMul_5"] == "int8"
    assert eo.profile(load_onnx(done.path), (2, 3, 8, 8)).totals.params == 8 * 27 + 8 + 8 * 72 + 32


def test_weights_of_four_bits_take_half_a_byte(tmp_path: Path) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)}
    path = write(tmp_path / "m.onnx", [node("MatMul", "x w", "y")], {"x": ("N", 64)}, ["y"], weights)
    done = compress.convert(load_onnx(path), (3, 64), "int4")
    found = eo.profile(load_onnx(done.path), (3, 64))
    assert (found.totals.macs, found.totals.params, found.totals.param_bytes) == (3 * 64 * 32, 64 * 32, 64 * 32 // 2)
    assert found.totals.buffer_bytes == 64 * 32 // 32 * 4  # a scale for each group of 32


def test_a_file_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    done = compress.convert(net(tmp_path / "net.onnx"), (2, 3, 8, 8), scheme="dynamic")
    with pytest.raises(InvalidInput, match="is quantized already"):
        compress.convert(load_onnx(done.path), (2, 3, 8, 8), scheme="dynamic")


@pytest.mark.parametrize(("precision", "runtime"), [("fp16", "onnxruntime"), ("int8", "litert")])
def test_what_a_file_cannot_become_is_one_sentence(tmp_path: Path, precision: str, runtime: str) -> None:
    with pytest.raises(InvalidInput, match=f"not {precision} for {runtime}"):
        compress.convert(net(tmp_path / "net.onnx"), (1, 3, 8, 8), precision, runtime, calibration=BATCHES)
