"""Layers whose channels a graph of operators cannot follow, and plain linear layers that stand in for them meanwhile.

Channels are followed on a twin of the model. In it a recurrent layer, attention with one joint layer for query, key and
value, or a layer that mixes tokens is replaced by linear layers through which the same channels flow. Nothing of the
twin is ever run for its values: what is found on it is cut out of the original, and proved there.
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
from edge_opt.trace.inputs import CallArguments

# Under which name a part that is set beside the stream keeps its module.
BESIDE = "beside_the_stream"


class Role(NamedTuple):
    """A layer of the model that a stand-in plays: channel c of the layer is channel `where[c]` of the stand-in."""

    path: str
    where: np.ndarray


class StandIn(nn.Linear):
    """A linear layer in the place of others; what it reads and what it writes are channels of those."""

    def __init__(self, inputs: int, outputs: int, reads: tuple[Role, ...], writes: tuple[Role, ...], block: int = 1):
        super().__init__(inputs, outputs, bias=False)
        self.reads = reads
        self.writes = writes
        # So many neighboring outputs can only go together.
        self.block = block


@dataclass(frozen=True, slots=True)
class Twin:
    """The twin, the attention whose heads it knows, and outputs of parts that were set beside the stream."""

    model: nn.Module
    heads: tuple[Heads, ...]
    beside: list[torch.Tensor]


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer that keeps its weight as (in, out), as the Conv1D of GPT-2 does."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and getattr(module, "nf", None) == weight.shape[1]
    )


def features(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer of either kind; None for anything else."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if is_transposed_linear(module):
        inputs, outputs = module.get_parameter("weight").shape
        return inputs, outputs
    return None


def twin_of(model: nn.Module, arguments: CallArguments) -> Twin:
    """A copy of the model with stand-ins, to be traced. The model runs once, to see what its layers get and return."""
    twin = copy.deepcopy(model)
    seen = _calls(model, arguments)
    heads: list[Heads] = []
    beside: list[torch.Tensor] = []
    done: list[str] = []
    for path, module in model.named_modules():
        if not path or any(path.startswith(f"{each}.") for each in done):
            continue
        stand_in: nn.Module | None = None
        if isinstance(module, nn.RNNBase):
            stand_in = _Recurrent(path, module)
        elif is_transposed_linear(module):
            inputs, outputs = module.get_parameter("weight").shape
            stand_in = StandIn(inputs, outputs, (Role(path, np.arange(inputs)),), (Role(path, np.arange(outputs)),))
        elif path in seen and seen[path].is_across_tokens:
            stand_in = _Beside(twin.get_submodule(path), beside)
        elif path in seen and (found := _joint_attention(path, module)) is not None:
            kind, described = found
            stand_in = _Attention(path, module, kind, seen[path].is_tuple)
            heads.append(described)
        if stand_in is not None:
            holder, _, name = path.rpartition(".")
            setattr(twin.get_submodule(holder), name, stand_in)
            done.append(path)
    return Twin(twin, tuple(heads), beside)


class _Seen(NamedTuple):
    """What a module got and returned in a run."""

    is_tuple: bool
    is_across_tokens: bool


def _calls(model: nn.Module, arguments: CallArguments) -> dict[str, _Seen]:
    """Modules that got a sequence of feature vectors and return one, with what is peculiar about the call."""
    found: dict[str, _Seen] = {}

    def note(path: str) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = _first_tensor(args, kwargs)
            first = output[0] if isinstance(output, tuple) and output else output
            if x is None or x.dim() != 3 or not isinstance(first, torch.Tensor):
                return
            found.setdefault(path, _Seen(isinstance(output, tuple), _is_across_tokens(module, x, first)))

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
        # What is wrong with the call is said by whoever runs it next.
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    values = (*args, kwargs.get("hidden_states"), *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


def _is_across_tokens(module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether tokens are mixed, not channels: what a layer norm left, channels last, came in transposed."""
    if output.shape != x.shape or type(x.grad_fn).__name__ not in ("TransposeBackward0", "PermuteBackward0"):
        return False
    first = next((size for part in module.modules() if (size := features(part))), None)
    (source, _), *_ = x.grad_fn.next_functions  # type: ignore[union-attr]
    return first is not None and first[0] == x.shape[-1] and type(source).__name__ == "NativeLayerNormBackward0"


