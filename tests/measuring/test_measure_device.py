"""Devices by name, with a double for those no test machine has."""

from __future__ import annotations

import pytest
import torch

from edge_opt.errors import InvalidInput
from edge_opt.measuring.layers import clock_of
from edge_opt.measuring.machine import CPU, find_device


class Recording:
    """A backend that is there `total` times and writes down what it is asked."""

    is_asynchronous = True

    def __init__(self, total: int) -> None:
        self.total = total
        self.waited: list[int] = []

    def count(self) -> int:
        return self.total

    def name(self, index: int) -> str:
        return f"GPU {index}"

    def synchronize(self, index: int) -> None:
        self.waited.append(index)


def test_the_cpu_is_always_there_and_never_waited_for() -> None:
    assert (CPU.torch_name, CPU.name, CPU.is_asynchronous) == ("cpu", "cpu", False)
    assert CPU.synchronize() is None
    assert find_device(torch.device("cpu")).torch_name == "cpu"


def test_a_device_is_found_by_its_number_and_waited_for_by_it() -> None:
    backend = Recording(2)
    second = find_device("cuda:1", {"cuda": backend})
    assert (second.torch_name, second.name, second.is_asynchronous) == ("cuda:1", "GPU 1", True)
    second.synchronize()
    find_device("cuda", {"cuda": backend}).synchronize()
    assert backend.waited == [1, 0]


def test_layer_clocks_wait_for_an_asynchronous_device_only() -> None:
    backend = Recording(1)
    now = clock_of(find_device("cuda", {"cuda": backend}))
    first = now()
    assert now() >= first
    assert backend.waited == [0, 0]
    assert clock_of(CPU)() >= first


@pytest.mark.parametrize("asked", ["tpu", "", "cuda:x", "gpu"])
def test_an_unknown_device_is_refused_with_those_there_are(asked: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown device '{asked}'; write one of cpu, cuda, mps"):
        find_device(asked)


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'cuda' was asked for, and torch .* finds no cuda here; use device='cpu'"):
        find_device("cuda", {"cuda": Recording(0)})
    with pytest.raises(InvalidInput, match="'cuda:3' was asked for, and there is only cuda:0 to cuda:1"):
        find_device("cuda:3", {"cuda": Recording(2)})
