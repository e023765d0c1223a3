"""Indexing, sorting and counting: one operation for each element that is added, log2 for each that is looked for."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from operator_calls import other_ops as ops
from operator_calls import profiled


def cost(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    return profiled(function, *tensors).operators[-1].cost


X = torch.ones(10, 4)
ROWS = torch.tensor([1, 1, 3])


def test_index_add_is_one_addition_for_each_source_element() -> None:
    assert ops(lambda x: x.index_add(0, ROWS, torch.ones(3, 4)), X) == 3 * 4
    assert ops(lambda x: x.index_add(0, ROWS, torch.ones(3, 4), alpha=2), X) == 2 * 3 * 4


def test_adding_in_place_reads_and_writes_only_the_rows_it_names() -> None:
    found = cost(lambda x, s: x.index_add_(0, ROWS, s), X, torch.ones(3, 4))
    rows, indices = 3 * 4 * 4, 3 * 8
    assert found.bytes_read == rows + indices + rows  # the source, the indices, and what it is added to
    assert found.bytes_written == rows


def test_adding_to_a_copy_moves_the_whole_target() -> None:
    found = cost(lambda x, s: x.index_add(0, ROWS, s), X, torch.ones(3, 4))
    assert found.bytes_read == 10 * 4 * 4 + 3 * 4 * 4 + 3 * 8
    assert found.bytes_written == 10 * 4 * 4


def test_scatter_adds_one_for_each_index() -> None:
    index = torch.zeros(5, 4, dtype=torch.long)
    assert ops(lambda x, s: x.scatter_add(0, index, s), X, torch.ones(5, 4)) == 5 * 4
    assert ops(lambda x, s: x.scatter(0, index, s), X, torch.ones(5, 4)) == 0
    assert ops(lambda x, s: x.scatter(0, index, s, reduce="add"), X, torch.ones(5, 4)) == 5 * 4


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_scatter_reduce_is_one_for_each_index(reduce: str) -> None:
    index = torch.zeros(5, 4, dtype=torch.long)
    assert ops(lambda x, s: x.scatter_reduce(0, index, s, reduce), X, torch.ones(5, 4)) == 5 * 4


def test_a_mean_also_counts_and_divides() -> None:
    index = torch.zeros(5, 4, dtype=torch.long)
    assert ops(lambda x, s: x.scatter_reduce(0, index, s, "mean"), X, torch.ones(5, 4)) == 2 * 5 * 4 + 10 * 4


def test_index_put_computes_only_when_it_accumulates() -> None:
    values = torch.ones(3, 4)
    assert ops(lambda x, v: x.index_put((ROWS,), v), X, values) == 0
    assert ops(lambda x, v: x.index_put((ROWS,), v, accumulate=True), X, values) == 3 * 4


def test_one_value_is_added_in_every_place() -> None:
    # Two indices of 2 x 3 and of 3 name 6 places; each leaves a line of 4 whole.
    x = torch.ones(5, 6, 4)
    first, second = torch.zeros(2, 3, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    assert ops(lambda x, v: x.index_put((first, second), v, accumulate=True), x, torch.ones(())) == 6 * 4


def test_sorting_follows_its_dimension() -> None:
    x = torch.ones(32, 8)
    assert ops(lambda x: x.sort(0), x) == 32 * 8 * 5
    assert ops(lambda x: x.sort(1), x) == 32 * 8 * 3
    assert ops(lambda x: x.sort(dim=0, stable=True), x) == 32 * 8 * 5
    assert ops(torch.msort, x) == 32 * 8 * 5
    assert ops(lambda x: x.argsort(0), x) == 32 * 8 * 5


def test_the_k_largest_need_a_heap_of_k() -> None:
    assert ops(lambda x: x.topk(8), torch.ones(4, 64)) == 4 * 64 * 3
    assert ops(lambda x: x.topk(8, dim=0), torch.ones(64, 4)) == 64 * 4 * 3
    assert ops(lambda x: x.topk(1), torch.ones(4, 64)) == 4 * 64


@given(values=st.integers(1, 50), boundaries=st.integers(1, 50))
def test_searching_halves_the_boundaries(values: int, boundaries: int) -> None:
    found = ops(torch.searchsorted, torch.ones(boundaries), torch.ones(values))
    assert found == values * ceil(log2(boundaries + 1))
    assert ops(torch.bucketize, torch.ones(values), torch.ones(boundaries)) == found


def test_unique_sorts_and_compares() -> None:
    assert ops(lambda x: torch.unique(x), torch.arange(64.0)) == 64 * 6 + 64
    assert ops(lambda x: torch.unique_consecutive(x), torch.arange(64.0)) == 64


def test_histogram() -> None:
    # Range 2, distance 1, scale 1, last bin 1, count 1; without a range also the smallest and the largest.
    x = torch.arange(30.0)
    assert ops(lambda x: torch.histc(x, 10, min=0, max=30), x) == 30 * 6
    assert ops(lambda x: torch.histc(x, 10), x) == 30 * 8


def test_complex_additions_count_twice() -> None:
    x = torch.ones(10, 4, dtype=torch.complex64)
    assert ops(lambda x, s: x.index_add(0, ROWS, s), x, torch.ones(3, 4, dtype=torch.complex64)) == 2 * 3 * 4
