"""The contents of a model file in any format: nodes, constants, inputs, outputs, and the modules of nodes.

A module is known by what exporters wrote beside a node, by the node's name, or each node is its own.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_opt.errors import MissingExtra, ModelNotFound, UnreadableModel, first_line, message_of
from edge_opt.text import printable, shorten

# Nodes that are executed, each as often as a loop or a function runs it, and modules: some ten seconds of work.
MOST_NODES = 25_000
LONGEST_NAME = 1 << 16
# As many as numpy and torch have.
MOST_DIMENSIONS = 64
# Sizes from here on are refused.
LARGEST_DIMENSION = 1 << 40
# Constants up to this many elements are read: shapes, axes, scales. Weights beyond it stay on the disk.
MOST_KNOWN = 1 << 16
_SHOWN_LETTERS = 120


@contextmanager
def read_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what goes wrong while a model's file is read into one short sentence with its name."""
    try:
        yield
    except FileNotFoundError:
        raise ModelNotFound(f"no file {str(path)!r}; the folder is {Path.cwd()}") from None
    except (MissingExtra, ModelNotFound):
        raise
    except Exception as error:  # a file that somebody crafted may break any assumption of a reader
        words = message_of if isinstance(error, (UnreadableModel, OSError, ValueError)) else first_line
        raise UnreadableModel(f"{str(path)!r} cannot be read: {words(error)}") from error


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A constant of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # by torch's name; text counts as bytes
    values: np.ndarray[Any, Any] | None  # None for weights: only few values are read


@dataclass(frozen=True, slots=True)
class FileValue:
    """A value that the file describes: an input, an output, or one in between."""

    name: str
    # An unknown dimension is its name, or "" where it has none; None where the rank is unknown.
    shape: tuple[int | str, ...] | None
    dtype: str | None  # by torch's name; None for text, sequences and maps
    role: str = ""  # "PARAMETER" or "BUFFER" where torch's exporter says so


@dataclass(frozen=True, slots=True)
class FileNode:
    """One operator of a graph."""

    op: str  # its type, such as "Conv" or "CONV_2D"
    domain: str  # where the type is defined; "" for ONNX itself
    name: str  # may be empty
    inputs: tuple[str, ...]  # names of values; "" for one that is left out
    outputs: tuple[str, ...]
    attributes: dict[str, Any]  # numbers, texts, lists, tensors and graphs
    metadata: dict[str, str]  # what exporters wrote beside it, such as the path of its module

    @property
    def label(self) -> str:
        """Type and name, for sentences."""
        kind = f"{self.domain}:{self.op}" if self.domain else self.op
        name = self.name or (self.outputs[0] if self.outputs else "")
        return f"{printable(shorten(kind, _SHOWN_LETTERS))} node {printable(shorten(name, _SHOWN_LETTERS))!r}"


@dataclass(frozen=True, slots=True)
class FileGraph:
    """Nodes in the order of execution, and what they start from; constants and values by name."""

    nodes: tuple[FileNode, ...]
    constants: dict[str, FileTensor]
    inputs: tuple[FileValue, ...]  # what a call must give, without constants
    outputs: tuple[FileValue, ...]
    values: dict[str, FileValue]


@dataclass(frozen=True, slots=True)
class Function:
    """Nodes under a name of their own, which other nodes call."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    defaults: dict[str, Any]  # of attributes that a call may leave out
    nodes: tuple[FileNode, ...]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The contents of a file."""

    path: Path
    graph: FileGraph
    opset: int  # version of ONNX's own operators; 0 for other formats
    functions: dict[tuple[str, str], Function]  # by domain and name


@dataclass(frozen=True, slots=True)
class AttributeReference:
    """An attribute inside a function that takes the value of the call's own attribute."""

    name: str


# The modules behind nodes

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
# Exports of our own keep the path of a node's module alone.
OWN_PATH = "edge_opt.module"
_NORM_FOLDED = {"Conv": "torch.nn.modules.conv.Conv2d", "ConvTranspose": "torch.nn.modules.conv.ConvTranspose2d",
                "Gemm": "torch.nn.modules.linear.Linear"}  # fmt: skip
_UNSAFE = re.compile(r"[^\w\-]+")


