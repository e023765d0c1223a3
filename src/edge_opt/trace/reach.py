"""What a forward can reach beside its model: globals, closures, defaults and class attributes, by the names it uses."""

from __future__ import annotations

import dis
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

from edge_opt._support.state import Snapshot
from edge_opt.trace.shadow import SHARED_ROOTS, is_shared_class

_LRU = type(functools.lru_cache(lambda: None))
_Function = types.FunctionType
_CONTAINERS = (dict, list, set, deque)


class Reach:
    """Places outside a model that its code can write to, and the bindings by which they were found."""

    __slots__ = ("attributes", "bindings", "caches", "cells", "classes", "names", "objects", "slots")

    def __init__(self) -> None:
        self.slots: list[tuple[dict[str, Any], str]] = []
        self.cells: list[types.CellType] = []
        self.classes: list[type] = []
        self.attributes: list[tuple[type, str]] = []
        self.caches: list[Any] = []  # of functools.lru_cache
        self.names: set[str] = set()  # that the code uses
        self.objects: list[Any] = []
        self.bindings: list[tuple[dict[str, Any], str, Any]] = []

    def is_current(self) -> bool:
        """Whether every name still means the function it meant: a notebook's cell may have been run again."""
        return all(table.get(name) is value for table, name, value in self.bindings)

    def snapshot(self) -> Snapshot:
        """What these places hold now."""
        taken = Snapshot(is_shared_class, most=20_000)
        for table, name in self.slots:
            taken.add_name(table, name)
        for cell in self.cells:
            taken.add_cell(cell)
        for cls in self.classes:
            taken.add_class(cls)
        for cls, name in self.attributes:
            taken.add(vars(cls).get(name))
        for value in self.objects:
            taken.add(value)
        return taken


_known: OrderedDict[frozenset[type], Reach] = OrderedDict()
_MOST_KNOWN = 64


def reach_of(classes: set[type], functions: list[_Function]) -> Reach:
    """What the forwards of these classes, and these functions, can reach; worked out once per set of classes."""
    own = frozenset(cls for cls in classes if not is_shared_class(cls))
    if not own and not functions:
        return Reach()
    if functions:
        return _Walk(own, functions).found
    found = _known.get(own)
    if found is None or not found.is_current():
        found = _known[own] = _Walk(own, []).found
        if len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return found


# What a function does when it changes something that it did not make itself: an instruction, or a method by its name.
_STORES = frozenset(
    code for name, code in dis.opmap.items() if name in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_ATTR", "DELETE_ATTR")
)
_GLOBAL_STORES = frozenset(code for name, code in dis.opmap.items() if name in ("STORE_GLOBAL", "DELETE_GLOBAL"))
_ATTRIBUTE_STORES = frozenset(code for name, code in dis.opmap.items() if name in ("STORE_ATTR", "DELETE_ATTR"))
_ASSIGNMENTS = _GLOBAL_STORES | _ATTRIBUTE_STORES
_MUTATORS = frozenset(
    "append add extend insert update setdefault pop popitem remove discard clear appendleft extendleft popleft rotate "
    "move_to_end setattr delattr __setitem__ __setattr__ set put push register store save".split()
)


