"""Layers at the peak of the arena lose channels first where a budget limits RAM."""

from __future__ import annotations

import pytest
from torch import nn

import edge_opt as eo
from edge_opt.model import SmallCNN
from edge_opt.pruning.plan import PruningPlan, make_plan
from edge_opt.records.microcontrollers import McuMemory
from edge_opt.records.profiles import ModelProfile
from edge_opt.run.config import sweep_settings
from edge_opt.run.peak_pruning import STEP, _plan, ratios_at_peak


def memory_of(profile: ModelProfile) -> McuMemory:
    return eo.mcu_memory(profile, core="stm32h747", kernels="cmsis-nn")


@pytest.fixture(scope="module")
def plan() -> PruningPlan:
    return make_plan(SmallCNN(16, 32), (1, 1, 28, 28)).with_rounding(4)


def test_only_the_layer_at_the_peak_is_pruned(plan: PruningPlan) -> None:
    whole = memory_of(plan.before)
    # The peak is the first convolution's result and its pool: (28 * 28 + 14 * 14) bytes for each of 16 channels.
    per_channel = 28 * 28 + 14 * 14
    assert whole.head_bytes == 16 * per_channel
    limit = whole.arena_bytes - 4 * per_channel  # twelve channels are enough
    ratios = ratios_at_peak(plan, memory_of, limit)
    assert ratios is not None and list(ratios) == ["conv1"]
    pruned = eo.compress.prune(SmallCNN(16, 32), (1, 1, 28, 28), layers=ratios, round_to=4)
    assert isinstance(pruned.model.conv1, nn.Conv2d)
    assert (pruned.model.conv1.out_channels, pruned.model.conv2.out_channels) == (12, 32)
    assert ratios["conv1"] - STEP < 4 / 16 <= ratios["conv1"] + STEP


def test_a_budget_that_holds_or_cannot_hold_prunes_nothing(plan: PruningPlan) -> None:
    assert ratios_at_peak(plan, memory_of, memory_of(plan.before).arena_bytes) == {}
    assert ratios_at_peak(plan, memory_of, 1024) is None


def test_widths_are_rounded_for_the_target_and_not_for_this_machine() -> None:
    config = sweep_settings({"target": "stm32h747", "precisions": ["int8"]})
    # A tile of two vectors of two lanes.
    assert _plan(SmallCNN(16, 32), (1, 1, 28, 28), config).ranking.round_to == 2 * 2
