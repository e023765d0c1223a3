"""Linear layers in place of layers whose channels the dependency graph cannot follow.

Channels are followed on a copy of the model, the surrogate. In it a recurrent layer, or attention with one joint layer
for query, key and value, is replaced by linear layers through which the same channels flow. Nothing of the surrogate is
ever run for its values: the channels found on it are cut out of the original, and proved there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from edge_opt.pruning.attention import HEAD_COUNTS, Heads, projections_of
from edge_opt.pruning.layer_kinds import channels, is_transposed_linear
from edge_opt.trace.inputs import CallArguments


class Role(NamedTuple):
    """A layer of the model that a surrogate stands for: its channel c is channel `channels[c]` of the surrogate."""

    path: str
    channels: np.ndarray


class SurrogateLinear(nn.Linear):
    """A linear layer in the place of others, whose inputs and outputs are channels of those.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        reads: The layers that its inputs stand for.
        writes: The layers that its outputs stand for.
        block: So many neighboring outputs can only go together.
    """

    def __init__(self, inputs: int, outputs: int, reads: tuple[Role, ...], writes: tuple[Role, ...], block: int = 1):
        super().__init__(inputs, outputs, bias=False)
        self.reads = reads
        self.writes = writes
        self.block = block


@dataclass(frozen=True, slots=True)
class SurrogateModel:
    """The copy with surrogate layers, and the attention modules whose heads are known."""

    model: nn.Module
    heads: tuple[Heads, ...]


def features(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer of either kind; None for anything else."""
    if isinstance(module, nn.Linear) or is_transposed_linear(module):
        return channels(module, "in"), channels(module, "out")
    return None


def surrogate_model(model: nn.Module, arguments: CallArguments) -> SurrogateModel:
    """Return a copy of the model with surrogate layers, to be traced.

    The model runs once, to see which layers get a sequence of feature vectors and what they return.
    """
    copied = copy.deepcopy(model)
    sequence_layers = _sequence_layers(model, arguments)
    heads: list[Heads] = []
    replaced: list[str] = []
    for path, module in model.named_modules():
        if not path or any(path.startswith(f"{other}.") for other in replaced):
            continue
        surrogate: nn.Module | None = None
        if isinstance(module, nn.RNNBase):
            surrogate = _Recurrent(path, module)
        elif is_transposed_linear(module):
            surrogate = _plain_surrogate(path, channels(module, "in"), channels(module, "out"))
        elif path in sequence_layers and (joint := _joint_attention(path, module)) is not None:
            layout, described = joint
            surrogate = _JointAttention(path, module, layout, sequence_layers[path])
            heads.append(described)
        if surrogate is not None:
            holder, _, name = path.rpartition(".")
            setattr(copied.get_submodule(holder), name, surrogate)
            replaced.append(path)
    return SurrogateModel(copied, tuple(heads))


def _plain_surrogate(path: str, inputs: int, outputs: int) -> SurrogateLinear:
    """Return a surrogate for one layer, channel for channel."""
    return SurrogateLinear(inputs, outputs, (Role(path, np.arange(inputs)),), (Role(path, np.arange(outputs)),))


