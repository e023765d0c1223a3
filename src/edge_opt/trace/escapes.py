"""Find what a trace misses: work outside operators, and tensors that something holds afterwards.

Work in NumPy, in Python numbers, in another thread or in a C library shows where its result comes back: as a tensor
that is neither an input, nor a weight, nor a constant from before the trace, nor the output of a recorded operator. It
is recorded as an operator without a cost rule under the module that met it, so that the totals are a lower bound and
name the module.

A tensor of the trace that a cache or a global still holds afterwards is released, or its holder is named.
"""

from __future__ import annotations

import _thread
import collections
import functools
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from edge_opt._support.unchanged import slot_names
from edge_opt.errors import TraceFailed
from edge_opt.trace.inputs import flat_leaves
from edge_opt.trace.lifetimes import empty_meta_like
from edge_opt.trace.module_calls import Frame, ModuleStack
from edge_opt.trace.probes import FEW_VALUES as _FEW_VALUES
from edge_opt.trace.probes import Probe, is_computed

# One number with a fraction that a module reads is compared with something; several are computed with.
_FEW_FLOATS = 1
# A tensor that Python code makes from a list of numbers is not larger, or rarely so.
_MOST_NUMBERS = 1024
# CPU time of other threads that is not a thread waking up to look at a clock.
_BUSY_S = 50e-6
_forks: list[None] = []  # one entry for each fork of this process
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=functools.partial(_forks.append, None))


_Tensor = torch.Tensor
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class NeedsData(BaseException):
    """The model needs a value, which a meta tensor does not have. Not an Exception: models must not swallow it."""

    def __init__(self, what: str, why: str = "the model looks at values") -> None:
        super().__init__(f"{why} ({what})")


