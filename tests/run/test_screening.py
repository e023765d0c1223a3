"""Levels that are worth training, training for int8, and programs for the runtimes that ship."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edge_opt.compress import finetune, prune
from edge_opt.data import Splits, load_splits
from edge_opt.errors import Disagrees
from edge_opt.measuring.statistics import latency_of
from edge_opt.model import SmallCNN
from edge_opt.pruning.plan import make_plan
from edge_opt.records.measurements import Latency
from edge_opt.records.sweeps import Candidate
from edge_opt.run import job as job_module
from edge_opt.run import screen_runtimes, variants
from edge_opt.run.config import RunConfig
from edge_opt.run.job import Baseline, PipelineJob
from edge_opt.run.model_and_data import ModelAndData, summarize_score, torch_threads
from edge_opt.run.screening import Place, bisect_last, choose_ratios, screen
from edge_opt.run.variants import variant_of
from edge_opt.runtimes.registry import find_runtime
from edge_opt.search.space import Pair


@pytest.mark.parametrize(
    ("lack", "chosen"),
    [
        (1.0, (0.6, 8)),  # all that is allowed
        (1.5, (0.4, 8)),  # 0.6 / sqrt(1.5) is 0.49
        (9.0, (0.2, 8)),  # 0.6 / 3 is 0.2
        (100.0, (0.2, 8)),  # 0.06, and nothing is so gentle
    ],
)
def test_the_accuracy_drop_after_training_decides_the_smaller_ratio(lack: float, chosen: Place) -> None:
    trained: list[Place] = []

    def lacks(place: Place) -> float:
        trained.append(place)
        return lack

    found = choose_ratios([(0.6, 8), (0.5, "auto")], {8: [0.2, 0.4, 0.6], "auto": [0.5]}, lacks, {})
    assert found == (chosen,) and trained == [(0.6, 8)]


@pytest.mark.parametrize(("larger_gap", "kept"), [(1.0, ((0.4, 8), (0.6, 8))), (1.1, ((0.4, 8),))])
def test_a_larger_ratio_is_trained_where_the_first_loses_little(larger_gap: float, kept: tuple[Place, ...]) -> None:
    gaps = {0.4: 0.5, 0.6: larger_gap}
    ratios = {8: [0.2, 0.4, 0.6]}
    assert choose_ratios([(0.4, 8)], ratios, lambda place: gaps[place[0]], {(0.4, 8): (0.6, 8)}, 0.5) == kept
    # Where the budget leaves less room, or the larger one is hardly faster, it is not trained.
    assert choose_ratios([(0.4, 8)], ratios, lambda place: {0.4: 0.5}[place[0]], {(0.4, 8): (0.6, 8)}, 0.4) == kept[:1]
    assert choose_ratios([(0.4, 8)], ratios, lambda place: {0.4: 0.0}[place[0]], {}) == ((0.4, 8),)


def test_without_a_smaller_ratio_the_fastest_is_offered() -> None:
    assert choose_ratios([(0.5, 8)], {8: [0.5]}, lambda place: 3.0, {}) == ((0.5, 8),)
    assert choose_ratios([], {8: []}, lambda place: 0.0, {}) == ()


def test_the_largest_ratio_is_found_with_few_tries() -> None:
    seen: list[float] = []

    def holds(value: float) -> bool:
        seen.append(value)
        return value <= 9

    # 13 values are halved 4 times at most
    assert bisect_last(holds, range(13)) == 9 and len(seen) <= 4
    for guess in range(13):
        assert bisect_last(holds, range(13), guess) == 9
    seen.clear()
    # a guess that is right needs one look more, at its neighbour
    assert bisect_last(holds, range(13), 9) == 9 and seen == [9, 10]


def test_levels_together_are_what_each_is_alone() -> None:
    torch.manual_seed(0)
    model, batches = SmallCNN(16, 32), [torch.randn(16, 1, 28, 28)]
    plan = make_plan(model, (2, 1, 28, 28), importance="group", data=batches)
    # 0.1 of 16 and of 32 rounds to nothing, and 0.55 leaves 7.2 and 14.4: 8 and 16, as 0.5 does
    assert plan.distinct_ratios((0.1, 0.5, 0.55), 8, set()) == [0.5]
    alone = prune(model, (2, 1, 28, 28), 0.5, importance="group", round_to=8, loader=batches)
    together = plan.build_ratio(0.5, 8).state_dict()
    assert all(torch.equal(tensor, together[name]) for name, tensor in alone.model.state_dict().items())


def job_of(model: nn.Module, folder: Path, **settings: Any) -> tuple[PipelineJob, Splits]:
    splits = load_splits("digits", train_subset=64, val_subset=64, calibration_batches=1)
    source = ModelAndData(model, splits, RunConfig(**{"min_time_s": 0.01, "fine_tune_epochs": 1, **settings}))
    scored = summarize_score(source.task().score(source.build(), splits.validation))
    return PipelineJob(source, folder, Baseline(scored, 1, 1)), splits


def test_the_job_of_a_screening_makes_what_it_trained_and_trains_nothing_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    job, splits = job_of(SmallCNN(16, 32), tmp_path)
    with torch_threads(1):
        found = screen(job, splits, [("fp32", "onnxruntime")])
    assert found.chosen and f"{len(found.levels)} tried" in str(found)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("facts.json")}
    again = found.job(job)
    model = again.variant(splits, Candidate(found.chosen[0].share, "fp32", "torch")).model
    assert sum(each.numel() for each in model.parameters()) < sum(p.numel() for p in SmallCNN(16, 32).parameters())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("facts.json")} == made


def test_a_model_that_does_not_prune_is_swept_unpruned(tmp_path: Path) -> None:
    job, splits = job_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), tmp_path)
    found = screen(job, splits, [("fp32", "torch")])
    assert found.chosen == () and "not pruned: nothing in Sequential can be pruned" in str(found)
    # What int8 is trained for, it is still trained for.
    assert found.job(job) is job


def test_a_level_that_is_rounded_back_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, splits = job_of(SmallCNN(16, 32), tmp_path, round_to=16)
    trained: list[Any] = []
    monkeypatch.setattr(variants, "finetune", lambda *given, **settings: trained.append(given))
    found = variant_of(job.source, splits, Candidate(0.1, "fp32", "torch"), tmp_path)
    assert not trained and job.config.fine_tune_epochs > 0
    assert found.remarks[0].startswith("pruning 0.1 removes nothing: every layer is rounded back to the width it has")


def test_a_level_is_exported_once_for_all_that_is_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = job_of(SmallCNN(4, 4), tmp_path / "cache")
    made: list[Path] = []
    real = job_module.export_onnx
    monkeypatch.setattr(job_module, "export_onnx", lambda m, x, path: made.append(path) or real(m, x, path))
    for precision in ("fp32", "int8"):
        job.build(Candidate(0.0, precision, "onnxruntime"), _folder(tmp_path / precision))  # type: ignore[arg-type]
    assert len(made) == 1


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_training_for_int8_leaves_float_candidates_alone(tmp_path: Path) -> None:
    splits = load_splits("digits", train_subset=64, val_subset=32)
    source = ModelAndData(SmallCNN(4, 4), splits, RunConfig(fine_tune_epochs=1, train_for_int8=True))
    float_one = variant_of(source, splits, Candidate(0.0, "fp32", "onnxruntime"), tmp_path)
    rounded = variant_of(source, splits, Candidate(0.0, "int8", "onnxruntime"), tmp_path)
    before = source.build().state_dict()
    assert float_one.folder is None and rounded.folder is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in float_one.model.state_dict().items())
    assert not torch.equal(rounded.model.conv1.weight, before["conv1.weight"])
    assert rounded.model.conv1.weight.shape == before["conv1.weight"].shape


@pytest.mark.slow
def test_int8_that_loses_too_much_or_is_refused_is_trained_with_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = load_splits("digits", train_subset=512, val_subset=64, calibration_batches=1)
    torch.manual_seed(0)
    net = finetune(SmallCNN(8, 8), splits.train, epochs=2, learning_rate=1e-2, progress=False).model.eval()
    inputs = next(iter(splits.validation))[0]
    with torch.no_grad():
        # The same function, with one channel 150 times as large: most of the others is lost in its rounding.
        largest = int(torch.relu(net.conv1(inputs)).mean((0, 2, 3)).argmax())
        net.conv1.weight[largest] *= 150
        net.conv1.bias[largest] *= 150
        net.conv2.weight[:, largest] /= 150
    source = ModelAndData(net, splits, RunConfig(fine_tune_epochs=2, min_time_s=0.01))
    scored = summarize_score(source.task().score(net, splits.validation))
    job = PipelineJob(source, tmp_path / "cache", Baseline(scored, 1, 1))
    real = PipelineJob._converted

    def refuse(job: PipelineJob, *arguments: Any, rounds: bool = False) -> Any:
        if not rounds:
            raise Disagrees("outputs differ by 30 %. Keep layers in float")
        return real(job, *arguments, rounds=rounds)

    for name, problem in (
        ("lost", "plain int8 lost "),
        ("refused", "plain int8 was refused: outputs differ by 30 %; "),
    ):
        facts = job.build(Candidate(0.0, "int8", "onnxruntime"), _folder(tmp_path / name))
        [remark] = [text for text in facts["remarks"] if text.startswith(problem)]
        assert "trained with int8 rounding it scores" in remark and facts["effective_precision"] == "int8"
        kept = variants.read_variant(source, tmp_path / name / "pruned").model
        assert not torch.equal(kept.conv1.weight, net.conv1.weight)
        monkeypatch.setattr(PipelineJob, "_converted", refuse)


def test_training_goes_on_while_accuracy_is_missing_and_training_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, splits = job_of(SmallCNN(8, 8), tmp_path)
    assert job.baseline is not None
    perfect = replace(job.baseline.score, value=1.0)
    scores = iter([0.5, 0.6, 0.7, 0.5, 0.4])
    monkeypatch.setattr(variants._Training, "_score", lambda *_: next(scores))
    longest, stopped = (
        variant_of(job.source, splits, Candidate(ratio, "fp32", "torch"), tmp_path, perfect) for ratio in (0.3, 0.6)
    )
    # Three times one epoch at most; the second variant loses in its second round, which is left out.
    assert (longest.epochs, longest.score) == (3, 0.7) and (stopped.epochs, stopped.score) == (1, 0.5)


def test_one_of_two_runtimes_with_the_same_kernels_is_screened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = job_of(SmallCNN(4, 4), tmp_path / "pruned" / "key")
    phases: list[Any] = []

    def run_here(phase_job: Any, source: Any, phase: str, arguments: Any, *_: Any) -> Any:
        phases.append((phase, arguments[0]))
        return getattr(phase_job, phase)(*arguments)

    monkeypatch.setattr(screen_runtimes, "run_phase", run_here)
    for name in ("onnxruntime", "openvino"):
        monkeypatch.setattr(type(find_runtime(name)), "kernels", "shared")
    pairs: list[Pair] = [("fp32", "torch"), ("fp32", "onnxruntime"), ("int8", "onnxruntime"), ("fp32", "openvino")]
    dropped = screen_runtimes.choose_pairs(job, tmp_path, pairs, lambda _: None)
    assert dropped["fp32", "openvino"] == "onnxruntime has the same kernels; name openvino to try it"
    # Eager torch takes far more than 1.3 times as long on a network this small.
    assert "times as long as" in dropped["fp32", "torch"] and ("fp32", "onnxruntime") not in dropped
    assert [phase for phase, _ in phases] == ["convert", "compare"]
    # The decision is stored.
    assert screen_runtimes.choose_pairs(job, tmp_path, pairs, lambda _: None) == dropped and len(phases) == 2


def test_a_cpu_time_of_zero_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> dict[str, Latency]:
        return {"a": latency_of([2e-5] * 9, [0.0] + [2e-5] * 8), "b": latency_of([1e-5] * 9, [1e-5] * 9)}

    monkeypatch.setattr(screen_runtimes, "measure_runners", measured)
    job = PipelineJob(ModelAndData(SmallCNN(), {}, RunConfig(threads=1)), tmp_path / "run" / "cache")
    assert screen_runtimes.interleaved_seconds(job, {}, []) == {"a": 2e-5, "b": 1e-5}
