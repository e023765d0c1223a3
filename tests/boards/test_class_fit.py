"""The fit of class costs, on boards whose costs are known because they were made up."""

from __future__ import annotations

import numpy as np
import pytest
from board_priors import IN_ORDER_INT8, INHERITED_SD, PARENTS, TYPICAL, broad_prior, fit_prior, shrunk
from held_out import Trial, calibrated, new_family_quantile, noise_ratio
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_opt.boards.class_costs import CLASSES, Costs, Spread, Vector, fit_costs
from edge_opt.errors import InvalidInput

SIZE = len(CLASSES)
USED = [CLASSES.index(name) for name in ("conv3x3_macs", "conv1x1_macs", "depthwise_elements", "layers")]


def made_up(seed: int, boards: int, nets: int, noise: float) -> tuple[list[tuple[Vector, Vector]], Vector]:
    """Boards whose costs differ by one factor and a little more, and nets of four classes."""
    generator = np.random.default_rng(seed)
    truth = np.log([TYPICAL[name] for name in CLASSES])
    found, costs = [], []
    for _ in range(boards):
        own = truth + generator.normal(0, 0.8) + generator.normal(0, 0.3, SIZE)
        rows = np.zeros((nets, SIZE))
        for column in USED:
            scale = 0.3 / TYPICAL[CLASSES[column]]
            rows[:, column] = scale * generator.lognormal(2, 1, nets)
        times = rows @ np.exp(own) * np.exp(generator.normal(0, noise, nets))
        found.append((rows, times))
        costs.append(own)
    return found, np.array(costs)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_without_noise_predictions_are_the_times(seed: int) -> None:
    boards, _ = made_up(seed, 1, 12, 0.0)
    rows, times = boards[0]
    costs = fit_costs(rows, times, broad_prior())
    errors = [costs.log_time(row) - np.log(time) for row, time in zip(rows, times, strict=True)]
    assert np.max(np.abs(errors)) < 0.05


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_a_board_that_is_slower_by_a_factor_is_predicted_slower_by_it(seed: int, factor: float) -> None:
    rows, times = made_up(seed, 1, 8, 0.05)[0][0]
    flat = Costs(broad_prior().mean, np.full((SIZE, SIZE), 1e6) + np.eye(SIZE), np.zeros(SIZE))
    one, other = fit_costs(rows, times, flat), fit_costs(rows, factor * times, flat)
    # within the step at which the fit stops
    assert other.log_time(rows[0]) - one.log_time(rows[0]) == pytest.approx(np.log(factor), abs=0.02)


def test_noise_says_how_far_a_single_time_moves_a_cost() -> None:
    prior = Costs(np.zeros(SIZE), 0.04 * np.eye(SIZE), np.zeros(SIZE))
    row = np.zeros((1, SIZE))
    row[0, CLASSES.index("layers")] = 1.0
    # At the minimum f / 0.04 = 5 d / (4 s^2 + d^2), with f the moved cost and d = 0.4 - f what remains of a time of
    # exp(0.4). With s = 0.2, f = 0.2: 0.2 / 0.04 = 5 and 5 * 0.2 / (0.16 + 0.04) = 5.
    costs = fit_costs(row, np.exp([0.4]), prior, noise=0.2)
    assert costs.mean[CLASSES.index("layers")] == pytest.approx(0.2, abs=1e-3)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_shares_add_up_and_variances_are_positive(seed: int) -> None:
    rows, times = made_up(seed, 1, 5, 0.1)[0][0]
    costs = fit_costs(rows, times, broad_prior())
    assert costs.shares(rows[0]).sum() == pytest.approx(1.0)
    assert costs.variance(rows[0]) > 0
    assert np.all(np.linalg.eigvalsh(costs.covariance) > 0)


def test_more_times_never_make_the_costs_less_sure() -> None:
    rows, times = made_up(3, 1, 10, 0.0)[0][0]
    few, many = fit_costs(rows[:3], times[:3], broad_prior()), fit_costs(rows, times, broad_prior())
    assert many.variance(rows[9]) < few.variance(rows[9])


def test_one_time_that_is_ten_times_too_long_does_not_bend_the_others() -> None:
    rows, times = made_up(5, 1, 14, 0.02)[0][0]
    bent = times.copy()
    bent[0] *= 10
    costs = fit_costs(rows, bent, broad_prior())
    errors = [abs(costs.log_time(row) - np.log(time)) for row, time in zip(rows[1:], times[1:], strict=True)]
    assert np.median(errors) < 0.05


def test_no_time_leaves_the_prior() -> None:
    prior = broad_prior()
    assert fit_costs(np.zeros((0, SIZE)), np.zeros(0), prior) is prior


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_no_run_can_take_are_refused(wrong: float) -> None:
    with pytest.raises(InvalidInput, match="more than zero"):
        fit_costs(np.ones((2, SIZE)), np.array([1.0, wrong]), broad_prior())


