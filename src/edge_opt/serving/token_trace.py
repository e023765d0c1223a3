"""Steps of a language model, traced on meta tensors: the weights they read, their MACs, and the cache."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt._support.progress import quiet
from edge_opt.cost.rules import price
from edge_opt.errors import InvalidInput, TraceFailed
from edge_opt.records.costs import OpCall, OpSignature, Trace
from edge_opt.records.serving import PartName
from edge_opt.serving.model_source import LanguageModel, text_config
from edge_opt.serving.weight_formats import WeightTensor, described
from edge_opt.trace import InputSpec, trace
from edge_opt.trace.inputs import copied_with

_INNER = "model."  # the attribute of the model in the wrapper below
_PRODUCTS = ("matmul", "attention", "conv")


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer, in values of one sequence.

    `per_position` grows with the context up to `window`, `per_prompt` with the prompt that an encoder read, and
    `constant` does not grow: the state of a convolution or a recurrence.
    """

    per_position: int = 0
    per_prompt: int = 0
    constant: int = 0
    window: int | None = None

    def values(self, context: int, prompt: int) -> int:
        """Return the values that grow, at a length of context."""
        positions = context if self.window is None else min(context, self.window)
        return self.per_position * positions + self.per_prompt * prompt


@dataclass(frozen=True, slots=True)
class WeightUse:
    """How a step reads a parameter: as a whole, some `rows` of it as a table, or the matrices of some `experts`.

    `met` are pairs of a token and an expert. A table that is embedding and head has rows and is read whole.
    """

    part: PartName
    is_whole: bool
    rows: int = 0
    experts: int = 0
    met: int = 0


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One call of the model.

    `macs` are of products and attention, by part; `live_bytes` is the most that tensors held at once, the cache among
    them, weights and inputs apart; `kept_bytes` is what the trace of a prompt itself has in its cache.
    """

    tokens: int
    macs: Mapping[PartName, int]
    score_macs: int
    uses: Mapping[str, WeightUse]
    operators: int
    live_bytes: int
    kept_bytes: int
    input_bytes: int
    unpriced: tuple[str, ...]
    called: frozenset[str]  # paths of modules


@dataclass(frozen=True, slots=True)
class TracedLanguageModel:
    """A model with everything that is asked of it, whatever the format and the target."""

    name: str
    tensors: tuple[WeightTensor, ...]
    is_tied: bool
    states: tuple[LayerState, ...]
    decode: StepTrace
    prefill: StepTrace
    buffer_bytes: int
    is_latent: bool
    has_delta_nets: bool
    max_context: int | None
    remarks: tuple[str, ...]


def traced_model(model: LanguageModel, context: int, prompt: int, batch: int, absorbs_mla: bool) -> TracedLanguageModel:
    """Trace a decoding step at full context, and the prompt.

    `absorbs_mla`: the runtime multiplies a compressed cache (MLA) as it is, instead of expanding it at each step.
    """
    with quiet():
        steps = (_HubSteps if model.inputs is None else _OwnSteps)(model, batch, absorbs_mla)
        decode, prefill = steps.decode(context, prompt), steps.prefill(prompt)
    parameters = dict(model.module.named_parameters())
    remarks = steps.remarks
    if model.sees_more_than_text:
        whole = sum(value.numel() for value in parameters.values())
        parameters = {
            name: value
            for name, value in parameters.items()
            if any(name.rpartition(".")[0] in step.called or name in step.uses for step in (decode, prefill))
        }
        unmet = whole - sum(value.numel() for value in parameters.values())
        remarks += (f"the text part alone: {unmet:,} parameters that read pictures or sound are not in it",)
    text = text_config(model.config)
    heads = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    sharing = heads[0] // heads[1] if isinstance(heads[0], int) and isinstance(heads[1], int) and heads[1] else 1
    experts = max((use.experts for use in decode.uses.values()), default=0) or 1
    head = _head_path(model.module)
    return TracedLanguageModel(
        name=model.name,
        tensors=described(((name, tuple(value.shape)) for name, value in parameters.items()), sharing, experts),
        is_tied=bool(head) and f"{head}.weight" not in parameters,
        states=steps.states,
        decode=decode,
        prefill=prefill,
        buffer_bytes=sum(value.numel() * value.itemsize for value in model.module.buffers()),
        is_latent=any(_is_latent(module) for module in model.module.modules()),
        has_delta_nets=any("DeltaNet" in type(module).__name__ for module in model.module.modules()),
        max_context=model.max_context,
        remarks=remarks,
    )


# Checkpoints of the Hub that hold the head beside the table that it shares: Qwen3-0.6B has 751 M parameters there,
# Qwen3-1.7B 2.03 B. GGUF files made from them hold both. So do Gemma 3's files for MLX, of mlx-community in 2025:
# mlx_lm gave the head weights of its own. Four sizes measured on an M5 hold 0.17 to 0.8e9 bytes more.
_STORED_HEADS = {
    "llama.cpp": (("qwen3", 1024), ("qwen3", 2048)),
    "mlx": (("gemma3_text", 1152), ("gemma3_text", 2560), ("gemma3_text", 3840), ("gemma3_text", 5376)),
}


def with_stored_head(model: TracedLanguageModel, config: Any, runtime: str) -> TracedLanguageModel:
    """Return the model as a runtime's file holds it: with a head of its own where published files have one."""
    text = text_config(config) if config is not None else None
    table = next((tensor for tensor in model.tensors if tensor.role == "embedding"), None)
    key = getattr(text, "model_type", ""), getattr(text, "hidden_size", 0)
    if not model.is_tied or table is None or key not in _STORED_HEADS.get(runtime, ()):
        return model
    head = replace(table, name="lm_head.weight", role="head")

    def untied(step: StepTrace) -> StepTrace:
        rows = step.uses[table.name].rows
        uses = {table.name: WeightUse("embedding", False, rows), head.name: WeightUse("head", True)}
        return replace(step, uses={**step.uses, **uses})

    tensors = (*model.tensors, head)
    return replace(model, tensors=tensors, is_tied=False, decode=untied(model.decode), prefill=untied(model.prefill))


