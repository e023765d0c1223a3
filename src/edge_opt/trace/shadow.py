"""Shadows: a copy of a model's objects that shares its tensors, so that a trace writes to nothing of the user's."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Of these nothing is copied: immutable, or without state that a forward could change.
_PLAIN: frozenset[type] = frozenset((
    type(None), bool, int, float, complex, str, bytes, type, range, slice, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, types.BuiltinFunctionType, types.ModuleType, type(Ellipsis),
))  # fmt: skip
# Objects of these libraries are shared, but for the containers and random generators below.
SHARED_ROOTS = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "torch", "numpy", "pandas", "scipy", "PIL", "triton", "edge_opt", "rasp", "pytest", "_pytest",
}  # fmt: skip
_RANDOM = ("Generator", "RandomState")
_Handler = Callable[["Copier", Any], Any]
_handlers: dict[type, _Handler | None] = {}
_MOST_CLASSES = 4096


def is_shared_class(cls: type) -> bool:
    """Whether a class belongs to Python, torch or another library that keeps no state for a model."""
    return str(getattr(cls, "__module__", "")).partition(".")[0] in SHARED_ROOTS


class Copier:
    """Copies containers, modules and helper objects, each once; `tensor` says what becomes of tensors.

    What cannot be copied (an open file, a lock, an object of a C library) is shared.
    """

    def __init__(self, tensor: Callable[[Any], Any] | None = None, leaf: type | None = None) -> None:
        self.made: dict[int, Any] = {}
        self.classes: set[type] = set()
        self.functions: list[types.FunctionType] = []
        self.hooks: list[types.FunctionType] = []
        self._tensor = tensor
        self._leaf = leaf
        self._kept: list[Any] = []  # an id is an object's own only while the object lives

    def copied(self, value: Any) -> Any:
        cls = value.__class__
        if cls in _PLAIN:
            return value
        done = self.made.get(id(value))
        if done is not None:
            return done
        if cls is self._leaf or isinstance(value, torch.Tensor):
            return value if self._tensor is None else self._tensor(value)
        try:
            handler = _handlers[cls]
        except KeyError:
            if len(_handlers) > _MOST_CLASSES:  # classes made on the fly are not kept for ever
                _handlers.clear()
                _slot_names.clear()
            handler = _handlers[cls] = _handler(cls)
        return value if handler is None else handler(self, value)

    def note(self, value: Any, made: Any) -> Any:
        self.made[id(value)] = made
        self._kept.append(value)
        return made

    def table(self, table: dict[str, Any]) -> dict[str, Any]:
        """A copy of an object's attributes."""
        return {key: item if item.__class__ in _PLAIN else self.copied(item) for key, item in table.copy().items()}

    def _hook_table(self, table: Any) -> Any:
        """A copy of a table of hooks. They are the user's own: what they note of the shapes they see is to stay."""
        functions, self.functions = self.functions, self.hooks
        made = self.copied(table)
        self.functions = functions
        return made

    def shell(self, module: nn.Module) -> nn.Module:
        """An empty twin of a module, to be filled later; of a script module, which lives in C++, itself."""
        if isinstance(module, torch.jit.ScriptModule):
            return self.note(module, module)  # type: ignore[no-any-return]
        cls = module.__class__
        self.classes.add(cls)
        return self.note(module, object.__new__(cls))  # type: ignore[no-any-return]

    def fill(self, module: nn.Module, twin: nn.Module) -> None:
        """Give a twin the attributes of its module: tables of hooks and tensors of its own, tensors shared."""
        if twin is module:
            return
        attributes = module.__dict__.copy()
        object.__setattr__(twin, "__dict__", attributes)  # past a __setattr__ of the module's own
        # One pass that looks at classes alone: a model has thousands of these attributes, and most are plain.
        for key, value in [item for item in attributes.items() if item[1].__class__ not in _PLAIN]:
            cls = value.__class__
            if cls is _OrderedDict:
                attributes[key] = self._hook_table(value) if value else _OrderedDict()
            elif key in _COPIED:
                attributes[key] = value.copy()
            elif key == "_modules":
                attributes[key] = {name: self.copied(child) for name, child in value.items()} if value else {}
            elif cls is not tuple or not _PLAIN.issuperset(map(_class_of, value)):
                attributes[key] = self.copied(value)
        for name in _slots(twin.__class__):
            _copy_slot(self, module, twin, name)


