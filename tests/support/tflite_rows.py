"""`.tflite` files of one operator or a few, with what LiteRT makes of them and what our reading does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ai_edge_litert.interpreter import Interpreter, OpResolverType

import edge_opt as eo
from edge_opt.model_files.file_model import load_tflite
from edge_opt.model_files.graph_interpreter import GraphInterpreter
from operator_rows import Array, Fed, Outline, outline
from tflite_graphs import Graph, Op, write


class TfliteRow:
    """A file with what it is expected to cost.

    Attributes:
        ops: Its operators; they read `given` by these names.
        given: Arrays that are fed, constants, or states.
        made: Element types of what the operators make, by name, with a shape where the file must say it.
        outputs: Names of the results.
        macs: What it should cost.
    """

    def __init__(
        self, ops: Sequence[Op], given: Mapping[str, Any], made: Mapping[str, Any], outputs: str, macs: int = 0
    ) -> None:
        self.ops, self.given, self.made, self.outputs, self.macs = list(ops), dict(given), dict(made), outputs, macs

    @property
    def kinds(self) -> set[str]:
        return {one.kind for one in self.ops}

    @property
    def label(self) -> str:
        return " ".join(one.kind for one in self.ops)

    @property
    def arrays(self) -> dict[str, Array]:
        return {name: one.array for name, one in self.given.items() if isinstance(one, Fed)}

    def write(self, folder: Path, is_constant: bool = False) -> Path:
        """The file. What it says of the shapes of its results is wrong, unless the row has one: they must follow."""
        given = {
            name: (one.array if is_constant else (one.array.shape, one.array.dtype.name))
            if isinstance(one, Fed)
            else one
            for name, one in self.given.items()
        }
        made = {name: (one if isinstance(one, tuple) else ((1, 1, 1), one)) for name, one in self.made.items()}
        inputs = "" if is_constant else " ".join(self.arrays)
        path = folder / "m.tflite"
        write(path, Graph(self.ops, {**given, **made}, inputs, self.outputs))
        return path


def one_op(
    kind: str, *inputs: Any, makes: Any = "float32", options: str = "", macs: int = 0, **fields: Any
) -> TfliteRow:
    """A file of one operator; an input that is None is left out, and `makes` has the types of its results."""
    names = ["-" if one is None else f"i{place}" for place, one in enumerate(inputs)]
    made = {f"y{place}": one for place, one in enumerate(makes if isinstance(makes, list) else [makes])}
    given = {name: one for name, one in zip(names, inputs, strict=True) if name != "-"}
    return TfliteRow([Op(kind, " ".join(names), " ".join(made), options, fields)], given, made, " ".join(made), macs)


def joined(rows: Sequence[TfliteRow]) -> TfliteRow:
    """The rows beside each other in one file."""

    def renamed(text: str, place: int) -> str:
        return " ".join("-" if name == "-" else f"{name}_{place}" for name in text.split())

    ops = [one._replace(inputs=renamed(one.inputs, place), outputs=renamed(one.outputs, place))
           for place, row in enumerate(rows) for one in row.ops]  # fmt: skip
    given = {f"{name}_{place}": one for place, row in enumerate(rows) for name, one in row.given.items()}
    made = {f"{name}_{place}": one for place, row in enumerate(rows) for name, one in row.made.items()}
    outputs = " ".join(renamed(row.outputs, place) for place, row in enumerate(rows))
    return TfliteRow(ops, given, made, outputs, sum(row.macs for row in rows))


@cache
def litert_makes(row: TfliteRow) -> list[Any]:
    """What LiteRT's own kernels return."""
    with TemporaryDirectory() as folder:
        runtime = Interpreter(
            str(row.write(Path(folder))), num_threads=1,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )  # fmt: skip
        runtime.allocate_tensors()
        for port, array in zip(runtime.get_input_details(), row.arrays.values(), strict=True):
            runtime.set_tensor(port["index"], array)
        runtime.invoke()
        return [runtime.get_tensor(port["index"]) for port in runtime.get_output_details()]


def reading_makes(row: TfliteRow, folder: Path) -> Outline:
    """Shapes and types of what our reading returns."""
    tensors = [torch.from_numpy(array).to("meta") for array in row.arrays.values()]
    found = load_tflite(row.write(folder))(*tensors)
    return [outline(one) for one in (found if isinstance(found, tuple) else (found,))]


def profiled(row: TfliteRow, folder: Path) -> eo.ModelProfile:
    """What our reading says that a run costs."""
    return eo.profile(load_tflite(row.write(folder)), [torch.from_numpy(array) for array in row.arrays.values()])


def known_values(row: TfliteRow, folder: Path) -> list[Array | None]:
    """The results where all inputs are constants, as far as our reading works them out."""
    model = load_tflite(row.write(folder, is_constant=True))
    run = GraphInterpreter(model.plan, {})
    run.whole()
    found = [run.constant_values.get(name) for name in row.outputs.split()]
    return [value.numpy() if isinstance(value, torch.Tensor) else None for value in found]
