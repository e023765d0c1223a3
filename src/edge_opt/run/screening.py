"""Choose the pruning ratios that are worth training (`pruning_levels: auto`).

1. Prune at thirteen ratios, with widths rounded to what kernels run fast, and to half of that. Nothing is trained.
2. In each rounding, find by bisection the largest ratio whose score fine-tuning can still recover.
3. Time these, interleaved with the unpruned model.
4. Fine-tune the fastest one, and longer if its accuracy is still too low.
5. If it is too low after that, take a smaller ratio instead. If the budget leaves room, train a larger one as well.

Before that, `edge_opt/run/screen_runtimes.py` drops runtimes that are slow.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from edge_opt._support.files import write_whole
from edge_opt._support.json import from_plain, to_plain
from edge_opt._support.progress import report_progress
from edge_opt.boards.targets import ResolvedTarget
from edge_opt.budgets import parse_budgets, trial_metrics
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError, MeasurementFailed, UnreadableProfile
from edge_opt.pruning.plan import PruningPlan, check_prunable, make_plan, pruning_context
from edge_opt.pruning.ranking import RoundTo, fast_multiple
from edge_opt.records.fields import field, record
from edge_opt.records.sweeps import Candidate
from edge_opt.run.config import RunConfig
from edge_opt.run.job import PipelineJob, run_phase
from edge_opt.run.model_and_data import torch_threads
from edge_opt.run.peak_pruning import layers_for_ram
from edge_opt.run.run_summary import pruning_target
from edge_opt.run.screen_runtimes import choose_pairs, model_times, quick_pairs
from edge_opt.run.variants import first_batches, scale_of
from edge_opt.runtimes.registry import unsupported_pairs
from edge_opt.search.locks import build_lock
from edge_opt.search.space import Pair, Space
from edge_opt.search.sweep_progress import Listener, Notice, StepStarted

FILE = "screening.json"
# Odd multiples of 1/32. A user hardly names such a ratio, so rows of a named ratio in the same folder have other keys.
LEVELS = tuple((2 * step + 1) / 32 for step in range(1, 14))
# A variant counts as faster from this share of the parent's time on: less is noise.
FASTER = 0.97
# Drop in accuracy, before training, that fine-tuning recovers: four epochs recovered all of 11 and 15 points on
# Fashion-MNIST (a MobileNetV2, a ResNet), and not all of more.
MAX_RECOVERABLE_DROP = 0.10
# Drop after fine-tuning above which a smaller ratio is taken.
MAX_TRAINED_DROP = 0.02
# A larger ratio is trained as well where the budget leaves room for its drop, and where it takes at most this share of
# the time of the first: training it costs as much as the first.
CLEARLY_FASTER = 0.85
# Drop that is accepted where nothing is trained.
UNTRAINED = 0.005
SAME = "same widths as another"
LOST = "accuracy drop too large"
SMALLER = "smaller than needed"
SLOWER = "slower than another"
NOT_FASTER = "not faster than the unpruned model"
TRAINED = "trained"
# A pruning ratio, and what the widths that it leaves are rounded to.
Place = tuple[float, RoundTo]
UNPRUNED: Place = (0.0, "auto")


@record
class Level:
    """A pruning level before any training."""

    share: float = field("Share of the channels to remove.")
    round_to: RoundTo = field("What the channels that stay are rounded to.")
    accuracy: float | None = field("Score after pruning and fitting, higher is better; None where it was not built.")
    latency_ratio: float | None = field("Time over that of the unpruned model; None where it was not timed.")
    verdict: str = field('"trained", or why not.')


@record
class Screening:
    """The result of screening: every pruning ratio tried, and why it is trained or not."""

    accuracy: float = field("Of the unpruned model, on the same samples; higher is better.")
    levels: tuple[Level, ...] = field("The levels, by rounding.")

    @property
    def chosen(self) -> tuple[Level, ...]:
        """The levels that were trained; none where none is worth it."""
        return tuple(level for level in self.levels if level.verdict == TRAINED)

    def job(self, job: PipelineJob) -> PipelineJob:
        """Return the job that makes the chosen ratios as screening made them."""
        return with_rounding(job, self.chosen[0].round_to) if self.chosen else job

    def __str__(self) -> str:
        reasons = Counter(level.verdict for level in self.levels if level.verdict != TRAINED)
        skipped = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        trained = " and ".join(f"{100 * level.share:.0f} %" for level in self.chosen) or "none"
        round_to = self.chosen[0].round_to if self.chosen else "auto"
        widths = "" if round_to == "auto" else f" (widths in {round_to}s)"
        return (
            f"pruning ratios: {len(self.levels)} tried, {reasons.total()} skipped{f' ({skipped})' if skipped else ''}; "
            f"chosen: {trained}{widths}"
        )


def with_rounding(job: PipelineJob, round_to: RoundTo) -> PipelineJob:
    """Return the job with another rounding of widths."""
    config = job.config.model_copy(update={"round_to": round_to})
    return replace(job, source=replace(job.source, config=config))


@dataclass(frozen=True)
class ScreeningJob:
    """Screening as a job with a process of its own."""

    job: PipelineJob
    pairs: Sequence[Pair]

    def screen(self) -> Mapping[str, Any]:
        """Choose pruning ratios; hold the locks of building and of measuring in turn."""
        with torch_threads(self.job.config.used_build_threads):
            screening = screen(self.job, self.job.source.splits(), self.pairs)
        return cast("Mapping[str, Any]", to_plain(screening))


def choose_space(job: PipelineJob, root: Path, on_event: Listener) -> tuple[Space, PipelineJob]:
    """Return the candidates of a configuration and the job that makes them; with `auto`, those worth trying.

    Decisions are stored in the folder and not taken again.
    """
    config = job.config
    # Eager torch first, because it is the baseline.
    runtimes = sorted(config.used_runtimes, key=lambda name: name != "torch")
    impossible = unsupported_pairs()
    wanted: list[Pair] = [(precision, runtime) for precision in config.precisions for runtime in runtimes]
    pairs = [pair for pair in wanted if pair not in impossible]
    # Runtimes that are named are all tried.
    if config.screens_runtimes and len(pairs) > 1:
        dropped = choose_pairs(job, root, pairs, on_event)
        impossible |= dropped
        pairs = [pair for pair in pairs if pair not in dropped]
    layers = layers_for_ram(job, root, on_event)
    if config.pruning_levels != "auto":
        return Space(config.pruning_levels, config.precisions, runtimes, layers, impossible), job
    # The cache is named after everything that pruned models depend on.
    key = f"{job.cache.name} {pairs} {budgeted_drop(config)}"
    screening = _stored(root / FILE, key)
    if screening is None:
        on_event(StepStarted("screening: choosing the pruning ratio to train"))
        try:
            plain = run_phase(ScreeningJob(job, pairs), job.source, "screen", (), root / "baseline")
        except MeasurementFailed as error:
            raise MeasurementFailed(f"screening {error}; name pruning_levels to skip it") from error
        write_whole(root / FILE, json.dumps({"key": key, **plain}, indent=1))
        screening = from_plain(Screening, plain)
    on_event(Notice(str(screening)))
    levels = [0.0, *(level.share for level in screening.chosen)]
    space = Space(levels, config.precisions, runtimes, layers, impossible)
    return space, screening.job(job)


def _stored(path: Path, key: str) -> Screening | None:
    """Return the decision of an earlier run with the same key."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return from_plain(Screening, plain) if plain.pop("key") == key else None
    except (OSError, ValueError, KeyError, AttributeError, UnreadableProfile):
        return None


