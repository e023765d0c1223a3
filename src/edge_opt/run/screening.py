"""Which pruning levels are worth training: cut, fitted and timed first, at the widths that they really get.

Levels are tried without any training. A level falls out where its widths are those of another, where it is not faster
than the unpruned model, where another is faster and more accurate, or where it has lost more than fine-tuning has ever
brought back. Of what is left the fastest are trained. Times are taken in turns in one process, so that they compare.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from edge_opt._support.files import write_whole
from edge_opt.compress import convert, open_runner, prune
from edge_opt.compress.runtimes import measure_runners
from edge_opt.data import Splits
from edge_opt.errors import EdgeOptError
from edge_opt.records.sweeps import SHARES
from edge_opt.run.config import RunConfig
from edge_opt.run.job import PipelineJob, computing_with

FILE = "screening.json"
LEVELS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
# As many as the former grid trained.
TRAINED = 2
# A variant counts as faster from this share of the parent's time on: less is noise.
FASTER = 0.97
# Accuracy that a cut and fitted model may lack: fine-tuning wins back two thirds or so of what is lost.
RECOVERABLE = 0.1
_WINDOW_S = 0.3


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
    """

    precision: str
    runtime: str
    accuracy: float
    levels: tuple[Level, ...]

    @property
    def chosen(self) -> list[float]:
        """The unpruned model and the levels to train."""
        return [0.0, *(level.share for level in self.levels if level.verdict == "trained")]

    def __str__(self) -> str:
        reasons = Counter(level.verdict for level in self.levels if level.verdict != "trained")
        out = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        trained = ", ".join(f"{share:g}" for share in self.chosen[1:]) or "none"
        return (
            f"pruning levels: {len(self.levels)} considered, {reasons.total()} screened out"
            f"{f' ({out})' if out else ''}, to be trained: {trained}"
        )


def levels_of(
    config: RunConfig, job: PipelineJob, splits: Splits, root: Path, key: str, tell: Callable[[str], None]
) -> Sequence[float]:
    """The levels that a configuration names, or those that are worth training. What was found before is kept."""
    if config.pruning_levels != "auto":
        return config.pruning_levels
    kept = _kept(root / FILE, key)
    if kept is None:
        with computing_with(job.build_threads):
            kept = screen(job, splits, *_pair(config))
        write_whole(root / FILE, json.dumps({"key": key, **asdict(kept)}, indent=1))
    tell(str(kept))
    return kept.chosen


def _pair(config: RunConfig) -> tuple[str, str]:
    """What levels are timed in: the narrowest precision that a runtime beside eager torch runs."""
    runtimes = [name for name in config.runtimes if name != "torch"]
    narrow = [name for name in ("int8", "fp32") if name in config.precisions]
    return (narrow[0], runtimes[0]) if runtimes and narrow else ("fp32", "torch")


def _kept(path: Path, key: str) -> Screening | None:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] != key:
            return None
        levels = tuple(Level(**level) for level in found["levels"])
        return Screening(found["precision"], found["runtime"], found["accuracy"], levels)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def screen(
    job: PipelineJob, splits: Splits, precision: str, runtime: str, levels: Sequence[float] = LEVELS
) -> Screening:
    """Every level cut, fitted, scored and timed, and which of them are worth training."""
    parent = job.subject.build()
    inputs = job.subject.example(splits, parent)
    task = job.subject.task.build()
    is_higher_better = task.metric.direction == "higher"

    def score(model: nn.Module) -> float:
        value = task.score(model, splits.validation, resamples=0).value
        return value if is_higher_better else -value

    whole = score(parent)
    found: dict[float, Level] = {}
    variants: dict[float, nn.Module] = {0.0: parent}
    seen: set[tuple[Any, ...]] = set()
    for share in levels:
        try:
            pruned = prune(
                parent,
                inputs,
                share,
                importance=job.tuning.importance,
                round_to=job.tuning.round_to,
                loader=splits.calibration,
                seed=job.tuning.seed,
            )
        except EdgeOptError as error:
            found[share] = Level(share, None, None, f"not pruned: {error}")
            continue
        widths = tuple(layer.after for layer in pruned.achieved.layers)
        if not pruned.spec.kept or widths in seen:
            found[share] = Level(share, None, None, "of the same widths as another")
            continue
        seen.add(widths)
        variants[share] = pruned.model.eval()
        found[share] = Level(share, score(variants[share]), None, "")
    ratios = _times(job, splits, variants, inputs, precision, runtime)
    timed = [replace(level, latency_ratio=ratios.get(share)) for share, level in found.items()]
    lost = RECOVERABLE * (1.0 if task.metric.name in SHARES else abs(whole))
    return Screening(precision, runtime, whole, judged(timed, whole, lost))


