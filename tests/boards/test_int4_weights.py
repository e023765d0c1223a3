"""Weights in four bits, in estimates, side by side and in the largest batch."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

import edge_opt as eo
from edge_opt.boards.estimate import estimate
from edge_opt.boards.fused_layers import passes
from edge_opt.records.devices import Figure

BITS = 4 + 20 / 128  # groups of 128 share a half of scale and a zero of 4 bits


def test_matrices_take_four_bits_and_their_scales() -> None:
    profile = eo.profile(nn.Linear(1024, 512), (2, 1024))
    need = eo.peak_memory(profile, "int4")
    assert need.weight_bytes == 1024 * 512 * BITS / 8 + 512 * 2  # the bias in 16 bits
    assert need.input_bytes == 2 * 1024 * 2 and need.activation_bytes == 2 * 512 * 2
    [only] = passes(profile, "int4")
    assert only.bytes_read == int(1024 * 512 * BITS / 8 + 512 * 2 + 2 * 1024 * 2)
    assert only.bytes_written == 2 * 512 * 2


def test_a_memory_bound_layer_takes_its_bytes_share_of_the_time() -> None:
    profile = eo.profile(nn.Linear(4096, 4096, bias=False), (1, 4096))
    # By the roofline both times: fp32 has published times there, and int4 has none.
    free = Figure(0.0, "test", "derived")  # calls
    spec = replace(eo.device("raspberry-pi-5"), overhead_s=free)
    wide, narrow = (estimate(profile, spec, precision) for precision in ("fp32", "int4"))
    assert wide.seconds is not None and narrow.seconds is not None and narrow.bound == "memory"
    read = {"fp32": 4096 * 4096 * 4 + 2 * 4096 * 4, "int4": 4096 * 4096 * BITS / 8 + 2 * 4096 * 2}
    assert abs(narrow.seconds / wide.seconds - read["int4"] / read["fp32"]) < 1e-6


def test_side_by_side_and_the_largest_batch() -> None:
    model = nn.Linear(1024, 1024, bias=False)
    found = eo.compare_targets(model, (1, 1024), ["raspberry-pi-5"], precision="int4")
    assert found.memory.weight_bytes == 1024 * 1024 * BITS / 8
    fit = eo.fit_batch(model, (1024,), memory_limit_mb=1, precision="int4")
    # One MiB less the weights, for inputs and outputs of 2 KiB each.
    assert fit.batch == int((1024 * 1024 - 1024 * 1024 * BITS / 8) // 4096)