def screen(job: PipelineJob, splits: Splits, pairs: Sequence[Pair], shares: Sequence[float] = LEVELS) -> Screening:
    """Choose pruning ratios as the head of this file describes.

    Chosen models are trained where the sweep looks for them, and not trained again.
    """
    source, config = job.source, job.config
    task = source.task()
    parent = job.variant(splits, Candidate(0.0, "fp32", "torch")).model
    sign = 1.0 if task.metric.direction == "higher" else -1.0

    def score(model: nn.Module, part: Iterable[Any]) -> float:
        return sign * task.score(model, part, resamples=0).value

    target = pruning_target(config)
    few = first_batches(splits.validation)
    with build_lock(folder=job.root):
        of_few = score(parent, few)
        whole = score(parent, splits.validation) if job.baseline is None else sign * job.baseline.score.value
    scale = scale_of(task.metric.name, whole)
    max_drop = (MAX_RECOVERABLE_DROP if config.fine_tune_epochs else UNTRAINED) * scale
    try:
        with build_lock(folder=job.root):
            with pruning_context():
                plan = make_plan(
                    parent,
                    source.example(splits, parent),
                    importance=config.importance,
                    seed=config.seed,
                    data=list(task.batches(parent, splits.calibration)),
                    target=target,
                )
            check_prunable(plan)
            known: set[bytes] = set()
            steps = roundings(config.round_to, target)
            distinct = {round_to: plan.distinct_ratios(shares, round_to, known) for round_to in steps}
            scores, largest = _largest_recoverable(plan, distinct, lambda model: score(model, few), of_few - max_drop)
    except EdgeOptError as error:
        return Screening(whole, (Level(max(shares), "auto", None, None, f"not pruned: {error}"),))
    next_larger = _next_larger(largest, distinct) if config.fine_tune_epochs else {}
    models = largest | {place: plan.build_ratio(*place).eval() for place in next_larger.values()}
    # Predictions need no conversion.
    timed = pairs if config.targets else quick_pairs(pairs)
    ratios = _ratios(model_times(job, splits, {UNPRUNED: parent, **models}, timed)) if largest else {}
    order = sorted((place for place in largest if ratios.get(place, 1.0) <= FASTER), key=lambda place: ratios[place])

    def accuracy_gap(place: Place) -> float:
        with build_lock(folder=job.root):
            rounded = with_rounding(job, place[1])
            variant = rounded.variant(splits, Candidate(place[0], "fp32", "torch"))
            value = score(variant.model, splits.validation) if variant.score is None else sign * variant.score
            return (whole - value) / (MAX_TRAINED_DROP * scale)

    larger = {
        place: other
        for place, other in next_larger.items()
        if ratios.get(other, 1.0) <= CLEARLY_FASTER * ratios.get(place, 1.0)
    }
    room = budgeted_drop(config) / (MAX_TRAINED_DROP * scale) - 1
    chosen = choose_ratios(order, distinct, accuracy_gap, larger, room)
    levels = tuple(
        Level(*place, scores.get(place), ratios.get(place), _verdict(place, distinct, largest, order, chosen))
        for place in [(share, round_to) for round_to in distinct for share in shares]
    )
    return Screening(of_few, levels)


