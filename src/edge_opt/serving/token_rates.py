"""How fast a device streams weights and multiplies matrices when it serves a language model."""

from __future__ import annotations

from dataclasses import dataclass

from edge_opt.serving.weight_formats import WeightFormat
from edge_opt.errors import InvalidInput
from edge_opt.records.devices import DeviceSpec, Engine


@dataclass(frozen=True, slots=True)
class DecodeEvidence:
    """A published decoding speed with what it streamed.

    `operators` are those of a step that compute or move something, as our own trace of the model has them; `cores` are
    those of a CPU, 1 for other engines.
    """

    machine: str
    engine: Engine
    cores: int
    datasheet_bytes_per_s: float
    model: str
    streamed_bytes: float
    operators: int
    tokens_per_s: float
    source: str

    @property
    def share(self) -> float:
        """The part of the bandwidth on paper that streaming reached, overhead per operator taken off."""
        seconds = 1 / self.tokens_per_s - self.operators * overhead_s(self.engine, self.cores)
        return self.streamed_bytes / seconds / self.datasheet_bytes_per_s


# Bytes that a step streams (every weight but the embedding's table, in the mixes of `weight_formats`) and operators.
_8B, _3B, _14B = (4.617e9, 1169), (2.011e9, 1025), (8.55e9, 1745)
_7B_Q4, _13B_Q4, _70B_Q4 = (3.752e9, 1169), (7.28e9, 1457), (38.72e9, 2897)
_AI = "github.com/geerlingguy/ai-benchmarks"
_MACS = "github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference/issues/1"
_LLMFIT = "github.com/AlexsJones/llmfit/pull/1031"
_METAL = "github.com/ggml-org/llama.cpp/pull/16634"
_MAC_BENCH = "github.com/enescingoz/mac-llm-bench, results/m2/max/speed"
_SPEEDS = "github.com/dmatora/LLM-inference-speed-benchmarks"
_Row = tuple[str, tuple[float, int], float, str]


def _of(machine: str, engine: Engine, datasheet: float, *rows: _Row, cores: int = 1) -> tuple[DecodeEvidence, ...]:
    return tuple(
        DecodeEvidence(machine, engine, cores, datasheet, model, *size, speed, source)
        for model, size, speed, source in rows
    )


