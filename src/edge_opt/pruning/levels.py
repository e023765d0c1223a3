"""One model cut at many levels: its channels are followed and ranked once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from edge_opt._support.unchanged import unchanged
from edge_opt.pruning.prune import Plan, check_prunable, heal, make_plan
from edge_opt.pruning.ranking import best_kind
from edge_opt.pruning.recipe import apply_spec
from edge_opt.pruning.widths import RoundTo, fast_multiple
from edge_opt.records.compression import Importance, PruneRequest


@dataclass(frozen=True, slots=True)
class Levels:
    """A model whose channels are known, to be cut at several ratios and roundings.

    Attributes:
        model: The model; it is left as it was.
        plan: Its channels, ranked.
        data: Batches that a cut model is fitted to.
    """

    model: nn.Module
    plan: Plan
    data: Sequence[Any]

    def distinct(self, ratios: Iterable[float], round_to: RoundTo, known: set[bytes] | None = None) -> list[float]:
        """The ratios that remove something, the first of each set of widths.

        Args:
            ratios: Shares of the channels to remove, the gentlest first.
            round_to: As in `prune`.
            known: Sets of widths that were met before; they are left out, and what is found is added.
        """
        seen, plan, found = set() if known is None else known, _rounding(self.plan, round_to), []
        for ratio in ratios:
            removed = plan.removed(ratio)
            # Which channels go follows from how many, so this stands for widths, too.
            key = np.packbits(removed).tobytes()
            if removed.any() and key not in seen:
                seen.add(key)
                found.append(ratio)
        return found

    def cut(self, ratio: float, round_to: RoundTo) -> nn.Module:
        """What `prune` makes of the model at this ratio, fitted to the batches; not proved, only looked at."""
        plan = _rounding(self.plan, round_to)
        with unchanged([], training=False), torch.inference_mode(False), torch.enable_grad():
            spec = plan.spec(plan.removed(ratio))
            pruned = apply_spec(self.model, spec)
            heal(self.model, plan, pruned, spec, self.data, reestimate=True, reconstruct=True)
        return pruned


def levels_of(
    model: nn.Module, example_inputs: Any, *, importance: Importance, loader: Iterable[Any], seed: int
) -> Levels:
    """The model with its channels followed and ranked.

    Args:
        model: The model; it is left as it was.
        example_inputs: As in `prune`.
        importance: What ranks channels, as in `prune`.
        loader: Batches to rank with and to fit to.
        seed: Decides a random ranking.
    """
    data = list(loader)
    with unchanged([], training=False), torch.inference_mode(False), torch.enable_grad():
        plan = make_plan(model, example_inputs, None, _request("auto", importance, seed), data)
    check_prunable(model, plan)
    return Levels(model, plan, data)


def _request(round_to: RoundTo, importance: Importance, seed: int) -> PruneRequest:
    return PruneRequest(
        ratio=None, layers=(), macs_target=None, latency_target=None, importance=best_kind(importance),
        round_to=fast_multiple(None) if isinstance(round_to, str) else round_to, ignored=(), global_ranking=False,
        seed=seed, is_round_auto=round_to == "auto",
    )  # fmt: skip


def _rounding(plan: Plan, round_to: RoundTo) -> Plan:
    """The same plan with channels rounded otherwise."""
    width = fast_multiple(None) if isinstance(round_to, str) else round_to
    return replace(plan, ranking=replace(plan.ranking, round_to=width, is_adaptive=round_to == "auto"))
