"""What operators hold beside their outputs: the static peak equals the measured one, operator by operator."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import edge_opt as eo
from edge_opt.measuring.memory import measure_memory

FLOAT = 4


class Applies(nn.Module):
    """A function, perhaps of modules, as a model."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *args: Any) -> Any:
        return self.function(*self.parts, *args)


def static_peak(model: nn.Module, *args: torch.Tensor) -> int:
    """The static peak, after making sure that it is the measured one."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        profile = eo.profile(model, list(args))
        memory = measure_memory(model, args, {}, profile.trace)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert profile.peak_activation_bytes == memory.tensor_peak_bytes
    return profile.peak_activation_bytes


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def test_layer_norm_saves_two_numbers_per_row() -> None:
    assert static_peak(nn.LayerNorm(8), rows(6, 8)) == (6 * 8 + 2 * 6) * FLOAT


def test_statistics_have_the_type_of_the_weights() -> None:
    assert static_peak(nn.LayerNorm(8), rows(6, 8).bfloat16()) == 6 * 8 * 2 + 2 * 6 * FLOAT


def test_max_pooling_writes_64_bit_indices() -> None:
    assert static_peak(nn.MaxPool2d(2), rows(1, 3, 8, 8)) == 3 * 4 * 4 * (FLOAT + 8)


def test_a_python_number_becomes_a_tensor_of_64_bits() -> None:
    assert static_peak(Applies(lambda x: x * 2), rows(4)) == 4 * FLOAT + 8
    assert static_peak(Applies(lambda x: x.add_(0.5)), rows(4)) == 8
    assert static_peak(Applies(lambda x: x * True), rows(4)) == 4 * FLOAT + 1


def test_fused_attention_returns_the_logarithms_of_its_sums() -> None:
    batch, heads, length, width = 2, 4, 16, 32
    inputs = [rows(batch, heads, length, width) for _ in range(3)]
    out, logarithms = batch * heads * length * width * FLOAT, batch * heads * length * FLOAT
    assert static_peak(Applies(F.scaled_dot_product_attention), *inputs) == out + logarithms


def test_a_mask_of_booleans_is_turned_into_numbers() -> None:
    batch, heads, length, width = 2, 4, 16, 32
    inputs = [rows(batch, heads, length, width) for _ in range(3)]
    mask = torch.ones(length, length, dtype=torch.bool)
    out, logarithms = batch * heads * length * width * FLOAT, batch * heads * length * FLOAT
    peak = static_peak(Applies(F.scaled_dot_product_attention), *inputs, mask)
    assert peak == out + logarithms + length * length * FLOAT


def test_attention_on_three_dimensions_is_taken_apart() -> None:
    heads, length, width = 4, 16, 32
    inputs = [rows(heads, length, width) for _ in range(3)]
    # Scaled queries and keys, and their product.
    expected = (2 * heads * length * width + heads * length * length) * FLOAT
    assert static_peak(Applies(F.scaled_dot_product_attention), *inputs) == expected


def test_a_linear_layer_copies_rows_that_are_no_matrix() -> None:
    layer = nn.Linear(32, 64)
    assert static_peak(layer, rows(2, 16, 32)) == 2 * 16 * 64 * FLOAT
    assert static_peak(layer, rows(2, 16, 32).transpose(0, 1)) == 2 * 16 * (32 + 64) * FLOAT
    assert static_peak(layer, rows(2, 16, 40)[..., :32]) == 2 * 16 * 64 * FLOAT


def test_a_gru_holds_one_product_and_every_step() -> None:
    time, batch, hidden = 10, 6, 32
    # The initial state; gates of all inputs; the steps' outputs, apart and stacked.
    expected = batch * hidden + time * batch * hidden * (3 + 1 + 1)
    assert static_peak(nn.GRU(24, hidden), rows(time, batch, 24)) == expected * FLOAT


def test_an_lstm_keeps_its_states_until_they_are_stacked() -> None:
    time, batch, hidden = 10, 6, 32
    # Two initial states; the output; two last states, apart and stacked.
    expected = 2 * batch * hidden + time * batch * hidden + 2 * 2 * batch * hidden
    assert static_peak(nn.LSTM(24, hidden), rows(time, batch, 24)) == expected * FLOAT


IMAGE, TOKENS = (2, 8, 12, 12), (2, 16, 32)

CASES: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "group_norm": (nn.GroupNorm(4, 8), rows(*IMAGE)),
    "group_norm, transposed": (nn.GroupNorm(4, 8), rows(*IMAGE).transpose(2, 3)),
    "group_norm, half": (nn.GroupNorm(4, 8), rows(*IMAGE).bfloat16()),
    "instance_norm": (nn.InstanceNorm2d(8), rows(*IMAGE)),
    "instance_norm, affine": (nn.InstanceNorm2d(8, affine=True), rows(*IMAGE).transpose(2, 3)),
    "instance_norm, tracking": (nn.InstanceNorm2d(8, affine=True, track_running_stats=True), rows(*IMAGE)),
    "rms_norm": (nn.RMSNorm(32), rows(*TOKENS)),
    "rms_norm, no weight": (nn.RMSNorm(32, elementwise_affine=False), rows(*TOKENS)),
    "rms_norm, transposed": (nn.RMSNorm(32, elementwise_affine=False), rows(*TOKENS).transpose(0, 1)),
    "rms_norm, half": (nn.RMSNorm(32).bfloat16(), rows(*TOKENS).bfloat16()),
    "softmax in double": (Applies(lambda x: F.softmax(x, -1, dtype=torch.float64)), rows(*TOKENS)),
    "padding of even kernels": (nn.Conv2d(8, 8, 4, padding="same"), rows(*IMAGE)),
    "padding of odd kernels": (nn.Conv2d(8, 8, 3, padding="same"), rows(*IMAGE)),
    "padding of a dilated kernel": (nn.Conv2d(8, 8, (4, 3), padding="same", dilation=2), rows(*IMAGE)),
    "padding without a batch": (nn.Conv1d(8, 8, 4, padding="same"), rows(8, 12)),
    "bilinear": (Applies(lambda layer, x: layer(x, x), nn.Bilinear(32, 32, 8)), rows(*TOKENS)),
    "nearest-exact": (Applies(lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact")), rows(*IMAGE)),
    "embedding_bag, sum": (nn.EmbeddingBag(100, 16, mode="sum"), torch.randint(0, 100, (4, 10))),
    "embedding_bag, mean": (nn.EmbeddingBag(100, 16, mode="mean"), torch.randint(0, 100, (4, 10))),
    "embedding_bag, max": (nn.EmbeddingBag(100, 16, mode="max"), torch.randint(0, 100, (4, 10))),
    "where with a number": (Applies(lambda x: torch.where(x > 0, x, -1.0)), rows(*TOKENS)),
    "encoder layer": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), rows(*TOKENS)),
    "rolled along two dimensions": (Applies(lambda x: x.roll((1, 2), (1, 2))), rows(*TOKENS)),
}


@pytest.mark.parametrize("name", CASES)
def test_static_equals_measured(name: str) -> None:
    model, x = CASES[name]
    static_peak(model.eval(), x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("key_heads", "value_width", "is_transposed"), [(4, 32, False), (4, 32, True), (2, 32, False), (4, 16, True)]
)
def test_attention_in_all_its_forms(
    causal: bool, dtype: torch.dtype, key_heads: int, value_width: int, is_transposed: bool
) -> None:
    def head(heads: int, width: int) -> torch.Tensor:
        x = rows(2, 16, heads, width).transpose(1, 2) if is_transposed else rows(2, heads, 16, width)
        return x.to(dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=key_heads != 4)
        # The layout of the result decides whether this is a copy.
        return out.transpose(1, 2).reshape(2, 16, -1) + 1

    static_peak(Applies(attend), head(4, 32), head(key_heads, 32), head(key_heads, value_width))


@pytest.mark.parametrize("seed", range(60))
def test_recurrent_layers_of_any_size(seed: int) -> None:
    draw = random.Random(seed)
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    options: dict[str, Any] = {
        "num_layers": draw.randint(1, 3),
        "bidirectional": draw.random() < 0.5,
        "batch_first": draw.random() < 0.5,
        "bias": draw.random() < 0.8,
    }
    if kind is nn.LSTM and draw.random() < 0.3:
        options["proj_size"] = 3
    size = draw.choice([1, 4, 200])
    model = kind(size, draw.choice([4, 64]), **options)
    if draw.random() < 0.3:
        model = model.double()
    x = rows(draw.choice([1, 2, 9]), draw.choice([1, 5]), size).to(next(model.parameters()).dtype)
    static_peak(model.eval(), x)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(kind: type[nn.Module]) -> None:
    static_peak(kind(24, 32), rows(6, 24))
