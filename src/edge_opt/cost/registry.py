"""The registry of cost rules, and the verdict on an operator: priced, free or unpriced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from edge_opt.errors import RuleError
from edge_opt.records import OpCost, OpPrice, OpSignature


@dataclass(frozen=True, slots=True)
class Work:
    """What a cost rule returns. Bytes left out mean: every input read once, every output written once."""

    macs: int = 0
    other_ops: int = 0
    bytes_read: int | None = None
    bytes_written: int | None = None


Rule = Callable[..., Work]


@dataclass(frozen=True, slots=True)
class Registration:
    """A rule with the kind of work it prices; no rule means that the operator is known to cost nothing."""

    kind: str
    rule: Rule | None


_rules: dict[str, Registration] = {}
_prices: dict[int, tuple[OpSignature, OpPrice]] = {}
_FREE = OpPrice("free", "free", OpCost())


def cost_rule(*operators: Any, kind: str = "custom") -> Callable[[Rule], Rule]:
    """Price an operator: `torch.ops.lib.name`, one of its overloads, or "lib::name".

    The rule is called as `rule(out, *args, **kwargs)` with the operator's own arguments, tensors as `TensorInfo`
    (`shape`, `dtype`, `nbytes`, `elements`), and returns a `Work`.

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
    """Declare operators that neither compute nor move anything."""
    for operator in operators:
        _add(operator, Registration("free", None))


def rules() -> Mapping[str, Registration]:
    """Every registered rule by operator name; read-only."""
    return MappingProxyType(_rules)


def _add(operator: Any, registration: Registration) -> None:
    name = _name(operator)
    known = _rules.get(name)
    if known is not None:
        names = [getattr(item.rule, "__qualname__", "free") for item in (known, registration)]
        raise RuleError(f"operator {name} has two cost rules: {names[0]} and {names[1]}; remove one of them")
    _rules[name] = registration
    _prices.clear()


def _name(operator: Any) -> str:
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
    registration = _rules.get(signature.op) or _rules.get(signature.op.removesuffix("_")) or _by_tag(signature.op)
    if registration is None:
        return OpPrice("unpriced", "unpriced", OpCost())
    if registration.rule is None:
        return _FREE
    out: Any = signature.outputs[0] if len(signature.outputs) == 1 else signature.outputs
    try:
        work = registration.rule(out, *signature.args, **dict(signature.kwargs))
    except Exception as error:
        name = getattr(registration.rule, "__qualname__", "?")
        raise RuleError(f"cost rule {name} does not fit {signature.op}: {type(error).__name__}: {error}") from error
    read, written = work.bytes_read, work.bytes_written
    if read is None:
        read = sum(tensor.nbytes for tensor in signature.inputs)
    if written is None:
        written = sum(tensor.nbytes for tensor in signature.outputs)
    return OpPrice("priced", registration.kind, OpCost(work.macs, work.other_ops, read, written))


def _by_tag(name: str) -> Registration | None:
    """Torch marks its own element-wise operators and reductions; those need no rule of their own."""
    library, _, operator = name.partition(".")
    packet = getattr(getattr(torch.ops, library, None), operator, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    overloads = packet.overloads()  # type: ignore[no-untyped-call]
    tags = {tag for overload in overloads for tag in getattr(packet, overload).tags}
    if torch.Tag.pointwise in tags:
        return Registration("elementwise", _one_per_output)
    if getattr(torch.Tag, "reduction", None) in tags:
        return Registration("reduction", _one_per_input)
    return None


def _one_per_output(out: Any, *_: Any, **__: Any) -> Work:
    return Work(other_ops=out.elements if not isinstance(out, tuple) else sum(item.elements for item in out))


def _one_per_input(out: Any, x: Any, *_: Any, **__: Any) -> Work:
    return Work(other_ops=x.elements)
