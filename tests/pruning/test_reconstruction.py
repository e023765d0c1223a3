"""What channels contribute on real inputs: ranked, stood in for, and norms that see the smaller model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from edge_opt.compress import apply_spec, prune
from edge_opt.pruning.reconstruction import reestimate_norms


def copies() -> nn.Sequential:
    """Four hidden channels of which the last two are multiples of the first two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight[2:] = 3 * model[0].weight[:2]
        model[0].bias[2:] = 3 * model[0].bias[:2]
    return model


BATCHES = [torch.randn(256, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def test_a_channel_that_others_know_goes_without_loss() -> None:
    model = copies()
    pruned = prune(model, (1, 6), 0.5, round_to=1, importance="reconstruction", loader=BATCHES)
    kept = next(each.indices for each in pruned.spec.kept if each.tensor == "0.weight")
    # Of each pair one stays: 0 or 2, and 1 or 3.
    assert {index % 2 for index in kept} == {0, 1}
    x = BATCHES[0]
    with torch.no_grad():
        before, after = model(x), pruned.model(x)
        cut = apply_spec(model, pruned.spec)(x)
    # Only damping is between them; without the fit much is lost.
    assert (after - before).norm() < 0.02 * before.norm()
    assert (cut - before).norm() > 0.1 * before.norm()


def test_without_a_fit_the_weights_are_those_of_the_recipe() -> None:
    model = copies()
    pruned = prune(model, (1, 6), 0.5, round_to=1, importance="reconstruction", loader=BATCHES, reconstruct=False)
    assert torch.equal(pruned.model[1].weight, apply_spec(model, pruned.spec)[1].weight)


def test_the_mean_of_removed_channels_goes_into_the_bias() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        # The second channel is constant, 5: what it adds is 2 * 5.
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 5.0]))
        model[1].weight.copy_(torch.tensor([[1.0, 2.0]]))
        model[1].bias.fill_(1.0)
    pruned = prune(model, (1, 2), 0.5, round_to=1, importance="reconstruction", loader=[torch.randn(64, 2)])
    assert pruned.model[1].bias.item() == pytest.approx(1 + 2 * 5, rel=1e-3)


def test_norms_take_the_statistics_of_the_batches_and_nothing_else_changes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(32, 3)).train()
    before = copy.deepcopy(model.state_dict())
    batches = [torch.randn(8, 1, 4, 4) + shift for shift in (0.0, 2.0)]
    reestimate_norms(model, [(batch, torch.zeros(8)) for batch in batches])
    with torch.no_grad():
        means = torch.stack([model[0](batch).mean((0, 2, 3)) for batch in batches])
    assert torch.allclose(model[1].running_mean, means.mean(0), atol=1e-6)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.running_mean", "1.running_var"}
    assert model.training and model[2].training and model[1].momentum == 0.1


def test_statistics_stay_where_the_batches_do_not_fit() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    model[1].running_mean.fill_(7.0)
    with pytest.raises(RuntimeError):
        reestimate_norms(model, [torch.randn(2, 1, 4, 4), torch.randn(2, 5, 4, 4)])
    assert model[1].running_mean.tolist() == [7.0, 7.0]


def test_a_loader_that_runs_out_serves_every_step() -> None:
    once = prune(copies(), (1, 6), 0.5, round_to=1, importance="reconstruction", loader=iter(BATCHES))
    again = prune(copies(), (1, 6), 0.5, round_to=1, importance="reconstruction", loader=BATCHES)
    assert torch.equal(once.model[1].weight, again.model[1].weight)


def test_the_group_counts_readers_as_well_as_writers() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        # Writers: 1 and 2 in square; readers: 9 and 1. Together the first channel matters more.
        model[0].weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [2.0**0.5, 0.0, 0.0]]))
        model[1].weight.copy_(torch.tensor([[3.0, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    assert prune(model, (1, 3), 0.5, importance="group", round_to=1).spec.kept[0].indices == (0,)
