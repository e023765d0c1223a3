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
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import nn

from edge_opt._support.extras import import_optional
from edge_opt.errors import PruningFailed
from edge_opt.trace.inputs import CallArguments, flat_tensors


def dependency_graph(model: nn.Module, arguments: CallArguments) -> Any:
    """Return torch-pruning's graph of a model, corrected."""
    pruning = import_optional("torch_pruning", "pruning needs", "compress", "torch-pruning")

    base: Any = pruning.pruner.function.MultiheadAttentionPruner

    class AttentionPruner(base):  # type: ignore[misc]
        """What goes in and what comes out are channels of their own; by default they are taken for the same."""

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
            is_unread_operator = isinstance(error, (ArithmeticError, LookupError))
            if not (is_unread_operator and _mapped_one_by_one(pruning, graph)):
                raise PruningFailed(
                    f"the channels of {type(model).__name__} cannot be followed: {type(error).__name__}: {error}"
                ) from error
    _follow_pixel_shuffles(graph)
    _correct_flattened(graph)
    return graph


class _Lost:
    """Channels behind an operator that could not be read: none of them may go.

    The largest index is beyond every layer's width, which the walk refuses.
    """

    def __call__(self, indices: list[Any]) -> list[Any]:
        return [type(each)(sys.maxsize, each.root_idx) for each in indices]


def _mapped_one_by_one(pruning: Any, graph: Any) -> bool:
    """Read the mappings of operators again, one at a time; return False where there is no graph at all.

    Channels behind an operator that cannot be read are not followed.
    """
    nodes = getattr(graph, "module2node", None)
    if not nodes:
        return False
    kinds = pruning.ops.OPTYPE
    readers = pruning.dependency.index_mapping
    by_kind = {
        kinds.CONCAT: readers.update_concat_index_mapping,
        kinds.SPLIT: readers.update_split_index_mapping,
        kinds.RESHAPE: readers.update_reshape_index_mapping,
        kinds.UNBIND: readers.update_unbind_index_mapping,
        kinds.EXPAND: readers.update_expand_index_mapping,
        kinds.SLICE: readers.update_slice_index_mapping,
    }
    for node in nodes.values():
        try:
            by_kind.get(node.type, lambda *_: None)(graph, node)
        except (ArithmeticError, LookupError, TypeError, AttributeError):
            for other in (*node.inputs, *node.outputs):
                for dependency in other.dependencies:
                    if dependency.target is node:
                        dependency.index_mapping[0] = _Lost()
            for dependency in node.dependencies:
                dependency.index_mapping[0] = _Lost()
    return True


def _differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors in whatever a model returns from which autograd can go back."""
    differentiable = [tensor for tensor in flat_tensors(output) if tensor.grad_fn is not None]
    if not differentiable:
        raise PruningFailed("no output of the model depends on a parameter, so there is nothing to prune")
    return differentiable


class _Shuffled:
    """Channels through a pixel shuffle: r x r neighbors of its input make one of its output."""

    def __init__(self, block: int, is_inward: bool) -> None:
        self.block = block
        self.is_inward = is_inward

    def __call__(self, indices: list[Any]) -> list[Any]:
        if self.is_inward:
            return [type(each)(each.idx * self.block + k, each.root_idx) for each in indices for k in range(self.block)]
        return [type(each)(each.idx // self.block, each.root_idx) for each in indices]


def _correct_flattened(graph: Any) -> None:
    """Give flattened images the block that their height and width make.

    The graph guesses it from the next layer's inputs, which are those of others, too, where features are concatenated.
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
    """Put in the mapping of pixel shuffles, which the graph takes for element-wise."""
    for node in graph.module2node.values():
        name = type(node.grad_fn).__name__
        if not name.startswith("PixelShuffle"):
            continue
        block = node.grad_fn._saved_upscale_factor**2
        for source in node.inputs:
            for dependency in (*source.dependencies, *node.dependencies):
                # The mapping belongs to the way into the shuffle; what lies behind it has the output's channels.
                if dependency.source is source and dependency.target is node:
                    dependency.index_mapping[0] = _Shuffled(block, is_inward=False)
                elif dependency.source is node and dependency.target is source:
                    dependency.index_mapping[0] = _Shuffled(block, is_inward=True)
