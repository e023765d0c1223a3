"""The plan of a pruning: the model's channels, ranked, without those whose removal the model does not survive."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt._support.progress import report_progress
from edge_opt._support.unchanged import unchanged
from edge_opt.boards.estimate import predicted_seconds
from edge_opt.boards.targets import ResolvedTarget
from edge_opt.errors import EdgeOptError, InvalidInput, PruningFailed
from edge_opt.profiling import profile
from edge_opt.pruning.coupling import NONE, ChannelMap, ChannelRefusal, channel_map, kept_channels
from edge_opt.pruning.layer_kinds import channels, is_depthwise, kind_of, refusal_of, tied_positions
from edge_opt.pruning.proof import TOLERANCE, silenced_error, with_random_constants
from edge_opt.pruning.ranking import Ranking, RoundTo, fast_multiple, unit_scores
from edge_opt.pruning.recipe import apply_spec, copied_model, prune_spec
from edge_opt.pruning.reconstruction import fold_removed_channels, reestimate_norms
from edge_opt.records.compression import Importance, LayerChannels, PruneSpec, Shortfall
from edge_opt.records.fields import field, record
from edge_opt.records.profiles import ModelProfile
from edge_opt.trace.inputs import CallArguments, call_arguments, map_arguments, real_tensor

# Share of each group that a trial removes: enough to be seen in the outputs, never all.
_TRIAL_RATIO = 0.5
# Where layers lose channels by what they cost on a target, each loses between the ratio over this and the ratio times
# this: docs/evidence/pruning.md compares it with equal ratios and with a wider spread.
SPREAD = 1.5
# None loses more than this, unless the ratio is above it.
HIGHEST_SHARE = 0.9
_NO_LAYERS = "it has no layers that Python calls; pass the model that it was scripted or exported from"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def pruning_context() -> Iterator[None]:
    """Prune with autograd as by default; the process's random numbers and flags are unchanged afterwards."""
    with unchanged([], training=False), torch.inference_mode(False), torch.enable_grad():
        yield


