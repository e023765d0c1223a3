"""What can be asked of pruning, what comes of it, and what is refused."""

from __future__ import annotations

import random
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.compress import prune
from edge_opt.errors import EdgeOptError, InvalidInput, PruningFailed, TraceFailed
from edge_opt.model import SmallCNN
from edge_opt.pruning import structured_channel_prune
from edge_opt.pruning.coupling import Group
from edge_opt.pruning.ranking import rounded
from pruned_nets import Residual, TiedLanguageModel, UNet

SMALL = (1, 1, 28, 28)
IMAGE = (1, 3, 16, 16)


def batch(count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))


@pytest.mark.parametrize("wanted", [0.3, 0.5, 0.8])
def test_a_target_of_macs_is_met_within_a_tenth(wanted: float) -> None:
    pruned = prune(UNet(32), IMAGE, macs_target=wanted, round_to=8)
    assert abs(pruned.achieved.macs_ratio - wanted) <= 0.1 * wanted
    assert pruned.shortfalls == ()


def test_groups_are_nudged_where_one_ratio_jumps_over_the_target() -> None:
    pruned = prune(SmallCNN(16, 32), SMALL, macs_target=0.5, round_to=8)
    # With multiples of 8 one ratio gives 16 and 16 channels (55 %) or 8 and 24 (39 %); 8 and 32 are nearest.
    macs = 784 * 8 * 9 + 196 * 32 * 72 + 32 * 49 * 10
    assert (pruned.achieved.macs, pruned.shortfalls) == (macs, ())


def test_a_target_out_of_reach_is_reported_by_layer() -> None:
    pruned = prune(Residual(16, 32), IMAGE, macs_target=0.1, ignored=["stem"], round_to=8)
    # stem 16 x 27 MACs a pixel, up and down 16 x 9 for each of 32 channels; only those 32 can go, down to 8
    left, whole = 432 + 8 * 288, 432 + 32 * 288
    assert pruned.achieved.macs_ratio == pytest.approx((256 * left + 160) / (256 * whole + 160))
    reasons = {fall.path: fall.reason for fall in pruned.shortfalls}
    assert reasons["stem"] == "stem is ignored"
    assert reasons["down"] == "coupled with others: stem is ignored"
    assert reasons["up"] == "rounded to a multiple of 8: 8 of 32 stay"


def test_latency_comes_from_the_callers_own_measure() -> None:
    seen = []

    def latency_of(model: nn.Module) -> float:
        seen.append(model)
        return 1e-9 * eo.profile(model, IMAGE).totals.params

    pruned = prune(UNet(32), IMAGE, latency_target=0.5, latency_of=latency_of)
    assert pruned.achieved.latency_ratio == pytest.approx(pruned.achieved.params_ratio)
    assert abs(pruned.achieved.latency_ratio - 0.5) <= 0.05
    assert len(seen) > 2


def test_for_a_target_of_latency_nothing_slower_than_the_original_is_handed_over() -> None:
    def slower_when_cut(model: nn.Module) -> float:
        return 1.0 if eo.profile(model, SMALL).totals.macs == whole else 1.2

    whole = eo.profile(SmallCNN(), SMALL).totals.macs
    with pytest.raises(PruningFailed, match="latency_target=0.5: no pruned variant that was tried is faster"):
        prune(SmallCNN(), SMALL, latency_target=0.5, latency_of=slower_when_cut)
    assert prune(SmallCNN(), SMALL, latency_target=1.0, latency_of=slower_when_cut).achieved.latency_ratio == 1.0


def test_a_latency_that_no_ratio_reaches_is_refused() -> None:
    def latency_of(net: nn.Module) -> float:
        return 0.8 + 0.2 * net.conv1.out_channels / 16

    # 8 of 16 channels stay: 0.8 + 0.2 / 2 = 90 %
    with pytest.raises(PruningFailed, match="out of reach: with 98% of the channels pruned 90% of the latency"):
        prune(SmallCNN(), SMALL, latency_target=0.5, latency_of=latency_of, round_to=8)


def test_latency_can_be_what_a_device_is_estimated_to_take() -> None:
    pruned = prune(UNet(32), IMAGE, latency_target=0.6, target="raspberry-pi-4")
    before, after = (eo.estimate(eo.profile(net, IMAGE), "raspberry-pi-4").seconds for net in (UNet(32), pruned.model))
    assert pruned.achieved.latency_ratio == pytest.approx(after / before)