# Every dense row of each source that was at hand and says which memory it had, whether it suits or not. Neither the
# Raspberry Pi 5 (nor the 500+, which has its chip) nor the M1 is among them: what is said of those is a prediction.
EVIDENCE = (
    *_of("Intel N150, one channel of DDR4-3200", "cpu", 25.6e9,
         ("R1-Distill-Llama-8B q4_k_m", _8B, 3.55, f"{_AI}/issues/12"),
         ("R1-Distill-Qwen-1.5B q4_k_m", (0.986e9, 1025), 17.02, f"{_AI}/issues/12"), cores=4),
    *_of("Ryzen AI 5 340, two channels of DDR5-5600", "cpu", 89.6e9,
         ("Llama-3.1-8B q4_k_m", _8B, 10.46, f"{_AI}/issues/33"),
         ("Llama-3.2-3B q4_k_m", _3B, 23.81, f"{_AI}/issues/33"),
         ("R1-Distill-Qwen-14B q4_k_m", _14B, 5.83, f"{_AI}/issues/33"), cores=6),
    *_of("Radxa Orion O6, 128-bit LPDDR5-5500", "cpu", 88.0e9,
         ("Llama-3.1-8B q4_k_m", _8B, 7.60, f"{_AI}/issues/13"),
         ("Llama-3.2-3B q4_k_m", _3B, 16.49, f"{_AI}/issues/13"),
         ("Llama-2-13B q4_0", _13B_Q4, 4.17, f"{_AI}/issues/13"), cores=12),
    *_of("Core i5-4278U, two channels of DDR3L-1600", "cpu", 25.6e9,
         ("Llama-3.2-3B q4_k_m", _3B, 7.68, f"{_AI}/issues/53"), cores=2),
    *_of("Apple M2 Pro, its CPU", "cpu", 200e9,
         ("Llama-2-7B q4_0", _7B_Q4, 1 / 0.04781, _MACS),
         ("Llama-2-13B q4_0", _13B_Q4, 1 / 0.07338, _MACS),
         ("Llama-2-7B fp16", (13.215e9, 1169), 1 / 0.11784, _MACS), cores=10),
    *_of("Mac Pro 2019, six channels of DDR4-2933", "cpu", 140.8e9,
         ("Llama-2-7B q4_0", _7B_Q4, 1 / 0.05876, _MACS),
         ("Llama-2-13B q4_0", _13B_Q4, 1 / 0.10148, _MACS),
         ("Llama-2-70B q4_0", _70B_Q4, 1 / 0.48715, _MACS), cores=28),
    *_of("Apple M4", "gpu", 120e9,
         ("Llama-3.1-8B q4_k_m", _8B, 20.89, f"{_AI}/issues/2"),
         ("Llama-3.2-3B q4_k_m", _3B, 41.04, f"{_AI}/issues/2")),
    *_of("Apple M5", "gpu", 153.6e9,
         ("Mistral-7B q4_0", (4.035e9, 1169), 26.59, _METAL),
         ("Phi-2 q4_0", (1.526e9, 1036), 64.11, _METAL),
         ("TinyLlama-1.1B q4_0", (0.599e9, 809), 149.69, _METAL)),
    *_of("Apple M2 Pro", "gpu", 200e9,
         ("Llama-3.1-8B q4_k_m", _8B, 33.0, _LLMFIT),
         ("Llama-3.1-8B q8_0", (7.975e9, 1169), 22.0, _LLMFIT),
         ("R1-Distill-Qwen-14B q4_k_m", _14B, 17.8, _LLMFIT),
         ("Qwen2.5-Coder-14B q4_k_m", _14B, 17.6, _LLMFIT),
         ("Phi-4 q4_k_m", (8.76e9, 1417), 17.2, _LLMFIT),
         ("Gemma-3-12B q4_k_m", (7.30e9, 3194), 19.8, _LLMFIT)),
    *_of("Apple M3 Pro", "gpu", 150e9,
         ("Qwen2.5-3B q4_0", (1.816e9, 1313), 65.0, "github.com/AlexsJones/llmfit/pull/1019")),
    *_of("Apple M1 Max", "gpu", 400e9,
         ("Llama-3.1-8B q4_k_m", _8B, 46.2, "github.com/brand-o/normiebench/issues/40"),
         ("Llama-3.2-3B q4_k_m", _3B, 80.20, f"{_AI}/pull/30")),
    *_of("Apple M2 Max", "gpu", 400e9,
         ("Llama-3.2-1B q4_k_m", (0.799e9, 593), 205.9, _MAC_BENCH),
         ("Llama-3.2-3B q4_k_m", _3B, 84.7, _MAC_BENCH),
         ("Llama-3.1-8B q4_k_m", _8B, 37.5, _MAC_BENCH),
         ("Qwen2.5-Coder-14B q4_k_m", _14B, 20.4, _MAC_BENCH)),
    *_of("RTX 3080", "gpu", 760e9, ("Llama-3.1-8B q4_k_m", _8B, 111.95, f"{_SPEEDS}/issues/12")),
    *_of("RTX 4090", "gpu", 1008e9, ("Llama-3-8B q6_k", (6.157e9, 1169), 93.0, f"{_SPEEDS}/issues/10")),
)  # fmt: skip
# Part of the bandwidth on paper that streaming weights reaches: the median over the machines above, and for the CPU
# the STREAM copy of the Raspberry Pi 4 as one more. tests/serving/test_token_rates.py derives all of these.
SHARE: dict[Engine, float] = {"cpu": 0.58, "gpu": 0.8, "npu": 0.8, "all": 0.8}
# GPUs with more than this on paper reach less of it with a single sequence: the median of four. Weights of eight bits
# or more are so few per byte that they keep up: Llama-2-7B in fp16 and q8_0 on M1, M2 and M3 Max reach 0.77 to 0.87
# (github.com/ggml-org/llama.cpp/discussions/4167).
WIDE_BYTES_PER_S = 300e9
WIDE_SHARE = 0.61
WIDE_BITS = 8.0
# Time per operator beside its bytes, where the device has no figure of its own. On a GPU the first and the last M5 row
# above, one with seven times the bytes of the other, give it; a runtime fuses some of the operators that are counted,
# so a launch takes longer than this. On a CPU all threads wait for each other after each operator, so it is a time per
# core: the one that explains the rows of five machines best, each with a bandwidth of its own.
OVERHEAD_S: dict[Engine, float] = {"cpu": 0.5e-6, "gpu": 1.7e-6, "npu": 1.7e-6, "all": 1.7e-6}
_USUAL_CORES = 4
# Nine in ten times lie within these factors of what the share says. On CPUs many fall short of it, where few cores have
# wide memory, and none is far above: below the quantile of the evidence, above its largest. On GPUs both ends are those
# of Student's distribution for one row more than the twelve.
SPREAD: dict[Engine, float] = {"cpu": 1.4, "gpu": 1.17, "npu": 1.4, "all": 1.4}
MOST_ABOVE: dict[Engine, float] = {"cpu": 1.17}
WIDE_SPREAD = 1.5
# What a published run streamed on the device itself, and what is derived from runs on its kin.
DECODED_SPREAD = 1.25
DERIVED_SPREAD = 1.5
# An engine of which the catalogue knows nothing may be of another kind than those that were timed.
UNKNOWN_SPREAD = 2.0
# A read that was measured under load leaves the model's own kernels as the only unknown.
MEASURED_SPREAD = 1.15
# A copy reads and writes, one thread alone does not fill the memory: what streaming reaches over twice a one-thread
# memcpy, on the catalogue's CPUs that have a figure on paper too, is 0.8 to 1.0.
COPY_SHARE = 0.85


