"""Measured memory from dimensions and from hand-made events; and everything is left as it was found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import edge_opt as eo
from edge_opt.errors import InvalidInput, MeasurementFailed
from edge_opt.measuring.memory import Allocation, Boundary, measure_memory, replay
from edge_opt.records.measurements import MeasuredMemory
from edge_opt.trace import trace

FLOAT = 4


def measured(model: nn.Module, *args: Any, **kwargs: Any) -> MeasuredMemory:
    return measure_memory(model, args, kwargs, trace(model, list(args) or None, kwargs))


def test_a_perceptron_from_its_dimensions() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    memory = measured(model, torch.zeros(4, 16))
    hidden, out = 4 * 64 * FLOAT, 4 * 8 * FLOAT
    assert memory.peak_bytes == memory.tensor_peak_bytes == memory.activation_bytes == 2 * hidden
    assert (memory.peak_op, memory.peak_module, memory.scratch_bytes) == ("aten.relu", "1", 0)
    assert memory.param_bytes == (16 * 64 + 64 + 64 * 8 + 8) * FLOAT
    assert [(row.path, row.before_bytes, row.allocated_bytes, row.peak_bytes) for row in memory.modules] == [
        ("", 0, out, 2 * hidden),
        ("0", 0, hidden, hidden),
        ("1", hidden, hidden, 2 * hidden),
        ("2", hidden, out, hidden + out),
    ]


def test_writing_in_place_takes_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True))
    memory = measured(model, torch.zeros(4, 16))
    assert memory.peak_bytes == 4 * 64 * FLOAT
    assert memory.modules[2].allocated_bytes == 0


class Applies(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def test_what_an_operator_gives_back_before_it_returns_is_scratch() -> None:
    # Rolling along two dimensions goes by way of a tensor rolled along the first.
    memory = measured(Applies(lambda x: x.roll((1, 1), (0, 1))), torch.zeros(8, 8))
    whole = 8 * 8 * FLOAT
    assert (memory.peak_bytes, memory.scratch_bytes, memory.activation_bytes) == (2 * whole, whole, whole)
    assert memory.tensor_peak_bytes == whole
    assert memory.peak_op == "aten.roll"


def test_what_an_operator_returns_and_nobody_wants_is_no_scratch() -> None:
    # Max pooling returns 64-bit indices to its composite, which drops them.
    memory = measured(Applies(lambda x: F.max_pool2d(x, 2)), torch.zeros(1, 1, 8, 8))
    assert memory.peak_bytes == memory.tensor_peak_bytes == 4 * 4 * (FLOAT + 8)
    assert memory.peak_op == "aten.max_pool2d"
    assert memory.modules[0].allocated_bytes == 4 * 4 * FLOAT


def test_a_shared_module_has_a_row_for_each_call() -> None:
    layer = nn.Linear(8, 8)
    memory = measured(nn.Sequential(layer, layer), torch.zeros(2, 8))
    one = 2 * 8 * FLOAT
    assert [(row.module, row.before_bytes, row.peak_bytes) for row in memory.modules[1:]] == [
        (1, 0, one),
        (2, one, 2 * one),
    ]


def test_a_model_behind_compile_is_measured_itself() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
    memory = measured(torch.compile(model, backend="eager"), torch.zeros(4, 16))
    assert memory == measured(model, torch.zeros(4, 16))


def test_a_script_module_is_measured_inside() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
    memory = measured(torch.jit.script(model), torch.zeros(4, 16))
    assert memory.peak_bytes == 2 * 4 * 64 * FLOAT
    assert memory.peak_op == "aten.relu"


def test_training_keeps_a_mask_for_dropout() -> None:
    model, x = nn.Dropout(0.5), torch.zeros(4, 16)
    kept = measure_memory(model, (x,), {}, trace(model, x, training=True), training=True)
    assert kept.peak_bytes == 2 * 4 * 16 * FLOAT
    assert measured(model, x).peak_bytes == 0


def test_replay_leaves_out_what_it_did_not_see_taken() -> None:
    events = [Allocation(0, 7, -1000), Allocation(1, 8, 100), Allocation(2, 7, -1000), Allocation(3, 9, 50)]
    assert replay(events).peak_bytes == 150


def test_replay_takes_an_address_given_out_again_as_given_back() -> None:
    events = [Allocation(0, 7, 100), Allocation(1, 7, 60), Allocation(2, 8, 30)]
    assert replay(events).peak_bytes == 100


def test_replay_tells_scratch_by_the_operators_return() -> None:
    found = replay(
        [
            Boundary(0, 0, True),
            Allocation(1, 1, 10, "aten.a", 5),
            Allocation(2, 2, 100, "aten.a", 5),
            Allocation(4, 2, -100, "aten.a", 5),
            Allocation(6, 1, -10),
            Allocation(7, 3, 40, "aten.b", 9),
            Boundary(9, 0, False),
        ]
    )
    assert (found.peak_bytes, found.scratch_bytes, found.tensor_peak_bytes) == (110, 100, 40)
    assert (found.peak_op, found.peak_call) == ("aten.a", 0)
    assert found.spans[0].allocated_bytes == 40
    assert found.spans[0].peak_bytes == 110


def test_replay_of_nothing_is_zero() -> None:
    assert replay([]).peak_bytes == 0


class Awkward(nn.Module):
    """Writes to its buffers, weights, attributes and input, draws numbers, adds hooks; then fails if told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(1))
        self.calls = 0

    def forward(self, x: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        self.steps += 1
        self.layer.weight.data.mul_(2)
        self.layer.register_forward_hook(lambda module, args, out: None)
        x.add_(torch.rand(4) * random.random())
        memory.append(x)
        self.last = self.norm(self.layer(x))
        if self.fails:
            raise RuntimeError("forward gave up")
        return self.last


def state(model: Awkward) -> list[Any]:
    return [
        [(name, tensor.tolist()) for name, tensor in model.state_dict().items()],
        [module.training for module in model.modules()],
        [sorted(module.__dict__) for module in model.modules()],
        [len(module._forward_hooks) for module in model.modules()],
        model.calls,
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_num_threads(),
        torch._C._autograd._profiler_enabled(),
    ]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "raises"])
