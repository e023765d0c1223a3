"""prune(): which channels go, cut, proved; asked against achieved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from edge_opt._support.checks import check_one_of, check_whole, is_number
from edge_opt._support.progress import report_progress, show_progress
from edge_opt._support.unchanged import unchanged
from edge_opt.boards.targets import Target, find_target
from edge_opt.errors import EdgeOptError, InvalidInput, PruningFailed
from edge_opt.profiling import profile
from edge_opt.pruning.cost_targets import (
    Latency,
    check_faster,
    is_reached,
    latency_for,
    nudges,
    positive_seconds,
    ratio_for,
)
from edge_opt.pruning.coupling import (
    NONE,
    ChannelMap,
    Group,
    Side,
    TensorDim,
    channel_map,
    channels,
    is_depthwise,
    is_prunable,
    refusal,
    ties,
)
from edge_opt.pruning.proof import TOLERANCE, check_pruned, roused, silenced_error
from edge_opt.pruning.ranking import KINDS, NEED_DATA, Ranking, best_kind, unit_scores
from edge_opt.pruning.recipe import apply_spec, prune_spec
from edge_opt.pruning.reconstruction import reestimate_norms, stand_in
from edge_opt.pruning.widths import RoundTo, fast_multiple
from edge_opt.records.compression import (
    Importance,
    LayerChannels,
    Pruned,
    PruneRequest,
    PruneResult,
    PruneSpec,
    Shortfall,
)
from edge_opt.records.profiles import ModelProfile
from edge_opt.trace.inputs import CallArguments, call_arguments, map_arguments, real_tensor


def askable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose channels or heads one can ask to prune; the parts of an attention layer are not on their own."""
    attention = [path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    inner = {f"{path}.out_proj".lstrip(".") for path in attention}
    return {path: module for path, module in model.named_modules() if is_prunable(module) and path not in inner}


def owners_of(model: nn.Module, found: ChannelMap) -> dict[str, np.ndarray]:
    """For each layer that can be asked for, the unit of each of its output channels, or of its heads."""
    owners = {}
    for path, module in askable_layers(model).items():
        if isinstance(module, nn.MultiheadAttention):
            owners[path] = found.heads.get(path, np.full(module.num_heads, NONE))
            continue
        sides: tuple[Side, ...] = ("out", "both")
        known = [found.layers[path, side] for side in sides if (path, side) in found.layers]
        owners[path] = known[0] if known else np.full(channels(module, "out"), NONE)
    return owners


def layer_channels(
    model: nn.Module, owners: Mapping[str, np.ndarray], removed: np.ndarray, asked: Mapping[str, float]
) -> tuple[LayerChannels, ...]:
    """Each layer's channels before and after, in the model's order."""
    found = []
    for path, owner in owners.items():
        module = model.get_submodule(path)
        found.append(
            LayerChannels(
                path=path,
                kind=type(module).__name__,
                unit="heads" if isinstance(module, nn.MultiheadAttention) else "channels",
                before=len(owner),
                after=int(((owner == NONE) | ~removed[owner]).sum()),
                asked=asked.get(path, 0.0),
            )
        )
    return tuple(found)


# A share of each group that a trial removes: enough to be seen in the outputs, never all.
_TRIAL = 0.5
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class Plan:
    """The original, its call, its channels, and who loses how much.

    `base` is a copy in eval mode, without hooks; `probe` the same with nothing constant in it, to see what silencing
    does; `skeleton` the same without data, to try many ratios on.
    """

    base: nn.Module
    probe: nn.Module
    skeleton: nn.Module
    arguments: CallArguments
    before: ModelProfile
    ranking: Ranking
    owners: dict[str, np.ndarray]
    named: dict[str, float]

    @property
    def found(self) -> ChannelMap:
        return self.ranking.found

    def asked(self, ratio: float | None) -> dict[str, float]:
        """The share of its channels that each layer is to lose."""
        return dict.fromkeys(self.owners, ratio or 0.0) | self.named

    def removed(self, ratio: float | None, shifts: Mapping[int, int] | None = None) -> np.ndarray:
        """The units that go. A ratio given to one layer holds for all that are coupled with it."""
        group_of, asked = self.found.group_of(), self.asked(ratio)
        shares: dict[int, tuple[str, float]] = {}
        # Named layers first, so that they decide for their groups.
        for path in sorted(self.owners, key=lambda path: path not in self.named):
            owner = self.owners[path]
            if path in self.found.heads and path not in self.named:
                # Asked for all of the model, an attention layer gives of its outputs, too, not of its heads alone.
                owner = np.concatenate([owner, self.found.layers.get((path, "out"), owner)])
            for number in dict.fromkeys(group_of[owner[owner != NONE]].tolist()):
                first, share = shares.setdefault(number, (path, asked[path]))
                if path in self.named and share != asked[path]:
                    raise InvalidInput(
                        f"{first} and {path} lose the same channels, and are given the ratios {share:g} and "
                        f"{asked[path]:g}; give one of them"
                    )
        return self.ranking.removed({number: share for number, (_, share) in shares.items()}, shifts)

    def removed_by(self, spec: PruneSpec) -> np.ndarray:
        """The units that a recipe takes out."""
        gone = np.zeros(self.found.units, dtype=bool)
        for each in spec.kept:
            owner = self.found.tensors[TensorDim(each.tensor, each.dim)]
            lost = np.delete(owner, each.indices)
            gone[lost[lost != NONE]] = True
        return gone

    def spec(self, removed: np.ndarray) -> PruneSpec:
        return prune_spec(self.base, self.found, removed)

    def costs(self, removed: np.ndarray) -> ModelProfile:
        """What the model costs without these units, from shapes alone."""
        return self.profile(apply_spec(self.skeleton, self.spec(removed)))

    def profile(self, model: nn.Module) -> ModelProfile:
        """What a variant of the model costs on the same inputs."""
        return profile(model, list(self.arguments.args) or None, kwargs=self.arguments.kwargs)


def make_plan(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, request: PruneRequest, loader: Iterable[Any] | None
) -> Plan:
    """Follow the channels of a model, rank them, and set apart those that cannot go."""
    report_progress("pruning: which channels hang together")
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidInput("a scripted model cannot be pruned; pass the module that it was scripted from")
    if any(tensor.is_meta for tensor in model.parameters()):
        raise InvalidInput(
            "the model's weights are on the meta device and have no values to rank; build it with real ones"
        )
    before = profile(model, inputs, kwargs=kwargs)
    base = working_copy(model)
    floating = (tensor.dtype for tensor in base.parameters() if tensor.is_floating_point())
    dtype = next(floating, torch.get_default_dtype())
    place = next((tensor.device for tensor in base.parameters()), torch.device("cpu"))
    arguments = map_arguments(call_arguments(model, inputs, kwargs), lambda value: real_tensor(value, dtype, place))
    found = channel_map(working_copy(model), arguments, request.ignored)
    scores = unit_scores(base, found, request.importance, loader, request.seed)
    owners = owners_of(base, found)
    named = {
        path: share for name, share in request.layers for path in owners if path == name or path.startswith(f"{name}.")
    }
    ranking = Ranking(found, scores, request.round_to, request.global_ranking, request.is_round_auto)
    skeleton = copy.deepcopy(base).to("meta")
    return _proved(Plan(base, roused(base), skeleton, arguments, before, ranking, owners, named))


def shortfalls(plan: Plan, layers: tuple[LayerChannels, ...]) -> tuple[Shortfall, ...]:
    """Layers that kept at least one channel more than asked, each with the reason."""
    group_of = plan.found.group_of()
    falls = []
    for layer in layers:
        if layer.after - layer.before * (1 - layer.asked) < 1:
            continue
        owner = plan.owners[layer.path]
        groups = [plan.found.groups[number] for number in dict.fromkeys(group_of[owner[owner != NONE]].tolist())]
        reason = _reason(plan, layer, owner, groups)
        if reason:
            falls.append(Shortfall(layer.path, layer.asked, layer.achieved, reason))
    return tuple(falls)


def _reason(plan: Plan, layer: LayerChannels, owner: np.ndarray, groups: list[Group]) -> str | None:
    module = plan.base.get_submodule(layer.path)
    refused = next((group.refused for group in groups if group.refused), None)
    if refused:
        # Some reasons name a layer, which may be another one, and some are about all channels alike.
        is_own = refused.startswith((f"{layer.path} ", "removing ", "its ", "the channels ", "keys "))
        return refused if is_own else f"coupled with others: {refused}"
    if (owner == NONE).any():
        return refusal(module) or _unreached(plan, layer.path)
    if plan.ranking.is_global:
        return None
    labels = ties(module, "out")
    if labels is not None:
        return (
            f"grouped convolution: its {module.groups} groups lose channels at the same position, "
            f"{labels.max() + 1} positions in all"
        )
    units = len(set(owner.tolist()))
    if layer.unit == "heads":
        return f"whole heads only: {layer.after} of {layer.before} stay"
    if units < len(owner) and not (isinstance(module, _ConvNd) and is_depthwise(module)):
        return f"{len(owner) // units} channels go at a time: {units} heads, or groups of a coupled layer"
    multiple = max((plan.ranking.multiple(group) for group in groups), default=1)
    if multiple > 1:
        return f"rounded to a multiple of {multiple}: {layer.after} of {layer.before} stay"
    return f"whole channels only: {layer.after} of {layer.before} stay"


def _unreached(plan: Plan, path: str) -> str:
    """Why nothing is known of a layer's channels."""
    if any(call.path == path for call in plan.before.trace.modules):
        return "the dependency graph never reached it"
    return "it is not called as a layer: its parent computes with its weights, or never uses it"


def working_copy(model: nn.Module) -> nn.Module:
    """A copy to run: in eval mode, and without the hooks, which belong to the caller."""
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise PruningFailed(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error
    for module in copied.modules():
        module.training = False
        for name in _HOOKS:
            getattr(module, name).clear()
    return copied


def _proved(plan: Plan) -> Plan:
    """The plan without the groups whose removal the model does not survive, or that takes more than themselves along.

    All are tried at once, by running the model; only when that fails, one by one.
    """
    groups = [number for number, group in enumerate(plan.found.groups) if not group.refused and len(group.units) > 1]
    if not groups or _complaint(plan, groups, is_run=True) is None:
        return plan
    complaints = {number: _complaint(plan, [number], is_run=False) for number in groups}
    sound = [number for number in groups if complaints[number] is None]
    if sound and _complaint(plan, sound, is_run=True) is not None:
        complaints |= {number: _complaint(plan, [number], is_run=True) for number in sound}
    refused = tuple(
        group if group.refused else replace(group, refused=complaints.get(number))
        for number, group in enumerate(plan.found.groups)
    )
    return replace(plan, ranking=replace(plan.ranking, found=replace(plan.found, groups=refused)))


def _complaint(plan: Plan, groups: list[int], is_run: bool) -> str | None:
    """What is wrong with a model that lost half of these groups; only its shapes are looked at unless it is run."""
    removed = replace(plan.ranking, round_to=1, is_global=False).removed(dict.fromkeys(groups, _TRIAL))
    spec = plan.spec(removed)
    try:
        if not is_run:
            after = plan.costs(removed).trace.modules[0].output_shapes
            changed = after != plan.before.trace.modules[0].output_shapes
            return f"removing channels changes the model's outputs to {after}" if changed else None
        error = silenced_error(plan.probe, apply_spec(plan.probe, spec), spec, plan.arguments)
    except EdgeOptError as refused:
        return f"removing channels breaks the model: {refused}"
    if error is None or error <= TOLERANCE:
        return None
    return (
        "removing channels changes more than those channels: a reshape, mean or softmax over channels is between them, "
        f"outputs are off by {error:.2g} of the change"
    )


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
    target: Target | None = None,
    runtime: str | None = None,
    threads: int | None = None,
    importance: Importance = "auto",
    round_to: RoundTo = "auto",
    ignored: Sequence[str] = (),
    global_ranking: bool = False,
    loader: Iterable[Any] | None = None,
    reestimate: bool = True,
    reconstruct: bool | None = None,
    seed: int = 0,
) -> Pruned:
    """A copy of the model with the least important channels and attention heads taken out, proved and accounted for.

    Layers that are added or concatenated lose the same channels. Give `ratio`, `layers` or one of the two targets.

    Args:
        model: The model; it is left as it was.
        example_inputs: As in `profile`; the shape of one call.
        ratio: Share to remove of every layer, or a mapping of layers to shares.
        kwargs: Arguments of the model by name.
        layers: Shares to remove of single layers, by path.
        macs_target: Share of the MACs that is to remain.
        latency_target: Share of the latency that is to remain; it needs `latency_of` or `target`.
        latency_of: A function of the model that gives its latency in seconds.
        target: Where the model is to run, as in `profile`: its latency is predicted, and `round_to` chosen, for it.
        runtime: What runs the model on the target, such as "ncnn"; the best-known one unless given.
        threads: Of the runtime on the target, as in `profile`.
        importance: What ranks channels: weights of all layers that write and read them (group, which is auto), what the
            layers behind lose on `loader` (reconstruction), what the loss feels (taylor), norms (bn_scale), weights of
            the layers that write them (l1, l2), or chance (random).
        round_to: Kept channels are a multiple of this; "auto" is what kernels run fast here, or on `target`.
        ignored: Paths of layers that stay whole.
        global_ranking: Whether channels of all layers compete with each other; else each layer loses its own share.
        loader: Calibration batches, inputs or (inputs, labels), which taylor needs; a few hundred samples do.
        reestimate: Whether batch norms see the loader's batches after the cut, so that their statistics hold again.
        reconstruct: Whether layers behind a cut are fitted to the loader's batches. None: where there is a loader.
        seed: Decides a random ranking.

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
    place = None if target is None else find_target(target)
    request = PruneRequest(
        ratio=ratio, layers=tuple((layers or {}).items()), macs_target=macs_target, latency_target=latency_target,
        importance=best_kind(importance), round_to=fast_multiple(place) if round_to == "auto" else round_to,
        ignored=tuple([ignored] if isinstance(ignored, str) else ignored), global_ranking=global_ranking, seed=seed,
        is_round_auto=round_to == "auto",
    )  # fmt: skip
    _check_request(model, request, loader, reconstruct)
    latency = latency_for(request, latency_of, place, {"runtime": runtime, "threads": threads})
    data = list(loader) if isinstance(loader, Iterator) else loader  # several steps go through it
    with show_progress(), unchanged([], training=False), torch.inference_mode(False), torch.enable_grad():
        plan = make_plan(model, example_inputs, kwargs, request, data)
        pruned = carried_out(model, plan, request, latency)
        if data is not None:
            heal(model, plan, pruned.model, pruned.spec, data, reestimate, reconstruct is not False)
    return pruned


def check_prunable(model: nn.Module, plan: Plan) -> None:
    """Refuse a model of which no channel can go."""
    if all(group.refused for group in plan.found.groups):
        reasons = "; ".join(dict.fromkeys(str(group.refused) for group in plan.found.groups)) or "it has no layers"
        raise PruningFailed(f"nothing in {type(model).__name__} can be pruned: {reasons}")


def carried_out(model: nn.Module, plan: Plan, request: PruneRequest, latency: Latency | None) -> Pruned:
    report_progress("pruning: removing channels, and proving the result")
    check_prunable(model, plan)
    latency_before_s = None if latency is None else positive_seconds(latency(plan.base, plan.before))
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
        latency_s=None if latency is None else positive_seconds(latency(pruned, after)),
        is_lower_bound=after.totals.is_lower_bound,
    )
    check_faster(request, achieved)
    falls = shortfalls(plan, layers)
    return Pruned(
        model=apply_spec(model, spec),
        spec=spec,
        asked=request,
        achieved=achieved,
        shortfalls=() if is_reached(request, achieved) else falls,
        check=check,
    )


def heal(
    model: nn.Module,
    plan: Plan,
    pruned: nn.Module,
    spec: PruneSpec,
    data: Iterable[Any],
    reestimate: bool,
    reconstruct: bool,
) -> None:
    """Let kept channels of the pruned copy stand in for removed ones, and its norms see it as it is."""
    report_progress("pruning: fitting what is left to the outputs of the original")
    if not spec.kept:
        return
    if reconstruct:
        filled = working_copy(model)
        stand_in(filled, plan.found, plan.removed_by(spec), data)
        pruned.load_state_dict(apply_spec(filled, spec).state_dict())
    if reestimate:
        reestimate_norms(pruned, data)


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
        return positive_seconds(latency(variant, plan.profile(variant))) / latency_before_s

    ratio = ratio_for(remaining, wanted)
    free = [number for number, group in enumerate(plan.found.groups) if not group.refused]
    shifts = nudges(lambda shifts: remaining(ratio, shifts), free, wanted)
    return ratio, plan.removed(ratio, shifts)


def _check_request(
    model: nn.Module, request: PruneRequest, loader: Iterable[Any] | None, reconstruct: bool | None
) -> None:
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
        if value is not None and not (is_number(value) and 0 < value <= 1):
            raise InvalidInput(f"{name} is {value!r}; it is the share that is to remain, above 0 and up to 1")
    check_one_of("importance", request.importance, KINDS)
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
    prunable = [name for name, module in modules.items() if is_prunable(module)]
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
