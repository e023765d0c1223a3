"""Layer-wise estimates of a model, as tables: thin over `edge_opt.profile`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import edge_opt as eo
from edge_opt.errors import InvalidInput

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


@dataclass(frozen=True, slots=True)
class LayerEstimate:
    """One layer that computes: its outputs, the bytes of its parameters and outputs, its multiply-accumulates."""

    layer: str
    output_elements: int
    parameter_bytes: int
    activation_bytes: int
    macs: int


def estimate_layerwise_stats(
    model: nn.Module,
    batch_size: int,
    input_shape: tuple[int, ...] = (1, 28, 28),
    activation_bytes_per_value: int | None = None,
) -> pd.DataFrame:
    """One row per layer that multiplies and accumulates, for any model, in order of execution.

    Functional products stand under the module that calls them; a layer that is called twice has two rows, its
    parameters in the first. Bytes follow the tensors' own dtypes unless `activation_bytes_per_value` is given.

    >>> from edge_opt.model import SmallCNN
    >>> estimate_layerwise_stats(SmallCNN(), batch_size=1)[["layer", "macs"]].values.tolist()
    [['conv1', 112896], ['conv2', 903168], ['classifier', 15680]]
    """
    import pandas as pd

    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise InvalidInput(f"batch_size is {batch_size!r}; it must be a whole number of at least 1")
    profile = eo.profile(model, (batch_size, *input_shape))
    rows = [asdict(estimate) for estimate in _estimates(profile, activation_bytes_per_value)]
    return pd.DataFrame(rows, columns=[field.name for field in fields(LayerEstimate)])


def _estimates(profile: eo.ModelProfile, bytes_per_value: int | None) -> list[LayerEstimate]:
    outputs: dict[int, list[eo.TensorInfo]] = {}
    for call in profile.trace.ops:
        if profile.prices[call.signature].cost.macs:
            outputs.setdefault(call.module, []).extend(profile.trace.signatures[call.signature].outputs)
    estimates = []
    for layer in profile.layers:
        if layer.cost.macs:
            tensors = outputs[layer.call.index]
            elements = sum(tensor.elements for tensor in tensors)
            own_bytes = sum(tensor.nbytes for tensor in tensors)
            estimates.append(
                LayerEstimate(
                    layer=layer.call.path or profile.name,
                    output_elements=elements,
                    parameter_bytes=layer.call.param_bytes,
                    activation_bytes=own_bytes if bytes_per_value is None else elements * bytes_per_value,
                    macs=layer.cost.macs,
                )
            )
    return estimates
