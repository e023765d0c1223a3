"""Prices of operators: rules by operator, and three states: priced, free, unpriced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from edge_opt.errors import RuleError
from edge_opt.records.costs import OpCost, OpPrice, OpSignature, TensorInfo
from edge_opt.records.fields import field, record


@record
class Work:
    """What a cost rule returns."""

    macs: int = field("Multiplications with an addition.", default=0)
    other_ops: int = field("All other arithmetic.", default=0)
    bytes_read: int | None = field("Bytes read; None reads every input once.", default=None)
    bytes_written: int | None = field("Bytes written; None writes every output once.", default=None)


# A rule returns None where the cost depends on values, which shapes do not tell: the operator is then unpriced.
Rule = Callable[..., Work | None]


@dataclass(frozen=True, slots=True)
class Registration:
    """A rule with the kind of work it prices; no rule means that the operator is known to cost nothing."""

    kind: str
    rule: Rule | None


class _Names:
    """Operators by name: `aten.relu` is "aten::relu", whether or not this version of torch has it."""

    def __getattr__(self, name: str) -> str:
        return f"aten::{name}"


# Not torch.ops.aten: torch 2.15 dropped `cholesky`, and one missing operator would fail every profile.
aten = _Names()

_rules: dict[str, Registration] = {}
# By identity, because hashing a signature takes longer than pricing it. The signature is kept with its price, so that
# its id is not used again. The memo of the trace holds at most as many signatures.
_prices: dict[int, tuple[OpSignature, OpPrice]] = {}
_MAX_PRICES = 100_000
_FREE = OpPrice("free", "free", OpCost())
_UNPRICED = OpPrice("unpriced", "unpriced", OpCost())


def cost_rule(*operators: Any, kind: str = "custom") -> Callable[[Rule], Rule]:
    """Register a cost rule for an operator.

    The rule is called as `rule(out, *args, **kwargs)` with the operator's own arguments, tensors as `TensorInfo`
    (`shape`, `dtype`, `nbytes`, `elements`), and returns a `Work`; None where the cost depends on values. Tensors
    passed for the results (`out=`) are left out: they are the outputs.

    Args:
        operators: The operators of the rule: `torch.ops.lib.name`, one of its overloads, or "lib::name".
        kind: The class of work that tables show, such as "conv" or "norm".

    >>> @cost_rule("docs::scale", kind="elementwise")
    ... def scale(out, x, factor):
    ...     return Work(other_ops=out.elements)
    >>> rules()["docs.scale"].kind
    'elementwise'
    """

    def register(rule: Rule) -> Rule:
        for operator in operators:
            _add(operator, Registration(kind, rule))
        return rule

    return register


def free_operators(*operators: Any) -> None:
    """Declare operators that neither compute nor move anything.

    Args:
        operators: `torch.ops.lib.name`, one of its overloads, or "lib::name".
    """
    for operator in operators:
        _add(operator, Registration("free", None))


def rules() -> Mapping[str, Registration]:
    """Return every registered rule by operator name; read-only."""
    return MappingProxyType(_rules)


def _add(operator: Any, registration: Registration) -> None:
    name = operator_name(operator)
    known = _rules.get(name)
    if known is not None:
        names = [getattr(item.rule, "__qualname__", "free") for item in (known, registration)]
        raise RuleError(f"operator {name} has two cost rules: {names[0]} and {names[1]}; remove one of them")
    _rules[name] = registration
    _prices.clear()


def operator_name(operator: Any) -> str:
    """Return the name under which a rule is registered, such as `aten.conv2d`."""
    if isinstance(operator, str):
        return operator.replace("::", ".")
    if isinstance(operator, torch._ops.OpOverload):
        return operator._schema.name.replace("::", ".")
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return operator._qualified_op_name.replace("::", ".")
    raise RuleError(f"{operator!r} is not an operator; pass torch.ops.LIBRARY.NAME or 'LIBRARY::NAME'")


def clear_prices() -> None:
    """Forget every price computed so far."""
    _prices.clear()


def price(signature: OpSignature) -> OpPrice:
    """Return the price of an operator on its shapes, computed once."""
    known = _prices.get(id(signature))
    if known is None:
        if len(_prices) >= _MAX_PRICES:
            _prices.clear()
        known = _prices[id(signature)] = (signature, _compute_price(signature))
    return known[1]


def _compute_price(signature: OpSignature) -> OpPrice:
    if signature.is_view:
        return _FREE
    # The in-place variant of an operator does the same work.
    plain = signature.op.removesuffix("_")
    registration = _rules.get(signature.op) or _rules.get(plain) or _by_schema(signature.op) or _by_schema(plain)
    if registration is None:
        return _UNPRICED
    if registration.rule is None:
        return _FREE
    results = _result_arguments(signature)
    kwargs = {name: value for name, value in signature.kwargs if name not in results}
    out: Any = signature.outputs[0] if len(signature.outputs) == 1 else signature.outputs
    try:
        work = registration.rule(out, *signature.args, **kwargs)
    except Exception as error:
        name = getattr(registration.rule, "__qualname__", "?")
        raise RuleError(f"cost rule {name} does not fit {signature.op}: {type(error).__name__}: {error}") from error
    if work is None:
        return _UNPRICED
    read, written = work.bytes_read, work.bytes_written
    if read is None:
        only_written = sum(tensor.nbytes for tensors in results.values() for tensor in tensors)
        read = sum(tensor.nbytes for tensor in signature.inputs) - only_written
    if written is None:
        written = sum(tensor.nbytes for tensor in signature.outputs)
    return OpPrice("priced", registration.kind, OpCost(work.macs, work.other_ops, read, written))


def _result_arguments(signature: OpSignature) -> dict[str, tuple[TensorInfo, ...]]:
    """Return tensors passed as `out=` (or under the names a schema gives several results): written, not read."""
    if not any(isinstance(value, (TensorInfo, tuple)) for _, value in signature.kwargs):
        return {}
    names = _result_names(signature.op)
    return {name: value if isinstance(value, tuple) else (value,) for name, value in signature.kwargs if name in names}


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """Return the overloads of an operator; none for one that this process does not know."""
    library, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, library, None), operator, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]


@cache
def _result_names(name: str) -> frozenset[str]:
    return frozenset(
        argument.name
        for overload in _overloads(name)
        for argument in overload._schema.arguments
        if argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write
    )


def _by_schema(name: str) -> Registration | None:
    """Return a rule from torch's own tags and schema: element-wise, a reduction, a view, or a copy in place of one."""
    known = _schema_rules.get(name)
    if known is None and (known := _read_schema(name)) is not None:
        _schema_rules[name] = known
    return known


