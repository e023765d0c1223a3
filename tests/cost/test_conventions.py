"""Counting conventions on small models; expected figures are worked out from the dimensions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import edge_opt as eo
from edge_opt.cost.conventions import CONVENTIONS, count, reconcile, under_convention
from edge_opt.cost.conventions.counting import convention
from edge_opt.errors import InvalidInput, RuleError
from edge_opt.records.costs import Cause
from edge_opt.records.profiles import ModelProfile
from zoo import torchvision_models

TOOLS = sorted(CONVENTIONS)


class Function(nn.Module):
    """A model that is one function of its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )


def of_small_cnn(batch: int = 1) -> ModelProfile:
    return eo.profile(small_cnn(), (batch, 3, 8, 8))


MACS = 64 * 4 * 27 + 64 * 10  # 8x8 positions x 4 filters x (3 channels x 3x3), then 64 inputs x 10 classes
CELLS = 4 * 8 * 8  # elements of the feature map


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        # batch norm: a scale and a shift; average pooling: nothing
        ("fvcore", MACS + 2 * CELLS),
        # norm 2 x 2 per element; pooling: one addition per tap, one division per output
        ("thop", MACS + 4 * CELLS + CELLS + CELLS // 4),
        # norm; ReLU and pooling each as a module and as a function; both biases
        ("ptflops", MACS + 2 * CELLS + 2 * CELLS + 2 * CELLS + CELLS + 10),
        # parameters times positions, or times samples: both biases, and the norm's 2 x 4 parameters once
        ("torchinfo", MACS + CELLS + 10 + 8),
        ("torch", 2 * MACS),
        # with a bias n products and n additions; norm 2 x 2; ReLU 1; pooling of 4 taps: 4 products, 3 additions
        ("rasp", 2 * MACS + 4 * CELLS + CELLS + 7 * CELLS // 4),
    ],
)
def test_each_convention_on_a_small_cnn(tool: str, expected: int) -> None:
    assert count(of_small_cnn(), tool).total == expected


def test_layers_stand_beside_those_of_the_profile() -> None:
    profile = of_small_cnn()
    counted = count(profile, "fvcore")
    by_path = {layer.call.path: amount for layer, amount in zip(profile.layers, counted.layers, strict=True)}
    assert by_path == {"": 0, "0": 64 * 4 * 27, "1": 2 * CELLS, "2": 0, "3": 0, "4": 0, "5": 640}


def test_causes_of_a_difference_in_macs() -> None:
    found = reconcile(of_small_cnn(), "ptflops")
    assert (found.unit, found.ours, found.theirs) == ("macs", MACS, MACS + 7 * CELLS + 10)
    assert found.causes == (
        Cause("activation", 2 * CELLS, ("2",)),
        Cause("normalization", 2 * CELLS, ("1",)),
        Cause("pooling", 2 * CELLS, ("3",)),
        Cause("bias", CELLS + 10, ("0", "5")),
    )


def test_causes_of_a_difference_in_flops() -> None:
    found = reconcile(of_small_cnn(), "torch")
    assert found.unit == "flops"
    # Ours: norm a scale and a shift, ReLU one, pooling 3 additions and a division per output, biases one.
    assert found.ours == 2 * MACS + 2 * CELLS + CELLS + CELLS + CELLS + 10
    assert {cause.cause: cause.difference for cause in found.causes} == {
        "normalization not counted": -2 * CELLS,
        "activation not counted": -CELLS,
        "pooling not counted": -CELLS,
        "bias not counted": -CELLS - 10,
    }


def test_rasp_counts_one_addition_less_than_products() -> None:
    found = reconcile(eo.profile(nn.Linear(16, 8, bias=False), (4, 16)), "rasp")
    assert found.theirs == 4 * 8 * (16 + 15)
    assert found.causes == (Cause("a sum of n terms as n - 1 additions", -4 * 8, ("",)),)


def test_causes_are_in_order_of_size() -> None:
    for tool in TOOLS:
        sizes = [abs(cause.difference) for cause in reconcile(of_small_cnn(), tool).causes]
        assert sizes == sorted(sizes, reverse=True)


def test_ptflops_averages_modules_over_the_batch_but_not_functions() -> None:
    found = reconcile(of_small_cnn(batch=3), "ptflops")
    by_module, by_function = MACS + 5 * CELLS + 10, 2 * CELLS  # functions: relu, avg_pool2d
    assert found.theirs == by_module + 3 * by_function
    averaged = next(cause for cause in found.causes if cause.cause == "averaged over the batch")
    assert averaged.difference == -2 * by_module


def test_fused_attention_is_a_cause_of_its_own() -> None:
    profile = eo.profile(Function(F.scaled_dot_product_attention), [(2, 4, 5, 8)] * 3)
    products = 2 * 4 * 5 * 5 * (8 + 8)  # batch x heads x queries x keys x both widths
    assert reconcile(profile, "fvcore").causes == (Cause("attention not counted", -products, ("",)),)
    assert reconcile(profile, "thop").causes == ()
    assert count(profile, "torch").total == 2 * products


def test_recurrent_layers_are_opaque_to_fvcore() -> None:
    profile = eo.profile(nn.LSTM(4, 6, bias=False), (5, 3, 4))
    macs = 5 * 3 * 4 * 6 * (4 + 6)  # steps x batch x gates x hidden x (input + hidden)
    assert reconcile(profile, "fvcore").causes == (Cause("recurrent layers not counted", -macs, ("",)),)
    # thop adds, per hidden unit: one per gate for its sum, two products and one addition for c, one product for h
    assert count(profile, "thop").total == macs + 5 * 3 * 6 * (4 + 3 + 1)
    assert count(profile, "torch").total == 2 * macs