# Texts without a backslash: Python's own parser takes a hundred times as long.
_TEXT = re.compile(r"""'([^'\\]*)'|"([^"\\]*)\"""")
_PLAIN_TEXTS = re.compile(r"""\[(?:(?:'[^'\\]*'|"[^"\\]*")(?:, ?|(?=\])))*\]""")
_MOST_EVALUATED = 2_000
# Modules inside modules that are told apart; a call of each is one of Python's, which has about 300.
_DEEPEST_SCOPE = 40


class Scope(NamedTuple):
    """A module that a node belongs to."""

    path: str  # such as "layer1.0.conv1"
    kind: str  # its class, such as "torch.nn.modules.conv.Conv2d"; "" if not known


@dataclass(slots=True)
class ModuleSpan:
    """Nodes in a row that one call of a module runs."""

    scope: Scope  # for the model itself one without a path
    first: int  # index of the first node, those of children included
    end: int  # index after the last node
    items: list[int | ModuleSpan] = field(default_factory=list)  # own nodes, and spans of children, in order


def scopes_of(node: FileNode, index: int) -> tuple[Scope, ...]:
    """Return the modules around a node, outermost first, without the model itself; a node without any is its own."""
    if _SCOPES in node.metadata:
        return _exported_scopes(node)[:_DEEPEST_SCOPE]
    if OWN_PATH in node.metadata:
        parts = [part for part in node.metadata[OWN_PATH].split(".") if part]
        return tuple(Scope(".".join(parts[: count + 1]), "") for count in range(min(len(parts), _DEEPEST_SCOPE)))
    if node.domain.startswith("tflite"):
        return _converted_scopes(node, index)[:_DEEPEST_SCOPE]
    names = [part for part in node.name.split("/") if part]
    if len(names) > 1:
        return _named_scopes(names[:-1][:_DEEPEST_SCOPE])
    return (Scope(_UNSAFE.sub("_", node.name) or f"{node.op}_{index}", node.op),)


# A class with the modules that define it, then the name under which its parent has it: "pkg.net.Block_layers.0".
_OWNED = re.compile(r"(?P<kind>(?:\w+\.)*?_*[A-Z][^_./]*|(?:\w+\.)*[^_./]+)_(?P<name>.+)")
_QUALIFIED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_WEIGHTED = frozenset("CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV CONV_3D FULLY_CONNECTED BATCH_MATMUL".split())
# Ours, and where it was defined up to version 0.2, whose files are still read.
_OWN_ADAPTERS = ("edge_opt.runtimes.model_call.FlatModel", "edge_opt.compress.export.Flat")


def _converted_scopes(node: FileNode, index: int) -> tuple[Scope, ...]:
    """Return scopes from names of tensors, where a converter keeps their owners: of the weights, then of the result.

    litert-torch writes "pkg.Net/pkg.Block_layers.0/torch.nn.modules.conv.Conv2d_conv;1", and names that were fused
    one behind the other; TensorFlow writes "net/conv/Conv2D".
    """
    weights = node.inputs[1:2] if node.op in _WEIGHTED else ()
    for name in (*weights, *node.outputs[:1]):
        for chunk in reversed([part for part in name.split(";") if part]):
            pieces = [piece for piece in chunk.split("/") if piece]
            if pieces and _QUALIFIED.fullmatch(pieces[0]) and not chunk.startswith(("arith.", "tfl.")):
                return _owned_scopes(pieces[: _DEEPEST_SCOPE + 2])
            if len(pieces) > 1:
                return _named_scopes(pieces[:-1][:_DEEPEST_SCOPE])
    return (Scope(_UNSAFE.sub("_", node.name) or f"{node.op}_{index}", node.op),)


def _owned_scopes(pieces: Sequence[str]) -> tuple[Scope, ...]:
    """Return modules from the model down, each under its parent's name for it; the model itself is left out."""
    scopes: list[Scope] = []
    for piece in pieces[1:]:
        parts = _OWNED.fullmatch(piece)
        kind, name = (parts["kind"], parts["name"]) if parts else ("", piece)
        path = ".".join(_UNSAFE.sub("_", part) for part in name.split(".") if part) or "_"
        scopes.append(Scope(f"{scopes[-1].path}.{path}" if scopes else path, kind))
    if scopes and pieces[0] in _OWN_ADAPTERS:
        # Our own exports put an adapter around the model, as its "model".
        scopes = [Scope(scope.path.partition(".")[2], scope.kind) for scope in scopes[1:]]
    return tuple(scopes)


