"""Where each kind of layer keeps its channels: one table, with one entry per kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

# "both": input and output channels are the same ones, as in a norm.
Side = Literal["in", "out", "both"]


class TensorEntries(NamedTuple):
    """A dimension of a tensor that holds channels; channel c is at `indices[c]` of it."""

    tensor: str
    dim: int
    indices: np.ndarray


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state by name; extra state of modules may be anything else."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def is_depthwise(module: nn.Module) -> bool:
    """Return whether it is a convolution in which every input channel has filters of its own, one or several."""
    return isinstance(module, _ConvNd) and module.groups > 1 and module.groups == module.in_channels


def is_transposed_linear(module: nn.Module) -> bool:
    """Return whether it is a linear layer that keeps its weight as (in, out), as the Conv1D of GPT-2 does."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ != "Conv1D" or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return False
    return bool(getattr(module, "nf", None) == weight.shape[1])


def _present(module: nn.Module, tensors: Iterable[tuple[str, int]], every: np.ndarray) -> list[TensorEntries]:
    """Return the entries of those of the named tensors that the module has; each comes with its dimension."""
    entries = []
    for name, dim in tensors:
        holder, _, leaf = name.rpartition(".")
        if isinstance(getattr(module.get_submodule(holder), leaf, None), torch.Tensor):
            entries.append(TensorEntries(name, dim, every))
    return entries


