"""Reading `.onnx` files: nothing is run, weights stay where they are, and a broken file is one sentence."""

from __future__ import annotations

import os
import random
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, load, save
from onnx.external_data_helper import convert_model_to_external_data

from edge_opt.errors import EdgeOptError, MissingExtra, ModelNotFound, UnreadableModel
from edge_opt.model_files.file_model import load_onnx
from edge_opt.model_files.onnx_reader import read_onnx
from onnx_graphs import node, write


@pytest.fixture
def gemm(tmp_path: Path) -> str:
    return write(tmp_path / "gemm.onnx", [node("Gemm", "x w b", "y", transB=1)], {"x": ("N", 8)}, ["y"],
                 {"w": (4, 8), "b": (4,)})  # fmt: skip


def test_a_file_is_read_as_its_own_library_reads_it(gemm: str) -> None:
    theirs, ours = load(gemm), read_onnx(gemm)
    assert [one.op_type for one in theirs.graph.node] == [one.op for one in ours.graph.nodes]
    assert {one.name: tuple(one.dims) for one in theirs.graph.initializer} == {
        name: one.shape for name, one in ours.graph.constants.items()
    }
    assert ours.graph.nodes[0].attributes == {"transB": 1}
    assert ours.graph.inputs[0].shape == ("N", 8)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_one_sentence(gemm: str, share: float) -> None:
    data = Path(gemm).read_bytes()
    Path(gemm).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UnreadableModel, match="cannot be read"):
        load_onnx(gemm)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\xff" * 64, b"{}", bytes(range(256))])
def test_what_is_no_onnx_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(UnreadableModel, match="cannot be read"):
        load_onnx(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ModelNotFound, match="no file 'nowhere.onnx'"):
        load_onnx("nowhere.onnx")


def test_nodes_in_a_circle_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Add", "x b", "a"), node("Relu", "a", "b")], {"x": (2,)}, ["b"])
    with pytest.raises(UnreadableModel, match="in a circle"):
        load_onnx(path)


def test_weights_beside_the_file_are_counted_and_not_opened(gemm: str, tmp_path: Path) -> None:
    model = load(gemm)
    convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    save(model, gemm)
    (tmp_path / "weights.bin").chmod(0)
    assert sum(one.numel() for one in load_onnx(gemm).parameters()) == 4 * 8 + 4


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", ""])
def test_weights_outside_the_folder_are_refused(gemm: str, tmp_path: Path, location: str) -> None:
    model = load(gemm)
    convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    save(model, gemm)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    Path(gemm).write_bytes(model.SerializeToString())
    with pytest.raises(UnreadableModel, match="outside the folder"):
        load_onnx(gemm)


def test_weights_that_are_too_short_are_refused(gemm: str, tmp_path: Path) -> None:
    model = load(gemm)
    convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    save(model, gemm)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UnreadableModel, match=r"has 1$"):
        load_onnx(gemm)


@pytest.mark.parametrize("offset", ["-4", "9" * 5000, "\N{ARABIC-INDIC DIGIT THREE}", "x"])
def test_weights_at_no_place_are_refused(gemm: str, offset: str) -> None:
    model = load(gemm)
    convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    save(model, gemm)
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "offset"]
    for entry in entries:
        entry.value = offset
    Path(gemm).write_bytes(model.SerializeToString())
    with pytest.raises(UnreadableModel, match="bytes from") as caught:
        load_onnx(gemm)
    assert len(str(caught.value)) < 500


def test_a_link_out_of_the_folder_is_refused(gemm: str, tmp_path: Path) -> None:
    model = load(gemm)
    convert_model_to_external_data(model, location="weights.bin", size_threshold=0)
    save(model, gemm)
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "weights.bin").symlink_to("/etc/passwd")
    with pytest.raises(UnreadableModel, match="outside the folder"):
        load_onnx(gemm)


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    os.mkfifo(path)
    with pytest.raises(UnreadableModel, match="a pipe or a device"):
        load_onnx(path)


def test_without_the_onnx_package_the_command_that_installs_it_is_named(
    gemm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"reading an \.onnx file needs onnx.*pip install '\.\[onnx\]'"):
        load_onnx(gemm)


def test_graphs_that_are_nested_too_deep_are_one_sentence(tmp_path: Path) -> None:
    content = b""
    for _ in range(60):  # a graph in an attribute of a node of the graph around it
        content = field(1, field(5, b"\x0a\x01g\xa0\x01\x05" + field(6, content)))
    (tmp_path / "m.onnx").write_bytes(field(7, content))
    with pytest.raises(UnreadableModel, match=r"cannot be read: .*(nested|damaged)"):
        load_onnx(tmp_path / "m.onnx")


def field(number: int, content: bytes) -> bytes:
    """A field of bytes as it stands in a protocol buffer."""
    length, size = len(content), b""
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


@pytest.mark.parametrize(("content", "said"), [
    (b"\x08\x05" * 16_100_000, "it has no graph"),
    (b"\x38\x05", "it has no graph"),
    (field(7, field(1, b"") * 25_001), "more than 25,000 nodes"),
    (field(7, field(5, b"\x08\x01" * 70)), "has 70 dimensions"),
    (field(7, field(5, field(1, b"\x01" * 17_000_000))), "17,000,000 dimensions"),
    (field(7, field(1, field(5, b"") * 750_001)), "750,000 parts"),
    (field(7, field(13, field(2, field(1, field(2, field(1, b"") * 750_001))))), "750,000 parts"),
    (field(7, field(1, field(3, b"n" * 5_000_000))), "a name of 5,000,000 letters"),
    (field(7, b"\x0a\x05ab"), "cut off or damaged"),
    (field(7, field(1, field(5, b"\x0a\x01a"))), "the attribute 'a' has no type"),
    (field(7, field(11, field(2, field(1, field(2, field(1, b"\x08\x01") * 70))))), "has 70 dimensions"),
])  # fmt: skip
def test_a_file_of_tiny_parts_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(UnreadableModel, match=said):
        load_onnx(path)


