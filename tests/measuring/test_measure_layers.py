"""Layers and what lies between them: whose time it is, and that together they are the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.measuring.layers import LayerRecorder, RecordedBlock, RecordingCost, layer_latencies, recording_cost
from edge_opt.measuring.statistics import latency_of
from edge_opt.model import SmallCNN
from edge_opt.records.measurements import LayerLatencies, LayerLatency, Measurement
from edge_opt.records.profiles import ModelProfile
from zoo import torchvision_models

FREE = RecordingCost(0.0, 0.0)


class Ticking:
    """A clock in nanoseconds that modules move forward themselves."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Working(nn.Module):
    """Takes `before`, calls its children, takes `after`: nanoseconds on the ticking clock."""

    def __init__(self, clock: Ticking, before: int, after: int = 0, *children: nn.Module, repeats: int = 1) -> None:
        super().__init__()
        self.clock = [clock]  # in a list: state that is shared, not copied
        self.before, self.after, self.repeats = before, after, repeats
        self.parts = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0].ns += self.before
        for _ in range(self.repeats):
            for part in self.parts:
                x = part(x)
        self.clock[0].ns += self.after
        return x + 1


def recorded_block(model: nn.Module, profile: ModelProfile, clock: Ticking, count: int = 1) -> RecordedBlock:
    recorder = LayerRecorder(model, profile.trace.modules, clock)
    recorder.attach(count)
    for _ in range(count):
        model(torch.zeros(1))
    recorder.detach(count)
    return recorder.blocks[0]


def nanoseconds(block: RecordedBlock) -> list[int]:
    return [round(seconds * 1e9) for seconds in block.own_s]


def measured(model: nn.Module, inputs: Any) -> Measurement:
    """A short look, in one thread: two would wait for each other on a busy machine."""
    return eo.measure(model, inputs, min_time_s=0.02, max_time_s=0.05, threads=1, memory=False, energy=None)


def test_a_module_has_its_own_time_and_not_that_of_its_children() -> None:
    clock = Ticking()
    model = Working(clock, 100, 20, Working(clock, 7), Working(clock, 5, 3, Working(clock, 1000)))
    profile = eo.profile(model, (1,))
    assert [call.path for call in profile.trace.modules] == ["", "parts.0", "parts.1", "parts.1.parts.0"]
    assert nanoseconds(recorded_block(model, profile, clock)) == [120, 7, 8, 1000, 0]


def test_repeated_calls_have_rows_of_their_own() -> None:
    clock = Ticking()
    model = Working(clock, 1, 1, Working(clock, 10), repeats=3)
    assert nanoseconds(recorded_block(model, eo.profile(model, (1,)), clock)) == [2, 10, 10, 10, 0]


def test_a_block_of_several_forwards_is_their_mean_and_time_between_them_is_nobodys() -> None:
    clock = Ticking()
    model = Working(clock, 10)
    model.register_forward_hook(lambda *_: setattr(clock, "ns", clock.ns + 4))
    block = recorded_block(model, eo.profile(model, (1,)), clock, count=4)
    assert block.own_s[0] == pytest.approx(10e-9)
    # After each of the first three forwards; the last one's hook runs after the last time stamp.
    assert block.own_s[1] == pytest.approx(3 * 4e-9 / 4)
    assert (block.calls[0], block.children[1]) == (1, 1)


def test_a_call_the_trace_does_not_know_is_its_callers_work() -> None:
    clock = Ticking()
    model = Working(clock, 1, 1, Working(clock, 10))
    profile = eo.profile(model, (1,))
    model.repeats = 2
    assert nanoseconds(recorded_block(model, profile, clock)) == [2 + 10, 10, 0]


def test_a_forward_that_changes_from_call_to_call_is_followed() -> None:
    clock = Ticking()
    model = Working(clock, 1, 1, Working(clock, 10))
    recorder = LayerRecorder(model, eo.profile(model, (1,)).trace.modules, clock)
    for repeats in (1, 0, 1):
        model.repeats = repeats
        recorder.attach(1)
        model(torch.zeros(1))
        recorder.detach(1)
    assert [nanoseconds(block) for block in recorder.blocks] == [[2, 10, 0], [2, 0, 0], [2, 10, 0]]


