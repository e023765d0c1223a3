"""Figures, intervals, verdicts and comparisons of samples, on known cases and on recorded noise."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_opt.errors import InvalidInput
from edge_opt.measuring.statistics import (
    compare_latencies,
    compare_placements,
    latency_of,
    median_interval,
    relative_half_width,
    resamples,
    waiting_share,
)
from edge_opt.records.measurements import Comparison, Latency
from timings import environment, steady

NOISE = json.loads((Path(__file__).parents[1] / "recordings" / "latency_noise.json").read_text(encoding="utf-8"))[
    "sets"
]
SAMPLES = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=60)


def test_figures_are_those_of_numpy() -> None:
    wall = np.random.default_rng(1).lognormal(size=101)
    found = latency_of(wall, wall / 2, batch_size=8)
    assert found.samples_s == tuple(wall)
    assert (found.minimum_s, found.median_s, found.mean_s) == (wall.min(), np.median(wall), wall.mean())
    assert found.std_s == wall.std(ddof=1)
    assert (found.p90_s, found.p95_s, found.p99_s) == tuple(np.percentile(wall, (90, 95, 99)))
    assert (found.cpu_minimum_s, found.cpu_median_s) == (wall.min() / 2, np.median(wall) / 2)
    assert found.throughput == 8 / np.median(wall)


def test_one_sample_is_its_own_everything() -> None:
    found = latency_of([0.5], [0.5])
    assert (found.minimum_s, found.median_s, found.p99_s, found.std_s) == (0.5, 0.5, 0.5, 0.0)
    assert (found.median_interval_s.low, found.median_interval_s.high) == (0.5, 0.5)


@given(SAMPLES)
def test_the_interval_holds_the_median_and_stays_within_the_samples(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert min(samples) <= interval.low <= np.median(samples) * (1 + 1e-9)
    assert max(samples) >= interval.high >= np.median(samples) * (1 - 1e-9)


@given(SAMPLES, st.sampled_from([0.125, 8.0]))
def test_twice_as_slow_is_twice_every_figure(samples: list[float], factor: float) -> None:
    once, scaled = (
        latency_of(samples, samples),
        latency_of([factor * s for s in samples], [factor * s for s in samples]),
    )
    for name in ("minimum_s", "median_s", "mean_s", "std_s", "p90_s", "p95_s", "p99_s", "cpu_median_s"):
        assert getattr(scaled, name) == pytest.approx(factor * getattr(once, name))
    assert scaled.median_interval_s.low == pytest.approx(factor * once.median_interval_s.low)
    assert (scaled.is_noisy, scaled.is_contended) == (once.is_noisy, once.is_contended)


def test_the_same_samples_give_the_same_interval() -> None:
    samples = list(steady(1.0))
    assert median_interval(samples) == median_interval(samples)
    assert median_interval(samples) != median_interval(samples, seed=1)


def test_the_interval_covers_the_true_median_in_about_95_of_100() -> None:
    covered = 0
    for seed in range(200):
        interval = median_interval(list(steady(1.0, 50, seed)))
        covered += interval.low <= 1.0 <= interval.high
    assert 180 <= covered <= 199


def test_intervals_of_long_recordings_are_drawn_in_parts() -> None:
    interval = median_interval(list(steady(1.0, 3000)))
    # The median's standard error is 1.2533 sigma / sqrt(n); 1.96 of them to each side.
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * 1.2533 * 0.01 / math.sqrt(3000), rel=0.35)


def test_draws_are_runs_of_neighbours() -> None:
    drawn = resamples(27, 10)
    assert drawn.shape == (10, 27)
    steps = np.diff(drawn.reshape(10, 9, 3), axis=2) % 27  # runs of 3, the cube root of 27
    assert (steps == 1).all()


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    independent = steady(1.0, 512, scatter=0.05)
    alike = np.repeat(steady(1.0, 64, scatter=0.05), 8)
    assert relative_half_width(list(alike)) > 1.5 * relative_half_width(list(independent))


def test_steady_samples_are_neither_noisy_nor_contended() -> None:
    found = latency_of(steady(1.0), steady(1.0), environment=environment(governor="performance"))
    assert not found.is_noisy
    assert not found.is_contended
    assert found.remarks == ()


def test_a_wide_interval_is_noisy_and_the_remark_says_how_wide() -> None:
    wall = steady(1.0, 10, scatter=0.08)
    found = latency_of(wall, wall, target_precision=0.001)
    assert found.is_noisy
    assert any("and ±0.1% was asked for" in remark for remark in found.remarks)


def test_scatter_is_noisy_even_when_many_samples_pin_the_median() -> None:
    wall = steady(1.0, 3000, scatter=0.2)
    found = latency_of(wall, wall)
    assert relative_half_width(wall) < 0.02
    assert found.is_noisy
    assert any("scatter" in remark for remark in found.remarks)


@pytest.mark.parametrize(("late", "word"), [(0.8, "is faster by"), (1.3, "is slower by")])
def test_a_machine_that_changes_half_way_is_noticed(late: float, word: str) -> None:
    wall = np.concatenate([steady(1.0, 50), steady(late, 50, seed=1)])
    assert any(word in remark for remark in latency_of(wall, wall).remarks)


def test_a_clock_that_stands_still_is_noisy() -> None:
    found = latency_of([0.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert found.is_noisy
    assert "the clock did not move" in found.remarks[0]


@pytest.mark.parametrize(
    ("wall", "cpu", "waiting"),
    [
        ([1.0] * 8, [1.0] * 8, 0.0),  # one thread, undisturbed
        ([1.0] * 8, [1.9] * 8, 0.0),  # two threads, undisturbed
        ([2.0] * 8, [1.0] * 8, 0.5),  # one thread, half of the time held up throughout
        ([1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0], 1 - 8 / 2 / 6),  # two threads; half of the blocks held up
        ([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0], 0.0),  # slower at its own work, not held up
    ],
)
def test_waiting_is_wall_time_that_no_core_worked(wall: list[float], cpu: list[float], waiting: float) -> None:
    assert waiting_share(wall, cpu) == pytest.approx(waiting)
    assert latency_of(wall, cpu).is_contended == (waiting > 0.1)


def test_waiting_for_another_device_is_no_contention() -> None:
    assert not latency_of([2.0] * 8, [0.1] * 8, waits_for_device=True).is_contended


def test_a_load_above_the_cores_is_contention_and_a_governor_a_remark() -> None:
    busy = latency_of(steady(1.0), steady(1.0), environment=environment(load_1min=3.2))
    assert busy.is_contended
    assert busy.remarks == ("the load was 3.2 on 2 cores before the measurement began",)
    saving = latency_of(steady(1.0), steady(1.0), environment=environment(governor="powersave"))
    assert not saving.is_contended
    assert "'powersave'" in saving.remarks[0]


@pytest.mark.parametrize(("wall", "cpu"), [([], []), ([1.0], []), ([1.0, 1.0], [1.0])])
def test_samples_without_partners_are_refused(wall: list[float], cpu: list[float]) -> None:
    with pytest.raises(InvalidInput, match="samples"):
        latency_of(wall, cpu)


def recorded(session: dict[str, Any], side: str, factor: float = 1.0) -> Latency:
    wall, cpu = ([factor * us * 1e-6 for us in session[side][name]] for name in ("wall_us", "cpu_us"))
    return latency_of(wall, cpu, environment=environment(load_1min=session["load"]))


def compared(name: str, factor: float) -> list[Comparison]:
    return [compare_latencies(recorded(s, "a"), recorded(s, "b", factor), paired=True) for s in NOISE[name]]


@pytest.mark.parametrize("name", NOISE)
def test_a_model_equals_itself_in_95_of_100_recorded_sessions(name: str) -> None:
    verdicts = Counter(comparison.verdict for comparison in compared(name, 1.0))
    assert verdicts.total() == 100
    assert verdicts["equal"] >= 95


@pytest.mark.parametrize("name", NOISE)
@pytest.mark.parametrize("later", [1, 7, 50])
def test_a_model_equals_itself_in_95_of_100_pairs_of_sessions(name: str, later: int) -> None:
    sides = [recorded(session, "a") for session in NOISE[name]]
    pairs = zip(sides, sides[later:] + sides[:later], strict=True)
    verdicts = Counter(compare_latencies(old, new).verdict for old, new in pairs)
    assert verdicts["equal"] >= 95


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, "slower"), (1 / 1.1, "faster")])
def test_a_tenth_is_found_in_95_of_100_recorded_sessions(factor: float, verdict: str) -> None:
    verdicts = Counter(comparison.verdict for comparison in compared("1 thread", factor))
    assert verdicts[verdict] >= 95
    assert verdicts[verdict] + verdicts["equal"] == 100


def test_places_in_memory_are_in_the_interval_of_copies() -> None:
    # Five copies, each 10 % slower than its baseline but for where it lies: -2 % to 2 % in steps of 1 %.
    pairs = [
        (latency_of([1.0] * 40, [1.0] * 40), latency_of([1.1 * math.exp(shift)] * 40, [1.1] * 40))
        for shift in (-0.02, -0.01, 0.0, 0.01, 0.02)
    ]
    found = compare_placements(pairs)
    # Student's t for 4 degrees of freedom is 2.776; the deviation of the five is 0.01 x sqrt(2.5).
    half_width = 2.776 * 0.01 * math.sqrt(2.5 / 5)
    assert found.ratio == pytest.approx(1.1)
    assert found.ratio_interval.high == pytest.approx(1.1 * math.exp(half_width))
    assert found.verdict == "slower"


@pytest.mark.parametrize("paired", [True, False])
def test_a_tenth_is_found_between_quiet_sessions(paired: bool) -> None:
    pairs = [(latency_of(steady(1.0, seed=n), steady(1.0, seed=n)), steady(1.1, seed=1000 + n)) for n in range(100)]
    found = [compare_latencies(old, latency_of(new, new), paired=paired).verdict for old, new in pairs]
    assert found.count("slower") == 100


@settings(max_examples=50)
@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=40), st.floats(0.5, 2.0), st.booleans())
def test_a_comparison_read_backwards_says_the_opposite(samples: list[float], factor: float, paired: bool) -> None:
    old = latency_of(samples, samples)
    new = latency_of([factor * s for s in reversed(samples)], samples[::-1])
    there, back = compare_latencies(old, new, paired=paired), compare_latencies(new, old, paired=paired)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.ratio_interval.low <= there.ratio <= there.ratio_interval.high
    assert {there.verdict, back.verdict} in ({"equal"}, {"faster", "slower"})


def test_contended_sessions_are_compared_by_cpu_time() -> None:
    held_up = latency_of(steady(2.0), steady(1.0))
    assert compare_latencies(held_up, held_up, paired=True).clock == "cpu"
    assert compare_latencies(latency_of(steady(1.0), steady(1.0)), held_up).clock == "cpu"
    assert compare_latencies(latency_of(steady(1.0), steady(1.0)), latency_of(steady(1.0), steady(1.0))).clock == "wall"


def test_a_single_sample_shows_no_difference() -> None:
    found = compare_latencies(latency_of([1.0], [1.0]), latency_of([3.0], [3.0]))
    assert (found.verdict, found.ratio) == ("equal", pytest.approx(3.0))
    assert (found.ratio_interval.low, found.ratio_interval.high > 1e300) == (0.0, True)


def test_what_cannot_be_compared_is_refused() -> None:
    one, three = latency_of([1.0], [1.0]), latency_of([1.0] * 3, [1.0] * 3)
    with pytest.raises(InvalidInput, match="1 and 3 samples: sample counts differ, cannot pair"):
        compare_latencies(one, three, paired=True)
    with pytest.raises(InvalidInput, match="zero seconds"):
        compare_latencies(one, latency_of([0.0], [0.0]))
