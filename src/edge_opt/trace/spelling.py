"""How Python code called an operator: with a sign such as `@`, or by which name it looked the function up.

Tools that replace functions while a model runs see a call only by the name they replaced: `torch.matmul(a, b)` and
not `a @ b`, `F.softmax(x)` and not `x.softmax()`, and nothing that was kept under another name before.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType

import torch

SIGN = "sign"

# Operators that ptflops has a replacement for.
SPELLED = frozenset(
    f"aten.{name}"
    for name in (
        "mm bmm mv dot addmm baddbmm mul add relu relu_ prelu elu elu_ relu6 relu6_ hardtanh hardtanh_ gelu silu silu_ "
        "softmax avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices "
        "max_pool2d_with_indices max_pool3d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    ).split()
)

# Of torch.nn.functional's functions with a replacement, those that are written in Python.
_IN_PYTHON = frozenset(
    "relu elu relu6 silu softmax max_pool1d max_pool2d max_pool3d adaptive_avg_pool2d adaptive_avg_pool3d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate".split()
)
_FUNCTIONAL: str = torch.nn.functional.softmax.__code__.co_filename
_BETWEEN = frozenset((torch._ops.__file__, torch._jit_internal.__file__))
# By identity, since a code object's own hash is slow; the code is kept with it.
_known: dict[tuple[int, int], tuple[str, CodeType]] = {}


def spelling(tape_file: str) -> str:
    """The name under which the running operator was looked up; "sign" for `a @ b`; "" where it was kept before.

    Names of torch.nn.functional's own Python functions have `F.` in front: `x.softmax()` is "softmax".

    `tape_file` names the file whose frames stand between the operator and the model's code.
    """
    frame: FrameType | None = sys._getframe(3)  # past this function, and two of the tape
    while frame is not None:
        file = frame.f_code.co_filename
        if file != tape_file and file not in _BETWEEN:
            break
        frame = frame.f_back
    if frame is None:
        return ""
    name = _public_name(frame.f_code)
    if file != _FUNCTIONAL or name not in _IN_PYTHON:
        return _looked_up(frame)
    # What counts is how the function in Python was called.
    caller = frame.f_back
    while caller is not None and (caller.f_code.co_filename in _BETWEEN or _is_part(caller.f_code, name)):
        caller = caller.f_back
    return f"F.{name}" if caller is not None and _looked_up(caller) == name else ""


def _public_name(code: CodeType) -> str:
    """A pooling function of torch.nn.functional stands for itself and for its parts with and without indices."""
    return code.co_name.lstrip("_").removesuffix("_with_indices")


def _is_part(code: CodeType, name: str) -> bool:
    return code.co_filename == _FUNCTIONAL and _public_name(code) == name


def _looked_up(frame: FrameType) -> str:
    code, offset = frame.f_code, frame.f_lasti
    found = _known.get((id(code), offset))
    if found is None:
        found = _known[id(code), offset] = (_callee(code, offset), code)
    return found[0]


def _callee(code: CodeType, offset: int) -> str:
    """The attribute that the instruction at `offset` calls; "" for a variable, which was bound before."""
    instructions = list(dis.get_instructions(code))
    # A call to a Python function stands at the end of its instruction, which is longer than its first byte.
    running = max((item for item in instructions if item.offset <= offset), key=lambda item: item.offset)
    if running.opname.startswith(("BINARY_", "INPLACE_")):
        return SIGN
    place = getattr(running, "positions", None)
    if place is None or place.lineno is None:
        # Before Python 3.11 instructions have no columns: the nearest attribute that was loaded to be called.
        loaded = [item for item in instructions if item.offset < offset and item.opname == "LOAD_METHOD"]
        return str(loaded[-1].argval) if loaded else ""
    candidates = [
        item
        for item in instructions
        if item.offset < offset
        and item.positions is not None
        and item.opname.startswith("LOAD_")
        and _starts_with(place, item.positions)
    ]
    # `F.relu(x)`: of what is loaded from where the call begins, the longest is what is called.
    longest = max(candidates, key=lambda item: _end(item.positions), default=None)
    # Inside torch.nn.functional a plain name is looked up in the module, where a replacement stands, too.
    late = ("LOAD_ATTR", "LOAD_METHOD", *(("LOAD_GLOBAL",) if code.co_filename == _FUNCTIONAL else ()))
    return str(longest.argval) if longest is not None and longest.opname in late else ""


def _starts_with(call: dis.Positions, part: dis.Positions) -> bool:
    return (call.lineno, call.col_offset) == (part.lineno, part.col_offset) and _end(part) < _end(call)


def _end(place: dis.Positions | None) -> tuple[int, int]:
    return (0, 0) if place is None else (place.end_lineno or 0, place.end_col_offset or 0)
