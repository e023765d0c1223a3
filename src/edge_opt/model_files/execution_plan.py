"""Facts computed once per file: the module of each node, constants, and the last reader of each value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from edge_opt.errors import InvalidInput, UnreadableModel
from edge_opt.model_files.file_graph import (
    MOST_KNOWN,
    MOST_NODES,
    FileGraph,
    FileNode,
    FileTensor,
    FileValue,
    ModelFile,
    ModuleSpan,
    Scope,
    graphs_in,
    names_read,
    root_kind,
    scopes_of,
    spans,
)
from edge_opt.model_files.node_call import real_values, torch_dtype
from edge_opt.model_files.onnx_quantized import quantized_nodes
from edge_opt.trace.inputs import MOST_ELEMENTS

RANDOM = frozenset(
    "RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial RANDOM_UNIFORM "
    "RANDOM_STANDARD_NORMAL MULTINOMIAL READ_VARIABLE".split()
)
BY_SHAPE = frozenset(("Shape", "Size", "SHAPE", "RANK"))
CONTROL = frozenset("If Loop Scan IF WHILE CALL CALL_ONCE STABLEHLO_COMPOSITE".split())
# Domains whose operators of these names are meant.
KNOWN_DOMAINS = ("", "tflite")
# Weights that scikit-learn's operators keep among their attributes.
_KEPT_INSIDE = {"LinearRegressor": ("coefficients", "intercepts"), "LinearClassifier": ("coefficients", "intercepts"),
                "Scaler": ("offset", "scale")}  # fmt: skip
# Inputs that describe a quantized tensor rather than being one: scales and zero points.
_SCALES = {"QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "QLinearConv": (1, 2, 4, 5, 6, 7),
           "QLinearMatMul": (1, 2, 4, 5, 6, 7), "MatMulInteger": (2, 3), "ConvInteger": (2, 3),
           "DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (2, 3, 4, 5), "QGemm": (1, 2, 4, 5, 7, 8),
           "BatchNormalization": (3, 4), "MatMulNBits": (2, 3), "GatherBlockQuantized": (2, 3),
           "QAttention": (3, 4, 6, 7)}  # fmt: skip


def identifier(name: str) -> str:
    clean = re.sub(r"\W", "_", name)
    return clean if clean.isidentifier() else f"input_{clean}"


class ExecutionPlan:
    """Facts computed once per file: the module of each node, constants, and the last reader of each value."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        constants = dict(file.graph.constants)
        constants |= _weights_of_nodes(file.graph)
        self.nodes = tuple(_with_weights(node, index, constants) for index, node in enumerate(file.graph.nodes))
        self.reads = tuple(names_read(node) for node in self.nodes)
        available = {*constants, *(value.name for value in file.graph.inputs), ""}
        check_order(self.nodes, available)
        self.outputs = frozenset(value.name for value in file.graph.outputs)
        if not self.outputs <= available:
            raise UnreadableModel(f"the output {min(self.outputs - available)!r} is made by no node")
        self.folded, self.constant_names = _constant_nodes(self.nodes, self.reads, constants)
        self.runs_quantized = quantized_nodes(self.nodes, self.constant_names, self.outputs)
        chains = self._chains()
        self.tree = spans(chains)
        self.modules = self._modules(chains)
        if len(self.modules) > MOST_NODES:
            raise UnreadableModel(f"it has {len(self.modules):,} modules; at most {MOST_NODES:,} are followed")
        kind = root_kind(self.nodes)
        self.kind = _class_path(kind) if kind else ""  # class of the model, where the file says it
        self.last = {
            name: index for index, node in enumerate(self.nodes) for name in (*node.outputs, *self.reads[index])
        }
        readers: dict[str, int] = {}
        for index, names_of_node in enumerate(self.reads):
            for name in names_of_node:
                readers.setdefault(name, index)
        # Who multiplies a quantized weight owns it, not the step that widens it.
        users = {name: readers.get(self.nodes[index].outputs[0], index) if self.nodes[index].op == "DequantizeLinear"
                 else index for name, index in readers.items()}  # fmt: skip
        self.owners = {name: chains[index][-1].path if chains[index] else "" for name, index in users.items()}
        self.paths = tuple(chain[-1].path if chain else "" for chain in chains)
        self.indices = {
            name: index for index, node in enumerate(self.nodes) for name in (*node.outputs, node.name) if name
        }
        self.roles = _roles(self.nodes, constants, file.graph.values)
        self.constant_values = {
            name: value for name, constant in constants.items() if (value := real_values(constant)) is not None
        }
        self.tensors = {name: meta_constant(constant, self.roles[name]) for name, constant in constants.items()}
        self.names = [value.name for value in file.graph.inputs]
        self.inner: dict[int, torch.Tensor] = {}  # constants of graphs inside nodes, by the identity of their record
        for index, node in enumerate(self.nodes):
            self._add_inner(node, self.paths[index])

    def _add_inner(self, node: FileNode, owner: str) -> None:
        """Add the weights of the graphs inside a node: they belong to the module that runs the node."""
        for graph in graphs_in(node):
            roles = _roles(graph.nodes, graph.constants, graph.values)
            for name, constant in graph.constants.items():
                if id(constant) not in self.inner:
                    key = f"{node.name or node.op}/{len(self.inner)}.{name}"
                    self.inner[id(constant)] = self.tensors[key] = meta_constant(constant, roles[name])
                    self.roles[key], self.owners[key] = roles[name], owner
            for inside in graph.nodes:
                self._add_inner(inside, owner)

    def _chains(self) -> list[tuple[Scope, ...]]:
        """Return the modules around each node.

        A constant node stays with the one before it, so that it ends no call. A conversion between floats and bytes
        that a quantizer put in belongs to the module that reads or writes what it converts.
        """
        chains: list[tuple[Scope, ...]] = []
        readers = {name: index for index, node in reversed(list(enumerate(self.nodes))) for name in node.inputs}
        makers = {name: index for index, node in enumerate(self.nodes) for name in node.outputs}
        for index, node in enumerate(self.nodes):
            is_step = not node.metadata and node.op in ("QuantizeLinear", "DequantizeLinear")
            other = None
            if is_step and not self.constant_names.issuperset(node.inputs):
                is_back = node.op == "DequantizeLinear"
                other = readers.get(node.outputs[0]) if is_back else makers.get(node.inputs[0])
            if other is not None and index not in self.folded:
                chains.append(chains[other] if other < index else scopes_of(self.nodes[other], other))
            else:
                flows = is_step or index in self.folded
                chains.append((chains[-1] if chains else ()) if flows else scopes_of(node, index))
        return chains

    def _modules(self, chains: Sequence[tuple[Scope, ...]]) -> dict[str, str]:
        """Return the class of each module by its path; the main node of a module says what an unknown one is."""
        kinds: dict[str, str] = {}
        mains: dict[str, str] = {}
        for index, chain in enumerate(chains):
            for scope in chain:
                kinds[scope.path] = kinds.get(scope.path) or scope.kind
            if chain and index not in self.folded:
                op = self.nodes[index].op
                path = chain[-1].path
                mains[path] = op if mains.get(path) is None or op in _MAIN else mains[path]
        return {path: _class_path(kind or mains.get(path, "Module")) for path, kind in sorted(kinds.items())}

    def boundary(self, span: ModuleSpan) -> tuple[list[str], list[str]]:
        """Return the names of values that a span reads from outside, and of those that others read of it."""
        inside = range(span.first, span.end)
        own = dict.fromkeys(name for index in inside for name in self.nodes[index].outputs if name)
        read = dict.fromkeys(name for index in inside for name in self.reads[index])
        sources = [name for name in read if name not in own and name not in self.constant_names]
        results = [name for name in own if name not in self.constant_names
                   and (name in self.outputs or self.last[name] >= span.end)]  # fmt: skip
        return sources, results

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the call's inputs by their names in the file, checked against what the file says of them."""
        values = self.file.graph.inputs
        names = {identifier(value.name): value.name for value in values} | {value.name: value.name for value in values}
        tensors = dict(zip(self.names, args, strict=False))
        unknown = next((name for name in kwargs if name not in names), None)
        if unknown is not None or len(args) > len(values):
            what = f"no input {unknown!r}" if unknown is not None else f"{len(values)} inputs, not {len(args)}"
            raise InvalidInput(f"the file has {what}; it takes {_described(values)}")
        tensors |= {names[name]: value for name, value in kwargs.items()}
        missing = next((value.name for value in values if value.name not in tensors), None)
        if missing is not None:
            raise InvalidInput(f"the input {missing!r} is missing; the file takes {_described(values)}")
        for value in values:
            _check_input(value, tensors[value.name])
        return {value.name: tensors[value.name] for value in values}


