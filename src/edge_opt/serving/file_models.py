"""A language model from the header of its file: what each tensor is used for, the cache of each layer, the format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from edge_opt._support.extras import import_optional
from edge_opt.errors import InvalidInput, ModelNotFound
from edge_opt.records.serving import PartName, StoredType, WeightFileSummary
from edge_opt.serving.model_source import rope_scaling, text_config
from edge_opt.serving.token_trace import LayerState, StepTrace, TracedLanguageModel, WeightUse
from edge_opt.serving.weight_files import StoredTensor, WeightFile
from edge_opt.serving.weight_formats import (
    BLOCK_TYPES,
    BlockType,
    ServingRuntime,
    TensorRole,
    WeightFormat,
    WeightTensor,
)

# Every n-th layer sees the whole context and the others a window, where the file itself does not say which.
# Architectures that are not listed have a window in their file that llama.cpp does not use.
_FULL_EVERY = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "olmo2": 4, "llama4": 4,
    "afmoe": 4, "mimo2": 4,
}  # fmt: skip
_ENCODERS = ("bert", "t5encoder", "clip", "jina", "wavtokenizer")
_KIND = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<kind>.+?)(?:\.(?P<end>weight|bias|scale))?")
_MOST_LAYERS = 1_000
# Operators of a traced step for each weight that it reads: a Llama has 36 in a layer of nine weights.
_OPERATORS_PER_WEIGHT = 4
_ROUTED = re.compile(r"ffn_(gate|up|down|gate_up)_(ch)?exps")
_TABLES = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
_FLOAT_BYTES = 4


def gguf_model(file: WeightFile, context: int, prompt: int, batch: int) -> TracedLanguageModel:
    """Return what serving a GGUF file takes, computed from its header with llama.cpp's own layout of the cache."""
    header = _Header.of(file)
    tensors = tuple(_weight_tensor(tensor, header) for tensor in file.tensors)
    states = tuple(header.state(layer) for layer in range(header.layers))
    return TracedLanguageModel(
        name=file.name,
        tensors=tensors,
        is_tied=header.is_tied,
        states=states,
        decode=_step(header, tensors, batch, 1, context),
        prefill=_step(header, tensors, batch, prompt, prompt),
        buffer_bytes=0,
        is_latent=header.is_latent,
        has_delta_nets=header.architecture.startswith(("qwen3next", "qwen35")),
        max_context=header.number("context_length") or None,
        remarks=header.remarks,
    )


