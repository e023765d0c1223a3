"""rasp's convention, layer by layer: expected figures are worked out from the dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import edge_opt
import rasp


def figures(layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The totals of one layer on one input of this shape."""
    inputs = torch.empty(shape, dtype=dtype, device="meta")
    totals: dict[str, Any] = rasp.stat(
        layer.to(dtype), inputs=inputs, print_stat=False, returns="totals", includes="macc"
    )
    return totals


def test_grouped_convolution_with_bias() -> None:
    found = figures(nn.Conv2d(4, 6, 3, padding=1, groups=2), 2, 4, 8, 8)
    taps, outputs, params = 4 // 2 * 3 * 3, 2 * 6 * 8 * 8, 6 * 2 * 3 * 3 + 6
    assert found["params"] == params
    assert found["macc"] == outputs * (taps + 1)
    assert found["flops"] == outputs * (2 * taps - 1 + 1)
    assert found["mem_r"] == 2 * (4 * 8 * 8 + params) * 4
    assert found["mem_w"] == outputs * 4
    assert found["mem_rw"] == found["mem_r"] + found["mem_w"]


@pytest.mark.parametrize(("conv", "size"), [(nn.Conv1d, (9,)), (nn.Conv3d, (9, 9, 9))])
def test_convolution_in_one_and_three_dimensions(conv: type[nn.Module], size: tuple[int, ...]) -> None:
    found = figures(conv(2, 5, 3, bias=False), 1, 2, *size)
    taps, outputs = 2 * 3 ** len(size), 5 * 7 ** len(size)
    assert found["macc"] == outputs * taps
    assert found["flops"] == outputs * (2 * taps - 1)


def test_convolution_of_an_unbatched_input_reads_weights_once() -> None:
    found = figures(nn.Conv2d(3, 4, 1, bias=False), 3, 5, 5)
    assert found["mem_r"] == (3 * 5 * 5 + 3 * 4) * 4


def test_padding_beside_a_convolution_adds_its_traffic_and_no_arithmetic() -> None:
    # Circular padding by 1 is an operator of its own: it reads 6x6, writes 8x8, and the convolution reads 8x8.
    found = figures(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False), 1, 1, 6, 6)
    assert found["macc"] == 6 * 6 * 9
    assert found["mem_r"] == (8 * 8 + 9) * 4 + 6 * 6 * 4
    assert found["mem_w"] == 6 * 6 * 4 + 8 * 8 * 4


def test_transposed_convolution_follows_its_input() -> None:
    found = figures(nn.ConvTranspose2d(3, 4, 2, stride=2), 2, 3, 5, 5)
    products, outputs, params = 2 * 3 * 5 * 5 * (4 * 2 * 2), 2 * 4 * 10 * 10, 3 * 4 * 2 * 2 + 4
    assert found["macc"] == products + outputs
    assert found["flops"] == 2 * products + outputs
    assert found["mem_r"] == 2 * (3 * 5 * 5 + params) * 4
    assert found["mem_w"] == outputs * 4


@pytest.mark.parametrize("bias", [0, 1])
def test_linear(bias: int) -> None:
    found = figures(nn.Linear(16, 8, bias=bool(bias)), 4, 16)
    params = 16 * 8 + 8 * bias
    assert found["macc"] == 4 * 8 * (16 + bias)
    assert found["flops"] == 4 * 8 * (2 * 16 - 1 + bias)
    assert found["mem_r"] == 4 * (16 + params) * 4
    assert found["mem_w"] == 4 * 8 * 4


def test_linear_keeps_inner_dimensions() -> None:
    found = figures(nn.Linear(16, 8, bias=False), 2, 5, 16)
    assert found["macc"] == 2 * 5 * 8 * 16
    assert found["mem_r"] == 2 * (5 * 16 + 16 * 8) * 4


@pytest.mark.parametrize("is_affine", [False, True])
def test_batch_norm(is_affine: bool) -> None:
    found = figures(nn.BatchNorm2d(6, affine=is_affine), 3, 6, 4, 4)
    elements, params = 3 * 6 * 4 * 4, 2 * 6 * is_affine
    assert found["params"] == params
    assert found["macc"] == (is_affine + 1) * elements
    assert found["flops"] == 2 * (is_affine + 1) * elements
    assert found["mem_r"] == (elements + 3 * params) * 4
    assert found["mem_w"] == elements * 4


