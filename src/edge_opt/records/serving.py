"""A language model served from a device: what it holds, what a token costs, how many tokens a second."""

from __future__ import annotations

from typing import Literal

from edge_opt.records.devices import Bound
from edge_opt.records.fields import Record, Saved, by_name, field, record
from edge_opt.records.measurements import Energy

SERVING_FORMAT = "edge_opt.llm"
PartName = Literal["attention", "mlp", "experts", "head", "embedding", "kv", "other"]


@record
class ServingPart(Record):
    """One part of the model, in one decoding step of the whole batch at full context."""

    name: PartName = field("attention, mlp, experts, head, embedding, kv (cache and other state) or other.")
    weights_bytes: int = field("Bytes of its weights in memory; 0 for kv. A tied table stands with the head.")
    bytes_per_step: int = field("Bytes that one step streams from memory for it.")
    flops_per_step: int = field("Arithmetic operations of one step, two per MAC.")


@record
class ServingMemory(Record):
    """The memory that is needed at once, and whether it fits."""

    weights_bytes: int = field("Every parameter in its format, scales included; all experts of a mixture.")
    buffer_bytes: int = field("Tensors that the model keeps beside its parameters, such as tables for positions.")
    kv_bytes: int = field("The key-value cache and other state at full context, for the whole batch.")
    input_bytes: int = field("The token ids of a step.")
    activation_bytes: int = field("Most bytes of other tensors, in prefill or a decoding step.")
    ram_bytes: tuple[int, ...] = field("RAM sizes of the target, smallest first; empty: not known.")
    limit_bytes: int | None = field("RAM that the next two refer to: the smallest that fits, else the largest.")
    longest_context: int | None = field("Positions that fill that RAM, up to the model's maximum; None: not known.")
    largest_batch: int | None = field("Sequences at full context that fit that RAM; 0: not even one; None: not known.")
    runtime_bytes: int = field("What the runtime holds beside: vocabulary, code, tables.", default=0)

    @property
    def total_bytes(self) -> int:
        """The sum of all of it."""
        tensors = self.weights_bytes + self.buffer_bytes + self.kv_bytes + self.input_bytes + self.activation_bytes
        return tensors + self.runtime_bytes

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


@record
class PrefillCost(Record):
    """Reading the prompt, up to the first token."""

    tokens: int = field("Tokens of the prompt, of one sequence.")
    flops: int = field("Arithmetic operations for the whole batch, two per MAC.")
    bytes_moved: int = field("Bytes of weights and state that are streamed.")
    seconds: float | None = field("Until the first token; None where the target's matrix rate is not known.")
    low: float | None = field("Lower end of the 90 % interval, in seconds.")
    high: float | None = field("Upper end of the 90 % interval, in seconds.")
    tokens_per_s: float | None = field("Tokens of the prompt per second, for the whole batch.")
    bound: Bound = field("What most of the time goes to.")


@record
class DecodeCost(Record):
    """Making tokens one by one, at one length of context."""

    context: int = field("Positions in the cache, the new one among them.")
    tokens_per_s: float | None = field("Tokens per second of the whole batch; None without a target.")
    low: float | None = field("Lower end of the 90 % interval, in tokens per second.")
    high: float | None = field("Upper end of the 90 % interval; None: open.")
    seconds_per_step: float | None = field("Time of one step, which makes one token for each sequence of the batch.")
    bytes_per_token: float = field("Bytes streamed per token: weights, of experts those that are met, and state.")
    flops_per_token: float = field("Arithmetic operations per token, two per MAC.")
    bound: Bound = field("What most of the time goes to.")


@record
class CurvePoint(Record):
    """Decoding at one length of context."""

    context: int = field("Positions in the cache.")
    kv_bytes: int = field("Bytes of the cache and other state there, for the whole batch.")
    tokens_per_s: float | None = field("Tokens per second of the whole batch; None without a target.")


@record
class MeasuredServing(Record):
    """The real loop, run on this machine."""

    runtime: str = field("torch or llama-cpp-python, with its version.")
    weights: str = field("What the weights were held in while it ran.")
    threads: int = field("Threads that computed.")
    prompt: int = field("Tokens of the prompt.")
    tokens: int = field("Tokens made after it.")
    prefill_s: float = field("Seconds until the first token.")
    decode_tokens_per_s: float = field("Tokens per second after it, by the median step.")
    peak_bytes: int | None = field("Most bytes alive in a decoding step, weights included; None: not traced.")


@record
class StoredType(Record):
    """The tensors of a file that have one type."""

    name: str = field("The type, such as Q6_K or BF16.")
    tensors: int = field("How many tensors have it.")
    stored_bytes: int = field("Their bytes.")


