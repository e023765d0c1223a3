"""Kernels that the CPU runs otherwise than the meta device: attention, recurrent layers, some gradients.

For the length of a trace, torch's dispatcher sends those operators on meta tensors to the same operators that it would
send them to on the CPU. Tensors on other devices, and other threads, are not concerned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from edge_opt.backward.recurrent_layers import recurrent_kernels
from edge_opt.trace.shapes import is_fused_attention

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_active = threading.local()


@contextmanager
def as_on_cpu(autocast: torch.dtype | None = None) -> Iterator[None]:
    """Let these operators on meta tensors call what they would call on the CPU, in this thread."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")  # type: ignore[no-untyped-call]
    for name, layers in recurrent_kernels(_is_on).items():
        library.impl(name, layers, "AutogradMeta")  # type: ignore[no-untyped-call]
    for operator in _WITH_CPU_KERNEL:
        name = operator._schema.name.removeprefix("aten::")
        library.impl(name, _whole(operator), "AutogradMeta")  # type: ignore[no-untyped-call]
    for operator in _CAST_BY_AUTOCAST if autocast is not None else ():
        name = f"{operator._schema.name.removeprefix('aten::')}.{operator._overloadname}".removesuffix(".default")
        library.impl(name, _autocast(operator, autocast), "AutogradMeta")  # type: ignore[no-untyped-call]
    _active.is_on = True
    _active.casts, _active.dtype = {}, autocast
    try:
        yield
    finally:
        _active.is_on = False
        _active.casts = {}
        library._destroy()  # type: ignore[no-untyped-call]


def _is_on() -> bool:
    return getattr(_active, "is_on", False)


# Composite on the meta device, with a kernel of their own on the CPU. None has a gradient in a step.
_WITH_CPU_KERNEL = (aten.silu_backward.default, aten.mish_backward.default)


# Composite operators that autocast runs in the narrow type. Products called by themselves (`torch.bmm`) are not among
# them: they have gradients of their own, which a kernel in Python would hide.
_CAST_BY_AUTOCAST = (
    aten.linear.default, aten.matmul.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
)  # fmt: skip


def _autocast(operator: Any, dtype: torch.dtype | None) -> Callable[..., torch.Tensor]:
    def narrow(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if id(value) not in _active.casts:
            _active.casts[id(value)] = value.to(dtype)
        return _active.casts[id(value)]

    def call(*args: Any) -> torch.Tensor:
        if _is_on() and getattr(_active, "is_casting", False):
            args = tuple(map(narrow, args))
        return operator._op_dk(_COMPOSITE, *args)  # type: ignore[no-any-return]

    return call


@contextmanager
def casting(is_on: bool) -> Iterator[None]:
    """The stretch of a step that runs under autocast."""
    _active.is_casting = is_on
    try:
        yield
    finally:
        _active.is_casting = False
        _active.casts = {}


def _whole(operator: Any) -> Callable[..., torch.Tensor]:
    def call(*args: Any) -> torch.Tensor:
        if not _is_on():
            return operator._op_dk(_COMPOSITE, *args)  # type: ignore[no-any-return]
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)  # type: ignore[no-any-return]

    return call


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if getattr(_active, "is_casting", False):
        query, key, value = (tensor.to(_active.dtype) for tensor in (query, key, value))
    if not _is_on() or not is_fused_attention(query, key, value, attn_mask, dropout_p, is_causal, **options):  # type: ignore[arg-type]
        whole = aten.scaled_dot_product_attention.default
        taken_apart: torch.Tensor = whole._op_dk(
            _COMPOSITE, query, key, value, attn_mask, dropout_p, is_causal, **options
        )
        return taken_apart
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        # The kernel adds its mask: 0 where it may look, minus infinity elsewhere.
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), float("-inf"))
    fused: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return fused
