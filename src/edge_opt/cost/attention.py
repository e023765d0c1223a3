"""Attention as one fused operator: scores and values are MACs, full even under a causal mask."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from edge_opt.cost.pointwise import SOFTMAX_OPS, norm_ops
from edge_opt.cost.registry import Work, cost_rule
from edge_opt.records import TensorInfo

aten = torch.ops.aten


@cost_rule(
    aten.scaled_dot_product_attention,
    aten._scaled_dot_product_attention_math,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
    kind="attention",
)
def attention(out: Any, query: TensorInfo, key: TensorInfo, value: TensorInfo, *rest: Any, **options: Any) -> Work:
    """query @ key.T then weights @ value, for every query head; fewer key heads do not make it cheaper."""
    mask = options.get("attn_mask") or (rest[0] if rest else None)
    first = out[0] if isinstance(out, tuple) else out
    scores = prod(query.shape[:-1]) * key.shape[-2]
    return Work(
        macs=scores * (query.shape[-1] + value.shape[-1]),
        other_ops=scores * (1 + SOFTMAX_OPS + (1 if isinstance(mask, TensorInfo) else 0)),
        bytes_written=first.nbytes,
    )


@cost_rule(aten._native_multi_head_attention, kind="attention")
def multi_head_attention(
    out: Any, query: TensorInfo, key: TensorInfo, value: TensorInfo, width: int, heads: int, *weights: Any, **_: Any
) -> Work:
    """Projections in, attention, projection out."""
    rows, length = prod(query.shape[:-1]), key.shape[-2]
    return Work(macs=_projected_attention(rows, length, width), other_ops=_attention_ops(rows, length, width, heads))


@cost_rule(aten._transformer_encoder_layer_fwd, kind="attention")
def encoder_layer(out: TensorInfo, x: TensorInfo, width: int, heads: int, *rest: Any, **_: Any) -> Work:
    """The fused encoder layer: attention, two norms, two linears with an activation, two residual adds."""
    rows, length = prod(x.shape[:-1]), x.shape[-2]
    hidden = next(t.shape[0] for t in rest[10:] if isinstance(t, TensorInfo) and len(t.shape) == 2)
    return Work(
        macs=_projected_attention(rows, length, width) + 2 * rows * width * hidden,
        other_ops=_attention_ops(rows, length, width, heads)
        + 2 * rows * width * (norm_ops(affine=2) + 1)
        + rows * (2 * hidden + width),
    )


def _projected_attention(rows: int, length: int, width: int) -> int:
    return 4 * rows * width * width + 2 * rows * length * width


def _attention_ops(rows: int, length: int, width: int, heads: int) -> int:
    return 4 * rows * width + rows * heads * length * (1 + SOFTMAX_OPS)
