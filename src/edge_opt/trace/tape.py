"""The tape: a dispatch mode that records every operator without computing it."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edge_opt.records import OpCall, OpSignature, Role
from edge_opt.trace.inputs import SMALL
from edge_opt.trace.lifetimes import Lifetimes
from edge_opt.trace.modules import ModuleStack
from edge_opt.trace.operators import INDEX, Behavior, behavior, operator_name
from edge_opt.trace.scratch import scratch_bytes
from edge_opt.trace.shapes import changes_nothing, is_understood, output_specs
from edge_opt.trace.signatures import Entry, recall, remember, signature_of

_META = torch.device("meta")
_CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_Tensor = torch.Tensor
_empty_strided = torch.empty_strided
_MASKS = (torch.bool, torch.uint8)
_lift_fresh = torch.ops.aten.lift_fresh.default

# Tensors made inside forward (masks, position ids) stay real up to SMALL, so that code may look at their values.
_CONSTANT_WORK_LIMIT = 1 << 24


class NeedsData(BaseException):
    """The model looked at a value, which a meta tensor does not have. Not an Exception: models must not swallow it."""


class _Operands:
    """What one call was given: its storages, and which kinds of tensor are among them."""

    __slots__ = ("has_constant", "has_device", "has_meta", "has_own", "reads", "work")

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.has_meta = False  # without values
        self.has_own = False  # the model's parameters and buffers: real, but not to be computed with
        self.has_constant = False  # small and real: made inside forward, or an input of integers
        self.has_device = False
        self.work = 1


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators under the module that runs them, on meta tensors or (`is_real`) on the model's own."""

    supports_higher_order_operators = True

    def __init__(self, stack: ModuleStack, lifetimes: Lifetimes, roles: dict[int, Role], is_real: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack = stack
        self.lifetimes = lifetimes
        self.is_real = is_real
        self.ops: list[OpCall] = []
        self.signatures: list[OpSignature] = []
        self.has_read_values = False
        self.shape_error: BaseException | None = None
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._roles = roles
        self._own: dict[int, tuple[int, torch.Tensor]] = {}  # the tensor is kept, so that its id stays its own
        self._twins: dict[int, torch.Tensor] = {}
        self._written: set[int] = set()
        self._signature_index: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Dynamo's guard would double the price of every call; compiled modules are unwrapped before the trace.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = behavior(func)
        if kind is Behavior.DECOMPOSE:
            # The C++ kernel, as an eager run would take it apart; torch may have another in Python, and slower.
            with self:
                return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        if func is _lift_fresh:
            # `torch.tensor(...)` inside forward: it is new, and its values are known.
            self.lifetimes.born(args[0])
        elif func is INDEX and any(index is not None and index.dtype in _MASKS for index in args[1]):
            kind = Behavior.DATA
        words: list[Any] = [id(func)]
        operands = _Operands()
        self._describe(args, words, operands)
        if kwargs:
            words.append(tuple(kwargs))
            self._describe(kwargs.values(), words, operands)
        else:
            kwargs = {}
        if self.is_real or _is_small(kind, args, kwargs, operands):
            self.has_read_values = self.has_read_values or kind is Behavior.DATA
            if operands.has_device and not self.is_real:
                args, kwargs = _at(_CPU, args, kwargs)
            return self._run(func, args, kwargs, words, operands)
        if kind is Behavior.DATA:
            if operands.has_meta or not self._written.isdisjoint(operands.reads):
                raise NeedsData(operator_name(func))
            self.has_read_values = True
            return self._run(func, args, kwargs, words, operands)
        key = tuple(words)
        entry = recall(key)
        if entry is None or entry.specs is None:
            return self._replay(func, kind, args, kwargs, key, entry, operands)
        outputs = [_empty_strided(size, step, dtype=dtype, device=_META) for size, step, dtype in entry.specs]
        self._record(entry.signature, outputs, operands.reads)
        if entry.is_list:
            return outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _describe(self, values: Any, words: list[Any], operands: _Operands) -> None:
        """Add the arguments to a key (tensors by layout and dtype), and note what they are."""
        for value in values:
            if isinstance(value, _Tensor):
                words += (value.shape, value.stride(), value.dtype)
                own = self._own.get(id(value))
                if own is not None:
                    operands.has_own = True
                    operands.reads.append(own[0])
                else:
                    self._identify(value, operands)
            elif isinstance(value, (list, tuple)):
                if any(isinstance(item, _Tensor) for item in value):
                    words.append(len(value))
                    self._describe(value, words, operands)
                else:
                    words.append(tuple(value))
            else:
                words += (value.__class__, value)
                if value.__class__ is torch.device:
                    operands.has_device = True

    def _identify(self, value: torch.Tensor, operands: _Operands) -> None:
        """Note a tensor that is not known yet as one of the model's own."""
        number = None
        if value.is_meta or self.is_real or id(value) not in self._roles:
            number = self.lifetimes.numbers.get(value.untyped_storage()._cdata)
        if number is None:
            # No operator made it, so it was there before.
            number = self.lifetimes.register(value, self._roles.get(id(value), "buffer"))
            if not value.is_meta:
                self._own[id(value)] = (number, value)
                operands.has_own = True
        elif not value.is_meta:
            operands.has_constant = True
            operands.work *= max(value.numel(), 1)
        operands.has_meta = operands.has_meta or value.is_meta
        operands.reads.append(number)

    def _replay(
        self, func: Any, kind: Behavior, args: Any, kwargs: dict[str, Any], key: tuple[Any, ...],
        entry: Entry | None, operands: _Operands,
    ) -> Any:  # fmt: skip
        """Outputs of an operator on meta tensors that memory alone cannot give: by a shape rule, or from torch."""
        specs = output_specs(func, args, kwargs) if entry is None and kind is Behavior.PURE else None
        if specs is not None:
            made = tuple(_empty_strided(size, step, dtype=dtype, device=_META) for size, step, dtype in specs)
            result: Any = made[0] if len(made) == 1 else made
        else:
            twins = self._on_meta(args) if operands.has_own or operands.has_constant else args
            if kwargs and (operands.has_own or operands.has_constant):
                kwargs = dict(zip(kwargs, self._on_meta(kwargs.values()), strict=True))
            if operands.has_device or kind is Behavior.FACTORY:
                twins, kwargs = _at(_META, twins, kwargs)
                if kind is Behavior.FACTORY:
                    kwargs["device"] = _META
            if kind is Behavior.IN_PLACE:
                self._written.add(operands.reads[0])
            is_settled = kind is Behavior.IN_PLACE and (entry is not None or changes_nothing(func, args))
            result = twins[0] if is_settled else self._called(func, twins, kwargs)
        outputs = _tensors_in(result)
        if entry is None:
            entry = self._entry(func, kind, args, kwargs, result, outputs, operands.reads)
            remember(key, entry)
        self._record(entry.signature, outputs, operands.reads)
        return result

    def _on_meta(self, values: Any) -> list[Any]:
        """The arguments with every real tensor replaced by an empty one: the same each time for the model's own."""
        replaced: list[Any] = []
        for value in values:
            if isinstance(value, _Tensor) and not value.is_meta:
                twin = self._twins.get(id(value))
                if twin is None:
                    twin = _empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
                    own = self._own.get(id(value))
                    if own is not None:
                        self._twins[id(value)] = twin
                        self.lifetimes.alias(twin, own[0])
                replaced.append(twin)
            elif isinstance(value, (list, tuple)) and any(isinstance(item, _Tensor) for item in value):
                replaced.append(self._on_meta(value))
            else:
                replaced.append(value)
        return replaced

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], words: list[Any], operands: _Operands) -> Any:
        """Outputs of an operator that really runs: on small constants, or because the model needs data."""
        if self.is_real and getattr(getattr(func, "_schema", None), "is_mutable", False):
            self._save(args)
        result = self._called(func, args, kwargs)
        outputs = _tensors_in(result)
        # Values may decide the output's shape here, so it is part of the key.
        key = (*words, tuple(tensor.shape for tensor in outputs))
        entry = recall(key)
        if entry is None:
            entry = self._entry(func, Behavior.RUN, args, kwargs, result, outputs, operands.reads, is_run=True)
            remember(key, entry)
        self._record(entry.signature, outputs, operands.reads)
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if is_understood(func):
                self.shape_error = error
            raise

    def _entry(
        self, func: Any, kind: Behavior, args: Any, kwargs: dict[str, Any], result: Any,
        outputs: list[torch.Tensor], reads: list[int], is_run: bool = False,
    ) -> Entry:  # fmt: skip
        numbers = [self.lifetimes.numbers.get(tensor.untyped_storage()._cdata) for tensor in outputs]
        is_aliased = any(number is not None and number in reads for number in numbers)
        is_mutating = getattr(getattr(func, "_schema", None), "is_mutable", False)
        scratch = scratch_bytes(func, args, kwargs, outputs)
        signature = signature_of(func, args, kwargs, outputs, is_aliased and not is_mutating, scratch)
        whole = result if isinstance(result, (tuple, list)) else (result,)
        is_fresh = kind in (Behavior.PURE, Behavior.RUN) and not (is_aliased or is_mutating or is_run)
        if not is_fresh or not outputs or not all(isinstance(item, _Tensor) for item in whole):
            return Entry(signature, None, False)
        specs = tuple((tuple(t.size()), t.stride(), t.dtype) for t in outputs)
        return Entry(signature, specs, isinstance(result, list))

    def _record(self, signature: OpSignature, outputs: list[torch.Tensor], reads: list[int]) -> None:
        lifetimes = self.lifetimes
        index = len(self.ops)
        creates = []
        for tensor in outputs:
            number = lifetimes.born(tensor)
            if number is not None:
                creates.append(number)
        position = self._signature_index.get(id(signature))
        if position is None:
            position = self._signature_index[id(signature)] = len(self.signatures)
            self.signatures.append(signature)
        frame = self.stack.current
        live = lifetimes.live_bytes + signature.scratch_bytes
        self.ops.append(OpCall(index, frame.index if frame else 0, position, tuple(reads), tuple(creates), live))
        lifetimes.time = index + 1

    def _save(self, args: Any) -> None:
        """Keep a copy of each of the model's own tensors before an operator may write to it."""
        for value in args:
            if isinstance(value, _Tensor):
                number = self.lifetimes.numbers[value.untyped_storage()._cdata]
                if self.lifetimes.roles[number] != "activation" and number not in self._written:
                    self._written.add(number)
                    self.saved.append((value, value.detach().clone()))


def _is_small(kind: Behavior, args: Any, kwargs: dict[str, Any], operands: _Operands) -> bool:
    """Whether an operator makes, or works on, small tensors of forward's own alone, and may run for real."""
    if operands.has_meta or operands.has_own:
        return False
    if kind is not Behavior.FACTORY:
        return operands.has_constant and (kind is Behavior.RUN or operands.work <= _CONSTANT_WORK_LIMIT)
    sizes: list[float] = [prod(value) for value in args if isinstance(value, (list, tuple))]
    sizes += [abs(value) for value in args if isinstance(value, (int, float))]
    return all(size <= SMALL for size in sizes)


def _at(device: torch.device, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with another device: forward asks for that of its inputs, which only stand for real ones."""
    return (
        [device if isinstance(value, torch.device) else value for value in args],
        {name: device if name == "device" else value for name, value in kwargs.items()},
    )


def _tensors_in(result: Any) -> list[torch.Tensor]:
    if isinstance(result, _Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in _tensors_in(item)]
    return []