def test_layers_have_ratios_of_their_own_beside_the_overall_one() -> None:
    pruned = prune(SmallCNN(16, 32), SMALL, 0.5, layers={"conv1": 0.25}, round_to=1)
    assert [(layer.path, layer.after) for layer in pruned.achieved.layers][:2] == [("conv1", 12), ("conv2", 16)]
    only = prune(SmallCNN(16, 32), SMALL, {"conv1": 0.25}, round_to=1)
    assert [(layer.path, layer.after) for layer in only.achieved.layers][:2] == [("conv1", 12), ("conv2", 32)]
    assert only.shortfalls == ()


def test_a_ratio_for_a_module_holds_for_the_layers_in_it() -> None:
    pruned = prune(UNet(16), IMAGE, {"bottom": 0.5})
    assert pruned.model.bottom[0].out_channels == 32
    assert pruned.model.lower[0].out_channels == 32


def test_coupled_layers_cannot_have_two_ratios() -> None:
    with pytest.raises(InvalidInput, match="stem and down lose the same channels, and are given .* 0.25 and 0.5"):
        prune(Residual(), IMAGE, {"stem": 0.25, "down": 0.5})


def test_ignored_layers_keep_their_channels() -> None:
    pruned = prune(SmallCNN(), SMALL, 0.5, ignored=["conv1"])
    assert (pruned.model.conv1.out_channels, pruned.model.conv2.out_channels) == (16, 16)
    assert next(fall.reason for fall in pruned.shortfalls if fall.path == "conv1") == "conv1 is ignored"


def test_rounding_is_to_the_nearest_multiple_and_is_reported() -> None:
    pruned = prune(SmallCNN(24, 40), SMALL, 0.5, round_to=8)
    # 12 of 24 and 20 of 40 are halfway between multiples of 8; halves stay
    assert (pruned.model.conv1.out_channels, pruned.model.conv2.out_channels) == (16, 24)
    reasons = {fall.path: fall.reason for fall in pruned.shortfalls}
    assert reasons["conv1"] == "rounded to a multiple of 8: 16 of 24 stay"
    exact = prune(SmallCNN(24, 40), SMALL, 0.5, round_to=1)
    assert (exact.model.conv1.out_channels, exact.model.conv2.out_channels) == (12, 20)


def test_rounding_of_any_group_is_a_multiple_or_all_of_it() -> None:
    for count in range(1, 70):
        for round_to in (1, 4, 8):
            group = Group("conv", np.arange(count), 1, None)
            for left in np.linspace(0, count, 25):
                kept = rounded(float(left), group, round_to)
                assert 1 <= kept <= count
                assert kept % round_to == 0 or kept == count or count < round_to
                assert abs(kept - left) <= round_to


def test_random_importance_is_the_seeds_choice() -> None:
    specs = [prune(SmallCNN(), SMALL, 0.5, importance="random", seed=seed).spec.kept for seed in (1, 1, 2)]
    assert specs[0] == specs[1]
    assert specs[0] != specs[2]


def test_taylor_keeps_what_the_loss_feels() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        # The first unit is larger, and nothing listens to it.
        model[0].weight.copy_(torch.tensor([[9.0, 9, 9, 9], [1, 1, 1, 1]]))
        model[2].weight.copy_(torch.tensor([[0.0, 1], [0, -1]]))
    loader = [(torch.rand(16, 4), torch.randint(0, 2, (16,)))]
    kept = prune(model, (1, 4), 0.5, importance="taylor", loader=loader, round_to=1).spec.kept
    assert kept[0].indices == (1,)


def test_the_older_call_prunes_a_copy() -> None:
    model = SmallCNN(16, 32)
    pruned = structured_channel_prune(model, 0.5)
    assert (pruned.conv1.out_channels, pruned.conv2.out_channels, pruned.classifier.in_features) == (8, 16, 16 * 49)
    assert model.conv1.out_channels == 16
    assert structured_channel_prune(Residual(), 0.5, input_shape=IMAGE).up.out_channels == 16


def test_no_ratio_at_all_is_an_unchanged_copy() -> None:
    model = SmallCNN()
    pruned = prune(model, SMALL, 0.0)
    assert pruned.achieved.macs_ratio == 1.0
    assert pruned.check.silenced_error is None
    assert pruned.model is not model


