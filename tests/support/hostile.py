"""Files that nobody wrote on purpose, and files that somebody did; each is read in a process of its own with limits.

Everything is made here, from a few small models: truncated, with changed bits or fields, or crafted to exhaust memory
or time, to show escape sequences, to read other files or to execute code. Nothing leaves the folder of the test.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from onnx import ModelProto, StringStringEntryProto, TensorProto, helper

import onnx_graphs
import tflite_graphs
from onnx_graphs import node
from tflite_graphs import Graph, Op

RECORDINGS = Path(__file__).parents[1] / "recordings" / "files_of_0_2"
REFUSED_S, REFUSED_MIB = 2.0, 500.0
MOST_S, MOST_MIB = 20.0, 2048.0
# Beyond these a process is ended: the table shows it as over the limits.
KILLED_S, KILLED_MIB = 40.0, 4096.0
ESCAPE = "\x1b]0;owned\x07\x1b[31m"
PREDICTED = "profile edge_opt.model:SmallCNN -i 1x1x28x28 -t FILE"
PROFILED, CHECKED, CONFIGURED, SERVED = "profile FILE", "check FILE --budget macs<=1", "CONFIG", "llm FILE"


class HostileFile(NamedTuple):
    """A file, and the command that reads it; "FILE" stands for its path."""

    kind: str
    name: str
    content: bytes
    command: str


class Outcome(NamedTuple):
    """What became of a file."""

    file: HostileFile
    code: int  # exit code; minus the signal's number where the process was ended
    seconds: float  # of the CPU
    mib: float  # beyond what the imports take
    output: str
    executed: bool

    @property
    def status(self) -> str:
        """Return "answered", "one sentence" or "traceback"; whatever is not a proper answer counts as the last."""
        if self.code in (0, 1) and "Traceback" not in self.output:
            return "answered"
        errors = [line for line in self.output.splitlines() if line.startswith("error: ")]
        is_short = len(self.output) < 2_000 and len(errors) == 1 and "Traceback" not in self.output
        return "one sentence" if self.code == 2 and is_short else "traceback"

    @property
    def problems(self) -> list[str]:
        """Return what must not be."""
        is_refused = self.status != "answered"
        most_s, most_mib = (REFUSED_S, REFUSED_MIB) if is_refused else (MOST_S, MOST_MIB)
        checks = {
            f"ended with {self.code}": self.status == "traceback",
            f"took {self.seconds:.1f} s": self.seconds > most_s,
            f"took {self.mib:.0f} MiB": self.mib > most_mib,
            "printed control characters": any(not c.isprintable() and c not in "\n" for c in self.output),
            "executed code": self.executed,
        }
        return [problem for problem, holds in checks.items() if holds]


def run(file: HostileFile, folder: Path, watched: Path) -> Outcome:
    """Read a file in a forked process; `watched` is a folder in which code that was executed leaves a file."""
    path, shown = folder / file.name, folder / "output.txt"
    path.write_bytes(file.content)
    before_kib, begun = _imported_kib(), time.monotonic()
    child = os.fork()
    if not child:
        _read_in_this_process(file, path, shown)
    ended, status, usage = 0, 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    while not ended:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if not ended and time.monotonic() - begun > 2 * KILLED_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0 if ended else 0.005)
    executed = bool(list(watched.iterdir()))
    for mark in watched.iterdir():
        mark.unlink()
    path.unlink()
    code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    mib = max(usage.ru_maxrss - before_kib, 0) / 1024
    return Outcome(file, code, seconds, mib, shown.read_text(encoding="utf-8", errors="replace"), executed)


def _imported_kib() -> int:
    """Return the memory that a forked process begins with."""
    child = os.fork()
    if not child:
        os._exit(0)
    return os.wait4(child, 0)[2].ru_maxrss


def _read_in_this_process(file: HostileFile, path: Path, shown: Path) -> None:
    """Run the command as a shell would, and end the process."""
    code: Any = 70
    try:
        with shown.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(path.parent)
        resource.setrlimit(resource.RLIMIT_CPU, (int(KILLED_S), int(KILLED_S)))
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + int(KILLED_MIB) * 2**20,) * 2)
        code = _command(file.command, path)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 71)


def _command(command: str, path: Path) -> int:
    if command == CONFIGURED:
        from edge_opt.errors import EdgeOptError
        from edge_opt.run.config import read_config

        try:
            print(len(read_config(path).output_dir))
        except EdgeOptError as error:
            # A file may have several faults, each with a sentence.
            print("error: " + str(error).replace("\n", "; ")[:1_000].encode("unicode_escape").decode())
            return 2
        return 0
    from edge_opt.cli import main

    sys.argv = ["edge-opt", *(word.replace("FILE", str(path)) for word in command.split())]
    main()
    return 0


def preload() -> None:
    """Import what the commands need, before the first process is forked."""
    for module in ("calibration.predict", "cli", "model_files.file_model", "profiling", "report.html", "run.config"):
        importlib.import_module(f"edge_opt.{module}")
    importlib.import_module("edge_opt.serving.model_source").import_transformers()
    importlib.import_module("transformers.models.llama.modeling_llama")


# Mutations


def damaged(
    kind: str, suffix: str, whole: bytes, command: str, count: int, dice: random.Random
) -> Iterator[HostileFile]:
    """Yield a file cut off, and with changed, exchanged, repeated and removed bytes."""
    for number in range(count):
        data = bytearray(whole)
        way = ("cut off", "changed bit", "changed byte", "large number", "exchanged", "repeated", "removed")[number % 7]
        first, second = sorted(dice.randrange(len(data)) for _ in range(2))
        second = min(second, first + 64)
        if way == "cut off":
            del data[first:]
        elif way == "changed bit":
            data[first] ^= 1 << dice.randrange(8)
        elif way == "changed byte":
            data[first] = dice.randrange(256)
        elif way == "large number":
            data[first : first + 4] = dice.choice(
                (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\0\0\0\0")
            )
        elif way == "exchanged":
            data[first], data[second] = data[second], data[first]
        elif way == "repeated":
            data[second:second] = data[first:second] * 3
        else:
            del data[first:second]
        yield HostileFile(f"{kind}, damaged", f"{number}{suffix}", bytes(data), command)


def damaged_text(
    kind: str, suffix: str, plain: Any, command: str, count: int, dice: random.Random, write: Callable[[Any], str]
) -> Iterator[HostileFile]:
    """Yield a document in which one value is another: of another type, huge, deep, no number, or text to be obeyed."""
    values: list[Any] = [
        None,
        -1,
        0,
        1e308,
        -1e308,
        10**30,
        float("nan"),
        float("inf"),
        True,
        "",
        ESCAPE,
        "\0",
        "x" * 100_000,
        [],
        {},
        [[]],
        {"a": 1},
        "</script><script>alert(1)</script>",
        "../../../etc/passwd",
        2**63,
        0.5,
    ]
    for number in range(count):
        document = json.loads(json.dumps(plain))
        path = dice.choice(list(_paths(document)))
        inner = document
        for step in path[:-1]:
            inner = inner[step]
        if number % 5 == 4 and isinstance(inner, dict):
            del inner[path[-1]]
        else:
            inner[path[-1]] = dice.choice(values)
        yield HostileFile(f"{kind}, other values", f"{number}{suffix}", write(document).encode(), command)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys: Iterable[Any] = (
        value.keys() if isinstance(value, dict) else range(min(len(value), 3)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield (*path, key)
        yield from _paths(value[key], (*path, key))


def swapped_fields(whole: bytes, count: int, dice: random.Random) -> Iterator[HostileFile]:
    """Yield ONNX files whose message is well-formed, with a field that has another value, is gone or is repeated."""
    for number in range(count):
        model = ModelProto.FromString(whole)
        message: Any = model
        while True:
            field, value = dice.choice(message.ListFields())
            if field.type == field.TYPE_MESSAGE and dice.random() < 0.85:
                message = dice.choice(value) if field.is_repeated else value
                if message.ListFields():
                    continue
                break
            _change(message, field, value, dice)
            break
        yield HostileFile("onnx, other fields", f"{number}.onnx", model.SerializeToString(), PROFILED)


def _change(message: Any, field: Any, value: Any, dice: random.Random) -> None:
    numbers = {
        field.TYPE_INT64: (0, -1, 2**31, 2**62, -(2**63)),
        field.TYPE_INT32: (0, -1, 99, 2**31 - 1),
        field.TYPE_ENUM: (0,),
    }
    if field.type == field.TYPE_MESSAGE and field.is_repeated:
        value.extend([dice.choice(value)] * dice.choice((1, 1000)))
    elif field.is_repeated and len(value) and field.type in numbers:
        value[dice.randrange(len(value))] = dice.choice(numbers[field.type])
    elif field.is_repeated and len(value) and field.type == field.TYPE_STRING:
        value[dice.randrange(len(value))] = dice.choice(("", "w", "y", "nobody", ESCAPE))
    elif field.type in numbers:
        setattr(message, field.name, dice.choice(numbers[field.type]))
    elif field.type == field.TYPE_STRING and not field.is_repeated:
        setattr(message, field.name, dice.choice(("", "w", "Conv", "Loop", ESCAPE, "x" * 1_000_000)))
    else:
        message.ClearField(field.name)


# ONNX


def small_onnx(folder: Path) -> bytes:
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "f"),
        node("Conv", "f w b", "c"),
        node("Relu", "c", "r", name="block/act"),
        node("Concat", "r r", "k", axis=1),
        node("Slice", "k o e", "l"),
        node("Reshape", "l t", "y"),
    ]
    weights = {
        "w": (4, 2, 3, 3),
        "b": (4,),
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.int8),
        "t": np.array([0, -1]),
        "o": np.array([0]),
        "e": np.array([9]),
    }
    return Path(onnx_graphs.write(folder / "small.onnx", nodes, {"x": (1, 2, 6, 6)}, ["y"], weights)).read_bytes()


def _onnx(
    folder: Path,
    name: str,
    nodes: list[Any],
    weights: dict[str, Any] | None = None,
    outputs: str = "y",
    shape: Any = (1, 4),
    **settings: Any,
) -> HostileFile:
    path = onnx_graphs.write(folder / "crafted.onnx", nodes, {"x": shape}, outputs.split(), weights, **settings)
    return HostileFile("onnx, crafted", f"{name}.onnx", Path(path).read_bytes(), PROFILED)


def _doubling(op: str, count: int) -> list[Any]:
    attributes: dict[str, Any] = {"axis": 0} if op == "Concat" else {}
    return [node(op, f"v{index} v{index}", f"v{index + 1}", **attributes) for index in range(count)]


def _renamed(nodes: list[Any], first: str, last: str) -> list[Any]:
    for item in nodes:
        item.input[:] = [first if name == "v0" else name for name in item.input]
    nodes[-1].output[0] = last
    return nodes


def _body(nodes: list[Any], count: str = "i", goes_on: str = "c", result: str = "d", collected: str = "") -> Any:
    values = [helper.make_tensor_value_info(count, 7, []), helper.make_tensor_value_info(goes_on, 9, [])]
    results = [helper.make_tensor_value_info(result, 9, [])]
    results += [helper.make_tensor_value_info(collected, 1, None)] * bool(collected)
    return helper.make_graph(nodes, "body", values, results)


def crafted_onnx(folder: Path, secret: Path) -> Iterator[HostileFile]:
    """Yield ONNX files that ask for memory, time, other files, or a terminal that obeys."""
    one, many = np.array([1], np.int64), np.array([2**31], np.int64)
    for op in ("Concat", "Sum"):
        for count in (30, 80, 400):
            yield _onnx(folder, f"doubling {op} {count}", _renamed(_doubling(op, count), "x", "y"))
            yield _onnx(
                folder,
                f"doubling constant {op} {count}",
                [*_renamed(_doubling(op, count), "w", "z"), node("Add", "x z", "y")],
                {"w": (4,)},
            )
            yield _onnx(
                folder,
                f"doubling integers {op} {count}",
                [*_renamed(_doubling(op, count), "w", "z"), node("Reshape", "x z", "y")],
                {"w": one},
            )
    shapes = [
        node("Concat", f"{' '.join(['x'] * 200)}", "a", axis=1),
        node("Concat", " ".join(["a"] * 200), "y", axis=1),
    ]
    yield _onnx(folder, "wide Concat", shapes)
    relus = [node("Relu", f"v{index}", f"v{index + 1}") for index in range(49_000)]
    yield _onnx(folder, "49000 nodes", _renamed(relus, "x", "y"))
    adds = [node("Add", f"v{index} v{max(index - 7, 0)}", f"v{index + 1}") for index in range(20_000)]
    yield _onnx(folder, "20000 nodes", _renamed(adds, "x", "y"))
    folds = [node("Add", f"v{index} v{index}", f"v{index + 1}") for index in range(49_000)]
    yield _onnx(folder, "49000 constant nodes", [*_renamed(folds, "w", "z"), node("Add", "x z", "y")], {"w": (4,)})
    for op in ("Relu", "Nobody"):
        odd = helper.make_node(op, ["x"], ["y"], name="n" * 5_000_000)
        yield _onnx(folder, f"long name {op}", [odd])
        yield _onnx(folder, f"escapes {op}", [helper.make_node(op, ["x"], ["y"], name=f"a/{ESCAPE}/{ESCAPE}")])
    yield _onnx(folder, "long type", [helper.make_node("N" * 5_000_000, ["x"], ["y"])])
    yield _onnx(folder, "long domain", [helper.make_node("Relu", ["x"], ["y"], domain="d" * 5_000_000)])
    yield _onnx(folder, "long value", [node("Relu", "x", "v" * 3_000_000), node("Relu", "v" * 3_000_000, "y")])
    yield _onnx(folder, "missing long value", [node("Relu", "v" * 5_000_000, "y")])
    yield _onnx(folder, "escapes in values", [node("Relu", f"x{ESCAPE}", "y")])
    yield _onnx(folder, "escapes in a custom operator", [helper.make_node(f"No{ESCAPE}", ["x"], ["y"], domain=ESCAPE)])
    yield _onnx(folder, "long output", [node("Relu", "x", "y")], outputs="z" * 5_000_000)
    for opset in (0, -1, 1, 6, 2**31, 2**62, 1000):
        yield _onnx(folder, f"opset {opset}", [node("Relu", "x", "y")], opset=opset)
    unset = ModelProto.FromString(_onnx(folder, "", [node("Relu", "x", "y")]).content)
    del unset.opset_import[:]
    yield HostileFile("onnx, crafted", "no opset.onnx", unset.SerializeToString(), PROFILED)
    unset.opset_import.extend([helper.make_opsetid("", version) for version in (20, 7)])
    yield HostileFile("onnx, crafted", "two opsets.onnx", unset.SerializeToString(), PROFILED)
    yield _onnx(folder, "circle", [node("Add", "x b", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")])
    yield _onnx(folder, "itself", [node("Add", "x y", "y")])
    yield _onnx(folder, "made twice", [node("Relu", "x", "y"), node("Tanh", "x", "y")])
    yield _onnx(folder, "no inputs", [node("Conv", "x", "y")], shape=(1, 1, 4, 4))
    yield _onnx(folder, "no outputs", [helper.make_node("Relu", ["x"], [])])
    yield _onnx(folder, "negative shape", [node("Relu", "x", "y")], shape=(-5, 4))
    yield _onnx(folder, "huge shape", [node("Relu", "x", "y")], shape=(2**62, 2**62))
    yield _onnx(folder, "large shape", [node("Conv", "x w", "y")], {"w": (4, 4, 3, 3)}, shape=(2**20, 4, 2**14, 2**14))
    for op, sizes in {"Expand": many, "Tile": many, "Reshape": many, "ConstantOfShape": many}.items():
        inputs = "s" if op == "ConstantOfShape" else "x s"
        yield _onnx(folder, f"huge {op}", [node(op, inputs, "y")], {"s": np.repeat(sizes, 2)})
        yield _onnx(folder, f"negative {op}", [node(op, inputs, "y")], {"s": -np.repeat(sizes, 2)})
    yield _onnx(folder, "huge Pad", [node("Pad", "x p", "y")], {"p": np.array([2**40] * 4)})
    yield _onnx(
        folder, "huge Range", [node("Range", "a b c", "y")], {"a": np.array(0), "b": np.array(2**62), "c": np.array(1)}
    )
    yield _onnx(
        folder,
        "Range without an end",
        [node("Range", "a b c", "y")],
        {"a": np.array(0.0), "b": np.array(np.inf), "c": np.array(1.0)},
    )
    yield _onnx(
        folder,
        "huge OneHot",
        [node("OneHot", "i d v", "y")],
        {"i": one, "d": np.array(2**62), "v": np.array([0.0, 1.0])},
    )
    yield _onnx(folder, "huge Resize", [node("Resize", "x - s", "y")], {"s": np.array([1e30, 1e30], np.float32)})
    yield _onnx(folder, "NaN Resize", [node("Resize", "x - s", "y")], {"s": np.array([np.nan, 1], np.float32)})
    yield _onnx(
        folder,
        "many pieces",
        [node("Split", "x", " ".join(f"y{i}" for i in range(30_000)), axis=0)],
        outputs="y0",
        shape=(30_000, 4),
    )
    for trips in (10**9, 2**62, -1, 20_000):
        nodes = [node("Identity", "c", "d"), node("Cast", "i", "z", to=1)]
        loop = node("Loop", "n -", "y", body=_body(nodes, collected="z"))
        yield _onnx(folder, f"Loop {trips}", [loop], {"n": np.array(trips)})
    inner = node(
        "Loop",
        "n -",
        "z",
        body=_body([node("Identity", "c2", "d2"), node("Cast", "i2", "z2", to=1)], "i2", "c2", "d2", "z2"),
    )
    loop = node("Loop", "n -", "y", body=_body([node("Identity", "c", "d"), inner], collected="z"))
    yield _onnx(folder, "Loop in Loop", [loop], {"n": np.array(1_000)})
    scan = helper.make_graph(
        [node("Relu", "r", "o")],
        "g",
        [helper.make_tensor_value_info("r", 1, [4])],
        [helper.make_tensor_value_info("o", 1, [4])],
    )
    yield _onnx(folder, "long Scan", [node("Scan", "x", "y", body=scan, num_scan_inputs=1)], shape=(2**39, 4))
    slices = {"a": np.array([2**62]), "b": np.array([-(2**62)]), "c": np.array([0]), "d": np.array([-1])}
    yield _onnx(folder, "Slice backwards", [node("Slice", "x a b c d", "y")], slices, shape=(2**38, 4))
    yield _onnx(folder, "many scan inputs", [node("Scan", "x", "y", body=scan, num_scan_inputs=2**40)])
    yield _onnx(folder, "Loop without a body", [node("Loop", "n -", "y")], {"n": np.array(3)})
    yield _onnx(folder, "If without a branch", [node("If", "b", "y")], {"b": np.array(True)})
    kinds = [helper.make_node(f"Own{index}", ["x"], [f"y{index}"], domain="own") for index in range(3_000)]
    values = [helper.make_tensor_value_info(f"y{index}", 1, [4]) for index in range(3_000)]
    yield _onnx(folder, "many kinds", kinds, outputs="y0", values=values, domains=["own"])
    yield from _crafted_functions(folder)
    yield from _crafted_weights(folder, secret)
    yield from _crafted_lists(folder)


def _changed(folder: Path, name: str, change: Callable[[Any], object]) -> HostileFile:
    """Return a file of one addition, whose message was changed."""
    model = ModelProto.FromString(_onnx(folder, name, [node("Add", "x w", "y")], {"w": (4,)}).content)
    change(model)
    return HostileFile("onnx, crafted", f"{name}.onnx", model.SerializeToString(), PROFILED)


def _crafted_functions(folder: Path) -> Iterator[HostileFile]:
    """Yield ONNX files with functions and graphs that call each other."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]

    def row(count: int, times: int, last: str) -> Callable[[Any], None]:
        """Add functions that call the next one so many times; the last one calls `last`."""

        def change(model: Any) -> None:
            for number in range(count):
                called, domain = (f"f{number + 1}", "own") if number + 1 < count else (last, "own" * (last[0] == "f"))
                nodes = [helper.make_node(called, [f"v{i}"], [f"v{i + 1}"], domain=domain) for i in range(times)]
                function = helper.make_function("own", f"f{number}", ["v0"], [f"v{times}"], nodes, opsets)
                model.functions.append(function)
            model.graph.node[0].CopyFrom(helper.make_node("f0", ["x"], ["y"], domain="own"))

        return change

    def nested(depth: int) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            graph = helper.make_graph([node("Relu", "x", "y")], "g", [], [helper.make_tensor_value_info("y", 1, None)])
            for _ in range(depth):
                other = graph if graph.ByteSize() < 100_000 else None
                branches = {"then_branch": graph} | ({"else_branch": other} if other else {})
                graph = helper.make_graph([helper.make_node("If", ["b"], ["y"], **branches)], "g", [], graph.output)
            model.graph.node[0].CopyFrom(graph.node[0])
            model.graph.initializer.append(helper.make_tensor("b", TensorProto.BOOL, [], [True]))

        return change

    yield _changed(folder, "functions in a circle", row(2, 1, "f0"))
    yield _changed(folder, "functions that double", row(40, 2, "Relu"))
    yield _changed(folder, "functions in a row", row(500, 1, "Relu"))
    for depth in (5, 12, 25):
        yield _changed(folder, f"If {depth} deep", nested(depth))


