"""Ratios of two variants against published pairs that they never saw: nets held out by family, boards by chip.

    python benchmarks/ratios.py ../shared/published

fp32 and int8 of one net on one board: the ratio follows from the board's times of other families, and from ratios on
boards with other chips. Nets of one family on one platform: both are left out of its costs. Intervals are calibrated on
the other families or sources.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "platform_fit"))

from board_priors import fit_prior
from fit_platforms import Group, groups, same_run
from held_out import Trial, calibrated, hold_out_relative, noise_ratio
from published_tables import Board, Net, read_tables

from edge_opt.boards.class_costs import Costs, KernelConventions, Vector, fit_costs
from edge_opt.boards.ratios import SHARE_SPREAD, WIDTH_NOISE, WIDTH_QUANTILE

# Ratios nearer to one than this are no gain and no loss.
LEAST_GAIN = math.log(1.1)
# Of one source at most so many pairs count, so that no source decides alone.
MOST_PAIRS = 100


# A group with fewer pairs is not shown.
LEAST_SHOWN = 15


def _maker(board: Board) -> str:
    """Return who makes a board's processor, as far as its name tells."""
    words = f"{board.soc} {board.device}".lower()
    makers = ("snapdragon", "qualcomm", "rockchip", "rk3", "bcm", "raspberry", "apple", "mediatek", "kirin", "loongson",
              "allwinner", "amlogic", "nvidia", "jetson", "tegra", "intel", "amd", "phytium", "azure")  # fmt: skip
    same = {"qualcomm": "snapdragon", "rk3": "rockchip", "raspberry": "bcm", "jetson": "nvidia", "tegra": "nvidia"}
    maker = next((maker for maker in makers if maker in words), "other")
    return same.get(maker, maker)


_GROUPINGS: dict[str, Callable[[Board], str]] = {
    "processor": _maker,
    "threads": lambda board: str(board.threads),
    "ncnn of": lambda board: board.day[:4],
}


def precision_pairs(boards: Sequence[Board], floats: Sequence[Board]) -> None:
    """Print the error of the ratio of int8 to float, the share of right signs, and what intervals hold."""
    found = hold_out_relative(boards, floats, KernelConventions())
    trials = [trial for trial in found if trial.known == "ratio"]
    print(f"{'int8 over fp32, ncnn CPU':40} {'pairs':>6} {'median':>7} {'sign':>7} {'of':>5} {'90 %':>6} {'holds':>7}")
    _line("all families", trials, trials)
    for family in dict.fromkeys(trial.family for trial in trials):
        _line(f"  {family}", [trial for trial in trials if trial.family == family], trials)
    for title, key in _GROUPINGS.items():
        names = [key(board) for board in boards]
        for name in sorted(set(names)):
            shown = [trial for trial in trials if names[trial.board] == name]
            if len(shown) >= LEAST_SHOWN:
                # Intervals are calibrated without the group.
                _line(f"  {title} {name}", shown, [trial for trial in trials if names[trial.board] != name])


def _line(label: str, shown: Sequence[Trial], trials: Sequence[Trial]) -> None:
    errors = np.array([trial.log_error for trial in shown])
    predicted = np.array([trial.log_predicted for trial in shown])
    is_clear = np.abs(predicted + errors) > LEAST_GAIN
    right = np.sign(predicted + errors) == np.sign(predicted)
    print(
        f"{label:40} {len(shown):6} {np.median(np.abs(np.expm1(-errors))):7.1%} {right[is_clear].mean():7.1%} "
        f"{is_clear.sum():5} {np.exp(np.quantile(np.abs(errors), 0.9)):6.2f} {_held(shown, trials):7.1%}"
    )


def _held(shown: Sequence[Trial], trials: Sequence[Trial]) -> float:
    """Share of ratios within intervals that were calibrated on the other families."""
    held = []
    for family in {trial.family for trial in shown}:
        others = [trial for trial in trials if trial.family != family]
        spread = calibrated(others)
        for trial in shown:
            if trial.family == family:
                own = [other for other in others if other.board == trial.board]
                ratio = noise_ratio(own, others, spread) if own else 1.0
                held.append(abs(trial.log_error) <= spread.width(trial.variance, ratio))
    return float(np.mean(held))


# The predicted logarithm of a ratio, its error, and the distance of the two nets in shares of their classes.
Pair = tuple[float, float, float]


def pairs_of(costs: Costs, rows: Sequence[tuple[Net, float]], known: Mapping[str, Vector]) -> Iterator[Pair]:
    """Every pair of nets of one family that were left out of the costs."""
    for (one, first), (other, second) in itertools.combinations(rows, 2):
        a, b = known[one.name], known[other.name]
        predicted = costs.log_time(a) - costs.log_time(b)
        yield (
            predicted,
            math.log(first / second) - predicted,
            float(np.abs(costs.shares(a) - costs.shares(b)).sum()) / 2,
        )


