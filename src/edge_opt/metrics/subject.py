"""The subject: a model on its device, in the precision it claims, left as it was found."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.errors import InvalidInput

# int8 has no one type of input: a quantised model takes what it takes.
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": None}
EIGHT_BITS = (torch.int8, torch.uint8, torch.qint8, torch.quint8)


def usable_device(device: torch.device | str) -> torch.device:
    """The device asked for, or with a warning the CPU where there is no such GPU."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device is {device!r}; it must be 'cpu', 'cuda', 'cuda:1' or 'mps'") from error
    if wanted.type not in ("cpu", "cuda", "mps"):
        raise InvalidInput(f"device is {device!r}; it must be 'cpu', 'cuda', 'cuda:1' or 'mps'")
    if wanted.type == "cuda" and torch.cuda.is_available() and (wanted.index or 0) < torch.cuda.device_count():
        return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    if wanted.type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps", 0)
    if wanted.type != "cpu":
        warnings.warn(f"{wanted} is not available here; the CPU is measured instead", UserWarning, stacklevel=3)
    return torch.device("cpu")


def stored_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Every tensor the model keeps, once: parameters, buffers, and what quantised layers pack into their state."""
    found: list[Any] = [*model.parameters(), *model.buffers()]
    for value in model.state_dict(keep_vars=True).values():
        found.extend(value if isinstance(value, (tuple, list)) else [value])
    parts = [part for tensor in found if isinstance(tensor, torch.Tensor) for part in _parts(tensor)]
    return list({id(tensor): tensor for tensor in parts}.values())


def _parts(tensor: Any) -> list[torch.Tensor]:
    """The tensors inside a wrapper such as torchao's, which shows a floating type and holds int8; else itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]


def input_dtype(model: nn.Module, precision: str) -> torch.dtype | None:
    """The type of floating inputs, after making sure that the model is what `precision` says."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the model must be a torch.nn.Module, and this is a {type(model).__name__}")
    if precision not in PRECISIONS:
        raise InvalidInput(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    stored, wanted = stored_tensors(model), PRECISIONS[precision]
    if any(tensor.is_meta for tensor in stored):
        raise InvalidInput("the model's weights are on the meta device; it cannot be run without real ones")
    if wanted is None:
        # A table of bytes or a mask is not a weight; a model without any tensor keeps its weights elsewhere.
        if stored and not any(tensor.dtype in EIGHT_BITS and tensor.ndim > 1 for tensor in stored):
            raise InvalidInput("precision is 'int8', and no weight is stored in 8 bits; quantise the model first")
        return None
    weights = [(name, part) for name, parameter in model.named_parameters() for part in _parts(parameter)]
    weights += [("a packed weight", tensor) for tensor in stored if tensor.is_quantized]
    named = [
        (name, tensor.dtype) for name, tensor in weights if tensor.is_floating_point() or tensor.dtype in EIGHT_BITS
    ]
    odd = [f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in named if dtype != wanted]
    if odd:
        raise InvalidInput(
            f"precision is {precision!r}, and {len(odd)} of {len(named)} weights are not: {odd[0]}; "
            "convert the model first, or name the precision it is in"
        )
    return wanted


@contextmanager
def as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the model in eval mode; then restore modes, attributes, buffers and random numbers, also after an error."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    tables = [table for module in modules for table in _attribute_tables(module)]
    copies = [dict(table) for table in tables]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for table, kept in zip(tables, copies, strict=True):
                table.clear()
                table.update(kept)
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])


def _attribute_tables(module: nn.Module) -> list[dict[str, Any]]:
    """A module's parameters, buffers, children and other attributes; of a script module, what it shows."""
    if isinstance(module, torch.jit.ScriptModule):
        return [module.__dict__]
    return [module._parameters, module._buffers, module._modules, module.__dict__]  # type: ignore[list-item]
