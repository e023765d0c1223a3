"""A model ready to be run again and again on one device, and left as it was found when that is over."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from edge_opt.errors import InvalidInput
from edge_opt.measure.device import Device
from edge_opt.measure.recorder import Recorder
from edge_opt.measure.stopwatch import Runner, Tally
from edge_opt.records import Trace
from edge_opt.trace.guard import as_found
from edge_opt.trace.inputs import CallArguments, InputSpec, call_arguments, materialize, real_tensor
from edge_opt.trace.modules import module_paths


def on_device(model: nn.Module, device: Device) -> nn.Module:
    """The model itself if all of it is there already, else a copy that is."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise InvalidInput("the model's weights are on the meta device and have no values; build it with real weights")
    place = torch.device(device.torch_name)
    if all(tensor.device.type == place.type and tensor.device.index in (None, place.index or 0) for tensor in tensors):
        return model
    return copy.deepcopy(model).to(place)


def call_on(model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, device: Device) -> CallArguments:
    """The arguments of one call, with tensors of their own on the device; described ones are filled at random."""
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    dtype = next(floating, torch.get_default_dtype())
    place = torch.device(device.torch_name)
    # What torch.compile wraps keeps the signature that says which arguments have names.
    original = model._modules.get("_orig_mod")
    described = call_arguments(model if original is None else original, inputs, kwargs)
    return materialize(described, lambda value: real_tensor(value, dtype, place))


def first_dimension(arguments: CallArguments) -> int:
    """The batch size, if the first tensor among the arguments has it in front; 1 where there is none."""
    found: list[int] = []

    def look(value: torch.Tensor | InputSpec) -> torch.Tensor | InputSpec:
        found.append(value.shape[0] if len(value.shape) else 1)
        return value

    materialize(arguments, look)
    return found[0] if found else 1


class Caller:
    """Calls the model with the same arguments each time; what forward may write to comes fresh for each call."""

    def __init__(self, model: nn.Module, arguments: CallArguments) -> None:
        self.model = model
        self.arguments = arguments
        self._tally = Tally()
        self._fresh: deque[CallArguments] = deque()

    def runner(self, recorder: Recorder | None = None) -> Runner:
        """A runner of calls, which the recorder watches."""
        detach = None if recorder is None else recorder.detach
        values = (*self.arguments.args, *self.arguments.kwargs.values())
        if not any(_is_mutable(value) for value in values):
            return Runner(self._call, None if recorder is None else recorder.attach, detach, self._tally)

        def prepare(count: int) -> None:
            self._fresh = deque(materialize(self.arguments, lambda tensor: tensor) for _ in range(count))
            if recorder is not None:
                recorder.attach(count)

        return Runner(self._call_fresh, prepare, detach, self._tally)

    def _call(self) -> object:
        return self.model(*self.arguments.args, **self.arguments.kwargs)

    def _call_fresh(self) -> object:
        arguments = self._fresh.popleft()
        return self.model(*arguments.args, **arguments.kwargs)


def _is_mutable(value: Any) -> bool:
    """Whether forward could leave something behind in an argument: in a list, a dict, a cache. Tensors are let pass."""
    if isinstance(value, tuple):
        return any(_is_mutable(item) for item in value)
    plain = (torch.Tensor, bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Module)
    return not (value is None or isinstance(value, plain) or callable(value))


@contextmanager
def ready(model: nn.Module, trace: Trace, training: bool, threads: int | None) -> Iterator[None]:
    """Let the model run for inference in the given mode and number of threads; then restore what running changed."""
    modules = list(module_paths(model))
    kept = [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]
    if writes_parameters(trace):
        kept += list(model.parameters())
    threads_found = torch.get_num_threads()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        copies = [tensor.clone() for tensor in kept]
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        with as_found(modules, training):
            # The guard switches it off for tracing; what is measured is what the caller would run.
            torch.backends.mha.set_fastpath_enabled(fast_path)
            with torch.inference_mode() if not training else torch.no_grad():
                yield
    finally:
        if threads is not None:
            torch.set_num_threads(threads_found)
        with torch.no_grad():
            for tensor, before in zip(kept, copies, strict=True):
                tensor.copy_(before)


def writes_parameters(trace: Trace) -> bool:
    """Whether an operator of the trace writes to a parameter, so that running the model would change it."""
    return any(
        trace.signatures[call.signature].op.endswith("_")
        and call.reads
        and trace.storages[call.reads[0]].role == "parameter"
        for call in trace.ops
    )