def test_everything_is_as_it_was(fails: bool, training: bool) -> None:
    model = Awkward(fails=False).train()
    x, memory = torch.randn(3, 4), []
    traced = trace(model, [x, memory])
    model.fails = fails
    x_before, before = x.clone(), state(model)
    if fails:
        with pytest.raises(MeasurementFailed, match="RuntimeError: forward gave up"):
            measure_memory(model, (x, memory), {}, traced, training=training)
    else:
        measure_memory(model, (x, memory), {}, traced, training=training)
    assert state(model) == before
    assert torch.equal(x, x_before)
    assert memory == []


def test_the_profiler_is_off_and_free_afterwards() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    first = measured(model, x)
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(x)
    assert profiler.events()
    assert measured(model, x) == first


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    measured(nn.Linear(4, 4), torch.zeros(2, 4))
    assert capfd.readouterr() == ("", "")


def test_inputs_that_cannot_be_written_to_are_welcome() -> None:
    with torch.inference_mode():
        frozen = torch.ones(2, 4)
    for x in (frozen, torch.ones(1, 4).expand(2, 4), torch.full((2, 4), float("nan"))):
        assert measured(nn.Linear(4, 4), x).tensor_peak_bytes == 2 * 4 * FLOAT


def test_the_callers_fast_path_is_taken() -> None:
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.zeros(2, 4, 8)
    assert torch.backends.mha.get_fastpath_enabled()
    assert measured(model, x).peak_op == "aten._transformer_encoder_layer_fwd"
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        profile = eo.profile(model, x)
        memory = measure_memory(model, (x,), {}, profile.trace)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert memory.tensor_peak_bytes == profile.peak_activation_bytes
    assert len(memory.modules) == len(profile.trace.modules)


def test_a_running_profiler_is_named_as_the_obstacle() -> None:
    with (
        torch_profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(InvalidInput, match="a torch profiler is running"),
    ):
        measured(nn.Linear(4, 4), torch.zeros(2, 4))


def test_a_device_without_a_known_allocator_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    with pytest.raises(InvalidInput, match="cannot be measured on 'mps'"):
        measure_memory(model, (x,), {}, trace(model, x), "mps")


def test_cuda_is_asked_for_its_own_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(name: str, value: int | None) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda device: (asked.append(name), value)[1])

    answer("synchronize", None)
    answer("reset_peak_memory_stats", None)
    answer("memory_allocated", 1000)
    answer("max_memory_allocated", 5000)
    model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    memory = measure_memory(model, (x,), {}, trace(model, x), "cuda")
    assert memory.peak_bytes == 5000 - 1000
    assert memory.source == "statistics of the caching allocator"
    started = ["synchronize", "reset_peak_memory_stats", "memory_allocated"]
    assert asked == [*started, "synchronize", "max_memory_allocated"]
