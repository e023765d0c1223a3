"""A whole run: every artifact, resumed, judged, the same again, and with a model and data of one's own."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from typer.testing import CliRunner

import edge_opt as eo
from edge_opt import units
from edge_opt.cli import app
from edge_opt.data import load_splits
from edge_opt.errors import FolderInUse, InvalidInput, MeasurementFailed, OtherSettings, UnknownDevice
from edge_opt.model import SmallCNN
from edge_opt.records.sweeps import Candidate, Trial, TrialMetrics
from edge_opt.report.sheets import sheet_text
from edge_opt.report.sweep_files import conclusion, read_sweep
from edge_opt.run.config import RunConfig, read_config
from edge_opt.run.pipeline import RunResult, run
from edge_opt.run.seeds import run_seeds
from edge_opt.search.sweep_progress import Event, TrialFinished, status

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_fork_server")]

SMALL = [
    "epochs=6", "fine_tune_epochs=2", "train_subset=600", "pruning_levels=[0.0, 0.5]", "min_time_s=0.02",
    "budgets=[accuracy_drop <= 0.05, peak_memory_mb <= 3]", "sensitivity=true",
]  # fmt: skip
ARTIFACTS = """sweep_results.csv pareto_frontier_latency.csv pareto_frontier_energy.csv accuracy_vs_latency.png
    accuracy_vs_energy.png accuracy_vs_memory.png summary.json reproducibility.json layerwise_breakdown.csv
    precision_tradeoffs.csv hardware_summary.csv layerwise_activation_memory.png layerwise_macs.png sweep.json
    profile.json sensitivity.json report.html best/model.onnx best/model.safetensors best/spec.json best/samples.npz
    best/run_best.py best/MODEL_CARD.md""".split()
MEASURED = {"latency_s", "latency_low_s", "latency_high_s", "latency_std_s", "latency_p95_s", "cpu_latency_s",
            "throughput", "energy_j", "single_latency_s", "remarks", "test_accuracy", "deploy_latency_s",
            "deploy_latency_low_s", "deploy_latency_high_s", "measured_memory_bytes", "is_disturbed",
            "disturbed_times"}  # fmt: skip


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return read_config(settings=SMALL)


@pytest.fixture(scope="module")
def done(config: RunConfig, one_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run(config, tmp_path_factory.mktemp("run"), command=["edge-opt", "run"])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def metrics_of(trial: Trial) -> TrialMetrics:
    assert trial.metrics is not None, trial.reason
    return trial.metrics


def test_every_artifact_is_there_and_says_something(done: RunResult) -> None:
    for name in ARTIFACTS:
        assert (done.folder / name).stat().st_size > 0, name
    assert not (done.folder / "sweep_errors.csv").exists()
    for picture in done.folder.glob("*.png"):
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_table_has_a_row_for_every_candidate(done: RunResult) -> None:
    # two levels, and of two precisions on two runtimes all but int8 on eager torch
    assert len(rows(done.folder / "sweep_results.csv")) == len(done.result.trials) == 2 * (2 * 2 - 1)
    assert done.summary["counts"]["tried"] == 6 and done.summary["counts"]["failed"] == 0
    assert [item["runtime"] for item in done.summary["excluded"]] == ["torch"]


def test_the_baseline_learns_and_is_the_eager_model(done: RunResult) -> None:
    baseline = done.result.baseline
    assert baseline.candidate == Candidate(0.0, "fp32", "torch")
    assert metrics_of(baseline).accuracy_drop == 0
    share = metrics_of(baseline).test_accuracy
    assert share is not None and share > 0.85


def test_only_what_is_reported_was_looked_at_on_the_test_part(done: RunResult) -> None:
    tested = {trial.candidate.key for trial in done.result.trials if metrics_of(trial).test_accuracy is not None}
    assert tested == {done.result.baseline.candidate.key, done.result.best}


def test_static_figures_follow_from_the_shapes(done: RunResult) -> None:
    half = metrics_of(done.result.trial(Candidate(0.5, "fp32", "torch").key))
    # 8 and 16 channels: 8 * (9 + 1) + 16 * (8 * 9 + 1) + 10 * (16 * 49 + 1) parameters
    assert half.params == 80 + 1168 + 7850
    assert half.macs == 32 * (784 * 8 * 9 + 196 * 16 * 8 * 9 + 784 * 10)
    assert half.model_bytes == 4 * half.params
    int8 = metrics_of(done.result.trial(Candidate(0.5, "int8", "onnxruntime").key))
    assert int8.model_bytes < half.model_bytes / 3 and int8.effective_precision == "int8"
    assert int8.peak_memory_bytes < half.peak_memory_bytes


def test_a_smaller_variant_is_accepted(done: RunResult) -> None:
    baseline = metrics_of(done.result.baseline)
    assert any(metrics_of(trial).size_bytes < baseline.size_bytes for trial in done.result.accepted)


def test_the_memory_budget_rejects_by_name_and_amount(done: RunResult) -> None:
    [broken] = done.result.baseline.violations
    # weights, a batch of 32 images and the peak of eager activations: more than 3 MiB
    found = metrics_of(done.result.baseline).peak_memory_bytes / 2**20
    assert broken.metric == "peak_memory_mb" and broken.excess == pytest.approx(found - 3.0)
    assert [budget["memory_budget_mb"] for budget in done.summary["memory_budgets"]] == [1.0, 2.0, 4.0]


def test_the_hardware_summary_is_in_the_deployment(done: RunResult) -> None:
    deployment = done.summary["deployment"]
    assert {"batch_latency_ms", "stream_utilization", "bandwidth_utilization", "achieved_gmacs"} <= set(deployment)
    assert deployment["batch_latency_ms"] == pytest.approx(metrics_of(done.result.baseline).latency_s * 1e3)


def test_what_was_written_reads_back(done: RunResult) -> None:
    assert read_sweep((done.folder / "sweep.json").read_text(encoding="utf-8")) == done.result
    assert eo.load(done.folder / "profile.json").totals.macs == metrics_of(done.result.baseline).macs
    assert json.loads((done.folder / "summary.json").read_text(encoding="utf-8"))["best"]["key"] == done.result.best
    repeated = json.loads((done.folder / "reproducibility.json").read_text(encoding="utf-8"))
    assert repeated["config"]["epochs"] == 6 and repeated["command"] == ["edge-opt", "run"]
    assert repeated["data"]["samples"] == {"train": 600, "calibration": 128, "validation": 359, "test": 359}


def page_data(path: Path) -> dict[str, Any]:
    """The one JSON value that a page draws from."""
    text = path.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    return found


def test_console_summary_table_and_page_tell_the_same(done: RunResult) -> None:
    summary = json.loads((done.folder / "summary.json").read_text(encoding="utf-8"))
    told, page = summary["best"]["speedup"], page_data(done.folder / "report.html")
    [row] = [row for row in rows(done.folder / "sweep_results.csv") if row["is_best"] == "True"]
    speed = done.result.speedup
    assert speed is not None and speed.runtime is not None
    # one record: the summary, the row and the page hold its numbers, the console and the page its words
    assert (told["ratio"], told["low"], told["high"]) == (speed.whole.ratio, speed.whole.low, speed.whole.high)
    assert told["low"] <= told["ratio"] <= told["high"] and told["runtime_alone"] == speed.runtime.ratio
    assert [float(row[name]) for name in ("speedup", "speedup_ci95_low", "speedup_ci95_high")] == pytest.approx(
        [told["ratio"], told["low"], told["high"]]
    )
    assert {key: page["sweep"]["speedup"][key] for key in told} == told
    words = sheet_text(conclusion(done.result), 160)
    card = (done.folder / "best/MODEL_CARD.md").read_text(encoding="utf-8")
    assert all(told["text"] in text for text in (words, " ".join(page["verdict"]), card))
    # what was disturbed is marked in all of them
    assert told["disturbed"] == (row["disturbed"] == "True") == ("DISTURBED" in words)
    assert told["disturbed"] == ("DISTURBED" in " ".join(page["verdict"])) == ("**disturbed** by" in card)
    assert row["disturbed_times"] == "; ".join(summary["best"]["metrics"]["disturbed_times"])
    # one latency at one batch: its own row, the summary, the page's row, the console
    best = summary["best"]["metrics"]
    [shown] = [item for item in page["sweep"]["rows"] if item["key"] == done.result.best]
    assert float(row["deploy_latency_ms"]) == shown["deploy_latency_ms"] == best["deploy_latency_s"] * 1e3
    assert units.per_call(best["deploy_latency_s"], 1) in words
    assert best["single_latency_s"] == best["deploy_latency_s"] and best["deploy_batch"] == 1


def test_printed_times_have_the_printed_ratio_and_its_parts_multiply(done: RunResult) -> None:
    speed, best = done.result.speedup, metrics_of(done.result.trial(str(done.result.best)))
    assert speed is not None and speed.runtime and speed.precision and speed.pruning
    ratio = metrics_of(done.result.baseline).ranked_latency_s / best.ranked_latency_s
    assert ratio == pytest.approx(speed.whole.ratio)
    assert speed.runtime.ratio * speed.precision.ratio * speed.pruning.ratio == pytest.approx(speed.whole.ratio)


def test_the_baseline_is_told_once(done: RunResult) -> None:
    found, metrics = done.summary["baseline"], metrics_of(done.result.baseline)
    assert found["latency_ms"] == metrics.latency_s * 1e3 and found["accuracy"] == metrics.accuracy
    assert found["energy_proxy_j"] == metrics.energy_j == found["metrics"]["energy_j"]
    assert "answers" not in found["metrics"]


def test_memory_is_measured_beside_the_estimate(done: RunResult) -> None:
    for trial in done.result.trials:
        held = metrics_of(trial).measured_memory_bytes
        # at least the weights come on top of an idle runtime
        assert held is not None and held > metrics_of(trial).model_bytes
    deployment = done.summary["deployment"]
    used = deployment["achieved_bandwidth_gbps"] / deployment["machine_memory_bandwidth_gbps"]
    assert deployment["bandwidth_utilization"] == pytest.approx(used)
    assert deployment["configured_memory_bandwidth_gbps"] == 4.3  # the device's, under its own name


def test_fine_tuning_is_priced_beside_each_candidate(done: RunResult) -> None:
    for trial, row in zip(done.result.trials, rows(done.folder / "sweep_results.csv"), strict=True):
        metrics = metrics_of(trial)
        assert metrics.train_flops is not None and metrics.train_peak_memory_bytes is not None
        # Forward, gradients of weights, and gradients of inputs but for the first layer.
        assert 2 * 2 * metrics.macs < metrics.train_flops < 3 * 2 * metrics.macs
        assert int(row["train_flops"]) == metrics.train_flops
        assert float(row["train_peak_memory_mb"]) == pytest.approx(metrics.train_peak_memory_bytes / 2**20)


def test_what_ships_is_the_measured_file(done: RunResult) -> None:
    best = done.result.trial(str(done.result.best))
    [measured] = (done.folder / "candidates" / best.candidate.key).glob(f"*.{best.candidate.precision}.onnx")
    assert (done.folder / "best/model.onnx").read_bytes() == measured.read_bytes()
    spec = json.loads((done.folder / "best/spec.json").read_text(encoding="utf-8"))
    assert (spec["runtime"], spec["precision"]) == (best.candidate.runtime, best.candidate.precision)
    assert spec["metrics"]["size_bytes"] == metrics_of(best).size_bytes


def test_the_shipped_model_runs_without_us(done: RunResult) -> None:
    program = (done.folder / "best/run_best.py").read_text(encoding="utf-8")
    assert "edge_opt" not in program and "torch" not in program
    ran = subprocess.run(
        [sys.executable, "-I", str(done.folder / "best/run_best.py")], capture_output=True, text=True, check=True
    )
    right, total = ran.stdout.splitlines()[-1].split()[0::2][:2]
    assert int(total) == 32 and int(right) >= 25


def test_the_shipped_weights_are_those_of_the_candidate(done: RunResult) -> None:
    from safetensors.numpy import load_file

    best = done.result.trial(str(done.result.best))
    stored = load_file(done.folder / "best/model.safetensors")
    assert sum(array.size for array in stored.values()) == metrics_of(best).params
    assert all(np.isfinite(array).all() for array in stored.values())


def test_a_second_run_reruns_nothing(config: RunConfig, done: RunResult) -> None:
    events: list[Event] = []
    weights = (done.folder / "baseline/model.safetensors").stat().st_mtime_ns
    again = run(config, done.folder, on_event=events.append)
    assert not [event for event in events if isinstance(event, TrialFinished)]
    assert [same(trial) for trial in again.result.trials] == [same(trial) for trial in done.result.trials]
    # finalists that other programs disturbed are timed interleaved once more; nothing else is
    assert done.result.finals is not None
    assert again.result == done.result or done.result.finals.is_disturbed
    assert (done.folder / "baseline/model.safetensors").stat().st_mtime_ns == weights


def test_other_settings_on_the_same_folder_are_told(config: RunConfig, done: RunResult) -> None:
    with pytest.raises(OtherSettings, match="epochs was 6 and is 7 now"):
        run(config.model_copy(update={"epochs": 7}), done.folder)


def test_constraints_may_change_and_nothing_accepted_is_exit_1(done: RunResult) -> None:
    settings = [*SMALL, "budgets=[latency_us <= 0.001]"]
    words = ["run", "-o", str(done.folder), *(word for text in settings for word in ("--set", text))]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 1, ran.output
    assert "nothing satisfies the constraints" in ran.output and "report" in ran.stdout
    assert rows(done.folder / "sweep_results.csv")[0]["violations"].startswith("latency_us <= 0.001")
    # the winner of the first run may not be shipped by these
    assert not (done.folder / "best").exists()


def test_an_unknown_target_is_refused_before_anything_runs(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UnknownDevice, match="raspberry-pi-4"):
        run(config.model_copy(update={"target": "raspbery-pi-4"}), tmp_path)
    assert list(tmp_path.iterdir()) == []


def same(trial: Trial) -> dict[str, object]:
    """What a seed decides about a trial."""
    found = metrics_of(trial)
    return {item.name: getattr(found, item.name) for item in fields(found) if item.name not in MEASURED}


def test_two_workers_and_another_run_give_the_same_table(config: RunConfig, done: RunResult, tmp_path: Path) -> None:
    other = run(config.model_copy(update={"sensitivity": False}), tmp_path, workers=2)
    assert {trial.candidate.key: same(trial) for trial in other.result.trials} == {
        trial.candidate.key: same(trial) for trial in done.result.trials
    }


def test_seeds_are_run_and_put_together(config: RunConfig, done: RunResult, tmp_path: Path) -> None:
    found = run_seeds(config, [3, 4], tmp_path, lambda config, folder: replace(done, folder=folder))
    assert [item.folder.name for item in found.values()] == ["seed-3", "seed-4"]
    table = rows(tmp_path / "aggregate.csv")
    assert len(table) == 6 and {row["seeds"] for row in table} == {"2"}
    assert json.loads((tmp_path / "aggregate.json").read_text())["seeds"] == [3, 4]
    with pytest.raises(InvalidInput, match="must be different"):
        run_seeds(config, [3, 3], tmp_path, lambda config, folder: done)


RESIDUAL = '''
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, width, 3, padding=1), Block(width)
        self.head = nn.Linear(width, 4)
    def forward(self, x):
        return self.head(self.block(self.stem(x)).mean((2, 3)))

def loaders(batch_size, seed):
    """Squares in one of four corners."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(400) % 4
    images = torch.rand(400, 3, 12, 12, generator=generator) / 10
    for image, label in zip(images, labels):
        image[int(label) % 3, :, :] += 1.0
        if label == 3:
            image[1] += 1.0
    data = TensorDataset(images, labels)
    parts = {"train": range(0, 240), "validation": range(240, 320), "test": range(320, 400)}
    return {
        name: DataLoader(torch.utils.data.Subset(data, part), batch_size, shuffle=name == "train")
        for name, part in parts.items()
    }