def _exported_scopes(node: FileNode) -> tuple[Scope, ...]:
    """Return scopes as torch's exporter writes them: paths from the model down to the operator, and their classes."""
    paths, kinds = _listed(node.metadata[_SCOPES]), _listed(node.metadata.get(_CLASSES, ""))
    kinds += [""] * (len(paths) - len(kinds))
    scopes = list({path: Scope(path, kind) for path, kind in zip(paths[:-1], kinds, strict=False) if path}.values())
    if scopes and "BatchNorm" in scopes[-1].kind and node.op in _NORM_FOLDED:
        # A norm that was folded into a product leaves its own scope there; the weight still says whose it is.
        owner = node.inputs[1].rpartition(".")[0] if len(node.inputs) > 1 else ""
        if owner:
            scopes[-1] = Scope(owner, _NORM_FOLDED[node.op])
    return tuple(scopes)


def root_kind(nodes: Sequence[FileNode]) -> str:
    """Return the class of the model, where an export says so."""
    for node in nodes:
        kinds = _listed(node.metadata.get(_CLASSES, ""))
        if len(kinds) > 1:
            return kinds[0]
    return ""


def _listed(text: str) -> list[str]:
    """Read a list of texts, written as Python would print it; return no texts where it is something else."""
    if _PLAIN_TEXTS.fullmatch(text):
        return [first or second for first, second in _TEXT.findall(text)]
    try:
        value = ast.literal_eval(text) if len(text) < _MOST_EVALUATED else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(item) for item in value] if isinstance(value, list) else []


def _named_scopes(names: Sequence[str]) -> tuple[Scope, ...]:
    """Return scopes from a name such as "/layer1/layer1.0/conv1/Conv": a part may repeat the one before it."""
    scopes: list[Scope] = []
    before = ""
    for name in names:
        part = ".".join(_UNSAFE.sub("_", piece) for piece in name.split(".") if piece) or "_"
        path = scopes[-1].path if scopes else ""
        if before and part.startswith(f"{before}."):
            path = path.removesuffix(before) + part
        else:
            path = f"{path}.{part}" if path else part
        before = part
        scopes.append(Scope(path, ""))
    return tuple(scopes)


def spans(chains: Sequence[tuple[Scope, ...]]) -> ModuleSpan:
    """Return the calls that run the nodes in their order; a module that is left and entered again is called twice."""
    root = ModuleSpan(Scope("", ""), 0, 0)
    stack = [root]
    for index, chain in enumerate(chains):
        common = 0
        while common < len(chain) and common + 1 < len(stack) and stack[common + 1].scope == chain[common]:
            common += 1
        del stack[common + 1 :]
        for scope in chain[common:]:
            child = ModuleSpan(scope, index, index)
            stack[-1].items.append(child)
            stack.append(child)
        stack[-1].items.append(index)
        for span in stack:
            span.end = index + 1
    return root


def names_read(node: FileNode) -> list[str]:
    """Return every value that a node reads, those inside its graphs included."""
    names = [name for name in node.inputs if name]
    for graph in graphs_in(node):
        names += names_from_outside(graph)
    return names


def names_from_outside(graph: FileGraph) -> list[str]:
    """Return the values that a graph inside a node reads and does not make."""
    own = {*graph.constants, *(value.name for value in graph.inputs)}
    own.update(name for inner in graph.nodes for name in inner.outputs)
    names = [name for inner in graph.nodes for name in names_read(inner) if name not in own]
    return names + [value.name for value in graph.outputs if value.name not in own]


def graphs_in(node: FileNode) -> list[FileGraph]:
    """Return the graphs among a node's settings: branches and bodies."""
    values = (item for value in node.attributes.values() for item in (value if isinstance(value, tuple) else (value,)))
    return [value for value in values if isinstance(value, FileGraph)]
