"""calibrate(): this machine measured, operator by operator, into one file."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from edge_opt.devices.calibration.alone import rounds, undisturbed
from edge_opt.devices.calibration.figures import bandwidths, fresh_outputs, peaks
from edge_opt.devices.calibration.heap import kept_heap
from edge_opt.devices.calibration.inplace import Visit, closed, operator_samples, visit_reference
from edge_opt.devices.calibration.operands import Runnable
from edge_opt.devices.calibration.overheads import measured_overheads
from edge_opt.devices.calibration.plan import is_warm, plan
from edge_opt.devices.calibration.references import REFERENCES
from edge_opt.devices.calibration.validation import validated
from edge_opt.devices.calibration_files import host_file, save_calibration
from edge_opt.errors import InvalidInput
from edge_opt.measure.environment import read_environment
from edge_opt.records import Calibration, OperatorSample

MOST_SECONDS = 120.0
_ROUNDS = 5
_PASSES = 2
_VISITS = 2
_GROUP = 40
_SMALL_BYTES = 4 << 20
_HOLE_BYTES = 1 << 30
_PLANNED = 1400
_PLANNED_PER_SECOND = 20
# Of the time: when to start no other reference model, and when to stop timing operators alone.
_REFERENCE_SHARE = 0.72
_ALONE_SHARE = 0.93

Progress = Callable[[float, str], None]


def calibrate(
    *,
    threads: int | None = None,
    seconds: float = 110.0,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Calibration:
    """Measure this machine for predictions, in at most `seconds` of CPU time, and save it.

    Operators are timed alone and inside reference models, with `threads` threads (torch's own number unless given).
    Without `path` the file becomes the host's own, which `target="host"` finds. Nothing else should run meanwhile.
    """
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 1 <= seconds <= MOST_SECONDS:
        raise InvalidInput(f"seconds is {seconds!r}; it must be a number from 1 to {MOST_SECONDS:g}")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise InvalidInput(f"threads is {threads!r}; it must be a whole number of at least 1")
    target = Path(path) if path is not None else host_file()
    with undisturbed(threads), _shown(progress) as tell:
        calibration = _measured(seconds, tell)
    save_calibration(calibration, target)
    return calibration


def _measured(seconds: float, tell: Progress) -> Calibration:
    start = time.process_time()

    def spent() -> float:
        return (time.process_time() - start) / seconds

    machine = read_environment()
    tell(0.0, "memory and peaks")
    overheads = measured_overheads()
    found_bandwidths, found_peaks, found_fresh = bandwidths(), peaks(), fresh_outputs()
    # Models first: timing hundreds of operators alone leaves the heap in pieces, some of them cold.
    with kept_heap(min(_HOLE_BYTES, machine.memory_bytes // 8)):
        visits = _visited_references(spent, tell)
    alone = _timed_alone(seconds, spent, tell)
    runs = [visit.run() for visit in visits]
    in_place = [sample for visit in visits for sample in operator_samples(visit)]
    tell(_ALONE_SHARE, "cross-validation")
    measured = Calibration(
        name=platform.node() or "host",
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        machine=machine,
        versions=(("torch", str(torch.__version__)), ("python", platform.python_version())),
        cpu_seconds=0.0,
        bandwidths=found_bandwidths,
        peaks=found_peaks,
        overhead_per_operator_s=overheads.operator_s,
        overhead_per_module_s=overheads.module_s,
        fresh_outputs=found_fresh,
        references=tuple(runs),
        samples=(*alone, *closed(in_place, runs, overheads)),
        whole_deviation=0.0,
        deviations=(),
    )
    return replace(validated(measured), cpu_seconds=time.process_time() - start)


def _timed_alone(seconds: float, spent: Callable[[], float], tell: Progress) -> list[OperatorSample]:
    planned = plan(count=min(_PLANNED, round(seconds * _PLANNED_PER_SECOND)))
    samples: list[OperatorSample] = []
    for first in range(0, len(planned), _GROUP):
        if samples and spent() > _ALONE_SHARE:
            break
        tell(spent(), f"operators alone: {len(samples)}")
        group = [Runnable(signature, is_warm(signature)) for signature in planned[first : first + _GROUP]]
        # What a round moves lies between two uses of the same weights.
        distance = sum(runnable.nbytes for runnable in group)
        # Only short operators notice whether their code is in the cache.
        rehearsals = [
            Runnable(item.signature, is_warm(item.signature)) if item.nbytes < _SMALL_BYTES else None for item in group
        ]
        for runnable, times in zip(group, rounds(group, _ROUNDS, rehearsals), strict=True):
            distances = tuple(0 if warm else distance for warm in is_warm(runnable.signature))
            samples.append(OperatorSample(runnable.signature, distances, min(times)))
    return samples


def _visited_references(spent: Callable[[], float], tell: Progress) -> list[Visit]:
    """Every reference model, visited twice with all the others in between: few disturbances last that long."""
    found: dict[tuple[str, int], Visit] = {}
    for turn in range(_VISITS):
        # Small batches first: a slow machine, or a short calibration, then still sees every family.
        for place in (0, 1):
            for reference in REFERENCES:
                if found and spent() > _REFERENCE_SHARE:
                    return list(found.values())
                tell(spent(), f"inside models, round {turn + 1}: {reference.name}")
                batch = reference.batches[place]
                visit = visit_reference(reference, batch, _PASSES)
                key = (reference.name, batch)
                found[key] = found[key] | visit if key in found else visit
    return list(found.values())


@contextmanager
def _shown(wanted: bool) -> Iterator[Progress]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield lambda share, what: None
        return
    columns = (TextColumn("calibrating"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Redrawn only between measurements: a thread that draws would be measured, too.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def tell(share: float, what: str) -> None:
            bar.update(task, completed=share, description=what, refresh=True)

        yield tell
