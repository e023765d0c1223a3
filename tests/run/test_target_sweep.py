"""Sweeps that a target decides: one answer, undecided budgets, times measured there, several targets."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edge_opt as eo
from edge_opt import units
from edge_opt.boards.targets import resolve_target
from edge_opt.budgets import judged, parse_budgets
from edge_opt.errors import EdgeOptError, InvalidInput
from edge_opt.measuring import ssh_board
from edge_opt.pruning.ranking import fast_multiple
from edge_opt.records.sweeps import Candidate, SweepResult, TargetFigures, Trial
from edge_opt.report.page_data import page_data
from edge_opt.report.sweep_files import load_sweep
from edge_opt.run.config import RunConfig
from edge_opt.run.screen_runtimes import slower_pairs
from edge_opt.run.target_sweep import TargetFiguring, computed_in, runtime_here, targets_by_pair
from edge_opt.search.choose import recommend, reject_slower_than_unpruned
from edge_opt.search.space import Pair
from edge_opt.search.sweep import candidate_folder
from edge_opt.search.sweep_progress import status_text
from ssh_server import HOST, SshServer
from tflite_graphs import Graph, Scaled, conv, write
from trial_metrics import METRICS

pytestmark = pytest.mark.slow
PI = "raspberry-pi-4"
ACCEPTS_ALL = "accuracy_drop <= 100%"


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
        )  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def loaders() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 3, 24, 24, generator=generator), torch.randint(4, (64,), generator=generator)
    return {name: DataLoader(TensorDataset(x, y), 16) for name in ("train", "validation")}


def swept(folder: Path, **settings: Any) -> SweepResult:
    # LiteRT, which the target runs as well, converts for a long time.
    options = {"target": PI, "budgets": [ACCEPTS_ALL], "host_timing": False, "runtimes": ["onnxruntime"], **settings}
    here = f"{Path(__file__)}:"
    return eo.sweep(
        f"{here}model", f"{here}loaders", output=folder, pruning_levels=[0.0, 0.5], fine_tune_epochs=0, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def result(folder: Path) -> SweepResult:
    return swept(folder)


def figures(result: SweepResult) -> dict[str, TargetFigures]:
    found = {trial.candidate.key: trial.metrics.target for trial in result.trials if trial.metrics}
    return {key: it for key, it in found.items() if it is not None}


def test_every_row_has_the_answer_of_profile(result: SweepResult, folder: Path) -> None:
    assert len(figures(result)) == 4
    for trial in result.trials:
        there = trial.metrics.target if trial.metrics else None
        assert there is not None and trial.metrics is not None
        saved = eo.load(folder / "candidates" / trial.candidate.key / "profile.json")
        predicted = eo.estimate(saved, PI, trial.candidate.precision)
        assert (there.seconds, there.low, there.high) == (predicted.seconds, predicted.low, predicted.high)
        assert there.ram_bytes == eo.peak_memory(saved, trial.candidate.precision, lifetimes="planner").total_bytes
        assert there.kind == "predicted" and there.flash_bytes == trial.metrics.size_bytes
        assert trial.metrics.latency_s is None and trial.metrics.deploy_latency_s is None


def test_the_exported_file_has_the_answer_of_its_row(result: SweepResult, folder: Path) -> None:
    best = result.trial(str(result.best))
    assert best.metrics is not None
    profiled = eo.profile(folder / "best" / "model.onnx", (1, 3, 24, 24))
    assert eo.estimate(profiled, PI, best.candidate.precision).seconds == pytest.approx(best.metrics.target_latency_s)
    spec = json.loads((folder / "best" / "spec.json").read_text())
    assert spec["metrics"]["target"]["seconds"] == best.metrics.target_latency_s


def test_the_fastest_there_wins_and_files_say_so(result: SweepResult, folder: Path) -> None:
    seconds = {key: it.seconds for key, it in figures(result).items()}
    assert result.best == min(seconds, key=lambda key: seconds[key] or math.inf)
    assert result.speedup is not None and result.speedup.clock == "predicted"
    with (folder / "sweep_results.csv").open(newline="") as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    for key, row in rows.items():
        assert float(row["target_latency_ms"]) == pytest.approx(1e3 * (seconds[key] or 0))
        assert float(row["target_latency_low_ms"]) < float(row["target_latency_ms"])
        assert (row["target_latency_kind"], row["latency_ms"], row["target"]) == ("predicted", "", PI)
    card = (folder / "best" / "MODEL_CARD.md").read_text()
    assert f"latency on {PI}" in card and "pnnx" in card
    assert PI in (folder / "report.html").read_text()


def test_a_second_target_ranks_the_same_builds(result: SweepResult, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder / "candidates").rglob("*.onnx")}
    other = swept(folder, target=[PI, "raspberry-pi-5"])
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "candidates").rglob("*.onnx")}
    assert (other.target, other.best) == (PI, result.best)
    assert [winner.target for winner in other.winners] == [PI, "raspberry-pi-5"]
    best = other.winners[0].candidate
    assert best is not None and best.key == result.best
    shown = page_data(sweep=load_sweep(folder))["sweep"]["winners"]
    assert shown["headers"][:2] == ["Target", "Ship"] and shown["rows"][0][:2] == [PI, best.title]
    # Pruned variants were made for the first target.
    with pytest.raises(EdgeOptError, match="raspberry-pi-5/cpu"):
        swept(folder, target="raspberry-pi-5")


def test_a_typed_time_moves_the_rest_by_its_factor(result: SweepResult, folder: Path) -> None:
    before = figures(result)
    first = result.baseline.candidate.key
    typed = 2 * (before[first].seconds or 0)
    after = figures(swept(folder, target_times={first: 1e3 * typed}))
    assert after[first].kind == "measured" and after[first].seconds == pytest.approx(typed)
    for key in before.keys() - {first}:
        assert after[key].seconds == pytest.approx(2 * (before[key].seconds or 0))
        # What remains uncertain is the ratio to the timed variant, at most as much as the time was.
        widths = [(it[key].high or 0) / (it[key].low or 1) for it in (after, before)]
        assert widths[0] <= widths[1] * (1 + 1e-9)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    started = SshServer(tmp_path)
    monkeypatch.setenv("PATH", f"{started.bin}{os.pathsep}{os.environ['PATH']}")
    yield started
    started.close()


# Answers an order with times that it is told, instead of running the files.
SCRIPT = """
import json, sys
order, known = json.load(open(sys.argv[1])), {known!r}
timings = [
    {{"file": name, "size": size, "wall_s": [known[name.partition(".")[0]]] * 20,
      "cpu_s": [known[name.partition(".")[0]]] * 20, "busy_cores": 0.0}}
    for name in order["files"] for size in order["sizes"]
]
machine = {{"name": "loopback", "cpu": "told", "cores": 4}}
reply = {{"timings": timings, "machine": machine, "runtime": "told", "memory_bytes": 1}}
json.dump(reply, open(sys.argv[2], "w"))
"""


def test_a_board_that_is_three_times_slower_keeps_the_winner(
    result: SweepResult, folder: Path, server: SshServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = figures(result)
    known = {key: 3 * (it.seconds or 0) for key, it in before.items()}
    archive = ssh_board._archive

    def told(content: dict[str, bytes]) -> bytes:
        return archive({**content, ssh_board.SCRIPT: SCRIPT.format(known=known).encode()})

    monkeypatch.setattr(ssh_board, "_archive", told)
    monkeypatch.setattr("edge_opt.run.time_finalists._CONTENDERS", 1)
    monkeypatch.setattr("edge_opt.run.time_finalists._ON_THE_FRONTIER", 1)
    measured = swept(folder, measure_on=f"{HOST}:{sys.executable}")
    assert measured.best == result.best
    after = figures(measured)
    assert {it.kind for it in after.values()} >= {"measured"} and measured.speedup is not None
    for key, there in after.items():
        assert there.seconds == pytest.approx(3 * (before[key].seconds or 0), rel=1e-3)


def row(seconds: float, low: float, high: float) -> Any:
    there = TargetFigures(PI, "x", "predicted", seconds, low, high, 400 * 1024, 10, None)
    return replace(METRICS, target=there)


@pytest.mark.parametrize(
    ("text", "is_broken", "is_open"),
    [
        ("target_latency_ms <= 13", False, False),
        ("target_latency_ms <= 11", False, True),
        ("target_latency_ms <= 7", True, False),
        ("target_latency_ms >= 9", False, True),
        ("target_ram_kib <= 400", False, False),
        ("target_ram_kib <= 399", True, False),
        ("target_energy_j <= 1", True, False),
    ],
)
def test_a_budget_holds_fails_or_is_undecided_by_the_interval(text: str, is_broken: bool, is_open: bool) -> None:
    broken, undecided = judged(row(0.010, 0.008, 0.0125), parse_budgets([text]))
    assert (bool(broken), bool(undecided)) == (is_broken, is_open)
    if undecided and "<=" in text:
        assert undecided[0].probability is not None and 0.5 < undecided[0].probability < 0.95


def test_an_undecided_winner_names_what_to_time(folder: Path, result: SweepResult) -> None:
    best = figures(result)[str(result.best)]
    limit = 1e3 * ((best.seconds or 0) + (best.low or 0)) / 2
    asked = swept(folder, budgets=[f"target_latency_ms <= {limit}", ACCEPTS_ALL])
    assert not asked.accepted and asked.best is not None
    assert f"--set target_times.{asked.best}=MS" in asked.recommendation
    chance = asked.trial(asked.best).probability
    assert chance is not None and 0.05 < chance < 0.5


def test_every_runtime_of_the_target_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGE_OPT_RUNTIMES", raising=False)
    config = RunConfig(target=PI)
    assert config.used_runtimes == ["onnxruntime", "litert"]
    names = {pair: it.platform.name for pair, it in targets_by_pair(config)[0].items() if it.platform}
    assert names == {
        ("fp32", "onnxruntime"): f"{PI}/cpu-4/ncnn/fp32",
        ("int8", "onnxruntime"): f"{PI}/cpu-4/ncnn/int8",
        ("fp32", "litert"): f"{PI}/cpu-4/xnnpack/fp32",
        ("int8", "litert"): f"{PI}/cpu-4/xnnpack/int8",
    }
    times: dict[Pair, float] = {
        ("fp32", "onnxruntime"): 3.0, ("int8", "onnxruntime"): 2.0, ("fp32", "litert"): 2.5, ("int8", "litert"): 1.0,
    }  # fmt: skip
    assert list(slower_pairs(times, always="onnxruntime")) == [("fp32", "litert")]
    assert RunConfig(target=PI, target_runtime="xnnpack").used_runtimes == ["litert"]
    assert RunConfig(target=PI, runtimes=["openvino"]).used_runtimes == ["openvino"]


def test_float_files_are_predicted_in_fp16_where_a_target_has_no_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGE_OPT_RUNTIMES", raising=False)
    there = targets_by_pair(RunConfig(target="galaxy-s24", runtimes=["onnxruntime"]))[0]
    known = {pair: it.platform.precision for pair, it in there.items() if it.platform}
    assert known["fp32", "onnxruntime"] == "fp16" and known["int8", "onnxruntime"] == "int8"
    assert computed_in(there["fp32", "onnxruntime"], "fp32") == "fp16"
    # fp16 is a candidate only where it is asked for.
    assert {precision for precision, _ in known} == {"fp32", "int8"}
    pi = targets_by_pair(RunConfig(target=PI, runtimes=["onnxruntime"]))[0]
    assert computed_in(pi["fp32", "onnxruntime"], "fp32") == "fp32"


@pytest.mark.parametrize(("kind", "runtime"), [("TfliteModel", "xnnpack"), ("OnnxModel", "ncnn"), ("Net", "ncnn")])
def test_a_file_is_answered_for_by_a_runtime_that_takes_it(kind: str, runtime: str) -> None:
    platform = resolve_target(PI, "int8", model=type(kind, (), {})()).platform
    assert platform is not None and platform.runtime == runtime
    # Where no runtime takes the file, any answers; a runtime that is named is the one.
    assert resolve_target("orange-pi-zero-2", model=type(kind, (), {})()).platform is not None
    named = resolve_target(PI, "int8", runtime="ncnn", model=type(kind, (), {})()).platform
    assert named is not None and named.runtime == "ncnn"


def test_what_a_target_runs() -> None:
    assert runtime_here(resolve_target(PI, runtime="xnnpack").platform) == "litert"
    assert runtime_here(resolve_target("stm32h747", "int8").platform) == "onnxruntime"
    assert fast_multiple(resolve_target(PI)) == 8
    assert fast_multiple(resolve_target("stm32h747", "int8")) == 4


def test_prune_for_a_latency_there_has_the_widths_of_the_sweep(result: SweepResult, folder: Path) -> None:
    pruned = next(it for it in result.trials if it.candidate.pruning == 0.5 and it.candidate.precision == "fp32")
    seconds = {key: it.seconds or 0 for key, it in figures(result).items()}
    share = seconds[pruned.candidate.key] / seconds[result.baseline.candidate.key]
    alone = eo.prune(model(), (1, 3, 24, 24), latency_target=share, target=PI)
    assert alone.achieved.latency_ratio == pytest.approx(share)
    saved = eo.load(folder / "candidates" / pruned.candidate.key / "profile.json")
    widths = [layer.call.output_shapes for layer in eo.profile(alone.model, (1, 3, 24, 24)).layers if layer.cost.macs]
    assert widths == [layer.call.output_shapes for layer in saved.layers if layer.cost.macs]


def test_one_file_has_one_answer_everywhere(folder: Path) -> None:
    result = swept(folder)  # other tests write to the folder as well
    best = result.trial(str(result.best))
    there = best.metrics.target if best.metrics else None
    assert there is not None and there.seconds is not None
    file = folder / "best" / "model.onnx"
    predicted = eo.profile(file, target=PI).prediction
    assert predicted is not None and predicted.precision == best.candidate.precision
    # The file that was exported, and the profile that its build left.
    assert (predicted.seconds, predicted.low, predicted.high) == pytest.approx((there.seconds, there.low, there.high))
    milliseconds = 1e3 * there.seconds
    with (folder / "sweep_results.csv").open(newline="") as csv_file:
        row_there = next(row for row in csv.DictReader(csv_file) if row["key"] == result.best)
    assert float(row_there["target_latency_ms"]) == pytest.approx(milliseconds)
    checked = eo.check(file, f"predicted_ms <= {milliseconds}", target=PI)
    assert checked.budgets[0].value == pytest.approx(milliseconds)
    text = units.duration(there.seconds)
    assert text in (folder / "best" / "MODEL_CARD.md").read_text()
    shown = page_data(sweep=load_sweep(folder))
    card = next(card for card in shown["cards"] if card["label"] == f"Latency on {PI}")
    assert (card["value"], card["provenance"]) == (pytest.approx(there.seconds), "predicted")
    assert PI in shown["verdict"][0] and text in shown["verdict"][0]
    why = result.explanation
    assert why is not None and why.latency is not None and why.latency.after_s == there.seconds
    assert shown["explanation"]["target"] == PI and shown["explanation"]["headline"].startswith(why.headline)


def test_each_onnx_file_of_a_sweep_has_the_figures_of_its_row(folder: Path) -> None:
    for trial in swept(folder).trials:
        there = trial.metrics and trial.metrics.target
        [file] = (folder / "candidates" / trial.candidate.key).glob("*.onnx")
        assert there is not None and there.seconds is not None and there.ram_bytes is not None
        kib = there.ram_bytes / 1024
        checked = eo.check(file, "target_latency_ms <= 20", f"target_ram_kib <= {kib}", target=PI)
        assert [budget.value for budget in checked.budgets] == pytest.approx([1e3 * there.seconds, kib])
        [fit] = eo.compare_targets(file, targets=[PI], lifetimes="planner").targets
        assert (fit.prediction.seconds, fit.needed_bytes) == (pytest.approx(there.seconds), there.ram_bytes)


def test_a_tflite_file_has_one_answer_on_a_microcontroller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGE_OPT_RUNTIMES", raising=False)
    target, candidate = "stm32h747", Candidate(0.0, "int8", "litert")
    at = candidate_folder(tmp_path, candidate)
    at.mkdir(parents=True)
    shapes = {"x": (1, 16, 16, 8), "a": (1, 16, 16, 16), "y": (1, 16, 16, 8)}
    first, second = np.ones((16, 3, 3, 8), np.int8), np.ones((8, 3, 3, 16), np.int8)
    tensors = {name: Scaled(shape, "int8", 0.05, 0) for name, shape in shapes.items()} | {"w": first, "v": second}
    graph = Graph([conv("CONV_2D", "x w", "a"), conv("CONV_2D", "a v", "y")], tensors, "x", "y")
    file = Path(write(at / "net.tflite", graph))
    eo.profile(file).save(at / "profile.json")
    figuring = TargetFiguring(config := RunConfig(target=target), tmp_path, targets_by_pair(config)[0], candidate)
    trial = figuring(Trial(candidate, "done", METRICS, None, "", (), 0.0))
    there, predicted = trial.metrics and trial.metrics.target, eo.profile(file, target=target).prediction
    assert there is not None and predicted is not None and predicted.mcu is not None
    assert (there.seconds, there.low, there.high) == (predicted.seconds, predicted.low, predicted.high)
    assert (there.ram_bytes, there.flash_bytes) == (predicted.mcu.arena_bytes, predicted.mcu.flash_bytes)
    names = ("target_latency_s", "target_ram_bytes", "target_flash_bytes")
    checked = eo.check(file, *[f"{name} <= 1e9" for name in names], target=target)
    assert [budget.value for budget in checked.budgets] == [there.seconds, there.ram_bytes, there.flash_bytes]
    # TFLM does not take ONNX, so that such a variant has no time there.
    assert figuring.prediction(Candidate(0.0, "int8", "onnxruntime")) is None


def test_a_pruned_variant_without_a_time_there_is_not_called_slower_than_unpruned() -> None:
    unknown = TargetFigures(PI, "not known", "predicted", None, None, None, 1, 1, None)
    whole, pruned, timed = (Candidate(share, "fp32", name) for share, name in ((0.0, "a"), (0.5, "a"), (0.5, "b")))
    rows = [(whole, unknown), (pruned, unknown), (timed, row(0.010, 0.008, 0.0125).target)]
    trials = [Trial(it, "done", replace(METRICS, target=there), None, "", (), 0.0) for it, there in rows]
    assert [trial.violations for trial in reject_slower_than_unpruned(trials)] == [(), (), ()]
    best, why = recommend(trials)
    assert best == timed.key and why.endswith("2 more without a known latency")
    assert "latency not known" in status_text(trials[0])


def test_no_host_timing_needs_a_target(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no target"):
        swept(tmp_path, target=None)
