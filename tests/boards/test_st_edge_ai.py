"""ST Edge AI: its activations, its flash, and the channels that it drops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edge_opt as eo
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.st_edge_ai import live_work, st_memory
from edge_opt.errors import InvalidInput
from edge_opt.model_files.tflm_graph import read_tflm
from tflite_graphs import Graph, Op, Scaled, Steps, conv, write


def net(folder: Path, empty: int) -> Path:
    """A 3x3 convolution of three channels, of whose eight filters so many are all zero, and a 1x1 of 16 filters."""
    first = np.ones((8, 3, 3, 3), np.int8)
    first[:empty] = 0
    tensors = {
        "x": Scaled((1, 8, 8, 3), "int8", 0.05, 0),
        "w": Steps(first, 0.05, 0),
        "a": Scaled((1, 8, 8, 8), "int8", 0.05, 0),
        "v": Steps(np.ones((16, 1, 1, 8), np.int8), 0.05, 0),
        "y": Scaled((1, 8, 8, 16), "int8", 0.05, 0),
    }
    ops = [conv("CONV_2D", "x w", "a"), conv("CONV_2D", "a v", "y")]
    return Path(write(folder / f"empty_{empty}.tflite", Graph(ops, tensors, "x", "y")))


def test_activations_share_memory_and_scales_are_code(tmp_path: Path) -> None:
    memory = st_memory(read_tflm(net(tmp_path, 0)))
    source, result = 8 * 8 * 8, 8 * 8 * 16
    assert memory.activation_bytes == source + result - int(0.2 * source) + (4 * 8 + 10 * 16)
    assert memory.weight_bytes == 8 * 27 + 16 * 8
    assert memory.code_bytes == 10_726 + 2 * 408 + 4 * (8 + 16)


def test_channels_without_weights_are_dropped(tmp_path: Path) -> None:
    path = net(tmp_path, 2)
    graph, places = read_tflm(path), 8 * 8
    work = live_work(model_work(eo.profile(str(path))), graph)
    assert [layer.macs for layer in work.works if layer.weights] == [places * 27 * 6, places * 6 * 16]
    assert st_memory(graph).weight_bytes == 6 * 27 + 16 * 6
    times = [
        eo.profile(str(net(tmp_path, empty)), target="nucleo-h743zi", runtime=runtime).predictions[0].seconds
        for runtime in ("st-edge-ai", "tflm")
        for empty in (0, 2)
    ]
    assert times[1] < times[0]
    assert times[3] == times[2], "TFLM computes them"


def test_a_profile_has_the_memory_of_the_runtime_that_is_asked_for(tmp_path: Path) -> None:
    path = str(net(tmp_path, 0))
    memory = eo.profile(path, target="nucleo-h743zi", runtime="st-edge-ai").predictions[0].mcu
    assert memory is not None and memory.kernels == "st-edge-ai"
    assert memory.verdicts[0].margin_bytes == 8 * 1024 + int(0.3 * memory.arena_bytes)
    with pytest.raises(InvalidInput, match="Arm Cortex-M"):
        eo.mcu_memory(path, core="esp32-s3", runtime="st-edge-ai")


def test_operators_without_a_result_take_what_lives_beside_them(tmp_path: Path) -> None:
    value = Scaled((1, 20), "int8", 0.05, 0)
    handle = Op("VAR_HANDLE", "", "h", "VarHandleOptions", {"container": "", "sharedName": "v"})
    graph = Graph([handle, Op("READ_VARIABLE", "h", "r"), Op("ADD", "r x", "y", "AddOptions"),
                   Op("ASSIGN_VARIABLE", "h y", "")],
                  {"x": value, "h": ((), "resource"), "r": value, "y": value}, "x", "y")  # fmt: skip
    memory = eo.mcu_memory(write(tmp_path / "net.tflite", graph), core="nucleo-h743zi", runtime="st-edge-ai")
    # The input and the variable's value while they are added in place.
    assert memory.arena_bytes == 2 * 20


def test_what_only_a_dropped_channel_reads_is_not_computed(tmp_path: Path) -> None:
    depthwise = np.ones((1, 3, 3, 8), np.int8)
    depthwise[..., :2] = 0
    tensors = {
        "x": Scaled((1, 8, 8, 3), "int8", 0.05, 0),
        "w": Steps(np.ones((8, 3, 3, 3), np.int8), 0.05, 0),
        "a": Scaled((1, 8, 8, 8), "int8", 0.05, 0),
        "d": Steps(depthwise, 0.05, 3),
        "y": Scaled((1, 8, 8, 8), "int8", 0.05, 0),
    }
    ops = [conv("CONV_2D", "x w", "a"), conv("DEPTHWISE_CONV_2D", "a d", "y", depthMultiplier=1)]
    path = write(tmp_path / "depthwise.tflite", Graph(ops, tensors, "x", "y"))
    work = live_work(model_work(eo.profile(path)), read_tflm(path))
    assert [layer.macs for layer in work.works if layer.weights] == [64 * 27 * 6, 64 * 9 * 6]
