"""Targets side by side: one row per target, what the model needs, and what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from edge_opt import units
from edge_opt.records import TargetComparison, TargetFit
from edge_opt.report.grid import Cell, Strip, grid
from edge_opt.report.terminal import drawn, print_sentences, rendered
from edge_opt.report.text import printable

if TYPE_CHECKING:
    import pandas as pd

_UNKNOWN = "unknown"


def render(found: TargetComparison, color: bool = False, width: int | None = None) -> str:
    """The comparison as text, as `show` prints it; without a width, for 100 columns."""
    return rendered(lambda console: show(found, console), color=color, width=width)


def show(found: TargetComparison, console: Console) -> None:
    """Print the comparison: one row per target, then what the model needs, then what to know about each figure."""
    drawn(console, lambda: _print(found, console))


def _print(found: TargetComparison, console: Console) -> None:
    for line in grid(list(_strips(found)), console.width):
        console.print(line, soft_wrap=True)
    console.print()
    print_sentences(console, [("Model", _model(found)), ("Memory", _memory(found)), *_notes(found)])


def _strips(found: TargetComparison) -> Iterator[Strip]:
    def column(header: str, text: Callable[[TargetFit], str], rank: int = 0) -> Strip:
        return Strip(header, tuple(Cell(text(fit)) for fit in found.targets), rank=rank)

    yield Strip("Target", tuple(Cell(printable(fit.prediction.target)) for fit in found.targets), "left", floor=14)
    yield column("Fits", _fits)
    yield column("Time", _time)
    yield column("90 % interval", _interval)
    yield column("Bound by", lambda fit: fit.prediction.bound, rank=1)
    yield column("Energy", _energy)
    yield column("Batch", _batch)
    yield column("Basis", lambda fit: fit.prediction.basis, rank=2)


def _fits(fit: TargetFit) -> str:
    if fit.fits is None:
        return _UNKNOWN
    if fit.fits:
        return "yes"
    sizes = fit.fitting_ram_bytes
    return f"from {units.size(sizes[0])} on" if sizes else "no"


def _time(fit: TargetFit) -> str:
    return _UNKNOWN if fit.prediction.seconds is None else units.duration(fit.prediction.seconds)


def _interval(fit: TargetFit) -> str:
    low, high = fit.prediction.low, fit.prediction.high
    if low is None:
        return units.DASH
    return f"{units.duration(low)} {units.DASH} {'?' if high is None else units.duration(high)}"


def _energy(fit: TargetFit) -> str:
    energies = fit.prediction.energies
    return f"{units.energy(energies[0].joules)} ({energies[0].source})" if energies else _UNKNOWN


def _batch(fit: TargetFit) -> str:
    if fit.batch is None:
        return _UNKNOWN
    if not fit.batch.fits:
        return f"none: {units.size(fit.batch.shortfall_bytes or 0)} short"
    return f"≥ {fit.batch.batch}" if fit.batch.shortfall_bytes is None else str(fit.batch.batch)


def _model(found: TargetComparison) -> str:
    return f"{found.model} on {', '.join(map(units.shape, found.inputs))} in {found.precision}"


def _memory(found: TargetComparison) -> str:
    need = found.memory
    buffers = f"buffers {units.size(need.buffer_bytes)}, " if need.buffer_bytes else ""
    return (
        f"{units.size(need.total_bytes)}: weights {units.size(need.weight_bytes)}, {buffers}"
        f"inputs {units.size(need.input_bytes)}, peak of activations {units.size(need.activation_bytes)}; "
        "an operating system and a runtime come on top. Fits: the smallest RAM holds it; batch: the largest that fits"
    )


def _notes(found: TargetComparison) -> Iterator[tuple[str, str]]:
    """What to know about each figure; a sentence that holds for several targets stands once, with their names."""
    said: dict[str, list[str]] = {}
    for fit in found.targets:
        for energy in fit.prediction.energies[:1]:
            said.setdefault(f"energy: {energy.note}", []).append(fit.prediction.target)
        for remark in (*fit.prediction.remarks, *fit.remarks):
            said.setdefault(remark, []).append(fit.prediction.target)
    for remark, names in said.items():
        yield ("Note", f"{', '.join(names)}: {remark}")


def dataframe(found: TargetComparison) -> pd.DataFrame:
    """One row per target; exact numbers, None where a figure is not known."""
    import pandas as pd

    return pd.DataFrame(
        {
            "target": fit.prediction.target,
            "precision": fit.prediction.precision,
            "fits": fit.fits,
            "needed_bytes": fit.needed_bytes,
            "smallest_ram_bytes": fit.ram_bytes[0] if fit.ram_bytes else None,
            "predicted_s": fit.prediction.seconds,
            "predicted_low_s": fit.prediction.low,
            "predicted_high_s": fit.prediction.high,
            "predicted_bound": fit.prediction.bound,
            "basis": fit.prediction.basis,
            "energy_j": fit.prediction.energies[0].joules if fit.prediction.energies else None,
            "energy_source": fit.prediction.energies[0].source if fit.prediction.energies else None,
            "largest_batch": fit.batch.batch if fit.batch else None,
        }
        for fit in found.targets
    )
