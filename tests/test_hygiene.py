"""A profile leaves the model and the process as it found them, also when forward raises."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import edge_opt as eo


class Awkward(nn.Module):
    """Does in forward what well-behaved models don't: keeps tensors, adds buffers, counts calls, draws numbers."""

    def __init__(self, fails: bool, looks: bool) -> None:
        super().__init__()
        self.fails = fails
        self.looks = looks
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2, 4), persistent=False)
        self.calls = 0
        self.drop.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x
        self.steps += 1
        self.cache[:, 1] = x[:2, 0]
        self.norm.weight.data.mul_(2)
        self.register_buffer("made_in_forward", torch.ones(3))
        x = self.drop(self.norm(self.frozen(x)))
        x = x + torch.rand(4) * random.random() * np.random.rand()
        self.cache = x
        if self.looks and x.sum() > -1e9:
            x = x * 2
        if self.fails:
            raise RuntimeError("forward gave up")
        return x


def state(model: nn.Module) -> dict[str, object]:
    """Everything a profile must not change."""
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "keys": list(model.state_dict()),
        "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "buffers": [name for name, _ in model.named_buffers()],
        "training": [module.training for module in model.modules()],
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [
            [len(getattr(m, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
            for m in model.modules()
        ],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "calls": model.calls,
        "torch_random": torch.get_rng_state(),
        "python_random": random.getstate(),
        "numpy_random": np.random.get_state()[1].copy(),
        "grad_mode": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "fast_path": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
        "functions": (nn.Module.__call__, nn.Module._call_impl, torch.nn.functional.conv2d, torch.Tensor.__matmul__),
        "dtype": torch.get_default_dtype(),
    }


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


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
