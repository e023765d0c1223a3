"""A language model served from a device: what it holds, what a token costs, how many tokens a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edge_opt.records.devices import Bound
from edge_opt.records.measurements import Energy
from edge_opt.records.shown import Record, Shown

if TYPE_CHECKING:
    import os
    from pathlib import Path

SERVING_FORMAT = "edge_opt.llm"
PartName = Literal["attention", "mlp", "experts", "head", "embedding", "kv", "other"]


@dataclass(frozen=True, slots=True)
class ServingPart(Record):
    """One part of the model, in one decoding step of the whole batch at full context.

    Attributes:
        name: attention, mlp, experts, head, embedding, kv (the cache and other state) or other (norms and the like).
        weights_bytes: bytes of its weights in memory; 0 for kv. A tied table stands with the head.
        bytes_per_step: bytes that one step streams from memory for it.
        flops_per_step: arithmetic operations of one step, two per MAC.
    """

    name: PartName
    weights_bytes: int
    bytes_per_step: int
    flops_per_step: int


@dataclass(frozen=True, slots=True)
class ServingMemory(Record):
    """What must be in memory at once, and whether it fits.

    Attributes:
        weights_bytes: every parameter in its format, scales included; all experts of a mixture.
        buffer_bytes: tensors that the model keeps beside its parameters, such as tables for positions.
        kv_bytes: the key-value cache and other state at full context, for the whole batch.
        input_bytes: the token ids of a step.
        activation_bytes: the most that other tensors hold at once, while reading the prompt or in a decoding step.
        ram_bytes: sizes of RAM that the target is sold with, smallest first; empty where not known.
        limit_bytes: the RAM that the next two are about: the smallest that holds all of it, else the largest.
        longest_context: positions at which that RAM is full, up to the model's maximum; None: not known.
        largest_batch: sequences at full context that fit that RAM; 0: not even one; None: not known.
    """

    weights_bytes: int
    buffer_bytes: int
    kv_bytes: int
    input_bytes: int
    activation_bytes: int
    ram_bytes: tuple[int, ...]
    limit_bytes: int | None
    longest_context: int | None
    largest_batch: int | None

    @property
    def total_bytes(self) -> int:
        """The sum of all of it."""
        return self.weights_bytes + self.buffer_bytes + self.kv_bytes + self.input_bytes + self.activation_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits the smallest RAM of the target; None where the RAM is not known."""
        return self.total_bytes <= self.ram_bytes[0] if self.ram_bytes else None

    @property
    def fitting_ram_bytes(self) -> tuple[int, ...]:
        """The sizes of RAM that suffice."""
        return tuple(size for size in self.ram_bytes if size >= self.total_bytes)

    @property
    def missing_bytes(self) -> int | None:
        """Bytes that the smallest RAM lacks; 0 where it fits, None where it is not known."""
        return max(0, self.total_bytes - self.ram_bytes[0]) if self.ram_bytes else None


@dataclass(frozen=True, slots=True)
class PrefillCost(Record):
    """Reading the prompt, up to the first token.

    Attributes:
        tokens: tokens of the prompt, of one sequence.
        flops: arithmetic operations for the whole batch, two per MAC.
        bytes_moved: bytes of weights and state that are streamed.
        seconds: until the first token; None where the target's matrix rate is not known.
        low: the shortest of nine times in ten, in seconds.
        high: the longest of nine times in ten, in seconds.
        tokens_per_s: tokens of the prompt per second, for the whole batch.
        bound: what most of the time goes to.
    """

    tokens: int
    flops: int
    bytes_moved: int
    seconds: float | None
    low: float | None
    high: float | None
    tokens_per_s: float | None
    bound: Bound


@dataclass(frozen=True, slots=True)
class DecodeCost(Record):
    """Making tokens one by one, at one length of context.

    Attributes:
        context: positions in the cache, the new one among them.
        tokens_per_s: tokens per second of the whole batch; None without a target.
        low: the slowest of nine times in ten, in tokens per second.
        high: the fastest of nine times in ten; None where it is open.
        seconds_per_step: time of one step, which makes one token for each sequence of the batch.
        bytes_per_token: bytes streamed per token: weights, of experts those that are met, and state.
        flops_per_token: arithmetic operations per token, two per MAC.
        bound: what most of the time goes to.
    """

    context: int
    tokens_per_s: float | None
    low: float | None
    high: float | None
    seconds_per_step: float | None
    bytes_per_token: float
    flops_per_token: float
    bound: Bound


