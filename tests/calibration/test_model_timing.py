"""calibrate(for_model=): operators of one model are timed, and its interval becomes narrower."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import edge_opt as eo
from calibrations import changed, imaginary
from edge_opt.calibration.calibration_file import load_calibration, save_calibration
from edge_opt.calibration.model_timing import callable_again
from edge_opt.calibration.operator_bench import reuse_distances
from edge_opt.calibration.predict import timing_key
from edge_opt.cli import app
from edge_opt.errors import CalibrationMissing, InvalidInput
from edge_opt.records.predictions import Calibration, OperatorSample, TimedOperators
from edge_opt.trace import trace


class Mixed(nn.Module):
    """Operators of many kinds: tensors in lists, in place, permuted, with a type as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.conv = nn.Conv1d(24, 24, 3, padding=1)
        self.norm = nn.LayerNorm(24)
        self.last = nn.Linear(48, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        y = F.relu_(self.conv(x.transpose(1, 2))).transpose(1, 2)
        y = F.scaled_dot_product_attention(self.norm(y), x, x)
        result: torch.Tensor = self.last(torch.cat([x, y], -1)).softmax(-1, dtype=torch.float64)
        return result


def known(seconds: float, share: float) -> Calibration:
    """The imaginary machine with origins of several nets; `share` of its samples are of nets."""
    calibration = imaginary(count=80)
    samples = (
        replace(
            item, seconds=item.seconds * seconds, origin=f"net-{place % 4}, batch 1" if place < 80 * share else None
        )
        for place, item in enumerate(calibration.samples)
    )
    return changed(replace(calibration, samples=tuple(samples)), threads=1)


def test_recorded_operators_can_be_called_again() -> None:
    recorded = trace(Mixed().eval(), torch.zeros(2, 7, dtype=torch.int64))
    computed = [signature for signature in recorded.signatures if not signature.is_view]
    again = [callable_again(signature) for signature in computed]
    assert len(again) >= 7 and None not in again
    for operator, signature in zip(again, computed, strict=True):
        assert operator is not None
        outputs = operator.function(*operator.args, **operator.kwargs)
        first = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        assert tuple(first.shape) == signature.outputs[0].shape
        assert str(first.dtype) == f"torch.{signature.outputs[0].dtype}"


def test_an_operator_of_another_library_is_left_out() -> None:
    signature = trace(nn.Linear(4, 4), torch.zeros(1, 4)).signatures[0]
    assert callable_again(replace(signature, op="unknown.operator")) is None


def test_two_estimates_count_by_the_inverse_of_their_variance() -> None:
    profile = eo.profile(nn.Linear(64, 64, bias=False), (8, 64))
    calibration = imaginary(count=300)
    before = eo.predict(profile, calibration)
    signature, distances = profile.trace.signatures[0], reuse_distances(profile.trace)[0]
    overhead_s = 2e-6 + 1e-6  # one operator, one module
    learned_s = before.seconds - overhead_s
    # Deviations of products are 0.1 in the imaginary calibration, as that of the timed one: both count alike.
    sample = OperatorSample(signature, distances, 4 * learned_s)
    timed = TimedOperators("Linear", "2026-01-01T00:00:00+00:00", 0.05, 0.1, (sample,))
    after = eo.predict(profile, replace(calibration, timed=(timed,)))
    assert after.seconds == pytest.approx(math.sqrt(learned_s * 4 * learned_s) + overhead_s)
    # Both whole deviations are 0.05, and the mean of two has 1 / √2 of it.
    assert math.log(before.high / before.seconds) == pytest.approx(1.645 * 0.05)
    assert math.log(after.high / after.seconds) == pytest.approx(1.645 * 0.05 / math.sqrt(2))


def test_seconds_are_those_of_the_calibrated_machine(tmp_path: Path) -> None:
    def timed(factor: float) -> dict[str, float]:
        path = save_calibration(known(factor, 0.8), tmp_path / f"{factor}.json")
        done = eo.calibrate(for_model=nn.Linear(256, 256), inputs=(64, 256), path=path, progress=False)
        return {item.signature.op: item.seconds for item in done.timed[-1].samples}

    # The same operators here stand for twice the time on a machine that takes twice as long for everything.
    usual, slow = timed(1.0), timed(2.0)
    assert usual.keys() == slow.keys() and usual
    # The median, because a single operator may be interrupted in every round of one of the two.
    assert 1.2 < median(slow[op] / seconds for op, seconds in usual.items()) < 3.3


@pytest.mark.slow
def test_the_interval_of_the_model_becomes_narrower_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    # In so few seconds two whole nets are checked, whose factor would be all that is uncertain.
    before = replace(eo.calibrate(threads=1, seconds=6, path=path, progress=False), check=None)
    save_calibration(before, path)
    model, shape = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 48, 3)), (1, 3, 64, 64)
    other = eo.profile(nn.Linear(33, 77), (5, 33))
    after = eo.calibrate(for_model=model, inputs=shape, path=path, progress=False)
    assert load_calibration(path) == after
    timed = after.timed[-1]
    assert timed.after[1] / timed.after[0] < timed.before[1] / timed.before[0]
    # Both say where the model is. Intervals of 90 % may exclude each other, but hardly by a factor of three.
    assert timed.after[0] < 3 * timed.before[1] and timed.before[0] < 3 * timed.after[1]
    prediction = eo.profile(model, shape, target=str(path)).prediction
    assert prediction is not None
    assert (prediction.low, prediction.high) == pytest.approx(timed.after)
    assert eo.predict(other, after).seconds == eo.predict(other, before).seconds
    assert replace(after, timed=()) == before
    # Timed again, operators stand in the file once.
    again = eo.calibrate(for_model=model, inputs=shape, path=path, progress=False)
    keys = [timing_key(sample.signature, sample.distances) for item in again.timed for sample in item.samples]
    assert len(keys) == len(set(keys))


def test_without_a_calibration_or_with_other_threads_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationMissing):
        eo.calibrate(for_model=nn.Linear(4, 4), inputs=(1, 4), path=tmp_path / "none.json", progress=False)
    with pytest.raises(InvalidInput, match="onnxruntime depend on"):
        eo.calibrate(for_model=nn.Linear(4, 4), inputs=(1, 4), runtimes=["onnxruntime"], progress=False)
    calibration = imaginary(count=60)
    path = save_calibration(calibration, tmp_path / "host.json")
    with pytest.raises(InvalidInput, match="thread"):
        wrong = calibration.machine.threads + 1
        eo.calibrate(for_model=nn.Linear(4, 4), inputs=(1, 4), path=path, threads=wrong, progress=False)


def test_the_command_says_the_interval_before_and_after(tmp_path: Path) -> None:
    path = save_calibration(known(1.0, 0.8), tmp_path / "host.json")
    (tmp_path / "net.py").write_text("import torch\n\n\ndef Net():\n    return torch.nn.Linear(32, 32)\n")
    net = f"{tmp_path / 'net.py'}:Net"
    done = CliRunner().invoke(app, ["calibrate", "--for", net, "-i", "4x32", "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "interval" in done.stderr and "->" in done.stderr
    wrong = CliRunner().invoke(app, ["calibrate", "-i", "4x32", "-o", str(path)])
    assert wrong.exit_code == 2 and "--for" in wrong.stderr
