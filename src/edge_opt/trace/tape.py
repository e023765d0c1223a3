"""The tape: a dispatch mode that records every operator without computing it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

from edge_opt.records.costs import OUTSIDE, OpCall, OpSignature, Role
from edge_opt.trace.escapes import NeedsData, OutsideWork
from edge_opt.trace.inputs import SMALL
from edge_opt.trace.lifetimes import Lifetimes, empty_meta_like, is_dense, is_sparse, shape_of, storage_of
from edge_opt.trace.module_calls import ModuleStack
from edge_opt.trace.operators import (
    COMPOSITE,
    INDEX,
    Behavior,
    MemoEntry,
    OperatorFacts,
    View,
    facts_of,
    known_facts,
    memo_get,
    memo_put,
    signature_of,
    steps_of,
    tensor_info,
)
from edge_opt.trace.probes import Probe
from edge_opt.trace.scratch import scratch_bytes
from edge_opt.trace.shapes import fails_on_shape_only, in_place_is_valid, output_specs

_META = torch.device("meta")
_CPU = torch.device("cpu")
_Tensor = torch.Tensor
_STRIDED = torch.strided
_PLAIN = frozenset((type(None), bool, int, float, torch.dtype))
_empty_strided = torch.empty_strided
_as_strided = torch.as_strided
_MASKS = (torch.bool, torch.uint8)
_TAKEN_APART = (Behavior.DECOMPOSE, Behavior.CONTROL)  # a tuple: looking up a set would call `Enum.__hash__` in Python
_lift_fresh = torch.ops.aten.lift_fresh.default
_detach = torch.ops.aten.detach.default
_detach_in_place = torch.ops.aten.detach_.default
_to_dtype = torch.ops.aten.to.dtype
_resolve_neg = torch.ops.aten.resolve_neg.default
_ITEM = ("aten.item", "aten._local_scalar_dense")

# Tensors made inside forward (masks, position ids) stay real up to SMALL: code may look at their values, and caches
# that outlive the trace hold what they would hold anyway.
_CONSTANT_WORK_LIMIT = 1 << 24


_AUTOCAST = ("torch.autocast", "only real tensors are cast")


def _check_autocast() -> None:
    """Ask for real tensors under autocast: it casts by device, and would leave tensors on meta as they are."""
    if torch.is_autocast_enabled("cpu"):
        raise NeedsData(*_AUTOCAST)


def _is_cast_by_autocast(dtype: torch.dtype) -> bool:
    """Return whether autocast is on and casts to this type. Its own kernels run as if it were off."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0 and dtype is torch.get_autocast_dtype("cpu")