@record
class PruningPlan:
    """A model with its channels ranked, from which variants of any ratio are built."""

    original: nn.Module = field("The caller's model.")
    base: nn.Module = field("A copy in eval mode, without hooks.")
    probe: nn.Module = field("`base` with nothing constant in it, so that silencing any channel changes the outputs.")
    skeleton: nn.Module = field("`base` without data, on which many ratios can be tried.")
    arguments: CallArguments = field("The call of the example inputs.")
    before: ModelProfile = field("The profile of the original.")
    ranking: Ranking = field("The units, their scores and their rounding.")
    owners: dict[str, np.ndarray] = field(
        "The unit of each output channel, or head, of every layer that can be asked for."
    )
    layer_ratios: dict[str, float] = field("Ratios of single layers, by path.")
    data: Iterable[Any] | None = field("Calibration batches that variants are fitted to; None: they are not fitted.")
    target: ResolvedTarget | None = field("What runs the variants, for widths that are fast; None: here.", default=None)
    savings: Mapping[int, float] | None = field(
        "Seconds per share of its channels that each group saves on the target; None without one.", default=None
    )

    @property
    def channel_map(self) -> ChannelMap:
        return self.ranking.channel_map

    def requested_ratios(self, ratio: float | None) -> dict[str, float]:
        """Return the share of its channels that each layer is to lose."""
        by_cost = self.ratios_by_cost(ratio or 0.0)
        asked = dict.fromkeys(self.owners, ratio or 0.0)
        for path, owner in self.owners.items() if by_cost else ():
            shares = [by_cost[number] for number in self.channel_map.groups_of(owner) if number in by_cost]
            asked[path] = shares[0] if shares else asked[path]
        return asked | self.layer_ratios

    def removed(self, ratio: float | None, shifts: Mapping[int, int] | None = None) -> np.ndarray:
        """Return the units that go. A ratio given to one layer holds for all that are coupled with it."""
        requested, by_cost = self.requested_ratios(ratio), self.ratios_by_cost(ratio or 0.0)
        shares: dict[int, tuple[str, float]] = {}
        # Named layers first, so that they decide for their groups.
        for path in sorted(self.owners, key=lambda path: path not in self.layer_ratios):
            owner = self.owners[path]
            if path in self.channel_map.heads and path not in self.layer_ratios:
                # Asked for all of the model, an attention layer also loses output channels, not only heads.
                owner = np.concatenate([owner, self.channel_map.layers.get((path, "out"), owner)])
            for number in self.channel_map.groups_of(owner):
                first, share = shares.setdefault(number, (path, requested[path]))
                if path in self.layer_ratios and share != requested[path]:
                    raise InvalidInput(
                        f"{first} and {path} lose the same channels, and are given the ratios {share:g} and "
                        f"{requested[path]:g}; give one of them"
                    )
        named = {number for number, (path, _) in shares.items() if path in self.layer_ratios}
        ratios = {number: share for number, (_, share) in shares.items()}
        spread = {number: share for number, share in by_cost.items() if number in ratios and number not in named}
        return self.ranking.removed(ratios | spread, shifts)

    def ratios_by_cost(self, ratio: float) -> dict[int, float]:
        """Return the share that each group loses on a target for a ratio of the whole model; without one, nothing.

        Groups whose channels cost more there lose more. Pruning harms a layer roughly with the square of its share, so
        that shares in proportion to what they save do least harm for the same latency; they stay near the ratio.
        """
        savings = self.savings or {}
        total = sum(savings.values())
        if not 0 < ratio < 1 or total <= 0:
            return {}
        low, high = ratio / SPREAD, min(ratio * SPREAD, max(ratio, HIGHEST_SHARE))

        def shares(scale: float) -> dict[int, float]:
            return {number: min(max(scale * saved / total, low), high) for number, saved in savings.items()}

        def saving(scale: float) -> float:
            return sum(share * savings[number] for number, share in shares(scale).items())

        ends = [0.0, total / min(filter(None, savings.values()))]
        for _ in range(50):
            middle = sum(ends) / 2
            ends[saving(middle) > ratio * total] = middle
        return shares(ends[0])

    def spec(self, removed: np.ndarray) -> PruneSpec:
        return prune_spec(self.base, self.channel_map, removed)

    def costs(self, removed: np.ndarray) -> ModelProfile:
        """Return what the model costs without these units, from shapes alone."""
        return self.profile(apply_spec(self.skeleton, self.spec(removed)))

    def profile(self, model: nn.Module) -> ModelProfile:
        """Return what a variant of the model costs on the same inputs."""
        return profile(model, list(self.arguments.args) or None, kwargs=self.arguments.kwargs)

    def build(self, removed: np.ndarray, reestimate: bool = True, reconstruct: bool = True) -> nn.Module:
        """Return the original without these units, fitted to the calibration batches where there are any."""
        spec = self.spec(removed)
        pruned = apply_spec(self.original, spec)
        if self.data is None or not spec.kept:
            return pruned
        report_progress("pruning: fitting the kept channels to the outputs of the original")
        if reconstruct:
            folded = working_copy(self.original)
            fold_removed_channels(folded, self.channel_map, removed, self.data)
            pruned.load_state_dict(apply_spec(folded, spec).state_dict())
        if reestimate:
            reestimate_norms(pruned, self.data)
        return pruned

    def with_rounding(self, round_to: RoundTo) -> PruningPlan:
        """Return the same plan with channels rounded; "auto" is for the target, or this machine without one."""
        multiple = fast_multiple(self.target) if round_to == "auto" else round_to
        return replace(self, ranking=replace(self.ranking, round_to=multiple, is_adaptive=round_to == "auto"))

    def distinct_ratios(self, ratios: Iterable[float], round_to: RoundTo, known: set[bytes]) -> list[float]:
        """Return the ratios that remove something, the first of each set of widths.

        Args:
            ratios: Shares of the channels to remove, the smallest first.
            round_to: As in `prune`.
            known: Sets of widths that are not returned again; those of the returned ratios are added.
        """
        plan, distinct = self.with_rounding(round_to), []
        for ratio in ratios:
            removed = plan.removed(ratio)
            # Which channels go follows from how many, so equal units mean equal widths.
            key = np.packbits(removed).tobytes()
            if removed.any() and key not in known:
                known.add(key)
                distinct.append(ratio)
        return distinct

    def build_ratio(self, ratio: float, round_to: RoundTo) -> nn.Module:
        """Return what `prune` makes of the model at this ratio, without the proof."""
        plan = self.with_rounding(round_to)
        with pruning_context():
            return plan.build(plan.removed(ratio))