@dataclass(frozen=True, slots=True)
class _Header:
    """What the metadata of a GGUF file says of its architecture, and the tensors of each layer by kind."""

    architecture: str
    metadata: Mapping[str, Any]
    layers: int
    by_layer: Mapping[int, Mapping[str, tuple[int, ...]]]
    is_tied: bool

    @classmethod
    def of(cls, file: WeightFile) -> _Header:
        architecture = file.metadata["general.architecture"]
        layers = file.metadata.get(f"{architecture}.block_count")
        if architecture.endswith(_ENCODERS) or f"{architecture}.decoder_start_token_id" in file.metadata:
            raise InvalidInput(f"{file.path.name} is of type {architecture!r}, which is no decoder of text alone")
        if not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
            problem = f"{file.path.name} has {layers} layers by {architecture}.block_count"
            raise ModelNotFound(f"{problem}; it must be from 1 to {_MOST_LAYERS}")
        by_layer: dict[int, dict[str, tuple[int, ...]]] = {}
        for tensor in file.tensors:
            match = _KIND.fullmatch(tensor.name)
            if match and match["layer"] and match["end"] != "bias":
                by_layer.setdefault(int(match["layer"]), {})[match["kind"]] = tensor.shape
        is_tied = all(tensor.name != "output.weight" for tensor in file.tensors)
        return cls(architecture, file.metadata, layers, by_layer, is_tied)

    def number(self, key: str, layer: int | None = None) -> int | None:
        """Return a number of the architecture, such as `attention.head_count`; that of a layer where they differ."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            value = value[layer] if layer is not None and layer < len(value) else max(value, default=None)
        return int(value) if isinstance(value, (int, float)) and 0 <= value < 2**40 else None

    @property
    def decoded_layers(self) -> int:
        """Layers that write a token; those behind them predict further tokens and are held alone."""
        return self.layers - (self.number("nextn_predict_layers") or 0)

    @property
    def is_latent(self) -> bool:
        """Whether the cache holds MLA's latent: older files have no tensors for it, and llama.cpp expands theirs."""
        if self.number("attention.kv_lora_rank") is None:
            return False
        kinds = {kind for layer in self.by_layer.values() for kind in layer}
        return bool(kinds & {"attn_k_b", "attn_v_b"}) or self.number("attention.key_length_mla") is not None

    @property
    def window(self) -> int | None:
        return self.number("attention.sliding_window") or self.number("attention.chunk_size") or None

    def has_window(self, layer: int) -> bool:
        pattern = self.metadata.get(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return layer < len(pattern) and bool(pattern[layer])
        period = pattern if isinstance(pattern, int) and pattern > 0 else _FULL_EVERY.get(self.architecture)
        return period is not None and layer % period < period - 1

    def heads(self, layer: int) -> tuple[int, int, int, int]:
        """Return the query heads of a layer, its key heads, and the widths of a key and a value."""
        queries = self.number("attention.head_count", layer) or 1
        pairs = self.number("attention.head_count_kv", layer)
        pairs = queries if pairs is None else pairs
        head = (self.number("embedding_length") or 0) // queries
        key, value = self.number("attention.key_length"), self.number("attention.value_length")
        return queries, pairs, key or head, value or key or head

    def cache_width(self, layer: int) -> int:
        """Return the values that a position takes in the cache of a layer."""
        kinds = self.by_layer.get(layer, {})
        shared = self.number("attention.shared_kv_layers") or 0
        is_mixed = "attn_qkv" in kinds and not any(kind.startswith("ssm") for kind in kinds)
        if layer >= self.decoded_layers - shared or not (is_mixed or {"attn_k", "attn_kv_a_mqa"} & kinds.keys()):
            return 0
        if self.is_latent:
            return self._rank + (self.number("rope.dimension_count") or 0)
        if "attn_k" in kinds:
            return kinds["attn_k"][0] + kinds.get("attn_v", kinds["attn_k"])[0]
        _, pairs, key, value = self.heads(layer)
        return pairs * (key + value)

    def constant_width(self, layer: int) -> int:
        """Return the values of a layer's state that do not grow: those of a convolution and a recurrence."""
        kinds = self.by_layer.get(layer, {})
        if any(kind.startswith("ssm") for kind in kinds):
            inner, size = self.number("ssm.inner_size") or 0, self.number("ssm.state_size") or 0
            channels = inner + 2 * (self.number("ssm.group_count") or 0) * size
            return max((self.number("ssm.conv_kernel") or 1) - 1, 0) * channels + inner * size
        width = self.number("embedding_length") or 0
        if any(kind.startswith("shortconv") for kind in kinds):
            return width * ((self.number("shortconv.l_cache") or 1) - 1)
        if any(kind.startswith("time_mix") for kind in kinds):
            return width * ((self.number("wkv.head_size") or 64) + (self.number("token_shift_count") or 2))
        return 0

    def state(self, layer: int) -> LayerState:
        window = self.window if self.has_window(layer) else None
        return LayerState(per_position=self.cache_width(layer), constant=self.constant_width(layer), window=window)

    def score_width(self, layer: int) -> int:
        """Return the MACs of a token's scores and values for each position that it sees."""
        queries, _, key, value = self.heads(layer)
        width = self.cache_width(layer)
        shared = self.number("attention.shared_kv_layers") or 0
        if self.is_latent and width:
            return queries * (self._rank + width)
        return queries * (key + value) if width or layer >= self.decoded_layers - shared > 0 else 0

    @property
    def _rank(self) -> int:
        return self.number("attention.kv_lora_rank") or 0

    @property
    def remarks(self) -> tuple[str, ...]:
        remarks = ["every size is the file's own"]
        if self.window and not any(self.has_window(layer) for layer in range(self.layers)):
            remarks.append(
                f"llama.cpp caches every position of {self.architecture}, beyond its window of {self.window}"
            )
        if self._rank and not self.is_latent:
            remarks.append("the file is of before llama.cpp's MLA, so the cache holds expanded keys and values")
        unused = self.layers - self.decoded_layers
        if unused:
            remarks.append(f"{unused} layers that predict further tokens are held and not run")
        return tuple(remarks)


def _weight_tensor(tensor: StoredTensor, header: _Header) -> WeightTensor:
    match = _KIND.fullmatch(tensor.name)
    layer = int(match["layer"]) if match and match["layer"] else None
    role: TensorRole = "small" if len(tensor.shape) < 2 else "matrix"
    return WeightTensor(
        tensor.name, tensor.shape, role, layer, header.layers, stored_type=tensor.type, stored_bytes=tensor.nbytes
    )


def _use(tensor: WeightTensor, header: _Header, tokens: int) -> WeightUse | None:
    """Return how a step uses a tensor; None for those that writing text does not meet."""
    match = _KIND.fullmatch(tensor.name)
    kind = match["kind"] if match else tensor.name
    if tensor.layer is not None and tensor.layer >= header.decoded_layers:
        return None
    if kind in _TABLES and tensor.name.endswith(".weight"):
        is_head = kind == "token_embd" and header.is_tied
        return WeightUse("head" if is_head else "embedding", is_head, rows=tokens)
    if _ROUTED.match(kind) and len(tensor.shape) > 1:
        experts = tensor.shape[0]
        used = min(header.number("expert_used_count", tensor.layer) or experts, experts)
        return WeightUse("experts", False, experts=experts, met=used * tokens)
    return WeightUse(_part(kind), True)


def _part(kind: str) -> PartName:
    if "norm" in kind and not kind.startswith("ssm"):
        return "other"
    if kind == "output":
        return "head"
    if "exps" in kind or kind.startswith(("ffn_gate_inp", "exp_probs")):
        return "experts"
    if kind.startswith(("ffn", "channel_mix")):
        return "mlp"
    is_mixing = kind.startswith(("attn", "ssm", "shortconv", "time_mix", "indexer"))
    return "attention" if is_mixing else "other"


def _step(header: _Header, tensors: tuple[WeightTensor, ...], batch: int, length: int, context: int) -> StepTrace:
    """Return the step that reads `length` tokens of each sequence and sees `context` positions."""
    tokens = batch * length
    uses = {tensor.name: use for tensor in tensors if (use := _use(tensor, header, tokens)) is not None}
    macs: dict[PartName, int] = {}
    widest = 0
    for tensor in tensors:
        use = uses.get(tensor.name)
        if use is None or len(tensor.shape) < 2 or not (use.is_whole or use.experts) or "conv1d" in tensor.name:
            continue
        rows = batch if use.part == "head" else tokens  # the last position alone is of interest
        spent = prod(tensor.shape) * rows if not use.experts else prod(tensor.shape[1:]) * use.met
        macs[use.part] = macs.get(use.part, 0) + spent
        widest = max(widest, 0 if use.part == "head" else sum(tensor.shape[-2:]))
    states = [header.state(layer) for layer in range(header.decoded_layers)]
    seen = [context if state.window is None else min(context, state.window) for state in states]
    scores = tokens * sum(header.score_width(layer) * count for layer, count in enumerate(seen))
    macs["attention"] = macs.get("attention", 0) + scores
    kept = batch * sum(state.values(context, context) + state.constant for state in states) * _FLOAT_BYTES
    width = header.number("embedding_length") or 0
    return StepTrace(
        tokens=tokens,
        macs=macs,
        score_macs=scores,
        uses=uses,
        operators=_OPERATORS_PER_WEIGHT * sum(name.endswith("weight") for name in uses),
        live_bytes=kept + tokens * (2 * width + 2 * widest) * _FLOAT_BYTES,
        kept_bytes=kept,
        input_bytes=8 * tokens,
        unpriced=(),
        called=frozenset(),
    )


# Endings of the tensors that a quantized weight is stored in, in the formats of GPTQ, AWQ, MLX and compressed-tensors.
_PACKED = re.compile(
    r"\.?(qweight|qzeros|g_idx|scales|biases|weight_packed|weight_scale\w*|weight_zero_point|weight_shape|weight_g_idx"
    r"|input_scale\w*|input_global_scale|weight_global_scale|blocks|weight|absmax|quant_map|nested_\w+)(\.\w+)?$"
)
_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)$")
_EXPERT_NAMES = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
# Buffers that a file also holds, such as the bias of a router, are less.
_NOTICED_SHARE = 0.001
_OUTSIDE_TEXT = re.compile(r"(^|\.)(vision\w*|visual|audio\w*|mm_\w+|multi_modal_projector|mtp)\.")


