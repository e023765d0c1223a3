"""Predictions for NPUs against Qualcomm's published times: nets held out by family, then devices by chip.

    python benchmarks/npu.py ../shared/published

A family is left out of every device, and each of its nets is predicted on all of them. Rankings are of pairs whose
published times differ by more than 20 %.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "platform_fit"))

from board_priors import fit_prior
from fit_platforms import Group, declare_operators, groups
from published_tables import Board

from edge_opt.boards.class_costs import Costs, Spread
from edge_opt.boards.platform_file import platform_family


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
    results = []
    spread = platform_family(group.name).spread
    for family in sorted({net.family for board in group.boards for net, _ in board.times}):
        rows = [_rows(board, group, family) for board in group.boards]
        _, costs = fit_prior(rows)
        for board, own in zip(group.boards, costs, strict=True):
            results += _predicted(board, group, own, spread, lambda name, wanted=family: name == wanted)
    return results


def without_chip(group: Group) -> list[HeldOut]:
    """Every row, predicted from the device of another chip whose NPU is closest: the median of all devices' costs."""
    results = []
    spread = platform_family(group.name).typed_spread
    for runtime in sorted({board.runtime for board in group.boards}):
        boards = [board for board in group.boards if board.runtime == runtime]
        for chip in sorted({board.soc for board in boards}):
            others = [board for board in boards if board.soc != chip]
            if len(others) < 3:
                continue
            prior, _ = fit_prior([_rows(board, group) for board in others])
            for board in boards:
                if board.soc == chip:
                    results += _predicted(board, group, prior, spread, lambda name: True)
    return results


def _rows(board: Board, group: Group, left_out: str = "") -> tuple[np.ndarray, np.ndarray]:
    kept = [(net.workload.quantities(group.conventions), time) for net, time in board.times if net.family != left_out]
    return np.array([row for row, _ in kept]), np.array([time for _, time in kept])


def _predicted(
    board: Board, group: Group, costs: Costs, spread: Spread, is_asked: Callable[[str], bool]
) -> Iterable[HeldOut]:
    for net, time in board.times:
        if is_asked(net.family):
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


def main() -> None:
    """Print every held-out error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of the published tables")
    options = parser.parse_args()
    declare_operators()
    from npu_table import npu_boards

    print(f"{'':36} {'rows':>5} {'median':>7} {'in 50 %':>8} {'holds':>8} {'devices':>8} {'nets':>8}")
    for group in groups(npu_boards(options.tables)):
        if group.boards:
            precision = group.name.rpartition("-")[2]
            report(f"{precision}, family left out", without_family(group))
            report(f"{precision}, chip left out", without_chip(group))


if __name__ == "__main__":
    main()
