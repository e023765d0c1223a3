"""How long a training step takes on a machine whose references were trained, and on one where none was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import edge_opt as eo
from calibrations import imaginary
from edge_opt.boards.roofline import used_bandwidth
from edge_opt.calibration.operator_bench import backward_work, relative_work
from edge_opt.records.predictions import Calibration, ReferenceRun

PACE = 1.5


@pytest.fixture(scope="module")
def trained() -> Calibration:
    """An imaginary machine on which every backward takes half as long again as its work would at the forward's rate."""
    runs = []
    for number in range(5):
        work = 1.8 + 0.1 * number
        run = ReferenceRun(f"{number}, batch 8", "f", 8, 10, 5, operators_s=0.09, seconds=0.1)
        runs.append(replace(run, step_s=0.1 * (1 + PACE * work), backward_work=work))
    return replace(imaginary(count=100), references=tuple(runs))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def test_the_backward_goes_at_the_pace_of_the_references(trained: Calibration) -> None:
    step = eo.training_step(model(), (16, 64), target=trained)
    [found] = step.times
    assert found.forward_seconds and found.backward_seconds
    # MACs per sample: forward 64·128 + 128·10 = 9472; backward the weights' 9472 and the second layer's inputs' 1280
    by_macs = (9472 + 1280) / 9472
    by_bytes = step.backward.bytes_moved / step.forward.bytes_moved
    assert found.backward_seconds == pytest.approx(found.forward_seconds * PACE * max(by_macs, by_bytes))
    assert "5 reference models that were trained there" in found.basis and "factor of 1.00" in found.basis


def test_nothing_is_claimed_where_too_few_were_trained(trained: Calibration) -> None:
    few = replace(trained, references=trained.references[:4])
    known, guess = (eo.training_step(model(), (16, 64), target=place).times[0] for place in (trained, few))
    assert guess.basis.endswith("a guess")
    assert known.low and known.high and guess.low and guess.high
    # a guess is two times wider on either side
    assert guess.high / guess.low == pytest.approx(4 * known.high / known.low)


def test_the_step_of_a_recurrent_net_with_a_state_of_its_own_is_traced() -> None:
    # 2 directions, 3 gates of 4 x (8 + 4) products, 5 steps of 2 samples
    step = eo.training_step(nn.GRU(8, 4, bidirectional=True, batch_first=True), (2, 5, 8), optimizer="sgd")
    assert step.forward.macs == 2 * 3 * 4 * (8 + 4) * 5 * 2


def test_the_work_of_a_backward_is_counted_from_its_operators() -> None:
    # Gradients of both weights, and of the second layer's input: MACs per sample 9472 + 1280 beside 9472; bytes more.
    work = backward_work(model(), torch.randn(16, 64))
    step = eo.training_step(model(), (16, 64), optimizer="sgd")
    assert work == pytest.approx(relative_work(step.backward, step.forward), rel=0.02)
    assert work > (9472 + 1280) / 9472


def test_the_optimizer_moves_its_bytes_on_the_engine_that_computes() -> None:
    step = eo.training_step(model(), (16, 64), target="jetson-agx-orin")
    [found] = step.times
    orin = eo.device("jetson-agx-orin")
    on_gpu, on_cpu = used_bandwidth(orin, "gpu"), used_bandwidth(orin, "cpu")
    assert orin.engine == "gpu" and on_gpu and on_cpu and on_gpu.bytes_per_s > 5 * on_cpu.bytes_per_s
    assert found.optimizer_seconds == pytest.approx(step.update.bytes_moved / on_gpu.bytes_per_s)
