"""Which channels hang together, and where each kind of layer keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize

from edge_opt.pruning.attention import Heads, split_heads
from edge_opt.pruning.dependency_graph import dependency_graph
from edge_opt.pruning.surrogate_layers import BESIDE, Role, StandIn, Twin, is_transposed_linear, twin_of
from edge_opt.trace.inputs import CallArguments

Side = Literal["in", "out", "both"]
NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm)
# Layers whose output channels a user can ask to prune.
PRUNABLE = (_ConvNd, nn.Linear, nn.MultiheadAttention, nn.RNNBase)


def is_prunable(module: nn.Module) -> bool:
    """Whether a user can ask for fewer output channels, heads or hidden units of a layer."""
    return isinstance(module, PRUNABLE) or is_transposed_linear(module)


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
    if isinstance(module, nn.RNNBase):
        return module.input_size if side == "in" else module.proj_size or module.hidden_size
    if is_transposed_linear(module):
        return int(module.get_parameter("weight").shape[0 if side == "in" else 1])
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
    if isinstance(module, nn.RNNBase):
        return _recurrent_places(module, side)
    if is_transposed_linear(module):
        if side == "in":
            return [Place("weight", 0, every)]
        return [Place("weight", 1, every), *_present(module, ("bias",), 0, every)]
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


def _recurrent_places(layer: nn.RNNBase, side: Side) -> list[Place]:
    """Where a hidden unit stands: a row in each gate, and a column for every reader, of each layer and direction."""
    if side == "in":
        names = [name for name in layer._flat_weights_names if name.startswith("weight_ih_l0")]
        return [Place(name, 1, np.arange(layer.input_size)) for name in names]
    if layer.proj_size:
        return []
    hidden = np.arange(layer.hidden_size)
    found = []
    for name in layer._flat_weights_names:
        tensor = layer.get_parameter(name)
        gates = tensor.shape[0] // layer.hidden_size
        found += [Place(name, 0, hidden + gate * layer.hidden_size) for gate in range(gates)]
        if name.startswith("weight_hh"):
            found.append(Place(name, 1, hidden))
        elif name.startswith("weight_ih") and not name.startswith("weight_ih_l0"):
            # Deeper layers read all directions of the one before.
            parts = tensor.shape[1] // layer.hidden_size
            found += [Place(name, 1, hidden + part * layer.hidden_size) for part in range(parts)]
    return found


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


def refusal(module: nn.Module, side: Side = "out") -> str | None:
    """Why the channels of a layer cannot be pruned, if they cannot."""
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
    if isinstance(module, nn.RNNBase):
        return {"input_size": kept_in} if module.proj_size else {"input_size": kept_in, "hidden_size": kept_out}
    if is_transposed_linear(module):
        return {name: count for name, count in (("nx", kept_in), ("nf", kept_out)) if hasattr(module, name)}
    if isinstance(module, nn.MultiheadAttention):
        return {"embed_dim": kept_in}
    return {"embedding_dim": kept_out} if isinstance(module, nn.Embedding) else {}


NONE = -1


class TensorDim(NamedTuple):
    """One dimension of a tensor of the model's state."""

    tensor: str
    dim: int


LayerOwners = dict[tuple[str, Side], np.ndarray]
TensorOwners = dict[TensorDim, np.ndarray]


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are ranked against each other. `refused` says why none of them may go, None where they may."""

    root: str
    units: np.ndarray
    channels_per_unit: int
    refused: str | None


@dataclass(frozen=True, slots=True)
class ChannelMap:
    """Who owns what: for each layer's channels and each tensor's entries the unit that they go with, or NONE."""

    units: int
    groups: tuple[Group, ...]
    layers: dict[tuple[str, Side], np.ndarray]
    tensors: dict[TensorDim, np.ndarray]
    scored: tuple[TensorDim, ...]
    heads: dict[str, np.ndarray]
    head_owners: dict[str, Heads]

    def group_of(self) -> np.ndarray:
        """For each unit the number of its group."""
        numbers = np.full(self.units, NONE)
        for number, group in enumerate(self.groups):
            numbers[group.units] = number
        return numbers


class _Index(NamedTuple):
    """A channel of a layer and the unit it belongs to, under the names that torch-pruning's mappings read."""

    idx: int
    root_idx: int


def channel_map(model: nn.Module, arguments: CallArguments, ignored: Iterable[str]) -> ChannelMap:
    """Every channel of the model with what must go when it goes. The model is a copy, in eval mode, to be traced."""
    twin = twin_of(model, arguments)
    survey = _Survey(model, twin, dependency_graph(twin.model, arguments, twin.beside), set(ignored))
    survey.follow()
    survey.tie_heads()
    survey.tie_shared_tensors()
    return survey.result()


