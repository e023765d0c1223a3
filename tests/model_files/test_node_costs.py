"""Costs on the nodes of a file, for Netron and Model Explorer; costs on a time line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import checker, load, shape_inference
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput
from edge_opt.model_files.file_model import load_onnx
from edge_opt.model_files.node_costs import node_costs, save_view
from onnx_graphs import node, write


@pytest.fixture
def path(tmp_path: Path) -> str:
    nodes = [node("MatMul", "x w", "a"), node("Relu", "a", "y")]
    nodes[0].name, nodes[1].name = "product", "relu"
    return write(tmp_path / "m.onnx", nodes, {"x": ("N", 16)}, ["y"], {"w": (16, 4)})


def test_a_copy_of_the_file_carries_costs_that_netron_shows(path: str, tmp_path: Path) -> None:
    model = load_onnx(path)
    save_view(model, eo.profile(model, (3, 16)), (3, 16), {}, tmp_path / "costs.onnx")
    copy = load(tmp_path / "costs.onnx")
    checker.check_model(shape_inference.infer_shapes(copy))
    first, second = ({one.key: one.value for one in node.metadata_props} for node in copy.graph.node)
    assert first["edge_opt.macs"] == str(3 * 16 * 4)
    assert second["edge_opt.flops"] == str(3 * 4)
    assert {one.key: one.value for one in copy.metadata_props}["edge_opt.parameters"] == "64"
    assert load_onnx(tmp_path / "costs.onnx") is not None


def test_costs_of_nodes_follow_from_the_inputs_and_add_up(path: str) -> None:
    model = load_onnx(path)
    whole = eo.profile(model, (3, 16))
    eo.profile(model, (5, 16))  # a later profile of other shapes changes nothing
    costs = {node.op: cost for _, node, cost in node_costs(model, (3, 16))}
    assert (costs["MatMul"].macs, costs["Relu"].flops) == (3 * 16 * 4, 3 * 4)
    assert sum(cost.flops for cost in costs.values()) == whole.totals.flops


def test_the_file_itself_is_not_written_over(path: str) -> None:
    model = load_onnx(path)
    with pytest.raises(InvalidInput, match="is the file that was read"):
        save_view(model, eo.profile(model, (3, 16)), (3, 16), {}, path)


def test_model_explorers_node_data_go_by_the_names_of_nodes(path: str, tmp_path: Path) -> None:
    model = load_onnx(path)
    save_view(model, eo.profile(model, (3, 16)), (3, 16), {}, tmp_path / "m.nodes.json")
    data = json.loads((tmp_path / "m.nodes.json").read_text())
    assert data["results"] == {"product": {"value": 2 * 3 * 64}, "relu": {"value": 12}}
    assert [one["stop"] for one in data["gradient"]] == [0, 1]


def test_a_time_line_has_measured_layers_and_memory(tmp_path: Path) -> None:
    found = eo.profile(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU())), (1, 8), measure={"min_time_s": 0.02})
    assert found.measurement is not None and found.measurement.layers is not None
    found.save(tmp_path / "m.trace.json")
    events = json.loads((tmp_path / "m.trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
    assert set(spans) == {"Sequential", "0", "1", "1.0"}
    # The whole begins at zero and takes what its layers take; each begins and ends on a whole nanosecond.
    layers = sum(layer.seconds for layer in found.measurement.layers.layers)
    assert spans["Sequential"] == pytest.approx((0.0, layers * 1e6), abs=1e-3)
    assert spans["0"][1] <= spans["1.0"][0] + 1e-9
    assert spans["1"][0] <= spans["1.0"][0] and spans["1.0"][1] <= spans["1"][1] <= spans["Sequential"][1]
    times = [value for event in events if event["ph"] == "X" for value in (event["ts"], event["dur"])]
    assert all(value >= 0 and value * 1000 == pytest.approx(round(value * 1000), abs=1e-6) for value in times)
    assert max(event["args"]["bytes"] for event in events if event["ph"] == "C") == found.peak.live_bytes


def test_a_time_line_without_times_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a time line needs the measured times"):
        eo.profile(load_onnx(path), (3, 16), target="raspberry-pi-4").save(tmp_path / "m.trace.json")
