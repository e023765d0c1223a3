"""Steps of a language model, traced on meta tensors: the weights they read, their MACs, and the cache."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from edge_opt.cost.rules import price
from edge_opt.errors import InvalidInput, TraceFailed
from edge_opt.records.costs import OpCall, OpSignature, Trace
from edge_opt.records.serving import PartName
from edge_opt.serving.model_source import LanguageModel, quiet, text_config
from edge_opt.serving.weight_formats import WeightTensor, described
from edge_opt.trace import InputSpec, trace
from edge_opt.trace.inputs import copied_with

_INNER = "model."  # where the model stands in the wrappers below
_PRODUCTS = ("matmul", "attention", "conv")


@dataclass(frozen=True, slots=True)
class LayerState:
    """What one layer remembers, in values of one sequence.

    `per_position` grows with the context up to `window`, `per_prompt` with the prompt that an encoder read, and
    `constant` does not grow: the state of a convolution or a recurrence.
    """

    per_position: int = 0
    per_prompt: int = 0
    constant: int = 0
    window: int | None = None

    def positions(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def values(self, context: int, prompt: int) -> int:
        """Values that grow, at a length of context."""
        return self.per_position * self.positions(context) + self.per_prompt * prompt


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
    them, weights and inputs apart; `kept_bytes` is what the trace itself has in its cache.
    """

    tokens: int
    macs: tuple[tuple[PartName, int], ...]
    score_macs: int
    uses: Mapping[str, WeightUse]
    products: int
    operators: int
    live_bytes: int
    kept_bytes: int
    input_bytes: int
    unpriced: tuple[str, ...]
    called: frozenset[str] = frozenset()  # paths of modules

    def part_macs(self, name: PartName) -> int:
        return dict(self.macs).get(name, 0)


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
    layers: int
    is_latent: bool
    has_delta_nets: bool
    max_context: int | None
    remarks: tuple[str, ...]


def traced_model(model: LanguageModel, context: int, prompt: int, batch: int, absorbs_mla: bool) -> TracedLanguageModel:
    """Trace a decoding step at full context, and the prompt.

    `absorbs_mla`: the runtime multiplies a compressed cache (MLA) as it is, instead of expanding it at each step.
    """
    with quiet():
        steps = _OwnSteps(model) if model.inputs is not None else _HubSteps(model, batch, prompt)
        states = steps.states()
        decode = steps.decode(context, batch, prompt, absorbs_mla)
        prefill = steps.prefill(prompt, batch, absorbs_mla)
    parameters = dict(model.module.named_parameters())
    remarks = steps.remarks
    if model.sees_more_than_text:
        whole = sum(value.numel() for value in parameters.values())
        parameters = {name: value for name, value in parameters.items() if _is_met(name, decode, prefill)}
        unmet = whole - sum(value.numel() for value in parameters.values())
        remarks += (f"the text part alone: {unmet:,} parameters that read pictures or sound are not in it",)
    text = text_config(model.config)
    heads = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    sharing = heads[0] // heads[1] if isinstance(heads[0], int) and isinstance(heads[1], int) and heads[1] else 1
    tensors = described(((name, tuple(value.shape)) for name, value in parameters.items()), sharing, _experts(decode))
    head = _head_path(model.module)
    is_tied = bool(head) and f"{head}.weight" not in parameters
    return TracedLanguageModel(
        name=model.name,
        tensors=tensors,
        is_tied=is_tied,
        states=states,
        decode=decode,
        prefill=prefill,
        buffer_bytes=sum(value.numel() * value.itemsize for value in _buffers(model.module)),
        layers=max((tensor.layers for tensor in tensors), default=0),
        is_latent=any(_is_latent(module) for module in model.module.modules()),
        has_delta_nets=any("DeltaNet" in type(module).__name__ for module in model.module.modules()),
        max_context=model.max_context,
        remarks=remarks,
    )


def _is_met(name: str, *steps: StepTrace) -> bool:
    """Return whether a step calls the module that holds a parameter, or reads the parameter."""
    return any(name.rpartition(".")[0] in step.called or name in step.uses for step in steps)


def _buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for value in module.buffers():
        if id(value) not in seen:
            seen.add(id(value))
            yield value


def _experts(step: StepTrace) -> int:
    return max((use.experts for use in step.uses.values()), default=0) or 1


_CACHES = ("past_key_values", "cache_params", "state")


def output_cache(out: Any) -> Any:
    """Return the cache or state among the results of a model; None where it returns none."""
    return next((cache for name in _CACHES if (cache := getattr(out, name, None)) is not None), None)


