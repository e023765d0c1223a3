"""prune(): a smaller copy of a model, proved, with what was achieved against what was asked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.compress.importance import KINDS
from edge_opt.compress.layers import PRUNABLE
from edge_opt.compress.outcome import layer_channels, shortfalls
from edge_opt.compress.plan import Plan, make_plan
from edge_opt.compress.spec import apply_spec
from edge_opt.compress.targets import latency_by_roofline, nudges, ratio_for
from edge_opt.compress.validation import check_pruned, export_difference
from edge_opt.errors import InvalidInput, PruningFailed
from edge_opt.records import DeviceSpec, Importance, ModelProfile, Pruned, PruneRequest, PruneResult
from edge_opt.trace.guard import as_found

# How near to a target of MACs or latency the result must be to count as reached.
WITHIN = 0.1
Latency = Callable[[nn.Module, ModelProfile], float]


def prune(
    model: nn.Module,
    example_inputs: Any,
    ratio: float | Mapping[str, float] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    layers: Mapping[str, float] | None = None,
    macs_target: float | None = None,
    latency_target: float | None = None,
    latency_of: Callable[[nn.Module], float] | None = None,
    target: str | os.PathLike[str] | DeviceSpec | None = None,
    importance: Importance = "l1",
    round_to: int = 8,
    ignored: Sequence[str] = (),
    global_ranking: bool = False,
    loader: Iterable[Any] | None = None,
    seed: int = 0,
    check_export: bool = False,
) -> Pruned:
    """A copy of the model with the least important channels and attention heads taken out, proved and accounted for.

    `ratio` is the share to remove of every layer, or a mapping of layers to shares, as `layers` is; layers that are
    added or concatenated lose the same channels. `macs_target` and `latency_target` are the share that is to remain;
    latency is what `latency_of(model)` says, in seconds, or the roofline of the device `target`. Kept channels are
    rounded to a multiple of `round_to`. With `global_ranking` units of all layers compete. `importance="taylor"` needs
    a `loader` of (inputs, labels). With `check_export` the result is also exported and run in ONNX Runtime. The model
    is left as it was.

    >>> from edge_opt.model import SmallCNN
    >>> pruned = prune(SmallCNN(16, 32), (1, 1, 28, 28), 0.5)
    >>> pruned.model.conv2
    Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    >>> [(fall.path, fall.reason) for fall in pruned.shortfalls]
    [('classifier', "classifier is the model's output")]
    """
    if isinstance(ratio, Mapping):
        layers, ratio = {**ratio, **(layers or {})}, None
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"the model must be a torch.nn.Module, and this is a {type(model).__name__}")
    request = PruneRequest(
        ratio=ratio,
        layers=tuple((layers or {}).items()),
        macs_target=macs_target,
        latency_target=latency_target,
        importance=importance,
        round_to=round_to,
        ignored=tuple([ignored] if isinstance(ignored, str) else ignored),
        global_ranking=global_ranking,
        seed=seed,
    )
    _check_request(model, request, loader)
    latency = _latency(request, latency_of, target)
    with as_found([], training=False), torch.inference_mode(False), torch.enable_grad():
        plan = make_plan(model, example_inputs, kwargs, request, loader)
        pruned = _carried_out(model, plan, request, latency)
    if not check_export:
        return pruned
    difference = export_difference(pruned.model, example_inputs, kwargs)
    return replace(pruned, check=replace(pruned.check, export_difference=difference))


def _carried_out(model: nn.Module, plan: Plan, request: PruneRequest, latency: Latency | None) -> Pruned:
    if all(group.refused for group in plan.found.groups):
        reasons = "; ".join(dict.fromkeys(str(group.refused) for group in plan.found.groups)) or "it has no layers"
        raise PruningFailed(f"nothing in {type(model).__name__} can be pruned: {reasons}")
    latency_before_s = None if latency is None else _positive(latency(plan.base, plan.before))
    ratio, removed = _chosen(plan, request, latency, latency_before_s)
    spec = plan.spec(removed)
    pruned = apply_spec(plan.base, spec)
    check = check_pruned(plan.probe, pruned, spec, plan.arguments)
    after = plan.profile(pruned)
    layers = layer_channels(plan.base, plan.owners, removed, plan.asked(ratio))
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
        latency_s=None if latency is None else _positive(latency(pruned, after)),
        is_lower_bound=after.totals.is_lower_bound,
    )
    falls = shortfalls(plan.base, plan.found, plan.owners, layers, request.round_to, request.global_ranking)
    return Pruned(
        model=apply_spec(model, spec),
        spec=spec,
        asked=request,
        achieved=achieved,
        shortfalls=() if is_reached(request, achieved) else falls,
        check=check,
    )


def is_reached(request: PruneRequest, achieved: PruneResult) -> bool:
    """Whether a target of MACs or latency is met, within a tenth; without one, False: each layer answers for itself."""
    wanted = request.macs_target or request.latency_target
    got = achieved.macs_ratio if request.macs_target else achieved.latency_ratio
    return wanted is not None and got is not None and abs(got - wanted) <= WITHIN * wanted


def _chosen(
    plan: Plan, request: PruneRequest, latency: Latency | None, latency_before_s: float | None
) -> tuple[float | None, np.ndarray]:
    """The ratio asked for, or the one that meets the target, and the units that go."""
    wanted = request.macs_target or request.latency_target
    if wanted is None:
        return request.ratio, plan.removed(request.ratio)
    tried: dict[bytes, float] = {}

    def remaining(ratio: float, shifts: Mapping[int, int] | None = None) -> float:
        removed = plan.removed(ratio, shifts)
        key = removed.tobytes()
        if key not in tried:
            tried[key] = share(removed)
        return tried[key]

    def share(removed: np.ndarray) -> float:
        if latency is None or not latency_before_s:
            return plan.costs(removed).totals.macs / max(plan.before.totals.macs, 1)
        variant = apply_spec(plan.base, plan.spec(removed))
        return _positive(latency(variant, plan.profile(variant))) / latency_before_s

    ratio = ratio_for(remaining, wanted)
    free = [number for number, group in enumerate(plan.found.groups) if not group.refused]
    shifts = nudges(lambda shifts: remaining(ratio, shifts), free, wanted)
    return ratio, plan.removed(ratio, shifts)


def _latency(
    request: PruneRequest,
    latency_of: Callable[[nn.Module], float] | None,
    target: str | os.PathLike[str] | DeviceSpec | None,
) -> Latency | None:
    if request.latency_target is None:
        if latency_of is not None or target is not None:
            raise InvalidInput("latency_of= and target= say how latency is found; give latency_target= too")
        return None
    if (latency_of is None) == (target is None):
        what = "neither is given" if target is None else "both are given"
        raise InvalidInput(
            "latency_target needs to know the latency: latency_of= (a function of the model, in seconds) or "
            f"target= (a device, by its roofline), and {what}; give one of them"
        )
    if latency_of is not None:
        return lambda model, _: latency_of(model)
    assert target is not None
    return lambda _, profiled: latency_by_roofline(profiled, target)


def _positive(seconds: float) -> float:
    if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise InvalidInput(f"latency_of returned {seconds!r}; it must be seconds, above 0")
    return float(seconds)


def _check_request(model: nn.Module, request: PruneRequest, loader: Iterable[Any] | None) -> None:
    given = [name for name in ("ratio", "macs_target", "latency_target") if getattr(request, name) is not None]
    if len(given) > 1:
        raise InvalidInput(f"{' and '.join(given)} are given; give one of them")
    if not given and not request.layers:
        raise InvalidInput(
            "how much to prune is not said; give ratio=0.5, layers={...}, macs_target= or latency_target="
        )
    shares = [("ratio", request.ratio), *((f"the ratio of {path!r}", share) for path, share in request.layers)]
    for name, value in shares:
        if value is not None:
            check_share(name, value)
    for name, value in (("macs_target", request.macs_target), ("latency_target", request.latency_target)):
        if value is not None and not _is_number(value, lambda share: 0 < share <= 1):
            raise InvalidInput(f"{name} is {value!r}; it is the share that is to remain, above 0 and up to 1")
    if request.importance not in KINDS:
        raise InvalidInput(f"importance is {request.importance!r}; it must be one of {', '.join(KINDS)}")
    if request.importance == "taylor" and loader is None:
        raise InvalidInput('importance="taylor" needs data to feel the loss; pass loader= with (inputs, labels)')
    if isinstance(request.round_to, bool) or not isinstance(request.round_to, int) or request.round_to < 1:
        raise InvalidInput(f"round_to is {request.round_to!r}; it must be a whole number of at least 1")
    for path in (*(path for path, _ in request.layers), *request.ignored):
        check_path(model, path)


def check_share(name: str, value: Any) -> None:
    """Refuse what is not a share of channels to remove."""
    if not _is_number(value, lambda share: 0 <= share < 1):
        raise InvalidInput(f"{name} is {value!r}; it is the share of channels to remove, at least 0 and below 1")


def _is_number(value: Any, holds: Callable[[float], bool]) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and holds(value)


def check_path(model: nn.Module, path: str) -> None:
    """Refuse the name of a layer that is not there, or that has nothing to prune."""
    modules = dict(model.named_modules())
    prunable = [name for name, module in modules.items() if isinstance(module, PRUNABLE)]
    if path not in modules or not path:
        close = get_close_matches(str(path), [name for name in modules if name], n=3, cutoff=0.4) or prunable[:3]
        raise InvalidInput(f"{type(model).__name__} has no layer {path!r}; closest: {', '.join(close)}")
    if not any(name == path or name.startswith(f"{path}.") for name in prunable):
        raise InvalidInput(
            f"{path} is a {type(modules[path]).__name__} and has no channels of its own; name a convolution, linear or "
            f"attention layer, such as {', '.join(prunable[:3])}"
        )
