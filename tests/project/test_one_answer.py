"""One question, one answer: the same number wherever it is asked."""

from __future__ import annotations

from typing import Any

import pytest

import edge_opt as eo
from edge_opt.compress import prune
from edge_opt.model import SmallCNN
from edge_opt.records.conversions import LayerPrecision
from edge_opt.run.config import RunConfig
from edge_opt.run.run_summary import with_target

SHAPE = (32, 1, 28, 28)


@pytest.mark.parametrize(
    ("target", "there"),
    [("raspberry-pi-4", {}), ("raspberry-pi-4", {"runtime": "tflite", "threads": 1}), ("rk3588", {"threads": 8})],
)
def test_time_on_a_device(target: str, there: dict[str, Any]) -> None:
    model = SmallCNN()
    profile = eo.profile(model, SHAPE, target=target, **there)
    assert profile.prediction is not None
    seconds = profile.prediction.seconds
    assert seconds is not None
    assert eo.compare_targets(model, SHAPE, target, **there).targets[0].prediction.seconds == seconds
    assert eo.estimate(profile, target, **there).seconds == seconds
    config = RunConfig(target=target, **{f"target_{key}": value for key, value in there.items()})
    assert [it.seconds for it in with_target(profile, config).predictions] == [seconds]
    assert prune(model, SHAPE, latency_target=0.9, target=target, **there).achieved.latency_before_s == seconds
    [checked] = eo.check(eo.profile(model, SHAPE), "predicted_ms <= 1000", target=target, **there).budgets
    assert checked.value == pytest.approx(seconds * 1e3, rel=1e-12)


@pytest.mark.parametrize("lifetimes", ["eager", "planner"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_peak_memory(precision: str, lifetimes: str) -> None:
    model = SmallCNN()
    profile = eo.profile(model, SHAPE)
    need = eo.peak_memory(profile, precision, lifetimes=lifetimes)
    assert need.kind == f"static {lifetimes}"
    compared = eo.compare_targets(model, SHAPE, "raspberry-pi-4", precision=precision, lifetimes=lifetimes)
    assert compared.memory == need
    limit_mb = need.total_bytes / 2**20
    fitted = eo.fit_batch(model, SHAPE[1:], memory_limit_mb=limit_mb, precision=precision, lifetimes=lifetimes)
    assert fitted.batch == 32
    # What a sweep knows of a variant whose layers all run in the precision.
    layers = [LayerPrecision(path, "", precision) for path in ("conv1", "conv2", "classifier")]
    measured = eo.peak_memory(profile, lifetimes=lifetimes, layers={layer.path: layer.precision for layer in layers})
    inputs = need.input_bytes if precision != "fp16" else 2 * need.input_bytes
    assert measured.total_bytes - measured.input_bytes == need.total_bytes - need.input_bytes
    assert measured.input_bytes == inputs


def test_peak_memory_in_a_check() -> None:
    profile = eo.profile(SmallCNN(), SHAPE)
    for metric, lifetimes in (("peak_memory", "eager"), ("planned_memory", "planner")):
        nbytes = eo.peak_memory(profile, lifetimes=lifetimes).total_bytes
        assert eo.check(profile, f"{metric}_bytes <= {nbytes}").passed
        assert not eo.check(profile, f"{metric}_bytes <= {nbytes - 1}").passed