def with_file_tensors(model: TracedLanguageModel, file: WeightFile) -> TracedLanguageModel:
    """Return a model that was traced from its configuration with the tensors that its files hold."""
    known = {_plain_name(tensor.name): tensor for tensor in model.tensors}
    groups: dict[str, list[StoredTensor]] = {}
    for item in file.tensors:
        groups.setdefault(_plain_name(item.name), []).append(item)
    tensors: list[WeightTensor] = []
    renamed: dict[str, str] = {}
    layers = max((tensor.layers for tensor in model.tensors), default=0)
    for name, stored in groups.items():
        parameter = known.get(name)
        largest, total = max(stored, key=lambda item: item.nbytes), sum(item.nbytes for item in stored)
        for item in stored:
            values = None if parameter is None else prod(parameter.shape) if item is largest else 0
            if (parameter is not None and name.endswith("experts.gate_up_proj")) or name.endswith("experts.down_proj"):
                values = None if parameter is None else round(prod(parameter.shape) * item.nbytes / max(total, 1))
            base = parameter or WeightTensor(item.name, item.shape, "matrix", None, layers)
            tensors.append(
                replace(base, name=item.name, stored_type=item.type, stored_bytes=item.nbytes, values=values)
            )
            if parameter is not None:
                renamed[item.name] = parameter.name
    if not renamed:
        problem = f"none of the {len(tensors)} tensors in {str(file.path)!r} is of the model in its config.json"
        raise ModelNotFound(f"{problem}; put the model's own config.json beside its files")
    unknown = [item for item in tensors if item.name not in renamed and not _OUTSIDE_TEXT.search(item.name)]
    remarks = [*model.remarks, "every size is the files' own"]
    size = sum(item.stored_bytes or 0 for item in unknown)
    if size > _NOTICED_SHARE * file.tensor_bytes:
        remarks.append(f"{len(unknown)} tensors of {size:,} bytes, {unknown[0].name} first, are taken to be read whole")
    whole = {item.name: WeightUse("other", True) for item in unknown}
    return replace(
        model,
        tensors=tuple(tensors),
        decode=replace(model.decode, uses=_renamed(model.decode.uses, renamed) | whole),
        prefill=replace(model.prefill, uses=_renamed(model.prefill.uses, renamed) | whole),
        remarks=tuple(remarks),
    )