def _crafted_weights(folder: Path, secret: Path) -> Iterator[HostileFile]:
    """Yield ONNX files whose weights are elsewhere, too large or of an unknown type."""

    def outside(place: str, offset: str) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            weight = model.graph.initializer[0]
            weight.ClearField("raw_data")
            weight.data_location = TensorProto.EXTERNAL
            for key, value in (("location", place), ("offset", offset)):
                weight.external_data.append(StringStringEntryProto(key=key, value=value))

        return change

    def described(dims: list[int], data_type: int) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            model.graph.initializer[0].dims[:] = dims
            model.graph.initializer[0].data_type = data_type

        return change

    relative = f"../{secret.parent.name}/{secret.name}"
    places = (str(secret), relative, "/etc/passwd", "/dev/zero", "", "." * 10_000, "a\0b", "x" * 5_000_000)
    for number, place in enumerate(places):
        for offset in ("0", "9" * 5_000, "-1", "x"):
            yield _changed(folder, f"weights outside {number} {offset[:2]}", outside(place, offset))
    for number, dims in enumerate(([2**40], [-1], [2**62, 2**62], [0, 2**62], [1] * 100, [2**31] * 60)):
        yield _changed(folder, f"dimensions {number}", described(dims, 1))
    for number in (0, 8, 23, 99, -1):
        yield _changed(folder, f"element type {number}", described([4], number))


