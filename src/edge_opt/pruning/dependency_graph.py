"""The graph of operators along which channels are followed: torch-pruning's, with its wrong mappings corrected.

Written for torch-pruning 1.6. When it changes, check what is used of it here, most of it private:

- `DependencyGraph.module2node`, `_param_to_name`; of a node `grad_fn`, `type`, `module`, `inputs`, `outputs`,
  `dependencies`, `pruning_dim`; of a dependency `source`, `target`, `handler`, `index_mapping[0]`.
- `_FlattenIndexMapping(stride, reverse)`, recognized by its class name, and `dependency.index_mapping.update_*`, which
  read one kind of operator each and raise where they cannot.
- Of autograd's nodes `_saved_self_sym_sizes` (before torch 2.1 `_saved_self_sizes`) and `_saved_upscale_factor`.

The graph is wrong in four places, and each function below corrects one: attention's inputs and outputs are taken for
the same channels; one operator that cannot be read ends the whole graph; a flattened image is assigned a block size
guessed from the next layer; a pixel shuffle is taken for element-wise. A mapping that is still wrong is found by the
proof, which refuses the channels concerned.

Some layers the graph cannot follow at all. So channels are followed on a copy of the model, the surrogate. In it a
recurrent layer, or attention with one joint layer for query, key and value, is replaced by linear layers through which
the same channels flow. Nothing of the surrogate is ever run for its values: the channels found on it are cut out of the
original, and proved there.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from edge_opt._support.extras import import_optional
from edge_opt.errors import PruningFailed
from edge_opt.pruning.attention import Heads, head_count, projections_of
from edge_opt.pruning.layer_kinds import channels, is_transposed_linear
from edge_opt.trace.inputs import CallArguments, flat_tensors


def dependency_graph(model: nn.Module, arguments: CallArguments) -> Any:
    """Return torch-pruning's graph of a model, corrected."""
    pruning = import_optional("torch_pruning", "pruning needs", "compress", "torch-pruning")

    base: Any = pruning.pruner.function.MultiheadAttentionPruner

    class AttentionPruner(base):  # type: ignore[misc]
        """Separate input channels from output channels; by default torch-pruning takes them for the same."""

        def prune_in_channels(self, layer: Any, idxs: Any) -> Any:
            return layer

    # The graph is read off autograd's, which leaves out what needs no gradient.
    for tensor in model.parameters():
        if tensor.is_floating_point():
            tensor.requires_grad_(True)
    graph = pruning.DependencyGraph()
    # Not as a customized layer: those hide their inner modules from the trace, and tuples of outputs are not unpacked.
    graph.REGISTERED_PRUNERS[pruning.ops.OPTYPE.MHA] = AttentionPruner()
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            graph.build_dependency(
                model,
                arguments,
                forward_fn=lambda net, call: net(*call.args, **call.kwargs),
                output_transform=_differentiable,
                verbose=False,
            )
        except Exception as error:
            if not _mapped_one_by_one(pruning, graph):
                raise PruningFailed(
                    f"the channels of {type(model).__name__} cannot be followed: {type(error).__name__}: {error}"
                ) from error
    _follow_pixel_shuffles(graph)
    _correct_flattened(graph)
    return graph


def _lost(indices: list[Any]) -> list[Any]:
    """Map channels through an operator that could not be read: none of them may go.

    The largest index is beyond every layer's width, which the walk refuses.
    """
    return [type(each)(sys.maxsize, each.root_idx) for each in indices]


def _mapped_one_by_one(pruning: Any, graph: Any) -> bool:
    """Read the mappings of operators again, one at a time; return False where there is no graph at all.

    Channels behind an operator that cannot be read are not followed.
    """
    nodes = getattr(graph, "module2node", None)
    if not nodes:
        return False
    kinds, readers = pruning.ops.OPTYPE, pruning.dependency.index_mapping
    names = ("CONCAT", "SPLIT", "RESHAPE", "UNBIND", "EXPAND", "SLICE")
    by_kind = {getattr(kinds, name): getattr(readers, f"update_{name.lower()}_index_mapping") for name in names}
    for node in nodes.values():
        try:
            by_kind.get(node.type, lambda *_: None)(graph, node)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError):
            around = (each for other in (*node.inputs, *node.outputs) for each in other.dependencies)
            for dependency in (*node.dependencies, *(each for each in around if each.target is node)):
                dependency.index_mapping[0] = _lost
    return True