def test_a_module_that_raises_and_is_caught_leaves_the_rest_in_order() -> None:
    clock = Ticking()

    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.ns += 50
            raise ValueError

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky, self.safe = Raising(), Working(clock, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.risky(x)
            except ValueError:
                clock.ns += 1
            return self.safe(x)

    model = Catching()
    assert nanoseconds(recorded_block(model, eo.profile(model, (1,)), clock)) == [1, 50, 3, 0]


def test_the_recorder_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    model[1].forward = own = lambda x: x  # an instance's own forward, as some libraries set it
    before = [dict(module.__dict__) for module in model.modules()]
    recorder = LayerRecorder(model, eo.profile(model, (1,)).trace.modules)
    for _ in range(2):
        recorder.attach(1)
        assert "forward" in model[0].__dict__
        model(torch.zeros(1))
        recorder.detach(1)
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert model[1].forward is own
    assert [len(recorder.blocks), *recorder.blocks[0].calls] == [2, 1, 1, 1, 0]


def closing(profile: ModelProfile, parts_ns: list[list[int]], whole_ns: list[int], cost: RecordingCost = FREE) -> Any:
    """Layers of recorded blocks: per block nanoseconds of each call; forwards take `whole_ns`, recorded or not."""
    calls = np.array([1.0] * len(profile.layers) + [0.0])
    children = np.zeros(len(calls))
    for layer in profile.layers:
        children[-1 if layer.call.parent is None else layer.call.parent] += 1
    blocks = [RecordedBlock(np.array([*parts, 0]) * 1e-9, calls, children) for parts in parts_ns]
    whole = latency_of([ns * 1e-9 for ns in whole_ns], [ns * 1e-9 for ns in whole_ns])
    return layer_latencies(profile.layers, whole, whole, blocks, cost)


def total(found: LayerLatencies) -> float:
    return math.fsum(row.seconds for row in found.layers) + found.between_layers_s


def test_containers_without_operators_lie_between_the_layers() -> None:
    profile = eo.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (1, 4))
    found = closing(profile, [[30, 50, 10]] * 4, [100] * 4)
    assert [(row.module, row.path, row.kind) for row in found.layers] == [(1, "0", "Linear"), (2, "1", "ReLU")]
    assert [row.seconds for row in found.layers] == pytest.approx([50e-9, 10e-9])
    assert found.between_layers_s == pytest.approx(40e-9)  # 30 in the Sequential, 10 outside of it
    assert [row.share for row in found.layers] == pytest.approx([0.5, 0.1])


def test_functional_work_is_a_row_of_the_module_that_does_it() -> None:
    clock = Ticking()
    model = Working(clock, 0, 0, nn.Linear(1, 1))
    found = closing(eo.profile(model, (1,)), [[10, 80]] * 4, [100] * 4)
    # The container adds 1 to its result itself.
    assert [(row.path, row.kind) for row in found.layers] == [("", "Working"), ("parts.0", "Linear")]


def test_rates_are_costs_over_seconds() -> None:
    found = closing(eo.profile(nn.Linear(16, 8), (4, 16)), [[500]] * 4, [500] * 4)
    row = found.layers[0]
    assert row.macs_per_s == pytest.approx(4 * 16 * 8 / 500e-9)
    # Input 4 x 16, weight 16 x 8, bias 8, output 4 x 8; four bytes each.
    assert row.bytes_per_s == pytest.approx((64 + 128 + 8 + 32) * 4 / 500e-9)


def test_a_layer_that_took_no_time_has_no_rate() -> None:
    found = closing(eo.profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (1, 4)), [[0, 10, 0]] * 4, [10] * 4)
    assert (found.layers[1].macs_per_s, found.layers[1].bytes_per_s, found.layers[1].share) == (None, None, 0.0)


def test_blocks_held_up_in_different_layers_do_not_move_the_shares() -> None:
    profile = eo.profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (1, 4))
    parts = [[0, 60 + (400 if n % 4 == 1 else 0), 40 + (400 if n % 4 == 3 else 0)] for n in range(16)]
    found = closing(profile, parts, [sum(part) for part in parts])
    assert [row.share for row in found.layers] == pytest.approx([0.6, 0.4])
    assert found.recorded_s == pytest.approx(100e-9)


