"""Run a model and restore it, and the settings of the process, afterwards."""

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
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

_MISSING: Any = object()


class _Kind(NamedTuple):
    """How to record objects of a class: `read` their content, follow its `children`, and `write` it back later."""

    read: Callable[[Any], Any]
    children: Callable[[Any], Iterable[Any]] | None = None
    write: Callable[[Any, Any], Any] | None = None


class Snapshot:
    """The contents of everything that can be reached from some modules, to be restored later.

    Follows attributes, slots, containers, closures, bound methods and partials as deep as they go, but not into objects
    of Python, torch or NumPy. Hooks are not followed: what a user's hook notes down is the user's. Only what differs is
    written back, so that nothing changes for other threads that look at the same objects.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.arrays: list[Any] = []  # of NumPy
        self._seen: set[int] = set()
        self._pending: list[Any] = list(modules)
        # Most tables of a module, such as those of its hooks, are empty: these are only asked whether they still are.
        self._empty: list[Any] = []
        # How to write back, the object, and its content.
        self._entries: list[tuple[Callable[[Any, Any], Any], Any, Any]] = [
            (_write_class, module, module.__class__) for module in self._pending
        ]
        for cls in {module.__class__ for module in self._pending}:
            self._pending += _arrays_beside(cls)
        while self._pending:
            self._add(self._pending.pop())

    def _add(self, value: Any) -> None:
        cls = value.__class__
        known = _KINDS.get(cls, _MISSING)
        if known is _MISSING:
            kind = _kind_of(cls)
            known = _KINDS[cls] = None if kind is None else (kind, cls.__dictoffset__ != 0, slot_names(cls))
        if known is None or id(value) in self._seen:
            return
        self._seen.add(id(value))
        kind, has_attributes, names = known
        if kind is _TENSOR:
            self.tensors[id(value)] = value
            self._entries.append((_write_tensor, value, _tensor_state(value)))
            return
        if kind is _MODULE:
            self._entries.append((restore, value.__dict__, attributes := value.__dict__.copy()))
            self._follow(attributes.values(), is_module=True)
        else:
            if kind is _ARRAY:
                self.arrays.append(value)
            content = kind.read(value)
            if kind.write is not None:
                self._entries.append((kind.write, value, content))
            if kind.children is not None:
                self._follow(kind.children(content))
            if has_attributes:
                self._pending.append(value.__dict__)
        if names:
            slots = {name: _slot(value, name) for name in names}
            self._entries.append((_write_slots, value, slots))
            self._follow(slots.values())

    def _follow(self, values: Iterable[Any], is_module: bool = False) -> None:
        """Add those of some values that a forward could change."""
        for value in values:
            cls = value.__class__
            if cls in _CLEARED and not value:
                self._empty.append(value)
            elif is_module and cls is collections.OrderedDict:
                # Hook tables are the only OrderedDicts of a module's own; their values are not followed.
                self._entries.append((restore, value, value.copy()))
            elif _KINDS.get(cls, _MISSING) is not None:
                self._pending.append(value)

    def replace(self, replacement: Callable[[Any], Any], kind: type) -> None:
        """Put a replacement in the place of each object of a class, until everything is restored."""
        for write, container, content in self._entries:
            if write is restore:
                for key, value in content.items():
                    if isinstance(value, kind):
                        dict.__setitem__(container, key, replacement(value))
            elif write is _write_items:
                for index, item in enumerate(content):
                    if isinstance(item, kind):
                        container[index] = replacement(item)

    def restore(self) -> None:
        """Write back what differs. An interrupt meanwhile waits."""
        try:
            for table in filter(None, self._empty):
                table.clear()
            for write, value, content in self._entries:
                write(value, content)
        except KeyboardInterrupt:
            self.restore()
            raise


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


def _write_class(module: nn.Module, cls: type[nn.Module]) -> None:
    if module.__class__ is not cls:
        module.__class__ = cls


def _write_items(sequence: Any, items: list[Any]) -> None:
    if len(sequence) != len(items) or not all(map(is_, sequence, items)):
        sequence.clear()
        sequence.extend(items)


def _write_set(group: set[Any], members: set[Any]) -> None:
    if len(group) != len(members) or not all(item in members for item in group):
        group.clear()
        group.update(members)


def _slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _MISSING


def _write_slots(value: Any, slots: dict[str, Any]) -> None:
    for name, content in slots.items():
        if _slot(value, name) is content:
            continue
        if content is _MISSING:
            object.__delattr__(value, name)
        else:
            object.__setattr__(value, name, content)


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing assigned yet
        return _MISSING


def _write_cell(cell: types.CellType, content: Any) -> None:
    if content is _MISSING:
        del cell.cell_contents
    elif _cell_content(cell) is not content:
        cell.cell_contents = content


# That of torch.Tensor is replaced by the trace, which wants to know who asks.
_data_ptr = torch._C.TensorBase.data_ptr


def _tensor_state(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return data, gradient, flags, hooks and attributes of a tensor; values are not copied."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    grad = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
    hooks = tensor._backward_hooks
    hooks_before = None if hooks is None else dict(hooks)
    return tensor.data, tensor.requires_grad, grad, hooks, hooks_before, dict(tensor.__dict__)


def _write_tensor(tensor: torch.Tensor, state: tuple[Any, ...] | None) -> None:
    if state is None:
        return
    data, requires_grad, grad, hooks, hooks_before, attributes = state
    address = _data_ptr(data)
    # The storage of a tensor without data has no address; others are asked for theirs, which is quick.
    if not address or _data_ptr(tensor) != address:
        is_same = tensor.untyped_storage()._cdata == data.untyped_storage()._cdata
        if not is_same or tensor.shape != data.shape or tensor.stride() != data.stride():
            tensor.data = data
    if (requires_grad or tensor.requires_grad) and tensor.is_leaf and tensor.grad is not grad:
        tensor.grad = grad
    if tensor.requires_grad is not requires_grad:
        tensor.requires_grad_(requires_grad)
    if tensor._backward_hooks is not hooks:
        tensor._backward_hooks = hooks
    if hooks is not None:
        restore(hooks, hooks_before)
    if attributes or tensor.__dict__:
        restore(tensor.__dict__, attributes)


def _arrays_beside(cls: type) -> list[Any]:
    """Return NumPy arrays that a class of modules and its methods refer to by name."""
    if cls.__module__.startswith("torch."):
        return []
    closures = [getattr(value, "__closure__", None) or () for value in vars(cls).values()]
    values = [_cell_content(cell) for closure in closures for cell in closure]
    values += (*vars(cls).values(), *vars(sys.modules.get(cls.__module__, cls)).values())
    return [value for value in values if isinstance(value, numpy.ndarray)]


def _write_array(array: Any, content: Any) -> None:
    if content is not None and array.tobytes() != content.tobytes():
        array[...] = content


def _bit_generator(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def _kind_of(cls: type) -> _Kind | None:
    """Return how to record an object of a class; None where it has nothing that a forward could change."""
    for base, kind in _KINDS_BY_BASE:
        if issubclass(cls, base):
            return kind
    root = cls.__module__.partition(".")[0]
    if root in ("builtins", "torch", "numpy", "pandas") or root in sys.stdlib_module_names - {"__main__"}:
        return None
    return _OBJECT


_MODULE, _TENSOR = _Kind(id), _Kind(type)  # recorded by `Snapshot` itself
_OBJECT = _Kind(id)  # its attributes and slots, as of every kind
# Large arrays are not copied.
_ARRAY = _Kind(
    lambda array: array.copy() if array.flags.writeable and array.nbytes < 1 << 24 else None, None, _write_array
)
_NUMPY_GENERATOR = _Kind(
    lambda generator: _bit_generator(generator).state,
    write=lambda generator, state: setattr(_bit_generator(generator), "state", state),
)
_KINDS_BY_BASE: tuple[tuple[Any, _Kind | None], ...] = (
    (nn.Module, _MODULE),
    (torch.Tensor, _TENSOR),
    (numpy.ndarray, _ARRAY),
    ((numpy.random.Generator, numpy.random.RandomState), _NUMPY_GENERATOR),
    ((type, types.ModuleType, types.BuiltinFunctionType), None),
    # dict.items on purpose: tables of transformers import what they name when they are asked for their items.
    (dict, _Kind(lambda table: dict(dict.items(table)), dict.values, restore)),
    ((list, collections.deque), _Kind(list, iter, _write_items)),
    (set, _Kind(set, write=_write_set)),
    ((tuple, frozenset), _Kind(tuple, iter)),
    (types.FunctionType, _Kind(lambda function: function.__closure__ or (), iter)),
    (types.CellType, _Kind(_cell_content, lambda content: (content,), _write_cell)),
    (types.MethodType, _Kind(lambda method: (method.__self__, method.__func__), iter)),
    (functools.partial, _Kind(lambda partial: (partial.func, partial.args, partial.keywords), iter)),
    (torch.Generator, _Kind(torch.Generator.get_state, write=torch.Generator.set_state)),
    (random.Random, _Kind(random.Random.getstate, write=random.Random.setstate)),
    ((types.SimpleNamespace, argparse.Namespace, weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _OBJECT),
)
_CLEARED = frozenset((dict, collections.OrderedDict, list, set))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, object)
# Classes that a process makes on the fly are few: the table is not bounded.
# A kind, whether objects of the class have a dictionary of attributes, and the names of their slots.
_KINDS: dict[type, tuple[_Kind, bool, tuple[str, ...]] | None] = dict.fromkeys(_PLAIN)


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
    # A frozen script module has no mode.
    scripts = [(m, m.training) for m in modules if isinstance(m, torch.jit.ScriptModule) and hasattr(m, "training")]
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
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    gpus = [(gpu.set_rng_state_all, gpu.get_rng_state_all()) for gpu in (torch.cuda, torch.xpu) if gpu.is_initialized()]
    try:
        yield
    finally:
        if not torch.equal(torch.get_rng_state(), states[0]):
            torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
        for set_states, before in gpus:
            set_states(before)
