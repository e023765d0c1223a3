"""Costs of ONNX graphs, node by node, with the arithmetic from their dimensions."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import AttributeProto, TensorProto, helper, numpy_helper

import edge_opt as eo
from edge_opt.errors import InvalidInput, TraceFailed
from edge_opt.model_files.file_model import load_onnx
from edge_opt.model_files.graph_interpreter import GraphInterpreter
from onnx_graphs import node, write


def profiled(path: str, *shapes: Any, **named: Any) -> eo.ModelProfile:
    return eo.profile(load_onnx(path), list(shapes) or None, kwargs=named)


def test_a_convolution_with_uneven_padding(tmp_path: Path) -> None:
    nodes = [node("Conv", "x w b", "y", pads=[0, 0, 1, 1], strides=[2, 2], group=2)]
    path = write(tmp_path / "m.onnx", nodes, {"x": ("N", 4, 8, 8)}, ["y"], {"w": (6, 2, 3, 3), "b": (6,)})
    # 2 images x 6 channels x 4x4 outputs (8 + 1 - 3) // 2 + 1, each 2 channels x 3x3
    assert profiled(path, (2, 4, 8, 8)).totals.macs == 2 * 6 * 16 * 2 * 9


def test_same_padding_follows_the_input(tmp_path: Path) -> None:
    nodes = [node("Conv", "x w", "y", auto_pad="SAME_UPPER", strides=[2, 2])]
    path = write(tmp_path / "m.onnx", nodes, {"x": (1, 3, 15, 15)}, ["y"], {"w": (8, 3, 3, 3)})
    assert profiled(path, (1, 3, 15, 15)).totals.macs == 8 * 8 * 8 * 3 * 9


def test_a_transposed_convolution_counts_taps_of_its_input(tmp_path: Path) -> None:
    nodes = [node("ConvTranspose", "x w", "y", strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])]
    path = write(tmp_path / "m.onnx", nodes, {"x": (1, 8, 5, 5)}, ["y"], {"w": (8, 4, 3, 3)})
    found = profiled(path, (1, 8, 5, 5))
    assert found.totals.macs == 8 * 25 * 4 * 9
    assert found.operators[-1].outputs[0].shape == (1, 4, 10, 10)


def test_an_lstm_in_both_directions(tmp_path: Path) -> None:
    nodes = [node("LSTM", "x w r b", "y h c", direction="bidirectional", hidden_size=6)]
    weights = {"w": (2, 24, 5), "r": (2, 24, 6), "b": (2, 48)}
    found = profiled(write(tmp_path / "m.onnx", nodes, {"x": (7, 3, 5)}, ["y", "h", "c"], weights), (7, 3, 5))
    assert found.totals.macs == 7 * 3 * 2 * 24 * (5 + 6)
    assert found.totals.params == 2 * (24 * 5 + 24 * 6 + 48)


def test_shapes_worked_out_in_the_graph_follow_the_input(tmp_path: Path) -> None:
    """Shape, Gather and Concat make the shape of a Reshape: none of them is work of the model."""
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Unsqueeze", "n axis", "n1"),
        node("Concat", "n1 rest", "t", axis=0), node("Reshape", "x t", "flat"), node("MatMul", "flat w", "y"),
    ]  # fmt: skip
    weights = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1]), "w": (12, 5)}
    path = write(tmp_path / "m.onnx", nodes, {"x": ("N", 3, 4)}, ["y"], weights)
    found = profiled(path, (7, 3, 4))
    assert found.totals.macs == 7 * 12 * 5
    assert [one.op for one in found.operators] == ["aten.reshape", "aten.mm"]
    assert found.totals.params == 12 * 5


def test_values_are_dropped_after_their_last_reader(tmp_path: Path) -> None:
    nodes = [node("Relu", "x", "a"), node("Relu", "a", "b"), node("Relu", "b", "c"), node("Relu", "c", "y")]
    found = profiled(write(tmp_path / "m.onnx", nodes, {"x": (1, 100)}, ["y"]), (1, 100))
    assert found.peak.live_bytes == 2 * 400  # what one node reads and what it makes
    assert found.peak.planner_bytes == 2 * 400


def test_an_operator_without_a_rule_is_listed_and_never_zero(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N", 3])]
    nodes = [node("Magic", "x", "a", domain="my.ops"), node("Relu", "a", "y")]
    path = write(tmp_path / "m.onnx", nodes, {"x": ("N", 8)}, ["y"], values=values, domains=["my.ops"])
    found = profiled(path, (4, 8))
    assert [one.op for one in found.unpriced] == ["onnx_file.my_ops_Magic"]
    assert found.totals.is_lower_bound
    assert found.operators[-1].outputs[0].shape == (4, 3)


def test_an_unknown_operator_of_unknown_shape_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Magic", "x", "a", domain="my.ops"), node("Relu", "a", "y")],
                 {"x": ("N", 8)}, ["y"], domains=["my.ops"])  # fmt: skip
    with pytest.raises(TraceFailed, match="my.ops:Magic node 'a': there is no rule for it"):
        profiled(path, (4, 8))


def _body(names: str, outputs: str, *nodes: Any) -> Any:
    def value(text: str) -> Any:
        name, _, kind = text.partition(":")
        return helper.make_tensor_value_info(name, int(kind or 1), None)

    return helper.make_graph(list(nodes), "b", [value(n) for n in names.split()], [value(n) for n in outputs.split()])


def test_a_loop_is_counted_as_often_as_it_runs(tmp_path: Path) -> None:
    body = _body("i:7 c:9 s", "d:9 t", node("Identity", "c", "d"), node("MatMul", "s w", "t"))
    path = write(tmp_path / "m.onnx", [node("Loop", "n - x", "y", body=body)], {"x": (2, 4)}, ["y"],
                 {"n": np.array(5), "w": (4, 4)})  # fmt: skip
    assert profiled(path, (2, 4)).totals.macs == 5 * 2 * 4 * 4


def test_the_first_round_of_a_loop_counts_also_where_its_state_is_known(tmp_path: Path) -> None:
    body = _body("i:7 c:9 s", "d:9 t", node("Identity", "c", "d"), node("MatMul", "s w", "m"), node("Add", "m x", "t"))
    path = write(tmp_path / "m.onnx", [node("Loop", "n - z", "y", body=body)], {"x": (2, 4)}, ["y"],
                 {"n": np.array(5), "w": (4, 4), "z": np.zeros((2, 4), np.float32)})  # fmt: skip
    found = profiled(path, (2, 4)).totals
    assert (found.macs, found.flops) == (5 * 2 * 4 * 4, 5 * (2 * 32 + 8))


def test_a_loop_of_thousands_of_iterations_is_counted(tmp_path: Path) -> None:
    body = _body("i:7 c:9 s", "d:9 t", node("Identity", "c", "d"), node("MatMul", "s w", "t"))
    path = write(tmp_path / "m.onnx", [node("Loop", "n - x", "y", body=body)], {"x": (2, 4)}, ["y"],
                 {"n": np.array(5_000), "w": (4, 4)})  # fmt: skip
    assert profiled(path, (2, 4)).totals.macs == 5_000 * 2 * 4 * 4


def test_a_loop_beyond_the_limit_is_refused_with_its_count(tmp_path: Path) -> None:
    body = _body("i:7 c:9 s", "d:9 t", node("Identity", "c", "d"), node("Relu", "s", "t"))
    path = write(tmp_path / "m.onnx", [node("Loop", "n - x", "y", body=body)], {"x": (2, 4)}, ["y"],
                 {"n": np.array(15_000)})  # fmt: skip
    with pytest.raises(TraceFailed, match="it runs 15,000 iterations of 2 nodes, and at most 25,000 nodes"):
        profiled(path, (2, 4))


def test_loops_in_a_loop_share_one_limit(tmp_path: Path) -> None:
    inner = _body("j:7 e:9 u", "f:9 v", node("Identity", "e", "f"), node("Relu", "u", "v"))
    outer = _body("i:7 c:9 s", "d:9 t", node("Identity", "c", "d"), node("Loop", "n - s", "t", body=inner))
    path = write(tmp_path / "m.onnx", [node("Loop", "n - x", "y", body=outer)], {"x": (2, 4)}, ["y"],
                 {"n": np.array(300)})  # fmt: skip
    # 300 x (2 + 300 x 2) nodes
    with pytest.raises(TraceFailed, match="it runs 300 iterations of 602 nodes, and at most 25,000 nodes"):
        profiled(path, (2, 4))


def _calling(name: str, called: str, times: int, domain: str = "f") -> Any:
    """A function that calls another one after the other; the last one in the row is an operator of ONNX."""
    names = ["a", *(f"v{place}" for place in range(times - 1)), "b"]
    nodes = [helper.make_node(called, [one], [other], domain=domain) for one, other in pairwise(names)]
    return helper.make_function("f", name, ["a"], ["b"], nodes, [helper.make_opsetid(one, 20) for one in ("", "f")])


@pytest.mark.parametrize(("times", "is_followed"), [(3, True), (10, False)])
def test_functions_that_call_functions_share_one_limit(tmp_path: Path, times: int, is_followed: bool) -> None:
    calls = [_calling(f"F{place}", f"F{place + 1}", times) for place in range(5)]
    graph = helper.make_graph([helper.make_node("F0", ["x"], ["y"], domain="f")], "g",
                              [helper.make_tensor_value_info("x", 1, [2, 4])],
                              [helper.make_tensor_value_info("y", 1, None)])  # fmt: skip
    opsets = [helper.make_opsetid(one, 20) for one in ("", "f")]
    model = helper.make_model(graph, opset_imports=opsets, functions=[*calls, _calling("F5", "Relu", 2, "")])
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    if is_followed:
        assert profiled(str(path), (2, 4)).totals.flops == 3**5 * 2 * 8
    else:
        # 10 + 100 + ... + 10^5 calls, and two nodes in each of the last
        with pytest.raises(TraceFailed, match="the file executes more than 25,000 nodes"):
            profiled(str(path), (2, 4))


def test_constants_are_worked_out_until_it_is_too_much(tmp_path: Path) -> None:
    names = ["w", *(f"k{place}" for place in range(60))]
    nodes = [node("Neg", one, other) for one, other in pairwise(names)]
    path = write(tmp_path / "m.onnx", [*nodes, node("Add", f"x {names[-1]}", "y")], {"x": (1, 4)}, ["y"],
                 {"w": (1 << 14, 4)})  # fmt: skip
    model = load_onnx(path)
    run = GraphInterpreter(model.plan, {"x": torch.empty(1, 4, device="meta")})
    run.whole()
    # One for each of 32 rounds of 2^16 elements; the shapes of the others are enough.
    assert sum(name in run.constant_values for name in names[1:]) == (1 << 21) // (1 << 16)


def test_inputs_that_do_not_fit_are_named_without_torchs_compiler(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Add", "x w", "y")], {"x": (2, 4)}, ["y"], {"w": (3,)})
    with pytest.raises(TraceFailed, match=r"its inputs of \(2, 4\) and \(3,\) do not fit each other"):
        profiled(path, (2, 4))


@pytest.mark.parametrize("made", [
    node("Split", "x", "y", num_outputs=10**12),  # a list of as many pieces would fill the memory
    node("Two", "x", "y"),
])  # fmt: skip
def test_what_a_node_says_of_itself_is_not_believed(tmp_path: Path, made: Any) -> None:
    made.op_type = made.op_type.replace("Two", "Two\nlines")
    with pytest.raises(TraceFailed) as caught:
        profiled(write(tmp_path / "m.onnx", [made], {"x": (4,)}, ["y"]), (4,))
    assert "\n" not in str(caught.value)


def test_a_scan_is_counted_row_by_row(tmp_path: Path) -> None:
    body = _body("s r", "t o", node("Add", "s r", "t"), node("MatMul", "t w", "o"))
    path = write(tmp_path / "m.onnx", [node("Scan", "z x", "e y", body=body, num_scan_inputs=1)],
                 {"z": (1, 4), "x": (6, 1, 4)}, ["y"], {"w": (4, 3)})  # fmt: skip
    found = profiled(path, (1, 4), (6, 1, 4))
    assert found.totals.macs == 6 * 4 * 3


def test_a_branch_is_the_one_that_is_known_to_run(tmp_path: Path) -> None:
    branches = {"then_branch": _body("", "t", node("MatMul", "x w", "t")),
                "else_branch": _body("", "e", node("Relu", "x", "e"))}  # fmt: skip
    nodes = [node("If", "k", "y", **branches)]
    path = write(tmp_path / "m.onnx", nodes, {"x": (2, 4)}, ["y"], {"k": np.array(True), "w": (4, 4)})
    assert profiled(path, (2, 4)).totals.macs == 2 * 4 * 4


def test_a_branch_that_depends_on_the_input_is_refused(tmp_path: Path) -> None:
    branches = {
        "then_branch": _body("", "t", node("Relu", "x", "t")),
        "else_branch": _body("", "e", node("Exp", "x", "e")),
    }
    nodes = [node("ReduceSum", "x", "s", keepdims=0), node("Greater", "s z", "k"), node("If", "k", "y", **branches)]
    path = write(tmp_path / "m.onnx", nodes, {"x": (2, 4)}, ["y"], {"z": np.array(0, np.float32)})
    with pytest.raises(TraceFailed, match="which branch runs depends on values"):
        profiled(path, (2, 4))


@pytest.mark.parametrize(("shape", "why"), [((1, 3, 9, 9), "the file takes 1x3x8x8"), ((1, 3, 8), "the file takes")])
def test_an_input_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...], why: str) -> None:
    path = write(tmp_path / "m.onnx", [node("Relu", "x", "y")], {"x": (1, 3, 8, 8)}, ["y"])
    with pytest.raises(InvalidInput, match=why):
        profiled(path, shape)


def test_inputs_go_by_the_names_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("MatMul", "input.1 b", "y")], {"input.1": (2, 3), "b": (3, 4)}, ["y"])
    found = profiled(path, b=((3, 4), "float32"), input_1=((2, 3), "float32"))
    assert found.totals.macs == 2 * 3 * 4
    with pytest.raises(InvalidInput, match="the input 'b' is missing"):
        profiled(path, (2, 3))


def test_a_node_without_a_module_is_a_layer_of_its_own(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="first"), node("Exp", "a", "y")]
    found = profiled(write(tmp_path / "m.onnx", nodes, {"x": (2,)}, ["y"]), (2,))
    assert [(one.path, one.kind) for one in found.trace.modules[1:]] == [("first", "Relu"), ("Exp_1", "Exp")]


def test_names_of_the_older_exporter_are_paths(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="/layer1/layer1.0/down/down.0/MatMul")]
    found = profiled(write(tmp_path / "m.onnx", nodes, {"x": (2, 3)}, ["y"], {"w": (3, 4)}), (2, 3))
    assert found.trace.modules[-1].path == "layer1.0.down.0"


def test_functions_of_a_file_are_read_with_their_attributes(tmp_path: Path) -> None:
    from onnx import load, save

    path = write(tmp_path / "m.onnx", [node("Twice", "x", "y", domain="own", slope=0.5)], {"x": (2, 3)}, ["y"],
                 domains=["own"])  # fmt: skip
    model = load(path)
    inner = helper.make_node("LeakyRelu", ["a"], ["b"])
    inner.attribute.append(AttributeProto(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="slope"))
    body = [inner, node("Add", "b b", "c")]
    model.functions.append(
        helper.make_function("own", "Twice", ["a"], ["c"], body, [helper.make_opsetid("", 20)], ["slope"])
    )
    save(model, path)
    assert [one.op for one in profiled(path, (2, 3)).operators] == ["aten.leaky_relu", "aten.add"]


def test_weights_of_one_name_are_counted_once(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "a"), node("MatMul", "a w", "y")]
    found = profiled(write(tmp_path / "m.onnx", nodes, {"x": (2, 4)}, ["y"], {"w": (4, 4)}), (2, 4))
    assert (found.totals.params, found.totals.macs) == (16, 2 * 2 * 16)


def test_statistics_of_a_norm_are_buffers(tmp_path: Path) -> None:
    nodes = [node("BatchNormalization", "x s b m v", "y")]
    found = profiled(
        write(tmp_path / "m.onnx", nodes, {"x": (2, 4, 3, 3)}, ["y"], dict.fromkeys("sbmv", (4,))), (2, 4, 3, 3)
    )
    assert (found.totals.params, found.totals.buffer_bytes) == (8, 8 * 4)


def test_trees_are_listed_with_the_shape_of_their_result(tmp_path: Path) -> None:
    trees = helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml",
                             classlabels_int64s=[0, 1, 2])  # fmt: skip
    path = write(
        tmp_path / "m.onnx", [trees, node("Exp", "scores", "y")], {"x": ("N", 8)}, ["y"], domains=["ai.onnx.ml"]
    )
    found = profiled(path, (4, 8))
    assert [one.op for one in found.unpriced] == ["onnx_file.ai_onnx_ml_TreeEnsembleClassifier"]
    assert found.operators[-1].outputs[0].shape == (4, 3)


def test_a_linear_model_of_scikit_learn_has_its_weights_in_attributes(tmp_path: Path) -> None:
    linear = helper.make_node("LinearRegressor", ["x"], ["y"], domain="ai.onnx.ml", coefficients=[0.5] * 16,
                              intercepts=[1.0, 2.0], targets=2)  # fmt: skip
    found = profiled(write(tmp_path / "m.onnx", [linear], {"x": ("N", 8)}, ["y"], domains=["ai.onnx.ml"]), (4, 8))
    assert (found.totals.macs, found.totals.params) == (4 * 8 * 2, 8 * 2 + 2)


@pytest.mark.parametrize(("weights", "params"), [({}, 4 * 3 + 3), ({"v": (4, 4)}, 4 * 4)])
def test_weights_in_nodes_are_parameters_where_there_are_no_others(
    tmp_path: Path, weights: dict[str, tuple[int, ...]], params: int
) -> None:
    nodes = [helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.ones(shape, np.float32)))
             for name, shape in (("w", (4, 3)), ("b", (3,)), ("one", ()))]  # fmt: skip
    nodes += [node("Mul", "x one", "m"), node("MatMul", "m v" if weights else "m w", "a")]
    nodes += [node("Add", "a b" if not weights else "a one", "y")]
    found = eo.profile(load_onnx(write(tmp_path / "m.onnx", nodes, {"x": (2, 4)}, ["y"], weights)), (2, 4))
    assert (found.totals.params, found.totals.param_bytes) == (params, 4 * params)
    assert found.totals.macs == 2 * (4 * 4 if weights else 4 * 3)
