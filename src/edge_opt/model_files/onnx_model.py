"""An ONNX file as a torch module without weights: a trace of it is a reading of the file, and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from edge_opt.errors import EdgeOptError, InvalidInput, TraceFailed, UnreadableModel, first_line
from edge_opt.model_files import onnx_movement, onnx_operators, onnx_quantized
from edge_opt.model_files.graph_scopes import Scope, Span, connect, names_read, root_kind, scopes_of, spans
from edge_opt.model_files.onnx_call import MOST_ELEMENTS, Call, handler_of, numbers, real_values, torch_dtype
from edge_opt.model_files.onnx_file import (
    MOST_KNOWN,
    Function,
    OnnxFile,
    OnnxGraph,
    OnnxNode,
    OnnxTensor,
    OnnxValue,
    Reference,
    read_onnx,
)

_TABLES = (onnx_movement, onnx_operators, onnx_quantized)  # importing them fills the table of operators
_RANDOM = frozenset(("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"))
_BY_SHAPE = frozenset(("Shape", "Size"))
_CONTROL = frozenset(("If", "Loop", "Scan"))
# Values, not sizes, of their inputs say how large their results are: their shapes come first.
_GROWING = frozenset("Expand Tile ConstantOfShape Range Pad Resize Upsample OneHot ConvTranspose".split())
_MOST_WORK = 1 << 20
_MOST_STEPS = 50_000
_DEEPEST_CALL = 64
_MOST_FUSED = 4
# Weights that scikit-learn's operators keep among their attributes.
_KEPT_INSIDE = {"LinearRegressor": ("coefficients", "intercepts"), "LinearClassifier": ("coefficients", "intercepts"),
                "Scaler": ("offset", "scale")}  # fmt: skip
# Inputs that describe a quantised tensor rather than being one: scales and zero points.
_SCALES = {"QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "QLinearConv": (1, 2, 4, 5, 6, 7),
           "QLinearMatMul": (1, 2, 4, 5, 6, 7), "MatMulInteger": (2, 3), "ConvInteger": (2, 3),
           "DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (2, 3, 4, 5), "QGemm": (1, 2, 4, 5, 7, 8),
           "BatchNormalization": (3, 4)}  # fmt: skip


class ScopeModule(nn.Module):
    """A module of the model that was exported. It is called with stand-ins for what it reads, to show their shapes."""

    def forward(self, run: Run, span: Span, *shown: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return run.inside(span)


class OnnxModel(nn.Module):
    """A model read from an `.onnx` file: its weights have shapes and no values, and a call of it is a reading.

    Attributes:
        file: The file that it was read from.
    """

    def __init__(self, file: OnnxFile) -> None:
        super().__init__()
        self.file = file.path
        self.plan = _Plan(file)
        for path, kind in self.plan.modules.items():
            _attach(self, path, kind)
        owners = dict(self.named_modules(remove_duplicate=False))
        for name, tensor in self.plan.tensors.items():
            role = self.plan.roles[name]
            owner = owners[self.plan.owners.get(name, "")]
            table: Any = owner._parameters if role == "parameter" else owner._buffers
            if role != "constant":
                table[_free_key(name, owner)] = tensor
        kind = root_kind(file.graph.nodes)
        if kind:
            _show_class(self, kind)

    def forward(self, *given: Any, **named: Any) -> Any:
        inputs = self.plan.arguments(given, named)
        run = Run(self.plan, dict(self.named_modules()), inputs)
        return run.whole()

    def session(self, threads: int | None = None) -> nn.Module:
        """The file as ONNX Runtime runs it, to be measured.

        Args:
            threads: Threads of the runtime; as many as torch uses unless given.
        """
        from edge_opt.model_files.onnx_session import Session

        return Session(self.file, self.plan.arguments, threads)

    def module_of(self, name: str, op: str = "") -> str | None:
        """Path of the module behind a kernel of a runtime; None where no node has that name.

        Args:
            name: Name of a node of the file, or of a value that it makes.
            op: What the kernel computes, such as "Conv". A fused one is named after the last of its nodes, so the
                nearest node of that type in front of it is meant.
        """
        plan = self.plan
        place = plan.places.get(name)
        if place is None:
            return None
        family = re.sub(r"^(QLinear|Fused|Q)|Integer$", "", op)
        seen = place
        for _ in range(_MOST_FUSED):
            if not family or plan.nodes[seen].op == family:
                return plan.paths[seen]
            before = plan.places.get(next((one for one in plan.nodes[seen].inputs if one in plan.places), ""))
            if before is None:
                break
            seen = before
        return plan.paths[place]

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Inputs of the shapes that the file gives, an open first dimension taken as 1; None where more is open."""
        found = []
        for value in self.plan.file.graph.inputs:
            if value.shape is None or value.dtype is None:
                return None
            first, *others = value.shape or (1,)
            if not all(isinstance(dim, int) and dim > 0 for dim in others):
                return None
            batch = first if isinstance(first, int) and first > 0 else 1
            sizes = (batch, *(int(dim) for dim in others)) if value.shape else ()
            if prod(sizes) > MOST_ELEMENTS:
                return None
            found.append(torch.empty(sizes, dtype=torch_dtype(value.dtype), device="meta"))
        return tuple(found), {}


