"""The largest batch that fits: exact, found in few steps, and a plain answer where nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import edge_opt as eo
from edge_opt.boards.capacity import largest_batch
from edge_opt.errors import InvalidInput, UnknownDevice

MIB = 1024 * 1024


def needed(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Bytes by the profile: weights, buffers, inputs and the peak of live activations."""
    totals = (profile := eo.profile(model, shape)).totals
    return totals.param_bytes + totals.buffer_bytes + totals.input_bytes + profile.peak_activation_bytes


def test_a_linear_layer_follows_hand_arithmetic() -> None:
    # 4 MiB of weights; each sample is 4 KiB of inputs and 4 KiB of outputs: 1 MiB left holds 128 of them.
    fit = eo.fit_batch(nn.Linear(1024, 1024, bias=False), (1024,), memory_limit_mb=5)
    assert (fit.batch, fit.fits, fit.limit_bytes, fit.limit_source) == (128, True, 5 * MIB, "memory_limit_mb")
    assert (fit.weight_bytes, fit.buffer_bytes, fit.input_bytes) == (4 * MIB, 0, 128 * 4096)
    assert fit.activation_bytes == 128 * 4096
    assert fit.total_bytes == 5 * MIB
    assert fit.shortfall_bytes == 2 * 4096  # for sample 129


def test_where_nothing_fits_the_answer_is_what_is_missing() -> None:
    fit = eo.fit_batch(nn.Linear(1024, 1024, bias=False), (1024,), memory_limit_mb=3)
    assert (fit.batch, fit.fits) == (0, False)
    assert fit.shortfall_bytes == 4 * MIB + 2 * 4096 - 3 * MIB
    assert fit.total_bytes == 4 * MIB + 2 * 4096


@pytest.mark.parametrize("limit_mb", [2, 7.5, 40])
def test_one_sample_more_than_the_answer_does_not_fit(limit_mb: float) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten())
    fit = eo.fit_batch(model, (3, 32, 32), memory_limit_mb=limit_mb)
    assert fit.total_bytes == needed(model, (fit.batch, 3, 32, 32)) <= limit_mb * MIB
    above = needed(model, (fit.batch + 1, 3, 32, 32))
    assert above > limit_mb * MIB
    assert fit.shortfall_bytes == above - fit.limit_bytes


@given(
    fixed=st.integers(0, 10**6),
    slopes=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    limit=st.integers(0, 10**7),
    most=st.integers(1, 5000),
)
def test_the_search_equals_trying_every_batch(fixed: int, slopes: list[int], limit: int, most: int) -> None:
    def bytes_at(batch: int) -> int:
        return fixed + sum(
            max(batch - 7 * number, 0) ** (1 + number % 2) * slope for number, slope in enumerate(slopes)
        )

    every = max((batch for batch in range(1, most + 1) if bytes_at(batch) <= limit), default=0)
    assert largest_batch(bytes_at, limit, most) == every


def test_a_straight_line_takes_a_handful_of_profiles() -> None:
    tried: list[int] = []

    def bytes_at(batch: int) -> int:
        tried.append(batch)
        return 1000 + 37 * batch

    assert largest_batch(bytes_at, 10**6, 1 << 16) == (10**6 - 1000) // 37
    assert len(tried) == len(set(tried)) <= 5


def test_the_search_ends_at_most_and_says_so() -> None:
    fit = eo.fit_batch(nn.Linear(4, 4), (4,), memory_limit_mb=100, max_batch=8)
    assert (fit.batch, fit.most, fit.shortfall_bytes) == (8, 8, None)


def test_the_target_is_a_device_with_its_ram() -> None:
    # 520 KiB, of which 256 KiB are weights; a sample is 1 KiB of inputs and 1 KiB of outputs.
    fit = eo.fit_batch(nn.Linear(256, 256, bias=False), (256,), target="rp2350")
    assert (fit.batch, fit.limit_bytes, fit.limit_source) == ((520 - 256) // 2, 520 * 1024, "RAM of rp2350")


def test_of_several_sizes_of_ram_the_smallest_is_the_limit() -> None:
    fit = eo.fit_batch(nn.Linear(4, 4), (4,), target=eo.device("raspberry-pi-4"), max_batch=2)
    assert fit.limit_bytes == 1024**3
    assert fit.limit_source == "RAM of raspberry-pi-4, the smallest of 1.00 GiB, 2.00 GiB, 4.00 GiB, 8.00 GiB"


def test_every_input_gets_the_batch_in_front_and_keeps_its_dtype() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 8)

        def forward(self, ids: torch.Tensor, scale: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
            return self.embedding(ids) * scale + offset

    for inputs, kwargs in (
        ([((5,), "int64"), (5, 8)], None),
        ({"ids": ((5,), "int64"), "scale": (5, 8)}, None),
        ([((5,), "int64")], {"scale": eo.InputSpec((5, 8)), "offset": 1.0}),
    ):
        fit = eo.fit_batch(Two(), inputs, kwargs=kwargs, memory_limit_mb=1, max_batch=3)
        # Per sample 5 indices of 8 bytes and 40 floats.
        assert (fit.batch, fit.input_bytes) == (3, 3 * (5 * 8 + 40 * 4))


def test_the_model_is_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    eo.fit_batch(model, (4,), memory_limit_mb=1)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither is given"),
        ({"memory_limit_mb": 1, "target": "rp2350"}, "both are given"),
        ({"memory_limit_mb": 0}, "memory_limit_mb is 0"),
        ({"memory_limit_mb": -4}, "memory_limit_mb is -4"),
        ({"memory_limit_mb": float("inf")}, "memory_limit_mb is inf"),
        ({"memory_limit_mb": float("nan")}, "memory_limit_mb is nan"),
        ({"memory_limit_mb": "64"}, "memory_limit_mb is '64'"),
        ({"memory_limit_mb": True}, "memory_limit_mb is True"),
        ({"memory_limit_mb": 1, "max_batch": 0}, "max_batch is 0"),
        ({"target": "apple-a16"}, "the RAM of apple-a16 is not known; pass memory_limit_mb="),
    ],
)
def test_wrong_limits_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        eo.fit_batch(nn.Linear(4, 4), (4,), **arguments)


def test_tensors_and_unknown_devices_are_refused() -> None:
    with pytest.raises(InvalidInput, match="give its shape without the batch"):
        eo.fit_batch(nn.Linear(4, 4), torch.zeros(1, 4), memory_limit_mb=1)
    with pytest.raises(UnknownDevice):
        eo.fit_batch(nn.Linear(4, 4), (4,), target="rp9999")
    with pytest.raises(InvalidInput, match="no inputs given"):
        eo.fit_batch(nn.Linear(4, 4), memory_limit_mb=1)
    with pytest.raises(UnknownDevice, match="no file"):
        eo.fit_batch(nn.Linear(4, 4), (4,), target=Path("absent.toml"))
