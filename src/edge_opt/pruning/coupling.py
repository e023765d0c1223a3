"""Which channels must be removed together: units of coupled channels, and the groups they are ranked in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from edge_opt.pruning.attention import Heads, split_heads
from edge_opt.pruning.dependency_graph import BlockMapping, Role, SurrogateLinear, dependency_graph, surrogate_model
from edge_opt.pruning.layer_kinds import (
    Side,
    channels,
    depth_multiplier,
    kind_of,
    refusal_of,
    state_tensors,
    tensor_entries,
    tied_positions,
)
from edge_opt.records.fields import field, record
from edge_opt.trace.inputs import CallArguments

# Marks a channel that belongs to no unit, so it stays.
NONE = -1
_LOST = "the channels could not be followed"


class TensorDim(NamedTuple):
    """One dimension of a tensor of the model's state."""

    tensor: str
    dim: int


@dataclass(frozen=True, slots=True)
class ChannelRefusal:
    """Why channels cannot be removed: `reason` about the layer at `path`, or about the channels where that is None."""

    reason: str
    path: str | None = None

    def __str__(self) -> str:
        return self.reason if self.path is None else f"{self.path} {self.reason}"


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are ranked against each other, named after the layer `root`; None of them may go if `refused`."""

    root: str
    units: np.ndarray
    channels_per_unit: int
    refused: ChannelRefusal | None


@record
class ChannelMap:
    """The unit of each layer's channels and of each tensor's entries, or NONE."""

    units: int = field("How many units there are.")
    groups: tuple[Group, ...] = field("The units by what they are ranked against.")
    layers: dict[tuple[str, Side], np.ndarray] = field("Units of a layer's channels, by path and side.")
    tensors: dict[TensorDim, np.ndarray] = field("Units of the entries of a tensor, along one dimension.")
    heads: dict[str, np.ndarray] = field("Units of the heads of each `nn.MultiheadAttention`.")
    head_owners: dict[str, Heads] = field("Other attention modules, by path.")

    def groups_of(self, owner: np.ndarray) -> list[int]:
        """Return the numbers of the groups that channels with these units belong to."""
        group_of = np.full(self.units, NONE)
        for number, group in enumerate(self.groups):
            group_of[group.units] = number
        return list(dict.fromkeys(group_of[owner[owner != NONE]].tolist()))


def kept_channels(owner: np.ndarray, removed: np.ndarray) -> np.ndarray:
    """Return for each channel whether it stays, when the units marked in `removed` go."""
    stays: np.ndarray = (owner == NONE) | ~removed[owner]
    return stays


class _Index(NamedTuple):
    """A channel of a layer and the unit it belongs to, under the names that torch-pruning's mappings read."""

    idx: int
    root_idx: int


def channel_map(model: nn.Module, arguments: CallArguments, ignored: Iterable[str]) -> ChannelMap:
    """Return every channel of the model with what must go when it goes.

    The model is a copy in eval mode, which is traced. Layers at the paths `ignored` keep their channels.
    """
    surrogate, heads = surrogate_model(model, arguments)
    coupling = CouplingGraph(model, surrogate, dependency_graph(surrogate, arguments), set(ignored))
    coupling.follow()
    coupling.tie_heads(heads)
    coupling.tie_shared_tensors()
    return coupling.result()