_OrderedDict = collections.OrderedDict
_class_of = operator.attrgetter("__class__")
_COPIED = frozenset(("_parameters", "_buffers", "_non_persistent_buffers_set"))


def shadow_of(modules: list[nn.Module], tensor: Callable[[Any], Any] | None = None) -> tuple[list[nn.Module], Copier]:
    """Twins of a model's modules, in the same order, that share nothing with them but tensors.

    `tensor` says what becomes of tensors that modules hold beside their tables of parameters and buffers.
    """
    copier = Copier(tensor)
    shells = [copier.shell(module) for module in modules]
    for module, twin in zip(modules, shells, strict=True):
        copier.fill(module, twin)
    return shells, copier


def _handler(cls: type) -> _Handler | None:
    """How objects of a class are copied; None: they are shared."""
    if issubclass(cls, nn.Module):
        return _module
    for base, handler in _BY_BASE:
        if issubclass(cls, base):
            return handler
    if cls in (types.SimpleNamespace, argparse.Namespace):
        return _namespace
    if cls is torch.Generator:
        return _generator
    if issubclass(cls, random.Random) or (cls.__module__.startswith("numpy.random") and cls.__name__ in _RANDOM):
        return _deep
    # A second object with a finalizer would release what the first one holds.
    if is_shared_class(cls) or hasattr(cls, "__del__") or issubclass(cls, (type, BaseException)):
        return None
    if cls.__module__ == "builtins" or not (hasattr(cls, "__dict__") or _slots(cls)):
        return None
    return _object


def _module(copier: Copier, value: nn.Module) -> Any:
    twin = copier.shell(value)
    copier.fill(value, twin)
    return twin


def _new(copier: Copier, value: Any, base: Any) -> Any:
    """An empty object of the value's class, with the attributes that a subclass adds."""
    cls = value.__class__
    made = copier.note(value, base.__new__(cls))
    if cls is not base and not is_shared_class(cls):
        copier.classes.add(cls)
        if getattr(value, "__dict__", None):
            made.__dict__.update(copier.table(value.__dict__))
    return made


def _dict(copier: Copier, value: dict[Any, Any]) -> Any:
    base = next(base for base in (collections.OrderedDict, collections.defaultdict, dict) if isinstance(value, base))
    made = _new(copier, value, base)
    if base is collections.defaultdict:
        made.default_factory = value.default_factory  # type: ignore[attr-defined]
    put = base.__setitem__
    for key, item in list(base.items(value)):
        put(made, copier.copied(key), copier.copied(item))
    return made


def _list(copier: Copier, value: list[Any]) -> Any:
    made = _new(copier, value, list)
    list.extend(made, [copier.copied(item) for item in list(value)])
    return made


def _set(copier: Copier, value: set[Any]) -> Any:
    made = _new(copier, value, set)
    set.update(made, [copier.copied(item) for item in list(value)])
    return made


def _deque(copier: Copier, value: collections.deque[Any]) -> Any:
    made = _new(copier, value, collections.deque)
    collections.deque.__init__(made, [copier.copied(item) for item in list(value)], value.maxlen)
    return made


def _tuple(copier: Copier, value: Any) -> Any:
    for item in value:
        if item.__class__ not in _PLAIN:
            break
    else:
        return value
    items = [copier.copied(item) for item in value]
    if all(map(operator.is_, items, value)):
        return value
    made = tuple.__new__(value.__class__, items)
    if getattr(value, "__dict__", None):
        made.__dict__.update(value.__dict__)
    return copier.note(value, made)


def _frozenset(copier: Copier, value: frozenset[Any]) -> Any:
    items = {copier.copied(item) for item in value}
    return value if items == value else copier.note(value, value.__class__(items))


def _method(copier: Copier, value: types.MethodType) -> Any:
    owner, function = copier.copied(value.__self__), copier.copied(value.__func__)
    if owner is value.__self__ and function is value.__func__:
        return value
    return copier.note(value, types.MethodType(function, owner))


