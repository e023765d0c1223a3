"""llm(): will a language model fit a device, how many tokens a second, and why; and the real loop on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from edge_opt import units
from edge_opt._support.checks import check_one_of, check_positive, check_whole
from edge_opt._support.progress import quiet, report_progress
from edge_opt._support.unchanged import unchanged
from edge_opt.boards.catalog import ENGINES
from edge_opt.boards.estimate import working_power
from edge_opt.boards.targets import Target, find_spec
from edge_opt.errors import InvalidInput, MeasurementFailed, first_line
from edge_opt.loading import load_model, parse_reference
from edge_opt.measuring.machine import crash_of, read_environment
from edge_opt.measuring.memory import record_events, replay
from edge_opt.records.devices import DeviceSpec, Engine
from edge_opt.records.measurements import Energy
from edge_opt.records.serving import (
    DecodeCost,
    MeasuredServing,
    ServingComparison,
    ServingMemory,
    ServingReport,
    ServingSplit,
)
from edge_opt.serving.file_models import file_format, file_summary, gguf_model, with_file_tensors
from edge_opt.serving.model_source import (
    HUB,
    InputMaker,
    find_config,
    find_language_model,
    import_transformers,
    rope_scaling,
)
from edge_opt.serving.serving_costs import (
    Serving,
    Speed,
    decode_cost,
    prefill_cost,
    prefill_spread,
    serving_curve,
    serving_parts,
    speed_of,
)
from edge_opt.serving.splits import LINK_BYTES_PER_S, USUAL_CPU, Place, parse_split, split_serving
from edge_opt.serving.token_rates import has_own_memory
from edge_opt.serving.token_trace import (
    TracedLanguageModel,
    filled_cache,
    output_cache,
    run_step,
    traced_model,
    with_stored_head,
)
from edge_opt.serving.weight_files import WeightFile, find_weight_file
from edge_opt.serving.weight_formats import WEIGHT_FORMATS, WeightFormat, cache_bytes_per_value, weight_format

CONTEXT = 4096
PROMPT = 512
# Formats that the real loop runs, its fewest and most tokens, and the seconds after which it has enough.
_TORCH_FORMATS = ("fp32", "fp16", "bf16")
_MAX_TOKENS = 64
_MIN_TOKENS = 5
_LOOP_S = 5.0


def llm(
    model: Any,
    target: Target | Sequence[Target] | None = None,
    weights: str | Sequence[str] | None = None,
    *,
    context: int | None = None,
    prompt: int | None = None,
    batch: int = 1,
    kv: str | None = None,
    runtime: str | None = None,
    engine: Engine | None = None,
    threads: int | None = None,
    inputs: InputMaker | None = None,
    ram_gib: float | None = None,
    flash_attention: bool = True,
    split: str | None = None,
    measure: bool = False,
    name: str | None = None,
) -> ServingReport | ServingComparison:
    """Predict whether a language model fits a device, its tokens per second, and what the time is spent on.

    The model is built without weights and traced twice: a prompt, and one token at full context. Decoding streams
    every weight that a token uses, and the cache, from memory once per step, so bandwidth over bytes is its speed.

    Args:
        model: a `.gguf` file (any part of a split one), a folder with safetensors files and their config.json, of
            which headers alone are read; `hf:ORG/NAME` (its configuration alone is fetched, or taken from the local
            cache), a config.json or what it holds, a transformers configuration or model, or a module of your own
            with `inputs` (or its reference, `file.py:factory`).
        target: a device of the catalog, a device file or `DeviceSpec`, a calibration, or "host", this machine as
            `edge-opt calibrate` measured it; several as a list. None: memory and costs alone.
        weights: the format of the weights: fp32, fp16, bf16, int8, int4 (int4-g64 for groups of 64), mlx-4bit, or one
            of GGUF's such as q4_k_m; several as a list. Default: what the file holds, fp16 for a configuration.
        context: positions that the cache holds at the end, the new token among them; 4096, or the model's maximum
            where that is less.
        prompt: tokens that are read before the first is written; 512, or the context where that is less.
        batch: sequences that are served at once.
        kv: the format of the key-value cache; fp16, or fp32 where the weights are.
        runtime: llama.cpp, torch, mlx or vllm; default: the first that supports the format.
        engine: cpu, gpu or npu; the device's own choice unless given.
        threads: threads of a CPU; default: all of its cores. Fewer threads compute more slowly; the
            memory bandwidth is assumed to be the same.
        inputs: for a module of your own: a function of tokens, past and batch that returns the arguments of its
            forward by name, the cache with `past` positions among them as floating tensors or `InputSpec`.
        ram_gib: the RAM of your own board, in GiB; default: of a device sold with several sizes, all are looked at.
        flash_attention: whether the runtime fuses attention, as llama.cpp does by default; without it the cache is
            read more slowly.
        split: devices to divide the model between, with memory: "gpu:24GiB,cpu:64GiB", where gpu is the target and
            cpu a usual computer; "2*gpu:24GiB" puts layers on two GPUs, "tensor:2*gpu:24GiB@64" divides tensors, the
            link at 64 GB/s. Default: with a GPU whose memory is too small, the rest goes to a usual CPU.
        measure: also run the real loop on this machine, in torch with random weights (or those of a module that has
            them).
        name: Name of the model in the report.

    >>> llama_2_7b = {"model_type": "llama"}  # what a config.json holds; the defaults are this model's
    >>> report = llm(llama_2_7b, target="raspberry-pi-5", weights="q4_0", context=2048)
    >>> report.memory.kv_bytes == 2 * 32 * 32 * 128 * 2048 * 2, round(report.decode.tokens_per_s, 1)
    (True, 2.0)
    """
    request = _Request(context, prompt, batch, kv, runtime, engine, threads, ram_gib, flash_attention, split)
    formats: list[str | None] = [None] if weights is None else list(weights)
    if isinstance(weights, str):
        formats = [item.strip() for item in weights.split(",") if item.strip()]
    targets: Sequence[Any] = target if isinstance(target, (list, tuple)) else [target]
    if not formats or not targets:
        raise InvalidInput("no weight format or no target is given; name one, such as q4_k_m or raspberry-pi-5")
    if isinstance(model, str) and not model.startswith(HUB) and parse_reference(model) is not None:
        loaded = load_model(model)
        model, name = loaded.model, name or loaded.name
    served = _served(model, inputs, name, request)
    reports = []
    for item in targets:
        spec = None if item is None else find_spec(item)
        reports += [_report(served(form), spec, request, model if measure else None) for form in formats]
    is_single = (weights is None or (isinstance(weights, str) and "," not in weights)) and targets is not target
    return reports[0] if is_single else ServingComparison(tuple(reports))


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `llm`, apart from model, target and weights."""

    context: int | None
    prompt: int | None
    batch: int
    kv: str | None
    runtime: str | None
    engine: Engine | None
    threads: int | None
    ram_gib: float | None
    flash_attention: bool = True
    split: str | None = None

    def __post_init__(self) -> None:
        for name in ("context", "prompt", "batch", "threads"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.engine is not None:
            check_one_of("engine", self.engine, ENGINES)
        if self.ram_gib is not None:
            check_positive("ram_gib", self.ram_gib, "a number of GiB")

    def check_target(self, spec: DeviceSpec) -> None:
        """Refuse an engine that is not known of the target, and threads that it has no cores for or does not use."""
        known = {spec.engine, *(peak.engine for peak in spec.peaks), *(item.engine for item in spec.bandwidths)}
        engine = self.engine or spec.engine
        if engine not in known:
            names = ", ".join(sorted(name for name in known if name))
            raise InvalidInput(f"{spec.name} has no figures of a {engine}; choose one of its engines: {names}")
        if self.threads is not None and engine != "cpu":
            problem = f"threads are those of a CPU, and {spec.name} runs the model on its {engine}"
            raise InvalidInput(f'{problem}; drop threads, or ask for engine="cpu"')
        if self.threads is not None and spec.cores is not None and self.threads > spec.cores.value:
            raise InvalidInput(f"threads is {self.threads}, and {spec.name} has {spec.cores.value:g} cores")

    def ram_bytes(self, spec: DeviceSpec | None) -> tuple[int, ...]:
        """Return the sizes of RAM to check, smallest first."""
        if self.ram_gib is not None:
            return (int(self.ram_gib * (1 << 30)),)
        return () if spec is None else tuple(int(figure.value) for figure in spec.ram_bytes)

    def cache_format(self, form: WeightFormat) -> str:
        """Return the format of the key-value cache; refuse one that is not known."""
        kv = self.kv or ("fp32" if form.name == "fp32" else "fp16")
        cache_bytes_per_value(kv)
        return kv

    def lengths(self, name: str, limit: int | None, scaling: str) -> tuple[int, int]:
        """Return context and prompt for a model; refuse more positions than its maximum."""
        context = self.context or min(CONTEXT, limit or CONTEXT)
        if limit is not None and context > limit:
            raise InvalidInput(f"context is {context}, and the maximum of {name} is {limit} ({scaling}); ask for less")
        prompt = self.prompt or min(PROMPT, context)
        if prompt > context:
            raise InvalidInput(f"prompt is {prompt} tokens and context {context}; the context holds the prompt as well")
        return context, prompt


def _served(
    source: Any, inputs: InputMaker | None, name: str | None, request: _Request
) -> Callable[[str | None], Serving]:
    """Return a function from a weight format to the served model, which is traced once for each type of numbers."""
    file = find_weight_file(source) if isinstance(source, (str, os.PathLike)) else None
    if file is not None and inputs is not None:
        raise InvalidInput("inputs= makes the arguments of a module of your own; drop it, or pass the module")
    if file is not None:
        return partial(_served_file, file, name=name, request=request)

    @cache
    def traced(dtype: torch.dtype, absorbs_mla: bool) -> tuple[TracedLanguageModel, Any, int, int]:
        report_progress("building the language model without its weights")
        model = find_language_model(source, dtype, inputs, name)
        scaling = rope_scaling(model.config) or "no RoPE scaling"
        context, prompt = request.lengths(model.name, model.max_context, scaling)
        report_progress(f"tracing the prompt and a step at {context} positions")
        return traced_model(model, context, prompt, request.batch, absorbs_mla), model.config, context, prompt

    def served(weights: str | None) -> Serving:
        form, runtime = weight_format(weights or "fp16", request.runtime)
        kv = request.cache_format(form)
        model, config, context, prompt = traced(getattr(torch, form.computes_in), runtime != "torch")
        model = with_stored_head(model, config, runtime)
        return Serving(model, form, runtime, kv, context, prompt, request.batch)

    return served


def _served_file(file: WeightFile, weights: str | None, name: str | None, request: _Request) -> Serving:
    """Return the served model of a file, in the format that the file holds."""
    source = file.path
    config = None if file.kind == "gguf" else find_config(source)
    form, runtime = file_format(file, config)
    if weights is not None and weight_format(weights)[0].name != form.name:
        cure = "drop weights=, or pass the config.json of the model to ask for another format"
        raise InvalidInput(f"weights is {weights!r}, and {file.path.name} holds {form.name}; {cure}")
    if request.runtime is not None and request.runtime not in form.runtimes:
        names = " or ".join(form.runtimes)
        raise InvalidInput(f"runtime is {request.runtime!r}; {file.kind} files in {form.name} are run by {names}")
    runtime = next((item for item in form.runtimes if item == request.runtime), runtime)
    kv = request.cache_format(form)
    if file.kind == "gguf":
        limit = gguf_model(file, 1, 1, 1).max_context
        context, prompt = request.lengths(name or file.name, limit, "no RoPE scaling")
        model = gguf_model(file, context, prompt, request.batch)
    else:
        built = find_language_model(source, getattr(torch, form.computes_in), None, name or file.name)
        context, prompt = request.lengths(built.name, built.max_context, rope_scaling(config) or "no RoPE scaling")
        traced = traced_model(built, context, prompt, request.batch, runtime != "torch")
        model = with_file_tensors(traced, file)
    model = replace(model, name=name or file.name)
    return Serving(model, form, runtime, kv, context, prompt, request.batch, file_summary(file, config))


def _energy(spec: DeviceSpec | None, decode: DecodeCost) -> Energy | None:
    """Return the device's power over the predicted rate, as a proxy; None where one of them is unknown."""
    power = None if spec is None else working_power(spec)
    if power is None or decode.tokens_per_s is None:
        return None
    watts = power.figure.value
    source = f"{watts:g} W ({power.state}; {power.figure.kind}: {power.figure.source})"
    note = f"proxy, not measured: {source} over predicted {decode.tokens_per_s:.3g} tokens/s"
    return Energy(watts / decode.tokens_per_s, "proxy", note)


def _report(serving: Serving, spec: DeviceSpec | None, request: _Request, measured_model: Any) -> ServingReport:
    """Return the report of one format on one target; `measured_model` also runs here, unless it is None."""
    if spec is not None:
        request.check_target(spec)
    speed = speed_of(spec, serving.form, request.engine, request.threads, serving.runtime, request.flash_attention)
    decode = decode_cost(serving, speed, serving.context)
    params = sum(tensor.params for tensor in serving.model.tensors)
    memory = serving.memory(request.ram_bytes(spec), spec)
    best = _best_format(serving, memory)
    return ServingReport(
        split=_split(serving, spec, memory, request),
        best_format=best,
        model=serving.model.name,
        target=None if spec is None else spec.name,
        engine=speed.engine,
        runtime=serving.runtime,
        weights=serving.form.name,
        kv=serving.kv,
        context=serving.context,
        prompt=serving.prompt,
        batch=serving.batch,
        params=params,
        active_params=serving.active_params,
        bits_per_weight=serving.weights_bytes * 8 / params if params else 0.0,
        max_context=serving.model.max_context,
        memory=memory,
        prefill=prefill_cost(serving, speed),
        decode=decode,
        decode_at_start=decode_cost(serving, speed, serving.prompt),
        parts=serving_parts(serving),
        curve=serving_curve(serving, speed),
        bandwidth_bytes_per_s=None if speed.rate is None else speed.rate.bytes_per_s,
        bandwidth_source="" if speed.rate is None else speed.rate.reading,
        energy_per_token=_energy(spec, decode),
        measured=None if measured_model is None else _measured(measured_model, serving),
        remarks=tuple(_remarks(serving, speed, memory)),
        file=serving.file,
    )


# The formats that people choose from, from the most precise to the smallest.
_CHOICES = ("fp16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m", "iq3_xxs", "q2_k", "iq2_xxs")


def _best_format(serving: Serving, memory: ServingMemory) -> str | None:
    """Return the most precise GGUF format that fits the smallest RAM; of a file its own, if it fits."""
    if not memory.ram_bytes:
        return None
    if serving.file is not None:
        return serving.form.name if memory.fits else None
    beside = memory.total_bytes - memory.weights_bytes
    for name in _CHOICES:
        other = replace(serving, form=WEIGHT_FORMATS[name])
        if other.weights_bytes + beside <= memory.ram_bytes[0]:
            return name
    return None


def _split(serving: Serving, spec: DeviceSpec | None, memory: ServingMemory, request: _Request) -> ServingSplit | None:
    """Return how the model is divided: as asked for, or between a GPU that is too small and a usual CPU."""
    if request.split is not None:
        is_tensor, places = parse_split(request.split, spec)
        return split_serving(serving, places, is_tensor, request.flash_attention)
    if spec is None or not has_own_memory(spec, request.engine) or memory.fits is not False:
        return None
    if serving.runtime != "llama.cpp":
        return None
    limit = memory.ram_bytes[-1]
    places = [Place(spec, limit, LINK_BYTES_PER_S), Place(find_spec(USUAL_CPU), None, LINK_BYTES_PER_S)]
    return split_serving(serving, places, False, request.flash_attention)


def _remarks(serving: Serving, speed: Speed, memory: ServingMemory) -> list[str]:
    model = serving.model
    remarks = list(model.remarks)
    if speed.spec is not None and speed.matrix_rate is None:
        unknown = f"no peak of {speed.spec.name} ({speed.engine}) is known"
        remarks.append(f"{unknown}, so there is no time for the prompt, and decoding is taken to be bound by memory")
    if speed.row_rate and speed.row_rate != speed.matrix_rate:
        remarks.append(f"decoding multiplies at {speed.row_rate.reading}")
    if speed.matrix_rate:
        remarks.append(f"products run at {speed.matrix_rate.reading}, within a factor of {prefill_spread(speed):g}")
    experts = max((use.experts for use in model.decode.uses.values()), default=0)
    if experts:
        remarks.append(f"of {experts} experts those that tokens meet at random are streamed, and all are held")
    if model.is_latent:
        how = "expanded at each step, as transformers does" if serving.runtime == "torch" else "used as it is"
        remarks.append(f"the cache holds the compressed latent (MLA), {how}")
    if model.decode.unpriced or model.prefill.unpriced:
        names = ", ".join(dict.fromkeys((*model.decode.unpriced, *model.prefill.unpriced)))
        remarks.append(f"operators without a cost rule are left out: {names}")
    if memory.fitting_ram_bytes:
        spare = memory.fitting_ram_bytes[0] - memory.total_bytes
        others = f"the operating system and other programs may take {units.size(spare)}"
        remarks.append(f"all of the RAM counts as free; of {units.size(memory.fitting_ram_bytes[0])} {others}")
    return remarks


def _measured(source: Any, serving: Serving) -> MeasuredServing:
    """Time the prefill once after a warm-up, then the median of steps with one token each, in torch.

    Refuse formats that torch does not run, and models that do not fit this machine.
    """
    if serving.form.name not in _TORCH_FORMATS:
        formats = ", ".join(_TORCH_FORMATS)
        raise InvalidInput(f"torch runs no weights in {serving.form.name}; measure with weights in {formats}")
    needed_bytes, ram_bytes = serving.memory().total_bytes, read_environment().memory_bytes
    if needed_bytes > 0.8 * ram_bytes:
        sizes = f"{needed_bytes / 2**30:.1f} GiB, and this machine has {ram_bytes / 2**30:.1f} GiB"
        raise InvalidInput(f"the loop needs {sizes}; measure a smaller model or a shorter context")
    dtype: torch.dtype = getattr(torch, serving.form.computes_in)
    crash = crash_of(dtype)
    if crash:
        problem = f"torch cannot multiply {serving.form.computes_in} on this machine (its process ended with {crash})"
        raise MeasurementFailed(f"{problem}; measure weights in fp32")
    model = _real_model(source, dtype)
    ids = torch.zeros(serving.batch, serving.prompt, dtype=torch.int64)
    next_ids = torch.zeros(serving.batch, 1, dtype=torch.int64)
    with torch.inference_mode(), quiet(), unchanged(list(model.modules()), training=False):
        _call(model, ids[:, :1], None)
        start = time.perf_counter()
        cache = output_cache(_call(model, ids, None))
        prefill_s = time.perf_counter() - start
        steps: list[float] = []
        begin = time.perf_counter()
        while len(steps) < _MIN_TOKENS or (len(steps) < _MAX_TOKENS and time.perf_counter() - begin < _LOOP_S):
            start = time.perf_counter()
            cache = output_cache(_call(model, next_ids, cache))
            steps.append(time.perf_counter() - start)
        peak = None
        if hasattr(cache, "layers"):  # else it cannot be made as long as the context
            full = partial(filled_cache, cache, max(serving.context - 1, 1))
            peak = max(peak_bytes(model, next_ids, full), peak_bytes(model, ids))
    return MeasuredServing(
        runtime=f"torch {torch.__version__}",
        weights=serving.form.name,
        threads=torch.get_num_threads(),
        prompt=serving.prompt,
        tokens=len(steps),
        prefill_s=prefill_s,
        decode_tokens_per_s=serving.batch / sorted(steps)[len(steps) // 2],
        peak_bytes=peak,
    )


def _real_model(source: Any, dtype: torch.dtype) -> nn.Module:
    """Return the module if it has weights, or one built with random weights."""
    if isinstance(source, nn.Module) and not any(item.is_meta for item in source.parameters()):
        return source
    config = source.config if isinstance(source, nn.Module) else find_config(source)
    transformers = import_transformers()
    with quiet():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def _call(model: nn.Module, ids: torch.Tensor, cache: Any) -> Any:
    try:
        return run_step(model, cache, input_ids=ids)
    except Exception as error:  # whatever a model's own forward raises
        raise MeasurementFailed(f"the loop stopped in {type(model).__name__}: {first_line(error)}") from error


def peak_bytes(model: nn.Module, ids: torch.Tensor, make_cache: Callable[[], Any] | None = None) -> int:
    """Return the most bytes of tensors alive at once in a call: weights, inputs, cache and activations.

    The cache is made while the allocator is watched, because the model replaces it layer by layer: memory that was
    taken before would not be seen to go.
    """
    tensors = (*model.parameters(), *model.buffers(), ids)
    resident = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    with torch.no_grad():
        events = record_events(lambda: _call(model, ids, make_cache and make_cache()), torch.device("cpu"))
    return sum(resident.values()) + replay(events).tensor_peak_bytes
