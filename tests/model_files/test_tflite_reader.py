"""Reading `.tflite` files: nothing is run, weights stay where they are, and a broken file is one sentence."""

from __future__ import annotations

import random
import resource
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

import edge_opt as eo
from edge_opt.errors import EdgeOptError, ModelNotFound, UnreadableModel
from edge_opt.model_files.file_model import load_tflite
from edge_opt.model_files.tflite_reader import OPERATORS, TYPES, read_tflite
from tflite_graphs import Graph, Op, conv, write


@pytest.fixture
def net(tmp_path: Path) -> str:
    ops = [conv("CONV_2D", "x w b", "c"), Op("RESHAPE", "c s", "y", "ReshapeOptions", {"newShape": [1, -1]})]
    tensors = {"x": ((1, 6, 6, 2), "float32"), "w": np.ones((4, 3, 3, 2), np.float32), "b": np.ones(4, np.float32),
               "c": ((1, 6, 6, 4), "float32"), "s": np.array([1, -1], np.int32),
               "y": ((1, 144), "float32")}  # fmt: skip
    return write(tmp_path / "m.tflite", Graph(ops, tensors, "x", "y"))


def test_numbers_of_operators_and_types_are_those_of_the_schema() -> None:
    codes = {value: name for name, value in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
    assert [codes[number] for number in range(len(OPERATORS))] == OPERATORS
    types = {value: name for name, value in vars(schema.TensorType).items() if not name.startswith("_")}
    assert [types[number].lower() for number in range(len(TYPES)) if TYPES[number]] == [one for one in TYPES if one]


def test_a_file_is_read_as_its_own_library_reads_it(net: str) -> None:
    theirs = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(Path(net).read_bytes(), 0)).subgraphs[0]
    ours = read_tflite(net).graph
    assert [one.name.decode() for one in theirs.tensors] == list(ours.values)
    assert {name: one.shape for name, one in ours.constants.items()} == {"w": (4, 3, 3, 2), "b": (4,), "s": (2,)}
    assert [node.op for node in ours.nodes] == ["CONV_2D", "RESHAPE"]
    assert ours.nodes[0].attributes["stride_h"] == theirs.operators[0].builtinOptions.strideH


def test_reading_needs_no_package_of_the_format(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ai_edge_litert", "flatbuffers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert eo.profile(load_tflite(net), (1, 6, 6, 2)).totals.macs == 36 * 4 * 18


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_one_sentence(net: str, share: float) -> None:
    data = Path(net).read_bytes()
    Path(net).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UnreadableModel, match="cannot be read"):
        load_tflite(net)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\xff" * 64, b"\x08\0\0\0TFL3" + b"\xff" * 64])
def test_what_is_no_tflite_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.tflite"
    path.write_bytes(content)
    with pytest.raises(UnreadableModel, match="cannot be read"):
        load_tflite(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ModelNotFound, match="no file 'nowhere.tflite'"):
        load_tflite("nowhere.tflite")


def test_damaged_bytes_are_a_sentence_or_another_model(net: str) -> None:
    whole, dice = Path(net).read_bytes(), random.Random(0)
    for _ in range(120):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        Path(net).write_bytes(damaged)
        try:
            eo.profile(load_tflite(net), (1, 6, 6, 2))
        except EdgeOptError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("what", ["broadcast", "fill", "tile", "pad", "loop", "itself"])
def test_a_hostile_file_takes_no_memory(tmp_path: Path, what: str) -> None:
    huge = np.array([10**6, 10**6, 10**6], np.int32)
    one, scalar = ((1, 1, 1), "float32"), ((), "int32")
    tensors = {"x": one, "s": huge, "y": one, "v": np.array(1, np.float32), "k": np.array(0, np.int32), "j": scalar,
               "p": np.full((3, 2), 10**9, np.int32)}  # fmt: skip
    calls = {"loop": {"condSubgraphIndex": 1, "bodySubgraphIndex": 2}, "itself": {"condSubgraphIndex": 0}}
    op = {
        "broadcast": Op("BROADCAST_TO", "x s", "y"), "fill": Op("FILL", "s v", "y"), "tile": Op("TILE", "x s", "y"),
        "pad": Op("PAD", "x p", "y"), "loop": Op("WHILE", "k", "j", "WhileOptions", calls["loop"]),
        "itself": Op("WHILE", "k", "j", "WhileOptions", calls["itself"]),
    }[what]  # fmt: skip
    body = Graph(
        [Op("ADD", "k z", "j", "AddOptions")], {"k": scalar, "z": np.array(0, np.int32), "j": scalar}, "k", "j"
    )
    condition = Graph([Op("EQUAL", "k k", "c")], {"k": scalar, "c": ((), "bool")}, "k", "c")
    main = Graph([op], tensors, "x", "j" if op.kind == "WHILE" else "y")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = eo.profile(load_tflite(write(tmp_path / "m.tflite", main, condition, body)), (1, 1, 1))
        assert found.totals.macs == 0  # priced from shapes alone
    except EdgeOptError as error:
        assert "\n" not in str(error)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 250_000


def test_graphs_that_call_graphs_are_counted_before_they_are_followed(tmp_path: Path) -> None:
    one = ((1, 4), "float32")
    names = [f"a{place}" for place in range(11)]
    tensors = dict.fromkeys(names, one)
    calls = [
        Graph([Op("CALL", a, b, "CallOptions", {"subgraph": number + 1}) for a, b in pairwise(names)], tensors,
              names[0], names[-1])
        for number in range(12)
    ]  # fmt: skip
    last = Graph([Op("RELU", "x", "y")], {"x": one, "y": one}, "x", "y")
    with pytest.raises(UnreadableModel, match="its graphs call each other for more than 25,000 nodes"):
        load_tflite(write(tmp_path / "m.tflite", *calls, last))


def test_a_tensor_of_too_many_dimensions_is_one_sentence(tmp_path: Path) -> None:
    tensors = {"x": ((1,) * 70, "float32"), "y": ((1,), "float32")}
    with pytest.raises(UnreadableModel, match="has 70 dimensions"):
        load_tflite(write(tmp_path / "m.tflite", Graph([Op("RELU", "x", "y")], tensors, "x", "y")))
