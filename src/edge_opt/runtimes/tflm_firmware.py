"""Files for a firmware project that runs a `.tflite` file with TensorFlow Lite Micro."""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_opt._support.files import write_whole
from edge_opt.boards.mcu_memory import find_core, mcu_memory
from edge_opt.errors import InvalidInput, translated
from edge_opt.model_files.tflm_graph import read_tflm
from edge_opt.model_files.tflm_kernels import Kernels
from edge_opt.records.microcontrollers import McuMemory

# Room for another date of TFLM, whose structures may grow by some bytes per operator.
ARENA_MARGIN = 0.05
# Names of methods of MicroMutableOpResolver that do not follow from the operator's own.
_METHODS = {
    "BATCH_MATMUL": "BatchMatMul", "PADV2": "PadV2", "CUMSUM": "CumSum", "SVDF": "Svdf", "ELU": "Elu",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "UnidirectionalSequenceLSTM", "EthosU": "EthosU", "TFLM_DECODE": "Decode",
    "TFLite_Detection_PostProcess": "DetectionPostprocess", "CIRCULAR_BUFFER": "CircularBuffer",
}  # fmt: skip
_SAMPLES = 4
_ONCE = "#pragma once\n\n"

_MAIN = """// Runs the model once on zeros. Fill the input and read the output where marked.
#include <cstddef>
#include <cstdint>

#include "arena_size.h"
#include "model_data.h"
#include "op_resolver.h"
#include "tensorflow/lite/micro/micro_interpreter.h"
#include "tensorflow/lite/schema/schema_generated.h"

alignas(16) static uint8_t tensor_arena[kTensorArenaSize];

int main() {
  const tflite::Model* model = tflite::GetModel(g_model_data);
  static ModelOpResolver resolver;
  if (RegisterModelOps(resolver) != kTfLiteOk) return 1;
  static tflite::MicroInterpreter interpreter(model, resolver, tensor_arena, kTensorArenaSize);
  if (interpreter.AllocateTensors() != kTfLiteOk) return 2;
  TfLiteTensor* input = interpreter.input(0);
  for (size_t i = 0; i < input->bytes; ++i) input->data.raw[i] = 0;  // your input
  if (interpreter.Invoke() != kTfLiteOk) return 3;
  const TfLiteTensor* output = interpreter.output(0);
  return output->bytes > 0 ? 0 : 4;  // your output: output->data
}
"""


