"""The score of a variant as plain values, with its interval and what pairs it with another's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edge_opt.records.sweeps import SHARES, MetricDirection
from edge_opt.search.choose import packed_answers, unpacked_answers
from edge_opt.tasks.paired_scores import Score, paired_difference


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """What a variant scored, as plain values that any process and JSON can hold.

    Attributes:
        value: The metric over all samples.
        low: Lower end of its 95 % interval.
        high: Upper end of its 95 % interval.
        samples: Samples it was reckoned over.
        metric: Its name.
        direction: Whether higher or lower is better.
        answers: Which samples were answered right, packed; "" where the metric is no share of right answers.
        replicates: The metric on samples drawn again and again, the same draws for every variant; empty where `answers`
            say more.
    """

    value: float
    low: float
    high: float
    samples: int
    metric: str = "accuracy"
    direction: MetricDirection = "higher"
    answers: str = field(default="", repr=False, compare=False)
    replicates: tuple[float, ...] = field(default=(), repr=False, compare=False)

    def drop(self, other: ScoreSummary) -> float:
        """By how much another is worse; below zero where it is better."""
        return self.value - other.value if self.direction == "higher" else other.value - self.value


def summarize_score(score: Score) -> ScoreSummary:
    """A score as plain values."""
    metric, (low, high), each = score.metric, score.interval, score.per_sample
    if metric.name in SHARES and each is not None and np.isin(each, (0.0, 1.0)).all():
        answers = packed_answers(each.astype(bool))
        return ScoreSummary(score.value, low, high, score.samples, metric.name, metric.direction, answers)
    drawn = tuple(float(value) for value in score.resamples)
    return ScoreSummary(score.value, low, high, score.samples, metric.name, metric.direction, "", drawn)


def paired_drop(reference: ScoreSummary, scored: ScoreSummary) -> tuple[float, float] | None:
    """Return the 95 % interval of how much worse a score is than the reference's; None where they are not paired."""
    if reference.samples != scored.samples:
        return None
    paired = paired_difference(
        reference.value - scored.value,
        (unpacked_answers(reference.answers), unpacked_answers(scored.answers)),
        (reference.replicates, scored.replicates),
    )
    if paired is None:
        return None
    return (paired.low, paired.high) if scored.direction == "higher" else (-paired.high, -paired.low)
