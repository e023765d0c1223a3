"""Devices by name, with a double for those no test machine has."""

from __future__ import annotations

import pytest
import torch

from edge_opt.errors import InvalidInput
from edge_opt.measuring.layers import clock_of
from edge_opt.measuring.machine import CPU, find_device


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs, and the numbers of those that were waited for."""
    waited: list[int] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    return waited


def test_the_cpu_is_always_there_and_never_waited_for() -> None:
    assert (CPU.torch_name, CPU.name, CPU.is_asynchronous) == ("cpu", "cpu", False)
    assert CPU.synchronize() is None
    assert find_device(torch.device("cpu")).torch_name == "cpu"


def test_a_device_is_found_by_its_number_and_waited_for_by_it(waited: list[int]) -> None:
    second = find_device("cuda:1")
    assert (second.torch_name, second.name, second.is_asynchronous) == ("cuda:1", "GPU 1", True)
    second.synchronize()
    find_device("cuda").synchronize()
    assert waited == [1, 0]


def test_layer_clocks_wait_for_an_asynchronous_device_only(waited: list[int]) -> None:
    now = clock_of(find_device("cuda"))
    first = now()
    assert now() >= first
    assert waited == [0, 0]
    assert clock_of(CPU)() >= first


@pytest.mark.parametrize("asked", ["tpu", "", "cuda:x", "gpu"])
def test_an_unknown_device_is_refused_with_those_there_are(asked: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown device '{asked}'; write one of cpu, cuda, mps"):
        find_device(asked)


def test_a_device_that_is_not_here_is_refused(waited: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="'cuda:3' was asked for, and there is only cuda:0 to cuda:1"):
        find_device("cuda:3")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(InvalidInput, match=r"'cuda' was asked for, and torch .* finds no cuda here; use device='cpu'"):
        find_device("cuda")
