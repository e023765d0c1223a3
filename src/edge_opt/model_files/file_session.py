"""A file as its own runtime runs it: what is measured of a file is this, never the module that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Arguments = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, torch.Tensor]]


class FileSession(nn.Module):
    """A file that a runtime has loaded. It is called as the model is, and returns tensors.

    Attributes:
        version: The runtime with its version, for remarks.
    """

    def __init__(self, arguments: Arguments, version: str) -> None:
        super().__init__()
        self.version = version
        self._arguments = arguments

    def arrays(self, arrays: dict[str, Any]) -> list[Any]:
        """What the runtime makes of arrays by the names of the file's inputs, in the file's order."""
        raise NotImplementedError

    def forward(self, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        tensors = self._arguments(given, named)
        made = self.arrays({name: tensor.detach().numpy() for name, tensor in tensors.items()})
        # Texts, sequences and maps are no tensors.
        return tuple(
            torch.from_numpy(value) for value in made if hasattr(value, "dtype") and value.dtype.kind in "fiub"
        )


def thread_count(threads: int | None) -> int:
    """As many as torch uses unless given."""
    return torch.get_num_threads() if threads is None else threads