def _partial(copier: Copier, value: functools.partial[Any]) -> Any:
    function, args = copier.copied(value.func), copier.copied(value.args)
    kwargs = {name: copier.copied(item) for name, item in value.keywords.items()}
    if function is value.func and args is value.args and all(kwargs[name] is value.keywords[name] for name in kwargs):
        return value
    return copier.note(value, functools.partial(function, *args, **kwargs))


def _function(copier: Copier, value: types.FunctionType) -> Any:
    """A function that closes over modules of the model closes over their twins; other contents are the user's."""
    copier.functions.append(value)
    cells = value.__closure__
    if not cells:
        return value
    # Noted before its cells are looked at: a function may close over itself.
    copier.note(value, value)
    contents = [_cell_content(copier, cell) for cell in cells]
    if all(new is old for new, old in contents):
        return value
    closure = tuple(
        cell if new is old else types.CellType(new) for cell, (new, old) in zip(cells, contents, strict=True)
    )
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, closure)
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update(value.__dict__)
    return copier.note(value, made)


def _cell_content(copier: Copier, cell: types.CellType) -> tuple[Any, Any]:
    try:
        old = cell.cell_contents
    except ValueError:  # empty
        return None, None
    known = isinstance(old, nn.Module) and id(old) in copier.made
    is_callable = isinstance(old, (types.FunctionType, types.MethodType, functools.partial))
    return (copier.copied(old) if known or is_callable else old), old


def _weak_reference(copier: Copier, value: weakref.ref[Any]) -> Any:
    twin = copier.made.get(id(value()))
    return value if twin is None or value() is None else copier.note(value, weakref.ref(twin))


def _weak_keys(copier: Copier, value: Any) -> Any:
    made = copier.note(value, value.__class__())
    for key, item in list(value.items()):
        made[copier.copied(key)] = copier.copied(item)
    return made


def _namespace(copier: Copier, value: Any) -> Any:
    made = copier.note(value, value.__class__())
    made.__dict__.update(copier.table(value.__dict__))
    return made


def _generator(copier: Copier, value: torch.Generator) -> Any:
    return copier.note(value, value.clone_state())


def _deep(copier: Copier, value: Any) -> Any:
    return copier.note(value, copy.deepcopy(value))


def _object(copier: Copier, value: Any) -> Any:
    cls = value.__class__
    try:
        made = object.__new__(cls)
        attributes = object.__getattribute__(value, "__dict__") if hasattr(cls, "__dict__") else None
    except (TypeError, AttributeError):  # made by a C library, or without attributes
        if not _slots(cls):
            return copier.note(value, value)
        attributes = None
        try:
            made = object.__new__(cls)
        except TypeError:
            return copier.note(value, value)
    copier.classes.add(cls)
    copier.note(value, made)
    if isinstance(attributes, dict):
        made.__dict__.update(copier.table(attributes))
    for name in _slots(cls):
        _copy_slot(copier, value, made, name)
    return made


_slot_names: dict[type, tuple[str, ...]] = {}


def _slots(cls: type) -> tuple[str, ...]:
    """Attributes that the class keeps outside of a dictionary; worked out once per class."""
    known = _slot_names.get(cls)
    if known is not None:
        return known
    found: list[str] = []
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                hidden = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    _slot_names[cls] = known = tuple(found)
    return known


def _copy_slot(copier: Copier, value: Any, made: Any, name: str) -> None:
    try:
        item = object.__getattribute__(value, name)
    except AttributeError:
        return
    object.__setattr__(made, name, copier.copied(item))


_BY_BASE: tuple[tuple[type, _Handler], ...] = (
    (dict, _dict), (list, _list), (set, _set), (collections.deque, _deque), (tuple, _tuple), (frozenset, _frozenset),
    (types.MethodType, _method), (functools.partial, _partial), (types.FunctionType, _function),
    (weakref.ref, _weak_reference), (weakref.WeakKeyDictionary, _weak_keys), (weakref.WeakValueDictionary, _weak_keys),
)  # fmt: skip
