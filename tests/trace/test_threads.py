"""Several threads may profile, also the same model: right results, and nothing left over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import edge_opt as eo
import keepers


def together(*tasks: Callable[[], object]) -> list[object]:
    """Results of tasks that start at the same time, each in a thread of its own."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], object]) -> object:
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(run, task) for task in tasks]]


def net() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(4), nn.TransformerEncoder(layer, 2))


def as_it_was(model: nn.Module) -> list[object]:
    return [[*sorted(module.__dict__), module.training] for module in model.modules()]


def test_two_models_in_two_threads() -> None:
    first, second = net().eval(), net().eval()
    alone = eo.profile(first, (2, 4, 16)).totals
    assert torch.backends.mha.get_fastpath_enabled()
    for _ in range(5):
        found = together(lambda: eo.profile(first, (2, 4, 16)).totals, lambda: eo.profile(second, (2, 4, 16)).totals)
        assert found == [alone, alone]
    assert torch.backends.mha.get_fastpath_enabled()


def test_one_model_in_two_threads_and_modes() -> None:
    model = net().train()
    before = as_it_was(model)
    evaluating, training = eo.profile(model, (2, 4, 16)), eo.profile(model, (2, 4, 16), mode="train")
    for _ in range(5):
        found = together(
            lambda: eo.profile(model, (2, 4, 16)).totals, lambda: eo.profile(model, (2, 4, 16), mode="train").totals
        )
        assert found == [evaluating.totals, training.totals]
        assert as_it_was(model) == before


def test_a_shared_cache_holds_real_values_while_another_thread_reads_it() -> None:
    keepers.reset()
    model = keepers.LruOnSmall().eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        expected = model(x)
    keepers.reset()

    @torch.no_grad()
    def run() -> bool:
        return all(torch.equal(model(x), expected) for _ in range(50))

    def profile() -> bool:
        return all(eo.profile(model, (4, 8)).totals.macs == 4 * 8 * 8 for _ in range(20))

    assert together(run, profile) == [True, True]
    keepers.reset()


def test_a_profile_inside_a_forward() -> None:
    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.other = [nn.Linear(8, 4)]

        def forward(self, x):
            self.macs = eo.profile(self.other[0], (1, 8)).totals.macs
            return self.layer(x)

    assert eo.profile(Curious(), (1, 8)).totals.macs == 64
