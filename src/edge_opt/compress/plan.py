"""A plan: a model's channels with their ranking, from which a recipe follows for every ratio."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.compress.channels import NONE, ChannelMap
from edge_opt.compress.importance import unit_scores
from edge_opt.compress.outcome import owners_of
from edge_opt.compress.selection import Ranking
from edge_opt.compress.spec import apply_spec, prune_spec
from edge_opt.compress.survey import channel_map
from edge_opt.compress.validation import TOLERANCE, roused, silenced_error
from edge_opt.errors import EdgeOptError, InvalidInput, PruningFailed
from edge_opt.profiling import profile
from edge_opt.records import ModelProfile, PruneRequest, PruneSpec
from edge_opt.trace.inputs import CallArguments, call_arguments, materialize, real_tensor

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
    arguments = materialize(call_arguments(model, inputs, kwargs), lambda value: real_tensor(value, dtype, place))
    found = channel_map(working_copy(model), arguments, request.ignored)
    scores = unit_scores(base, found, request.importance, loader, request.seed)
    owners = owners_of(base, found)
    named = {
        path: share for name, share in request.layers for path in owners if path == name or path.startswith(f"{name}.")
    }
    ranking = Ranking(found, scores, request.round_to, request.global_ranking)
    skeleton = copy.deepcopy(base).to("meta")
    return _proved(Plan(base, roused(base), skeleton, arguments, before, ranking, owners, named))


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
