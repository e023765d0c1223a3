"""Attention as the CPU runs it: whole, or taken apart."""

from __future__ import annotations

import torch


def is_fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> bool:  # fmt: skip
    """Whether the CPU runs attention as one flash kernel; otherwise it is taken apart into matrix products."""
    # The conditions are those of use_flash_attention_cpp in torch's sdp_utils_cpp.cpp.
    if any(tensor.dim() != 4 or tensor.stride(-1) != 1 for tensor in (query, key, value)) or dropout_p > 0:
        return False
    batch, heads, length, width = query.shape
    if key.shape[0] != batch or key.shape[3] != width or key.shape != value.shape:
        return False
    if key.shape[1] != heads and not (enable_gqa and heads % key.shape[1] == 0):
        return False
    if attn_mask is None:
        return True
    if attn_mask.dim() not in (2, 4) or attn_mask.stride(-1) != 1 or attn_mask.requires_grad:
        return False
    wanted = (batch, heads, length, key.shape[2])[-attn_mask.dim() :]
    return all(size in (1, full) for size, full in zip(attn_mask.shape, wanted, strict=True))
