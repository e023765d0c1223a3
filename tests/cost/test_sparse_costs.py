"""Sparse tensors: work by what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.records.costs import SparseInfo
from operator_calls import Call, profiled

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")

STORED = 7


def matrix() -> torch.Tensor:
    """6 x 5 with seven elements."""
    dense = torch.zeros(6, 5)
    dense.view(-1)[torch.tensor([0, 3, 8, 11, 17, 21, 29])] = 1.0
    return dense


class Graph(nn.Module):
    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adjacency @ x


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_product_takes_one_mac_for_each_stored_element_and_column(layout: torch.layout) -> None:
    profile = eo.profile(Graph(matrix().to_sparse(layout=layout)), (5, 3))
    assert profile.totals.macs == STORED * 3
    assert profile.coverage == 1.0
    assert profile.trace.used_real_tensors


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_input_counts_as_what_it_stores(layout: torch.layout) -> None:
    sparse = matrix().to_sparse(layout=layout)
    profile = eo.profile(Call(torch.mm), inputs=(sparse, torch.ones(5, 3)))
    indices = 2 * STORED if layout is torch.sparse_coo else 7 + STORED  # two places each; or a start for each row
    assert profile.trace.input_bytes == STORED * 4 + indices * 8 + 5 * 3 * 4
    assert profile.totals.macs == STORED * 3


def test_a_sparse_tensor_made_in_forward() -> None:
    profile = profiled(lambda x: torch.sparse.mm(x.to_sparse(), torch.ones(5, 3)), matrix())
    assert profile.totals.macs == STORED * 3


def test_a_vector_and_an_addition() -> None:
    sparse = matrix().to_sparse_csr()
    assert profiled(lambda x: torch.mv(sparse, x), torch.ones(5)).totals.macs == STORED
    added = profiled(lambda x: torch.sparse.addmm(torch.ones(6, 3), sparse, x), torch.ones(5, 3)).totals
    assert (added.macs, added.other_ops) == (STORED * 3, 6 * 3)


def test_sampled_products_are_only_those_asked_for() -> None:
    sparse = matrix().to_sparse_csr()
    found = profiled(lambda a, b: torch.sparse.sampled_addmm(sparse, a, b), torch.ones(6, 4), torch.ones(4, 5))
    assert found.totals.macs == STORED * 4


def test_two_sparse_matrices_are_not_guessed() -> None:
    profile = eo.profile(Call(torch.sparse.mm), inputs=(matrix().to_sparse(), matrix().t().to_sparse()))
    assert [item.op for item in profile.unpriced] == ["aten._sparse_sparse_matmul"]


def test_a_profile_with_sparse_tensors_can_be_saved(tmp_path: Path) -> None:
    profile = eo.profile(Graph(matrix().to_sparse_csr()), (5, 3))
    profile.save(tmp_path / "graph.json")
    loaded = eo.load(tmp_path / "graph.json")
    assert loaded.totals == profile.totals
    sparse = next(value for value in loaded.trace.signatures[0].args if isinstance(value, SparseInfo))
    assert (sparse.shape, sparse.stored) == ((6, 5), STORED)