def _crafted_lists(folder: Path) -> Iterator[HostileFile]:
    """Yield ONNX files with metadata to be evaluated, and with lists that are long."""

    def metadata(key: str, value: str) -> Callable[[Any], None]:
        entry = StringStringEntryProto(key=f"pkg.torch.onnx.{key}", value=value)
        return lambda model: model.graph.node[0].metadata_props.append(entry)

    texts = (
        "['" + "a', '" * 300_000 + "']",
        "[" * 5_000 + "]" * 5_000,
        "9**9**9",
        f"['', '{ESCAPE}']",
        "[" + "9" * 9_000,
    )
    for number, text in enumerate((*texts, "__import__('os').system('touch owned')")):
        for key in ("name_scopes", "class_hierarchy"):
            yield _changed(folder, f"metadata {key} {number}", metadata(key, text))
    scoped = [
        helper.make_node("Relu", ["y"], [f"z{i}"], name="/".join(f"m{i}_{j}" for j in range(60))) for i in range(3_000)
    ]
    values = [helper.make_tensor_value_info(f"v{i}", 1, [1]) for i in range(200_000)]
    weights = [helper.make_tensor(f"w{i}", 1, [1], [1.0]) for i in range(100_000)]
    yield _changed(folder, "many values", lambda model: model.graph.value_info.extend(values))
    yield _changed(folder, "many inputs", lambda model: model.graph.input.extend(values[:50_000]))
    yield _changed(folder, "many outputs", lambda model: model.graph.output.extend([model.graph.output[0]] * 100_000))
    yield _changed(folder, "many weights", lambda model: model.graph.initializer.extend(weights))
    yield _changed(folder, "many scopes", lambda model: model.graph.node.extend(scoped))
    yield _changed(folder, "sequence", lambda model: model.graph.node.append(node("SequenceConstruct", "y", "s")))
    for number, count in ((1, 4_900_000), (5, 4_900_000), (13, 4_900_000), (14, 1_000_000)):
        content = bytes([number << 3 | 2, 0]) * count
        size = b"".join(bytes([len(content) >> shift & 127 | 128]) for shift in (0, 7, 14)) + bytes(
            [len(content) >> 21]
        )
        yield HostileFile("onnx, crafted", f"empty {number}.onnx", b"\x3a" + size + content, PROFILED)


