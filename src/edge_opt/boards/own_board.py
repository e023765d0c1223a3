"""A board of your own: a platform from a few times that were typed in, and which net to time next.

The times may be of any nets and any runtime. They condition what is known of boards in general, or of one that is alike
(`like`), by the same fit that made the shipped platforms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from edge_opt._support.checks import check_one_of, check_whole
from edge_opt.boards.class_costs import CLASSES, LayerWork, ModelWork, Vector
from edge_opt.boards.class_fit import Costs, fit_costs
from edge_opt.boards.fused_layers import model_work
from edge_opt.boards.platform_file import Platform, PlatformFamily, platform_family
from edge_opt.boards.targets import named_target, platforms_of, select_platform
from edge_opt.errors import InvalidInput
from edge_opt.records.display import Record
from edge_opt.records.predictions import Calibration
from edge_opt.records.profiles import ModelProfile

# A number is said to contradict the others when it lies this much further off than nine in ten would.
_CONTRADICTION = 1.6
# Of a board that is like another, clock and build may differ: a common factor of 1.35, one time in three.
_LIKE_SCALE_SD = 0.3
_DEFAULT_KINDS = {"int8": "ncnn-cpu-int8"}

# Layers of torchvision's nets for one image of 224 x 224, written by scripts/write_bundled_nets.py.
NETS = Path(__file__).parent / "data" / "bundled_nets.json"

Timed = tuple[ModelProfile | ModelWork, float]


@dataclass(frozen=True, slots=True)
class Suggestion(Record):
    """A net whose time would tell most, and the factor of the mean 90 % interval before and after it is known."""

    name: str
    factor_now: float
    factor_then: float


def fit_platform(
    name: str,
    times: Sequence[Timed],
    *,
    like: Platform | str | None = None,
    threads: int | None = None,
    precision: str = "fp32",
    runtime: str = "typed",
) -> Platform:
    """A platform from a few times: profiles of nets, and the seconds that each took on the board.

    Three to eight nets are enough; with one, the interval is wide and a note says so. Times that contradict each other
    by more than their noise are named in `contradictions`; the fit gives them less weight, but keeps them.

    Args:
        name: what to call the board.
        times: pairs of a profile (of the batch that was timed) and seconds, more than zero. None at all needs `like`.
        like: a platform, its file, or the name of a device that has one: the board is taken to have the same core.
        threads: that the nets were timed with. Chooses among the platforms of `like`, and is noted.
        precision: that the nets ran in.
        runtime: what ran them, for the record.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> profile = eo.profile(SmallCNN(), (1, 1, 28, 28))
    >>> mine = fit_platform("my-board", [(profile, 400e-6)], like="raspberry-pi-5", threads=4)
    >>> eo.estimate(profile, mine).basis
    'fitted'
    """
    check_one_of("precision", precision, ("fp32", "int8"))
    if threads is not None:
        check_whole("threads", threads)
    works = [(work_of(profile), float(seconds)) for profile, seconds in times]
    for work, seconds in works:
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidInput(f"the time of {work.name} is {seconds:g} s; it must be finite and more than zero")
    if not works and like is None:
        raise InvalidInput("no time is given; type in at least one, or say which device the board is like=")
    base = None if like is None else _platform_like(like, precision, threads)
    kind = platform_family(base.kind if base is not None else _DEFAULT_KINDS.get(precision, "ncnn-cpu"))
    prior = kind.prior if base is None else _alike(base, kind)
    rows, times_ms = _rows(works, kind)
    costs = fit_costs(rows, times_ms, prior)
    return Platform(
        name=name, device=name, title=name, engine="cpu" if base is None else base.engine, cores="all",
        runtime=runtime, day="", precision=precision, threads=threads, core=None if base is None else base.core,
        ghz=None, kind=kind.name, costs=Costs(costs.mean, costs.covariance, _seen(costs, prior, works)),
        rows=len(works), error=None, factor=None, noise_ratio=1.0, source="typed in",
        origin="typed" if works else "core", notes=tuple(_notes(works, base)),
        contradictions=tuple(_contradictions(works, kind, prior)),
    )  # fmt: skip


@cache
def bundled_nets() -> Mapping[str, ModelWork]:
    """Nets of torchvision that can be named without it, by their names there, for one image of 224 x 224.

    >>> "resnet18" in bundled_nets()
    True
    """
    data = json.loads(NETS.read_text(encoding="utf-8"))
    return {name: ModelWork(name, tuple(map(_bundled_work, works))) for name, works in data.items()}


def _platform_like(like: Platform | str, precision: str, threads: int | None) -> Platform:
    """Return the platform that a board is like: the one that is named, or the best-known one of a device."""
    named = named_target(like)
    if isinstance(named, Platform):
        return named
    known = () if isinstance(named, Calibration) else platforms_of(named)
    platform = select_platform(known, precision, threads=threads)
    if platform is None:
        names = ", ".join(platform.name for platform in known) or "none"
        raise InvalidInput(
            f"{named.name} has no fitted platform in {precision}, threads={threads}; there are: {names}. Name another "
            "device with like=, or leave it out"
        )
    return platform


def _bundled_work(values: Sequence[object]) -> LayerWork:
    return LayerWork(*(tuple(value) if isinstance(value, list) else value for value in values))  # type: ignore[arg-type]


def work_of(profile: ModelProfile | ModelWork) -> ModelWork:
    """Return the layers of a profile; bundled nets are lists of layers already."""
    return profile if isinstance(profile, ModelWork) else model_work(profile)


def _seen(costs: Costs, prior: Costs, works: Sequence[object]) -> Vector:
    return costs.seen if works else prior.seen


def _alike(base: Platform, kind: PlatformFamily) -> Costs:
    """What is likely for a board that is like another: its costs, with the spread between boards of one core."""
    size = len(base.costs.mean)
    spread = base.costs.covariance + kind.same_core + np.full((size, size), _LIKE_SCALE_SD**2)
    return Costs(base.costs.mean, spread, base.costs.seen)


def _rows(works: Sequence[tuple[ModelWork, float]], kind: PlatformFamily) -> tuple[Vector, Vector]:
    rows = np.array([work.quantities(kind.conventions) for work, _ in works]).reshape(-1, len(CLASSES))
    return rows, np.array([1000 * seconds for _, seconds in works])


def _notes(works: Sequence[tuple[ModelWork, float]], base: Platform | None) -> list[str]:
    notes = [] if base is None else [f"taken to be like {base.name}"]
    if not works:
        notes.append("no time was typed in: all of it is what boards with that core take")
    elif len(works) == 1:
        notes.append("one time only, so the interval is wide; three to eight make it narrower")
    return notes


def _contradictions(works: Sequence[tuple[ModelWork, float]], kind: PlatformFamily, prior: Costs) -> list[str]:
    """Times that the others speak against, the worst first; each is left out before the next is looked for."""
    left, found = list(works), []
    while len(left) > 1:
        scores = [_against(left, number, kind, prior) for number in range(len(left))]
        worst = int(np.argmax([abs(error) / width for error, width in scores]))
        error, width = scores[worst]
        if abs(error) <= _CONTRADICTION * width:
            break
        work, seconds = left.pop(worst)
        relation = "more" if error > 0 else "less"
        found.append(
            f"{work.name}: {1000 * seconds:.4g} ms is {math.exp(abs(error)):.3g} times {relation} than the other times "
            f"say, and {math.exp(width):.2g} is their noise"
        )
    return found


def _against(
    works: Sequence[tuple[ModelWork, float]], number: int, kind: PlatformFamily, prior: Costs
) -> tuple[float, float]:
    """Error of one time, predicted from the others, and half of the interval of that prediction."""
    others = [pair for position, pair in enumerate(works) if position != number]
    costs = fit_costs(*_rows(others, kind), prior)
    row = works[number][0].quantities(kind.conventions)
    error = math.log(1000 * works[number][1]) - costs.log_time(row)
    return error, kind.typed_spread.width(costs.variance(row))


def suggest_next(platform: Platform, candidates: Sequence[ModelProfile | ModelWork]) -> tuple[Suggestion, ...]:
    """Which net to time next: those that shrink the interval of all candidates most come first.

    A time of net j with shares s of the classes turns the covariance C of the costs into C - Cs s'C / (s'Cs + noise^2),
    whatever the time is; so the gain is known beforehand.

    Args:
        platform: what is known by now.
        candidates: profiles of nets that could be timed, at least one.
    """
    if not candidates:
        raise InvalidInput("there are no candidates; give profiles of nets that could be timed")
    kind = platform_family(platform.kind)
    works = [work_of(candidate) for candidate in candidates]
    shares = np.array([platform.costs.shares(work.quantities(kind.conventions)) for work in works])
    now = _mean_width(shares, platform.costs.covariance, kind)
    found = []
    for work, share in zip(works, shares, strict=True):
        reach = platform.costs.covariance @ share
        then = platform.costs.covariance - np.outer(reach, reach) / (float(share @ reach) + kind.typed_spread.noise**2)
        found.append(Suggestion(work.name, math.exp(now), math.exp(_mean_width(shares, then, kind))))
    return tuple(sorted(found, key=lambda item: item.factor_then))


def _mean_width(shares: Vector, covariance: Vector, kind: PlatformFamily) -> float:
    variances = np.maximum(np.einsum("nk,kl,nl->n", shares, covariance, shares), 0.0)
    return float(np.mean([kind.typed_spread.width(variance) for variance in variances]))
