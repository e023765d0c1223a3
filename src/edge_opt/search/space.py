"""A space: every candidate that levels, precisions and runtimes make, counted without being listed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from edge_opt.errors import InvalidInput
from edge_opt.records.devices import Precision
from edge_opt.records.fields import Record, field, record
from edge_opt.records.sweeps import Candidate
from edge_opt.runtimes.registry import unsupported_pairs

Pair = tuple[Precision, str]
# Precisions of a sweep. int4 of weights can be estimated, but no runtime of a sweep runs it.
CONVERTIBLE: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A precision that a runtime cannot run, and why."""

    precision: Precision
    runtime: str
    reason: str


@record
class Space(Record):
    """Every candidate that levels of pruning, precisions and runtimes make, counted without being listed.

    >>> space = Space((0.0, 0.5), ("fp32", "int8"), ("torch", "onnxruntime"))
    >>> space.size, space[0].label, [(item.precision, item.runtime) for item in space.excluded]
    (6, 'prune 0 fp32 torch', [('int8', 'torch')])
    """

    pruning_levels: Sequence[float] = field("Shares of the channels to remove, from 0 to below 1.")
    precisions: Sequence[Precision] = field("Types of the numbers: fp32, fp16, bf16, int8.")
    runtimes: Sequence[str] = field("Who runs a candidate; `edge_opt.runtimes.registry.runtime_names()` lists them.")
    layer_pruning: Mapping[str, Sequence[float]] = field("Pruning ratios of single layers, by path.", factory=dict)
    impossible: Mapping[Pair, str] = field("Pairs to leave out, with the reason.", factory=unsupported_pairs)

    def __post_init__(self) -> None:
        axes: dict[str, Sequence[object]] = {
            "pruning_levels": self.pruning_levels,
            "precisions": self.precisions,
            "runtimes": self.runtimes,
            **{f"layer_pruning of {layer}": levels for layer, levels in self.layer_pruning.items()},
        }
        for name, values in axes.items():
            if not values:
                raise InvalidInput(f"{name} is empty; give at least one value")
            if len(set(values)) < len(values):
                raise InvalidInput(f"{name} names a value twice: {list(values)}")
        for name, values in (("pruning_levels", self.pruning_levels), *self.layer_pruning.items()):
            for level in values:
                if not 0 <= level < 1:
                    raise InvalidInput(f"{name} holds {level}; expected shares of the channels from 0 to below 1")
        unknown = [precision for precision in self.precisions if precision not in CONVERTIBLE]
        if unknown:
            raise InvalidInput(f"unknown precision {unknown[0]!r}; expected one of {', '.join(CONVERTIBLE)}")
        if not self.pairs:
            raise InvalidInput("nothing to try: " + "; ".join(item.reason for item in self.excluded))

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Precisions with the runtimes that can run them."""
        return tuple(pair for pair in product(self.precisions, self.runtimes) if pair not in self.impossible)

    @property
    def excluded(self) -> tuple[Exclusion, ...]:
        """The pairs that are left out, each with its reason."""
        wanted = product(self.precisions, self.runtimes)
        return tuple(Exclusion(*pair, self.impossible[pair]) for pair in wanted if pair in self.impossible)

    @property
    def size(self) -> int:
        """How many candidates there are."""
        return math.prod([len(self.pruning_levels), *map(len, self.layer_pruning.values()), len(self.pairs)])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Candidate:
        """Return the candidate at a place in the order of enumeration; the pair changes fastest."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        index, pair = divmod(index, len(self.pairs))
        layers: list[tuple[str, float]] = []
        for layer, levels in reversed([*self.layer_pruning.items()]):
            index, choice = divmod(index, len(levels))
            layers.insert(0, (layer, levels[choice]))
        return Candidate(self.pruning_levels[index], *self.pairs[pair], layer_pruning=tuple(layers))

    def __iter__(self) -> Iterator[Candidate]:
        return (self[index] for index in range(self.size))

    def __contains__(self, candidate: object) -> bool:
        return (
            isinstance(candidate, Candidate)
            and candidate.pruning in self.pruning_levels
            and (candidate.precision, candidate.runtime) in self.pairs
            and dict(candidate.layer_pruning).keys() == self.layer_pruning.keys()
            and all(level in self.layer_pruning[layer] for layer, level in candidate.layer_pruning)
        )

    def sample(self, count: int, seed: int) -> tuple[Candidate, ...]:
        """Return different candidates drawn at random, in the order of enumeration.

        Args:
            count: How many; all of them where there are no more.
            seed: Decides which; the same seed gives the same candidates.

        >>> [c.pruning for c in Space([i / 1000 for i in range(1000)], ["fp32"], ["torch"]).sample(3, seed=0)]
        [0.394, 0.776, 0.864]
        """
        if count >= self.size:
            return tuple(self)
        return tuple(self[index] for index in sorted(random.Random(seed).sample(range(self.size), count)))


def plain_space(space: Space) -> dict[str, Any]:
    """Return the space as JSON holds it; `space_from` reads it back."""
    return {
        "pruning_levels": list(space.pruning_levels),
        "precisions": list(space.precisions),
        "runtimes": list(space.runtimes),
        "layer_pruning": {layer: list(levels) for layer, levels in space.layer_pruning.items()},
        "impossible": [[*pair, reason] for pair, reason in space.impossible.items()],
    }


def space_from(plain: Mapping[str, Any]) -> Space:
    """Return the space that `plain_space` wrote.

    >>> space = Space((0.0, 0.5), ("fp32", "int8"), ("torch", "onnxruntime"))
    >>> set(space_from(plain_space(space))) == set(space)
    True
    """
    pairs = {(precision, runtime): reason for precision, runtime, reason in plain["impossible"]}
    return Space(**{**plain, "impossible": pairs})
