"""Precisions, and static int8 calibrated on batches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edge_opt._support.progress import quiet
from edge_opt.errors import ConversionFailed, InvalidInput, first_line
from edge_opt.measuring.machine import needs_reduced_range
from edge_opt.quantization.activation_ranges import ENDLESS, METHODS, Calibrated, Ranges, collect_ranges
from edge_opt.quantization.balancing import balance, correct_biases
from edge_opt.quantization.onnx_files import EXTERNAL_DATA_BYTES, PATH_KEY, SPARED_KEY, Tensors, require, size_of

"""Every (precision, runtime) with its maker."""


def check_method(method: str) -> None:
    """Refuse a way of calibrating that there is not."""
    if method not in METHODS:
        raise InvalidInput(f"unknown calibration method {method!r}; it is one of {', '.join(METHODS)}")


def is_below(path: str, tops: Iterable[str]) -> bool:
    """Whether a module is one of these, or inside one of them."""
    return any(path == top or path.startswith(f"{top}.") for top in tops)


def quantize(
    source: Path,
    prepared: Path,
    target: Path,
    names: tuple[str, ...],
    batches: list[Tensors],
    *,
    method: str,
    spare: tuple[str, ...],
    reduce_range: bool | None,
    held_out: Sequence[Tensors] = (),
    known: Calibrated | None = None,
    strength: float = 0.0,
    correct_bias: bool = False,
) -> Calibrated:
    """Write an exported file in static int8; returns the ranges, so that another one like it need not find them.

    `prepared` is the float file that it is made of; it is there where ranges are `known`. `held_out` are batches whose
    share in the ranges can be told apart. `strength` is that of balancing, and `correct_bias` takes out what rounded
    weights shift; see `balancing`. Both go by all batches.
    """
    onnx = require("onnx")
    registry = require("onnxruntime.quantization.registry")
    ops = list({*registry.QDQRegistry, *registry.QLinearOpsRegistry})
    is_big = size_of(source) > EXTERNAL_DATA_BYTES
    every = [*batches, *held_out]
    with quiet():
        if known is None:
            prepare(source, prepared, is_big)
            if strength:
                balance(prepared, names, every, strength, is_big)
        paths = {node.name: _path(node) for node in onnx.load(str(source), load_external_data=False).graph.node}
        graph = onnx.load(str(prepared), load_external_data=False).graph
        nodes = graph.node
        spared = [node.name for node in nodes if is_below(paths.get(node.name, _path(node)), spare)]
        if spare and not spared:
            raise InvalidInput(f"no operator of the exported model belongs to {', '.join(spare)}; nothing to spare")
        whole = [*spared, *_activations_before(nodes, set(spared))]
        try:
            found = known or collect_ranges(prepared, ops, names, batches, method, held_out)
            reduced, left = is_reduced(reduce_range), [*whole, *_masked(onnx, graph, found.endless)]
            write = partial(_write_static, ranges=found.ranges, ops=ops, spared=left, reduced=reduced, is_big=is_big)
            write(prepared, target)
            if correct_bias:
                corrected = target.with_name(f"corrected-{target.name}")
                correct_biases(prepared, target, corrected, names, every, is_big)
                write(corrected, target)
        except OSError:
            raise
        except Exception as error:  # the quantiser raises whatever its parts do
            raise ConversionFailed(f"ONNX Runtime could not quantise the model: {first_line(error)}") from error
        _label(onnx, target, paths, spared, whole)
    return found


def is_reduced(reduce_range: bool | None) -> bool:
    """Whether weights get 7 bits: as asked, or where this CPU would saturate."""
    return needs_reduced_range() if reduce_range is None else reduce_range


def range_remarks(reduce_range: bool | None) -> tuple[str, ...]:
    """Why weights have 7 bits, where they do."""
    if not is_reduced(reduce_range):
        return ()
    why = "this CPU has no VNNI, and 8 would saturate" if reduce_range is None else "as asked"
    return (f"weights have 7 bits: {why}",)


# With fewer samples than this, ranges are those of the samples rather than of the model's inputs.
ENOUGH_SAMPLES = 32


def sample_remarks(calibration: Sequence[Tensors]) -> tuple[str, ...]:
    """That ranges come from few samples, where they do."""
    count = sum(len(batch[0]) if batch[0].dim() else 1 for batch in calibration)
    if count >= ENOUGH_SAMPLES:
        return ()
    return (f"ranges come from {count} samples: others may leave them; calibrate on {ENOUGH_SAMPLES} or more",)


def _write_static(
    prepared: Path, target: Path, ranges: Ranges, ops: list[str], spared: list[str], reduced: bool, is_big: bool
) -> None:
    """Quantise and dequantise nodes around every operator that has an int8 kernel, with the ranges given."""
    np = require("numpy")
    calibrate = require("onnxruntime.quantization.calibrate")
    kinds = require("onnxruntime.quantization.quant_utils")
    found = {
        name: calibrate.TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
    }
    quantizer = require("onnxruntime.quantization.qdq_quantizer").QDQQuantizer(
        kinds.load_model_with_shape_infer(prepared),
        True,
        reduced,
        kinds.QuantType.QInt8,
        kinds.QuantType.QUInt8,
        calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, found),
        [],
        spared,
        ops,
        {},
    )
    quantizer.quantize_model()
    quantizer.model.save_model_to_file(str(target), is_big)


def prepare(source: Path, prepared: Path, is_big: bool) -> None:
    """Infer shapes and fold constants and batch norms, without which the quantiser leaves layers in float."""
    process = require("onnxruntime.quantization.shape_inference").quant_pre_process
    try:
        process(str(source), str(prepared), save_as_external_data=is_big)
    except OSError:
        raise
    except Exception:  # symbolic shapes of unusual operators; plain inference still serves the common ones
        process(str(source), str(prepared), save_as_external_data=is_big, skip_symbolic_shape=True)


def label_nodes(target: Path, paths: dict[str, str], spared: list[str], added: re.Pattern[str]) -> None:
    """Bring back module paths that a quantiser dropped with the names it gave; mark spared nodes."""
    model = require("onnx").load(str(target), load_external_data=False)
    for node in model.graph.node:
        name = node.name
        while name not in paths and added.search(name):
            name = added.sub("", name)
        del node.metadata_props[:]
        if paths.get(name):
            node.metadata_props.add(key=PATH_KEY, value=paths[name])
        if name in spared:
            node.metadata_props.add(key=SPARED_KEY, value="1")
    target.write_bytes(model.SerializeToString())


def _label(onnx: Any, target: Path, paths: dict[str, str], spared: list[str], whole: list[str]) -> None:
    """Bring back module paths that the preparation dropped, and mark spared nodes; `whole` are all left in float."""
    model = onnx.load(str(target), load_external_data=False)
    _leave_float(model.graph, set(whole))
    for node in model.graph.node:
        path = paths.get(node.name, _path(node))
        del node.metadata_props[:]
        if path:
            node.metadata_props.add(key=PATH_KEY, value=path)
        if node.name in spared:
            node.metadata_props.add(key=SPARED_KEY, value="1")
    target.write_bytes(model.SerializeToString())


# What hands a mask on, and scores that one was added to.
_CARRYING = frozenset("Where Add Sub Mul Expand Unsqueeze Squeeze Reshape Slice Cast Transpose Concat Identity".split())
_MASKING = ("Where", "Add", "Sub", "Mul")


def _masked(onnx: Any, graph: Any, endless: set[str]) -> list[str]:
    """Nodes that make a mask, add it to scores, or read such scores, up to the softmax: rounded, it hides nothing.

    Beside values near minus infinity, 256 levels hold no others. Calibration may have no sample with anything hidden,
    so it is not only tensors that were seen to be endless, but what is made with such a constant.
    """
    read = {name for node in graph.node if node.op_type in _MASKING for name in node.input}
    constants = {
        item.name
        for item in graph.initializer
        if item.name in read and item.data_type == onnx.TensorProto.FLOAT and not item.external_data
        if not (abs(onnx.numpy_helper.to_array(item)) < ENDLESS).all()
    }
    reached, found = set(endless), list[str]()
    for node in graph.node:
        if reached.intersection(node.input) or (node.op_type in _MASKING and constants.intersection(node.input)):
            found.append(node.name)
            reached |= set(node.output) if node.op_type in _CARRYING else set()
    return found


def _activations_before(nodes: Any, spared: set[str]) -> list[str]:
    """ReLUs and clips whose outputs spared nodes read.

    The quantiser drops them where rounding to unsigned numbers clips, too; what is read unrounded would miss them.
    """
    read = {name for node in nodes if node.name in spared for name in node.input}
    return [node.name for node in nodes if node.op_type in ("Relu", "Clip") and read.intersection(node.output)]


def _leave_float(graph: Any, spared: set[str]) -> None:
    """Take out what quantises the inputs and outputs of spared nodes.

    An input that was rounded before it arrives would spoil what is spared. Between a dequantised input and a quantised
    output ONNX Runtime quantises a float layer's weights by itself.
    """
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    ends = {value.name for value in graph.output}
    dropped: set[str] = set()
    for node in [node for node in graph.node if node.name in spared]:
        for place, name in enumerate(node.output):
            pairs = [
                (quantizer, dequantizer)
                for quantizer in readers[name]
                if quantizer.op_type == "QuantizeLinear"
                for dequantizer in readers[quantizer.output[0]]
            ]
            # A dequantiser at the end of the graph gives its name to the output.
            final = next((back.output[0] for _, back in pairs if back.output[0] in ends), name)
            node.output[place] = final
            for reader in [*readers[name], *(reader for _, back in pairs for reader in readers[back.output[0]])]:
                replaced = {name, *(back.output[0] for _, back in pairs)}
                for position, value in enumerate(reader.input):
                    if value in replaced:
                        reader.input[position] = final
            dropped |= {part.name for pair in pairs for part in pair}
    _read_unrounded(graph, spared)
    kept = [node for node in graph.node if node.name not in dropped]
    for _ in range(2):
        # Without a reader a dequantiser goes, and then the quantiser before it.
        read = {name for node in kept for name in node.input} | ends
        pairs_of_none = [n for n in kept if n.op_type in _ROUNDING and not read.intersection(n.output)]
        kept = [node for node in kept if node not in pairs_of_none]
    del graph.node[:]
    graph.node.extend(kept)


_ROUNDING = ("QuantizeLinear", "DequantizeLinear")


def _read_unrounded(graph: Any, spared: set[str]) -> None:
    """Let spared nodes read their inputs as they were before quantising and dequantising."""
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for position, name in enumerate(node.input if node.name in spared else ()):
            back = makers.get(name)
            there = makers.get(back.input[0]) if back is not None and back.op_type == "DequantizeLinear" else None
            if there is not None and there.op_type == "QuantizeLinear":
                node.input[position] = there.input[0]


def _path(node: Any) -> str:
    return next((item.value for item in node.metadata_props if item.key == PATH_KEY), "")
