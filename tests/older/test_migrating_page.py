"""Every item of the lists in docs/migrating.md, checked."""

from __future__ import annotations

import csv
import importlib
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import edge_opt as eo
import rasp
from edge_opt.errors import InvalidInput
from edge_opt.hardware import (
    LayerEstimate,
    estimate_layerwise_stats,
    precision_tradeoff_table,
    save_hardware_artifacts,
    summarize_hardware,
)
from edge_opt.metrics import Metrics, collect_metrics
from edge_opt.model import SmallCNN
from edge_opt.pruning import structured_channel_prune
from edge_opt.run.config import read_config
from edge_opt.run.pipeline import RunResult, run
from edge_opt.stream import FALLBACK_MS_PER_ROW

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "migrating.md"
Check = Callable[["Site"], Any]
SHAPE = (2, 1, 28, 28)


class Site:
    """Where a row is tried: a folder, and a small run that is made when the first row needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run: RunResult | None = None

    @property
    def done(self) -> RunResult:
        if self._run is None:
            config = read_config(
                settings=[
                    "epochs=1", "train_subset=256", "pruning_levels=[0.0]", "precisions=[fp32, int8]",
                    "runtimes=[torch, onnxruntime]", "min_time_s=0.01", "active_memory_budget_mb=0.05",
                    "cpu_frequency_scale=0.5",
                ]
            )  # fmt: skip
            self._run = run(config, self.folder / "run", command=["run_pipeline.py"])
        return self._run

    def json(self, name: str) -> Any:
        return json.loads((self.done.folder / name).read_text(encoding="utf-8"))

    def rows(self) -> list[dict[str, str]]:
        with (self.done.folder / "sweep_results.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def site(one_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("migrating"))


def stat(model: nn.Module | None = None, **options: Any) -> Any:
    options = {"returns": "data", "print_stat": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rasp.stat(model or SmallCNN(), SHAPE, **options)


def timed(**options: Any) -> Any:
    before = dict(rasp.CFG.profile)
    rasp.set_config({"profile": {"num_batches": 3, "warmup_batches": 0}})
    try:
        return stat(timing=True, **options)
    finally:
        rasp.set_config({"profile": before})


def measured() -> Metrics:
    batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    torch.manual_seed(0)
    return collect_metrics(SmallCNN(), [batch], "cpu", 2.0, "fp32", benchmark_repeats=1, benchmark_trials=1)


def raises(call: Callable[[], Any]) -> bool:
    with pytest.raises(InvalidInput):
        call()
    return True


def script(site: Site, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / arguments[0]), *arguments[1:]],
        capture_output=True, text=True, check=False, cwd=site.folder, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def _callers_lists(site: Site) -> bool:
    includes = ["macc"]
    stat(includes=includes, memory=True)
    return includes == ["macc"]


def _sum(site: Site) -> bool:
    text, totals = stat(returns="sum,totals")
    return "Total params: 20.49K" in text and totals["params"] == 20490


def _simulated(site: Site) -> bool:
    data, tree = stat(device="cuda", memory=True, returns="data,tree")
    is_said = "simulated" in data.attrs["device_memory"] and "simulated" in tree.memory_source
    return is_said and any("simulated" in note for note in data.attrs["notes"])


def _peak_of_containers(site: Site) -> bool:
    row = stat(nn.Sequential(SmallCNN()), device="cuda", memory=True, report_type="root").iloc[0]
    return bool(row["dev_max_mem_alloc"] > row["net_dev_mem"] + row["dev_mem_alloc"])


def _saved(site: Site) -> bool:
    table = stat()
    path = rasp.save_report(table, site.folder / "saved" / "t.csv")
    return bool(rasp.load_report(path).index.tolist() == table.index.tolist())


def _published_tables(site: Site) -> bool:
    layers = estimate_layerwise_stats(SmallCNN(), 32)
    summary = summarize_hardware(layers, 1.0, 4.3)
    rows = pd.DataFrame(
        [("fp32", 0.9, 1.0, 0.1, 0.1, True)],
        columns=["precision", "accuracy", "latency_ms", "memory_mb", "energy_proxy_j", "accepted"],
    )
    return len(save_hardware_artifacts(site.folder / "tables", layers, precision_tradeoff_table(rows), summary)) == 5


def _changeable(site: Site) -> bool:
    metrics, layer = measured(), LayerEstimate("a", 1, 2, 3, 4)
    metrics.accuracy, layer.macs = 1.0, 5
    return vars(metrics) == asdict(metrics) and vars(layer)["macs"] == 5


def _intervals_repeat(site: Site) -> bool:
    first, second = measured(), measured()
    return (first.accuracy_ci95_low, first.accuracy_ci95_high) == (second.accuracy_ci95_low, second.accuracy_ci95_high)


def _accepts_by_default(site: Site) -> bool:
    default, without = read_config(), read_config(settings=["constraints=[]"])
    return (default.all_budgets, without.all_budgets) == (("accuracy_drop <= 0.01",), ())


def _budget_of_weights(site: Site) -> bool:
    # 20490 weights of 4 bytes are 0.078 MiB, above the run's 0.05; in int8 they are less.
    rows = {row["precision"] + row["runtime"]: row for row in site.rows()}
    return (
        "model_mb <= 0.05" in rows["fp32torch"]["violations"]
        and "model_mb" not in rows["int8onnxruntime"]["violations"]
        and site.done.summary["baseline"]["accepted_under_active_budget"] is False
    )


def _counts(site: Site) -> bool:
    summary, rows = site.json("summary.json"), site.rows()
    accepted = [row for row in rows if row["accepted"] == "True"]
    counted = (summary["study_rows"], summary["accepted_rows"], summary["rejected_rows"])
    best = {"best_accuracy_accepted", "lowest_latency_ms_accepted"} <= set(summary)
    return best and counted == (len(rows), len(accepted), len(rows) - len(accepted))


def _baseline(site: Site) -> bool:
    found = site.json("summary.json")["baseline"]
    return set(asdict(measured())) <= set(found) and found["memory_mb"] == 4 * 20490 / 2**20


def _deployment(site: Site) -> bool:
    found = site.json("summary.json")["deployment"]
    per_second = 1000 / found["stream_avg_latency_ms"]
    return (
        found["stream_throughput_sps"] == pytest.approx(per_second)
        and found["stream_served_sps"] <= found["stream_throughput_sps"]
        and found["latency_multiplier"] == 2.0
    )


def _reproducible(site: Site) -> bool:
    found = site.json("reproducibility.json")
    return found["command"] == ["run_pipeline.py"] and {"packages", "cpu", "git_commit_hash", "model"} <= set(found)


def _columns(site: Site) -> bool:
    row = site.rows()[0]
    return row["memory_mb"] == row["model_memory_mb"] != row["peak_memory_mb"] and "violates_2.0mb" in row


def _quantization(site: Site) -> bool:
    return "onnxruntime" in site.json("quantization_metadata_p0.0_int8.json")["runtimes"]


def _written(site: Site) -> bool:
    profile = eo.build_hardware_profile_table(8, 4, 10)
    found = eo.write_hardware_profile_artifacts(profile, site.folder / "stream")
    return found["operator_profile_csv"] == str(found["operator_profile"])


def _limits(site: Site) -> bool:
    limits = eo.HardwareProfile(memory_limit_mb=1, compute_budget=10)
    limits.compute_budget = 20
    return vars(limits) == {"memory_limit_mb": 1, "compute_budget": 20} and eo.compute_utilization(5, limits) == 0.25


CHECKS: dict[str, Check] = {
    "`rasp.stat(model, input_shape)`": _callers_lists,
    '`report_type="tape"`, `"leaves"`, `"all"`': lambda _: all(
        len(stat(report_type=kind)) > 1 for kind in ("tape", "leaves", "all")
    ),
    '`report_type="node"`, `"root"`': lambda _: len(stat(report_type="node")) == len(stat(report_type="root")) == 2,
    "`net_lat`, `lat[%]`, `FLOPS`": lambda _: timed()["lat[%]"].iloc[:-1].sum() == pytest.approx(100),
    "`lat`": lambda _: timed(includes="end_lat")["end_lat"].iloc[:-1].is_monotonic_increasing,
    '`returns="sum"`': _sum,
    '`returns="data,tree"`': lambda _: isinstance(stat(returns="data,tree"), list),
    '`includes=["macc"]`': lambda _: list(stat(includes=["macc"], memory=True)).index("macc") == 9,
    '`device="cuda", memory=True`': _simulated,
    "`dev_max_mem_alloc`": _peak_of_containers,
    "`CFG.profile.batch_size`, `num_batches`, `warmup_batches`, `timing_max_depth`, `compute_max_depth`, `verbose`": (
        lambda _: raises(lambda: setattr(rasp.CFG.profile, "batch_size", 0))
    ),
    "`CFG.frontend.stat_mem`": lambda _: stat(memory=True) is not None and rasp.CFG.frontend.stat_mem is False,
    "`CFG.frontend.args`, `mark_updated`, `reset_max_mem`, `CFG.device`, `CFG.analysis`": lambda _: (
        dict(rasp.CFG.analysis) == {"regress_model": "linear"}
    ),
    "`set_config`, `get_config`": lambda _: (
        raises(lambda: rasp.set_config({"profile": {"batch_size": 2, "num_batches": 0}}))
        and rasp.get_config().profile.batch_size == 1
    ),
    "`save_report(df, path)`, `load_report(path)`": _saved,
    "`round_value(value, binary, prec)`": lambda _: rasp.round_value(2048, True, 1) == "2.0K",
    "`import rasp.addons.energy`": lambda _: (
        importlib.import_module("rasp.addons.energy") and "energy" in stat(includes=["energy"])
    ),
    "`edge_opt.model.SmallCNN`": lambda _: sum(p.numel() for p in SmallCNN().parameters()) == 20490,
    "`estimate_layerwise_stats(model, batch_size)`": lambda _: (
        estimate_layerwise_stats(nn.Linear(3, 2), 4, (5, 3))["macs"].tolist() == [4 * 5 * 3 * 2]
    ),
    "`summarize_hardware(...)`, `precision_tradeoff_table(...)`, `save_hardware_artifacts(...)`": _published_tables,
    "`collect_metrics(...)`": _intervals_repeat,
    "`Metrics.memory_mb`": lambda _: measured().memory_mb == 4 * 20490 / 2**20,
    "`vars(metrics)`, `asdict(metrics)`, `metrics.accuracy = 1.0`": _changeable,
    "`structured_channel_prune(model, level)`": lambda _: (
        structured_channel_prune(SmallCNN(16, 32), 0.25).conv2.out_channels == 24
    ),
    "`scripts/run_pipeline.py --config F`": lambda _: "--json" in (ROOT / "scripts/run_pipeline.py").read_text(),
    "`scripts/run_pipeline.py --config-template`": lambda site: (
        "output_dir: outputs" in script(site, "scripts/run_pipeline.py", "--config-template")
    ),
    "`experiments/multi_seed.py --config-template F --seeds 1 2 --output-dir D`": lambda site: (
        "--config-template" in script(site, "experiments/multi_seed.py", "--help")
    ),
    "`scripts/generate_hardware_tables.py --output-dir D`": lambda site: (
        "--output-dir" in script(site, "scripts/generate_hardware_tables.py", "--help")
    ),
    "`model: SmallCNN`": lambda _: (
        read_config(settings=["model=SmallCNN"]).model_reference == read_config().model_reference
    ),
    "`val_subset: null`": lambda _: read_config(settings=["val_subset=null"]).val_subset is None,
    "`active_memory_budget_mb: 2.0`": _budget_of_weights,
    "accepted: the weights keep the budget": _accepts_by_default,
    "`summary.json`: `study_rows`, `accepted_rows`, `rejected_rows`, `best_accuracy_accepted`, "
    "`lowest_latency_ms_accepted`": _counts,
    "`summary.json`: `baseline.*`": _baseline,
    "`summary.json`: `deployment.*`": _deployment,
    "`reproducibility.json`": _reproducible,
    "`sweep_results.csv`: `pruning_level`, `violates_*`, `memory_mb`, …": _columns,
    "`quantization_metadata_p0.0_int8.json`": _quantization,
    "`edge_opt.evaluation.hardware_profile`": lambda _: hasattr(
        importlib.import_module("edge_opt.evaluation.hardware_profile"), "build_hardware_profile_table"
    ),
    "`edge_opt.utils.hardware`": lambda _: hasattr(
        importlib.import_module("edge_opt.utils.hardware"), "HardwareProfile"
    ),
    "`build_hardware_profile_table(features, batch, interval)`": lambda _: eo.build_hardware_profile_table(8, 4, 10)[
        "estimate_source"
    ].startswith("timed here"),
    "0.01, 0.03, 0.008 and 0.012 ms per row": lambda _: (
        list(FALLBACK_MS_PER_ROW.values()) == [0.01, 0.03, 0.008, 0.012]
    ),
    "zero rows or features": lambda _: len(eo.build_hardware_profile_table(0, 0, 10)["remarks"]) == 2,
    "`write_hardware_profile_artifacts(profile, folder)`": _written,
    "`HardwareProfile(memory_limit_mb, compute_budget)`": _limits,
    "`estimate_batch_memory_mb`, `auto_adjust_batch_size`, `compute_utilization`": lambda _: raises(
        lambda: eo.auto_adjust_batch_size(8, 8, eo.HardwareProfile(0, 1))
    ),
}
IN_A_RUN = {name for name in CHECKS if "json`" in name or "csv`" in name or "active_memory" in name}


def rows_of_the_page() -> list[str]:
    """Return the name before the dash of every list item from the section on rasp on."""
    text = PAGE.read_text(encoding="utf-8").partition("## From rasp\n")[2]
    items = re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)
    return [re.sub(r"\n  ", " ", item).split(" – ")[0] for item in items]


def test_the_page_and_the_checks_name_the_same_rows() -> None:
    assert rows_of_the_page() == list(CHECKS)


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in IN_A_RUN])
def test_row(name: str, site: Site) -> None:
    assert CHECKS[name](site)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(IN_A_RUN))
def test_row_of_a_run(name: str, site: Site) -> None:
    assert CHECKS[name](site)
