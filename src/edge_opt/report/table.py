"""The one schema of columns: names, headings, kinds, rows and trees for terminal, files, comparisons and page."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

from edge_opt import units
from edge_opt.errors import InvalidInput
from edge_opt.records.costs import OpCost, Shape
from edge_opt.records.devices import Bound
from edge_opt.records.predictions import LayerPrediction, Prediction
from edge_opt.records.profiles import Level, ModelProfile

if TYPE_CHECKING:
    import pandas as pd


Kind = Literal["text", "flag", "number", "count", "bytes", "ratio", "share", "time", "energy"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class ProfileColumn:
    """One column of a profile, declared once: files, tables, pages and docs/columns.md read it.

    `get` takes a row and its profile; None is a value that is not known or not defined.
    """

    name: str
    title: str
    kind: Kind
    get: Callable[[ProfileRow, ModelProfile], Any]
    levels: Sequence[Level]
    help: str

    @property
    def is_integer(self) -> bool:
        return self.kind in ("number", "count", "bytes")

    def text(self, value: Any) -> str:
        """Return the value for people: scaled, with its unit, a dash where there is none."""
        return units.DASH if value is None else units.FORMATS[self.kind](value)


def _shapes(shapes: Sequence[Shape]) -> str:
    return ", ".join(units.shape(shape, times="x") for shape in shapes)


def _cost(pick: Callable[[OpCost], int]) -> Callable[[ProfileRow, ModelProfile], Any]:
    return lambda row, _: None if row.cost is None else pick(row.cost)


def _whole_cost(profile: ModelProfile) -> OpCost:
    totals = profile.totals
    return OpCost(totals.macs, totals.other_ops, totals.bytes_read, totals.bytes_written)


def _cost_share(pick: Callable[[OpCost], int]) -> Callable[[ProfileRow, ModelProfile], float | None]:
    """Return the share of a row in the model's cost; None where either is not known or the whole is nothing."""

    def share(row: ProfileRow, profile: ModelProfile) -> float | None:
        whole = pick(_whole_cost(profile))
        return pick(row.cost) / whole if row.cost and whole else None

    return share


def _intensity(row: ProfileRow, _: ModelProfile) -> float | None:
    """Return FLOPs per byte; None where an operator has no cost rule: a ratio of lower bounds is no bound."""
    return None if row.cost is None or row.unpriced else row.cost.intensity


def _predicted(pick: Callable[[Predicted], Any]) -> Callable[[ProfileRow, ModelProfile], Any]:
    return lambda row, _: None if row.predicted is None else pick(row.predicted)


_EVERY = LEVELS
_PARTS: tuple[Level, ...] = ("leaves", "modules", "operators")
_CALLS: tuple[Level, ...] = ("leaves", "modules")
_NOT_OPERATORS: tuple[Level, ...] = ("leaves", "modules", "root")