class _Operands:
    """The arguments of one call: their storages, and which kinds of tensor they are."""

    has_meta = False  # without values
    has_own = False  # the model's parameters and buffers: real, but not to be computed with
    has_constant = False  # small and real: made inside forward, or an input of integers
    has_device = False
    is_detached = False  # by `detach_`
    work = 1

    def __init__(self) -> None:
        self.reads: list[int] = []


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators under the module that runs them, on meta tensors or (`is_real`) on the model's own."""

    supports_higher_order_operators = True

    def __init__(
        self, stack: ModuleStack, lifetimes: Lifetimes, tensors: list[tuple[torch.Tensor, Role]], is_real: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack = stack
        self.lifetimes = lifetimes
        self._numbers = lifetimes.numbers
        self.is_real = is_real
        stack.on_enter = None if is_real else _check_autocast
        self.ops: list[OpCall] = []
        self.signatures: list[OpSignature] = []
        self.has_read_values = False
        self.watches_values = True  # not in files, whose constants this package reads itself
        self.notes: list[str] = []  # what forward adds for readers of the profile
        self.outside = OutsideWork(stack, is_real, [tensor for tensor, _ in tensors], self.is_constant)
        self.constants: Collection[int] = ()  # ids of tensors that the model holds beside its own
        self.shape_error: BaseException | None = None
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._roles = {id(tensor): role for tensor, role in tensors}
        self._is_on_cpu = all(tensor.is_cpu for tensor, _ in tensors)
        self._own: dict[int, tuple[int, torch.Tensor]] = {}  # the tensor is kept, so that its id stays its own
        self._twins: dict[int, torch.Tensor] = {}
        self._written: set[int] = set()
        self._input_independent: set[int] = set()  # real, and computed from no input: what an eager run would hold
        self._input_dependent: set[int] = set()  # real, but computed from an input
        self._signature_index: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch asks this once per class, and where it is True wraps `__torch_dispatch__` in `torch._disable_dynamo`.
        # That imports Dynamo at the first operator, which takes seconds, and adds two Python calls to each. With False,
        # Dynamo would compile into this method if a compiled function ran under the tape. None does: compiled modules
        # are unwrapped first, and `force_eager` holds for the rest.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and (subclass := _wrapper_among(types)) is not None:
            # A tensor made of tensors (jagged, quantized): its own class takes the operator apart.
            with self:
                return subclass.__torch_dispatch__(func, types, args, kwargs or {})
        facts = known_facts(id(func)) or facts_of(func)
        kind = facts.behavior
        if self.outside.probe.is_watching:
            self.outside.probe.note_call(func, args, kwargs or {}, self.stack.current)
        if kind in _TAKEN_APART:
            return self._take_apart(func, kind, args, kwargs or {})
        if func is _lift_fresh:
            # `torch.tensor(...)` or `torch.from_numpy(...)` inside forward: it is new, and its values are known.
            self.lifetimes.born(args[0])
            self.outside.meet_python_tensor(args[0])
        elif func is INDEX and any(index is not None and index.dtype in _MASKS for index in args[1]):
            kind = Behavior.DATA
        key_parts: list[Any] = [id(func)]
        operands = _Operands()
        operands.is_detached = func is _detach_in_place
        self._describe(args, key_parts, operands)
        if kwargs:
            key_parts.append(tuple(kwargs))
            self._describe(kwargs.values(), key_parts, operands)
        else:
            kwargs = {}
        if self.is_real or (not (operands.has_meta or operands.has_own) and _is_small(func, kind, args, operands)):
            self.has_read_values = self.has_read_values or kind is Behavior.DATA
            if operands.has_device and not self.is_real:
                args, kwargs = _at(_CPU, args, kwargs)
            return self._run(facts, args, kwargs, key_parts, operands)
        if func is _to_dtype and operands.has_own and _is_cast_by_autocast(args[1]):
            raise NeedsData(*_AUTOCAST)
        if kind is Behavior.DATA:
            if operands.has_meta or not self._written.isdisjoint(operands.reads):
                raise NeedsData(facts.name)
            self.has_read_values = True
            return self._run(facts, args, kwargs, key_parts, operands)
        key = tuple(key_parts)
        entry = memo_get(key)
        if entry is None:
            return self._infer_outputs(facts, args, kwargs, key, operands)
        outputs = _memorized_outputs(entry, func, args)
        if outputs is None:
            return self._infer_outputs(facts, args, kwargs, key, operands, entry)
        if kind is Behavior.IN_PLACE and entry.specs is None and not entry.views:
            self._written.add(operands.reads[0])
        self._record(entry.signature, outputs, operands.reads)
        return outputs if entry.is_list else outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _take_apart(self, func: Any, kind: Behavior, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator in pieces, and record those."""
        with self:
            if kind is Behavior.CONTROL:
                # Its eager implementation in Python: branches and loops run here, and what they call is recorded.
                steps: Any = steps_of(func)
                return steps(*args, **kwargs)
            # The C++ kernel of the composite, as an eager run takes it apart. `func.decompose()` is not an alternative:
            # where torch has registered a kernel in Python (`matmul`, `stft`), it calls that one, which calls other
            # operators.
            return func._op_dk(COMPOSITE, *args, **kwargs)

    def _describe(self, values: Any, key_parts: list[Any], operands: _Operands) -> None:
        """Add the arguments to a key (tensors by layout and dtype), and note what they are."""
        numbers = self._numbers
        has_threads = self.outside.has_threads
        for value in values:
            kind = value.__class__
            if kind in _PLAIN:
                key_parts += (kind, value)
            elif isinstance(value, _Tensor):
                if value.layout is _STRIDED and not value.is_nested:
                    key_parts += (value.shape, value.stride(), value.dtype)
                else:
                    key_parts += self._unusual(value)
                own = self._own.get(id(value))
                if own is not None:
                    operands.has_own = True
                    operands.reads.append(own[0])
                elif value.is_meta and (number := numbers.get(value.untyped_storage()._cdata)) is not None:
                    operands.has_meta = True
                    operands.reads.append(number)
                    if has_threads and id(value) not in self._roles:
                        self.outside.check_version(value)  # the model's own are summed up in `conclude`
                else:
                    self._identify(value, operands)
            elif isinstance(value, (list, tuple)):
                if value and value[0].__class__ is not int and any(isinstance(item, _Tensor) for item in value):
                    key_parts.append(len(value))
                    self._describe(value, key_parts, operands)
                else:
                    key_parts.append(tuple(value))
            else:
                key_parts += (kind, value)
                if kind is torch.device:
                    operands.has_device = True

    def _unusual(self, value: torch.Tensor) -> tuple[Any, ...]:
        """Return a key for a sparse or nested tensor; refuse it on meta, where few kernels take them."""
        if not self.is_real:
            raise NeedsData("a nested tensor" if value.is_nested else "a sparse tensor")
        return value.layout, value.is_nested, tensor_info(value), value.dtype

    def _identify(self, value: torch.Tensor, operands: _Operands) -> None:
        """Note a tensor that is not known yet as one of the model's own."""
        is_meta = value.is_meta
        number = None
        if is_meta or self.is_real or id(value) not in self._roles:
            number = self._numbers.get(storage_of(value)._cdata)
        if is_meta:
            operands.has_meta = True
        if number is None:
            # No operator made it: it was there before the trace, or it was computed elsewhere.
            is_unknown = id(value) not in self._roles and id(value) not in self.constants
            if is_unknown:
                # `torch.tensor(..., device=x.device)` detaches what it made; on meta nothing else of it can be seen.
                meet = self.outside.meet_python_tensor if operands.is_detached else self.outside.meet_unknown
                meet(value)
            number = self.lifetimes.register(value, self._roles.get(id(value), "buffer"))
            if is_meta and is_unknown and self._is_on_cpu:
                self.lifetimes.note_stand_in(value.untyped_storage(), number)
            if not is_meta:
                self._own[id(value)] = (number, value)
                operands.has_own = True
        elif not is_meta:
            operands.has_constant = True
            operands.work *= max(value.numel(), 1)
            # Written with values that are not known: its values are no longer those of an eager run.
            operands.has_meta = operands.has_meta or (number in self._written and not self.is_real)
        operands.reads.append(number)

    def _infer_outputs(
        self, facts: OperatorFacts, args: Any, kwargs: dict[str, Any], key: tuple[Any, ...], operands: _Operands,
        entry: MemoEntry | None = None,
    ) -> Any:  # fmt: skip
        """Return the outputs of an operator on meta tensors that memory alone cannot give: by a rule, or from torch."""
        kind, func = facts.behavior, facts.func
        specs = output_specs(func, args, kwargs) if entry is None and kind is Behavior.PURE else None
        if specs is not None:
            tensors = tuple(_empty_strided(size, step, dtype=dtype, device=_META) for size, step, dtype in specs)
            result: Any = tensors[0] if len(tensors) == 1 else tensors
        elif kind is Behavior.PURE:
            args_on_meta, kwargs_on_meta = _at(_META, args, kwargs) if operands.has_device else (args, kwargs)
            result = self._run_on_placeholders(facts, args_on_meta, kwargs_on_meta)
        else:
            placeholders = args
            if operands.has_own or operands.has_constant:
                placeholders, kwargs = self._on_meta((args, kwargs))
            if operands.has_device or kind is Behavior.FACTORY:
                placeholders, kwargs = _at(_META, placeholders, kwargs)
                if kind is Behavior.FACTORY:
                    kwargs["device"] = _META
            if kind is Behavior.IN_PLACE:
                self._written.add(operands.reads[0])
            is_settled = kind is Behavior.IN_PLACE and (entry is not None or in_place_is_valid(func, args))
            result = placeholders[0] if is_settled else self._call(facts, placeholders, kwargs)
        outputs = _tensors_in(result)
        if entry is None:
            entry = self._entry(facts, args, kwargs, result, outputs, operands.reads)
            memo_put(key, entry)
        self._record(entry.signature, outputs, operands.reads)
        return result

    def _run_on_placeholders(self, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the outputs of an operator with fresh outputs, held by nothing else.

        Some of torch's meta kernels are written in Python and leave cycles (`linalg.vector_norm`, `std`, `logsumexp`,
        `cdist` and whatever else is a decomposition), which would hold their arguments until the next garbage
        collection: the first profile of a process would read a higher peak than the second, which takes outputs from
        memory. So they are given placeholders, and the outputs are made after theirs.
        """
        addresses: list[int] = []
        refs: list[weakref.ref[torch.Tensor]] = []

        def placeholder(tensor: torch.Tensor) -> torch.Tensor:
            stand_in = empty_meta_like(tensor)
            refs.append(weakref.ref(stand_in))
            addresses.append(stand_in.untyped_storage()._cdata)
            return stand_in

        result = self._call(facts, *tree_map_only(_Tensor, placeholder, (args, kwargs)))
        cls, whole = result.__class__, result if isinstance(result, (tuple, list)) else (result,)
        # Otherwise it returns one of its arguments, as dropout does, or more than tensors.
        is_fresh = all(isinstance(item, _Tensor) and item.untyped_storage()._cdata not in addresses for item in whole)
        outputs = [empty_meta_like(item) for item in whole] if is_fresh else []
        del result, whole
        if any(ref() is not None for ref in refs):
            # A cycle that holds an exception of the kernel also holds the frames that called it: that of `_call` with
            # the placeholders, this one, and forward's with all of their variables. It is young, so that looking for
            # it is cheap.
            gc.collect(0)
        if not is_fresh:
            return self._call(facts, *self._on_meta((args, kwargs)))
        return outputs if cls is list else tuple(outputs) if issubclass(cls, tuple) else outputs[0]

    def _on_meta(self, arguments: Any) -> Any:
        """Return arguments with every real tensor replaced by an empty one: the same each time for the model's own."""
        return tree_map_only(_Tensor, self._twin, arguments)

    def _twin(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_meta:
            return value
        twin = self._twins.get(id(value))
        if twin is None:
            twin = empty_meta_like(value)
            own = self._own.get(id(value))
            if own is not None:
                self._twins[id(value)] = twin
            number = own[0] if own is not None else self.lifetimes.number_of(value)
            if number >= 0:
                # A view of the twin is one of what it stands for, and no new memory.
                self.lifetimes.alias(twin, value, number)
        return twin

    def _run(
        self, facts: OperatorFacts, args: Any, kwargs: dict[str, Any], key_parts: list[Any], operands: _Operands
    ) -> Any:
        """Return the outputs of an operator that really runs: on small constants, or because the model needs data."""
        if self.is_real and facts.is_mutable:
            self._save(args)
        result = self._call(facts, args, kwargs)
        if facts.name == "aten.set_":
            # A tensor was given another storage, as when it is read from a pickle.
            self.outside.meet_python_tensor(args[0])
        outputs = _tensors_in(result)
        # Values may decide the output's shape here, so it is part of the key.
        key = (*key_parts, tuple(shape_of(tensor) for tensor in outputs))
        entry = memo_get(key)
        if entry is None:
            entry = self._entry(facts, args, kwargs, result, outputs, operands.reads, is_run=True)
            memo_put(key, entry)
        self._record(entry.signature, outputs, operands.reads)
        roles, numbers = self.lifetimes.roles, self.lifetimes.numbers
        results = [numbers[storage_of(tensor)._cdata] for tensor in outputs if not tensor.is_meta]
        is_constant = not any(number in self._input_dependent or roles[number] == "input" for number in operands.reads)
        (self._input_independent if is_constant else self._input_dependent).update(results)
        if outputs and facts.func is not _resolve_neg:
            return result
        if facts.func is _resolve_neg and self.watches_values:
            # The last step of `tolist()`, and of `numpy()`, which asks for another layout before.
            is_numpy = len(self.ops) > 2 and self.signatures[self.ops[-3].signature].op == "aten.to"
            return self.outside.pass_on(result, is_constant, "numpy" if is_numpy else "python")
        if not is_constant:
            is_number = isinstance(result, (float, complex))
            is_whole = isinstance(result, float) and result.is_integer()  # such as a size that was rounded
            self.outside.read_values(1, int(is_number and not is_whole))
        if facts.name in _ITEM and self.watches_values:
            return self.outside.probe.pass_on(args[0], self.stack.current, is_constant, "python").item()
        return result

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether no value of a tensor depends on an input."""
        number = self.lifetimes.number_of(tensor)
        return number >= 0 and (
            self.lifetimes.roles[number] in ("parameter", "buffer") or number in self._input_independent
        )

    def record_outside_work(self, result: Any) -> None:
        """Record what was computed elsewhere, as operators without a cost rule, after forward has returned."""
        stack = self.stack
        self.outside.conclude(result, self._is_recorded)
        for frame, origin in self.outside.origins:
            outer, stack.current = stack.current, frame
            self._record(_work_outside(origin), [], [])
            stack.current = outer
        self.outside.origins.clear()

    def record_computed_numbers(self, second: Probe) -> None:
        """Record what was computed from values, as a second run has shown; the module calls have ended by now."""
        for module, origin in self.outside.probe.computed(second):
            self.ops.append(OpCall(len(self.ops), module, len(self.signatures), (), (), 0))
            self.signatures.append(_work_outside(origin))

    def _is_recorded(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._roles or id(tensor) in self.constants or self.lifetimes.number_of(tensor) >= 0

    def is_input_independent(self, number: int) -> bool:
        """Return whether a storage that outlives the trace holds what an eager run would have left there."""
        is_changed = number in self._input_dependent or number in self._written
        return self._is_on_cpu and number in self._input_independent and not is_changed

    def end(self) -> None:
        """Let go of every tensor."""
        self._own.clear()
        self._twins.clear()
        self.saved.clear()
        self.outside.end()

    def _call(self, facts: OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            result = facts.func(*args, **kwargs) if kwargs else facts.method(*args)
        except Exception as error:
            if fails_on_shape_only(facts.func):
                self.shape_error = error
            raise
        if not self.is_real and isinstance(result, _Tensor) and is_sparse(result):
            raise NeedsData(facts.name)
        return result

    def _entry(
        self, facts: OperatorFacts, args: Any, kwargs: dict[str, Any], result: Any, outputs: list[torch.Tensor],
        reads: list[int], is_run: bool = False,
    ) -> MemoEntry:  # fmt: skip
        known, kind = self._numbers, Behavior.ALWAYS_RUN if is_run else facts.behavior
        is_aliased = any(known.get(storage_of(tensor)._cdata, -1) in reads for tensor in outputs)
        # Sparse and nested tensors are met in real runs alone.
        is_usual = not self.is_real or all(map(is_dense, _tensors_in([*args, *kwargs.values(), *outputs])))
        scratch = scratch_bytes(facts.func, args, kwargs, outputs) if is_usual else 0
        signature = signature_of(facts.func, args, kwargs, outputs, is_aliased and not facts.is_mutable, scratch)
        whole = result if isinstance(result, (tuple, list)) else (result,)
        if is_run or not outputs or not all(isinstance(item, _Tensor) for item in whole):
            return MemoEntry(signature)
        is_list = isinstance(result, list)
        if is_aliased or facts.is_mutable:
            views = _views(kind, facts.is_mutable, args[0] if args else None, outputs)
            return MemoEntry(signature, None, views, is_list)
        specs = tuple([(tuple(t.size()), t.stride(), t.dtype) for t in outputs])
        return MemoEntry(signature, specs if kind in (Behavior.PURE, Behavior.ALWAYS_RUN) else None, None, is_list)

    def _record(self, signature: OpSignature, outputs: list[torch.Tensor], reads: list[int]) -> None:
        lifetimes = self.lifetimes
        ops = self.ops
        index = len(ops)
        creates: tuple[int, ...] = ()
        for tensor in outputs:
            number = lifetimes.born(tensor)
            if number is not None:
                creates += (number,)
        position = self._signature_index.get(id(signature))
        if position is None:
            position = self._signature_index[id(signature)] = len(self.signatures)
            self.signatures.append(signature)
        frame = self.stack.current
        live = lifetimes.live_bytes + signature.scratch_bytes
        ops.append(OpCall(index, frame.index if frame else 0, position, tuple(reads), creates, live))
        lifetimes.time = index + 1

    def _save(self, args: Any) -> None:
        """Keep a copy of each of the model's own tensors before an operator may write to it."""
        for value in args:
            if isinstance(value, _Tensor):
                number = self.lifetimes.numbers[storage_of(value)._cdata]
                if self.lifetimes.roles[number] != "activation" and number not in self._written:
                    self._written.add(number)
                    self.saved.append((value, value.detach().clone()))


def _work_outside(origin: str) -> OpSignature:
    return OpSignature(f"{OUTSIDE} ({origin})", (), (), (), (), False, 0, ())


def current_tape() -> Tape | None:
    """Return the tape that records now; None where nothing is traced, or another mode runs inside the tape.

    Torch has no public function for the innermost dispatch mode. If this private one disappears, files lose the costs
    of their nodes, and tests/model_files/test_node_costs.py fails.
    """
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Tape) else None


def _memorized_outputs(entry: MemoEntry, func: Any, args: Any) -> list[torch.Tensor] | None:
    """Return the outputs of a call that was seen before; None where the operator must be run again."""
    if entry.specs is not None:
        return [_empty_strided(size, step, dtype=dtype, device=_META) for size, step, dtype in entry.specs]
    if entry.views is None or not args[0].is_meta:
        return None
    if func is _detach:
        # Autograd also asks for it where its own keys are on, for outputs that their own node keeps: a view would have
        # a node that leads back to that one, and neither would ever be freed.
        return [args[0].detach()]
    if entry.views:
        start = args[0].storage_offset()
        return [_as_strided(args[0], size, step, start + offset) for size, step, offset in entry.views]
    return [args[0]]


def _views(kind: Behavior, is_mutating: bool, base: Any, outputs: list[torch.Tensor]) -> tuple[View, ...] | None:
    """Return where the outputs of an operator lie in its first argument; None where they may lie elsewhere."""
    if len(outputs) == 1 and outputs[0] is base and (kind is Behavior.IN_PLACE or not is_mutating):
        return ()
    # A view of a complex number may be its conjugate, or a part.
    if is_mutating or not isinstance(base, _Tensor) or not base.is_meta or base.is_complex():
        return None
    address, start = base.untyped_storage()._cdata, base.storage_offset()
    if any(view.dtype is not base.dtype or view.untyped_storage()._cdata != address for view in outputs):
        return None
    return tuple([(tuple(view.size()), view.stride(), int(view.storage_offset() - start)) for view in outputs])


def _is_small(func: Any, kind: Behavior, args: Any, operands: _Operands) -> bool:
    """Return whether an operator makes, or works on, only tensors of forward's own that are small enough to be real."""
    if kind is not Behavior.FACTORY:
        return operands.has_constant and (kind is Behavior.ALWAYS_RUN or _is_little_work(func, args, operands.work))
    sizes: list[float] = [prod(value) for value in args if isinstance(value, (list, tuple))]
    sizes += [abs(value) for value in args if isinstance(value, (int, float))]
    return all(size <= SMALL for size in sizes)


def _is_little_work(func: Any, args: Any, product: int) -> bool:
    """Return whether an operator on real tensors is done in milliseconds; `product` is that of their sizes."""
    if func in _REPEATS:
        return bool(product * prod(args[1]) <= SMALL)
    if product <= _CONSTANT_WORK_LIMIT:
        return True
    if torch.Tag.pointwise not in getattr(func, "tags", ()):
        return False
    shapes = [value.shape for value in args if isinstance(value, _Tensor)]
    return prod(torch.broadcast_shapes(*shapes)) <= SMALL  # type: ignore[no-untyped-call]


_REPEATS = (torch.ops.aten.repeat.default, torch.ops.aten.tile.default)


def _wrapper_among(types: Any) -> Any:
    """Return the first class of tensor that implements operators itself."""
    disabled = torch._C._disabled_torch_dispatch_impl
    return next((cls for cls in types if cls.__torch_dispatch__ is not disabled), None)


def _at(device: torch.device, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with another device: forward asks for that of its inputs, which represent real ones."""
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
