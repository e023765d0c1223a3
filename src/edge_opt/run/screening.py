"""Choose the pruning ratio that is worth training (`pruning_levels: auto`).

1. Prune at thirteen ratios, with widths rounded to what kernels run fast, and to half of that. Nothing is trained.
2. In each rounding, find by bisection the largest ratio whose score fine-tuning can still recover.
3. Time these, interleaved, in the precisions and runtimes in which the unpruned model is fastest.
4. Fine-tune the fastest one, for more epochs than a ratio of a grid gets, because a grid trains several.
5. If its score is still too low, take a smaller ratio instead.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt._support.files import write_whole
from edge_opt._support.json import from_plain, to_plain
from edge_opt._support.progress import report_progress
from edge_opt.compress import Runner, open_runner
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError, MeasurementFailed, UnreadableProfile
from edge_opt.pruning.plan import PruningPlan, check_prunable, make_plan, pruning_context
from edge_opt.pruning.ranking import RoundTo, fast_multiple
from edge_opt.records.conversions import Exported
from edge_opt.records.fields import field, record
from edge_opt.records.sweeps import SHARES, Candidate
from edge_opt.run.job import PipelineJob, run_phase, variant_of
from edge_opt.run.model_and_data import torch_threads
from edge_opt.runtimes.agreement import sized
from edge_opt.runtimes.export import export_quickly
from edge_opt.runtimes.model_call import model_call
from edge_opt.runtimes.protocol import measure_runners
from edge_opt.runtimes.registry import find_runtime, unsupported_pairs
from edge_opt.search.locks import build_lock, measurement_lock
from edge_opt.search.space import Exclusion, Pair, Space
from edge_opt.search.sweep_progress import Listener, Notice, StepStarted
from edge_opt.tasks.batches import example_inputs
from edge_opt.trace.inputs import CallArguments

FILE = "screening.json"
# Odd multiples of 1/32. A user hardly names such a ratio, so rows of a named ratio in the same folder have other keys.
LEVELS = tuple((2 * step + 1) / 32 for step in range(1, 14))
# A variant counts as faster from this share of the parent's time on: less is noise.
FASTER = 0.97
# Drop in accuracy, before training, that fine-tuning recovers: four epochs recovered all of 11 and 15 points on
# Fashion-MNIST (a MobileNetV2, a ResNet), and not all of more.
MAX_RECOVERABLE_DROP = 0.10
# Epochs, as a multiple of those of a ratio in a grid. The learning rate falls once over all of them: falling twice over
# half of them cost 0.1 to 1.0 points of accuracy (the same networks).
FINE_TUNE_FACTOR = 4
# Validation samples that are scored before training: 8 points are four standard errors.
SCREENED = 1000
# Drop after fine-tuning above which a smaller ratio is taken.
MAX_TRAINED_DROP = 0.02
# Drop that is accepted where nothing is trained.
UNTRAINED = 0.005
# Pairs of precision and runtime that are tried with every ratio; eager torch, the baseline, is timed in any case.
KEPT_PAIRS = 2
_WINDOW_S = 0.1
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
    epochs: int = field("Epochs of fine-tuning of the chosen ratio.", default=0)
    left_out: tuple[Exclusion, ...] = field("Pairs that are not tried with every level, with the reason.", default=())

    @property
    def chosen(self) -> Level | None:
        """The level that was trained; None where none is worth it."""
        return next((level for level in self.levels if level.verdict == TRAINED), None)

    def job(self, job: PipelineJob) -> PipelineJob:
        """Return the job that makes the chosen ratio as screening made it."""
        return job if self.chosen is None else with_training(job, self.chosen.round_to, self.epochs)

    def __str__(self) -> str:
        reasons = Counter(level.verdict for level in self.levels if level.verdict != TRAINED)
        skipped = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        chosen = self.chosen
        trained = "none" if chosen is None else f"{100 * chosen.share:.0f} %"
        widths = "" if chosen is None or chosen.round_to == "auto" else f" (widths in {chosen.round_to}s)"
        slow = ", ".join(f"{item.precision} in {item.runtime}" for item in self.left_out)
        return (
            f"pruning ratios: {len(self.levels)} tried, {reasons.total()} skipped{f' ({skipped})' if skipped else ''}; "
            f"{f'trained for {self.epochs} epochs' if self.epochs else 'chosen'}: {trained}{widths}"
            f"{f'; too slow to try further: {slow}' if slow else ''}"
        )


def with_training(job: PipelineJob, round_to: RoundTo, epochs: int) -> PipelineJob:
    """Return the job with another rounding of widths and other epochs of fine-tuning."""
    config = job.config.model_copy(update={"round_to": round_to, "fine_tune_epochs": epochs})
    return replace(job, source=replace(job.source, config=config))


@dataclass(frozen=True)
class ScreeningJob:
    """Screening as a job with a process of its own."""

    job: PipelineJob
    pairs: Sequence[Pair]

    def screen(self) -> Mapping[str, Any]:
        """Choose a pruning ratio; hold the locks of building and of measuring in turn."""
        with torch_threads(self.job.config.used_build_threads):
            screening = screen(self.job, self.job.source.splits(), self.pairs)
        return cast("Mapping[str, Any]", to_plain(screening))


def choose_space(job: PipelineJob, root: Path, on_event: Listener) -> tuple[Space, PipelineJob]:
    """Return the candidates of a configuration and the job that makes them; with `auto`, those worth trying.

    The decision is stored in the folder and not taken again.
    """
    config = job.config
    # Eager torch first, because it is the baseline.
    runtimes = sorted(config.runtimes, key=lambda name: name != "torch")
    if config.pruning_levels != "auto":
        return Space(config.pruning_levels, config.precisions, runtimes, config.layer_pruning), job
    # Ratios may be timed in every precision that a runtime of the configuration runs.
    wanted: list[Pair] = [(precision, runtime) for precision in config.precisions for runtime in config.runtimes]
    pairs = [pair for pair in wanted if pair not in unsupported_pairs()] or [("fp32", "torch")]
    # The cache is named after everything that pruned models depend on.
    key = f"{job.cache.name} {pairs}"
    screening = _stored(root / FILE, key)
    if screening is None:
        on_event(StepStarted("screening: choosing the pruning ratio to train"))
        try:
            plain = run_phase(ScreeningJob(job, pairs), config, "screen", (), root / "baseline")
        except MeasurementFailed as error:
            raise MeasurementFailed(f"screening {error}; name pruning_levels to skip it") from error
        write_whole(root / FILE, json.dumps({"key": key, **plain}, indent=1))
        screening = from_plain(Screening, plain)
    on_event(Notice(str(screening)))
    slow: dict[Pair, str] = {(item.precision, item.runtime): item.reason for item in screening.left_out}
    levels = [0.0] if screening.chosen is None else [0.0, screening.chosen.share]
    space = Space(levels, config.precisions, runtimes, config.layer_pruning, {**unsupported_pairs(), **slow})
    return space, screening.job(job)


def _stored(path: Path, key: str) -> Screening | None:
    """Return the decision of an earlier run with the same key."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return from_plain(Screening, plain) if plain.pop("key") == key else None
    except (OSError, ValueError, KeyError, AttributeError, UnreadableProfile):
        return None


