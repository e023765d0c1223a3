"""The number another tool would print for a profiled model, and the profile under its convention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_opt.cost.conventions.ledger import DENSE, FIRST_ADDITION, Entry, Unit, by_layer
from edge_opt.cost.conventions.reading import layers_of
from edge_opt.cost.conventions.registry import convention_named
from edge_opt.cost.layers import layer_costs, total_costs
from edge_opt.records import ModelProfile, OpCost

OURS = "edge_opt"


@dataclass(frozen=True, slots=True)
class ConventionCount:
    """What a tool counts: the number it prints, the part of each layer (as `profile.layers`), the single entries."""

    convention: str
    unit: Unit
    total: int
    layers: tuple[int, ...]
    entries: tuple[Entry, ...]


def count(profile: ModelProfile, convention: str) -> ConventionCount:
    """The number the tool would print for this model, from the trace alone.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> count(eo.profile(nn.Linear(16, 8), (4, 16)), "torch").total == 2 * 4 * 16 * 8
    True
    """
    rules = convention_named(convention)
    entries = tuple(rules.counting(layers_of(profile)))
    layers = by_layer(entries, len(profile.layers))
    return ConventionCount(rules.name, rules.unit, sum(layers), layers, entries)


def under_convention(profile: ModelProfile, convention: str) -> ModelProfile:
    """The same profile with the MACs and FLOPs of its layers and totals as the tool counts them.

    Bytes stay, and so do the prices of single operators. A tool of unit "macs" gives `macs`, and `flops` is twice
    that; one of unit "flops" gives `flops`, and `macs` is half of what it counts for products. "edge_opt" is our own.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> ptflops = under_convention(eo.profile(nn.Linear(16, 8), (1, 16)), "ptflops")
    >>> ptflops.totals.macs == 16 * 8 + 8, ptflops.convention
    (True, 'ptflops')
    """
    trace = profile.trace
    ours = layer_costs(trace, profile.prices)
    if convention == OURS:
        return replace(profile, convention=OURS, layers=ours, totals=total_costs(trace, ours))
    convention_named(convention, OURS)
    theirs = count(profile, convention)
    dense = by_layer((e for e in theirs.entries if e.subject in DENSE or e.subject == FIRST_ADDITION), len(ours))
    layers = tuple(
        replace(layer, cost=_cost(layer.cost, theirs.unit, amount, products))
        for layer, amount, products in zip(ours, theirs.layers, dense, strict=True)
    )
    return replace(profile, convention=theirs.convention, layers=layers, totals=total_costs(trace, layers))


def _cost(ours: OpCost, unit: Unit, amount: int, products: int) -> OpCost:
    macs = amount if unit == "macs" else products // 2
    other_ops = 0 if unit == "macs" else amount - 2 * macs
    return OpCost(macs, other_ops, ours.bytes_read, ours.bytes_written)
