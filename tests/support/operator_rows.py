"""Files of one operator or a few, with what the real runtime makes of them and what our reading does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper, save

import edge_opt as eo
from edge_opt.model_files.file_model import load_onnx
from edge_opt.model_files.graph_interpreter import GraphInterpreter

Array = np.ndarray[Any, Any]
Outline = list[Any]


class Fed(NamedTuple):
    """An array that is given when the model runs; other arrays are constants of the file."""

    array: Array


def numbers(shape: Sequence[int], kind: str = "float32") -> Array:
    """Small numbers of both signs, none of them 0; of integers 1 to 5."""
    count = np.arange(int(np.prod(shape)))
    if kind == "bool":
        return np.array(count % 2 == 0).reshape(shape)
    found = (count * 7 % 11 - 5.5) / 4 if "float" in kind else count % 5 + 1
    return np.asarray(found).astype(kind).reshape(shape)


def x(*shape: int, of: str = "float32") -> Fed:
    """An input of the model."""
    return Fed(numbers(shape, of))


def w(*shape: int, of: str = "float32") -> Array:
    """A constant of the file."""
    return numbers(shape, of)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


class OnnxRow:
    """A file with what it is expected to cost.

    Attributes:
        nodes: Its nodes; they read `given` by these names, and make "y", then "z" and so on.
        given: Arrays that are fed, or constants.
        version: The opset of ONNX's own operators.
        macs: What it should cost.
        instead: Nodes that the runtime gets, where it has the operator for other hardware only.
    """

    def __init__(
        self, nodes: Sequence[Any], given: Mapping[str, Any], outputs: str, version: int, macs: int = 0,
        instead: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self.nodes, self.given, self.outputs = (
            list(nodes),
            dict(given),
            [name for name in outputs.split() if name != "-"],
        )
        self.version, self.macs, self.instead = version, macs, list(instead)

    @property
    def ops(self) -> set[str]:
        return {f"{one.domain}:{one.op_type}" if one.domain else one.op_type for one in self.nodes}

    @property
    def label(self) -> str:
        return " ".join(one.op_type for one in self.nodes)

    def model(self, is_constant: bool = False, nodes: Sequence[Any] = ()) -> ModelProto:
        arrays = {name: one.array if isinstance(one, Fed) else one for name, one in self.given.items()}
        fed = [] if is_constant else [name for name, one in self.given.items() if isinstance(one, Fed)]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(arrays[name].dtype), arrays[name].shape)
            for name in fed
        ]
        constants = [numpy_helper.from_array(one, name) for name, one in arrays.items() if name not in fed]
        outputs = [ValueInfoProto(name=name) for name in self.outputs]
        graph = helper.make_graph(list(nodes) or self.nodes, "graph", inputs, outputs, constants)
        others = {one.domain for one in [*self.nodes, *self.instead] if one.domain}
        opsets = [helper.make_opsetid("", self.version), *(helper.make_opsetid(one, 3 if "ml" in one else 1)
                                                         for one in sorted(others))]  # fmt: skip
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    @property
    def arrays(self) -> dict[str, Array]:
        return {name: one.array for name, one in self.given.items() if isinstance(one, Fed)}


def row(op: str, *inputs: Any, makes: str = "y", version: int = 20, macs: int = 0, **attributes: Any) -> OnnxRow:
    """A file of one node; an input that is None is left out."""
    domain, _, kind = op.rpartition(":")
    names = ["" if one is None else f"i{place}" for place, one in enumerate(inputs)]
    made = ["" if name == "-" else name for name in makes.split()]
    one = helper.make_node(kind, names, made, domain=domain, **attributes)
    given = {name: one for name, one in zip(names, inputs, strict=True) if name}
    return OnnxRow([one], given, makes, version, macs)


def joined(rows: Sequence[OnnxRow]) -> OnnxRow:
    """The rows beside each other in one file."""
    nodes: list[Any] = []
    given: dict[str, Any] = {}
    outputs: list[str] = []
    for place, one in enumerate(rows):
        given |= {f"{name}_{place}": value for name, value in one.given.items()}
        outputs += [f"{name}_{place}" for name in one.outputs]
        for node in one.nodes:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = [f"{name}_{place}" if name else "" for name in node.input]
            copy.output[:] = [f"{name}_{place}" if name else "" for name in node.output]
            nodes.append(copy)
    return OnnxRow(nodes, given, " ".join(outputs), rows[0].version, sum(one.macs for one in rows))


@cache
def onnxruntime_makes(one: OnnxRow) -> list[Any]:
    """What ONNX Runtime returns."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    model = one.model(nodes=one.instead).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, one.arrays))


def outline(made: Any) -> Any:
    """Shape and element type of a result, or of each of a list."""
    if isinstance(made, (list, tuple)):
        return [outline(one) for one in made]
    return tuple(made.shape), str(made.dtype).removeprefix("torch.")


def reading_makes(one: OnnxRow, folder: Path) -> Outline:
    """Shapes and types of what our reading returns."""
    path = folder / "m.onnx"
    save(one.model(), path)
    tensors = [torch.from_numpy(array).to("meta") for array in one.arrays.values()]
    found = load_onnx(path)(*tensors)
    return [outline(one) for one in (found if isinstance(found, tuple) else (found,))]


def profiled(one: OnnxRow, folder: Path) -> eo.ModelProfile:
    """What our reading says that a run costs."""
    path = folder / "m.onnx"
    save(one.model(), path)
    return eo.profile(load_onnx(path), [torch.from_numpy(array) for array in one.arrays.values()])


def known_values(one: OnnxRow, folder: Path) -> list[Array | None]:
    """The results where all inputs are constants, as far as our reading works them out."""
    path = folder / "m.onnx"
    save(one.model(is_constant=True), path)
    model = load_onnx(path)
    run = GraphInterpreter(model.plan, {})
    run.whole()
    found = [run.constant_values.get(name) for name in one.outputs]
    return [value.numpy() if isinstance(value, torch.Tensor) else None for value in found]