@pytest.mark.parametrize(
    ("pool", "is_average"),
    [
        (nn.MaxPool2d(3, stride=2), False),
        (nn.MaxPool2d((3, 3), stride=2), False),
        (nn.MaxPool2d((3,), stride=2), False),
        (nn.MaxPool2d(3, stride=2, return_indices=True), False),
        (nn.AvgPool2d(3, stride=2), True),
    ],
)
def test_pooling_kernel_counts_in_every_dimension(pool: nn.Module, is_average: bool) -> None:
    found = figures(pool, 2, 4, 9, 9)
    taps, outputs = 3 * 3, 2 * 4 * 4 * 4
    assert found["macc"] == outputs * taps
    assert found["flops"] == outputs * (taps - 1 + taps * is_average)
    assert found["mem_r"] == 2 * 4 * 9 * 9 * 4
    assert found["mem_w"] == outputs * 4


@pytest.mark.parametrize(
    ("pool", "dims", "is_average"),
    [
        (nn.MaxPool1d(2), 1, False),
        (nn.AvgPool1d(2), 1, True),
        (nn.MaxPool3d(2), 3, False),
        (nn.AvgPool3d(2), 3, True),
    ],
)
def test_pooling_in_one_and_three_dimensions(pool: nn.Module, dims: int, is_average: bool) -> None:
    found = figures(pool, 1, 2, *[8] * dims)
    taps, outputs = 2**dims, 2 * 4**dims
    assert found["macc"] == outputs * taps
    assert found["flops"] == outputs * (taps - 1 + taps * is_average)


@pytest.mark.parametrize(
    ("size", "windows", "kernel"),
    [
        (8, 1, 8),  # 8 - 0
        (8, 2, 4),  # 8 - 1 * 8 // 2
        (8, 3, 3),  # 8 - 2 * 8 // 3
    ],
)
def test_adaptive_pooling(size: int, windows: int, kernel: int) -> None:
    average = figures(nn.AdaptiveAvgPool2d(windows), 2, 3, size, size)
    largest = figures(nn.AdaptiveMaxPool2d(windows), 2, 3, size, size)
    outputs, taps = 2 * 3 * windows * windows, kernel * kernel
    assert average["macc"] == largest["macc"] == outputs * taps
    assert average["flops"] == outputs * (2 * taps - 1)
    assert largest["flops"] == outputs * (taps - 1)


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.Hardswish()]
)
def test_activation_is_one_operation_per_element(activation: nn.Module) -> None:
    found = figures(activation, 2, 3, 5)
    assert found["macc"] == found["flops"] == 2 * 3 * 5
    assert found["mem_r"] == found["mem_w"] == 2 * 3 * 5 * 4


def test_learned_slopes_are_moved_with_each_sample() -> None:
    found = figures(nn.PReLU(3), 2, 3, 5)
    assert found["params"] == 3
    assert found["mem_r"] == found["mem_w"] == 2 * (3 * 5 + 3) * 4


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(), nn.Identity(), nn.Flatten()])
def test_what_inference_skips_costs_nothing(layer: nn.Module) -> None:
    found = figures(layer, 2, 3, 4, 4)
    assert set(found.values()) == {0}


def test_bytes_follow_the_dtype() -> None:
    found = figures(nn.Linear(16, 8, bias=False), 4, 16, dtype=torch.float16)
    assert found["mem_r"] == 4 * (16 + 16 * 8) * 2
    assert found["mem_w"] == 4 * 8 * 2


def test_attention_is_counted() -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    # 6 rows: four 8x8 projections, then scores and values over 3 positions.
    assert figures(SelfAttention(), 2, 3, 8)["macc"] == 6 * 4 * 8 * 8 + 6 * 2 * 3 * 8


def test_recurrent_layer_is_counted() -> None:
    # 3 steps x 2 samples, four gates of 5 units over 4 inputs and 5 states.
    assert figures(nn.LSTM(4, 5), 3, 2, 4)["macc"] == 3 * 2 * 4 * 5 * (4 + 5)


def test_layers_outside_the_convention_cost_what_edge_opt_says() -> None:
    layer = nn.LayerNorm(8)
    found, own = figures(layer, 4, 8), edge_opt.profile(layer, (4, 8)).totals
    assert own.flops > 0
    assert (found["macc"], found["flops"]) == (own.macs, own.flops)
    assert (found["mem_r"], found["mem_w"]) == (own.bytes_read, own.bytes_written)


def test_parametrized_convolution_is_counted_like_the_plain_one() -> None:
    plain = figures(nn.Conv1d(2, 3, 3), 1, 2, 8)
    normed = figures(nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 3)), 1, 2, 8)
    assert normed["macc"] == plain["macc"] == 3 * 6 * (2 * 3 + 1)
    assert normed["params"] == plain["params"] + 3  # one length per filter


def test_twice_the_batch_is_twice_everything_but_the_parameters() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    one, two = figures(net, 1, 3, 8, 8), figures(net, 2, 3, 8, 8)
    assert two == {name: value if name == "params" else 2 * value for name, value in one.items()}
