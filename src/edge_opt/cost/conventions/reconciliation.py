"""Why two counts of the same trace differ: the difference by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from edge_opt.cost.conventions.counts import count
from edge_opt.cost.conventions.ledger import CONVOLUTION, LINEAR, PRODUCT, Entry, our_entries
from edge_opt.cost.conventions.reading import layers_of
from edge_opt.cost.conventions.registry import convention_named
from edge_opt.records import Cause, ModelProfile, Reconciliation


def reconcile(profile: ModelProfile, convention: str) -> Reconciliation:
    """Our count, the tool's count, and what makes the difference; ours and the causes add up to theirs.

    Both are in the tool's unit: MACs, or FLOPs at two per MAC with all other arithmetic.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> eo.reconcile(eo.profile(nn.Linear(16, 8), (1, 16)), "ptflops").causes
    (Cause(cause='bias', difference=8, layers=('',)),)
    """
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
