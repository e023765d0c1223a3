"""Sensitivity as a table and in one sentence."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from edge_opt import units
from edge_opt.records import LayerSensitivity, Sensitivity
from edge_opt.report.grid import Cell, Strip, grid
from edge_opt.report.sensitivities import change_of
from edge_opt.report.text import printable

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 110


def sensitivity_dataframe(found: Sensitivity) -> pd.DataFrame:
    """One row per layer and change, in the model's order."""
    import pandas as pd

    names = [field.name for field in fields(LayerSensitivity)]
    return pd.DataFrame([asdict(row) for row in found.rows], columns=names)


def sensitivity_text(found: Sensitivity) -> str:
    """The table, what hurts most on top, and which layers to spare."""
    rows = found.worst_first()

    def points(row: LayerSensitivity) -> str:
        return f"{row.score_change * 100:+.2f}" if found.metric == "accuracy" else f"{row.score_change:+.4g}"

    strips = [
        Strip("Layer", tuple(Cell(printable(row.path)) for row in rows), "left", floor=12),
        Strip("Kind", tuple(Cell(row.kind) for row in rows), "left", rank=2),
        Strip("Change", tuple(Cell(change_of(row)) for row in rows), "left"),
        Strip(_unit(found.metric), tuple(Cell(points(row)) for row in rows)),
        Strip("Output error", tuple(Cell(f"{row.output_error:.2g}") for row in rows)),
        Strip("Other answers", tuple(Cell(_share(row.disagreement)) for row in rows), rank=1),
    ]
    baseline = units.percent(found.baseline) if found.metric == "accuracy" else f"{found.baseline:.4g}"
    lines = [f"{found.metric} of the whole model: {baseline} on {found.samples} samples; quantization is simulated"]
    if rows:
        lines += [line.plain.rstrip() for line in grid(strips, WIDTH)]
    lines.append(spare_sentence(found))
    by_reason: dict[str, list[str]] = {}
    for path, reason in found.unchanged:
        by_reason.setdefault(reason, []).append(printable(path))
    return "\n".join([*lines, *(f"not changed: {', '.join(paths)}: {reason}" for reason, paths in by_reason.items())])


def spare_sentence(found: Sensitivity) -> str:
    """Which layers to leave alone, and what they would cost."""
    parts = []
    for change, verb in (("prune", "pruned"), ("quantize", "quantized")):
        spared = found.spare(change)  # type: ignore[arg-type]
        if spared:
            parts.append(f"when {verb}: {', '.join(map(printable, spared))}")
    return f"spare these, they lose most {'; '.join(parts)}" if parts else "no layer loses anything on these samples"


def _unit(metric: str) -> str:
    return "Points" if metric == "accuracy" else printable(metric)


def _share(value: float | None) -> str:
    return units.DASH if value is None else units.percent(value)
