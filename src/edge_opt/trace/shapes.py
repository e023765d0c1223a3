"""Output shapes of hot operators, so that slow meta kernels are not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch


def is_fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> bool:  # fmt: skip
    """Return whether the CPU runs attention as one flash kernel; otherwise it is taken apart into matrix products."""
    # The conditions are those of use_flash_attention_cpp in torch 2.13's aten/src/ATen/native/transformers/
    # sdp_utils_cpp.cpp. Asking torch itself (`torch._fused_sdp_choice`) is no alternative: on meta tensors it answers
    # for the meta device. tests/trace/test_scratch.py compares every form with the bytes that the CPU allocates, and
    # fails when a later torch decides differently.
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 for tensor in (query, key, value)) or dropout_p > 0:
        return False
    batch, heads, length, width = query.shape
    if key.shape[0] != batch or key.shape[3] != width or key.shape != value.shape:
        return False
    if key.shape[1] != heads and not (enable_gqa and heads % key.shape[1] == 0):
        return False
    if attn_mask is None:
        return True
    if attn_mask.dim() not in (2, 4) or attn_mask.stride(-1) != 1 or attn_mask.requires_grad:
        return False
    wanted = (batch, heads, length, key.shape[2])[-attn_mask.dim() :]
    return all(size in (1, full) for size, full in zip(attn_mask.shape, wanted, strict=True))


aten = torch.ops.aten

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Specs = tuple[Spec, ...] | None
Rule = Callable[..., Specs]

_rules: dict[Any, Rule] = {}


def output_specs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Specs:
    """Return (shape, strides, dtype) of each output, or None where only the meta kernel knows."""
    rule = _rules.get(func)
    return rule(*args, **kwargs) if rule is not None else None


def fails_on_shape_only(func: Any) -> bool:
    """Return whether a refusal by this operator's meta kernel is about shapes, so that real tensors fail as well."""
    return func in _rules or func in _REFUSE_BY_SHAPE


_REFUSE_BY_SHAPE = frozenset((
    aten.view.default, aten.reshape.default, aten.expand.default, aten.addmm.default, aten.add_.Tensor,
    aten.mul_.Tensor,
))  # fmt: skip


