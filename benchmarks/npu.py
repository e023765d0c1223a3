"""Predictions for NPUs against Qualcomm's published times: nets held out by family, then devices by chip.

    python benchmarks/npu.py ../shared/published

A family is left out of every device, and each of its nets is predicted on all of them. Rankings are of pairs whose
published times differ by more than 20 %.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "platform_fit"))

from board_priors import fit_prior
from fit_platforms import Group, declare_operators, groups
from npu_chips import CHIPS, chip_costs
from npu_table import PlacedRow, npu_boards, placed_rows
from published_tables import Board

from edge_opt.boards.class_costs import Costs, Spread
from edge_opt.boards.placement import RULES, departures
from edge_opt.boards.platform_file import platform_family
from edge_opt.boards.targets import resolve_target
from edge_opt.errors import EdgeOptError
from edge_opt.records.predictions import Departure

# Nine in ten of a normal distribution lie within so many standard deviations.
NORMAL_90 = 1.645
# Rules that a runtime's documentation or maintainers state, so that no row needs to show them.
DOCUMENTED = ("3-D convolution",)


@dataclass(frozen=True)
class HeldOut:
    """One net on one platform, predicted without its family, or without the device's chip."""

    net: str
    device: str
    runtime: str
    ms: float
    predicted_ms: float
    is_in_interval: bool


def without_family(group: Group) -> list[HeldOut]:
    """Every row, predicted from all devices without the net's family."""
    nets = {net.name: net.family for board in group.boards for net, _ in board.times}
    families = [{name for name, own in nets.items() if own == family} for family in sorted(set(nets.values()))]
    return [item for names in families for item in without_nets(group, names)]


def without_nets(group: Group, names: Collection[str]) -> list[HeldOut]:
    """The rows of some nets, predicted from those of all others."""
    rows = [_rows(board, group, names) for board in group.boards]
    kept = [(board, own) for board, own in zip(group.boards, rows, strict=True) if len(own[1])]
    _, costs = fit_prior([own for _, own in kept], noise=group.conventions.noise)
    spread = platform_family(group.name).spread
    results = []
    for (board, _), own in zip(kept, costs, strict=True):
        results += _predicted(board, group, own, spread, names)
    return results


def at_random(group: Group, seed: int, share: float = 0.4) -> list[HeldOut]:
    """The rows of 40 % of the nets, drawn at random, predicted from those of the others."""
    nets = sorted({net.name for board in group.boards for net, _ in board.times})
    left_out = np.random.default_rng(seed).choice(nets, round(share * len(nets)), replace=False)
    return without_nets(group, set(left_out))


def without_chip(group: Group) -> list[HeldOut]:
    """Every row, predicted from other chips, and from the generation and market of its own."""
    results = []
    # Costs of a chip that nobody has timed carry the errors between chips; the noise of nets comes on top.
    spread = Spread(platform_family(group.name).spread.noise, trust=1.0, quantile=NORMAL_90)
    for runtime in sorted({board.runtime for board in group.boards}):
        boards = [board for board in group.boards if board.runtime == runtime]
        for chip in sorted({board.soc for board in boards}):
            others = [board for board in boards if board.soc != chip]
            if len(others) < 3:
                continue
            rows, chips = [_rows(board, group) for board in others], [CHIPS[board.device] for board in others]
            for board in boards:
                if board.soc == chip:
                    asked = _rows(board, group)[0]
                    costs = chip_costs(rows, chips, CHIPS[board.device], asked, group.conventions.noise)
                    results += _predicted(board, group, costs, spread, {net.name for net, _ in board.times})
    return results