# TFLite


def small_tflite(folder: Path) -> bytes:
    tensors = {
        "x": ((1, 6, 6, 2), "float32"),
        "w": np.ones((4, 3, 3, 2), np.float32),
        "b": np.zeros(4, np.float32),
        "c": ((1, 6, 6, 4), "float32"),
        "r": ((1, 6, 6, 4), "float32"),
        "s": np.array([1, 144], np.int32),
        "y": ((1, 144), "float32"),
    }
    ops = [tflite_graphs.conv("CONV_2D", "x w b", "c"), Op("RELU", "c", "r"), Op("RESHAPE", "r s", "y")]
    return Path(tflite_graphs.write(folder / "small.tflite", Graph(ops, tensors, "x", "y"))).read_bytes()


def swapped_tflite(whole: bytes, count: int, dice: random.Random) -> Iterator[HostileFile]:
    """Yield TFLite files that are well-formed tables with another value in one field."""
    for number in range(count):
        model = schema.ModelT.InitFromPackedBuf(whole, 0)
        graph = model.subgraphs[0]
        item = dice.choice([*graph.tensors, *graph.operators, *model.operatorCodes, *model.buffers, graph])
        name = dice.choice([key for key, value in vars(item).items() if value is not None])
        value = getattr(item, name)
        if isinstance(value, (list, np.ndarray)) and name not in ("tensors", "operators"):
            changed = list(value)
            if changed:
                changed[dice.randrange(len(changed))] = (
                    dice.choice((0, 1, 5, 100)) if name == "data" else dice.choice((-1, 0, 99, 2**31 - 1, -(2**31)))
                )
            value = dice.choice((changed, changed[:-1], changed * 50))
        elif isinstance(value, bytes | str):
            value = dice.choice((b"", b"x" * 500_000, ESCAPE.encode()))
        elif isinstance(value, int) and not isinstance(value, bool):
            value = dice.choice((0, 1, 7, 60, 120))
        else:
            value = None
        setattr(item, name, value)
        builder = flatbuffers.Builder(1024)
        try:
            builder.Finish(model.Pack(builder), b"TFL3")
        except Exception:  # the writer of the format checks some of it
            continue
        yield HostileFile("tflite, other fields", f"{number}.tflite", bytes(builder.Output()), PROFILED)


