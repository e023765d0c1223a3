"""Tables: which rows each level has, and what is in them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.errors import InvalidInput


class Block(nn.Module):
    """A layer used twice, a product of its own, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.act(self.linear(x)))
        return x @ x.T


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x) + self.blocks[1](x))


LINEAR = 3 * 4 * 4  # 3 rows, 4 to 4
PRODUCT = 3 * 3 * 4  # (3, 4) @ (4, 3)
BLOCK = 2 * LINEAR + PRODUCT
HEAD = 3 * 3 * 5


@pytest.fixture(scope="module")
def profile() -> eo.ModelProfile:
    return eo.profile(Net(), (3, 4))


def test_leaves_are_the_calls_in_order_with_own_work_in_rows_of_its_own(profile: eo.ModelProfile) -> None:
    table = profile.to_dataframe()
    block = [("", PRODUCT), ("linear", LINEAR), ("act", 0), ("linear", LINEAR)]
    expected = [("", 0)] + [(f"blocks.{i}.{name}".rstrip("."), macs) for i in (0, 1) for name, macs in block]
    assert list(zip(table.path, table.macs, strict=True)) == [*expected, ("head", HEAD)]
    assert table[table.path == "blocks.0.linear"].call_number.tolist() == [1, 2]
    assert table[table.path == "blocks.0.linear"].params.tolist() == [4 * 4 + 4, 0]
    assert table[~table.is_leaf].path.tolist() == ["", "blocks.0", "blocks.1"]


def test_modules_include_what_lies_below_them(profile: eo.ModelProfile) -> None:
    table = profile.to_dataframe("modules")
    below = [("linear", 2, 2 * LINEAR), ("act", 2, 0)]
    expected = [("", 0, 2 * BLOCK + HEAD)]
    for i in (0, 1):
        expected += [(f"blocks.{i}", 1, BLOCK)] + [(f"blocks.{i}.{name}", depth, macs) for name, depth, macs in below]
    expected.append(("head", 1, HEAD))
    assert list(zip(table.path, table.depth, table.macs, strict=True)) == expected
    assert table.calls.tolist() == [1, 1, 2, 1, 1, 2, 1, 1]
    assert table.params.tolist()[:3] == [2 * (4 * 4 + 4) + 3 * 5, 4 * 4 + 4, 4 * 4 + 4]


def test_a_module_is_its_own_work_plus_its_children(profile: eo.ModelProfile) -> None:
    modules, leaves = profile.to_dataframe("modules"), profile.to_dataframe("leaves")
    for row in modules.itertuples():
        inside = leaves.path.map(lambda path, top=row.path: path == top or not top or path.startswith(f"{top}."))
        for name in ("macs", "other_ops", "bytes_read", "bytes_written", "activation_bytes", "operators", "params"):
            assert leaves[inside][name].sum() == getattr(row, name)
        assert leaves[inside].peak_live_bytes.max() == row.peak_live_bytes


def test_operators_are_the_calls_of_the_tape(profile: eo.ModelProfile) -> None:
    table = profile.to_dataframe("operators")
    assert table.op.tolist() == [operator.op for operator in profile.operators]
    assert set(table.status) <= {"priced", "free"}
    assert table[table.op == "aten.linear"].macs.tolist() == [LINEAR] * 4 + [HEAD]
    linear = table[table.op == "aten.linear"].iloc[0]
    assert (linear.module, linear.in_shape, linear.out_shape) == ("blocks.0.linear", "3x4, 4x4, 4", "3x4")


def test_the_root_has_what_only_a_whole_model_has(profile: eo.ModelProfile) -> None:
    table = profile.to_dataframe("root")
    assert len(table) == 1
    row = table.iloc[0]
    assert (row["name"], row["mode"], row["convention"], row["coverage"]) == ("Net", "eval", "edge_opt", 1.0)
    assert (row["in_shape"], row["out_shape"], row["input_bytes"]) == ("3x4", "3x5", 3 * 4 * 4)
    assert row["intensity"] == profile.totals.intensity


def test_shares_are_of_the_whole(profile: eo.ModelProfile) -> None:
    for level in ("leaves", "operators"):
        table = profile.to_dataframe(level)  # type: ignore[arg-type]
        assert math.isclose(table.macs_share.sum(), 1)
        assert math.isclose(table.bytes_share.sum(), 1)
    assert profile.to_dataframe("modules").macs_share[1] == BLOCK / (2 * BLOCK + HEAD)


def test_what_is_not_known_is_missing_and_what_is_nothing_is_zero() -> None:
    class Exponential(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.matrix_exp(x.view(4, 4)) + 1

    profile = eo.profile(Exponential(), (16,))
    table = profile.to_dataframe("operators").set_index("op")
    assert table.macs.isna().tolist() == [False, True, False]
    assert table.loc["aten.view", "macs"] == 0
    assert math.isnan(table.loc["aten.view", "intensity"])  # nothing moves
    assert math.isnan(profile.to_dataframe("root").intensity[0])  # a quotient of two lower bounds
    assert math.isnan(profile.to_dataframe("leaves").macs_share[0])  # a share of no MACs


def test_integers_stay_integers_of_any_size() -> None:
    side = 10**7
    with torch.device("meta"):
        profile = eo.profile(nn.Linear(side, side, bias=False), (side, side))
    assert profile.to_dataframe("root").macs[0] == side**3 > 2**63
    assert str(eo.profile(nn.Linear(2, 2), (1, 2)).to_dataframe().macs.dtype) == "int64"


@pytest.mark.parametrize("level", ["layers", "", "Leaves"])
def test_an_unknown_level_names_the_known(profile: eo.ModelProfile, level: Any) -> None:
    with pytest.raises(InvalidInput, match="leaves, modules, operators, root"):
        profile.to_dataframe(level)
