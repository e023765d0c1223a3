"""Tensors of a trace that something still holds afterwards: they are released, or the holder is named."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from edge_opt._support.unchanged import slot_names
from edge_opt.errors import TraceFailed

_LRU = type(functools.lru_cache(lambda: None))
_MOST_LEVELS = 12


def release_trace_tensors(survivors: Callable[[], set[int]], has_failed: bool) -> None:
    """Take every tensor of the trace out of what still holds it.

    Entries of dicts, lists and sets go, and a `functools.lru_cache` is emptied: a model fills them again. Attributes,
    globals and closures had a value before that nobody knows, so the profile is refused with their name; so it is where
    the garbage collector does not see the holder, as with a cache in C. After a failure (`has_failed`) everything is
    released as well, but the failure is what is reported.

    Args:
        survivors: Gives the addresses of storages that should be gone. Usually there are none, and nothing is searched.
        has_failed: Whether the trace raised.
    """
    if not survivors():
        return
    gc.unfreeze()  # the collector does not show objects that `gc.freeze` has put aside
    search = _Search()
    # Cycles among objects of the forward's own look like holders until they are collected.
    for generation in (1, 2):
        gc.collect(generation)
        if not survivors():
            return
    search.release_all(survivors())
    if survivors():
        gc.collect()
    places = search.places + _empty_hidden(survivors())
    if places and not has_failed:
        raise TraceFailed(
            f"the model keeps a result in {places[0]}, where the trace cannot tell what was there before; it was taken "
            "out again. Keep it on the module (self.name = ...) or in a dict to profile the model"
        )


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of a failed forward: they are not caches."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _tensors_at(addresses: set[int]) -> list[torch.Tensor]:
    """Return the tensors with their values in these storages."""
    tensors = []
    for value in gc.get_objects():
        if torch.Tensor in type(value).__mro__:  # isinstance would ask proxies what they stand for
            try:
                if value.untyped_storage()._cdata in addresses:
                    tensors.append(value)
            except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
                continue
    return tensors


def _empty_hidden(addresses: set[int]) -> list[str]:
    """Turn tensors whose holders cannot be found into tensors without elements, so that no one computes with them."""
    tensors = _tensors_at(addresses) if addresses else []
    for tensor in tensors:
        with suppress(RuntimeError, AttributeError):  # something else depends on its identity, as a weak reference does
            torch.utils.swap_tensors(tensor, torch.empty(0))  # type: ignore[no-untyped-call]
    return ["an object that Python's garbage collector does not see"] if tensors else []


class _Search:
    """Follows holders upwards, from objects that forward made to the first one that was there before.

    Made before the collector runs: while it is paused, what forward made is in the two younger generations.
    """

    def __init__(self) -> None:
        self.places: list[str] = []  # where the value before is not known
        self._young = {id(value) for generation in (0, 1) for value in gc.get_objects(generation)}
        # What is in neither set was made by this search.
        self._old = {id(value) for value in gc.get_objects(2)}
        self._seen: set[int] = set()

    def release_all(self, addresses: set[int]) -> None:
        """Release the tensors with their values in these storages."""
        for tensor in _tensors_at(addresses):
            self.release(tensor)

    def release(self, value: Any, level: int = 0) -> None:
        """Cut a value off from everything that was there before the trace."""
        self._seen.add(id(value))
        for holder in self._holders(value):
            if isinstance(holder, _LRU):
                holder.cache_clear()
            elif isinstance(holder, dict):
                self._release_from_dict(value, holder, level)
            elif id(holder) in self._old:
                self._cut(value, holder)
            elif level < _MOST_LEVELS:
                self.release(holder, level + 1)

    def _holders(self, value: Any) -> list[Any]:
        """Return what refers to a value: no frames, which end, and nothing that this search made."""
        return [
            holder
            for holder in gc.get_referrers(value)
            if (id(holder) in self._young or id(holder) in self._old)
            and id(holder) not in self._seen
            and not isinstance(holder, types.FrameType)
        ]

    def _release_from_dict(self, value: Any, table: dict[Any, Any], level: int) -> None:
        """Release a value from a dict, or the dict from what holds it."""
        holders = self._holders(table)
        owner = _owner_of(table, holders)
        # A cache without a limit keeps its results in a dict, and has no other reference to them.
        above = [holder for each in holders if isinstance(each, dict) for holder in gc.get_referrers(each)]
        caches = [holder for holder in (*holders, *above) if isinstance(holder, _LRU)]
        # Python tracks a dict from its first entry on, so an old one that was empty looks young. It is cut off as a
        # whole only where it is an item of a list or of a new tuple: other dicts may be the interpreter's own, such as
        # that of a thread's local variables.
        is_item = all(isinstance(holder, list) or id(holder) in self._young for holder in holders) and not any(
            isinstance(holder, dict) for holder in holders
        )
        for cache in caches:
            cache.cache_clear()
        if owner is not None and id(owner) in self._young and level < _MOST_LEVELS:
            self.release(owner, level + 1)
        elif owner is not None:
            self.places += [f"{_name_of(owner)}.{name}" for name in _reset_attributes(owner, table, value)]
        elif not caches and id(table) in self._young and is_item and level < _MOST_LEVELS:
            self.release(table, level + 1)
        elif not caches:
            for key in [key for key, item in dict.items(table) if item is value or key is value]:
                type(table).__delitem__(table, key)

    def _cut(self, value: Any, holder: Any) -> None:
        """Take a value out of an object that was there before the trace."""
        if isinstance(holder, (list, collections.deque)):
            for index in reversed([index for index, item in enumerate(holder) if item is value]):
                del holder[index]
        elif isinstance(holder, set):
            holder.discard(value)
        elif isinstance(holder, types.CellType):
            holder.cell_contents = None
            self.places.append("a variable of an enclosing function")
        else:
            names = [name for name in slot_names(holder.__class__) if getattr(holder, name, None) is value]
            for name in names:
                object.__setattr__(holder, name, None)
            attributes = getattr(holder, "__dict__", None)
            names += _reset_attributes(holder, attributes, value) if isinstance(attributes, dict) else []
            self.places += [f"{_name_of(holder)}.{name}" for name in names] or [f"a {type(holder).__name__}"]


def _owner_of(table: dict[Any, Any], holders: list[Any]) -> Any:
    """Return the object, class or module whose attributes a dict has; None for a dict of its own."""
    if "__name__" in table and "__spec__" in table:
        return sys.modules.get(str(dict.get(table, "__name__")), table)
    for holder in holders:
        if isinstance(holder, type):
            return holder
        if not isinstance(holder, (dict, list, tuple)) and _dict_of(holder) is table:
            return holder
    return None


def _dict_of(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _reset_attributes(owner: Any, table: Any, value: Any) -> list[str]:
    """Empty the attributes with this value, and return their names.

    Those of modules and classes become None, because they exist before forward runs ("if MASK is None"); those of
    objects and functions go, because forward may have added them ("if not hasattr(...)").
    """
    names = [name for name, item in list(table.items()) if item is value]
    for name in names:
        if isinstance(owner, type):
            type.__setattr__(owner, name, None)
        elif isinstance(owner, (types.ModuleType, dict)):
            table[name] = None
        else:
            del table[name]
    return names


def _name_of(owner: Any) -> str:
    if isinstance(owner, dict):
        return str(owner.get("__name__"))
    if isinstance(owner, (type, types.FunctionType, types.ModuleType)):
        return str(owner.__name__)
    return type(owner).__name__
