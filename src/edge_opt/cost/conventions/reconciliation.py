"""A profile as another tool counts it, or as its export does, and the difference by cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

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
from edge_opt.records.costs import Cause, OpCost, Reconciliation
from edge_opt.records.profiles import ModelProfile

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


_PRODUCTS = frozenset(("conv", "matmul", "recurrent", "attention", "linalg"))
NORM_FOLDED = "norm folded into the product before it"
BIAS_ADDED = "bias that a folded norm leaves"
BIAS_DROPPED = "bias added outside of the product, or left out"
WORKED_OUT = "worked out when exported, for no input reaches it"
QUANTIZED = "steps between floats and integers"
_MOST_KINDS = 4
_Kinds = dict[str, OpCost]  # what each kind of work costs


def export_difference(model: ModelProfile, file: ModelProfile) -> Reconciliation:
    """Both counts in FLOPs, and what makes the difference; the model's and the causes add up to the file's.

    Args:
        model: The profile of the model.
        file: The profile of its export, on inputs of the same shape.
    """
    differences: dict[str, Counter[str]] = defaultdict(Counter)
    for path, ours, theirs in _together(_by_module(model), _by_module(file)):
        if _flops(ours) == _flops(theirs):
            continue
        if _is_rewritten(ours, theirs):
            differences[_rewritten(ours, theirs)][path] += _flops(theirs) - _flops(ours)
            continue
        for kind in {*ours, *theirs}:
            mine, other = ours.get(kind, OpCost()), theirs.get(kind, OpCost())
            if mine.flops != other.flops:
                differences[_export_cause(kind, mine, other, ours, theirs)][path] += other.flops - mine.flops
    causes = [Cause(cause, parts.total(), tuple(parts)) for cause, parts in differences.items() if parts.total()]
    return Reconciliation(
        convention=file.name,
        unit="flops",
        ours=model.totals.flops,
        theirs=file.totals.flops,
        causes=tuple(sorted(causes, key=lambda cause: (-abs(cause.difference), cause.cause))),
    )


def _flops(work: _Kinds) -> int:
    return sum(cost.flops for cost in work.values())


def _by_module(profile: ModelProfile) -> dict[str, _Kinds]:
    """What each module costs, by kind of work."""
    found: dict[str, _Kinds] = defaultdict(dict)
    for one in profile.operators:
        if one.cost.flops:
            found[one.module][one.kind] = found[one.module].get(one.kind, OpCost()) + one.cost
    return found


def _together(before: Mapping[str, _Kinds], after: Mapping[str, _Kinds]) -> list[tuple[str, _Kinds, _Kinds]]:
    """Work by module. What a file lays on a module that the model does not know goes to the one around it."""
    moved: dict[str, _Kinds] = defaultdict(dict)
    for path, work in after.items():
        known = path
        while known and known not in before:
            known = known.rpartition(".")[0]
        for kind, cost in work.items():
            moved[known][kind] = moved[known].get(kind, OpCost()) + cost
    return [(path, before.get(path, {}), moved.get(path, {})) for path in {**before, **moved}]


def _is_rewritten(ours: _Kinds, theirs: _Kinds) -> bool:
    """Whether the same module is made of operators of other kinds: attention of products, an activation of parts."""
    return bool(ours) and bool(set(theirs) - set(ours) - {"quantization"})


def _rewritten(ours: _Kinds, theirs: _Kinds) -> str:
    lost = [kind for kind in ours if ours[kind] != theirs.get(kind)] or list(ours)
    new = [kind for kind in theirs if theirs[kind] != ours.get(kind)]
    return f"{_named(lost)} written as {_named(new)}"


def _named(kinds: list[str]) -> str:
    shown = sorted(kinds)
    return ", ".join(shown[:_MOST_KINDS]) + (", ..." if len(shown) > _MOST_KINDS else "")


def _export_cause(kind: str, mine: OpCost, other: OpCost, ours: _Kinds, theirs: _Kinds) -> str:
    if kind == "quantization":
        return QUANTIZED
    if not mine.flops:
        return f"{kind} added by the exporter"
    if other.flops:
        is_bias = kind in _PRODUCTS and mine.macs == other.macs
        return (BIAS_ADDED if other.flops > mine.flops else BIAS_DROPPED) if is_bias else f"{kind} counted differently"
    if kind == "norm":
        return NORM_FOLDED
    if not theirs and _PRODUCTS.intersection(ours):
        return WORKED_OUT
    return f"{kind} left out by the exporter"
