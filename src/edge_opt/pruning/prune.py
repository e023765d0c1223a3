"""prune(): remove the least important channels, by ratio or for a target of MACs or latency, and prove the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from torch import nn

from edge_opt._support.checks import check_one_of, check_whole, is_number
from edge_opt._support.deprecation import accept_former_parameters
from edge_opt._support.progress import report_progress, show_progress
from edge_opt.boards.estimate import predicted_seconds
from edge_opt.boards.targets import ResolvedTarget, Target, resolve_target
from edge_opt.errors import InvalidInput, PruningFailed
from edge_opt.loading import ModelLike, check_can_change, resolve_call
from edge_opt.pruning.layer_kinds import kind_of
from edge_opt.pruning.plan import PruningPlan, check_prunable, layer_channels, make_plan, pruning_context, shortfalls
from edge_opt.pruning.proof import check_pruned
from edge_opt.pruning.ranking import IMPORTANCES, NEED_DATA, RoundTo, fast_multiple
from edge_opt.pruning.recipe import apply_spec
from edge_opt.records.compression import Importance, Pruned, PruneRequest, PruneResult
from edge_opt.records.profiles import ModelProfile

# The largest ratio that is tried, the steps of bisection, and the share of the target that is close enough to stop.
HIGHEST_RATIO = 0.98
STEPS = 12
CLOSE = 0.005
# Within this share of the target a search over single groups is not worth its time.
NEAR = 0.05
# How near to a target of MACs or latency the result must be to count as reached.
WITHIN = 0.1
LatencyOf = Callable[[nn.Module, ModelProfile], float]


@accept_former_parameters
def prune(
    model: ModelLike,
    inputs: Any = None,
    ratio: float | Mapping[str, float] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    layers: Mapping[str, float] | None = None,
    macs_target: float | None = None,
    latency_target: float | None = None,
    latency_of: Callable[[nn.Module], float] | None = None,
    target: Target | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    importance: Importance = "auto",
    round_to: RoundTo = "auto",
    ignored: Sequence[str] = (),
    loader: Iterable[Any] | None = None,
    reestimate: bool = True,
    reconstruct: bool | None = None,
    seed: int = 0,
    trust: bool = False,
) -> Pruned:
    """Remove the least important channels and attention heads from a copy of the model, and prove the result.

    Layers that are added or concatenated lose the same channels. Give `ratio`, `layers` or one of the two targets.

    Args:
        model: As in `profile`; a module is not modified.
        inputs: As in `profile`; the shape of one call.
        ratio: Share to remove of every layer, or a mapping of layers to shares.
        kwargs: Arguments of the model by name.
        layers: Shares to remove of single layers, by path.
        macs_target: Share of the MACs that is to remain.
        latency_target: Share of the latency that is to remain; it needs `latency_of` or `target`.
        latency_of: A function of the model that gives its latency in seconds.
        target: Target as in `profile`, for the latency; its costs decide widths and layers where `round_to` is "auto".
        runtime: Runtime on the target, such as "ncnn"; default: the one with the most accurate data.
        threads: Threads of the runtime on the target, as in `profile`.
        importance: Ranking of channels: weights of all layers that write and read them (group, which is auto), error of
            the next layers on `loader` (reconstruction), first-order change of the loss (taylor), or chance (random).
        round_to: Kept channels are a multiple of this; "auto" is what kernels run fast here, or on `target`.
        ignored: Paths of layers that are not pruned.
        loader: Calibration batches, inputs or (inputs, labels), which taylor needs; a few hundred samples are enough.
        reestimate: Whether statistics of batch norms are estimated again on the loader's batches.
        reconstruct: Whether layers after removed channels are fitted to the loader's batches. None: with a loader.
        seed: Seed of a random ranking.
        trust: Whether a .pt2 file may be opened, which can execute code from it.

    >>> from edge_opt.model import SmallCNN
    >>> pruned = prune(SmallCNN(16, 32), (1, 1, 28, 28), 0.5)
    >>> pruned.model.conv2
    Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    >>> [(fall.path, fall.reason) for fall in pruned.shortfalls]
    [('classifier', "classifier is the model's output")]
    """
    layers, ratio = ({**ratio, **(layers or {})}, None) if isinstance(ratio, Mapping) else (layers, ratio)
    module, inputs, kwargs, _ = resolve_call(model, inputs, kwargs, trust)
    check_can_change(module, "pruned")
    resolved = None if target is None else _known_target(target, runtime, threads)
    request = PruneRequest(
        ratio=ratio,
        layers=tuple((layers or {}).items()),
        macs_target=macs_target,
        latency_target=latency_target,
        importance="group" if importance == "auto" else importance,
        round_to=fast_multiple(resolved) if round_to == "auto" else round_to,
        ignored=tuple([ignored] if isinstance(ignored, str) else ignored),
        seed=seed,
        is_round_auto=round_to == "auto",
    )
    _check_request(module, request, loader, reconstruct)
    latency = _latency(request, latency_of, resolved, runtime, threads)
    data = list(loader) if isinstance(loader, Iterator) else loader  # several steps go through it
    with show_progress(), pruning_context():
        plan = make_plan(
            module, inputs, kwargs, importance=importance, data=data, ignored=request.ignored,
            layers=request.layers, seed=seed, target=resolved if request.is_round_auto else None,
        )  # fmt: skip
        plan = plan.with_rounding(round_to)
        return _build_pruned(plan, request, latency, reestimate, reconstruct is not False)


def _build_pruned(
    plan: PruningPlan, request: PruneRequest, latency: LatencyOf | None, reestimate: bool, reconstruct: bool
) -> Pruned:
    """Return the pruned model that a plan gives for a request, proved, with requested against achieved."""
    report_progress("pruning: removing channels, and proving the result")
    check_prunable(plan)
    latency_before_s = None if latency is None else _seconds(latency(plan.base, plan.before))
    ratio, removed = _chosen_units(plan, request, latency, latency_before_s)
    spec = plan.spec(removed)
    proved = apply_spec(plan.base, spec)
    check = check_pruned(plan.probe, proved, spec, plan.arguments)
    after = plan.profile(proved)
    layers = layer_channels(plan, removed, ratio)
    achieved = PruneResult(
        macs_before=plan.before.totals.macs,
        macs=after.totals.macs,
        params_before=plan.before.totals.params,
        params=after.totals.params,
        channels_before=sum(layer.before for layer in layers),
        channels=sum(layer.after for layer in layers),
        layers=layers,
        ratio=ratio,
        latency_before_s=latency_before_s,
        latency_s=None if latency is None else _seconds(latency(proved, after)),
        is_lower_bound=after.totals.is_lower_bound,
    )
    _check_faster(request, achieved)
    return Pruned(
        model=plan.build(removed, reestimate, reconstruct),
        spec=spec,
        asked=request,
        achieved=achieved,
        shortfalls=() if _is_reached(request, achieved) else shortfalls(plan, layers),
        check=check,
    )


def _chosen_units(
    plan: PruningPlan, request: PruneRequest, latency: LatencyOf | None, latency_before_s: float | None
) -> tuple[float | None, np.ndarray]:
    """Return the requested ratio, or the one that meets the target, and the units that go."""
    wanted = request.macs_target or request.latency_target
    if wanted is None:
        return request.ratio, plan.removed(request.ratio)
    shares: dict[bytes, float] = {}

    def remaining(ratio: float, shifts: Mapping[int, int] | None = None) -> float:
        removed = plan.removed(ratio, shifts)
        key = removed.tobytes()
        if key in shares:
            return shares[key]
        if latency is None or not latency_before_s:
            shares[key] = plan.costs(removed).totals.macs / max(plan.before.totals.macs, 1)
        else:
            variant = apply_spec(plan.base, plan.spec(removed))
            shares[key] = _seconds(latency(variant, plan.profile(variant))) / latency_before_s
        return shares[key]

    ratio = ratio_for(remaining, wanted)
    free = [number for number, group in enumerate(plan.channel_map.groups) if not group.refused]
    shifts = adjust_group_widths(lambda shifts: remaining(ratio, shifts), free, wanted)
    return ratio, plan.removed(ratio, shifts)


def ratio_for(remaining: Callable[[float], float], target: float) -> float:
    """Return the ratio whose result is closest to the target, where `remaining` falls, in steps, as the ratio grows.

    >>> round(ratio_for(lambda ratio: (1 - ratio) ** 2, 0.25), 2)
    0.5
    """
    low, high = 0.0, HIGHEST_RATIO
    shares = {low: 1.0, high: remaining(high)}
    for _ in range(STEPS):
        if shares[high] > target or min(abs(share - target) for share in shares.values()) <= CLOSE * target:
            break
        middle = (low + high) / 2
        shares[middle] = remaining(middle)
        low, high = (middle, high) if shares[middle] > target else (low, middle)
    # Choose the smallest of equally close ratios, never one that takes as long as the original or longer.
    faster = [ratio for ratio, share in shares.items() if share < 1.0 or ratio == 0.0]
    return min(faster, key=lambda ratio: (abs(shares[ratio] - target), ratio))


def adjust_group_widths(
    remaining: Callable[[Mapping[int, int]], float], groups: Sequence[int], target: float
) -> Mapping[int, int]:
    """Let groups keep a step of rounding more or less, one after another while that comes closer to the target.

    One ratio for all moves many groups at once where their channels are rounded, and may jump over the target.

    >>> adjust_group_widths(lambda shifts: 0.4 + 0.03 * shifts.get(0, 0) + 0.11 * shifts.get(1, 0), (0, 1), 0.5)
    {1: 1}
    """
    shifts: dict[int, int] = {}
    now = remaining(shifts)
    while abs(now - target) > NEAR * target:
        step = 1 if now < target else -1
        trials = [{**shifts, number: shifts.get(number, 0) + step} for number in groups]
        # A step that makes it slower than the original is not taken.
        values = [share if (share := remaining(trial)) < 1 else math.inf for trial in trials]
        best = min(range(len(trials)), key=lambda number: abs(values[number] - target), default=None)
        if best is None or abs(values[best] - target) >= abs(now - target):
            break
        shifts, now = trials[best], values[best]
    return shifts


def _known_target(target: Target, runtime: str | None, threads: int | None) -> ResolvedTarget:
    """Return the target in fp32; in int8 where times are known in int8 alone, as on microcontrollers."""
    resolved = resolve_target(target, runtime=runtime, threads=threads)
    if resolved.platform is not None or resolved.calibration is not None:
        return resolved
    in_int8 = resolve_target(target, "int8", runtime=runtime, threads=threads)
    return resolved if in_int8.platform is None else in_int8


def _latency(
    request: PruneRequest,
    latency_of: Callable[[nn.Module], float] | None,
    target: ResolvedTarget | None,
    runtime: str | None,
    threads: int | None,
) -> LatencyOf | None:
    """Return how the latency of a variant is found: by the caller's function, or predicted for a target; or None."""
    for name, value in (("runtime", runtime), ("threads", threads)):
        if value is not None and (target is None or request.latency_target is None):
            raise InvalidInput(f"{name}= requires target= and latency_target=")
    if request.latency_target is None:
        if latency_of is not None or (target is not None and not request.is_round_auto):
            raise InvalidInput("latency_of= and target= say how latency is found; give latency_target= too")
        return None
    if latency_of is not None and target is None:
        return lambda model, _: latency_of(model)
    if latency_of is None and target is not None:
        return lambda _, profiled: predicted_seconds(profiled, target, threads)
    what = "neither is given" if target is None else "both are given"
    raise InvalidInput(
        "latency_target needs to know the latency: latency_of= (a function of the model, in seconds) or "
        f"target= (a device, or a machine that was calibrated), and {what}; give one of them"
    )