class OutsideWork:
    """What a trace knows about values that left the tape, and about tensors that came from elsewhere."""

    def __init__(
        self, stack: ModuleStack, is_real: bool, own: list[torch.Tensor], is_constant: Callable[[torch.Tensor], bool]
    ) -> None:
        self.is_constant = is_constant
        self.probe = Probe()
        self.arrays: list[Any] | None = None  # of NumPy, that were there before; None: not to be judged
        self.origins: list[tuple[Frame | None, str]] = []  # the module that met a result, and where it was computed
        self.thread = get_ident()
        # Whether another thread could change a tensor in place. Only then are versions looked at: that takes time.
        self.has_threads = False
        self._counts_versions = True
        self._own, self._own_version = own, 0
        self._stack = stack
        self._is_real = is_real
        self._values_read = 0
        self._floats_read: collections.Counter[Frame | None] = collections.Counter()
        self._unknown: list[tuple[torch.Tensor, Frame | None]] = []
        self._python_made: Any = WeakTensorKeyDictionary()
        self._lent: list[tuple[torch.Tensor, torch.Tensor, Frame | None]] = []  # constants, and what NumPy got of them
        self._forks = len(_forks)
        self._others_s = _seconds_of_other_threads()
        _watch_the_process()
        _running.append(self)
        self._replaced: list[tuple[Any, str, Any]] = []
        self._had_sessions = bool(_sessions())
        for module, name, origin in (*_STARTERS, *_sessions()):
            if (function := getattr(module, name, None)) is not None:
                self._replaced.append((module, name, function))
                setattr(module, name, _noticed(function, functools.partial(_meet_start, origin)))
        for name in ("as_tensor", "asarray"):
            self._replaced.append((torch, name, getattr(torch, name)))
            setattr(torch, name, self._remembered(getattr(torch, name)))
        stack.in_other_thread = None if is_real else self.in_other_thread

    @property
    def is_in_forward(self) -> bool:
        return self._stack.current is not None

    def read_values(self, count: int, floats: int = 0, origin: str = "python") -> None:
        """Note that Python code has seen values that depend on an input.

        Integers and Booleans decide what to do next. Numbers with a fraction are computed with, unless they are few.
        """
        self._values_read += count
        self._floats_read[self._stack.current] += floats
        if self._floats_read[self._stack.current] > _FEW_FLOATS:
            self.add(origin)

    def meet_values(self, values: torch.Tensor, origin: str) -> None:
        """Note that NumPy, Python or C has seen values that depend on an input; `origin` is "" for a pickle."""
        count = values.numel()
        has_floats = origin and (values.is_floating_point() or values.is_complex())
        self.read_values(count + _FEW_VALUES, count if has_floats else 0, origin)

    def pass_on(self, values: torch.Tensor, is_constant: bool, origin: str) -> torch.Tensor:
        """Return the values that NumPy or Python code gets to see: changed a little where this trace is a probe.

        NumPy gets a copy of constants: it shares memory, and the weights of the model must not change.
        """
        if not is_constant:
            self.meet_values(values, origin)
        seen = self.probe.pass_on(values, self._stack.current, is_constant, origin)
        if is_constant and origin == "numpy" and seen is values:
            seen = values.clone()
            self._lent.append((values, seen, self._stack.current))
        return seen

    def expect_no_versions(self) -> None:
        """Say that operators of the trace do not count changes, so that one that is counted was made elsewhere."""
        self._counts_versions = False
        if len(sys._current_frames()) > 1:
            self.watch_threads()

    def watch_threads(self) -> None:
        """Look at the versions of tensors from now on, where they tell something."""
        if not self.has_threads and not self._counts_versions:
            self.has_threads, self._own_version = True, sum(map(_version, self._own))

    @contextmanager
    def in_other_thread(self) -> Iterator[None]:
        """Run a module of the model in another thread, where no operator is on the tape."""
        self.add("another thread")
        with torch.no_grad(), _OnMeta():  # type: ignore[no-untyped-call]
            yield

    def check_version(self, tensor: torch.Tensor) -> None:
        """Note a tensor of the trace that was changed elsewhere.

        A trace skips the layer of the dispatcher that counts the changes of a tensor, and other threads do not.
        """
        if _version(tensor):
            self.add("another thread")

    def meet_python_tensor(self, tensor: torch.Tensor) -> None:
        """Note a tensor that `torch.tensor`, `torch.from_numpy` or a relative of theirs just made."""
        # A single number may be a constant or a size.
        if (self._has_left() and tensor.numel() > 1) or is_computed(tensor, self.arrays):
            self.add("python" if tensor.untyped_storage().resizable() else "numpy")

    def _remembered(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Remember the tensors that a function makes of Python numbers: on the meta device no operator shows them."""

        @functools.wraps(make)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            data = (*args, *kwargs.values())[0]
            if self.thread == get_ident() and isinstance(data, (int, float, complex, list, tuple)):
                self._python_made[tensor] = True
            return tensor

        return call

    def meet_unknown(self, tensor: torch.Tensor) -> None:
        """Note an operand that the tape has not seen before, and find out where it came from: now, or in `conclude`."""
        if tensor in self._python_made:
            self.meet_python_tensor(tensor)
            return
        self._unknown.append((tensor, self._stack.current))
        if gc.isenabled():
            self._judge()  # where the collector runs, what is young now is old later

    def add(self, origin: str) -> None:
        """Note that a result was computed somewhere else, once per module call."""
        self._add(self._stack.current, origin)

    def _add(self, frame: Frame | None, origin: str) -> None:
        if (frame, origin) not in self.origins:
            self.origins.append((frame, origin))

    def _has_left(self) -> bool:
        return self._values_read > _FEW_VALUES or len(_forks) != self._forks

    def conclude(self, result: Any, is_known: Callable[[torch.Tensor], bool]) -> None:
        """Judge the unknown operands and what forward returned.

        `is_known` tells whether a tensor's storage was recorded.
        """
        root = self._stack.frames[0] if self._stack.frames else None
        leaves = flat_leaves(result)
        self._unknown += [(leaf, root) for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_known(leaf)]
        if any(map(_computes_later, leaves)):
            self._add(root, "a function that forward returns")
        if not self._had_sessions and _sessions():
            self._add(root, "ONNX Runtime")  # imported by forward itself, so that its calls were not seen
        numbers = (float, complex, numpy.ndarray, numpy.floating)
        if self._has_left() and any(isinstance(leaf, numbers) for leaf in leaves):
            self._add(root, "python")
        if len(_forks) != self._forks:
            self._add(root, "another process")
        for constant, lent, frame in self._lent:
            if not torch.equal(_bits(constant), _bits(lent)):
                self._add(frame, "numpy")
        if self.probe.is_watching:
            returned = [leaf for leaf in leaves if isinstance(leaf, (*numbers, int)) and not isinstance(leaf, bool)]
            self.probe.note(("result", len(leaves)), returned, root)
        if self.has_threads:
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and is_known(leaf):
                    self.check_version(leaf)
            if sum(map(_version, self._own)) != self._own_version:
                self._add(root, "another thread")
        self._judge()

    def _judge(self) -> None:
        for tensor, frame in self._made_elsewhere():
            self._add(frame, "numpy" if not tensor.untyped_storage().resizable() else "another thread or C")
        self._unknown.clear()

    def _made_elsewhere(self) -> Iterable[tuple[torch.Tensor, Frame | None]]:
        """Return the unknown tensors that are younger than the trace and no views of older ones."""
        if not self._unknown:
            return []
        young = _young_ids()
        candidates = [(tensor, frame) for tensor, frame in self._unknown if id(tensor) in young]
        is_busy = _seconds_of_other_threads() - self._others_s > _BUSY_S or self._has_left()
        if not self._is_real and not is_busy:
            # On the meta device `torch.as_tensor([1, 2], device=x.device)` makes a tensor that no mode sees. It looks
            # like the result of another thread, so there has to be more to it: a thread that worked, a size that nobody
            # writes down in Python, or numbers with a fraction in more than one dimension.
            candidates = [pair for pair in candidates if _is_much(pair[0]) or is_computed(pair[0], self.arrays)]
        if not candidates:
            return []
        storages = set(map(_address, _tensors_among(gc.get_objects(2))))
        return [(tensor, frame) for tensor, frame in candidates if _address(tensor) not in storages]

    def end(self) -> None:
        """Let go of every tensor and module."""
        self._unknown.clear()
        self._lent.clear()
        self._own.clear()
        self.origins.clear()
        if self in _running:
            _running.remove(self)
            for module, name, function in self._replaced:
                setattr(module, name, function)


class _OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes shapes only, also with the model's real parameters, and records nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, _on_meta, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else empty_meta_like(tensor)


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: unlike its numbers, they are equal to themselves also where they are NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _is_much(tensor: torch.Tensor) -> bool:
    return tensor.numel() > _MOST_NUMBERS or (tensor.dim() > 1 and tensor.is_floating_point())


def _young_ids() -> set[int]:
    """Return the ids of objects in the two younger generations of the garbage collector.

    Where it ran once before the trace and does not run during it, these are the objects that the trace made.
    """
    return {id(value) for generation in (0, 1) for value in gc.get_objects(generation)}


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse
        return None


def _seconds_of_other_threads() -> float:
    """Return the CPU time of all other threads of the process, ended ones included."""
    return time.process_time() - time.thread_time()


_running: list[OutsideWork] = []


@functools.cache
def _watch_the_process() -> None:
    """Notice, from the first trace on, what no mode sees: loops in Python, addresses, and modes that are put aside.

    Torch's methods are replaced once for the process. To replace them for each trace would use up the versions of a
    class that Python 3.13 caches look-ups by.
    """
    for name in ("apply_", "map_", "map2_"):  # on meta they do nothing
        setattr(torch.Tensor, name, _noticed(getattr(torch.Tensor, name), lambda _: _running[-1].add("python")))
    torch.Tensor.data_ptr = _noticed(torch.Tensor.data_ptr, _need_memory)  # type: ignore[method-assign]
    for name, origin in (("__dlpack__", "numpy"), ("__reduce_ex__", "")):
        setattr(torch.Tensor, name, _noticed(getattr(torch.Tensor, name), functools.partial(_meet_values, origin)))
    # `_disable_current_modes` asks it how many there are. Code may have imported that function before.
    modes: Any = torch.utils._python_dispatch
    modes._len_torch_dispatch_stack = _noticed(modes._len_torch_dispatch_stack, _meet_disabled_modes)


def _noticed(function: Any, notice: Callable[[tuple[Any, ...]], None]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _running and _running[-1].thread == get_ident():
            notice(args)
        return function(*args, **kwargs)

    return call


def _need_memory(args: tuple[Any, ...]) -> None:
    """Trace with real tensors where forward passes the address of one to C, which would crash at address 0."""
    if args[0].is_meta and _running[-1].is_in_forward:
        raise NeedsData("data_ptr")
    _meet_values("C", args)


def _meet_values(origin: str, args: tuple[Any, ...]) -> None:
    outside = _running[-1]
    if outside.is_in_forward and not args[0].is_meta and not outside.is_constant(args[0]):
        outside.meet_values(args[0], origin)


def _meet_disabled_modes(_: tuple[Any, ...]) -> None:
    callers = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(2))][:3]
    if callers[0].co_name == "_disable_current_modes" and not callers[2].co_filename.startswith(_LIBRARIES):
        _running[-1].add("operators without dispatch modes")


# Torch, and this package, which reads constants of files so.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# Functions that start something, with what that is. They are replaced during a trace: an audit hook would see every
# call as well, and slow down every `id()` of the process by a third.
_STARTERS: tuple[tuple[Any, str, str], ...] = (
    (_thread, "start_new_thread", "thread"), (threading, "_start_new_thread", "thread"),
    (threading, "_start_joinable_thread", "thread"), (subprocess, "_fork_exec", "another process"),
    (sys.modules.get("_posixsubprocess"), "fork_exec", "another process"), (os, "system", "another process"),
    (os, "posix_spawn", "another process"), (os, "posix_spawnp", "another process"),
    (socket, "create_connection", "another machine"),
)  # fmt: skip


def _sessions() -> list[tuple[Any, str, str]]:
    """Return the function that runs a session of ONNX Runtime, if it is imported."""
    collection = sys.modules.get("onnxruntime.capi.onnxruntime_inference_collection")
    return [] if collection is None else [(collection.Session, "run", "ONNX Runtime")]


def _meet_start(origin: str, _: tuple[Any, ...]) -> None:
    """Note that forward starts a process or a thread, connects to another machine, or runs a session."""
    if origin == "thread":
        _running[-1].watch_threads()
        return
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    if not any(name.startswith("<frozen importlib") for name in files):  # a library looks at the machine
        _running[-1].add(origin)


# Tensors that outlive a trace

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
    return [tensor for tensor in _tensors_among(gc.get_objects()) if _address(tensor) in addresses]


def _tensors_among(objects: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among some objects; `isinstance` would ask proxies what they stand for."""
    return (value for value in objects if torch.Tensor in type(value).__mro__)


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
        self._young = _young_ids()
        # Objects in neither set were made by this search.
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


def _computes_later(leaf: Any) -> bool:
    """Return whether something that forward returns is a function, or has one that may hold a module or a tensor."""
    if callable(leaf):
        return not isinstance(leaf, (type, nn.Module, _Tensor))
    if any(isinstance(value, _FUNCTIONS) for value in (_dict_of(leaf) or {}).values()):
        return True
    # A class that forward itself defines has methods that see its variables.
    methods = (value for value in vars(type(leaf)).values() if isinstance(value, types.FunctionType))
    for cell in (cell for method in methods for cell in method.__closure__ or ()):
        with suppress(ValueError):  # an empty cell
            if isinstance(cell.cell_contents, (nn.Module, _Tensor)):
                return True
    return False


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
