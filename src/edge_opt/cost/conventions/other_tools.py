"""How other tools count: torch's FlopCounterMode and fvcore by operators; thop, ptflops and torchinfo by modules.

thop is the maintained fork, ultralytics-thop.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from edge_opt.cost.conventions.counting import (
    RECURRENT_OPS,
    Category,
    CountedModule,
    CountedOp,
    Entry,
    category_of,
    convention,
    per_axis,
)
from edge_opt.cost.pointwise import adaptive_taps
from edge_opt.records.costs import TensorInfo

_Counts = Iterator[tuple[str, int]]  # categories with their amounts
_DIMS = ("1d", "2d", "3d")
_CONVOLUTIONS = tuple(f"{name}{dims}" for name in ("conv", "conv_transpose") for dims in _DIMS)


_CONVOLUTION_OPS = frozenset(f"aten.{name}" for name in (*_CONVOLUTIONS, "convolution", "_convolution"))
_PRODUCTS_OF_TORCH = frozenset(
    f"aten.{name}" for name in "linear mm bmm addmm baddbmm _scaled_mm scaled_dot_product_attention".split()
)


@convention("torch", unit="flops", by_module=False)
def flop_counter_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Count as torch.utils.flop_counter.FlopCounterMode on the meta device: two per MAC of every product.

    Attention and recurrent layers are split into products there, so they are counted in full.
    """
    for module in modules:
        for op in module.ops:
            if op.name in _CONVOLUTION_OPS | _PRODUCTS_OF_TORCH | RECURRENT_OPS:
                yield Entry(module.call.index, category_of(op, module), 2 * op.macs)


def _fvcore_convolution(op: CountedOp) -> int:
    """Padding by name, such as "same", is another operator in a jit trace, one without a rule in fvcore."""
    return 0 if isinstance(op.argument("padding"), str) else op.macs


def _fvcore_norm(op: CountedOp) -> int:
    return op.x.elements * (5 if op.has("weight") else 4)


def _fvcore_batch_norm(op: CountedOp) -> int:
    """In inference no statistics are gathered: one scale and one shift."""
    if op.argument("training"):
        return _fvcore_norm(op)
    return op.x.elements * (2 if op.has("weight") else 1)