def pairs_alone(board: Board, group: Group, is_by_family: bool, folds: int = 10) -> Iterator[Pair]:
    """Pairs of a board with a prior of its own; cells of NAS-Bench-201 are all of one family."""
    assert group.base is not None
    known = {net.name: net.workload.quantities(group.conventions) for net, _ in board.times}
    names = list(dict.fromkeys(net.family for net, _ in board.times))
    part = {name: number % folds for number, name in enumerate(names)}
    for fold in range(min(folds, len(names))):
        kept = [(known[net.name], time) for net, time in board.times if part[net.family] != fold]
        asked = [(net, time) for net, time in board.times if part[net.family] == fold]
        if kept:
            costs = fit_costs(np.array([row for row, _ in kept]), np.array([time for _, time in kept]), group.base)
            for family in dict.fromkeys(net.family if is_by_family else "" for net, _ in asked):
                yield from pairs_of(costs, [row for row in asked if family in ("", row[0].family)], known)


def ncnn_pairs(group: Group, folds: int = 4) -> dict[str, list[Pair]]:
    """Pairs of one family in ncnn's table, by family; the family and the board's chip are left out."""
    known = {net.name: net.workload.quantities(group.conventions) for board in group.boards for net, _ in board.times}
    fold = [zlib.crc32(board.soc.encode()) % folds for board in group.boards]
    found: dict[str, list[Pair]] = {}
    for family in dict.fromkeys(net.family for board in group.boards for net, _ in board.times):
        if len({net.name for board in group.boards for net, _ in board.times if net.family == family}) < 2:
            continue
        rows = [_without(board, family, known) for board in group.boards]
        for part in range(folds):
            prior, _ = fit_prior([row for row, number in zip(rows, fold, strict=True) if number != part])
            for board, row, number in zip(group.boards, rows, fold, strict=True):
                if number == part:
                    asked = [(net, time) for net, time in board.times if net.family == family]
                    found.setdefault(f"ncnn {family}", []).extend(pairs_of(fit_costs(*row, prior), asked, known))
    return found


def _without(board: Board, family: str, known: Mapping[str, Vector]) -> tuple[Vector, Vector]:
    kept = [(known[net.name], time) for net, time in board.times if net.family != family]
    return np.array([row for row, _ in kept]), np.array([time for _, time in kept])


def width_fit(sources: Sequence[Sequence[Pair]]) -> tuple[float, float, float]:
    """Return noise, share spread and quantile under which the errors are most likely; sources weigh alike."""
    pairs = np.concatenate([np.array(source) for source in sources])
    weights = np.concatenate([np.full(len(source), min(1.0, MOST_PAIRS / len(source))) for source in sources])
    best, chosen = -np.inf, (0.0, 0.0)
    for noise, spread in itertools.product((0.03, 0.04, 0.05, 0.06, 0.08, 0.1), (0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15)):
        sd = np.sqrt(noise**2 + spread * pairs[:, 2])
        likelihood = float(np.sum(weights * (-np.log(sd) - 2.5 * np.log1p((pairs[:, 1] / sd) ** 2 / 4))))
        if likelihood > best:
            best, chosen = likelihood, (noise, spread)
    scaled = np.abs(pairs[:, 1]) / np.sqrt(chosen[0] ** 2 + chosen[1] * pairs[:, 2])
    order = np.argsort(scaled)
    level = np.cumsum(weights[order]) / weights.sum()
    return (*chosen, float(scaled[order][np.searchsorted(level, 0.9)]))


def width_pairs(tables: Mapping[str, Group]) -> None:
    """Print the error of ratios between nets of one family on one platform, and what intervals hold."""
    sources: dict[str, list[Pair]] = {}
    for board in tables["tflite"].boards:
        sources[f"NAS-Bench-201, {board.device}"] = list(pairs_alone(board, tables["tflite"], False))[::7]
    for name in ("st-mcu-int8", "tflite-int8"):
        for board in tables[name].boards:
            sources[f"ST's zoo, {board.device}"] = list(pairs_alone(board, tables[name], True))
    sources |= ncnn_pairs(tables["ncnn-cpu"])
    print(f"\n{'nets of one family, one platform':40} {'pairs':>6} {'median':>7} {'90 %':>6} {'holds':>7}")
    every = []
    for name, pairs in sources.items():
        # A source is left out with all others of its table.
        table = name.split(" ")[0] if "ncnn" not in name else name
        noise, spread, quantile = width_fit([other for key, other in sources.items() if not key.startswith(table)])
        rows = np.array(pairs)
        held = np.abs(rows[:, 1]) <= quantile * np.sqrt(noise**2 + spread * rows[:, 2])
        every.append(held.mean())
        errors = np.abs(np.expm1(-rows[:, 1]))
        factor = np.exp(np.quantile(np.abs(rows[:, 1]), 0.9))
        print(f"{name:40} {len(rows):6} {np.median(errors):7.1%} {factor:6.2f} {held.mean():7.1%}")
    print(f"{'mean of the sources':40} {'':6} {'':7} {'':6} {np.mean(every):7.1%}")
    print(f"fitted: noise, spread, quantile = {width_fit(list(sources.values()))}; "
          f"shipped: {WIDTH_NOISE}, {SHARE_SPREAD}, {WIDTH_QUANTILE}")  # fmt: skip


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of the published tables")
    tables = {group.name: group for group in groups(read_tables(parser.parse_args().tables))}
    int8 = {same_run(board): board for board in tables["ncnn-cpu-int8"].boards}
    floats = [board for board in tables["ncnn-cpu"].boards if same_run(board) in int8]
    precision_pairs([int8[same_run(board)] for board in floats], floats)
    width_pairs(tables)


if __name__ == "__main__":
    main()
