"""Which pruning levels are worth training: cut, fitted, scored and timed first, at the widths that they really get.

Nothing is trained at first. A level falls out where it has lost more than fine-tuning has ever brought back, where it
is not faster than the unpruned model, or where another is faster and more accurate. Of what is left a likely one is
trained, and what it then scores says whether the next to be trained is a faster or a gentler one. Times are taken in
turns in one process, in the precision and runtime in which the unpruned model is fastest.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt._support.files import write_whole
from edge_opt.compress import Runner, convert, open_runner
from edge_opt.compress.agreement import sized
from edge_opt.compress.prune import pruned_levels
from edge_opt.compress.runtimes import measure_runners
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError
from edge_opt.records import Candidate
from edge_opt.records.sweeps import SHARES
from edge_opt.run.config import RunConfig
from edge_opt.run.job import PipelineJob, computing_with, variant_of
from edge_opt.search.space import IMPOSSIBLE, Exclusion, Pair, Space

FILE = "screening.json"
LEVELS = tuple(step / 16 for step in range(1, 14))
# As many as the grid of three levels trains.
TRAINED = 2
# So many are timed, for each must be exported: the most accurate of those that are not hopeless.
TIMED = 6
# A variant counts as faster from this share of the parent's time on: less is noise.
FASTER = 0.97
# Accuracy that a cut and fitted model may lack: fine-tuning wins back two thirds or so of what is lost.
RECOVERABLE = 0.1
# What a trained one may lack: about as much as some thousand samples tell apart.
ALLOWED = 0.005
# So many precisions and runtimes are tried with every level; the baseline, eager torch, is timed in any case.
KEPT_PAIRS = 2
_WINDOW_S = 0.3
SAME = "of the same widths as another"
BEYOND = "beyond those that lost too much"
# After so many levels in a row that lost too much, no bolder one is cut.
HOPELESS = 2
Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Level:
    """A pruning level before any training.

    Attributes:
        share: Share of the channels to remove.
        accuracy: The score on validation, higher is better, after the cut, with norms and weights fitted; None where it
            was not built.
        latency_ratio: Time over that of the unpruned model, in turns; None where it was not timed.
        verdict: "trained", or why not.
    """

    share: float
    accuracy: float | None
    latency_ratio: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Screening:
    """What became of every level that was considered.

    Attributes:
        precision: What the levels were timed in.
        runtime: Who ran them.
        accuracy: Of the unpruned model, on the same samples.
        levels: The levels, in order.
        left_out: Precisions and runtimes that are not tried with every level, each with the reason.
    """

    precision: str
    runtime: str
    accuracy: float
    levels: tuple[Level, ...]
    left_out: tuple[Exclusion, ...] = ()

    @property
    def chosen(self) -> list[float]:
        """The unpruned model and the levels that were trained."""
        return [0.0, *(level.share for level in self.levels if level.verdict == "trained")]

    def __str__(self) -> str:
        reasons = Counter(level.verdict for level in self.levels if level.verdict != "trained")
        out = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        trained = ", ".join(f"{share:g}" for share in self.chosen[1:]) or "none"
        left = ", ".join(f"{item.precision} in {item.runtime}" for item in self.left_out)
        return (
            f"pruning levels: {len(self.levels)} considered, {reasons.total()} screened out"
            f"{f' ({out})' if out else ''}, trained: {trained}{f'; slower kinds left out: {left}' if left else ''}"
        )


def space_of(
    config: RunConfig, job: PipelineJob, splits: Splits, root: Path, key: str, tell: Callable[[str], None]
) -> Space:
    """Everything a configuration allows; where levels are `auto`, what is worth trying. What was found is kept."""
    # Eager torch first, because the baseline is that.
    runtimes = sorted(config.runtimes, key=lambda name: name != "torch")
    if config.pruning_levels != "auto":
        return Space(config.pruning_levels, config.precisions, runtimes, config.layer_pruning)
    pairs = _pairs(config)
    key = f"{key} {pairs}"
    kept = _kept(root / FILE, key)
    if kept is None:
        with computing_with(job.build_threads):
            kept = screen(job, splits, pairs)
        write_whole(root / FILE, json.dumps({"key": key, **asdict(kept)}, indent=1))
    tell(str(kept))
    left_out: dict[Pair, str] = {(item.precision, item.runtime): item.reason for item in kept.left_out}
    return Space(kept.chosen, config.precisions, runtimes, config.layer_pruning, {**IMPOSSIBLE, **left_out})


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
        return Screening(found["precision"], found["runtime"], found["accuracy"], levels, left_out)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def screen(job: PipelineJob, splits: Splits, pairs: Sequence[Pair], levels: Sequence[float] = LEVELS) -> Screening:
    """Every level cut, fitted and scored, those that are not hopeless timed, and the likely ones trained.

    A trained level is kept where the sweep looks for it, and not trained again.
    """
    parent = job.subject.build()
    inputs = job.subject.example(splits, parent)
    task, tuning = job.subject.task.build(), job.tuning
    sign = 1.0 if task.metric.direction == "higher" else -1.0

    def score(model: nn.Module) -> float:
        return sign * task.score(model, splits.validation, resamples=0).value

    def trained(share: float) -> float:
        candidate = Candidate(share, "fp32", "torch")
        return score(variant_of(job.subject, splits, candidate, tuning, job.cache).model)

    whole = score(parent)
    alone = {pair: (parent, pair) for pair in pairs}
    times = _times(job, splits, alone) if len(pairs) > 1 else {}
    precision, runtime = pair = min(times, key=lambda each: times[each], default=pairs[0])
    left_out = slower_pairs(times, pairs)
    scale = 1.0 if task.metric.name in SHARES else abs(whole)
    scores: dict[float, float] = {}

    def is_hopeless(share: float, model: nn.Module) -> bool:
        scores[share] = score(model.eval())
        return gone(list(scores.values()), whole, RECOVERABLE * scale)

    try:
        cut = pruned_levels(
            parent, inputs, levels, importance=tuning.importance, round_to=tuning.round_to, seed=tuning.seed,
            loader=task.batches(parent, splits.calibration), is_last=is_hopeless,
        )  # fmt: skip
    except EdgeOptError as error:
        return Screening(precision, runtime, whole, (Level(max(levels), None, None, f"not pruned: {error}"),), left_out)
    is_cut_short = gone(list(scores.values()), whole, RECOVERABLE * scale)
    found = [
        Level(
            share,
            scores.get(share),
            None,
            "" if share in cut else BEYOND if is_cut_short and share > max(cut) else SAME,
        )
        for share in levels
    ]
    hopeful = promising(found, whole, RECOVERABLE * scale)
    seconds = _times(job, splits, {0.0: (parent, pair), **{share: (cut[share].model, pair) for share in hopeful}})
    ratios = {share: value / seconds[0.0] for share, value in seconds.items() if 0.0 in seconds}
    timed = [replace(level, latency_ratio=ratios.get(level.share)) for level in found]
    verdicts = judged(timed, whole, trained, most_lost=RECOVERABLE * scale, allowed=ALLOWED * scale)
    return Screening(precision, runtime, whole, verdicts, left_out)


def gone(scores: Sequence[float], whole: float, most_lost: float) -> bool:
    """Whether the last levels, ever bolder, have all lost more than fine-tuning brings back.

    >>> gone([0.9, 0.7], 0.92, 0.1), gone([0.9, 0.7, 0.6], 0.92, 0.1)
    (False, True)
    """
    return len(scores) >= HOPELESS and all(whole - score > most_lost for score in scores[-HOPELESS:])


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


def promising(levels: Sequence[Level], whole: float, most_lost: float) -> list[float]:
    """The levels to time: those that may come back, spread evenly where they are many; the best where none may.

    >>> rows = [Level(0.25, 0.90, None, ""), Level(0.5, 0.88, None, ""), Level(0.75, 0.4, None, "")]
    >>> promising(rows, 0.92, 0.1)
    [0.25, 0.5]
    """
    scored = [(level.share, level.accuracy) for level in levels if level.accuracy is not None]
    near = [share for share, accuracy in scored if whole - accuracy <= most_lost]
    if not near:
        return [share for share, _ in sorted(scored, key=lambda pair: -pair[1])[:1]]
    step = max(1.0, (len(near) - 1) / (TIMED - 1))
    return [near[round(place * step)] for place in range(min(TIMED, len(near)))]


def _times(job: PipelineJob, splits: Splits, variants: Mapping[Name, tuple[nn.Module, Pair]]) -> dict[Name, float]:
    """Seconds of each in the call that is deployed, a block of each in turn; one that is not converted is left out."""
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for name, (model, (precision, runtime)) in variants.items():
            inputs = job.subject.example(splits, model)
            try:
                # Before training a model may well disagree with itself in int8; only its time is asked for.
                made = convert(
                    model.eval(),
                    inputs,
                    precision,
                    runtime,
                    calibration=job.subject.calls(splits, model) if precision == "int8" else None,
                    calibration_batches=job.calibration_batches,
                    reduce_range=job.reduce_range,
                    folder=stack.enter_context(tempfile.TemporaryDirectory()),
                    allow=True,
                )
            except EdgeOptError:
                continue
            runners[str(name)] = stack.enter_context(open_runner(made, threads=job.bench.used_threads))
        if not runners:
            return {}
        tensors = [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)]
        call = sized([tuple(tensors)], job.bench.deploy_batch)
        found = measure_runners(runners, *call, min_time_s=_WINDOW_S, max_time_s=2 * _WINDOW_S)
    # One thread computes as long as its CPU time; what else runs here is not in that.
    is_alone = job.bench.used_threads == 1
    times = {name: each.cpu_median_s if is_alone else each.median_s for name, each in found.items()}
    return {name: times[str(name)] for name in variants if str(name) in times}


def judged(
    levels: Sequence[Level],
    whole: float,
    trained: Callable[[float], float],
    *,
    most_lost: float = RECOVERABLE,
    allowed: float = ALLOWED,
) -> tuple[Level, ...]:
    """The levels with their verdicts; `trained` trains one and says what it scores.

    `whole` is the accuracy of the unpruned model, `most_lost` what may be missing before training, `allowed` after it.

    >>> rows = [Level(0.25, 0.90, 0.8, ""), Level(0.5, 0.88, 0.5, ""), Level(0.75, 0.4, None, "")]
    >>> [(row.share, row.verdict) for row in judged(rows, 0.92, lambda share: 0.92)]
    [(0.25, 'trained'), (0.5, 'trained'), (0.75, 'too far from the accuracy of the whole')]
    """
    verdicts: dict[float, str] = {}
    able: list[Level] = []
    for level in levels:
        if level.accuracy is None:
            verdicts[level.share] = level.verdict
        elif level.latency_ratio is None:
            is_far = whole - level.accuracy > most_lost
            verdicts[level.share] = "too far from the accuracy of the whole" if is_far else "between others"
        elif level.latency_ratio > FASTER:
            verdicts[level.share] = "not faster than the unpruned model"
        elif any(_beats(other, level) for other in levels):
            verdicts[level.share] = "slower and less accurate than another"
        else:
            able.append(level)
    able.sort(key=lambda level: level.latency_ratio or 1.0)
    for level in climb(able, whole, trained, allowed):
        verdicts[level.share] = "trained"
    verdicts = {level.share: "not needed after those trained" for level in able} | verdicts
    return tuple(replace(level, verdict=verdicts[level.share]) for level in levels)


def climb(able: Sequence[Level], whole: float, trained: Callable[[float], float], allowed: float) -> list[Level]:
    """The levels to train, fastest first in `able`: one that fitting alone nearly healed, and from there on.

    Where a trained level keeps its accuracy, the next is halfway to the fastest; else halfway to the gentlest.
    """
    tried: list[Level] = []
    low, high = 0, len(able) - 1
    # Training wins back about two thirds of what a fitted model lacks.
    place = next((i for i, each in enumerate(able) if whole - (each.accuracy or 0.0) <= 3 * allowed), high)
    while low <= high and len(tried) < TRAINED:
        tried.append(able[place])
        if whole - trained(able[place].share) <= allowed:
            high = place - 1
        else:
            low = place + 1
        place = (low + high) // 2 if low <= high else 0
    return tried


def _beats(one: Level, other: Level) -> bool:
    """Whether one level is clearly faster than another, and at least as accurate."""
    if one.accuracy is None or one.latency_ratio is None or other.accuracy is None or other.latency_ratio is None:
        return False
    return one.latency_ratio < FASTER * other.latency_ratio and one.accuracy >= other.accuracy