# Category (None: by the kind of work) and count of each operator that fvcore knows.
_FVCORE_RULES: dict[str, tuple[str | None, Callable[[CountedOp], int]]] = {
    **dict.fromkeys(_CONVOLUTION_OPS, (None, _fvcore_convolution)),
    **{f"aten.{name}": (None, lambda op: op.macs) for name in ("linear", "mm", "addmm", "bmm")},
    # Recurrent layers have no rule; a single cell is made of linear layers.
    **{
        f"aten.{name}_cell": (Category.RECURRENT, lambda op: op.macs)
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    "aten.batch_norm": (Category.NORM, _fvcore_batch_norm),
    **{f"aten.{name}": (Category.NORM, _fvcore_norm) for name in ("group_norm", "layer_norm", "instance_norm")},
    "aten.adaptive_avg_pool2d": (Category.POOLING, lambda op: op.x.elements),
    "aten.upsample_nearest2d": (Category.INTERPOLATION, lambda op: op.out.elements),
    **{
        f"aten.{name}": (Category.INTERPOLATION, lambda op: 4 * op.out.elements)
        for name in ("upsample_bilinear2d", "grid_sampler_2d", "grid_sampler_3d")
    },
}


@convention("fvcore", unit="macs", by_module=False)
def fvcore_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Count as fvcore's FlopCountAnalysis, which prints 'flops' and means one per MAC.

    Attention, recurrent layers, `baddbmm`, biases, activations and most pooling count as nothing.
    Work whose result the model does not return is missing as well, because a jit trace has dropped it. fvcore rounds
    an einsum to four digits and ignores a batch that only the right operand of a matmul has; both are exact here.
    """
    for module in modules:
        for op in module.ops:
            if op.is_used and op.name in _FVCORE_RULES:
                category, rule = _FVCORE_RULES[op.name]
                yield Entry(module.call.index, category or category_of(op, module), rule(op))


@dataclass(frozen=True, slots=True)
class RecurrentCell:
    """One layer and direction of a recurrent operator."""

    inputs: int
    hidden: int
    recurrent: int
    projection: int
    gates: int
    has_bias: bool


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent_cells(op: CountedOp) -> tuple[RecurrentCell, ...]:
    """Return the cells of a recurrent operator: layer by layer, both directions of a layer next to each other."""
    gates = _GATES[op.name.removeprefix("aten.").removesuffix("_cell")]
    if op.name.endswith("_cell"):
        has_bias = op.has("b_ih")
        groups = [(op.argument("w_ih"), op.argument("w_hh"))]
    else:
        has_bias = bool(op.argument("has_biases"))
        weights = op.argument("params")
        size = len(weights) // (op.argument("num_layers") * (2 if op.argument("bidirectional") else 1))
        groups = [weights[start : start + size] for start in range(0, len(weights), size)]
    # After both weights and, where there are, both biases comes the weight of a projection.
    before_projection = 4 if has_bias else 2
    return tuple(
        RecurrentCell(
            inputs=group[0].shape[1],
            hidden=group[0].shape[0] // gates,
            recurrent=group[1].shape[1],
            projection=group[before_projection].shape[0] if len(group) > before_projection else 0,
            gates=gates,
            has_bias=has_bias,
        )
        for group in groups
    )


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """The attention inside a module: scores of `queries` against `keys` for every batch entry and head."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_width: int


def _attention_size(module: CountedModule) -> AttentionSize | None:
    """Return the attention that a module runs itself: fused, or as two products with a softmax between."""
    if not module.call.input_shapes:
        return None
    rows = prod(module.call.input_shapes[0][:-1])
    fused = module.first("aten.scaled_dot_product_attention")
    if fused is not None:
        *lines, queries, head_width = fused.x.shape
        keys = fused.argument("key").shape[-2]
    else:
        scores = module.first("aten.bmm", "aten.baddbmm")
        if scores is None:
            return None
        *lines, queries, keys = scores.out.shape
        head_width = scores.signature.inputs[-1].shape[-2]
    batch = max(rows // queries, 1)
    return AttentionSize(batch, prod(lines) // batch, queries, keys, head_width)


def _softmax_ops(rows: int, width: int) -> int:
    """Exponentials, additions, divisions."""
    return rows * (width + max(width - 1, 0) + width)


def _thop_softmax(module: CountedModule, op: CountedOp) -> int:
    width = op.x.shape[op.argument("dim")] if op.x.shape else 1
    rows = op.x.elements // width if width else 0
    extra = {"Softmin": op.x.elements, "LogSoftmax": rows}.get(module.kind, 0)
    return _softmax_ops(rows, width) + extra


def _thop_average_pool(module: CountedModule, op: CountedOp) -> int:
    """One addition per tap, taps on counted padding included, and one division per output."""
    dims = int(op.name[-2])
    kernel = per_axis(op.argument("kernel_size"), dims)
    stride = per_axis(op.argument("stride") or kernel, dims)
    padding = per_axis(op.argument("padding", 0), dims)
    margins = padding if op.argument("count_include_pad", True) else (0,) * dims
    taps = 1
    for size, count, k, s, p, margin in zip(
        op.x.shape[-dims:], op.out.shape[-dims:], kernel, stride, padding, margins, strict=True
    ):
        starts = [index * s - p for index in range(count)]
        taps *= sum(max(min(start + k, size + margin) - max(start, -margin), 0) for start in starts)
    return prod(op.x.shape[:-dims]) * taps + op.out.elements


def _thop_adaptive_pool(module: CountedModule, op: CountedOp) -> int:
    """One addition per tap and one division per output."""
    taps = prod(adaptive_taps(size, out) for size, out in zip(op.x.shape, op.out.shape, strict=True))
    return taps + op.out.elements


def _thop_recurrent(module: CountedModule, op: CountedOp) -> int:
    """Gate sums, biases, products of gates and states; activations are free."""
    total = 0
    for cell in _recurrent_cells(op):
        gate = cell.hidden * (cell.inputs + cell.recurrent + 1 + (2 if cell.has_bias else 0))
        # LSTM: c = f·c + i·g and o·tanh(c); GRU: r·(…) and h = (1 − z)·n + z·h.
        updates = 0 if cell.gates == 1 else 4
        total += cell.gates * gate + cell.hidden * (updates + cell.projection)
    return total * prod(op.x.shape[:-1])  # batch times steps; packed data are already flat


_ThopRule = tuple[str, str, str | None, Callable[[CountedModule, CountedOp], int]]

# A rule applies where the class name matches and the module itself runs one of the operators. Without a category, the
# operator's own is used.
_THOP_RULES: tuple[_ThopRule, ...] = (
    (r"Conv(Transpose)?[123][dD]", " ".join(_CONVOLUTIONS), None, lambda module, op: op.macs),
    (r"Linear$", "linear", None, lambda module, op: op.macs),
    (r"^Bilinear$", "bilinear", None, lambda module, op: op.macs),
    (
        r"(Batch|Instance|Layer|Group|RMS)Norm",
        "batch_norm instance_norm layer_norm group_norm rms_norm",
        Category.NORM,
        lambda module, op: op.x.elements * (4 if op.has("weight") else 2),
    ),
    (r"PReLU$", "prelu", Category.ACTIVATION, lambda module, op: op.x.elements),
    (r"^(Log)?Softmax|^Softmin$", "softmax log_softmax", Category.SOFTMAX, _thop_softmax),
    (r"^AvgPool[123]d", "avg_pool1d avg_pool2d avg_pool3d", Category.POOLING, _thop_average_pool),
    (
        r"^AdaptiveAvgPool",
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        Category.POOLING,
        _thop_adaptive_pool,
    ),
    (r"^Upsampl", "upsample_linear1d", Category.INTERPOLATION, lambda module, op: 5 * op.out.elements),
    (r"^Upsampl", "upsample_bilinear2d", Category.INTERPOLATION, lambda module, op: 11 * op.out.elements),
    (r"^Upsampl", "upsample_bicubic2d", Category.INTERPOLATION, lambda module, op: 259 * op.out.elements),
    (r"^Upsampl", "upsample_trilinear3d", Category.INTERPOLATION, lambda module, op: 31 * op.out.elements),
    (
        r"(LSTM|GRU|RNN)(Cell)?$",
        " ".join(name.removeprefix("aten.") for name in sorted(RECURRENT_OPS)),
        Category.RECURRENT,
        _thop_recurrent,
    ),
)

# Products that thop sees outside its own layers. A bare mm may be `torch.mm`, which it does not see; `@` is likelier.
_THOP_FUNCTIONS = frozenset(
    f"aten.{name}" for name in ("linear", "mm", "bmm", "mv", "dot", "scaled_dot_product_attention")
)


def _thop_counts(module: CountedModule) -> list[tuple[str, int]] | None:
    """Return what thop's rule for the class counts; None where it has no rule."""
    if module.kind == "MultiheadAttention" and module.first("aten.linear"):
        counts = [(category_of(op, module), op.macs) for op in module.ops if op.macs]
        size = _attention_size(module)
        if size is not None:
            counts.append((Category.SOFTMAX, _softmax_ops(size.batch * size.heads * size.queries, size.keys)))
        return counts
    for pattern, names, category, rule in _THOP_RULES:
        op = module.first(*(f"aten.{name}" for name in names.split()))
        if op is not None and re.search(pattern, module.kind):
            return [(category or category_of(op, module), rule(module, op))]
    return None


@convention("thop", unit="macs", by_module=True)
def thop_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Count as ultralytics-thop's profile: MACs, with norms, pooling and softmax at rates of its own.

    Modules of classes it has a rule for; outside them `@`, `bmm`, `einsum`, `F.linear` and fused attention.
    thop goes by inheritance, and a trace knows only the class name: a class counts as a layer of torch when its name
    says so (`StdConv2d`, `LayerNorm2d`) and it runs that operator itself.
    """
    is_covered: list[bool] = []  # by its own rule, or by that of a module around it
    for module in modules:
        counts = _thop_counts(module)
        parent = module.call.parent
        is_covered.append(counts is not None or (parent is not None and is_covered[parent]))
        if not is_covered[-1]:
            counts = [(category_of(op, module), op.macs) for op in module.ops if op.name in _THOP_FUNCTIONS]
        for category, amount in counts or ():
            yield Entry(module.call.index, category, amount)


# Their projections are modules, so torchinfo sees no leaf; they are not called as modules, so a trace sees no child.
_USES_CHILDREN = ("MultiheadAttention", "ShiftedWindowAttention", "ShiftedWindowAttentionV2")


@convention("torchinfo", unit="macs", by_module=True)
def torchinfo_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Count as torchinfo's "mult-adds": parameters of each leaf module times its outputs, so biases and norms too.

    A linear layer counts once per sample, however many rows it has. Work without parameters counts nothing, as in
    attention. A weight that two modules share counts with the first.
    """
    params: dict[str, int] = {}  # by path: the first call of a module holds them
    for module in modules:
        call = module.call
        count = params.setdefault(call.path, call.params)
        is_leaf = call.is_leaf and call.kind not in _USES_CHILDREN
        if not (is_leaf and count and call.output_shapes and module.ops):
            continue
        shape, op = call.output_shapes[0], next((op for op in module.ops if op.macs), module.ops[0])
        is_recurrent = op.name in RECURRENT_OPS
        sizes = (*shape[:1], *shape[2:]) if "Conv" in call.kind else shape[:2] if is_recurrent else shape[:1]
        bias = op.argument("bias").elements if op.has("bias") else 0
        for category, amount in ((category_of(op, module), count - bias), (Category.BIAS, bias)):
            if amount:
                yield Entry(call.index, category, amount * prod(sizes))


def _linear(module: CountedModule) -> _Counts:
    op = module.first("aten.linear")
    if op is not None:
        yield Category.LINEAR, op.macs
        if op.has("bias"):
            yield Category.BIAS, op.out.elements


def _convolution(module: CountedModule) -> _Counts:
    """The first two axes are batch and channels, even where there is no batch."""
    op = module.first_of("conv")
    if op is not None:
        weight = op.argument("weight").shape
        positions = op.x.shape[2:] if "transpose" in op.name else op.out.shape[2:]
        yield Category.CONVOLUTION, op.x.shape[0] * prod(positions) * prod(weight)
        if op.has("bias"):
            yield Category.BIAS, op.x.shape[0] * prod(op.out.shape[1:])


def _by_operator(kind: str, category: str, amount: Callable[[CountedOp], int]) -> Callable[[CountedModule], _Counts]:
    """Return a rule that counts the first operator of a kind that the module runs itself."""

    def rule(module: CountedModule) -> _Counts:
        op = module.first_of(kind)
        if op is not None:
            yield category, amount(op)

    return rule


_activation = _by_operator("activation", Category.ACTIVATION, lambda op: op.out.elements)
_pool = _by_operator("pooling", Category.POOLING, lambda op: op.x.elements)
# Twice the elements where there is an attribute `affine`, which a LayerNorm names differently.
_affine_norm = _by_operator("norm", Category.NORM, lambda op: op.x.elements * (2 if op.has("weight") else 1))


def _upsample(module: CountedModule) -> _Counts:
    """The outputs of one image, however many there are."""
    for shape in module.call.output_shapes[:1]:
        yield Category.INTERPOLATION, prod(shape[1:])


def _recurrent(module: CountedModule) -> _Counts:
    """Gate products, sums, biases and updates; a projection is left out."""
    op = module.first(*RECURRENT_OPS)
    if op is None:
        return
    total = 0
    for cell in _recurrent_cells(op):
        products = cell.gates * cell.hidden * (cell.inputs + cell.recurrent)
        biases = 2 * cell.gates * cell.hidden if cell.has_bias else 0
        updates = cell.hidden * {1: 1, 3: 7, 4: 10}[cell.gates]
        total += products + biases + updates
    yield Category.RECURRENT, total * prod(op.x.shape[:-1])


def _multihead_attention(module: CountedModule) -> _Counts:
    """Key and value projections as if square; the output projection as wide as the values."""
    size = _attention_size(module)
    if size is None or len(module.call.input_shapes) < 3:
        return
    query, key, value = (shape[-1] for shape in module.call.input_shapes[:3])
    batch, queries = size.batch, size.queries
    keys = prod(module.call.input_shapes[1][:-1]) // batch
    has_bias = any(op.has("bias") for op in module.ops if op.name == "aten.linear")
    yield Category.LINEAR, batch * (queries * query**2 + keys * key**2 + keys * value**2 + queries * value**2)
    yield Category.BIAS, batch * ((queries + 2 * keys) * query * has_bias + queries * value)
    yield Category.ELEMENTWISE, batch * queries * query
    widths = query // size.heads + value // size.heads
    yield Category.ATTENTION, batch * size.heads * queries * keys * widths
    yield Category.SOFTMAX, batch * size.heads * queries * keys


def _timm_attention(module: CountedModule) -> _Counts:
    size = _attention_size(module)
    if size is None:
        return
    scores = size.batch * size.heads * size.queries**2
    yield Category.ELEMENTWISE, size.batch * size.heads * size.queries * size.head_width
    yield Category.ATTENTION, 2 * scores * size.head_width
    yield Category.SOFTMAX, scores


_PTFLOPS_MODULES: dict[str, Callable[[CountedModule], _Counts]] = {
    **{f"{name}{dims}": _convolution for name in ("Conv", "ConvTranspose") for dims in _DIMS},
    "Linear": _linear,
    **dict.fromkeys(("ReLU", "PReLU", "ELU", "LeakyReLU", "ReLU6", "GELU"), _activation),
    **{f"{a}{name}Pool{dims}": _pool for a in ("", "Adaptive") for name in ("Max", "Avg") for dims in _DIMS},
    **{f"{name}Norm{dims}": _affine_norm for name in ("Batch", "Instance") for dims in _DIMS},
    "GroupNorm": _affine_norm,
    "LayerNorm": _by_operator("norm", Category.NORM, lambda op: op.x.elements),
    "Upsample": _upsample,
    **dict.fromkeys(("RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"), _recurrent),
    "MultiheadAttention": _multihead_attention,
}

# Where the class lives that ptflops imports as timm.models.vision_transformer.Attention: now, and in older versions.
_TIMM_ATTENTION = ("timm.layers.attention", "timm.models.vision_transformer")


def _ptflops_rule(module: CountedModule, children: set[str]) -> Callable[[CountedModule], _Counts] | None:
    """Return the rule of a class that ptflops knows: the very class of torch or timm, not a namesake or a subclass.

    Older files do not record where a class is defined; there, torch's layers are those that call no other module.
    """
    package = module.call.defined_in
    if module.kind == "Attention" and {"qkv", "q_norm", "k_norm", "proj"} <= children:
        return _timm_attention if package in ("", *_TIMM_ATTENTION) else None
    is_torchs = package.startswith("torch.nn.") if package else module.call.is_leaf
    return _PTFLOPS_MODULES.get(module.kind) if is_torchs else None


def _interpolate(op: CountedOp) -> int:
    """Outputs by size, or inputs times the scale that was passed, which may be a fraction."""
    scale = op.argument("scale_factors")
    return op.out.elements if scale is None else int(op.x.elements * prod(scale))


def _elementwise(op: CountedOp) -> int:
    """ptflops aligns shapes from the left, where torch aligns them from the right; the larger side counts."""
    shapes = [value.shape for value in op.signature.args[:2] if isinstance(value, TensorInfo)]
    return prod(max(sizes) for sizes in itertools.zip_longest(*shapes, fillvalue=1))


_PER_INPUT = "relu prelu elu relu6 gelu silu".split()
_POOLS = [f"{prefix}{name}_pool{dims}" for prefix in ("", "adaptive_") for name in ("max", "avg") for dims in _DIMS]
_INTERPOLATIONS = [
    *(f"upsample_{name}" for name in "nearest1d nearest2d nearest3d linear1d bilinear2d trilinear3d bicubic2d".split()),
    *(f"_upsample_nearest_exact{dims}" for dims in _DIMS),
]
_PTFLOPS_FUNCTIONS: dict[str, tuple[str | None, Callable[[CountedOp], int]]] = {
    **{f"aten.{name}": (Category.ACTIVATION, lambda op: op.x.elements) for name in _PER_INPUT},
    **{f"aten.{name}": (Category.POOLING, lambda op: op.x.elements) for name in _POOLS},
    **{f"aten.max_pool{dims}_with_indices": (Category.POOLING, lambda op: op.x.elements) for dims in _DIMS},
    "aten.softmax": (Category.SOFTMAX, lambda op: op.x.elements),
    **{f"aten.{name}": (Category.ELEMENTWISE, _elementwise) for name in ("mul", "add")},
    **{f"aten.{name}": (Category.INTERPOLATION, _interpolate) for name in _INTERPOLATIONS},
    **{f"aten.{name}": (None, lambda op: op.macs) for name in ("mm", "bmm")},
    # The vector's length stands in for a width.
    **{f"aten.{name}": (None, lambda op: op.macs * op.x.shape[-1]) for name in ("mv", "dot")},
    **{f"aten.{name}": (None, lambda op: op.macs + op.x.elements) for name in ("addmm", "baddbmm")},
}

# ptflops replaces functions by name while the model runs. It sees `torch.matmul(a, b)`, `F.softmax(x)` and `x.mul(y)`.
# It does not see `a @ b`, `x.softmax()`, `a * b`, the product inside an einsum, or a function that a module stored
# before. A trace holds one operator for both forms, so the exceptions are listed: products and functions count unless
# they are unseen, additions and multiplications only where they are seen. When a library's source changes, compare
# with the package again: tests/cost/test_ptflops_on_timm.py.
_UNSEEN_IN_TIMM = frozenset(("aten.mm", "aten.bmm", "aten.mv", "aten.dot", "aten.softmax"))
_UNSEEN = {
    "TransformerEncoderLayer": frozenset(("aten.relu", "aten.gelu")),
    "TransformerDecoderLayer": frozenset(("aten.relu", "aten.gelu")),
    "GELUActivation": frozenset(("aten.gelu",)),
    "Softmin": frozenset(("aten.softmax",)),
    "MultiscaleAttention": frozenset(("aten.softmax",)),
}
_SEEN = {
    "LocalResponseNorm": frozenset(("aten.mul", "aten.add")),
    "ConvNeXtBlock": frozenset(("aten.mul",)),
    "LambdaLayer": frozenset(("aten.softmax",)),
}
# Of torchvision's attention layers that write products in several ways: which of them, in order, are unseen.
_UNSEEN_PRODUCTS = {
    "RelativePositionalMultiHeadAttention": (0, 1),
    "MultiscaleAttention": (1, 2),
    "ShiftedWindowAttentionV2": (0,),
}


def _seen_ops(module: CountedModule) -> Iterator[CountedOp]:
    """Yield the operators of a layer that Python code calls by a name which ptflops replaces."""
    unseen = {"aten.mul", "aten.add", *_UNSEEN.get(module.kind, ())}
    if module.call.defined_in.startswith("timm."):
        unseen |= _UNSEEN_IN_TIMM
    unseen -= _SEEN.get(module.kind, frozenset())
    product_index = itertools.count()
    for op in module.ops:
        if op.name == "aten.bmm" and next(product_index) in _UNSEEN_PRODUCTS.get(module.kind, ()):
            continue
        is_in_place_sum = op.signature.op in ("aten.mul_", "aten.add_")
        if op.name in _PTFLOPS_FUNCTIONS and op.name not in unseen and not is_in_place_sum:
            yield op


def _ptflops_function_counts(module: CountedModule) -> _Counts:
    for op in _seen_ops(module):
        category, rule = _PTFLOPS_FUNCTIONS[op.name]
        yield category or category_of(op, module), rule(op)
    if module.kind == "Upsample" and module.call.is_leaf and not any("upsample" in op.name for op in module.ops):
        # A mode that the trace decomposes is still one call of F.interpolate.
        for shape in module.call.output_shapes[:1]:
            yield Category.INTERPOLATION, prod(shape)


def _tree_paths(modules: Sequence[CountedModule]) -> Callable[[str], int]:
    """Return a function that tells on how many ways from the root a module is reached; a shared one has several.

    ptflops adds up the whole tree, and meets a shared module once in each module that holds it. The trace shows
    those that call it; the module that its path names may hold it without calling it.
    """
    parents: dict[str, set[str]] = {module.call.path: set() for module in modules}
    for module in modules:
        if module.call.parent is not None:
            parents[module.call.path].add(modules[module.call.parent].call.path)
    for path, callers in parents.items():
        holder = path.rpartition(".")[0]
        if len(callers) > 1 and holder in parents:
            callers.add(holder)

    def count(path: str, below: frozenset[str] = frozenset()) -> int:
        # A module that calls itself, directly or through others, is no parent of itself.
        return sum(count(parent, below | {path}) for parent in parents[path] - below - {path}) or 1

    return cache(count)


def _ptflops_module_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Yield what hooks on modules count. Nothing is counted inside a module that has a rule of its own."""
    children: list[set[str]] = [set() for _ in modules]
    for module in modules:
        if module.call.parent is not None:
            children[module.call.parent].add(module.call.path.rpartition(".")[2])
    tree_paths = _tree_paths(modules)
    is_covered: list[bool] = []  # by its own rule, or by that of a module around it
    for module, names in zip(modules, children, strict=True):
        rule = _ptflops_rule(module, names)
        parent = module.call.parent
        is_inside = parent is not None and is_covered[parent]
        is_covered.append(is_inside or rule is not None)
        if rule is not None and not is_inside:
            for category, amount in rule(module):
                yield Entry(module.call.index, category, amount * tree_paths(module.call.path))


@convention("ptflops", unit="macs", by_module=True)
def ptflops_entries(modules: Sequence[CountedModule]) -> Iterator[Entry]:
    """Count as ptflops' get_model_complexity_info with its default backend: bias, norms and activations are MACs.

    Modules per sample, functions for the whole batch; an activation or pooling module is counted as both.
    The model's first input is taken to be positional, and its first axis the batch.
    """
    by_module = list(_ptflops_module_entries(modules))
    yield from by_module
    shapes = modules[0].call.input_shapes
    batch = shapes[0][0] if shapes and shapes[0] else 1
    if batch > 1:
        # What dividing the sum by the batch takes away, rounded so that the whole is rounded once.
        total = kept = 0
        for entry in by_module:
            total += entry.amount
            share = total // batch - kept
            kept += share
            yield Entry(entry.layer, Category.AVERAGING, share - entry.amount)
    for module in modules:
        for category, amount in _ptflops_function_counts(module):
            yield Entry(module.call.index, category, amount)
