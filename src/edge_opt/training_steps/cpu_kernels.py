"""Kernels that the CPU runs otherwise than the meta device: attention, LSTMs, some gradients.

For the length of a trace, torch's dispatcher sends those operators on meta tensors to the same operators that it would
send them to on the CPU. Tensors on other devices, and other threads, are not concerned.

On the CPU, an LSTM is one oneDNN kernel per layer and direction (mkldnn/RNN.cpp). GRU, RNN, and LSTMs with a projection
or in double precision are traced as the meta device runs them: it multiplies the input in every step, where the CPU
multiplies that of all steps at once. FLOPs are the same; what is alive at the peak differs by some per cent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from edge_opt.trace.shapes import is_fused_attention

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_active = threading.local()


@contextmanager
def as_on_cpu(autocast: torch.dtype | None = None) -> Iterator[None]:
    """Let these operators on meta tensors call what they would call on the CPU, in this thread.

    A kernel that is registered for AutogradMeta holds for the whole process. Other threads may use meta tensors
    meanwhile, so that each kernel asks a thread-local switch and otherwise takes torch's own way. A dispatch mode
    cannot do this: it sees operators below autograd, where the composite ones have been taken apart already.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")  # type: ignore[no-untyped-call]
    library.impl("lstm.input", _lstm, "AutogradMeta")  # type: ignore[no-untyped-call]
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
    """Run a stretch of a step under autocast."""
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


_LSTM_MODE = 2  # of torch's ldnn_rnn modes


def _lstm(
    x: torch.Tensor, hx: list[torch.Tensor], params: list[torch.Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    is_projected = hx[0].shape[2] != hx[1].shape[2]
    has_kernel = x.dtype in (torch.float32, torch.bfloat16) and torch._C._has_mkldnn and not is_projected
    lstm = _fused_lstm if _is_on() and has_kernel else partial(aten.lstm.input._op_dk, _COMPOSITE)
    return lstm(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def _fused_lstm(
    x: torch.Tensor, hx: list[torch.Tensor], params: list[torch.Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Run one oneDNN call per layer and direction."""
    directions, width = 2 if bidirectional else 1, 4 if has_biases else 2
    inputs = (x.transpose(0, 1) if batch_first else x).contiguous()
    hidden, cell = hx[0].contiguous(), hx[1].contiguous()
    outputs: list[Any] = [None] * directions
    last_hidden: list[torch.Tensor] = []
    last_cell: list[torch.Tensor] = []
    for layer in range(num_layers):
        for direction in range(directions):
            index = layer * directions + direction
            weights = params[index * width : (index + 1) * width]
            if not has_biases:
                weights = [*weights, *(torch.zeros_like(weight) for weight in weights)]
            result = aten.mkldnn_rnn_layer.default(
                inputs, *weights, hidden[index], cell[index], direction > 0, [], _LSTM_MODE, hidden.shape[2],
                num_layers, has_biases, bidirectional, batch_first, train,
            )  # fmt: skip
            outputs[direction] = result[0]
            last_hidden.append(result[1])
            last_cell.append(result[2])
            del weights, result
        inputs = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            inputs = torch.dropout(inputs, dropout, True)
    stacked = torch.stack(last_hidden, 0), torch.stack(last_cell, 0)
    return (inputs.transpose(0, 1) if batch_first else inputs), *stacked