@dataclass(frozen=True, slots=True)
class CurvePoint(Record):
    """Decoding at one length of context.

    Attributes:
        context: positions in the cache.
        kv_bytes: bytes of the cache and other state there, for the whole batch.
        tokens_per_s: tokens per second of the whole batch; None without a target.
    """

    context: int
    kv_bytes: int
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Speculation(Record):
    """Decoding with a draft model that proposes tokens, which the model checks in one step.

    Attributes:
        draft: name of the draft model.
        proposed: tokens that the draft proposes each time.
        acceptance: share of proposals that are kept; an assumption of the caller's.
        tokens_per_step: tokens that one check yields on average, the model's own among them.
        tokens_per_s: tokens per second of the whole batch; None without a target.
        speedup: against decoding without a draft.
        draft_bytes: bytes of the draft's weights and state, to be added to the memory.
    """

    draft: str
    proposed: int
    acceptance: float
    tokens_per_step: float
    tokens_per_s: float | None
    speedup: float | None
    draft_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredServing(Record):
    """The real loop, run on this machine.

    Attributes:
        runtime: torch or llama-cpp-python, with its version.
        weights: what the weights were held in while it ran.
        threads: threads that computed.
        prompt: tokens of the prompt.
        tokens: tokens made after it.
        prefill_s: seconds until the first token.
        decode_tokens_per_s: tokens per second after it, by the median step.
        peak_bytes: most bytes of tensors alive at once in a decoding step, weights included; None where not followed.
    """

    runtime: str
    weights: str
    threads: int
    prompt: int
    tokens: int
    prefill_s: float
    decode_tokens_per_s: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class ServingReport(Shown):
    """Will it fit, how many tokens a second, and why: one model, one format of weights, one target.

    Attributes:
        model: its name.
        target: the device; None: memory and costs only.
        engine: which engine of the device runs it.
        runtime: the program that is meant, such as llama.cpp.
        weights: the format of the weights.
        kv: the format of the key-value cache.
        context: positions that the cache holds at most.
        prompt: tokens of the prompt.
        batch: sequences served at once.
        params: parameters; a shared table counts once.
        active_params: parameters that one token meets; fewer where there are experts. The embedding's table is not met.
        bits_per_weight: average over all parameters, scales included.
        max_context: positions that the model was made for; None where there is no limit.
        memory: what must be held, and whether it fits.
        prefill: reading the prompt.
        decode: making tokens at full context.
        decode_at_start: making tokens right after the prompt.
        parts: what a step costs by part; they add up to the whole.
        curve: tokens per second over context.
        bandwidth_bytes_per_s: bytes per second that decoding is taken to reach; None without a target.
        bandwidth_source: where that figure comes from.
        energy_per_token: joules per token at full context, with its provenance; None where power is not known.
        speculation: decoding with a draft model; None unless asked for.
        measured: the real loop on this machine; None unless asked for.
        remarks: what was assumed, or is left out.
    """

    model: str
    target: str | None
    engine: str | None
    runtime: str
    weights: str
    kv: str
    context: int
    prompt: int
    batch: int
    params: int
    active_params: int
    bits_per_weight: float
    max_context: int | None
    memory: ServingMemory
    prefill: PrefillCost
    decode: DecodeCost
    decode_at_start: DecodeCost
    parts: tuple[ServingPart, ...]
    curve: tuple[CurvePoint, ...]
    bandwidth_bytes_per_s: float | None
    bandwidth_source: str
    energy_per_token: Energy | None
    speculation: Speculation | None
    measured: MeasuredServing | None
    remarks: tuple[str, ...]

    def part(self, name: PartName) -> ServingPart:
        """One part by its name.

        Args:
            name: Which part, such as "attention" or "head".
        """
        return next(part for part in self.parts if part.name == name)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a file.

        Args:
            path: Where; its ending decides the form: .json, .md, .txt or .html.
        """
        from edge_opt.report.serving_tables import save_serving

        return save_serving((self,), path)


@dataclass(frozen=True, slots=True)
class ServingComparison(Shown):
    """One model with several formats or on several targets, side by side.

    Attributes:
        reports: one report for each target and format, targets in the order asked for, formats within them.
    """

    reports: tuple[ServingReport, ...]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the reports to a file.

        Args:
            path: Where; its ending decides the form: .json, .md, .txt or .html.
        """
        from edge_opt.report.serving_tables import save_serving

        return save_serving(self.reports, path)