# Two lines per column: the declaration, and what it means.
# fmt: off
_COLUMNS = (
    ProfileColumn("name", "Model", "text", lambda row, profile: profile.name, ("root",),
        "Name of the model."),
    ProfileColumn("mode", "Mode", "text", lambda row, profile: profile.mode, ("root",),
        '"eval" or "train".'),
    ProfileColumn("convention", "Convention", "text", lambda row, profile: profile.convention, ("root",),
        "Which tool's way of counting: edge_opt's own, or another's."),
    ProfileColumn("index", "#", "number", lambda row, _: row.index, ("operators",),
        "Position in the order of execution."),
    ProfileColumn("op", "Operator", "text", lambda row, _: row.op, ("operators",),
        'Operator of torch, such as "aten.convolution".'),
    ProfileColumn("kind", "Kind", "text", lambda row, _: row.type, ("operators",),
        'Class of the work, such as "conv", "linear" or "norm".'),
    ProfileColumn("status", "Status", "text", lambda row, _: row.status, ("operators",),
        '"priced", "free" (it does no work) or "unpriced" (it has no cost rule).'),
    ProfileColumn("module", "Module", "text", lambda row, _: row.path, ("operators",),
        "Path of the module that ran the operator."),
    ProfileColumn("path", "Module", "text", lambda row, _: row.path, _NOT_OPERATORS,
        'Path of the module in the model; "" for the model itself.'),
    ProfileColumn("type", "Type", "text", lambda row, _: row.type, _NOT_OPERATORS,
        "Class of the module."),
    ProfileColumn("depth", "Depth", "number", lambda row, _: row.depth, ("modules",),
        "Depth in the tree of modules; 0 for the model itself."),
    ProfileColumn("is_leaf", "Leaf", "flag", lambda row, _: row.is_leaf, _CALLS,
        "Whether it called no other module."),
    ProfileColumn("call_number", "Call", "number", lambda row, _: row.call_number, ("leaves",),
        "1 for the first call of the module, 2 for the second."),
    ProfileColumn("calls", "Calls", "number", lambda row, _: row.calls, ("modules",),
        "How often the module was called; the row is all calls together."),
    ProfileColumn("in_shape", "Input", "text", lambda row, _: _shapes(row.inputs), _EVERY,
        "Shapes of the inputs."),
    ProfileColumn("out_shape", "Output", "text", lambda row, _: _shapes(row.outputs), _EVERY,
        "Shapes of the outputs."),
    ProfileColumn("output_elements", "Outputs", "count", lambda row, _: sum(map(prod, row.outputs)), _EVERY,
        "Elements of the outputs."),
    ProfileColumn("params", "Params", "count", lambda row, _: row.params, _NOT_OPERATORS,
        "Parameters, in the row of the first call of the module that owns them; shared ones count once."),
    ProfileColumn("trainable_params", "Trainable", "count", lambda row, _: row.trainable_params, _NOT_OPERATORS,
        "Parameters that are trained."),
    ProfileColumn("param_bytes", "Weights", "bytes", lambda row, _: row.param_bytes, _NOT_OPERATORS,
        "Bytes of the parameters."),
    ProfileColumn("buffer_bytes", "Buffers", "bytes", lambda row, profile: profile.totals.buffer_bytes, ("root",),
        "Bytes of the buffers, such as running means."),
    ProfileColumn("input_bytes", "Inputs", "bytes", lambda row, profile: profile.totals.input_bytes, ("root",),
        "Bytes of the inputs."),
    ProfileColumn("activation_bytes", "Activations", "bytes", lambda row, _: row.activation_bytes, _EVERY,
        "Bytes of all tensors that are created; a sum, not a peak."),
    ProfileColumn("macs", "MACs", "count", _cost(lambda cost: cost.macs), _EVERY,
        "Multiply-accumulates; a FLOP count is about twice as large."),
    ProfileColumn("flops", "FLOPs", "count", _cost(lambda cost: cost.flops), _EVERY,
        "All arithmetic: two per MAC, and `other_ops`."),
    ProfileColumn("other_ops", "Other ops", "count", _cost(lambda cost: cost.other_ops), _EVERY,
        "Arithmetic outside MACs: element-wise, norms, reductions, bias."),
    ProfileColumn("bytes_read", "Read", "bytes", _cost(lambda cost: cost.bytes_read), _EVERY,
        "Bytes of the tensors that operators read, once each."),
    ProfileColumn("bytes_written", "Written", "bytes", _cost(lambda cost: cost.bytes_written), _EVERY,
        "Bytes of the tensors that operators write, once each."),
    ProfileColumn("bytes_moved", "Moved", "bytes", _cost(lambda cost: cost.bytes_moved), _EVERY,
        "Bytes read plus bytes written by the operators."),
    ProfileColumn("intensity", "FLOPs/byte", "ratio", _intensity, _EVERY,
        "FLOPs per byte moved: high values are limited by compute, low values by memory."),
    ProfileColumn("peak_live_bytes", "Peak", "bytes", lambda row, _: row.peak_live_bytes, _NOT_OPERATORS,
        "Most bytes of activations alive at once while it runs; weights and inputs are not included."),
    ProfileColumn("live_bytes", "Live", "bytes", lambda row, _: row.peak_live_bytes, ("operators",),
        "Bytes of activations alive while the operator runs, its outputs and scratch memory included."),
    ProfileColumn("planner_bytes", "Planner bound", "bytes", lambda row, profile: profile.peak.planner_bytes, ("root",),
        "The peak of a runtime that plans memory ahead and drops each tensor after its last use."),
    ProfileColumn("measured_s", "Time", "time", lambda row, _: row.measured_s, _NOT_OPERATORS,
        "Seconds measured on this machine, of its own and its children's work."),
    ProfileColumn("predicted_s", "Predicted", "time", _predicted(lambda it: it.seconds), _NOT_OPERATORS,
        "Seconds predicted for the first target."),
    ProfileColumn("predicted_low_s", "At least", "time", _predicted(lambda it: it.low), _NOT_OPERATORS,
        "Lower end of the 90 % interval of the prediction."),
    ProfileColumn("predicted_high_s", "At most", "time", _predicted(lambda it: it.high), _NOT_OPERATORS,
        "Upper end of the 90 % interval of the prediction."),
    ProfileColumn("predicted_bound", "Bound by", "text", _predicted(lambda it: it.bound), _NOT_OPERATORS,
        'What most of the predicted time goes to: "compute", "memory" or "overhead".'),
    ProfileColumn("predicted_energy_j", "Energy", "energy", _predicted(lambda it: it.energy_j), _NOT_OPERATORS,
        "Joules predicted for the first target; an estimate, not a measurement."),
    ProfileColumn("predicted_engine", "Engine", "text", _predicted(lambda it: it.engine), _NOT_OPERATORS,
        'Who computes it on the first target: "npu", "cpu", or several, such as "cpu, npu"; empty: not known.'),
    ProfileColumn("operators", "Operators", "number", lambda row, _: row.operators, _NOT_OPERATORS,
        "Operator calls."),
    ProfileColumn("unpriced", "Unpriced", "number", lambda row, _: row.unpriced, _NOT_OPERATORS,
        "Operator calls without a cost rule; with any, its figures are lower bounds."),
    ProfileColumn("coverage", "Coverage", "share", lambda row, profile: profile.coverage, ("root",),
        "Share of the operator calls that are priced or free."),
    ProfileColumn("macs_share", "MACs %", "share", _cost_share(lambda cost: cost.macs), _PARTS,
        "Share of the model's MACs."),
    ProfileColumn("params_share", "Params %", "share",
        lambda row, profile: row.params / profile.totals.params if profile.totals.params else None, _CALLS,
        "Share of the model's parameters."),
    ProfileColumn("bytes_share", "Traffic %", "share", _cost_share(lambda cost: cost.bytes_moved), _PARTS,
        "Share of the bytes that the model moves."),
)
# fmt: on
COLUMNS = {column.name: column for column in _COLUMNS}
# Sort keys of tables: the word of the option, and the column.
SORT_COLUMNS = {
    "macs": "macs",
    "flops": "flops",
    "params": "params",
    "bytes": "bytes_moved",
    "activations": "activation_bytes",
    "peak": "peak_live_bytes",
    "intensity": "intensity",
    "time": "measured_s",
    "predicted": "predicted_s",
}


