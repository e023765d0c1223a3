"""Checksums of batches: whether two loaders give the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def fingerprint(loader: Iterable[Any]) -> str:
    """SHA-256 of every tensor of a loader, in order."""
    digest = hashlib.sha256()
    for batch in loader:
        _feed(digest, batch)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())