def test_lists_are_read_whether_they_are_packed_or_not(tmp_path: Path) -> None:
    wholes, floats = [3, -1, 2**40, *range(300)], [0.5, -2.0, *map(float, range(300))]
    relu = helper.make_node("Relu", ["x"], ["y"], wholes=wholes, floats=floats)
    found = read_onnx(write(tmp_path / "m.onnx", [relu], {"x": (1,)}, ["y"])).graph.nodes[0].attributes
    assert (list(found["wholes"]), list(found["floats"])) == (wholes, floats)
    packed = np.array([1, 300, 5], np.int64)
    tensor = helper.make_tensor("t", TensorProto.INT64, [3], packed.tolist())  # as int64_data, which is packed
    double = helper.make_tensor("u", TensorProto.DOUBLE, [2], [0.25, -3.0])
    graph = helper.make_graph([node("Relu", "x", "y")], "g", [helper.make_tensor_value_info("x", 1, [1])],
                              [helper.make_tensor_value_info("y", 1, None)], [tensor, double])  # fmt: skip
    path = tmp_path / "packed.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    constants = read_onnx(path).graph.constants
    assert [one.values.tolist() for one in constants.values() if one.values is not None] == [[1, 300, 5], [0.25, -3.0]]


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(field(7, field(1, b"\x12\x01y" + b"\x22\x03R\xffx")))
    assert read_onnx(tmp_path / "m.onnx").graph.nodes[0].op == "R\N{REPLACEMENT CHARACTER}x"


def test_names_in_a_sentence_are_short_and_printable(tmp_path: Path) -> None:
    odd = helper.make_node("Nobody\x1b[31m", ["x"], ["y"], name="n\x07\n" + "x" * 10**6)
    path = write(tmp_path / "m.onnx", [odd], {"x": (1,)}, ["y"])
    with pytest.raises(EdgeOptError) as caught:
        load_onnx(path)(torch.empty(1, device="meta"))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def hostile(tmp_path: Path, what: str) -> str:
    path = tmp_path / f"{what}.onnx"
    if what == "declared":  # a constant of 10⁹ elements without a byte of data
        graph = helper.make_graph([node("Add", "x w", "y")], "g", [helper.make_tensor_value_info("x", 1, [1])],
                                  [helper.make_tensor_value_info("y", 1, None)])  # fmt: skip
        graph.initializer.append(TensorProto(name="w", data_type=1, dims=[10**9]))
        path.write_bytes(helper.make_model(graph).SerializeToString())
        return str(path)
    huge = np.array([10**6, 10**6, 10**6], np.int64)
    nodes = {
        "huge": [node("Expand", "x s", "a"), node("Relu", "a", "y")],
        "made": [node("ConstantOfShape", "s", "a"), node("Add", "x a", "y")],
        "tiled": [node("Tile", "x s", "y")],
        "grown": [node("Reshape", "x s", "y")],
        "looped": [node("Loop", "n -", "y", body=_counting_body())],
        "deep": [node("Pad", "x p", "y")],
    }[what]
    weights = {"s": huge, "n": np.array(10**9), "p": np.array([0, 0, 0, 10**15, 10**15, 10**15])}
    used = {name for one in nodes for name in one.input}
    return write(path, nodes, {"x": (1, 1, 1)}, ["y"], {name: one for name, one in weights.items() if name in used})


def _counting_body() -> object:
    values = [helper.make_tensor_value_info(*one) for one in (("i", 7, []), ("c", 9, []), ("d", 9, []), ("z", 7, []))]
    nodes = [node("Identity", "c", "d"), node("Add", "i i", "z")]
    return helper.make_graph(nodes, "body", values[:2], values[2:])


@pytest.mark.parametrize("what", ["declared", "huge", "made", "tiled", "grown", "looped", "deep"])
def test_a_hostile_file_takes_no_memory(tmp_path: Path, what: str) -> None:
    import edge_opt as eo

    path = hostile(tmp_path, what)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = eo.profile(load_onnx(path), (1, 1, 1) if what != "declared" else (1,))
        assert found.totals.macs == 0  # priced from shapes alone
    except EdgeOptError as error:
        assert "\n" not in str(error)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 250_000  # torch imports what it needs the first time; the tensors would take 10⁹ bytes and more


def test_damaged_bytes_are_a_sentence_or_another_model(tmp_path: Path) -> None:
    import edge_opt as eo

    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "f"), node("Conv", "f w b", "c"),
             node("Relu", "c", "r"), node("Reshape", "r t", "y")]  # fmt: skip
    weights = {"w": (4, 2, 3, 3), "b": (4,), "s": np.array(0.1, np.float32), "z": np.array(0, np.int8),
               "t": np.array([0, -1])}  # fmt: skip
    path = tmp_path / "m.onnx"
    whole = Path(write(path, nodes, {"x": (1, 2, 6, 6)}, ["y"], weights)).read_bytes()
    dice = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            eo.profile(load_onnx(path), (1, 2, 6, 6))
        except EdgeOptError as error:
            assert "\n" not in str(error)