class _Survey:
    """The walk over the graph: each channel is reached once, and channels reached from two units make them one."""

    def __init__(self, model: nn.Module, twin: Twin, graph: Any, ignored: set[str]) -> None:
        self.model = model
        self.twin = twin
        self.graph = graph
        # A part set beside the stream stands one step deeper in the twin than in the model.
        known = dict(model.named_modules())
        self.paths = {
            module: own if (own := path.replace(f".{BESIDE}.", ".").removesuffix(f".{BESIDE}")) in known else path
            for path, module in twin.model.named_modules()
        }
        self.aside = [each for path, each in twin.model.named_modules() if path.endswith(f".{BESIDE}")]
        self.ignored = ignored
        self.first_names = _first_names(model)
        # No layer has more channels than this; a walk that counts beyond has lost its way in reshapes.
        self.most = max((size for tensor in model.state_dict().values() for size in tensor.shape), default=0)
        self.parents: list[int] = []
        self.roots: list[tuple[str, range, int]] = []
        self.seen: dict[tuple[Any, Side], dict[int, int]] = {}
        self.refused: dict[int, str] = {}
        self.heads: dict[str, list[int]] = {}
        self.head_owners: dict[str, Heads] = {}

    def new_units(self, root: str, count: int, size: int = 1) -> range:
        units = range(len(self.parents), len(self.parents) + count)
        self.parents.extend(units)
        self.roots.append((root, units, size))
        return units

    def find(self, unit: int) -> int:
        while self.parents[unit] != unit:
            self.parents[unit] = self.parents[self.parents[unit]]
            unit = self.parents[unit]
        return unit

    def unite(self, one: int, other: int) -> None:
        one, other = self.find(one), self.find(other)
        self.parents[max(one, other)] = min(one, other)

    def follow(self) -> None:
        """Start from the output channels of every layer that has weights of its own, as far as not reached yet."""
        nodes = list(self.graph.module2node.items())
        # The graph is read from the outputs backward; a group is named after its first layer in forward order.
        for module, node in reversed(nodes):
            path = self.path_of(module)
            if path is None or isinstance(module, nn.Parameter) or not _is_root(module):
                continue
            handler = self.graph.get_pruner_of_module(module).prune_out_channels
            seen = self.seen.get((node, self.side(node, handler)), {})
            fresh = [index for index in range(channels(module, "out")) if index not in seen]
            units = self.new_units(path, len(fresh))
            self.spread(node, handler, [_Index(*pair) for pair in zip(fresh, units, strict=True)])

    def path_of(self, module: Any) -> str | None:
        if isinstance(module, nn.Parameter):
            return str(self.graph._param_to_name.get(module, ""))
        return module.writes[0].path if isinstance(module, StandIn) else self.paths.get(module)

    def roles(self, module: nn.Module, side: Side) -> tuple[Role, ...]:
        """The layers of the model whose channels those of a module in the twin are."""
        if isinstance(module, StandIn):
            return module.reads if side == "in" else module.writes
        path = self.paths.get(module)
        return () if path is None else (Role(path, np.arange(channels(module, side))),)

    def side(self, node: Any, handler: Any) -> Side:
        pruner = self.graph.get_pruner_of_module(node.module)
        if pruner.prune_in_channels == pruner.prune_out_channels:
            return "both"
        return "out" if handler == pruner.prune_out_channels else "in"

    def spread(self, node: Any, handler: Any, reached: list[_Index]) -> None:
        stack = [(node, handler, reached)]
        while stack:
            node, handler, reached = stack.pop()
            side = self.side(node, handler)
            fresh = self.register(node, side, reached)
            if not fresh:
                continue
            for dependency in node.dependencies:
                if not dependency.is_triggered_by(handler):
                    continue
                mapped: Any = fresh
                try:
                    for mapping in dependency.index_mapping:
                        mapped = mapped if mapping is None else mapping(mapped)
                except LookupError:
                    self.refuse(fresh, "the channels could not be followed: a split or concatenation is not understood")
                    continue
                if any(index.root_idx is None for index in mapped):
                    self.refuse(fresh, "keys and values shared by several heads are not followed")
                elif mapped:
                    stack.append((dependency.target, dependency.handler, mapped))
            stack.extend(self.across(node, side, fresh))

    def register(self, node: Any, side: Side, reached: list[_Index]) -> list[_Index]:
        """Note the channels; those that are new are returned, to be followed further."""
        seen = self.seen.setdefault((node, side), {})
        fresh = []
        for index in reached:
            if index.idx >= self.most:
                self.refuse([index], "the channels could not be followed: a reshape mixes them")
            elif index.idx in seen:
                self.unite(seen[index.idx], index.root_idx)
            else:
                seen[index.idx] = index.root_idx
                fresh.append(index)
        reason = self.reason(node, side, fresh)
        if reason:
            self.refuse(fresh, reason)
        labels = None if isinstance(node.module, nn.Parameter) else ties(node.module, side)
        if labels is not None:
            first: dict[int, int] = {}
            for idx, unit in seen.items():
                self.unite(first.setdefault(int(labels[idx % len(labels)]), unit), unit)
        return fresh

    def reason(self, node: Any, side: Side, fresh: list[_Index]) -> str | None:
        path, module = self.path_of(node.module), node.module
        name = f"{path} ({type(module).__name__})"
        if side != "in" and not node.outputs:
            if any(part is module for each in self.aside for part in each.modules()):
                return f"{path} writes tokens, and their number is the input's"
            return f"{path} is the model's output" if path else "its channels are the model's output"
        if path is None:
            return None
        if side != "in" and self.is_ignored(path):
            return f"{path} is ignored"
        size = module.shape[node.pruning_dim] if isinstance(module, nn.Parameter) else channels(module, side)
        if size and any(index.idx >= size for index in fresh):
            return f"the channels could not be followed into {name}"
        roles = () if isinstance(module, nn.Parameter) else self.roles(module, side)
        for role in roles:
            why = refusal(self.model.get_submodule(role.path), side)
            if why:
                return f"{role.path} is a {why}"
        return None

    def is_ignored(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}.") for each in self.ignored)

    def across(self, node: Any, side: Side, fresh: list[_Index]) -> Iterator[tuple[Any, Any, list[_Index]]]:
        """A depthwise convolution with several outputs per input, which the graph takes for an ordinary one."""
        outputs = 0 if isinstance(node.module, nn.Parameter) else crossed(node.module, side)
        if not outputs:
            return
        pruner = self.graph.get_pruner_of_module(node.module)
        if side == "in":
            many = [_Index(i.idx * outputs + k, i.root_idx) for i in fresh for k in range(outputs)]
            yield node, pruner.prune_out_channels, many
        else:
            yield node, pruner.prune_in_channels, [_Index(i.idx // outputs, i.root_idx) for i in fresh]

    def refuse(self, reached: Iterable[_Index], reason: str) -> None:
        for index in reached:
            self.refused.setdefault(index.root_idx, reason)

    def tie_heads(self) -> None:
        """Attention loses whole heads: of `nn.MultiheadAttention`, and of projections that are split into heads."""
        for module, path in self.paths.items():
            is_traced = module in self.graph.module2node
            if isinstance(module, nn.MultiheadAttention) and refusal(module) is None and is_traced:
                units = self.new_units(path, module.num_heads, module.head_dim)
                self.heads[path] = list(units)
                if self.is_ignored(path):
                    self.refuse([_Index(0, unit) for unit in units], f"{path} is ignored")
        for module in self.graph.module2node:
            if isinstance(module, StandIn) and module.block > 1:
                seen = self.seen.get((self.graph.module2node[module], "out"), {})
                for channel, unit in seen.items():
                    self.unite(seen.get(channel // module.block * module.block, unit), unit)
        self.head_owners |= {heads.owner: heads for heads in self.twin.heads}
        for heads in split_heads(self.twin.model):
            self._tie_projections(heads)

    def _tie_projections(self, heads: Heads) -> None:
        layers = [self.twin.model.get_submodule(path) for path in heads.projections]
        owners = [self.seen.get((self.graph.module2node.get(layer), "out"), {}) for layer in layers]
        width = channels(layers[0], "out")
        if any(len(owner) < width for owner in owners):
            return
        size = width // heads.heads
        for channel in range(width):
            for owner in owners:
                self.unite(owners[0][channel // size * size], owner[channel])
        self.head_owners[heads.owner] = heads

    def tie_shared_tensors(self) -> None:
        """A tensor that two layers share, as tied embeddings are, can only be cut once for both."""
        owners: dict[tuple[TensorDim, int], int] = {}
        for (node, side), seen in self.seen.items():
            if isinstance(node.module, nn.Parameter):
                continue
            for path, where in self.roles(node.module, side):
                for place in places(self.model.get_submodule(path), side):
                    at = TensorDim(self.first_name(path, place.tensor), place.dim)
                    for index, channel in zip(place.where, where, strict=False):
                        if (unit := seen.get(int(channel))) is not None:
                            self.unite(owners.setdefault((at, int(index)), unit), unit)

    def first_name(self, path: str, tensor: str) -> str:
        """The name of a layer's tensor; of one with several, the first."""
        name = f"{path}.{tensor}".lstrip(".")
        return self.first_names.get(name, name)

    def result(self) -> ChannelMap:
        """The survey with units numbered anew, one number for those that became one."""
        leaders = sorted({self.find(unit) for unit in range(len(self.parents))})
        number = {leader: position for position, leader in enumerate(leaders)}
        unit_of = np.array([number[self.find(unit)] for unit in range(len(self.parents))], dtype=np.int64)
        layers, tensors, scored = self._owners(unit_of)
        refused = {int(unit_of[unit]): reason for unit, reason in reversed(self.refused.items())}
        return ChannelMap(
            units=len(leaders),
            groups=tuple(_groups(self.roots, unit_of, refused)),
            layers=layers,
            tensors=tensors,
            scored=scored,
            heads={path: unit_of[units] for path, units in self.heads.items()},
            head_owners=self.head_owners,
        )

    def _owners(self, unit_of: np.ndarray) -> tuple[LayerOwners, TensorOwners, tuple[TensorDim, ...]]:
        layers: LayerOwners = {}
        tensors: TensorOwners = {}
        scored: dict[TensorDim, None] = {}
        sizes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}

        def own(place: TensorDim, index: np.ndarray, units: np.ndarray) -> None:
            if place.tensor not in sizes:  # a weight that is computed; its layer is refused
                return
            owner = tensors.setdefault(place, np.full(sizes[place.tensor][place.dim], NONE))
            owner[index[units != NONE]] = units[units != NONE]

        for (node, side), seen in self.seen.items():
            path, module = self.path_of(node.module), node.module
            if path is None:
                continue
            if isinstance(module, nn.Parameter):
                dim = node.pruning_dim % module.dim()
                indices = np.array(sorted(seen))
                if indices.max() < module.shape[dim]:
                    own(TensorDim(path, dim), indices, unit_of[[seen[index] for index in sorted(seen)]])
                continue
            every = np.full(channels(module, side), NONE)
            for index, unit in seen.items():
                if index < len(every):
                    every[index] = unit_of[unit]
            for role in self.roles(module, side):
                owner = every[role.where]
                layers[role.path, side] = owner
                for place in places(self.model.get_submodule(role.path), side):
                    at = TensorDim(self.first_name(role.path, place.tensor), place.dim)
                    if len(place.where) != len(owner):  # a layer that is refused
                        continue
                    own(at, place.where, owner)
                    if side != "in" and _is_root(module) and "weight" in place.tensor and at in tensors:
                        scored[at] = None
        for path, heads in self.head_owners.items():
            if (heads.projections[0], "out") not in layers:
                continue
            for name, dim, where in _own_of_heads(self.model.get_submodule(path), heads):
                units = layers[heads.projections[0], "out"][where]
                own(TensorDim(self.first_name(path, name), dim), np.arange(len(where)), units)
        for path, of_heads in self.heads.items():
            module = self.model.get_submodule(path)
            assert isinstance(module, nn.MultiheadAttention)
            rows = np.repeat(unit_of[of_heads], module.head_dim)
            prefix = f"{path}." if path else ""
            for at in (TensorDim(f"{prefix}in_proj_weight", 0), TensorDim(f"{prefix}in_proj_bias", 0)):
                own(at, np.arange(3 * len(rows)), np.tile(rows, 3))
            own(TensorDim(f"{prefix}out_proj.weight", 1), np.arange(len(rows)), rows)
            scored |= dict.fromkeys((TensorDim(f"{prefix}in_proj_weight", 0), TensorDim(f"{prefix}out_proj.weight", 1)))
        return layers, tensors, tuple(scored)


def _own_of_heads(module: nn.Module, heads: Heads) -> Iterator[tuple[str, int, np.ndarray]]:
    """Tensors of an attention module itself, such as tables of biases: a dimension of heads, or of their channels.

    Each with the channel of the projection that its entries go with. What is no such thing and only as long is found
    by the proof.
    """
    every, size = np.arange(heads.width), heads.width // heads.heads
    channel_of = {heads.heads: every[::size], heads.width: every}
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        dims = [dim for dim, length in enumerate(tensor.shape) if length in channel_of and length > 1]
        if len(dims) == 1:
            yield name, dims[0], channel_of[tensor.shape[dims[0]]]


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter the first name of the same one."""
    firsts: dict[int, str] = {}
    return {
        name: firsts.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _is_root(module: nn.Module) -> bool:
    return isinstance(module, (_ConvNd, nn.Linear, nn.Embedding, nn.MultiheadAttention))


def _groups(roots: list[tuple[str, range, int]], unit_of: np.ndarray, refused: dict[int, str]) -> Iterator[Group]:
    """Units of one root are ranked together; one that fell to an earlier root is ranked there."""
    taken: set[int] = set()
    for root, members, channels_each in roots:
        numbers = [int(unit_of[unit]) for unit in members]
        own = [number for number in dict.fromkeys(numbers) if number not in taken]
        taken.update(own)
        for reason in dict.fromkeys(refused.get(unit) for unit in own):
            units = np.array([unit for unit in own if refused.get(unit) == reason])
            size = int(np.isin(numbers, units).sum()) // len(units)
            yield Group(root, units, max(size, 1) * channels_each, reason)