def cache_argument(module: nn.Module) -> str:
    """Return the name of the parameter by which a model takes its cache or state."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in reversed(_CACHES) if name in parameters), _CACHES[0])


class Prefill(nn.Module):
    """The model reads a prompt; the cache that it fills is the second of its results."""

    def __init__(self, model: nn.Module, extra: dict[str, Any], is_pair: bool) -> None:
        super().__init__()
        self.model = model
        self.extra = extra
        self.is_pair = is_pair

    def forward(self, input_ids: torch.Tensor) -> Any:
        extra = dict(self.extra)
        if self.is_pair:
            extra["decoder_input_ids"] = input_ids[:, :1]
        out = self.model(input_ids=input_ids, use_cache=True, **extra)
        return out.logits, output_cache(out)


class Decode(nn.Module):
    """The model makes one token for each sequence, on a cache that is made first, as tensors of its own."""

    def __init__(self, model: nn.Module, extra: dict[str, Any], template: Any, past: int, prompt: int | None) -> None:
        super().__init__()
        self.model = model
        self.extra = extra
        self.template = template
        self.past = past
        self.prompt = prompt

    def forward(self, input_ids: torch.Tensor) -> Any:
        extra = dict(self.extra)
        extra[cache_argument(self.model)] = filled_cache(self.template, self.past, self.prompt)
        if self.prompt is None:
            return self.model(input_ids=input_ids, use_cache=True, **extra).logits
        model: Any = self.model
        states = torch.empty(input_ids.shape[0], self.prompt, model.config.d_model, dtype=model.dtype, device="meta")
        return self.model(decoder_input_ids=input_ids, encoder_outputs=(states,), use_cache=True, **extra).logits


def filled_cache(template: Any, past: int, prompt: int | None = None) -> Any:
    """Return a cache like the template that holds `past` positions; for an encoder, those of the `prompt`.

    The tensors are made without values. To fill a real cache, the model would have to read a prompt of that length.

    A layer with a window keeps one position less than the window, as transformers does: the next token is the last.
    """
    if _is_fixed(template):
        return copied_with(torch.empty_like, template)
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


def _state_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping) or hasattr(value, "__dict__"):
        for item in (value if isinstance(value, Mapping) else vars(value)).values():
            yield from _state_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _state_tensors(item)


def _filled_layer(template: Any, past: int) -> Any:
    layer = copy.copy(template)
    window = getattr(layer, "sliding_window", None)
    positions = past if window is None else min(past, window - 1)
    for name, value in vars(template).items():
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            shape = (*value.shape[:-2], positions, value.shape[-1])
            setattr(layer, name, torch.empty(shape, dtype=value.dtype, device=value.device))
        elif isinstance(value, dict):
            copies = {
                key: torch.empty(item.shape, dtype=item.dtype, device=item.device)
                if isinstance(item, torch.Tensor)
                else item
                for key, item in value.items()
            }
            setattr(layer, name, copies)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = past
    return layer


class _HubSteps:
    """The steps of a transformers model. A short prompt first: the cache it fills is the pattern of all others."""

    PROBE = 4

    def __init__(self, model: LanguageModel, batch: int, prompt: int) -> None:
        self.model, self.batch = model, batch
        self.is_pair = model.is_encoder_decoder
        parameters = inspect.signature(type(model.module).forward).parameters
        # As generate() does: the head sees the last position only.
        self.extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.probe, self.template = self._filled(self.PROBE, batch)
        self.remarks: tuple[str, ...] = ()

    def _filled(self, tokens: int, batch: int) -> tuple[Trace, Any]:
        results: list[Any] = []
        wrapper = Prefill(self.model.module, self.extra, self.is_pair)
        recorded = trace(wrapper, [InputSpec((batch, tokens), "int64")], results=results)
        _, cache = results[-1]
        if _is_fixed(cache) and not any(True for _ in _state_tensors(cache)):
            kind = getattr(self.model.config, "model_type", type(self.model.module).__name__)
            raise InvalidInput(
                f"a model of type {kind!r} hands out nothing of what it remembers from token to token, so that cannot "
                "be counted; pass the module with inputs=, its state among them"
            )
        return recorded, cache

    def states(self) -> tuple[LayerState, ...]:
        if _is_fixed(self.template):
            return (LayerState(constant=sum(item.numel() for item in _state_tensors(self.template)) // self.batch),)
        if self.is_pair:
            own = tuple(map(_state, self.template.self_attention_cache.layers))
            across = map(_state, self.template.cross_attention_cache.layers)
            return own + tuple(LayerState(per_prompt=state.per_position) for state in across)
        return tuple(map(_state, self.template.layers))

    def decode(self, context: int, batch: int, prompt: int, absorbs_mla: bool) -> StepTrace:
        past = max(context - 1, 1)
        wrapper = Decode(self.model.module, self.extra, self.template, past, prompt if self.is_pair else None)
        recorded = trace(wrapper, [InputSpec((batch, 1), "int64")])
        return _step(self.model, recorded, batch, self._kept_bytes(past, batch, prompt), absorbs_mla)

    def prefill(self, prompt: int, batch: int, absorbs_mla: bool) -> StepTrace:
        if self._loops(batch):
            return self._extrapolated(prompt, batch, absorbs_mla)
        recorded, _ = self._filled(prompt, batch)
        # Behind an encoder, one token is written when the prompt has been read.
        past = 1 if self.is_pair else prompt
        return _step(self.model, recorded, batch * prompt, self._kept_bytes(past, batch, prompt), absorbs_mla)

    def _kept_bytes(self, past: int, batch: int, prompt: int) -> int:
        """Return the bytes of the cache in the trace, which has the model's own type."""
        itemsize = next((p.itemsize for p in self.model.module.parameters() if p.is_floating_point()), 4)
        return batch * itemsize * sum(state.values(past, prompt) + state.constant for state in self.states())

    def _loops(self, batch: int) -> bool:
        """Return whether the model reads a prompt token by token: a long one would take minutes to trace."""
        if not any(state.constant for state in self.states()):
            return False
        longer, _ = self._filled(self.PROBE + 2, batch)
        return len(longer.ops) > len(self.probe.ops) + 8

    def _extrapolated(self, prompt: int, batch: int, absorbs_mla: bool) -> StepTrace:
        """Return the prefill of a long prompt, extrapolated linearly from two short ones."""
        short = self._short(self.PROBE, batch, absorbs_mla)
        longer = self._short(2 * self.PROBE, batch, absorbs_mla)
        self.remarks += ("the prompt is extrapolated from two short ones, because the model reads it token by token",)

        def at(first: int, second: int) -> int:
            return first + (second - first) * (prompt - self.PROBE) // self.PROBE

        parts = dict(longer.macs)
        return StepTrace(
            tokens=batch * prompt,
            macs=tuple((name, at(short.part_macs(name), parts[name])) for name in parts),
            score_macs=at(short.score_macs, longer.score_macs),
            uses=longer.uses,
            products=longer.products,
            operators=longer.operators,
            live_bytes=at(short.live_bytes, longer.live_bytes),
            kept_bytes=at(short.kept_bytes, longer.kept_bytes),
            input_bytes=at(short.input_bytes, longer.input_bytes),
            unpriced=longer.unpriced,
            called=longer.called,
        )

    def _short(self, tokens: int, batch: int, absorbs_mla: bool) -> StepTrace:
        recorded, _ = self._filled(tokens, batch)
        return _step(self.model, recorded, batch * tokens, self._kept_bytes(tokens, batch, tokens), absorbs_mla)


