"""Several runs side by side: what each found, and what was different between one and the next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edge_opt import units
from edge_opt._support.extras import written_with
from edge_opt.errors import InvalidInput
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SHARES, SweepResult
from edge_opt.report.figures import axes_data
from edge_opt.report.page_data import is_disturbed
from edge_opt.report.sweep_files import frontier_keys, sweep_rows

FORMAT = "edge_opt.runs"
SCHEMA_VERSION = 1
# Values that differ from run to run although nobody chose them.
_NOT_CHOSEN = ("config.output_dir", "machine.load_1min", "machine.python", "machine.torch")
_DESCRIBED = ("config", "versions", "machine", "data")


@dataclass(frozen=True, slots=True)
class Run:
    """The contents of one folder or file; None for a missing part."""

    name: str
    source: Path
    page: Path | None
    profile: ModelProfile | None
    sweep: SweepResult | None
    reproducibility: Mapping[str, Any] | None

    @property
    def written(self) -> datetime:
        """When its results were written."""
        files = [self.source] if self.source.is_file() else [*self.source.glob("*.json")]
        return datetime.fromtimestamp(max(file.stat().st_mtime for file in files), tz=timezone.utc)

    @property
    def machine(self) -> str | None:
        """The processor it was measured on; None if nothing was measured or it is not recorded."""
        if self.profile is not None and self.profile.measurement is not None:
            return self.profile.measurement.environment.cpu
        machine = (self.reproducibility or {}).get("machine")
        return str(machine["cpu"]) if isinstance(machine, Mapping) and machine.get("cpu") else None


def runs_data(runs: Sequence[Run], folder: Path, title: str | None = None) -> dict[str, Any]:
    """Return what the page over several runs shows; links are relative to `folder`, where it will stand.

    The runs stay in the order given: each is compared with the one before it.
    """
    from edge_opt import __version__

    if not runs:
        raise InvalidInput("there is no run to show; name folders of runs, or profiles and sweeps saved as .json")
    first, *others = [_facts(run) for run in runs]
    # Figures of two metrics have no common axis.
    metric = next((run.sweep.metric for run in runs if run.sweep), None)
    drawn = [run for run in runs if run.sweep and run.sweep.metric == metric]
    sweeps = [run.sweep for run in drawn if run.sweep]
    rows = [row for sweep in sweeps for row in sweep_rows(sweep)]
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "edge_opt": __version__,
        "title": title or f"{len(runs)} runs",
        "verdict": _verdict(runs),
        "runs": [_row(run, folder) for run in runs],
        "metric": None
        if metric is None
        else {"title": "Accuracy" if metric == "accuracy" else metric, "is_share": metric in SHARES},
        "points": [_points(run) for run in drawn],
        "axes": axes_data(sweeps[0], rows) if sweeps else [],
        "changes": [_change(before, after) for before, after in pairwise(runs)],
        "same": [[name, value] for name, value in first.items() if all(it.get(name) == value for it in others)],
        "written": written_with(),
    }


# The columns of a run's line: the key, and where the value is. A run without the part has None.
_OF_BEST = {
    "score": "accuracy", "score_low": "accuracy_low", "score_high": "accuracy_high", "best_s": "ranked_latency_s",
    "best_low_s": "ranked_low_s", "best_high_s": "ranked_high_s", "size_bytes": "size_bytes",
}  # fmt: skip
_OF_SPEEDUP = {"speedup": "whole.ratio", "speedup_low": "whole.low", "speedup_high": "whole.high"}
_OF_PROFILE = {"macs": "totals.macs", "params": "totals.params", "peak_bytes": "peak.live_bytes"}


def _row(run: Run, folder: Path) -> dict[str, Any]:
    sweep, profile = run.sweep, run.profile
    trial = sweep.trial(sweep.best) if sweep and sweep.best else None
    best, speedup = trial.metrics if trial else None, sweep.speedup if sweep else None
    measured = profile.measurement if profile else None

    def values(record: object, paths: Mapping[str, str]) -> dict[str, Any]:
        return {key: None if record is None else attrgetter(path)(record) for key, path in paths.items()}

    return {
        "name": run.name,
        # "./" keeps a folder called `javascript:…` a folder.
        "link": None if run.page is None else "./" + quote(os.path.relpath(run.page, folder).replace(os.sep, "/")),
        "written": f"{run.written:%Y-%m-%d %H:%M}",
        "model": profile.name if profile else sweep.name if sweep else "",
        "best": trial.candidate.label if trial else None,
        "metric": sweep.metric if sweep else None,
        "is_share": sweep is not None and sweep.metric in SHARES,
        **values(best, _OF_BEST),
        "is_disturbed": best is not None and best.is_disturbed,
        **values(speedup, _OF_SPEEDUP),
        "accepted": len(sweep.accepted) if sweep else None,
        "tried": len(sweep.trials) if sweep else None,
        "failed": len(sweep.failed) if sweep else None,
        **values(profile, _OF_PROFILE),
        "latency_s": measured.latency.median_s if measured else None,
        "is_noisy": measured is not None and is_disturbed(measured),
        "machine": run.machine,
    }


def _points(run: Run) -> dict[str, Any]:
    assert run.sweep is not None
    labels = (trial.candidate.label for trial in run.sweep.trials)
    rows = [{**row, "label": label} for row, label in zip(sweep_rows(run.sweep), labels, strict=True)]
    done = [row for row in rows if row["status"] == "done"]
    return {"name": run.name, "rows": done, "best": run.sweep.best, "frontier": [*frontier_keys(run.sweep, "latency")]}


def _change(before: Run, after: Run) -> dict[str, Any]:
    """Return what is different, setting by setting: name, before, after; a dash where one of them has none."""
    old, new = _facts(before), _facts(after)
    names = [*new, *(name for name in old if name not in new)]
    items = [
        [name, old.get(name, units.DASH), new.get(name, units.DASH)] for name in names if old.get(name) != new.get(name)
    ]
    return {"before": before.name, "after": after.name, "items": items}


def _facts(run: Run) -> dict[str, str]:
    """Return what a run was made with, and what its model counts, as text that can be compared."""
    profile, counts = run.profile, {}
    if profile is not None:
        counts = {
            "model": profile.name,
            "input": ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes),
            "MACs": units.count(profile.totals.macs),
            "parameters": units.count(profile.totals.params),
            "peak activations": units.size(profile.peak.live_bytes),
        }
    described = {name: (run.reproducibility or {}).get(name) for name in _DESCRIBED}
    return counts | {name.removeprefix("config."): text for name, text in _flat(described) if name not in _NOT_CHOSEN}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every single value under its joined name.

    >>> list(_flat({"config": {"epochs": 3, "model": {"width": 8}}}))
    [('config.epochs', '3'), ('config.model.width', '8')]
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        yield name, ", ".join(map(str, value)) or "none"
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _verdict(runs: Sequence[Run]) -> list[str]:
    machines = sorted({run.machine for run in runs if run.machine})
    timed = [run for run in runs if run.sweep or (run.profile and run.profile.measurement)]
    sentences = []
    if len(machines) > 1:
        sentences.append(
            f"The runs were timed on {len(machines)} machines ({', '.join(machines)}): their times cannot be compared."
        )
    elif len(timed) > 1:
        sentences.append(
            "The runs were timed at different moments. Speedups inside a run are from interleaved measurements; small "
            "differences between runs may be drift of the machine."
        )
    empty = [run.name for run in runs if run.sweep and not run.sweep.accepted]
    if empty:
        sentences.append(f"Nothing was accepted in {', '.join(empty)}.")
    return sentences