# Only successes are kept: an operator that this process does not know may be declared later.
_schema_rules: dict[str, Registration] = {}


def _read_schema(name: str) -> Registration | None:
    overloads = _overloads(name)
    tags = {tag for overload in overloads for tag in overload.tags}
    if torch.Tag.inplace_view in tags:
        return Registration("free", None)
    if torch.Tag.pointwise in tags:
        return Registration("elementwise", per_output(name, 1))
    if getattr(torch.Tag, "reduction", None) in tags:
        return Registration("reduction", per_input(name, 1))
    returns = [result for overload in overloads for result in overload._schema.returns]
    if returns and all(result.alias_info is not None and not result.alias_info.is_write for result in returns):
        # The record says that this call was no view, so it had to copy.
        return Registration("movement", copied)
    return None


# Complex arithmetic in real operations, each derived from the real and the imaginary part.
# (a + bi)(c + di) = (ac - bd) + (ad + bc)i: four real multiply-accumulates in a sum of products.
COMPLEX_MACS = 4

COMPLEX_ADD, _MULTIPLY = 2, 4 + 2
# (ac + bd)/r and (bc - ad)/r with r = c² + d²: four products and two additions, three for r, two divisions.
_DIVIDE = 6 + 3 + 2
# sqrt(a² + b²)
_MAGNITUDE = 4
# exp(a)·cos(b), exp(a)·sin(b)
_EXPONENTIAL = 3 + 2
# log|z| and atan2(b, a)
_LOGARITHM = _MAGNITUDE + 1 + 1
# sin(a)·cosh(b), cos(a)·sinh(b)
_SINE = 4 + 2

_COMPLEX_OPS = {
    "add": COMPLEX_ADD, "sub": COMPLEX_ADD, "rsub": COMPLEX_ADD, "mul": _MULTIPLY, "square": _MULTIPLY, "div": _DIVIDE,
    "reciprocal": 3 + 1 + 2, "abs": _MAGNITUDE, "angle": 1, "sgn": _MAGNITUDE + 2, "conj_physical": 1, "neg": 2,
    "exp": _EXPONENTIAL, "expm1": _EXPONENTIAL + 1, "exp2": _EXPONENTIAL + 2, "log": _LOGARITHM,
    "log2": _LOGARITHM + 2, "log10": _LOGARITHM + 2, "log1p": _LOGARITHM + 1,
    "pow": _LOGARITHM + _MULTIPLY + _EXPONENTIAL, "sin": _SINE, "cos": _SINE + 1, "sinh": _SINE, "cosh": _SINE,
    "tan": 2 * _SINE + 1 + _DIVIDE, "tanh": 2 * _SINE + _DIVIDE, "sigmoid": 2 + _EXPONENTIAL + 1 + 6,
    "addcmul": 2 * _MULTIPLY + COMPLEX_ADD, "addcdiv": _MULTIPLY + _DIVIDE + COMPLEX_ADD,
    "lerp": 2 * COMPLEX_ADD + _MULTIPLY, "polar": 2 + 2, "complex": 0, "prod": _MULTIPLY, "cumprod": _MULTIPLY,
    "where": 1, "masked_fill": 1,
}  # fmt: skip


def is_complex(*values: Any) -> bool:
    """Return whether one of the arguments is a complex tensor."""
    return any(isinstance(value, TensorInfo) and value.dtype.startswith("complex") for value in values)


def complex_ops(operator: str, real_ops: int) -> int:
    """Return the real operations of one complex element; twice the real count where no formula is given.

    >>> complex_ops("aten.mul", 1), complex_ops("aten.sum", 1)
    (6, 2)
    """
    return _COMPLEX_OPS.get(operator.removeprefix("aten.").removesuffix("_"), 2 * real_ops)


def copied(out: Any, *_: Any, **__: Any) -> Work:
    """Every input read once, every output written once."""
    return Work()


def per_output(operator: str, ops: int) -> Rule:
    """Return a rule: `ops` operations for each element of the first result."""

    def rule(out: Any, *args: Any, **_: Any) -> Work:
        first = out[0] if isinstance(out, tuple) else out
        return Work(other_ops=first.stored * (complex_ops(operator, ops) if is_complex(first, *args) else ops))

    return rule


def per_input(operator: str, ops: int) -> Rule:
    """Return a rule: `ops` operations for each element of the first operand."""

    def rule(out: Any, x: Any, *_: Any, **__: Any) -> Work:
        return Work(other_ops=x.stored * (complex_ops(operator, ops) if is_complex(x) else ops))

    return rule


def by_operand(ops: Callable[[TensorInfo], int]) -> Rule:
    """Return a rule: the operations that a function counts for the first operand."""
    return lambda out, x, *_, **__: Work(other_ops=ops(x))
