"""What came of a request, layer by layer, and why a layer lost less than asked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import nn
from torch.nn.modules.conv import _ConvNd

from edge_opt.compress.channels import NONE, ChannelMap, Group
from edge_opt.compress.layers import PRUNABLE, Side, channels, is_depthwise, refusal, ties
from edge_opt.records import LayerChannels, Shortfall


def askable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers whose channels or heads one can ask to prune; the parts of an attention layer are not on their own."""
    attention = [path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    inner = {f"{path}.out_proj".lstrip(".") for path in attention}
    return {
        path: module for path, module in model.named_modules() if isinstance(module, PRUNABLE) and path not in inner
    }


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


def shortfalls(
    model: nn.Module,
    found: ChannelMap,
    owners: Mapping[str, np.ndarray],
    layers: tuple[LayerChannels, ...],
    round_to: int,
    is_global: bool,
) -> tuple[Shortfall, ...]:
    """Layers that kept at least one channel more than asked, each with the reason."""
    group_of = found.group_of()
    falls = []
    for layer in layers:
        if layer.after - layer.before * (1 - layer.asked) < 1:
            continue
        owner = owners[layer.path]
        groups = [found.groups[number] for number in dict.fromkeys(group_of[owner[owner != NONE]].tolist())]
        reason = _reason(model, layer, owner, groups, round_to, is_global)
        if reason:
            falls.append(Shortfall(layer.path, layer.asked, layer.achieved, reason))
    return tuple(falls)


def _reason(
    model: nn.Module, layer: LayerChannels, owner: np.ndarray, groups: list[Group], round_to: int, is_global: bool
) -> str | None:
    module = model.get_submodule(layer.path)
    refused = next((group.refused for group in groups if group.refused), None)
    if refused:
        # Some reasons name a layer, which may be another one, and some are about all channels alike.
        is_own = refused.startswith((f"{layer.path} ", "removing ", "its ", "the channels ", "keys "))
        return refused if is_own else f"coupled with others: {refused}"
    if (owner == NONE).any():
        return refusal(module) or "the dependency graph never reached it"
    if is_global:
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
    if round_to > 1:
        return f"rounded to a multiple of {round_to}: {layer.after} of {layer.before} stay"
    return f"whole channels only: {layer.after} of {layer.before} stay"