class CouplingGraph:
    """The walk over the dependency graph: a channel that is reached from two units makes them one (union-find)."""

    def __init__(self, model: nn.Module, surrogate: nn.Module, graph: Any, ignored: set[str]) -> None:
        self.model = model
        self.surrogate = surrogate
        self.graph = graph
        self.paths = {module: path for path, module in surrogate.named_modules()}
        self.ignored = ignored
        # For each name of a parameter the first name of the same one.
        firsts: dict[int, str] = {}
        named = model.named_parameters(remove_duplicate=False)
        self.first_names = {name: firsts.setdefault(id(parameter), name) for name, parameter in named}
        self.shapes = {name: tensor.shape for name, tensor in state_tensors(model).items()}
        # No layer has more channels than this; a walk that counts beyond has lost its way in reshapes.
        self.widest = max((size for shape in self.shapes.values() for size in shape), default=0)
        self.parents: list[int] = []
        self.roots: list[tuple[str, range, int]] = []
        self.seen: dict[tuple[Any, Side], dict[int, int]] = {}
        self.refused: dict[int, ChannelRefusal] = {}
        self.heads: dict[str, list[int]] = {}
        self.head_owners: dict[str, Heads] = {}
        self.tensors: dict[TensorDim, np.ndarray] = {}

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

    def unite(self, first: int, second: int) -> None:
        first, second = self.find(first), self.find(second)
        self.parents[max(first, second)] = min(first, second)

    def follow(self) -> None:
        """Start from the output channels of every layer that has weights of its own, as far as not reached yet."""
        nodes = list(self.graph.module2node.items())
        # The graph is read from the outputs backward; a group is named after its first layer in forward order.
        for module, node in reversed(nodes):
            path = self.path_of(module)
            if path is None or not kind_of(module).is_root:
                continue
            handler = self.graph.get_pruner_of_module(module).prune_out_channels
            seen = self.seen.get((node, self.side(node, handler)), {})
            fresh = [index for index in range(channels(module, "out")) if index not in seen]
            units = self.new_units(path, len(fresh))
            self.spread(node, handler, [_Index(*pair) for pair in zip(fresh, units, strict=True)])

    def path_of(self, module: Any) -> str | None:
        if isinstance(module, nn.Parameter):
            return str(self.graph._param_to_name.get(module, ""))
        return module.writes[0].path if isinstance(module, SurrogateLinear) else self.paths.get(module)

    def roles(self, module: nn.Module, side: Side) -> tuple[Role, ...]:
        """Return the layers of the model whose channels a module of the surrogate represents; none for a parameter."""
        if isinstance(module, SurrogateLinear):
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
                    self.refuse(fresh, ChannelRefusal(f"{_LOST}: a split or concatenation is not understood"))
                    continue
                if any(index.root_idx is None for index in mapped):
                    self.refuse(fresh, ChannelRefusal("keys and values shared by several heads are not followed"))
                elif mapped:
                    stack.append((dependency.target, dependency.handler, mapped))
            outputs = depth_multiplier(node.module, side)
            if outputs:
                # A depthwise convolution with several outputs per input, which the graph takes for an ordinary one.
                pruner = self.graph.get_pruner_of_module(node.module)
                opposite = pruner.prune_out_channels if side == "in" else pruner.prune_in_channels
                stack.append((node, opposite, BlockMapping(outputs, is_widening=side == "in")(fresh)))

    def register(self, node: Any, side: Side, reached: list[_Index]) -> list[_Index]:
        """Note the channels, and return those that are new, to be followed further."""
        seen = self.seen.setdefault((node, side), {})
        fresh = []
        for index in reached:
            if index.idx >= self.widest:
                self.refuse([index], ChannelRefusal(f"{_LOST}: a reshape mixes them"))
            elif index.idx in seen:
                self.unite(seen[index.idx], index.root_idx)
            else:
                seen[index.idx] = index.root_idx
                fresh.append(index)
        refusal = self.refusal(node, side, fresh)
        if refusal:
            self.refuse(fresh, refusal)
        labels = tied_positions(node.module, side)
        if isinstance(node.module, SurrogateLinear) and side == "out" and node.module.block > 1:
            labels = np.arange(node.module.out_features) // node.module.block
        if labels is not None:
            first: dict[int, int] = {}
            for idx, unit in seen.items():
                self.unite(first.setdefault(int(labels[idx % len(labels)]), unit), unit)
        return fresh

    def refusal(self, node: Any, side: Side, fresh: list[_Index]) -> ChannelRefusal | None:
        """Return why these channels of a node cannot be removed; None where they can."""
        path, module = self.path_of(node.module), node.module
        if side != "in" and not node.outputs:
            if not path:
                return ChannelRefusal("its channels are the model's output")
            return ChannelRefusal("is the model's output", path)
        if path is None:
            return None
        if side != "in" and self.is_ignored(path):
            return ChannelRefusal("is ignored", path)
        size = module.shape[node.pruning_dim] if isinstance(module, nn.Parameter) else channels(module, side)
        if size and any(index.idx >= size for index in fresh):
            return ChannelRefusal(f"{_LOST} into {path} ({type(module).__name__})")
        for role in self.roles(module, side):
            why = refusal_of(self.model.get_submodule(role.path), side)
            if why:
                return ChannelRefusal(f"is a {why}", role.path)
        return None

    def is_ignored(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}.") for each in self.ignored)

    def refuse(self, reached: Iterable[_Index], refusal: ChannelRefusal) -> None:
        """Note why channels cannot go; the first reason counts."""
        for index in reached:
            self.refused.setdefault(index.root_idx, refusal)

    def tie_heads(self, joint_heads: Iterable[Heads]) -> None:
        """Unite the channels of each head: of `nn.MultiheadAttention`, and of projections that are split into heads.

        Surrogates have tied `joint_heads` already.
        """
        for module, path in self.paths.items():
            is_attention = isinstance(module, nn.MultiheadAttention) and module in self.graph.module2node
            if is_attention and refusal_of(module) is None:
                units = self.new_units(path, module.num_heads, module.head_dim)
                self.heads[path] = list(units)
                if self.is_ignored(path):
                    self.refuse([_Index(0, unit) for unit in units], ChannelRefusal("is ignored", path))
        self.head_owners |= {heads.owner: heads for heads in joint_heads}
        for heads in split_heads(self.surrogate):
            layers = [self.surrogate.get_submodule(path) for path in heads.projections]
            owners = [self.seen.get((self.graph.module2node.get(layer), "out"), {}) for layer in layers]
            if any(len(owner) < heads.width for owner in owners):
                continue
            size = heads.width // heads.heads
            for channel in range(heads.width):
                for owner in owners:
                    self.unite(owners[0][channel // size * size], owner[channel])
            self.head_owners[heads.owner] = heads

    def tie_shared_tensors(self) -> None:
        """Unite the channels of a tensor that two layers share, as tied embeddings: it is cut once for both."""
        owners: dict[tuple[TensorDim, int], int] = {}
        for (node, side), seen in self.seen.items():
            for role in self.roles(node.module, side):
                for tensor_dim, indices in self.owned_entries(role.path, side):
                    for index, channel in zip(indices, role.channels, strict=False):
                        if (unit := seen.get(int(channel))) is not None:
                            self.unite(owners.setdefault((tensor_dim, int(index)), unit), unit)

    def owned_entries(self, path: str, side: Side) -> Iterator[tuple[TensorDim, np.ndarray]]:
        """Yield the tensor dimensions that hold a layer's channels, each with the index of every channel."""
        layer = self.model.get_submodule(path)
        for entries in tensor_entries(layer, side):
            yield TensorDim(self.first_name(path, entries.tensor), entries.dim), entries.indices

    def first_name(self, path: str, tensor: str) -> str:
        """Return the name of a layer's tensor; of one with several names, the first."""
        name = f"{path}.{tensor}".lstrip(".")
        return self.first_names.get(name, name)

    def result(self) -> ChannelMap:
        """Return the channel map, with units numbered anew: one number for those that became one."""
        leader_of = np.array([self.find(unit) for unit in range(len(self.parents))], dtype=np.int64)
        leaders, unit_of = np.unique(leader_of, return_inverse=True)
        layers = self._layer_owners(unit_of)
        self._own_head_tensors(unit_of, layers)
        refused = {int(unit_of[unit]): refusal for unit, refusal in reversed(self.refused.items())}
        return ChannelMap(
            units=len(leaders),
            groups=tuple(_groups(self.roots, unit_of, refused)),
            layers=layers,
            tensors=self.tensors,
            heads={path: unit_of[units] for path, units in self.heads.items()},
            head_owners=self.head_owners,
        )

    def own(self, tensor_dim: TensorDim, indices: np.ndarray, units: np.ndarray) -> None:
        """Note the units of these entries. A weight that is computed has no tensor; its layer is refused."""
        if tensor_dim.tensor in self.shapes:
            size = self.shapes[tensor_dim.tensor][tensor_dim.dim]
            owner = self.tensors.setdefault(tensor_dim, np.full(size, NONE))
            owner[indices[units != NONE]] = units[units != NONE]

    def _layer_owners(self, unit_of: np.ndarray) -> dict[tuple[str, Side], np.ndarray]:
        """Return the unit of each layer's channels, and note the tensors that hold them."""
        layers: dict[tuple[str, Side], np.ndarray] = {}
        for (node, side), seen in self.seen.items():
            path, module = self.path_of(node.module), node.module
            if path is None:
                continue
            if isinstance(module, nn.Parameter):
                dim = node.pruning_dim % module.dim()
                indices = np.array(sorted(seen))
                if indices.max() < module.shape[dim]:
                    self.own(TensorDim(path, dim), indices, unit_of[[seen[index] for index in sorted(seen)]])
                continue
            every = np.full(channels(module, side), NONE)
            for index, unit in seen.items():
                if index < len(every):
                    every[index] = unit_of[unit]
            for role in self.roles(module, side):
                owner = every[role.channels]
                layers[role.path, side] = owner
                for tensor_dim, indices in self.owned_entries(role.path, side):
                    if len(indices) == len(owner):  # else the layer is refused
                        self.own(tensor_dim, indices, owner)
        return layers

    def _own_head_tensors(self, unit_of: np.ndarray, layers: dict[tuple[str, Side], np.ndarray]) -> None:
        """Note the tensors that attention modules keep per head, or per channel of a head."""
        for path, heads in self.head_owners.items():
            if (heads.projections[0], "out") not in layers:
                continue
            for name, dim, indices in _own_of_heads(self.model.get_submodule(path), heads):
                units = layers[heads.projections[0], "out"][indices]
                self.own(TensorDim(self.first_name(path, name), dim), np.arange(len(indices)), units)
        for path, of_heads in self.heads.items():
            module = self.model.get_submodule(path)
            assert isinstance(module, nn.MultiheadAttention)
            rows = np.repeat(unit_of[of_heads], module.head_dim)
            for name in ("in_proj_weight", "in_proj_bias"):
                self.own(TensorDim(f"{path}.{name}".lstrip("."), 0), np.arange(3 * len(rows)), np.tile(rows, 3))
            self.own(TensorDim(f"{path}.out_proj.weight".lstrip("."), 1), np.arange(len(rows)), rows)


def _own_of_heads(module: nn.Module, heads: Heads) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield tensors of an attention module itself, such as tables of biases: one dimension is heads, or their channels.

    Each comes with the channel of the projection that its entries go with. A tensor that is only as long by chance is
    found by the proof.
    """
    every, size = np.arange(heads.width), heads.width // heads.heads
    channel_of = {heads.heads: every[::size], heads.width: every}
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        dims = [dim for dim, length in enumerate(tensor.shape) if length in channel_of and length > 1]
        if len(dims) == 1:
            yield name, dims[0], channel_of[tensor.shape[dims[0]]]


def _groups(
    roots: list[tuple[str, range, int]], unit_of: np.ndarray, refused: dict[int, ChannelRefusal]
) -> Iterator[Group]:
    """Yield the units of each root, which are ranked together; one that fell to an earlier root is ranked there."""
    taken: set[int] = set()
    for root, members, channels_each in roots:
        numbers = [int(unit_of[unit]) for unit in members]
        own = [number for number in dict.fromkeys(numbers) if number not in taken]
        taken.update(own)
        for refusal in dict.fromkeys(refused.get(unit) for unit in own):
            units = np.array([unit for unit in own if refused.get(unit) == refusal])
            size = int(np.isin(numbers, units).sum()) // len(units)
            yield Group(root, units, max(size, 1) * channels_each, refusal)
