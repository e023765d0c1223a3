"""The model and the process, left as found."""

from __future__ import annotations

import collections
import ctypes
import gc
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import nn

_MISSING: Any = object()


class Snapshot:
    """What containers, objects, names and cells hold now, to be put back later.

    Goes through dicts, lists, sets and the attributes of objects as deep as they reach, but not into objects that
    `is_shared` says are a library's own, and no further than `most` of them. Only what differs is written back, so that
    nothing changes for other threads that look at the same objects.
    """

    def __init__(self, is_shared: Callable[[type], bool], most: float = float("inf")) -> None:
        self._is_shared = is_shared
        self._most = most
        self._kinds: dict[type, str] = {}
        self._seen: set[int] = set()
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._sequences: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []

    def add(self, value: Any) -> None:
        """Remember what a value holds, at any depth."""
        pending = [value]
        while pending and len(self._seen) < self._most:
            value = pending.pop()
            cls = value.__class__
            kind = self._kinds.get(cls)
            if kind is None:
                kind = self._kinds[cls] = self._kind(cls)
            if kind == "plain" or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if kind == "table":
                # Past what a subclass makes of its items: a registry may build an object for each.
                self._tables.append((value, dict(dict.items(value))))
                pending.extend(self._tables[-1][1].values())
            elif kind == "sequence":
                self._sequences.append((value, list(value)))
                pending.extend(self._sequences[-1][1])
            elif kind == "set":
                self._sets.append((value, set(value)))
            elif kind == "tuple":
                pending.extend(value)
            attributes = getattr(value, "__dict__", None) if kind != "tuple" and cls not in _CONTAINERS else None
            if isinstance(attributes, dict):
                pending.append(attributes)

    def _kind(self, cls: type) -> str:
        if cls in _CONTAINERS:
            return _CONTAINERS[cls]
        if issubclass(cls, (type, types.FunctionType, types.ModuleType)) or self._is_shared(cls):
            return "plain"
        kinds = (("table", dict), ("sequence", (list, collections.deque)), ("set", set), ("tuple", tuple))
        found = next((kind for kind, base in kinds if issubclass(cls, base)), None)  # type: ignore[arg-type]
        return found or ("object" if hasattr(cls, "__dict__") and cls.__module__ != "builtins" else "plain")

    def add_name(self, table: dict[str, Any], name: str) -> None:
        """Remember what a global name means, and what that holds."""
        value = table.get(name, _MISSING)
        self._names.append((table, name, value))
        self.add(value)

    def add_cell(self, cell: types.CellType) -> None:
        """Remember what a closure holds."""
        value = _content(cell)
        self._cells.append((cell, value))
        self.add(value)

    def add_class(self, cls: type) -> None:
        """Remember a class's own attributes."""
        mine = {name: value for name, value in vars(cls).items() if not name.startswith("__")}
        self._classes.append((cls, mine))
        for value in mine.values():
            self.add(value)

    def restore(self, tensors_only: bool = False) -> None:
        """Put everything back; `tensors_only`: where a tensor was put. An interrupt in the middle waits."""
        is_taken_back: Callable[[Any], bool] = holds_tensor if tensors_only else (lambda value: True)
        try:
            self._restore(is_taken_back)
        except KeyboardInterrupt:
            self._restore(is_taken_back)
            raise

    def _restore(self, is_taken_back: Callable[[Any], bool]) -> None:
        for cell, value in self._cells:
            now = _content(cell)
            if now is not value and is_taken_back(now):
                if value is _MISSING:
                    del cell.cell_contents
                else:
                    cell.cell_contents = value
        for table, name, value in self._names:
            now = table.get(name, _MISSING)
            if now is not value and is_taken_back(now):
                if value is _MISSING:
                    del table[name]
                else:
                    table[name] = value
        for cls, mine in self._classes:
            _restore_class(cls, mine)
        for table, copy in self._tables:
            restore(table, copy, is_taken_back)
        for sequence, items in self._sequences:
            if len(sequence) != len(items) or not all(map(is_, sequence, items)):
                added = [item for item in list(sequence)[len(items) :] if not is_taken_back(item)]
                sequence.clear()
                sequence.extend([*items, *added])
        for group, members in self._sets:
            if len(group) != len(members) or not all(item in members for item in group):
                added = [item for item in group if item not in members and not is_taken_back(item)]
                group.clear()
                group.update(members, added)


def holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a value is a tensor, or a container or object with one inside."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (str, bytes, int, float, type, types.ModuleType)):
        return False
    if isinstance(value, dict):
        return any(holds_tensor(item, depth - 1) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return any(holds_tensor(item, depth - 1) for item in value)
    attributes = getattr(value, "__dict__", None)
    return isinstance(attributes, dict) and holds_tensor(attributes, depth - 1)


_CONTAINERS: dict[Any, str] = {
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes, type, types.FunctionType), "plain"),
    **dict.fromkeys((torch.Tensor, nn.Parameter, torch.dtype, torch.device, types.MethodType), "plain"),
    dict: "table", collections.OrderedDict: "table", collections.defaultdict: "table", collections.Counter: "table",
    list: "sequence", collections.deque: "sequence", set: "set", tuple: "tuple",
}  # fmt: skip


