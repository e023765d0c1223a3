"""Costs of `.tflite` graphs, operator by operator, with the arithmetic from their dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_opt as eo
from edge_opt.errors import InvalidInput, TraceFailed, UnreadableModel
from edge_opt.loading import load_model
from edge_opt.measuring.runtime_profile import map_runtime_profile, read_runtime_profile
from edge_opt.model_files.file_model import load_tflite
from tflite_graphs import Graph, Op, Scaled, conv, write

RELU = 1


def profiled(path: str, *shapes: Any) -> eo.ModelProfile:
    return eo.profile(load_tflite(path), list(shapes) or None)


def f32(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def test_a_convolution_with_channels_last(tmp_path: Path) -> None:
    op = conv("CONV_2D", "x w b", "y", strideW=2, strideH=2, fusedActivationFunction=RELU)
    tensors = {"x": ((1, 15, 15, 3), "float32"), "w": f32(8, 3, 3, 3), "b": f32(8), "y": ((1, 8, 8, 8), "float32")}
    found = profiled(write(tmp_path / "m.tflite", Graph([op], tensors, "x", "y")), (1, 15, 15, 3))
    # "SAME": 8x8 results of 8 channels, each 3x3 of 3 channels; then a comparison for each result
    assert (found.totals.macs, found.totals.flops) == (64 * 8 * 27, 2 * 64 * 8 * 27 + 64 * 8 + 64 * 8)
    assert found.totals.params == 8 * 27 + 8
    assert found.peak.live_bytes == 64 * 8 * 4  # the activation works in place, and no view is a copy


def test_a_depthwise_convolution_and_a_grouped_one(tmp_path: Path) -> None:
    ops = [conv("DEPTHWISE_CONV_2D", "x w -", "a", padding=1), conv("CONV_2D", "a v -", "y", padding=1)]
    tensors = {"x": ((1, 6, 6, 4), "float32"), "w": f32(1, 3, 3, 8), "a": ((1, 4, 4, 8), "float32"),
               "v": f32(6, 1, 1, 4), "y": ((1, 4, 4, 6), "float32")}  # fmt: skip
    found = profiled(write(tmp_path / "m.tflite", Graph(ops, tensors, "x", "y")), (1, 6, 6, 4))
    # two filters for each of 4 channels; then 6 filters that see 4 of 8 channels
    assert found.totals.macs == 16 * 8 * 9 + 16 * 6 * 4


def test_integers_keep_their_width(tmp_path: Path) -> None:
    ops = [
        conv("CONV_2D", "x w b", "c"),
        Op("ADD", "c c", "d", "AddOptions"),
        Op("SOFTMAX", "d", "y", "SoftmaxOptions"),
    ]
    tensors = {"x": ((1, 8, 8, 4), "int8"), "w": np.ones((6, 3, 3, 4), np.int8), "b": np.ones(6, np.int32),
               **dict.fromkeys("cdy", ((1, 8, 8, 6), "int8"))}  # fmt: skip
    found = eo.profile(
        load_tflite(write(tmp_path / "m.tflite", Graph(ops, tensors, "x", "y"))), [((1, 8, 8, 4), "int8")]
    )
    product = next(one for one in found.operators if one.kind == "conv")
    assert [one.dtype for one in product.inputs] == ["int8", "int8", "int32"]
    assert found.totals.macs == 64 * 6 * 36
    assert found.totals.param_bytes == 6 * 36 + 6 * 4
    assert {one.outputs[0].dtype for one in found.operators} == {"int8"}
    assert not found.unpriced


@pytest.mark.parametrize(("kind", "width"), [("int8", 1.0), ("int4", 0.5)])
def test_weights_alone_in_integers_are_multiplied_as_such(tmp_path: Path, kind: str, width: float) -> None:
    weights = ((4, 16), kind, bytes(int(64 * width)))
    tensors = {"x": ((2, 16), "float32"), "w": weights, "y": ((2, 4), "float32")}
    op = Op("FULLY_CONNECTED", "x w -", "y", "FullyConnectedOptions")
    found = profiled(write(tmp_path / "m.tflite", Graph([op], tensors, "x", "y")), (2, 16))
    product = next(one for one in found.operators if one.kind == "matmul")
    assert (product.inputs[1].dtype, product.inputs[1].nbytes) == (kind, 64 * width)
    assert (found.totals.macs, found.totals.params, found.totals.param_bytes) == (2 * 64, 64, 64 * width)
    assert found.operators[-1].outputs[0].dtype == "float32"


def test_halves_are_widened_once_and_counted_as_halves(tmp_path: Path) -> None:
    tensors = {"x": ((2, 16), "float32"), "h": np.ones((4, 16), np.float16), "w": ((4, 16), "float32"),
               "y": ((2, 4), "float32")}  # fmt: skip
    ops = [Op("DEQUANTIZE", "h", "w"), Op("FULLY_CONNECTED", "x w -", "y", "FullyConnectedOptions")]
    model = load_tflite(write(tmp_path / "m.tflite", Graph(ops, tensors, "x", "y")))
    found = eo.profile(model, (2, 16))
    assert [one.kind for one in found.operators] == ["matmul"]
    assert found.totals.param_bytes == 64 * 2
    assert model.arena().persistent_bytes == 64 * 4  # the interpreter keeps the widened copy


def test_an_operator_of_the_users_own_is_listed_and_never_zero(tmp_path: Path) -> None:
    tensors = {"x": ((2, 8), "float32"), "a": ((2, 3), "float32"), "y": ((2, 3), "float32")}
    graph = Graph([Op("Magic", "x", "a"), Op("RELU", "a", "y")], tensors, "x", "y")
    found = profiled(write(tmp_path / "m.tflite", graph), (2, 8))
    assert [one.op for one in found.unpriced] == ["onnx_file.tflite_custom_Magic"]
    assert found.totals.is_lower_bound


def test_a_loop_is_counted_as_often_as_it_runs(tmp_path: Path) -> None:
    number, row = ((), "int32"), ((1, 4), "float32")
    main = Graph([Op("WHILE", "i x", "j y", "WhileOptions", {"condSubgraphIndex": 1, "bodySubgraphIndex": 2})],
                 {"i": np.array(0, np.int32), "x": row, "j": number, "y": row}, "x", "y")  # fmt: skip
    condition = Graph([Op("LESS", "i n", "c")], {"i": number, "x": row, "n": np.array(5, np.int32), "c": ((), "bool")},
                      "i x", "c")  # fmt: skip
    body = Graph([Op("ADD", "i one", "j", "AddOptions"), Op("FULLY_CONNECTED", "x w -", "y", "FullyConnectedOptions")],
                 {"i": number, "x": row, "one": np.array(1, np.int32), "w": f32(4, 4), "j": number, "y": row},
                 "i x", "j y")  # fmt: skip
    found = profiled(write(tmp_path / "m.tflite", main, condition, body), (1, 4))
    assert (found.totals.macs, found.totals.params) == (5 * 16, 16)


def test_a_batch_that_is_open_is_taken_from_the_input(tmp_path: Path) -> None:
    tensors = {"x": ((1, 16), "float32"), "w": f32(4, 16), "y": ((1, 4), "float32")}
    graph = Graph([Op("FULLY_CONNECTED", "x w -", "y", "FullyConnectedOptions")], tensors, "x", "y")
    path = write(tmp_path / "m.tflite", graph, opening={"x": (-1, 16), "y": (-1, 4)})
    assert profiled(path, (7, 16)).totals.macs == 7 * 64
    with pytest.raises(InvalidInput, match="the file takes"):
        profiled(path, (7, 15))
    example = load_model(path).example
    assert example is not None and tuple(example[0][0].shape) == (1, 16)


def test_a_recurrent_layer_multiplies_each_matrix_once_a_step(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(8)] + [f"b{number}" for number in range(4)]
    weights = {name: f32(6, 3 if number < 4 else 6) for number, name in enumerate(names[:8])}
    state = ((1, 6), "float32")
    tensors = {"x": ((1, 5, 3), "float32"), **weights, **{name: f32(6) for name in names[8:]}, "h": state, "c": state,
               "y": ((1, 5, 6), "float32")}  # fmt: skip
    given = " ".join(["x", *names[:8], "-", "-", "-", *names[8:], "-", "-", "h", "c"])
    op = Op("UNIDIRECTIONAL_SEQUENCE_LSTM", given, "y", "UnidirectionalSequenceLSTMOptions")
    found = profiled(write(tmp_path / "m.tflite", Graph([op], tensors, "x", "y")), (1, 5, 3))
    assert found.totals.macs == 5 * 4 * 6 * (3 + 6)
    assert found.totals.params == 4 * 6 * (3 + 6 + 1)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16"])
def test_a_small_input_of_integers_is_read_by_its_shape(tmp_path: Path, kind: str) -> None:
    window = {"filterWidth": 2, "filterHeight": 2, "strideW": 2, "strideH": 2}
    ops = [Op("AVERAGE_POOL_2D", "x", "a", "Pool2DOptions", window), Op("SOFTMAX", "a", "y", "SoftmaxOptions")]
    tensors = {"x": ((1, 4, 4, 2), kind), **dict.fromkeys("ay", ((1, 2, 2, 2), kind))}
    found = profiled(write(tmp_path / "m.tflite", Graph(ops, tensors, "x", "y")), (1, 4, 4, 2))
    assert {one.outputs[0].nbytes for one in found.operators} == {8 * np.dtype(kind).itemsize}


def test_a_result_of_another_type_than_the_file_says_is_refused(tmp_path: Path) -> None:
    tensors = {"x": ((2, 4), "int8"), "y": ((2, 4), "int8")}
    path = write(tmp_path / "m.tflite", Graph([Op("ATAN2", "x x", "y")], tensors, "x", "y"))
    with pytest.raises(TraceFailed, match="its result would be float32, but the file says int8"):
        profiled(path, (2, 4))


def test_what_depends_on_values_is_refused(tmp_path: Path) -> None:
    tensors = {"x": ((4,), "bool"), "y": ((4, 1), "int64")}
    path = write(tmp_path / "m.tflite", Graph([Op("WHERE", "x", "y")], tensors, "x", "y"))
    with pytest.raises(TraceFailed, match="how many places it finds depends on values"):
        eo.profile(load_tflite(path), [((4,), "bool")])


def test_times_of_benchmark_model_go_to_the_modules_behind_the_tensors(tmp_path: Path) -> None:
    block = "pkg.Net/pkg.Block_blocks.0"
    up, down = f"{block}/torch.nn.modules.linear.Linear_up;1", f"{block};;{block}/torch.nn.modules.linear.Linear_down;2"
    row = ((1, 4), "float32")
    tensors = {"x": row, "v": f32(4, 4), "w": f32(4, 4), up: row, down: row}
    ops = [Op("FULLY_CONNECTED", "x v -", up, "FullyConnectedOptions"),
           Op("FULLY_CONNECTED", f"{up} w -", down, "FullyConnectedOptions")]  # fmt: skip
    model = load_tflite(write(tmp_path / "m.tflite", Graph(ops, tensors, "x", down)))
    (tmp_path / "times.csv").write_text(f"""Operator-wise Profiling Info for Regular Benchmark Runs:
============================== Run Order ==============================
node type, first, avg_ms, %, cdf%, mem KB, times called, name
FULLY_CONNECTED, 0.1, 1, 33%, 33%, 0, 1, [{up}]:0
FULLY_CONNECTED, 0.1, 2, 67%, 100%, 0, 1, [{down}]:1
""")
    laid = map_runtime_profile(eo.profile(model, (1, 4)), read_runtime_profile(tmp_path / "times.csv"), model.module_of)
    assert laid.measurement is not None and laid.measurement.layers is not None
    assert {one.path: one.seconds for one in laid.measurement.layers.layers} == {
        "blocks.0.up": pytest.approx(1e-3), "blocks.0.down": pytest.approx(2e-3),
    }  # fmt: skip


def test_a_file_is_measured_by_its_runtime(tmp_path: Path) -> None:
    tensors = {"x": ((2, 16), "float32"), "w": f32(4, 16), "y": ((2, 4), "float32")}
    op = Op("FULLY_CONNECTED", "x w -", "y", "FullyConnectedOptions")
    path = write(tmp_path / "m.tflite", Graph([op], tensors, "x", "y"))
    found = eo.measure(load_model(path).model, (2, 16), min_time_s=0.01, energy=None)
    assert found.latency.median_s > 0
    assert "run by LiteRT" in found.latency.remarks[-1]


@pytest.mark.parametrize(("kind", "options"), [
    ("RESIZE_BILINEAR", "ResizeBilinearOptions"), ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions"),
])  # fmt: skip
def test_a_resize_of_integers_stays_at_their_width(tmp_path: Path, kind: str, options: str) -> None:
    op = Op(kind, "x s", "y", options)
    profiles = {}
    for dtype in ("int8", "float32"):
        tensors = {"x": ((1, 4, 4, 2), dtype), "s": np.array([8, 8], np.int32), "y": ((1, 8, 8, 2), dtype)}
        path = write(tmp_path / f"{dtype}.tflite", Graph([op], tensors, "x", "y"))
        profiles[dtype] = eo.profile(load_tflite(path), [((1, 4, 4, 2), dtype)])
    integers, floats = profiles["int8"], profiles["float32"]
    # 4 x 4 elements of 2 channels are read, 8 x 8 are written, one byte each; no float copy is made
    assert sum(one.cost.bytes_moved for one in integers.operators) == 4 * 4 * 2 + 8 * 8 * 2
    assert integers.peak.live_bytes == 8 * 8 * 2
    assert integers.totals.flops == floats.totals.flops
    assert (integers.totals.flops > 0) == (kind == "RESIZE_BILINEAR")


def test_softmax_may_widen_int8_to_int16(tmp_path: Path) -> None:
    tensors = {"x": Scaled((1, 4), "int8", 0.1, 0), "y": Scaled((1, 4), "int16", 1 / 32768, 0)}
    path = write(tmp_path / "wide.tflite", Graph([Op("SOFTMAX", "x", "y", "SoftmaxOptions", {"beta": 1.0})],
                                                 tensors, "x", "y"))  # fmt: skip
    assert eo.profile(path).trace.modules[0].output_shapes == ((1, 4),)


def test_a_file_whose_input_is_text_is_refused(tmp_path: Path) -> None:
    tensors = {"x": ((4,), "string"), "i": ((2,), "int32"), "y": ((2,), "string")}
    path = write(tmp_path / "text.tflite", Graph([Op("GATHER", "x i", "y", "GatherOptions")], tensors, "x i", "y"))
    with pytest.raises(UnreadableModel, match="text"):
        eo.profile(path)
