"""What a model's file holds, whichever its format: nodes, constants, inputs and outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt._support.files import mapped
from edge_opt.errors import ModelNotFound, UnreadableModel, message_of

# Nodes that are executed, each as often as a loop or a function runs it: some ten seconds of work.
MOST_NODES = 50_000
# As many as numpy and torch have.
MOST_DIMENSIONS = 64
# Sizes from here on are refused.
LARGEST_DIMENSION = 1 << 40
# Constants up to this many elements are read: shapes, axes, scales. Weights beyond it stay on the disk.
MOST_KNOWN = 1 << 16
_LONGEST_NAME = 120


@contextmanager
def file_bytes(path: str | os.PathLike[str]) -> Iterator[memoryview]:
    """Map a model's file; what goes wrong while it is read becomes one sentence with its name."""
    try:
        yield mapped(Path(path))
    except FileNotFoundError:
        raise ModelNotFound(f"no file {str(path)!r}; the folder is {Path.cwd()}") from None
    except (UnreadableModel, OSError, ValueError) as error:  # an empty file cannot be mapped
        raise UnreadableModel(f"{str(path)!r} cannot be read: {message_of(error)}") from error


def _short(name: str) -> str:
    """Return a name for a sentence: a file may have one of a million letters, or one that a terminal would obey."""
    kept = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    return "".join(letter if letter.isprintable() else " " for letter in kept)


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
        kind = " ".join(_short(f"{self.domain}:{self.op}" if self.domain else self.op).split())
        return f"{kind} node {_short(self.name or (self.outputs[0] if self.outputs else ''))!r}"


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
    """What a file holds."""

    path: Path
    graph: FileGraph
    opset: int  # version of ONNX's own operators; 0 for other formats
    functions: dict[tuple[str, str], Function]  # by domain and name


@dataclass(frozen=True, slots=True)
class AttributeReference:
    """An attribute inside a function that takes the value of the call's own attribute."""

    name: str
