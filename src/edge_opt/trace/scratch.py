"""Tensors that an operator makes beside its outputs, and drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from edge_opt.trace.lifetimes import Lifetimes, empty_meta_like
from edge_opt.trace.operators import COMPOSITE, facts_of, is_composite
from edge_opt.trace.shapes import is_fused_attention


class PeakCounter:
    """Bytes that are allocated now, and the most that ever were."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0

    def alloc(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)

    def free(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def spike(self, nbytes: int) -> None:
        """Allocate and free at once."""
        self.peak = max(self.peak, self.allocated + nbytes)


class RecurrentStack:
    """Layers of a recurrent network by their sizes in bytes. Peaks include the outputs.

    The order of allocating and freeing is copied from torch 2.13's aten/src/ATen/native/RNN.cpp (loops over steps) and
    native/mkldnn/RNN.cpp (one call of oneDNN per layer). Watching the operators on meta tensors is no alternative:
    these loops run inside one kernel. tests/trace/test_scratch.py compares peaks with what the CPU allocates, to the
    byte, and fails when a later torch allocates in another order.
    """

    def __init__(
        self, x: torch.Tensor, hidden: torch.Tensor, params: list[torch.Tensor], layers: int, bidirectional: bool,
        batch_first: bool,
    ) -> None:  # fmt: skip
        x = x.transpose(0, 1) if batch_first else x
        self.layers = layers
        self.directions = 2 if bidirectional else 1
        self.time = x.shape[0]
        # The kernels run time-first, on a copy where the input is not.
        self.copy = 0 if x.is_contiguous() else x.numel() * x.itemsize
        self.step = x.shape[1] * hidden.shape[2] * x.itemsize
        self.gates = x.shape[1] * params[1].shape[0] * x.itemsize

    def fused_peak(self, zeros: Sequence[int]) -> int:
        """Return the peak of an LSTM in oneDNN: one call per layer and direction, states kept apart until stacked.

        `zeros` replace the biases of each call.
        """
        sequence = self.time * self.step
        counter = PeakCounter()
        counter.alloc(self.copy)
        for layer in range(self.layers):
            for call in range(layer * self.directions, (layer + 1) * self.directions):
                counter.alloc(zeros[call] + sequence + 2 * self.step)
                # Only now does it replace the last layer's output in this direction.
                counter.free(zeros[call] + (sequence if layer and self.directions == 2 else 0))
            if self.directions == 2:
                counter.alloc(2 * sequence)
            if layer:
                counter.free(self.directions * sequence)
        counter.alloc(2 * self.layers * self.directions * self.step)
        return counter.peak

    def stepwise_peak(self, gates: int, inside: int, has_cell: bool) -> int:
        """Return the peak of a loop over steps: one product over all inputs, then every step's output until stacked.

        `inside` is how many states a step holds at its height; `has_cell`: a second state goes from step to step.
        """
        state = self.gates // gates
        cell = state if has_cell else 0
        sequence, product = self.time * self.step, self.time * self.gates
        counter = PeakCounter()
        for layer in range(self.layers):
            for direction in range(self.directions):
                copy = 0 if layer else self.copy
                counter.alloc(copy + product)
                # The other direction's product is dropped only when this one is complete.
                counter.free(copy + (product if direction else 0))
                counter.spike((self.time - 1) * self.step + (cell if self.time > 1 else 0) + inside * state)
                counter.alloc(sequence + cell + sequence)
            counter.alloc(2 * sequence if self.directions == 2 else 0)
            # The output and the last states of the layer remain.
            counter.free(product + self.directions * (sequence - self.step))
            counter.free((2 * sequence if self.directions == 2 else 0) + (self.directions * sequence if layer else 0))
        counter.alloc(self.layers * self.directions * (self.step + cell))
        return counter.peak


aten = torch.ops.aten

_Tensor = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)
_rules: dict[Any, Callable[..., int]] = {}
_NUMBERS = frozenset((bool, int, float, complex))


def scratch_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> int:
    """Return the bytes that one call holds beside its visible outputs, at the moment when it holds most."""
    rule = _rules.get(func)
    hidden = rule(outputs, *args, **kwargs) if rule is not None and outputs else 0
    has_numbers = not _NUMBERS.isdisjoint([value.__class__ for value in args])
    return max(0, hidden) + (_numbers(func, args) if has_numbers else 0)