def _seconds(seconds: float) -> float:
    if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise InvalidInput(f"latency_of returned {seconds!r}; it must be seconds, above 0")
    return float(seconds)


def _is_reached(request: PruneRequest, achieved: PruneResult) -> bool:
    """Return whether a target of MACs or latency is met within a tenth; False where there is none."""
    wanted = request.macs_target or request.latency_target
    got = achieved.macs_ratio if request.macs_target else achieved.latency_ratio
    return wanted is not None and got is not None and abs(got - wanted) <= WITHIN * wanted


def _check_faster(request: PruneRequest, achieved: PruneResult) -> None:
    """Refuse a model for a latency target if it takes as long as the original or longer, or if no ratio is enough."""
    ratio = achieved.latency_ratio
    if ratio is not None and ratio < 1 and achieved.ratio == HIGHEST_RATIO and not _is_reached(request, achieved):
        raise PruningFailed(
            f"latency_target={request.latency_target:g} is out of reach: with {HIGHEST_RATIO:.0%} of the channels "
            f"pruned {ratio:.0%} of the latency remains; ask for more than that, or give ratio= or macs_target= instead"
        )
    is_whole = achieved.channels == achieved.channels_before
    if ratio is None or ratio < 1 or (is_whole and _is_reached(request, achieved)):
        return
    what = "no pruned variant that was tried is faster than the original"
    if not is_whole:
        what = f"the variant closest to the target takes {ratio:.2f} times as long as the original"
    raise PruningFailed(
        f"latency_target={request.latency_target:g}: {what}; round channels to wider steps (round_to=16), give "
        "macs_target= instead, or keep the original"
    )


