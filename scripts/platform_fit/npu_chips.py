"""What is known of a chip before any time, the generation of its NPU and what it is sold for, and what follows.

Times of two chips differ by one factor almost alone: after it, 6 to 20 % remain from net to net. The factor follows
from the generation, as newer ones are faster, and from the market: chips for cars and boards have slower clocks than
those of phones, and small NPUs have no fp16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from board_priors import fit_prior

from edge_opt.boards.class_costs import Costs, Rows, Vector


@dataclass(frozen=True)
class Chip:
    """The generation of the Hexagon NPU (None: not published), and the market."""

    generation: int | None
    market: Literal["flagship", "embedded", "small"]


# Generations: pytorch/executorch backends/qualcomm/serialization/qc_schema.py. That of SA7255P: qualcomm/ai-hub-apps
# issue 38; those of X Elite (SC8380XP) and X2 Elite (SC8480XP): attributes of AI Hub's devices, as users quote them.
CHIPS: Mapping[str, Chip] = {
    "galaxy-s22": Chip(69, "flagship"),
    "qcs8550": Chip(73, "flagship"),
    "galaxy-s24": Chip(75, "flagship"),
    "galaxy-s25": Chip(79, "flagship"),
    "galaxy-s26": Chip(81, "flagship"),
    "snapdragon-x-elite-crd": Chip(73, "flagship"),
    "snapdragon-x2-elite-crd": Chip(81, "flagship"),
    "snapdragon-8-elite-gen-6-qrd": Chip(None, "flagship"),
    "snapdragon-8-elite-extreme-gen-6-qrd": Chip(None, "flagship"),
    "sa8295p-adp": Chip(68, "embedded"),
    "sa8650p-adp": Chip(73, "embedded"),
    "dragonwing-iq-9075-evk": Chip(73, "embedded"),
    "arduino-ventuno-q": Chip(None, "embedded"),
    "sa7255p-adp": Chip(75, "embedded"),
    "dragonwing-rb3-gen-2-vision-kit": Chip(68, "small"),
    "dragonwing-q-6690-mtp": Chip(None, "small"),
    "snapdragon-7-gen-4-qrd": Chip(None, "small"),
}


def _features(chip: Chip) -> Vector:
    # A generation that is not known counts as the middle one; five numbers are about two years.
    years = 0.0 if chip.generation is None else (chip.generation - 75) / 5
    return np.array([1.0, years, chip.market == "embedded", chip.market == "small"])


def _regression(chips: Sequence[Chip], scales: Vector) -> Vector:
    """Return weights of the features; all but the constant are pulled towards zero, as chips are few."""
    rows = np.array([_features(chip) for chip in chips])
    weights: Vector = np.linalg.solve(rows.T @ rows + np.diag([0.0, 0.1, 0.1, 0.1]), rows.T @ scales)
    return weights


def chip_costs(rows: Sequence[Rows], chips: Sequence[Chip], chip: Chip, asked: Vector, noise: float) -> Costs:
    """Return the costs of a chip that nobody has timed, from those of others.

    Args:
        rows: Quantities and times of each timed board.
        chips: Their chips, in the same order.
        chip: The one that is asked for.
        asked: Quantities of nets, by whose times boards are compared.
        noise: Scale of relative residuals.
    """
    prior, boards = fit_prior(rows, noise=noise)
    level = np.mean([prior.log_time(row) for row in asked])
    scales = np.array([np.mean([costs.log_time(row) for row in asked]) - level for costs in boards])
    scale = float(_regression(chips, scales) @ _features(chip))
    # Each chip from all others says how far this one may be off.
    errors = [
        scales[n] - _regression([*chips[:n], *chips[n + 1 :]], np.delete(scales, n)) @ _features(chips[n])
        for n in range(len(chips))
    ]
    # The prior's common factor is what the regression explains: its errors take that place.
    common = prior.covariance[~np.eye(len(prior.covariance), dtype=bool)].mean()
    return Costs(prior.mean + scale, prior.covariance - common + np.mean(np.square(errors)), prior.seen)
