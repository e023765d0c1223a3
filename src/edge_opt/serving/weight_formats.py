"""Weight formats as data: how many bits a weight takes, scales included, and which tensors stay wider."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Literal

from edge_opt.errors import InvalidInput
from edge_opt.records.fields import field, record

ServingRuntime = Literal["llama.cpp", "torch", "mlx", "vllm"]
RUNTIMES: tuple[ServingRuntime, ...] = ("llama.cpp", "torch", "mlx", "vllm")
# The role of a tensor in a language model; a mix stores some roles in another type.
TensorRole = Literal[
    "embedding", "head", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_down", "ffn_up", "router",
    "matrix", "small",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one tensor is stored: `block` weights of a row share one block of `block_bytes`, its scales among them."""

    name: str
    block: int
    block_bytes: float

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return self.block_bytes * 8 / self.block


# Weights and bytes of the structs in ggml-common.h (ggml-org/llama.cpp): for Q4_0 a half and 16 bytes per 32 weights.
_BLOCKS: dict[str, tuple[int, float]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
BLOCK_TYPES: Mapping[str, BlockType] = {name: BlockType(name, *size) for name, size in _BLOCKS.items()}
# If a row is not a multiple of the block, llama.cpp takes the next type with blocks of 32; after that, F16.
_FALLBACK = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip

# When a rule of a mix holds; `layer` of `layers`, `sharing` query heads per key head.
Condition = Literal["always", "more_bits", "middle", "first_8th", "first_16th", "first_2", "first_4", "sharing_4"]
_Rule = tuple[Condition, str]


@record
class WeightFormat:
    """A format that a user names, such as q4_k_m."""

    name: str = field("As users write it, in small letters.")
    runtimes: tuple[ServingRuntime, ...] = field("Programs that can run it; the first is the default.")
    base: BlockType = field("The type of every matrix that no rule names.")
    embedding: BlockType = field("The type of the embedding table where the head has a table of its own.")
    head: BlockType = field("The type of the output head, and of the one table of both where they are tied.")
    small: BlockType = field("The type of norms, biases, router and convolution weights.")
    rules: Mapping[str, tuple[_Rule, ...]] = field("Types by role; the first rule that holds counts.", factory=dict)
    computes_in: Literal["float32", "float16", "bfloat16"] = field("Type of activations.", default="float32")

    @property
    def bits(self) -> float:
        """Bits per weight of most matrices, scales included."""
        return self.base.bits

    @property
    def is_quantized(self) -> bool:
        return self.base.bits < 16


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One parameter: what it is and where it stands. `layer` is None outside the layers.

    A tensor of a file has its type and bytes from there. `values` are its weights where packing hides their number.
    """

    name: str
    shape: tuple[int, ...]
    role: TensorRole
    layer: int | None
    layers: int
    sharing: int = 1
    experts: int = 1
    stored_type: str = ""
    stored_bytes: int | None = None
    values: int | None = None

    @property
    def params(self) -> int:
        return prod(self.shape) if self.values is None else self.values


def _gguf(
    name: str, base: str, head: str = "Q6_K", embedding: str | None = None, **rules: tuple[_Rule, ...]
) -> WeightFormat:
    inner, outer, last = (BLOCK_TYPES[kind] for kind in (base, embedding or base, head))
    return WeightFormat(name, ("llama.cpp",), inner, outer, last, BLOCK_TYPES["F32"], rules)


def _plain(name: str, type_name: str, computes_in: Literal["float32", "float16", "bfloat16"]) -> WeightFormat:
    kind = BLOCK_TYPES[type_name]
    return WeightFormat(name, ("torch", "llama.cpp", "mlx", "vllm"), kind, kind, kind, kind, computes_in=computes_in)


def _grouped(name: str, bits: int, group: int, runtime: ServingRuntime, beside: int, is_whole: bool) -> WeightFormat:
    """Return a format whose groups share `beside` bits of scale and zero; `is_whole`: embedding and head included."""
    base = BlockType(name, group, (bits * group + beside) / 8)
    half = BLOCK_TYPES["F16"]
    outer = base if is_whole else half
    runtimes: tuple[ServingRuntime, ...] = ("torch", "vllm") if runtime == "torch" else (runtime,)
    return WeightFormat(name, runtimes, base, outer, outer, half, computes_in="float16")


_MORE: tuple[_Rule, ...] = (("more_bits", "Q6_K"),)
_LOW_IQ: dict[str, tuple[_Rule, ...]] = {
    "attn_v": (("sharing_4", "Q4_K"), ("always", "Q2_K")),
    "ffn_down": (("first_8th", "Q2_K"),),
}
_IQ2_S: dict[str, tuple[_Rule, ...]] = {
    "attn_v": (("sharing_4", "Q4_K"), ("always", "IQ3_S")),
    "ffn_down": (("first_8th", "IQ3_S"),),
    "attn_output": (("always", "IQ3_S"),),
}
# The mixes of llama-quantize: src/llama-quant.cpp of ggml-org/llama.cpp, read in 2026-11. An importance matrix changes
# IQ3_XXS and IQ4; published files of these have one.
_ALL = (
    _plain("fp32", "F32", "float32"),
    _plain("fp16", "F16", "float16"),
    _plain("bf16", "BF16", "bfloat16"),
    # fp8: a scale per row or tensor, in 32 bits.
    _grouped("fp8", 8, 4096, "torch", 32, is_whole=False),
    # int8: a half of scale per row, taken as one in 4096. int4: a half of scale and a zero of 4 bits per group.
    _grouped("int8", 8, 4096, "torch", 16, is_whole=False),
    *(_grouped(f"int4-g{group}", 4, group, "torch", 20, is_whole=False) for group in (32, 64, 128, 256)),
    # MLX: a half of scale and a half of bias per group of 64, for the embedding as well.
    _grouped("mlx-4bit", 4, 64, "mlx", 32, is_whole=True),
    _grouped("mlx-8bit", 8, 64, "mlx", 32, is_whole=True),
    _gguf("q8_0", "Q8_0", head="Q8_0"),
    _gguf("q6_k", "Q6_K"),
    _gguf("q5_0", "Q5_0"),
    _gguf("q5_1", "Q5_1"),
    _gguf("q5_k_s", "Q5_K"),
    _gguf("q5_k_m", "Q5_K", attn_v=_MORE, ffn_down=_MORE, attn_qkv=(("always", "Q6_K"),)),
    _gguf("q4_0", "Q4_0"),
    _gguf("q4_1", "Q4_1"),
    _gguf("q4_k_s", "Q4_K", attn_v=(("first_4", "Q5_K"),), ffn_down=(("first_8th", "Q5_K"),)),
    _gguf("q4_k_m", "Q4_K", attn_v=_MORE, ffn_down=_MORE, attn_qkv=(("always", "Q5_K"),)),
    _gguf("q3_k_s", "Q3_K"),
    _gguf(
        "q3_k_m", "Q3_K", attn_v=(("first_2", "Q5_K"), ("always", "Q4_K")), attn_output=(("always", "Q4_K"),),
        ffn_down=(("first_16th", "Q5_K"), ("always", "Q4_K")), attn_qkv=(("always", "Q4_K"),),
    ),
    _gguf(
        "q3_k_l", "Q3_K", attn_v=(("always", "Q5_K"),), attn_output=(("always", "Q5_K"),),
        ffn_down=(("always", "Q5_K"),), attn_qkv=(("always", "Q4_K"),),
    ),
    _gguf(
        "q2_k", "Q2_K", attn_v=(("sharing_4", "Q4_K"), ("always", "Q3_K")), attn_output=(("always", "Q3_K"),),
        ffn_down=(("always", "Q3_K"),),
    ),
    _gguf("q2_k_s", "Q2_K", attn_v=(("sharing_4", "Q4_K"),), ffn_down=(("first_8th", "Q4_K"),)),
    _gguf("iq4_nl", "IQ4_NL", attn_v=(("sharing_4", "Q5_K"),)),
    _gguf("iq4_xs", "IQ4_XS", attn_v=(("sharing_4", "Q5_K"),)),
    _gguf("iq3_s", "IQ3_S", attn_v=(("sharing_4", "Q4_K"),)),
    _gguf(
        "iq3_xs", "IQ3_S", attn_v=(("sharing_4", "Q4_K"),), attn_q=(("always", "IQ3_XXS"),),
        attn_k=(("always", "IQ3_XXS"),), ffn_up=(("middle", "IQ3_XXS"),),
    ),
    _gguf(
        "iq3_m", "IQ3_S", attn_v=(("always", "Q4_K"),), attn_output=(("always", "Q4_K"),),
        ffn_down=(("first_8th", "Q4_K"),), attn_qkv=(("always", "Q4_K"),),
    ),
    _gguf(
        "iq3_xxs", "IQ3_XXS", head="Q5_K", embedding="IQ3_S", attn_v=(("sharing_4", "Q4_K"),),
        attn_q=(("always", "IQ2_S"),), attn_k=(("always", "IQ2_S"),), attn_output=(("always", "IQ3_S"),),
    ),
    _gguf("iq2_m", "IQ2_S", head="Q5_K", embedding="IQ3_S", **_IQ2_S),
    _gguf("iq2_s", "IQ2_XS", head="Q5_K", embedding="IQ3_S", **_IQ2_S),
    _gguf("iq2_xs", "IQ2_XS", head="Q5_K", embedding="Q2_K", **_LOW_IQ),
    _gguf("iq2_xxs", "IQ2_XXS", head="Q5_K", embedding="Q2_K", **_LOW_IQ),
    _gguf("iq1_m", "IQ1_M", head="Q5_K", embedding="Q2_K", attn_output=(("always", "IQ2_XXS"),), **_LOW_IQ),
    _gguf("iq1_s", "IQ1_S", head="Q5_K", embedding="Q2_K", attn_output=(("always", "IQ2_XXS"),), **_LOW_IQ),
    # Experts in MXFP4, the rest in Q8_0.
    _gguf("mxfp4", "Q8_0", head="Q8_0"),
)  # fmt: skip
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {item.name: item for item in _ALL}
_ALIASES = {
    "int4": "int4-g128", "f32": "fp32", "f16": "fp16", "float32": "fp32", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "q4": "q4_0", "q8": "q8_0", "q6": "q6_k", "4bit": "mlx-4bit", "8bit": "mlx-8bit",
    "q4_0_4_4": "q4_0", "q4_0_4_8": "q4_0", "q4_0_8_8": "q4_0", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "q3_k": "q3_k_m",
    "mxfp4_moe": "mxfp4",
}  # fmt: skip

# Formats of the key-value cache: bytes per value, scales included.
CACHE_FORMATS: Mapping[str, float] = {
    "fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip


def weight_format(name: str, runtime: str | None = None) -> tuple[WeightFormat, ServingRuntime]:
    """Return the format of that name, and the runtime that runs it; refuse a runtime that does not have the format.

    `2.7bpw` is a GGUF file of somebody's own mix, by its bits per weight.

    >>> form, runtime = weight_format("Q4_K_M")
    >>> form.name, form.bits, runtime
    ('q4_k_m', 4.5, 'llama.cpp')
    """
    plain = name.strip().lower() if isinstance(name, str) else repr(name)
    form = WEIGHT_FORMATS.get(_ALIASES.get(plain, plain)) or _by_bits(plain)
    if form is None:
        close = get_close_matches(plain, [*WEIGHT_FORMATS, *_ALIASES], n=3)
        hint = f"closest: {', '.join(close)}" if close else f"known: {', '.join(WEIGHT_FORMATS)}"
        raise InvalidInput(f"no weight format named {name!r}; {hint}")
    if runtime is None:
        return form, form.runtimes[0]
    if runtime not in RUNTIMES:
        raise InvalidInput(f"runtime is {runtime!r}; it must be one of {', '.join(RUNTIMES)}")
    if runtime not in form.runtimes:
        has = ", ".join(item.name for item in _ALL if runtime in item.runtimes)
        raise InvalidInput(f"{runtime} has no weights in {form.name}; it has {has}")
    return form, next(item for item in RUNTIMES if item == runtime)


def _by_bits(name: str) -> WeightFormat | None:
    """Return the format of a GGUF file with a mix of its own, such as 2.7bpw: bits per weight of every matrix."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)bpw", name)
    if match is None or not 1 <= float(match[1]) <= 32:
        return None
    kind = BlockType(name, 1, float(match[1]) / 8)
    return WeightFormat(name, ("llama.cpp",), kind, kind, kind, BLOCK_TYPES["F32"])