'''


def test_a_model_and_loaders_of_one_s_own_run_through_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(RESIDUAL)
    (tmp_path / "run.yaml").write_text(
        f"model: {tmp_path}/net.py:Net(width=12)\ndataset: {tmp_path}/net.py:loaders\nepochs: 4\nlearning_rate: 1e-2\n"
        "batch_size: 16\nprecisions: [int8]\nruntimes: [onnxruntime]\npruning_levels: [0.5]\nmin_time_s: 0.02\n"
        "budgets: [accuracy_drop <= 0.2]\n"
    )
    ran = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml"), "-o", str(tmp_path / "out"), "--json"])
    assert ran.exit_code == 0, ran.output
    summary = json.loads(ran.stdout)
    assert summary["baseline"]["label"] == "prune 0 fp32 torch"  # measured, though no part of the space
    assert summary["best"]["label"] == "prune 0.5 int8 onnxruntime"
    assert summary["best"]["metrics"]["params_ratio"] < 0.6
    assert summary["best"]["metrics"]["test_accuracy"] > 0.7
    repeated = json.loads((tmp_path / "out/reproducibility.json").read_text())
    assert set(repeated["data"]["sha256"]) == {"batches of validation", "batches of test"}


def test_a_trained_model_is_swept_from_python(done: RunResult, tmp_path: Path) -> None:
    model = SmallCNN()
    from safetensors.torch import load_file

    model.load_state_dict(load_file(done.folder / "baseline/model.safetensors"))
    splits = load_splits("digits", train_subset=100, val_subset=64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = eo.sweep(
        model,
        {"train": list(splits.train), "validation": list(splits.validation)},
        inputs=(16, 1, 28, 28),
        pruning_levels=[0.0],
        precisions=["fp32"],
        runtimes=["torch", "onnxruntime"],
        budgets=["accuracy_drop <= 0"],
        output=tmp_path / "out",
        min_time_s=0.02,
    )
    assert [metrics_of(trial).batch_size for trial in result.trials] == [16, 16]
    assert len(result.accepted) == 2 and metrics_of(result.baseline).test_accuracy is None
    for name in ("sweep_results.csv", "summary.json", "report.html", "best/run_best.py", "best/MODEL_CARD.md"):
        assert (tmp_path / "out" / name).is_file()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_winner_in_torch_ships_as_torch(tmp_path: Path) -> None:
    splits = load_splits("digits", train_subset=64, val_subset=32)
    loaders = {"train": list(splits.train), "validation": list(splits.validation)}
    space: dict[str, Any] = {"pruning_levels": [0.0], "precisions": ["fp32"], "runtimes": ["torch"]}
    result = eo.sweep(SmallCNN(), loaders, output=tmp_path, budgets=[], min_time_s=0.01, **space)
    # the winner is the baseline: exactly as fast as itself
    assert result.speedup is not None and result.speedup.whole.ratio == 1
    [measured] = (tmp_path / "candidates" / str(result.best)).glob("*.pt")
    assert (tmp_path / "best/model.pt").read_bytes() == measured.read_bytes()
    assert not (tmp_path / "best/model.onnx").exists()
    program = [sys.executable, "-I", str(tmp_path / "best/run_best.py")]
    assert " of 32 right" in subprocess.run(program, capture_output=True, text=True, check=True).stdout


def test_a_model_that_no_other_process_can_import_is_refused(tmp_path: Path) -> None:
    class Local(SmallCNN):
        pass

    batch = torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.long)
    with pytest.raises(InvalidInput, match=r"the model is a .*Local, which other processes cannot import"):
        eo.sweep(Local(), {"train": [batch], "validation": [batch]}, output=tmp_path)


QUICK = ["epochs=2", "fine_tune_epochs=1", "train_subset=128", "val_subset=64", "min_time_s=0.01", "budgets=[]"]


@pytest.fixture(scope="module")
def searched(one_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run with the default search of the pruning ratio."""
    config = read_config(settings=[*QUICK, "precisions=[fp32]", "runtimes=[onnxruntime]"])
    return run(config, tmp_path_factory.mktemp("auto"))


def test_the_default_search_trains_one_ratio_and_is_not_repeated(searched: RunResult) -> None:
    screening = json.loads((searched.folder / "screening.json").read_text(encoding="utf-8"))
    trained = [level["share"] for level in screening["levels"] if level["verdict"] == "trained"]
    assert len(screening["levels"]) == 2 * 13 and len(trained) <= 1
    assert {trial.candidate.pruning for trial in searched.result.trials} == {0.0, *trained}
    config = read_config(settings=[*QUICK, "precisions=[fp32]", "runtimes=[onnxruntime]"])
    before = (searched.folder / "screening.json").stat().st_mtime_ns
    events: list[Event] = []
    again = run(config, searched.folder, on_event=events.append)
    assert (searched.folder / "screening.json").stat().st_mtime_ns == before
    assert not [event for event in events if isinstance(event, TrialFinished)]
    assert [same(trial) for trial in again.result.trials] == [same(trial) for trial in searched.result.trials]


def test_a_fresh_run_keeps_the_earlier_table_aside(searched: RunResult) -> None:
    config = read_config(settings=[*QUICK, "precisions=[fp32]", "runtimes=[onnxruntime]", "pruning_levels=[0.0]"])
    again = run(config, searched.folder, fresh=True)
    assert len(list(searched.folder.glob("sweep.2*.sqlite"))) == 1
    assert {trial.candidate.pruning for trial in again.result.trials} == {0.0}


def test_a_sweep_of_the_command_line_comes_to_its_end_with_the_default_search(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(RESIDUAL)
    words = ["sweep", f"{tmp_path}/net.py:Net", "--data", f"{tmp_path}/net.py:loaders", "-o", str(tmp_path / "out"),
             "--precision", "fp32", "--runtime", "onnxruntime", "--fine-tune-epochs", "1",
             "--set", "min_time_s=0.01", "--set", "budgets=[]", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    plain = json.loads(done.stdout)
    assert (tmp_path / "out" / "screening.json").is_file() and (tmp_path / "out" / "best" / "model.onnx").is_file()
    assert plain["best"] is not None


def test_a_run_within_too_little_memory_is_one_sentence(tmp_path: Path) -> None:
    config = read_config(settings=[*QUICK, "memory_limit_mb=256"])
    # Training needs about as much as the limit, so that on some machines the step after it is the one to fail.
    with pytest.raises(MeasurementFailed, match="out of memory: (train|screen) used more memory than the limit of 256"):
        run(config, tmp_path)


def test_a_run_that_trains_holds_its_folder_and_says_what_it_does(tmp_path: Path) -> None:
    settings = ["epochs=500", "pruning_levels=[0.0]", "min_time_s=0.01"]
    words = [sys.executable, "-m", "edge_opt.cli", "run", "-o", str(tmp_path), *(f"--set={each}" for each in settings)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("loss: cross_entropy")
        assert "training SmallCNN" in process.stderr.readline()
        told = status(tmp_path)
        assert (told.pid, told.stage, told.is_running) == (process.pid, "training", True)
        with pytest.raises(FolderInUse, match=f"process {process.pid}"):
            run(read_config(settings=settings), tmp_path, fresh=True)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    # Killed while it trains, it leaves no process, and the folder is free.
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not status(tmp_path).is_running and not (tmp_path / "baseline" / "training.json").exists()
