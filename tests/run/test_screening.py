"""Levels that are worth training, training for int8, and programs for the runtimes that ship."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from edge_opt.compress import prune
from edge_opt.compress.prune import pruned_levels
from edge_opt.compress.runtimes import PACKAGES, SUFFIXES
from edge_opt.data import load_splits
from edge_opt.model import SmallCNN
from edge_opt.records import Candidate
from edge_opt.run.handover import program
from edge_opt.run.job import Subject, Tuning, variant_of
from edge_opt.run.screening import Level, climb, judged, promising

# The fastest first.
ABLE = [Level(share, None, 1 - share, "") for share in (0.8, 0.6, 0.4, 0.2)]


@pytest.mark.parametrize(
    ("lost", "shares"),
    [
        # 0.8 lacks more than three times 0.005; of those that are nearly healed the fastest comes first
        (0.0, [0.6, 0.8]),
        # trained it lacks more than 0.005 all the same: the next is gentler
        (0.01, [0.6, 0.4]),
    ],
)
def test_what_a_trained_level_scores_decides_over_the_next(lost: float, shares: list[float]) -> None:
    able = [Level(each.share, 0.9 - (0.014 if each.share <= 0.6 else 0.02), each.latency_ratio, "") for each in ABLE]
    tried = climb(able, 0.9, lambda share: 0.9 - lost, allowed=0.005)
    assert [level.share for level in tried] == shares


def test_levels_fall_out_before_training_for_a_reason_each() -> None:
    rows = [
        Level(0.1, 0.90, 0.99, ""), Level(0.2, 0.85, 0.8, ""), Level(0.3, 0.86, 0.6, ""), Level(0.9, 0.3, None, ""),
    ]  # fmt: skip
    found = {level.share: level.verdict for level in judged(rows, 0.9, lambda share: 0.9)}
    assert found == {
        0.1: "not faster than the unpruned model",
        0.2: "slower and less accurate than another",
        0.3: "trained",
        0.9: "too far from the accuracy of the whole",
    }


def test_of_many_levels_six_are_timed_from_the_gentlest_to_the_boldest() -> None:
    rows = [Level(share / 16, 0.9 - share / 1000, None, "") for share in range(1, 14)]
    # 13 levels, 12 steps over 5 gaps: every 2.4th
    assert promising(rows, 0.9, 0.1) == [1 / 16, 3 / 16, 6 / 16, 8 / 16, 11 / 16, 13 / 16]
    assert promising(rows, 2.0, 0.1) == [1 / 16]  # hopeless all: the most accurate is tried


def test_levels_together_are_what_each_is_alone() -> None:
    torch.manual_seed(0)
    model, batches = SmallCNN(16, 32), [torch.randn(16, 1, 28, 28)]
    options = {"importance": "group", "round_to": 8, "loader": batches, "seed": 0}
    found = pruned_levels(model, (2, 1, 28, 28), (0.1, 0.5, 0.55), **options)  # type: ignore[arg-type]
    # 0.1 of 16 and of 32 rounds to nothing, and 0.55 leaves 7.2 and 14.4: 8 and 16, as 0.5 does
    assert list(found) == [0.5]
    alone = prune(model, (2, 1, 28, 28), 0.5, **options)  # type: ignore[arg-type]
    together = found[0.5].model.state_dict()
    assert all(torch.equal(tensor, together[name]) for name, tensor in alone.model.state_dict().items())


def test_training_for_int8_leaves_float_candidates_alone(tmp_path: Path) -> None:
    splits = load_splits("digits", train_subset=64, val_subset=32)
    subject, tuning = Subject(SmallCNN(4, 4), splits), Tuning(fine_tune_epochs=1, train_for_int8=True)
    float_one = variant_of(subject, splits, Candidate(0.0, "fp32", "onnxruntime"), tuning, tmp_path)
    rounded = variant_of(subject, splits, Candidate(0.0, "int8", "onnxruntime"), tuning, tmp_path)
    before = subject.build().state_dict()
    assert float_one.folder is None and rounded.folder is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in float_one.model.state_dict().items())
    assert not torch.equal(rounded.model.conv1.weight, before["conv1.weight"])
    assert rounded.model.conv1.weight.shape == before["conv1.weight"].shape


@pytest.mark.parametrize("runtime", SUFFIXES)
def test_every_runtime_has_a_package_and_a_program(runtime: str) -> None:
    compile(program(runtime, "fp32"), "run_best.py", "exec")
    if runtime not in ("litert", "executorch"):  # extras, and slow to import
        importlib.import_module(PACKAGES[runtime])
