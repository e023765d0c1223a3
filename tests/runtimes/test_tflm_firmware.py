"""Files for a firmware project, run by TFLM's own interpreter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt.cli import app
from edge_opt.errors import InvalidInput
from edge_opt.runtimes.tflm_firmware import resolver_method, write_firmware
from tflm import SINE, recorded, runtime


def test_the_files_hold_the_model_its_operators_and_an_arena_that_suffices(tmp_path: Path) -> None:
    write_firmware(SINE, tmp_path, core="x86-64", margin=0)
    assert (tmp_path / "model.tflite").read_bytes() == SINE.read_bytes()
    array = re.findall(r"0x([0-9a-f]{2})", (tmp_path / "model_data.cc").read_text())
    assert bytes(int(byte, 16) for byte in array) == SINE.read_bytes()
    resolver = (tmp_path / "op_resolver.h").read_text()
    assert "MicroMutableOpResolver<1>" in resolver and "AddFullyConnected()" in resolver
    match = re.search(r"kTensorArenaSize = (\d+);", (tmp_path / "arena_size.h").read_text())
    assert match is not None
    size = int(match[1])
    assert size == eo.mcu_memory(SINE, core="x86-64").arena_bytes
    assert recorded(SINE, size) is not None
    assert recorded(SINE, size - 16) is None


def test_expected_outputs_are_those_of_the_interpreter(tmp_path: Path) -> None:
    write_firmware(SINE, tmp_path)
    interpreter = runtime.Interpreter.from_file(str(SINE))
    for sample in json.loads((tmp_path / "expected_outputs.json").read_text()):
        interpreter.set_input(np.array(sample["input"], np.float32).reshape(1, 1), 0)
        interpreter.invoke()
        assert interpreter.get_output(0).ravel().tolist() == sample["output"]
        # The model is a sine.
        assert sample["output"][0] == pytest.approx(np.sin(sample["input"][0]), abs=0.15)


def test_the_margin_is_a_share_of_the_arena(tmp_path: Path) -> None:
    write_firmware(SINE, tmp_path, margin=0.5)
    match = re.search(r"kTensorArenaSize = (\d+);", (tmp_path / "arena_size.h").read_text())
    least = eo.mcu_memory(SINE).arena_bytes
    assert match is not None and 1.5 * least <= int(match[1]) < 1.5 * least + 16
    with pytest.raises(InvalidInput, match="margin"):
        write_firmware(SINE, tmp_path, margin=5)


def test_methods_of_the_resolver_are_named_as_in_tflm() -> None:
    names = ("CONV_2D", "AVERAGE_POOL_2D", "RESIZE_NEAREST_NEIGHBOR", "BATCH_MATMUL", "UNIDIRECTIONAL_SEQUENCE_LSTM")
    assert [resolver_method(name) for name in names] == [
        "AddConv2D", "AddAveragePool2D", "AddResizeNearestNeighbor", "AddBatchMatMul", "AddUnidirectionalSequenceLSTM"
    ]  # fmt: skip


def test_the_command_takes_a_file(tmp_path: Path) -> None:
    tflm = ["--runtime", "tflm", "--core", "rp2040", "-o", str(tmp_path / "firmware")]
    assert CliRunner().invoke(app, ["convert", str(SINE), *tflm]).exit_code == 0
    assert (tmp_path / "firmware/main.cc").exists()


def test_weights_behind_the_flatbuffer_move_into_it(tmp_path: Path) -> None:
    # LiteRT's quantizer writes 256 KiB and more behind the FlatBuffer: 512 x 520 bytes are 260 KiB.
    torch.manual_seed(0)
    converted = eo.convert(
        nn.Linear(512, 520), (1, 512), "int8", "litert", calibration=[torch.randn(1, 512)], output=tmp_path,
        fixed_batch=True,
    )  # fmt: skip
    before = eo.mcu_memory(converted.path, core="nucleo-h743zi")
    assert all("--runtime tflm" in verdict.text for verdict in before.verdicts)
    model = write_firmware(converted.path, tmp_path / "firmware")[0]
    after = eo.mcu_memory(model, core="x86-64")
    assert "--runtime tflm" not in " ".join(after.notes)
    assert recorded(model, after.arena_bytes) is not None
    assert recorded(model, after.arena_bytes - 16) is None


def test_a_module_becomes_firmware_whose_arena_is_exact(tmp_path: Path) -> None:
    firmware = tmp_path / "firmware"
    command = ["convert", "edge_opt.model:SmallCNN", "-i", "1x1x28x28", "-c", "random", "--runtime", "tflm"]
    done = CliRunner().invoke(app, [*command, "--core", "x86-64", "-o", str(firmware)])
    assert done.exit_code == 0, done.output
    memory = eo.mcu_memory(firmware / "model.tflite", core="x86-64")
    assert recorded(firmware / "model.tflite", memory.arena_bytes) is not None
    assert recorded(firmware / "model.tflite", memory.arena_bytes - 16) is None
    interpreter = runtime.Interpreter.from_file(str(firmware / "model.tflite"))
    for sample in json.loads((firmware / "expected_outputs.json").read_text()):
        interpreter.set_input(np.array(sample["input"], np.int8).reshape(1, 1, 28, 28), 0)
        interpreter.invoke()
        assert interpreter.get_output(0).ravel().tolist() == sample["output"]
    _check_syntax(firmware)


# What the example uses of TFLM's public classes.
_HEADERS = {
    "micro/micro_mutable_op_resolver.h": """
#pragma once
enum TfLiteStatus { kTfLiteOk, kTfLiteError };
namespace tflite {
template <unsigned int count> struct MicroMutableOpResolver { METHODS };
}
""",
    "micro/micro_interpreter.h": """
#pragma once
#include <cstddef>
#include <cstdint>
struct TfLiteTensor { union { char* raw; } data; size_t bytes; };
namespace tflite {
struct Model;
struct MicroInterpreter {
  template <typename Resolver> MicroInterpreter(const Model*, const Resolver&, uint8_t*, size_t);
  TfLiteStatus AllocateTensors();
  TfLiteStatus Invoke();
  TfLiteTensor* input(size_t);
  TfLiteTensor* output(size_t);
};
}
""",
    "schema/schema_generated.h": """
#pragma once
namespace tflite { struct Model; const Model* GetModel(const void*); }
""",
}


def _check_syntax(folder: Path) -> None:
    """Compile the files against declarations of the classes that they use; nothing is linked."""
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ is missing; as root: apt-get install g++"
    methods = set(re.findall(r"resolver\.(\w+)\(\)", (folder / "op_resolver.h").read_text()))
    includes = folder.parent / "includes/tensorflow/lite"
    for name, text in _HEADERS.items():
        (includes / name).parent.mkdir(parents=True, exist_ok=True)
        declared = " ".join(f"TfLiteStatus {method}();" for method in sorted(methods))
        (includes / name).write_text(text.replace("METHODS", declared))
    sources = [str(folder / "main.cc"), str(folder / "model_data.cc")]
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I", str(folder.parent / "includes")]
    done = subprocess.run([compiler, *options, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