def _check_request(
    model: nn.Module, request: PruneRequest, loader: Iterable[Any] | None, reconstruct: bool | None
) -> None:
    amounts = [name for name in ("ratio", "macs_target", "latency_target") if getattr(request, name) is not None]
    if len(amounts) > 1:
        raise InvalidInput(f"{' and '.join(amounts)} are given; give one of them")
    if not amounts and not request.layers:
        raise InvalidInput(
            "nothing says how much to prune; pass ratio=0.5, layers=, macs_target=0.5 or latency_target=0.5"
        )
    if request.ratio is not None:
        check_share("ratio", request.ratio)
    for path, share in request.layers:
        check_share(f"the ratio of {path!r}", share)
    for name, value in (("macs_target", request.macs_target), ("latency_target", request.latency_target)):
        if value is not None and not (is_number(value) and 0 < value <= 1):
            raise InvalidInput(f"{name} is {value!r}; it is the share that is to remain, above 0 and up to 1")
    check_one_of("importance", request.importance, IMPORTANCES)
    if loader is None and request.importance in NEED_DATA:
        what = NEED_DATA[request.importance]
        raise InvalidInput(f'importance="{request.importance}" needs {what}; pass loader= with (inputs, labels)')
    if loader is None and reconstruct:
        raise InvalidInput("reconstruct= needs data to see what channels contribute; pass loader= with batches")
    if not request.is_round_auto and isinstance(request.round_to, str):
        raise InvalidInput(f'round_to is {request.round_to!r}; it is a whole number, or "auto"')
    check_whole("round_to", request.round_to)
    for path in (*(path for path, _ in request.layers), *request.ignored):
        check_path(model, path)


