"""Complex arithmetic in real operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import edge_opt as eo
from operator_calls import Call


def totals(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    tensors = [torch.empty(shape, dtype=torch.complex64, device="meta") for shape in shapes]
    return eo.profile(Call(function), inputs=tensors).totals


@given(m=st.integers(1, 9), k=st.integers(1, 9), n=st.integers(1, 9))
def test_a_complex_product_is_four_real_ones(m: int, k: int, n: int) -> None:
    assert totals(torch.matmul, (m, k), (k, n)).macs == 4 * m * k * n
    assert totals(torch.bmm, (2, m, k), (2, k, n)).macs == 4 * 2 * m * k * n


def test_linear_and_convolution() -> None:
    linear = eo.profile(nn.Linear(5, 7, dtype=torch.complex64), inputs=torch.ones(3, 5, dtype=torch.complex64)).totals
    assert (linear.macs, linear.other_ops) == (4 * 3 * 5 * 7, 2 * 3 * 7)
    layer = nn.Conv1d(2, 3, 3, dtype=torch.complex64, bias=False)
    assert eo.profile(layer, inputs=torch.ones(1, 2, 10, dtype=torch.complex64)).totals.macs == 4 * 3 * 8 * 2 * 3


@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (lambda x: x * x, 6),  # four products, two sums
        (lambda x: x + x, 2),
        (lambda x: x - x, 2),
        (lambda x: x / x, 11),  # two sums of two products (6), the square of the divisor (3), two divisions
        (lambda x: x.abs(), 4),  # two squares, a sum, a root
        (lambda x: x.exp(), 5),  # exp, cos, sin, two products
        (lambda x: x.sum(), 2),
        (lambda x: x.prod(), 6),
        (lambda x: x.neg(), 2),
    ],
)
def test_element_wise(function: Callable[..., Any], ops: int) -> None:
    assert totals(function, (4, 5)).other_ops == ops * 20


def test_making_a_complex_number_costs_nothing_and_a_polar_one_four() -> None:
    real = torch.empty(20, device="meta")
    assert eo.profile(Call(torch.complex), inputs=(real, real)).totals.other_ops == 0
    # A cosine, a sine, two products.
    assert eo.profile(Call(torch.polar), inputs=(real, real)).totals.other_ops == 4 * 20