_CACHES = ("past_key_values", "cache_params", "state")


def run_step(module: nn.Module, cache: Any, **arguments: Any) -> Any:
    """Call a transformers model on its cache or state, None at first; as in generate(), the head sees one position."""
    parameters = inspect.signature(type(module).forward).parameters
    if cache is not None:
        arguments[next((name for name in reversed(_CACHES) if name in parameters), _CACHES[0])] = cache
    if "logits_to_keep" in parameters:
        arguments["logits_to_keep"] = 1
    return module(use_cache=True, **arguments)


def output_cache(out: Any) -> Any:
    """Return the cache or state among the results of a model; None where it returns none."""
    return next((cache for name in _CACHES if (cache := getattr(out, name, None)) is not None), None)


def filled_cache(template: Any, past: int, prompt: int | None = None) -> Any:
    """Return a cache like the template that holds `past` positions; for an encoder, those of the `prompt`.

    The tensors are made without values. To fill a real cache, the model would have to read a prompt of that length.

    A layer with a window keeps one position less than the window, as transformers does: the next token is the last.
    """
    if _is_fixed(template):
        return copied_with(_empty, template)
    cache = copy.copy(template)
    if hasattr(template, "cross_attention_cache"):
        cache.self_attention_cache = filled_cache(template.self_attention_cache, past)
        cache.cross_attention_cache = filled_cache(template.cross_attention_cache, prompt or past)
        cache.is_updated = dict.fromkeys(template.is_updated, True)
        return cache
    cache.layers = [_filled_layer(layer, past) for layer in template.layers]
    return cache


