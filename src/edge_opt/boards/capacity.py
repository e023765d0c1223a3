"""Peak memory in its one definition, whether it fits a memory limit, and the largest batch that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from edge_opt.boards.fused_layers import ITEMSIZE, WEIGHT_ITEMSIZE, floating_itemsize, signature_passes
from edge_opt.records.costs import OUTSIDE, Role, Trace
from edge_opt.records.devices import SCRATCH_IS_APART as SCRATCH_IS_APART
from edge_opt.records.devices import Precision
from edge_opt.records.predictions import MemoryKind, MemoryNeed
from edge_opt.records.profiles import ModelProfile

# Who drops tensors: eager torch when Python lets go of them, a planning runtime after their last use.
Lifetimes = Literal["eager", "planner"]
_KINDS: dict[Lifetimes, MemoryKind] = {"eager": "static eager", "planner": "static planner"}


def lifetimes_of(runtime: str) -> Lifetimes:
    """Return whose lifetimes count in a runtime: eager torch follows Python, every other runtime plans."""
    return "eager" if runtime == "torch" else "planner"


def peak_memory(
    profile: ModelProfile,
    precision: Precision | None = None,
    *,
    lifetimes: Lifetimes = "eager",
    layers: Mapping[str, str] | None = None,
) -> MemoryNeed:
    """Return the memory that one forward pass needs at once: weights, buffers, inputs and peak activations.

    `fit_batch`, `compare_targets`, `check`, sweeps and pages all use this function. Integers, and memory that operators
    hold beside their outputs, stay as traced. In int8, inputs stay as the caller gives them, and so
    do biases and norms (parameters and buffers of one dimension): every int8 runtime keeps those wide. In int4,
    matrices of weights take 4 bits and their scales, and everything else 16 bits.

    Args:
        profile: The model and its inputs; its batch is the batch.
        precision: Type of floating-point tensors; None: the model's own.
        lifetimes: "eager" holds a tensor as long as Python does, as torch would; "planner" drops it after its last
            use, as ONNX Runtime, OpenVINO or LiteRT do.
        layers: Precisions that layers really run in, by module path, where a runtime told them. Weights of a layer
            that is not named stay in float32, and activations count in the widest precision of all.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> need = peak_memory(eo.profile(nn.Linear(8, 4), (2, 8)), "int8")
    >>> need.weight_bytes, need.input_bytes, need.activation_bytes, need.kind
    (48, 64, 8, 'static eager')
    """
    trace, totals = profile.trace, profile.totals
    saved = _saved(trace, _widths(precision, layers))

    def of(role: Role) -> int:
        return sum(saved[number] for number, storage in enumerate(trace.storages) if storage.role == role)

    is_planned = lifetimes == "planner"
    if not any(saved):
        live = profile.peak.planner_bytes if is_planned else profile.peak.live_bytes
    else:
        # Rules of cost need torch, and budgets on a saved profile do not.
        from edge_opt.cost.totals import planner_bound

        live = planner_bound(trace, saved) if is_planned else max(_live_bytes(trace, saved), default=0)
    return MemoryNeed(
        weight_bytes=totals.param_bytes - of("parameter"),
        buffer_bytes=totals.buffer_bytes - of("buffer"),
        input_bytes=totals.input_bytes - of("input"),
        activation_bytes=live,
        kind=_KINDS[lifetimes],
        outside=tuple(
            f"{item.op} in {item.module or 'the model'}" for item in profile.unpriced if item.op.startswith(OUTSIDE)
        ),
    )


def _widths(precision: Precision | None, layers: Mapping[str, str] | None) -> Callable[[str, Role], float | None]:
    """Return the bytes of a floating value, by the path of the layer that uses it and its role; None: as traced."""
    if layers is None:
        if precision is None:
            return lambda path, role: None
        width, of_weights = ITEMSIZE[precision], WEIGHT_ITEMSIZE.get(precision, ITEMSIZE[precision])
        return lambda path, role: of_weights if role == "parameter" else width
    # A precision that a runtime cannot name counts as float32.
    sizes: dict[str, int] = dict(ITEMSIZE.items())
    known = {path: sizes.get(name, 4) for path, name in layers.items()}
    widest = max(known.values(), default=4)
    return lambda path, role: known.get(path, 4) if role == "parameter" else widest if role == "activation" else None


def _saved(trace: Trace, width_of: Callable[[str, Role], float | None]) -> list[int]:
    """Return the bytes by which each storage is smaller than it was traced."""
    saved = [0] * len(trace.storages)
    for call in trace.ops:
        signature, path = trace.signatures[call.signature], trace.modules[call.module].path
        uses = [*zip(call.reads, signature.inputs, strict=True)]
        if len(call.creates) == len(signature.outputs):
            uses += zip(call.creates, signature.outputs, strict=True)
        for number, tensor in uses:
            size, storage = floating_itemsize(tensor.dtype), trace.storages[number]
            width = width_of(path, storage.role)
            if not size or width is None:
                continue
            if width == 1 and (storage.role == "input" or (storage.role != "activation" and len(tensor.shape) < 2)):
                continue
            if width < 1 and len(tensor.shape) < 2:
                width = ITEMSIZE["int4"]
            saved[number] = storage.nbytes - int(storage.nbytes // size * width)
    return saved


def at_precision(profile: ModelProfile, precision: Precision) -> ModelProfile:
    """Return the profile with the bytes that `peak_memory` counts at a precision, layer by layer; shapes stay.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> at_precision(eo.profile(nn.Linear(8, 4), (2, 8)), "int8").totals.activation_bytes
    8
    """
    from edge_opt.cost.totals import layer_costs, peak_activations, total_costs

    trace = profile.trace
    saved = _saved(trace, _widths(precision, None))
    if not any(saved):
        return profile
    need = peak_memory(profile, precision)
    saved_params, counted = [0] * len(trace.modules), set()
    for call in trace.ops:
        for number in call.reads:
            if trace.storages[number].role == "parameter" and number not in counted:
                counted.add(number)
                saved_params[call.module] += saved[number]
    narrow = replace(
        trace,
        modules=tuple(
            replace(module, param_bytes=module.param_bytes - saving)
            for module, saving in zip(trace.modules, saved_params, strict=True)
        ),
        ops=tuple(
            replace(call, live_bytes=live) for call, live in zip(trace.ops, _live_bytes(trace, saved), strict=True)
        ),
        storages=tuple(
            replace(storage, nbytes=storage.nbytes - saving)
            for storage, saving in zip(trace.storages, saved, strict=True)
        ),
        param_bytes=need.weight_bytes,
        buffer_bytes=need.buffer_bytes,
        input_bytes=need.input_bytes,
    )
    prices = tuple(
        price
        if item is None
        else replace(price, cost=replace(price.cost, bytes_read=item.bytes_read, bytes_written=item.bytes_written))
        for price, item in zip(profile.prices, signature_passes(profile, precision)[0], strict=True)
    )
    layers = layer_costs(narrow, prices)
    return replace(
        profile, trace=narrow, prices=prices, layers=layers, totals=total_costs(narrow, layers),
        peak=peak_activations(narrow),
    )  # fmt: skip


def _live_bytes(trace: Trace, saved: list[int]) -> Iterator[int]:
    """Yield the live bytes of each operator when storages are smaller by what is saved."""
    change = [0] * (len(trace.ops) + 1)
    for storage, saving in zip(trace.storages, saved, strict=True):
        if storage.role == "activation" and storage.born is not None:
            change[storage.born] += saving
            change[len(trace.ops) if storage.died is None else storage.died] -= saving
    saving = 0
    for call in trace.ops:
        saving += change[call.index]
        yield call.live_bytes - saving


def largest_batch(bytes_at: Callable[[int], int], limit_bytes: int, most: int) -> int:
    """Return the largest batch of at most `most` that needs no more than the limit; 0 where even one does not fit.

    More samples must not need less. Memory is nearly linear in the batch, so a line through the last two batches
    tried says where to look; each guess is checked, and bisection has the last word.

    >>> largest_batch(lambda batch: 100 + 7 * batch, limit_bytes=1000, most=4096)
    128
    """
    fitting, too_large = 0, most + 1
    tried: dict[int, int] = {}
    guess = 1
    while too_large - fitting > 1:
        tried[guess] = bytes_at(guess)
        if tried[guess] <= limit_bytes:
            fitting = guess
        else:
            too_large = guess
        guess = _next_guess(tried, limit_bytes, fitting, too_large)
    return fitting


def _next_guess(tried: dict[int, int], limit_bytes: int, fitting: int, too_large: int) -> int:
    """Return a batch between what fits and what does not: by the line at first, halfway after some tries."""
    middle = (fitting + too_large) // 2
    if len(tried) < 2:
        return min(2, middle) or 1
    if len(tried) > 6:
        return middle
    (first, low), (last, high) = sorted(tried.items())[-2:]
    if high <= low:
        return middle
    on_the_line = first + (limit_bytes - low) * (last - first) // (high - low)
    return min(max(on_the_line, fitting + 1), too_large - 1)