def crafted_tflite(folder: Path) -> Iterator[HostileFile]:
    """Yield TFLite files that ask for memory or time."""

    def write(name: str, *graphs: Graph) -> HostileFile:
        path = tflite_graphs.write(folder / "crafted.tflite", *graphs)
        return HostileFile("tflite, crafted", f"{name}.tflite", Path(path).read_bytes(), PROFILED)

    unit = ((1, 4), "float32")
    for count in (30, 80, 400):
        names = [f"v{i}" for i in range(count + 1)]
        ops = [Op("CONCATENATION", f"{a} {a}", b, "ConcatenationOptions", {"axis": 0}) for a, b in pairwise(names)]
        yield write(f"doubling {count}", Graph(ops, dict.fromkeys(names, unit), names[0], names[-1]))
        constants = dict.fromkeys(names[1:], unit) | {"v0": np.ones((1, 4), np.float32), "x": unit, "y": unit}
        ops = [*ops, Op("ADD", f"x {names[-1]}", "y", "AddOptions")]
        yield write(f"doubling constant {count}", Graph(ops, constants, "x", "y"))
        integers = dict.fromkeys(names[1:], ((1,), "int32")) | {"v0": np.ones(1, np.int32), "x": unit, "y": unit}
        yield write(
            f"doubling integers {count}", Graph([*ops[:-1], Op("RESHAPE", f"x {names[-1]}", "y")], integers, "x", "y")
        )
    names = [f"v{i}" for i in range(49_001)]
    ops = [Op("RELU", a, b) for a, b in pairwise(names)]
    yield write("49000 nodes", Graph(ops, dict.fromkeys(names, unit), names[0], names[-1]))
    huge, rows = np.array([2**31 - 1] * 3, np.int32), ((1, 1, 1), "float32")
    tensors = {"x": rows, "s": huge, "y": rows, "v": np.array(1, np.float32), "p": np.full((3, 2), 2**31 - 1, np.int32)}
    for op in (
        Op("BROADCAST_TO", "x s", "y"),
        Op("FILL", "s v", "y"),
        Op("TILE", "x s", "y"),
        Op("PAD", "x p", "y"),
        Op("RESHAPE", "x s", "y"),
    ):
        yield write(f"huge {op.kind}", Graph([op], tensors, "x", "y"))
    scalar = ((), "int32")
    for first, second in ((1, 2), (0, 0), (1, 0), (9, 9), (-1, -1)):
        loop = Op("WHILE", "k", "j", "WhileOptions", {"condSubgraphIndex": first, "bodySubgraphIndex": second})
        main = Graph([loop], {"k": np.array(0, np.int32), "j": scalar, "x": rows}, "x", "j")
        body = Graph(
            [Op("ADD", "k z", "j", "AddOptions")], {"k": scalar, "z": np.array(1, np.int32), "j": scalar}, "k", "j"
        )
        condition = Graph(
            [Op("LESS", "k z", "c")], {"k": scalar, "z": np.array(2**31 - 1, np.int32), "c": ((), "bool")}, "k", "c"
        )
        yield write(f"WHILE {first} {second}", main, condition, body)
    for name in (ESCAPE, "n" * 60_000, ";".join(["a.B/c_d"] * 5_000), "/".join("a" * 30_000)):
        tensors = {"x": unit, "y": unit}
        yield write(f"operator of {len(name)}", Graph([Op(f"Nobody{name}", "x", "y")], tensors, "x", "y"))
    same = tflite_graphs.write(
        folder / "crafted.tflite", Graph([Op("RELU", "x", "NAME")], {"x": unit, "NAME": unit}, "x", "NAME")
    )
    for number, encoded in enumerate((ESCAPE.encode() * 500, b"n" * 5_000_000, b"a.B/c_d;" * 8_000, b"a/" * 30_000)):
        model = schema.ModelT.InitFromPackedBuf(Path(same).read_bytes(), 0)
        model.subgraphs[0].tensors[1].name = encoded
        builder = flatbuffers.Builder(1024)
        builder.Finish(model.Pack(builder), b"TFL3")
        yield HostileFile("tflite, crafted", f"name {number}.tflite", bytes(builder.Output()), PROFILED)


