"""Frontiers against brute force, and the recommendation by its rule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_opt.budgets import parse_budget, violations
from edge_opt.measuring.statistics import wilson
from edge_opt.records.pareto import ObjectiveInterval, Point, dominates, frontier
from edge_opt.records.sweeps import Candidate, Finalist, Finals, SpeedupRatio, Trial, TrialMetrics
from edge_opt.search.choose import (
    frontiers,
    packed_answers,
    recommend,
    reject_slower_than_unpruned,
    retimed,
    trial_frontier,
)
from sweep_jobs import figures

# Few distinct values, so that ties, duplicates and touching intervals are common.
numbers = st.one_of(st.integers(0, 4).map(float), st.just(math.nan))
exact = numbers.map(lambda value: ObjectiveInterval(value, value, value))
uncertain = st.lists(st.integers(0, 6).map(float), min_size=3, max_size=3).map(
    lambda three: ObjectiveInterval(*sorted(three))
)


def points(spans: st.SearchStrategy[ObjectiveInterval]) -> st.SearchStrategy[list[Point]]:
    return st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[spans] * width), max_size=12))


def has_nan(point: Point) -> bool:
    return any(math.isnan(x) for span in point for x in span)


@given(points(exact))
def test_the_frontier_of_exact_figures_is_what_no_other_beats(found: list[Point]) -> None:
    def beaten(i: int) -> bool:
        return any(
            all(a.value <= b.value for a, b in zip(other, found[i], strict=True))
            and [a.value for a in other] != [b.value for b in found[i]]
            for other in found
            if not has_nan(other)
        )

    expected = [i for i, point in enumerate(found) if not has_nan(point) and not beaten(i)]
    assert list(frontier(found)) == expected


@given(points(uncertain))
def test_the_frontier_of_intervals_is_what_no_other_surely_beats(found: list[Point]) -> None:
    def beats(one: Point, other: Point) -> bool:
        nowhere_worse = not any(
            a.low > b.low or a.value > b.value or a.high > b.high for a, b in zip(one, other, strict=True)
        )
        return nowhere_worse and any(max(a) < min(b) for a, b in zip(one, other, strict=True))

    assert list(frontier(found)) == [
        i for i, point in enumerate(found) if not any(beats(other, point) for other in found)
    ]


@given(points(uncertain))
def test_regard_to_intervals_only_ever_adds_to_the_frontier(found: list[Point]) -> None:
    by_value = [tuple(ObjectiveInterval(s.value, s.value, s.value) for s in point) for point in found]
    assert set(frontier(by_value)) <= set(frontier(found))


@given(points(uncertain))
def test_dominance_is_a_strict_partial_order(found: list[Point]) -> None:
    for a in found:
        assert not dominates(a, a)
        for b in found:
            assert not (dominates(a, b) and dominates(b, a))
            for c in found:
                assert dominates(a, c) or not (dominates(a, b) and dominates(b, c))


def trial(pruning: float, *, budgets: tuple[str, ...] = (), runtime: str = "onnxruntime", **changes: Any) -> Trial:
    candidate = Candidate(pruning, "fp32", runtime)
    metrics: TrialMetrics = replace(figures(candidate), **changes)
    broken = violations(metrics, [parse_budget(text) for text in budgets])
    return Trial(candidate, "done", metrics, None, "", broken, 1.0)


def failed(pruning: float) -> Trial:
    return Trial(Candidate(pruning, "fp32", "torch"), "failed", None, "raised", "build: ValueError: no", (), 1.0)


def test_more_accuracy_and_less_of_everything_else_is_better() -> None:
    good, slow, wrong = (
        trial(0.1, accuracy=0.9, latency_s=1.0),
        trial(0.2, accuracy=0.9, latency_s=2.0),
        trial(0.3, accuracy=0.8, latency_s=1.0),
    )
    assert trial_frontier([slow, good, wrong], ("accuracy", "latency_ms")) == (good.candidate.key,)


def test_equal_candidates_share_the_frontier() -> None:
    same = [trial(level, accuracy=0.9, latency_s=1.0) for level in (0.1, 0.2)]
    assert len(trial_frontier(same, ("accuracy", "latency_ms"))) == 2


def test_what_failed_or_has_no_figure_is_on_no_frontier() -> None:
    rows = [trial(0.1, energy_j=None), trial(0.2, energy_j=1.0), failed(0.3)]
    assert trial_frontier(rows, ("accuracy", "energy_j")) == (rows[1].candidate.key,)


def test_a_slower_candidate_stays_while_the_intervals_overlap() -> None:
    fast = trial(0.1, accuracy=0.9, latency_s=1.0, latency_low_s=0.8, latency_high_s=1.2)
    slow = trial(0.2, accuracy=0.9, latency_s=1.1, latency_low_s=1.0, latency_high_s=1.3)
    # The accuracies are the same figure with the same interval.
    same = {"accuracy_low": 0.88, "accuracy_high": 0.92}
    rows = [replace(row, metrics=replace(row.metrics, **same)) for row in (fast, slow)]  # type: ignore[type-var]
    objectives = ("accuracy", "latency_ms")
    assert trial_frontier(rows, objectives) == (fast.candidate.key,)
    assert len(trial_frontier(rows, objectives, use_ci=True)) == 2


def test_frontiers_leave_out_objectives_that_nobody_knows() -> None:
    # No candidate here knows its energy.
    assert [name for name, _ in frontiers([trial(0.0), trial(0.5)])] == [
        "accuracy,latency_ms",
        "accuracy,peak_memory_mb",
        "accuracy,size_mb",
        "accuracy,latency_ms,peak_memory_mb,size_mb",
    ]


def answering(level: float, right: int, latency_s: float, wrong_from: int = 0, of: int = 300) -> Trial:
    """A candidate that answers all but `of - right` samples right, the wrong ones from a place on."""
    answers = np.ones(of, dtype=bool)
    answers[wrong_from : wrong_from + of - right] = False
    low, high = wilson(right, of)
    return trial(
        level, accuracy=right / of, accuracy_low=low, accuracy_high=high, latency_s=latency_s,
        answers=packed_answers(answers),
    )  # fmt: skip


def test_two_wrong_answers_more_of_300_are_not_significantly_worse() -> None:
    # 299 and 297 of 300: on two samples the pairs differ, which chance does easily
    rows = [answering(0.0, 299, 0.004), answering(0.1, 297, 0.002), answering(0.2, 270, 0.001)]
    key, sentence = recommend(rows)
    assert key == rows[1].candidate.key
    assert "pruned 10 % fp32 onnxruntime is the fastest of 2 accepted candidates without a significant" in sentence
    # (297 - 299) / 300
    assert "accuracy difference from the best not significant: -0.67 points (95 % CI " in sentence


def test_pairs_show_what_two_intervals_do_not() -> None:
    # 285 and 270 of 300: Wilson's intervals overlap (0.919 to 0.969, 0.861 to 0.929); no sample speaks for the second
    rows = [answering(0.0, 285, 0.004), answering(0.1, 270, 0.002)]
    first, second = (row.metrics for row in rows)
    assert first and second and second.accuracy_high > first.accuracy_low
    assert recommend(rows)[0] == rows[0].candidate.key


def test_resampled_scores_are_compared_draw_by_draw() -> None:
    # on every draw the second is 0.01 worse, though both vary by 0.1
    draws = tuple(0.9 + 0.1 * (index % 11 - 5) / 5 for index in range(110))
    wide = {"accuracy_low": 0.8, "accuracy_high": 1.0}
    one = trial(0.0, accuracy=0.9, latency_s=0.004, replicates=draws, **wide)
    other = trial(0.1, accuracy=0.89, latency_s=0.002, replicates=tuple(v - 0.01 for v in draws), **wide)
    assert recommend([one, other])[0] == one.candidate.key


def finalist(row: Trial, logs: list[float]) -> Finalist:
    seconds = math.exp(sum(logs) / len(logs))
    return Finalist(row.candidate, seconds, seconds, seconds, 0.0, seconds, SpeedupRatio(1.0, 1.0, 1.0), tuple(logs))


def test_of_those_not_significantly_slower_the_smaller_is_chosen() -> None:
    rows = [answering(0.0, 299, 0.0010), answering(0.1, 299, 0.00101), answering(0.2, 299, 0.0020)]
    sizes = (3000, 2000, 1000)
    rows = [replace(row, metrics=replace(row.metrics, size_bytes=size)) for row, size in zip(rows, sizes, strict=True)]  # type: ignore[type-var]
    # one per cent apart in turns, which is less than a session knows; the third takes twice as long
    logs = [[math.log(base) + wobble for wobble in (0.0, 0.01, -0.01, 0.0)] for base in (0.0010, 0.00101, 0.0020)]
    finals = Finals(1, 1, "wall", 1, False, (), tuple(map(finalist, rows, logs)))
    key, sentence = recommend(rows, finals)
    assert key == rows[1].candidate.key and "is the smallest of the equally fast of 3 accepted" in sentence


def test_a_pruned_variant_slower_than_its_parent_in_turns_is_not_offered() -> None:
    # Timed alone 0.25 looked twice as fast as unpruned; in turns it takes 1.1 ms against 1.0 ms. 0.5 takes 0.8 ms.
    rows = [answering(0.0, 299, 0.0020), answering(0.25, 299, 0.0010), answering(0.5, 299, 0.0009)]
    logs = [[math.log(seconds)] * 4 for seconds in (0.0010, 0.0011, 0.0008)]
    finals = Finals(1, 1, "wall", 1, False, (), tuple(map(finalist, rows, logs)))
    held = reject_slower_than_unpruned([retimed(row, finals) for row in rows], finals)
    assert [row.is_accepted for row in held] == [True, False, True]
    [broken] = held[1].violations
    assert (broken.constraint, broken.metric) == ("faster than unpruned", "deploy_latency_ms")
    assert (broken.value, broken.limit) == (pytest.approx(1.1), pytest.approx(1.0))
    assert recommend(held, finals)[0] == rows[2].candidate.key
    without = [retimed(row, finals) for row in rows[:2]]
    assert recommend(reject_slower_than_unpruned(without, finals), finals)[0] == rows[0].candidate.key


def test_the_finals_clear_only_the_times_that_they_took() -> None:
    taken = ("latency_ms", "deploy_latency_ms", "single_latency_ms")
    row = trial(0.0, batch_size=32, is_disturbed=True, disturbed_times=taken)
    # batches of 32 were timed alone and stay disturbed; calls of one sample were timed again, in turns
    for is_disturbed, left in ((False, taken[:1]), (True, taken)):
        found = retimed(row, Finals(1, 1, "wall", 4, is_disturbed, (), (finalist(row, [-7.0, -7.1]),))).metrics
        assert found is not None
        assert (found.is_disturbed, found.disturbed_times) == (is_disturbed, left)


def test_times_taken_alone_must_be_apart_to_show_that_pruning_made_it_slower() -> None:
    def alone(level: float, seconds: float, runtime: str = "onnxruntime") -> Trial:
        ends = {"latency_low_s": 0.9 * seconds, "latency_high_s": 1.1 * seconds}
        return trial(level, latency_s=seconds, runtime=runtime, **ends)

    # unpruned 1.0 ms (up to 1.1); 1.1 ms may be from 0.99 on, 1.3 ms is at least 1.17; torch has no parent here
    rows = [alone(0.0, 0.0010), alone(0.25, 0.0011), alone(0.5, 0.0013), alone(0.5, 0.0099, runtime="torch")]
    assert [row.is_accepted for row in reject_slower_than_unpruned(rows)] == [True, True, False, True]
    disturbed = replace(rows[2], metrics=replace(rows[2].metrics, is_disturbed=True))  # type: ignore[type-var]
    assert all(row.is_accepted for row in reject_slower_than_unpruned([rows[0], disturbed]))


def test_rejected_and_failed_candidates_are_never_recommended() -> None:
    rows = [failed(0.4), trial(0.0, latency_s=0.001, budgets=("size_mb <= 0.1",)), trial(0.1, latency_s=0.5)]
    key, sentence = recommend(rows)
    assert key == rows[2].candidate.key
    assert "the only accepted candidate" in sentence


def test_without_an_accepted_candidate_the_closest_is_named_with_its_excess() -> None:
    # 4.2 - 3 = 1.2 ms beyond, which is closer than 6 - 3.
    rows = [trial(level, latency_s=s, budgets=("latency_ms <= 3",)) for level, s in ((0.0, 0.006), (0.1, 0.0042))]
    assert recommend(rows) == (
        None,
        "no candidate satisfies the constraints; closest is pruned 10 % fp32 onnxruntime, beyond latency_ms by 1.2",
    )


def test_a_constraint_on_an_unknown_figure_is_not_satisfied_and_said() -> None:
    assert recommend([trial(0.1, energy_j=None, budgets=("energy_j <= 1",))])[1].endswith("energy_j is not known")


def test_when_everything_failed_the_first_reason_is_given() -> None:
    key, sentence = recommend([failed(0.1), failed(0.2)])
    assert key is None
    assert "all 2 candidates failed" in sentence
    assert "ValueError: no" in sentence