def columns(level: str) -> tuple[ProfileColumn, ...]:
    """Return the columns of one level, in order."""
    if level not in LEVELS:
        raise InvalidInput(f"unknown level {level!r}; it is one of {', '.join(LEVELS)}")
    return tuple(column for column in _COLUMNS if level in column.levels)


def check_choice(keys: Collection[str], sort: str | None, top: int | None) -> None:
    """Refuse an order or a number of rows that a table cannot have, before any work is done."""
    if sort is not None and sort not in keys:
        raise InvalidInput(f"cannot sort by {sort!r}; use one of {', '.join(keys)}")
    if top is not None and top < 1:
        raise InvalidInput(f"top is {top}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted time of one row; None: not known. `spent` is the time by compute, memory and overhead."""

    seconds: float | None
    low: float | None
    high: float | None
    energy_j: float | None
    spent: tuple[tuple[Bound, float], ...]
    engines: frozenset[str] = frozenset()

    @property
    def engine(self) -> str:
        return ", ".join(sorted(self.engines))

    @property
    def bound(self) -> Bound:
        return max(self.spent, key=lambda part: part[1])[0] if self.spent and self.seconds is not None else "unknown"


NO_WORK = Predicted(0.0, 0.0, 0.0, 0.0, ())


def _predicted_by_call(profile: ModelProfile) -> dict[int, Predicted]:
    """Return what each module call would take itself on the first target, by its index; without work it is absent."""
    layers = () if profile.prediction is None else profile.prediction.layers
    return {layer.module: _as_predicted(layer, layer.energy_j, [layer]) for layer in layers}


def _predicted_whole(whole: Prediction) -> Predicted:
    return _as_predicted(whole, whole.energies[0].joules if whole.energies else None, whole.layers)


def _as_predicted(
    time: LayerPrediction | Prediction, joules: float | None, layers: Sequence[LayerPrediction]
) -> Predicted:
    engines = frozenset(layer.engine for layer in layers if layer.engine is not None)
    return Predicted(time.seconds, time.low, time.high, joules, ((time.bound, time.seconds or 0.0),), engines)


def _together(parts: Sequence[Predicted | None]) -> Predicted | None:
    """Return several rows as one; what is unknown in one is unknown. Ends add up: layers err in the same direction."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    spent: dict[Bound, float] = {}
    for part in known:
        for bound, seconds in part.spent:
            spent[bound] = spent.get(bound, 0.0) + seconds
    sums = {name: _sum([getattr(part, name) for part in known]) for name in ("seconds", "low", "high", "energy_j")}
    engines = frozenset[str]().union(*(part.engines for part in known))
    return Predicted(**sums, spent=tuple(spent.items()), engines=engines)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """One line of a table: an operator, a module call, a module with all below it, or the whole model.

    `cost` is None where it is not known: the operator has no rule. `op` and `status` are those of operators only.
    `measured_s` is None where nothing was measured; a call that only passes work on has no time of its own. `predicted`
    is None where nothing was predicted, and at operators, which predictions do not name.
    """

    path: str
    type: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    cost: OpCost | None
    activation_bytes: int
    peak_live_bytes: int
    operators: int
    unpriced: int
    params: int = 0
    trainable_params: int = 0
    param_bytes: int = 0
    index: int = 0
    depth: int = 0
    calls: int = 1
    call_number: int = 1
    is_leaf: bool = True
    op: str = ""
    status: str = ""
    measured_s: float | None = None
    predicted: Predicted | None = None


def in_target_precision(profile: ModelProfile) -> ModelProfile:
    """Return the profile with bytes in the precision that its predictions share, where that is narrower than fp32."""
    precisions = {prediction.precision for prediction in profile.predictions} - {"fp32"}
    if len(precisions) != 1:
        return profile
    from edge_opt.boards.capacity import at_precision

    return at_precision(profile, precisions.pop())


def call_rows(profile: ModelProfile) -> list[ProfileRow]:
    """Return every module call with the work it does itself, in order of the trace."""
    profile = in_target_precision(profile)
    measured = None if profile.measurement is None else profile.measurement.layers
    times = {} if measured is None else {layer.module: layer.seconds for layer in measured.layers}
    predicted = _predicted_by_call(profile)
    nothing = NO_WORK if profile.predictions else None
    return [
        ProfileRow(
            path=layer.call.path,
            type=layer.call.kind,
            inputs=layer.call.input_shapes,
            outputs=layer.call.output_shapes,
            cost=layer.cost,
            activation_bytes=layer.activation_bytes,
            peak_live_bytes=layer.peak_live_bytes,
            operators=layer.operators,
            unpriced=layer.unpriced,
            params=layer.call.params,
            trainable_params=layer.call.trainable_params,
            param_bytes=layer.call.param_bytes,
            index=layer.call.index,
            call_number=layer.call.call_number,
            is_leaf=layer.call.is_leaf,
            measured_s=times.get(layer.call.index),
            predicted=predicted.get(layer.call.index, nothing),
        )
        for layer in profile.layers
    ]


def leaf_rows(profile: ModelProfile) -> list[ProfileRow]:
    """Return every leaf call in order of execution, and every other call that works or holds parameters itself."""
    return [row for row in call_rows(profile) if row.is_leaf or row.operators or row.params or row.activation_bytes]


def operator_rows(profile: ModelProfile) -> list[ProfileRow]:
    """Return every operator call in order of execution."""
    profile = in_target_precision(profile)
    trace = profile.trace
    return [
        ProfileRow(
            path=operator.module,
            type=operator.kind,
            inputs=tuple(tensor.shape for tensor in operator.inputs),
            outputs=tuple(tensor.shape for tensor in operator.outputs),
            cost=None if operator.status == "unpriced" else operator.cost,
            activation_bytes=sum(trace.storages[number].nbytes for number in call.creates),
            peak_live_bytes=operator.live_bytes,
            operators=1,
            unpriced=int(operator.status == "unpriced"),
            index=operator.index,
            op=operator.op,
            status=operator.status,
        )
        for operator, call in zip(profile.operators, trace.ops, strict=True)
    ]


def root_row(profile: ModelProfile) -> ProfileRow:
    """Return the whole model in one row."""
    profile = in_target_precision(profile)
    totals, root = profile.totals, profile.trace.modules[0]
    return ProfileRow(
        path=root.path,
        type=root.kind,
        inputs=root.input_shapes,
        outputs=root.output_shapes,
        cost=_whole_cost(profile),
        activation_bytes=totals.activation_bytes,
        peak_live_bytes=profile.peak.live_bytes,
        operators=len(profile.trace.ops),
        unpriced=sum(item.count for item in profile.unpriced),
        params=totals.params,
        trainable_params=totals.trainable_params,
        param_bytes=totals.param_bytes,
        is_leaf=root.is_leaf,
        measured_s=None if profile.measurement is None else profile.measurement.latency.median_s,
        predicted=None if profile.prediction is None else _predicted_whole(profile.prediction),
    )


def combined(rows: Sequence[ProfileRow]) -> ProfileRow:
    """Return several rows as one: the first one's name and shapes, costs added up, the highest peak."""
    known = [row.cost for row in rows if row.cost is not None]
    times = [row.measured_s for row in rows if row.measured_s is not None]
    added = ("activation_bytes", "operators", "unpriced", "params", "trainable_params", "param_bytes")
    sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in added}
    return replace(
        rows[0],
        **sums,
        cost=sum(known, OpCost()) if known else None,
        peak_live_bytes=max(row.peak_live_bytes for row in rows),
        measured_s=math.fsum(times) if times else None,
        predicted=_together([row.predicted for row in rows]),
    )


