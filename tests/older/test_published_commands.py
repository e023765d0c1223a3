"""The published pipeline's commands on its own configuration: every file, key and column that it promises."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import published_pipeline as published
from edge_opt.data.datasets import find_files
from edge_opt.run.config import read_config, template

ROOT = Path(__file__).parent.parent.parent
TINY = [
    "train_subset=256", "val_subset=128", "epochs=1", "pruning_levels=[0.0]", "precisions=[fp32]", "runtimes=[torch]",
    "min_time_s=0.01", "num_workers=0", "budgets=[]",
]  # fmt: skip


def run(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    threads = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=folder,
        env={**os.environ, **threads, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def prepared(folder: Path) -> list[str]:
    """The configuration where the documents have it; and what stands in for data that is not on this machine."""
    (folder / "configs").mkdir()
    (folder / "configs" / "default.yaml").write_text(published.CONFIG, encoding="utf-8")
    if find_files("fashion-mnist", None):
        return []
    (folder / "loaders.py").write_text(published.LOADERS, encoding="utf-8")
    return settings("dataset=loaders.py:loaders")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One run of the documented command; only with fewer samples and levels, less time for each, and one runtime."""
    folder = tmp_path_factory.mktemp("published")
    data = prepared(folder)
    command = ["scripts/run_pipeline.py", "--config", "configs/default.yaml"]
    less = ["min_time_s=0.02", "train_subset=1500", "val_subset=600", "epochs=1", "runtimes=[onnxruntime]",
            "pruning_levels=[0.0, 0.25]"]  # fmt: skip
    found = run(folder, *command, *data, *settings(*less))
    assert found.returncode == 0, found.stderr
    return folder / "outputs", json.loads(found.stdout)


