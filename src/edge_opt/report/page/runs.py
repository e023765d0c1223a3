"""Several runs side by side: what each found, and what was different between one and the next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edge_opt import units
from edge_opt._support.extras import written_with
from edge_opt.errors import InvalidInput
from edge_opt.records.profiles import ModelProfile
from edge_opt.records.sweeps import SHARES, SweepResult, TrialMetrics
from edge_opt.report.figures import axes_of
from edge_opt.report.page.payload import is_disturbed
from edge_opt.report.sweep_files import frontier_keys, sweep_rows

FORMAT = "edge_opt.runs"
SCHEMA_VERSION = 1
# What differs from run to run without being a choice of anybody.
_NOT_CHOSEN = ("config.output_dir", "machine.load_1min", "machine.python", "machine.torch")
_DESCRIBED = ("config", "versions", "machine", "data")


@dataclass(frozen=True, slots=True)
class Run:
    """What one folder or file holds; None for a part that it lacks."""

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
        """The processor it was measured on; None where nothing was, or nobody wrote it down."""
        if self.profile is not None and self.profile.measurement is not None:
            return self.profile.measurement.environment.cpu
        machine = (self.reproducibility or {}).get("machine")
        return str(machine["cpu"]) if isinstance(machine, Mapping) and machine.get("cpu") else None


def runs_payload(runs: Sequence[Run], folder: Path, title: str | None = None) -> dict[str, Any]:
    """What the page over several runs shows; links are relative to `folder`, where it will stand.

    The runs stay in the order given: each is compared with the one before it.
    """
    from edge_opt import __version__

    if not runs:
        raise InvalidInput("there is no run to show; name folders of runs, or profiles and sweeps saved as .json")
    # Figures of two metrics have no common axis.
    metric = next((run.sweep.metric for run in runs if run.sweep), None)
    drawn = [run for run in runs if run.sweep and run.sweep.metric == metric]
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "edge_opt": __version__,
        "title": title or f"{len(runs)} runs",
        "verdict": _verdict(runs),
        "runs": [_row(run, folder) for run in runs],
        "metric": None if metric is None else {"title": _titled(metric), "is_share": metric in SHARES},
        "points": [_points(run) for run in drawn],
        "axes": _axes(drawn),
        "changes": [_change(before, after) for before, after in pairwise(runs)],
        "same": _same(runs),
        "written": written_with(),
    }


def _titled(metric: str) -> str:
    return "Accuracy" if metric == "accuracy" else metric


def _row(run: Run, folder: Path) -> dict[str, Any]:
    best = run.sweep.trial(run.sweep.best) if run.sweep and run.sweep.best else None
    return {
        "name": run.name,
        # "./" keeps a folder called `javascript:…` a folder.
        "link": None if run.page is None else "./" + quote(os.path.relpath(run.page, folder).replace(os.sep, "/")),
        "written": f"{run.written:%Y-%m-%d %H:%M}",
        "model": run.profile.name if run.profile else run.sweep.name if run.sweep else "",
        "best": best.candidate.label if best else None,
        "metric": run.sweep.metric if run.sweep else None,
        "is_share": run.sweep is not None and run.sweep.metric in SHARES,
        **_scored(best.metrics if best else None),
        **_factor(run.sweep),
        **_tried(run.sweep),
        **_counted(run.profile),
        "machine": run.machine,
    }


def _scored(best: TrialMetrics | None) -> dict[str, Any]:
    if best is None:
        names = ("score", "score_low", "score_high", "best_s", "best_low_s", "best_high_s", "size_bytes")
        return {**dict.fromkeys(names), "is_disturbed": False}
    is_deployed = best.deploy_latency_s is not None
    return {
        "score": best.accuracy,
        "score_low": best.accuracy_low,
        "score_high": best.accuracy_high,
        "best_s": best.ranked_latency_s,
        "best_low_s": best.deploy_latency_low_s if is_deployed else best.latency_low_s,
        "best_high_s": best.deploy_latency_high_s if is_deployed else best.latency_high_s,
        "size_bytes": best.size_bytes,
        "is_disturbed": best.is_disturbed,
    }


def _factor(sweep: SweepResult | None) -> dict[str, float | None]:
    whole = sweep.speedup.whole if sweep and sweep.speedup else None
    return {
        "speedup": whole.ratio if whole else None,
        "speedup_low": whole.low if whole else None,
        "speedup_high": whole.high if whole else None,
    }


def _tried(sweep: SweepResult | None) -> dict[str, int | None]:
    return {
        "accepted": len(sweep.accepted) if sweep else None,
        "tried": len(sweep.trials) if sweep else None,
        "failed": len(sweep.failed) if sweep else None,
    }


def _counted(profile: ModelProfile | None) -> dict[str, Any]:
    if profile is None:
        return {**dict.fromkeys(("macs", "params", "peak_bytes", "latency_s")), "is_noisy": False}
    measured = profile.measurement
    return {
        "macs": profile.totals.macs,
        "params": profile.totals.params,
        "peak_bytes": profile.peak.live_bytes,
        "latency_s": measured.latency.median_s if measured else None,
        "is_noisy": measured is not None and is_disturbed(measured),
    }


def _points(run: Run) -> dict[str, Any]:
    assert run.sweep is not None
    labels = (trial.candidate.label for trial in run.sweep.trials)
    rows = [{**row, "label": label} for row, label in zip(sweep_rows(run.sweep), labels, strict=True)]
    done = [row for row in rows if row["status"] == "done"]
    return {"name": run.name, "rows": done, "best": run.sweep.best, "frontier": [*frontier_keys(run.sweep, "latency")]}


def _axes(drawn: Sequence[Run]) -> list[dict[str, Any]]:
    sweeps = [run.sweep for run in drawn if run.sweep]
    rows = [row for sweep in sweeps for row in sweep_rows(sweep)]
    return [
        {
            "name": axis.name,
            "title": axis.title,
            "unit": axis.unit,
            "is_better_high": axis.is_better_high,
            "is_share": axis.name == "accuracy" and sweeps[0].metric in SHARES,
            "is_log": axis.is_wide(rows),
        }
        for axis in (axes_of(sweeps[0]) if sweeps else ())
    ]


def _change(before: Run, after: Run) -> dict[str, Any]:
    """What is different, setting by setting: name, before, after; a dash where one of them has none."""
    old, new = _facts(before), _facts(after)
    names = [*new, *(name for name in old if name not in new)]
    items = [
        [name, old.get(name, units.DASH), new.get(name, units.DASH)] for name in names if old.get(name) != new.get(name)
    ]
    return {"before": before.name, "after": after.name, "items": items}


def _same(runs: Sequence[Run]) -> list[list[str]]:
    """What all the runs have in common, by name."""
    first, *others = [_facts(run) for run in runs]
    return [[name, value] for name, value in first.items() if all(other.get(name) == value for other in others)]


def _facts(run: Run) -> dict[str, str]:
    """What a run was made with, and what its model counts, as text that can be compared."""
    profile, found = run.profile, {}
    if profile is not None:
        found = {
            "model": profile.name,
            "input": ", ".join(units.shape(shape) for shape in profile.trace.modules[0].input_shapes),
            "MACs": units.count(profile.totals.macs),
            "parameters": units.count(profile.totals.params),
            "peak activations": units.size(profile.peak.live_bytes),
        }
    described = {name: (run.reproducibility or {}).get(name) for name in _DESCRIBED}
    return found | {name.removeprefix("config."): text for name, text in _flat(described) if name not in _NOT_CHOSEN}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every single value under its joined name.

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
    found = []
    if len(machines) > 1:
        found.append(
            f"The runs were timed on {len(machines)} machines ({', '.join(machines)}): their times do not belong in "
            "one column."
        )
    elif len(timed) > 1:
        found.append(
            "Each run was timed at another moment. Inside a run, times were compared in turns and may be divided. "
            "Between runs, a difference smaller than a machine's drift says nothing."
        )
    scored = [run for run in runs if run.sweep]
    empty = [run.name for run in scored if run.sweep and not run.sweep.accepted]
    if empty:
        found.append(f"Nothing was accepted in {', '.join(empty)}.")
    return found