@record
class WeightFileSummary(Record):
    """What the header of a model's file says; several parts are one file."""

    path: str = field("Name of the file, or of the folder.")
    kind: Literal["gguf", "safetensors"] = field("Its format.")
    parts: int = field("Files that it is split into.")
    disk_bytes: int = field("Bytes on disk, headers included.")
    tensor_bytes: int = field("Bytes of all tensors.")
    tensors: int = field("Number of tensors.")
    types: tuple[StoredType, ...] = field("Bytes by type, the most first.")
    architecture: str = field("As the file or the configuration beside it names it.")
    experts: int | None = field("Experts of a layer; None: no mixture.")
    experts_per_token: int | None = field("Experts that a token uses; None: no mixture.")
    window: int | None = field("Positions that a layer with a sliding window sees; None: no window.")
    rope_base: float | None = field("Base of the rotary positions; None: not in the file.")
    rope_scaling: str = field("How rotary positions are stretched; empty: not at all.")
    tokens: int | None = field("Words of the vocabulary; None: not in the file.")
    tokenizer_bytes: int | None = field("Bytes of the vocabulary in the file; None: not in it.")


@record
class SplitPart(Record):
    """What one device holds and does when a model is divided between several."""

    device: str = field("The device.")
    limit_bytes: int | None = field("Memory that it may use; None: not limited.")
    layers: int = field("Layers that it runs.")
    expert_layers: int = field("Layers whose experts it holds.")
    weights_bytes: int = field("Bytes of the weights that it holds.")
    kv_bytes: int = field("Bytes of the cache that it holds.")
    total_bytes: int = field("All that it holds, buffers included.")
    seconds_per_step: float = field("Seconds of a decoding step that it works.")


@record
class ServingSplit(Record):
    """A model divided between devices: layers one after another, or every layer between equal GPUs."""

    way: Literal["layers", "experts", "tensor"] = field("What is divided: layers, experts, or each tensor.")
    parts: tuple[SplitPart, ...] = field("What each device holds and does.")
    link_s: float = field("Seconds of a step that data moves between the devices.")
    tokens_per_s: float | None = field("Tokens per second of the whole batch at full context; None: it does not fit.")
    low: float | None = field("Lower end of the 90 % interval, in tokens per second.")
    high: float | None = field("Upper end of the 90 % interval.")
    missing_bytes: int = field("Bytes that fit nowhere; 0: everything fits.")
    source: str = field("What speeds of devices and links were assumed.")


@record
class ServingReport(Saved):
    """Will it fit, how many tokens a second, and why: one model, one format of weights, one target."""

    model: str = field("Its name.")
    target: str | None = field("The device; None: memory and costs only.")
    engine: str | None = field("Which engine of the device runs it.")
    runtime: str = field("The program that is meant, such as llama.cpp.")
    weights: str = field("The format of the weights.")
    kv: str = field("The format of the key-value cache.")
    context: int = field("Positions that the cache holds at most.")
    prompt: int = field("Tokens of the prompt.")
    batch: int = field("Sequences served at once.")
    params: int = field("Parameters; a shared table counts once.")
    active_params: int = field("Parameters used per token, without the embedding table.")
    bits_per_weight: float = field("Average over all parameters, scales included.")
    max_context: int | None = field("Maximum context of the model; None where there is no limit.")
    memory: ServingMemory = field("What must be held, and whether it fits.")
    prefill: PrefillCost = field("Reading the prompt.")
    decode: DecodeCost = field("Making tokens at full context.")
    decode_at_start: DecodeCost = field("Making tokens right after the prompt.")
    parts: tuple[ServingPart, ...] = field("What a step costs by part; they add up to the whole.")
    curve: tuple[CurvePoint, ...] = field("Tokens per second over context.")
    bandwidth_bytes_per_s: float | None = field("Bytes per second assumed for decoding; None without a target.")
    bandwidth_source: str = field("Where that figure comes from.")
    energy_per_token: Energy | None = field("Joules per token at full context; None: power not known.")
    measured: MeasuredServing | None = field("The real loop on this machine; None unless asked for.")
    remarks: tuple[str, ...] = field("What was assumed, or is left out.")
    file: WeightFileSummary | None = field("The file whose header was read; None: a configuration.", default=None)
    split: ServingSplit | None = field("How it is divided between devices; None: it is not.", default=None)
    best_format: str | None = field("Most precise GGUF format that fits the smallest RAM; None: none.", default=None)

    def part(self, name: PartName) -> ServingPart:
        """Return one part by its name.

        Args:
            name: Which part, such as "attention" or "head".
        """
        return by_name("part", name, ((part.name, part) for part in self.parts))


@record
class ServingComparison(Saved):
    """One model with several formats or on several targets, side by side."""

    reports: tuple[ServingReport, ...] = field("One report for each target and format, in the order asked for.")
