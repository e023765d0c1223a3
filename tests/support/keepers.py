"""Models whose forward keeps or changes something outside its result. Each calls `stop()` in the middle."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import itertools
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrize

WIDE = 24  # a mask of WIDE x WIDE is beyond what a trace computes for real, once a test has lowered that limit to 256


class Stop:
    """Raises what a test asks for, in mid-forward."""

    error: type[BaseException] | None = None


def stop() -> None:
    if Stop.error is not None:
        raise Stop.error("in mid-forward")


GLOBAL_DICT: dict[Any, Any] = {}
GLOBAL_LIST: list[Any] = []
GLOBAL_NAME: Any = None
GLOBAL_COUNT = 0
LATE: Any = None
WEAK: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


@functools.lru_cache
def cached_mask(size: int) -> torch.Tensor:
    return torch.ones(size, size).tril()


@functools.cache
def unbounded_mask(size: int) -> dict[str, torch.Tensor]:
    return {"mask": torch.ones(size, size).tril()}


class LruOnFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = cached_mask(WIDE)
        stop()
        return self.linear(x) * mask[: x.shape[0], :8]


class LruInDict(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = unbounded_mask(WIDE)["mask"]
        stop()
        return self.linear(x) * mask[: x.shape[0], :8]


class LruOnSmall(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = cached_mask(16)
        stop()
        return self.linear(x) * mask[: x.shape[0], :8]


@functools.lru_cache
def cached_numbers(device: Any) -> torch.Tensor:
    return torch.as_tensor([1.0] * 8, device=device)


class LruByDevice(Base):
    """The device of the input is meta in a trace, and a tensor made from numbers is there at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * cached_numbers(x.device)
        stop()
        return y


class LruOnMethod(Base):
    @functools.lru_cache  # noqa: B019
    def mask(self, size: int) -> torch.Tensor:
        return torch.ones(size, size).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask(WIDE)
        stop()
        return self.linear(x) * mask[: x.shape[0], :8]


class LruOnInput(Base):
    @staticmethod
    @functools.lru_cache(maxsize=4)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.double(x)
        stop()
        return self.linear(y)


class DictOnModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[Any, Any] = {"kept": torch.zeros(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[tuple(x.shape)] = x + 1
        self.cache["kept"] = x
        stop()
        return self.linear(self.cache[tuple(x.shape)])


class ListOnModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = [1, [2]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x)
        self.history[1].append(x)
        stop()
        return self.linear(x)


class SetOnModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()
        self.recent: collections.deque[Any] = collections.deque(maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(x)
        self.recent.append(self.linear(x))
        stop()
        return self.recent[-1]


@dataclass
class Memory:
    keys: list[torch.Tensor] = field(default_factory=list)
    last: torch.Tensor | None = None
    steps: int = 0

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.append(x)
        self.last = x
        self.steps += 1
        return torch.stack(self.keys)


class HelperObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.memory.update(self.linear(x))
        stop()
        return y.sum(0)


class SlottedHelper(Base):
    class Slots:
        __slots__ = ("value",)

        def __init__(self) -> None:
            self.value: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.slots = self.Slots()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.slots.value = self.linear(x)
        stop()
        return self.slots.value


class GlobalDict(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in GLOBAL_DICT:
            GLOBAL_DICT[x.shape[0]] = torch.ones(WIDE, WIDE).tril()
        stop()
        return self.linear(x) * GLOBAL_DICT[x.shape[0]][: x.shape[0], :8]


class GlobalList(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        GLOBAL_LIST.append(Memory([self.linear(x)], x))
        stop()
        return GLOBAL_LIST[-1].keys[0]


class GlobalName(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global GLOBAL_NAME, GLOBAL_COUNT
        GLOBAL_COUNT += 1
        if GLOBAL_NAME is None:
            GLOBAL_NAME = torch.ones(WIDE, WIDE).tril()
        stop()
        return self.linear(x) * GLOBAL_NAME[: x.shape[0], :8]


def _with_closure() -> tuple[Callable[[int], torch.Tensor], Callable[[], Any]]:
    mask: Any = None

    def get(size: int) -> torch.Tensor:
        nonlocal mask
        if mask is None:
            mask = torch.ones(size, size).tril()
        return mask

    return get, lambda: mask


closure_mask, closure_state = _with_closure()


class Closure(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = closure_mask(WIDE)
        stop()
        return self.linear(x) * mask[: x.shape[0], :8]


class ClassAttribute(Base):
    table: Any = None
    shared: dict[Any, Any] = {}  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if ClassAttribute.table is None:
            ClassAttribute.table = torch.ones(WIDE, WIDE).tril()
        type(self).calls = getattr(type(self), "calls", 0) + 1
        self.shared[len(self.shared)] = x
        stop()
        return self.linear(x) * self.table[: x.shape[0], :8]


class MutableDefault(Base):
    def forward(self, x: torch.Tensor, cache: dict[Any, Any] = {}) -> torch.Tensor:  # noqa: B006
        if "mask" not in cache:
            cache["mask"] = torch.ones(WIDE, WIDE).tril()
        stop()
        return self.linear(x) * cache["mask"][: x.shape[0], :8]


class FunctionAttribute(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(stop, "mask"):
            stop.mask = torch.ones(WIDE, WIDE).tril()  # type: ignore[attr-defined]
        stop()
        return self.linear(x) * stop.mask[: x.shape[0], :8]  # type: ignore[attr-defined]


class OwnAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDE, WIDE).tril()
        stop()
        return self.linear(x) * self.mask[: x.shape[0], :8]


class LazyRope(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cos.shape[0] < x.shape[0]:
            angles = torch.outer(torch.arange(x.shape[0]).float(), 1.0 / 10000 ** (torch.arange(8) / 8))
            self.register_buffer("cos", angles.cos(), persistent=False)
        stop()
        return self.linear(x) * self.cos[: x.shape[0]]


class OwnKeyValueCache(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kv: Any = (torch.zeros(0, 8), torch.zeros(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kv = tuple(torch.cat([old, self.linear(x)]) for old in self.kv)
        stop()
        return self.kv[0] + self.kv[1]


class ReplacedData(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.5
        stop()
        return self.linear(x)


class WrittenInPlace(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.mul_(0.5)
        self.linear.bias.data.zero_()
        stop()
        return self.linear(x)


class ThawsAndHooks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.requires_grad_()
        self.linear.weight.register_hook(lambda grad: grad)
        self.linear.weight.note = x
        self.linear.weight.grad = torch.ones(8, 8)
        stop()
        return self.linear(x)


class ChangesClass(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear
        self.__class__ = type("Changed", (ChangesClass,), {})
        stop()
        return self.linear(x)


class AddsHooks(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.register_forward_hook(lambda module, args, out: out + 0)
        self.linear.register_forward_pre_hook(lambda module, args: None)
        self.linear.register_full_backward_hook(lambda module, grads, outs: None)
        self.linear.register_full_backward_pre_hook(lambda module, grads: None)
        self.linear.register_state_dict_post_hook(lambda *args: None)
        self.linear.register_state_dict_pre_hook(lambda *args: None)
        self.linear.register_load_state_dict_post_hook(lambda *args: None)
        stop()
        return self.linear(x)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class AddsParametrization(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not parametrize.is_parametrized(self.linear):
            parametrize.register_parametrization(self.linear, "weight", Doubled())
        stop()
        return self.linear(x)


class HasParametrization(Base):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.linear, "weight", Doubled())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stop()
        return self.linear(x)


class AddsModules(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(8, 8)
            with torch.no_grad():
                self.late.weight.fill_(0.5), self.late.bias.fill_(0.25)
        if hasattr(self, "linear"):
            del self.linear
        stop()
        return self.late(x)


class BoundToItself(Base):
    def __init__(self) -> None:
        super().__init__()
        self.step = self.advance
        self.steps = 0
        self.linear.parent = weakref.ref(self)
        self.table = functools.partial(self.advance, times=2)

    def advance(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        self.steps += times
        self.last = x
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.table(self.step(x)))
        self.linear.parent().grand = y
        stop()
        return y


class PatchedForward(Base):
    """Its forward is a function on the instance that closes over the instance."""

    def __init__(self) -> None:
        super().__init__()
        me = self
        calls: list[Any] = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            me.last = me.linear(x)
            calls.append(x)
            stop()
            return me.last * len(calls)

        self.forward = forward  # type: ignore[method-assign]
        self.calls = calls


class WeakRegistry(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WEAK[self] = self.linear(x)
        stop()
        return WEAK[self]


class OwnGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(8, generator=self.generator)
        stop()
        return self.linear(x) + noise


class TransformedWeight(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cached: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cached is None:
            self.cached = self.linear.weight.t().contiguous()
        stop()
        return x @ self.cached


class LooksAndKeeps(Base):
    """Needs real tensors, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.total += float(y.sum())
        self.kept.append(y)
        GLOBAL_DICT["real"] = y
        stop()
        return y + len(self.kept)


class Namespace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.space = types.SimpleNamespace(state=None, inner={"a": [1]})
        self.plain_modules = [nn.Linear(8, 8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.space.state = x
        self.space.inner["a"].append(x)
        self.plain_modules[0].last = x
        stop()
        return self.plain_modules[0](x)


class Slotted:
    """Keeps its one attribute outside of a dictionary."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Finalized:
    """Has a finalizer, which a copy would run a second time."""

    closed = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def __del__(self) -> None:
        Finalized.closed += 1


class Pair(NamedTuple):
    first: Any
    second: Any


class Singleton:
    value: Any = None


GLOBAL_SLOTS = Slotted()
GLOBAL_SPACE = types.SimpleNamespace()
GLOBAL_SINGLETON = Singleton()
GLOBAL_SET: set[Any] = set()
GLOBAL_DEQUE: collections.deque[Any] = collections.deque(maxlen=3)
GLOBAL_DEFAULT: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
GLOBAL_ORDERED: collections.OrderedDict[str, Any] = collections.OrderedDict()
GLOBAL_USER: collections.UserDict[str, Any] = collections.UserDict()
GLOBAL_QUEUE: queue.Queue[Any] = queue.Queue()
GLOBAL_ARRAY = numpy.empty(1, dtype=object)
GLOBAL_POINTER = ctypes.py_object(None)
LOCAL = threading.local()
CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("keeper", default=None)
WEAK_VALUES: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class Keeps(Base):
    """Puts its result where `keep` says."""

    def keep(self, y: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.keep(y)
        stop()
        return y


class InGlobalSlots(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_SLOTS.value = y


class InNewSlots(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DICT["slots"] = Slotted(y)


class InFinalized(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_LIST.append(Finalized(y))


class InNamespace(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_SPACE.value = y


class InSingleton(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_SINGLETON.value = y


class InSet(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_SET.add(y)


class InDeque(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DEQUE.append(y)


class InDefaultDict(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DEFAULT["results"].append(y)


class InOrderedDict(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_ORDERED["last"] = y


class InUserDict(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_USER["last"] = y


class InQueue(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_QUEUE.put(y)


class InNestedDict(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DICT.setdefault("outer", {})["inner"] = {"y": y}


class InTuple(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DICT["pair"] = (y, (y, 1))


class InNamedTuple(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_LIST.append(Pair(y, [y]))


class AsKey(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DICT[y] = 1


class InPartial(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_LIST.append(functools.partial(torch.add, y))


class InNewClosure(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_LIST.append(lambda: y)


class InGenerator(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        def steps() -> Any:
            yield y.shape
            yield y

        GLOBAL_LIST.append(steps())
        next(GLOBAL_LIST[-1])


class InIterator(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DICT["iterator"] = itertools.repeat(y)


class InException(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        try:
            raise ValueError(y)
        except ValueError as error:
            GLOBAL_LIST.append(error)


class InCycle(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        ring: list[Any] = [y]
        ring.append(ring)
        GLOBAL_DICT["ring"] = ring


class InThreadLocal(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        LOCAL.value = y


class InContext(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        CONTEXT.set(y)


class InWeakValues(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        WEAK_VALUES["y"] = y


class InWeakReference(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_DICT["weak"] = weakref.ref(y)


class InObjectArray(Keeps):
    """NumPy's arrays of objects hide what they hold from the garbage collector."""

    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_ARRAY[0] = y


class InPointer(Keeps):
    """A cache in C, which the garbage collector does not see either."""

    def keep(self, y: torch.Tensor) -> None:
        GLOBAL_POINTER.value = y


class OnPythonModule(Keeps):
    def keep(self, y: torch.Tensor) -> None:
        sys.modules[__name__].LATE = y  # type: ignore[attr-defined]


class ClassRegistry(Keeps):
    registry: ClassVar[dict[str, Any]] = {}

    def keep(self, y: torch.Tensor) -> None:
        type(self).registry[type(self).__name__] = [y]


class CachedProperty(Keeps):
    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return self.linear.weight * 2

    def keep(self, y: torch.Tensor) -> None:
        y += self.doubled[0]


class LruOnClassMethod(Keeps):
    @classmethod
    @functools.lru_cache(maxsize=2)
    def mask(cls, size: int) -> torch.Tensor:
        return torch.ones(size, size).tril()

    def keep(self, y: torch.Tensor) -> None:
        y *= self.mask(WIDE)[: y.shape[0], :8]


class RemovesItsHook(Base):
    """A hook that removes itself the first time it runs."""

    def __init__(self) -> None:
        super().__init__()

        def once(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
            self.handle.remove()
            stop()
            return result + 1

        self.handle = self.linear.register_forward_hook(once)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


# The value before cannot be known, or the holder cannot be seen: these profiles are refused with the holder's name.
REFUSED: dict[type[nn.Module], str] = {
    GlobalName: "keepers.GLOBAL_NAME",
    Closure: "enclosing function",
    ClassAttribute: "ClassAttribute.table",
    FunctionAttribute: "stop.mask",
    InGlobalSlots: "Slotted.value",
    InNamespace: "SimpleNamespace.value",
    InSingleton: "Singleton.value",
    InObjectArray: "garbage collector does not see",
    InPointer: "py_object",
    OnPythonModule: "keepers.LATE",
}

KEEPERS: list[type[nn.Module]] = [
    value
    for value in list(globals().values())
    if isinstance(value, type) and Base in value.__mro__[1:] and value is not Keeps
]


def globals_now() -> dict[str, Any]:
    """Return everything outside the models in which a keeper may put a tensor."""
    return {
        "slots": GLOBAL_SLOTS.value, "space": vars(GLOBAL_SPACE), "singleton": GLOBAL_SINGLETON.value,
        "set": list(GLOBAL_SET), "deque": list(GLOBAL_DEQUE), "default dict": dict(GLOBAL_DEFAULT),
        "ordered": dict(GLOBAL_ORDERED), "user": dict(GLOBAL_USER), "queue": list(GLOBAL_QUEUE.queue),
        "array": GLOBAL_ARRAY[0], "pointer": GLOBAL_POINTER.value, "local": vars(LOCAL), "context": CONTEXT.get(),
        "weak values": dict(WEAK_VALUES), "late": LATE, "registry": dict(ClassRegistry.registry),
        "dict": dict(GLOBAL_DICT), "list": list(GLOBAL_LIST), "name": GLOBAL_NAME, "closure": closure_state(),
        "table": ClassAttribute.table, "shared": dict(ClassAttribute.shared),
        "default": dict(MutableDefault.forward.__defaults__[0]),  # type: ignore[index]
        "function": dict(stop.__dict__), "weak": dict(WEAK),
    }  # fmt: skip


def reset() -> None:
    """Start again: nothing kept anywhere."""
    global GLOBAL_NAME, GLOBAL_COUNT, LATE, closure_mask, closure_state
    Stop.error = None
    for container in (
        GLOBAL_DICT, GLOBAL_LIST, ClassAttribute.shared, MutableDefault.forward.__defaults__[0], WEAK,  # type: ignore[index]
        GLOBAL_SET, GLOBAL_DEQUE, GLOBAL_DEFAULT, GLOBAL_ORDERED, GLOBAL_USER, GLOBAL_QUEUE.queue, WEAK_VALUES,
        ClassRegistry.registry, vars(GLOBAL_SPACE), vars(LOCAL), vars(GLOBAL_SINGLETON),
    ):  # fmt: skip
        container.clear()  # type: ignore[attr-defined]
    GLOBAL_SLOTS.value = GLOBAL_ARRAY[0] = GLOBAL_POINTER.value = LATE = None
    GLOBAL_NAME, GLOBAL_COUNT, ClassAttribute.table = None, 0, None
    stop.__dict__.clear()
    for cache in (
        cached_mask, unbounded_mask, cached_numbers, LruOnMethod.mask, LruOnInput.double, LruOnClassMethod.mask,
    ):  # fmt: skip
        cache.cache_clear()
    closure_mask, closure_state = _with_closure()
    if "calls" in vars(ClassAttribute):
        del ClassAttribute.calls  # type: ignore[attr-defined]


def fingerprint(model: nn.Module) -> list[Any]:
    """Every attribute, hook, flag and value of a model and of the objects it holds, in an order of its own."""
    seen: set[int] = set()

    def of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            grad = None if value.grad is None else value.grad.tolist()
            extra = sorted(value.__dict__)
            hooks = len(value._backward_hooks or ())
            return (id(value), str(value.device), value.requires_grad, value.tolist(), grad, extra, hooks)
        if value is None or isinstance(value, (bool, int, float, str, type)):
            return value
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if id(value) in seen:
            return id(value)
        seen.add(id(value))
        if isinstance(value, dict):
            return [(of(key), of(item)) for key, item in value.items()]
        if isinstance(value, (list, tuple, collections.deque)):
            return [of(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(map(id, value))
        slots = [of(getattr(value, name, None)) for name in getattr(type(value), "__slots__", ())]
        return (id(value), type(value).__name__, of(getattr(value, "__dict__", None)), slots)

    return [of(module) for module in model.modules()]