# Exported programs


class _Mark:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def small_pt2(folder: Path) -> bytes:
    import torch
    from torch import nn

    torch.export.save(torch.export.export(nn.Linear(8, 4).eval(), (torch.zeros(4, 8),)), folder / "small.pt2")
    return (folder / "small.pt2").read_bytes()


def crafted_pt2(whole: bytes, watched: Path) -> Iterator[HostileFile]:
    """Yield exported programs that execute code when they are opened; each command must refuse them."""
    code = f"open({str(watched / 'ran')!r}, 'w')"
    bombs = {"pickle": pickle.dumps(_Mark(watched / "ran")), "expression": code.encode(), "power": b"9**9**9"}
    commands = (
        "profile FILE",
        CHECKED,
        "compare FILE FILE",
        "report FILE",
        "train-cost FILE",
        "llm FILE",
        "board FILE",
        "measure-on FILE --board x",
        "quantize FILE --random-calibration -o out",
        "export FILE -o out --runtime onnxruntime",
        "prune FILE -o out",
        "sweep FILE -o out",
        "profile FILE -t raspberry-pi-4 -t jetson-nano",
        "profile FILE --measure",
    )
    for bomb, content in bombs.items():
        data = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(whole)) as archive, zipfile.ZipFile(data, "w") as changed:
            for name in archive.namelist():
                is_inputs, is_model = (
                    name.endswith(("sample_inputs/model.pt", "sample_inputs_config.json")),
                    name.endswith("models/model.json"),
                )
                text = archive.read(name)
                if bomb == "pickle" and is_inputs and name.endswith(".pt"):
                    text = content
                elif bomb != "pickle" and is_model:
                    text = text.replace(b'"expr_str": "4"', b'"expr_str": ' + json.dumps(content.decode()).encode())
                    text = text.replace(
                        b'"as_int": 4',
                        b'"as_expr": {"expr_str": ' + json.dumps(content.decode()).encode() + b', "hint": null}',
                    )
                changed.writestr(name, text)
        for number, command in enumerate(commands):
            yield HostileFile("pt2, not trusted", f"{bomb}{number}.pt2", data.getvalue(), command)


