"""The recipe of a pruned model: what stays of each tensor, and which attributes change with it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt.errors import InvalidInput, PruningFailed
from edge_opt.pruning.attention import HEAD_COUNTS, HEAD_WIDTHS, PrunedAttention
from edge_opt.pruning.coupling import NONE, ChannelMap
from edge_opt.pruning.layer_kinds import Side, channels, counted_attributes
from edge_opt.records.compression import ChangedAttribute, KeptIndices, PruneSpec, TensorShape

# Attributes in which models keep the width of their stream of features, beside the layer that makes it.
WIDTHS = ("hidden_dim", "embed_dim", "hidden_size", "d_model")


def prune_spec(model: nn.Module, channel_map: ChannelMap, removed: np.ndarray) -> PruneSpec:
    """Return the recipe that takes these units out of the model."""
    kept = [
        KeptIndices(at.tensor, at.dim, tuple(np.flatnonzero(stays).tolist()))
        for at, owner in channel_map.tensors.items()
        if not (stays := (owner == NONE) | ~removed[owner]).all()
    ]
    attributes = [
        *_layer_attributes(model, channel_map, removed),
        *_norm_attributes(model, kept),
        *_head_attributes(model, channel_map, removed),
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
    """Return names and shapes of all that a model's state holds."""
    return tuple(TensorShape(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())


def _layer_attributes(model: nn.Module, channel_map: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    """Return what each layer counts, and the width that the module around it keeps for its own reshapes."""

    def kept_channels(path: str, module: nn.Module, side: Side) -> int:
        owner = channel_map.layers.get((path, side), channel_map.layers.get((path, "both")))
        return channels(module, side) if owner is None else int(((owner == NONE) | ~removed[owner]).sum())

    changes = []
    for path in dict.fromkeys(path for path, _ in channel_map.layers):
        module = model.get_submodule(path)
        counts = counted_attributes(module, kept_channels(path, module, "in"), kept_channels(path, module, "out"))
        changes += [ChangedAttribute(path, *item) for item in counts.items() if getattr(module, item[0]) != item[1]]
        before, after = channels(module, "out"), kept_channels(path, module, "out")
        parent = path.rpartition(".")[0]
        changes += [
            ChangedAttribute(parent, name, after)
            for name in WIDTHS
            if path and before != after and getattr(model.get_submodule(parent), name, None) == before
        ]
    return changes


def _norm_attributes(model: nn.Module, kept: list[KeptIndices]) -> list[ChangedAttribute]:
    """Return the sizes of norms that torch-pruning does not know, of which only the weight was followed."""
    changes = []
    for each in kept:
        path = each.tensor.rpartition(".")[0]
        module = model.get_submodule(path)
        if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) == 1:
            changes.append(ChangedAttribute(path, "normalized_shape", (len(each.indices),)))
    return changes


def _head_attributes(model: nn.Module, channel_map: ChannelMap, removed: np.ndarray) -> list[ChangedAttribute]:
    changes = []
    for path, units in channel_map.heads.items():
        if removed[units].any():
            changes.append(ChangedAttribute(path, "num_heads", int((~removed[units]).sum())))
    for path, heads in channel_map.head_owners.items():
        owner = channel_map.layers[heads.projections[0], "out"]
        kept = int(((owner == NONE) | ~removed[owner]).sum())
        if kept == len(owner):
            continue
        module = model.get_submodule(path)
        changes += [
            ChangedAttribute(path, name, kept * heads.heads // len(owner))
            for name in HEAD_COUNTS
            if getattr(module, name, None) == heads.heads
        ]
        widths = [name for name in HEAD_WIDTHS if getattr(module, name, None) == heads.width]
        changes += [ChangedAttribute(path, name, kept * heads.width // len(owner)) for name in widths]
    return changes


def apply_spec(model: nn.Module, spec: PruneSpec) -> nn.Module:
    """Return a pruned copy of the original model: the same weights, without what the recipe leaves out.

    Args:
        model: The original model, as it was before pruning.
        spec: The recipe.

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
    expected = {each.name: each.shape for each in spec.original}
    shapes = {each.name: each.shape for each in fingerprint(model)}
    cure = "build the original model, with the arguments it had when it was pruned"
    missing, surplus = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing or surplus:
        what = f"lacks {missing[0]!r}" if missing else f"has {surplus[0]!r} besides"
        raise InvalidInput(f"{type(model).__name__} is not the model that was pruned: it {what}; {cure}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            what = f"{name} is {shapes[name]}, not {shape}"
            raise InvalidInput(f"{type(model).__name__} is not the model that was pruned: {what}; {cure}")
    for each in spec.kept:
        size = dict(enumerate(expected.get(each.tensor, ()))).get(each.dim, 0)
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
    """Take the entries out of the tensors; a tensor that two modules share stays shared.

    Tensors are compared by id, because equal values do not make a tensor shared. Python reuses the id of an object
    that was collected, so `names` keeps every old tensor alive until all are replaced.
    """
    names = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    dims_by_name: dict[str, list[KeptIndices]] = {}
    for kept in spec.kept:
        dims_by_name.setdefault(kept.tensor, []).append(kept)
    dims_of: dict[int, list[KeptIndices]] = {}
    for name, dims in dims_by_name.items():
        dims_of.setdefault(id(names[name]), dims)  # a shared tensor is cut once
    cut: dict[int, torch.Tensor] = {}
    for name, tensor in names.items():
        if id(tensor) not in dims_of:
            continue
        if id(tensor) not in cut:
            cut[id(tensor)] = _selected(tensor, dims_of[id(tensor)])
        holder, _, leaf = name.rpartition(".")
        module = model.get_submodule(holder)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = cut[id(tensor)]  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # Recurrent layers keep a second list of their weights, which their kernels read instead of the parameters.
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _selected(tensor: torch.Tensor, dims: list[KeptIndices]) -> torch.Tensor:
    with torch.no_grad():
        cut = tensor.detach()
        for each in dims:
            cut = cut.index_select(each.dim, torch.tensor(each.indices, device=cut.device))
        cut = cut.contiguous()
    return nn.Parameter(cut, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cut
