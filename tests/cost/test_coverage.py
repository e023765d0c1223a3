"""Priced, free, unpriced: an operator without a rule is listed, never a silent zero."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.cost.rules import aten, clear_prices, rules
from edge_opt.errors import RuleError
from edge_opt.profiling import clear_caches
from edge_opt.records.costs import TensorInfo

library = torch.library.Library("edge_opt_tests", "DEF")
for _name in ("mystery", "blend", "broken"):
    library.define(f"{_name}(Tensor x, Tensor y, int taps) -> Tensor")
    library.impl(_name, lambda x, y, taps: x + y, "CompositeExplicitAutograd")
ops = torch.ops.edge_opt_tests


class Uses(nn.Module):
    def __init__(self, op: object) -> None:
        super().__init__()
        self.op = op
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.layer(x), self.op(x, x, 3), 3)


def test_an_operator_without_a_rule_is_listed_and_the_total_is_a_lower_bound() -> None:
    profile = eo.profile(Uses(ops.mystery), (2, 4))
    assert [(item.op, item.module, item.count) for item in profile.unpriced] == [("edge_opt_tests.mystery", "", 2)]
    assert profile.totals.is_lower_bound
    assert profile.coverage == pytest.approx(1 / 3)  # the linear is priced, two calls are not
    assert [operator.status for operator in profile.operators] == ["priced", "unpriced", "unpriced"]


def test_rules_name_operators_of_torch_and_need_none_of_them() -> None:
    names = {name.removeprefix("aten.") for name in rules() if name.startswith("aten.")}
    strangers = {name for name in names if not any(hasattr(torch.ops.aten, n) for n in (name, name.removesuffix("_")))}
    assert len(names) > 500 and strangers <= {"cholesky"}  # which torch 2.15 no longer has
    assert aten.an_operator_of_another_version == "aten::an_operator_of_another_version"


def test_a_users_rule_prices_a_custom_operator() -> None:
    before = eo.profile(Uses(ops.blend), (2, 4))
    assert before.totals.is_lower_bound

    @eo.cost_rule(ops.blend, kind="matmul")
    def blend(out: TensorInfo, x: TensorInfo, y: TensorInfo, taps: int) -> eo.Work:
        return eo.Work(macs=out.elements * taps)

    after = eo.profile(Uses(ops.blend), (2, 4))
    assert after.coverage == 1.0
    assert not after.totals.is_lower_bound
    # the linear, and two calls of 8 outputs with 3 taps
    assert after.totals.macs == 2 * 4 * 4 + 2 * 8 * 3
    # two operands read and one written, each 8 values of 4 bytes, in two calls; and the linear
    assert after.totals.bytes_read == 2 * 2 * 8 * 4 + 4 * (8 + 16 + 4)
    assert rules()["edge_opt_tests.blend"].kind == "matmul"

    with pytest.raises(RuleError, match="edge_opt_tests.blend has two cost rules: .*blend and .*another"):

        @eo.cost_rule("edge_opt_tests::blend")
        def another(out: TensorInfo, *args: object) -> eo.Work:
            return eo.Work()


def test_a_rule_that_does_not_fit_says_which() -> None:
    @eo.cost_rule(ops.broken)
    def too_short(out: TensorInfo, x: TensorInfo) -> eo.Work:
        return eo.Work()

    with pytest.raises(RuleError, match="cost rule .*too_short does not fit edge_opt_tests.broken: TypeError"):
        eo.profile(Uses(ops.broken), (2, 4))


def test_not_an_operator_is_refused() -> None:
    with pytest.raises(RuleError, match="is not an operator; pass torch.ops"):
        eo.cost_rule(torch.relu)(lambda out: eo.Work())


def test_the_registry_cannot_be_written_from_outside() -> None:
    with pytest.raises(TypeError):
        rules()["aten.relu"] = None


def test_views_are_free_not_unpriced() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(8).unsqueeze(0).expand(3, 8).t()

    profile = eo.profile(nn.Sequential(Views(), nn.Identity()), (2, 4))
    assert {operator.status for operator in profile.operators} == {"free"}
    assert profile.coverage == 1.0
    assert profile.totals.flops == 0


def test_clearing_the_caches_changes_no_number() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    warm = eo.profile(model, (1, 3, 8, 8))
    assert eo.profile(model, (1, 3, 8, 8)) == warm
    clear_caches()
    assert eo.profile(model, (1, 3, 8, 8)) == warm


def test_prices_are_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["edge_opt.cost.rules"]
    monkeypatch.setattr(module, "_MAX_PRICES", 3)
    clear_prices()
    for size in range(1, 9):
        assert eo.profile(nn.Linear(size, 2), (1, size)).totals.macs == 2 * size
        assert len(module._prices) <= 3


def test_a_gradient_is_of_the_kind_of_its_operator() -> None:
    assert {rules()[f"aten.{name}_backward"].kind for name in ("avg_pool2d", "max_pool2d_with_indices")} == {"pooling"}