def cache_bytes_per_value(name: str) -> float:
    """Return the bytes of one value of the key-value cache in that format, scales included.

    >>> cache_bytes_per_value("fp16"), cache_bytes_per_value("q8_0")
    (2.0, 1.0625)
    """
    if name not in CACHE_FORMATS:
        raise InvalidInput(f"no format {name!r} for the key-value cache; it must be one of {', '.join(CACHE_FORMATS)}")
    return CACHE_FORMATS[name]


def tensor_bytes(tensor: WeightTensor, form: WeightFormat, is_tied: bool = False) -> int:
    """Return the bytes of a parameter in a format. `is_tied`: the embedding table is the head as well.

    >>> table = WeightTensor("embed_tokens.weight", (1000, 256), "embedding", None, 2)
    >>> tensor_bytes(table, WEIGHT_FORMATS["q4_k_m"])  # 1000 rows of one block of 144 bytes
    144000
    """
    if tensor.stored_bytes is not None:
        return tensor.stored_bytes
    kind = tensor_type(tensor, form, is_tied)
    row = tensor.shape[-1] if tensor.shape else 1
    rows = prod(tensor.shape) // row if row else 0
    return round(rows * row / kind.block * kind.block_bytes)


def tensor_type(tensor: WeightTensor, form: WeightFormat, is_tied: bool = False) -> BlockType:
    """Return the type of a parameter in a format: by its role, its layer, and whether its rows fill whole blocks."""
    if tensor.stored_bytes is not None:
        return BLOCK_TYPES.get(tensor.stored_type) or BlockType(tensor.stored_type, 1, form.bits / 8)
    if tensor.role in ("small", "router") or len(tensor.shape) < 2:
        return form.small
    if tensor.role == "head" or (tensor.role == "embedding" and is_tied):
        kind = form.head
        if kind.name in _FALLBACK and tensor.shape[-1] % form.base.block:
            return BLOCK_TYPES["Q8_0"]
    elif tensor.role == "embedding":
        kind = form.embedding
    elif form.name == "mxfp4" and len(tensor.shape) == 3:
        kind = BLOCK_TYPES["MXFP4"]
    else:
        kind = form.base
        for condition, name in form.rules.get(tensor.role, ()):
            if _holds(condition, tensor):
                kind = BLOCK_TYPES[name]
                break
        if form.small.name == "F32" and form.is_quantized:
            kind = _exceptional(kind, tensor, form)
    return _fitting(kind, tensor.shape[-1])


