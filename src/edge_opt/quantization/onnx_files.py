"""ONNX files: what we write on each node, float files prepared once, and int8 and int4 files made from them.

int8 is static by ranges of calibration batches, or dynamic; weights alone may have 8 or 4 bits.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from edge_opt._support.extras import import_optional
from edge_opt._support.progress import quiet, report_progress
from edge_opt.errors import InvalidInput, translated
from edge_opt.measuring.machine import needs_reduced_range
from edge_opt.records.fields import field, record

Tensors = tuple[torch.Tensor, ...]
# protobuf refuses 2 GiB; weights of larger models are in a separate file; the graph also needs space.
EXTERNAL_DATA_BYTES = 1_500_000_000
# Where each node keeps the path of its module, so that every tool behind the export can name it.
PATH_KEY = "edge_opt.module"
# On nodes that stay in float because the caller asked for it.
KEPT_KEY = "edge_opt.spared"
# Suffixes that the quantizers append to the names of nodes.
_APPENDED = re.compile(r"(_quant|_MatMul|_Q\d+|_nbits)$")


def with_data(path: Path) -> list[Path]:
    """Return an ONNX file and the weights beside it, weights first: it must never name data that is not there yet."""
    data = path.with_name(f"{path.name}.data")
    return [data, path] if data.exists() else [path]


def size_of(path: Path) -> int:
    """Return the bytes on disk, weights beside the file included."""
    return sum(file.stat().st_size for file in with_data(path))


def require(package: str, extra: str = "onnx") -> Any:
    """Return an optional package; where it is missing, one sentence says how to install it."""
    return import_optional(package, "this needs", extra)


def is_below(path: str, tops: Iterable[str]) -> bool:
    """Return whether a module is one of these, or inside one of them."""
    return any(path == top or path.startswith(f"{top}.") for top in tops)


def module_path(node: Any) -> str:
    """Return the path of the module that a node belongs to; "" where it does not say."""
    return next((item.value for item in node.metadata_props if item.key == PATH_KEY), "")


@record
class FloatFile:
    """A float file that quantizers can work on: shapes are known, constants and batch norms folded."""

    path: Path = field("The file.")
    model: Any = field("Its ModelProto with weights, parsed once; copy it before changing it.")
    module_paths: Mapping[str, str] = field(
        "Path of the module of each node, by its name; the preparation drops what the nodes say."
    )
    is_big: bool = field("Whether weights are in a file beside it.")

    def source_name(self, name: str) -> str:
        """Return the name that a node had in this file, without what quantizers append to it."""
        while name not in self.module_paths and _APPENDED.search(name):
            name = _APPENDED.sub("", name)
        return name

    def nodes_of(self, layers: Iterable[str]) -> list[str]:
        """Return the names of the nodes of these modules, and of those inside them."""
        layers = tuple(layers)
        paths = ((node.name, self.module_paths.get(node.name, module_path(node))) for node in self.model.graph.node)
        return [name for name, path in paths if is_below(path, layers)]


def prepare(source: Path, prepared: Path) -> FloatFile:
    """Infer shapes and fold constants and batch norms, without which the quantizer leaves layers in float."""
    onnx = require("onnx")
    process = require("onnxruntime.quantization.shape_inference").quant_pre_process
    _keep_from_dumping()
    is_big = size_of(source) > EXTERNAL_DATA_BYTES
    paths = {node.name: module_path(node) for node in onnx.load(str(source), load_external_data=False).graph.node}
    try:
        process(str(source), str(prepared), save_as_external_data=is_big)
    except OSError:
        raise
    except Exception:  # symbolic shapes of unusual operators; plain inference still serves the common ones
        process(str(source), str(prepared), save_as_external_data=is_big, skip_symbolic_shape=True)
    return FloatFile(prepared, onnx.load(str(prepared)), paths, is_big)


class _OnnxThatSavesNothing(ModuleType):
    """The package `onnx`, but for `save_model`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(require("onnx"), name)

    @staticmethod
    def save_model(*_: Any, **__: Any) -> None:
        """Do nothing."""


@cache
def _keep_from_dumping() -> None:
    """Keep ONNX Runtime from writing models into the current folder.

    Where it cannot infer all symbolic shapes, it saves what it has there (`sym_shape_infer_temp.onnx` and its weights)
    before it raises. To change the current folder meanwhile would change it for all threads.
    """
    require("onnxruntime.tools.symbolic_shape_infer").onnx = _OnnxThatSavesNothing("onnx")


