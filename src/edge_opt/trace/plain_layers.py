"""Layers of torch's own whose forward is one operator: the tape is given that operator without the way through torch.

A part of what a recorded call takes goes into torch's dispatcher, which boxes the arguments and brings them back. A CNN
is made of such layers almost alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

_aten = torch.ops.aten
_Tensor = torch.Tensor
_Parameter = nn.Parameter
_modes = torch._C._len_torch_dispatch_stack
_mode_at = torch._C._get_dispatch_stack_at
_function_modes = torch._C._len_torch_function_stack
_autocast = torch._C._is_any_autocast_enabled
_transform = torch._C._functorch.peek_interpreter_stack

# The operator and its arguments as torch hands them over, without defaults at the end; None where it would be others.
Operation = tuple[Any, tuple[Any, ...]]
_Described = Callable[[Any, torch.Tensor], "Operation | None"]


def _linear(layer: Any, x: torch.Tensor) -> Operation | None:
    weight, bias = _weight_and_bias(layer.__dict__)
    if not _are_usual(weight, bias):
        return None
    return _aten.linear.default, (x, weight) if bias is None else (x, weight, bias)


def _conv2d(layer: Any, x: torch.Tensor) -> Operation | None:
    weight, bias = _weight_and_bias(layer.__dict__)
    stride, padding, dilation, groups = layer.stride, layer.padding, layer.dilation, layer.groups
    # Someone may have set a single number, or the name of a padding.
    are_pairs = stride.__class__ is padding.__class__ is dilation.__class__ is tuple
    if not are_pairs or layer.padding_mode != "zeros" or not _are_usual(weight, bias):
        return None
    if not len(stride) == len(padding) == len(dilation) == 2:
        return None
    if groups != 1:
        return _aten.conv2d.default, (x, weight, bias, list(stride), list(padding), list(dilation), groups)
    if dilation != (1, 1):
        return _aten.conv2d.default, (x, weight, bias, list(stride), list(padding), list(dilation))
    if padding != (0, 0):
        return _aten.conv2d.default, (x, weight, bias, list(stride), list(padding))
    if stride != (1, 1):
        return _aten.conv2d.default, (x, weight, bias, list(stride))
    return _aten.conv2d.default, (x, weight) if bias is None else (x, weight, bias)


def _batch_norm(layer: Any, x: torch.Tensor) -> Operation | None:
    attributes = layer.__dict__
    weight, bias = _weight_and_bias(attributes)
    buffers = attributes["_buffers"]
    mean, variance = buffers.get("running_mean"), buffers.get("running_var")
    if layer.training or mean.__class__ is not _Tensor or variance.__class__ is not _Tensor or x.dim() != 4:
        return None
    if not _are_usual(weight, bias) or not _BUFFERS.isdisjoint(attributes):
        return None
    momentum = 0.0 if layer.momentum is None else layer.momentum
    is_fast = torch.backends.cudnn.enabled
    return _aten.batch_norm.default, (x, weight, bias, mean, variance, False, momentum, layer.eps, is_fast)


_BUFFERS = frozenset(("running_mean", "running_var"))


def _layer_norm(layer: Any, x: torch.Tensor) -> Operation | None:
    weight, bias = _weight_and_bias(layer.__dict__)
    if weight is None or bias is None or not _are_usual(weight, bias):
        return None
    words = (x, list(layer.normalized_shape), weight, bias)
    return _aten.layer_norm.default, words if layer.eps == _LAYER_NORM_EPS else (*words, layer.eps)


_LAYER_NORM_EPS = 1e-5


def _relu(layer: Any, x: torch.Tensor) -> Operation | None:
    return _aten.relu_.default if layer.inplace else _aten.relu.default, (x,)


def _weight_and_bias(attributes: dict[str, Any]) -> tuple[Any, Any]:
    """A layer's parameters, from its table: asking the layer for them takes ten times as long.

    An attribute of the same name stands in front of a parameter; what is found then is not usual.
    """
    if "weight" in attributes or "bias" in attributes:
        return False, False
    parameters = attributes["_parameters"]
    return parameters.get("weight", False), parameters.get("bias", False)


def _are_usual(weight: Any, bias: Any) -> bool:
    """Whether they are parameters of torch's own class: others may take an operator apart themselves."""
    return (weight is None or weight.__class__ is _Parameter) and (bias is None or bias.__class__ is _Parameter)


# What they call is compared, too: someone may have put another function in its place.
_LAYERS: dict[type[nn.Module], tuple[_Described, Any, str, Any]] = {
    nn.Linear: (_linear, nn.Linear.forward, "linear", F.linear),
    nn.Conv2d: (_conv2d, nn.Conv2d.forward, "conv2d", F.conv2d),
    nn.BatchNorm2d: (_batch_norm, nn.BatchNorm2d.forward, "batch_norm", F.batch_norm),
    nn.LayerNorm: (_layer_norm, nn.LayerNorm.forward, "layer_norm", F.layer_norm),
    nn.ReLU: (_relu, nn.ReLU.forward, "relu", F.relu),
}


class Recorder(Protocol):
    """The tape, as plain layers see it."""

    def told(self, func: Any, args: tuple[Any, ...], name: str) -> Any:
        """Record an operator that a function of that name in torch.nn.functional calls, and give its output."""
        ...


def straight(module: nn.Module, forward: Callable[..., Any], tape: Recorder) -> Callable[..., Any]:
    """The forward of a module: for a plain layer on a tensor without values, its operator told to the tape at once.

    Args:
        module: Any module.
        forward: What it would run.
        tape: What records operators; it is torch's dispatch mode meanwhile.
    """
    known = _LAYERS.get(module.__class__)
    if known is None or "forward" in module.__dict__:
        return forward
    described, own_forward, name, function = known
    if module.__class__.forward is not own_forward or getattr(F, name) is not function:
        return forward

    def call(*args: Any, **kwargs: Any) -> Any:
        is_usual = len(args) == 1 and not kwargs and args[0].__class__ is _Tensor and args[0].is_meta
        if is_usual and _is_simple_moment(tape):
            operation = described(module, args[0])
            if operation is not None:
                return tape.told(*operation, name)
        return forward(*args, **kwargs)

    return call


def _is_simple_moment(tape: Recorder) -> bool:
    """Whether nothing but the tape stands between a function and its operator; in another thread it does not."""
    if _modes() != 1 or _mode_at(0) is not tape:
        return False
    return not _function_modes() and not _autocast() and _transform() is None
