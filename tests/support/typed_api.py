"""Types of the public API as a type checker of a user sees them: `mypy` checks this file, and nothing runs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import edge_opt as eo
from edge_opt.loading import Loaded
from edge_opt.records.compression import Pruned
from edge_opt.records.conversions import Converted
from edge_opt.records.devices import BatchFit, DeviceSpec
from edge_opt.records.measurements import Measurement
from edge_opt.records.predictions import Prediction, TargetComparison
from edge_opt.records.profiles import CheckResult, ModelComparison
from edge_opt.records.sweeps import SweepResult
from edge_opt.records.training_steps import TrainingStep
from edge_opt.run.pipeline import RunResult


def use(model: nn.Module, program: torch.export.ExportedProgram, path: Path, loader: Sequence[torch.Tensor]) -> None:
    profile = assert_type(eo.profile(model, (1, 3, 8, 8), target="raspberry-pi-4"), eo.ModelProfile)
    for other in ("torchvision:resnet18", path, program, eo.load_model("net.onnx")):
        assert_type(eo.profile(other), eo.ModelProfile)
    assert_type(eo.load_model("net.py:Net"), Loaded)
    assert_type(profile.totals.macs, int)
    assert_type(profile.prediction, Prediction | None)
    assert_type(eo.compare(profile, model, "net.onnx", inputs=(1, 3, 8, 8)), ModelComparison)
    assert_type(eo.check(path, "macs <= 1M"), CheckResult)
    assert_type(eo.measure(model, (1, 3, 8, 8)), Measurement)
    assert_type(eo.prune(model, (1, 3, 8, 8), 0.5), Pruned)
    assert_type(eo.convert(model, (1, 3, 8, 8), "int8", calibration=loader), Converted)
    assert_type(eo.fit_batch(model, (3, 8, 8), memory_limit_mb=64), BatchFit)
    assert_type(eo.compare_targets(model, (1, 3, 8, 8), ["raspberry-pi-4"]), TargetComparison)
    assert_type(eo.training_step(model, (1, 3, 8, 8)), TrainingStep)
    assert_type(eo.estimate(profile, "raspberry-pi-4"), Prediction)
    assert_type(eo.sweep("net.py:trained", "net.py:loaders", output=path), SweepResult)
    assert_type(eo.run("run.yaml", output=path), RunResult)
    assert_type(eo.device("raspberry-pi-4"), DeviceSpec)


def misuse(model: nn.Module) -> None:
    eo.profile(model, (1, 3), mode="test")  # type: ignore[arg-type]
    eo.profile(model, (1, 3), shape=(1, 3))  # type: ignore[call-arg]
    eo.profile(3)  # type: ignore[arg-type]
    eo.sweep(model, {})  # type: ignore[call-arg]
