"""How fast a device streams weights and multiplies matrices when it serves a language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edge_opt.errors import InvalidInput
from edge_opt.records.devices import DeviceSpec, Engine, Figure
from edge_opt.serving.weight_formats import WeightFormat

# Share of the data sheet's bandwidth that streaming weights reaches: the median over the machines that
# tests/support/decode_evidence.py lists, and for the CPU the STREAM copy of the Raspberry Pi 4 as one more.
# tests/serving/test_token_rates.py derives all of these constants from that list.
SHARE: dict[Engine, float] = {"cpu": 0.58, "gpu": 0.8, "npu": 0.8, "all": 0.8}
# GPUs with more than this reach less of it with a single sequence: the median of four. Weights of eight bits
# or more are so few per byte that they keep up: Llama-2-7B in fp16 and q8_0 on M1, M2 and M3 Max reach 0.77 to 0.87
# (github.com/ggml-org/llama.cpp/discussions/4167).
WIDE_BYTES_PER_S = 300e9
WIDE_SHARE = 0.61
WIDE_BITS = 8.0
# Time per operator beside its bytes, where the device has no figure of its own. On a GPU the first and the last M5 row
# of that list, one with seven times the bytes of the other, give it; a runtime fuses some of the operators that are
# counted, so a launch takes longer than this. On a CPU all threads wait for each other after each operator, so it is a
# time per core: the one that explains the rows of five machines best, each with a bandwidth of its own.
OVERHEAD_S: dict[Engine, float] = {"cpu": 0.5e-6, "gpu": 1.7e-6, "npu": 1.7e-6, "all": 1.7e-6}
_USUAL_CORES = 4
# Nine in ten times lie within these factors of what the share says. On CPUs many fall short of it, where few cores have
# wide memory, and none is far above: below the quantile of the evidence, above its largest. On GPUs both ends are those
# of Student's distribution for one row more than the twelve.
SPREAD: dict[Engine, float] = {"cpu": 1.4, "gpu": 1.17, "npu": 1.4, "all": 1.4}
MOST_ABOVE: dict[Engine, float] = {"cpu": 1.17}
WIDE_SPREAD = 1.5
# Rates of published runs on the device itself, and rates derived from runs on similar devices.
DECODED_SPREAD = 1.25
DERIVED_SPREAD = 1.5
# An engine without figures in the catalog may be of another kind than those that were timed.
UNKNOWN_SPREAD = 2.0
# A read that was measured under load leaves the model's own kernels as the only unknown.
MEASURED_SPREAD = 1.15
# A copy reads and writes, one thread alone does not fill the memory: what streaming reaches over twice a one-thread
# memcpy, on the catalog's CPUs that also have a data-sheet figure, is 0.8 to 1.0.
COPY_SHARE = 0.85


def overhead_s(engine: Engine, threads: int | None = None) -> float:
    """Return the seconds of an operator beside its bytes; on a CPU they grow with the threads that wait.

    >>> overhead_s("cpu", 4), overhead_s("gpu")
    (2e-06, 1.7e-06)
    """
    return OVERHEAD_S[engine] * ((threads or _USUAL_CORES) if engine == "cpu" else 1)


# Decoding multiplies one row by each matrix. A CPU without dot products of int8 unpacks its weights so slowly that this
# and not memory is the limit: 0.19 of the fp32 peak of a Raspberry Pi 4 (Qwen-1.8B q4_0 3.054 and Gemma-2B q4_0 1.83
# tokens/s: 9.4e9 and 9.2e9 of 48e9 operations per second; github.com/aidatatools/ollama-benchmark/pull/9).
ROW_SHARE = 0.19
_DOT_PRODUCT = 4  # times the fp32 peak: what int8 reaches where there is such an instruction

# Apple's GPUs have no dot products of int8 and unpack every weight to a float. For most formats this is hidden behind
# memory; for those that llama.cpp takes where rows are no multiple of 256 it is not. fp32 operations per weight, from
# Gemma-3-1B q4_k_m on an M2 Max, half of whose weights are Q5_0 for it: 151.3 tokens/s, where bytes alone would allow
# 200.
UNPACK_OPERATIONS: dict[str, float] = {"Q5_0": 73.0, "Q5_1": 73.0}
# llama.cpp makes the recurrence of a gated delta net of single operators that read and write the whole state: so many
# passes explain Qwen3.5-4B and 9B on the same machine (48.4 and 30.2 tokens/s). A fused one has two.
DELTA_PASSES = 14

# Prefill. Part of the engine's fp32 peak that products reach, as dense ones do elsewhere. On a CPU with dot products of
# int8 quantized ones go by its int8 peak: formats that kernels keep repacked reach REPACKED_SHARE of it (Raspberry Pi
# 5, Q4_0, edge-llm-leaderboard of nyunai, 2024), the others, block by block, UNPACKED_SHARE. That is the median of six
# published prompts, in operations per second over the int8 peak: Qwen3-8B on an M4 Max (12 fast cores, 6.9e12) in
# q8_0, q5_k and q6_k without repacking 0.094, 0.077, 0.066; LFM2-700M in q5_k and q6_k and TinyLlama in q8_0 on four
# Cortex-A76 0.114, 0.096, 0.118 (github.com/ggml-org/llama.cpp, pull requests 18096, 19356, 19360; justine.lol).
MATRIX_SHARE = 0.5
REPACKED_SHARE = 0.3
UNPACKED_SHARE = 0.1
REPACKED = ("q4_0", "iq4_nl")
PREFILL_SPREAD = 2.0


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Bytes per second that decoding is taken to stream, where that comes from, and how far off it may be.

    The 90 % interval is from a `spread`-th of it to `above` times as much. `is_lower_bound`: the engine that runs the
    model has no figure of its own, and another's is used.
    """

    bytes_per_s: float
    reading: str
    spread: float
    is_lower_bound: bool = False
    most_above: float | None = None

    @property
    def above(self) -> float:
        """The factor to the upper end; that to the lower one where nothing else is known."""
        return self.most_above or self.spread