class Watched(nn.Module):
    """Counts its calls, drops out, and holds batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Conv2d(16, 16, 3).requires_grad_(False)
        self.head = nn.Linear(16, 10)
        self.drop.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.drop(torch.relu(self.norm(self.conv(x))))).mean((2, 3)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_original_and_the_process_are_as_found(fails: bool) -> None:
    model = Watched()
    seen: list[int] = []
    model.conv.register_forward_hook(lambda module, args, out: seen.append(1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    if fails:
        with pytest.raises(TraceFailed):
            prune(model, (1, 4, 16, 16), 0.5)
    else:
        pruned = prune(model, IMAGE, 0.5)
        assert [module.training for module in pruned.model.modules()] == modes
        assert [parameter.requires_grad for parameter in pruned.model.parameters()] == grads
        assert len(pruned.model.conv._forward_hooks) == 1
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert (np.random.get_state()[1] == numbers[2]).all()
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


@cache
def scale(size: int) -> torch.Tensor:
    return torch.full((size,), 2.0)


class Caching(nn.Module):
    """Keeps tensors where a run leaves them: in a function's cache, in the class, and in itself."""

    tables: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.tables.setdefault(len(x), torch.ones(len(x), 1, device=x.device))
        self.last = torch.relu(self.hidden(x * scale(x.shape[1]))) * table
        return self.out(self.last)


@pytest.mark.parametrize("request_", [{"ratio": 0.5, "importance": "taylor"}, {"macs_target": 0.5}, {"fails": True}])
def test_tensors_that_a_model_caches_stay_real(request_: dict) -> None:
    model, data = Caching(), [(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))]
    scale.cache_clear()
    Caching.tables.clear()
    if request_.pop("fails", False):
        with pytest.raises(RuntimeError):
            prune(model, (2, 8), 0.5, loader=[torch.randn(4, 8), torch.randn(4, 9)], importance="reconstruction")
    else:
        prune(model, (2, 8), round_to=1, loader=data, **request_)
    assert model.last is None
    assert not any(tensor.is_meta for tensor in (*Caching.tables.values(), scale(8)))
    assert model(torch.randn(2, 8)).shape == (2, 4)


def test_tied_tensors_are_cut_once_while_a_target_is_sought() -> None:
    pruned = prune(TiedLanguageModel(), [((2, 6), "int64")], macs_target=0.5, round_to=1)
    assert pruned.achieved.macs_ratio == pytest.approx(0.5, abs=0.05)
    assert pruned.model.out.weight is pruned.model.embedding.weight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1.0}, "ratio is 1.0; it is the share of channels to remove, at least 0 and below 1"),
        ({"ratio": -0.1}, "ratio is -0.1"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"ratio": "half"}, "ratio is 'half'"),
        ({"ratio": True}, "ratio is True"),
        ({"layers": {"conv1": 2}}, "the ratio of 'conv1' is 2"),
        ({"ratio": 0.5, "macs_target": 0.5}, "ratio and macs_target are given; give one of them"),
        ({}, "how much to prune"),
        ({"macs_target": 0}, "macs_target is 0; it is the share that is to remain, above 0 and up to 1"),
        ({"latency_target": 0.5}, "latency_of= .* or target= .*, and neither is given"),
        ({"ratio": 0.5, "round_to": 8, "target": "raspberry-pi-4"}, "give latency_target= too"),
        ({"latency_target": 0.5, "latency_of": lambda net: -1.0}, "latency_of returned -1.0"),
        ({"layers": {"conv3": 0.5}}, "SmallCNN has no layer 'conv3'; closest: conv2, conv1"),
        ({"layers": {"relu1": 0.5}}, "relu1 is a ReLU and has no channels of its own"),
        ({"ratio": 0.5, "ignored": ["conv7"]}, "SmallCNN has no layer 'conv7'"),
        ({"ratio": 0.5, "importance": "l3"}, "importance is 'l3'; it must be one of auto, group, recon"),
        ({"ratio": 0.5, "importance": "taylor"}, 'importance="taylor" needs data'),
        ({"ratio": 0.5, "importance": "taylor", "loader": []}, "the loader has no batches"),
        ({"ratio": 0.5, "round_to": 0}, "round_to is 0"),
        ({"ratio": 0.5, "round_to": "fast"}, "round_to is 'fast'; it is a whole number, or \"auto\""),
        ({"ratio": 0.5, "reconstruct": True}, "reconstruct= needs data"),
        ({"ratio": 0.5, "importance": "reconstruction"}, 'importance="reconstruction" needs data'),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(arguments: dict, message: str) -> None:
    with pytest.raises(EdgeOptError, match=message):
        prune(SmallCNN(), SMALL, **arguments)