def test_functional_convolutions_are_invisible_to_tools_that_hook_modules() -> None:
    profile = eo.profile(Function(F.conv2d), [(1, 3, 8, 8), (4, 3, 3, 3)])
    macs = 6 * 6 * 4 * 27
    for tool in ("thop", "ptflops"):
        assert reconcile(profile, tool).causes == (Cause("functional operators not counted", -macs, ("",)),)


def test_what_the_model_drops_is_missing_from_a_jit_trace() -> None:
    def forward(x: torch.Tensor, used: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        F.linear(x, dropped)
        return F.linear(x, used)

    profile = eo.profile(Function(forward), [(2, 16), (8, 16), (4, 16)])
    assert count(profile, "fvcore").total == 2 * 16 * 8
    assert count(profile, "torch").total == 2 * (2 * 16 * 8 + 2 * 16 * 4)


def test_a_product_counts_however_it_is_written() -> None:
    # ptflops sees torch.matmul and not `@`, thop sees `@` and not torch.mm; a trace holds one operator for all of them.
    for function in (lambda a, b: torch.matmul(a, b), lambda a, b: a.mm(b), lambda a, b: a @ b, torch.matmul):
        profile = eo.profile(Function(function), [(4, 5), (5, 6)])
        for tool in ("ptflops", "thop"):
            assert count(profile, tool).total == 4 * 5 * 6


def test_a_profile_of_0_2_still_loads(tmp_path: Path) -> None:
    profile = eo.profile(Function(lambda a, b: a @ b), [(4, 5), (5, 6)])
    profile.save(tmp_path / "profile.json")
    saved = json.loads((tmp_path / "profile.json").read_text())
    saved["trace"]["spelled"] = [[0, "sign"]]
    saved["trace"]["modules"][0]["places"] = 1
    (tmp_path / "profile.json").write_text(json.dumps(saved))
    assert eo.load(tmp_path / "profile.json") == profile


def test_rasp_agrees_with_its_published_table() -> None:
    profile = eo.profile(torchvision_models().mobilenet_v2(), (1, 3, 224, 224))
    with (Path(__file__).parents[1] / "reference" / "rasp_mobilenet_v2.csv").open() as file:
        published = [(row["name"], int(row["flops"])) for row in csv.DictReader(file)]
    counted = count(profile, "rasp")
    rows = [
        (f".{layer.call.path}", amount)
        for layer, amount in zip(profile.layers, counted.layers, strict=True)
        if layer.call.is_leaf
    ]
    assert rows == published
    assert counted.total == sum(flops for _, flops in published)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_profile_under_a_convention_has_the_tools_number_and_our_bytes(tool: str) -> None:
    profile = of_small_cnn(batch=2)
    theirs = under_convention(profile, tool)
    number = {"macs": theirs.totals.macs, "flops": theirs.totals.flops}[CONVENTIONS[tool].unit]
    assert (theirs.convention, number) == (tool, count(profile, tool).total)
    assert theirs.totals == replace(
        profile.totals, macs=theirs.totals.macs, flops=theirs.totals.flops, other_ops=theirs.totals.other_ops
    )
    assert sum(layer.cost.flops for layer in theirs.layers) == theirs.totals.flops
    assert all(layer.cost.macs >= 0 and layer.cost.other_ops >= 0 for layer in theirs.layers)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_profile_under_a_convention_leads_back_to_ours(tool: str) -> None:
    profile = of_small_cnn()
    theirs = under_convention(profile, tool)
    assert under_convention(theirs, "edge_opt") == profile
    assert reconcile(theirs, tool) == reconcile(profile, tool)


def test_an_unknown_convention_is_refused_with_the_names_there_are() -> None:
    for refuse in (count, reconcile, under_convention):
        with pytest.raises(InvalidInput, match=r"'deepspeed'.*fvcore, ptflops, rasp, thop, torch"):
            refuse(of_small_cnn(), "deepspeed")


def test_an_unknown_convention_is_refused_before_the_model_is_traced() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model was called")

    with pytest.raises(InvalidInput, match=r"'deepspeed'.*edge_opt, fvcore"):
        eo.profile(Function(forward), (4, 5), convention="deepspeed", measure=True)


def test_the_registry_is_read_only_and_refuses_a_second_convention_of_a_name() -> None:
    with pytest.raises(TypeError):
        CONVENTIONS["mine"] = CONVENTIONS["thop"]  # type: ignore[index]
    with pytest.raises(RuleError, match="'thop' is registered twice"):
        convention("thop", unit="macs", by_module=True)(lambda layers: ())


@settings(max_examples=30, deadline=None)
@given(
    channels=st.integers(1, 4),
    width=st.integers(1, 6),
    kernel=st.integers(1, 3),
    has_bias=st.booleans(),
    batch=st.integers(1, 3),
)
def test_causes_add_up_and_counts_scale_with_the_batch(
    channels: int, width: int, kernel: int, has_bias: bool, batch: int
) -> None:
    model = nn.Sequential(
        nn.Conv2d(channels, width, kernel, bias=has_bias), nn.GroupNorm(1, width), nn.GELU(), nn.Conv2d(width, 2, 1)
    )
    one, many = (eo.profile(model, (size, channels, 5, 5)) for size in (1, batch))
    for tool in TOOLS:
        found = reconcile(many, tool)
        assert found.ours + sum(cause.difference for cause in found.causes) == found.theirs
        assert found.ours == (many.totals.macs if found.unit == "macs" else many.totals.flops)
        if tool != "ptflops":
            assert found.theirs == batch * count(one, tool).total