def _convolution_entries(conv: Any, side: Side, every: np.ndarray) -> list[TensorEntries]:
    bias = _present(conv, [("bias", 0)], every) if side != "in" else []
    if is_depthwise(conv):
        outputs = conv.out_channels // conv.groups
        if side == "in" and not conv.transposed and outputs > 1:
            return []
        return [TensorEntries("weight", 0, every // outputs if conv.transposed and side != "in" else every), *bias]
    # A transposed convolution keeps (in, out / groups, ...), any other (out, in / groups, ...).
    if side == ("in" if conv.transposed else "out"):
        return [TensorEntries("weight", 0, every), *bias]
    return [TensorEntries("weight", 1, every % (len(every) // conv.groups)), *bias]


def _recurrent_entries(layer: Any, side: Side, every: np.ndarray) -> list[TensorEntries]:
    """Return where a hidden unit is: a row in each gate, and a column for every reader, of each layer and direction."""
    names = layer._flat_weights_names
    if side == "in":
        return [TensorEntries(name, 1, every) for name in names if name.startswith("weight_ih_l0")]
    if layer.proj_size:
        return []
    size = layer.hidden_size
    entries = []
    for name in names:
        tensor = layer.get_parameter(name)
        entries += [TensorEntries(name, 0, every + gate * size) for gate in range(tensor.shape[0] // size)]
        if name.startswith("weight_hh"):
            entries.append(TensorEntries(name, 1, every))
        elif name.startswith("weight_ih") and not name.startswith("weight_ih_l0"):
            # Deeper layers read all directions of the one before.
            entries += [TensorEntries(name, 1, every + part * size) for part in range(tensor.shape[1] // size)]
    return entries


# Tensors of a layer, each with the dimension that holds channels.
_ROWS = (("weight", 0), ("bias", 0))
_OF_NORMS = (*_ROWS, ("running_mean", 0), ("running_var", 0))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layer.

    Attributes:
        inputs: The attribute that counts input channels; None where they are the output channels.
        outputs: The attribute that counts output channels; None for a module without channels.
        reads: The tensors that hold its input channels; none where those are the output channels.
        writes: The tensors that hold its output channels.
        entries: Where its tensors hold the channels of a side, given their numbers, where that is less simple.
        groups: The attribute that counts groups, which must stay equally large.
        is_prunable: A user can ask for fewer output channels, heads or hidden units.
        is_root: It has weights of its own, so that a group of coupled channels can start at its outputs.
    """

    inputs: str | None = None
    outputs: str | None = None
    reads: tuple[tuple[str, int], ...] = ()
    writes: tuple[tuple[str, int], ...] = _OF_NORMS
    entries: Callable[[Any, Side, np.ndarray], list[TensorEntries]] | None = None
    groups: str = ""
    is_prunable: bool = False
    is_root: bool = False


LAYER_KINDS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], LayerKind], ...] = (
    (
        _ConvNd,
        LayerKind("in_channels", "out_channels", entries=_convolution_entries, groups="groups", is_prunable=True,
                  is_root=True),
    ),
    (nn.Linear, LayerKind("in_features", "out_features", (("weight", 1),), _ROWS, is_prunable=True, is_root=True)),
    ((_BatchNorm, _InstanceNorm), LayerKind(None, "num_features")),
    (nn.LayerNorm, LayerKind(None, "normalized_shape")),
    (nn.GroupNorm, LayerKind(None, "num_channels", groups="num_groups")),
    (nn.PReLU, LayerKind(None, "num_parameters")),
    (nn.Embedding, LayerKind(None, "embedding_dim", writes=(("weight", 1),), is_root=True)),
    (nn.RNNBase, LayerKind("input_size", "hidden_size", entries=_recurrent_entries, is_prunable=True)),
    (
        nn.MultiheadAttention,
        LayerKind(None, "embed_dim", (("in_proj_weight", 1),), (("out_proj.weight", 0), ("out_proj.bias", 0)),
                  is_prunable=True, is_root=True),
    ),
)  # fmt: skip
_TRANSPOSED_LINEAR = LayerKind("nx", "nf", (("weight", 0),), (("weight", 1), ("bias", 0)), is_prunable=True)
_WITHOUT_CHANNELS = LayerKind()


def kind_of(module: nn.Module) -> LayerKind:
    """Return the table's entry for a module."""
    for types, kind in LAYER_KINDS:
        if isinstance(module, types):
            return kind
    return _TRANSPOSED_LINEAR if is_transposed_linear(module) else _WITHOUT_CHANNELS


def channels(module: nn.Module, side: Side) -> int:
    """Return how many channels a layer has on one side; 0 for a module that has none of its own."""
    kind = kind_of(module)
    if kind is _TRANSPOSED_LINEAR:
        return int(module.get_parameter("weight").shape[0 if side == "in" else 1])
    if side != "in" and isinstance(module, nn.RNNBase) and module.proj_size:
        return int(module.proj_size)
    name = kind.inputs if side == "in" and kind.inputs else kind.outputs
    count = 0 if name is None else getattr(module, name)
    if isinstance(module, nn.PReLU) and count == 1:
        return 0  # one parameter for all channels
    return int(count[-1] if isinstance(count, tuple) else count)


def tensor_entries(module: nn.Module, side: Side) -> list[TensorEntries]:
    """Return the tensors of a layer that lose an entry when it loses a channel on that side."""
    kind, every = kind_of(module), np.arange(channels(module, side))
    if kind.entries is not None:
        return kind.entries(module, side, every)
    return _present(module, kind.reads if side == "in" else kind.writes, every) if len(every) else []


def tied_positions(module: nn.Module, side: Side) -> np.ndarray | None:
    """Return a label per channel; channels of one label can only go together. None where each can go alone.

    Groups of a convolution or norm must stay equally large, so each loses the channel at the same position.
    """
    name, count = kind_of(module).groups, channels(module, side)
    groups = getattr(module, name) if name else 1
    return np.arange(count) % (count // groups) if groups > 1 and not is_depthwise(module) else None


def depth_multiplier(module: nn.Module, side: Side) -> int:
    """Return the outputs per input of a depthwise convolution; 0 for every other layer.

    Losing a channel on one side of such a convolution costs channels on the other side.
    """
    return channels(module, "out") // channels(module, "in") if is_depthwise(module) and side != "both" else 0


def refusal_of(module: nn.Module, side: Side = "out") -> str | None:
    """Return why the channels of a layer cannot be pruned; None where they can."""
    kind = type(module).__name__
    if isinstance(module, nn.RNNBase):
        return f"{kind} that projects its outputs" if module.proj_size and side != "in" else None
    if parametrize.is_parametrized(module) or hasattr(module, "weight_g"):
        return f"{kind}: its weight is computed from other parameters"
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        return f"{kind} normalizes over {len(module.normalized_shape)} dimensions"
    if isinstance(module, nn.MultiheadAttention):
        has_one_source = module.in_proj_weight is not None and module.bias_k is None and not module.add_zero_attn
        return None if has_one_source else f"{kind} with key, value or bias of its own size"
    return None


def counted_attributes(module: nn.Module, kept_in: int, kept_out: int) -> dict[str, Any]:
    """Return the attributes that count channels, with their values after pruning."""
    kind = kind_of(module)
    counts: dict[str, Any] = {name: n for name, n in ((kind.inputs, kept_in), (kind.outputs, kept_out)) if name}
    if isinstance(module, nn.LayerNorm):
        counts = {"normalized_shape": (kept_out,)}
    elif isinstance(module, nn.MultiheadAttention):
        counts = {"embed_dim": kept_in}
    elif isinstance(module, nn.RNNBase) and module.proj_size:
        counts.pop("hidden_size")
    elif is_depthwise(module):
        counts["groups"] = kept_in
    # GPT-2's layer counts under different names in different versions; a PReLU of one parameter counts no channels.
    return {name: count for name, count in counts.items() if hasattr(module, name) and count}
