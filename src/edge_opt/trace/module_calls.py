"""Which module is running: the stack of calls, their paths, their shapes, and who owns which parameter."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import add
from threading import get_ident
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch import nn

from edge_opt.records.costs import ModuleCall, Shape
from edge_opt.trace.lifetimes import packed_bytes, shape_of

_Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class Frame:
    """One module call while it is being recorded; `kind` is the module's class, and `defined_in` where that is from."""

    index: int
    parent: Frame | None
    path: str
    kind: str
    defined_in: str
    call_number: int
    children: int = 0
    inputs: tuple[Shape, ...] = ()
    outputs: tuple[Shape, ...] = ()

    def show_as(self, kind: str) -> None:
        """Show the call under the class that it represents, such as "torch.nn.modules.conv.Conv2d"."""
        self.defined_in, _, self.kind = kind.rpartition(".")


class ModuleStack:
    """Follows the calls of watched modules; `current` is the one that runs now."""

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        self.paths = paths
        self.frames: list[Frame] = []
        self.current: Frame | None = None
        self.refused: Frame | None = None
        self.on_enter: Callable[[], None] | None = None
        self.in_other_thread: Callable[[], AbstractContextManager[None]] | None = None
        self._calls: dict[str, int] = {}
        self._refusal: BaseException | None = None
        self._forwards: list[tuple[dict[str, Any], Any]] = []  # of watched modules, as they were

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        if self.on_enter is not None:
            self.on_enter()
        cls = type(module)
        frame = self._begin(self.paths[module], cls.__name__, cls.__module__)
        frame.inputs = _shapes_in(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        return frame

    def _begin(self, path: str, kind: str, defined_in: str) -> Frame:
        number = self._calls[path] = self._calls.get(path, 0) + 1
        parent = self.current
        frame = Frame(len(self.frames), parent, path, kind, defined_in, number)
        if parent is not None:
            parent.children += 1
        self.frames.append(frame)
        self.current = frame
        return frame

    def leave(self, frame: Frame, result: Any) -> None:
        frame.outputs = _shapes_in(result)
        self.current = frame.parent

    def fail(self, frame: Frame, error: BaseException) -> None:
        """Remember the innermost module that raised; an outer one sees the same exception pass by."""
        if self._refusal is not error:
            self.refused, self._refusal = frame, error
        self.current = frame.parent

    @contextmanager
    def scope(self, path: str, kind: str, inputs: tuple[Shape, ...]) -> Iterator[Frame]:
        """Record a call of something that is not a module, such as a part of a file; its outputs are set by the caller.

        Args:
            path: Its path, such as "layer1.0.conv1".
            kind: The class that it represents, such as "torch.nn.modules.conv.Conv2d".
            inputs: The shapes that it is given.
        """
        frame = self._begin(path, "", "")
        frame.show_as(kind)
        frame.inputs = inputs
        try:
            yield frame
        except BaseException as error:
            self.fail(frame, error)
            raise
        self.current = frame.parent

    def watch(self, modules: list[nn.Module]) -> None:
        """Put a recorder in front of each module's `forward`, until `unwatch`."""
        for module in modules:
            attributes = module.__dict__
            self._forwards.append((attributes, attributes.get("forward")))
            attributes["forward"] = self._watched(module, _plain_forward(module))

    def unwatch(self) -> None:
        """Take the recorders away again."""
        for attributes, forward in self._forwards:
            if forward is not None:
                attributes["forward"] = forward
            else:
                attributes.pop("forward", None)
        self._forwards.clear()

    def end(self) -> None:
        """Let go of every module."""
        self.unwatch()
        self.frames.clear()
        self.paths = {}
        self._calls.clear()
        self.current = self.refused = self._refusal = None

    def _watched(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        thread = get_ident()

        def call(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                # No operator of another thread is on the tape. It may also run the same model by chance.
                is_of_trace = any(value.is_meta for value in (*args, *kwargs.values()) if isinstance(value, _Tensor))
                with self.in_other_thread() if is_of_trace and self.in_other_thread else nullcontext():
                    return forward(*args, **kwargs)
            frame = self.enter(module, args, kwargs)
            try:
                result = forward(*args, **kwargs)
            except BaseException as error:
                self.fail(frame, error)
                raise
            self.leave(frame, result)
            return self._resumed(frame, result) if isinstance(result, GeneratorType) else result

        return call

    def _resumed(self, frame: Frame, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Return the generator of a forward with `yield`: its work belongs to its module, whoever iterates over it."""
        sent = None
        while True:
            outer, self.current = self.current, frame
            try:
                value = generator.send(sent)
            except StopIteration as end:
                return end.value
            finally:
                self.current = outer
            sent = yield value

    def calls(self, owned: dict[str, Owned]) -> tuple[ModuleCall, ...]:
        """Return the calls. Parameters go to the first call of their owner, or of the nearest called ancestor."""
        nothing = Owned(0, 0, 0)
        totals = _settled(owned, {frame.path for frame in self.frames})
        return tuple(
            ModuleCall(
                frame.index,
                None if frame.parent is None else frame.parent.index,
                frame.path,
                frame.kind,
                frame.call_number,
                frame.inputs,
                frame.outputs,
                frame.children == 0,
                *mine,
                frame.defined_in,
            )
            for frame in self.frames
            for mine in (totals.get(frame.path, nothing) if frame.call_number == 1 else nothing,)
        )


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward without `torch.compile`: what is traced is the original."""
    if "_orig_mod" in module._modules:
        return module._modules["_orig_mod"]  # type: ignore[return-value]
    if module.__dict__.get("_compiled_call_impl") is not None:
        module.__dict__["_compiled_call_impl"] = None
    # Parts of a script module may have none that Python could call.
    return getattr(module, "forward", module)


def exported_module(program: Any) -> nn.Module:
    """Return the module of an exported program, with the tree of the model it was made from where that can be had."""
    try:
        model: nn.Module = torch.export.unflatten(program)
    except Exception:  # whatever it stumbles over: the flat graph is the same model without the tree
        model = program.module()
    for module in model.modules():
        _show_original_type(module)
    return model


def _show_original_type(module: nn.Module) -> None:
    """Give a restored module the name of the class it was exported from; all are InterpreterModule otherwise."""
    type_name = getattr(module, "type_name", None)
    original = type_name() if callable(type_name) else None
    if original:
        cls = type(module)
        module.__class__ = type(original.rpartition(".")[2], (cls,), {"__module__": cls.__module__})


def _shapes_in(value: Any) -> tuple[Shape, ...]:
    """Return the shape of every tensor in a value; faster for a single tensor, the usual case."""
    if value.__class__ is _Tensor:
        return (tuple(value.shape) if not value.is_nested else shape_of(value),)
    return tuple(tensor_shapes(value))


def tensor_shapes(value: Any) -> Iterator[Shape]:
    """Yield the shape of every tensor in a nested value, in order."""
    if isinstance(value, _Tensor):
        yield shape_of(value)
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
    """Return every module with its path, in order of definition; one that is reachable twice keeps its first path."""
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


class Owned(NamedTuple):
    """Parameters that a module holds itself."""

    params: int
    param_bytes: int
    trainable_params: int


def owned_parameters(paths: dict[nn.Module, str]) -> dict[str, Owned]:
    """Return what each module holds itself, by its path; a tied parameter belongs to the first that holds it."""
    owned: dict[str, Owned] = {}
    seen: set[int] = set()
    for module, path in paths.items():
        params = nbytes = trainable = 0
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            count = parameter.numel()
            params += count
            nbytes += packed_bytes(count, parameter)
            trainable += count if parameter.requires_grad else 0
        if params:
            owned[path] = Owned(params, nbytes, trainable)
    return owned


def _settled(owned: dict[str, Owned], called: set[str]) -> dict[str, Owned]:
    """Move parameters of modules that were never called up to the nearest ancestor that was."""
    if owned.keys() <= called:
        return owned
    settled: dict[str, Owned] = {}
    for path, mine in owned.items():
        while path and path not in called:
            path = path.rpartition(".")[0]
        settled[path] = Owned(*map(add, settled[path], mine)) if path in settled else mine
    return settled