class ProductRate(NamedTuple):
    """Operations per second that products reach, and where that comes from."""

    flops_per_s: float
    reading: str


def read_rate(
    spec: DeviceSpec, engine: Engine | None = None, runtime: str | None = None, bits: float = 4.5
) -> ReadRate:
    """Return what an engine streams under load: measured where the catalog knows it, else a share of the data sheet.

    `runtime` is the program that decodes; a figure of llama.cpp counts for llama.cpp alone. `bits` are those of one
    weight.

    >>> from edge_opt.boards.catalog import device
    >>> round(read_rate(device("raspberry-pi-5")).bytes_per_s / 1e9, 2)  # 0.58 × 17 GB/s
    9.86
    """
    wanted = engine or spec.engine
    for method in ("llama_cpp_decode", "decode") if runtime == "llama.cpp" else ("decode",):
        figure = spec.bandwidth(method, wanted)
        if figure is not None:
            spread = DECODED_SPREAD if figure.kind == "measured" else DERIVED_SPREAD
            return ReadRate(figure.value, f"decoding on the {wanted} ({figure.source})", spread)
    for method, what in (("read", "reads under load"), ("traffic", "bytes read and written under load")):
        figure = spec.bandwidth(method, wanted)
        if figure is not None:
            return ReadRate(figure.value, f"{what}, measured on the {wanted} ({figure.source})", MEASURED_SPREAD)
    for method in ("datasheet", "quoted"):
        figure = spec.bandwidth(method)
        if figure is not None:
            share, spread = sheet_share(wanted, figure.value, bits)
            reading = f"{share:g} of {figure.value / 1e9:g} GB/s by the data sheet ({figure.source})"
            known = {spec.engine, *(peak.engine for peak in spec.peaks), *(item.engine for item in spec.bandwidths)}
            if wanted not in known:
                return ReadRate(share * figure.value, f"{reading}; nothing is known of its {wanted}", UNKNOWN_SPREAD)
            return ReadRate(share * figure.value, reading, spread, most_above=MOST_ABOVE.get(wanted))
    return _from_copies(spec, wanted)


def sheet_share(engine: Engine, datasheet_bytes_per_s: float, bits: float = 4.5) -> tuple[float, float]:
    """Return the share of the data sheet that it streams, and the factor that nine in ten published rows meet."""
    if engine != "cpu" and datasheet_bytes_per_s > WIDE_BYTES_PER_S and bits < WIDE_BITS:
        return WIDE_SHARE, WIDE_SPREAD
    return SHARE[engine], SPREAD[engine]


