"""int8 and int4 without calibration in ONNX Runtime: activations quantised as they come, or weights alone."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from edge_opt._support.progress import quiet
from edge_opt.errors import ConversionFailed, InvalidInput, first_line
from edge_opt.quantization.onnx_files import PATH_KEY, require
from edge_opt.quantization.static_int8 import is_below, label_nodes, prepare

GROUP_SIZES = (16, 32, 64, 128, 256)
_ADDED = re.compile(r"(_quant|_MatMul|_Q\d+|_nbits)$")


def quantize_dynamic(source: Path, target: Path, spare: tuple[str, ...], reduced: bool, is_big: bool) -> None:
    """Write the twin whose products and LSTMs have int8 weights, and round their inputs to 8 bits as they come."""
    quantization = require("onnxruntime.quantization")
    prepared, paths, spared = _prepared(source, target, spare, is_big)
    kinds = {node.op_type for node in require("onnx").load(str(prepared), load_external_data=False).graph.node}
    quantize = partial(
        quantization.quantize_dynamic,
        str(prepared),
        str(target),
        op_types_to_quantize=["MatMul", "LSTM", "Attention"],
        # An LSTM with a scale for each channel takes an eighth longer, at every step.
        per_channel="LSTM" not in kinds,
        reduce_range=reduced,
        weight_type=quantization.QuantType.QInt8,
        nodes_to_exclude=spared,
        use_external_data_format=is_big,
        # Products of two activations stay in float: rounding both as they come costs more than it saves.
        extra_options={"MatMulConstBOnly": True},
    )
    with quiet():
        try:
            try:
                quantize()
            except OSError:
                raise
            except Exception:  # shapes that were inferred symbolically and that ONNX infers otherwise
                _forget_shapes(prepared)
                quantize()
        except OSError:
            raise
        except Exception as error:  # the quantiser raises whatever its parts do
            raise ConversionFailed(f"ONNX Runtime could not quantise the model: {first_line(error)}") from error
        _forget_shapes(target)
        label_nodes(target, paths, spared, _ADDED)


def quantize_weights(
    source: Path, target: Path, spare: tuple[str, ...], bits: int, group_size: int, is_big: bool
) -> None:
    """Write the twin whose products keep their weights in 8 or 4 bits, with a scale for each group of them."""
    if group_size not in GROUP_SIZES:
        raise InvalidInput(f"group_size is {group_size!r}; it is one of {', '.join(map(str, GROUP_SIZES))}")
    onnx = require("onnx")
    kind = require("onnxruntime.quantization.matmul_nbits_quantizer").MatMulNBitsQuantizer
    wrapped = require("onnxruntime.quantization.onnx_model").ONNXModel
    prepared, paths, spared = _prepared(source, target, spare, is_big)
    with quiet():
        model = wrapped(onnx.load(str(prepared)))
        model.replace_gemm_with_matmul()
        excluded = [node.name for node in model.model.graph.node if _source_name(node.name) in spared]
        try:
            quantizer = kind(
                model.model, bits=bits, block_size=group_size, is_symmetric=True, accuracy_level=4,
                nodes_to_exclude=excluded,
            )  # fmt: skip
            quantizer.process()
            quantizer.model.save_model_to_file(str(target), is_big)
        except OSError:
            raise
        except Exception as error:  # as above
            raise ConversionFailed(f"ONNX Runtime could not quantise the weights: {first_line(error)}") from error
        label_nodes(target, paths, spared, _ADDED)


def _forget_shapes(path: Path) -> None:
    """Take the shapes of inner tensors out of a file; whoever needs them infers them."""
    model = require("onnx").load(str(path), load_external_data=False)
    del model.graph.value_info[:]
    path.write_bytes(model.SerializeToString())


def _source_name(name: str) -> str:
    while _ADDED.search(name):
        name = _ADDED.sub("", name)
    return name


def _prepared(
    source: Path, target: Path, spare: tuple[str, ...], is_big: bool
) -> tuple[Path, dict[str, str], list[str]]:
    """The source with shapes and folded constants, where each of its nodes belongs, and which stay as they are."""
    onnx = require("onnx")
    prepared = target.with_name(f"prepared-{target.name}")
    with quiet():
        prepare(source, prepared, is_big)
    graph: Any = onnx.load(str(source), load_external_data=False).graph
    paths = {
        node.name: next((item.value for item in node.metadata_props if item.key == PATH_KEY), "") for node in graph.node
    }
    nodes = onnx.load(str(prepared), load_external_data=False).graph.node
    spared = [node.name for node in nodes if is_below(paths.get(node.name, ""), spare)]
    return prepared, paths, spared
