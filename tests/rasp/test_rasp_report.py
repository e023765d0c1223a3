"""What each report type shows, and how its rows add up."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn

import rasp

FIGURES = ["params", "flops", "mem_r", "mem_w", "mem_rw", "macc"]


class Block(nn.Module):
    """A linear layer that is called twice, with a residual add and a product of its own."""

    def __init__(self, has_product: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.has_product = has_product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.act(self.linear(self.linear(x)))
        return y @ y.transpose(-1, -2) if self.has_product else y


class Net(nn.Module):
    def __init__(self, has_product: bool = False) -> None:
        super().__init__()
        self.block = Block(has_product)
        self.head = nn.Linear(5 if has_product else 4, 3)
        self.unused = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def report(model: nn.Module, report_type: str, include_root: bool = False) -> pd.DataFrame:
    data: pd.DataFrame = rasp.stat(
        model, (1, 2, 5, 4), report_type=report_type, include_root=include_root, includes=["macc"],
        print_stat=False, returns="data",
    )  # fmt: skip
    return data


def names(data: pd.DataFrame) -> list[str]:
    return list(data["name"].iloc[:-1])


def test_tape_has_leaf_calls_in_order_of_execution() -> None:
    data = report(Net(), "tape")
    assert names(data) == [".block.linear", ".block.linear", ".block.act", ".head"]
    assert list(data["params"]) == [4 * 4 + 4, 0, 0, 4 * 3 + 3, 4 * 4 + 4 + 4 * 3 + 3]
    assert list(data["macc"].iloc[:2]) == [2 * 5 * 4 * (4 + 1)] * 2


def test_leaves_merges_calls_of_one_module() -> None:
    data = report(Net(), "leaves")
    assert names(data) == [".block.linear", ".block.act", ".head"]
    assert data["macc"].iloc[0] == 2 * (2 * 5 * 4 * (4 + 1))


def test_all_has_every_module_with_everything_beneath_it() -> None:
    data = report(Net(), "all")
    assert names(data) == [".block", ".block.linear", ".block.act", ".head"]
    tape = report(Net(), "tape")
    residual_add = 2 * 5 * 4
    assert data["flops"].iloc[0] == tape["flops"].iloc[:3].sum() + residual_add
    assert data["params"].iloc[0] == 4 * 4 + 4


def test_nodes_has_modules_with_children_and_node_the_model_alone() -> None:
    assert names(report(Net(), "nodes")) == [".block"]
    assert names(report(Net(), "nodes", include_root=True)) == [".", ".block"]
    assert names(report(Net(), "node")) == names(report(Net(), "root")) == ["."]


def test_root_is_the_model_alone() -> None:
    data = report(Net(), "root")
    assert names(data) == ["."]
    assert list(data["type"]) == ["Net", ""]
    assert (data["in_shape"].iloc[0], data["out_shape"].iloc[0]) == ((1, 2, 5, 4), (1, 2, 5, 3))


@pytest.mark.parametrize("report_type", ["tape", "leaves", "all", "nodes"])
def test_root_row_comes_first_and_is_the_whole_model(report_type: str) -> None:
    with_root, without = report(Net(), report_type, include_root=True), report(Net(), report_type)
    assert names(with_root) == [".", *names(without)]
    whole = report(Net(), "root")
    assert list(with_root[FIGURES].iloc[0]) == list(whole[FIGURES].iloc[0])
    assert list(with_root[FIGURES].iloc[-1]) == list(without[FIGURES].iloc[-1])


@pytest.mark.parametrize("report_type", ["tape", "leaves"])
@pytest.mark.parametrize("has_product", [False, True])
def test_rows_of_leaves_add_up_to_the_total(report_type: str, has_product: bool) -> None:
    data = report(Net(has_product), report_type)
    assert list(data[FIGURES].iloc[:-1].sum()) == list(data[FIGURES].loc["total"])


@pytest.mark.parametrize("report_type", ["all", "nodes", "node", "root"])
def test_total_of_a_tree_is_the_whole_model(report_type: str) -> None:
    data, whole = report(Net(), report_type), report(Net(), "root")
    assert data["name"].iloc[-1] == data.index[-1] == "total"
    assert list(data[FIGURES].loc["total"]) == list(whole[FIGURES].iloc[0])


def test_functional_product_has_a_row_under_its_module() -> None:
    data = report(Net(has_product=True), "tape")
    assert names(data) == [".block", ".block.linear", ".block.linear", ".block.act", ".head"]
    assert data["macc"].iloc[0] == 2 * (5 * 4 * 5)  # two products of 5x4 by 4x5


def test_element_wise_work_without_a_row_is_noted() -> None:
    notes = report(Net(), "tape").attrs["notes"]
    # The residual add: 40 elements, two read and one written, of 4 bytes each.
    assert any("40 flops, 480 bytes" in note for note in notes)
    assert not any("has no row" in note for note in report(Net(), "all").attrs["notes"])


def test_parameters_that_are_not_read_are_noted_and_not_counted() -> None:
    data = report(Net(), "root")
    assert data["params"].iloc[0] == 4 * 4 + 4 + 4 * 3 + 3
    assert any(f"{100 * 100 + 100} parameters" in note for note in data.attrs["notes"])


def test_parameters_of_a_module_with_children_have_a_row() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    data = report(Scaled(), "tape")
    assert list(zip(data["name"], data["params"], strict=True)) == [(".", 4), (".linear", 16), ("total", 20)]


def test_shared_weights_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.up.weight = self.down.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.down(x))

    assert list(report(Tied(), "tape")["params"]) == [16, 0, 16]


def test_operator_without_a_price_makes_a_lower_bound() -> None:
    @torch.library.custom_op("rasp_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(x)

    notes = report(nn.Sequential(Twice()), "tape").attrs["notes"]
    assert any("rasp_tests.twice" in note and "lower bounds" in note for note in notes)


def test_one_layer_is_its_own_root() -> None:
    assert names(report(nn.Linear(4, 3), "tape")) == ["."]
    assert names(report(nn.Linear(4, 3), "tape", include_root=True)) == ["."]
    assert names(report(nn.Linear(4, 3), "nodes")) == []


def test_several_inputs_are_a_tuple_of_shapes() -> None:
    data = rasp.stat(
        nn.Bilinear(3, 4, 5), inputs=[torch.ones(2, 3), torch.ones(2, 4)], print_stat=False, returns="data"
    )
    assert data["in_shape"].iloc[0] == ((2, 3), (2, 4))