# Documents


def _recorded(name: str) -> Any:
    return json.loads(gzip.decompress((RECORDINGS / f"{name}.json.gz").read_bytes()))


def _deep(kind: str, suffix: str, command: str) -> Iterator[HostileFile]:
    """Yield JSON that is deep, has numbers of thousands of digits, or is not JSON."""
    texts = {
        "deep lists": "[" * 100_000 + "]" * 100_000,
        "deep mappings": '{"a":' * 50_000 + "1" + "}" * 50_000,
        "long integer": '{"format": ' + "9" * 100_000 + "}",
        "long version": "9" * 5_000,
        "not a number": '{"format": NaN}',
        "twice": '{"format": 1, "format": 2}',
        "empty": "",
        "null": "null",
        "list": "[]",
        "zeros": "\0" * 1_000,
        "half a surrogate": '{"format": "\\ud800"}',
        "escapes": json.dumps({ESCAPE: ESCAPE}),
        "raw escapes": ESCAPE,
        "not UTF-8": "\udcff",
        "large": '{"a": "' + "x" * 9_000_000 + '"}',
        "wide": "[" + "1," * 3_000_000 + "1]",
        "model_type": '{"model_type": "' + "l" * 1_000_000 + '"}',
    }
    for name, text in texts.items():
        yield HostileFile(kind, f"{name}{suffix}", text.encode("utf-8", "surrogateescape"), command)


def documents(count: int, dice: random.Random) -> Iterator[HostileFile]:
    """Yield damaged profiles, comparisons, sweeps, calibrations, devices, configurations and language models."""
    commands = {
        "profile": (CHECKED, "report FILE -o out.html", "compare FILE FILE"),
        "profile_measured": (CHECKED, "report FILE -o out.html"),
        "profile_target": (CHECKED, "report FILE -o out.html"),
        "sweep": ("report FILE -o out.html",),
        "calibration": (PREDICTED,),
    }
    for name, texts in commands.items():
        plain = _recorded(name)
        for index, command in enumerate(texts):
            kind = f"json, {name.partition('_')[0]}"
            share = count // len(texts)
            yield from damaged_text(kind, ".json", plain, command, share, dice, json.dumps)
            yield from damaged(kind, ".json", json.dumps(plain).encode(), command, share // 2, dice)
            if not index:
                yield from _deep(f"{kind}, crafted", ".json", command)
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 500,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_scaling": None,
        "head_dim": 16,
    }
    yield from damaged_text("json, language model", ".json", llama, SERVED, count, dice, json.dumps)
    yield from _deep("json, language model, crafted", ".json", SERVED)
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "intermediate_size",
        "max_position_embeddings",
    ):
        for value in (10**9, 2**62, 10**4, -1, 0, 1e9, "8"):
            yield HostileFile(
                "json, language model, crafted",
                f"{key} {value}.json",
                json.dumps(llama | {key: value}).encode(),
                SERVED,
            )
    import yaml

    settings = {
        "output_dir": "out",
        "epochs": 2,
        "learning_rate": 0.001,
        "budgets": ["size_mb <= 5"],
        "pruning_levels": [0.0, 0.5],
        "precisions": ["fp32"],
        "model": {"conv1_channels": 8},
        "layer_pruning": {"conv1": [0.5]},
        "metric": "accuracy",
        "memory_limit_mb": 900,
        "target": None,
        "cpu_frequency_scale": 1.0,
        "batch_size": 32,
        "seed": 0,
        "time_limit_s": 60,
    }
    yield from damaged_text("yaml, configuration", ".yaml", settings, CONFIGURED, count, dice, yaml.safe_dump)
    yield from damaged("yaml, configuration", ".yaml", yaml.safe_dump(settings).encode(), CONFIGURED, count, dice)
    yield from crafted_yaml()
    device = (Path(__file__).parents[2] / "src/edge_opt/boards/data/raspberry-pi-4.toml").read_bytes()
    yield from damaged("toml, device", ".toml", device, PREDICTED, count, dice)


