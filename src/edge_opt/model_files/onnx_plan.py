"""What is worked out once per ONNX file: which node is whose, which are constant, when each value is read last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from edge_opt.errors import InvalidInput, UnreadableModel
from edge_opt.model_files.graph_scopes import Scope, connect, names_read, scopes_of, spans
from edge_opt.model_files.onnx_call import MOST_ELEMENTS, real_values, torch_dtype
from edge_opt.model_files.onnx_file import MOST_KNOWN, OnnxFile, OnnxGraph, OnnxNode, OnnxTensor, OnnxValue
from edge_opt.model_files.onnx_quantized import nodes_on_bytes

RANDOM = frozenset("RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial".split())
BY_SHAPE = frozenset(("Shape", "Size"))
CONTROL = frozenset(("If", "Loop", "Scan"))
# Weights that scikit-learn's operators keep among their attributes.
_KEPT_INSIDE = {"LinearRegressor": ("coefficients", "intercepts"), "LinearClassifier": ("coefficients", "intercepts"),
                "Scaler": ("offset", "scale")}  # fmt: skip
# Inputs that describe a quantised tensor rather than being one: scales and zero points.
_SCALES = {"QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "QLinearConv": (1, 2, 4, 5, 6, 7),
           "QLinearMatMul": (1, 2, 4, 5, 6, 7), "MatMulInteger": (2, 3), "ConvInteger": (2, 3),
           "DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (2, 3, 4, 5), "QGemm": (1, 2, 4, 5, 7, 8),
           "BatchNormalization": (3, 4)}  # fmt: skip


def identifier(name: str) -> str:
    clean = re.sub(r"\W", "_", name)
    return clean if clean.isidentifier() else f"input_{clean}"


class Plan:
    """What is worked out once per file: which node is whose, which are constant, when each value is read last."""

    def __init__(self, file: OnnxFile) -> None:
        self.file = file
        constants = dict(file.graph.constants)
        self.nodes = tuple(_with_weights(node, place, constants) for place, node in enumerate(file.graph.nodes))
        _check_order(self.nodes, constants, file.graph)
        self.outputs = frozenset(value.name for value in file.graph.outputs)
        self.folded, names = _constant_nodes(self.nodes, constants)
        self.on_bytes = nodes_on_bytes(self.nodes, names, self.outputs)
        chains = self._chains(names)
        self.tree = spans(chains)
        connect(self.tree, self.nodes, names, self.outputs)
        self.modules = self._modules(chains)
        self.last = {
            name: place for place, node in enumerate(self.nodes) for name in (*node.outputs, *names_read(node))
        }
        readers: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            for name in names_read(node):
                readers.setdefault(name, place)
        # Who multiplies a quantised weight owns it, not the step that widens it.
        users = {name: readers.get(self.nodes[place].outputs[0], place) if self.nodes[place].op == "DequantizeLinear"
                 else place for name, place in readers.items()}  # fmt: skip
        self.owners = {name: chains[place][-1].path if chains[place] else "" for name, place in users.items()}
        self.paths = tuple(chain[-1].path if chain else "" for chain in chains)
        self.places = {
            name: place for place, node in enumerate(self.nodes) for name in (*node.outputs, node.name) if name
        }
        self.read_ops: list[
            tuple[int, int]
        ] = []  # of the last trace: first operator of each node, and one past its last
        self.roles = _roles(self.nodes, constants, file.graph.values)
        self.known = {name: value for name, one in constants.items() if (value := real_values(one)) is not None}
        self.tensors = {name: hollow(one, self.roles[name]) for name, one in constants.items()}
        self.names = [value.name for value in file.graph.inputs]

    def _chains(self, names: frozenset[str]) -> list[tuple[Scope, ...]]:
        """The modules of each node. A constant one stays where the flow is, so that it ends no call; steps between
        floats and bytes that a quantiser put in belong to who reads or made what they convert."""
        found: list[tuple[Scope, ...]] = []
        readers = {name: place for place, node in reversed(list(enumerate(self.nodes))) for name in node.inputs}
        makers = {name: place for place, node in enumerate(self.nodes) for name in node.outputs}
        for place, node in enumerate(self.nodes):
            is_step = not node.metadata and node.op in ("QuantizeLinear", "DequantizeLinear")
            other = None
            if is_step and not names.issuperset(node.inputs):
                is_back = node.op == "DequantizeLinear"
                other = readers.get(node.outputs[0]) if is_back else makers.get(node.inputs[0])
            if other is not None and place not in self.folded:
                found.append(found[other] if other < place else scopes_of(self.nodes[other], other))
            else:
                flows = is_step or place in self.folded
                found.append((found[-1] if found else ()) if flows else scopes_of(node, place))
        return found

    def _modules(self, chains: Sequence[tuple[Scope, ...]]) -> dict[str, str]:
        """Every module by its path, with its class; of an unknown one its largest node says what it is."""
        kinds: dict[str, str] = {}
        mains: dict[str, str] = {}
        for place, chain in enumerate(chains):
            for scope in chain:
                kinds[scope.path] = kinds.get(scope.path) or scope.kind
            if chain and place not in self.folded:
                op = self.nodes[place].op
                path = chain[-1].path
                mains[path] = op if mains.get(path) is None or op in _MAIN else mains[path]
        return {path: kind or mains.get(path, "Module") for path, kind in sorted(kinds.items())}

    def arguments(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The call's inputs by their names in the file, checked against what the file says of them."""
        values = self.file.graph.inputs
        names = {identifier(value.name): value.name for value in values} | {value.name: value.name for value in values}
        found = dict(zip(self.names, given, strict=False))
        unknown = next((name for name in named if name not in names), None)
        if unknown is not None or len(given) > len(values):
            what = f"no input {unknown!r}" if unknown is not None else f"{len(values)} inputs, not {len(given)}"
            raise InvalidInput(f"the file has {what}; it takes {_described(values)}")
        found |= {names[name]: value for name, value in named.items()}
        missing = next((value.name for value in values if value.name not in found), None)
        if missing is not None:
            raise InvalidInput(f"the input {missing!r} is missing; the file takes {_described(values)}")
        for value in values:
            self._check_input(value, found[value.name])
        return {name: self._typed(value, found[value.name]) for value in values for name in (value.name,)}

    @staticmethod
    def _check_input(value: OnnxValue, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(f"the input {value.name!r} is a {type(tensor).__name__}; the file takes a tensor")
        shape = tuple(tensor.shape)
        dims = value.shape
        fits = dims is None or (
            len(dims) == len(shape)
            and all(not isinstance(want, int) or want in (size, -1, 0) for want, size in zip(dims, shape, strict=True))
        )
        if not fits:
            raise InvalidInput(f"the input {value.name!r} is {_shown(shape)}, and the file takes {_shown(dims or ())}")

    @staticmethod
    def _typed(value: OnnxValue, tensor: torch.Tensor) -> torch.Tensor:
        """An input given by its shape alone has the type of the weights; the file knows better."""
        wanted = None if value.dtype is None else torch_dtype(value.dtype)
        if wanted is None or wanted == tensor.dtype:
            return tensor
        raise InvalidInput(
            f"the input {value.name!r} is of {str(tensor.dtype).removeprefix('torch.')}, and the file takes "
            f"{value.dtype}; write --input {identifier(value.name)}:{_shown(tuple(tensor.shape))}:{value.dtype}"
        )


_MAIN = frozenset("Conv ConvTranspose Gemm MatMul LSTM GRU RNN QLinearConv QLinearMatMul BatchNormalization "
                  "LayerNormalization Attention MaxPool AveragePool GlobalAveragePool Gather".split())  # fmt: skip


def _shown(shape: Sequence[int | str]) -> str:
    return "x".join(str(dim) or "?" for dim in shape) or "scalar"


def _described(values: Sequence[OnnxValue]) -> str:
    return ", ".join(f"{value.name} ({_shown(value.shape or ())}, {value.dtype})" for value in values) or "none"


def _with_weights(node: OnnxNode, place: int, constants: dict[str, OnnxTensor]) -> OnnxNode:
    """The node with weights that it keeps among its attributes as inputs, like any other weights."""
    added = []
    for name in _KEPT_INSIDE.get(node.op, ()) if node.domain == "ai.onnx.ml" else ():
        values = node.attributes.get(name, ())
        if values:
            key = f"{node.name or node.op}_{place}.{name}"
            constants[key] = OnnxTensor(key, (len(values),), 1, None)
            added.append(key)
    return replace(node, inputs=(*node.inputs, *added)) if added else node


def _check_order(nodes: Sequence[OnnxNode], constants: Mapping[str, OnnxTensor], graph: OnnxGraph) -> None:
    """Each value must be made before it is read: then there is no cycle, either."""
    made = {*constants, *(value.name for value in graph.inputs), ""}
    for node in nodes:
        missing = next((name for name in names_read(node) if name not in made), None)
        if missing is not None:
            raise UnreadableModel(
                f"{node.label} reads {missing!r}, which no node before it makes: they are in a circle, or in disorder"
            )
        made.update(node.outputs)
    lost = next((value.name for value in graph.outputs if value.name not in made), None)
    if lost is not None:
        raise UnreadableModel(f"the output {lost!r} is made by no node")


def _constant_nodes(
    nodes: Sequence[OnnxNode], constants: Mapping[str, OnnxTensor]
) -> tuple[frozenset[int], frozenset[str]]:
    """Places of the nodes that a runtime works out once, when it loads the file, and the names of their results.

    A weight that is stored as bytes is not among them: it stays bytes until it is used.
    """
    names = {*constants, ""}
    places: set[int] = set()
    for place, node in enumerate(nodes):
        is_free = node.op in RANDOM or node.op in ("DequantizeLinear", *CONTROL)
        if (node.op in BY_SHAPE and not node.domain) or (not is_free and names.issuperset(names_read(node))):
            places.add(place)
            names.update(node.outputs)
    return frozenset(places), frozenset(names)


def _roles(
    nodes: Sequence[OnnxNode], constants: Mapping[str, OnnxTensor], values: Mapping[str, OnnxValue]
) -> dict[str, str]:
    """What each constant was in the model: "parameter", "buffer", or a "constant" of its code.

    Torch's exporter says so of most. Else weights are what has a dimension and is of floats, or of bytes that are
    multiplied; statistics of batch norms, scales and zero points are buffers.
    """
    scales = {node.inputs[place] for node in nodes for place in _SCALES.get(node.op, ()) if place < len(node.inputs)}
    multiplied = {
        name for node in nodes for name in node.inputs
        if node.op in ("DequantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "QGemm",
                       "DynamicQuantizeMatMul", "MatMulIntegerToFloat")
    }  # fmt: skip
    is_labelled = any(value.role == "PARAMETER" for value in values.values())

    def role(name: str, one: OnnxTensor) -> str:
        said = values[name].role if name in values else ""
        if said in ("PARAMETER", "BUFFER"):
            return said.lower()
        if name in scales:
            return "buffer"
        is_float = "float" in one.dtype
        if not one.shape or not (is_float or name in multiplied):
            return "buffer" if one.shape and prod(one.shape) > MOST_KNOWN else "constant"
        # One number without a path is a factor that the exporter wrote as a tensor.
        return "constant" if is_labelled and prod(one.shape) == 1 and "." not in name else "parameter"

    return {name: role(name, one) for name, one in constants.items()}


def hollow(one: OnnxTensor, role: str) -> torch.Tensor:
    if prod(one.shape) > MOST_ELEMENTS:
        raise UnreadableModel(f"the constant {one.name!r} would have the shape {one.shape}")
    empty = torch.empty(one.shape, dtype=torch_dtype(one.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=empty.is_floating_point()) if role == "parameter" else empty