def _differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors in whatever a model returns from which autograd can go back."""
    differentiable = [tensor for tensor in flat_tensors(output) if tensor.grad_fn is not None]
    if not differentiable:
        raise PruningFailed("no output of the model depends on a parameter, so there is nothing to prune")
    return differentiable


class BlockMapping(NamedTuple):
    """Channels between two sides, where `block` neighbors on one side go with one channel of the other."""

    block: int
    is_widening: bool

    def __call__(self, indices: list[Any]) -> list[Any]:
        if self.is_widening:
            return [type(each)(each.idx * self.block + k, each.root_idx) for each in indices for k in range(self.block)]
        return [type(each)(each.idx // self.block, each.root_idx) for each in indices]


def _correct_flattened(graph: Any) -> None:
    """Give flattened images the block that their height and width make.

    The graph guesses it from the next layer's inputs, which include other layers' where features are concatenated.
    """
    for node in graph.module2node.values():
        sizes: Any = getattr(node.grad_fn, "_saved_self_sym_sizes", getattr(node.grad_fn, "_saved_self_sizes", ()))
        if len(sizes) != 4:
            continue
        block = int(sizes[2]) * int(sizes[3])
        for dependency in (*node.dependencies, *(each for source in node.inputs for each in source.dependencies)):
            is_way_in = {dependency.source, dependency.target} <= {node, *node.inputs}
            mapping = dependency.index_mapping[0]
            if is_way_in and type(mapping).__name__ == "_FlattenIndexMapping" and mapping._stride != block:
                dependency.index_mapping[0] = type(mapping)(block, mapping.reverse) if block > 1 else None


def _follow_pixel_shuffles(graph: Any) -> None:
    """Put in the mapping of pixel shuffles, which the graph takes for element-wise.

    r x r neighbors of a shuffle's input make one channel of its output.
    """
    for node in graph.module2node.values():
        name = type(node.grad_fn).__name__
        if not name.startswith("PixelShuffle"):
            continue
        block = node.grad_fn._saved_upscale_factor**2
        for source in node.inputs:
            for dependency in (*source.dependencies, *node.dependencies):
                # The mapping belongs to the way into the shuffle; what lies behind it has the output's channels.
                if dependency.source is source and dependency.target is node:
                    dependency.index_mapping[0] = BlockMapping(block, is_widening=False)
                elif dependency.source is node and dependency.target is source:
                    dependency.index_mapping[0] = BlockMapping(block, is_widening=True)


class Role(NamedTuple):
    """A layer of the model that a surrogate represents: its channel c is channel `channels[c]` of the surrogate."""

    path: str
    channels: np.ndarray


class SurrogateLinear(nn.Linear):
    """A linear layer in the place of others, whose inputs and outputs are channels of those.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        reads: The layers that its inputs represent.
        writes: The layers that its outputs represent.
        block: So many neighboring outputs can only go together.
    """

    def __init__(self, inputs: int, outputs: int, reads: tuple[Role, ...], writes: tuple[Role, ...], block: int = 1):
        super().__init__(inputs, outputs, bias=False)
        self.reads = reads
        self.writes = writes
        self.block = block


def features(module: nn.Module) -> tuple[int, int] | None:
    """Return inputs and outputs of a linear layer of either kind; None for anything else."""
    if isinstance(module, nn.Linear) or is_transposed_linear(module):
        return channels(module, "in"), channels(module, "out")
    return None


def surrogate_model(model: nn.Module, arguments: CallArguments) -> tuple[nn.Module, list[Heads]]:
    """Return a copy of the model with surrogate layers, to be traced, and the heads of the attention among them.

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
        elif path in sequence_layers and (joint := _joint_attention(path, module, sequence_layers[path])) is not None:
            surrogate, described = joint
            heads.append(described)
        if surrogate is not None:
            copied.set_submodule(path, surrogate)
            replaced.append(path)
    return copied, heads