def make_plan(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    importance: Importance = "auto",
    data: Iterable[Any] | None = None,
    ignored: Sequence[str] = (),
    layers: Sequence[tuple[str, float]] = (),
    seed: int = 0,
    target: ResolvedTarget | None = None,
) -> PruningPlan:
    """Follow the channels of a model, rank them, and set apart those that cannot go.

    Args:
        model: The model; it is not modified.
        inputs: As in `prune`.
        kwargs: Arguments of the model by name.
        importance: What ranks channels, as in `prune`.
        data: Batches to rank with and to fit variants to.
        ignored: Paths of layers that keep their channels.
        layers: Ratios of single layers or modules, by path.
        seed: Decides a random ranking.
        target: What runs the variants, for widths that are fast there.
    """
    report_progress("pruning: finding coupled channels")
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
    device = next((tensor.device for tensor in base.parameters()), torch.device("cpu"))
    arguments = map_arguments(call_arguments(model, inputs, kwargs), lambda value: real_tensor(value, dtype, device))
    coupled = channel_map(working_copy(model), arguments, ignored)
    # Ranking may run the model, and what it then keeps of the graph of gradients could not be copied.
    scores = unit_scores(base if data is None else working_copy(model), coupled, importance, data, seed)
    owners = owners_of(base, coupled)
    layer_ratios = {
        path: share for name, share in layers for path in owners if path == name or path.startswith(f"{name}.")
    }
    # Code that reads values cannot run without them.
    skeleton = base if before.trace.used_real_tensors else _without_data(base)
    probe = with_random_constants(base)
    ranking = Ranking(coupled, scores)
    plan = PruningPlan(model, base, probe, skeleton, arguments, before, ranking, owners, layer_ratios, data, target)
    plan = _without_unsound_groups(plan)
    return plan if target is None else replace(plan, savings=_savings(plan, target))


def _savings(plan: PruningPlan, target: ResolvedTarget) -> dict[int, float]:
    """Return the seconds that each group of channels saves on the target, per share of it; empty without a time."""
    report_progress("pruning: predicting what each layer costs on the target")
    savings: dict[int, float] = {}
    with suppress(InvalidInput):  # no time is known there
        whole = predicted_seconds(plan.before, target)
        for number, group in enumerate(plan.channel_map.groups):
            removed = plan.ranking.removed({number: _TRIAL_RATIO})
            if removed.any():
                saved = whole - predicted_seconds(plan.costs(removed), target)
                savings[number] = max(saved, 0.0) / float(removed[group.units].mean())
    return savings


def working_copy(model: nn.Module) -> nn.Module:
    """Return a copy to run: in eval mode, and without the hooks, which belong to the caller."""
    copied = copied_model(model)
    for module in copied.modules():
        module.training = False
        for name in _HOOKS:
            getattr(module, name).clear()
    return copied


