"""Samples and environments for tests of statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge_opt.records.measurements import Environment


def environment(**changed: Any) -> Environment:
    quiet = {"cpu": "A", "cores": 2, "threads": 1, "governor": None, "load_1min": 0.1, "memory_bytes": 1}
    return Environment(**{**quiet, "system": "S", "python": "3", "torch": "2", "device": "cpu", **changed})


def steady(seconds: float, count: int = 40, seed: int = 0, scatter: float = 0.01) -> np.ndarray:
    return seconds * (1 + scatter * np.random.default_rng(seed).standard_normal(count))
