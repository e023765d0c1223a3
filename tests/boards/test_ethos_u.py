"""Models on an Ethos-U, compiled by Arm's Vela."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import edge_opt as eo
from edge_opt.boards import ethos_u
from edge_opt.errors import InvalidInput
from tflite_graphs import Graph, Op, Scaled, conv, write


def net(folder: Path, op: Op | None = None) -> Path:
    """An int8 convolution, and perhaps another operator behind it."""
    maps = {name: Scaled((1, 16, 16, 8), "int8", 0.05, 0) for name in ("x", "y", "z")}
    ops = [conv("CONV_2D", "x w b", "y"), *([op] if op else [])]
    tensors = {**maps, "w": np.ones((8, 3, 3, 8), np.int8), "b": np.zeros(8, np.int32)}
    return Path(write(folder / "net.tflite", Graph(ops, tensors, "x", "z" if op else "y")))


def test_time_is_vela_s_cycles_at_its_clock_and_ram_is_tflm_s_for_the_compiled_file(tmp_path: Path) -> None:
    prediction = eo.profile(net(tmp_path), target="corstone-300", runtime="vela").prediction
    assert prediction is not None and prediction.mcu is not None and prediction.seconds is not None
    numbers = re.search(r"(\d+) cycles at (\d+) MHz and ([\d.]+) KiB of SRAM", prediction.remarks[0])
    assert numbers is not None
    assert prediction.seconds == pytest.approx(int(numbers[1]) / (int(numbers[2]) * 1e6), rel=1e-3)
    # 128 multipliers do 16 x 16 x 8 outputs of 72 MACs in no fewer cycles than this.
    assert int(numbers[1]) >= 16 * 16 * 8 * 72 / 128
    assert (prediction.basis, prediction.low, prediction.mcu.operators) == ("vendor", None, ("EthosU",))
    assert prediction.mcu.head_bytes == pytest.approx(float(numbers[3]) * 1024, abs=64)
    assert len(prediction.mcu.verdicts) == 1 and prediction.mcu.fits  # this board has no flash


def test_without_vela_or_an_ethos_u_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="rp2040 has no Ethos-U"):
        eo.mcu_memory(net(tmp_path), core="rp2040", runtime="vela")
    with pytest.raises(InvalidInput, match=r"takes a \.tflite file"):
        eo.mcu_memory("net.onnx", core="corstone-300", runtime="vela")
    monkeypatch.setattr(ethos_u, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"edge-opt\[ethos-u\]"):
        eo.mcu_memory(net(tmp_path), core="corstone-300", runtime="vela")


def test_operators_left_to_the_cpu_leave_the_time_open(tmp_path: Path) -> None:
    file = net(tmp_path, Op("FLOOR_MOD", "y y", "z", "FloorModOptions"))
    run = ethos_u.compiled_by_vela(file, eo.device("corstone-300"))
    assert run.cpu_operators == ("FLOOR_MOD",)
    assert "1 operators that are left to the CPU" in run.note
