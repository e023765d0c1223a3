"""Balancing and bias correction: an exported graph changed so that its static int8 twin stays closer to it.

Balancing (as in SmoothQuant, and in cross-layer equalisation) divides each channel of an activation by a factor s and
multiplies the weights that read it by s. What is computed stays the same:

    y = W x = (W diag(s)) (diag(1/s) x),    s = max|x|^strength / max|W|^(1 - strength), channel by channel.

One range for all channels then serves them better. The division costs nothing, for it is folded into the layer or norm
that makes x; where there is none to fold it into, the channels stay as they are.

Bias correction takes out what rounded weights add on average: E[(W' - W) x] for each output, on calibration batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.quantization.activation_ranges import Observer
from edge_opt.quantization.onnx_files import Tensors, require

# relu(x / s) is relu(x) / s for s above 0; these keep channels where they are, too.
_HOMOGENEOUS = ("Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity")
_LAYERS = ("Conv", "Gemm", "MatMul")
# Factors stay between 1 / this and this, so that no channel vanishes.
_LARGEST = 1e4


@dataclass(frozen=True, slots=True)
class _Parts:
    """A graph by its tensors: weights, who makes and who reads each, and how often each is used."""

    graph: Any
    weights: dict[str, Any]
    makers: dict[str, Any]
    readers: dict[str, list[Any]]

    def array(self, name: str) -> Any:
        return require("onnx").numpy_helper.to_array(self.weights[name])

    def put(self, name: str, array: Any) -> None:
        helper = require("onnx").numpy_helper
        self.weights[name].CopyFrom(helper.from_array(np.ascontiguousarray(array, dtype=np.float32), name))

    def owns(self, node: Any, place: int) -> bool:
        """Whether an input of a node is a float weight that nobody else reads."""
        if len(node.input) <= place or node.input[place] not in self.weights:
            return False
        name = node.input[place]
        return len(self.readers[name]) == 1 and self.weights[name].data_type == 1


def _parts(graph: Any) -> _Parts:
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    for value in graph.output:
        # An output of the model is read by the caller.
        readers[value.name].append(None)
    makers = {name: node for node in graph.node for name in node.output}
    return _Parts(graph, {item.name: item for item in graph.initializer}, makers, readers)


def _attribute(node: Any, name: str, default: int) -> int:
    return next((int(item.i) for item in node.attribute if item.name == name), default)


def _is_layer(parts: _Parts, node: Any) -> bool:
    if node is None or node.op_type not in _LAYERS or not parts.owns(node, 1):
        return False
    if node.op_type == "Conv":
        return _attribute(node, "group", 1) == 1
    rank = len(parts.weights[node.input[1]].dims)
    return rank == 2 and not _attribute(node, "transA", 0)


def _axes(node: Any) -> tuple[int, int]:
    """Where a layer's weight has its inputs, and where its outputs."""
    if node.op_type == "Conv" or _attribute(node, "transB", 0):
        return 1, 0
    return 0, 1


@dataclass(frozen=True, slots=True)
class _Link:
    """An activation with the layers that read it, and the tensors that a factor of its channels can be folded into."""

    tensor: str
    channel_axis: int
    readers: tuple[Any, ...]
    folded: tuple[tuple[str, int], ...]


def _links(parts: _Parts) -> Iterator[_Link]:
    for tensor, readers in list(parts.readers.items()):
        if not readers or not all(_is_layer(parts, node) and node.input[0] == tensor for node in readers):
            continue
        is_image = readers[0].op_type == "Conv"
        if any((node.op_type == "Conv") is not is_image for node in readers):
            continue
        folded = _source(parts, tensor)
        if folded:
            yield _Link(tensor, 1 if is_image else -1, tuple(readers), folded)


