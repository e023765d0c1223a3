"""Statistics of latency samples: intervals, noise, and the comparison of two."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records.measurements import Comparison, Environment, Interval, Latency, Verdict

Floats = NDArray[np.float64]

_DRAWS = 1000
_DRAWN_AT_ONCE = 1 << 20
_CONFIDENCE = (2.5, 97.5)
# The median absolute deviation of a normal distribution is 1/1.4826 of its standard deviation.
_MAD_TO_STD = 1.4826
_NOISY_SCATTER = 0.10
_CONTENDED_WAITING = 0.10
CONTENDED_CORES = 0.10
# Factors by which the same work comes out different although its samples agree with each other. An interval from
# samples alone cannot contain them, so they are added to it. Each is from an experiment with a model against itself
# (benchmarks/record_noise.py):
# - Rounds of one session see the same machine, but not where memory happens to lie. With 2 %, the same model was
#   "equal" in 100 of 100 sessions with one thread and in 96 with two, and a difference of a tenth was found in 99.
_WITHIN_SESSION = 1.02
# - Two sessions on a quiet machine had medians up to 5 % apart.
_BETWEEN_QUIET_SESSIONS = 1.05
# - The same files, interleaved in three processes on a busy machine, had speedups of 9.82, 10.28 and 9.66.
_BETWEEN_PROCESSES = 1.05
# - On a busy machine even CPU times were up to 1.6 x apart with one thread (the core's sibling works, or rests), and
#   6 x with two (one spins until the other runs).
_BETWEEN_BUSY_SESSIONS = 6.0
# The 97.5 % quantile of Student's t for 1 to 9 degrees of freedom.
_STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_LARGEST_LOG = 700.0


def median(samples: Sequence[float]) -> float:
    """Return the middle sample, or the mean of the two."""
    return float(np.median(samples))


def resamples(count: int, draws: int, seed: int = 0) -> NDArray[np.int64]:
    """Return positions of `count` samples drawn again, one row a draw, seeded: a circular block bootstrap.

    Slow moments last longer than one sample. Drawn one by one, neighbours would pass for independent, and intervals
    would come out too narrow. So runs of neighbours are drawn, which keep the dependence inside them. A run has the
    cube root of the count: longer ones leave too few to draw from, shorter ones cut the dependence (Hall, Horowitz and
    Jing, Biometrika 82, 1995: n^(1/3) for a variance). The samples form a circle, so that the first and the last are
    drawn as often as the others.
    """
    length = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(0, count, size=(draws, math.ceil(count / length), 1))
    positions: NDArray[np.int64] = ((starts + np.arange(length)) % count).reshape(draws, -1)[:, :count]
    return positions


def median_interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """Return a 95 % bootstrap interval of the median; the same samples give the same interval.

    >>> median_interval([1.0, 1.0, 1.0])
    Interval(low=1.0, high=1.0)
    """
    values = np.asarray(samples, dtype=float)
    # A bounded number of draws at once.
    at_once = max(1, _DRAWN_AT_ONCE // len(values))
    medians = [
        np.median(values[resamples(len(values), min(at_once, _DRAWS - done), seed + 1000 * done)], axis=1)
        for done in range(0, _DRAWS, at_once)
    ]
    low, high = np.percentile(np.concatenate(medians), _CONFIDENCE)
    return Interval(float(low), float(high))


def relative_half_width(samples: Sequence[float]) -> float:
    """Return how well the median is known: half the width of its interval, as a share of it."""
    interval, middle = median_interval(samples), median(samples)
    return (interval.high - interval.low) / 2 / middle if middle > 0 else math.inf


def latency_of(
    samples_s: Sequence[float],
    cpu_samples_s: Sequence[float],
    *,
    batch_size: int = 1,
    target_precision: float = 0.02,
    environment: Environment | None = None,
    waits_for_device: bool = False,
    cores_of_others: float | None = None,
    remarks: Sequence[str] = (),
) -> Latency:
    """Return the figures of these samples, with remarks on noise and contention.

    `waits_for_device`: the CPU may idle while another device works, so that its time says nothing about contention.
    `cores_of_others` is how many cores other programs kept busy meanwhile.
    """
    if len(samples_s) == 0 or len(samples_s) != len(cpu_samples_s):
        raise InvalidInput(
            f"{len(samples_s)} wall and {len(cpu_samples_s)} CPU samples; both must be the same, above 0"
        )
    wall, cpu = np.asarray(samples_s, dtype=float), np.asarray(cpu_samples_s, dtype=float)
    interval = median_interval(samples_s)
    noise = _noise_remarks(wall, interval, target_precision)
    contention: list[str] = []
    if not waits_for_device and (waiting := waiting_share(wall, cpu)) > _CONTENDED_WAITING:
        share = units.percent(waiting)
        contention.append(f"the process waited {share} of the time for a core; other programs run on this machine")
    contention += _others_remarks(environment, cores_of_others)
    governor = None if environment is None else environment.governor
    if governor not in (None, "performance"):
        advice = "so the clock frequency may change; 'performance' fixes it"
        remarks = (f"the CPU governor is {governor!r}, {advice}", *remarks)
    p90, p95, p99 = (float(value) for value in np.percentile(wall, (90, 95, 99)))
    return Latency(
        samples_s=tuple(map(float, wall)),
        cpu_samples_s=tuple(map(float, cpu)),
        minimum_s=float(wall.min()),
        median_s=float(np.median(wall)),
        mean_s=float(wall.mean()),
        std_s=float(wall.std(ddof=1)) if len(wall) > 1 else 0.0,
        p90_s=p90,
        p95_s=p95,
        p99_s=p99,
        median_interval_s=interval,
        cpu_minimum_s=float(cpu.min()),
        cpu_median_s=float(np.median(cpu)),
        batch_size=batch_size,
        is_noisy=bool(noise),
        is_contended=bool(contention),
        # Other programs are a cause, and noise may be their effect.
        remarks=(*contention, *noise, *remarks),
    )


def _noise_remarks(wall: Floats, interval: Interval, target_precision: float) -> list[str]:
    middle = float(np.median(wall))
    if middle <= 0:
        return ["the clock did not move during half of the samples; measure for longer"]
    remarks = []
    half_width = (interval.high - interval.low) / 2 / middle
    if half_width > target_precision:
        remarks.append(
            f"the median is known to ±{units.percent(half_width)} only, and ±{units.percent(target_precision)} was "
            "asked for; measure for longer or on a quieter machine"
        )
    scatter = _MAD_TO_STD * float(np.median(np.abs(wall - middle))) / middle
    if scatter > _NOISY_SCATTER:
        remarks.append(
            f"samples scatter by {units.percent(scatter)} around the median; stop other programs or measure for longer"
        )
    return remarks + _drift_remarks(wall)


def _drift_remarks(wall: Floats) -> list[str]:
    """Return a sentence when the second half differs from the first: still warming up, or throttled by heat."""
    if len(wall) < 2 or wall.min() <= 0:
        return []
    (early, early_half_width), (late, late_half_width) = map(_batch_means, np.array_split(np.log(wall), 2))
    if abs(late - early) <= math.hypot(early_half_width, late_half_width) + math.log(_BETWEEN_QUIET_SESSIONS):
        return []
    change = f"{'slower' if late > early else 'faster'} by {units.percent(abs(math.expm1(late - early)))}"
    return [f"the second half of the samples is {change} than the first; the model or the machine had not settled"]


def waiting_share(wall: Sequence[float] | Floats, cpu: Sequence[float] | Floats) -> float:
    """Return the share of the time in which the process was ready and got no core.

    A run in several threads uses more CPU than wall time, how much more is seen where it ran fastest; a run that was
    never held up uses at least one core throughout.
    """
    wall, cpu = np.asarray(wall, dtype=float), np.asarray(cpu, dtype=float)
    fastest = np.argsort(wall)[: max(1, len(wall) // 4)]
    if wall[fastest].sum() <= 0:
        return 0.0
    cores = max(1.0, float(cpu[fastest].sum() / wall[fastest].sum()))
    return max(0.0, 1.0 - float(cpu.sum() / cores / wall.sum()))


def _others_remarks(environment: Environment | None, cores_of_others: float | None) -> list[str]:
    """Return sentences on other programs, which slow us down even on another core: it may be half of our own."""
    if environment is None:
        return []
    cores, load = environment.cores, environment.load_1min
    if cores_of_others is not None:
        if cores_of_others <= CONTENDED_CORES * cores:
            return []
        return [f"other programs kept {cores_of_others:.1f} of {cores} cores busy meanwhile"]
    if load is None or load <= cores:
        return []
    return [f"the load was {load:.1f} on {cores} cores before the measurement began"]


def compare_latencies(baseline: Latency, other: Latency, *, paired: bool = False) -> Comparison:
    """Return whether a latency is lower or higher than a baseline; `equal` means that no difference could be shown.

    CPU time decides where one of them was contended.

    Args:
        baseline: The latency to compare with.
        other: The latency to judge.
        paired: Both come from one `interleaved` session, so that samples of a round are compared with each other.
    """
    is_contended = baseline.is_contended or other.is_contended
    old, new = (np.array(side.cpu_samples_s if is_contended else side.samples_s) for side in (baseline, other))
    if min(old.min(), new.min()) <= 0:
        raise InvalidInput("a sample of zero seconds cannot be compared; measure for longer")
    if paired and len(old) != len(new):
        raise InvalidInput(
            f"{len(old)} and {len(new)} samples: sample counts differ, cannot pair; measure both with `interleaved`"
        )
    if paired:
        middle, half_width = _batch_means(np.log(new / old))
        unseen = _WITHIN_SESSION
    else:
        (before, before_half_width), (after, after_half_width) = _batch_means(np.log(old)), _batch_means(np.log(new))
        middle, half_width = after - before, math.hypot(before_half_width, after_half_width)
        unseen = _BETWEEN_BUSY_SESSIONS if is_contended else _BETWEEN_QUIET_SESSIONS
    return _comparison(middle, half_width + math.log(unseen), is_contended)


def compare_placements(pairs: Sequence[tuple[Latency, Latency]]) -> Comparison:
    """Return whether a model is slower than a baseline, from copies of both that lie elsewhere in memory each time.

    All pairs come from one `interleaved` session. What its rounds cannot see, where a copy happens to lie, differs from
    pair to pair, and so is in the interval over pairs; nothing is added for it.

    Args:
        pairs: Latencies of a copy of the baseline and of a copy of the model; two pairs or more.
    """
    is_contended = any(side.is_contended for pair in pairs for side in pair)
    logs = [
        [np.log(np.array(side.cpu_samples_s if is_contended else side.samples_s)) for side in pair] for pair in pairs
    ]
    middle, half_width = mean_and_half_width([_batch_means(new - old)[0] for old, new in logs])
    return _comparison(middle, half_width, is_contended)


def _comparison(middle: float, half_width: float, is_contended: bool) -> Comparison:
    interval = Interval(math.exp(middle - half_width), math.exp(min(middle + half_width, _LARGEST_LOG)))
    verdict: Verdict = "slower" if interval.low > 1 else "faster" if interval.high < 1 else "equal"
    return Comparison(verdict, math.exp(middle), interval, "cpu" if is_contended else "wall")


def _batch_means(samples: Floats) -> tuple[float, float]:
    """Return the mean of the medians of consecutive batches, and half its 95 % interval by Student's t.

    Batches long enough to outlast a slow moment are independent, which neighbouring samples are not.
    """
    count = min(len(samples), len(_STUDENT_T) + 1)
    return mean_and_half_width([float(np.median(batch)) for batch in np.array_split(samples, count)])


def log_batch_minima(samples: Sequence[float]) -> tuple[float, ...]:
    """Return logarithms of the fastest of up to ten consecutive batches; nothing where the clock stood still.

    Interleaved times have batches of the same moments, so that differences of these are ratios free of drift. They
    add up along a chain, and the exponential of their mean is a time: ratios of such times are the ratios told. Other
    programs only ever make a block slower, and one variant more than another: the fastest is what the work takes.
    """
    values = np.asarray(samples, dtype=float)
    if not len(values) or values.min() <= 0:
        return ()
    return tuple(float(np.log(batch.min())) for batch in np.array_split(values, min(len(values), len(_STUDENT_T) + 1)))


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values and half its 95 % interval by Student's t; one value has no bounds."""
    count = len(values)
    if count == 1:
        return float(values[0]), math.inf
    freedom = min(count - 1, len(_STUDENT_T))
    return float(np.mean(values)), _STUDENT_T[freedom - 1] * float(np.std(values, ddof=1)) / math.sqrt(count)


def paired_ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, Interval]:
    """Return how many times as long `one` takes as `other`, both from `log_batch_minima`, with its 95 % interval.

    The interval also holds what rounds of one session cannot see: where memory happens to lie in a process.

    >>> ratio, interval = paired_ratio([0.7, 0.71], [0.0, 0.01])
    >>> round(ratio, 3), round(interval.high / interval.low, 4)  # e ** 0.7, known to 5 % either way
    (2.014, 1.1025)
    """
    middle, half_width = mean_and_half_width([first - second for first, second in zip(one, other, strict=True)])
    half_width += math.log(_BETWEEN_PROCESSES)
    return math.exp(middle), Interval(
        math.exp(max(middle - half_width, -_LARGEST_LOG)), math.exp(min(middle + half_width, _LARGEST_LOG))
    )


# The 97.5 % quantile of the normal distribution.
_Z95 = 1.959963984540054


def wilson(correct: int, samples: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share, which has a width also where all are right.

    >>> [round(bound, 4) for bound in wilson(95, 100)]
    [0.8882, 0.9785]
    """
    p, n, z2 = correct / samples, samples, _Z95**2
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # Rounding must not put the share outside its own interval.
    return max(0.0, min(center - half, p)), min(1.0, max(center + half, p))
