"""How far predictions are off, for models that the calibration never saw.

    python benchmarks/prediction_accuracy.py [--models 'NAME;...'] [--reuse-calibration FILE] [--reuse-times FILE]

Measured: CPU time of one thread, models in turn, the least of several visits, in a heap that keeps its memory. Beside
it: the prediction from calibration alone with its interval; a naive roofline on calibrated
figures. Then the same with whole families of reference models left out. Prints a table and writes
benchmarks/results/prediction_accuracy.json. About eight minutes; `--reuse-times` keeps the measured part in a file, so
that it can be run in pieces.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import save
from unseen import UNSEEN

import edge_opt as eo
from edge_opt.boards.targets import calibrated_device
from edge_opt.calibration.calibration_file import load_calibration
from edge_opt.calibration.operator_bench import kept_heap
from edge_opt.records.predictions import Calibration
from edge_opt.records.profiles import ModelProfile

BATCHES = (1, 8)
VISITS = 5
VISIT_S = 0.06
# Which references a family of unseen models resembles; these are taken away together.
HELD_OUT = {
    "no transformer": ("transformer", "windows"),
    "no mobile net": ("mobile",),
    "no residual net": ("residual",),
    "no dense or branching net": ("dense", "branches"),
    "no channels-last net": ("last-norm",),
}

Case = tuple[str, int]


def profiles(names: list[str]) -> dict[Case, ModelProfile]:
    found = {}
    for name in names:
        model = UNSEEN[name].build()
        for batch in BATCHES:
            found[name, batch] = eo.profile(model, UNSEEN[name].inputs(batch), name=name)
    return found


def measured(names: list[str], visits: int) -> dict[Case, float]:
    """Least CPU seconds of a forward; every visit runs the model once before it counts."""
    runs: dict[Case, Callable[[], object]] = {}
    for name in names:
        model = UNSEEN[name].build()
        for batch in BATCHES:
            runs[name, batch] = _call(model, UNSEEN[name].inputs(batch))
    best = dict.fromkeys(runs, float("inf"))
    gc.disable()
    with torch.inference_mode(), kept_heap(1 << 30):
        for _ in range(visits):
            for case, run in runs.items():
                start = time.process_time()
                run()
                count = max(1, round(VISIT_S / (time.process_time() - start)))
                start = time.process_time()
                for _ in range(count):
                    run()
                best[case] = min(best[case], (time.process_time() - start) / count)
    gc.enable()
    return best


def _call(model: torch.nn.Module, inputs: Any) -> Callable[[], object]:
    return (lambda: model(**inputs)) if isinstance(inputs, dict) else (lambda: model(inputs))


def without(calibration: Calibration, families: tuple[str, ...]) -> Calibration:
    """The calibration without anything that was timed inside references of these families."""
    gone = {run.name for run in calibration.references if run.family in families}
    return replace(
        calibration,
        references=tuple(run for run in calibration.references if run.name not in gone),
        samples=tuple(sample for sample in calibration.samples if sample.origin not in gone),
    )


def rows(times: dict[Case, float], models: dict[Case, ModelProfile], calibration: Calibration) -> list[dict[str, Any]]:
    device = replace(calibrated_device(calibration), overhead_s=None)
    found = []
    for case, seconds in times.items():
        prediction = eo.predict(models[case], calibration)
        roof = eo.roofline(models[case], device).total.seconds
        found.append(
            {
                "model": case[0],
                "family": UNSEEN[case[0]].family,
                "batch": case[1],
                "measured_s": seconds,
                "predicted_s": prediction.seconds,
                "low_s": prediction.low,
                "high_s": prediction.high,
                "error": prediction.seconds / seconds - 1,
                "is_covered": prediction.low <= seconds <= prediction.high,
                "outside": list(prediction.outside),
                "roofline_error": roof / seconds - 1,
            }
        )
    return found


def summary(errors: list[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {
        "models": len(sizes),
        "median_error": median(sizes),
        "within_5_percent": sum(size <= 0.05 for size in sizes) / len(sizes),
        "within_10_percent": sum(size <= 0.10 for size in sizes) / len(sizes),
        "worst_error": max(sizes),
    }


def held_out(times: dict[Case, float], models: dict[Case, ModelProfile], calibration: Calibration) -> dict[str, Any]:
    """Predictions of each family from a calibration that saw none of it."""
    found: dict[str, Any] = {}
    every: list[float] = []
    for title, families in HELD_OUT.items():
        rest = without(calibration, families)
        cases = [case for case in times if UNSEEN[case[0]].family in families]
        errors = [eo.predict(models[case], rest).seconds / times[case] - 1 for case in cases]
        if errors:
            found[title] = summary(errors)
            every += errors
    return {**found, "all of them": summary(every)} if every else {}


def show(found: list[dict[str, Any]], summaries: dict[str, dict[str, float]]) -> None:
    table = Table("model", "batch", "measured ms", "predicted ms", "error", "90 % interval", "roofline")
    for row in found:
        mark = "" if row["is_covered"] else " missed"
        table.add_row(
            row["model"],
            str(row["batch"]),
            f"{row['measured_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['error']:+.1%}",
            f"{row['low_s'] * 1e3:.1f} to {row['high_s'] * 1e3:.1f}{mark}",
            f"{row['roofline_error']:+.1%}",
        )
    console = Console(width=130)
    console.print(table)
    for title, figures in summaries.items():
        console.print(
            f"{title}: median {figures['median_error']:.1%}, within 5 % {figures['within_5_percent']:.0%}, "
            f"within 10 % {figures['within_10_percent']:.0%}, worst {figures['worst_error']:.1%} "
            f"({figures['models']} cases)",
            highlight=False,
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure, predict, compare, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="", help="names from benchmarks/unseen.py, separated by semicolons; all of them if empty"
    )
    parser.add_argument("--reuse-calibration", type=Path, help="a calibration file; made there if it does not exist")
    parser.add_argument("--reuse-times", type=Path, help="measured seconds; added to if it exists")
    parser.add_argument("--visits", type=int, default=VISITS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    names = [name.strip() for name in options.models.split(";") if name.strip()] or list(UNSEEN)
    path = options.reuse_calibration
    if path is not None and path.exists():
        calibration = load_calibration(path)
    else:
        calibration = eo.calibrate(threads=1, path=path or Path("benchmarks/results/host-calibration.json"))
    kept: dict[str, Any] = {"measured": {}}
    if options.reuse_times is not None and options.reuse_times.exists():
        kept = json.loads(options.reuse_times.read_text(encoding="utf-8"))
    models = profiles(names)
    missing = [name for name in names if f"{name}|1" not in kept["measured"]]
    if missing:
        kept["measured"] |= {f"{name}|{batch}": s for (name, batch), s in measured(missing, options.visits).items()}
        if options.reuse_times is not None:
            options.reuse_times.write_text(json.dumps(kept), encoding="utf-8")
    times = {case: kept["measured"][f"{case[0]}|{case[1]}"] for case in models}
    found = rows(times, models, calibration)
    summaries = {
        "predicted": summary([row["error"] for row in found]),
        "naive roofline": summary([row["roofline_error"] for row in found]),
        **held_out(times, models, calibration),
    }
    show(found, summaries)
    coverage = sum(row["is_covered"] for row in found) / len(found)
    print(f"90 % intervals hold {coverage:.0%} of the measured times")
    facts = {"samples": len(calibration.samples), "calibration_cpu_seconds": calibration.cpu_seconds}
    saved = save("prediction_accuracy", found, summaries=summaries, coverage=coverage, calibration=facts)
    print(f"saved to {saved}", file=sys.stderr)


if __name__ == "__main__":
    main()
