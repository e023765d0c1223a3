"""Kernels that the CPU runs otherwise than the meta device: attention, recurrent layers, some gradients.

For the length of a trace, torch's dispatcher sends those operators on meta tensors to the same operators that it would
send them to on the CPU. Tensors on other devices, and other threads, are not concerned.

On the CPU, an LSTM is one oneDNN kernel per layer and direction (mkldnn/RNN.cpp). GRU and RNN multiply the input of all
steps at once, and then go step by step (RNN.cpp, `FullLayer`); other devices multiply it in every step. What is alive
when is a matter of the order, so names are bound and dropped here as they are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

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


_LSTM_MODE = 2  # of torch's ldnn_rnn modes
_linear = torch.nn.functional.linear


class _Params(NamedTuple):
    """Weights of one layer and direction."""

    ih: torch.Tensor
    hh: torch.Tensor
    bias_ih: torch.Tensor | None
    bias_hh: torch.Tensor | None
    hr: torch.Tensor | None  # the projection of an LSTM's state

    def of_input(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(x, self.ih, self.bias_ih)

    def of_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return _linear(hidden, self.hh, self.bias_hh)


_Cell = Callable[[torch.Tensor, Any, _Params], Any]  # input's share, state, weights -> next state


def recurrent_kernels(is_on: Callable[[], bool]) -> Mapping[str, Callable[..., Any]]:
    """Kernels by the name of the operator; each takes torch's own way where `is_on` says no."""
    return {
        "lstm.input": _either(aten.lstm.input, _lstm, is_on),
        "gru.input": _either(aten.gru.input, _stepwise(_gru_cell), is_on),
        "rnn_tanh.input": _either(aten.rnn_tanh.input, _stepwise(_simple_cell(torch.tanh)), is_on),
        "rnn_relu.input": _either(aten.rnn_relu.input, _stepwise(_simple_cell(torch.relu)), is_on),
    }


def _either(operator: Any, kernel: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return kernel(*args) if is_on() else operator._op_dk(_COMPOSITE, *args)

    return call


def _gru_cell(of_input: torch.Tensor, hidden: torch.Tensor, params: _Params) -> torch.Tensor:
    input_gates = of_input.unsafe_chunk(3, 1)
    state_gates = params.of_state(hidden).unsafe_chunk(3, 1)
    reset = state_gates[0].add_(input_gates[0]).sigmoid_()
    update = state_gates[1].add_(input_gates[1]).sigmoid_()
    new = input_gates[2].add(state_gates[2].mul_(reset)).tanh_()
    return (hidden - new).mul_(update).add_(new)


def _simple_cell(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> _Cell:
    def cell(of_input: torch.Tensor, hidden: torch.Tensor, params: _Params) -> torch.Tensor:
        return nonlinearity(params.of_state(hidden).add_(of_input))

    return cell


def _lstm_cell(
    of_input: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], params: _Params
) -> tuple[torch.Tensor, torch.Tensor]:
    gates = params.of_state(state[0]).add_(of_input).unsafe_chunk(4, 1)
    enter, forget, candidate = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[2].tanh_()
    out = gates[3].sigmoid_()
    cell = (forget * state[1]).add_(enter * candidate)
    hidden = out * cell.tanh()
    if params.hr is not None:
        hidden = hidden.matmul(params.hr.t())
    return hidden, cell


def _stepwise(cell: _Cell) -> Callable[..., Any]:
    """All layers of a GRU or RNN, as `torch.gru` and its like on a padded batch."""

    def layers(
        x: torch.Tensor, hx: torch.Tensor, params: list[torch.Tensor], has_biases: bool, num_layers: int,
        dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        inputs = x.transpose(0, 1) if batch_first else x
        gathered = _gathered(params, 4 if has_biases else 2)
        outputs, last = _stack(cell, inputs, hx.unbind(0), gathered, num_layers, dropout if train else 0.0,
                               bidirectional)  # fmt: skip
        final = torch.stack(last, 0)
        return (outputs.transpose_(0, 1) if batch_first else outputs), final

    return layers


def _gathered(params: list[torch.Tensor], width: int) -> list[_Params]:
    """Weights by layer and direction; `width` tensors each."""
    rows: Iterator[list[torch.Tensor]] = (params[start : start + width] for start in range(0, len(params), width))
    return [
        _Params(
            row[0], row[1], row[2] if width > 3 else None, row[3] if width > 3 else None, row[-1] if width % 2 else None
        )
        for row in rows
    ]


def _stack(
    cell: _Cell, inputs: torch.Tensor, states: Sequence[Any], params: list[_Params], num_layers: int, dropout: float,
    bidirectional: bool,
) -> tuple[torch.Tensor, list[Any]]:  # fmt: skip
    """The last layer's outputs, and the last state of every layer and direction."""
    last: list[Any] = []
    for layer in range(num_layers):
        if bidirectional:
            pair = slice(2 * layer, 2 * layer + 2)
            inputs, final = _both_ways(cell, inputs, states[pair], params[pair])
            last += final
        else:
            inputs, final = _one_way(cell, inputs, states[layer], params[layer])
            last.append(final)
        del final
        if dropout and layer < num_layers - 1:
            inputs = torch.dropout(inputs, dropout, True)
    return inputs, last


def _one_way(cell: _Cell, inputs: torch.Tensor, state: Any, params: _Params) -> tuple[torch.Tensor, Any]:
    """One direction. The input's share of every step is held until the outputs are joined, as torch holds it."""
    steps = params.of_input(inputs).unbind(0)
    outputs, final = _steps(cell, steps, state, params)
    return torch.stack(outputs, 0), final


def _both_ways(
    cell: _Cell, inputs: torch.Tensor, states: Sequence[Any], params: list[_Params]
) -> tuple[torch.Tensor, list[Any]]:
    """Forth and back. The outputs of every step are held until both are joined, as torch holds them."""
    steps = params[0].of_input(inputs).unbind(0)
    forth, last_forth = _steps(cell, steps, states[0], params[0])
    joined_forth = torch.stack(forth, 0)
    steps = params[1].of_input(inputs).unbind(0)
    back, last_back = _steps(cell, steps[::-1], states[1], params[1])
    joined_back = torch.stack(back[::-1], 0)
    return torch.cat((joined_forth, joined_back), -1), [last_forth, last_back]


def _steps(cell: _Cell, steps: Sequence[torch.Tensor], state: Any, params: _Params) -> tuple[list[torch.Tensor], Any]:
    outputs: list[torch.Tensor] = []
    for step in steps:
        state = cell(step, state, params)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return outputs, state


def _lstm(
    x: torch.Tensor, hx: list[torch.Tensor], params: list[torch.Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    is_projected = hx[0].shape[2] != hx[1].shape[2]
    if x.dtype in (torch.float32, torch.bfloat16) and torch._C._has_mkldnn and not is_projected:
        return _fused_lstm(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    states = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    gathered = _gathered(params, (4 if has_biases else 2) + is_projected)
    inputs = x.transpose(0, 1) if batch_first else x
    outputs, last = _stack(_lstm_cell, inputs, states, gathered, num_layers, dropout if train else 0.0, bidirectional)
    hidden, cells = zip(*last, strict=True)
    final = torch.stack(hidden, 0), torch.stack(cells, 0)
    return (outputs.transpose_(0, 1) if batch_first else outputs), *final


def _fused_lstm(
    x: torch.Tensor, hx: list[torch.Tensor], params: list[torch.Tensor], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """One oneDNN call per layer and direction."""
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
