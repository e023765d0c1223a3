"""The recipe of a pruned model, and its application to the original."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.compress.attention import HEAD_COUNTS, HEAD_WIDTHS, PrunedAttention
from edge_opt.compress.channels import NONE, ChannelMap
from edge_opt.compress.layers import Side, channels, counted_attributes
from edge_opt.errors import InvalidInput, PruningFailed
from edge_opt.records import ChangedAttribute, KeptIndices, PruneSpec, TensorShape

# What models call the width of their stream of features, where they keep it beside the layer that makes it.
WIDTHS = ("hidden_dim", "embed_dim", "hidden_size", "d_model")


def prune_spec(model: nn.Module, found: ChannelMap, removed: np.ndarray) -> PruneSpec:
    """The recipe that takes these units out of the model."""
    kept = [
        KeptIndices(place.tensor, place.dim, tuple(np.flatnonzero(stays).tolist()))
        for place, owner in found.tensors.items()
        if not (stays := (owner == NONE) | ~removed[owner]).all()
    ]
    attributes = [
        *_layer_attributes(model, found, removed),
        *_norm_attributes(model, kept),
        *_head_attributes(model, found, removed),
    ]
    changed = {each.tensor for each in kept}
    attention = tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        and any(f"{path}.{name}".lstrip(".") in changed for name in ("in_proj_weight", "out_proj.weight"))
    )
    return PruneSpec(fingerprint(model), tuple(kept), tuple(dict.fromkeys(attributes)), attention)


def fingerprint(model: nn.Module) -> tuple[TensorShape, ...]:
    """Names and shapes of all that a model's state holds."""
    return tuple(TensorShape(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())


def _layer_attributes(model: nn.Module, found: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    """What each layer counts, and the width that the module around it remembers for its own reshapes."""

    def left(path: str, module: nn.Module, side: Side) -> int:
        owner = found.layers.get((path, side), found.layers.get((path, "both")))
        return channels(module, side) if owner is None else int(((owner == NONE) | ~removed[owner]).sum())

    changes = []
    for path in dict.fromkeys(path for path, _ in found.layers):
        module = model.get_submodule(path)
        counts = counted_attributes(module, left(path, module, "in"), left(path, module, "out"))
        changes += [ChangedAttribute(path, *item) for item in counts.items() if getattr(module, item[0]) != item[1]]
        before, after = channels(module, "out"), left(path, module, "out")
        parent = path.rpartition(".")[0]
        changes += [
            ChangedAttribute(parent, name, after)
            for name in WIDTHS
            if path and before != after and getattr(model.get_submodule(parent), name, None) == before
        ]
    return changes


def _norm_attributes(model: nn.Module, kept: list[KeptIndices]) -> list[ChangedAttribute]:
    """Norms that torch-pruning does not know, of which only the weight was followed."""
    changes = []
    for each in kept:
        path = each.tensor.rpartition(".")[0]
        module = model.get_submodule(path)
        if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 1:
            changes.append(ChangedAttribute(path, "normalized_shape", (len(each.indices),)))
    return changes


def _head_attributes(model: nn.Module, found: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    changes = []
    for path, units in found.heads.items():
        if removed[units].any():
            changes.append(ChangedAttribute(path, "num_heads", int((~removed[units]).sum())))
    for path, heads in found.head_owners.items():
        owner = found.layers[heads.projections[0], "out"]
        left = int(((owner == NONE) | ~removed[owner]).sum())
        if left == len(owner):
            continue
        module = model.get_submodule(path)
        changes += [
            ChangedAttribute(path, name, left * heads.heads // len(owner))
            for name in HEAD_COUNTS
            if getattr(module, name, None) == heads.heads
        ]
        widths = [name for name in HEAD_WIDTHS if getattr(module, name, None) == len(owner)]
        changes += [ChangedAttribute(path, name, left) for name in widths]
    return changes


def apply_spec(model: nn.Module, spec: PruneSpec) -> nn.Module:
    """A pruned copy of the original model: the same weights, without what the recipe leaves out.

    >>> from edge_opt.compress import prune
    >>> from edge_opt.model import SmallCNN
    >>> original = SmallCNN()
    >>> pruned = prune(original, (1, 1, 28, 28), 0.5)
    >>> again = apply_spec(original, pruned.spec)
    >>> again.conv2, bool((again.conv2.weight == pruned.model.conv2.weight).all())
    (Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)), True)
    """
    check_original(model, spec)
    try:
        pruned = copy.deepcopy(model)
    except Exception as error:
        raise PruningFailed(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}") from error
    for path in spec.attention:
        pruned = _replaced(pruned, path)
    _cut(pruned, spec)
    for change in spec.attributes:
        holder = _part(pruned, change.module)
        if not isinstance(getattr(holder, change.name, None), (int, tuple)):
            raise InvalidInput(f"{change.module} has no count {change.name!r}; the recipe is of another model")
        setattr(holder, change.name, change.value)
    for path in spec.attention:
        # A module of its own for its weights only; its sizes are for people who print the model.
        projection: Any = pruned.get_submodule(f"{path}.out_proj".lstrip("."))
        projection.out_features, projection.in_features = projection.weight.shape
    return pruned


def check_original(model: nn.Module, spec: PruneSpec) -> None:
    """Refuse a model that is not the one the recipe was made for."""
    ours = {each.name: each.shape for each in spec.original}
    found = {each.name: each.shape for each in fingerprint(model)}
    cure = "build the original model, with the arguments it had when it was pruned"
    missing, surplus = sorted(ours.keys() - found.keys()), sorted(found.keys() - ours.keys())
    if missing or surplus:
        what = f"lacks {missing[0]!r}" if missing else f"has {surplus[0]!r} besides"
        raise InvalidInput(f"{type(model).__name__} is not the model that was pruned: it {what}; {cure}")
    for name, shape in ours.items():
        if found[name] != shape:
            raise InvalidInput(
                f"{type(model).__name__} is not the model that was pruned: {name} is {found[name]}, not {shape}; {cure}"
            )
    for each in spec.kept:
        size = dict(enumerate(ours.get(each.tensor, ()))).get(each.dim, 0)
        if not each.indices or not 0 <= min(each.indices) <= max(each.indices) < size:
            raise InvalidInput(f"the recipe keeps impossible indices of {each.tensor}, dimension {each.dim}")


def _part(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise InvalidInput(f"{type(model).__name__} has no {path!r}; the recipe is of another model") from error


def _replaced(model: nn.Module, path: str) -> nn.Module:
    module = _part(model, path)
    if not isinstance(module, nn.MultiheadAttention):
        kind = type(module).__name__
        raise InvalidInput(f"{path} is a {kind}, not nn.MultiheadAttention; the recipe is of another model")
    if not path:
        return PrunedAttention(module)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, PrunedAttention(module))
    return model


def _cut(model: nn.Module, spec: PruneSpec) -> None:
    """Take the entries out of the tensors; a tensor that two modules share stays shared."""
    cuts: dict[str, list[KeptIndices]] = {}
    for each in spec.kept:
        cuts.setdefault(each.tensor, []).append(each)
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    names = dict(_named_tensors(model))
    by_identity: dict[int, list[KeptIndices]] = {}
    for name, dims in cuts.items():
        by_identity.setdefault(id(names[name]), dims)
    for name, tensor in names.items():
        if id(tensor) not in by_identity:
            continue
        if id(tensor) not in done:
            # The old tensor is kept alive with the new one: its id must not be used again.
            done[id(tensor)] = (tensor, _selected(tensor, by_identity[id(tensor)]))
        holder, _, leaf = name.rpartition(".")
        module = model.get_submodule(holder)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = done[id(tensor)][1]  # type: ignore[assignment]


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _selected(tensor: torch.Tensor, dims: list[KeptIndices]) -> torch.Tensor:
    with torch.no_grad():
        cut = tensor.detach()
        for each in dims:
            cut = cut.index_select(each.dim, torch.tensor(each.indices, device=cut.device))
        cut = cut.contiguous()
    return nn.Parameter(cut, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cut
