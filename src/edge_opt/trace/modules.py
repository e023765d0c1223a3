"""Which module is running: the stack of calls, their paths, their shapes, and who owns which parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from edge_opt.records import ModuleCall, Shape

_Tensor = torch.Tensor


class Frame:
    """One module call while it is being recorded."""

    __slots__ = ("call_number", "children", "index", "inputs", "module", "outputs", "parent", "path")

    def __init__(self, index: int, parent: Frame | None, module: nn.Module, path: str, call_number: int) -> None:
        self.index = index
        self.parent = parent
        self.module = module
        self.path = path
        self.call_number = call_number
        self.children = 0
        self.inputs: tuple[Shape, ...] = ()
        self.outputs: tuple[Shape, ...] = ()


class ModuleStack:
    """Follows the calls of watched modules; `current` is the one that runs now."""

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        self.paths = paths
        self.frames: list[Frame] = []
        self.current: Frame | None = None
        self.refused: Frame | None = None
        self._calls: dict[nn.Module, int] = {}
        self._refusal: BaseException | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        number = self._calls[module] = self._calls.get(module, 0) + 1
        parent = self.current
        frame = Frame(len(self.frames), parent, module, self.paths[module], number)
        if len(args) == 1 and not kwargs and isinstance(args[0], _Tensor):
            frame.inputs = (tuple(args[0].shape),)
        else:
            frame.inputs = tuple(tensor_shapes((args, kwargs)))
        if parent is not None:
            parent.children += 1
        self.frames.append(frame)
        self.current = frame
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        frame.outputs = (tuple(result.shape),) if isinstance(result, _Tensor) else tuple(tensor_shapes(result))
        self.current = frame.parent

    def fail(self, frame: Frame, error: BaseException) -> None:
        """Remember the innermost module that raised; an outer one sees the same exception pass by."""
        if self._refusal is not error:
            self.refused, self._refusal = frame, error
        self.current = frame.parent

    def watch(self, modules: list[nn.Module]) -> None:
        """Put a recorder in front of each module's `forward`; the guard that copied their attributes takes it away."""
        for module in modules:
            module.__dict__["forward"] = self._watched(module, _plain_forward(module))

    def _watched(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = self.enter(module, args, kwargs)
            try:
                result = forward(*args, **kwargs)
            except BaseException as error:
                self.fail(frame, error)
                raise
            self.leave(frame, result)
            return result

        return call

    def calls(self, owned: dict[nn.Module, Owned]) -> tuple[ModuleCall, ...]:
        """The finished calls. Parameters go to the first call of their owner, or of its nearest called ancestor."""
        nothing = Owned(0, 0, 0)
        totals = _settled(owned, self.paths, {frame.module for frame in self.frames})
        return tuple(
            ModuleCall(
                frame.index,
                None if frame.parent is None else frame.parent.index,
                frame.path,
                type(frame.module).__name__,
                frame.call_number,
                frame.inputs,
                frame.outputs,
                frame.children == 0,
                mine.params,
                mine.param_bytes,
                mine.trainable_params,
            )
            for frame in self.frames
            for mine in (totals.get(frame.module, nothing) if frame.call_number == 1 else nothing,)
        )


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's forward without `torch.compile`: what is traced is the original."""
    if "_orig_mod" in module._modules:
        return module._modules["_orig_mod"]  # type: ignore[return-value]
    module.__dict__["_compiled_call_impl"] = None
    return module.forward


def tensor_shapes(value: Any) -> Iterator[Shape]:
    """Shapes of every tensor in a nested value, in order."""
    if isinstance(value, _Tensor):
        yield tuple(value.shape)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensor_shapes(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensor_shapes(item)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from tensor_shapes(getattr(value, name, None))


def module_paths(root: nn.Module) -> dict[nn.Module, str]:
    """Every module with its path, in order of definition; one that is reachable twice keeps its first path."""
    paths: dict[nn.Module, str] = {}
    pending: list[tuple[str, nn.Module]] = [("", root)]
    while pending:
        path, module = pending.pop()
        if module in paths:
            continue
        paths[module] = path
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child) for name, child in module._modules.items() if child is not None]
        pending.extend(reversed(children))
    return paths


class Owned:
    """Parameters that a module holds itself."""

    __slots__ = ("param_bytes", "params", "trainable_params")

    def __init__(self, params: int, param_bytes: int, trainable_params: int) -> None:
        self.params = params
        self.param_bytes = param_bytes
        self.trainable_params = trainable_params

    def plus(self, other: Owned) -> Owned:
        return Owned(
            self.params + other.params,
            self.param_bytes + other.param_bytes,
            self.trainable_params + other.trainable_params,
        )


def owned_parameters(modules: Iterable[nn.Module]) -> dict[nn.Module, Owned]:
    """What each module holds itself; a tied parameter belongs to the first module that holds it."""
    owned: dict[nn.Module, Owned] = {}
    seen: set[int] = set()
    for module in modules:
        params = nbytes = trainable = 0
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            count = parameter.numel()
            params += count
            nbytes += count * parameter.itemsize
            trainable += count if parameter.requires_grad else 0
        if params:
            owned[module] = Owned(params, nbytes, trainable)
    return owned


def _settled(
    owned: dict[nn.Module, Owned], paths: dict[nn.Module, str], called: set[nn.Module]
) -> dict[nn.Module, Owned]:
    """Parameters of modules that were never called move up to the nearest ancestor that was."""
    if owned.keys() <= called:
        return owned
    by_path = {path: module for module, path in paths.items()}
    settled: dict[nn.Module, Owned] = {}
    for module, mine in owned.items():
        path = paths[module]
        while module not in called and path:
            path = path.rpartition(".")[0]
            module = by_path.get(path, module)
        settled[module] = settled[module].plus(mine) if module in settled else mine
    return settled
