"""How far predictions are off, for models that the calibration never saw.

    python benchmarks/prediction_accuracy.py [--set first|second] [--load] [--runtimes] [--calibration FILE]
        [--times FILE] [--files FOLDER] [--models 'NAME;...']

There are two sets of models without a common family (benchmarks/unseen.py): methods are developed on the first, the
second is looked at once. Eager fp32 at batch 1 and 8; with --runtimes also ONNX Runtime and OpenVINO in fp32 and int8
at batch 1, from files that are made in --files when they are missing. --load keeps half a core busy meanwhile.

Measured: the least CPU time of single calls of one thread in several visits, batches in turn, in a heap that keeps its
memory, over the slowness of a reference kernel beside each visit. `--times` keeps what was measured, so that it can be
run in pieces. Prints a table and writes benchmarks/results/prediction_accuracy_SET.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import save
from unseen import SECOND, UNSEEN, Unseen

import edge_opt as eo
from edge_opt import compress
from edge_opt.boards.targets import calibrated_device
from edge_opt.calibration.calibration_file import load_calibration
from edge_opt.calibration.operator_bench import kept_heap
from edge_opt.calibration.quiet_clock import ReferenceKernel, SampleClock
from edge_opt.errors import EdgeOptError
from edge_opt.records.predictions import Calibration
from edge_opt.records.profiles import ModelProfile
from edge_opt.runtimes.export import export_quickly
from edge_opt.runtimes.model_call import model_call

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
RUNTIMES = ("onnxruntime", "openvino")
# The models of the chosen set, by name.
MODELS: dict[str, Unseen] = {}


def profiles(names: list[str]) -> dict[Case, ModelProfile]:
    found = {}
    for name in names:
        model = MODELS[name].build()
        for batch in BATCHES:
            found[name, batch] = eo.profile(model, MODELS[name].inputs(batch), name=name)
    return found


def measured(names: list[str], visits: int) -> dict[Case, float]:
    """Least CPU seconds of one call of each model, over the slowness of the machine beside each visit."""
    clock = SampleClock(1)
    kernel = ReferenceKernel(clock)
    best: dict[Case, float] = {}
    runs: dict[Case, Callable[[], object]] = {}
    gc.disable()
    with torch.inference_mode(), kept_heap(1 << 30):
        for name in names:
            model = MODELS[name].build()
            for batch in BATCHES:
                runs[name, batch] = _call(model, MODELS[name].inputs(batch))
        for _ in range(visits):
            for case, run in runs.items():
                best[case] = min(best.get(case, float("inf")), _visit(run, kernel, clock))
    gc.enable()
    return best


def _visit(run: Callable[[], object], kernel: ReferenceKernel, clock: SampleClock) -> float:
    run()
    count = max(2, min(8, round(VISIT_S / (clock.nanoseconds(run) / 1e9))))
    return kernel.quiet_round(lambda: [clock.least_s(run, count)], 1)[0][0]


def runtime_files(name: str, folder: Path) -> dict[str, Path]:
    """Return the fp32 and int8 file of a model; int8 has ranges of noise, which is enough for its time."""
    stem = re.sub(r"[^a-z0-9_]+", "_", name.lower())
    paths = {precision: folder / f"{stem}.{precision}.onnx" for precision in ("fp32", "int8")}
    if not paths["int8"].exists():
        model, inputs = MODELS[name].build(), MODELS[name].inputs(1)
        args, kwargs = ([], inputs) if isinstance(inputs, dict) else ([inputs], None)
        exported = export_quickly(model_call(model, args, kwargs), paths["fp32"])
        batch = tuple(inputs.values()) if isinstance(inputs, dict) else inputs
        compress.convert(
            model, args, "int8", "onnxruntime", kwargs=kwargs, calibration=[batch], calibration_batches=1,
            exported=exported, max_difference=True, output=folder, filename=paths["int8"].name,
        )  # fmt: skip
    return paths


def measured_runtimes(names: list[str], folder: Path, visits: int) -> dict[str, float]:
    """Least CPU seconds of a call at batch 1 by "name|runtime|precision"; what cannot be converted is left out."""
    clock = SampleClock(1)
    kernel = ReferenceKernel(clock)
    times: dict[str, float] = {}
    for name in names:
        try:
            files = runtime_files(name, folder)
        except EdgeOptError as error:
            print(f"{name}: {str(error)[:100]}", file=sys.stderr)
            continue
        inputs = MODELS[name].inputs(1)
        tensors = tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)
        with ExitStack() as stack:
            calls = {
                f"{name}|{runtime}|{precision}": stack.enter_context(
                    compress.open_runner(path, runtime, threads=1, precision=precision)
                ).bind(*tensors)
                for runtime in RUNTIMES
                for precision, path in files.items()
            }
            for _ in range(visits):
                for key, call in calls.items():
                    times[key] = min(times.get(key, float("inf")), _visit(call, kernel, clock))
    return times


def runtime_rows(
    times: dict[str, float], models: dict[Case, ModelProfile], calibration: Calibration
) -> list[dict[str, Any]]:
    rows = []
    for key, seconds in times.items():
        name, runtime, precision = key.split("|")
        if (name, 1) not in models or not any(item.runtime == runtime for item in calibration.runtimes):
            continue
        there = eo.predict(models[name, 1], calibration, precision, runtime)
        row = {"model": name, "batch": 1, "platform": f"{runtime} {precision}", "measured_s": seconds}
        row |= {"predicted_s": there.seconds, "low_s": there.low, "high_s": there.high}
        row |= {"error": there.seconds / seconds - 1, "is_covered": there.low <= seconds <= there.high}
        rows.append(row)
    return rows


@contextmanager
def half_a_core() -> Iterator[None]:
    """Keep half of one core busy by another process meanwhile."""
    program = """
