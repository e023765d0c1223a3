"""The shares of the data sheet, from what other people published about other machines."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Literal

import numpy as np
import pytest

from edge_opt.boards.catalog import device, devices
from edge_opt.boards.token_rates import (
    EVIDENCE,
    OVERHEAD_S,
    ROW_SHARE,
    SHARE,
    WIDE_BYTES_PER_S,
    WIDE_SHARE,
    DecodeEvidence,
    matrix_rate,
    overhead_s,
    read_rate,
    row_rate,
    sheet_share,
)
from edge_opt.boards.weight_formats import WEIGHT_FORMATS
from edge_opt.errors import InvalidInput


def rows_of(engine: str, *, is_wide: bool = False) -> list[DecodeEvidence]:
    rows = [row for row in EVIDENCE if row.engine == engine]
    if engine == "cpu":
        return rows
    return [row for row in rows if (row.datasheet_bytes_per_s > WIDE_BYTES_PER_S) == is_wide]


def by_machine(rows: list[DecodeEvidence]) -> list[float]:
    return [median(row.share for row in rows if row.machine == name) for name in {row.machine for row in rows}]


def test_the_share_of_a_cpu_is_the_median_of_seven_machines() -> None:
    pi = device("raspberry-pi-4")
    copy, sheet = pi.bandwidth("stream_copy", "cpu"), pi.bandwidth("datasheet")
    assert copy is not None and sheet is not None
    assert median([*by_machine(rows_of("cpu")), copy.value / sheet.value]) == pytest.approx(SHARE["cpu"], abs=0.005)


def test_the_share_of_a_gpu_is_the_median_of_four_machines_and_of_four_wide_ones() -> None:
    assert median(by_machine(rows_of("gpu"))) == pytest.approx(SHARE["gpu"], abs=0.005)
    assert median(by_machine(rows_of("gpu", is_wide=True))) == pytest.approx(WIDE_SHARE, abs=0.005)
    assert sheet_share("gpu", 400e9)[0] == WIDE_SHARE and sheet_share("cpu", 400e9)[0] == SHARE["cpu"]


def test_overhead_of_a_cpu_explains_the_rows_of_five_machines_best() -> None:
    # Seconds = bytes / (share × paper) + operators × cores × overhead: one share per machine, one overhead for all.
    rows = [row for row in rows_of("cpu") if row.cores > 2]
    machines = sorted({row.machine for row in rows})
    columns = [[row.streamed_bytes * row.tokens_per_s * (row.machine == name) for name in machines] for row in rows]
    waits = [[row.operators * row.cores * row.tokens_per_s] for row in rows]
    found = np.linalg.lstsq(np.hstack([columns, waits]), np.ones(len(rows)), rcond=None)[0]
    assert found[-1] == pytest.approx(OVERHEAD_S["cpu"], rel=0.2)
    assert overhead_s("cpu", 8) == 2 * overhead_s("cpu", 4)


def test_overhead_is_what_two_models_on_one_machine_give() -> None:
    large, _, small = (row for row in EVIDENCE if row.machine == "Apple M5")
    # Two equations of bytes × a + operators × b = seconds.
    determinant = large.streamed_bytes * small.operators - small.streamed_bytes * large.operators
    overhead = (large.streamed_bytes / small.tokens_per_s - small.streamed_bytes / large.tokens_per_s) / determinant
    assert overhead == pytest.approx(OVERHEAD_S["gpu"], rel=0.05)


@pytest.mark.parametrize(("engine", "is_wide"), [("cpu", False), ("gpu", False), ("gpu", True)])
def test_nine_in_ten_of_the_evidence_lie_within_the_spread(engine: Literal["cpu", "gpu"], is_wide: bool) -> None:
    rows = rows_of(engine, is_wide=is_wide)
    share, spread = sheet_share(engine, rows[0].datasheet_bytes_per_s)
    assert sum(1 / spread <= row.share / share <= spread for row in rows) / len(rows) >= 0.85


def test_what_is_checked_is_not_in_the_evidence() -> None:
    machines = {row.machine.split(",")[0] for row in EVIDENCE}
    assert not machines & {"Raspberry Pi 5", "Apple M1"}


def test_a_device_with_a_bandwidth_answers_and_one_without_is_refused() -> None:
    assert read_rate(device("raspberry-pi-5")).bytes_per_s == 0.58 * 17e9
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


def test_a_core_without_dot_products_is_bound_by_unpacking() -> None:
    q4, fp16 = WEIGHT_FORMATS["q4_0"], WEIGHT_FORMATS["fp16"]
    # Operations per token × published tokens per second, over the fp32 peak.
    assert median([3.076e9 * 3.054 / 48e9, 5.031e9 * 1.83 / 48e9]) == pytest.approx(ROW_SHARE, abs=0.005)
    assert (row_rate(device("raspberry-pi-4"), q4) or (0.0, ""))[0] == pytest.approx(0.19 * 48e9)
    assert row_rate(device("raspberry-pi-4"), fp16) == matrix_rate(device("raspberry-pi-4"), fp16)
    assert row_rate(device("raspberry-pi-5"), q4) == matrix_rate(device("raspberry-pi-5"), q4)
