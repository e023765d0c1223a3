"""Every snippet of the five published documents, unchanged, with the values that they promise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import edge_opt as eo
import rasp
import seed_snippets as snippets
from edge_opt.hardware import (
    LayerEstimate,
    estimate_layerwise_stats,
    explain_utilization,
    precision_tradeoff_table,
    save_hardware_artifacts,
)
from edge_opt.metrics import collect_metrics
from edge_opt.model import SmallCNN
from edge_opt.pruning import structured_channel_prune
from edge_opt.run.config import read_config
from zoo import torchvision_models

# Batch 32. conv1 32x16x28x28 outputs of 9 products, 16 x (9 + 1) parameters; conv2 32x32x14x14 of 16 x 9; the
# classifier 32x10 of 32 x 49. (The sample table in the document contradicts its own formulas.)
EXPECTED = [
    ["conv1", 32 * 16 * 784, 4 * 160, 4 * 32 * 16 * 784, 32 * 16 * 784 * 9],
    ["conv2", 32 * 32 * 196, 4 * 4640, 4 * 32 * 32 * 196, 32 * 32 * 196 * 16 * 9],
    ["classifier", 320, 4 * 15690, 4 * 320, 320 * 32 * 49],
]
COLUMNS = ["layer", "output_elements", "parameter_bytes", "activation_bytes", "macs"]
SUMMARY = [
    "estimated_total_bytes", "estimated_total_macs", "achieved_bandwidth_gbps", "configured_memory_bandwidth_gbps",
    "bandwidth_utilization", "achieved_gmacs",
]  # fmt: skip


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A session; figures are drawn where there is no screen."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    import matplotlib

    matplotlib.use("Agg")
    return {"__name__": "snippet"}


def test_layer_wise_analysis(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(snippets.LAYERWISE_EXAMPLE, names)
    exec(snippets.LAYERWISE_SIGNATURE, names)
    assert list(names["layerwise_df"].columns) == COLUMNS
    assert names["layerwise_df"].values.tolist() == EXPECTED
    exec(snippets.LAYERWISE_OUTPUT_SHAPE, names)
    assert names["_conv2d_output_shape"](28, 28, 3, 1) == (28, 28)
    exec(snippets.LAYERWISE_BOTTLENECKS, names)
    assert names["top_activation_layers"]["layer"].tolist() == ["conv1", "conv2", "classifier"]
    exec(snippets.LAYERWISE_DISTRIBUTION, names)
    assert names["layerwise_df"]["mac_percentage"].sum() == pytest.approx(100)
    exec(snippets.LAYERWISE_BATCHES, names)
    per_sample = sum(row[3] for row in EXPECTED) / 32 / 1024**2
    assert names["total_memory"] == pytest.approx([size * per_sample for size in (1, 8, 16, 32, 64)])
    assert "Top memory consumers:" in capsys.readouterr().out


def test_layer_wise_analysis_and_bandwidth_in_the_pipeline(names: dict[str, Any]) -> None:
    batch = torch.zeros(32, 1, 28, 28), torch.zeros(32, dtype=torch.int64)
    names |= {
        "baseline_model": SmallCNN(),
        "cfg": read_config(settings=["batch_size=32", "memory_bandwidth_gbps=4.3"]),
        "baseline_metrics": collect_metrics(SmallCNN(), [batch], "cpu", 2.0, "fp32"),
    }
    exec("from edge_opt.hardware import estimate_layerwise_stats, summarize_hardware", names)
    exec(snippets.LAYERWISE_PIPELINE, names)
    first = names["hardware_summary"]
    exec(snippets.BANDWIDTH_SIGNATURE, names)
    exec(snippets.BANDWIDTH_PIPELINE, names)
    assert first == names["hardware_summary"]
    assert first["estimated_total_macs"] == sum(row[4] for row in EXPECTED)


def test_bandwidth(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(snippets.BANDWIDTH_EXAMPLE, names)
    summary, latency_ms = names["summary"], names["metrics"].latency_ms
    assert list(summary)[:6] == SUMMARY
    names |= {"latency_ms": latency_ms, "memory_bandwidth_gbps": 4.3}
    exec(snippets.BANDWIDTH_FORMULAS, names)
    assert summary["estimated_total_bytes"] == names["total_bytes"] == sum(row[2] + row[3] for row in EXPECTED)
    for figure in ("achieved_bandwidth_gbps", "bandwidth_utilization", "achieved_gmacs"):
        assert summary[figure] == names[figure], figure
    exec(snippets.BANDWIDTH_DEVICES, names)
    names |= {
        "baseline_df": estimate_layerwise_stats(SmallCNN(), batch_size=32),
        "pruned_df": estimate_layerwise_stats(structured_channel_prune(SmallCNN(), 0.5), batch_size=32),
    }
    exec(snippets.BANDWIDTH_TRACKING, names)
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == [
        "Achieved bandwidth", "Utilization", "Compute throughput", "Raspberry Pi 4", "Jetson Nano", "Desktop CPU",
        "Baseline", "Pruned", "Reduction",
    ]  # fmt: skip


@pytest.mark.parametrize(("share", "word"), [(0.9, "memory-bound"), (0.5, "balanced"), (0.1, "compute-bound")])
def test_utilization_reads_as_the_document_says(share: float, word: str) -> None:
    assert word in explain_utilization(share).lower()


def test_the_module_reference(tmp_path: Path) -> None:
    assert list(LayerEstimate.__dataclass_fields__) == COLUMNS
    rows = [
        ("fp32", 0.9, 4.0, 2.0, 0.2, True),
        ("int8", 0.8, 1.0, 0.5, 0.1, False),
        ("fp32", 0.7, 2.0, 1.0, 0.1, False),
    ]
    sweep = pd.DataFrame(
        rows, columns=["precision", "accuracy", "latency_ms", "memory_mb", "energy_proxy_j", "accepted"]
    )
    table = precision_tradeoff_table(sweep)
    assert list(table) == [
        "precision", "accuracy_mean", "latency_ms_mean", "memory_mb_mean", "energy_proxy_j_mean", "accepted_ratio",
    ]  # fmt: skip
    assert table["precision"].tolist() == ["int8", "fp32"]
    assert table["accepted_ratio"].tolist() == [0.0, 0.5]
    save_hardware_artifacts(tmp_path / "new", estimate_layerwise_stats(SmallCNN(), 1), table, {"achieved_gmacs": 1.0})
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "layerwise_breakdown.csv", "precision_tradeoffs.csv", "hardware_summary.csv",
        "layerwise_activation_memory.png", "layerwise_macs.png",
    }  # fmt: skip


def test_the_stream_by_the_names_of_its_document(tmp_path: Path) -> None:
    from edge_opt.evaluation.hardware_profile import build_hardware_profile_table, write_hardware_profile_artifacts
    from edge_opt.utils.hardware import (
        HardwareProfile,
        auto_adjust_batch_size,
        compute_utilization,
        estimate_batch_memory_mb,
    )

    profile = build_hardware_profile_table(feature_count=64, batch_size=32, stream_interval_ms=10)
    assert {"operator_profile", "totals", "precision_tradeoffs", "edge_constraints"} <= set(profile)
    assert [row["operator"] for row in profile["operator_profile"]] == [
        "input_normalization", "linear_projection", "activation", "decision_head",
    ]  # fmt: skip
    assert profile["estimate_source"].startswith("timed here")
    assert 0 < profile["totals"]["stream_utilization"] <= 1.0
    written = write_hardware_profile_artifacts(profile, str(tmp_path))
    assert written["operator_profile_csv"] == str(tmp_path / "operator_profile.csv")
    assert written["hardware_totals_csv"] == str(tmp_path / "hardware_totals.csv")
    assert written["operator_profile"] == tmp_path / "operator_profile.csv"
    limits = HardwareProfile(memory_limit_mb=0.3, compute_budget=1000)
    assert auto_adjust_batch_size(1024, 128, limits) == 256
    assert estimate_batch_memory_mb(1024, 128) == 1.0
    assert compute_utilization(2500, limits) == 1.0


class Repeats:
    """`edge_opt.measure` with two repeats instead of those asked for, which it remembers."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.measure = eo.measure

    def __call__(self, *args: Any, repeats: int, warmup: int, **options: Any) -> Any:
        self.asked.append((repeats, warmup))
        return self.measure(*args, repeats=min(repeats, 2), warmup=0, **options)


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repeats]:
    found = Repeats()
    monkeypatch.setattr(eo, "measure", found)
    yield found
    rasp.set_config({"profile": {"num_batches": 100, "warmup_batches": 10}})


@pytest.mark.slow
def test_rasp(repeats: Repeats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision_models()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippet", "torch": torch}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not available here.*")
        for text in snippets.RASP:
            exec(text, names)
    assert names["df"].loc["total", "params"] == 61_100_840
    assert (100, 10) in repeats.asked and (200, 20) in repeats.asked
    assert list((tmp_path / "reports").iterdir())
