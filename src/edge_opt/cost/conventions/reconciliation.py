"""A profile as another tool counts it, and the difference by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from edge_opt.cost.conventions.export_difference import export_difference
from edge_opt.cost.conventions.ledger import (
    CONVOLUTION,
    DENSE,
    FIRST_ADDITION,
    LINEAR,
    PRODUCT,
    Entry,
    Layer,
    Unit,
    by_layer,
    layers_of,
    our_entries,
)
from edge_opt.cost.totals import layer_costs, total_costs
from edge_opt.errors import InvalidInput, RuleError
from edge_opt.records import Cause, ModelProfile, OpCost, Reconciliation

Counting = Callable[[Sequence[Layer]], Iterable[Entry]]


@dataclass(frozen=True, slots=True)
class Convention:
    """How another tool counts. `unit` is ours for its number; `by_module`: it goes by the classes of modules."""

    name: str
    unit: Unit
    description: str
    by_module: bool
    counting: Counting


_conventions: dict[str, Convention] = {}
CONVENTIONS: Mapping[str, Convention] = MappingProxyType(_conventions)


def convention(name: str, *, unit: Unit, description: str, by_module: bool) -> Callable[[Counting], Counting]:
    """Register a counting function under the name of its tool."""

    def register(counting: Counting) -> Counting:
        if name in _conventions:
            known = getattr(_conventions[name].counting, "__qualname__", "?")
            raise RuleError(f"convention {name!r} is registered twice: {known} and {counting.__qualname__}")
        _conventions[name] = Convention(name, unit, description, by_module, counting)
        return counting

    return register


def convention_named(name: str, *also: str) -> Convention:
    """The convention of that name; a refusal lists those there are, and what the caller takes besides."""
    try:
        return CONVENTIONS[name]
    except KeyError:
        allowed = ", ".join((*also, *sorted(CONVENTIONS)))
        raise InvalidInput(f"no counting convention named {name!r}; choose one of: {allowed}") from None


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


def reconcile(profile: ModelProfile, convention: str | ModelProfile) -> Reconciliation:
    """Our count, the tool's count, and what makes the difference; ours and the causes add up to theirs.

    Both are in the tool's unit: MACs, or FLOPs at two per MAC with all other arithmetic.

    Args:
        profile: The model and its inputs.
        convention: The tool: fvcore, thop, ptflops, torch or rasp. Or the profile of a file that was exported from
            the model: the difference is then what the exporter folded, stored or wrote in another way, in FLOPs.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> eo.reconcile(eo.profile(nn.Linear(16, 8), (1, 16)), "ptflops").causes
    (Cause(cause='bias', difference=8, layers=('',)),)
    """
    if isinstance(convention, ModelProfile):
        return export_difference(profile, convention)
    rules = convention_named(convention)
    theirs = count(profile, convention)
    ours = tuple(our_entries(layers_of(profile), rules.unit))
    we, they = _summed(ours), _summed(theirs.entries)
    differences: dict[str, Counter[int]] = defaultdict(Counter)
    for subject, layer in sorted({*we, *they}):
        we_count, they_count = we[subject, layer], they[subject, layer]
        if we_count != they_count:
            cause = _cause(subject, we_count, they_count, rules.by_module)
            differences[cause][layer] += they_count - we_count
    found = [
        Cause(cause, parts.total(), tuple(dict.fromkeys(profile.trace.modules[layer].path for layer in parts)))
        for cause, parts in differences.items()
    ]
    return Reconciliation(
        convention=rules.name,
        unit=rules.unit,
        ours=sum(entry.amount for entry in ours),
        theirs=theirs.total,
        causes=tuple(sorted(found, key=lambda cause: (-abs(cause.difference), cause.cause))),
    )


def _summed(entries: Iterable[Entry]) -> Counter[tuple[str, int]]:
    """Amounts by heading and layer."""
    sums: Counter[tuple[str, int]] = Counter()
    for entry in entries:
        sums[entry.subject, entry.layer] += entry.amount
    return sums


def _cause(subject: str, ours: int, theirs: int, by_module: bool) -> str:
    """The difference in words: theirs alone, ours alone, or both."""
    if not ours:
        return subject
    if theirs:
        return f"{subject} counted differently"
    if by_module and subject in (CONVOLUTION, LINEAR, PRODUCT):
        return "functional operators not counted"
    return f"{subject} not counted"
