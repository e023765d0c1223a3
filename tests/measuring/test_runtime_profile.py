"""Profiles of runtimes, laid on the modules of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput, UnreadableProfile
from edge_opt.measuring.runtime_profile import map_runtime_profile, read_runtime_profile
from edge_opt.model_files.file_model import OnnxModel, load_onnx
from onnx_graphs import node, write


def layers(profile: eo.ModelProfile) -> dict[str, float]:
    assert profile.measurement is not None and profile.measurement.layers is not None
    return {one.path: one.seconds for one in profile.measurement.layers.layers}


@pytest.fixture
def file(tmp_path: Path) -> OnnxModel:
    nodes = [node("MatMul", "x w", "a"), node("Relu", "a", "b"), node("MatMul", "b v", "y")]
    for one, name in zip(nodes, ("/first/MatMul", "/act/Relu", "/second/MatMul"), strict=True):
        one.name = name
    return load_onnx(write(tmp_path / "m.onnx", nodes, {"x": (2, 16)}, ["y"], {"w": (16, 4), "v": (4, 4)}))


def laid(model: OnnxModel, path: Path) -> eo.ModelProfile:
    return map_runtime_profile(eo.profile(model, (2, 16)), read_runtime_profile(path), model.module_of, path.name)


def test_a_real_profile_of_onnxruntime_is_laid_whole(file: OnnxModel, tmp_path: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "run")
    session = onnxruntime.InferenceSession(str(file.file), options, providers=["CPUExecutionProvider"])
    for _ in range(3):
        session.run(None, {"x": np.ones((2, 16), np.float32)})
    found = laid(file, Path(session.end_profiling()))
    assert {"first", "second"} <= layers(found).keys()
    assert found.measurement is not None
    whole = found.measurement.layers
    assert whole is not None
    assert sum(layers(found).values()) + whole.between_layers_s == pytest.approx(whole.whole_s)


def ort(path: Path, runs: int) -> Path:
    """Two kernels of 10 and 30 µs, a copy that belongs to none, in each run; the first run is ten times slower."""
    events: list[dict[str, Any]] = []
    for run in range(runs):
        start, slow = run * 1000, 10 if run == 0 else 1
        events.append({"cat": "Session", "name": "model_run", "ts": start, "dur": 50 * slow})
        for shift, (name, op, dur) in enumerate(
            (("/first/MatMul", "MatMul", 10), ("b", "MatMul", 30), ("copy", "Memcpy", 5))
        ):
            events.append({"cat": "Node", "name": f"{name}_kernel_time", "ts": start + shift + 1, "dur": dur * slow,
                           "args": {"op_name": op}})  # fmt: skip
    path.write_text(json.dumps(events))
    return path


def test_the_first_run_does_not_count_and_fused_kernels_go_to_their_product(file: OnnxModel, tmp_path: Path) -> None:
    found = laid(file, ort(tmp_path / "p.json", 4))
    # The kernel "b" is named after the relu and computes the product in front of it.
    assert layers(found) == {"first": pytest.approx(40e-6)}
    assert found.measurement is not None
    assert found.measurement.latency.median_s == pytest.approx(50e-6)
    assert "1 of 3 entries, 10.0% of the time, belong to no layer: copy" in found.measurement.latency.remarks[1]


def test_tensorrts_fused_layers_go_to_the_first_of_their_nodes(file: OnnxModel, tmp_path: Path) -> None:
    path = tmp_path / "trt.json"
    path.write_text(json.dumps([
        {"count": 10},
        {"name": "/first/MatMul + PWN(/act/Relu)", "timeMs": 5.0, "averageMs": 0.5, "medianMs": 0.4, "percentage": 80},
        {"name": "/second/MatMul", "timeMs": 1.0, "averageMs": 0.1, "percentage": 20},
    ]))  # fmt: skip
    assert layers(laid(file, path)) == {"first": pytest.approx(4e-4), "second": pytest.approx(1e-4)}


def test_tflites_table_in_run_order_is_read(file: OnnxModel, tmp_path: Path) -> None:
    path = tmp_path / "tflite.csv"
    path.write_text("""Operator-wise Profiling Info for Regular Benchmark Runs:
============================== Run Order ==============================
node type, first, avg_ms, %, cdf%, mem KB, times called, name
FULLY_CONNECTED, 0.2, 0.3, 75%, 75%, 0.0, 1, [first/MatMul;act/Relu]:0
FULLY_CONNECTED, 0.1, 0.1, 25%, 100%, 0.0, 1, [second/MatMul]:1
============================== Top by Computation Time ==============================
node type, first, avg_ms, %, cdf%, mem KB, times called, name
FULLY_CONNECTED, 0.2, 0.3, 75%, 75%, 0.0, 1, [first/MatMul;act/Relu]:0
""")
    assert layers(laid(file, path)) == {"first": pytest.approx(3e-4), "second": pytest.approx(1e-4)}


def test_executorchs_table_goes_by_its_module_hierarchy(tmp_path: Path) -> None:
    path = tmp_path / "inspector.csv"
    path.write_text("""event_block_name,event_name,p50 (ms),module_hierarchy
Execute,Method::execute,0.5,
Execute,native_call_addmm.out,0.3,"{'L__self__': ('', 'Sequential'), 'L__self___0': (""L['self'].0"", 'Linear')}"
Execute,native_call_relu.out,0.1,"{'x': (""L['self'].1"", 'ReLU')}"
""")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    found = map_runtime_profile(eo.profile(model, (1, 4)), read_runtime_profile(path))
    assert layers(found) == {"0": pytest.approx(3e-4), "1": pytest.approx(1e-4)}


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing of p.json belongs to a layer"):
        map_runtime_profile(
            eo.profile(nn.Linear(4, 4), (1, 4)), read_runtime_profile(ort(tmp_path / "p.json", 2)), None, "p.json"
        )


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1, 2]", '{"traceEvents": 3}', "a,b\n1,2\n", '[{"name": "x"'])
def test_what_is_no_profile_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UnreadableProfile, match=r"p\.json"):
        read_runtime_profile(path)