def _check_input(value: FileValue, tensor: Any) -> None:
    """Refuse an input of another shape or element type than the file's; for a type, with the option that sets it."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(f"the input {value.name!r} is a {type(tensor).__name__}; the file takes a tensor")
    shape, dims = tuple(tensor.shape), value.shape
    fits = dims is None or (
        len(dims) == len(shape)
        and all(not isinstance(want, int) or want in (size, -1, 0) for want, size in zip(dims, shape, strict=True))
    )
    if not fits:
        raise InvalidInput(f"the input {value.name!r} is {_shown(shape)}, and the file takes {_shown(dims or ())}")
    if value.dtype is not None and torch_dtype(value.dtype) != tensor.dtype:
        raise InvalidInput(
            f"the input {value.name!r} is of {str(tensor.dtype).removeprefix('torch.')}, and the file takes "
            f"{value.dtype}; write --inputs {identifier(value.name)}:{_shown(shape)}:{value.dtype}"
        )


_MAIN = frozenset("Conv ConvTranspose Gemm MatMul LSTM GRU RNN QLinearConv QLinearMatMul BatchNormalization "
                  "LayerNormalization Attention MaxPool AveragePool GlobalAveragePool Gather CONV_2D "
                  "DEPTHWISE_CONV_2D TRANSPOSE_CONV CONV_3D FULLY_CONNECTED BATCH_MATMUL".split())  # fmt: skip


def _class_path(kind: str) -> str:
    """Return the path of a class with a name that Python allows: a file may say anything.

    A class without a module in the file is not torch's, so it is shown as one of this package.
    """
    defined_in, _, name = kind.rpartition(".")
    return f"{defined_in or __package__}.{identifier(name)}"


def _shown(shape: Sequence[int | str]) -> str:
    return "x".join(str(dim) or "?" for dim in shape) or "scalar"


def _described(values: Sequence[FileValue]) -> str:
    return ", ".join(f"{value.name} ({_shown(value.shape or ())}, {value.dtype})" for value in values) or "none"


def _weights_of_nodes(graph: FileGraph) -> dict[str, FileTensor]:
    """Return the weights that a file keeps in nodes of type Constant, by the names of their results.

    Some exporters write all weights so. Where there are weights outside of nodes, those in nodes are constants of code.
    """
    if any("float" in constant.dtype and prod(constant.shape) > 1 for constant in graph.constants.values()):
        return {}
    constants = {node.outputs[0]: node.attributes.get("value") for node in graph.nodes
             if (node.op, node.domain) == ("Constant", "") and node.outputs}  # fmt: skip
    return {name: replace(constant, name=name) for name, constant in constants.items()
            if isinstance(constant, FileTensor) and "float" in constant.dtype and prod(constant.shape) > 1}  # fmt: skip


def _with_weights(node: FileNode, index: int, constants: dict[str, FileTensor]) -> FileNode:
    """Return the node with the weights among its attributes as inputs, like any other weights."""
    _unpack(node, constants)
    added = []
    for name in _KEPT_INSIDE.get(node.op, ()) if node.domain == "ai.onnx.ml" else ():
        values = node.attributes.get(name, ())
        if values:
            key = f"{node.name or node.op}_{index}.{name}"
            constants[key] = FileTensor(key, (len(values),), "float32", None)
            added.append(key)
    return replace(node, inputs=(*node.inputs, *added)) if added else node


def _unpack(node: FileNode, constants: dict[str, FileTensor]) -> None:
    """Count packed weights of 4 or 2 bits one by one and at their own width, not as the bytes that hold them."""
    packed = constants.get(node.inputs[1]) if node.op == "MatMulNBits" and len(node.inputs) > 1 else None
    bits, rows, columns = (node.attributes.get(name, 0) for name in ("bits", "N", "K"))
    if packed is None or packed.dtype != "uint8" or bits not in (2, 4, 8):
        return
    if rows * columns * bits > prod(packed.shape) * 8:
        raise UnreadableModel(f"{node.label} has {rows}x{columns} weights of {bits} bits in {prod(packed.shape)} bytes")
    constants[packed.name] = FileTensor(packed.name, (rows, columns), f"uint{bits}", None)


def check_order(nodes: Sequence[FileNode], available: set[str]) -> None:
    """Refuse a graph that reads a value before a node makes it, as a cycle would; `available` grows by the results."""
    for node in nodes:
        missing = next((name for name in names_read(node) if name not in available), None)
        if missing is not None:
            raise UnreadableModel(
                f"{node.label} reads {missing!r}, which no node before it makes: they are in a circle, or in disorder"
            )
        available.update(node.outputs)


def _constant_nodes(
    nodes: Sequence[FileNode], reads: Sequence[Sequence[str]], constants: Mapping[str, FileTensor]
) -> tuple[frozenset[int], frozenset[str]]:
    """Return indices of the nodes that a runtime evaluates once, when it loads the file, and names of their results.

    A weight that is stored as bytes is not among them: it stays bytes until it is used.
    """
    names = {*constants, ""}
    indices: set[int] = set()
    for index, node in enumerate(nodes):
        is_free = node.op in RANDOM or node.op in ("DequantizeLinear", *CONTROL)
        if (node.op in BY_SHAPE and node.domain in KNOWN_DOMAINS) or (not is_free and names.issuperset(reads[index])):
            indices.add(index)
            names.update(node.outputs)
    return frozenset(indices), frozenset(names)


def _roles(
    nodes: Sequence[FileNode], constants: Mapping[str, FileTensor], values: Mapping[str, FileValue]
) -> dict[str, str]:
    """Return what each constant was in the model: "parameter", "buffer", or a "constant" of its code.

    Torch's exporter says so of most. Else weights are what has a dimension and is of floats, or of bytes that are
    multiplied; statistics of batch norms, scales and zero points are buffers.
    """
    scales = {node.inputs[index] for node in nodes for index in _SCALES.get(node.op, ()) if index < len(node.inputs)}
    # ONNX Runtime multiplies the scale of an input by that of the weights.
    input_scales = {node.outputs[1] for node in nodes if node.op == "DynamicQuantizeLinear" and len(node.outputs) > 1}
    rescaling = [node for node in nodes if node.op == "Mul" and input_scales.intersection(node.inputs)]
    scales |= {name for node in rescaling for name in node.inputs}
    multiplied = {
        name for node in nodes for name in node.inputs
        if node.op in ("DequantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "QGemm",
                       "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "GatherBlockQuantized",
                       "QAttention")
    }  # fmt: skip
    is_labelled = any(value.role == "PARAMETER" for value in values.values())

    def role(name: str, constant: FileTensor) -> str:
        exported_role = values[name].role if name in values else ""
        if exported_role in ("PARAMETER", "BUFFER"):
            return exported_role.lower()
        if name in scales:
            return "buffer"
        is_float = "float" in constant.dtype
        if not constant.shape or not (is_float or name in multiplied):
            return "buffer" if constant.shape and prod(constant.shape) > MOST_KNOWN else "constant"
        # One number without a path is a factor that the exporter wrote as a tensor.
        return "constant" if is_labelled and prod(constant.shape) == 1 and "." not in name else "parameter"

    return {name: role(name, constant) for name, constant in constants.items()}


def meta_constant(constant: FileTensor, role: str) -> torch.Tensor:
    if prod(constant.shape) > MOST_ELEMENTS:
        raise UnreadableModel(f"the constant {constant.name!r} would have the shape {constant.shape}")
    empty = torch.empty(constant.shape, dtype=torch_dtype(constant.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=empty.is_floating_point()) if role == "parameter" else empty
