"""Widths for speed: from the vectors of the machine, and never more than half of a layer."""

from __future__ import annotations

import numpy as np

from edge_opt.boards.targets import resolve_target
from edge_opt.compress import prune
from edge_opt.model import SmallCNN
from edge_opt.pruning.coupling import Group
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
