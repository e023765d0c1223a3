"""What TFLM runs: its operators, the types that each accepts, and the size of their code.

Types are those that kernels accept while they prepare, measured with the package `tflite-micro` 0.dev20261023. Sizes of
code are in `tflm_code.csv`: pieces of linked code with the operators that need each, so that shared code counts once.
"""

from __future__ import annotations

import csv
from collections.abc import Collection
from functools import cache
from importlib import resources
from typing import NamedTuple

from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator
from edge_opt.model_files.tflm_kernels import Kernels

# Operators that accept some types of their first input only; others prepare with any.
_FLOAT = frozenset(("float32",))
_FLOAT_INT8 = frozenset(("float32", "int8"))
_QUANTIZED = frozenset(("float32", "int8", "int16"))
_ACCEPTED = {
    **dict.fromkeys("CEIL EXP L2_POOL_2D ROUND".split(), _FLOAT),
    **dict.fromkeys("ADD_N CUMSUM DEPTH_TO_SPACE SPACE_TO_DEPTH GATHER GATHER_ND".split(), _FLOAT_INT8),
    "L2_NORMALIZATION": _FLOAT_INT8,
    **dict.fromkeys("AVERAGE_POOL_2D MAX_POOL_2D BATCH_MATMUL SOFTMAX".split(), _QUANTIZED),
    "CONCATENATION": frozenset(("float32", "int8", "int16", "int32", "int64", "bool")),
    "QUANTIZE": frozenset(("float32", "int8", "uint8", "int16", "int32")),
    "DEQUANTIZE": frozenset(("int8", "uint8", "int16")),
    "REVERSE_V2": frozenset(("float32", "int8", "uint8", "int16", "int32", "int64", "bool")),
}  # fmt: skip
# Types of input and weights that go together.
_PAIRS = {("float32", "float32"), ("int8", "int8"), ("int8", "int4"), ("int16", "int8")}
_WITH_WEIGHTS = {"CONV_2D": (0, 1), "DEPTHWISE_CONV_2D": (0, 1), "FULLY_CONNECTED": (0, 1), "TRANSPOSE_CONV": (2, 1)}
_MOST_JOINED = 10  # inputs of a CONCATENATION
_NEED_SCALES = frozenset("ADD SUB MUL".split())
_CODE_FILE = "tflm_code.csv"
# Registering operators: code beside theirs, once and for each.
_REGISTRATION_BYTES, _REGISTRATION_BYTES_EACH = 100, 38
_CUSTOM_NAMES = {"ethos-u": "EthosU"}


class CodeSize(NamedTuple):
    """Bytes of code and constants that a set of operators links."""

    core_bytes: int  # interpreter, allocator, planner, reading of the file, parts of the C library
    shared_bytes: int  # code that two or more of the operators need, and their registration
    operators: tuple[tuple[str, int], ...]  # code that one operator alone needs, the largest first

    @property
    def nbytes(self) -> int:
        return self.core_bytes + self.shared_bytes + sum(size for _, size in self.operators)


def registered_name(operator: TflmOperator) -> str:
    """Return the name under which TFLM's table of code sizes has an operator."""
    return _CUSTOM_NAMES.get(operator.op, operator.op)


def refusal(graph: TflmGraph) -> str | None:
    """Return why TFLM would refuse a file, as its own kernels do; None where it would not."""
    known = set(_code("reference")[0])
    for index, operator in enumerate(graph.operators()):
        if registered_name(operator) not in known:
            kind = "custom operator" if operator.is_custom else "operator"
            return f"TFLM does not have the {kind} {operator.op}"
        reason = None if operator.is_custom else _type_error(operator)
        if reason is not None:
            return f"TFLM refuses {operator.op} at node {index}: {reason}"
    return None


def _type_error(operator: TflmOperator) -> str | None:
    op = operator.op
    if op in _WITH_WEIGHTS:
        values, weights = (operator.needed(index) for index in _WITH_WEIGHTS[op])
        if (values.dtype, weights.dtype) not in _PAIRS:
            return f"an input in {values.dtype} with weights in {weights.dtype} (hybrid models are not supported)"
        return None
    source, second = operator.given(0), operator.given(1)
    if source is None:
        return None
    if source.dtype not in _ACCEPTED.get(op, {source.dtype}) or source.dtype == "string":
        return f"its type {source.dtype} is not supported"
    if op == "CONCATENATION" and len(operator.inputs) > _MOST_JOINED:
        return f"it joins {len(operator.inputs)} tensors, and TFLM joins {_MOST_JOINED} at most"
    expected = {"BATCH_MATMUL": source.dtype, "GATHER": "int32"}.get(op)
    if expected is not None and second is not None and second.dtype != expected:
        return f"its second input is in {second.dtype} instead of {expected}"
    if op in _NEED_SCALES and source.is_quantized and not operator.outputs[0].scales:
        return "its output has no scale"
    if op == "SQUEEZE":
        sizes = dict(zip(range(-len(source.shape), len(source.shape)), source.shape * 2, strict=True))
        wrong = [axis for axis in operator.options["axes"] if sizes.get(axis) != 1]
        return f"dimension {wrong[0]} of {source.shape} cannot be dropped" if wrong else None
    if op == "UNIDIRECTIONAL_SEQUENCE_LSTM" and len(operator.inputs) != 24:
        return f"it has {len(operator.inputs)} inputs, and TFLM needs 24"
    return None


@cache
def _code(kernels: Kernels) -> tuple[tuple[str, ...], tuple[tuple[int, frozenset[str]], ...], dict[str, int]]:
    """Return the operators, the pieces of code with the operators that need each, and what MVE adds to operators."""
    text = (resources.files("edge_opt.model_files") / _CODE_FILE).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    names: tuple[str, ...] = ()
    pieces: list[tuple[int, frozenset[str]]] = []
    mve: dict[str, int] = {}
    for kind, size, members in csv.reader(lines):
        if kind == "operators":
            names = tuple(members.split())
        elif kind == "mve":
            mve[members] = int(size)
        elif kind == kernels:
            mask = int(members, 16)
            pieces.append((int(size), frozenset(name for index, name in enumerate(names) if mask >> index & 1)))
    return names, tuple(pieces), mve


def code_size(operators: Collection[str], kernels: Kernels, is_mve: bool = False) -> CodeSize:
    """Return the code that these operators link, compiled for a Cortex-M4 with TFLM's release options.

    Args:
        operators: Names of operators that are registered; each counts once.
        kernels: TFLM's own kernels, or CMSIS-NN's.
        is_mve: Whether CMSIS-NN is compiled for the vector extension, as on a Cortex-M55.
    """
    _, pieces, mve = _code(kernels)
    registered = set(operators)
    core, shared, alone = 0, _REGISTRATION_BYTES, dict.fromkeys(sorted(registered), _REGISTRATION_BYTES_EACH)
    for size, members in pieces:
        needed = members & registered
        if not members:
            core += size
        elif len(needed) == 1:
            alone[next(iter(needed))] += size
        elif needed:
            shared += size
    if is_mve and kernels == "cmsis-nn":
        core += mve["*"]
        alone = {name: size + mve.get(name, 0) for name, size in alone.items()}
    return CodeSize(core, shared, tuple(sorted(alone.items(), key=lambda item: (-item[1], item[0]))))
