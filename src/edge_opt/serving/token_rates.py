"""How fast a device streams weights and multiplies matrices when it serves a language model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from edge_opt.errors import InvalidInput
from edge_opt.records.devices import DeviceSpec, Engine, Figure
from edge_opt.serving.weight_formats import WeightFormat

# Share of the data sheet's bandwidth that streaming weights reaches on a CPU: the median over the machines that
# tests/support/decode_evidence.py lists, and the STREAM copy of the Raspberry Pi 4 as one more. Engines of which no
# rows are known are taken to reach what GPUs reach.
SHARE: dict[Engine, float] = {"cpu": 0.58, "gpu": 0.8, "npu": 0.8, "all": 0.8}
# Weights of this many bits or more are so few per byte that unpacking never holds them up.
WIDE_BITS = 8.0
# Time per operator beside its bytes. On a CPU all threads wait for each other after each operator, so it is a time per
# core: the one that explains the rows of five machines best, each with a bandwidth of its own.
OVERHEAD_S: dict[Engine, float] = {"cpu": 0.5e-6, "gpu": 3e-6, "npu": 3e-6, "all": 3e-6}
_USUAL_CORES = 4
# Nine in ten times lie within these factors of what the share says. On CPUs many fall short of it, where few cores have
# wide memory, and none is far above: below the quantile of the evidence, above its largest.
SPREAD: dict[Engine, float] = {"cpu": 1.4, "gpu": 1.5, "npu": 1.5, "all": 1.5}
MOST_ABOVE: dict[Engine, float] = {"cpu": 1.17}
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


@dataclass(frozen=True, slots=True)
class GpuFamily:
    """What llama.cpp reaches on GPUs of one kind, fitted to the rows of benchmarks/data/llm_rows.csv.

    A step takes its bytes over `share` of the data sheet's bandwidth and `overhead_s` for each operator; nine in ten
    rows lie from a `below`-th to `above` times that. The cache is read at `cache_share` of the rate of weights with
    flash attention and at `plain_share` without. Products of many rows reach `products` of the peak at `precision`,
    for quantized weights, for 16-bit ones, and with MLX; nine in ten prompts lie within `prefill_spread`.
    """

    name: str
    pattern: str
    share: float
    overhead_s: float
    below: float
    above: float
    cache_share: float
    plain_share: float
    precision: str
    products: tuple[float, ...]
    prefill_spread: float


# `python benchmarks/llm_rates.py` prints what rows and devices left out say of these; docs/evidence/language_models.md.
# A 16-core neural unit in each core of an M5 multiplies for MLX. AMD: Vulkan launches operators at 1.1 µs, ROCm at 2.5
# (github.com/ggml-org/llama.cpp/issues/26663), so that small models differ by half between them.
GPU_FAMILIES = (
    GpuFamily("Apple M5", r"Apple M5", 0.89, 3.2e-6, 1.3, 1.25, 0.7, 0.15, "fp32", (0.9, 0.9, 1.25), 1.4),
    GpuFamily("Apple", r"Apple M\d", 0.89, 3.2e-6, 1.22, 1.2, 0.7, 0.15, "fp32", (0.6, 0.64, 0.4), 1.25),
    GpuFamily("NVIDIA A100", r"NVIDIA A100", 0.72, 3.8e-6, 1.25, 1.35, 1.0, 0.4, "fp16", (0.25, 0.25), 1.4),
    GpuFamily("NVIDIA H100", r"NVIDIA (H100|H200)", 0.72, 3.8e-6, 1.25, 1.35, 1.0, 0.4, "fp16", (0.15, 0.15), 1.4),
    GpuFamily("NVIDIA Ampere and Turing", r"NVIDIA (GeForce RTX [23]0|RTX A\d|A10|A40)", 0.85, 1.6e-6, 1.2, 1.3,
              1.0, 0.4, "fp32", (1.55, 1.6), 1.3),
    GpuFamily("NVIDIA Ada and Blackwell", r"NVIDIA (GeForce RTX [45]0|RTX|L4|DGX|Jetson AGX Thor)", 0.85, 1.35e-6, 1.2,
              1.3, 1.0, 0.4, "fp32", (1.4, 1.4), 1.45),
    GpuFamily("AMD integrated", r"AMD (Ryzen|Radeon \d+M)", 0.85, 1.8e-6, 1.4, 1.5, 0.6, 0.3, "fp16", (0.21, 0.21),
              1.7),
    GpuFamily("AMD Radeon", r"AMD Radeon", 0.85, 1.8e-6, 1.4, 1.5, 0.6, 0.3, "fp16", (0.43, 0.43), 1.7),
    GpuFamily("Intel Arc", r"Intel Arc", 0.90, 4.3e-6, 1.6, 1.4, 0.6, 0.3, "fp16", (0.8, 0.8), 1.8),
)  # fmt: skip
# Other programs on a GPU: their overhead per operator, their share of the bandwidth, and the factor of their intervals.
# MLX has rows of four Macs. Qwen2.5 of 0.5B to 14B on an A100 (QwenLM/Qwen2.5, docs, speed_benchmark.rst, 2024): vLLM
# 0.6.3; torch is launched from Python at 24 µs an operator, while the GPU works on the operators before.
RUNTIME_OVERHEAD_S = {"mlx": 1.2e-6, "vllm": 3e-6, "torch": 24e-6}
RUNTIME_SHARE = {"mlx": 0.85, "vllm": 0.8}
RUNTIME_SPREAD = {"mlx": 1.42, "vllm": 1.4, "torch": 1.6}


_OWN_MEMORY = re.compile(r"NVIDIA (GeForce|RTX|A\d|H\d|L4)|AMD Radeon RX|Intel Arc")


def has_own_memory(spec: DeviceSpec, engine: Engine | None = None) -> bool:
    """Return whether the engine is a GPU with memory of its own, not that of the computer."""
    return (engine or spec.engine) == "gpu" and _OWN_MEMORY.match(spec.title) is not None


def gpu_family(spec: DeviceSpec, engine: Engine | None = None) -> GpuFamily | None:
    """Return the family of a device's GPU; None for other engines and for GPUs of which no rows are known.

    >>> from edge_opt.boards.catalog import device
    >>> gpu_family(device("rtx-4090")).name
    'NVIDIA Ada and Blackwell'
    """
    if (engine or spec.engine) != "gpu":
        return None
    return next((family for family in GPU_FAMILIES if re.match(family.pattern, spec.title)), None)


def overhead_s(
    engine: Engine, threads: int | None = None, family: GpuFamily | None = None, runtime: str | None = None
) -> float:
    """Return the seconds of an operator beside its bytes; on a CPU they grow with the threads that wait.

    >>> overhead_s("cpu", 4), overhead_s("gpu")
    (2e-06, 3e-06)
    """
    if engine == "cpu":
        return OVERHEAD_S[engine] * (threads or _USUAL_CORES)
    known = OVERHEAD_S[engine] if family is None else family.overhead_s
    return RUNTIME_OVERHEAD_S.get(runtime or "", known)


# Decoding multiplies one row by each matrix. A CPU without dot products of int8 unpacks its weights so slowly that this
# and not memory is the limit: 0.19 of the fp32 peak of a Raspberry Pi 4 (Qwen-1.8B q4_0 3.054 and Gemma-2B q4_0 1.83
# tokens/s: 9.4e9 and 9.2e9 of 48e9 operations per second; github.com/aidatatools/ollama-benchmark/pull/9).
ROW_SHARE = 0.19
_DOT_PRODUCT = 4  # times the fp32 peak: what int8 reaches where there is such an instruction

# Apple's GPUs have no dot products of int8 and unpack every weight to a float. On chips with much bandwidth for their
# cores this and not memory is the limit: an M2 Max of 30 cores reads Q4_K at 180 of 400 GB/s. fp32 operations per
# weight, fitted to 86 rows of 14 Macs; those of Q5_0 to Gemma-3-1B, half of whose weights are in it.
UNPACK_OPERATIONS: dict[str, float] = {
    "Q5_0": 73.0, "Q5_1": 73.0, "Q4_0": 22.0, "Q4_1": 22.0, "mlx-4bit": 23.0,
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 28.0),
}  # fmt: skip
# With up to so many rows llama.cpp multiplies quantized weights on NVIDIA GPUs without their matrix units, at this part
# of the fp32 peak: Llama-3-8B q4_0 on an RTX 3090, 4 to 8 rows (github.com/ggml-org/llama.cpp/pull/15802).
VECTOR_ROWS, VECTOR_SHARE = 8, 0.27
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
# Nine in ten published prompts lie within this factor on CPUs, and within the others with MLX and elsewhere.
PREFILL_SPREAD = 1.5
MLX_PREFILL_SPREAD = 1.7
PREFILL_UNKNOWN_SPREAD = 2.0
# With fewer rows than this for each expert, products of experts slow down by this power of what is missing:
# Qwen3-30B-A3B on an M2 Max reads 128 tokens at 517 and 512 at 735 per second (github.com/enescingoz/mac-llm-bench).
EXPERT_ROWS, EXPERT_POWER = 256, 0.35


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
    # What llama.cpp streamed was in 4 bits; wider weights are not held up by unpacking.
    is_own = runtime == "llama.cpp" and bits < WIDE_BITS
    for method in ("llama_cpp_decode", "decode") if is_own else ("decode",):
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
            family = gpu_family(spec, wanted)
            share = SHARE[wanted] if family is None else RUNTIME_SHARE.get(runtime or "", family.share)
            reading = f"{share:g} of {figure.value / 1e9:g} GB/s by the data sheet ({figure.source})"
            if family is not None:
                return _family_rate(family, share * figure.value, reading, runtime)
            known = {spec.engine, *(peak.engine for peak in spec.peaks), *(item.engine for item in spec.bandwidths)}
            if wanted not in known:
                return ReadRate(share * figure.value, f"{reading}; nothing is known of its {wanted}", UNKNOWN_SPREAD)
            return ReadRate(share * figure.value, reading, SPREAD[wanted], most_above=MOST_ABOVE.get(wanted))
    return _from_copies(spec, wanted)


def _family_rate(family: GpuFamily, bytes_per_s: float, reading: str, runtime: str | None) -> ReadRate:
    """Return the rate of a GPU by its family; of other programs than llama.cpp the interval is wider."""
    rows = f"{reading}, as published runs on {family.name} GPUs reach"
    if runtime in RUNTIME_SPREAD:
        spread = RUNTIME_SPREAD[runtime]
        known = "four Macs" if runtime == "mlx" else "an A100 alone"
        return ReadRate(bytes_per_s, f"{rows}; runs of {runtime} are known of {known}, so it is wide", spread)
    return ReadRate(bytes_per_s, rows, family.below, most_above=family.above)


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


def matrix_rate(spec: DeviceSpec, form: WeightFormat, engine: Engine, runtime: str = "") -> ProductRate | None:
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
    family = gpu_family(spec, engine)
    known = None if family is None else spec.peak(engine, family.precision)
    if family is not None and known is not None:
        share = family.products[-1 if runtime == "mlx" else 0 if form.is_quantized else 1]
        return _share_of_peak(share, family.precision, known, f", as on {family.name} GPUs")
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


def vector_rate(spec: DeviceSpec, form: WeightFormat, engine: Engine) -> float | None:
    """Return the operations per second of quantized products with few rows; None where those of many rows count."""
    peak = spec.peak(engine, "fp32")
    return VECTOR_SHARE * peak.value if peak and form.is_quantized and spec.title.startswith("NVIDIA") else None


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