def load_onnx(path: str | Path) -> OnnxModel:
    """The model of an `.onnx` file, to be profiled, compared and checked like any other; nothing in it is run.

    Args:
        path: The file.
    """
    try:
        return OnnxModel(read_onnx(path))
    except RecursionError as error:
        raise UnreadableModel(f"{str(path)!r} cannot be read: its graphs are nested too deep") from error


def _identifier(name: str) -> str:
    clean = re.sub(r"\W", "_", name)
    return clean if clean.isidentifier() else f"input_{clean}"


def _free_key(name: str, owner: nn.Module) -> str:
    key = name.rpartition(".")[2] or "value"
    taken = {*owner._parameters, *owner._buffers, *owner._modules}
    return key if key not in taken else f"{key}_{len(taken)}"


def _attach(root: nn.Module, path: str, kind: str) -> None:
    """Hang a module into the tree under the nearest one that is there."""
    known = dict(root.named_modules()) if root._modules else {"": root}
    parent = path
    while parent and (parent == path or parent not in known):
        parent = parent.rpartition(".")[0]
    module = ScopeModule()
    _show_class(module, kind)
    known[parent]._modules[path.removeprefix(parent).removeprefix(".")] = module


def _show_class(module: nn.Module, kind: str) -> None:
    """Give a module the name of the class it was exported from, as tables and other tools' conventions show it."""
    defined_in, _, name = kind.rpartition(".")
    cls = type(module)
    module.__class__ = type(_identifier(name), (cls,), {"__module__": defined_in or cls.__module__})