def _rule(*funcs: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _rules.update(dict.fromkeys(funcs, rule))
        return rule

    return register


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return shape, tuple(strides), dtype


def _same_layout(x: torch.Tensor) -> Specs:
    if not x.is_contiguous() or not x.is_floating_point():
        return None
    return (_contiguous(tuple(x.shape), x.dtype),)


def _as_laid_out(x: torch.Tensor) -> Specs:
    """Return the result of an elementwise kernel, which keeps the order of its input's strides and leaves no gaps."""
    if not x.is_floating_point():
        return None
    return ((tuple(x.shape), torch.empty_like(x, device="meta").stride(), x.dtype),)


@_rule(
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default, aten.tanh.default,
    aten.hardswish.default, aten.hardsigmoid.default, aten.hardtanh.default, aten.relu6.default,
    aten.leaky_relu.default, aten.elu.default, aten.mish.default, aten.softplus.default, aten.exp.default,
    aten.rsqrt.default, aten.sqrt.default, aten.neg.default, aten.cos.default, aten.sin.default, aten.erf.default,
    aten.abs.default, aten.square.default,
)  # fmt: skip
def _elementwise(x: torch.Tensor, *_: Any, **__: Any) -> Specs:
    return _same_layout(x) or _as_laid_out(x)


@_rule(aten.roll.default, aten.masked_fill.Scalar)
def _moved(x: torch.Tensor, other: Any, *_: Any) -> Specs:
    fits = not isinstance(other, torch.Tensor) or _broadcasts(other, x)
    return _same_layout(x) if fits else None


@_rule(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.ge.Scalar)
def _comparison(x: torch.Tensor, value: Any) -> Specs:
    return (_contiguous(tuple(x.shape), torch.bool),) if x.is_contiguous() else None


@_rule(aten.softmax.int, aten.log_softmax.int)
def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Specs:
    return _same_layout(x) if dtype is None and -x.dim() <= dim < x.dim() else None


@_rule(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm(x: torch.Tensor, normalized_shape: list[int], weight: Any = None, bias: Any = None, *_: Any) -> Specs:
    wanted = tuple(normalized_shape)
    fits = tuple(x.shape[-len(wanted) :]) == wanted and (weight is None or tuple(weight.shape) == wanted)
    if not fits or not x.is_floating_point() or (weight is not None and weight.dtype != x.dtype):
        return None
    return (_contiguous(tuple(x.shape), x.dtype),)  # row-major, however the input lies


@_rule(aten.batch_norm.default, aten.instance_norm.default)
def _batch_norm(x: torch.Tensor, weight: Any, bias: Any, running_mean: Any, *_: Any) -> Specs:
    if x.dim() < 2:
        return None
    fits = all(t is None or tuple(t.shape) == (x.shape[1],) for t in (weight, bias, running_mean))
    return _same_layout(x) if fits else None


@_rule(aten.native_batch_norm.default)
def _normalized_by_buffers(
    x: torch.Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *_: Any
) -> Specs:
    """In eval mode the CPU's kernel hands out no statistics of the batch; the meta device's does."""
    specs = None if training else _batch_norm(x, weight, bias, running_mean)
    return None if specs is None else (*specs, _contiguous((0,), x.dtype), _contiguous((0,), x.dtype))


@_rule(aten.group_norm.default)
def _group_norm(x: torch.Tensor, groups: int, weight: Any = None, *_: Any) -> Specs:
    if x.dim() < 2 or x.shape[1] % groups or (weight is not None and tuple(weight.shape) != (x.shape[1],)):
        return None
    return _same_layout(x)


@_rule(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
def _binary(x: Any, y: Any, **kwargs: Any) -> Specs:
    if not isinstance(x, torch.Tensor) or kwargs.get("rounding_mode") is not None:
        return None
    if not isinstance(y, torch.Tensor):
        return (_same_layout(x) or _as_laid_out(x)) if isinstance(y, (int, float)) else None
    if x.dtype != y.dtype or not x.is_floating_point() or not x.is_contiguous() or not y.is_contiguous():
        return None
    if _broadcasts(y, x):
        return _same_layout(x)
    if _broadcasts(x, y):
        return _same_layout(y)
    if x.dim() != y.dim() or not all(a == b or 1 in (a, b) for a, b in zip(x.shape, y.shape, strict=True)):
        return None
    return (_contiguous(tuple(map(max, x.shape, y.shape)), x.dtype),)


def _broadcasts(small: torch.Tensor, big: torch.Tensor) -> bool:
    """Return whether `small` fits into the shape of `big`."""
    offset = big.dim() - small.dim()
    return offset >= 0 and all(dim in (1, big.shape[offset + axis]) for axis, dim in enumerate(small.shape))


_UNTAGGED_POINTWISE = frozenset((aten.hardswish_.default, aten.hardsigmoid_.default, aten.fill_.Scalar))


def in_place_is_valid(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an in-place operator on these shapes is certain to succeed, so that it need not be run."""
    if func is aten.fill_.Tensor and args[1].dim() == 0 and not args[1].is_complex():
        return True  # it converts the number
    if torch.Tag.pointwise not in func.tags and func not in _UNTAGGED_POINTWISE:
        return False
    x, *others = args
    tensors = [value for value in others if isinstance(value, torch.Tensor)]
    return all(_broadcasts(tensor, x) and tensor.dtype == x.dtype for tensor in tensors)


@_rule(aten.linear.default)
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Specs:
    fits = weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    fits = fits and (bias is None or (tuple(bias.shape) == (weight.shape[0],) and bias.dtype == x.dtype))
    if not fits or not x.is_contiguous():
        return None
    return (_contiguous((*x.shape[:-1], weight.shape[0]), x.dtype),)


def _channels_last(shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    _, channels, height, width = shape
    return shape, (channels * height * width, 1, channels * width, channels), dtype


def _window_counts(
    sizes: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[int, ...] | None:
    """Return how many windows fit along each axis; None where one does not. A single setting applies to all axes."""
    counts = []
    for axis, size in enumerate(sizes):
        width, step, pad, spread = (
            values[axis if len(values) > 1 else 0] for values in (kernel, stride, padding, dilation)
        )
        room = size + 2 * pad - spread * (width - 1) - 1
        if room < 0:
            return None
        counts.append(room // step + 1)
    return tuple(counts)


@_rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, stride: Any = (1,), padding: Any = (0,),
    dilation: Any = (1,), groups: int = 1,
) -> Specs:  # fmt: skip
    spatial = weight.dim() - 2
    if x.dim() != weight.dim() or x.dtype != weight.dtype:
        return None
    is_plain = x.is_contiguous() and weight.is_contiguous()
    # The meta kernel does not know that the CPU's keeps channels last.
    is_last = spatial == 2 and x.is_contiguous(memory_format=torch.channels_last)
    if not is_plain and not is_last:
        return None
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        return None
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.dtype != x.dtype):
        return None
    sizes = _window_counts(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    if sizes is None:
        return None
    shape = (x.shape[0], weight.shape[0], *sizes)
    return (_contiguous(shape, x.dtype) if is_plain else _channels_last(shape, x.dtype),)


@_rule(aten.adaptive_avg_pool2d.default)
def _adaptive_pool(x: torch.Tensor, output_size: list[int]) -> Specs:
    if x.dim() not in (3, 4) or len(output_size) != 2 or min(output_size) < 1:
        return None
    if x.is_contiguous():
        return (_contiguous((*x.shape[:-2], *output_size), x.dtype),)
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    return (_channels_last((*x.shape[:2], *output_size), x.dtype),)


@_rule(aten.max_pool2d.default)
def _max_pool(
    x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> Specs:
    if x.dim() != 4 or ceil_mode or not x.is_contiguous():
        return None
    sizes = _window_counts(x.shape[2:], kernel, stride or kernel, padding, dilation)
    if sizes is None or 2 * max(padding) > min(kernel):
        return None  # or a padding that the kernel refuses
    return (_contiguous((*x.shape[:2], *sizes), x.dtype),)


@_rule(aten.mm.default)
def _matrix_product(x: torch.Tensor, y: torch.Tensor) -> Specs:
    fits = x.dim() == y.dim() == 2 and x.shape[1] == y.shape[0] and x.dtype == y.dtype
    return (_contiguous((x.shape[0], y.shape[1]), x.dtype),) if fits else None


@_rule(aten.bmm.default)
def _batched_matrix_product(x: torch.Tensor, y: torch.Tensor) -> Specs:
    if x.dim() != 3 or y.dim() != 3 or x.dtype != y.dtype:
        return None
    fits = x.shape[0] == y.shape[0] and x.shape[2] == y.shape[1]
    return (_contiguous((*x.shape[:2], y.shape[2]), x.dtype),) if fits else None


@_rule(*(packet.default for packet in [getattr(aten, "_grouped_mm", None)] if packet))  # not in older versions
def _grouped_product(
    x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Specs:
    if x.dtype != y.dtype or x.shape[-1] != y.shape[-2] or out_dtype not in (None, x.dtype):
        return None
    groups = () if offs is None else tuple(offs.shape)
    outer = {(2, 2): groups, (2, 3): (), (3, 2): (), (3, 3): tuple(x.shape[:1])}[(x.dim(), y.dim())]
    return (_contiguous((*outer, x.shape[-2], y.shape[-1]), x.dtype),)


def _is_row_major(x: torch.Tensor) -> bool:
    """Return whether dimensions lie in their order, with or without gaps between rows."""
    strides = x.stride()
    return x.is_contiguous() or (strides[-1] == 1 and all(a > b for a, b in pairwise(strides)))


@_rule(aten.index.Tensor)
def _index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> Specs:
    index = indices[0]
    if len(indices) != 1 or index is None or index.dtype is not torch.int64 or not index.is_contiguous():
        return None
    return (_contiguous((*index.shape, *x.shape[1:]), x.dtype),) if x.is_contiguous() else None


@_rule(aten.cat.default)
def _cat(tensors: list[torch.Tensor], dim: int = 0) -> Specs:
    first = tensors[0]
    if not all(t.dim() == first.dim() and t.dtype == first.dtype and _is_row_major(t) for t in tensors):
        return None
    if not -first.dim() <= dim < first.dim():
        return None
    axis = dim % first.dim()
    rest = [shape[:axis] + shape[axis + 1 :] for shape in (tuple(t.shape) for t in tensors)]
    if any(shape != rest[0] for shape in rest):
        return None
    total = sum(t.shape[axis] for t in tensors)
    return (_contiguous((*rest[0][:axis], total, *rest[0][axis:]), first.dtype),)


@_rule(aten.stack.default)
def _stack(tensors: list[torch.Tensor], dim: int = 0) -> Specs:
    first = tensors[0]
    shape, rank = tuple(first.shape), first.dim() + 1
    is_alike = all(t.shape == first.shape and t.dtype == first.dtype and _is_row_major(t) for t in tensors)
    if not is_alike or not -rank <= dim < rank:
        return None
    axis = dim % rank
    return (_contiguous((*shape[:axis], len(tensors), *shape[axis:]), first.dtype),)


@_rule(aten.embedding.default)
def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> Specs:
    fits = weight.dim() == 2 and indices.dtype in (torch.int64, torch.int32)
    return (_contiguous((*indices.shape, weight.shape[1]), weight.dtype),) if fits else None


@_rule(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
def _embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, by_frequency: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Any = None, includes_last: bool = False, padding_idx: int | None = None,
) -> Specs:  # fmt: skip
    is_plain = per_sample_weights is None and not includes_last and (padding_idx is None or padding_idx < 0)
    if not is_plain or weight.dtype is not torch.float32 or not weight.is_contiguous():
        return None
    if indices.dtype != offsets.dtype or indices.dim() != 1 or offsets.dim() != 1:
        return None
    bags = offsets.shape[0]
    # Beside the result: the bag of each index (none for a sum), the size of each bag, and where each maximum came from.
    shapes = ((0 if mode == 0 else indices.shape[0],), (bags,), (bags, weight.shape[1]) if mode == 2 else (bags,))
    return _contiguous((bags, weight.shape[1]), weight.dtype), *(_contiguous(shape, indices.dtype) for shape in shapes)


@_rule(aten._embedding_bag.default)
def _kept_embedding_bag(*args: Any) -> Specs:
    """The same where its gradient will be asked for. The kernel counts bags from one element before the first."""
    specs = _embedding_bag(*args)
    if specs is None or not specs[1][0][0]:
        return specs
    counted = (specs[1][0][0] + 1,)
    return specs[0], (counted, (1,), specs[1][2]), *specs[2:]


@_rule(aten.scaled_dot_product_attention.default)
def _attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Specs:
    if not is_fused_attention(query, *args, **kwargs):
        return None
    # The kernel's result is laid out as its queries are.
    return ((tuple(query.shape), torch.empty_like(query, device="meta").stride(), query.dtype),)


@_rule(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def _recurrent(
    x: torch.Tensor, hx: Any, params: list[torch.Tensor], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Specs:  # fmt: skip
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    hidden = states[0]
    directions = 2 if bidirectional else 1
    batch = x.shape[0 if batch_first else 1] if x.dim() == 3 else 0
    if x.dim() != 3 or params[0].shape[1] != x.shape[2]:
        return None
    if tuple(hidden.shape[:2]) != (num_layers * directions, batch):
        return None
    time = x.shape[1 if batch_first else 0]
    width = directions * hidden.shape[2]
    # The kernels run time-first; a batch-first result is the transpose of what they wrote.
    out = _contiguous((time, batch, width), x.dtype)
    if batch_first:
        out = (batch, time, width), (width, batch * width, 1), x.dtype
    return out, *(_contiguous(tuple(state.shape), x.dtype) for state in states)


@_rule(aten.lstm_cell.default, aten.gru_cell.default, aten.rnn_tanh_cell.default, aten.rnn_relu_cell.default)
def _cell(x: torch.Tensor, hx: Any, w_ih: torch.Tensor, w_hh: torch.Tensor, *_: Any) -> Specs:
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    h = states[0]
    fits = x.dim() == 2 and x.shape[1] == w_ih.shape[1] and h.shape[1] == w_hh.shape[1] and x.shape[0] == h.shape[0]
    return tuple(_contiguous(tuple(state.shape), x.dtype) for state in states) if fits else None


@_rule(aten.mkldnn_rnn_layer.default)
def _onednn_layer(x: torch.Tensor, *args: Any) -> Specs:
    """One layer and direction of an LSTM in oneDNN: the sequence, both last states, and what its backward needs."""
    hidden, cell, train = args[4], args[5], args[14]
    steps, batch, width = *x.shape[:2], hidden.shape[-1]
    workspace = onednn_workspace(steps, batch, x.shape[2], width, x.itemsize) if train else 0
    states = (_contiguous(tuple(state.shape), x.dtype) for state in (hidden, cell))
    return _contiguous((steps, batch, width), x.dtype), *states, ((workspace,), (1,), torch.uint8)


@_rule(aten.mkldnn_rnn_layer_backward.default)
def _onednn_layer_backward(x: torch.Tensor, *args: Any) -> Specs:
    """Gradients of the input, of both weights and biases, and of both states.

    Where a layer has no biases, zeros in the shapes of its weights replace them, and have gradients like biases.
    """
    weights, gates, states = args[:2], args[0].shape[:1], args[4:6]
    shapes = (x.shape, *(weight.shape for weight in weights), gates, gates, *(state.shape for state in states))
    return tuple(_contiguous(tuple(shape), x.dtype) for shape in shapes)


def onednn_workspace(steps: int, batch: int, inputs: int, width: int, itemsize: int) -> int:
    """Return the bytes that oneDNN keeps of one LSTM layer for its backward, in spaces that begin on 4096-byte pages.

    Gates; states of the layer and of the iteration, and the gradients of the former, as wide as the wider of input and
    state; cell states and their gradients; gradients of the iteration. Rows begin on cache lines, and avoid multiples
    of 256 elements. Copied from oneDNN, src/cpu/rnn/rnn_utils.hpp (`get_good_ld`) and rnn_utils.cpp
    (`set_offsets`), as torch 2.13 builds it: torch offers no call that returns the size without running the layer.
    tests/training_steps/test_step_peaks.py compares it with the kernel, and fails when oneDNN lays it out differently.
    """

    def row(size: int) -> int:
        rounded = -(-size // 16) * 16
        return rounded + 16 if rounded % 256 == 0 else rounded

    kept = 2 * (steps + 1) * batch
    spaces = [
        steps * batch * row(4 * width), *[kept * row(max(inputs, width))] * 3, *[kept * width] * 2,
        steps * batch * row(width),
    ]  # fmt: skip
    return sum(-(-space * itemsize // 4096) * 4096 for space in spaces)