def _renamed(uses: Mapping[str, WeightUse], names: Mapping[str, str]) -> dict[str, WeightUse]:
    """Return the uses by names of the file's tensors."""
    return {name: uses[parameter] for name, parameter in names.items() if parameter in uses}


def _plain_name(name: str) -> str:
    """Return a name without what differs between files and modules.

    >>> _plain_name("language_model.model.layers.0.block_sparse_moe.experts.7.w1.weight")
    'layers.0.mlp.experts.gate_up_proj'
    """
    name = re.sub(r"^(language_model|text_model|transformer|model|backbone)\.", "", name)
    name = re.sub(r"^(language_model|text_model|transformer|model|backbone)\.", "", name)
    name = _PACKED.sub("", name.removesuffix(".base_layer"))
    name = re.sub(r"(gate_up_proj|down_proj)_(blocks|scales)$", r"\1", name)
    name = name.replace(".block_sparse_moe.", ".mlp.").replace(".language_model.", ".")
    match = _EXPERT.search(name)
    return f"{name[: match.start()]}.experts.{_EXPERT_NAMES.get(match[1], 'down_proj')}" if match else name


_PLAIN_TYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}


def file_format(file: WeightFile, config: Any = None) -> tuple[WeightFormat, ServingRuntime]:
    """Return the format of a file as its header names it, and the program that runs it."""
    totals = stored_types(file.tensors)
    most = max(totals, key=lambda item: item.stored_bytes).name if totals else "F16"
    float32 = BLOCK_TYPES["F32"]
    if file.kind == "gguf":
        gguf = import_optional("gguf", "GGUF files need", "llm")
        kind = BLOCK_TYPES.get(most) or BlockType(most, *gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[most]])
        number = file.metadata.get("general.file_type")
        names = {int(item): item.name for item in gguf.LlamaFileType}
        name = names.get(number, most) if isinstance(number, int) else most
        name = name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
        name = {"f16": "fp16", "f32": "fp32"}.get(name, name)
        return WeightFormat(name, ("llama.cpp",), kind, kind, kind, float32), "llama.cpp"
    quantization = getattr(config, "quantization_config", None) or getattr(config, "quantization", None) or {}
    settings = quantization if isinstance(quantization, Mapping) else vars(quantization)
    bits = settings.get("bits") or settings.get("w_bit")
    method = settings.get("quant_method") or ("mlx" if settings else "")
    runtime: ServingRuntime = "mlx" if method == "mlx" else "torch"
    name = f"{method}-{bits}bit" if method and bits else str(method or _PLAIN_TYPES.get(most, most.lower()))
    width = float(bits) if isinstance(bits, (int, float)) else 4.0 if "fp4" in name else 8.0 if "8" in name else 16.0
    base = BlockType(name, 1, 4.0 if name == "fp32" else width / 8)
    computes_in = {"fp32": "float32", "fp16": "float16"}.get(name, "bfloat16")
    others: tuple[ServingRuntime, ...] = ("vllm", "mlx") if runtime == "torch" else ("torch",)
    runtimes: tuple[ServingRuntime, ...] = (runtime, *others)
    return WeightFormat(name, runtimes, base, base, base, base, computes_in=computes_in), runtime  # type: ignore[arg-type]