def _source(parts: _Parts, tensor: str) -> tuple[tuple[str, int], ...]:
    """Weights, biases and scales whose division divides the channels of a tensor; none where that cannot be done."""
    node = parts.makers.get(tensor)
    while node is not None and node.op_type in _HOMOGENEOUS:
        if len(parts.readers[node.input[0]]) != 1:
            return ()
        node = parts.makers.get(node.input[0])
    if node is None:
        return ()
    if node.op_type == "LayerNormalization":
        owned = [place for place in (1, 2) if len(node.input) > place]
        return tuple((node.input[place], 0) for place in owned) if all(parts.owns(node, p) for p in owned) else ()
    added: tuple[tuple[str, int], ...] = ()
    if node.op_type == "Add":
        bias = next((place for place in (0, 1) if parts.owns(node, place)), None)
        if bias is None or len(parts.readers[node.input[1 - bias]]) != 1:
            return ()
        added, node = ((node.input[bias], -1),), parts.makers.get(node.input[1 - bias])
        if node is None or node.op_type != "MatMul":
            return ()
    if not _is_layer(parts, node):
        return ()
    found = ((node.input[1], _axes(node)[1]), *added)
    if len(node.input) > 2 and node.input[2]:
        return (*found, (node.input[2], -1)) if parts.owns(node, 2) else ()
    return found


def _shaped(factors: Any, array: Any, axis: int) -> Any:
    shape = [1] * array.ndim
    shape[axis] = -1
    return factors.reshape(shape)


def balance(prepared: Path, names: tuple[str, ...], batches: list[Tensors], strength: float, is_big: bool) -> int:
    """Balance every activation of a graph that can be; returns how many there were."""
    onnx = require("onnx")
    model = onnx.load(str(prepared))
    parts = _parts(model.graph)
    links = list(_links(parts))
    axes = {link.tensor: link.channel_axis for link in links}
    largest: dict[str, Any] = {}
    with Observer(prepared, list(axes), names) as observer:
        for name, array in observer.values(batches):
            others = tuple(axis for axis in range(array.ndim) if axis != axes[name] % array.ndim)
            largest[name] = np.maximum(largest.get(name, 0.0), np.abs(array).max(others))
    done = 0
    for link in links:
        done += _balanced(parts, link, largest.get(link.tensor), strength)
    onnx.save(model, str(prepared), save_as_external_data=is_big)
    return done


