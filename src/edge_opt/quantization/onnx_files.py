"""ONNX files on disk: weights beside the graph, and what we write on each node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edge_opt._support.extras import import_optional

Tensors = tuple[torch.Tensor, ...]
# protobuf refuses 2 GiB; weights of larger models stand in a file of their own, with room for the rest of the graph.
EXTERNAL_DATA_BYTES = 1_500_000_000
# Where each node keeps the path of its module, so that every tool behind the export can name it.
PATH_KEY = "edge_opt.module"
SPARED_KEY = "edge_opt.spared"


def with_data(path: Path) -> list[Path]:
    """An ONNX file and the weights beside it, weights first: the file must never name data that is not there yet."""
    data = path.with_name(f"{path.name}.data")
    return [data, path] if data.exists() else [path]


def size_of(path: Path) -> int:
    """Bytes on disk, weights beside the file included."""
    return sum(file.stat().st_size for file in with_data(path))


def require(package: str, extra: str = "onnx") -> Any:
    """An optional package, or one sentence with the command that installs it."""
    return import_optional(package, "this needs", extra)
