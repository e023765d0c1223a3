"""Heads of attention: how many a model has, and attention with fewer heads than its width divides by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

# Names of the attribute with the number of heads in models; pruning lowers it.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
# Their joint width, kept by some beside the number.
HEAD_WIDTHS = ("all_head_size", "inner_dim", "attn_dim", "attention_dim", "split_size")


class PrunedAttention(nn.Module):
    """`nn.MultiheadAttention` after pruning: the same calls and the same names of tensors, any number of heads.

    Query, key and value are one width, `embed_dim`; the heads' joint width is `num_heads * head_dim`.

    Args:
        original: The module to replace; its tensors are used, not copied.
    """

    # nn.TransformerEncoderLayer reads it: its fused path cannot run this one.
    _qkv_same_embed_dim = False

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        self.embed_dim = original.embed_dim
        self.num_heads = original.num_heads
        self.head_dim = original.head_dim
        self.dropout = original.dropout
        self.batch_first = original.batch_first
        self.in_proj_weight = original.in_proj_weight
        self.in_proj_bias = original.in_proj_bias
        self.out_proj = original.out_proj
        self.train(original.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attended values and, if wanted, the weights. Shapes are those of `nn.MultiheadAttention`.

        Args:
            query: What looks.
            key: What is looked at.
            value: What is taken from there.
            key_padding_mask: Which keys are padding and are left out.
            need_weights: Whether to return the weights.
            attn_mask: Which keys a query may not see, or numbers to add to the scores.
            average_attn_weights: Whether weights are averaged over the heads; else there is one row per head.
            is_causal: Whether a query ignores later keys; used only without weights and without a mask.
        """
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (each.unsqueeze(0 if self.batch_first else 1) for each in (query, key, value))
        if not self.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(each, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for each, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        mask = _joined_mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        attention: torch.Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
            attention = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            mixed = F.dropout(attention, dropout) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal and mask is None)
        out = F.linear(mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if attention is not None and average_attn_weights:
            attention = attention.mean(dim=1)
        if not self.batch_first:
            out = out.transpose(0, 1)
        if not is_batched:
            out = out.squeeze(0 if self.batch_first else 1)
            attention = None if attention is None else attention.squeeze(0)
        return out, attention


def _joined_mask(mask: torch.Tensor | None, padding: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return both masks as one that is added to the scores, (batch or 1, heads or 1, queries or 1, keys)."""
    if mask is not None:
        mask = _added(mask, query)
        if mask.dim() == 3:
            mask = mask.view(query.shape[0], -1, *mask.shape[1:])
            if mask.shape[1] not in (1, query.shape[1]):
                raise ValueError(f"attn_mask is for {mask.shape[1]} heads; after pruning there are {query.shape[1]}")
    if padding is None:
        return mask
    padded = _added(padding if padding.dim() == 2 else padding.unsqueeze(0), query)[:, None, None]
    return padded if mask is None else mask + padded


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(mask, float("-inf"))


class Heads(NamedTuple):
    """Projections whose outputs are split into heads: the module that splits them, the heads, and their joint width."""

    owner: str
    projections: tuple[str, ...]
    heads: int
    width: int


def head_count(module: nn.Module) -> int | None:
    """Return the number of heads that a module keeps; None where it keeps none."""
    return next((value for name in HEAD_COUNTS if type(value := getattr(module, name, None)) is int), None)


def split_heads(model: nn.Module) -> list[Heads]:
    """Return attention with one linear layer each for query, key and value, as in BERT."""
    attention = []
    for path, module in model.named_modules():
        count = head_count(module)
        if count is None or isinstance(module, (nn.MultiheadAttention, PrunedAttention)):
            continue
        linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        triple = projections_of(linears)
        widths = {linears[name].out_features for name in triple}
        if len(widths) == 1 and count > 0 and next(iter(widths)) % count == 0:
            paths = tuple(f"{path}.{name}".lstrip(".") for name in triple)
            attention.append(Heads(path, paths, count, next(iter(widths))))
    return attention


def projections_of(layers: Iterable[str]) -> list[str]:
    """Return the names of the layers for query, key and value among these; none unless all three are there."""
    triple, endings = [], ("", "_proj", "_lin", "_linear", "proj", "_projection")
    for word in ("query", "key", "value"):
        letter = word[0]
        usual = {stem + ending for stem in (letter, word) for ending in endings}
        usual |= {f"to_{letter}", f"w{letter}", f"w_{letter}"}
        triple += [name for name in layers if name.lower() in usual][:1]
    return triple if len(triple) == 3 else []