def write_firmware(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    core: str = "cortex-m4",
    kernels: Kernels | Literal["auto"] = "reference",
    margin: float = ARENA_MARGIN,
) -> list[Path]:
    """Write what a firmware project needs to run a `.tflite` file with TFLM, and return the files.

    The folder gets model.tflite, model_data.h and model_data.cc (the file as an array aligned to 16 bytes),
    op_resolver.h (the operators to register), arena_size.h, main.cc (an example), and expected_outputs.json: inputs and
    outputs of a few samples in TFLM's own interpreter, where the package tflite-micro is installed.

    Args:
        model: The file.
        output: The folder; it is made if it is not there.
        core: Core or board, as in `mcu_memory`.
        kernels: Kernels of the build, as in `mcu_memory`; "auto": CMSIS-NN on an Arm core, else TFLM's own.
        margin: Share of the arena that is added to the constant; 0: the smallest arena that works.
    """
    if not 0 <= margin <= 1:
        raise InvalidInput(f"margin is {margin}; it is a share of the arena from 0 to 1, such as 0.05")
    if kernels == "auto":
        kernels = "cmsis-nn" if find_core(core)[2].is_arm else "reference"
    memory = mcu_memory(model, core=core, kernels=kernels)
    graph, folder = read_tflm(model), Path(output)
    data = _joined(model) if graph.is_split else Path(model).read_bytes()
    ports = graph.subgraphs[0]
    contents: dict[str, str | bytes] = {
        "model.tflite": data,
        "model_data.h": f"{_ONCE}alignas(16) extern const unsigned char g_model_data[];\n"
                        "extern const unsigned int g_model_data_size;\n",
        "model_data.cc": _array(data),
        "op_resolver.h": _resolver(memory),
        "arena_size.h": _arena_size(memory, margin),
        "main.cc": _MAIN,
    }  # fmt: skip
    expected = expected_outputs(data, len(ports.inputs), len(ports.outputs))
    if expected is not None:
        contents["expected_outputs.json"] = json.dumps(expected, indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    return [write_whole(folder / name, content) for name, content in contents.items()]


def _joined(model: str | os.PathLike[str]) -> bytes:
    """Return the file with all weights inside its FlatBuffer, where TFLM reads them."""
    if find_spec("ai_edge_litert") is None:
        raise InvalidInput(f"weights of {model} lie behind its FlatBuffer; to move them: pip install ai-edge-litert")
    tools = import_module("ai_edge_litert.tools.flatbuffer_utils")
    with translated("the weights cannot be moved into the FlatBuffer"):
        return bytes(tools.convert_object_to_bytearray(tools.read_model(os.fspath(model))))


def _array(data: bytes) -> str:
    rows = [", ".join(f"0x{byte:02x}" for byte in data[start : start + 12]) for start in range(0, len(data), 12)]
    values = ",\n  ".join(rows)
    return (
        '#include "model_data.h"\n\n'
        f"alignas(16) const unsigned char g_model_data[] = {{\n  {values}\n}};\n"
        f"const unsigned int g_model_data_size = {len(data)};\n"
    )


def resolver_method(operator: str) -> str:
    """Return the method of `MicroMutableOpResolver` that registers an operator.

    >>> resolver_method("DEPTHWISE_CONV_2D"), resolver_method("ADD"), resolver_method("SignalRfft")
    ('AddDepthwiseConv2D', 'AddAdd', 'AddRfft')
    """
    if operator.startswith("Signal"):
        return f"Add{operator.removeprefix('Signal')}"
    words = "".join(word if word == "2D" else word.capitalize() for word in operator.split("_"))
    return f"Add{_METHODS.get(operator, words)}"


def _resolver(memory: McuMemory) -> str:
    count = len(memory.operators)
    lines = "".join(
        f"  if (resolver.{resolver_method(operator)}() != kTfLiteOk) return kTfLiteError;\n"
        for operator in memory.operators
    )
    return (
        f'{_ONCE}#include "tensorflow/lite/micro/micro_mutable_op_resolver.h"\n\n'
        f"using ModelOpResolver = tflite::MicroMutableOpResolver<{count}>;\n\n"
        f"inline TfLiteStatus RegisterModelOps(ModelOpResolver& resolver) {{\n{lines}  return kTfLiteOk;\n}}\n"
    )


def _arena_size(memory: McuMemory, margin: float) -> str:
    size = -(-int(memory.arena_bytes * (1 + margin)) // 16) * 16
    why = f"// Smallest arena that works on {memory.core} with {memory.kernels} kernels: {memory.arena_bytes} bytes.\n"
    return f"{_ONCE}#include <cstddef>\n\n{why}constexpr size_t kTensorArenaSize = {size};\n"


def expected_outputs(data: bytes, inputs: int = 1, outputs: int = 1) -> list[dict[str, Any]] | None:
    """Return inputs and outputs of a few samples in TFLM's interpreter; None where the package is not installed."""
    if find_spec("tflite_micro") is None:
        return None
    package = import_module("tflite_micro.python.tflite_micro.runtime")
    generator = np.random.default_rng(0)
    samples: list[dict[str, Any]] = []
    with translated("TFLM cannot run the model"):
        interpreter = package.Interpreter.from_bytes(data, arena_size=max(1 << 20, 20 * len(data)))
        for _ in range(_SAMPLES):
            sample = {}
            for index in range(inputs):
                details = interpreter.get_input_details(index)
                dtype, shape = np.dtype(details["dtype"]), tuple(details["shape"])
                is_whole = np.issubdtype(dtype, np.integer)
                values = (generator.integers(0, 127, shape) if is_whole else generator.random(shape)).astype(dtype)
                interpreter.set_input(values, index)
                sample[f"input_{index}" if index else "input"] = values.ravel().tolist()
            interpreter.invoke()
            for index in range(outputs):
                sample[f"output_{index}" if index else "output"] = interpreter.get_output(index).ravel().tolist()
            samples.append(sample)
    return samples
