"""Which pruning level is worth training: cut, fitted and scored first, and timed at the widths that it really gets.

Nothing is trained at first. Levels are tried in two roundings of the widths: as kernels run fast, and half of that. In
each, the boldest level that training can still bring back is looked for by halving, by its score when it is cut and
fitted. These are timed in turns in one process, in the precisions and runtimes in which the unpruned model is fast, and
the fastest is trained, for more epochs than a level of a grid gets: a grid trains several. If it lacks much accuracy
even then, a gentler one is trained, and the other is given up.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt._support.files import write_whole
from edge_opt.compress import Runner, convert, open_runner
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError
from edge_opt.pruning.plan import PruningPlan, check_prunable, make_plan, pruning_context
from edge_opt.pruning.ranking import RoundTo, fast_multiple
from edge_opt.records.conversions import Exported
from edge_opt.records.devices import Precision
from edge_opt.records.sweeps import SHARES, Candidate
from edge_opt.run.config import RunConfig
from edge_opt.run.job import PipelineJob, computing_with, variant_of
from edge_opt.runtimes.agreement import sized
from edge_opt.runtimes.export import export_quickly
from edge_opt.runtimes.model_call import subject_of
from edge_opt.runtimes.runners import BY_ONNX_FILE, measure_runners
from edge_opt.search.space import IMPOSSIBLE, Exclusion, Pair, Space

FILE = "screening.json"
# Odd parts of 32, for nobody names those: a row of the same folder under a level that somebody named is another one.
LEVELS = tuple((2 * step + 1) / 32 for step in range(1, 14))
# A variant counts as faster from this share of the parent's time on: less is noise.
FASTER = 0.97
# Accuracy that a cut and fitted model may lack: four epochs brought back all of 11 and 15 points on Fashion-MNIST (a
# MobileNetV2, a ResNet), and of more not all.
HEALED = 0.10
# Times the epochs of a level that somebody names, of which a grid trains several. The rate falls once over all of them:
# falling twice over half of them cost 0.1 to 1.0 points of accuracy (the same nets).
LONGER = 4
# Of so many samples of the validation part it is found: 8 points are four standard errors.
SCREENED = 1000
# What a trained level may lack before a gentler one is trained instead.
ALLOWED = 0.02
# What may be lacking where nothing is trained.
UNTRAINED = 0.005
# So many precisions and runtimes are tried with every level; the baseline, eager torch, is timed in any case.
KEPT_PAIRS = 2
_WINDOW_S = 0.1
SAME = "of the same widths as another"
LOST = "lost too much"
GENTLER = "gentler than needed"
SLOWER = "slower than another"
NOT_FASTER = "not faster than the unpruned model"
TRAINED = "trained"
Name = TypeVar("Name")
Place = tuple[float, RoundTo]


@dataclass(frozen=True, slots=True)
class Level:
    """A pruning level before any training.

    Attributes:
        share: Share of the channels to remove.
        round_to: What the channels that stay are rounded to.
        accuracy: The score on the first samples of validation, higher is better, after the cut, with norms and weights
            fitted; None where it was not built.
        latency_ratio: Time over that of the unpruned model, each where it is fastest; None where it was not timed.
        verdict: "trained", or why not.
    """

    share: float
    round_to: RoundTo
    accuracy: float | None
    latency_ratio: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Screening:
    """What became of every level that was considered.

    Attributes:
        accuracy: Of the unpruned model, on the same samples; higher is better.
        levels: The levels, by rounding.
        epochs: Of fine-tuning, for what was chosen.
        left_out: Precisions and runtimes that are not tried with every level, each with the reason.
    """

    accuracy: float
    levels: tuple[Level, ...]
    epochs: int = 0
    left_out: tuple[Exclusion, ...] = ()

    @property
    def trained(self) -> list[Level]:
        """The levels that were trained."""
        return [level for level in self.levels if level.verdict == TRAINED]

    @property
    def chosen(self) -> list[float]:
        """The unpruned model and the levels that were trained."""
        return [0.0, *(level.share for level in self.trained)]

    def job(self, job: PipelineJob) -> PipelineJob:
        """The job that makes what was chosen as the screening made it; the same where nothing was chosen."""
        if not self.trained:
            return job
        round_to = self.trained[0].round_to
        return replace(job, tuning=replace(job.tuning, round_to=round_to, fine_tune_epochs=self.epochs))

    def __str__(self) -> str:
        reasons = Counter(level.verdict for level in self.levels if level.verdict != TRAINED)
        out = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        trained = ", ".join(f"{level.share:g}" for level in self.trained) or "none"
        widths = next(
            (f", widths rounded to {level.round_to}" for level in self.trained if level.round_to != "auto"), ""
        )
        left = ", ".join(f"{item.precision} in {item.runtime}" for item in self.left_out)
        return (
            f"pruning levels: {len(self.levels)} considered, {reasons.total()} screened out"
            f"{f' ({out})' if out else ''}, {f'trained for {self.epochs} epochs' if self.epochs else 'kept'}: "
            f"{trained}{widths}"
            f"{f'; slower kinds left out: {left}' if left else ''}"
        )


def space_of(
    config: RunConfig, job: PipelineJob, splits: Splits, root: Path, key: str, tell: Callable[[str], None]
) -> tuple[Space, PipelineJob]:
    """Everything a configuration allows, and who makes it; where levels are `auto`, what is worth trying.

    What was found is kept in the folder.
    """
    # Eager torch first, because the baseline is that.
    runtimes = sorted(config.runtimes, key=lambda name: name != "torch")
    if config.pruning_levels != "auto":
        return Space(config.pruning_levels, config.precisions, runtimes, config.layer_pruning), job
    pairs = _pairs(config)
    key = f"{key} {pairs}"
    kept = _kept(root / FILE, key)
    if kept is None:
        with computing_with(job.build_threads):
            kept = screen(job, splits, pairs)
        write_whole(root / FILE, json.dumps({"key": key, **asdict(kept)}, indent=1))
    tell(str(kept))
    left_out: dict[Pair, str] = {(item.precision, item.runtime): item.reason for item in kept.left_out}
    space = Space(kept.chosen, config.precisions, runtimes, config.layer_pruning, {**IMPOSSIBLE, **left_out})
    return space, kept.job(job)


def _pairs(config: RunConfig) -> list[Pair]:
    """What levels may be timed in: every precision that a runtime of the configuration runs."""
    wanted: list[Pair] = [(precision, runtime) for precision in config.precisions for runtime in config.runtimes]
    return [pair for pair in wanted if pair not in IMPOSSIBLE] or [("fp32", "torch")]


def _kept(path: Path, key: str) -> Screening | None:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] != key:
            return None
        levels = tuple(Level(**level) for level in found["levels"])
        left_out = tuple(Exclusion(**item) for item in found["left_out"])
        return Screening(found["accuracy"], levels, found["epochs"], left_out)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def screen(job: PipelineJob, splits: Splits, pairs: Sequence[Pair], shares: Sequence[float] = LEVELS) -> Screening:
    """The boldest level that training can bring back in each rounding, timed; the fastest trained, or a gentler one.

    A trained level is kept where the sweep looks for it, and not trained again.
    """
    parent = job.subject.build()
    tuning = replace(job.tuning, fine_tune_epochs=LONGER * job.tuning.fine_tune_epochs)
    task = job.subject.task.build()
    sign = 1.0 if task.metric.direction == "higher" else -1.0

    def score(model: nn.Module, part: Iterable[Any] = splits.validation) -> float:
        return sign * task.score(model, part, resamples=0).value

    few = _first(splits.validation, SCREENED)
    whole, of_few = score(parent), score(parent, few)
    times = _times(job, splits, {"": parent}, pairs)
    left_out = slower_pairs({pair: seconds for (_, pair), seconds in times.items()}, pairs)
    dropped = {(item.precision, item.runtime) for item in left_out}
    kept = [pair for pair in pairs if pair not in dropped]
    try:
        with pruning_context():
            plan = make_plan(
                parent, job.subject.example(splits, parent), importance=tuning.importance, seed=tuning.seed,
                data=list(task.batches(parent, splits.calibration)),
            )  # fmt: skip
        check_prunable(plan)
        scale = 1.0 if task.metric.name in SHARES else abs(whole)
        most_lost = (HEALED if tuning.fine_tune_epochs else UNTRAINED) * scale
        tried = _tried(plan, shares, roundings(tuning.round_to), lambda model: score(model, few), of_few - most_lost)
    except EdgeOptError as error:
        return Screening(whole, (Level(max(shares), "auto", None, None, f"not pruned: {error}"),), left_out=left_out)
    ratios = _ratios(job, splits, parent, tried.boldest, kept)
    order = sorted(
        (place for place in tried.boldest if ratios.get(place, 1.0) <= FASTER), key=lambda place: ratios[place]
    )

    def lack(place: Place) -> float:
        rounded = replace(tuning, round_to=place[1])
        variant = variant_of(job.subject, splits, Candidate(place[0], "fp32", "torch"), rounded, job.cache)
        return (whole - score(variant.model)) / (ALLOWED * scale)

    chosen = climb(order, tried.distinct, lack)
    epochs = tuning.fine_tune_epochs if chosen else 0
    return Screening(of_few, _judged(tried, ratios, order, chosen), epochs, left_out)


def _first(part: Iterable[Any], samples: int) -> list[Any]:
    """The first batches, with so many samples or a few more."""
    found: list[Any] = []
    for batch in part:
        found.append(batch)
        samples -= next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 1)
        if samples <= 0:
            break
    return found


def roundings(round_to: RoundTo) -> tuple[RoundTo, ...]:
    """What widths are rounded to: where kernels decide, also half of that, for which some layers are as fast.

    >>> roundings(4)
    (4,)
    """
    return (round_to, max(fast_multiple() // 2, 4)) if round_to == "auto" else (round_to,)


@dataclass(frozen=True, slots=True)
class _Tried:
    """The levels of each rounding that differ, what some of them score, and the boldest that is nearly healed."""

    shares: Sequence[float]
    distinct: Mapping[RoundTo, Sequence[float]]
    scores: Mapping[Place, float]
    boldest: Mapping[Place, nn.Module]


def _tried(
    plan: PruningPlan,
    shares: Sequence[float],
    widths: Sequence[RoundTo],
    score: Callable[[nn.Module], float],
    least: float,
) -> _Tried:
    known: set[bytes] = set()
    distinct = {round_to: plan.distinct_ratios(shares, round_to, known) for round_to in widths}
    scores: dict[Place, float] = {}
    boldest: dict[Place, nn.Module] = {}
    for round_to, able in distinct.items():
        models: dict[float, nn.Module] = {}

        def keeps(share: float, round_to: RoundTo = round_to, models: dict[float, nn.Module] = models) -> bool:
            models[share] = plan.build_ratio(share, round_to).eval()
            scores[share, round_to] = score(models[share])
            return scores[share, round_to] >= least

        # What one rounding bears, another nearly does.
        known_share = next((share for share, _ in boldest), None)
        near = None if known_share is None else [abs(share - known_share) for share in able]
        found = last_that(keeps, able, near.index(min(near)) if near else None)
        if found is not None:
            boldest[found, round_to] = models[found]
    return _Tried(shares, distinct, scores, boldest)


def last_that(holds: Callable[[float], bool], values: Sequence[float], guess: int | None = None) -> float | None:
    """The last of the values for which something holds, if it holds for all before that; found by halving.

    With the place of a guess it is looked for from there, by steps that double.

    >>> last_that(lambda value: value < 3.5, [1, 2, 3, 4, 5]), last_that(lambda value: False, [1, 2])
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