def _numbers(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of Python numbers in the place of tensors: torch makes a tensor of each, 64 bits for a real."""
    values = [args[position] for position in facts_of(func).tensor_positions if position < len(args)]
    return sum(
        1 if isinstance(value, bool) else 16 if isinstance(value, complex) else 8
        for value in values
        if isinstance(value, (bool, int, float, complex))
    )


def _rule(*funcs: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def register(rule: Callable[..., int]) -> Callable[..., int]:
        _rules.update(dict.fromkeys(funcs, rule))
        return rule

    return register


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _is_dense(x: torch.Tensor) -> bool:
    """Return whether the memory format that torch guesses for this tensor is the one it has."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last))


@_rule(aten.max_pool2d.default, aten.max_pool3d.default)
def _pooling(outputs: list[torch.Tensor], *_: Any) -> int:
    # The kernel writes 64-bit indices even if they were not requested.
    return 8 * outputs[0].numel()


@_rule(aten.layer_norm.default)
def _layer_norm(outputs: list[torch.Tensor], x: torch.Tensor, shape: list[int], weight: Any = None, *_: Any) -> int:
    statistics = 2 * (x.numel() // max(prod(shape), 1))
    return statistics * (x if weight is None else weight).itemsize


@_rule(aten.group_norm.default)
def _group_norm(outputs: list[torch.Tensor], x: torch.Tensor, groups: int, weight: Any = None, *_: Any) -> int:
    statistics = 2 * x.shape[0] * groups
    return statistics * (x if weight is None else weight).itemsize + (0 if _is_dense(x) else _nbytes(x))


@_rule(aten.batch_norm.default)
def _batch_norm(
    outputs: list[torch.Tensor], x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> int:
    return 2 * x.shape[1] * (x if weight is None else weight).itemsize if training else 0


@_rule(aten.instance_norm.default)
def _instance_norm(
    outputs: list[torch.Tensor], x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, from_input: bool, *_: Any
) -> int:
    # A batch norm over batch x channels: every vector is repeated for each sample, and statistics are saved.
    repeated = sum(x.shape[0] * _nbytes(vector) for vector in (weight, bias, mean, var) if vector is not None)
    statistics = 2 * x.shape[0] * x.shape[1] * x.itemsize if from_input else 0
    return repeated + statistics + (0 if x.is_contiguous() else _nbytes(x))


@_rule(aten.rms_norm.default)
def _rms_norm(outputs: list[torch.Tensor], x: torch.Tensor, shape: list[int], weight: Any = None, *_: Any) -> int:
    item = 4 if x.dtype in _HALF else x.itemsize
    whole, rows = x.numel() * item, x.numel() // max(prod(shape), 1) * item
    widened = whole if x.dtype in _HALF else 0
    squaring = whole + 2 * rows
    scaling = rows + whole * (2 if weight is not None or not x.is_contiguous() else 1)
    return widened + max(squaring, scaling) - _nbytes(outputs[0])


@_rule(aten.softmax.int, aten.log_softmax.int)
def _softmax(outputs: list[torch.Tensor], x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> int:
    return _nbytes(outputs[0]) if dtype not in (None, x.dtype) else 0


@_rule(aten.dropout.default)
def _dropout(outputs: list[torch.Tensor], x: torch.Tensor, p: float, train: bool) -> int:
    return _nbytes(x) if train and p > 0 else 0


@_rule(aten.linear.default)
def _linear(outputs: list[torch.Tensor], x: torch.Tensor, *_: Any) -> int:
    # Rows that cannot be seen as one matrix are copied first; torch avoids the copy only with frozen weights.
    steps = [(size, step) for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size != 1]
    is_matrix = all(outer == size * inner for (_, outer), (size, inner) in pairwise(steps))
    return 0 if is_matrix else _nbytes(x)


@_rule(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def _same_convolution(
    outputs: list[torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: Any = None, stride: Any = (1,),
    padding: str = "valid", dilation: Any = (1,), groups: int = 1,
) -> int:  # fmt: skip
    kernel = weight.shape[2:]
    spread = list(dilation) if len(dilation) == len(kernel) else list(dilation) * len(kernel)
    odd = [step * (size - 1) % 2 for step, size in zip(spread, kernel, strict=True)]
    if padding != "same" or not any(odd):
        return 0
    # Where both sides cannot get the same padding, the input is copied with one more on one side.
    sizes = [size + more for size, more in zip(x.shape[-len(kernel) :], odd, strict=True)]
    return int(prod((*x.shape[: -len(kernel)], *sizes))) * x.itemsize


@_rule(aten.bilinear.default)
def _bilinear(outputs: list[torch.Tensor], x: Any, y: Any, weight: Any, bias: Any = None) -> int:
    return 0 if bias is None else _nbytes(outputs[0])


@_rule(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
def _embedding_bag(outputs: list[torch.Tensor], *_: Any) -> int:
    # The bags of the indices are written with one place more, which is then cut off.
    return outputs[1].itemsize if outputs[1].numel() else 0


@_rule(aten.scaled_dot_product_attention.default)
def _attention(
    outputs: list[torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    if not is_fused_attention(query, key, value, attn_mask, *args, **kwargs):
        call = (query, key, value, attn_mask, *args)
        return _observed(aten.scaled_dot_product_attention.default, call, kwargs) - _nbytes(outputs[0])
    logarithms = prod(query.shape[:-1]) * max(query.itemsize, 4)
    is_converted = attn_mask is not None and attn_mask.dtype is torch.bool
    return int(logarithms) + (attn_mask.numel() * query.itemsize if is_converted else 0)


@_rule(aten.lstm.input)
def _lstm(
    outputs: list[torch.Tensor], x: torch.Tensor, hx: list[torch.Tensor], params: list[torch.Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> int:  # fmt: skip
    stack = RecurrentStack(x, hx[0], params, num_layers, bidirectional, batch_first)
    is_projected = hx[0].shape[2] != hx[1].shape[2]
    if x.dtype not in (torch.float32, torch.bfloat16) or is_projected or not torch._C._has_mkldnn:
        return stack.stepwise_peak(gates=4, inside=7, has_cell=True) - sum(map(_nbytes, outputs))
    # oneDNN asks for biases, and gets zeros of the weights' size where there are none.
    sizes = [0 if has_biases else _nbytes(weight) for weight in params]
    per_call = 4 if has_biases else 2
    zeros = [sum(sizes[first : first + per_call]) for first in range(0, len(sizes), per_call)]
    return stack.fused_peak(zeros) - sum(map(_nbytes, outputs))


def _stepwise(
    gates: int, inside: int, outputs: list[torch.Tensor], x: Any, hx: Any, params: Any, has_biases: bool, layers: int,
    *rest: Any,
) -> int:  # fmt: skip
    stack = RecurrentStack(x, hx, params, layers, *rest[2:])
    return stack.stepwise_peak(gates, inside, has_cell=False) - sum(map(_nbytes, outputs))


_rule(aten.gru.input)(partial(_stepwise, 3, 5))
_rule(aten.rnn_tanh.input, aten.rnn_relu.input)(partial(_stepwise, 1, 2))


@_rule(aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default)
def _cell(outputs: list[torch.Tensor], x: Any, hx: Any, w_ih: torch.Tensor, w_hh: torch.Tensor, *_: Any) -> int:
    state = _nbytes(outputs[0])
    gates = w_hh.shape[0] // w_hh.shape[1]
    # Both products stand side by side; a GRU then makes its new gate and its state beside them, an RNN its state.
    beside = {4: 0, 3: 2, 1: 1}[gates]
    return (2 * gates + beside) * state - sum(map(_nbytes, outputs))


def _observed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the most bytes alive while an operator is taken apart on meta tensors, its outputs included."""
    args, kwargs = tree_map_only(_Tensor, empty_meta_like, (args, kwargs))
    with _Watch([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Tensor)]) as watch:
        func._op_dk(COMPOSITE, *args, **kwargs)
    return int(watch.peak_bytes)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new storages; those of the arguments are not new."""

    def __init__(self, arguments: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._lifetimes = Lifetimes()
        for tensor in arguments:
            self._lifetimes.register(tensor, "input")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_composite(func):
            with self:
                return func._op_dk(COMPOSITE, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, _Tensor):
                self._lifetimes.born(tensor)
        self.peak_bytes = max(self.peak_bytes, self._lifetimes.live_bytes)
        return result
