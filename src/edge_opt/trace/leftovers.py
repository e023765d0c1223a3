"""What a forward keeps of a trace: tensors that outlive it are found by their holders, and put away."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from edge_opt._support.state import TensorStates
from edge_opt.errors import TraceFailed
from edge_opt.trace.reach import reach_of
from edge_opt.trace.shadow import Copier
from edge_opt.trace.tape import Tape


class Aftermath:
    """What a trace on twins puts back and puts away when it is over, whether it went well or not.

    Made before the trace runs. `twins` must be the only list that holds them, for holders are counted.
    """

    def __init__(self, twins: list[nn.Module], copier: Copier, tensors: Iterable[torch.Tensor], tape: Tape) -> None:
        self._states = TensorStates(tensors)
        self.reach = reach_of(copier.classes, copier.functions)
        self._outside = self.reach.snapshot()
        self._hooked = reach_of(set(), copier.hooks).snapshot()
        self._twins, self._tape = twins, tape

    def put_back(self) -> None:
        """Restore what forward can reach and the model's tensors, and let the twins go of everything they hold."""
        self._hooked.restore(tensors_only=True)
        self._outside.restore()
        self._states.restore()
        self._tape.stack.end()
        self._tape.end()
        for attributes in [twin.__dict__ for twin in self._twins if not isinstance(twin, torch.jit.ScriptModule)]:
            attributes.clear()

    def put_away(self, has_failed: bool) -> None:
        """Find what still holds a tensor of the trace, and put it away; see `put_away`."""
        survivors = functools.partial(self._tape.lifetimes.survivors, self._tape.is_right)
        put_away(survivors, [] if has_failed else self._twins, self.reach.caches, has_failed)


_LRU = type(functools.lru_cache(lambda: None))
_Survivors = Callable[[], set[int]]


def put_away(survivors: _Survivors, twins: list[nn.Module], caches: list[Any], has_failed: bool) -> None:
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