def _exceptional(kind: BlockType, tensor: WeightTensor, form: WeightFormat) -> BlockType:
    """Return the type after llama.cpp's exceptions for models of 80 layers (70B), and of eight experts (Mixtral).

    Their keys and values are small beside the rest, so that they are stored wider.
    """
    role = tensor.role
    if role == "attn_v" and tensor.layers == 80 and kind.name in ("Q3_K", "Q4_K"):
        return BLOCK_TYPES["Q5_K"]
    if tensor.experts != 8:
        return kind
    if role in ("attn_v", "attn_k"):
        return BLOCK_TYPES["Q4_K" if form.name.startswith(("iq1", "iq2")) else "Q8_0"]
    if role == "attn_output":
        is_wider = form.bits < 4.6 and form.name not in ("q2_k_s", "q3_k_l", "q4_0")
        return BLOCK_TYPES["Q5_K"] if is_wider else form.base
    is_wider = form.name == "iq3_m" and role == "ffn_down" and _holds("more_bits", tensor)
    return BLOCK_TYPES["Q4_K"] if is_wider else kind


def _fitting(kind: BlockType, row: int) -> BlockType:
    if row % kind.block == 0 or kind.name not in BLOCK_TYPES:
        return kind
    other = BLOCK_TYPES[_FALLBACK.get(kind.name, "F16")]
    return other if row % other.block == 0 else BLOCK_TYPES["F16"]


