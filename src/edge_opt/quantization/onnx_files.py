"""ONNX files on disk: weights beside the graph, what we write on each node, and files prepared for quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge_opt._support.extras import import_optional

Tensors = tuple[torch.Tensor, ...]
# protobuf refuses 2 GiB; weights of larger models stand in a file of their own, with room for the rest of the graph.
EXTERNAL_DATA_BYTES = 1_500_000_000
# Where each node keeps the path of its module, so that every tool behind the export can name it.
PATH_KEY = "edge_opt.module"
# On nodes that stay in float because the caller asked for it.
KEPT_KEY = "edge_opt.spared"
# What the quantizers append to the names of nodes.
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


@dataclass(frozen=True, slots=True)
class FloatFile:
    """A float file that quantizers can work on: shapes are known, constants and batch norms folded.

    Attributes:
        path: The file.
        model: Its ModelProto with weights, parsed once; whoever changes it takes a copy.
        module_paths: Path of the module of each node, by its name; the preparation drops what the nodes say.
        is_big: Whether weights stand beside the file.
    """

    path: Path
    model: Any
    module_paths: Mapping[str, str]
    is_big: bool

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
    is_big = size_of(source) > EXTERNAL_DATA_BYTES
    paths = {node.name: module_path(node) for node in onnx.load(str(source), load_external_data=False).graph.node}
    try:
        process(str(source), str(prepared), save_as_external_data=is_big)
    except OSError:
        raise
    except Exception:  # symbolic shapes of unusual operators; plain inference still serves the common ones
        process(str(source), str(prepared), save_as_external_data=is_big, skip_symbolic_shape=True)
    return FloatFile(prepared, onnx.load(str(prepared)), paths, is_big)


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