def overhead_s(engine: Engine, threads: int | None = None) -> float:
    """Seconds that an operator takes beside its bytes; on a CPU they grow with the threads that wait for each other.

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
# int8 quantised ones go by its int8 peak: formats that kernels keep repacked reach REPACKED_SHARE of it (Raspberry Pi
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

    Nine times in ten it is between a `spread`-th of it and `above` times as much. `is_lower_bound`: the engine that
    runs the model has no figure of its own, and another's stands in.
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


def read_rate(
    spec: DeviceSpec, engine: Engine | None = None, runtime: str | None = None, bits: float = 4.5
) -> ReadRate:
    """What an engine streams under load: measured where the catalogue knows it, else a share of the data sheet.

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
            reading = f"{share:g} of {figure.value / 1e9:g} GB/s on paper ({figure.source})"
            known = {spec.engine, *(peak.engine for peak in spec.peaks), *(item.engine for item in spec.bandwidths)}
            if wanted not in known:
                return ReadRate(share * figure.value, f"{reading}; nothing is known of its {wanted}", UNKNOWN_SPREAD)
            return ReadRate(share * figure.value, reading, spread, most_above=MOST_ABOVE.get(wanted))
    return _from_copies(spec, wanted)


def sheet_share(engine: Engine, datasheet_bytes_per_s: float, bits: float = 4.5) -> tuple[float, float]:
    """Part of the bandwidth on paper that an engine streams, and the factor that nine in ten published rows keep."""
    if engine != "cpu" and datasheet_bytes_per_s > WIDE_BYTES_PER_S and bits < WIDE_BITS:
        return WIDE_SHARE, WIDE_SPREAD
    return SHARE[engine], SPREAD[engine]


def _from_copies(spec: DeviceSpec, engine: Engine) -> ReadRate:
    """What copies and fills say where nothing better is known; a device without any figure is refused."""
    copy, stream = spec.bandwidth("memcpy", engine), spec.bandwidth("stream_copy", engine)
    if stream is not None:
        return ReadRate(stream.value, f"STREAM copy on the {engine} ({stream.source})", SPREAD[engine])
    if copy is not None:
        reading = f"{COPY_SHARE:g} of twice memcpy on the {engine}, one thread ({copy.source})"
        return ReadRate(COPY_SHARE * 2 * copy.value, reading, SPREAD[engine])
    others = [item for item in spec.bandwidths if item.engine is not None]
    if others:
        best = max(others, key=lambda item: item.figure.value)
        reading = (
            f"{best.method} on the {best.engine} ({best.figure.source}); the {engine} itself has no figure, so it is "
            "at least this"
        )
        return ReadRate(best.figure.value, reading, SPREAD[engine], is_lower_bound=True)
    why = spec.bandwidth_unknown or "no figure is known"
    raise InvalidInput(
        f"the bandwidth of {spec.name} is unknown ({why}), and decoding is bound by it; "
        "copy its file, add bandwidth_bytes_per_s, and pass the file as target"
    )


