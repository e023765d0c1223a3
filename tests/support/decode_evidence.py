"""Published decoding speeds, with what each run streamed; the constants of `token_rates` follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from edge_opt.records.devices import Engine
from edge_opt.serving.token_rates import overhead_s


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
