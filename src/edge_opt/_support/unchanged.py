"""Run a model and leave it, and the settings of the process, as they were."""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import nn

_MISSING: Any = object()


class Snapshot:
    """The contents of everything that can be reached from some modules, to be restored later.

    Follows attributes, slots, containers, closures, bound methods and partials as deep as they go, but not into objects
    of Python, torch or NumPy. Hooks are not followed: what a user's hook notes down is the user's. Only what differs is
    written back, so that nothing changes for other threads that look at the same objects.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._seen: set[int] = set()
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._generators: list[tuple[Callable[[Any], Any], Any]] = []
        self._classes = [(module, module.__class__) for module in modules]
        self._pending: list[Any] = [module for module, _ in self._classes]
        while self._pending:
            self._add(self._pending.pop())
        self._states = TensorStates(self.tensors.values())

    def _add(self, value: Any) -> None:
        cls = value.__class__
        add = _WALKS.get(cls, _MISSING)
        if add is _MISSING:
            add = _WALKS[cls] = _walk_of(cls)
        if add is not None and id(value) not in self._seen:
            self._seen.add(id(value))
            add(self, value)

    def _add_module(self, module: nn.Module) -> None:
        attributes = module.__dict__
        # Hook tables are the only OrderedDicts of a module's own; their values are not followed.
        self._tables.append((attributes, copied := attributes.copy()))
        for value in copied.values():
            cls = value.__class__
            if cls is collections.OrderedDict:
                self._tables.append((value, value.copy()))
            elif _WALKS.get(cls, _MISSING) is not None:
                self._pending.append(value)
        self._add_slots(module)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        self.tensors[id(tensor)] = tensor

    def _add_dict(self, table: dict[Any, Any]) -> None:
        # dict.items on purpose: tables of transformers import what they name when they are asked for their items.
        copied = dict(dict.items(table))
        self._tables.append((table, copied))
        self._pending.extend(copied.values())
        self._add_attributes(table)

    def _add_sequence(self, sequence: Any) -> None:
        self._sequences.append((sequence, list(sequence)))
        self._pending.extend(sequence)
        self._add_attributes(sequence)

    def _add_set(self, group: set[Any]) -> None:
        self._sets.append((group, set(group)))
        self._add_attributes(group)

    def _add_items(self, items: Iterable[Any]) -> None:
        self._pending.extend(items)

    def _add_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # nothing assigned yet
                content = _MISSING
            self._cells.append((cell, content))
            self._pending.append(content)
        if function.__dict__:
            self._pending.append(function.__dict__)

    def _add_method(self, method: types.MethodType) -> None:
        self._pending += (method.__self__, method.__func__)

    def _add_partial(self, partial: functools.partial[Any]) -> None:
        self._pending += (partial.func, partial.args, partial.keywords)

    def _add_torch_generator(self, generator: torch.Generator) -> None:
        self._generators.append((generator.set_state, generator.get_state()))

    def _add_python_generator(self, generator: random.Random) -> None:
        self._generators.append((generator.setstate, generator.getstate()))

    def _add_numpy_generator(self, generator: Any) -> None:
        bits = getattr(generator, "bit_generator", None) or generator._bit_generator
        self._generators.append((functools.partial(setattr, bits, "state"), bits.state))

    def _add_object(self, value: Any) -> None:
        self._add_attributes(value)
        self._add_slots(value)

    def _add_attributes(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._pending.append(attributes)

    def _add_slots(self, value: Any) -> None:
        for name in slot_names(value.__class__):
            try:
                content = object.__getattribute__(value, name)
            except AttributeError:
                content = _MISSING
            self._slots.append((value, name, content))
            self._pending.append(content)

    def replace(self, replacement: Callable[[Any], Any], kind: type) -> None:
        """Put a replacement in the place of each object of a class, until everything is restored."""
        for table, copied in self._tables:
            for key, value in copied.items():
                if isinstance(value, kind):
                    dict.__setitem__(table, key, replacement(value))
        for sequence, items in self._sequences:
            for index, item in enumerate(items):
                if isinstance(item, kind):
                    sequence[index] = replacement(item)

    def restore(self) -> None:
        """Write back what differs. An interrupt in the middle waits."""
        try:
            self._restore()
        except KeyboardInterrupt:
            self._restore()
            raise

    def _restore(self) -> None:
        for module, cls in self._classes:
            if module.__class__ is not cls:
                module.__class__ = cls
        for table, copied in self._tables:
            restore(table, copied)
        for sequence, items in self._sequences:
            if len(sequence) != len(items) or not all(map(is_, sequence, items)):
                sequence.clear()
                sequence.extend(items)
        for group, members in self._sets:
            if len(group) != len(members) or not all(item in members for item in group):
                group.clear()
                group.update(members)
        for value, name, content in self._slots:
            if getattr(value, name, _MISSING) is content:
                continue
            if content is _MISSING:
                object.__delattr__(value, name)
            else:
                object.__setattr__(value, name, content)
        for cell, content in self._cells:
            if content is _MISSING:
                del cell.cell_contents
            elif cell.cell_contents is not content:
                cell.cell_contents = content
        for set_state, state in self._generators:
            set_state(state)
        self._states.restore()


def _walk_of(cls: type) -> Callable[[Snapshot, Any], None] | None:
    """Return how to record an object of a class; None where it has nothing that a forward could change."""
    if issubclass(cls, nn.Module):
        return Snapshot._add_module
    for base, add in _WALKS_BY_BASE:
        if issubclass(cls, base):
            return add
    root = cls.__module__.partition(".")[0]
    if root == "numpy" and cls.__name__ in ("Generator", "RandomState"):
        return Snapshot._add_numpy_generator
    if root in ("builtins", "torch", "numpy", "pandas") or root in sys.stdlib_module_names - {"__main__"}:
        return None
    return Snapshot._add_object


_WALKS_BY_BASE: tuple[tuple[Any, Callable[[Snapshot, Any], None] | None], ...] = (
    (torch.Tensor, Snapshot._add_tensor),
    ((type, types.ModuleType, types.BuiltinFunctionType), None),
    (dict, Snapshot._add_dict),
    ((list, collections.deque), Snapshot._add_sequence),
    (set, Snapshot._add_set),
    ((tuple, frozenset), Snapshot._add_items),
    (types.FunctionType, Snapshot._add_function),
    (types.MethodType, Snapshot._add_method),
    (functools.partial, Snapshot._add_partial),
    (torch.Generator, Snapshot._add_torch_generator),
    (random.Random, Snapshot._add_python_generator),
    (
        (types.SimpleNamespace, argparse.Namespace, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
        Snapshot._add_attributes,
    ),
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, object)
# Classes that a process makes on the fly are few: the table is not bounded.
_WALKS: dict[type, Callable[[Snapshot, Any], None] | None] = dict.fromkeys(_PLAIN)


@functools.lru_cache(maxsize=4096)
def slot_names(cls: type) -> tuple[str, ...]:
    """Return the attributes that objects of a class keep outside of a dictionary, as Python mangles their names."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def restore(table: dict[Any, Any], copied: dict[Any, Any]) -> None:
    """Make a dict hold what it held, in the same order; one that still does is not touched."""
    # dict's own methods on purpose: a subclass may import what it names when it is asked for its keys, as transformers'
    # tables of models do. An OrderedDict keeps its order apart, so that its own methods have to be called.
    base: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
    keys = list(base.__iter__(table))
    if len(keys) == len(copied) and all(map(is_, dict.values(table), copied.values())) and all(map(is_, keys, copied)):
        return
    for key in keys:
        if key not in copied:
            base.__delitem__(table, key)
    if list(base.__iter__(table)) != list(copied):
        base.clear(table)
    for key, value in copied.items():
        if dict.get(table, key, _MISSING) is not value:
            base.__setitem__(table, key, value)