def screen(job: PipelineJob, splits: Splits, pairs: Sequence[Pair], shares: Sequence[float] = LEVELS) -> Screening:
    """Choose a pruning ratio as the head of this file describes.

    The chosen model is trained where the sweep looks for it, and not trained again.
    """
    source, config = job.source, job.config
    parent, task = source.build(), source.task()
    epochs = FINE_TUNE_FACTOR * config.fine_tune_epochs
    sign = 1.0 if task.metric.direction == "higher" else -1.0

    def score(model: nn.Module, part: Iterable[Any] = splits.validation) -> float:
        return sign * task.score(model, part, resamples=0).value

    few = _first(splits.validation, SCREENED)
    with build_lock(folder=job.root):
        whole, of_few = score(parent), score(parent, few)
    times = _times(job, splits, {UNPRUNED: parent}, pairs)
    left_out = slower_pairs({pair: seconds for (_, pair), seconds in times.items()}, pairs)
    dropped = {(item.precision, item.runtime) for item in left_out}
    fast_pairs = [pair for pair in pairs if pair not in dropped]
    scale = 1.0 if task.metric.name in SHARES else abs(whole)
    max_drop = (MAX_RECOVERABLE_DROP if epochs else UNTRAINED) * scale
    try:
        with build_lock(folder=job.root):
            with pruning_context():
                plan = make_plan(
                    parent,
                    source.example(splits, parent),
                    importance=config.importance,
                    seed=config.seed,
                    data=list(task.batches(parent, splits.calibration)),
                )
            check_prunable(plan)
            known: set[bytes] = set()
            distinct = {
                round_to: plan.distinct_ratios(shares, round_to, known) for round_to in roundings(config.round_to)
            }
            scores, largest = _largest_recoverable(plan, distinct, lambda model: score(model, few), of_few - max_drop)
    except EdgeOptError as error:
        return Screening(whole, (Level(max(shares), "auto", None, None, f"not pruned: {error}"),), left_out=left_out)
    ratios = _ratios(_times(job, splits, {UNPRUNED: parent, **largest}, fast_pairs)) if largest else {}
    order = sorted((place for place in largest if ratios.get(place, 1.0) <= FASTER), key=lambda place: ratios[place])

    def accuracy_gap(place: Place) -> float:
        trained = with_training(job, place[1], epochs)
        with build_lock(folder=job.root):
            variant = variant_of(trained.source, splits, Candidate(place[0], "fp32", "torch"), job.cache)
            return (whole - score(variant.model)) / (MAX_TRAINED_DROP * scale)

    chosen = choose_ratio(order, distinct, accuracy_gap)
    levels = tuple(
        Level(*place, scores.get(place), ratios.get(place), _verdict(place, distinct, largest, order, chosen))
        for place in [(share, round_to) for round_to in distinct for share in shares]
    )
    return Screening(of_few, levels, epochs if chosen else 0, left_out)