def _rows(board: Board, group: Group, left_out: Collection[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    kept = [(net.workload.quantities(group.conventions), time) for net, time in board.times if net.name not in left_out]
    return np.array([row for row, _ in kept]), np.array([time for _, time in kept])


def _predicted(board: Board, group: Group, costs: Costs, spread: Spread, names: Collection[str]) -> Iterable[HeldOut]:
    for net, time in board.times:
        if net.name in names:
            row = net.workload.quantities(group.conventions)
            log_time = costs.log_time(row)
            is_inside = abs(np.log(time) - log_time) <= spread.width(costs.variance(row))
            yield HeldOut(net.name, board.device, board.runtime, time, float(np.exp(log_time)), is_inside)


def ranked(results: Sequence[HeldOut], by: str) -> float:
    """Share of pairs in the right order: nets of one device and runtime, or devices of one net and runtime."""
    grouped = defaultdict(list)
    for item in results:
        grouped[(item.net if by == "device" else item.device, item.runtime)].append(item)
    right = [
        (one.ms > two.ms) == (one.predicted_ms > two.predicted_ms)
        for items in grouped.values()
        for one, two in combinations(items, 2)
        if max(one.ms, two.ms) > 1.2 * min(one.ms, two.ms)
    ]
    return float(np.mean(right))


def report(label: str, results: Sequence[HeldOut]) -> None:
    """Print one row of the table."""
    errors = np.array([abs(item.predicted_ms / item.ms - 1) for item in results])
    print(
        f"{label:36} {len(results):5} {np.median(errors):7.1%} {np.mean(errors <= 0.5):8.1%} "
        f"{np.mean([item.is_in_interval for item in results]):8.1%} {ranked(results, 'device'):8.1%} "
        f"{ranked(results, 'net'):8.1%}"
    )


def leaving(rows: Sequence[PlacedRow]) -> None:
    """Print how well "at least one layer on the CPU" is predicted, with the net's family left out of the rules.

    A rule is used for a family only if the rows of another one show it, or a runtime's documentation says it.
    """
    found = [{item.operator: item.engine for item in _departures(row)} for row in rows]
    shown: dict[str, set[str]] = {rule.title: set() for rule in RULES}
    for row, operators in zip(rows, found, strict=True):
        for operator in operators if row.cpu_layers else ():
            shown[operator].add(row.net.family)
    results = [
        (
            row,
            any(
                engine == "cpu" and (operator in DOCUMENTED or shown[operator] - {row.net.family})
                for operator, engine in operators.items()
            ),
        )
        for row, operators in zip(rows, found, strict=True)
    ]
    print(f"\n{'at least one layer on the CPU':36} {'rows':>5} {'both':>6} {'table':>6} {'rules':>6} precision recall")
    parts = [row for row, _ in results if not (row.is_whole and row.cpu_layers)]
    _confusion("all rows", results)
    _confusion("without nets that left as a whole", [(row, it) for row, it in results if row in parts])
    for runtime, precision in sorted({(row.runtime, row.precision) for row in rows}):
        own = [(row, it) for row, it in results if (row.runtime, row.precision) == (runtime, precision)]
        _confusion(f"  {runtime}, {precision}", own)
    for name, families in shown.items():
        print(f"  {name}: shown by {', '.join(sorted(families)) or 'no row'}")


def _departures(row: PlacedRow) -> Sequence[Departure]:
    try:
        platform = resolve_target(row.device, row.precision, runtime=row.runtime).platform
    except EdgeOptError:
        return ()
    return () if platform is None else departures(row.profile, platform)


def _confusion(label: str, results: Sequence[tuple[PlacedRow, bool]]) -> None:
    both = sum(bool(row.cpu_layers) and said for row, said in results)
    actual, said = sum(bool(row.cpu_layers) for row, _ in results), sum(said for _, said in results)
    shares = " ".join(f"{both / count:8.2f}" if count else "       -" for count in (said, actual))
    print(f"{label:36} {len(results):5} {both:6} {actual:6} {said:6} {shares}")


def main() -> None:
    """Print every held-out error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of the published tables")
    options = parser.parse_args()
    declare_operators()
    print(f"{'':36} {'rows':>5} {'median':>7} {'in 50 %':>8} {'holds':>8} {'devices':>8} {'nets':>8}")
    for group in groups(npu_boards(options.tables)):
        if group.boards:
            precision = group.name.rpartition("-")[2]
            report(f"{precision}, family left out", without_family(group))
            report(f"{precision}, chip left out", without_chip(group))
            for seed in range(5):
                report(f"{precision}, 40 % of nets left out, seed {seed}", at_random(group, seed))
    leaving(placed_rows(options.tables))


if __name__ == "__main__":
    main()
