"""Linear algebra: the textbook's counts, from the dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import edge_opt as eo
from edge_opt.cost.linalg import form_q_ops, lu_ops, qr_ops, svd_ops
from operator_calls import Call, profiled

size = st.integers(1, 40)


def of_matrices(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """The profile of one call; matrices are well-conditioned, in case it needs real ones."""
    tensors = [
        torch.eye(*shape[-2:], dtype=dtype).expand(shape).clone() + 0.01 * torch.ones(shape, dtype=dtype)
        for shape in shapes
    ]
    return profiled(function, *tensors)


def ops(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Operations of the factorisation or solution itself, without what torch does around it."""
    operators = of_matrices(function, *shapes, dtype=dtype).operators
    return sum(operator.cost.other_ops for operator in operators if operator.kind == "linalg")


def test_solving_is_elimination_and_two_triangles() -> None:
    # 2n³/3 + 2n²r for n = 6, r = 2, of which there are three.
    assert ops(torch.linalg.solve, (3, 6, 6), (3, 6, 2)) == 3 * (2 * 6**3 // 3 + 2 * 36 * 2)


def test_a_vector_is_one_right_hand_side() -> None:
    assert ops(lambda a, b: torch.linalg.solve(a, b[:, 0]), (6, 6), (6, 1)) == 2 * 6**3 // 3 + 2 * 36


def test_triangular_solution() -> None:
    assert ops(lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), (2, 5, 5), (2, 5, 7)) == 2 * 25 * 7


def test_cholesky_is_half_of_elimination() -> None:
    assert ops(torch.linalg.cholesky, (4, 6, 6)) == 4 * 6**3 // 3
    assert ops(lambda b, a: torch.cholesky_solve(b, a), (6, 2), (6, 6)) == 2 * 36 * 2


def test_inverse_and_determinant() -> None:
    assert ops(torch.linalg.inv, (6, 6)) == 2 * 6**3
    assert ops(torch.linalg.det, (6, 6)) == 2 * 6**3 // 3 + 6


def test_qr_of_a_tall_matrix() -> None:
    # 2n²(m - n/3) for R, and as much again for the thin Q: m = 9, n = 3.
    once = 2 * 9 * (9 - 1)
    assert ops(lambda a: torch.linalg.qr(a, mode="r"), (9, 3)) == once
    assert ops(torch.linalg.qr, (9, 3)) == 2 * once
    # The whole Q: 4(m²n - mn² + n³/3).
    assert ops(lambda a: torch.linalg.qr(a, mode="complete"), (9, 3)) == once + 4 * (243 - 81 + 9)


def test_singular_values() -> None:
    m, n = 8, 3
    assert ops(lambda a: torch.linalg.svd(a, full_matrices=False), (m, n)) == 14 * m * n * n + 8 * n**3
    assert ops(torch.linalg.svd, (m, n)) == 4 * m * m * n + 8 * m * n * n + 9 * n**3


def test_values_alone_are_counted_without_vectors() -> None:
    m, n = 7, 5
    singular_values = math.ceil(4 * m * n * n - Fraction(4 * n**3, 3))
    for function in (
        torch.linalg.svdvals,
        torch.linalg.cond,
        torch.linalg.matrix_rank,
        lambda a: torch.linalg.matrix_norm(a, "nuc"),
        lambda a: torch.linalg.matrix_norm(a, 2),
    ):
        assert ops(function, (m, n)) == singular_values
    eigenvalues = math.ceil(Fraction(4 * n**3, 3))
    assert ops(torch.linalg.eigvalsh, (n, n)) == eigenvalues
    assert ops(lambda a: torch.linalg.matrix_rank(a, hermitian=True), (n, n)) == eigenvalues
    assert ops(torch.linalg.eigvals, (n, n)) == 10 * n**3


def test_eigenvalues() -> None:
    assert ops(torch.linalg.eigh, (2, 5, 5)) == 2 * 9 * 5**3
    assert ops(torch.linalg.eig, (5, 5)) == 25 * 5**3


def test_least_squares() -> None:
    m, n, r = 9, 3, 2
    assert ops(lambda a, b: torch.linalg.lstsq(a, b)[0], (m, n), (m, r)) == (
        2 * n * n * (m - n // 3) + r * (4 * m * n - 2 * n * n) + n * n * r
    )


def test_a_complex_matrix_counts_four_times() -> None:
    assert ops(torch.linalg.inv, (6, 6), dtype=torch.complex64) == 4 * 2 * 6**3


def test_the_exponential_of_a_matrix_depends_on_its_values() -> None:
    profile = eo.profile(Call(torch.linalg.matrix_exp), (4, 4))
    assert [item.op for item in profile.unpriced] == ["aten.linalg_matrix_exp"]
    assert profile.totals.is_lower_bound


def test_linalg_is_no_multiply_accumulate() -> None:
    assert of_matrices(torch.linalg.cholesky, (6, 6)).totals.macs == 0


@given(m=size, n=size)
def test_elimination_by_its_loops(m: int, n: int) -> None:
    # Step i divides the column below, and updates what is to the right of it: a product and a difference each.
    updates = sum(2 * (m - i - 1) * (n - i - 1) for i in range(min(m, n)))
    divisions = sum(m - i - 1 for i in range(min(m, n)))
    # The textbook keeps the terms of third order.
    assert abs(lu_ops(m, n) - updates - divisions) <= 4 * m * n


@given(n=size, extra=size)
def test_thin_q_costs_as_much_as_r(n: int, extra: int) -> None:
    assert form_q_ops(n + extra, n, n) == qr_ops(n + extra, n)


@given(n=size, extra=size)
def test_vectors_cost_more_than_values(n: int, extra: int) -> None:
    m = n + extra
    assert svd_ops(m, n, with_vectors=False) < svd_ops(m, n, with_vectors=True)
    assert svd_ops(m, n, with_vectors=True) == svd_ops(n, m, with_vectors=True)


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.det, torch.linalg.cholesky, torch.linalg.eigvalsh])
def test_twice_the_batch_is_twice_the_work(function: Callable[..., Any]) -> None:
    assert ops(function, (4, 3, 3)) == 2 * ops(function, (2, 3, 3))
