"""Candidates of a sweep, and those that are skipped."""

from __future__ import annotations

import hashlib
import json

from edge_opt.records.devices import Precision
from edge_opt.records.fields import Record, field, record


@record
class Candidate(Record):
    """One variant to try."""

    pruning: float = field("Share of the channels to remove of every layer, from 0 to below 1.")
    precision: Precision = field("Type of the numbers.")
    runtime: str = field('Who runs it, such as "onnxruntime".')
    layer_pruning: tuple[tuple[str, float], ...] = field("By layer path; overrides `pruning`.", default=())

    @property
    def key(self) -> str:
        """The same for equal candidates, whatever the order of their layers."""
        content = [self.pruning, self.precision, self.runtime, sorted(self.layer_pruning)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    @property
    def is_pruned(self) -> bool:
        """Whether anything is to be removed at all."""
        return self.pruning > 0 or any(share > 0 for _, share in self.layer_pruning)

    @property
    def label(self) -> str:
        """Its name in files, with the exact ratio: `prune 0.28125 int8 onnxruntime`."""
        pruned = "by layer" if self.layer_pruning else f"{self.pruning:g}"
        return f"prune {pruned} {self.precision} {self.runtime}"

    @property
    def title(self) -> str:
        """Its name for people, with the ratio in per cent: `pruned 28 % int8 onnxruntime`."""
        share = f"{min(100 * self.pruning, 99):.2g} %"
        pruned = share if not self.layer_pruning else f"{share} and by layer" if self.pruning else "by layer"
        return f"{f'pruned {pruned}' if self.is_pruned else 'unpruned'} {self.precision} {self.runtime}"


@record
class SkippedCandidate(Record):
    """A candidate that was predicted to miss a latency budget."""

    candidate: Candidate = field("The candidate.")
    metric: str = field('The latency that the budget limits, such as "target_latency_ms".')
    seconds: float = field("Its predicted latency.")
    low_s: float = field("Lower end of the 90 % interval: with 95 % confidence it takes longer.")
    high_s: float = field("Upper end of that interval.")
    limit_s: float = field("The budget.")
    reason: str = field("Why it is skipped.")
    is_built: bool = field("Whether it was built all the same, to check the skipping.", default=False)
    is_right: bool | None = field("Whether it then missed the budget; None: not built.", default=None)
