"""Channels of a whole model: units of those that go together, and who owns which entry of which tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edge_opt.compress.attention import Heads
from edge_opt.compress.layers import Side

NONE = -1


class TensorDim(NamedTuple):
    """One dimension of a tensor of the model's state."""

    tensor: str
    dim: int


LayerOwners = dict[tuple[str, Side], np.ndarray]
TensorOwners = dict[TensorDim, np.ndarray]


@dataclass(frozen=True, slots=True)
class Group:
    """Units that are ranked against each other. `refused` says why none of them may go, None where they may."""

    root: str
    units: np.ndarray
    channels_per_unit: int
    refused: str | None


@dataclass(frozen=True, slots=True)
class ChannelMap:
    """Who owns what: for each layer's channels and each tensor's entries the unit that they go with, or NONE."""

    units: int
    groups: tuple[Group, ...]
    layers: dict[tuple[str, Side], np.ndarray]
    tensors: dict[TensorDim, np.ndarray]
    scored: tuple[TensorDim, ...]
    heads: dict[str, np.ndarray]
    head_owners: dict[str, Heads]

    def group_of(self) -> np.ndarray:
        """For each unit the number of its group."""
        numbers = np.full(self.units, NONE)
        for number, group in enumerate(self.groups):
            numbers[group.units] = number
        return numbers