def write_labelled(model: Any, target: Path, source: FloatFile, kept: Iterable[str]) -> None:
    """Write a quantized model with the module path on each node, and a mark on those that were kept in float."""
    kept = set(kept)
    for node in model.graph.node:
        name = source.source_name(node.name)
        path = source.module_paths.get(name, module_path(node))
        del node.metadata_props[:]
        if path:
            node.metadata_props.add(key=PATH_KEY, value=path)
        if name in kept:
            node.metadata_props.add(key=KEPT_KEY, value="1")
    require("onnxruntime.quantization.onnx_model").ONNXModel(model).save_model_to_file(str(target), source.is_big)


# Masks add this, or more, to scores that must not count; what is rounded to a 256th of it is gone.
_UNBOUNDED = 1e4
# With fewer samples than this, ranges are those of the samples rather than of the model's inputs.
_ENOUGH_SAMPLES = 32

GROUP_SIZES = (16, 32, 64, 128, 256)
Ranges = dict[str, tuple[float, float]]


def collect_ranges(
    source: FloatFile, names: tuple[str, ...], batches: Sequence[Tensors], held_out: Sequence[Tensors]
) -> tuple[Ranges, Ranges]:
    """Return the smallest and largest value of every float tensor around an operator that int8 has kernels for.

    The first ranges are of all batches, the second of those that are not held out. ONNX Runtime's own
    `MinMaxCalibrater` takes -inf, which masks contain, as the low end of a range. Here only finite values count, and
    batches that are held out are told apart in one run.
    """
    values = _observed_values(source, names, [*batches, *held_out])
    seen = _min_max(chain.from_iterable(islice(values, len(batches))), {})
    return _min_max(chain.from_iterable(values), seen), seen


def _quantizable_operators() -> list[str]:
    registry = require("onnxruntime.quantization.registry")
    return list({*registry.QDQRegistry, *registry.QLinearOpsRegistry})


def _observed_values(
    source: FloatFile, names: tuple[str, ...], batches: Iterable[Tensors]
) -> Iterator[list[tuple[str, Any]]]:
    """Yield the tensors of each batch by name, as the float graph computes them."""
    observed = _observed_tensors(source.model.graph)
    inner = [name for name in observed if name not in names]
    onnx, runtime = require("onnx"), require("onnxruntime")
    model = onnx.load(str(source.path), load_external_data=False) if source.is_big else copy.deepcopy(source.model)
    known = [value.name for value in model.graph.output]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner if name not in known)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    # Idle threads of a pool spin, and calibration often runs beside other work.
    options.intra_op_num_threads = 1
    # Optimized graphs do not have all of these tensors.
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    probe: Any = model.SerializeToString()
    if source.is_big:
        # Weights are found beside a file, and not beside bytes.
        probe = source.path.with_name(f"observed-{source.path.name}")
        probe.write_bytes(model.SerializeToString())
    session = runtime.InferenceSession(probe, options, providers=["CPUExecutionProvider"])
    if source.is_big:
        probe.unlink()
    for number, batch in enumerate(batches, start=1):
        report_progress(f"quantizing: ranges of calibration batch {number}")
        feeds = {name: tensor.numpy() for name, tensor in zip(names, batch, strict=True)}
        # Without a name the session would return every output.
        computed = zip(inner, session.run(inner, feeds) if inner else [], strict=True)
        yield [*computed, *((name, array) for name, array in feeds.items() if name in observed)]


def _observed_tensors(graph: Any) -> list[str]:
    operators = _quantizable_operators()
    floats = {
        value.name
        for value in chain(graph.value_info, graph.input, graph.output)
        if value.type.tensor_type.elem_type == require("onnx").TensorProto.FLOAT
    } - {tensor.name for tensor in graph.initializer}
    used = (name for node in graph.node if node.op_type in operators for name in chain(node.input, node.output))
    return [name for name in dict.fromkeys(used) if name in floats]


def _min_max(values: Iterable[tuple[str, Any]], known: Ranges) -> Ranges:
    """Return known ranges, widened to hold these values as well."""
    ranges = dict(known)
    for name, array in values:
        low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
        if not (np.isfinite(low) and np.isfinite(high)):
            finite = array[np.isfinite(array)]
            low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        before = ranges.get(name, (low, high))
        ranges[name] = min(low, before[0]), max(high, before[1])
    return ranges


