"""The arena: each tensor where LiteRT's own interpreter puts it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import interpreter

import edge_opt as eo
from edge_opt.model_files.file_model import load_tflite
from tflite_graphs import Graph, Op, conv, write


def places(path: str, names: Mapping[str, int]) -> dict[str, int]:
    """Where LiteRT's interpreter placed the tensors, from the first of them on; no delegate takes any away."""
    kinds = interpreter.OpResolverType
    loaded = interpreter.Interpreter(path, experimental_op_resolver_type=kinds.BUILTIN_REF, num_threads=1)
    loaded.allocate_tensors()
    numbers = {entry["name"]: entry["index"] for entry in loaded.get_tensor_details()}
    found = {name: loaded.tensor(numbers[name])().__array_interface__["data"][0] for name in names}
    first = min(found.values())
    return {name: address - first for name, address in found.items()}


def f32(*shape: int) -> Any:
    return shape, "float32"


def branches(tmp_path: Path) -> str:
    """Branches of several widths that meet again, with results of many sizes."""
    ops = [
        conv("CONV_2D", "x w1 b8", "a"), conv("CONV_2D", "a w2 b4", "b", strideW=2, strideH=2),
        conv("DEPTHWISE_CONV_2D", "a w3 b8", "c", strideW=2, strideH=2),
        Op("CONCATENATION", "b c", "d", "ConcatenationOptions", {"axis": 3}), Op("LOGISTIC", "d", "e"),
        conv("CONV_2D", "e w4 b5", "f"), Op("RESHAPE", "f s", "g", "ReshapeOptions", {"newShape": [1, 36 * 5]}),
        Op("FULLY_CONNECTED", "g w5 -", "y", "FullyConnectedOptions"),
    ]  # fmt: skip
    ones = {"w1": (8, 3, 3, 3), "w2": (4, 3, 3, 8), "w3": (1, 3, 3, 8), "w4": (5, 1, 1, 12), "w5": (10, 180),
            "b4": (4,), "b5": (5,), "b8": (8,)}  # fmt: skip
    tensors = {"x": f32(1, 12, 12, 3), "a": f32(1, 12, 12, 8), "b": f32(1, 6, 6, 4), "c": f32(1, 6, 6, 8),
               "d": f32(1, 6, 6, 12), "e": f32(1, 6, 6, 12), "f": f32(1, 6, 6, 5), "g": f32(1, 180), "y": f32(1, 10),
               "s": np.array([1, 180], np.int32),
               **{name: np.ones(shape, np.float32) for name, shape in ones.items()}}  # fmt: skip
    return write(tmp_path / "m.tflite", Graph(ops, tensors, "x", "y"))


def test_tensors_lie_where_the_interpreter_puts_them(tmp_path: Path) -> None:
    path = branches(tmp_path)
    arena = load_tflite(path).arena((1, 12, 12, 3))
    assert arena.offsets == places(path, arena.offsets)


def test_the_largest_pair_that_lives_at_once_decides(tmp_path: Path) -> None:
    arena = load_tflite(branches(tmp_path)).arena((1, 12, 12, 3))
    # The input, to the end; a, b and c at once, each from a multiple of 64 bytes; the result, 40 bytes, fits a gap.
    assert arena.nbytes >= 12 * 12 * 3 * 4 + 12 * 12 * 8 * 4 + 6 * 6 * 4 * 4 + 6 * 6 * 8 * 4
    assert max(arena.offsets.values()) < arena.nbytes


@pytest.mark.parametrize("kind", ["ADD", "SUB", "MUL", "DIV"])
def test_sums_are_written_over_an_input_that_nobody_else_reads(tmp_path: Path, kind: str) -> None:
    ops = [
        Op("EXP", "x", "a"),
        Op("LOG", "x", "b"),
        Op(kind, "a b", "c", f"{kind.title()}Options"),
        Op("EXP", "c", "y"),
    ]
    tensors = dict.fromkeys("xabcy", f32(1, 100))
    path = write(tmp_path / "m.tflite", Graph(ops, tensors, "x", "y"))
    arena = load_tflite(path).arena((1, 100))
    assert arena.offsets == places(path, arena.offsets)
    assert arena.offsets["c"] == arena.offsets["a"]


def test_a_profile_says_what_the_arena_takes(tmp_path: Path) -> None:
    path = branches(tmp_path)
    found = eo.profile(load_tflite(path), (1, 12, 12, 3))
    assert any("an arena of" in note for note in found.trace.notes)


def test_the_arena_follows_the_batch(tmp_path: Path) -> None:
    tensors = dict.fromkeys("xay", f32(1, 64))
    graph = Graph([Op("EXP", "x", "a"), Op("EXP", "a", "y")], tensors, "x", "y")
    path = write(tmp_path / "m.tflite", graph, opening=dict.fromkeys("xay", (-1, 64)))
    # input and result to the end, and one in between
    assert load_tflite(path).arena((1, 64)).nbytes == 3 * 256
    assert load_tflite(path).arena((5, 64)).nbytes == 5 * 3 * 256
