"""Count a profile as another tool counts it, and explain the difference.

A convention reads a trace as `CountedModule`s with their `CountedOp`s, and yields one `Entry` per count. The export of
a model is compared with the model by module and kind of work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from edge_opt.cost.totals import layer_costs, total_costs
from edge_opt.errors import InvalidInput, RuleError
from edge_opt.records.costs import (
    Cause,
    ModuleCall,
    OpCall,
    OpCost,
    OpPrice,
    OpSignature,
    Reconciliation,
    TensorInfo,
    Trace,
)
from edge_opt.records.profiles import ModelProfile

Unit = Literal["macs", "flops"]


class Category:
    """Categories of work, as causes of a difference name them."""

    CONVOLUTION = "convolutions"
    LINEAR = "linear layers"
    PRODUCT = "matrix products"
    ATTENTION = "attention"
    RECURRENT = "recurrent layers"
    BIAS = "bias"
    NORM = "normalization"
    POOLING = "pooling"
    ACTIVATION = "activation"
    SOFTMAX = "softmax"
    INTERPOLATION = "interpolation"
    EMBEDDING = "embedding"
    ELEMENTWISE = "element-wise arithmetic"
    FIRST_ADDITION = "a sum of n terms as n - 1 additions"
    AVERAGING = "averaged over the batch"


# Work that is made of multiply-accumulates.
DENSE = frozenset((Category.CONVOLUTION, Category.LINEAR, Category.PRODUCT, Category.ATTENTION, Category.RECURRENT))

# The category of an operator's MACs and that of its other work, by the kind its cost rule gives it.
_CATEGORIES = {
    "conv": (Category.CONVOLUTION, Category.BIAS),
    "matmul": (Category.PRODUCT, Category.BIAS),
    "attention": (Category.ATTENTION, Category.SOFTMAX),
    "recurrent": (Category.RECURRENT, Category.RECURRENT),
    "norm": (Category.NORM, Category.NORM),
    "pooling": (Category.POOLING, Category.POOLING),
    "activation": (Category.ACTIVATION, Category.ACTIVATION),
    "softmax": (Category.SOFTMAX, Category.SOFTMAX),
    "interpolation": (Category.INTERPOLATION, Category.INTERPOLATION),
    "embedding": (Category.EMBEDDING, Category.EMBEDDING),
    "elementwise": (Category.ELEMENTWISE, Category.ELEMENTWISE),
}

RECURRENT_OPS = frozenset(
    f"aten.{name}{suffix}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for suffix in ("", "_cell")
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A count of one module call (`layer` is its index) in one category."""

    layer: int
    category: str
    amount: int


@dataclass(frozen=True, slots=True)
class CountedOp:
    """One operator call; `is_used` is unset when the model's result does not depend on it."""

    name: str
    signature: OpSignature
    price: OpPrice
    is_used: bool

    @property
    def macs(self) -> int:
        return self.price.cost.macs

    @property
    def x(self) -> TensorInfo:
        """The first tensor read."""
        return self.signature.inputs[0]

    @property
    def out(self) -> TensorInfo:
        """The first tensor written."""
        return self.signature.outputs[0]

    def argument(self, name: str, default: Any = None) -> Any:
        return self.signature.argument(name, default)

    def has(self, name: str) -> bool:
        """Return whether a tensor was passed for parameter `name`."""
        return isinstance(self.argument(name), TensorInfo)


@dataclass(frozen=True, slots=True)
class CountedModule:
    """One module call with its own operators; its children are counted modules of their own."""

    call: ModuleCall
    ops: tuple[CountedOp, ...]
    reads_parameters: bool

    @property
    def kind(self) -> str:
        return self.call.kind

    def first(self, *names: str) -> CountedOp | None:
        """Return the first of its operators that has one of these names."""
        return next((op for op in self.ops if op.name in names), None)

    def first_of(self, kind: str) -> CountedOp | None:
        """Return the first of its operators that does this kind of work."""
        return next((op for op in self.ops if op.price.kind == kind), None)