class _Recurrent(nn.Module):
    """An LSTM, GRU or RNN. All its layers and directions lose hidden units at the same positions."""

    def __init__(self, path: str, layer: nn.RNNBase) -> None:
        super().__init__()
        self.is_lstm = isinstance(layer, nn.LSTM)
        self.batch_first = layer.batch_first
        self.directions = 2 if layer.bidirectional else 1
        self.states = layer.num_layers * self.directions
        self.projected_cell = layer.hidden_size if layer.proj_size else 0
        outputs = layer.proj_size or layer.hidden_size
        roles = (Role(path, np.arange(layer.input_size)),), (Role(path, np.arange(outputs)),)
        self.cell = StandIn(layer.input_size, outputs, *roles)

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
        # A projection narrows what is told, not what is kept: the cell's own units are followed nowhere.
        cell = state.new_zeros(*state.shape[:-1], self.projected_cell) if self.projected_cell else state
        return out, (state, cell) if self.is_lstm else state


class _Beside(nn.Module):
    """A part that mixes tokens: channels pass it by, and its own hidden units are an output of their own."""

    def __init__(self, part: nn.Module, beside: list[torch.Tensor]) -> None:
        super().__init__()
        self.add_module(BESIDE, part)
        self.beside = beside

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.beside.append(self.get_submodule(BESIDE)(x.detach()))
        return x.clone()


@dataclass(frozen=True, slots=True)
class _Joint:
    """Attention as its projections are laid out: who reads, which head each row belongs to, and who joins the heads."""

    readers: tuple[Role, ...]
    width: int
    block: int
    out: str


def _joint_attention(path: str, module: nn.Module) -> tuple[_Joint, Heads] | None:
    """Attention with one layer for query, key and value, or with fewer heads for keys and values than for queries."""
    linears = {name: size for name, child in module.named_children() if (size := features(child))}
    others = [name for name, child in module.named_children() if name not in linears and list(child.parameters())]
    head_size = getattr(module, "head_dim", None)
    count = next((value for name in HEAD_COUNTS if type(value := getattr(module, name, None)) is int), None)
    for reading, width in _layouts(linears, count, head_size if type(head_size) is int else None):
        readers = {name for name, _ in reading}
        outs = [name for name, (inputs, _) in linears.items() if name not in readers and inputs == width.all]
        if len(outs) != 1 or len(linears) != len(readers) + 1 or any("norm" not in name for name in others):
            continue
        roles = tuple(Role(f"{path}.{name}", where) for name, where in reading)
        heads = Heads(path, (roles[0].path,), width.all // width.head, width.all)
        return _Joint(roles, width.all, width.block, outs[0]), heads
    return None


class _Width(NamedTuple):
    """All heads together, one head, and what can only go together."""

    all: int
    head: int
    block: int


def _layouts(
    linears: Mapping[str, tuple[int, int]], count: int | None, head_size: int | None
) -> Iterator[tuple[list[tuple[str, np.ndarray]], _Width]]:
    """The ways in which the layers of an attention module may hold its heads, with where each channel stands."""
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
    places = (np.arange(width), shared, shared)
    if width > kept or count is None:
        yield list(zip(triple, places, strict=True)), _Width(width, head_size, block)


class _Attention(nn.Module):
    """Attention as the flow of its heads: from the stream to the heads, and from there to the stream."""

    def __init__(self, path: str, module: nn.Module, kind: _Joint, is_tuple: bool) -> None:
        super().__init__()
        self.is_tuple = is_tuple
        size = features(module.get_submodule(kind.readers[0].path[len(path) + 1 :]))
        out = features(module.get_submodule(kind.out))
        assert size is not None and out is not None
        reads = tuple(Role(role.path, np.arange(size[0])) for role in kind.readers)
        self.heads = StandIn(size[0], kind.width, reads, kind.readers, kind.block)
        joined = f"{path}.{kind.out}"
        self.out = StandIn(*out, (Role(joined, np.arange(out[0])),), (Role(joined, np.arange(out[1])),))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = _first_tensor(args, kwargs)
        assert x is not None
        out = self.out(self.heads(x))
        return (out, None) if self.is_tuple else out