def _plain_surrogate(path: str, inputs: int, outputs: int) -> SurrogateLinear:
    """Return a surrogate for one layer, channel for channel."""
    return SurrogateLinear(inputs, outputs, (Role(path, np.arange(inputs)),), (Role(path, np.arange(outputs)),))


def _sequence_layers(model: nn.Module, arguments: CallArguments) -> dict[str, bool]:
    """Return the modules that get a sequence of feature vectors and return one; True where they return a tuple."""
    returns_tuple: dict[str, bool] = {}

    def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = _first_tensor(args, kwargs)
        first = output[0] if isinstance(output, tuple) and output else output
        if x is not None and x.dim() == 3 and isinstance(first, torch.Tensor):
            returns_tuple.setdefault(path, isinstance(output, tuple))

    handles = [
        module.register_forward_hook(partial(note, path), with_kwargs=True)
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


def _joint_attention(path: str, module: nn.Module, is_tuple: bool) -> tuple[nn.Module, Heads] | None:
    """Return a surrogate for attention with one layer for query, key and value, or with fewer heads for keys."""
    linears = {name: size for name, child in module.named_children() if (size := features(child))}
    others = [name for name, child in module.named_children() if name not in linears and list(child.parameters())]
    head_size = getattr(module, "head_dim", None)
    layouts = _head_layouts(linears, head_count(module), head_size if type(head_size) is int else None)
    for readers, width, head, block in layouts:
        outs = [name for name in linears if name not in readers and linears[name][0] == width]
        if len(outs) != 1 or len(linears) != len(readers) + 1 or any("norm" not in name for name in others):
            continue
        writes = tuple(Role(f"{path}.{name}", indices) for name, indices in readers.items())
        inputs = linears[next(iter(readers))][0]
        reads = tuple(Role(role.path, np.arange(inputs)) for role in writes)
        surrogate = _JointAttention(
            SurrogateLinear(inputs, width, reads, writes, block),
            _plain_surrogate(f"{path}.{outs[0]}", *linears[outs[0]]),
            is_tuple,
        )
        return surrogate, Heads(path, (writes[0].path,), width // head, width)
    return None


def _head_layouts(
    linears: Mapping[str, tuple[int, int]], count: int | None, head_size: int | None
) -> Iterator[tuple[dict[str, np.ndarray], int, int, int]]:
    """Yield the ways in which the layers of an attention module may hold its heads: (readers, width, head, block).

    `readers` are the layers with the index of each of their channels among those of all heads, of which there are
    `width`. One head has `head`, and `block` neighbors can only go together.
    """
    for name, (_, outputs) in linears.items():
        width = outputs // 3
        head = head_size or (width // count if count else 0)
        if outputs % 3 == 0 and head and width % head == 0 and count in (None, width // head) and len(linears) == 2:
            yield {name: np.tile(np.arange(width), 3)}, width, head, head
    triple = projections_of(linears)
    if not triple or not head_size:
        return
    sizes = [linears[name] for name in triple]
    width, kept = sizes[0][1], sizes[1][1]
    if sizes[2][1] != kept or width % kept or kept % head_size or len({inputs for inputs, _ in sizes}) != 1:
        return
    # Query heads that share a key and value are neighbors; the channel of a key represents the first of them.
    block = head_size * (width // kept)
    shared = np.arange(kept) // head_size * block + np.arange(kept) % head_size
    if width > kept or count is None:
        yield dict(zip(triple, (np.arange(width), shared, shared), strict=True)), width, head_size, block


class _JointAttention(nn.Module):
    """Attention as the flow of its heads: from the stream to the heads, and from there to the stream."""

    def __init__(self, heads: SurrogateLinear, out: SurrogateLinear, is_tuple: bool) -> None:
        super().__init__()
        self.heads = heads
        self.out = out
        self.is_tuple = is_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = _first_tensor(args, kwargs)
        assert x is not None
        out = self.out(self.heads(x))
        return (out, None) if self.is_tuple else out