def _times(
    job: PipelineJob, splits: Splits, variants: Mapping[float, nn.Module], inputs: Any, precision: str, runtime: str
) -> dict[float, float]:
    """Each variant's time over the parent's, a block of each in turn."""
    with ExitStack() as stack:
        runners = {}
        for share, model in variants.items():
            made = convert(
                model,
                inputs,
                precision,
                runtime,
                calibration=splits.calibration if precision == "int8" else None,
                calibration_batches=job.calibration_batches,
                reduce_range=job.reduce_range,
                folder=stack.enter_context(tempfile.TemporaryDirectory()),
            )
            runners[f"{share}"] = stack.enter_context(open_runner(made, threads=job.bench.used_threads))
        found = measure_runners(runners, *inputs, min_time_s=_WINDOW_S, max_time_s=2 * _WINDOW_S)
    return {share: found[f"{share}"].median_s / found["0.0"].median_s for share in variants if share}


def judged(levels: Sequence[Level], whole: float, most_lost: float = RECOVERABLE) -> tuple[Level, ...]:
    """The levels with their verdicts; `whole` is the accuracy of the unpruned model, `most_lost` what may be missing.

    >>> rows = [Level(0.25, 0.90, 0.8, ""), Level(0.5, 0.88, 0.5, ""), Level(0.75, 0.4, 0.3, "")]
    >>> [(row.share, row.verdict) for row in judged(rows, 0.92)]
    [(0.25, 'trained'), (0.5, 'trained'), (0.75, 'too far from the accuracy of the whole')]
    """
    able: list[Level] = []
    verdicts: dict[float, str] = {}
    for level in levels:
        if level.accuracy is None or level.latency_ratio is None:
            verdicts[level.share] = level.verdict or "not timed"
        elif level.latency_ratio > FASTER:
            verdicts[level.share] = "not faster than the unpruned model"
        elif any(_beats(other, level) for other in levels):
            verdicts[level.share] = "slower and less accurate than another"
        elif whole - level.accuracy > most_lost:
            verdicts[level.share] = "too far from the accuracy of the whole"
        else:
            able.append(level)
    if not able:
        # Better one try with the gentlest that is faster at all than none.
        near = [level for level in levels if verdicts.get(level.share, "").startswith("too far")]
        able = sorted(near, key=lambda level: -(level.accuracy or 0.0))[:1]
    fastest = sorted(able, key=lambda level: level.latency_ratio or 1.0)
    verdicts |= {level.share: "trained" for level in fastest[:TRAINED]}
    verdicts |= {level.share: "slower than those to be trained" for level in fastest[TRAINED:]}
    return tuple(replace(level, verdict=verdicts[level.share]) for level in levels)


def _beats(one: Level, other: Level) -> bool:
    """Whether one level is clearly faster than another, and at least as accurate."""
    if one.accuracy is None or one.latency_ratio is None or other.accuracy is None or other.latency_ratio is None:
        return False
    return one.latency_ratio < FASTER * other.latency_ratio and one.accuracy >= other.accuracy
