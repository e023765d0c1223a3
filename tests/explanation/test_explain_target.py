"""Explanations on a target: totals are those of profile(target=), and gains those of the change when it is made."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt import compress
from edge_opt.boards.channel_groups import channel_groups, narrowed
from edge_opt.boards.class_costs import CLASSES
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.targets import resolve_target
from edge_opt.errors import InvalidInput
from edge_opt.explanation.explain import ModelVariant
from edge_opt.model import SmallCNN
from edge_opt.records.compression import Explanation

PI, SHAPE = "raspberry-pi-4", (1, 3, 32, 32)


class Residual(nn.Module):
    """A stem, a block that is added to it, a depthwise layer and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.norm = nn.BatchNorm2d(48)
        self.inner = nn.Conv2d(48, 64, 1)
        self.outer = nn.Conv2d(64, 48, 1)
        self.depthwise = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.outer(torch.nn.functional.silu(self.inner(x)))
        return self.head(self.depthwise(x).mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


@pytest.fixture(scope="module")
def int8(net: nn.Module) -> Explanation:
    profiled = eo.profile(net, SHAPE)
    return eo.explain(profiled, ModelVariant(profiled, precision="int8"), target=PI)


def test_layers_add_up_to_what_profile_says(net: nn.Module, int8: Explanation) -> None:
    sides = [eo.profile(net, SHAPE, target=PI, precision=name).prediction for name in ("fp32", "int8")]
    assert int8.latency is not None and sides[0] is not None and sides[1] is not None
    assert (int8.latency.before_s, int8.latency.after_s) == (sides[0].seconds, sides[1].seconds)
    assert sum(row.seconds_before or 0 for row in int8.layers) == pytest.approx(sides[0].seconds)
    assert sum(row.seconds_after or 0 for row in int8.layers) == pytest.approx(sides[1].seconds)
    assert {row.precision for row in int8.layers if row.seconds_after} == {"int8"}
    assert int8.bytes_ratio == pytest.approx(1 / 4, abs=0.001) and int8.macs_ratio == 1


def test_a_file_is_explained_in_its_own_precision(tmp_path: Path) -> None:
    model, shape = SmallCNN().eval(), (1, 1, 28, 28)
    file = compress.convert(model, shape, "int8", calibration=[torch.randn(8, *shape[1:])], output=tmp_path).path
    explanation = eo.explain(eo.profile(model, shape), eo.profile(file), target=PI)
    predicted = eo.profile(file, target=PI).prediction
    assert explanation.latency is not None and predicted is not None and predicted.precision == "int8"
    assert explanation.latency.after_s == predicted.seconds


def test_channels_of_a_profile_are_those_that_prune_removes(net: nn.Module) -> None:
    profiled = eo.profile(net, SHAPE)
    groups = {group.layers: group for group in channel_groups(profiled)}
    # The sum couples the stem with the block's output, and the depthwise layer keeps their channels.
    assert set(groups) == {("stem", "outer"), ("inner",)}
    for (first, *_), group in groups.items():
        pruned = eo.prune(net, SHAPE, layers={first: 0.5}, round_to=1).model
        work = narrowed(profiled, [(group, group.channels // 2)])
        assert work.works == model_work(eo.profile(pruned, SHAPE)).works


def test_gains_are_those_of_the_changed_model(net: nn.Module) -> None:
    before = eo.profile(net, SHAPE)
    changes = {change.topic: change for change in eo.explain(before, before, target=PI, runtime="ncnn").helpful}
    assert len(changes) <= 3 and "precision" in changes
    faster = eo.estimate(before, PI, "int8", runtime="ncnn")
    assert changes["precision"].latency.after_s == faster.seconds
    pruned = changes["prune"]
    assert pruned.layers[0] == "stem"
    smaller = eo.profile(eo.prune(net, SHAPE, layers={"stem": 0.5}, target=PI).model, SHAPE, target=PI, runtime="ncnn")
    assert smaller.prediction is not None and pruned.latency.after_s == pytest.approx(smaller.prediction.seconds)
    assert [change.latency.ratio for change in changes.values()] == sorted(it.latency.ratio for it in changes.values())


def test_reasons_name_classes_calls_and_widths(net: nn.Module) -> None:
    def topics(explanation: Explanation) -> dict[str, str]:
        return {reason.topic: reason.sentence for reason in explanation.reasons}

    small = eo.profile(SmallCNN(), (1, 1, 28, 28))
    assert "Calling them costs more" in topics(eo.explain(small, small, target=PI))["overhead"]
    pruned = eo.profile(eo.prune(net, SHAPE, layers={"inner": 0.2}, round_to=1).model, SHAPE)
    # 64 channels without a fifth are 51, and 56 is the next multiple of 8.
    assert "inner uses 51 of 56" in topics(eo.explain(eo.profile(net, SHAPE), pruned, target=PI))["vector width"]


def test_work_that_a_precision_does_not_make_faster_is_named(net: nn.Module) -> None:
    fp32 = resolve_target(PI, runtime="ncnn")
    assert fp32.platform is not None
    costs = fp32.platform.costs
    # Twice as fast but for depthwise convolutions, which are as fast as before.
    gain = np.array([0.0 if name.startswith("depthwise") else math.log(2) for name in CLASSES])
    changed = replace(fp32.platform, precision="int8", costs=replace(costs, mean=costs.mean - gain))
    profiled = eo.profile(net, SHAPE)
    sides = [
        ModelVariant(profiled, precision="fp32").on_target(fp32),
        ModelVariant(profiled, precision="int8").on_target(replace(fp32, platform=changed)),
    ]
    sentence = next(reason.sentence for reason in eo.explain(*sides).reasons if reason.topic == "classes")
    assert sentence.startswith("Work that int8 does not make faster there") and "depthwise convolutions" in sentence
    assert "1x1 convolutions" not in sentence


def test_a_runtime_without_a_target_is_refused(net: nn.Module) -> None:
    profiled = eo.profile(net, SHAPE)
    with pytest.raises(InvalidInput, match="add target="):
        eo.explain(profiled, profiled, runtime="ncnn")