class _Plan:
    """What is worked out once per file: which node is whose, which are constant, when each value is read last."""

    def __init__(self, file: OnnxFile) -> None:
        self.file = file
        constants = dict(file.graph.constants)
        self.nodes = tuple(_with_weights(node, place, constants) for place, node in enumerate(file.graph.nodes))
        _check_order(self.nodes, constants, file.graph)
        self.outputs = frozenset(value.name for value in file.graph.outputs)
        self.folded, names = _constant_nodes(self.nodes, constants)
        self.on_bytes = onnx_quantized.nodes_on_bytes(self.nodes, names, self.outputs)
        chains = self._chains(names)
        self.tree = spans(chains)
        connect(self.tree, self.nodes, names, self.outputs)
        self.modules = self._modules(chains)
        self.last = {name: place for place, node in enumerate(self.nodes) for name in (*node.outputs, *names_read(node))}
        readers: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            for name in names_read(node):
                readers.setdefault(name, place)
        # Who multiplies a quantised weight owns it, not the step that widens it.
        users = {name: readers.get(self.nodes[place].outputs[0], place) if self.nodes[place].op == "DequantizeLinear"
                 else place for name, place in readers.items()}  # fmt: skip
        self.owners = {name: chains[place][-1].path if chains[place] else "" for name, place in users.items()}
        self.paths = tuple(chain[-1].path if chain else "" for chain in chains)
        self.places = {name: place for place, node in enumerate(self.nodes) for name in (*node.outputs, node.name) if name}
        self.read_ops: list[tuple[int, int]] = []  # of the last trace: first operator of each node, and one past its last
        self.roles = _roles(self.nodes, constants, file.graph.values)
        self.known = {name: value for name, one in constants.items() if (value := real_values(one)) is not None}
        self.tensors = {name: _hollow(one, self.roles[name]) for name, one in constants.items()}
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
        names = {_identifier(value.name): value.name for value in values} | {value.name: value.name for value in values}
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
            f"{value.dtype}; write --input {_identifier(value.name)}:{_shown(tuple(tensor.shape))}:{value.dtype}"
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
                f"{node.label} reads {missing!r}, which nothing before it makes: its nodes are in no order, or in a circle"
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
        is_free = node.op in _RANDOM or node.op in ("DequantizeLinear", *_CONTROL)
        if (node.op in _BY_SHAPE and not node.domain) or (not is_free and names.issuperset(names_read(node))):
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
    scales = {
        node.inputs[place] for node in nodes for place in _SCALES.get(node.op, ()) if place < len(node.inputs)
    }
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