def climb(
    order: Sequence[Place], distinct: Mapping[RoundTo, Sequence[float]], lack: Callable[[Place], float]
) -> list[Place]:
    """The level to offer: the first, which is the fastest, or a gentler one if it lacks too much when it is trained.

    `lack` trains a level and tells what it lacks, 1 being all that is allowed. It grows with the square of the share,
    or faster, which says how much gentler. That level is trained where the sweep builds it.

    >>> climb([(0.5, 8)], {8: [0.1, 0.3, 0.5]}, lambda place: 2.0)  # 0.5 / sqrt(2) is 0.35
    [(0.3, 8)]
    """
    if not order:
        return []
    share, round_to = order[0]
    most = share / math.sqrt(max(lack(order[0]), 1.0))
    gentle = [each for each in distinct[round_to] if each <= most] or distinct[round_to][:1]
    return [(gentle[-1], round_to)]


def _judged(
    tried: _Tried, ratios: Mapping[Place, float], order: Sequence[Place], chosen: Sequence[Place]
) -> tuple[Level, ...]:
    """Every level with what became of it."""
    bold = {round_to: share for share, round_to in tried.boldest}

    def verdict(place: Place) -> str:
        share, round_to = place
        if place in chosen:
            return TRAINED
        if share not in tried.distinct[round_to]:
            return SAME
        if share > bold.get(round_to, 0.0) or (chosen and round_to == chosen[0][1] and share > chosen[0][0]):
            return LOST
        if share < bold[round_to]:
            return GENTLER
        return SLOWER if place in order else NOT_FASTER

    places = [(share, round_to) for round_to in tried.distinct for share in tried.shares]
    return tuple(Level(*place, tried.scores.get(place), ratios.get(place), verdict(place)) for place in places)