@pytest.mark.slow
def test_every_file_is_there(done: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = done
    for name in (*published.FILES, *published.QUANTIZATION[:2]):
        assert (folder / name).stat().st_size > 0, name


@pytest.mark.slow
def test_the_summary_has_every_key_and_is_printed(done: tuple[Path, dict[str, Any]]) -> None:
    folder, printed = done
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert printed == {"format": "edge_opt.run", "schema_version": 1, **summary}
    assert set(published.SUMMARY) <= set(summary)
    assert set(published.BASELINE) <= set(summary["baseline"])
    assert set(published.DEPLOYMENT) <= set(summary["deployment"])
    rows = table(folder / "sweep_results.csv")
    accepted = [row for row in rows if row["accepted"] == "True"]
    assert summary["study_rows"] == len(rows)
    assert summary["accepted_rows"] == len(accepted)
    assert summary["rejected_rows"] == len(rows) - len(accepted)
    assert summary["best_accuracy_accepted"] == max(float(row["accuracy"]) for row in accepted)
    assert summary["lowest_latency_ms_accepted"] == min(float(row["latency_ms"]) for row in accepted)
    assert summary["latency_multiplier"] == 1 / 0.7
    deployment = summary["deployment"]
    assert deployment["stream_throughput_sps"] == pytest.approx(1000 / deployment["stream_avg_latency_ms"])
    # conv1 16 x (9 + 1), conv2 32 x (16 x 9 + 1), classifier 10 x (32 x 49 + 1), 4 bytes each
    assert summary["baseline"]["memory_mb"] == 4 * (160 + 4640 + 15690) / 2**20
    assert summary["baseline"]["accepted_under_active_budget"] is True


@pytest.mark.slow
def test_the_default_constraint_is_said(done: tuple[Path, dict[str, Any]]) -> None:
    _, summary = done
    assert summary["constraints"] == ["accuracy_drop <= 0.01", "model_mb <= 2"]
    assert any("accuracy_drop <= 0.01" in note and "`budgets: []`" in note for note in summary["notes"])


@pytest.mark.slow
def test_reproducibility_has_every_key(done: tuple[Path, dict[str, Any]]) -> None:
    found = json.loads((done[0] / "reproducibility.json").read_text(encoding="utf-8"))
    assert set(published.REPRODUCIBILITY) <= set(found)
    assert set(found["cpu"]) == {"processor", "machine", "platform"}
    assert (found["seed"], found["dataloader_seed"]) == (7, 7)
    assert (found["device_requested"], found["device_resolved"], found["model"]) == ("cpu", "cpu", "SmallCNN")
    assert "torch" in found["packages"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep_results.csv", "pareto_frontier_latency.csv", "pareto_frontier_energy.csv"])
def test_tables_have_every_column(done: tuple[Path, dict[str, Any]], name: str) -> None:
    rows = table(done[0] / name)
    assert rows and set(published.COLUMNS) <= set(rows[0])
    for row in rows:
        if row["status"] == "failed":
            # As where a runtime has no fp16 kernels: a row with its reason, and no figures that are not its own.
            assert (row["accepted"], row["accuracy"]) == ("False", "") and row["error"] == row["reason"] != ""
            continue
        assert row["memory_mb"] == row["model_memory_mb"]
        assert row["latency_ms"] == row["latency_median_ms"]
        assert row["active_budget_mb"] == "2.0"
        assert row["violates_1.0mb"] == str(float(row["memory_mb"]) > 1.0)
        assert float(row["memory_mb"]) < float(row["estimated_runtime_memory_mb"]) == float(row["peak_memory_mb"])
        assert row["error"] == ""
    assert {float(row["pruning_level"]) for row in rows} <= {0.0, 0.25, 0.5, 0.7}


@pytest.mark.slow
def test_quantization_metadata_is_what_int8_came_to(done: tuple[Path, dict[str, Any]]) -> None:
    found = json.loads((done[0] / published.QUANTIZATION[1]).read_text(encoding="utf-8"))
    assert (found["pruning_level"], found["precision"], found["backend"]) == (0.25, "int8", "fbgemm")
    assert found["runtimes"]["onnxruntime"]["effective_precision"].startswith("int8")


@pytest.mark.slow
def test_several_seeds_as_documented(tmp_path: Path) -> None:
    data = prepared(tmp_path)
    found = run(
        tmp_path, "experiments/multi_seed.py", "--config-template", "configs/default.yaml", "--seeds", "1", "2",
        "--output-dir", "many", *data, *settings(*TINY),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert {path.name for path in (tmp_path / "many").iterdir()} >= {"seed-1", "seed-2", "aggregate.csv"}
    assert not (tmp_path / "outputs").exists()


def run_quickly(command: str, folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [*shlex.split(command), str(ROOT / script), *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_hardware_tables_as_documented(tmp_path: Path, edge_opt_command: str) -> None:
    found = run_quickly(edge_opt_command, tmp_path, "scripts/generate_hardware_tables.py", "--output-dir", "tables")
    assert found.returncode == 0, found.stderr
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names >= {"layerwise_breakdown.csv", "precision_tradeoffs.csv", "hardware_summary.csv"}
    assert names >= {"operator_profile.csv", "hardware_totals.csv"}
    assert [row["macs"] for row in table(tmp_path / "tables" / "layerwise_breakdown.csv")] == [
        "3612672", "28901376", "501760",
    ]  # fmt: skip
    assert set(published.HARDWARE) <= set(table(tmp_path / "tables" / "hardware_summary.csv")[0])


def test_the_template_is_printed_and_reads_back(tmp_path: Path, edge_opt_command: str) -> None:
    found = run_quickly(edge_opt_command, tmp_path, "scripts/run_pipeline.py", "--config-template")
    assert (found.returncode, found.stdout) == (0, template())
    assert yaml.safe_load(found.stdout)["output_dir"] == "outputs"
    assert not list(tmp_path.iterdir())


def test_the_configuration_is_read_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "default.yaml"
    file.write_text(published.CONFIG, encoding="utf-8")
    config = read_config(file)
    assert config.model_reference == "edge_opt.model:SmallCNN(conv1_channels=16, conv2_channels=32, num_classes=10)"
    assert config.all_budgets == ("accuracy_drop <= 0.01", "model_mb <= 2")
    file.write_text(published.CONFIG.replace("val_subset: 3000", "val_subset: null"), encoding="utf-8")
    assert read_config(file).val_subset is None


def test_without_a_number_validation_is_as_large_as_the_test_part() -> None:
    from edge_opt.data import load_splits

    sizes = load_splits("digits", val_subset=None, train_subset=64).sizes()
    assert sizes["validation"] == sizes["test"] == 359


@pytest.mark.parametrize("model", ["nowhere.py:net", "wrong.py:net"])
def test_a_refused_model_leaves_nothing(tmp_path: Path, model: str, edge_opt_command: str) -> None:
    (tmp_path / "wrong.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(3, 10)\n")
    before = sorted(tmp_path.iterdir())
    (tmp_path / "run.yaml").write_text(f"dataset: digits\nmodel: {model}\noutput_dir: out\n", encoding="utf-8")
    found = run_quickly(edge_opt_command, tmp_path, "scripts/run_pipeline.py", "--config", "run.yaml")
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    left = {path.name for path in tmp_path.iterdir()} - {path.name for path in before} - {"run.yaml", "__pycache__"}
    assert left == set()
