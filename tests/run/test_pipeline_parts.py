"""The parts of a run that need no run: deployment, scores, aggregation, reproducibility."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import edge_opt as eo
from edge_opt.boards.capacity import peak_memory
from edge_opt.data import load_splits
from edge_opt.errors import InvalidConfig, InvalidInput, MeasurementFailed
from edge_opt.measuring.statistics import wilson
from edge_opt.model import SmallCNN
from edge_opt.records.sweeps import Candidate, SweepResult, Trial, TrialMetrics
from edge_opt.run.config import RunConfig
from edge_opt.run.model_and_data import summarize_score
from edge_opt.run.pipeline import run
from edge_opt.run.run_summary import commit, reproducibility, simulate_deployment
from edge_opt.run.seeds import aggregate, flat, mean_of
from edge_opt.tasks.batches import task_of


def test_a_slower_clock_takes_longer_for_batches_and_streams() -> None:
    # 8 ms per batch of 16 and 2 ms per sample here; a clock of 0.4 times takes 2.5 times as long
    found = simulate_deployment(0.008, 0.002, batch_size=16, cpu_frequency_scale=0.4, stream_interval_s=0.02)
    assert found["batch_latency_ms"] == pytest.approx(20.0)
    assert found["batch_throughput_sps"] == pytest.approx(16 / 0.020)
    assert found["stream_latency_ms"] == pytest.approx(5.0)
    assert found["stream_utilization"] == pytest.approx(5 / 20)
    assert found["stream_throughput_sps"] == pytest.approx(200)  # all that could be done
    assert found["stream_served_sps"] == pytest.approx(50)  # all that arrives
    assert found["stream_keeps_up"] and found["stream_backlog_sps"] == 0


def test_a_stream_that_is_too_fast_leaves_a_backlog() -> None:
    # a sample every 1 ms, and 4 ms each: 250 of 1000 per second are done
    found = simulate_deployment(0.01, 0.004, batch_size=4, stream_interval_s=0.001)
    assert found["stream_utilization"] == 1.0 and not found["stream_keeps_up"]
    assert (found["stream_served_sps"], found["stream_backlog_sps"]) == (pytest.approx(250), pytest.approx(750))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_clock_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(InvalidInput, match="must all be above 0"):
        simulate_deployment(0.01, 0.01, batch_size=1, cpu_frequency_scale=scale)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_s_interval_solves_its_equation(counts: tuple[int, int]) -> None:
    share = counts[0] / counts[1]
    low, high = wilson(*counts)
    assert 0 <= low <= share <= high <= 1 and low < high
    for bound in (low, high):
        if 0 < bound < 1 and bound != share:
            # the bound is where the share is 1.96 standard errors away
            error = math.sqrt(bound * (1 - bound) / counts[1])
            assert abs(share - bound) == pytest.approx(1.959963984540054 * error, rel=1e-6, abs=1e-9)


def test_answers_are_counted_over_all_batches() -> None:
    batches = [(torch.eye(4), torch.tensor([0, 1, 2, 0])), (torch.eye(4)[:1], torch.tensor([[0]]))]
    for model in (lambda x: x, lambda x: (x,), lambda x: [x.numpy()], lambda x: {"logits": x}):
        found = summarize_score(task_of().score(model, batches))
        assert (found.value, found.samples) == (4 / 5, 5)


@pytest.mark.parametrize(
    ("run", "error", "sentence"),
    [
        (lambda x: x * np.nan, MeasurementFailed, "outputs of batch 0 are NaN"),
        (lambda x: x.sum(0), InvalidInput, "do not fit"),
        (lambda x: "yes", InvalidInput, "the model returns a str"),
    ],
)
def test_answers_without_meaning_are_refused(run: object, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        task_of().score(run, [(torch.eye(2), torch.tensor([0, 1]))])


def test_no_batches_have_no_accuracy() -> None:
    with pytest.raises(InvalidInput, match="no batches"):
        task_of().score(lambda x: x, [])


def test_a_mean_over_seeds_has_student_s_interval() -> None:
    found = mean_of([0.9, 0.92, 0.97, 0.93])
    # mean 0.93; deviations -0.03 -0.01 0.04 0 -> variance 0.0026 / 3; t(3) = 3.182446
    half = 3.182446 * math.sqrt(0.0026 / 3) / 2
    assert (found.mean, found.low, found.high) == pytest.approx((0.93, 0.93 - half, 0.93 + half))
    assert mean_of([0.5]).low is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=200))
def test_an_interval_holds_its_mean(values: list[float]) -> None:
    found = mean_of(values)
    assert found.low is not None and found.high is not None
    assert found.low <= found.mean <= found.high


def test_int8_weights_take_a_byte_and_biases_four() -> None:
    profile = eo.profile(SmallCNN(16, 32), (2, 1, 28, 28))
    found = peak_memory(profile, lifetimes="planner", layers=dict.fromkeys(("conv1", "conv2", "classifier"), "int8"))
    weights, biases = 16 * 9 + 32 * 16 * 9 + 10 * 32 * 49, 16 + 32 + 10
    assert found.weight_bytes == weights + 4 * biases
    # two images of float32, and a quarter of the planned activations
    assert found.total_bytes == found.weight_bytes + 2 * 784 * 4 + profile.peak.planner_bytes // 4
    assert found == peak_memory(profile, "int8", lifetimes="planner")


def test_a_layer_that_stayed_in_float_counts_as_float() -> None:
    profile = eo.profile(SmallCNN(16, 32), (2, 1, 28, 28))
    found = peak_memory(profile, layers={"conv2": "int8", "conv1": "fp32"})
    assert found.weight_bytes == 4 * profile.totals.params - 3 * 32 * 16 * 9
    assert found.total_bytes == found.weight_bytes + 2 * 784 * 4 + profile.peak.live_bytes


def test_a_device_that_is_not_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cuda:99"):
        run(RunConfig(device="cuda:99"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def metrics(accuracy: float, latency_s: float) -> TrialMetrics:
    return TrialMetrics(
        accuracy, accuracy, accuracy, 0.0, latency_s, latency_s, latency_s, 0.0, latency_s, latency_s, 8, 8 / latency_s,
        100, 120, 300, 2 * latency_s, "proxy", 10, 5, 1.0, 1.0, "fp32",
    )  # fmt: skip


def sweep(*figures: tuple[float, float] | None) -> SweepResult:
    trials = []
    for index, pair in enumerate(figures):
        candidate = Candidate(index / 10, "fp32", "torch")
        found = None if pair is None else metrics(*pair)
        failure, status = (None, "done") if found else ("crashed", "failed")
        trials.append(Trial(candidate, status, found, failure, "", (), 1.0))  # type: ignore[arg-type]
    return SweepResult("net", trials[0], tuple(trials), (), (), trials[0].candidate.key, "")


def test_seeds_are_put_together_candidate_by_candidate() -> None:
    rows = aggregate({1: sweep((0.9, 0.01), (0.8, 0.02)), 2: sweep((0.94, 0.03), None)})
    first, second = rows
    assert first["accuracy"].mean == pytest.approx(0.92) and first["latency_s"].mean == pytest.approx(0.02)
    assert (first["finished"], first["accepted"], first["best"]) == (2, 2, 2)
    assert (second["seeds"], second["finished"], second["accepted"]) == (2, 1, 1)
    assert second["accuracy"].low is None and second["test_accuracy"] is None
    table = flat(rows)
    assert table[0]["accuracy_mean"] == pytest.approx(0.92) and table[1]["test_accuracy_mean"] is None


def test_a_commit_is_named_inside_of_git_only(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("1")
    for step in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *step], cwd=tmp_path, check=True)
    clean = commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == f"{clean}+changes"


def test_what_a_result_depends_on_is_written_down() -> None:
    splits = load_splits("digits", train_subset=64, val_subset=32)
    found = reproducibility(RunConfig(seed=3), {"seed": 3}, splits, ["edge-opt", "run"], "net")
    assert found["seeds"] == {"seed": 3, "dataloader_seed": None} and found["dataloader_seed"] == found["seed"] == 3
    assert found["data"] == {"sha256": dict(splits.fingerprints()), "samples": dict(splits.sizes())}
    assert found["versions"]["torch"] is not None
    assert found["machine"]["cores"] >= 1 and found["command"] == ["edge-opt", "run"]