def _without_data(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device. Unlike `model.to("meta")` it keeps tensors shared that two modules share."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor.detach().to("meta") for tensor in tensors}
    memo |= {id(tensor): nn.Parameter(memo[id(tensor)], tensor.requires_grad) for tensor in model.parameters()}
    return copy.deepcopy(model, memo)


def askable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers whose channels or heads one can ask to prune, without the parts of attention layers."""
    modules = dict(model.named_modules())
    attention = [path for path, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    inner = {f"{path}.out_proj".lstrip(".") for path in attention}
    return {path: module for path, module in modules.items() if kind_of(module).is_prunable and path not in inner}


def owners_of(model: nn.Module, channel_map: ChannelMap) -> dict[str, np.ndarray]:
    """Return the unit of each output channel, or head, of each layer that can be named."""
    owners = {}
    for path, module in askable_layers(model).items():
        if isinstance(module, nn.MultiheadAttention):
            owners[path] = channel_map.heads.get(path, np.full(module.num_heads, NONE))
            continue
        unknown = np.full(channels(module, "out"), NONE)
        owners[path] = channel_map.layers.get((path, "out"), channel_map.layers.get((path, "both"), unknown))
    return owners


def check_prunable(plan: PruningPlan) -> None:
    """Refuse a model without a channel that can be removed."""
    groups = plan.channel_map.groups
    if all(group.refused for group in groups):
        reasons = "; ".join(dict.fromkeys(str(group.refused) for group in groups)) or _NO_LAYERS
        raise PruningFailed(f"nothing in {type(plan.original).__name__} can be pruned: {reasons}")


def _without_unsound_groups(plan: PruningPlan) -> PruningPlan:
    """Refuse groups whose removal breaks the model or removes other channels as well.

    All are tried at once, by running the model; only when that fails, one by one.
    """
    numbered = enumerate(plan.channel_map.groups)
    groups = [number for number, group in numbered if not group.refused and len(group.units) > 1]
    if not groups or _trial_refusal(plan, groups, is_run=True) is None:
        return plan
    refusals = {number: _trial_refusal(plan, [number], is_run=False) for number in groups}
    sound = [number for number in groups if refusals[number] is None]
    if sound and _trial_refusal(plan, sound, is_run=True) is not None:
        refusals |= {number: _trial_refusal(plan, [number], is_run=True) for number in sound}
    checked = tuple(
        group if group.refused else replace(group, refused=refusals.get(number))
        for number, group in enumerate(plan.channel_map.groups)
    )
    return replace(plan, ranking=replace(plan.ranking, channel_map=replace(plan.channel_map, groups=checked)))


def _trial_refusal(plan: PruningPlan, groups: list[int], is_run: bool) -> ChannelRefusal | None:
    """Return what is wrong with a model that lost half of these groups; only shapes are compared unless it is run."""
    removed = plan.ranking.removed(dict.fromkeys(groups, _TRIAL_RATIO))
    spec = plan.spec(removed)
    try:
        if not is_run:
            after = plan.costs(removed).trace.modules[0].output_shapes
            changed = after != plan.before.trace.modules[0].output_shapes
            return ChannelRefusal(f"removing channels changes the model's outputs to {after}") if changed else None
        error = silenced_error(plan.probe, apply_spec(plan.probe, spec), spec, plan.arguments)
    except EdgeOptError as failure:
        return ChannelRefusal(f"removing channels breaks the model: {failure}")
    if error is None or error <= TOLERANCE:
        return None
    return ChannelRefusal(
        "removing channels changes more than those channels: a reshape, mean or softmax over channels is between them, "
        f"outputs are off by {error:.2g} of the change"
    )


def layer_channels(plan: PruningPlan, removed: np.ndarray, ratio: float | None) -> tuple[LayerChannels, ...]:
    """Return each layer's channels before and after, in the model's order."""
    requested, modules = plan.requested_ratios(ratio), dict(plan.base.named_modules())
    return tuple(
        LayerChannels(
            path=path,
            kind=type(modules[path]).__name__,
            unit="heads" if isinstance(modules[path], nn.MultiheadAttention) else "channels",
            before=len(owner),
            after=int(kept_channels(owner, removed).sum()),
            asked=requested[path],
        )
        for path, owner in plan.owners.items()
    )


def shortfalls(plan: PruningPlan, layers: Iterable[LayerChannels]) -> tuple[Shortfall, ...]:
    """Return the layers that kept at least one channel more than asked, each with the reason."""
    return tuple(
        Shortfall(layer.path, layer.asked, layer.achieved, _shortfall_reason(plan, layer))
        for layer in layers
        if layer.after - layer.before * (1 - layer.asked) >= 1
    )


def _shortfall_reason(plan: PruningPlan, layer: LayerChannels) -> str:
    owner, module = plan.owners[layer.path], plan.base.get_submodule(layer.path)
    groups = [plan.channel_map.groups[number] for number in plan.channel_map.groups_of(owner)]
    refused = next((group.refused for group in groups if group.refused), None)
    if refused:
        # A refusal about another layer holds for this one because their channels are coupled.
        return str(refused) if refused.path in (None, layer.path) else f"coupled with others: {refused}"
    if (owner == NONE).any():
        is_called = any(call.path == layer.path for call in plan.before.trace.modules)
        not_called = "it is not called as a layer: its parent computes with its weights, or never uses it"
        return refusal_of(module) or ("the dependency graph never reached it" if is_called else not_called)
    labels = tied_positions(module, "out")
    if labels is not None:
        return (
            f"grouped convolution: its {module.groups} groups lose channels at the same position, "
            f"{labels.max() + 1} positions in all"
        )
    units = len(set(owner.tolist()))
    if layer.unit == "heads":
        return f"whole heads only: {layer.after} of {layer.before} stay"
    if units < len(owner) and not is_depthwise(module):
        return f"{len(owner) // units} channels go at a time: {units} heads, or groups of a coupled layer"
    multiple = max((plan.ranking.multiple(group) for group in groups), default=1)
    if multiple > 1:
        return f"rounded to a multiple of {multiple}: {layer.after} of {layer.before} stay"
    return f"whole channels only: {layer.after} of {layer.before} stay"