def _from_copies(spec: DeviceSpec, engine: Engine) -> ReadRate:
    """Return what copies and fills say where nothing better is known; a device without any figure is refused."""
    copy, stream = spec.bandwidth("memcpy", engine), spec.bandwidth("stream_copy", engine)
    if stream is not None:
        return ReadRate(stream.value, f"STREAM copy on the {engine} ({stream.source})", SPREAD[engine])
    if copy is not None:
        reading = f"{COPY_SHARE:g} of twice memcpy on the {engine}, one thread ({copy.source})"
        return ReadRate(COPY_SHARE * 2 * copy.value, reading, SPREAD[engine])
    others = [item for item in spec.bandwidths if item.engine is not None]
    if others:
        best = max(others, key=lambda item: item.figure.value)
        source = f"{best.method} on the {best.engine} ({best.figure.source})"
        reading = f"{source}; the {engine} itself has no figure, so it is at least this"
        return ReadRate(best.figure.value, reading, SPREAD[engine], is_lower_bound=True)
    why = spec.bandwidth_unknown or "no figure is known"
    cure = "copy its file, add bandwidth_bytes_per_s, and pass the file as target"
    raise InvalidInput(f"the bandwidth of {spec.name} is unknown ({why}), and decoding is bound by it; {cure}")


def matrix_rate(spec: DeviceSpec, form: WeightFormat, engine: Engine) -> ProductRate | None:
    """Return the rate that products of many rows reach in a format; None where no peak is known.

    >>> from edge_opt.boards.catalog import device
    >>> from edge_opt.serving.weight_formats import WEIGHT_FORMATS
    >>> round(matrix_rate(device("raspberry-pi-5"), WEIGHT_FORMATS["q8_0"], "cpu")[0] / 1e9, 1)  # a tenth of 614.4
    61.4
    """
    int8 = spec.peak(engine, "int8")
    if engine == "cpu" and form.name in REPACKED and int8 is not None:
        return _share_of_peak(REPACKED_SHARE, "int8", int8)
    if engine == "cpu" and form.is_quantized and int8 is not None and _has_dot_products(spec):
        return _share_of_peak(UNPACKED_SHARE, "int8", int8)
    for precision in ("fp32", "fp16", "bf16") if engine == "cpu" else ("fp16", "bf16", "fp32"):
        peak = spec.peak(engine, precision)
        if peak is not None:
            return _share_of_peak(MATRIX_SHARE, precision, peak)
    fp64 = spec.peak(engine, "fp64")
    if fp64 is not None:  # measured with HPL, not from a data sheet: fp32 does twice as much
        return ProductRate(2 * fp64.value, f"twice the fp64 rate ({fp64.source})")
    return None


def _share_of_peak(share: float, precision: str, peak: Figure, why: str = "") -> ProductRate:
    return ProductRate(share * peak.value, f"{share:g} of the {precision} peak ({peak.source}){why}")


def unpack_rate(spec: DeviceSpec, engine: Engine) -> float | None:
    """Return the operations per second of unpacking weights to floats; None where that takes no time of its own.

    >>> from edge_opt.boards.catalog import device
    >>> unpack_rate(device("apple-m1"), "gpu"), unpack_rate(device("raspberry-pi-5"), "cpu")
    (2600000000000.0, None)
    """
    peak = spec.peak(engine, "fp32")
    is_metal = engine == "gpu" and spec.title.startswith("Apple")
    return peak.value if is_metal and peak is not None else None


def row_rate(spec: DeviceSpec, form: WeightFormat, engine: Engine) -> ProductRate | None:
    """Return the rate that products with one row reach in a format; None where no peak is known.

    >>> from edge_opt.boards.catalog import device
    >>> from edge_opt.serving.weight_formats import WEIGHT_FORMATS
    >>> round(row_rate(device("raspberry-pi-4"), WEIGHT_FORMATS["q4_0"], "cpu")[0] / 1e9, 2)  # 0.19 × 48e9
    9.12
    """
    fp32, int8 = spec.peak(engine, "fp32"), spec.peak(engine, "int8")
    if engine == "cpu" and form.is_quantized and fp32 and int8 and not _has_dot_products(spec):
        return _share_of_peak(ROW_SHARE, "fp32", fp32, ": there are no int8 dot products")
    if engine == "cpu" and form.is_quantized and fp32 and form.name not in REPACKED:
        # A single row stays in registers, so that block by block costs less than in a product of many.
        return _share_of_peak(MATRIX_SHARE, "fp32", fp32)
    return matrix_rate(spec, form, engine)


def _has_dot_products(spec: DeviceSpec) -> bool:
    """Return whether a CPU has dot products of int8, by its peaks: these instructions do four times what fp32 does."""
    fp32, int8 = spec.peak("cpu", "fp32"), spec.peak("cpu", "int8")
    return fp32 is not None and int8 is not None and int8.value >= _DOT_PRODUCT * fp32.value
