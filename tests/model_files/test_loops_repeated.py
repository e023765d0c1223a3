"""Rounds of a loop that are recorded without being run: the same operators, storages and lifetimes as if they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import edge_opt as eo
from edge_opt.model_files.file_model import load_onnx
from edge_opt.trace.repetition import Repetition
from onnx_graphs import node, write

ROUNDS, SIZE = 40, 4
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name: str, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, None)


def body(nodes: list[Any], state: str, outputs: str) -> Any:
    """A loop's body: its number `i`, the condition `c`, and what it carries on."""
    given = [value("i", INT), value("c", BOOL), *map(value, state.split())]
    return helper.make_graph(
        [node("Identity", "c", "d"), *nodes], "body", given, [value("d", BOOL), *map(value, outputs.split())]
    )


def constant(name: str, numbers: list[int]) -> Any:
    return node("Constant", "", name, value_ints=numbers)


INNER = body([node("Relu", "t", "t2")], "t", "t2")
# Name: nodes of the body, what it carries on, its outputs, what the loop is given, what it returns.
LOOPS: dict[str, tuple[list[Any], str, str, str, str]] = {
    "alike": ([node("MatMul", "s w", "a"), node("Relu", "a", "s2")], "s", "s2", "x", "y"),
    "kept": ([node("MatMul", "s w", "s2"), node("Neg", "s", "z")], "s", "s2 z", "x", "y zz"),
    "carried and kept": ([node("Relu", "s", "s2")], "s", "s2 s2", "x", "y zz"),
    "kept from outside": ([node("Relu", "s", "s2"), node("Identity", "x", "z")], "s", "s2 z", "x", "y zz"),
    "a view of what is kept": ([node("Relu", "s", "z"), constant("r", [SIZE, SIZE]), node("Reshape", "z r", "s2")],
                               "s", "s2 z", "x", "y zz"),
    "picked": ([constant("one", [1]), node("Add", "i one", "j"), node("Gather", "x j", "r"), node("Add", "s r", "s2")],
               "s", "s2", "x", "y"),
    "times its number": ([node("Cast", "i", "f", to=FLOAT), node("Mul", "s f", "s2")], "s", "s2", "x", "y"),
    "two, in turn": ([node("Relu", "s", "a")], "s t", "t a", "x x", "y v"),
    "kept from the round before": ([node("Relu", "s", "s2")], "s", "s2 s", "x", "y zz"),
    "three, in turn": ([node("Relu", "s", "a")], "s t u", "t u s t", "x w x", "y v q zz"),
    "nested": ([node("Loop", "m - s", "s2", body=INNER)], "s", "s2", "x", "y"),
    "growing": ([node("Concat", "s x", "s2", axis=0)], "s", "s2", "x", "y"),
    "longer by its number": ([constant("zero", [0]), node("Reshape", "i one1", "e"), node("Slice", "x zero e", "r"),
                              node("ReduceSum", "r", "q", keepdims=0), node("Add", "s q", "s2")], "s", "s2", "x", "y"),
    "squared": ([node("Mul", "i i", "j"), node("Gather", "x j", "r"), node("Add", "s r", "s2")], "s", "s2", "x", "y"),
    "its number kept": ([node("Relu", "s", "s2"), node("Identity", "i", "z")], "s", "s2 z", "x", "y zz"),
    "ended by its number": ([], "s", "s2", "x", "y"),
}  # fmt: skip
RUN_ALL = {
    "growing", "longer by its number", "squared", "its number kept", "ended by its number", "two, in turn",
    "kept from the round before", "three, in turn", "a view of what is kept",
}  # fmt: skip


def looped(name: str, path: Path) -> str:
    nodes, state, outputs, given, made = LOOPS[name]
    inside = body(nodes, state, outputs)
    if name == "ended by its number":
        nodes = [
            constant("most", [20]),
            node("Less", "i most", "d1"),
            node("Squeeze", "d1", "d"),
            node("Relu", "s", "s2"),
        ]
        inside = helper.make_graph(nodes, "body", list(inside.input), list(inside.output))
    weights = {"n": np.array(ROUNDS), "m": np.array(30), "w": (SIZE, SIZE), "one1": np.array([1])}
    rows = 2000 if name == "squared" else SIZE if name != "picked" else ROUNDS + 1
    return write(path, [node("Loop", f"n - {given}", made, body=inside)], {"x": (rows, SIZE)}, made.split(), weights)


def scanned(path: Path) -> str:
    inside = helper.make_graph([node("Add", "s r", "s2"), node("Relu", "s2", "o")], "body", [value("s"), value("r")],
                               [value("s2"), value("o")])  # fmt: skip
    nodes = [node("Scan", "h x", "y z", body=inside, num_scan_inputs=1)]
    return write(path, nodes, {"h": (SIZE,), "x": (ROUNDS, SIZE)}, ["y", "z"])


def seen(path: str) -> Any:
    """Everything a trace holds, with each operator's signature in its place; and how many rounds were really run."""
    model = load_onnx(path)
    found = eo.profile(model, list(model.example()[0]))  # type: ignore[index]
    trace = found.trace
    ops = [
        (one.index, one.module, trace.signatures[one.signature], one.reads, one.creates, one.live_bytes)
        for one in trace.ops
    ]
    return ops, trace.storages, found.totals, found.peak, found.layers


@pytest.mark.parametrize("name", [*LOOPS, "scan"])
def test_repeated_rounds_are_those_that_would_have_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = scanned(tmp_path / "m.onnx") if name == "scan" else looped(name, tmp_path / "m.onnx")
    counted = []
    record = Repetition.repeated

    def repeated(self: Repetition, copies: int, state: Any, kept: Any) -> Any:
        found = record(self, copies, state, kept)
        counted.append(0 if found is None else copies)
        return found

    monkeypatch.setattr(Repetition, "repeated", repeated)
    quick = seen(path)
    assert (sum(counted) > 0) == (name not in RUN_ALL)
    monkeypatch.setattr(Repetition, "is_asked", lambda self, state: False)
    assert quick == seen(path)