def slower_pairs(times: Mapping[Pair, float], pairs: Sequence[Pair]) -> tuple[Exclusion, ...]:
    """Precisions and runtimes that are not worth trying: neither among the fastest, nor the fastest float.

    >>> found = slower_pairs({("fp32", "a"): 3.0, ("int8", "a"): 1.0, ("fp32", "b"): 4.0, ("int8", "b"): 2.0},
    ...                      [("fp32", "a"), ("int8", "a"), ("fp32", "b"), ("int8", "b")])
    >>> [(item.precision, item.runtime, item.reason) for item in found]
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


def _ratios(
    job: PipelineJob, splits: Splits, parent: nn.Module, able: Mapping[Place, nn.Module], pairs: Sequence[Pair]
) -> dict[Place, float]:
    """Time over that of the unpruned model, each in the precision and runtime in which it is fastest."""
    if not able:
        return {}
    whole: Place = (0.0, "auto")
    times = _times(job, splits, {whole: parent, **able}, pairs)
    least: dict[Place, float] = {}
    for (place, _), seconds in times.items():
        least[place] = min(seconds, least.get(place, seconds))
    return {place: seconds / least[whole] for place, seconds in least.items() if place != whole and whole in least}


def _times(
    job: PipelineJob, splits: Splits, models: Mapping[Name, nn.Module], pairs: Sequence[Pair]
) -> dict[tuple[Name, Pair], float]:
    """Seconds of each in the call that is deployed, a block of each in turn; one that is not converted is left out."""
    with ExitStack() as stack:
        runners: dict[str, tuple[tuple[Name, Pair], Runner]] = {}
        for name, model in models.items():
            inputs = job.subject.example(splits, model)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            opened = _Opened(job, splits, model, inputs, folder)
            for pair in pairs:
                try:
                    runner = stack.enter_context(opened.runner(*pair))
                except EdgeOptError:
                    continue
                runners[str(len(runners))] = (name, pair), runner
        if not runners:
            return {}
        tensors = [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)]
        call = sized([tuple(tensors)], job.bench.deploy_batch)
        found = measure_runners(
            {key: runner for key, (_, runner) in runners.items()}, *call, min_time_s=_WINDOW_S, max_time_s=2 * _WINDOW_S
        )
    # One thread computes as long as its CPU time; what else runs here is not in that.
    is_alone = job.bench.used_threads == 1
    return {
        place: found[key].cpu_median_s if is_alone else found[key].median_s
        for key, (place, _) in runners.items()
        if key in found
    }


class _Opened:
    """A model in several precisions and runtimes, to be timed and no more; files of ONNX come from one quick export."""

    def __init__(self, job: PipelineJob, splits: Splits, model: nn.Module, inputs: Any, folder: Path) -> None:
        self._job, self._splits, self._model, self._inputs, self._folder = job, splits, model.eval(), inputs, folder
        self._exported: Exported | None = None

    def runner(self, precision: Precision, runtime: str) -> AbstractContextManager[Runner]:
        job, by_file = self._job, runtime in BY_ONNX_FILE and precision in ("fp32", "int8")
        if by_file and self._exported is None:
            self._exported = export_quickly(subject_of(self._model, self._inputs), self._folder / "quick.onnx")
        threads = job.bench.used_threads
        if self._exported is not None and by_file and precision == "fp32":
            return open_runner(self._exported.path, runtime, threads=threads, precision=precision)
        # Before training a model may well disagree with itself in int8; only its time is asked for.
        made = convert(
            self._model,
            self._inputs,
            precision,
            runtime,
            calibration=job.subject.calls(self._splits, self._model) if precision == "int8" else None,
            calibration_batches=1,
            reduce_range=job.reduce_range,
            exported=self._exported if by_file else None,
            folder=self._folder / f"{precision}-{runtime}",
            allow=True,
        )
        return open_runner(made, threads=threads)