def _balanced(parts: _Parts, link: _Link, seen: Any, strength: float) -> bool:
    read = [_largest_by_input(parts, node) for node in link.readers]
    folded = [(name, axis, parts.array(name)) for name, axis in link.folded]
    widths = {len(each) for each in read} | {array.shape[axis] for _, axis, array in folded}
    if seen is None or widths != {len(seen)}:
        return False
    weight = np.max(read, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = seen**strength / weight ** (1 - strength)
    is_known = np.isfinite(factors) & (seen > 0) & (weight > 0)
    factors = np.clip(np.where(is_known, factors, 1.0), 1 / _LARGEST, _LARGEST)
    for name, axis, array in folded:
        parts.put(name, array / _shaped(factors, array, axis))
    for node in link.readers:
        array = parts.array(node.input[1])
        parts.put(node.input[1], array * _shaped(factors, array, _axes(node)[0]))
    return True


def _largest_by_input(parts: _Parts, node: Any) -> Any:
    array = np.abs(parts.array(node.input[1]))
    axis = _axes(node)[0]
    return array.max(tuple(other for other in range(array.ndim) if other != axis))


def correct_biases(
    prepared: Path, quantized: Path, corrected: Path, names: tuple[str, ...], batches: list[Tensors], is_big: bool
) -> int:
    """Write the float graph with biases that take out the mean shift of its quantised weights; returns how many."""
    onnx = require("onnx")
    model = onnx.load(str(prepared))
    parts = _parts(model.graph)
    rounded = _rounded_weights(onnx.load(str(quantized)).graph)
    layers = [
        node
        for node in model.graph.node
        if node.op_type in _LAYERS and parts.owns(node, 1) and node.input[1] in rounded and _bias_of(parts, node)
    ]
    means = _means(prepared, list(dict.fromkeys(node.input[0] for node in layers)), names, batches)
    done = 0
    for node in layers:
        seen = means.get(node.input[0])
        if seen is not None:
            change = rounded[node.input[1]] - parts.array(node.input[1])
            _shift(parts, node, _mean_output(node, change, seen))
            done += 1
    onnx.save(model, str(corrected), save_as_external_data=is_big)
    return done


def _rounded_weights(graph: Any) -> dict[str, Any]:
    """Weights of a quantised graph by their former names, as their integers say them."""
    helper = require("onnx").numpy_helper
    known = {item.name: item for item in graph.initializer}
    found = {}
    for node in graph.node:
        name = node.input[0].removesuffix("_quantized") if node.input else ""
        if node.op_type != "DequantizeLinear" or node.input[0] not in known or name == node.input[0]:
            continue
        integers, scale = (helper.to_array(known[each]).astype(np.float32) for each in node.input[:2])
        if integers.ndim < 2:
            continue
        axis = _attribute(node, "axis", 1)
        zero = helper.to_array(known[node.input[2]]).astype(np.float32) if len(node.input) > 2 else np.zeros_like(scale)
        if scale.ndim:
            scale, zero = _shaped(scale, integers, axis), _shaped(zero, integers, axis)
        found[name] = (integers - zero) * scale
    return found


def _means(prepared: Path, wanted: list[str], names: tuple[str, ...], batches: list[Tensors]) -> dict[str, Any]:
    """The mean sample of each tensor; those whose samples differ in shape are left out."""
    sums: dict[str, Any] = {}
    count: dict[str, int] = defaultdict(int)
    uneven: set[str] = set()
    with Observer(prepared, wanted, names) as observer:
        for name, array in observer.values(batches):
            total = array.sum(0, keepdims=True, dtype=np.float64)
            if name in sums and sums[name].shape != total.shape:
                uneven.add(name)
                continue
            sums[name] = sums.get(name, 0.0) + total
            count[name] += len(array)
    return {name: (total / count[name]).astype(np.float32) for name, total in sums.items() if name not in uneven}


def _mean_output(node: Any, weight: Any, seen: Any) -> Any:
    """What a layer with these weights and no bias gives on average, for each output."""
    onnx = require("onnx")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    del alone.input[:], alone.output[:]
    alone.input.extend(["x", "w"])
    alone.output.append("y")
    graph = helper.make_graph(
        [alone],
        "layer",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, seen.shape)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.ascontiguousarray(weight, dtype=np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    runtime = require("onnxruntime")
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"x": seen})
    channel = 1 if node.op_type == "Conv" else found.ndim - 1
    return found.mean(tuple(axis for axis in range(found.ndim) if axis != channel), dtype=np.float64)


def _bias_of(parts: _Parts, node: Any) -> tuple[Any, int] | None:
    """The node and the place of a layer's bias; the place is that of a new one where it has none. None: nowhere."""
    if node.op_type != "MatMul":
        is_free = len(node.input) < 3 or not node.input[2]
        return (node, 2) if is_free or parts.owns(node, 2) else None
    readers = parts.readers[node.output[0]]
    if len(readers) != 1 or readers[0] is None or readers[0].op_type != "Add":
        return None
    place = next((place for place in (0, 1) if parts.owns(readers[0], place)), None)
    return None if place is None else (readers[0], place)


def _shift(parts: _Parts, node: Any, shift: Any) -> None:
    found = _bias_of(parts, node)
    assert found is not None
    holder, place = found
    if len(holder.input) > place and holder.input[place]:
        name = holder.input[place]
        parts.put(name, parts.array(name) - shift)
        return
    name = f"{node.output[0]}_bias"
    new = require("onnx").numpy_helper.from_array((-shift).astype(np.float32), name)
    parts.graph.initializer.append(new)
    if len(holder.input) > place:
        holder.input[place] = name
    else:
        holder.input.append(name)
