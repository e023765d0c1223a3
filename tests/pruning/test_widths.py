"""Widths for speed: from the vectors of the machine, and never more than half of a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import edge_opt as eo
from edge_opt.boards.targets import resolve_target
from edge_opt.compress import prune
from edge_opt.model import SmallCNN
from edge_opt.pruning.coupling import Group
from edge_opt.pruning.plan import make_plan
from edge_opt.pruning.ranking import Ranking, fast_multiple


def test_the_multiple_follows_the_target() -> None:
    # Two vectors of 128 bits hold 8 numbers of 32 bits.
    assert fast_multiple(resolve_target("raspberry-pi-4")) == 8


def test_narrow_layers_are_rounded_to_less() -> None:
    ranking = Ranking(None, np.zeros(0), 16, is_adaptive=True)  # type: ignore[arg-type]  # only widths are asked
    widths = {channels: ranking.multiple(Group("", np.arange(channels), 1, None)) for channels in (6, 16, 24, 32, 64)}
    assert widths == {6: 4, 16: 8, 24: 8, 32: 16, 64: 16}


def test_auto_is_the_default_and_a_target_decides_for_it() -> None:
    pruned = prune(SmallCNN(32, 64), (1, 1, 28, 28), 0.25, target="raspberry-pi-4")
    # 24 of 32 and 48 of 64 are multiples of 8.
    assert (pruned.asked.round_to, pruned.asked.is_round_auto) == (8, True)
    assert (pruned.model.conv1.out_channels, pruned.model.conv2.out_channels) == (24, 48)
    assert "rounded to fast widths" in str(pruned)


def test_layers_whose_channels_cost_more_on_the_target_lose_more() -> None:
    plan = make_plan(SmallCNN(32, 64), (1, 1, 28, 28), target=resolve_target("raspberry-pi-4"))
    groups = [number for number, group in enumerate(plan.channel_map.groups) if not group.refused]
    assert plan.savings is not None and list(plan.savings) == groups and min(plan.savings.values()) > 0
    first, second = groups
    known = replace(plan, savings={first: 3.0, second: 1.0})
    # Together they save 40 % of what all channels cost: 3 x + y = 1.6. In proportion to what they save, y would be
    # 0.16; it is at least 0.4 / 1.5.
    shares = known.ratios_by_cost(0.4)
    assert shares == pytest.approx({second: 0.4 / 1.5, first: (1.6 - 0.4 / 1.5) / 3})
    asked = known.requested_ratios(0.4)
    assert (asked["conv1"], asked["conv2"], asked["classifier"]) == (shares[first], shares[second], 0.4)
    assert replace(plan, savings=None).ratios_by_cost(0.4) == {}


def test_pruning_for_a_microcontroller_meets_a_latency_in_int8() -> None:
    pruned = prune(SmallCNN(32, 64), (1, 1, 28, 28), latency_target=0.5, target="stm32h747")
    before, after = (eo.profile(net, (1, 1, 28, 28)) for net in (SmallCNN(32, 64), pruned.model))
    seconds = [eo.estimate(profile, "stm32h747", "int8").seconds or 0 for profile in (before, after)]
    assert pruned.achieved.latency_ratio == pytest.approx(seconds[1] / seconds[0])
    assert abs(pruned.achieved.latency_ratio - 0.5) <= 0.05