import time
while True:
    end = time.process_time() + 0.01
    while time.process_time() < end:
        sum(range(1000))
    time.sleep(0.01)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield
    finally:
        process.kill()
        process.wait()


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
                "family": MODELS[case[0]].family,
                "batch": case[1],
                "platform": "torch fp32",
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
        "within_15_percent": sum(size <= 0.15 for size in sizes) / len(sizes),
        "within_20_percent": sum(size <= 0.20 for size in sizes) / len(sizes),
        "worst_error": max(sizes),
    }


def held_out(times: dict[Case, float], models: dict[Case, ModelProfile], calibration: Calibration) -> dict[str, Any]:
    """Predictions of each family from a calibration that saw none of it."""
    found: dict[str, Any] = {}
    every: list[float] = []
    for title, families in HELD_OUT.items():
        rest = without(calibration, families)
        cases = [case for case in times if MODELS[case[0]].family in families]
        errors = [eo.predict(models[case], rest).seconds / times[case] - 1 for case in cases]
        if errors:
            found[title] = summary(errors)
            every += errors
    return {**found, "all of them": summary(every)} if every else {}


def show(found: list[dict[str, Any]], summaries: dict[str, dict[str, float]]) -> None:
    table = Table("model", "platform", "batch", "measured ms", "predicted ms", "error", "90 % interval")
    for row in found:
        mark = "" if row["is_covered"] else " missed"
        table.add_row(
            row["model"],
            row["platform"],
            str(row["batch"]),
            f"{row['measured_s'] * 1e3:.1f}",
            f"{row['predicted_s'] * 1e3:.1f}",
            f"{row['error']:+.1%}",
            f"{row['low_s'] * 1e3:.1f} to {row['high_s'] * 1e3:.1f}{mark}",
        )
    console = Console(width=130)
    console.print(table)
    for title, figures in summaries.items():
        covered = f", intervals hold {figures['coverage']:.0%}" if "coverage" in figures else ""
        console.print(
            f"{title}: median {figures['median_error']:.1%}, within 5 % {figures['within_5_percent']:.0%}, "
            f"10 % {figures['within_10_percent']:.0%}, 15 % {figures['within_15_percent']:.0%}, "
            f"20 % {figures['within_20_percent']:.0%}, worst {figures['worst_error']:.1%}{covered} "
            f"({figures['models']} cases)",
            highlight=False,
        )