def quantize_static(
    source: FloatFile, target: Path, ranges: Ranges, keep_float: tuple[str, ...], reduce_range: bool | None
) -> None:
    """Write a file in static int8: 8-bit activations and weights, quantize and dequantize nodes between operators."""
    kept = source.nodes_of(keep_float)
    if keep_float and not kept:
        raise InvalidInput(f"no operator of the exported model belongs to {', '.join(keep_float)}; nothing to keep")
    graph = source.model.graph
    in_float = [*kept, *_activations_before(graph.node, set(kept))]
    # 256 levels cannot hold such values beside any others.
    unbounded = {name for name, (low, high) in ranges.items() if max(-low, high) >= _UNBOUNDED}
    excluded = [*in_float, *_masked(graph, unbounded), *_stacked_products(graph)]
    with quiet(), translated("ONNX Runtime could not quantize the model"):
        model = _with_quantized_nodes(source, ranges, excluded, is_reduced(reduce_range))
        _leave_float(model.graph, set(in_float))
        write_labelled(model, target, source, kept)


def _with_quantized_nodes(source: FloatFile, ranges: Ranges, excluded: list[str], reduced: bool) -> Any:
    calibrate = require("onnxruntime.quantization.calibrate")
    utilities = require("onnxruntime.quantization.quant_utils")
    tensors = {
        name: calibrate.TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
    }
    model = copy.deepcopy(source.model)
    # Says that shapes are inferred already; else the quantizer writes the model to a file and infers them again.
    utilities.add_infer_metadata(model)
    quantizer = require("onnxruntime.quantization.qdq_quantizer").QDQQuantizer(
        model,
        True,
        reduced,
        utilities.QuantType.QInt8,
        utilities.QuantType.QUInt8,
        calibrate.TensorsData(calibrate.CalibrationMethod.MinMax, tensors),
        [],
        excluded,
        _quantizable_operators(),
        {},
    )
    quantizer.quantize_model()
    return quantizer.model.model


def is_reduced(reduce_range: bool | None) -> bool:
    """Return whether weights get 7 bits: as asked, or where this CPU would saturate."""
    return needs_reduced_range() if reduce_range is None else reduce_range


def range_remarks(reduce_range: bool | None) -> tuple[str, ...]:
    """Return why weights have 7 bits, where they do."""
    if not is_reduced(reduce_range):
        return ()
    why = "this CPU has no VNNI, and 8 would saturate" if reduce_range is None else "as asked"
    return (f"weights have 7 bits: {why}",)


def sample_remarks(calibration: Sequence[Tensors]) -> tuple[str, ...]:
    """Return that ranges come from few samples, where they do."""
    count = sum(len(batch[0]) if batch[0].dim() else 1 for batch in calibration)
    if count >= _ENOUGH_SAMPLES:
        return ()
    return (f"ranges come from {count} samples: others may leave them; calibrate on {_ENOUGH_SAMPLES} or more",)


# Operators that pass a mask on, and scores to which a mask was added.
_CARRYING = frozenset("Where Add Sub Mul Expand Unsqueeze Squeeze Reshape Slice Cast Transpose Concat Identity".split())
_MASKING = ("Where", "Add", "Sub", "Mul")


def _masked(graph: Any, unbounded: set[str]) -> list[str]:
    """Return nodes that make a mask, add it to scores, or read such scores, up to the softmax.

    Why: one range of 256 levels that holds -1e4 has steps of 40, so that all scores beside it become equal and a
    rounded mask hides nothing. Ranges alone do not tell masks: calibration may have no sample with anything hidden.
    So constants that are large count as well as tensors that were seen to be.
    """
    onnx = require("onnx")
    read = {name for node in graph.node if node.op_type in _MASKING for name in node.input}
    constants = {
        item.name
        for item in graph.initializer
        if item.name in read and item.data_type == onnx.TensorProto.FLOAT and not item.external_data
        if not (abs(onnx.numpy_helper.to_array(item)) < _UNBOUNDED).all()
    }
    reached, names = set(unbounded), list[str]()
    for node in graph.node:
        if reached.intersection(node.input) or (node.op_type in _MASKING and constants.intersection(node.input)):
            names.append(node.name)
            reached |= set(node.output) if node.op_type in _CARRYING else set()
    return names


def _stacked_products(graph: Any) -> list[str]:
    """Return products with a constant that is a stack of matrices, as the positions of DeBERTa are.

    Why: weights get a scale for each column, and the int8 products of ONNX Runtime take those of one matrix only.
    """
    stacks = {item.name for item in graph.initializer if len(item.dims) > 2}
    return [node.name for node in graph.node if node.op_type == "MatMul" and stacks.intersection(node.input)]


