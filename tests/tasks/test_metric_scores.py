"""Metrics by name and of one's own: values, direction, intervals, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.tasks.metrics import METRICS, QualityMetric, edit_distance, metric_named, metric_of
from edge_opt.tasks.paired_scores import paired_difference

# Classes 0, 0, 1, 2; guesses 0, 1, 1, 2.
SCORES = torch.tensor([[3.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 3.0]])
LABELS = torch.tensor([0, 0, 1, 2])
NUMBERS = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([1.0, 2.0, 4.0, 4.0])


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "value"),
    [
        ("accuracy", SCORES, LABELS, 3 / 4),
        # per class 2 right / (true + guessed): 2/3, 2/3, 2/2
        ("f1", SCORES, LABELS, (2 / 3 + 2 / 3 + 1) / 3),
        # per class right / union: 1/2, 1/2, 1/1
        ("miou", SCORES, LABELS, (1 / 2 + 1 / 2 + 1) / 3),
        # errors 0, 0, 1, 2
        ("mae", *NUMBERS, 3 / 4),
        ("rmse", *NUMBERS, math.sqrt(5 / 4)),
        # targets' mean 2.75, squared distances 3.0625 + 0.5625 + 2 x 1.5625 = 6.75
        ("r2", *NUMBERS, 1 - 5 / 6.75),
        # of the four pairs of a positive with a negative, three are in order
        ("auroc", torch.tensor([0.9, 0.4, 0.6, 0.1]), torch.tensor([1, 1, 0, 0]), 3 / 4),
        ("perplexity", torch.zeros(2, 3, 5), torch.tensor([[1, 2, -100], [0, 4, 3]]), 5.0),
        # 7 is inserted, 2 becomes 3: two edits of four tokens
        ("wer", torch.tensor([[1, 3, 7], [4, 5, -1]]), torch.tensor([[1, 2, -1], [4, 5, -1]]), 1 / 4),
    ],
)
def test_a_metric_is_what_its_formula_says(
    name: str, outputs: torch.Tensor, targets: torch.Tensor, value: float
) -> None:
    assert metric_named(name).value(outputs, targets) == pytest.approx(value)


def test_top_5_counts_labels_among_the_five_best_scores() -> None:
    scores = torch.arange(8.0).repeat(2, 1)
    assert metric_named("top-5").value(scores, torch.tensor([3, 2])) == 0.5


def test_a_pixel_s_classes_stand_in_the_second_dimension() -> None:
    masks = torch.tensor([[[0, 1], [1, 1]]])
    found = torch.stack([(masks == index).float() for index in (0, 1)], 1)
    assert metric_named("miou").value(found, masks) == 1.0


def test_batches_are_gathered_whatever_their_sizes() -> None:
    parts = [(SCORES[:1], LABELS[:1]), (SCORES[1:], LABELS[1:])]
    for name in ("accuracy", "f1", "miou"):
        metric = metric_named(name)
        assert metric.scored(parts).value == metric.scored([(SCORES, LABELS)]).value


@pytest.mark.parametrize("metric", [metric for metric in METRICS.values() if metric.name in ("mae", "r2", "rmse")])
def test_the_direction_says_which_is_worse(metric: QualityMetric) -> None:
    good, bad = (metric.value(NUMBERS[1] + gap * torch.tensor([1.0, -1.0, 1.0, -1.0]), NUMBERS[1]) for gap in (0.1, 1))
    assert bad < good if metric.direction == "higher" else bad > good


def test_pairs_are_compared_on_the_same_resamples() -> None:
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(200, generator=draw)
    noisy = truth + torch.randn(200, generator=draw)
    one, other = (metric_named("mae").scored([(outputs, truth)]) for outputs in (noisy, noisy + 0.01))
    pair = paired_difference(one.value - other.value, (None, None), (one.resamples, other.resamples))
    # Each alone is uncertain by more than 0.1; together only where the shift crosses a target.
    assert one.interval[1] - one.interval[0] > 0.1
    assert pair is not None and pair.low <= pair.value <= pair.high and pair.high - pair.low < 0.01


@pytest.mark.parametrize(
    ("outputs", "labels", "way_out"),
    [
        (torch.zeros(4, 3), torch.zeros(4), "set metric to mae, rmse or r2"),
        (torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), "set metric to auroc"),
        (torch.zeros(4), torch.zeros(4), "set metric to mae"),
        (torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.int64), "Set metric to what fits them"),
        (torch.zeros(4, 3), torch.eye(4, 3), "set metric to auroc, for one-hot labels pass their argmax"),
        (torch.zeros(4, 3), torch.full((4,), 3), "a label is 3, and the outputs have 3 classes"),
    ],
)
def test_labels_that_do_not_fit_accuracy_are_refused(outputs: Any, labels: Any, way_out: str) -> None:
    with pytest.raises(InvalidInput, match=way_out):
        metric_named("accuracy").value(outputs, labels)


def test_numbers_are_never_spread_over_each_other() -> None:
    assert metric_named("mae").value(torch.zeros(3, 1), torch.ones(3)) == 1.0
    with pytest.raises(InvalidInput, match="needs outputs and targets of one shape"):
        metric_named("mae").value(torch.zeros(3, 2), torch.ones(3))


def test_a_value_that_is_none_is_an_error() -> None:
    with pytest.raises(MeasurementFailed, match="r2 is nan"):
        metric_named("r2").value(torch.ones(3), torch.ones(3))
    with pytest.raises(MeasurementFailed, match="outputs of batch 0 are NaN"):
        metric_named("mae").value(torch.full((2,), math.nan), torch.ones(2))


def largest(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs().max()


def each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs()


@pytest.mark.parametrize(("function", "value"), [(largest, 2.0), (each, 3 / 4)])
def test_a_function_gives_one_number_or_one_per_sample(function: Callable[..., Any], value: float) -> None:
    score = metric_of(function, "lower").scored([(NUMBERS[0][:2], NUMBERS[1][:2]), (NUMBERS[0][2:], NUMBERS[1][2:])])
    assert score.value == value
    assert (score.per_sample is None) == (function is largest)
    assert score.interval[0] <= value <= score.interval[1]


def test_a_function_must_say_which_way_is_better() -> None:
    with pytest.raises(InvalidInput, match="is a higher largest better, or a lower one"):
        metric_of(largest)


class MeanError:
    """As torchmetrics has them: update() and compute()."""

    higher_is_better = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.total += float((preds - target).abs().sum())
        self.count += len(target)

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.total / self.count)


def test_an_object_with_update_and_compute_is_a_metric() -> None:
    metric = metric_of(MeanError())
    assert (metric.name, metric.direction, metric.value(*NUMBERS)) == ("mean_error", "lower", 3 / 4)


def test_what_a_function_raises_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"metric largest raised .* on outputs and targets of \(3,\) and \(2,\)"):
        metric_of(largest, "lower").value(torch.zeros(3), torch.zeros(2))


def test_edits_are_counted_as_the_fewest() -> None:
    # k → s, e → i, and g at the end
    assert edit_distance(list("kitten"), list("sitting")) == 3


def test_scores_without_answers_or_resamples_are_not_paired() -> None:
    assert paired_difference(0.1, (None, None), ((), ())) is None
    right = np.array([True, False, True, True])
    # the second model is right where the first is not, and wrong once: 3 of 4 and 3 of 4
    same = paired_difference(0.0, (right, right[::-1]), ((), ()))
    assert same is not None and (same.value, same.samples) == (0.0, 4) and same.low < 0 < same.high


@pytest.mark.parametrize(("name", "direction"), [("mae", "lower"), ("mIoU", "higher"), ("dice", "higher")])
def test_a_function_named_like_a_known_metric_takes_its_direction(name: str, direction: str) -> None:
    def function(outputs: Any, targets: Any) -> float:
        return 0.0

    function.__name__ = name
    assert metric_of(function).direction == direction
    # What the user says of a function of their own is right.
    assert metric_of(function, "lower").direction == "lower"


def test_a_function_of_an_unknown_name_must_say_its_direction() -> None:
    with pytest.raises(InvalidInput, match="--metric-direction"):
        metric_of(lambda outputs, targets: 0.0, name="worst")