def roundings(round_to: RoundTo, target: ResolvedTarget | None = None) -> tuple[RoundTo, ...]:
    """Return the multiples that widths are rounded to; with `auto` also half of it, which is as fast in some layers.

    Predictions for a target do not tell one rounding from another, so that its own is taken.

    >>> roundings(4)
    (4,)
    """
    return (round_to, max(fast_multiple() // 2, 4)) if round_to == "auto" and target is None else (round_to,)


def _largest_recoverable(
    plan: PruningPlan,
    distinct: Mapping[RoundTo, Sequence[float]],
    score: Callable[[nn.Module], float],
    least: float,
) -> tuple[dict[Place, float], dict[Place, nn.Module]]:
    """Return the scores of ratios that were built, and in each rounding the largest one that scores enough."""
    scores: dict[Place, float] = {}
    largest: dict[Place, nn.Module] = {}
    for round_to, able in distinct.items():
        models: dict[float, nn.Module] = {}

        def keeps(share: float, round_to: RoundTo = round_to, models: dict[float, nn.Module] = models) -> bool:
            report_progress(f"pruning ratio {100 * share:.0f} %")
            models[share] = plan.build_ratio(share, round_to).eval()
            scores[share, round_to] = score(models[share])
            return scores[share, round_to] >= least

        # Ratios that are accurate enough with one rounding are nearly so with another.
        known_share = next((share for share, _ in largest), None)
        near = None if known_share is None else [abs(share - known_share) for share in able]
        last = bisect_last(keeps, able, near.index(min(near)) if near else None)
        if last is not None:
            largest[last, round_to] = models[last]
    return scores, largest


def bisect_last(holds: Callable[[float], bool], values: Sequence[float], guess: int | None = None) -> float | None:
    """Return the last of the values for which something holds, assuming that it holds for all before; by bisection.

    With the place of a guess it is looked for from there, by steps that double.

    >>> bisect_last(lambda value: value < 3.5, [1, 2, 3, 4, 5]), bisect_last(lambda value: False, [1, 2])
    (3, None)
    """
    low, high, step, place = -1, len(values), 1, guess
    while high - low > 1:
        middle = (low + high) // 2 if place is None else place
        if holds(values[middle]):
            low, place = middle, middle + step
        else:
            high, place = middle, middle - step
        step *= 2
        place = place if guess is not None and low < place < high else None
    return values[low] if low >= 0 else None


def budgeted_drop(config: RunConfig) -> float:
    """Return the drop of the metric that the budgets allow; infinity where none limits it.

    >>> budgeted_drop(RunConfig(budgets=["accuracy_drop <= 3%", "size_mb <= 1"]))
    0.03
    """
    budgets = parse_budgets(config.all_budgets, trial_metrics(config.metric_name))
    name = f"{config.metric_name}_drop"
    return min((budget.limit for budget in budgets if budget.metric == name), default=math.inf)


def choose_ratios(
    order: Sequence[Place],
    distinct: Mapping[RoundTo, Sequence[float]],
    accuracy_gap: Callable[[Place], float],
    larger: Mapping[Place, Place],
    room: float = 0.0,
) -> tuple[Place, ...]:
    """Return the fastest ratio, or a smaller one if its accuracy is too low after training; none if none is faster.

    `accuracy_gap` trains a ratio and returns its drop as a multiple of the allowed one. The drop grows with the square
    of the ratio, or faster, which says how much smaller. That one is trained where the sweep builds it. Where no more
    than `room` is lost, in the same unit, the `larger` ratio of a ratio is trained, and kept as well if the gap is 1.

    >>> choose_ratios([(0.5, 8)], {8: [0.1, 0.3, 0.5]}, lambda place: 2.0, {})  # 0.5 / sqrt(2) is 0.35
    ((0.3, 8),)
    >>> choose_ratios([(0.3, 8)], {8: [0.1, 0.3, 0.5]}, lambda place: place[0], {(0.3, 8): (0.5, 8)}, room=0.5)
    ((0.3, 8), (0.5, 8))
    """
    if not order:
        return ()
    share, round_to = order[0]
    gap = accuracy_gap(order[0])
    if gap <= room and order[0] in larger and accuracy_gap(larger[order[0]]) <= 1:
        return order[0], larger[order[0]]
    most = share / math.sqrt(max(gap, 1.0))
    recoverable = [each for each in distinct[round_to] if each <= most] or distinct[round_to][:1]
    return ((recoverable[-1], round_to),)


def _next_larger(largest: Iterable[Place], distinct: Mapping[RoundTo, Sequence[float]]) -> dict[Place, Place]:
    """Return the next ratio after each, in its rounding, where there is one."""
    following = {place: [share for share in distinct[place[1]] if share > place[0]] for place in largest}
    return {place: (shares[0], place[1]) for place, shares in following.items() if shares}


def _verdict(
    place: Place,
    distinct: Mapping[RoundTo, Sequence[float]],
    largest: Iterable[Place],
    order: Sequence[Place],
    chosen: Sequence[Place],
) -> str:
    """Return why a ratio is trained or not."""
    share, round_to = place
    if place in chosen:
        return TRAINED
    if share not in distinct[round_to]:
        return SAME
    bound = next((each for each, rounding in largest if rounding == round_to), 0.0)
    if share > bound or (chosen and round_to == chosen[0][1] and share > chosen[-1][0]):
        return LOST
    if share < bound:
        return SMALLER
    return SLOWER if place in order else NOT_FASTER


def _ratios(times: Mapping[tuple[Place, Pair], float]) -> dict[Place, float]:
    """Return times over that of the unpruned model, each in the precision and runtime in which it is fastest."""
    least: dict[Place, float] = {}
    for (place, _), seconds in times.items():
        least[place] = min(seconds, least.get(place, seconds))
    unpruned = least.pop(UNPRUNED, None)
    return {} if unpruned is None else {place: seconds / unpruned for place, seconds in least.items()}