def _sequence_layers(model: nn.Module, arguments: CallArguments) -> dict[str, bool]:
    """Return the modules that get a sequence of feature vectors and return one; True where they return a tuple."""
    returns_tuple: dict[str, bool] = {}

    def note(path: str) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = _first_tensor(args, kwargs)
            first = output[0] if isinstance(output, tuple) and output else output
            if x is not None and x.dim() == 3 and isinstance(first, torch.Tensor):
                returns_tuple.setdefault(path, isinstance(output, tuple))

        return after

    handles = [
        module.register_forward_hook(note(path), with_kwargs=True)
        for path, module in model.named_modules()
        if path and any(features(part) for part in module.modules())
    ]
    try:
        with torch.enable_grad():
            model(*arguments.args, **arguments.kwargs)
    except Exception:
        # The dependency graph makes the same call next, and reports what is wrong with it.
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return returns_tuple


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    values = (*args, kwargs.get("hidden_states"), *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


class _Recurrent(nn.Module):
    """An LSTM, GRU or RNN. All its layers and directions lose hidden units at the same positions."""

    def __init__(self, path: str, layer: nn.RNNBase) -> None:
        super().__init__()
        self.is_lstm = isinstance(layer, nn.LSTM)
        self.batch_first = layer.batch_first
        self.directions = 2 if layer.bidirectional else 1
        self.states = layer.num_layers * self.directions
        self.projected_cell = layer.hidden_size if layer.proj_size else 0
        self.cell = _plain_surrogate(path, layer.input_size, layer.proj_size or layer.hidden_size)

    def forward(self, x: Any, hx: Any = None) -> tuple[Any, Any]:
        rows: torch.Tensor = x.data if isinstance(x, PackedSequence) else x
        hidden = self.cell(rows)
        out = torch.cat([hidden] * self.directions, dim=-1) if self.directions > 1 else hidden
        if isinstance(x, PackedSequence):
            last = hidden[: int(x.batch_sizes[0])]
            out = x._replace(data=out)
        else:
            last = hidden[:, -1] if self.batch_first and rows.dim() == 3 else hidden[-1]
        state = last.unsqueeze(0).expand(self.states, *last.shape)
        # A projection narrows the outputs, not the cell state; the units of the cell state are followed nowhere.
        cell = state.new_zeros(*state.shape[:-1], self.projected_cell) if self.projected_cell else state
        return out, (state, cell) if self.is_lstm else state


@dataclass(frozen=True, slots=True)
class _JointLayout:
    """How an attention module holds its heads: the layers that read, the heads' joint width, and the layer behind."""

    readers: tuple[Role, ...]
    width: int
    block: int
    out: str


def _joint_attention(path: str, module: nn.Module) -> tuple[_JointLayout, Heads] | None:
    """Recognize attention with one layer for query, key and value, or with fewer heads for keys than for queries."""
    linears = {name: size for name, child in module.named_children() if (size := features(child))}
    others = [name for name, child in module.named_children() if name not in linears and list(child.parameters())]
    head_size = getattr(module, "head_dim", None)
    count = next((value for name in HEAD_COUNTS if type(value := getattr(module, name, None)) is int), None)
    for reading, width in _layouts(linears, count, head_size if type(head_size) is int else None):
        readers = {name for name, _ in reading}
        outs = [name for name, (inputs, _) in linears.items() if name not in readers and inputs == width.all]
        if len(outs) != 1 or len(linears) != len(readers) + 1 or any("norm" not in name for name in others):
            continue
        roles = tuple(Role(f"{path}.{name}", indices) for name, indices in reading)
        heads = Heads(path, (roles[0].path,), width.all // width.head, width.all)
        return _JointLayout(roles, width.all, width.block, outs[0]), heads
    return None


class _Width(NamedTuple):
    """All heads together, one head, and what can only go together."""

    all: int
    head: int
    block: int


def _layouts(
    linears: Mapping[str, tuple[int, int]], count: int | None, head_size: int | None
) -> Iterator[tuple[list[tuple[str, np.ndarray]], _Width]]:
    """Yield the ways in which the layers of an attention module may hold its heads, with the index of each channel."""
    for name, (_, outputs) in linears.items():
        width = outputs // 3
        head = head_size or (width // count if count else 0)
        if outputs % 3 == 0 and head and width % head == 0 and count in (None, width // head) and len(linears) == 2:
            yield [(name, np.tile(np.arange(width), 3))], _Width(width, head, head)
    triple = projections_of(linears)
    if triple is None or not head_size:
        return
    sizes = [linears[name] for name in triple]
    width, kept = sizes[0][1], sizes[1][1]
    if sizes[2][1] != kept or width % kept or kept % head_size or len({inputs for inputs, _ in sizes}) != 1:
        return
    # Query heads that share a key and value are neighbors; the channel of a key stands for the first of them.
    block = head_size * (width // kept)
    shared = np.arange(kept) // head_size * block + np.arange(kept) % head_size
    indices = (np.arange(width), shared, shared)
    if width > kept or count is None:
        yield list(zip(triple, indices, strict=True)), _Width(width, head_size, block)


class _JointAttention(nn.Module):
    """Attention as the flow of its heads: from the stream to the heads, and from there to the stream."""

    def __init__(self, path: str, module: nn.Module, layout: _JointLayout, is_tuple: bool) -> None:
        super().__init__()
        self.is_tuple = is_tuple
        size = features(module.get_submodule(layout.readers[0].path[len(path) + 1 :]))
        out = features(module.get_submodule(layout.out))
        assert size is not None and out is not None
        reads = tuple(Role(role.path, np.arange(size[0])) for role in layout.readers)
        self.heads = SurrogateLinear(size[0], layout.width, reads, layout.readers, layout.block)
        self.out = _plain_surrogate(f"{path}.{layout.out}", *out)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = _first_tensor(args, kwargs)
        assert x is not None
        out = self.out(self.heads(x))
        return (out, None) if self.is_tuple else out