def _first(part: Iterable[Any], samples: int) -> list[Any]:
    """Return the first batches, with at least this many samples."""
    batches: list[Any] = []
    for batch in part:
        batches.append(batch)
        samples -= next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
        if samples <= 0:
            break
    return batches


def roundings(round_to: RoundTo) -> tuple[RoundTo, ...]:
    """Return the multiples that widths are rounded to; with `auto` also half of it, which is as fast in some layers.

    >>> roundings(4)
    (4,)
    """
    return (round_to, max(fast_multiple() // 2, 4)) if round_to == "auto" else (round_to,)


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


def choose_ratio(
    order: Sequence[Place], distinct: Mapping[RoundTo, Sequence[float]], accuracy_gap: Callable[[Place], float]
) -> Place | None:
    """Return the fastest ratio, or a smaller one if its accuracy is too low after training; None if none is faster.

    `accuracy_gap` trains a ratio and returns its drop as a multiple of the allowed one. The drop grows with the square
    of the ratio, or faster, which says how much smaller. That one is trained where the sweep builds it.

    >>> choose_ratio([(0.5, 8)], {8: [0.1, 0.3, 0.5]}, lambda place: 2.0)  # 0.5 / sqrt(2) is 0.35
    (0.3, 8)
    """
    if not order:
        return None
    share, round_to = order[0]
    most = share / math.sqrt(max(accuracy_gap(order[0]), 1.0))
    recoverable = [each for each in distinct[round_to] if each <= most] or distinct[round_to][:1]
    return recoverable[-1], round_to


def _verdict(
    place: Place,
    distinct: Mapping[RoundTo, Sequence[float]],
    largest: Iterable[Place],
    order: Sequence[Place],
    chosen: Place | None,
) -> str:
    """Return why a ratio is trained or not."""
    share, round_to = place
    if place == chosen:
        return TRAINED
    if share not in distinct[round_to]:
        return SAME
    bound = next((each for each, rounding in largest if rounding == round_to), 0.0)
    if share > bound or (chosen and round_to == chosen[1] and share > chosen[0]):
        return LOST
    if share < bound:
        return SMALLER
    return SLOWER if place in order else NOT_FASTER


def slower_pairs(times: Mapping[Pair, float], pairs: Sequence[Pair]) -> tuple[Exclusion, ...]:
    """Return precisions and runtimes that are not worth trying: neither among the fastest, nor the fastest float.

    >>> slow = slower_pairs({("fp32", "a"): 3.0, ("int8", "a"): 1.0, ("fp32", "b"): 4.0, ("int8", "b"): 2.0},
    ...                      [("fp32", "a"), ("int8", "a"), ("fp32", "b"), ("int8", "b")])
    >>> [(item.precision, item.runtime, item.reason) for item in slow]
    [('fp32', 'b', 'unpruned it takes 4.0 times as long as int8 in a')]
    """
    if len(pairs) <= KEPT_PAIRS or not times:
        return ()
    order = sorted(times, key=lambda pair: times[pair])
    kept = {*order[:KEPT_PAIRS], *[pair for pair in order if pair[0] == "fp32"][:1]}
    best = order[0]
    return tuple(
        Exclusion(*pair, f"unpruned it takes {times[pair] / times[best]:.1f} times as long as {best[0]} in {best[1]}")
        for pair in pairs
        if pair in times and pair not in kept
    )


def _ratios(times: Mapping[tuple[Place, Pair], float]) -> dict[Place, float]:
    """Return times over that of the unpruned model, each in the precision and runtime in which it is fastest."""
    least: dict[Place, float] = {}
    for (place, _), seconds in times.items():
        least[place] = min(seconds, least.get(place, seconds))
    unpruned = least.pop(UNPRUNED, None)
    return {} if unpruned is None else {place: seconds / unpruned for place, seconds in least.items()}


def _times(
    job: PipelineJob, splits: Splits, models: Mapping[Place, nn.Module], pairs: Sequence[Pair]
) -> dict[tuple[Place, Pair], float]:
    """Return seconds of each in the call that is deployed, interleaved; one that is not converted is left out."""
    with ExitStack() as stack:
        runners: dict[str, tuple[tuple[Place, Pair], Runner]] = {}
        for place, model in models.items():
            call = job.source.call(splits, model)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            exported: Exported | None = None
            for pair in pairs:
                try:
                    # Files of ONNX come from one quick export.
                    if exported is None and _starts_from_onnx(pair):
                        exported = export_quickly(model_call(model.eval(), example_inputs(call)), folder / "quick.onnx")
                    runner = stack.enter_context(_opened(job, splits, model, call, pair, exported, folder))
                except EdgeOptError:
                    continue
                runners[str(len(runners))] = (place, pair), runner
        if not runners:
            return {}
        tensors = [value for value in tree_leaves((call.args, call.kwargs)) if isinstance(value, torch.Tensor)]
        inputs = sized([tuple(tensors)], job.config.deploy_batch)
        opened = {key: runner for key, (_, runner) in runners.items()}
        with measurement_lock(folder=job.root):
            latencies = measure_runners(opened, *inputs, min_time_s=_WINDOW_S, max_time_s=2 * _WINDOW_S)
    # One thread computes as long as its CPU time; what else runs here is not in that.
    is_alone = job.config.used_threads == 1
    return {
        name: latencies[key].cpu_median_s if is_alone else latencies[key].median_s
        for key, (name, _) in runners.items()
        if key in latencies
    }


def _starts_from_onnx(pair: Pair) -> bool:
    return find_runtime(pair[1]).runs_onnx and pair[0] in ("fp32", "int8")


def _opened(
    job: PipelineJob,
    splits: Splits,
    model: nn.Module,
    call: CallArguments,
    pair: Pair,
    exported: Exported | None,
    folder: Path,
) -> AbstractContextManager[Runner]:
    """Open a model in a precision and a runtime, to be timed and no more."""
    precision, runtime = pair
    threads = job.config.used_threads
    exported = exported if _starts_from_onnx(pair) else None
    if exported is not None and precision == "fp32":
        return open_runner(exported.path, runtime, threads=threads, precision=precision)
    # Before training a model may well disagree with itself in int8; only its time is asked for.
    options = {"calibration_batches": 1, "exported": exported, "max_difference": True}
    aside = folder / f"{precision}-{runtime}"
    converted = job.convert(Candidate(0.0, precision, runtime), model.eval(), splits, call, aside, **options)
    return open_runner(converted, threads=threads)
