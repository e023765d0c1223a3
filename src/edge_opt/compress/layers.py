"""Where each kind of layer keeps its channels: the dimensions of its tensors, and the attributes that count them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

Side = Literal["in", "out", "both"]
NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm)
# Layers whose output channels a user can ask to prune.
PRUNABLE = (_ConvNd, nn.Linear, nn.MultiheadAttention)


class Place(NamedTuple):
    """A dimension of a tensor that holds channels; `where[c]` is where channel c stands in it."""

    tensor: str
    dim: int
    where: np.ndarray


def is_depthwise(conv: _ConvNd) -> bool:
    """Whether every input channel has filters of its own, one or several."""
    return conv.groups > 1 and conv.groups == conv.in_channels


def channels(module: nn.Module, side: Side) -> int:
    """How many channels a layer has on one side; 0 for a module that has none of its own."""
    if isinstance(module, _ConvNd):
        return module.in_channels if side == "in" else module.out_channels
    if isinstance(module, nn.Linear):
        return module.in_features if side == "in" else module.out_features
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return module.num_features
    if isinstance(module, nn.LayerNorm):
        return int(module.normalized_shape[-1])
    if isinstance(module, nn.GroupNorm):
        return module.num_channels
    if isinstance(module, nn.PReLU):
        return module.num_parameters if module.num_parameters > 1 else 0
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return module.embed_dim if isinstance(module, nn.MultiheadAttention) else 0


def places(module: nn.Module, side: Side) -> list[Place]:
    """The tensors of a layer that lose an entry when it loses a channel on that side."""
    count = channels(module, side)
    every = np.arange(count)
    if isinstance(module, _ConvNd):
        return _conv_places(module, side, every)
    if isinstance(module, nn.Linear):
        return [Place("weight", 1, every)] if side == "in" else _present(module, ("weight", "bias"), 0, every)
    if isinstance(module, nn.Embedding):
        return [Place("weight", 1, every)]
    if isinstance(module, nn.MultiheadAttention):
        names = ("in_proj_weight",) if side == "in" else ("out_proj.weight", "out_proj.bias")
        return _present(module, names, 1 if side == "in" else 0, every)
    return _present(module, ("weight", "bias", "running_mean", "running_var"), 0, every) if count else []


def _conv_places(conv: _ConvNd, side: Side, every: np.ndarray) -> list[Place]:
    # A transposed convolution keeps (in, out / groups, ...), any other (out, in / groups, ...).
    first: Side = "in" if conv.transposed else "out"
    found: list[Place] = []
    if is_depthwise(conv):
        outputs = conv.out_channels // conv.groups
        if side == "in" and not conv.transposed and outputs > 1:
            return []
        found = [Place("weight", 0, every // outputs if conv.transposed and side != "in" else every)]
    elif side == first:
        found = [Place("weight", 0, every)]
    else:
        found = [Place("weight", 1, every % (len(every) // conv.groups))]
    return found + (_present(conv, ("bias",), 0, every) if side != "in" else [])


def _present(module: nn.Module, names: tuple[str, ...], dim: int, every: np.ndarray) -> list[Place]:
    """The tensors among `names` that the module has."""
    found = []
    for name in names:
        holder, _, leaf = name.rpartition(".")
        tensor = getattr(module.get_submodule(holder) if holder else module, leaf, None)
        if isinstance(tensor, torch.Tensor):
            found.append(Place(name, dim, every))
    return found


def ties(module: nn.Module, side: Side) -> np.ndarray | None:
    """A label per channel: those of one label can only go together. None where each can go alone.

    Groups of a convolution or norm must stay equally large, so each loses the channel at the same position.
    """
    if isinstance(module, _ConvNd) and module.groups > 1 and not is_depthwise(module):
        count = channels(module, side)
        return np.arange(count) % (count // module.groups)
    if isinstance(module, nn.GroupNorm) and module.num_groups > 1:
        return np.arange(module.num_channels) % (module.num_channels // module.num_groups)
    return None


def crossed(module: nn.Module, side: Side) -> int:
    """Outputs per input of a depthwise convolution with several, where losing one side's channel costs the other's."""
    if isinstance(module, _ConvNd) and is_depthwise(module) and side != "both":
        return module.out_channels // module.groups
    return 0


def refusal(module: nn.Module) -> str | None:
    """Why the channels of a layer cannot be pruned, if they cannot."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        return f"{kind}: recurrent layers are not pruned"
    if parametrize.is_parametrized(module) or hasattr(module, "weight_g"):
        return f"{kind}: its weight is computed from other parameters"
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return f"{kind} normalizes over {len(module.normalized_shape)} dimensions"
    if isinstance(module, nn.MultiheadAttention):
        has_one_source = module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn
        return None if has_one_source else f"{kind} with key, value or bias of its own size"
    return None


def counted_attributes(module: nn.Module, kept_in: int, kept_out: int) -> dict[str, Any]:
    """The attributes that count channels, as they are with so many left on each side."""
    if isinstance(module, _ConvNd):
        groups = kept_in if is_depthwise(module) else module.groups
        return {"in_channels": kept_in, "out_channels": kept_out, "groups": groups}
    if isinstance(module, nn.Linear):
        return {"in_features": kept_in, "out_features": kept_out}
    if isinstance(module, (_BatchNorm, _InstanceNorm)):
        return {"num_features": kept_out}
    if isinstance(module, nn.LayerNorm):
        return {"normalized_shape": (kept_out,)}
    if isinstance(module, nn.GroupNorm):
        return {"num_channels": kept_out}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": kept_out}
    if isinstance(module, nn.MultiheadAttention):
        return {"embed_dim": kept_in}
    return {"embedding_dim": kept_out} if isinstance(module, nn.Embedding) else {}
