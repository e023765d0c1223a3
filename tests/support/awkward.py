"""A model that leaves traces everywhere, and what to compare before and after."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn


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
