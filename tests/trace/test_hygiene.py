"""A profile leaves the model and the process as it found them, also when forward raises."""

from __future__ import annotations

import contextvars
import copy
import gc
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import edge_opt as eo
from awkward import Awkward, same, state
from edge_opt._support.unchanged import preserve_rng
from edge_opt.errors import TraceFailed
from edge_opt.profiling import clear_caches


@pytest.mark.parametrize("looks", [False, True], ids=["meta", "real"])
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "raises"])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("training", [False, True])
def test_everything_is_as_it_was(looks: bool, fails: bool, mode: str, training: bool) -> None:
    model = Awkward(fails, looks)
    model.train(training)
    model.norm.train(not training)
    x = torch.randn(3, 4)
    x_before = x.clone()
    before = state(model)
    if fails:
        with pytest.raises(eo.EdgeOptError, match="forward gave up"):
            eo.profile(model, x, mode=mode)
    else:
        profile = eo.profile(model, x, mode=mode)
        assert profile.trace.used_real_tensors == looks
    after = state(model)
    for key in before:
        assert same(before[key], after[key]), key
    assert torch.equal(x, x_before)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_grad_mode_and_fast_path_of_the_caller_survive() -> None:
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.enable_grad():
        eo.profile(model, (1, 3, 8))
        assert torch.is_grad_enabled()
    with torch.no_grad():
        eo.profile(model, (1, 3, 8))
        assert not torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_model_still_runs_and_trains_afterwards() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    twin = copy.deepcopy(model)
    eo.profile(model, (2, 3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    for net in (model, twin):
        net(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_hooks_of_the_user_are_kept_and_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen = []
    handle = model[0].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    eo.profile(model, (2, 4))
    assert seen == [(2, 4)]
    handle.remove()
    assert not model[0]._forward_hooks


def test_a_profile_inside_inference_mode_works() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.inference_mode():
        assert eo.profile(model, (2, 4)).totals.macs == 2 * 16


def test_weights_are_not_copied() -> None:
    model = nn.Linear(4096, 4096)
    pointer = model.weight.data_ptr()
    eo.profile(model, (1, 4096))
    assert model.weight.data_ptr() == pointer


def test_objects_passed_as_arguments_are_not_written_to() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, memory: dict) -> torch.Tensor:
            memory["last"] = self.layer(x)
            return memory["last"]

    memory: dict[str, torch.Tensor] = {}
    eo.profile(Keeps(), [(2, 4), memory])
    assert memory == {}


def test_a_key_value_cache_passed_as_argument_stays_empty() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys: list[torch.Tensor] = []

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            cache.keys.append(self.layer(x))
            return cache.keys[-1]

    cache = Cache()
    eo.profile(Caching(), [(2, 4), cache])
    assert cache.keys == []


def test_hooks_that_forward_adds_itself_are_taken_back() -> None:
    class AddsHooks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "is_ready"):
                self.layer.register_forward_hook(lambda module, args, out: out + 1)
                self.layer.register_forward_pre_hook(lambda module, args: None)
                self.is_ready = True
            return self.layer(x)

    model = AddsHooks()
    eo.profile(model, (2, 4))
    assert not model.layer._forward_hooks
    assert not model.layer._forward_pre_hooks
    x = torch.zeros(2, 4)
    assert torch.equal(model(x), model.layer.bias.expand(2, 4) + 1)


class _Slices(nn.Module):
    """Slices alike at two places, an operator that returns its input, and one that works in place on a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x[2:4][1:], x[4:6][1:]
        if high.storage_offset() - low.storage_offset() != 2 * x.stride(0) or high.contiguous() is not high:
            raise ValueError("a remembered view is not where it belongs")
        first, second = (part.split(2, dim=1)[1] for part in (low, high))
        if second.storage_offset() - first.storage_offset() != 2 * x.stride(0):
            raise ValueError("a remembered split is not where it belongs")
        return high.view(4).relu_() + low.view(4).relu_()


def test_a_view_that_was_met_before_lies_at_its_own_place_in_its_own_storage() -> None:
    _Slices()(torch.ones(6, 4))
    trace = eo.profile(_Slices(), (6, 4)).trace
    assert sum(bool(call.creates) for call in trace.ops) == 1  # the sum; all else lies in the input
    assert {number for call in trace.ops[:-1] for number in call.reads} == {0}


_last: contextvars.ContextVar[torch.Tensor | None] = contextvars.ContextVar("last", default=None)


class _InContext(nn.Linear):
    """Keeps its result in a variable of the context."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        _last.set(result)
        return result


def test_a_context_variable_holds_what_it_held() -> None:
    assert eo.profile(_InContext(4, 4), (3, 4)).totals.macs == 3 * 16
    assert _last.get() is None


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_rests_and_is_left_as_found(was_on: bool, fails: bool) -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if fails or gc.isenabled():
                raise ValueError("told to fail" if fails else "somebody looks for garbage")
            return x + 1

    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(TraceFailed, match="told to fail") if fails else nullcontext():
            eo.profile(Asking(), (2, 4))
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


class _Cyclic(nn.Linear):
    """Calls operators whose kernels without data are written in Python; some of them leave cycles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        spread = torch.linalg.vector_norm(y, dim=1) + y.std(1) + y.logsumexp(1)
        return nn.functional.normalize(y) * spread[:, None] + torch.cdist(y, y).sum()


@pytest.mark.parametrize("model", [_Cyclic(8, 4), nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))])
def test_memory_is_the_same_the_first_time_and_later(model: nn.Module) -> None:
    clear_caches()
    first, later = (eo.profile(model, (4, 8)).trace for _ in range(2))
    assert first == later


_FIRST_AND_SECOND = """
import torch, edge_opt as eo
from torch import nn
class Attention(nn.Module):
    def forward(self, x):
        x = x.transpose(0, 1)
        return nn.functional.scaled_dot_product_attention(x, x, x)
print(*(eo.profile(Attention(), (4, 2, 8)).peak.live_bytes for _ in range(2)))
"""


def test_the_first_profile_of_a_process_equals_the_second() -> None:
    """Attention on three dimensions is taken apart, by kernels that a process imports when it first needs them."""
    done = subprocess.run([sys.executable, "-c", _FIRST_AND_SECOND], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second


def test_a_batched_product_of_four_dimensions_is_refused_as_torch_does() -> None:
    class Batched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, x)

    assert eo.profile(Batched(), (2, 4, 4)).totals.macs == 2 * 4 * 4 * 4
    with pytest.raises(TraceFailed, match="3D tensor"):
        eo.profile(Batched(), (2, 2, 4, 4))


def test_random_numbers_of_gpus_are_preserved(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state of the GPU"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    with preserve_rng():
        assert not restored
    assert restored == ["state of the GPU"]
