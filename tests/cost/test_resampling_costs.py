"""Resizing and sampling: sums over the taps that are really used."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from edge_opt.cost.vision import antialias_taps
from operator_calls import other_ops


def test_halving_with_antialias_reads_windows_of_four() -> None:
    # A triangle of half-width 2: windows of 4, but 3 at either border. Columns first, over all rows, then rows.
    def halve(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True)

    windows = [3, 4, 4, 3]
    line = sum(2 * taps - 1 for taps in windows)
    assert other_ops(halve, (1, 3, 8, 8)) == 3 * 8 * line + 3 * 4 * line


def test_a_bicubic_filter_reaches_twice_as_far() -> None:
    assert max(antialias_taps(64, 32, 1.0, False, None)) == 4
    assert max(antialias_taps(64, 32, 2.0, False, None)) == 8


@given(size=st.integers(1, 60), out=st.integers(1, 60), support=st.sampled_from([1.0, 2.0]))
def test_windows_cover_the_input(size: int, out: int, support: float) -> None:
    taps = antialias_taps(size, out, support, False, None)
    assert len(taps) == out
    assert all(1 <= count <= size for count in taps)
    # A reduction leaves nothing out.
    assert sum(taps) >= size or out > size


@pytest.mark.parametrize(
    ("mode", "per_output", "per_point"),
    [
        # Positions: ((x + 1)·size - 1)/2 is four operations a coordinate.
        ("bilinear", 7, 2 * (4 + 3) + 4),  # floor and two distances; four products of distances
        ("nearest", 0, 2 * (4 + 1)),  # rounding
        ("bicubic", 31, 2 * (4 + 2 + 25)),  # floor and distance; four cubic polynomials
    ],
)
def test_grid_sample_by_mode(mode: str, per_output: int, per_point: int) -> None:
    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode=mode, align_corners=False)

    points = 2 * 5 * 6
    assert other_ops(sample, (2, 3, 8, 8), (2, 5, 6, 2)) == points * per_point + 3 * points * per_output


def test_grid_sample_in_three_dimensions() -> None:
    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, align_corners=False)

    points = 2 * 4 * 4
    # Eight corners: weights of two products each, sums of eight products.
    assert other_ops(sample, (1, 3, 8, 8, 8), (1, 2, 4, 4, 3)) == points * (3 * 7 + 8 * 2) + 3 * points * 15
