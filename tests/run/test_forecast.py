"""Candidates that are predicted to miss a latency budget: which are skipped, which are built all the same."""

from __future__ import annotations

from dataclasses import replace

from edge_opt.records.sweeps import Candidate, SkippedCandidate, SweepResult, Trial, Violation
from edge_opt.run.forecast import plan_of

LIMIT_S = 0.010


def candidates(count: int) -> tuple[Candidate, ...]:
    return tuple(Candidate(number / 100, "fp32", "onnxruntime") for number in range(count))


def forecast(candidate: Candidate, seconds: float) -> SkippedCandidate:
    """An interval of a tenth to both sides."""
    return SkippedCandidate(candidate, "target_latency_ms", seconds, 0.9 * seconds, 1.1 * seconds, LIMIT_S, "why")


def test_only_what_misses_with_its_whole_interval_is_skipped() -> None:
    three = candidates(3)
    # 0.9 x 12 ms is above 10 ms, 0.9 x 11 ms is below it.
    seconds = (0.012, 0.011, 0.005)
    plan = plan_of(three, [forecast(it, value) for it, value in zip(three, seconds, strict=True)], seed=0)
    assert [item.candidate for item in plan.skipped] == [three[0]]
    # One of one is built all the same: a tenth, rounded up.
    assert plan.skipped[0].is_built and three[0] in plan.order


def test_a_tenth_of_what_is_skipped_is_built_and_what_should_hold_comes_first() -> None:
    forty = candidates(40)
    # The more is pruned, the faster; the last ten hold the budget.
    plan = plan_of(forty, [forecast(it, LIMIT_S * (40 - place) / 10) for place, it in enumerate(forty)], seed=0)
    # 0.9 x 10 ms x k / 10 > 10 ms for k of 12 and more: 29 of 40, of which 3 are built.
    assert len(plan.skipped) == 29
    assert sum(item.is_built for item in plan.skipped) == 3
    assert len(plan.order) == 40 - 29 + 3
    assert plan.order[0] == forty[30]
    assert plan_of(forty, [], seed=0).order == forty


def test_the_fastest_is_built_even_if_all_miss() -> None:
    four = candidates(4)
    plan = plan_of(four, [forecast(it, 0.1 - place / 100) for place, it in enumerate(four)], seed=0)
    assert four[3] in plan.order and four[3] not in [item.candidate for item in plan.skipped]


def test_the_result_says_how_right_the_skipping_was() -> None:
    one, other = candidates(2)
    plan = plan_of((one, other), [forecast(one, 0.02), forecast(other, 0.001)], seed=0)
    broken = Violation("target_latency_ms <= 10", "target_latency_ms", 21.0, 10.0)
    trials = [Trial(it, "done", None, None, "", (), 1.0) for it in (one, other)]
    result = SweepResult("s", trials[1], tuple(trials), (), (), None, "")
    assert plan.checked(result).skipped[0].is_right is None  # it has no metrics: nothing is known
    assert "1 skipped" not in plan.checked(result).skipping
    known = replace(plan.skipped[0], is_right=True)
    assert replace(result, skipped=(known,)).skipping.endswith("of 1 built all the same 1 missed it")
    assert broken.metric == known.metric
