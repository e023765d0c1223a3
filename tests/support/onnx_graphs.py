"""Small ONNX files for the tests, made of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """A node; names are separated by blanks, and "-" is one that is left out."""
    read, made = (["" if name == "-" else name for name in text.split()] for text in (inputs, outputs))
    return helper.make_node(op, read, made, **attributes)


def write(
    path: Path, nodes: Sequence[Any], shapes: Mapping[str, Sequence[Any]], outputs: Sequence[str],
    weights: Mapping[str, Any] | None = None, opset: int = 20, types: Mapping[str, int] | None = None,
    values: Sequence[Any] = (), domains: Sequence[str] = (),
) -> str:  # fmt: skip
    """The path of a file with these nodes, inputs by shape, and weights: arrays, or shapes to be filled with ones."""
    arrays = {
        name: np.ones(value, np.float32) if isinstance(value, tuple) else np.asarray(value)
        for name, value in (weights or {}).items()
    }
    kinds = dict(types or {})
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [
            helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), list(shape))
            for name, shape in shapes.items()
        ],
        [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
        value_info=list(values),
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    # The oldest version that has metadata: runtimes are older than the newest library.
    save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return str(path)