def _activations_before(nodes: Any, kept: set[str]) -> list[str]:
    """Return ReLUs and clips whose outputs are read by nodes that are kept in float.

    Why: the quantizer drops a ReLU before rounding to unsigned numbers, because that clips as well. A node in float
    reads what was not rounded, and would get negative values.
    """
    read = {name for node in nodes if node.name in kept for name in node.input}
    return [node.name for node in nodes if node.op_type in ("Relu", "Clip") and read.intersection(node.output)]


_ROUNDING = ("QuantizeLinear", "DequantizeLinear")


def _leave_float(graph: Any, kept: set[str]) -> None:
    """Take out what quantizes the inputs and outputs of nodes that are kept in float.

    Why: `nodes_to_exclude` of the quantizer excludes the node and leaves the pairs around it. An input that was rounded
    before it arrives would spoil what is kept. Between a dequantized input and a quantized output ONNX Runtime
    quantizes a float layer's weights by itself, so that it runs in int8 after all. To check when ONNX Runtime changes:
    that layers in `keep_float` run in fp32 by its own profile, which `convert` demands.
    """
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    ends = {value.name for value in graph.output}
    dropped: set[str] = set()
    for node in [node for node in graph.node if node.name in kept]:
        for position, name in enumerate(node.output):
            pairs = [
                (quantizer, dequantizer)
                for quantizer in readers[name]
                if quantizer.op_type == "QuantizeLinear"
                for dequantizer in readers[quantizer.output[0]]
            ]
            # A dequantizer at the end of the graph gives its name to the output.
            final = next((back.output[0] for _, back in pairs if back.output[0] in ends), name)
            node.output[position] = final
            replaced = {name, *(back.output[0] for _, back in pairs)}
            for reader in [*readers[name], *(reader for _, back in pairs for reader in readers[back.output[0]])]:
                for index, value in enumerate(reader.input):
                    if value in replaced:
                        reader.input[index] = final
            dropped |= {part.name for pair in pairs for part in pair}
    _read_unrounded(graph, kept)
    nodes = [node for node in graph.node if node.name not in dropped]
    for _ in range(2):
        # Without a reader a dequantizer goes, and then the quantizer before it.
        read = {name for node in nodes for name in node.input} | ends
        nodes = [node for node in nodes if node.op_type not in _ROUNDING or read.intersection(node.output)]
    del graph.node[:]
    graph.node.extend(nodes)


def _read_unrounded(graph: Any, kept: set[str]) -> None:
    """Let nodes in float read their inputs as they were before quantizing and dequantizing."""
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        for position, name in enumerate(node.input if node.name in kept else ()):
            back = makers.get(name)
            there = makers.get(back.input[0]) if back is not None and back.op_type == "DequantizeLinear" else None
            if there is not None and there.op_type == "QuantizeLinear":
                node.input[position] = there.input[0]


def quantize_dynamic(source: FloatFile, target: Path, keep_float: tuple[str, ...], reduce_range: bool | None) -> None:
    """Write a file whose products and LSTMs have int8 weights, and round their inputs to 8 bits as they come."""
    quantization, onnx = require("onnxruntime.quantization"), require("onnx")
    kept = source.nodes_of(keep_float)
    quantize = partial(
        quantization.quantize_dynamic,
        model_output=str(target),
        op_types_to_quantize=["MatMul", "LSTM", "Attention"],
        # An LSTM with a scale for each channel takes an eighth longer, at every step.
        per_channel=all(node.op_type != "LSTM" for node in source.model.graph.node),
        reduce_range=is_reduced(reduce_range),
        weight_type=quantization.QuantType.QInt8,
        nodes_to_exclude=[*kept, *_stacked_products(source.model.graph)],
        use_external_data_format=source.is_big,
        # Products of two activations stay in float: rounding both as they come costs more than it saves.
        extra_options={"MatMulConstBOnly": True},
    )
    with quiet(), translated("ONNX Runtime could not quantize the model"):
        _with_or_without_shapes(source, quantize)
        model = onnx.load(str(target))
        # Shapes of inner tensors are those of the float file; they are inferred again when needed.
        del model.graph.value_info[:]
        write_labelled(model, target, source, kept)


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
            nodes_to_exclude=[node.name for node in model.model.graph.node if source.source_name(node.name) in kept],
        )
        quantizer.process()
        write_labelled(quantizer.model.model, target, source, kept)
