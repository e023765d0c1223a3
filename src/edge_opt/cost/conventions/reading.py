"""A trace read layer by layer: each module call with the operators it runs itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edge_opt.records import ModelProfile, ModuleCall, OpCall, OpPrice, OpSignature, Shape, TensorInfo, Trace

Written = Literal["as is", "matmul", "einsum"]

# What torch makes of `a @ b` and of `einsum` before it reaches the batched product.
_MATMUL = ("aten.expand", "aten.reshape", "aten.expand", "aten.reshape")
_EINSUM = ("aten.permute", "aten.reshape", "aten.permute", "aten.reshape")
_REACH = 32  # more views than an einsum of two operands makes


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call; `is_used` is unset when the model's result does not depend on it.

    A batched product also tells how it was written, and into which order an einsum brought its axes first.
    """

    name: str
    signature: OpSignature
    price: OpPrice
    is_used: bool
    written: Written = "as is"
    operands: tuple[Shape, ...] = ()
    permutations: tuple[tuple[int, ...], ...] = ()

    @property
    def macs(self) -> int:
        return self.price.cost.macs

    @property
    def x(self) -> TensorInfo:
        """The first tensor read."""
        return self.signature.inputs[0]

    @property
    def out(self) -> TensorInfo:
        """The first tensor made."""
        return self.signature.outputs[0]

    def argument(self, name: str, default: Any = None) -> Any:
        return self.signature.argument(name, default)

    def has(self, name: str) -> bool:
        """Whether a tensor was passed for parameter `name`."""
        return isinstance(self.argument(name), TensorInfo)


@dataclass(frozen=True, slots=True)
class Layer:
    """One module call with its own operators; its children are layers of their own."""

    call: ModuleCall
    ops: tuple[Op, ...]
    reads_parameters: bool

    @property
    def kind(self) -> str:
        return self.call.kind

    def first(self, *names: str) -> Op | None:
        """The first of its operators that has one of these names."""
        return next((op for op in self.ops if op.name in names), None)

    def first_of(self, kind: str) -> Op | None:
        """The first of its operators that does this kind of work."""
        return next((op for op in self.ops if op.price.kind == kind), None)


def layers_of(profile: ModelProfile) -> tuple[Layer, ...]:
    """Every module call of the trace, in order; an operator stands with the module that ran it."""
    own: list[list[OpCall]] = [[] for _ in profile.trace.modules]
    for call in profile.trace.ops:
        own[call.module].append(call)
    used = _used_operators(profile.trace)
    return tuple(
        Layer(
            module,
            tuple(_op(profile, calls, position, used) for position in range(len(calls))),
            any(profile.trace.storages[number].role == "parameter" for call in calls for number in call.reads),
        )
        for module, calls in zip(profile.trace.modules, own, strict=True)
    )


def _used_operators(trace: Trace) -> frozenset[int]:
    """The operators that what is left after the run depends on; the others computed something and dropped it."""
    needed = {number for number, storage in enumerate(trace.storages) if storage.died is None}
    used = set()
    for call in reversed(trace.ops):
        writes = call.reads[:1] if trace.signatures[call.signature].op.endswith("_") else ()
        if not needed.isdisjoint((*call.creates, *writes)):
            used.add(call.index)
            needed.update(call.reads)
    return frozenset(used)


def _op(profile: ModelProfile, calls: Sequence[OpCall], position: int, used: frozenset[int]) -> Op:
    call = calls[position]
    signature = profile.trace.signatures[call.signature]
    # An operator that works in place does the same work as its twin.
    plain = Op(signature.op.removesuffix("_"), signature, profile.prices[call.signature], call.index in used)
    if plain.name != "aten.bmm":
        return plain
    before = [profile.trace.signatures[earlier.signature] for earlier in calls[max(position - _REACH, 0) : position]]
    names = tuple(earlier.op for earlier in before[-4:])
    if names == _MATMUL:
        return replace(plain, written="matmul", operands=(before[-4].inputs[0].shape, before[-2].inputs[0].shape))
    operands = tuple(tensor.shape for tensor in signature.inputs)
    if names == _EINSUM:
        return replace(plain, written="einsum", operands=operands, permutations=_permutations(before[:-4]))
    return replace(plain, operands=operands)


def _permutations(before: Sequence[OpSignature]) -> tuple[tuple[int, ...], ...]:
    """How einsum ordered the axes of its two operands: kept axes first, then the summed ones."""
    found: list[tuple[int, ...]] = []
    for signature in reversed(before):
        if signature.op not in ("aten.permute", "aten.unsqueeze") or len(found) == 2:
            break
        if signature.op == "aten.permute":
            found.append(signature.argument("dims"))
    return tuple(reversed(found))