def _is_fixed(cache: Any) -> bool:
    """Return whether a cache is a state that does not grow, such as tensors in lists or attributes."""
    return not hasattr(cache, "layers") and not hasattr(cache, "cross_attention_cache")


def _filled_layer(template: Any, past: int) -> Any:
    layer = copy.copy(template)
    window = getattr(layer, "sliding_window", None)
    positions = past if window is None else min(past, window - 1)
    for name, value in vars(template).items():
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            setattr(layer, name, _empty(value, (*value.shape[:-2], positions, value.shape[-1])))
        elif isinstance(value, dict):
            tensors = {key: _empty(item) for key, item in value.items() if isinstance(item, torch.Tensor)}
            setattr(layer, name, value | tensors)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = past
    return layer


def _empty(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    return torch.empty(tensor.shape if shape is None else shape, dtype=tensor.dtype, device=tensor.device)


def _layer_state(layer: Any) -> LayerState:
    """Return what a layer of a transformers cache holds, per sequence."""
    growing = constant = 0
    for value in vars(layer).values():
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.numel():
            growing += prod(value.shape[1:-2]) * value.shape[-1]
        elif isinstance(value, dict):
            tensors = [item for item in value.values() if isinstance(item, torch.Tensor)]
            constant += sum(item.numel() // max(item.shape[0], 1) for item in tensors if item.dim() > 1)
    return LayerState(per_position=growing, constant=constant, window=getattr(layer, "sliding_window", None))


def _state_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a state that does not grow, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = vars(value) if hasattr(value, "__dict__") and not isinstance(value, Mapping) else value
    if isinstance(parts, Mapping):
        parts = list(parts.values())
    return [tensor for part in parts for tensor in _state_tensors(part)] if isinstance(parts, (list, tuple)) else []


class _Wrapper(nn.Module):
    """A way to call the model, as a module that can be traced."""

    def __init__(self, model: nn.Module, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.call(input_ids)


class _HubSteps:
    """The steps of a transformers model. A short prompt first: the cache it fills is the pattern of all others."""

    PROBE = 4

    def __init__(self, model: LanguageModel, batch: int, absorbs_mla: bool) -> None:
        self.model, self.batch, self.absorbs_mla = model, batch, absorbs_mla
        self.module, self.is_pair = model.module, model.is_encoder_decoder
        self.probe, self.template = self._read(self.PROBE)
        self.states = self._states()
        self.remarks: tuple[str, ...] = ()

    def _trace(self, call: Callable[[torch.Tensor], Any], tokens: int, results: list[Any] | None = None) -> Trace:
        return trace(_Wrapper(self.module, call), [InputSpec((self.batch, tokens), "int64")], results=results)

    def _read(self, tokens: int) -> tuple[Trace, Any]:
        """Trace the reading of a prompt; return the cache that it fills as well."""

        def read(input_ids: torch.Tensor) -> Any:
            pair = {"decoder_input_ids": input_ids[:, :1]} if self.is_pair else {}
            out = run_step(self.module, None, input_ids=input_ids, **pair)
            return out.logits, output_cache(out)

        results: list[Any] = []
        recorded = self._trace(read, tokens, results)
        _, cache = results[-1]
        if _is_fixed(cache) and not _state_tensors(cache):
            kind = getattr(self.model.config, "model_type", type(self.module).__name__)
            problem = f"a model of type {kind!r} hands out nothing of what it remembers from token to token"
            raise InvalidInput(f"{problem}; pass the module with inputs=, its state among them")
        return recorded, cache

    def _states(self) -> tuple[LayerState, ...]:
        if _is_fixed(self.template):
            return (LayerState(constant=sum(item.numel() for item in _state_tensors(self.template)) // self.batch),)
        if self.is_pair:
            own = tuple(map(_layer_state, self.template.self_attention_cache.layers))
            across = map(_layer_state, self.template.cross_attention_cache.layers)
            return own + tuple(LayerState(per_prompt=state.per_position) for state in across)
        return tuple(map(_layer_state, self.template.layers))

    def decode(self, context: int, prompt: int) -> StepTrace:
        """Return the step that makes one token for each sequence, on a cache that it makes first."""

        def write(input_ids: torch.Tensor) -> Any:
            cache = filled_cache(self.template, max(context - 1, 1), prompt if self.is_pair else None)
            if not self.is_pair:
                return run_step(self.module, cache, input_ids=input_ids).logits
            module: Any = self.module
            states = torch.empty(len(input_ids), prompt, module.config.d_model, dtype=module.dtype, device="meta")
            return run_step(module, cache, decoder_input_ids=input_ids, encoder_outputs=(states,)).logits

        return _step(self.model, self._trace(write, 1), self.batch, self.absorbs_mla)

    def prefill(self, prompt: int) -> StepTrace:
        """Return the step that reads the prompt; a long one that is read token by token would take minutes to trace.

        That one is extrapolated linearly from two short ones.
        """
        if not any(state.constant for state in self.states):
            return self._read_step(prompt)
        two_more, _ = self._read(self.PROBE + 2)
        if len(two_more.ops) <= len(self.probe.ops) + 8:
            return self._read_step(prompt)
        short, longer = self._read_step(self.PROBE), self._read_step(2 * self.PROBE)
        self.remarks += ("the prompt is extrapolated from two short ones, because the model reads it token by token",)

        def at(first: int, second: int) -> int:
            return first + (second - first) * (prompt - self.PROBE) // self.PROBE

        return replace(
            longer,
            tokens=self.batch * prompt,
            macs={name: at(short.macs.get(name, 0), macs) for name, macs in longer.macs.items()},
            score_macs=at(short.score_macs, longer.score_macs),
            live_bytes=at(short.live_bytes, longer.live_bytes),
            kept_bytes=at(short.kept_bytes, longer.kept_bytes),
            input_bytes=at(short.input_bytes, longer.input_bytes),
        )

    def _read_step(self, tokens: int) -> StepTrace:
        recorded, _ = self._read(tokens)
        itemsize = next((p.itemsize for p in self.module.parameters() if p.is_floating_point()), 4)
        # Behind an encoder, one token is written when the prompt has been read.
        past = 1 if self.is_pair else tokens
        kept_bytes = self.batch * itemsize * sum(state.values(past, tokens) + state.constant for state in self.states)
        return _step(self.model, recorded, self.batch * tokens, self.absorbs_mla, kept_bytes)


class _OwnSteps:
    """The steps of a user's own module, whose arguments a function makes: inputs(tokens=, past=, batch=)."""

    remarks: tuple[str, ...] = ()

    def __init__(self, model: LanguageModel, batch: int, absorbs_mla: bool) -> None:
        self.model, self.batch, self.absorbs_mla = model, batch, absorbs_mla
        less, more = (sum(map(_floating_values, tree_leaves(self._arguments(1, past, 1)))) for past in (64, 128))
        growing = (more - less) // 64
        self.states = (LayerState(per_position=growing, constant=less - 64 * growing),)

    def _arguments(self, tokens: int, past: int, batch: int) -> dict[str, Any]:
        assert self.model.inputs is not None
        try:
            arguments = self.model.inputs(tokens=tokens, past=past, batch=batch)
        except TypeError as error:
            raise InvalidInput(f"inputs= cannot be called with tokens=, past= and batch=: {error}") from error
        if not isinstance(arguments, Mapping):
            raise InvalidInput(f"inputs= returned a {type(arguments).__name__}; it must return arguments by name")
        return dict(arguments)

    def decode(self, context: int, prompt: int) -> StepTrace:
        recorded = trace(self.model.module, None, self._arguments(1, context - 1, self.batch))
        return _step(self.model, recorded, self.batch, self.absorbs_mla, prefix="")

    def prefill(self, prompt: int) -> StepTrace:
        recorded = trace(self.model.module, None, self._arguments(prompt, 0, self.batch))
        return _step(self.model, recorded, self.batch * prompt, self.absorbs_mla, prefix="")


def _floating_values(value: Any) -> int:
    """Return the floating-point values in an argument: they are the cache, because tokens are integers."""
    if isinstance(value, torch.Tensor):
        return value.numel() if value.is_floating_point() else 0
    if isinstance(value, InputSpec):
        return 0 if value.dtype and "int" in value.dtype else prod(value.shape)
    return 0


def _step(
    model: LanguageModel, recorded: Trace, tokens: int, absorbs_mla: bool, kept_bytes: int = 0, prefix: str = _INNER
) -> StepTrace:
    """Summarize a trace as one step."""
    if recorded.used_real_tensors and any(p.is_meta for p in model.module.parameters()):
        raise TraceFailed("the model looks at values, so its cost cannot be computed from shapes alone")
    reader = WeightReader(model.module, recorded, prefix)
    macs: dict[PartName, int] = {}
    score_macs = operators = 0
    for call in recorded.ops:
        signature = recorded.signatures[call.signature]
        cost = price(signature)
        reader.read(call, signature)
        operators += cost.status != "free"
        path = reader.path(call)
        # Rotary angles are a table of values, one by one, though written as a product.
        if cost.kind not in _PRODUCTS or not cost.cost.macs or "rotary" in path:
            continue
        part = reader.part(path, signature)
        spent, is_score = _spent(call, signature, cost.cost.macs, tokens, reader, absorbs_mla)
        score_macs += spent if is_score else 0
        macs[part] = macs.get(part, 0) + spent
    return StepTrace(
        tokens=tokens,
        macs=macs,
        score_macs=score_macs,
        uses=reader.uses,
        operators=operators,
        live_bytes=max((call.live_bytes for call in recorded.ops), default=0),
        kept_bytes=kept_bytes,
        input_bytes=recorded.input_bytes,
        unpriced=tuple(sorted({item.op for item in recorded.signatures if price(item).status == "unpriced"})),
        called=frozenset(call.path.removeprefix(prefix) for call in recorded.modules),
    )


def _spent(
    call: OpCall, signature: OpSignature, macs: int, tokens: int, reader: WeightReader, absorbs_mla: bool
) -> tuple[int, bool]:
    """Return the MACs of a product, and whether they grow with the context.

    With multi-head latent attention (MLA) the cache holds a compressed latent. transformers expands it by `kv_b_proj`
    at every position in each step; llama.cpp and MLX absorb that matrix into the query and the output instead. The
    expansion then counts once per token instead of once per position, and scores and values have the width of the
    latent: rank + rope for the scores, rank for the values. A trace always has transformers' way, so the other one is
    derived here from its shapes.
    """
    path = reader.path(call)
    has_weight = any(reader.trace.storages[number].role == "parameter" for number in call.reads)
    # A router's weights are widened first, so that they come as a tensor of the step.
    grows = not has_weight and reader.part(path, signature) == "attention"
    if not absorbs_mla:
        return macs, grows
    owner, parent = reader.modules.get(path), reader.modules.get(path.rpartition(".")[0])
    if _is_latent(parent) and path.endswith("kv_b_proj"):
        rows = prod(signature.inputs[0].shape[:-1])
        return macs * tokens // max(rows, 1), False
    if _is_latent(owner) and signature.op.endswith("scaled_dot_product_attention"):
        query, key = signature.inputs[0].shape, signature.inputs[1].shape
        width = 2 * int(owner.kv_lora_rank) + int(owner.qk_rope_head_dim)  # type: ignore[union-attr,arg-type]
        # While reading a prompt there is nothing to gain, so runtimes expand it as it stands.
        return (prod(query[:-1]) * key[-2] * width if query[-2] == 1 else macs), True
    return macs, grows


def _is_latent(module: nn.Module | None) -> bool:
    return module is not None and hasattr(module, "kv_lora_rank") and hasattr(module, "kv_b_proj")


def _head_path(module: nn.Module) -> str:
    """Return the path of the output head; empty where the model does not tell."""
    getter = getattr(module, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return next((path for path, child in module.named_modules() if child is head), "") if head is not None else ""


_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection|head)$")
_ROUTER = re.compile(r"\.(gate|router)(\.|$)")
_ATTENTION = re.compile(r"attn|attention|mixer|mamba|ssm|conv|temporal|recurrent|retention|time_mix", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|ff$|feed_?forward|fc\d?$|dense|expert|moe|channel_mix|c_fc|c_proj", re.IGNORECASE)


class WeightReader:
    """Finds which parameter a call reads, by the running module and the shape; a trace knows storages, not names."""

    def __init__(self, module: nn.Module, trace: Trace, prefix: str) -> None:
        self.trace = trace
        self.prefix = prefix
        self.modules = dict(module.named_modules())
        self.head = _head_path(module)
        self.has_experts = any(item.op == "aten._grouped_mm" for item in trace.signatures)
        self.uses: dict[str, WeightUse] = {}
        self._names = {id(value): name for name, value in module.named_parameters()}
        self._by_storage: dict[int, str | None] = {}

    def path(self, call: OpCall) -> str:
        return self.trace.modules[call.module].path.removeprefix(self.prefix)

    def part(self, path: str, signature: OpSignature) -> PartName:
        if signature.op == "aten.embedding":
            return "embedding"
        if (self.head and path == self.head) or (not self.head and _HEAD.search(path)):
            return "head"
        words = [word for word in path.split(".") if "norm" not in word.lower() and not word.startswith("ln_")]
        if "experts" in words or (self.has_experts and _ROUTER.search(path)):
            return "experts"
        for word in reversed(words):
            if _ATTENTION.search(word):
                return "attention"
            if _MLP.search(word):
                # GPT-2 calls the output of attention and of the MLP alike: the word before decides.
                return "attention" if word == "c_proj" and "attn" in words else "mlp"
        return "other"

    def read(self, call: OpCall, signature: OpSignature) -> None:
        """Note how a call uses the parameters that it reads; what was read whole stays so."""
        path = self.path(call)
        for number, tensor in zip(call.reads, signature.inputs, strict=True):
            if self.trace.storages[number].role != "parameter":
                continue
            if number not in self._by_storage:
                self._by_storage[number] = self._parameter_name(path, number, tensor.shape)
            name = self._by_storage[number]
            if name is None:
                continue
            part = self.part(path, signature)
            known = self.uses.get(name, WeightUse(part, is_whole=False))
            if signature.op == "aten.embedding":
                self.uses[name] = replace(known, rows=known.rows + prod(signature.inputs[1].shape))
            elif "experts" in path.split(".") and len(tensor.shape) == 3:
                met = signature.inputs[0].shape[0] if signature.op == "aten._grouped_mm" else 0
                self.uses[name] = WeightUse("experts", False, experts=tensor.shape[0], met=max(met, known.met))
            elif not known.is_whole and not known.experts:
                self.uses[name] = WeightUse(part, True, known.rows)

    def _parameter_name(self, path: str, number: int, shape: tuple[int, ...]) -> str | None:
        """Return the parameter behind a storage: of the running module, one inside it, or the nearest outer one."""
        nbytes, taken = self.trace.storages[number].nbytes, set(self._by_storage.values())
        while True:
            owner = self.modules.get(path)
            for owned in () if owner is None else (owner._parameters.values(), owner.parameters() if path else ()):
                fits = [item for item in owned if item is not None and item.untyped_storage().nbytes() == nbytes]
                fits.sort(key=lambda item: tuple(item.shape) != tuple(shape))
                names = (self._names.get(id(item)) for item in fits)
                name = next((name for name in names if name is not None and name not in taken), None)
                if name is not None:
                    return name
            if not path:
                return None
            path = path.rpartition(".")[0]