def _keep(times: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(times), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Measure, predict, compare, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("first", "second"), default="first", dest="which")
    parser.add_argument("--models", default="", help="names of benchmarks/unseen.py, separated by semicolons")
    parser.add_argument("--calibration", type=Path, help="a calibration file; made there if it does not exist")
    parser.add_argument("--times", type=Path, help="measured seconds; added to if it exists")
    parser.add_argument("--files", type=Path, default=Path("benchmarks/results/files"))
    parser.add_argument("--runtimes", action="store_true")
    parser.add_argument("--load", action="store_true", help="keep half a core busy while measuring")
    parser.add_argument("--visits", type=int, default=VISITS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    MODELS.update({"first": UNSEEN, "second": SECOND}[options.which])
    names = [name.strip() for name in options.models.split(";") if name.strip()] or list(MODELS)
    path = options.calibration or Path("benchmarks/results/host-calibration.json")
    with half_a_core() if options.load else nullcontext():
        if path.exists():
            calibration = load_calibration(path)
        else:
            runtimes = ["torch", *(RUNTIMES if options.runtimes else ())]
            calibration = eo.calibrate(threads=1, path=path, runtimes=runtimes, precisions=["fp32", "int8"])
        kept: dict[str, Any] = {"measured": {}, "runtimes": {}}
        if options.times is not None and options.times.exists():
            kept = json.loads(options.times.read_text(encoding="utf-8"))
        missing = [name for name in names if f"{name}|1" not in kept["measured"]]
        for name in missing:
            kept["measured"] |= {f"{name}|{batch}": s for (_, batch), s in measured([name], options.visits).items()}
            _keep(kept, options.times)
        if options.runtimes:
            options.files.mkdir(parents=True, exist_ok=True)
            missing = [name for name in names if f"{name}|onnxruntime|fp32" not in kept["runtimes"]]
            for name in missing:
                kept["runtimes"] |= measured_runtimes([name], options.files, options.visits)
                _keep(kept, options.times)
    models = profiles(names)
    times = {case: kept["measured"][f"{case[0]}|{case[1]}"] for case in models}
    found = rows(times, models, calibration) + runtime_rows(kept["runtimes"], models, calibration)
    summaries = {}
    for platform in dict.fromkeys(row["platform"] for row in found):
        for batch in BATCHES:
            own = [row for row in found if (row["platform"], row["batch"]) == (platform, batch)]
            if own:
                figures = summary([row["error"] for row in own])
                figures["coverage"] = sum(row["is_covered"] for row in own) / len(own)
                summaries[f"{platform}, batch {batch}"] = figures
    eager = [row for row in found if "roofline_error" in row]
    summaries["eager, all"] = summary([row["error"] for row in eager])
    summaries["eager, all"]["coverage"] = sum(row["is_covered"] for row in eager) / len(eager)
    summaries["naive roofline"] = summary([row["roofline_error"] for row in eager])
    summaries |= {f"families held out: {title}": it for title, it in held_out(times, models, calibration).items()}
    show(found, summaries)
    facts: dict[str, Any] = {"samples": len(calibration.samples), "calibration_cpu_seconds": calibration.cpu_seconds}
    facts |= {item.name: item.cpu_seconds for item in calibration.runtimes}
    name = f"prediction_accuracy_{options.which}{'_load' if options.load else ''}"
    saved = save(name, found, summaries=summaries, calibration=facts)
    print(f"saved to {saved}", file=sys.stderr)


if __name__ == "__main__":
    main()
