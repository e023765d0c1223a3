"""Figure data of a sweep: candidates as points, the frontier of any two figures, and means by precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from edge_opt.records import SweepResult
from edge_opt.report.sweeps import frontier_keys, sweep_rows


@dataclass(frozen=True, slots=True)
class Axis:
    """One figure of a candidate. `low` and `high` name the columns of its interval, "" where there is none."""

    name: str
    title: str
    unit: str
    is_better_high: bool
    low: str = ""
    high: str = ""


AXES = (
    Axis("accuracy", "Accuracy", "", True, "accuracy_ci95_low", "accuracy_ci95_high"),
    Axis("latency_ms", "Latency", "ms", False, "latency_ci95_low_ms", "latency_ci95_high_ms"),
    Axis("latency_p95_ms", "Latency, 95th percentile", "ms", False),
    Axis("throughput_sps", "Throughput", "samples/s", True),
    Axis("memory_mb", "Peak memory", "MiB", False),
    Axis("size_mb", "Size on disk", "MiB", False),
    Axis("energy_j", "Energy", "J", False),
    Axis("macs", "MACs", "", False),
    Axis("params", "Parameters", "", False),
)
_RECORDED = {"latency_ms": "latency", "energy_j": "energy"}


def axis_named(name: str) -> Axis:
    """The axis of that name."""
    return next(axis for axis in AXES if axis.name == name)


def frontier(rows: Sequence[Mapping[str, Any]], x: Axis, y: Axis) -> list[int]:
    """Positions of the rows that no other beats in both figures, by x; rows that lack one are left out.

    >>> rows = [{"accuracy": a, "latency_ms": t} for a, t in ((0.9, 5), (0.8, 6), (0.7, 2))]
    >>> frontier(rows, axis_named("latency_ms"), axis_named("accuracy"))
    [2, 0]
    """
    known = [index for index, row in enumerate(rows) if row[x.name] is not None and row[y.name] is not None]

    def cost(index: int) -> tuple[float, float]:
        across, up = rows[index][x.name], rows[index][y.name]
        return (-across if x.is_better_high else across, -up if y.is_better_high else up)

    kept: list[int] = []
    for index in sorted(known, key=cost):
        # Twins are both kept: neither beats the other.
        if not kept or cost(index)[1] < cost(kept[-1])[1] or cost(index) == cost(kept[-1]):
            kept.append(index)
    return sorted(kept, key=lambda index: (rows[index][x.name], rows[index][y.name]))


def frontiers(result: SweepResult) -> dict[str, list[int]]:
    """The frontier of every two axes, as positions among the trials, under "x|y" in the order of AXES.

    The sweep's own frontiers, which may allow for intervals, where it has them; else the accepted candidates that
    none of the accepted beats in both.
    """
    rows = sweep_rows(result)
    place = {row["key"]: index for index, row in enumerate(rows)}
    accepted = [index for index, row in enumerate(rows) if row["accepted"]]
    found = {}
    for first, second in combinations(AXES, 2):
        recorded: Iterable[str] = ()
        if first.name == "accuracy" and second.name in _RECORDED:
            recorded = frontier_keys(result, _RECORDED[second.name])
        kept = [place[key] for key in recorded if key in place and rows[place[key]][second.name] is not None]
        if not kept:
            kept = [accepted[index] for index in frontier([rows[index] for index in accepted], first, second)]
        found[f"{first.name}|{second.name}"] = sorted(kept, key=lambda index, by=second.name: rows[index][by])  # type: ignore[misc]
    return found


_AVERAGED = ("accuracy", "latency_ms", "memory_mb", "size_mb", "energy_j")


@dataclass(frozen=True, slots=True)
class PrecisionMeans:
    """Candidates of one precision on one runtime that ran, on average; None where no figure is known."""

    precision: str
    runtime: str
    candidates: int
    accepted: int
    failed: int
    accuracy: float | None
    latency_ms: float | None
    memory_mb: float | None
    size_mb: float | None
    energy_j: float | None


def precision_means(result: SweepResult) -> list[PrecisionMeans]:
    """One row per precision and runtime, fastest first, those without any figure last.

    Runtimes stay apart: a mean over them would credit a precision with what its runtime did.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sweep_rows(result):
        groups.setdefault((row["precision"], row["runtime"]), []).append(row)
    found = [
        PrecisionMeans(
            precision,
            runtime,
            len(rows),
            sum(row["accepted"] for row in rows),
            sum(row["status"] == "failed" for row in rows),
            *(_mean(row[name] for row in rows) for name in _AVERAGED),
        )
        for (precision, runtime), rows in groups.items()
    ]
    return sorted(found, key=lambda means: math.inf if means.latency_ms is None else means.latency_ms)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
