"""Parts of a dataset that share no sample, in the shares of its classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_opt.data.checksums import fingerprint
from edge_opt.errors import InvalidInput

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Splits:
    """Four loaders of (inputs, labels) batches. Candidates are chosen on `validation`, and reported on `test`.

    `indices` says which samples of the source are in which part, where we made the parts; `checksums` are of the
    source's files, empty where there are none that we know of.
    """

    name: str
    train: Iterable[Any]
    calibration: Iterable[Any]
    validation: Iterable[Any]
    test: Iterable[Any] | None
    checksums: tuple[tuple[str, str], ...] = ()
    indices: Mapping[str, Indices] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Samples by part, where we made the parts."""
        return {part: len(chosen) for part, chosen in self.indices.items()}

    def fingerprints(self) -> tuple[tuple[str, str], ...]:
        """SHA-256 of the source's files, or else of the batches of validation and test: a pass over each."""
        if self.checksums:
            return self.checksums
        parts = {"validation": self.validation, "test": self.test}
        return tuple((f"batches of {name}", fingerprint(part)) for name, part in parts.items() if part is not None)


def stratified_order(labels: npt.NDArray[Any], seed: int) -> Indices:
    """Every index once, shuffled by `seed`, so that each stretch of the order holds the classes in their shares.

    >>> order = stratified_order(np.array([0] * 6 + [1] * 3), seed=0)
    >>> sorted(order.tolist()), np.bincount(np.array([0] * 6 + [1] * 3)[order[:3]]).tolist()
    ([0, 1, 2, 3, 4, 5, 6, 7, 8], [2, 1])
    """
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(labels))
    places = np.empty(len(labels))
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        # A class stands at even distances from 0 to 1; the offset keeps classes of one size from taking turns.
        places[members] = (np.arange(len(members)) + generator.random()) / len(members)
    return np.argsort(places, kind="stable").astype(np.int64)


def part_indices(
    labels: npt.NDArray[Any], *, seed: int, validation: int, calibration: int, train: int | None
) -> dict[str, Indices]:
    """Disjoint, stratified parts of what is not for testing; `train` None is all that is left.

    Validation is taken first: it is the same whatever the size of the others.
    """
    available = len(labels)
    least_train = 1 if train is None else train
    if validation + calibration + least_train > available:
        asked = f"val_subset {validation}, calibration {calibration} and train_subset {train}"
        raise InvalidInput(f"{asked} are more than the {available} samples there are; make one of them smaller")
    order = stratified_order(labels, seed)
    after = validation + calibration
    end = available if train is None else after + train
    return {"train": order[after:end], "calibration": order[validation:after], "validation": order[:validation]}