def _holds(condition: Condition, tensor: WeightTensor) -> bool:
    layer, layers = tensor.layer or 0, max(tensor.layers, 1)
    if condition == "more_bits":
        return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if condition == "middle":
        return layers // 8 <= layer < 7 * layers // 8
    bounds = {"first_8th": layers // 8, "first_16th": layers // 16, "first_2": 2, "first_4": 4}
    if condition in bounds:
        return layer < bounds[condition]
    return tensor.sharing >= 4 if condition == "sharing_4" else condition == "always"


# By the last parts of a parameter's path, as Hugging Face models and their kin name them; the first that fits counts.
_ROLES: tuple[tuple[re.Pattern[str], TensorRole], ...] = tuple(
    (re.compile(pattern), role)  # type: ignore[misc]
    for pattern, role in (
        (r"(^|\.)(lm_head|embed_out|output_projection)\.weight$", "head"),
        (r"(norm|ln_?\w*|layernorm)\.weight$", "small"),
        (r"(wpe|embed_positions|position_embeddings|relative_attention_bias)\.weight$", "small"),
        (r"(embed\w*|wte|word_embeddings|shared|tok_embeddings)\.weight$", "embedding"),
        (r"(conv1d|conv)\.weight$|(A_log|\.D|dt_bias)$", "small"),
        (r"(gate|router|shared_expert_gate|router\.\w+)\.weight$", "router"),
        (r"(qkv_proj|Wqkv|query_key_value|c_attn|qkv)\.weight$", "attn_qkv"),
        (r"(v_proj|kv_b_proj|wv)\.weight$|\.v\.weight$", "attn_v"),
        (r"(k_proj|wk)\.weight$|\.k\.weight$", "attn_k"),
        (r"(q_proj|q_b_proj|wq)\.weight$|\.q\.weight$", "attn_q"),
        (r"(down_proj|w2|fc2|fc_out|dense_4h_to_h)(\.weight)?$|mlp\.c_proj\.weight$", "ffn_down"),
        (r"(gate_up_proj|gate_proj|up_proj|w1|w3|fc1|fc_in|dense_h_to_4h|c_fc)(\.weight)?$", "ffn_up"),
        (r"(o_proj|out_proj|c_proj|dense|wo)\.weight$|\.o\.weight$", "attn_output"),
    )
)  # fmt: skip
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")


def described(
    parameters: Iterable[tuple[str, tuple[int, ...]]], sharing: int = 1, experts: int = 1
) -> tuple[WeightTensor, ...]:
    """Return parameters by name and shape, with the role that their names tell.

    >>> described([("model.layers.1.mlp.down_proj.weight", (64, 256))])[0].role
    'ffn_down'
    """
    listed = [(name, shape, _LAYER.search(name)) for name, shape in parameters]
    layers = max((int(layer[1]) for _, _, layer in listed if layer), default=-1) + 1
    return tuple(
        WeightTensor(name, shape, _role(name, shape), int(layer[1]) if layer else None, layers, sharing, experts)
        for name, shape, layer in listed
    )


def _role(name: str, shape: tuple[int, ...]) -> TensorRole:
    if len(shape) < 2 or name.endswith("bias"):
        return "small"
    return next((role for pattern, role in _ROLES if pattern.search(name)), "matrix")