def check_share(name: str, value: Any) -> None:
    """Refuse what is not a share of channels to remove."""
    if not (is_number(value) and 0 <= value < 1):
        raise InvalidInput(f"{name} is {value!r}; it is the share of channels to remove, at least 0 and below 1")


def check_path(model: nn.Module, path: str) -> None:
    """Refuse the name of a layer that is not there, or that has nothing to prune."""
    modules = dict(model.named_modules())
    prunable = [name for name, module in modules.items() if kind_of(module).is_prunable]
    if path not in modules or not path:
        close = get_close_matches(str(path), [name for name in modules if name], n=3, cutoff=0.4) or prunable[:3]
        raise InvalidInput(f"{type(model).__name__} has no layer {path!r}; closest: {', '.join(close)}")
    if not any(name == path or name.startswith(f"{path}.") for name in prunable):
        raise InvalidInput(
            f"{path} is a {type(modules[path]).__name__} and has no channels of its own; name a convolution, linear or "
            f"attention layer, such as {', '.join(prunable[:3])}"
        )


def structured_channel_prune(
    model: nn.Module, level: float, input_shape: tuple[int, ...] = (1, 1, 28, 28), round_to: int = 1
) -> nn.Module:
    """Return a copy of the model without a share of its channels, as the published pipeline calls pruning.

    Args:
        model: Any model; it is not modified.
        level: Share of every layer's channels to remove, from 0 to below 1. Those with the smallest weights go.
        input_shape: Shape of the model's input, batch included; the default is SmallCNN's.
        round_to: Kept channels are a multiple of this; 1, as published, comes nearest to the share.

    >>> from edge_opt.model import SmallCNN
    >>> structured_channel_prune(SmallCNN(16, 32), 0.25).conv2
    Conv2d(12, 24, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    return prune(model, input_shape, level, round_to=round_to).model