def crafted_yaml() -> Iterator[HostileFile]:
    """Yield YAML with tags, dates, aliases that grow, deep nesting and numbers of thousands of digits."""
    aliases = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    texts = [
        "epochs: !!python/object/apply:os.system ['touch owned']",
        "epochs: !!python/name:os.system",
        "!!python/module:os",
        "epochs: 2001-99-99",
        "epochs: 2001-01-01",
        "epochs: 2001-01-01 25:61:61",
        "epochs: !!timestamp x",
        "epochs: !!int x",
        "epochs: !!float x",
        "epochs: !!binary x",
        "epochs: !!binary é",
        "epochs: !!bool x",
        "epochs: !!set {a, b}",
        "epochs: !!omap [a: 1]",
        "epochs: !!pairs [a]",
        "epochs: !own x",
        "!!map [a]",
        "? [a, b]\n: 1",
        "? {a: 1}\n: 1",
        "epochs: " + "9" * 10_000,
        "epochs: 0x" + "f" * 10_000,
        "epochs: " + "1:" * 5_000 + "1",
        "epochs: 1e" + "9" * 5_000,
        "learning_rate: 1e300",
        "learning_rate: .nan",
        "output_dir: ''",
        'output_dir: "a\\0b"',
        "memory_limit_mb: 1",
        "cpu_frequency_scale: 1e300",
        "constraints: ['size_mb <= 1', 'size_mb >= 2']",
        "constraints: ['latency_ms <= " + "9" * 5_000 + "']",
        "seed: " + "9" * 400,
        "batch_size: 99999999999999999999",
        "[" * 5_000,
        "{a: " * 3_000,
        "- " * 3_000 + "a",
        aliases,
        "a: &a [*a]",
        "&a {b: *a}",
        "model: &m {conv1_channels: 8}\nlayer_pruning: *m",
        "\0",
        "\x1b[31m: 1",
        f"'{ESCAPE}': 1".encode("unicode_escape").decode(),
        "epochs: 1\nepochs: 2",
        "%YAML 9.9\n---\na: 1",
        "--- 1\n--- 2",
        "metric: os:system",
        "metric: 7",
        "dataset: ''",
        "target: " + "x" * 100_000,
        "x" * 1_000_000,
        "<<: 1",
        "<<: [1]",
        "<<: {<<: {a: 1}}",
        "1: 2",
        "null: 1",
        "[]: 1",
    ]
    for number, text in enumerate(texts):
        yield HostileFile("yaml, crafted", f"{number}.yaml", text.encode("utf-8", "surrogatepass"), CONFIGURED)


def files(folder: Path, count: int, seed: int = 0) -> Iterator[HostileFile]:
    """Yield all kinds of files; `count` is that of each kind of damage."""
    dice, watched, secret = random.Random(seed), folder / "watched", folder / "secret" / "weights.bin"
    for path in (watched, secret.parent):
        path.mkdir(exist_ok=True)
    secret.write_bytes(bytes(4_096))
    whole = small_onnx(folder)
    yield from damaged("onnx", ".onnx", whole, PROFILED, count, dice)
    yield from swapped_fields(whole, count, dice)
    yield from crafted_onnx(folder, secret)
    whole = small_tflite(folder)
    yield from damaged("tflite", ".tflite", whole, PROFILED, count, dice)
    yield from swapped_tflite(whole, count, dice)
    yield from crafted_tflite(folder)
    whole = small_pt2(folder)
    yield from crafted_pt2(whole, watched)
    yield from damaged("pt2, trusted", ".pt2", whole, "profile FILE --trust", count, dice)
    yield from documents(count, dice)


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of all kinds."""
    headings = ("kind", "files", "one sentence", "answered", "traceback", "over 2 s", "over 500 MiB", "code executed")
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for name in (outcome.file.kind, "all"):
            row = rows.setdefault(name, Counter())
            row.update(
                [
                    "files",
                    outcome.status,
                    *["over 2 s"] * (outcome.seconds > REFUSED_S),
                    *["over 500 MiB"] * (outcome.mib > REFUSED_MIB),
                    *["code executed"] * outcome.executed,
                ]
            )
    rows["all"] = rows.pop("all", Counter())
    lines = [
        headings,
        ["---"] + ["--:"] * 7,
        *([name, *(str(row[key]) for key in headings[1:])] for name, row in rows.items()),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
