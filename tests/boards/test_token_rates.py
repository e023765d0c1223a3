"""The shares of the data sheet, from what other people published about other machines."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from edge_opt.boards.catalog import device, devices
from edge_opt.boards.token_rates import EVIDENCE, OVERHEAD_S, SHARE, SPREAD, matrix_rate, read_rate
from edge_opt.boards.weight_formats import WEIGHT_FORMATS
from edge_opt.errors import InvalidInput


def by_machine(engine: str) -> list[float]:
    rows = [row for row in EVIDENCE if row.engine == engine]
    return [median(row.share for row in rows if row.machine == name) for name in {row.machine for row in rows}]


def test_the_share_of_a_cpu_is_the_median_of_six_machines() -> None:
    pi = device("raspberry-pi-4")
    copy, sheet = pi.bandwidth("stream_copy", "cpu"), pi.bandwidth("datasheet")
    assert copy is not None and sheet is not None
    assert median([*by_machine("cpu"), copy.value / sheet.value]) == pytest.approx(SHARE["cpu"], abs=0.005)


def test_the_share_of_a_gpu_is_the_median_of_five_machines() -> None:
    assert median(by_machine("gpu")) == pytest.approx(SHARE["gpu"], abs=0.005)


def test_overhead_is_what_two_models_on_one_machine_give() -> None:
    large, _, small = (row for row in EVIDENCE if row.machine == "Apple M5")
    # Two equations of bytes × a + operators × b = seconds.
    determinant = large.streamed_bytes * small.operators - small.streamed_bytes * large.operators
    overhead = (large.streamed_bytes / small.tokens_per_s - small.streamed_bytes / large.tokens_per_s) / determinant
    assert overhead == pytest.approx(OVERHEAD_S["gpu"], rel=0.05)


def test_nine_in_ten_of_the_evidence_lie_within_the_spread() -> None:
    ratios = [row.share / SHARE[row.engine] for row in EVIDENCE]
    inside = sum(1 / SPREAD <= ratio <= SPREAD for ratio in ratios)
    assert 0.85 <= inside / len(ratios) <= 0.95


def test_what_is_checked_is_not_in_the_evidence() -> None:
    machines = {row.machine.split(",")[0] for row in EVIDENCE}
    assert not machines & {"Raspberry Pi 5", "Apple M1"}


def test_a_device_with_a_bandwidth_answers_and_one_without_is_refused() -> None:
    assert read_rate(device("raspberry-pi-5")).bytes_per_s == 0.52 * 17e9
    for spec in devices():
        if spec.bandwidths:
            assert read_rate(spec).bytes_per_s > 0
        else:
            with pytest.raises(InvalidInput, match=f"the bandwidth of {spec.name} is unknown"):
                read_rate(spec)


def test_a_figure_of_another_engine_is_a_lower_bound() -> None:
    known = device("jetson-agx-orin")  # a GPU
    found = read_rate(replace(known, bandwidths=tuple(item for item in known.bandwidths if item.engine == "cpu")))
    assert found.is_lower_bound and "at least" in found.reading


def test_products_of_many_rows() -> None:
    pi = device("raspberry-pi-5")
    assert matrix_rate(pi, WEIGHT_FORMATS["q8_0"]) is not None
    rate, reading = matrix_rate(pi, WEIGHT_FORMATS["q4_0"]) or (0.0, "")
    assert rate == pytest.approx(0.3 * 614.4e9) and "int8" in reading
    assert matrix_rate(device("apple-a16"), WEIGHT_FORMATS["fp16"]) is not None