def test_the_recorders_own_time_is_taken_out() -> None:
    profile = eo.profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (1, 4))
    # Each of three calls costs 2 inside its stamps and 5 in its caller; the real work is 60 and 20, with 20 around it.
    parts = [[20 + 2 + 5 + 5, 60 + 2, 20 + 2]] * 4
    found = closing(profile, parts, [100 + 3 * 7] * 4, RecordingCost(2e-9, 5e-9))
    assert [row.share for row in found.layers] == pytest.approx([0.6, 0.2])
    assert found.recorded_s == pytest.approx(100e-9)


def test_intervals_hold_the_seconds_and_grow_with_the_noise() -> None:
    profile = eo.profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (1, 4))
    numbers = np.random.default_rng(0)
    parts = [[0, 1000 + int(numbers.normal(0, 5)), 1000 + int(numbers.normal(0, 200))] for _ in range(40)]
    steady, shaky = closing(profile, parts, [sum(part) for part in parts]).layers
    for row in (steady, shaky):
        assert row.interval_s.low <= row.seconds <= row.interval_s.high
    assert width(shaky) > 1.5 * width(steady)


def width(row: LayerLatency) -> float:
    return row.interval_s.high - row.interval_s.low


def test_recording_costs_something_and_not_much() -> None:
    class Steps:
        """Each look takes 10 ns, so a recorded call costs two of them."""

        def __init__(self) -> None:
            self.ns = 0

        def __call__(self) -> int:
            self.ns += 10
            return self.ns

    found = recording_cost(Steps(), count=100, rounds=2)
    # One step lies between the stamps of a call; the other, before them, is its caller's.
    assert found.inside_s + found.in_caller_s == pytest.approx(20e-9, rel=0.02)
    assert found.inside_s == pytest.approx(10e-9, rel=0.02)


def vision(name: str, size: int) -> tuple[Callable[[], nn.Module], Any]:
    return lambda: getattr(torchvision_models(), name)(), (1, 3, size, size)


REAL: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "SmallCNN": (SmallCNN, (2, 1, 28, 28)),
    "resnet18": vision("resnet18", 64),
    "mobilenet_v3_small": vision("mobilenet_v3_small", 64),
    "swin_t": vision("swin_t", 64),
    "lstm": (lambda: nn.LSTM(8, 16, batch_first=True), (2, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
}


@pytest.mark.parametrize("name", REAL)
def test_layers_and_what_lies_between_are_the_whole(name: str) -> None:
    build, shape = REAL[name]
    model = build()
    found = measured(model, shape)
    layers = found.layers
    assert layers.whole_s == found.latency.median_s
    assert total(layers) == pytest.approx(layers.whole_s, rel=1e-9)
    assert layers.between_layers_s >= 0
    assert math.fsum(row.share for row in layers.layers) <= 1 + 1e-9
    modules = eo.profile(model, shape).trace.modules
    for row in layers.layers:
        assert (modules[row.module].path, modules[row.module].kind) == (row.path, row.kind)
        assert row.interval_s.low <= row.seconds <= row.interval_s.high


def test_a_fused_encoder_layer_is_one_row_with_the_cost_of_its_parts() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    profile = eo.profile(model, (2, 5, 16))
    assert len(profile.layers) > 5
    assert torch.backends.mha.get_fastpath_enabled()
    found = measured(model, (2, 5, 16)).layers
    assert [(row.path, row.kind) for row in found.layers] == [("", "TransformerEncoderLayer")]
    assert found.layers[0].macs_per_s == pytest.approx(profile.totals.macs / found.layers[0].seconds)


def test_a_script_module_is_one_row() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.ReLU())
    found = measured(model, (2, 4)).layers
    assert [row.path for row in found.layers] == ["0", "1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_module_is_measured_as_it_is(how: str) -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    inner = Block()
    if how == "in place":
        inner.compile(backend=backend)
    model = nn.Sequential(torch.compile(inner, backend=backend) if how == "wrapped" else inner, nn.ReLU())
    found = measured(model, (2, 4)).layers
    assert [row.path for row in found.layers] == ["0", "1"]
    assert found.layers[0].macs_per_s == pytest.approx(2 * 16 / found.layers[0].seconds)
    assert len(compiled) == 1  # once: the recorder did not make torch compile it again


def test_a_compiled_model_is_one_row() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    found = measured(model, (2, 4)).layers
    assert [(row.path, row.module) for row in found.layers] == [("", 0)]
    assert total(found) == pytest.approx(found.whole_s, rel=1e-9)
