"""The shares of the data sheet, from what other people published about other machines."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from decode_evidence import EVIDENCE, DecodeEvidence
from edge_opt.boards.catalog import device, devices
from edge_opt.errors import InvalidInput
from edge_opt.serving.token_rates import (
    DELTA_PASSES,
    GPU_FAMILIES,
    MOST_ABOVE,
    OVERHEAD_S,
    ROW_SHARE,
    SHARE,
    SPREAD,
    UNKNOWN_SPREAD,
    UNPACK_OPERATIONS,
    UNPACKED_SHARE,
    GpuFamily,
    gpu_family,
    matrix_rate,
    overhead_s,
    read_rate,
    row_rate,
    vector_rate,
)
from edge_opt.serving.weight_formats import WEIGHT_FORMATS


def rows_of(engine: str) -> list[DecodeEvidence]:
    return [row for row in EVIDENCE if row.engine == engine]


def by_machine(rows: list[DecodeEvidence]) -> list[float]:
    return [median(row.share for row in rows if row.machine == name) for name in {row.machine for row in rows}]


def test_the_share_of_a_cpu_is_the_median_of_seven_machines() -> None:
    pi = device("raspberry-pi-4")
    copy, sheet = pi.bandwidth("stream_copy", "cpu"), pi.bandwidth("datasheet")
    assert copy is not None and sheet is not None
    assert median([*by_machine(rows_of("cpu")), copy.value / sheet.value]) == pytest.approx(SHARE["cpu"], abs=0.005)


def family_of(row: DecodeEvidence) -> GpuFamily:
    title = row.machine if row.machine.startswith("Apple") else f"NVIDIA GeForce {row.machine}"
    return next(family for family in GPU_FAMILIES if re.match(family.pattern, title))


def test_rows_of_gpus_lie_in_the_interval_of_their_family() -> None:
    rows = rows_of("gpu")
    inside = 0
    for row in rows:
        family = family_of(row)
        busy = row.streamed_bytes / (family.share * row.datasheet_bytes_per_s)
        if row.machine.startswith("Apple") and "q4" in row.model:  # unpacked to floats: 4.8 bits per weight
            peak = device(row.machine.lower().replace(" ", "-")).peak("gpu", "fp32")
            assert peak is not None
            busy = max(busy, row.streamed_bytes * 8 / 4.8 * UNPACK_OPERATIONS["Q4_K"] / peak.value)
        seconds = busy + row.operators * family.overhead_s
        inside += 1 / family.below <= row.tokens_per_s * seconds <= family.above
    assert inside / len(rows) >= 0.8


def test_every_gpu_of_the_catalog_that_people_buy_has_a_family() -> None:
    for name in ("rtx-2060", "rtx-3090", "rtx-a6000", "rtx-4060-ti", "rtx-5090", "rtx-pro-6000", "nvidia-l4", "rx-7600",
                 "rx-9070-xt", "radeon-780m", "ryzen-ai-max-395", "arc-b580", "apple-m5-max", "dgx-spark", "h100-sxm",
                 "jetson-agx-thor"):  # fmt: skip
        spec = device(name)
        family = gpu_family(spec)
        sheet = spec.bandwidth("datasheet")
        assert family is not None and sheet is not None, name
        assert read_rate(spec, runtime="llama.cpp").bytes_per_s == pytest.approx(family.share * sheet.value)
    assert gpu_family(device("raspberry-pi-5")) is None
    assert gpu_family(device("h100-sxm")) != gpu_family(device("rtx-4090"))


def test_other_programs_than_llama_cpp_have_wide_intervals() -> None:
    spreads = {
        runtime: read_rate(device("rtx-4090"), runtime=runtime).spread for runtime in ("llama.cpp", "vllm", "torch")
    }
    assert spreads["llama.cpp"] < spreads["vllm"] < spreads["torch"]
    assert "runs of vllm are known of an A100 alone" in read_rate(device("rtx-4090"), runtime="vllm").reading


def test_overhead_of_a_cpu_explains_the_rows_of_five_machines_best() -> None:
    # Seconds = bytes / (share × paper) + operators × cores × overhead: one share per machine, one overhead for all.
    rows = [row for row in rows_of("cpu") if row.cores > 2]
    machines = sorted({row.machine for row in rows})
    columns = [[row.streamed_bytes * row.tokens_per_s * (row.machine == name) for name in machines] for row in rows]
    waits = [[row.operators * row.cores * row.tokens_per_s] for row in rows]
    found = np.linalg.lstsq(np.hstack([columns, waits]), np.ones(len(rows)), rcond=None)[0]
    assert found[-1] == pytest.approx(OVERHEAD_S["cpu"], rel=0.2)
    assert overhead_s("cpu", 8) == 2 * overhead_s("cpu", 4)


def test_nine_in_ten_of_the_evidence_of_cpus_lie_within_the_spread() -> None:
    rows, share, below, above = rows_of("cpu"), SHARE["cpu"], SPREAD["cpu"], MOST_ABOVE["cpu"]
    assert 0.85 <= sum(1 / below <= row.share / share <= above for row in rows) / len(rows) <= 1
    logs = np.log([row.share / share for row in rows])
    assert above == pytest.approx(np.exp(logs.max()), abs=0.01)
    assert below == pytest.approx(np.exp(np.quantile(np.abs(logs), 0.9)), abs=0.03)


def test_wide_weights_reach_more_than_k_quants_on_an_m2_max() -> None:
    spec = device("apple-m2-max")
    # Llama-2-7B in fp16 and q8_0, 13.215e9 and 7.02e9 bytes: tokens per second (llama.cpp discussion 4167).
    rate = read_rate(spec, runtime="llama.cpp", bits=8.5)
    for size, speed in ((13.215e9, 24.65), (7.02e9, 41.83)):
        seconds = size / rate.bytes_per_s + 1169 * overhead_s("gpu", family=gpu_family(spec))
        assert 1 / rate.spread < speed * seconds < rate.above
    # Qwen3-8B in Q4_K_M on 30 cores: 7.57e9 weights are unpacked, which takes longer than to stream 4.69e9 bytes.
    unpacking_s, streaming_s = 7.57e9 * UNPACK_OPERATIONS["Q4_K"] / 10.65e12, 4.69e9 / rate.bytes_per_s
    assert unpacking_s > 1.4 * streaming_s
    assert 1 / (unpacking_s + 1745 * overhead_s("gpu", family=gpu_family(spec))) == pytest.approx(37.2, rel=0.1)


def test_few_rows_of_quantized_weights_go_without_matrix_units_on_nvidia() -> None:
    spec = device("rtx-3090")
    # Llama-3-8B q4_0, eight rows: 8 × 2 × 7.5e9 operations take longer than to stream 4.2e9 bytes (583.8 tokens/s).
    rate = vector_rate(spec, WEIGHT_FORMATS["q4_0"], "gpu")
    assert rate == pytest.approx(0.27 * 35.58e12)
    seconds = 8 * 2 * 7.5e9 / rate + 1169 * overhead_s("gpu", family=gpu_family(spec))
    assert 8 / seconds == pytest.approx(583.8, rel=0.1) and 4.2e9 / read_rate(spec).bytes_per_s < seconds / 2
    assert vector_rate(spec, WEIGHT_FORMATS["fp16"], "gpu") is None
    assert vector_rate(device("apple-m1"), WEIGHT_FORMATS["q4_0"], "gpu") is None


def test_unpacking_and_passes_over_a_state_are_what_one_machine_tells() -> None:
    # An M2 Max with 30 GPU cores (github.com/enescingoz/mac-llm-bench): bytes and operators of our own trace, tokens/s.
    plain = [(0.804e9, 593, 205.9), (1.116e9, 1361, 144.4), (2.026e9, 1025, 84.7), (4.691e9, 1745, 37.2)]
    matrix = np.array([[size, operators] for size, operators, _ in plain])
    speeds = np.array([speed for _, _, speed in plain])
    per_byte, per_operator = np.linalg.lstsq(matrix * speeds[:, None], np.ones(len(plain)), rcond=None)[0]
    # Gemma-3-1B: 0.803e9 bytes, of which 0.314e9 are 457e6 weights of 5.5 bits; peak 30 × 128 × 1.398 GHz × 2.
    left = 1 / 151.3 - 1742 * per_operator - (0.803e9 - 0.314e9) * per_byte
    assert left / 457e6 * 10.7e12 == pytest.approx(UNPACK_OPERATIONS["Q5_0"], rel=0.1)
    # Qwen3.5-4B and 9B: a state of 53.5e6 bytes beside 2.70e9 and 5.05e9 of weights and cache.
    passes = [
        (1 / speed - 2159 * per_operator - size * per_byte) / per_byte / 53.5e6
        for size, speed in ((2.70e9, 48.4), (5.05e9, 30.2))
    ]
    assert sum(passes) / 2 == pytest.approx(DELTA_PASSES, rel=0.1)


def test_what_a_model_streamed_on_the_device_counts_before_the_data_sheet() -> None:
    orin = device("jetson-agx-orin")
    assert read_rate(orin, runtime="llama.cpp").bytes_per_s == 100e9
    assert read_rate(orin, runtime="torch").bytes_per_s == pytest.approx(0.8 * 204.8e9)  # of llama.cpp alone
    phone, measured = read_rate(device("snapdragon-8-gen-3")), read_rate(orin, runtime="llama.cpp")
    assert phone.bytes_per_s == pytest.approx(0.45 * 76.8e9)
    assert phone.spread > measured.spread  # derived from its kin


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


def test_an_engine_that_nothing_is_known_of_has_a_wide_interval() -> None:
    gpu, cpu = (read_rate(device("raspberry-pi-5"), engine) for engine in ("gpu", "cpu"))
    assert (gpu.spread, gpu.above) == (UNKNOWN_SPREAD, UNKNOWN_SPREAD) and cpu.spread == SPREAD["cpu"]
    assert gpu.reading.endswith("nothing is known of its gpu")


def test_a_figure_of_another_engine_is_a_lower_bound() -> None:
    known = device("jetson-agx-orin")  # a GPU
    found = read_rate(replace(known, bandwidths=tuple(item for item in known.bandwidths if item.engine == "cpu")))
    assert found.is_lower_bound and "at least" in found.reading


def test_products_of_many_rows() -> None:
    pi = device("raspberry-pi-5")
    assert matrix_rate(pi, WEIGHT_FORMATS["q8_0"], "cpu") is not None
    rate, reading = matrix_rate(pi, WEIGHT_FORMATS["q4_0"], "cpu") or (0.0, "")
    assert rate == pytest.approx(0.3 * 614.4e9) and "int8" in reading
    mac = device("apple-m1")
    assert matrix_rate(mac, WEIGHT_FORMATS["fp16"], mac.engine) is not None


def test_products_block_by_block_reach_a_tenth_of_the_int8_peak() -> None:
    # Tokens per second × operations per token over the int8 peak: an M4 Max, and four Cortex-A76 at 2.4 GHz.
    fast = 12 * 4.5e9 * 4 * 32  # cores × clock × pipes × 16 MACs
    found = [speed * 2 * 7.57e9 / fast for speed in (43.03, 35.15, 30.10)]
    found += [47.06 * 2 * 0.742e9 / 614.4e9, 39.93 * 2 * 0.742e9 / 614.4e9, 35 * 2 * 1.034e9 / 614.4e9]
    assert median(found) == pytest.approx(UNPACKED_SHARE, abs=0.01)
    rate, reading = matrix_rate(device("raspberry-pi-5"), WEIGHT_FORMATS["q4_k_m"], "cpu") or (0.0, "")
    assert rate == pytest.approx(61.44e9) and "0.1 of the int8 peak" in reading


def test_a_core_without_dot_products_is_bound_by_unpacking() -> None:
    q4, fp16 = WEIGHT_FORMATS["q4_0"], WEIGHT_FORMATS["fp16"]
    # Operations per token × published tokens per second, over the fp32 peak.
    assert median([3.076e9 * 3.054 / 48e9, 5.031e9 * 1.83 / 48e9]) == pytest.approx(ROW_SHARE, abs=0.005)
    pi_4, pi_5 = device("raspberry-pi-4"), device("raspberry-pi-5")
    assert (row_rate(pi_4, q4, "cpu") or (0.0, ""))[0] == pytest.approx(0.19 * 48e9)
    assert row_rate(pi_4, fp16, "cpu") == matrix_rate(pi_4, fp16, "cpu")
    assert row_rate(pi_5, q4, "cpu") == matrix_rate(pi_5, q4, "cpu")