def test_nothing_to_prune_is_an_error_with_the_reason() -> None:
    with pytest.raises(PruningFailed, match="nothing in Linear can be pruned"):
        prune(nn.Linear(4, 4), (1, 4), 0.5)
    with pytest.raises(PruningFailed, match="conv1 is ignored; conv2 is ignored; classifier is the model's output"):
        prune(SmallCNN(), SMALL, 0.5, ignored=["conv1", "conv2"])
    with pytest.raises(PruningFailed, match="no output of the model depends on a parameter"):
        prune(nn.ReLU(), (1, 4), 0.5)


def test_of_a_model_only_the_recurrent_layer_with_a_projection_is_spared() -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(8, 16)
            self.lstm = nn.LSTM(16, 16, batch_first=True, proj_size=16 - 1)
            self.wide = nn.Linear(15, 32)
            self.head = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.wide(self.lstm(self.enter(x))[0])))

    pruned = prune(Speech(), (1, 5, 8), 0.5, round_to=1)
    widths = {layer.path: layer.after for layer in pruned.achieved.layers}
    # half of the layers around it: 16 channels go in, 32 are made of what comes out
    assert widths == {"enter": 8, "lstm": 15, "wide": 16, "head": 4}
    assert (pruned.model.lstm.input_size, pruned.model.lstm.hidden_size, pruned.model.lstm.proj_size) == (8, 16, 15)
    reasons = {fall.path: fall.reason for fall in pruned.shortfalls}
    assert reasons["lstm"] == "lstm is a LSTM that projects its outputs"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_pruning_works_under_any_gradient_mode(mode) -> None:
    model = SmallCNN()
    with mode():
        pruned = prune(model, SMALL, 0.5)
        assert not torch.is_grad_enabled()
    pruned.model(torch.randn(SMALL)).sum().backward()


def test_models_without_values_or_with_broken_ones_are_refused() -> None:
    with pytest.raises(InvalidInput, match="the model's weights are on the meta device"):
        prune(SmallCNN().to("meta"), SMALL, 0.5)
    model = SmallCNN()
    with torch.no_grad():
        model.conv1.weight[3] = torch.nan
    with pytest.raises(PruningFailed, match="conv1.weight has weights or gradients that are not finite"):
        prune(model, SMALL, 0.5)


def test_models_that_are_not_made_of_layers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="a scripted model cannot be pruned"):
        prune(torch.jit.script(SmallCNN()), SMALL, 0.5)
    exported = torch.export.export(SmallCNN(), (torch.randn(SMALL),)).module()
    with pytest.raises(PruningFailed, match="nothing in GraphModule can be pruned: it has no layers"):
        prune(exported, SMALL, 0.5)


def test_computed_weights_are_left_alone_by_name() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 16, 3))
    pruned = prune(nn.Sequential(normed, nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 3)), IMAGE, 0.5)
    assert (pruned.model[0].out_channels, pruned.model[1].out_channels) == (16, 8)
    reason = next(fall.reason for fall in pruned.shortfalls if fall.path == "0")
    assert reason.endswith("its weight is computed from other parameters")


def test_attention_between_two_streams_loses_heads_inputs_and_outputs() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours, self.theirs = nn.Linear(8, 16), nn.Linear(8, 16)
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            theirs = self.theirs(y)
            return self.head(self.attention(self.ours(x), theirs, theirs)[0])

    pruned = prune(Cross(), [(2, 5, 8), (2, 7, 8)], 0.5).model
    assert (pruned.ours.out_features, pruned.theirs.out_features, pruned.head.in_features) == (8, 8, 8)
    # two heads of four channels for each of query, key and value, from eight inputs
    assert pruned.attention.in_proj_weight.shape == (3 * 2 * 4, 8)
    assert pruned.attention.out_proj.weight.shape == (8, 2 * 4)


def test_a_fresh_model_is_proved_although_its_head_is_silent() -> None:
    torch.manual_seed(0)
    model = UNet(16)
    with torch.no_grad():
        # As vision transformers start: no output depends on anything, so equal outputs would prove nothing.
        model.out.weight.zero_()
    assert 0 < prune(model, IMAGE, 0.5).check.silenced_error < 1e-3
