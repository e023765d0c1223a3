"""A conversion as text for people, and as a document for machines."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from edge_opt import units
from edge_opt.records import Agreement, Converted
from edge_opt.report.text import printable


def conversion_text(done: Converted) -> str:
    """What was asked, what runs, layer by layer, agreement, size and remarks.

    Layers that run in what was asked are counted; the others stand one by one with their reason.
    """
    kept = done.kept_layers
    rows = [(layer.path or "(the model itself)", layer.op, layer.precision, layer.reason) for layer in kept]
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(3)]
    lines = [
        f"{done.precision} on {done.runtime}: runs in {done.effective_precision}, "
        f"{len(done.layers) - len(kept)} of {len(done.layers)} layers as asked",
        *(
            "  "
            + "  ".join([*(printable(text).ljust(width) for text, width in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ),
        agreement_text(done.agreement),
        f"size: {units.size(done.size_bytes)}, {units.size(done.original_bytes)} before "
        f"({done.size_bytes / done.original_bytes * 100:.0f} %)"
        if done.original_bytes
        else f"size: {units.size(done.size_bytes)}",
        *(f"note: {remark}" for remark in done.remarks),
    ]
    return "\n".join(lines)


def agreement_text(found: Agreement) -> str:
    """How far two models agree, in one line."""
    top1 = "" if found.top1 is None else f"same top-1 for {units.percent(found.top1)}, "
    relative = (
        "" if found.relative_difference is None else f" ({units.percent(found.relative_difference)} of the mean output)"
    )
    return (
        f"agreement on {found.samples} samples of {found.source}: {top1}largest difference {found.max_difference:.3g}, "
        f"mean {found.mean_difference:.3g}{relative}"
    )


def conversion_document(done: Converted) -> dict[str, Any]:
    """Everything but the module, as plain values."""
    return {field.name: _plain(getattr(done, field.name)) for field in fields(done) if field.name != "model"}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