@dataclass(frozen=True, slots=True)
class ProfileNode:
    """One module, all its calls together. `own` is its own work; `row` adds everything below it."""

    own: ProfileRow
    row: ProfileRow
    children: tuple[ProfileNode, ...]


def module_tree(profile: ModelProfile) -> ProfileNode:
    """Return the modules that were called, by path; children are in the order of their first call.

    A module belongs under the path that defines it, also when a module elsewhere calls it: so a row is its own work
    plus its children's, also if they are shared. Containers that are never called, such as a ModuleList, have no row.
    """
    calls: dict[str, list[ProfileRow]] = {}
    for row in call_rows(profile):
        calls.setdefault(row.path, []).append(row)
    children: dict[str, list[str]] = {path: [] for path in calls}
    root = profile.layers[0].call.path
    for path in calls:
        if path != root:
            above = path.rpartition(".")[0]
            while above and above not in children:
                above = above.rpartition(".")[0]
            children[above].append(path)
    tree = _node(root, 0, calls, children)
    if profile.prediction is None:
        return tree
    # The whole has an interval and a bound of its own, which the rows below need not add up to.
    return replace(tree, row=replace(tree.row, predicted=_predicted_whole(profile.prediction)))


def _node(path: str, depth: int, calls: dict[str, list[ProfileRow]], children: dict[str, list[str]]) -> ProfileNode:
    below = tuple(_node(child, depth + 1, calls, children) for child in children[path])
    first = combined(calls[path])
    own = replace(first, depth=depth, calls=len(calls[path]), is_leaf=not below)
    return ProfileNode(own, combined([own, *(node.row for node in below)]), below)


