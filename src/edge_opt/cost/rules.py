"""Prices of operators: rules by operator, and three states: priced, free, unpriced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from edge_opt.cost.complex_numbers import complex_ops, is_complex
from edge_opt.errors import RuleError
from edge_opt.records.costs import OpCost, OpPrice, OpSignature, TensorInfo


@dataclass(frozen=True, slots=True)
class Work:
    """What a cost rule returns.

    Attributes:
        macs: Multiplications with an addition.
        other_ops: All other arithmetic.
        bytes_read: Bytes read; None reads every input once.
        bytes_written: Bytes written; None writes every output once.
    """

    macs: int = 0
    other_ops: int = 0
    bytes_read: int | None = None
    bytes_written: int | None = None


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
_prices: dict[int, tuple[OpSignature, OpPrice]] = {}
_FREE = OpPrice("free", "free", OpCost())
_UNPRICED = OpPrice("unpriced", "unpriced", OpCost())


def cost_rule(*operators: Any, kind: str = "custom") -> Callable[[Rule], Rule]:
    """Price an operator by a rule of your own.

    The rule is called as `rule(out, *args, **kwargs)` with the operator's own arguments, tensors as `TensorInfo`
    (`shape`, `dtype`, `nbytes`, `elements`), and returns a `Work`; None where the cost depends on values. Tensors
    passed for the results (`out=`) are left out: they are the outputs.

    Args:
        operators: What the rule prices: `torch.ops.lib.name`, one of its overloads, or "lib::name".
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
    """Every registered rule by operator name; read-only."""
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
    """The name under which a rule is registered, such as `aten.conv2d`."""
    if isinstance(operator, str):
        return operator.replace("::", ".")
    if isinstance(operator, torch._ops.OpOverload):
        return operator._schema.name.replace("::", ".")
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return operator._qualified_op_name.replace("::", ".")
    raise RuleError(f"{operator!r} is not an operator; pass torch.ops.LIBRARY.NAME or 'LIBRARY::NAME'")


def clear_prices() -> None:
    """Forget every price worked out so far."""
    _prices.clear()


def price(signature: OpSignature) -> OpPrice:
    """The price of an operator on its shapes; worked out once."""
    known = _prices.get(id(signature))
    if known is None:
        known = _prices[id(signature)] = (signature, _priced(signature))
    return known[1]


def _priced(signature: OpSignature) -> OpPrice:
    if signature.is_view:
        return _FREE
    # An operator that works in place does the same work as its twin.
    twin = signature.op.removesuffix("_")
    registration = _rules.get(signature.op) or _rules.get(twin) or _by_schema(signature.op) or _by_schema(twin)
    if registration is None:
        return _UNPRICED
    if registration.rule is None:
        return _FREE
    provided = _provided(signature)
    kwargs = {name: value for name, value in signature.kwargs if name not in provided}
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
        given = (tensor for tensors in provided.values() for tensor in tensors)
        read = sum(tensor.nbytes for tensor in signature.inputs) - sum(tensor.nbytes for tensor in given)
    if written is None:
        written = sum(tensor.nbytes for tensor in signature.outputs)
    return OpPrice("priced", registration.kind, OpCost(work.macs, work.other_ops, read, written))


def _provided(signature: OpSignature) -> dict[str, tuple[TensorInfo, ...]]:
    """Tensors passed as `out=` (or under the names a schema gives several results): written, not read."""
    if not any(isinstance(value, (TensorInfo, tuple)) for _, value in signature.kwargs):
        return {}
    names = _result_names(signature.op)
    return {name: value if isinstance(value, tuple) else (value,) for name, value in signature.kwargs if name in names}


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """Torch's own description of an operator; nothing for one that this process does not know."""
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
    """What torch says of its own operators: element-wise, a reduction, a view in place, or a view where it can."""
    known = _schema_rules.get(name)
    if known is None and (known := _read_schema(name)) is not None:
        _schema_rules[name] = known
    return known


_schema_rules: dict[str, Registration] = {}  # an operator without one may be declared later


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


def copied(out: Any, *_: Any, **__: Any) -> Work:
    """Every input read once, every output written once."""
    return Work()


def per_output(operator: str, ops: int) -> Rule:
    """So many operations for each element of the first result."""

    def rule(out: Any, *args: Any, **_: Any) -> Work:
        first = out[0] if isinstance(out, tuple) else out
        return Work(other_ops=first.stored * (complex_ops(operator, ops) if is_complex(first, *args) else ops))

    return rule


def per_input(operator: str, ops: int) -> Rule:
    """So many operations for each element of the first operand."""

    def rule(out: Any, x: Any, *_: Any, **__: Any) -> Work:
        return Work(other_ops=x.stored * (complex_ops(operator, ops) if is_complex(x) else ops))

    return rule