def restore(
    table: dict[Any, Any], copy: dict[Any, Any], is_taken_back: Callable[[Any], bool] = lambda value: True
) -> None:
    """Make a dict hold what it held, in the same order; one that still does is not touched."""
    # A subclass may import what it names when it is asked for its keys, as transformers' tables of models do.
    base: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
    keys = list(base.__iter__(table))
    if len(keys) == len(copy) and all(map(is_, dict.values(table), copy.values())) and all(map(is_, keys, copy)):
        return
    kept = {key: now for key, now in dict.items(table) if now is not copy.get(key, _MISSING) and not is_taken_back(now)}
    copy = {**copy, **kept}
    for key in keys:
        if key not in copy:
            base.__delitem__(table, key)
    if list(base.__iter__(table)) != list(copy):
        base.clear(table)
    for key, value in copy.items():
        if dict.get(table, key, _MISSING) is not value:
            base.__setitem__(table, key, value)


def _restore_class(cls: type, mine: dict[str, Any]) -> None:
    now = vars(cls)
    for name in [name for name in now if name not in mine and not name.startswith("__")]:
        type.__delattr__(cls, name)
    for name, value in mine.items():
        if now.get(name, _MISSING) is not value:
            type.__setattr__(cls, name, value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing assigned yet
        return _MISSING


class TensorStates:
    """Data, gradient, flags, hooks and attributes of tensors, to be put back later. Values are not copied."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        # Twice the same expression, in line: there are hundreds of tensors, and a call for each would be felt.
        self._tensors = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._data = [tensor.data for tensor in self._tensors]
        self._states = [
            (t.data_ptr(), t.requires_grad, t._backward_hooks, t.grad if t.requires_grad else None, t.__dict__ or None)
            for t in self._tensors
        ]
        self._tables = {
            index: (None if hooks is None else dict(hooks), dict(attributes or {}))
            for index, (_, _, hooks, _, attributes) in enumerate(self._states)
            if hooks is not None or attributes
        }

    def restore(self) -> None:
        """Put back what was changed."""
        states = [
            (t.data_ptr(), t.requires_grad, t._backward_hooks, t.grad if t.requires_grad else None, t.__dict__ or None)
            for t in self._tensors
        ]
        for index, (now, before) in enumerate(zip(states, self._states, strict=True)):
            # The storage of a tensor without data has no address; it is cheap to put back.
            if now[0] != before[0] or not now[0] or index in self._tables or not all(map(is_, now[1:], before[1:])):
                self._put_back(self._tensors[index], self._data[index], before, *self._tables.get(index, (None, {})))

    @staticmethod
    def _put_back(tensor: torch.Tensor, data: torch.Tensor, before: Any, hooks: Any, attributes: Any) -> None:
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
    """Let nobody look for cycles meanwhile: among a program's millions of objects one such look takes longer than all.

    Cycles that are made meanwhile stay until the next look, so what is alive does not depend on when one happens.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def unchanged(modules: list[nn.Module], training: bool, *, fast_path: bool = False) -> Iterator[None]:
    """Run the modules in the given mode; then restore attributes, flags, random numbers and backend switches.

    Modes are set on each module directly: a model's own `train()` may fuse or merge weights. With `fast_path`, encoder
    layers may run as one operator, as they would without us.
    """
    snapshot = Snapshot(_is_a_library_s)
    for module in modules:
        snapshot.add(module.__dict__)
    classes = [(module, module.__class__) for module in modules]
    tensors = TensorStates(t for module in modules for t in _own_tensors(module))
    scripts = [(module, module.training) for module in modules if isinstance(module, torch.jit.ScriptModule)]
    with nullcontext() if fast_path else without_fast_path(), preserve_rng():
        try:
            for module in modules:
                module.__dict__["training"] = training
            for module, _ in scripts:
                module.training = training
            yield
        finally:
            for module, was_training in scripts:
                module.training = was_training
            for module, cls in classes:
                if module.__class__ is not cls:
                    module.__class__ = cls
            snapshot.restore()
            tensors.restore()


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    if not isinstance(module, torch.jit.ScriptModule):
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)
        yield from (tensor for tensor in module._buffers.values() if tensor is not None)


def _is_a_library_s(cls: type) -> bool:
    root = str(getattr(cls, "__module__", "")).partition(".")[0]
    is_numeric = root in ("torch", "numpy", "pandas") and not issubclass(cls, nn.Module)
    return is_numeric or root in sys.stdlib_module_names


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
    """Draw random numbers inside; those drawn afterwards are the same as without."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    words = _words_of(numpy, states[2])
    try:
        yield
    finally:
        if not torch.equal(torch.get_rng_state(), states[0]):
            torch.set_rng_state(states[0])
        if random.getstate() != states[1]:
            random.setstate(states[1])
        if numpy and states[2] is not None and (words is None or words != _words_of(numpy, states[2])):
            numpy.random.set_state(states[2])


def _words_of(numpy: Any, state: Any) -> bytes | None:
    """The words of NumPy's usual generator, as they lie in memory: to set its state takes 50 times as long.

    None where they do not tell whether a number was drawn: of two normal numbers that are made at once, one may wait.
    """
    if state is None or state[0] != "MT19937" or state[3] or not hasattr(numpy.random, "get_bit_generator"):
        return None
    return ctypes.string_at(numpy.random.get_bit_generator().ctypes.state_address, 4 * (len(state[1]) + 1))
