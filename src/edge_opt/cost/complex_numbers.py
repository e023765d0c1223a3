"""Complex arithmetic in real operations, each worked out from the real and the imaginary part."""

from __future__ import annotations

from typing import Any

from edge_opt.records.costs import TensorInfo

# (a + bi)(c + di) = (ac - bd) + (ad + bc)i: four real multiply-accumulates in a sum of products.
MACS_PER_PRODUCT = 4

ADD, MULTIPLY = 2, 4 + 2
# (ac + bd)/r and (bc - ad)/r with r = c² + d²: four products and two additions, three for r, two divisions.
DIVIDE = 6 + 3 + 2
# sqrt(a² + b²)
MAGNITUDE = 4
# exp(a)·cos(b), exp(a)·sin(b)
EXPONENTIAL = 3 + 2
# log|z| and atan2(b, a)
LOGARITHM = MAGNITUDE + 1 + 1
# sin(a)·cosh(b), cos(a)·sinh(b)
SINE = 4 + 2

_OPS = {
    "add": ADD, "sub": ADD, "rsub": ADD, "mul": MULTIPLY, "square": MULTIPLY, "div": DIVIDE, "reciprocal": 3 + 1 + 2,
    "abs": MAGNITUDE, "angle": 1, "sgn": MAGNITUDE + 2, "conj_physical": 1, "neg": 2,
    "exp": EXPONENTIAL, "expm1": EXPONENTIAL + 1, "exp2": EXPONENTIAL + 2, "log": LOGARITHM, "log2": LOGARITHM + 2,
    "log10": LOGARITHM + 2, "log1p": LOGARITHM + 1, "pow": LOGARITHM + MULTIPLY + EXPONENTIAL,
    "sin": SINE, "cos": SINE + 1, "sinh": SINE, "cosh": SINE, "tan": 2 * SINE + 1 + DIVIDE, "tanh": 2 * SINE + DIVIDE,
    "sigmoid": 2 + EXPONENTIAL + 1 + 6, "addcmul": 2 * MULTIPLY + ADD, "addcdiv": MULTIPLY + DIVIDE + ADD,
    "lerp": 2 * ADD + MULTIPLY, "polar": 2 + 2, "complex": 0, "prod": MULTIPLY, "cumprod": MULTIPLY, "where": 1,
    "masked_fill": 1,
}  # fmt: skip


def is_complex(*values: Any) -> bool:
    """Whether one of the arguments is a complex tensor."""
    return any(isinstance(value, TensorInfo) and value.dtype.startswith("complex") for value in values)


def complex_ops(operator: str, real_ops: int) -> int:
    """Real operations of one complex element; twice the real count where no formula is given.

    >>> complex_ops("aten.mul", 1), complex_ops("aten.sum", 1)
    (6, 2)
    """
    return _OPS.get(operator.removeprefix("aten.").removesuffix("_"), 2 * real_ops)
