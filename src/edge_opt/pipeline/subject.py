"""What a run is about: a model with its trained weights, and data, as every process of the run can have them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_opt.data import Splits, load_splits
from edge_opt.errors import InvalidInput, MissingExtra
from edge_opt.loading.models import load_model
from edge_opt.loading.references import parse_reference


@dataclass(frozen=True)
class Subject:
    """A model by reference with its weights as safetensors, or a model itself; data by name and options, or itself.

    References and options reach any process and any machine; objects must be picklable. `batch_size` is that of what
    is profiled and timed; None is that of the first validation batch.
    """

    model: str | nn.Module
    data: Mapping[str, Any] | Splits
    weights: bytes = field(default=b"", repr=False)
    batch_size: int | None = None

    def build(self) -> nn.Module:
        """The trained model, each time a new one, in eval mode."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model).eval()
        model = load_model(self.model).model
        if self.weights:
            model.load_state_dict(weights_from(self.weights))
        return model.eval()

    def splits(self) -> Splits:
        """The four parts, the same in every process."""
        return self.data if isinstance(self.data, Splits) else load_splits(**self.data)

    def example(self, splits: Splits) -> list[torch.Tensor]:
        """Validation samples to profile and time with."""
        inputs: list[torch.Tensor] = []
        for batch in splits.validation:
            found = inputs_of(batch)
            inputs = [torch.cat(pair) for pair in zip(inputs, found, strict=True)] if inputs else found
            if self.batch_size is None or len(inputs[0]) >= self.batch_size:
                break
        if not inputs:
            raise InvalidInput("the validation part has no batches; at least one is needed")
        if self.batch_size is None:
            return inputs
        repeats = -(-self.batch_size // len(inputs[0]))
        return [torch.cat([value] * repeats)[: self.batch_size].clone() for value in inputs]


def absolute(reference: str) -> str:
    """A reference that means the same file in every process.

    >>> absolute("torchvision:resnet18"), absolute("net.py:Net") == f"{Path('net.py').resolve()}:Net"
    ('torchvision:resnet18', True)
    """
    parsed = parse_reference(reference)
    if parsed is None or not parsed.source.endswith(".py"):
        return reference
    return f"{Path(parsed.source).resolve()}{reference[len(parsed.source) :]}"


def weights_of(model: nn.Module) -> bytes:
    """A model's state as safetensors; tensors that are shared are written once for each name."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    content: bytes = safetensors().save(state)
    return content


def weights_from(content: bytes) -> dict[str, torch.Tensor]:
    """The state that `weights_of` wrote; nothing in it is executed."""
    state: dict[str, torch.Tensor] = safetensors().load(content)
    return state


def safetensors() -> Any:
    """safetensors for torch, or how to get it."""
    try:
        from safetensors import torch as library
    except ImportError as error:
        raise MissingExtra("a run needs safetensors; install with `pip install 'edge-opt[run]'`") from error
    return library


def inputs_of(batch: Any) -> list[torch.Tensor]:
    """The inputs of a batch of (inputs…, labels)."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise InvalidInput(f"a batch is a {type(batch).__name__}; loaders of a run must yield (inputs…, labels)")
    inputs = list(batch[:-1])
    if not all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in inputs):
        raise InvalidInput("inputs of a batch must be tensors whose first dimension is the sample")
    return inputs