def matrix_rate(spec: DeviceSpec, form: WeightFormat, engine: Engine | None = None) -> tuple[float, str] | None:
    """Operations per second that products of many rows reach in a format, and why; None where no peak is known.

    >>> from edge_opt.boards.catalog import device
    >>> from edge_opt.serving.weight_formats import WEIGHT_FORMATS
    >>> round(matrix_rate(device("raspberry-pi-5"), WEIGHT_FORMATS["q8_0"])[0] / 1e9, 1)  # a tenth of 614.4
    61.4
    """
    wanted = engine or spec.engine
    int8 = spec.peak(wanted, "int8")
    if wanted == "cpu" and form.name in REPACKED and int8 is not None:
        return REPACKED_SHARE * int8.value, f"{REPACKED_SHARE:g} of the int8 peak ({int8.source})"
    if wanted == "cpu" and form.is_quantized and int8 is not None and _has_dot_products(spec):
        return UNPACKED_SHARE * int8.value, f"{UNPACKED_SHARE:g} of the int8 peak ({int8.source})"
    for precision in ("fp32", "fp16", "bf16") if wanted == "cpu" else ("fp16", "bf16", "fp32"):
        peak = spec.peak(wanted, precision)
        if peak is not None:
            return MATRIX_SHARE * peak.value, f"{MATRIX_SHARE:g} of the {precision} peak ({peak.source})"
    fp64 = spec.peak(wanted, "fp64")
    if fp64 is not None:  # HPL, reached and not on paper: fp32 does twice as much
        return 2 * fp64.value, f"twice the fp64 rate ({fp64.source})"
    return None


def unpack_rate(spec: DeviceSpec, engine: Engine | None = None) -> float | None:
    """Operations per second with which an engine unpacks weights to floats; None where that takes no time of its own.

    >>> from edge_opt.boards.catalog import device
    >>> unpack_rate(device("apple-m1")), unpack_rate(device("raspberry-pi-5"))
    (2600000000000.0, None)
    """
    wanted = engine or spec.engine
    peak = spec.peak(wanted, "fp32")
    is_metal = wanted == "gpu" and spec.title.startswith("Apple")
    return peak.value if is_metal and peak is not None else None


def row_rate(spec: DeviceSpec, form: WeightFormat, engine: Engine | None = None) -> tuple[float, str] | None:
    """Operations per second that products with one row reach in a format, and why; None where no peak is known.

    >>> from edge_opt.boards.catalog import device
    >>> from edge_opt.serving.weight_formats import WEIGHT_FORMATS
    >>> round(row_rate(device("raspberry-pi-4"), WEIGHT_FORMATS["q4_0"])[0] / 1e9, 2)  # 0.19 × 48e9
    9.12
    """
    wanted = engine or spec.engine
    fp32, int8 = spec.peak(wanted, "fp32"), spec.peak(wanted, "int8")
    if wanted == "cpu" and form.is_quantized and fp32 and int8 and not _has_dot_products(spec):
        reading = f"{ROW_SHARE:g} of the fp32 peak ({fp32.source}), for there are no dot products of int8"
        return ROW_SHARE * fp32.value, reading
    if wanted == "cpu" and form.is_quantized and fp32 and form.name not in REPACKED:
        # A single row stays in registers, so that block by block costs less than in a product of many.
        return MATRIX_SHARE * fp32.value, f"{MATRIX_SHARE:g} of the fp32 peak ({fp32.source})"
    return matrix_rate(spec, form, wanted)


def _has_dot_products(spec: DeviceSpec) -> bool:
    """Whether a CPU has instructions for dot products of int8, by its peaks: they do four times what fp32 does."""
    fp32, int8 = spec.peak("cpu", "fp32"), spec.peak("cpu", "int8")
    return fp32 is not None and int8 is not None and int8.value >= _DOT_PRODUCT * fp32.value