def walk(node: ProfileNode, depth: int | None = None) -> Iterator[ProfileNode]:
    """Yield the node and all below it, parents first, down to `depth` levels under the root."""
    yield node
    if depth is None or node.row.depth < depth:
        for child in node.children:
            yield from walk(child, depth)


def cut(node: ProfileNode, depth: int | None = None) -> list[ProfileRow]:
    """Return rows that add up to the whole: modules at `depth` with all below them, and the own work of those above.

    A module that is folded here counts as a leaf; a row that is not one holds own work only.
    """
    rows = []
    for module in walk(node, depth):
        if module.row.depth == depth or not module.children:
            rows.append(replace(module.row, is_leaf=True))
        elif module.own.operators or module.own.params:
            rows.append(module.own)
    return rows


def deepest_that_fits(node: ProfileNode, limit: int) -> int:
    """Return the depth at which the tree has at most `limit` rows; at least 1."""
    depths = [module.row.depth for module in walk(node)]
    return next((depth for depth in range(max(depths), 1, -1) if sum(d <= depth for d in depths) <= limit), 1)


def rows_of(profile: ModelProfile, level: Level) -> list[ProfileRow]:
    """Return the rows of one level; those of leaves, operators and the root add up to the totals."""
    if level == "leaves":
        return leaf_rows(profile)
    if level == "modules":
        return [node.row for node in walk(module_tree(profile))]
    if level == "operators":
        return operator_rows(profile)
    return [root_row(profile)]


def table(profile: ModelProfile, level: Level) -> list[tuple[ProfileColumn, list[Any]]]:
    """Return each column of the level with its values, exact and unscaled."""
    wanted = [column for column in columns(level) if profile.predictions or not column.name.startswith("predicted_")]
    rows = rows_of(profile, level)
    return [(column, [column.get(row, profile) for row in rows]) for column in wanted]


def dataframe(profile: ModelProfile, level: Level = "leaves") -> pd.DataFrame:
    """Return the profile as a DataFrame of exact numbers.

    Integers of the operator level are of the nullable type Int64: an operator without a rule has no cost, not 0.
    """
    import pandas as pd

    integer = "Int64" if level == "operators" else "int64"

    def series(column: ProfileColumn, values: list[Any]) -> pd.Series[Any]:
        if column.kind in ("ratio", "share", "time", "energy"):
            return pd.Series(values, dtype="float64")
        if not column.is_integer:
            return pd.Series(values, dtype="bool" if column.kind == "flag" else "str")
        try:
            return pd.Series(values, dtype=integer)
        except OverflowError:  # beyond 2**63 only Python's own integers are exact
            return pd.Series(values, dtype="object")

    return pd.DataFrame({column.name: series(column, values) for column, values in table(profile, level)})
