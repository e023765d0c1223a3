"""Models that look at values fall back to real tensors by themselves, and the profile says so."""

from __future__ import annotations

import resource
from functools import partial

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.errors import EdgeOptError, TraceFailed


class Looks(nn.Module):
    """Takes the branch that its own values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return self.extra(x) if x.abs().sum() >= 0 else x


def test_data_dependent_branches_are_followed() -> None:
    profile = eo.profile(Looks(), (2, 4))
    assert profile.totals.macs == 2 * (2 * 16)
    assert profile.trace.used_real_tensors
    assert "looks at values" in profile.trace.notes[0]


def test_the_users_own_values_decide() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            for _ in range(int(steps)):
                x = self.layer(x)
            return x

    assert eo.profile(Counts(), (torch.zeros(2, 4), torch.tensor(5))).totals.macs == 5 * (2 * 16)


def test_boolean_indexing_counts_the_rows_taken() -> None:
    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[x[:, 0] > 0])

    x = torch.ones(6, 4)
    x[:2] = -1
    assert eo.profile(Selects(), x).totals.macs == 4 * 16


def test_script_modules_are_traced_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for script in (torch.jit.script(model), torch.jit.trace(model, torch.zeros(3, 4))):
        profile = eo.profile(script, (3, 4))
        assert profile.totals.macs == 3 * (32 + 16)
        assert profile.trace.used_real_tensors
    mixed = nn.Sequential(torch.jit.script(nn.Linear(4, 8)), nn.Linear(8, 2))
    assert eo.profile(mixed, (3, 4)).totals.macs == 3 * (32 + 16)


def test_torchscript_that_refuses_a_call_is_answered_with_what_to_use() -> None:
    with pytest.raises(TraceFailed, match="does not say why; check the shapes"):
        eo.profile(torch.jit.script(nn.Linear(4, 8)), (3, 5))
    # Its weights are in a layout for the kernels of one CPU, which no other code can read.
    body = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval())
    optimized = nn.Sequential(torch.jit.optimize_for_inference(body), nn.ReLU())
    for function in (eo.profile, partial(eo.prune, ratio=0.5), partial(eo.convert, precision="fp32")):
        with pytest.raises(EdgeOptError, match=r"before torch\.jit\.optimize_for_inference"):
            function(optimized, (1, 3, 8, 8))


def test_values_of_small_tensors_made_in_forward_are_known_without_a_real_run() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("depth", torch.tensor(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(x.shape[1], device=x.device)
            if (positions[1:] > positions[:-1]).all() and float(torch.tensor(2.0)) == 2:
                for _ in range(self.depth.item()):
                    x = self.layer(x)
            return x + positions

    profile = eo.profile(Positions(), (2, 4))
    assert profile.totals.macs == 3 * (2 * 16)
    assert not profile.trace.used_real_tensors


def test_numpy_in_forward_needs_real_tensors() -> None:
    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = float(self.layer(x).numpy().mean())
            return self.layer(x) * scale

    profile = eo.profile(Numpy(), (2, 4))
    assert profile.totals.macs == 2 * (2 * 16)
    assert profile.trace.used_real_tensors


def test_a_meta_model_that_looks_at_values_is_refused_with_the_reason() -> None:
    with torch.device("meta"):
        model = Looks()
    with pytest.raises(TraceFailed, match="looks at values.*weights are on the meta device"):
        eo.profile(model, (2, 4))


def test_a_meta_model_of_seven_billion_parameters_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 11008), nn.Linear(11008, 4096)) for _ in range(78)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = eo.profile(model, (1, 4096))
    assert profile.totals.params == 78 * (2 * 4096 * 11008 + 4096 + 11008) > 7e9
    assert profile.totals.macs == 78 * 2 * 4096 * 11008
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_weights_on_the_meta_device_are_numbered_once() -> None:
    with torch.device("meta"):
        layer = nn.Linear(4, 4)
    trace = eo.profile(nn.Sequential(layer, layer, layer), (2, 4)).trace
    assert [storage.nbytes for storage in trace.storages if storage.role == "parameter"] == [4 * 16, 4 * 4]


def test_models_swallowing_exceptions_still_fall_back() -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                steps = 1 + int(x.sum().item() == 0)
            except Exception:
                steps = 0
            for _ in range(steps):
                x = self.layer(x)
            return x

    assert eo.profile(Swallows(), torch.zeros(2, 4)).totals.macs == 2 * (2 * 16)


class Cast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x)


class CastWeights(nn.Conv2d):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.conv2d(x, self.weight, self.bias)


ATTENTION = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


@pytest.mark.parametrize(
    ("model", "shape", "macs"),
    [
        (Cast(nn.Conv2d(3, 4, 3)), (2, 3, 8, 8), 2 * 4 * 36 * 27),
        (CastWeights(3, 4, 3), (2, 3, 8, 8), 2 * 4 * 36 * 27),
        # Projections of 8 tokens, 4 of 16 x 16; scores and values over 4 tokens; two layers of 16 x 32.
        (Cast(ATTENTION), (2, 4, 16), 8 * (4 * 16 * 16 + 2 * 4 * 16 + 2 * 16 * 32)),
    ],
)
def test_autocast_inside_a_model_is_followed(model: nn.Module, shape: tuple[int, ...], macs: int) -> None:
    profile = eo.profile(model, shape)
    assert profile.totals.macs == macs
    products = [signature for signature in profile.trace.signatures if signature.op in ("aten.linear", "aten.conv2d")]
    assert products and all(signature.outputs[0].dtype == "bfloat16" for signature in products)


def test_autocast_around_a_profile_is_followed_each_time() -> None:
    model = nn.Conv2d(3, 4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profiles = [eo.profile(model, (2, 3, 8, 8)) for _ in range(2)]
    assert profiles[0] == profiles[1]
    # The input, the weights and the bias are cast, and the result is in two bytes each.
    assert profiles[0].totals.activation_bytes == 2 * (2 * 3 * 64 + 4 * 27 + 4 + 2 * 4 * 36)


class Gradient(nn.Linear):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).sum(), x)[0]


class Tangent(nn.Linear):
    def forward(self, x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(super().forward(dual)).tangent


@pytest.mark.parametrize(
    ("cls", "products"),
    [
        (Gradient, 2),  # with the input, and of the gradient with the weights
        (Tangent, 3),  # with the input, with its tangent, and with the weights' tangent of zeros
    ],
)
def test_gradients_inside_forward_are_counted(cls: type[nn.Linear], products: int) -> None:
    model = cls(8, 4, bias=False)
    profile = eo.profile(model, (2, 8))
    assert profile.totals.macs == products * (2 * 8 * 4) and not profile.totals.is_lower_bound
    assert model.weight.grad is None


def test_a_training_step_of_lazy_modules_leaves_them_lazy() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 1, bias=False), nn.Flatten(), nn.LazyLinear(8, bias=False))
    before = torch.get_rng_state()
    step = eo.training_step(model, (2, 3, 5, 5), optimizer="sgd")
    # Per image: 25 pixels of 3 x 4 channels, then 4 x 25 inputs of 8 outputs.
    assert step.forward_flops == 2 * 2 * (25 * 3 * 4 + 4 * 25 * 8)
    assert all(map(nn.parameter.is_lazy, model.parameters()))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(TraceFailed, match="lazy model cannot be run"):
        eo.training_step(nn.LazyConv2d(4, 1), (2, 8))


def test_a_training_step_of_a_lazy_norm_leaves_its_buffers_lazy() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyLinear(4, bias=False))
    # Weight and bias of 8 channels, then 8 inputs of 4 outputs.
    assert eo.training_step(model, (2, 8), optimizer="sgd").params == 8 + 8 + 8 * 4
    assert all(map(nn.parameter.is_lazy, (*model.parameters(), model[0].running_mean)))
