"""The dependency graph of a model, as torch-pruning reads it off autograd's."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt.errors import MissingExtra, PruningFailed
from edge_opt.trace.inputs import CallArguments


def dependency_graph(model: nn.Module, arguments: CallArguments) -> Any:
    try:
        pruning = import_module("torch_pruning")
    except ImportError as error:
        raise MissingExtra(
            "pruning needs torch-pruning, which is not installed; run `pip install 'edge-opt[compress]'`"
        ) from error

    base: Any = pruning.pruner.function.MultiheadAttentionPruner

    class Attention(base):  # type: ignore[misc]
        """What goes in and what comes out are channels of their own; by default they are taken for the same."""

        def prune_in_channels(self, layer: Any, idxs: Any) -> Any:
            return layer

    # The graph is read off autograd's, which leaves out what needs no gradient.
    for tensor in model.parameters():
        if tensor.is_floating_point():
            tensor.requires_grad_(True)
    graph = pruning.DependencyGraph()
    # Not as a customized layer: those hide their inner modules from the trace, and tuples of outputs are not unpacked.
    graph.REGISTERED_PRUNERS[pruning.ops.OPTYPE.MHA] = Attention()
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
            _follow_pixel_shuffles(graph)
            return graph
        except Exception as error:
            raise PruningFailed(
                f"the channels of {type(model).__name__} cannot be followed: {type(error).__name__}: {error}"
            ) from error


def _differentiable(output: Any) -> list[torch.Tensor]:
    """The tensors in whatever a model returns from which autograd can go back."""
    tensors = [leaf for leaf in tree_leaves(_opened(output)) if isinstance(leaf, torch.Tensor)]
    found = [tensor for tensor in tensors if tensor.grad_fn is not None]
    if not found:
        raise PruningFailed("no output of the model depends on a parameter, so there is nothing to prune")
    return found


def _opened(output: Any) -> Any:
    return dict(output) if hasattr(output, "items") else output


class _Shuffled:
    """Channels through a pixel shuffle: r x r neighbors of its input make one of its output."""

    def __init__(self, block: int, is_inward: bool) -> None:
        self.block = block
        self.is_inward = is_inward

    def __call__(self, indices: list[Any]) -> list[Any]:
        if self.is_inward:
            return [type(each)(each.idx * self.block + k, each.root_idx) for each in indices for k in range(self.block)]
        return [type(each)(each.idx // self.block, each.root_idx) for each in indices]


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
