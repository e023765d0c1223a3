"""What a forward can reach and what it leaves behind: places are put back, tensors of the trace put away.

Places beside the model are globals, closures, defaults and class attributes, by the names that the code uses. Tensors
that outlive the trace are found by their holders.
"""

from __future__ import annotations

import collections
import dis
import functools
import gc
import sys
import traceback
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from edge_opt._support.unchanged import Snapshot, TensorStates
from edge_opt.errors import TraceFailed
from edge_opt.trace.shadow import SHARED_ROOTS, Copier, is_shared_class
from edge_opt.trace.tape import Tape

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


class TraceCleanup:
    """What a trace on twins puts back and puts away when it is over, whether it went well or not.

    Made before the trace runs. `twins` must be the only list that holds them, for holders are counted.
    """

    def __init__(self, twins: list[nn.Module], copier: Copier, tensors: Iterable[torch.Tensor], tape: Tape) -> None:
        self._states = TensorStates(tensors)
        self.reach = reach_of(copier.classes, copier.functions)
        self._outside = self.reach.snapshot()
        self._hooked = reach_of(set(), copier.hooks).snapshot()
        self._twins, self._tape = twins, tape

    def restore(self) -> None:
        """Restore what forward can reach and the model's tensors, and let the twins go of everything they hold."""
        self._hooked.restore(tensors_only=True)
        self._outside.restore()
        self._states.restore()
        self._tape.stack.end()
        self._tape.end()
        for attributes in [twin.__dict__ for twin in self._twins if not isinstance(twin, torch.jit.ScriptModule)]:
            attributes.clear()

    def release_trace_tensors(self, has_failed: bool) -> None:
        """Find what still holds a tensor of the trace, and put it away; see `release_trace_tensors`."""
        survivors = functools.partial(self._tape.lifetimes.survivors, self._tape.is_right)
        release_trace_tensors(survivors, [] if has_failed else self._twins, self.reach.caches, has_failed)


_Survivors = Callable[[], set[int]]


def release_trace_tensors(survivors: _Survivors, twins: list[nn.Module], caches: list[Any], has_failed: bool) -> None:
    """Empty the caches that still hold a tensor, or a module, of the trace; refuse what cannot be put back.

    `survivors` gives the addresses of storages that should be gone. Usually there are none, and nothing is searched.
    `caches` of functools are those that the model's code names: they are tried first. After a failure (`has_failed`)
    things are put away, but the failure is what is told.
    """
    if not survivors() and not _is_held(twins):
        return
    for cache in caches:
        cache.cache_clear()
    if not survivors() and not _is_held(twins):
        return
    # Cycles among objects of the forward's own look like holders until they are collected.
    for generation in (1, 2):
        gc.collect(generation)
        if not survivors() and not _is_held(twins):
            return
    held: list[Any] = [*_tensors_at(survivors()), *(twin for twin in twins if sys.getrefcount(twin) > _OWN_REFERENCES)]
    _empty_caches(held)
    held.clear()
    if not survivors():
        return
    places = [place for tensor in _tensors_at(survivors()) for place in _removed(tensor)]
    if places and not has_failed:
        raise TraceFailed(
            f"the model keeps a result in {places[0]}, where the trace cannot tell what was there before; it was taken "
            "out again. Keep it on the module (self.name = ...) or in a dict to profile the model"
        )


# A twin is held by the list of twins, by the loop's variable and by the call that counts.
_OWN_REFERENCES = 3


def _is_held(twins: list[nn.Module]) -> bool:
    return any(sys.getrefcount(twin) > _OWN_REFERENCES for twin in twins)


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of a failed forward: they are no caches."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _tensors_at(addresses: set[int]) -> list[torch.Tensor]:
    """Tensors with their values in these storages."""
    found = []
    for value in gc.get_objects():
        if torch.Tensor in type(value).__mro__:  # isinstance would ask proxies what they stand for
            try:
                if value.untyped_storage()._cdata in addresses:
                    found.append(value)
            except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
                continue
    return found


def _holders(value: Any, ignored: set[int]) -> list[Any]:
    """Objects that refer to a value: no frames, which end, and none of our own lists."""
    return [
        holder
        for holder in gc.get_referrers(value)
        if not isinstance(holder, types.FrameType) and id(holder) not in ignored
    ]


def _empty_caches(held: list[Any]) -> None:
    """Clear every `functools.lru_cache` that leads to one of these; what it held is computed again when asked for."""
    ignored = {id(held), id(sys._getframe())}
    seen: set[int] = set()
    level = list(held)
    ignored.add(id(level))
    for _ in range(6):
        above: list[Any] = []
        ignored.add(id(above))
        for value in level:
            holders = _holders(value, ignored)
            ignored.add(id(holders))
            for holder in holders:
                if isinstance(holder, _LRU):
                    holder.cache_clear()
                elif id(holder) not in seen and not _is_root(holder):
                    seen.add(id(holder))
                    above.append(holder)
        if len(above) > 500:
            return
        level = above


def _is_root(value: Any) -> bool:
    """Whether everything is reachable from here, so that there is no point in looking further up."""
    is_globals = isinstance(value, dict) and "__name__" in value and "__spec__" in value
    return is_globals or isinstance(value, (types.ModuleType, type, types.FunctionType))


def _removed(tensor: torch.Tensor) -> Iterator[str]:
    """Take a tensor out of whatever holds it; the places where something else may have been before."""
    for holder in _holders(tensor, set()):
        if isinstance(holder, dict):
            owner = _owner(holder)
            for key in _keys_of(id(tensor), holder.items()):
                del holder[key]
                if owner:
                    yield f"{owner}.{key}"
        elif isinstance(holder, (list, collections.deque)):
            for index in [] if _is_ours(holder) else reversed(_keys_of(id(tensor), enumerate(holder))):
                del holder[index]
        elif isinstance(holder, set):
            holder.discard(tensor)
        elif isinstance(holder, types.CellType):
            del holder.cell_contents
            yield "a variable of an enclosing function"
        elif isinstance(holder, (tuple, frozenset)):
            if _holders(holder, set()):  # else it is the arguments of a call
                yield f"a {type(holder).__name__}"
        else:
            for name in _keys_of(id(tensor), (getattr(holder, "__dict__", None) or {}).items()):
                object.__delattr__(holder, name)
                yield f"{type(holder).__name__}.{name}"


def _keys_of(address: int, items: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Keys of a value. By address: a comprehension that names the value would itself be one of its holders."""
    return [key for key, value in items if id(value) == address]


def _is_ours(holder: Any) -> bool:
    """Whether a list is a local variable of this file."""
    frames = [frame for frame in gc.get_referrers(holder) if isinstance(frame, types.FrameType)]
    return any(frame.f_globals.get("__name__") == __name__ for frame in frames)


def _owner(table: dict[Any, Any]) -> str | None:
    """Whose attributes a dict is: an object's class, or a module of Python; None for a dict of its own."""
    if _is_root(table):
        return str(table["__name__"])
    for holder in gc.get_referrers(table):
        if getattr(holder, "__dict__", None) is table:
            return type(holder).__name__
    return None