def counted_modules(profile: ModelProfile) -> tuple[CountedModule, ...]:
    """Return every module call of the trace in order, each with the operators that it ran itself."""
    trace = profile.trace
    calls: list[list[OpCall]] = [[] for _ in trace.modules]
    for call in trace.ops:
        calls[call.module].append(call)
    used = _used_operators(trace)

    def counted(call: OpCall) -> CountedOp:
        signature = trace.signatures[call.signature]
        # The in-place variant of an operator does the same work.
        name = signature.op.removesuffix("_")
        return CountedOp(name, signature, profile.prices[call.signature], call.index in used)

    modules = []
    for module, own in zip(trace.modules, calls, strict=True):
        reads_parameters = any(trace.storages[number].role == "parameter" for call in own for number in call.reads)
        modules.append(CountedModule(module, tuple(map(counted, own)), reads_parameters))
    return tuple(modules)


def _used_operators(trace: Trace) -> frozenset[int]:
    """Return the operators that the results depend on; the others computed something that was dropped."""
    needed = {number for number, storage in enumerate(trace.storages) if storage.died is None}
    used = set()
    for call in reversed(trace.ops):
        writes = call.reads[:1] if trace.signatures[call.signature].op.endswith("_") else ()
        if not needed.isdisjoint((*call.creates, *writes)):
            used.add(call.index)
            needed.update(call.reads)
    return frozenset(used)


def category_of(op: CountedOp, module: CountedModule) -> str:
    """Return the category of an operator's MACs; both products inside a MultiheadAttention are its attention."""
    if op.name == "aten.linear":
        return Category.LINEAR
    if module.kind == "MultiheadAttention" and op.name in ("aten.bmm", "aten.baddbmm"):
        return Category.ATTENTION
    return _categories(op)[0]


def _categories(op: CountedOp) -> tuple[str, str]:
    return _CATEGORIES.get(op.price.kind, (op.price.kind, op.price.kind))


def our_entries(modules: Sequence[CountedModule], unit: Unit) -> Iterator[Entry]:
    """Yield our own count of the same modules: MACs alone, or every operation with two per MAC."""
    for module in modules:
        for op in module.ops:
            cost = op.price.cost
            if cost.macs:
                macs = cost.macs if unit == "macs" else 2 * cost.macs
                yield Entry(module.call.index, category_of(op, module), macs)
            if cost.other_ops and unit == "flops":
                yield Entry(module.call.index, _categories(op)[1], cost.other_ops)