def test_a_prior_over_boards_predicts_a_new_one_from_two_times() -> None:
    boards, _ = made_up(11, 30, 12, 0.05)
    prior, fits = fit_prior(boards[:29])
    rows, times = boards[29]
    costs = fit_costs(rows[:2], times[:2], prior)
    errors = [abs(costs.log_time(row) - np.log(time)) for row, time in zip(rows[2:], times[2:], strict=True)]
    assert len(fits) == 29
    assert np.median(errors) < 0.25


def test_a_class_without_rows_costs_what_its_parent_costs() -> None:
    prior, fits = fit_prior(made_up(2, 6, 10, 0.05)[0])
    for name in ("product_macs", "conv_macs"):
        assert PARENTS[name] == "conv1x1_macs"
        for costs in (prior, *fits):
            place, parent = CLASSES.index(name), CLASSES.index("conv1x1_macs")
            assert costs.mean[place] == pytest.approx(costs.mean[parent])
            assert costs.covariance[place, place] == pytest.approx(costs.covariance[parent, parent] + INHERITED_SD**2)
            assert costs.seen[place] == 0


def test_two_boards_make_no_prior() -> None:
    with pytest.raises(InvalidInput, match="three boards"):
        fit_prior(made_up(1, 2, 5, 0.1)[0])


def test_shrinking_keeps_the_diagonal_and_pulls_the_rest_together() -> None:
    spread = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]])
    pulled = shrunk(spread, boards=8)
    # half of each, and the mean off the diagonal is (0.9 + 0.1 + 0.2) / 3 = 0.4
    assert pulled[0, 1] == pytest.approx((0.9 + 0.4) / 2)
    assert pulled[0, 0] == pytest.approx(1.0, abs=1e-3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.4))
def test_calibrated_intervals_hold_nine_in_ten(seed: int, noise: float) -> None:
    generator = np.random.default_rng(seed)
    variances = generator.uniform(0, 0.05, 600)
    errors = generator.normal(0, 1, 600) * np.sqrt(noise**2 + variances)
    trials = [
        Trial(0, "net", str(number % 9), "all", float(e), float(v), False)
        for number, (e, v) in enumerate(zip(errors, variances, strict=True))
    ]
    spread = calibrated(trials[:300])
    held = np.mean([abs(trial.log_error) <= spread.width(trial.variance) for trial in trials[300:]])
    # Both the quantile and the share are of 300 draws: three standard deviations of their difference are 0.073.
    assert 0.81 < held < 0.98


def test_few_rows_never_promise_less_than_the_usual_noise() -> None:
    trials = [Trial(0, "net", "net", "all", 0.001, 0.0, False)] * 5
    assert calibrated(trials).width(0.0) >= 0.1 * 1.8


def test_a_noisier_board_gets_a_wider_interval() -> None:
    spread = Spread(0.1, 1.0, 2.0)
    calm = [Trial(0, "net", "net", "all", 0.02, 0.0, False)] * 20
    wild = [Trial(1, "net", "net", "all", 0.3, 0.0, False)] * 20
    assert noise_ratio(wild, calm + wild, spread) > 1 > noise_ratio(calm, calm + wild, spread)


def test_a_family_that_was_never_seen_may_err_more_than_those_that_were() -> None:
    errors = np.random.default_rng(0).normal(size=4000)
    # Four families alike: the quantile of a normal variable, 1.645.
    assert new_family_quantile([errors / np.sqrt(np.mean(errors**2))] * 4) == pytest.approx(1.645, rel=0.03)
    # Scales of 1/2, 1, 1 and 2 pooled have 2.0 of nine in ten rows; a fifth family may have a larger one.
    scales = (0.5, 1.0, 1.0, 2.0)
    pooled = float(np.quantile(np.abs(np.concatenate([scale * errors for scale in scales])), 0.9))
    few = new_family_quantile([scale * errors for scale in scales])
    assert few > 1.1 * pooled
    # With four times as many families of the same scales their spread is known better.
    assert new_family_quantile([scale * errors for scale in scales * 4]) < few


def test_proportions_of_the_right_kind_of_core_carry_four_nets_to_others() -> None:
    # A core without caches at 280 MHz: a depthwise MAC takes three cycles, an element ten, a layer three thousand.
    truth = np.array([IN_ORDER_INT8[name] / 0.28 for name in CLASSES])
    (known, _), (unseen, _) = made_up(7, 2, 4, 0.0)[0]
    worst = {}
    for name, typical in (("right", IN_ORDER_INT8), ("wrong", TYPICAL)):
        costs = fit_costs(known, known @ truth, broad_prior(class_sd=0.35, typical=typical))
        worst[name] = max(abs(costs.log_time(row) - np.log(row @ truth)) for row in unseen)
    assert worst["right"] < 0.01 < worst["wrong"]