def stored_types(tensors: Iterable[StoredTensor]) -> tuple[StoredType, ...]:
    """Return the bytes of each type, the most first."""
    counts: dict[str, list[int]] = {}
    for tensor in tensors:
        counts.setdefault(tensor.type, []).append(tensor.nbytes)
    types = (StoredType(name, len(sizes), sum(sizes)) for name, sizes in counts.items())
    return tuple(sorted(types, key=lambda item: -item.stored_bytes))


def file_summary(file: WeightFile, config: Any = None) -> WeightFileSummary:
    """Return what a report says of the file."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture") or getattr(config, "model_type", "")
    config = config and text_config(config)
    vocabularies = (file.path / name for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    vocabulary = next((path for path in vocabularies if file.kind == "safetensors" and path.is_file()), None)

    def value(key: str, *fields: str) -> Any:
        known = metadata.get(f"{architecture}.{key}")
        known = max(known, default=None) if isinstance(known, list) else known
        return next((item for item in (known, *(getattr(config, name, None) for name in fields)) if item), None)

    parameters = getattr(config, "rope_parameters", None) or {}  # of Gemma 3 by type of layer
    rope = value("rope.freq_base", "rope_theta") or parameters.get("full_attention", parameters).get("rope_theta")
    scaling = metadata.get(f"{architecture}.rope.scaling.type") or (config and rope_scaling(config))
    experts = value("expert_count", "num_experts", "num_local_experts", "n_routed_experts")
    used = value("expert_used_count", "num_experts_per_tok", "num_experts_per_token")
    window = value("attention.sliding_window", "sliding_window")
    return WeightFileSummary(
        path=file.path.name,
        kind=file.kind,
        parts=file.parts,
        disk_bytes=file.disk_bytes,
        tensor_bytes=file.tensor_bytes,
        tensors=len(file.tensors),
        types=stored_types(file.tensors),
        architecture=str(architecture),
        experts=experts if isinstance(experts, int) else None,
        experts_per_token=used if isinstance(used, int) else None,
        window=window if isinstance(window, int) else None,
        rope_base=float(rope) if isinstance(rope, (int, float)) else None,
        rope_scaling=str(scaling or ""),
        tokens=file.tokens or (value("vocab_size", "vocab_size") or None),
        tokenizer_bytes=file.tokenizer_bytes if vocabulary is None else vocabulary.stat().st_size,
    )