class TensorStates:
    """Data, gradient, flags, hooks and attributes of tensors, to be restored later. Values are not copied."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
        self._data = [tensor.data for tensor in self._tensors]
        self._states = self._current()
        self._tables = {
            index: (None if hooks is None else dict(hooks), dict(attributes or {}))
            for index, (_, _, hooks, _, attributes) in enumerate(self._states)
            if hooks is not None or attributes
        }

    def _current(self) -> list[tuple[Any, ...]]:
        return [
            (t.data_ptr(), t.requires_grad, t._backward_hooks, t.grad if t.requires_grad else None, t.__dict__ or None)
            for t in self._tensors
        ]

    def restore(self) -> None:
        """Restore what was changed."""
        for index, (now, before) in enumerate(zip(self._current(), self._states, strict=True)):
            # The storage of a tensor without data has no address; it is cheap to restore.
            if now[0] != before[0] or not now[0] or index in self._tables or not all(map(is_, now[1:], before[1:])):
                self._restore(self._tensors[index], self._data[index], before, *self._tables.get(index, (None, {})))

    @staticmethod
    def _restore(tensor: torch.Tensor, data: torch.Tensor, before: Any, hooks: Any, attributes: Any) -> None:
        is_same = tensor.untyped_storage()._cdata == data.untyped_storage()._cdata
        if not is_same or tensor.shape != data.shape or tensor.stride() != data.stride():
            tensor.data = data
        if tensor.is_leaf and (before[1] or tensor.requires_grad) and tensor.grad is not before[3]:
            tensor.grad = before[3]
        if tensor.requires_grad is not before[1]:
            tensor.requires_grad_(before[1])
        if tensor._backward_hooks is not before[2]:
            tensor._backward_hooks = before[2]
        if hooks is not None:
            restore(before[2], hooks)
        restore(tensor.__dict__, attributes)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the search for cycles: among a program's millions of objects one search takes longer than a whole trace.

    Cycles that are made meanwhile stay until the next search, so what is alive does not depend on when one happens.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def unchanged(modules: list[nn.Module], training: bool | None, *, fast_path: bool = False) -> Iterator[Snapshot]:
    """Run the modules in the given mode, or each in its own (None), and then restore them.

    That is everything in a `Snapshot`, the random numbers and the backend switches.

    With `fast_path`, encoder layers may run as one operator, as they would without us.
    """
    snapshot = Snapshot(modules)
    scripts = [(module, module.training) for module in modules if isinstance(module, torch.jit.ScriptModule)]
    with nullcontext() if fast_path else without_fast_path(), preserve_rng():
        try:
            for module in modules if training is not None else ():
                # Past `train()`, which a model may define: it may fuse or merge weights.
                module.__dict__["training"] = training
            for module, was_training in scripts:
                module.training = was_training if training is None else training
            yield snapshot
        finally:
            for module, was_training in scripts:
                module.training = was_training
            snapshot.restore()


_fast_path_lock = threading.Lock()
_fast_path = {"holders": 0, "was_enabled": True}


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Keep encoder layers from running as one operator, which would hide their layers; threads may overlap."""
    with _fast_path_lock:
        if not _fast_path["holders"]:
            _fast_path["was_enabled"] = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _fast_path["holders"] += 1
    try:
        yield
    finally:
        with _fast_path_lock:
            _fast_path["holders"] -= 1
            if not _fast_path["holders"]:
                torch.backends.mha.set_fastpath_enabled(bool(_fast_path["was_enabled"]))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Draw random numbers inside; those drawn afterwards, on the CPU and on GPUs in use, are the same as without."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    gpus = [(gpu.set_rng_state_all, gpu.get_rng_state_all()) for gpu in (torch.cuda, torch.xpu) if gpu.is_initialized()]
    try:
        yield
    finally:
        if not torch.equal(torch.get_rng_state(), states[0]):
            torch.set_rng_state(states[0])
        if random.getstate() != states[1]:
            random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
        for set_states, before in gpus:
            set_states(before)
