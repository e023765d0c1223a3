"""int8 and int4 of ONNX files without calibration: activations quantized as they come, or weights alone."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edge_opt._support.progress import quiet
from edge_opt._support.translated import translated
from edge_opt.errors import InvalidInput
from edge_opt.quantization.onnx_files import FloatFile, require, write_labelled

GROUP_SIZES = (16, 32, 64, 128, 256)
# What the quantizers append to the names of nodes.
_ADDED = re.compile(r"(_quant|_MatMul|_Q\d+|_nbits)$")


def quantize_dynamic(source: FloatFile, target: Path, keep_float: tuple[str, ...], reduced: bool) -> None:
    """Write a file whose products and LSTMs have int8 weights, and round their inputs to 8 bits as they come."""
    quantization, onnx = require("onnxruntime.quantization"), require("onnx")
    kept = source.nodes_of(keep_float)
    quantize = partial(
        quantization.quantize_dynamic,
        model_output=str(target),
        op_types_to_quantize=["MatMul", "LSTM", "Attention"],
        # An LSTM with a scale for each channel takes an eighth longer, at every step.
        per_channel=all(node.op_type != "LSTM" for node in source.model.graph.node),
        reduce_range=reduced,
        weight_type=quantization.QuantType.QInt8,
        nodes_to_exclude=kept,
        use_external_data_format=source.is_big,
        # Products of two activations stay in float: rounding both as they come costs more than it saves.
        extra_options={"MatMulConstBOnly": True},
    )
    with quiet(), translated("ONNX Runtime could not quantize the model"):
        _with_or_without_shapes(source, quantize)
        model = onnx.load(str(target))
        # Shapes of inner tensors are those of the float file; whoever needs them infers them.
        del model.graph.value_info[:]
        write_labelled(model, target, source, kept, _ADDED)


def _with_or_without_shapes(source: FloatFile, quantize: Callable[[str], object]) -> None:
    """Quantize the file; where its symbolic shapes contradict those that ONNX infers, a copy without shapes."""
    try:
        quantize(str(source.path))
    except OSError:
        raise
    except Exception:
        onnx = require("onnx")
        model = onnx.load(str(source.path), load_external_data=False)
        del model.graph.value_info[:]
        # Beside the file, where its weights are found.
        with tempfile.NamedTemporaryFile(dir=source.path.parent, suffix=".onnx") as plain:
            plain.write(model.SerializeToString())
            plain.flush()
            quantize(plain.name)


def quantize_weights(source: FloatFile, target: Path, keep_float: tuple[str, ...], bits: int, group_size: int) -> None:
    """Write a file whose products keep their weights in 8 or 4 bits, with a scale for each group of them."""
    if group_size not in GROUP_SIZES:
        raise InvalidInput(f"group_size is {group_size!r}; it is one of {', '.join(map(str, GROUP_SIZES))}")
    quantizer_class = require("onnxruntime.quantization.matmul_nbits_quantizer").MatMulNBitsQuantizer
    kept = source.nodes_of(keep_float)
    with quiet(), translated("ONNX Runtime could not quantize the weights"):
        model = require("onnxruntime.quantization.onnx_model").ONNXModel(copy.deepcopy(source.model))
        model.replace_gemm_with_matmul()
        quantizer = quantizer_class(
            model.model,
            bits=bits,
            block_size=group_size,
            is_symmetric=True,
            accuracy_level=4,
            nodes_to_exclude=[node.name for node in model.model.graph.node if _source_name(node.name) in kept],
        )
        quantizer.process()
        write_labelled(quantizer.model.model, target, source, kept, _ADDED)


def _source_name(name: str) -> str:
    while _ADDED.search(name):
        name = _ADDED.sub("", name)
    return name
