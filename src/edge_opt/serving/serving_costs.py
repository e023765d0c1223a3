"""Bytes, operations and seconds of a served model: as functions of format, context, batch and device."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod

import torch

from edge_opt.boards.estimate import share_of_peak
from edge_opt.records.devices import Bound, DeviceSpec, Engine
from edge_opt.records.serving import (
    CurvePoint,
    DecodeCost,
    PartName,
    PrefillCost,
    ServingMemory,
    ServingPart,
    WeightFileSummary,
)
from edge_opt.serving.token_rates import (
    DELTA_PASSES,
    EXPERT_POWER,
    EXPERT_ROWS,
    MLX_PREFILL_SPREAD,
    PREFILL_SPREAD,
    PREFILL_UNKNOWN_SPREAD,
    UNPACK_OPERATIONS,
    VECTOR_ROWS,
    GpuFamily,
    ProductRate,
    ReadRate,
    gpu_family,
    has_own_memory,
    matrix_rate,
    overhead_s,
    read_rate,
    row_rate,
    unpack_rate,
    vector_rate,
)
from edge_opt.serving.token_trace import StepTrace, TracedLanguageModel
from edge_opt.serving.weight_formats import WeightFormat, WeightTensor, cache_bytes_per_value, tensor_bytes, tensor_type

# llama.cpp reads a prompt in pieces of this many tokens, so its tensors are no larger than for one of them.
PIECE = 512
# Bytes beside tensors: the smallest models on an Apple M1 hold this much more with llama.cpp.
RUNTIME_BYTES = {"llama.cpp": 32 << 20}
# MLX reads prompts in pieces of so many tokens, and lets a cache grow by so many positions (mlx_lm 0.31). So many
# command buffers are under way, and attention is fused for heads up to that width (mlx, backend/metal).
MLX_PIECE, MLX_CACHE_STEP, MLX_UNDER_WAY, MLX_FUSED_HEAD = 2048, 256, 11, 128
PARTS: tuple[PartName, ...] = ("attention", "mlp", "experts", "head", "embedding", "kv", "other")
# Up to so many rows a product is bound by its weights, and more sequences add what they compute.
FEW_ROWS = 64
# Kernels for several rows differ more than those for one; on a Mac llama.cpp of 2023 takes up to twice as long.
BATCH_SPREAD, APPLE_BATCH_BELOW = 1.2, 1.5
_MOST_BATCH = 1 << 16
_MOST_CONTEXT = 1 << 22


@dataclass(frozen=True, slots=True)
class Serving:
    """A traced model in one format: bytes and operations as functions of context and batch."""

    model: TracedLanguageModel
    form: WeightFormat
    runtime: str
    kv: str
    context: int
    prompt: int
    batch: int
    file: WeightFileSummary | None = None

    def tensor_bytes(self, tensor: WeightTensor) -> int:
        return tensor_bytes(tensor, self.form, self.model.is_tied)

    @property
    def weights_bytes(self) -> int:
        return sum(map(self.tensor_bytes, self.model.tensors))

    @property
    def constant_bytes(self) -> float:
        """Bytes of one sequence's state that does not grow: 32 bits a value in llama.cpp, nowhere fewer than 16."""
        is_wide = self.runtime == "llama.cpp" or (self.runtime == "mlx" and self.model.has_delta_nets)
        per_value = 4.0 if is_wide else max(cache_bytes_per_value(self.kv), 2.0)
        return per_value * sum(state.constant for state in self.model.states)

    def state_bytes(self, context: int, batch: int) -> int:
        """Return the bytes of the key-value cache in its format, and of other state."""
        growing = sum(state.values(context, self.prompt) for state in self.model.states)
        return round(batch * (growing * cache_bytes_per_value(self.kv) + self.constant_bytes))

    def streamed(self, step: StepTrace, tokens: int) -> dict[PartName, float]:
        """Return the bytes of weights that a step of this many tokens streams, by part."""
        parts: dict[PartName, float] = dict.fromkeys(PARTS, 0.0)
        for tensor in self.model.tensors:
            for part, nbytes in self.tensor_streams(tensor, step, tokens):
                parts[part] += nbytes
        return parts

    def tensor_streams(self, tensor: WeightTensor, step: StepTrace, tokens: int) -> Iterator[tuple[PartName, float]]:
        """Yield the bytes of a tensor that a step of this many tokens streams, with their part."""
        use = step.uses.get(tensor.name)
        if use is None:
            return
        nbytes = self.tensor_bytes(tensor)
        if use.rows and tensor.shape:
            yield "embedding", nbytes / tensor.shape[0] * use.rows * tokens / step.tokens
        if use.experts:
            yield "experts", nbytes * distinct_experts(use.experts, use.met / step.tokens, tokens) / use.experts
        elif use.is_whole:
            yield use.part, nbytes

    def step_bytes(self, context: int) -> dict[PartName, float]:
        """Return the bytes that a decoding step streams, by part: weights once, and the state of each sequence."""
        parts = self.streamed(self.model.decode, self.batch)
        # State that does not grow is read and written; of the rest, one position is written and the others are read.
        passes = DELTA_PASSES if self.model.has_delta_nets and self.runtime == "llama.cpp" else 2
        parts["kv"] = self.state_bytes(context, self.batch) + self.batch * self.constant_bytes * (passes - 1)
        return parts

    def slow_weights(self) -> Iterator[tuple[float, float]]:
        """Yield the bytes of each tensor that a decoding step unpacks, and the operations this takes."""
        for tensor in self.model.tensors:
            each = UNPACK_OPERATIONS.get(tensor_type(tensor, self.form, self.model.is_tied).name)
            if each is not None:
                moved = self.tensor_streams(tensor, self.model.decode, self.batch)
                streamed = sum(size for part, size in moved if part != "embedding")
                yield streamed, each * tensor.params * streamed / max(self.tensor_bytes(tensor), 1)

    def step_flops(self, context: int) -> dict[PartName, int]:
        """Return the operations of a decoding step, by part; scores grow with the positions in the cache."""
        decode = self.model.decode
        full = sum(state.values(self.context, self.prompt) for state in self.model.states)
        here = sum(state.values(context, self.prompt) for state in self.model.states)
        lost = decode.score_macs * (full - here) // full if full else 0
        parts: dict[PartName, int] = dict.fromkeys(PARTS, 0)
        for name, macs in decode.macs.items():
            parts[name] = 2 * (macs - (lost if name == "attention" else 0))
        return parts

    def activation_bytes(self, context: int, batch: int, prompt_bytes: Callable[[int], int] | None = None) -> int:
        """Return the peak of tensors beside weights and state, in a prompt or a step."""
        prefill, decode = self.model.prefill, self.model.decode
        if prompt_bytes is not None:
            # The cache grows in steps, so that the prompt may need most while the cache is short.
            reading, writing = (self.state_bytes(_in_steps(size), batch) for size in (self.prompt, context))
            step = max(0, decode.live_bytes - self._traced_state(self.context)) * context // self.context
            peak = max(reading + prompt_bytes(batch), writing + step * batch // self.batch)
            return peak - self.state_bytes(context, batch)
        if self.runtime != "torch":  # their cache is allocated once, and prompts are read in pieces
            reading = max(0, prefill.live_bytes - prefill.kept_bytes) * min(self.prompt, PIECE) // self.prompt
            return reading * batch // self.batch
        # torch makes each layer's cache anew with every token: that copy grows with the context.
        writing = max(0, decode.live_bytes - self._traced_state(self.context)) * context // self.context
        more_input = prefill.input_bytes - decode.input_bytes
        reading = max(0, prefill.live_bytes + more_input - self._traced_state(context))
        return max(reading, writing) * batch // self.batch

    def _traced_state(self, context: int) -> int:
        """Return the bytes of the state in the type that was traced."""
        itemsize = getattr(torch, self.form.computes_in).itemsize
        values = sum(state.values(context, self.prompt) + state.constant for state in self.model.states)
        return int(self.batch * values * itemsize)

    def reserved_bytes(self) -> int:
        """Return the buffer that llama.cpp reserves on a GPU of its own: the logits and states of a whole piece.

        Llama-3-8B: 512 × (128256 + 4096) × 4 bytes = 258.5 MiB, as its log says.
        """
        heads = [tensor.shape for tensor in self.model.tensors if self.part(tensor) == "head" and len(tensor.shape) > 1]
        return max((sum(shape) * PIECE * 4 for shape in heads), default=0) if self.runtime == "llama.cpp" else 0

    def part(self, tensor: WeightTensor) -> PartName:
        use = self.model.decode.uses.get(tensor.name)
        return use.part if use else "other"

    def memory(self, ram_bytes: tuple[int, ...] = (), spec: DeviceSpec | None = None) -> ServingMemory:
        """Return what is held; on a GPU with memory of its own reserved bytes are taken at once."""
        runtime_bytes = RUNTIME_BYTES.get(self.runtime, 0)
        least = self.reserved_bytes() if spec is not None and has_own_memory(spec) else 0
        fixed = self.weights_bytes + self.model.buffer_bytes + self.model.decode.input_bytes + runtime_bytes
        reading = cache(partial(mlx_prompt_bytes, self, spec)) if self.runtime == "mlx" else None

        def activations(context: int, batch: int) -> int:
            return max(self.activation_bytes(context, batch, reading), least)

        def total(context: int, batch: int) -> int:
            return fixed + self.state_bytes(context, batch) + activations(context, batch)

        whole = total(self.context, self.batch)
        limit = next((size for size in ram_bytes if size >= whole), ram_bytes[-1] if ram_bytes else None)
        most = self.model.max_context or _MOST_CONTEXT
        return ServingMemory(
            weights_bytes=self.weights_bytes,
            buffer_bytes=self.model.buffer_bytes,
            kv_bytes=self.state_bytes(self.context, self.batch),
            input_bytes=self.model.decode.input_bytes,
            activation_bytes=activations(self.context, self.batch),
            runtime_bytes=runtime_bytes,
            ram_bytes=ram_bytes,
            limit_bytes=limit,
            longest_context=limit and largest(lambda size: total(size, self.batch) <= limit, most),
            largest_batch=limit and largest(lambda size: total(self.context, size) <= limit, _MOST_BATCH),
        )

    @property
    def width(self) -> int:
        """The length of the vector that goes from layer to layer."""
        shapes = [tensor.shape for tensor in self.model.tensors if self.part(tensor) in ("head", "embedding")]
        return min((shape[-1] for shape in shapes if len(shape) > 1), default=4096)

    @property
    def active_params(self) -> int:
        """Parameters that one token meets; of a table that is looked up, none."""
        params = 0.0
        for tensor in self.model.tensors:
            use = self.model.decode.uses.get(tensor.name)
            if use is not None and use.experts:
                params += tensor.params * use.met / self.model.decode.tokens / use.experts
            elif use is not None and use.is_whole:
                params += tensor.params
        return round(params)


def _in_steps(positions: int) -> int:
    """Return the positions of a cache that grows in MLX's steps."""
    return -(-positions // MLX_CACHE_STEP) * MLX_CACHE_STEP


def mlx_prompt_bytes(serving: Serving, spec: DeviceSpec | None, batch: int) -> int:
    """Return the most that MLX holds of a prompt's tensors at once, its cache apart.

    Operators are collected in command buffers. What a buffer writes is freed when it is done, and `MLX_UNDER_WAY` of
    them are under way. A buffer ends at 40 operators or 40 Mi elements that it reads or writes, 50 on larger chips.
    """
    most = 50 if spec is not None and re.search(r"Max|Ultra", spec.title) else 40
    tokens = batch * max(1, min(serving.prompt - 1, MLX_PIECE))
    written: list[int] = []
    operators, elements, new, latest = 0, 0.0, 0, 0
    width = serving.width
    for weights, size in _mlx_operators(serving, tokens, width):
        operators, elements, new, latest = operators + 1, elements + weights + size, new + size, size or latest
        if operators > most or elements >= (most + 1) << 20:
            written.append(new)
            # The next buffer reads the newest tensor, and the sum that the layers add to.
            operators, elements, new = 0, latest + width * tokens, 0
    written.append(new)
    peak = max(sum(written[start : start + MLX_UNDER_WAY]) for start in range(len(written)))
    return peak * (4 if serving.form.name == "fp32" else 2)


def _mlx_operators(serving: Serving, tokens: int, width: int) -> Iterator[tuple[float, int]]:
    """Yield the elements of weights that an operator of a prompt reads, and those of the new memory that it writes to.

    Sums, activations and norms write over an input that nothing else reads.
    """
    step = serving.model.prefill
    tensors = {tensor.name: tensor for tensor in serving.model.tensors if tensor.layer is not None and tensor.params}
    # Gemma adds one to the weights of norms, and normalizes what the layers add, which nothing else reads.
    is_gemma = any("pre_feedforward" in name for name in tensors)
    head_width, queries, is_joined, has_convolution = 0, 0, False, False
    for name, use in step.uses.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        nbytes, share = serving.tensor_bytes(tensor), tensor.params / max(prod(tensor.shape), 1)
        # Packed weights are words of 32 bits, with a scale and a bias for 64 of them.
        weights = nbytes / 4 + tensor.params / 64 if nbytes < 2 * tensor.params else tensor.params
        rows = round((tokens * use.met / step.tokens if use.experts else tokens) * share)
        before: list[int] = []
        after: list[int] = []
        if len(tensor.shape) < 2:
            is_kept = tensor.shape == (width,) and name.endswith("weight")
            before, written = [0] * is_gemma, rows * width * (is_kept and not (is_gemma and "post_" in name))
            head_width = tensor.shape[0] if tensor.shape and "q_norm" in name else head_width
        elif tensor.role == "small":
            before, written, after = [rows * tensor.shape[0]], rows * tensor.shape[0], [0]
            has_convolution = True
        else:
            written, read = rows * tensor.shape[-2], rows * tensor.shape[-1]
            # Queries and keys are rotated, two caches are made and written, and rows are sorted by their experts.
            around = {
                "attn_q": ([], [written]), "attn_k": ([], [written]), "attn_v": ([], [0] * 4),
                "attn_qkv": ([], [written, 0, 0, 0, 0]), "attn_output": ([read], [0]),
                "ffn_down": ([read * is_joined], [written if use.experts else 0]),
            }  # fmt: skip
            before, after = around.get(tensor.role, ([read] if use.experts else [], []))
            if tensor.role == "attn_output" and has_convolution:
                # A gated delta net starts from a state of zeros in 32 bits, and normalizes its output.
                zeros = 2 * sum(state.constant for state in serving.model.states[tensor.layer or 0 :][:1])
                before, has_convolution = [zeros * serving.batch, read, read, 0], False
            elif tensor.role == "attn_output" and head_width > MLX_FUSED_HEAD:
                # Scores and values are products of their own; a gate comes with the queries and is copied.
                gate = [read] * (queries == 2 * read)
                before = [0, read // head_width * serving.prompt, 0, 0, read, read, *gate]
            weights += 2 * _in_steps(rows) * tensor.shape[-2] if tensor.role == "attn_v" else 0
            queries = written if tensor.role == "attn_q" else queries
            is_joined = "gate_up" in name and not use.experts
        yield from ((0.0, size) for size in before)
        yield weights, written
        yield from ((0.0, size) for size in after)


def distinct_experts(experts: int, per_token: float, tokens: int) -> float:
    """Return how many experts are used by this many tokens on average, if each chooses at random.

    One token misses an expert with probability 1 − k/E, all of them with its power.

    >>> distinct_experts(8, 2, 1), round(distinct_experts(8, 2, 4), 2)
    (2.0, 5.47)
    """
    return float(experts * (1 - (1 - per_token / experts) ** tokens))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits; 0 where not even 1 does.

    >>> largest(lambda size: size * size <= 50, 100)
    7
    """
    return bisect_left(range(1, most + 1), True, key=lambda size: not fits(size))


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a device for bytes and operations; without a device, unknown.

    Products of many rows run at `matrix_rate`, those with one row at `row_rate`. Weights are unpacked to floats at
    `unpack_per_s` where that takes time of its own.
    """

    spec: DeviceSpec | None = None
    engine: Engine | None = None
    threads: int | None = None
    rate: ReadRate | None = None
    matrix_rate: ProductRate | None = None
    row_rate: ProductRate | None = None
    unpack_per_s: float | None = None
    vector_per_s: float | None = None
    runtime: str = ""
    has_flash: bool = True

    @property
    def family(self) -> GpuFamily | None:
        return None if self.spec is None else gpu_family(self.spec, self.engine)

    def unpacking_s(self, weights: Iterable[tuple[float, float]]) -> float:
        """Return the seconds that unpacking takes beyond those of streaming the same weights."""
        if self.unpack_per_s is None or self.rate is None:
            return 0.0
        rate, unpacked = self.rate.bytes_per_s, self.unpack_per_s
        return sum(max(0.0, operations / unpacked - nbytes / rate) for nbytes, operations in weights)

    def step(
        self,
        nbytes: float,
        flops: float,
        step: StepTrace,
        rows: int,
        unpacking_s: float = 0.0,
        cache_bytes: float = 0.0,
    ) -> tuple[float | None, Bound]:
        """Return the seconds of a step of so many rows in each product, and what bounds it."""
        if self.rate is None or self.spec is None or self.engine is None:
            return None, "unknown"
        family = self.family
        # The cache is read at a part of the rate of weights.
        share = 1.0 if family is None else family.cache_share if self.has_flash else family.plain_share
        moving = (nbytes - cache_bytes + cache_bytes / share) / self.rate.bytes_per_s
        product_rate = self.row_rate if rows == 1 else self.matrix_rate
        computing = 0.0 if product_rate is None else flops / product_rate.flops_per_s
        own = self.spec.overhead_s
        each = overhead_s(self.engine, self.threads, family, self.runtime) if own is None else own.value
        overhead = step.operators * each
        spent: dict[Bound, float] = {"memory": moving, "compute": max(computing, unpacking_s), "overhead": overhead}
        busy = max(moving + unpacking_s, computing)
        if family is not None and 1 < rows <= FEW_ROWS:
            # Kernels for few rows hide only the first of them behind memory.
            busy = max(busy, moving + unpacking_s + computing * (rows - 1) / rows)
        if self.vector_per_s is not None and 1 < rows <= VECTOR_ROWS:
            busy = max(busy, flops / self.vector_per_s)
        seconds = max(busy, overhead) if self.runtime == "torch" and family else busy + overhead
        return seconds, max(spent, key=lambda bound: spent[bound])


def speed_of(
    spec: DeviceSpec | None,
    form: WeightFormat,
    engine: Engine | None,
    threads: int | None,
    runtime: str,
    has_flash: bool = True,
) -> Speed:
    """Return the speed of a device in a format; with fewer threads than cores a CPU has that share of its rate."""
    if spec is None:
        return Speed()
    wanted: Engine = engine or spec.engine
    used, part = None, 1.0
    if wanted == "cpu":
        cores = None if spec.cores is None else int(spec.cores.value)
        # Threads wait for each other, so that slow cores beside fast ones only hold a step up.
        used = threads or (cores if spec.fast_cores is None else int(spec.fast_cores.value))
        part = share_of_peak(spec, min(used, cores), cores) if used and cores else 1.0
    rates = matrix_rate(spec, form, wanted, runtime), row_rate(spec, form, wanted)
    matrix, row = (rate and rate._replace(flops_per_s=rate.flops_per_s * part) for rate in rates)
    streamed = read_rate(spec, wanted, runtime, form.bits)
    unpacked, few = unpack_rate(spec, wanted), vector_rate(spec, form, wanted)
    return Speed(spec, wanted, used, streamed, matrix, row, unpacked, few, runtime, has_flash)


def decode_cost(serving: Serving, speed: Speed, context: int) -> DecodeCost:
    """Return the cost of writing one token per sequence at a length of context."""
    parts = serving.step_bytes(context)
    nbytes, cache_bytes = sum(parts.values()), parts["kv"]
    flops = sum(serving.step_flops(context).values())
    unpacking_s = speed.unpacking_s(serving.slow_weights())
    seconds, bound = speed.step(nbytes, flops, serving.model.decode, serving.batch, unpacking_s, cache_bytes)
    rate = None if seconds is None else serving.batch / seconds
    below, above = (speed.rate.spread, speed.rate.above) if speed.rate else (1.0, 1.0)
    if serving.batch > 1:
        is_apple = speed.family is not None and speed.family.name.startswith("Apple")
        below, above = below * (APPLE_BATCH_BELOW if is_apple else BATCH_SPREAD), above * BATCH_SPREAD
    is_open = speed.rate is not None and speed.rate.is_lower_bound
    return DecodeCost(
        context=context,
        tokens_per_s=rate,
        low=None if rate is None else rate / below,
        high=None if rate is None or is_open else rate * above,
        seconds_per_step=seconds,
        bytes_per_token=nbytes / serving.batch,
        flops_per_token=flops / serving.batch,
        bound=bound,
    )


def prefill_spread(speed: Speed) -> float:
    """Return the factor that nine in ten published prompts meet; wider for GPUs and programs without rows."""
    if speed.runtime == "mlx":
        return MLX_PREFILL_SPREAD
    if speed.family is not None and speed.runtime == "llama.cpp":
        return speed.family.prefill_spread
    return PREFILL_SPREAD if speed.engine == "cpu" else PREFILL_UNKNOWN_SPREAD


def prefill_cost(serving: Serving, speed: Speed) -> PrefillCost:
    """Return the cost of reading the prompt."""
    step = serving.model.prefill
    flops = 2 * sum(step.macs.values())
    nbytes = sum(serving.streamed(step, step.tokens).values()) + serving.state_bytes(serving.prompt, serving.batch)
    rows = max(step.tokens, FEW_ROWS + 1)
    spent = flops if speed.family is None else flops + _lost_to_experts(step)
    seconds, bound = speed.step(nbytes, spent, step, rows) if speed.matrix_rate is not None else (None, "unknown")
    spread = prefill_spread(speed)
    return PrefillCost(
        tokens=serving.prompt,
        flops=flops,
        bytes_moved=round(nbytes),
        seconds=seconds,
        low=None if seconds is None else seconds / spread,
        high=None if seconds is None else seconds * spread,
        tokens_per_s=None if seconds is None else serving.batch * serving.prompt / seconds,
        bound=bound,  # type: ignore[arg-type]
    )


def _lost_to_experts(step: StepTrace) -> float:
    """Return the operations that a GPU could have done while it multiplies the few rows of each expert."""
    rows = max((use.met / use.experts for use in step.uses.values() if use.experts), default=EXPERT_ROWS)
    slower = (EXPERT_ROWS / max(rows, 1.0)) ** EXPERT_POWER if rows < EXPERT_ROWS else 1.0
    return 2 * step.macs.get("experts", 0) * (slower - 1)


def serving_parts(serving: Serving) -> tuple[ServingPart, ...]:
    """Return weights, streamed bytes and operations of a step by part, without empty parts."""
    nbytes, flops = serving.step_bytes(serving.context), serving.step_flops(serving.context)
    weights_bytes: dict[PartName, int] = dict.fromkeys(PARTS, 0)
    for tensor in serving.model.tensors:
        weights_bytes[serving.part(tensor)] += serving.tensor_bytes(tensor)
    parts = (ServingPart(name, weights_bytes[name], round(nbytes[name]), flops[name]) for name in PARTS)
    return tuple(part for part in parts if part.weights_bytes or part.bytes_per_step or part.flops_per_step)


def serving_curve(serving: Serving, speed: Speed) -> tuple[CurvePoint, ...]:
    """Return the cache and the speed at powers of two up to the context."""
    lengths = sorted({size for size in (1 << power for power in range(7, 40)) if size < serving.context})
    return tuple(
        CurvePoint(size, serving.state_bytes(size, serving.batch), decode_cost(serving, speed, size).tokens_per_s)
        for size in (*lengths, serving.context)
    )
