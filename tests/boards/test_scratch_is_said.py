"""Every verdict on RAM says that kernels' scratch is not in it."""

from __future__ import annotations

import edge_opt as eo
from edge_opt.boards.capacity import SCRATCH_IS_APART
from edge_opt.model import SmallCNN
from edge_opt.report.sheets import record_text


def test_the_largest_batch_says_it() -> None:
    assert eo.fit_batch(SmallCNN(), (1, 28, 28), memory_limit_mb=4).remark == SCRATCH_IS_APART


def test_targets_side_by_side_say_it() -> None:
    found = eo.compare_targets(SmallCNN(), (1, 1, 28, 28), ["raspberry-pi-4", "raspberry-pi-5"])
    assert all(SCRATCH_IS_APART in fit.remarks for fit in found.targets)
    assert any(SCRATCH_IS_APART in note for note in found.notes)
    assert "kernels' scratch on top" in str(found)


def test_a_budget_on_memory_says_it() -> None:
    profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    assert SCRATCH_IS_APART in record_text(eo.check(profile, "peak_memory_mb <= 1"))
    assert SCRATCH_IS_APART in eo.check(profile, baseline=profile, max_increase={"planned_memory": "5%"}).remarks
    assert SCRATCH_IS_APART not in record_text(eo.check(profile, "macs <= 2M"))
