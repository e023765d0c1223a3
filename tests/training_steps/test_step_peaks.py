"""Peaks of training steps against real steps, byte for byte: layers whose CPU kernels keep something of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.measuring.memory import record_events, replay
from edge_opt.training_steps.step_trace import summed


def static_peak(model: nn.Module, inputs: Any, **options: Any) -> int:
    """What the trace says of the first step, without what is there before: weights, buffers, batch."""
    step = eo.training_step(model, inputs, **options)
    assert not step.used_real_tensors
    return step.first_peak_bytes - sum(step.peak_by_kind[kind] for kind in ("weights", "buffers", "inputs"))


def real_peak(model: nn.Module, inputs: Any, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> int:
    """What the allocator says of the same step."""
    optimizer = make(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss = summed(model(**inputs) if isinstance(inputs, dict) else model(inputs))
        loss.backward()
        optimizer.step()

    return replay(record_events(step, torch.device("cpu"))).tensor_peak_bytes


class Reads(nn.Module):
    """A recurrent layer between a table and a head."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(20, 12), layer, nn.Linear(width, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(words))[0])


def test_an_lstm_keeps_what_its_cpu_kernel_keeps() -> None:
    model, words = Reads(nn.LSTM(12, 10, bias=False), 10).train(), torch.randint(0, 20, (5, 7))
    assert static_peak(model, words, optimizer="sgd") == real_peak(model, words)


STEPWISE: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: Reads(nn.GRU(12, 10, 2, dropout=0.2), 10),
    "GRU, both ways": lambda: Reads(nn.GRU(12, 10, 2, batch_first=True, bidirectional=True), 20),
    "RNN": lambda: Reads(nn.RNN(12, 10, batch_first=True, bias=False), 10),
    "LSTM with projection": lambda: Reads(nn.LSTM(12, 10, 2, proj_size=5, batch_first=True, bidirectional=True), 10),
    "LSTM in double": lambda: Reads(nn.LSTM(12, 10), 10).double(),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", STEPWISE)
def test_other_recurrent_layers_are_near_and_say_so(name: str) -> None:
    model, words = STEPWISE[name]().train(), torch.randint(0, 20, (5, 7))
    assert static_peak(model, words, optimizer="sgd") == pytest.approx(real_peak(model, words), rel=0.12)
    assert any(text.startswith("layer (") for text in eo.training_step(model, words).remarks)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_keep_their_indices(mode: str) -> None:
    model, words = nn.EmbeddingBag(20, 4, mode=mode).train(), torch.randint(0, 20, (5, 3))
    assert static_peak(model, words, optimizer="sgd") == real_peak(model, words)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(self.first(x) * 0.5)) / 3.0


def test_a_number_that_autograd_keeps_is_left_out() -> None:
    model, x = Scaled(), torch.randn(3, 4)
    # The product with 0.5 and the division by 3.0 each keep their number for the backward, as a tensor of 8 bytes.
    assert real_peak(model, x) - static_peak(model, x, optimizer="sgd") in (0, 8, 16)


class LooksAside(nn.Module):
    """Scales by a norm that is no part of the backward, as DoRA does, and looks up rows by index, as Whisper does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.places = nn.Linear(6, 8), nn.Parameter(torch.zeros(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.norm(torch.tanh(self.layer.weight), dim=1).detach()
        return self.layer(x) * norm + self.places[torch.arange(4)]


def test_what_is_kept_for_a_backward_that_never_comes_is_dropped() -> None:
    model, x = LooksAside(), torch.randn(4, 6)
    static = [static_peak(model, x, optimizer="sgd") for _ in range(2)]
    assert static == 2 * [real_peak(model, x)]
