"""FLOPs and bytes of operators against brute force: loops that do the arithmetic and count it."""

from __future__ import annotations

from itertools import product
from math import prod
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import edge_opt as eo
from edge_opt.cost.pointwise import adaptive_taps
from edge_opt.profiling import clear_caches
from edge_opt.records.costs import OpCost

F32 = 4


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, *args):
        return self.function(*args)


def cost(function, *shapes: object) -> OpCost:
    profile = eo.profile(function if isinstance(function, nn.Module) else Call(function), list(shapes))
    assert profile.coverage == 1.0, profile.unpriced
    totals = profile.totals
    return OpCost(totals.macs, totals.other_ops, totals.bytes_read, totals.bytes_written)


small = st.integers(1, 3)


@st.composite
def convolutions(draw):
    groups = draw(small)
    dims = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    stride = tuple(draw(small) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    size = tuple(
        draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 7)) for k, d, p in zip(kernel, dilation, padding, strict=True)
    )
    return {
        "batch": draw(small), "groups": groups, "inputs": groups * draw(small), "outputs": groups * draw(small),
        "kernel": kernel, "stride": stride, "dilation": dilation, "padding": padding, "size": size,
        "bias": draw(st.booleans()),
    }  # fmt: skip


def loop_outputs(size: int, kernel: int, stride: int, dilation: int, padding: int) -> int:
    """Outputs along one dimension, by sliding the kernel until it falls off."""
    count, start = 0, -padding
    while start + dilation * (kernel - 1) <= size - 1 + padding:
        count += 1
        start += stride
    return count


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_convolution_equals_the_loop(c) -> None:
    dims = len(c["kernel"])
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        c["inputs"], c["outputs"], c["kernel"], c["stride"], c["padding"], c["dilation"], c["groups"], c["bias"]
    )
    out = [
        loop_outputs(*args)
        for args in zip(c["size"], c["kernel"], c["stride"], c["dilation"], c["padding"], strict=True)
    ]
    macs = 0
    for _sample, _channel, _place in product(range(c["batch"]), range(c["outputs"]), product(*map(range, out))):
        for _input, _tap in product(range(c["inputs"] // c["groups"]), product(*map(range, c["kernel"]))):
            macs += 1
    outputs = c["batch"] * c["outputs"] * prod(out)
    weights = c["outputs"] * (c["inputs"] // c["groups"]) * prod(c["kernel"])
    found = cost(layer, (c["batch"], c["inputs"], *c["size"]))
    assert found.macs == macs
    assert found.flops == 2 * macs + (outputs if c["bias"] else 0)
    bias = c["outputs"] if c["bias"] else 0
    assert found.bytes_read == F32 * (c["batch"] * c["inputs"] * prod(c["size"]) + weights + bias)
    assert found.bytes_written == F32 * outputs


@settings(max_examples=40, deadline=None)
@given(convolutions())
def test_transposed_convolution_equals_the_loop(c) -> None:
    dims = len(c["kernel"])
    spread = [d * (k - 1) + 1 for d, k in zip(c["dilation"], c["kernel"], strict=True)]
    out = [(n - 1) * s - 2 * p + r for n, s, p, r in zip(c["size"], c["stride"], c["padding"], spread, strict=True)]
    if min(out) < 1:
        return
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](
        c["inputs"], c["outputs"], c["kernel"], c["stride"], c["padding"], 0, c["groups"], c["bias"], c["dilation"]
    )
    macs = 0
    for _sample, _channel, _place in product(range(c["batch"]), range(c["inputs"]), product(*map(range, c["size"]))):
        for _output, _tap in product(range(c["outputs"] // c["groups"]), product(*map(range, c["kernel"]))):
            macs += 1
    outputs = c["batch"] * c["outputs"] * prod(out)
    found = cost(layer, (c["batch"], c["inputs"], *c["size"]))
    assert found.macs == macs
    assert found.other_ops == (outputs if c["bias"] else 0)
    assert found.bytes_written == F32 * outputs


@settings(max_examples=40, deadline=None)
@given(st.lists(small, min_size=0, max_size=3), small, small, st.booleans())
def test_linear_equals_the_loop(lead, inputs, outputs, bias) -> None:
    macs = sum(1 for _ in product(*map(range, lead), range(inputs), range(outputs)))
    rows = prod(lead)
    found = cost(nn.Linear(inputs, outputs, bias), (*lead, inputs))
    assert found.macs == macs
    assert found.other_ops == (rows * outputs if bias else 0)
    assert found.bytes_read == F32 * (rows * inputs + inputs * outputs + (outputs if bias else 0))
    assert found.bytes_written == F32 * rows * outputs


@settings(max_examples=40, deadline=None)
@given(small, small, small, small, small, small)
def test_attention_equals_the_loop(batch, heads, queries, keys, width, value_width) -> None:
    macs = other = 0
    for _ in product(range(batch), range(heads), range(queries), range(keys)):
        macs += width + value_width  # one score, one weighted value
        other += 1 + 5  # scaled; maximum, subtract, exp, sum, divide
    shapes = [(batch, heads, queries, width), (batch, heads, keys, width), (batch, heads, keys, value_width)]
    found = cost(F.scaled_dot_product_attention, *shapes)
    assert (found.macs, found.other_ops) == (macs, other)
    assert found.bytes_read == F32 * sum(map(prod, shapes))
    assert found.bytes_written == F32 * batch * heads * queries * value_width


@settings(max_examples=40, deadline=None)
@given(small, small, small, small, st.sampled_from(["lstm", "gru", "rnn"]), st.booleans(), st.booleans())
def test_recurrent_layers_equal_the_loop(steps, batch, inputs, hidden, kind, bias, both) -> None:
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[kind]
    unit_ops = {"lstm": 18, "gru": 14, "rnn": 1}[kind]  # activations and state updates, see docs/counting.md
    make = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
    macs = other = 0
    for _direction, _step, _row in product(range(1 + both), range(steps), range(batch)):
        for _gate, _unit in product(range(gates), range(hidden)):
            macs += inputs + hidden
            other += 1 + (2 if bias else 0)  # input and hidden part are added; two biases
        other += unit_ops * hidden
    model = make(inputs, hidden, bias=bias, bidirectional=both)
    profile = eo.profile(model, (steps, batch, inputs))
    layer = next(op for op in profile.operators if op.kind == "recurrent")
    assert (layer.cost.macs, layer.cost.other_ops) == (macs, other)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12))
def test_adaptive_windows_equal_torchs_own(size, out) -> None:
    # With one-hot inputs, the average of a window is nonzero exactly when it covers that place.
    taps = int((F.adaptive_avg_pool1d(torch.eye(size)[None], out) > 0).sum())
    assert adaptive_taps(size, out) == taps


@pytest.mark.parametrize(
    ("function", "per_element"),
    [
        (F.relu, 1), (F.relu6, 2), (F.leaky_relu, 2), (torch.sigmoid, 4), (F.silu, 4), (F.gelu, 5), (F.hardswish, 5),
        (torch.tanh, 1), (torch.exp, 1), (lambda x: x * 2, 1), (lambda x: x + x, 1), (lambda x: x.softmax(-1), 5),
        (lambda x: x.log_softmax(-1), 5), (lambda x: F.layer_norm(x, (4,)), 5), (lambda x: F.rms_norm(x, (4,)), 3),
        (lambda x: x.clamp(0, 1), 2), (lambda x: torch.where(x > 0, x, 0.5), 2), (lambda x: x.mul(2).add_(1), 2),
    ],
)  # fmt: skip
def test_elementwise_work_per_element(function, per_element: int) -> None:
    found = cost(function, (2, 3, 4))
    assert (found.macs, found.other_ops) == (0, per_element * 24)


def test_norms_with_scale_and_shift() -> None:
    assert cost(nn.LayerNorm(4), (2, 3, 4)).other_ops == (5 + 2) * 24
    assert cost(nn.GroupNorm(2, 4), (2, 4, 3)).other_ops == (5 + 2) * 24
    assert cost(nn.BatchNorm1d(4), (2, 4, 3)).other_ops == 2 * 24  # running statistics: one scale, one shift
    assert cost(nn.InstanceNorm1d(4), (2, 4, 3)).other_ops == 5 * 24
    train = eo.profile(nn.BatchNorm1d(4), (2, 4, 3), mode="train").totals
    assert train.other_ops == (5 + 2) * 24 + 1  # and the counter of batches


def test_pooling_counts_every_tap() -> None:
    # 2 x 3 x 4x4 outputs of 2x2 windows; a maximum compares one less than there are taps
    assert cost(nn.MaxPool2d(2), (2, 3, 8, 8)).other_ops == 96 * 3
    assert cost(nn.AvgPool2d(2), (2, 3, 8, 8)).other_ops == 96 * 4
    assert cost(nn.AvgPool2d((2, 4)), (2, 3, 8, 8)).other_ops == 2 * 3 * 4 * 2 * 8
    assert cost(nn.AdaptiveAvgPool2d(1), (2, 3, 8, 8)).other_ops == 2 * 3 * 64
    assert cost(nn.AdaptiveMaxPool1d(2), (2, 3, 8)).other_ops == 2 * 3 * (8 - 2)


def test_views_are_free_and_copies_are_not() -> None:
    assert cost(lambda x: x.view(6, 4).transpose(0, 1)[:2], (2, 3, 4)) == OpCost()
    moved = cost(lambda x: x.transpose(0, 1).contiguous(), (4, 6))
    assert moved == OpCost(0, 0, F32 * 24, F32 * 24)
    assert cost(lambda x: x.reshape(4, 6), (24,)) == OpCost()
    assert cost(lambda x: x.t().reshape(24), (4, 6)) == moved
    assert cost(lambda x: F.dropout(x, training=False), (4, 6)) == OpCost()


def test_an_expanded_operand_is_read_once() -> None:
    found = cost(lambda x, y: x + y.expand(8, 4), (8, 4), (1, 4))
    assert found.bytes_read == F32 * (32 + 4)


def test_gathers_read_what_they_take() -> None:
    ids = eo.InputSpec((5,), "int64")
    found = cost(nn.Embedding(1000, 8), ids)
    assert found == OpCost(0, 0, F32 * 40 + 8 * 5, F32 * 40)
    found = cost(lambda x, i: x.index_select(0, i), (100, 8), ids)
    assert found == OpCost(0, 0, F32 * 40 + 8 * 5, F32 * 40)
    bag = cost(nn.EmbeddingBag(1000, 8, mode="sum"), eo.InputSpec((2, 5), "int64"))
    assert bag.other_ops == 10 * 8


def test_concatenation_moves_and_computes_nothing() -> None:
    assert cost(lambda x, y: torch.cat([x, y]), (2, 4), (3, 4)) == OpCost(0, 0, F32 * 20, F32 * 20)


def test_in_place_work_reads_and_writes_its_target() -> None:
    assert cost(lambda x: x.clone().relu_(), (6,)) == OpCost(0, 6, 2 * F32 * 6, 2 * F32 * 6)


def test_half_precision_halves_the_bytes() -> None:
    single, half = cost(nn.Linear(8, 4), (3, 8)), cost(nn.Linear(8, 4).half(), (3, 8))
    assert half.bytes_read * 2 == single.bytes_read
    assert half.bytes_written * 2 == single.bytes_written
    assert half.macs == single.macs


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x.roll(1, 0), [(2, 3)]), (lambda x: x.t().roll(1, 0), [(2, 3)]), (lambda x: x.roll(2), [(6,)]),
        (lambda x: x.masked_fill(x > 0, 1.0), [(2, 3)]), (lambda x: x.masked_fill(x[0] > 0, 1.0), [(2, 3)]),
        (lambda x: x == 1, [(2, 3)]), (lambda x: x.t() != 1, [(2, 3)]), (lambda x: x.long() < 1.5, [(2, 3)]),
        (lambda x, y: x * y, [(2, 1, 3), (4, 1)]), (lambda x, y: x - y, [(2, 3), (1, 3)]),
        (lambda x, y: torch.cat([x, y], -1), [(2, 3), (2, 1)]), (lambda x: F.max_pool2d(x, 3, 2, 1), [(1, 2, 9, 8)]),
        (lambda x: F.max_pool2d(x, (2, 3)), [(1, 2, 9, 8)]), (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), [(2, 8, 9)]),
        (lambda x, y: F.linear(x, y), [(2, 5, 3), (4, 3)]), (lambda x, y: F.linear(x.t(), y), [(3, 2), (4, 3)]),
        (lambda q, k: F.scaled_dot_product_attention(q, k, k), [(1, 2, 5, 4), (1, 2, 7, 4)]),
        (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 4, 9, 7), (6, 4, 3, 3)]),
        (lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w), [(2, 4, 9, 7), (6, 4, 3, 3)]),
    ],
)  # fmt: skip
def test_shapes_and_layouts_are_those_of_a_real_run(function, shapes) -> None:
    """Shape rules stand in for torch's kernels, so what they say must be what those do."""
    seen = SimpleQueue()  # a list would be put back to what it was

    class Notes(nn.Module):
        def forward(self, *args):
            out = function(*args)
            seen.put((tuple(out.shape), out.stride(), out.dtype))
            return out

    clear_caches()
    for _ in range(2):  # cold, and from memory
        eo.profile(Notes(), shapes)
    with torch.no_grad():
        Notes()(*(torch.randn(shape) for shape in shapes))
    assert seen.get() == seen.get() == seen.get()
