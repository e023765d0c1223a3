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
    """A constant of the file.

    Attributes:
        name: Its name in the graph.
        shape: Its dimensions.
        dtype: Its element type by torch's name; text counts as bytes.
        values: Its values where they are few enough to be read; None for weights.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray[Any, Any] | None


@dataclass(frozen=True, slots=True)
class FileValue:
    """A value that the file describes: an input, an output, or one in between.

    Attributes:
        name: Its name in the graph.
        shape: Its dimensions, an unknown one by its name, "" where it has none; None where the rank is unknown.
        dtype: Its element type by torch's name; None for text, sequences and maps.
        role: What torch's exporter says it was in the model: "PARAMETER", "BUFFER"; "" where it says nothing.
    """

    name: str
    shape: tuple[int | str, ...] | None
    dtype: str | None
    role: str = ""


@dataclass(frozen=True, slots=True)
class FileNode:
    """One operator of a graph.

    Attributes:
        op: Its type, such as "Conv" or "CONV_2D".
        domain: Where the type is defined; "" for ONNX itself.
        name: Its name; may be empty.
        inputs: Names of the values that it reads; "" for one that is left out.
        outputs: Names of the values that it makes.
        attributes: Its settings: numbers, texts, lists, tensors and graphs.
        metadata: What exporters wrote beside it, such as the path of its module.
    """

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    metadata: dict[str, str]

    @property
    def label(self) -> str:
        """Type and name, for sentences."""
        kind = " ".join(_short(f"{self.domain}:{self.op}" if self.domain else self.op).split())
        return f"{kind} node {_short(self.name or (self.outputs[0] if self.outputs else ''))!r}"


@dataclass(frozen=True, slots=True)
class FileGraph:
    """Nodes in the order of execution, and what they start from.

    Attributes:
        nodes: The operators.
        constants: The file's constants by name.
        inputs: What a call must give; names of constants are left out.
        outputs: What it returns.
        values: Everything else that the file describes, by name.
    """

    nodes: tuple[FileNode, ...]
    constants: dict[str, FileTensor]
    inputs: tuple[FileValue, ...]
    outputs: tuple[FileValue, ...]
    values: dict[str, FileValue]


@dataclass(frozen=True, slots=True)
class Function:
    """Nodes under a name of their own, which other nodes call.

    Attributes:
        inputs: Names of what it is given.
        outputs: Names of what it returns.
        defaults: Values of attributes that a call may leave out.
        nodes: Its operators.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    defaults: dict[str, Any]
    nodes: tuple[FileNode, ...]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What a file holds.

    Attributes:
        path: The file.
        graph: Its graph.
        opset: Version of ONNX's own operators; 0 for other formats.
        functions: Nodes that are called by name, by (domain, name).
    """

    path: Path
    graph: FileGraph
    opset: int
    functions: dict[tuple[str, str], Function]


@dataclass(frozen=True, slots=True)
class AttributeReference:
    """An attribute inside a function that takes the value of the call's own attribute."""

    name: str