class _Walk:
    """Follows names from function to function. A method counts as called when any function reached uses its name.

    A global is worth remembering if a function assigns it, or if it can be changed and a function that uses it, or a
    method of its own, changes things.
    """

    def __init__(self, classes: frozenset[type], functions: list[_Function]) -> None:
        self.found = Reach()
        self._names: set[str] = {"forward"}
        self._stored: set[tuple[int, str]] = set()
        self._candidates: dict[tuple[int, str], tuple[dict[str, Any], bool]] = {}
        self._classes: list[type] = []
        self._owners: dict[int, type] = {}
        self._changing: set[type] = set()
        self._changing_names: set[str] = set()
        self._assigned: set[type] = set()
        self._waiting: dict[str, list[tuple[dict[str, Any], Any, bool]]] = {}
        self._seen: set[int] = set()
        self._pending: list[_Function] = list(functions)
        for cls in classes:
            self._add_class(cls)
        while self._pending:
            self._follow(self._pending.pop())
        self._sort_out()
        self.found.names = self._names

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) in self._seen or is_shared_class(base):
                continue
            self._seen.add(id(base))
            self._classes.append(base)
            for name, value in list(vars(base).items()):
                self._note_cache(value)
                for function in _functions_in(value):
                    self._owners.setdefault(id(function), base)
                    self._offer(name, function)

    def _note_cache(self, value: Any) -> None:
        value = getattr(value, "__func__", value)
        if isinstance(value, _LRU):
            self.found.caches.append(value)

    def _offer(self, name: str, function: _Function) -> None:
        """A method, followed once its name is used; special methods are called without their names."""
        if name in self._names or (name.startswith("__") and name.endswith("__")):
            self._pending.append(function)
        else:
            self._waiting.setdefault(name, []).append(({}, function, False))

    def _add_module(self, module: types.ModuleType) -> None:
        if id(module) in self._seen or module.__name__.partition(".")[0] in SHARED_ROOTS:
            return
        self._seen.add(id(module))
        table = module.__dict__
        for name in list(table):
            if name in self._names:
                self._classify(table, name)
            else:
                self._waiting.setdefault(name, []).append((table, None, True))

    def _use(self, name: str) -> None:
        if name in self._names:
            return
        self._names.add(name)
        for table, function, is_global in self._waiting.pop(name, ()):
            if is_global:
                self._classify(table, name)
            else:
                self._pending.append(function)

    def _follow(self, function: _Function) -> None:
        root = (function.__module__ or "").partition(".")[0]
        if id(function) in self._seen or root in SHARED_ROOTS:
            return
        self._seen.add(id(function))
        table = function.__globals__
        names, stored, changes, targets = _uses(function.__code__)
        self._stored.update((id(table), name) for name in stored)
        owner = self._owners.get(id(function))
        if changes:
            self._changing_names |= names
            self._changing.update((owner,) if owner else ())
            self._note_assigned_classes(function, owner, targets)
        for name in (*names, *stored):
            self._use(name)
            if name in table:
                self._classify(table, name, changes)
            elif name in stored:
                self._candidates[id(table), name] = (table, True)
        for cell in function.__closure__ or ():
            self._add_cell(cell)
        if changes:
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            self.found.objects += [value for value in defaults if isinstance(value, _CONTAINERS)]
        if function.__dict__.keys() - {"__wrapped__"}:
            self.found.objects.append(function.__dict__)
        for inner in _functions_in(getattr(function, "__wrapped__", None)):
            self._pending.append(inner)

    def _note_assigned_classes(self, function: _Function, owner: type | None, targets: set[str]) -> None:
        """Classes whose attributes this function may assign: its own by `cls` or `type(self)`, others by name."""
        if owner and targets:
            self._assigned.update(owner.__mro__)
        named = [function.__globals__.get(name) for name in targets]
        self._assigned.update(value for value in named if isinstance(value, type))
        self.found.objects += [value.__dict__ for value in named if isinstance(value, _Function)]

    def _add_cell(self, cell: types.CellType) -> None:
        if id(cell) in self._seen:
            return
        self._seen.add(id(cell))
        try:
            value = cell.cell_contents
        except ValueError:  # nothing assigned yet
            value = None
        self._note_cache(value)
        functions = list(_functions_in(value))
        self._pending += functions
        if isinstance(value, type):
            self._add_class(value)
        elif not functions:
            self.found.cells.append(cell)

    def _classify(self, table: dict[str, Any], name: str, changes: bool = True) -> None:
        key = (id(table), name)
        value = table[name]
        if key in self._candidates:
            self._candidates[key] = (table, changes or self._candidates[key][1])
            return
        if hash(key) in self._seen:
            return
        if isinstance(value, types.ModuleType):
            self._seen.add(hash(key))
            self._add_module(value)
            return
        self._note_cache(value)
        functions = list(_functions_in(value))
        if isinstance(value, type) or functions:
            self._seen.add(hash(key))
            if isinstance(value, type):
                self._add_class(value)
            self._pending += functions
            self.found.bindings.append((table, name, value))
        elif not isinstance(value, types.BuiltinFunctionType):
            self._candidates[key] = (table, changes)
            if not is_shared_class(type(value)):
                self._add_class(type(value))

    def _sort_out(self) -> None:
        """Keep what can be changed by the code that was reached."""
        for (address, name), (table, changes) in self._candidates.items():
            value = table.get(name)
            can_change = isinstance(value, _CONTAINERS) or not is_shared_class(type(value))
            is_changed = changes or not self._changing.isdisjoint(type(value).__mro__)
            if (address, name) in self._stored or (can_change and is_changed):
                self.found.slots.append((table, name))
        for cls in self._classes:
            for name, value in vars(cls).items():
                if name in self._changing_names and (
                    isinstance(value, _CONTAINERS) or not is_shared_class(type(value))
                ):
                    self.found.attributes.append((cls, name))
        self.found.classes += [cls for cls in self._classes if cls in self._assigned]


def _uses(code: types.CodeType) -> tuple[set[str], set[str], bool, set[str]]:
    """Names that a function uses, globals that it assigns, whether it changes anything it did not make, and the names
    (or "cls", for a way that is not a name) whose attributes it assigns."""
    names, stored, targets = set(code.co_names), set[str](), set[str]()
    operations = set(code.co_code[::2])
    changes = not _STORES.isdisjoint(operations) or not _MUTATORS.isdisjoint(names)
    if not _ASSIGNMENTS.isdisjoint(operations):
        before: dis.Instruction | None = None
        for one in dis.get_instructions(code):
            if one.opcode in _GLOBAL_STORES:
                stored.add(one.argval)
            elif one.opcode in _ATTRIBUTE_STORES and before is not None:
                targets |= _assigned_objects(before, names)
            before = one if one.opname != "CACHE" else before
    if not names.isdisjoint(("setattr", "delattr")):
        targets |= {"cls", *names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _uses(constant)
            names, stored, changes = names | inner[0], stored | inner[1], changes or inner[2]
            targets |= inner[3]
    return names, stored, changes, targets


def _assigned_objects(before: dis.Instruction, names: set[str]) -> set[str]:
    """Whose attribute an instruction assigns, by what was loaded last: a global's name, or "cls" for a class."""
    if before.opname.startswith("LOAD_FAST"):
        return {"cls"} if before.argval == "cls" else set()
    if before.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return {str(before.argval)}
    if before.opname == "LOAD_ATTR":
        return {"cls"} if before.argval == "__class__" else set()
    return {"cls", *names}


def _functions_in(value: Any) -> Iterator[_Function]:
    """The Python functions behind a method, a property, a partial or a cache."""
    if isinstance(value, _Function):
        yield value
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions_in(part)
    elif isinstance(value, (functools.cached_property, functools.partial, functools.partialmethod)):
        yield from _functions_in(value.func)
    elif isinstance(value, _LRU):
        yield from _functions_in(value.__wrapped__)
