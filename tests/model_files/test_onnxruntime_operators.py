"""Operators that ONNX Runtime fuses or adds, with the arithmetic from their dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import edge_opt as eo
from edge_opt.model_files.file_model import load_onnx
from onnx_graphs import node, write

MS = "com.microsoft"


def profiled(path: Path, nodes: list[Any], shapes: dict[str, Any], weights: dict[str, Any]) -> eo.ModelProfile:
    file = write(path / "m.onnx", nodes, shapes, ["y"], weights, domains=[MS])
    return eo.profile(load_onnx(file), [*shapes.values()])


def test_attention_with_its_projections(tmp_path: Path) -> None:
    nodes = [node("Attention", "x w b", "y", domain=MS, num_heads=2)]
    found = profiled(tmp_path, nodes, {"x": (1, 6, 8)}, {"w": (8, 24), "b": (24,)})
    # queries, keys and values of 6 rows; then scores and sums over 6 x 6 pairs of 8 columns
    assert found.totals.macs == 6 * 8 * 24 + 2 * 6 * 6 * 8
    assert found.totals.params == 8 * 24 + 24


def test_grouped_attention_reads_its_cache(tmp_path: Path) -> None:
    nodes = [node("GroupQueryAttention", "q k v pk pv - -", "y nk nv", domain=MS, num_heads=4, kv_num_heads=2)]
    shapes = {"q": (1, 1, 32), "k": (1, 1, 16), "v": (1, 1, 16), "pk": (1, 2, 9, 8), "pv": (1, 2, 9, 8)}
    found = profiled(tmp_path, nodes, shapes, {})
    assert found.totals.macs == 2 * 4 * 10 * 8  # 4 heads of one query see 10 positions of 8 columns, twice


def test_a_norm_behind_a_sum(tmp_path: Path) -> None:
    nodes = [
        node("SkipLayerNormalization", "x s g b", "y", domain=MS),
    ]
    found = profiled(tmp_path, nodes, {"x": (2, 5, 8), "s": (2, 5, 8)}, {"g": (8,), "b": (8,)})
    assert [one.op for one in found.operators] == ["aten.add", "aten.layer_norm"]


@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False), (2, False)])
def test_products_with_weights_of_few_bits(tmp_path: Path, bits: int, zeros: bool) -> None:
    rows, columns, group = 24, 64, 32
    packed = np.zeros((rows, columns // group, group * bits // 8), np.uint8)
    weights = {"w": packed, "s": np.ones((rows * 2,), np.float32), "z": np.zeros((rows,), np.uint8)}
    inputs = "x w s z" if zeros else "x w s"
    nodes = [node("MatMulNBits", inputs, "y", domain=MS, N=rows, K=columns, bits=bits, block_size=group)]
    found = profiled(tmp_path, nodes, {"x": (3, columns)}, {name: weights[name] for name in inputs.split()[1:]})
    assert (found.totals.macs, found.totals.params) == (3 * rows * columns, rows * columns)
    assert found.totals.param_bytes == rows * columns * bits // 8
    assert found.totals.flops == 2 * 3 * rows * columns + 2 * rows * columns  # each weight: minus zero, times scale


def test_constants_of_four_bits(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.INT4, (6, 4), np.zeros(24, np.int8))
    nodes = [node("DequantizeLinear", "w s", "f"), node("MatMul", "x f", "y")]
    from onnx import load, save

    path = write(tmp_path / "m.onnx", nodes, {"x": (2, 6)}, ["y"], {"s": np.array(0.1, np.float32)}, opset=21)
    model = load(path)
    model.graph.initializer.append(weight)
    save(model, path)
    found = eo.profile(load_onnx(path), (2, 6))
    assert (found.totals.macs, found.totals.params, found.totals.param_bytes) == (2 * 24, 24, 12)


def test_weights_inside_a_branch_are_parameters(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, (4, 4), np.ones(16, np.float32))
    then = helper.make_graph(
        [node("MatMul", "x w", "t")], "b", [], [helper.make_tensor_value_info("t", 1, None)], [weight]
    )
    other = helper.make_graph([node("Relu", "x", "e")], "b", [], [helper.make_tensor_value_info("e", 1, None)])
    nodes = [node("If", "k", "y", then_branch=then, else_branch=other)]
    found = profiled(tmp_path, nodes, {"x": (2, 4)}, {"k": np.array(True)})
    assert (found.totals.macs, found.totals.params) == (2 * 16, 16)


def test_an_average_of_bytes_without_a_sign(tmp_path: Path) -> None:
    scale, zero = np.array(0.1, np.float32), np.array(0, np.uint8)
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "f"),
             node("GlobalAveragePool", "f", "p"), node("QuantizeLinear", "p s z", "r"),
             node("DequantizeLinear", "r s z", "y")]  # fmt: skip
    found = profiled(tmp_path, nodes, {"x": (1, 4, 5, 5)}, {"s": scale, "z": zero})
    pool = next(one for one in found.operators if "pool" in one.op)
    assert pool.inputs[0].nbytes == 100


def test_files_that_onnxruntime_optimised_are_read(tmp_path: Path) -> None:
    """What the runtime fuses for this machine, saved by the runtime itself."""
    import onnxruntime

    dice = np.random.default_rng(0)
    shapes = {"w": (16, 16, 3, 3), "b": (16,), "v": (16, 16, 1, 1), "h": (16, 4)}
    nodes = [node("Conv", "x w b", "c", pads=[1] * 4), node("Relu", "c", "r"), node("Conv", "r v", "d"),
             node("Add", "d r", "a"), node("GlobalAveragePool", "a", "p"), node("Flatten", "p", "f"),
             node("MatMul", "f h", "y")]  # fmt: skip
    weights = {name: dice.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    path = write(tmp_path / "m.onnx", nodes, {"x": (1, 16, 8, 8)}, ["y"], weights)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found = eo.profile(load_onnx(tmp_path / "optimised.onnx"), (1, 16, 8, 8))
    assert found.totals.macs == 64 * 16 * 16 * (9 + 1) + 16 * 4
    assert not found.unpriced


@pytest.mark.parametrize("directions", [1, 2])
def test_a_quantised_lstm_has_the_operations_of_its_hidden_units(tmp_path: Path, directions: int) -> None:
    steps, batch, inputs, hidden = 7, 3, 5, 6
    byte = {name: np.ones((directions, rows, 4 * hidden), np.uint8) for name, rows in (("w", inputs), ("r", hidden))}
    scales = {name: np.ones(directions, np.float32) for name in ("ws", "rs")}
    zeros = {name: np.zeros(directions, np.uint8) for name in ("wz", "rz")}
    nodes = [node("DynamicQuantizeLSTM", "x w r b - - - - ws wz rs rz", "y h c", domain=MS, hidden_size=hidden,
                  direction="bidirectional" if directions == 2 else "forward")]  # fmt: skip
    biases = {"b": (directions, 8 * hidden)}
    found = profiled(tmp_path, nodes, {"x": (steps, batch, inputs)}, {**byte, **biases, **scales, **zeros}).totals
    rows = steps * batch * directions
    assert found.macs == rows * 4 * hidden * (inputs + hidden)
    # four gates: sums of two products, two biases each; three sigmoids of 4, two tanhs, and 4 for cell and output
    assert found.flops - 2 * found.macs == rows * hidden * (4 + 8 + 3 * 4 + 2 + 4)