def _hollow(one: OnnxTensor, role: str) -> torch.Tensor:
    if prod(one.shape) > MOST_ELEMENTS:
        raise UnreadableModel(f"the constant {one.name!r} would have the shape {one.shape}")
    empty = torch.empty(one.shape, dtype=torch_dtype(one.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=empty.is_floating_point()) if role == "parameter" else empty


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Work that a runtime does when it loads the file, and stand-ins: no part of a run."""
    with _disable_current_modes():
        yield


class Run:
    """One reading of the graph with inputs of one shape."""

    def __init__(self, plan: _Plan, modules: dict[str, nn.Module], inputs: dict[str, torch.Tensor]) -> None:
        self.plan = plan
        self.modules = modules
        self.values: dict[str, Any] = {**plan.tensors, **inputs, "": None}
        self.known: dict[str, torch.Tensor] = dict(plan.known)
        self.bytes: dict[str, torch.Tensor] = {}  # what a DequantizeLinear was given, by the name of its result
        self.steps = 0
        self.depth = 0
        self.dims = {
            dim: size
            for value in plan.file.graph.inputs
            for dim, size in zip(value.shape or (), inputs[value.name].shape, strict=False)
            if isinstance(dim, str) and dim
        }

    def whole(self) -> Any:
        """Read every node, and return what the file returns."""
        self.plan.read_ops = [(0, 0)] * len(self.plan.nodes)
        self.inside(self.plan.tree)
        found = tuple(self.value(value.name) for value in self.plan.file.graph.outputs)
        return found[0] if len(found) == 1 else found

    def inside(self, span: Span) -> tuple[torch.Tensor, ...]:
        """Read the nodes of one call of a module."""
        for item in span.items:
            if isinstance(item, int):
                self.node(item)
            else:
                scope = item.scope
                module = self.modules[scope.path if scope is not None else ""]
                module(self, item, *self._shown(item.reads))
        return self._shown(span.makes)

    def _shown(self, names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        """Stand-ins of the same shape: the values themselves must go when they are read for the last time."""
        with _unrecorded():
            return tuple(
                torch.empty(value.shape, device="meta")
                for value in (self.bytes.get(name, self.values.get(name)) for name in names)
                if isinstance(value, torch.Tensor)
            )

    def node(self, place: int) -> None:
        """Read one node, and note which operators of the trace it became."""
        before = self._recorded()
        self._node(place)
        self.plan.read_ops[place] = (before, self._recorded())

    @staticmethod
    def _recorded() -> int:
        """How many operators the trace has so far; none where nobody records."""
        return len(getattr(_get_current_dispatch_mode(), "ops", ()))

    def _node(self, place: int) -> None:
        node = self.plan.nodes[place]
        if place in self.plan.folded:
            self._fold(node)
        elif node.op == "DequantizeLinear":
            self.bytes[node.outputs[0]] = self.value(node.inputs[0])
            self._wait(node)
        else:
            self._step(node, place in self.plan.on_bytes)
        for name in (*names_read(node), *node.outputs):
            if self.plan.last.get(name) == place and name not in self.plan.outputs and name not in self.plan.tensors:
                self.values.pop(name, None)
                self.bytes.pop(name, None)

    def _wait(self, node: OnnxNode) -> None:
        """Put floats off until somebody reads them: a runtime that computes on bytes never makes them."""
        self.values[node.outputs[0]] = _Floats(node, {name: self.values[name] for name in node.inputs if name})

    def value(self, name: str, on_bytes: bool = False) -> Any:
        """A value by its name; floats of quantised data are made when they are first read."""
        if on_bytes and name in self.bytes:
            return self.bytes[name]
        found = self.values[name]
        if isinstance(found, _Floats):
            inputs = [found.given.get(one) for one in found.node.inputs]
            known = [self.known.get(one) for one in found.node.inputs]
            found = onnx_quantized.dequantize(Call(found.node, found.node.attributes, inputs, known, self.plan.file.opset))
            self.values[name] = found
        return found

    def _fold(self, node: OnnxNode) -> None:
        """A node whose result is known before the run: its values where they are few, else its shape."""
        with _unrecorded():
            real = [self.known.get(name) for name in node.inputs]
            is_known = all(one is not None or not name for one, name in zip(real, node.inputs, strict=True))
            is_known = is_known and handler_of(node) is not None and node.op not in _BY_SHAPE
            if not is_known or node.op in _GROWING or prod(one.numel() for one in real if one is not None) > _MOST_WORK:
                self._step(node, False)
                made = [self.values[name] for name in node.outputs if name]
                if node.op in _BY_SHAPE:
                    self.known[node.outputs[0]] = made[0]
                is_known &= all(isinstance(one, torch.Tensor) and one.numel() <= MOST_KNOWN for one in made)
            if is_known:
                found = self._called(Call(node, node.attributes, real, real, self.plan.file.opset, "cpu"))
                self.known.update(zip(node.outputs, found, strict=False))
                self.values.update(zip(node.outputs, found, strict=False))
            for name in node.outputs:
                value = self.values.get(name)
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    self.values[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")

    def _step(self, node: OnnxNode, on_bytes: bool, attributes: dict[str, Any] | None = None) -> None:
        """Read one node; its results are noted under their names."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise TraceFailed(f"{node.label}: its loops take more than {_MOST_STEPS:,} steps; bound them to profile")
        settings = node.attributes if attributes is None else attributes
        function = self.plan.file.functions.get((node.domain, node.op))
        inputs = [self.value(name, on_bytes) for name in node.inputs]
        call = Call(node, settings, inputs, [self.known.get(name) for name in node.inputs], self.plan.file.opset)
        if node.op in _CONTROL and not node.domain:
            found = _Control(self, call).found()
        elif handler_of(node) is not None:
            found = self._called(call)
        elif function is not None:
            found = self._function(function, call)
        else:
            found = self._opaque(call)
        for name, value in zip(node.outputs, found, strict=False):
            if name:
                self.values[name] = value

    @staticmethod
    def _called(call: Call) -> tuple[Any, ...]:
        handler = handler_of(call.node)
        assert handler is not None
        try:
            found = handler(call)
        except EdgeOptError:
            raise
        except Exception as error:
            raise call.refusal(f"its inputs do not fit: {first_line(error)}") from error
        return found if isinstance(found, tuple) else (found,)

    def _function(self, function: Function, call: Call) -> tuple[Any, ...]:
        """A function of the file, read node by node with names of its own."""
        self.depth += 1
        if self.depth > _DEEPEST_CALL:
            raise call.refusal("its functions call each other in a circle")
        outer_values, outer_known = self.values, self.known
        self.values = {"": None, **dict(zip(function.inputs, call.inputs, strict=False))}
        self.values |= {name: None for name in function.inputs if name not in self.values}
        self.known = {name: one for name, one in zip(function.inputs, call.known, strict=False) if one is not None}
        given = function.defaults | call.attributes
        try:
            for node in function.nodes:
                settings = {
                    name: given.get(value.name) if isinstance(value, Reference) else value
                    for name, value in node.attributes.items()
                }
                settings = {name: value for name, value in settings.items() if value is not None}
                self.inner(replace(node, attributes=settings))
            return tuple(self.value(name) for name in function.outputs)
        finally:
            self.values, self.known = outer_values, outer_known
            self.depth -= 1

    def inner(self, node: OnnxNode) -> None:
        """A node inside a function or a body: constant where everything it reads is known."""
        is_known = all(name in self.known for name in names_read(node))
        if node.op in _BY_SHAPE or (is_known and node.op not in _RANDOM and node.op not in _CONTROL):
            self._fold(node)
        else:
            self._step(node, False)

    def _opaque(self, call: Call) -> tuple[Any, ...]:
        """An operator that nothing is known of: it has no price, and the file must say what it returns."""
        found = []
        for name in call.node.outputs:
            value = self.plan.file.graph.values.get(name)
            shape = None if value is None or value.shape is None else [self.dims.get(d, d) for d in value.shape]  # type: ignore[call-overload]
            if value is None or shape is None or value.dtype is None or any(not isinstance(dim, int) for dim in shape):
                raise call.refusal("there is no rule for it, and the file does not say the shape of its result; "
                                   "run onnx.shape_inference over the file, or leave that part out")  # fmt: skip
            found.append(call.empty(tuple(shape), torch_dtype(value.dtype)).to("meta"))
        return _unpriced(call, found)


def _unpriced(call: Call, made: list[torch.Tensor]) -> tuple[Any, ...]:
    """The results of an operator without a rule, recorded under its name."""
    name = re.sub(r"\W", "_", f"{call.node.domain}_{call.node.op}" if call.node.domain else call.node.op)
    library = onnx_quantized._library
    if not hasattr(torch.ops.onnx_file, name):
        onnx_quantized._define(f"{name}(Tensor[] inputs, Tensor[] like) -> Tensor[]", _likes)
    assert library is not None
    given = [value for value in call.inputs if isinstance(value, torch.Tensor)]
    return tuple(getattr(torch.ops.onnx_file, name)(given, made))


def _likes(inputs: list[torch.Tensor], like: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(one) for one in like]


class _Floats:
    """Floats that a DequantizeLinear would make, not made yet; what they are made of is kept alive."""

    __slots__ = ("given", "node")

    def __init__(self, node: OnnxNode, given: dict[str, Any]) -> None:
        self.node = node
        self.given = given


class _Control:
    """If, Loop and Scan: what they run is counted where the number of runs is known."""

    def __init__(self, run: Run, call: Call) -> None:
        self.run = run
        self.call = call

    def found(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = getattr(self, f"_{self.call.node.op.lower()}")()
        return found

    def _body(self, graph: OnnxGraph, inputs: list[Any], known: list[torch.Tensor | None]) -> list[Any]:
        """One run of a graph inside; it sees the values around it."""
        run = self.run
        run.depth += 1
        if run.depth > _DEEPEST_CALL:
            raise self.call.refusal("its graphs call each other too deep")
        before_values, before_known = run.values, run.known
        names = [value.name for value in graph.inputs]
        tensors = {name: _hollow(one, "buffer") for name, one in graph.constants.items()}
        run.values = {**before_values, **tensors, **dict(zip(names, inputs, strict=False))}
        run.known = {key: value for key, value in before_known.items() if key not in names}
        run.known |= {name: value for name, one in graph.constants.items() if (value := real_values(one)) is not None}
        run.known |= {name: value for name, value in zip(names, known, strict=False) if value is not None}
        try:
            _check_inner(graph, run.values)
            for node in graph.nodes:
                run.inner(node)
            self.last_known = [run.known.get(value.name) for value in graph.outputs]
            return [run.value(value.name) for value in graph.outputs]
        finally:
            run.values, run.known = before_values, before_known
            run.depth -= 1

    def _check_steps(self, count: int, body: OnnxGraph) -> None:
        if count * len(body.nodes) > _MOST_STEPS:
            raise self.call.refusal(f"it runs {count:,} times, and more than {_MOST_STEPS:,} steps are not followed")

    def _if(self) -> tuple[Any, ...]:
        condition = self.call.known[0]
        if condition is None:
            raise self.call.refusal("which branch runs depends on values that are known only when the model runs")
        branch = self.call.get("then_branch" if numbers(condition)[0] else "else_branch")
        return tuple(self._body(branch, [], []))

    def _loop(self) -> tuple[Any, ...]:
        call, body = self.call, self.call.get("body")
        count = call.known[0]
        goes_on = call.known[1] if len(call.known) > 1 else None
        if count is None or (call.has(1) and goes_on is None):
            raise call.refusal("how often it runs depends on values that are known only when the model runs")
        trips = int(numbers(count)[0]) if goes_on is None or numbers(goes_on)[0] else 0
        state, known = list(call.inputs[2:]), list(call.known[2:])
        scans: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(state))]
        self._check_steps(trips, body)
        for number in range(trips):
            with _unrecorded():
                given = [torch.tensor(number), torch.tensor(True)]
                shown = [value.to("meta") for value in given]
            made = self._body(body, [*shown, *state], [*given, *known])
            again = self.last_known[0]
            if again is None and body.outputs[0].name != body.inputs[1].name:
                raise call.refusal("when it ends depends on values that are known only when the model runs")
            state, known = made[1 : 1 + len(state)], list(self.last_known[1 : 1 + len(state)])
            for place, value in enumerate(made[1 + len(state) :]):
                scans[place].append(value)
            if again is not None and not numbers(again)[0]:
                break
        if not trips and scans:
            raise call.refusal("it never runs, and what it would have collected has no shape")
        return (*state, *(torch.stack(values) for values in scans))

    def _scan(self) -> tuple[Any, ...]:
        call, body = self.call, self.call.get("body")
        inputs = int(call.get("num_scan_inputs", 1))
        state = list(call.inputs[: len(call.inputs) - inputs])
        rows = call.inputs[len(state) :]
        axes = list(call.get("scan_input_axes", ())) or [0] * inputs
        scans: list[list[Any]] = [[] for _ in range(len(body.outputs) - len(state))]
        self._check_steps(rows[0].shape[axes[0]], body)
        for number in range(rows[0].shape[axes[0]]):
            step = [row.select(axis, number) for row, axis in zip(rows, axes, strict=True)]
            made = self._body(body, [*state, *step], [None] * (len(state) + inputs))
            state = made[: len(state)]
            for place, value in enumerate(made[len(state) :]):
                scans[place].append(value)
        places = list(call.get("scan_output_axes", ())) or [0] * len(scans)
        return (*state, *(torch.stack(values, axis) for values, axis in zip(scans, places, strict=True)))


def _check_inner(graph: OnnxGraph, around: Mapping[str, Any]) -> None:
    made = set(around)
    for node in graph.nodes:
        missing = next((name for name in names_read(node) if name not in made), None)
        if missing is not None:
            raise UnreadableModel(f"{node.label} reads {missing!r}, which nothing before it makes")
        made.update(node.outputs)