def per_axis(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return a size in each dimension; a single number applies to all of them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values if len(values) == dims else values * dims


CountModules = Callable[[Sequence[CountedModule]], Iterable[Entry]]


@dataclass(frozen=True, slots=True)
class Convention:
    """How another tool counts. `unit` is ours for its number; `by_module`: it goes by the classes of modules."""

    name: str
    unit: Unit
    by_module: bool
    entries: CountModules


_conventions: dict[str, Convention] = {}
CONVENTIONS: Mapping[str, Convention] = MappingProxyType(_conventions)
OURS = "edge_opt"


def convention(name: str, *, unit: Unit, by_module: bool) -> Callable[[CountModules], CountModules]:
    """Register a counting function under the name of its tool."""

    def register(entries: CountModules) -> CountModules:
        if name in _conventions:
            known = getattr(_conventions[name].entries, "__qualname__", "?")
            raise RuleError(f"convention {name!r} is registered twice: {known} and {entries.__qualname__}")
        _conventions[name] = Convention(name, unit, by_module, entries)
        return entries

    return register


def find_convention(name: str, *also: str) -> Convention:
    """Return the convention of that name.

    Args:
        name: The tool.
        also: Other names that the caller accepts, for the error message.
    """
    try:
        return CONVENTIONS[name]
    except KeyError:
        allowed = ", ".join((*also, *sorted(CONVENTIONS)))
        raise InvalidInput(f"no counting convention named {name!r}; choose one of: {allowed}") from None


@dataclass(frozen=True, slots=True)
class ConventionCount:
    """What a tool counts: the number it prints, the part of each layer (as `profile.layers`), the single entries."""

    convention: str
    unit: Unit
    total: int
    layers: tuple[int, ...]
    entries: tuple[Entry, ...]


def count(profile: ModelProfile, convention: str) -> ConventionCount:
    """Return the number that the tool would print for this model, from the trace alone.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> count(eo.profile(nn.Linear(16, 8), (4, 16)), "torch").total == 2 * 4 * 16 * 8
    True
    """
    rules = find_convention(convention)
    entries = tuple(rules.entries(counted_modules(profile)))
    layers = _by_layer(entries, len(profile.layers))
    return ConventionCount(rules.name, rules.unit, sum(layers), layers, entries)


def _by_layer(entries: Iterable[Entry], layers: int) -> tuple[int, ...]:
    sums = [0] * layers
    for entry in entries:
        sums[entry.layer] += entry.amount
    return tuple(sums)


def under_convention(profile: ModelProfile, convention: str) -> ModelProfile:
    """Return the same profile with the MACs and FLOPs of its layers and totals as the tool counts them.

    Bytes stay, and so do the prices of single operators. A tool of unit "macs" gives `macs`, and `flops` is twice
    that; one of unit "flops" gives `flops`, and `macs` is half of what it counts for products. "edge_opt" is our own.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> ptflops = under_convention(eo.profile(nn.Linear(16, 8), (1, 16)), "ptflops")
    >>> ptflops.totals.macs == 16 * 8 + 8, ptflops.convention
    (True, 'ptflops')
    """
    if convention == profile.convention:
        return profile
    trace = profile.trace
    # A profile that is already under a convention no longer holds our counts.
    ours = profile.layers if profile.convention == OURS else layer_costs(trace, profile.prices)
    if convention == OURS:
        return replace(profile, convention=OURS, layers=ours, totals=total_costs(trace, ours))
    find_convention(convention, OURS)
    theirs = count(profile, convention)
    products = _by_layer((e for e in theirs.entries if e.category in DENSE | {Category.FIRST_ADDITION}), len(ours))
    layers = []
    for layer, amount, product in zip(ours, theirs.layers, products, strict=True):
        macs = amount if theirs.unit == "macs" else product // 2
        other_ops = 0 if theirs.unit == "macs" else amount - 2 * macs
        cost = OpCost(macs, other_ops, layer.cost.bytes_read, layer.cost.bytes_written)
        layers.append(replace(layer, cost=cost))
    return replace(
        profile, convention=theirs.convention, layers=tuple(layers), totals=total_costs(trace, tuple(layers))
    )


def reconcile(profile: ModelProfile, convention: str | ModelProfile) -> Reconciliation:
    """Return our count, the tool's count, and what makes the difference; ours and the causes add up to theirs.

    Both are in the tool's unit: MACs, or FLOPs at two per MAC with all other arithmetic.

    Args:
        profile: The model and its inputs.
        convention: The tool: fvcore, thop, ptflops, torchinfo, torch or rasp. Or the profile of a file that was
            exported from the model: the difference is then what the exporter folded, stored or wrote in another way,
            in FLOPs.

    >>> import edge_opt as eo
    >>> from torch import nn
    >>> eo.reconcile(eo.profile(nn.Linear(16, 8), (1, 16)), "ptflops").causes
    (Cause(cause='bias', difference=8, layers=('',)),)
    """
    if isinstance(convention, ModelProfile):
        return export_difference(profile, convention)
    rules = find_convention(convention)
    modules = counted_modules(profile)
    our_counts = _by_category(our_entries(modules, rules.unit))
    their_counts = _by_category(rules.entries(modules))
    differences: dict[str, Counter[int]] = defaultdict(Counter)
    for category, layer in sorted({*our_counts, *their_counts}):
        ours, theirs = our_counts[category, layer], their_counts[category, layer]
        if ours != theirs:
            differences[_cause(category, ours, theirs, rules.by_module)][layer] += theirs - ours
    causes = [
        Cause(cause, parts.total(), tuple(dict.fromkeys(profile.trace.modules[layer].path for layer in parts)))
        for cause, parts in differences.items()
    ]
    return Reconciliation(
        convention=rules.name,
        unit=rules.unit,
        ours=our_counts.total(),
        theirs=their_counts.total(),
        causes=tuple(sorted(causes, key=lambda cause: (-abs(cause.difference), cause.cause))),
    )


def _by_category(entries: Iterable[Entry]) -> Counter[tuple[str, int]]:
    """Add up the amounts by category and layer."""
    sums: Counter[tuple[str, int]] = Counter()
    for entry in entries:
        sums[entry.category, entry.layer] += entry.amount
    return sums


def _cause(category: str, ours: int, theirs: int, by_module: bool) -> str:
    """Describe the difference: only they count it, only we do, or both."""
    if not ours:
        return category
    if theirs:
        return f"{category} counted differently"
    if by_module and category in (Category.CONVOLUTION, Category.LINEAR, Category.PRODUCT):
        return "functional operators not counted"
    return f"{category} not counted"


# The export of a model

_PRODUCTS = frozenset(("conv", "matmul", "recurrent", "attention", "linalg"))
NORM_FOLDED = "norm folded into the product before it"
BIAS_ADDED = "bias that a folded norm leaves"
BIAS_DROPPED = "bias added outside of the product, or left out"
WORKED_OUT = "computed when exported: no input reaches it"
QUANTIZED = "steps between floats and integers"
_MAX_KINDS = 4  # listed in one cause
_Work = dict[str, OpCost]  # cost by kind of operator


def export_difference(model: ModelProfile, file: ModelProfile) -> Reconciliation:
    """Compare both counts in FLOPs; the model's count and the causes add up to the file's.

    Args:
        model: The profile of the model.
        file: The profile of its export, on inputs of the same shape.
    """
    differences: dict[str, Counter[str]] = defaultdict(Counter)
    for path, ours, theirs in _work_by_path(_by_module(model), _by_module(file)):
        if _flops(ours) == _flops(theirs):
            continue
        # The file uses other kinds of operators for the module, such as products for attention.
        if ours and set(theirs) - set(ours) - {"quantization"}:
            differences[_rewritten_cause(ours, theirs)][path] += _flops(theirs) - _flops(ours)
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


def _flops(work: _Work) -> int:
    return sum(cost.flops for cost in work.values())


def _by_module(profile: ModelProfile) -> dict[str, _Work]:
    """Return the cost of each module by kind of operator."""
    modules: dict[str, _Work] = defaultdict(lambda: defaultdict(OpCost))
    for operator in profile.operators:
        if operator.cost.flops:
            modules[operator.module][operator.kind] += operator.cost
    return modules


def _work_by_path(before: Mapping[str, _Work], after: Mapping[str, _Work]) -> list[tuple[str, _Work, _Work]]:
    """Pair the work of each module. Work of a module that only the file has belongs to the module around it."""
    moved: dict[str, _Work] = defaultdict(lambda: defaultdict(OpCost))
    for path, work in after.items():
        known = path
        while known and known not in before:
            known = known.rpartition(".")[0]
        for kind, cost in work.items():
            moved[known][kind] += cost
    return [(path, before.get(path, {}), moved.get(path, {})) for path in {**before, **moved}]


def _rewritten_cause(ours: _Work, theirs: _Work) -> str:
    lost = [kind for kind in ours if ours[kind] != theirs.get(kind)] or list(ours)
    new = [kind for kind in theirs if theirs[kind] != ours.get(kind)]
    return f"{_join_kinds(lost)} written as {_join_kinds(new)}"


def _join_kinds(kinds: list[str]) -> str:
    return ", ".join(sorted(kinds)[:_MAX_KINDS]) + (", ..." if len(kinds) > _MAX_KINDS else "")


def _export_cause(kind: str, mine: OpCost, other: OpCost, ours: _Work, theirs: _Work) -> str:
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