def _state(layer: Any) -> LayerState:
    """Return what a layer of a transformers cache holds, per sequence."""
    growing = constant = 0
    for value in vars(layer).values():
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.numel():
            growing += prod(value.shape[1:-2]) * value.shape[-1]
        elif isinstance(value, dict):
            tensors = [item for item in value.values() if isinstance(item, torch.Tensor)]
            constant += sum(item.numel() // max(item.shape[0], 1) for item in tensors if item.dim() > 1)
    return LayerState(per_position=growing, constant=constant, window=getattr(layer, "sliding_window", None))


class _OwnSteps:
    """The steps of a user's own module, whose arguments a function makes: inputs(tokens=, past=, batch=)."""

    remarks: tuple[str, ...] = ()

    def __init__(self, model: LanguageModel) -> None:
        assert model.inputs is not None
        self.model = model
        self.make = model.inputs

    def _arguments(self, tokens: int, past: int, batch: int) -> dict[str, Any]:
        try:
            arguments = self.make(tokens=tokens, past=past, batch=batch)
        except TypeError as error:
            raise InvalidInput(f"inputs= cannot be called with tokens=, past= and batch=: {error}") from error
        if not isinstance(arguments, Mapping):
            raise InvalidInput(f"inputs= returned a {type(arguments).__name__}; it must return arguments by name")
        return dict(arguments)

    def states(self) -> tuple[LayerState, ...]:
        less, more = (self._held(past) for past in (64, 128))
        growing = (more - less) // 64
        return (LayerState(per_position=growing, constant=less - 64 * growing),)

    def _held(self, past: int) -> int:
        """Return the number of floating-point values among the arguments: the cache, because tokens are integers."""
        return sum(map(_floating_values, self._arguments(1, past, 1).values()))

    def decode(self, context: int, batch: int, prompt: int, absorbs_mla: bool) -> StepTrace:
        recorded = trace(self.model.module, None, self._arguments(1, context - 1, batch))
        return _step(self.model, recorded, batch, 0, absorbs_mla, prefix="")

    def prefill(self, prompt: int, batch: int, absorbs_mla: bool) -> StepTrace:
        recorded = trace(self.model.module, None, self._arguments(prompt, 0, batch))
        return _step(self.model, recorded, batch * prompt, 0, absorbs_mla, prefix="")


def _floating_values(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() if value.is_floating_point() else 0
    if isinstance(value, InputSpec):
        return 0 if value.dtype and "int" in value.dtype else prod(value.shape)
    if isinstance(value, (list, tuple)):
        return sum(map(_floating_values, value))
    return sum(map(_floating_values, value.values())) if isinstance(value, Mapping) else 0


def _step(
    model: LanguageModel, recorded: Trace, tokens: int, kept_bytes: int, absorbs_mla: bool, prefix: str = _INNER
) -> StepTrace:
    """Summarize a trace as one step."""
    if recorded.used_real_tensors and any(p.is_meta for p in model.module.parameters()):
        raise TraceFailed("the model looks at values, so its cost cannot be computed from shapes alone")
    reader = WeightReader(model.module, recorded, prefix)
    macs: dict[PartName, int] = {}
    score_macs = products = operators = 0
    for call in recorded.ops:
        signature = recorded.signatures[call.signature]
        cost = price(signature)
        reader.read(call, signature, tokens)
        operators += cost.status != "free"
        if cost.kind not in _PRODUCTS or not cost.cost.macs:
            continue
        path = reader.path(call)
        if "rotary" in path:  # a table of angles: one value by one, though written as a product
            continue
        spent, is_score = _spent(call, signature, cost.cost.macs, tokens, reader, absorbs_mla)
        products += 1
        score_macs += spent if is_score else 0
        part = reader.part(path, signature)
        macs[part] = macs.get(part, 0) + spent
    return StepTrace(
        tokens=tokens,
        macs=tuple(macs.items()),
        score_macs=score_macs,
        uses=reader.uses,
        products=products,
        operators=operators,
        live_bytes=max((call.live_bytes for call in recorded.ops), default=0),
        kept_bytes=kept_bytes,
        input_bytes=recorded.input_bytes,
        called=frozenset(call.path.removeprefix(prefix) for call in recorded.modules),
        unpriced=tuple(sorted({item.op for item in recorded.signatures if price(item).status == "unpriced"})),
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
    has_weight = any(reader.trace.storages[number].role == "parameter" for number in call.reads)
    # A router's weights are widened first, so that they come as a tensor of the step.
    grows = not has_weight and reader.part(reader.path(call), signature) == "attention"
    owner = reader.module(reader.path(call))
    if not absorbs_mla:
        return macs, grows
    parent = reader.module(reader.path(call).rpartition(".")[0])
    if _is_latent(parent) and reader.path(call).endswith("kv_b_proj"):
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

    def module(self, path: str) -> nn.Module | None:
        return self.modules.get(path)

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

    def read(self, call: OpCall, signature: OpSignature, tokens: int) -> None:
        """Note how a call uses the parameters that it reads; what was read whole stays so."""
        for number, tensor in zip(call.reads, signature.inputs, strict=True):
            if self.trace.storages[number].role != "parameter":
                continue
            name = self._name(call, number, tensor.shape)
            if name is None:
                continue
            part = self.part(self.path(call), signature)
            known = self.uses.get(name)
            rows = known.rows if known else 0
            if signature.op == "aten.embedding":
                rows += prod(signature.inputs[1].shape)
                self.uses[name] = WeightUse(known.part if known else part, known is not None and known.is_whole, rows)
            elif "experts" in self.path(call).split(".") and len(tensor.shape) == 3:
                met = signature.inputs[0].shape[0] if signature.op == "aten._grouped_mm" else 0
                met = max(met, known.met if known else 0)
                self.uses[name] = WeightUse("experts", False, experts=tensor.shape[0], met=met)
            elif known is None or not (known.is_whole or known.experts):
                self.uses[name] = WeightUse(part, True, rows)

    def _name(self, call: OpCall, number: int, shape: tuple[int, ...]) -> str | None:
        if number not in self._by_storage:
            self._by_storage[number] = self._found_name(self.path(call), number, shape)
        return self._by_storage[number]

    def _found_name(self, path: str, number: int, shape: tuple[int, ...]) -> str | None:
        """Return the parameter behind a storage: of the running module, one inside it, or the nearest outer one."""
        nbytes = self.trace.storages[number].nbytes
        taken = set(self._by_storage.values())

        def fitting(owned: Iterable[nn.Parameter | None]) -> str | None:
            fits = [item for item in owned if item is not None and item.untyped_storage().nbytes() == nbytes]
            fits.sort(key=lambda item: tuple(item.shape) != tuple(shape))
            names = (self._names.get(id(item)) for item in fits)
            return next((name for name in names if name is not None and name not in taken), None)

        while True:
            owner = self.modules.get(path)
            if owner is not None:
                name = fitting(owner._parameters.values()) or (fitting(owner.parameters()) if path else None)
                if name is not None:
                    return name
            if not path:
                return None
            path = path.rpartition(".")[0]
