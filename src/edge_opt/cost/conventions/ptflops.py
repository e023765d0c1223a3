"""How ptflops counts (its default backend): modules by exact class, plus the functions it patches in Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod

from edge_opt.cost.conventions.ledger import (
    ACTIVATION,
    ATTENTION,
    AVERAGING,
    BIAS,
    CONVOLUTION,
    ELEMENTWISE,
    INTERPOLATION,
    LINEAR,
    NORM,
    POOLING,
    RECURRENT,
    RECURRENT_OPS,
    SOFTMAX,
    Entry,
    Layer,
    Op,
    attention_in,
    recurrent_cells,
    recurrent_rows,
    subject_of,
)
from edge_opt.cost.conventions.reconciliation import convention
from edge_opt.records.costs import TensorInfo

Counted = Iterator[tuple[str, int]]

_DIMS = ("1d", "2d", "3d")


def _linear(layer: Layer) -> Counted:
    op = layer.first("aten.linear")
    if op is not None:
        yield LINEAR, op.macs
        if op.has("bias"):
            yield BIAS, op.out.elements


def _convolution(layer: Layer) -> Counted:
    """The first two axes are batch and channels, even where there is no batch."""
    op = layer.first_of("conv")
    if op is not None:
        weight = op.argument("weight").shape
        positions = op.x.shape[2:] if "transpose" in op.name else op.out.shape[2:]
        yield CONVOLUTION, op.x.shape[0] * prod(positions) * prod(weight)
        if op.has("bias"):
            yield BIAS, op.x.shape[0] * prod(op.out.shape[1:])


def _activation(layer: Layer) -> Counted:
    op = layer.first_of("activation")
    if op is not None:
        yield ACTIVATION, op.out.elements


def _pool(layer: Layer) -> Counted:
    op = layer.first_of("pooling")
    if op is not None:
        yield POOLING, op.x.elements


def _norm(layer: Layer) -> Counted:
    """Twice the elements where there is an attribute `affine`, which a LayerNorm calls otherwise."""
    op = layer.first_of("norm")
    if op is not None:
        is_affine = op.has("weight") and layer.kind != "LayerNorm"
        yield NORM, op.x.elements * (2 if is_affine else 1)


def _upsample(layer: Layer) -> Counted:
    """The outputs of one image, however many there are."""
    for shape in layer.call.output_shapes[:1]:
        yield INTERPOLATION, prod(shape[1:])


def _recurrent(layer: Layer) -> Counted:
    """Gate products, sums, biases and updates; a projection is left out."""
    op = layer.first(*RECURRENT_OPS)
    if op is None:
        return
    total = 0
    for cell in recurrent_cells(op):
        products = cell.gates * cell.hidden * (cell.inputs + cell.recurrent)
        biases = 2 * cell.gates * cell.hidden if cell.has_bias else 0
        updates = cell.hidden * {1: 1, 3: 7, 4: 10}[cell.gates]
        total += products + biases + updates
    yield RECURRENT, total * recurrent_rows(op)


def _multihead_attention(layer: Layer) -> Counted:
    """Key and value projections as if square; the output projection as wide as the values."""
    found = attention_in(layer)
    if found is None or len(layer.call.input_shapes) < 3:
        return
    query, key, value = (shape[-1] for shape in layer.call.input_shapes[:3])
    batch, queries = found.batch, found.queries
    keys = prod(layer.call.input_shapes[1][:-1]) // batch
    has_bias = any(op.has("bias") for op in layer.ops if op.name == "aten.linear")
    yield LINEAR, batch * (queries * query**2 + keys * key**2 + keys * value**2 + queries * value**2)
    yield BIAS, batch * ((queries + 2 * keys) * query * has_bias + queries * value)
    yield ELEMENTWISE, batch * queries * query
    widths = query // found.heads + value // found.heads
    yield ATTENTION, batch * found.heads * queries * keys * widths
    yield SOFTMAX, batch * found.heads * queries * keys


def _timm_attention(layer: Layer) -> Counted:
    found = attention_in(layer)
    if found is None:
        return
    scores = found.batch * found.heads * found.queries**2
    yield ELEMENTWISE, found.batch * found.heads * found.queries * found.head_width
    yield ATTENTION, 2 * scores * found.head_width
    yield SOFTMAX, scores


_MODULES: dict[str, Callable[[Layer], Counted]] = {
    **{f"{name}{dims}": _convolution for name in ("Conv", "ConvTranspose") for dims in _DIMS},
    "Linear": _linear,
    **dict.fromkeys(("ReLU", "PReLU", "ELU", "LeakyReLU", "ReLU6", "GELU"), _activation),
    **{f"{a}{name}Pool{dims}": _pool for a in ("", "Adaptive") for name in ("Max", "Avg") for dims in _DIMS},
    **{f"{name}Norm{dims}": _norm for name in ("Batch", "Instance") for dims in _DIMS},
    "GroupNorm": _norm,
    "LayerNorm": _norm,
    "Upsample": _upsample,
    **dict.fromkeys(("RNN", "GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell"), _recurrent),
    "MultiheadAttention": _multihead_attention,
}


# Where the class lives that ptflops imports as timm.models.vision_transformer.Attention: now, and in older versions.
_TIMM_ATTENTION = ("timm.layers.attention", "timm.models.vision_transformer")


def _module_rule(layer: Layer, children: frozenset[str]) -> Callable[[Layer], Counted] | None:
    """The rule of a class it knows, which is the very class of torch or timm: not a namesake, and not a subclass.

    Older files do not tell where a class is from; there, torch's layers are known by calling no others.
    """
    home = layer.call.defined_in
    if layer.kind == "Attention" and {"qkv", "q_norm", "k_norm", "proj"} <= children:
        return _timm_attention if home in ("", *_TIMM_ATTENTION) else None
    is_torchs = home.startswith("torch.nn.") if home else layer.call.is_leaf
    return _MODULES.get(layer.kind) if is_torchs else None


def _macs(op: Op) -> int:
    return op.macs


def _elements_in(op: Op) -> int:
    return op.x.elements


def _product(op: Op) -> int:
    """By the left operand as it was written."""
    left, right = op.operands
    return prod(left) * right[-1]


def _matrix_vector(op: Op) -> int:
    """The vector's length stands in for a width."""
    return op.macs * op.x.shape[-1]


def _product_plus(op: Op) -> int:
    return op.macs + op.x.elements


def _interpolate(op: Op) -> int:
    """Outputs by size, or inputs times the scale as it was given, which may be a fraction."""
    scale = op.argument("scale_factors")
    if scale is None:
        return op.out.elements
    return int(op.x.elements * prod(scale))


def _elementwise(op: Op) -> int:
    """It lines shapes up from the left, where torch does so from the right; the larger side counts."""
    shapes = [value.shape for value in op.signature.args[:2] if isinstance(value, TensorInfo)]
    return prod(max(sizes) for sizes in itertools.zip_longest(*shapes, fillvalue=1))


_FUNCTIONS: dict[str, tuple[str | None, Callable[[Op], int]]] = {
    **{f"aten.{name}": (ACTIVATION, _elements_in) for name in ("relu", "prelu", "elu", "relu6", "gelu", "silu")},
    **{
        f"aten.{prefix}{name}_pool{dims}": (POOLING, _elements_in)
        for prefix in ("", "adaptive_")
        for name in ("max", "avg")
        for dims in _DIMS
    },
    **{f"aten.max_pool{dims}_with_indices": (POOLING, _elements_in) for dims in _DIMS},
    "aten.softmax": (SOFTMAX, _elements_in),
    **{f"aten.{name}": (ELEMENTWISE, _elementwise) for name in ("mul", "add")},
    **{
        f"aten.upsample_{name}": (INTERPOLATION, _interpolate)
        for name in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
    },
    **{f"aten._upsample_nearest_exact{dims}": (INTERPOLATION, _interpolate) for dims in _DIMS},
    "aten.mm": (None, _macs),
    "aten.mv": (None, _matrix_vector),
    "aten.dot": (None, _matrix_vector),
    "aten.bmm": (None, _product),
    "aten.addmm": (None, _product_plus),
    "aten.baddbmm": (None, _product_plus),
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


def _seen_ops(layer: Layer) -> Iterator[Op]:
    """Yield the operators of a layer that Python code calls by a name which ptflops replaces."""
    unseen = {"aten.mul", "aten.add", *_UNSEEN.get(layer.kind, ())}
    if layer.call.defined_in.startswith("timm."):
        unseen |= _UNSEEN_IN_TIMM
    unseen -= _SEEN.get(layer.kind, frozenset())
    product_index = itertools.count()
    for op in layer.ops:
        if op.name == "aten.bmm" and next(product_index) in _UNSEEN_PRODUCTS.get(layer.kind, ()):
            continue
        is_in_place_sum = op.signature.op in ("aten.mul_", "aten.add_")
        if op.name in _FUNCTIONS and op.name not in unseen and not is_in_place_sum:
            yield op


def _functional(layer: Layer) -> Counted:
    for op in _seen_ops(layer):
        subject, rule = _FUNCTIONS[op.name]
        yield subject or subject_of(op, layer), rule(op)
    if layer.kind == "Upsample" and layer.call.is_leaf and not any("upsample" in op.name for op in layer.ops):
        # A mode that the trace takes apart is still one call of F.interpolate.
        for shape in layer.call.output_shapes[:1]:
            yield INTERPOLATION, prod(shape)


def _by_module(layers: Sequence[Layer]) -> Iterator[Entry]:
    """What hooks on modules count. Inside a module with a rule of its own nothing more is looked at."""
    children: list[set[str]] = [set() for _ in layers]
    for layer in layers:
        if layer.call.parent is not None:
            children[layer.call.parent].add(layer.call.path.rpartition(".")[2])
    is_hidden: list[bool] = []
    has_rule: list[bool] = []
    for layer, names in zip(layers, children, strict=True):
        rule = _module_rule(layer, frozenset(names))
        parent = layer.call.parent
        is_hidden.append(parent is not None and (is_hidden[parent] or has_rule[parent]))
        has_rule.append(rule is not None)
        if rule is not None and not is_hidden[-1]:
            for subject, amount in rule(layer):
                # The sum goes down the tree, and meets a module once in every place where it hangs.
                yield Entry(layer.call.index, subject, amount * layer.call.places)


@convention(
    "ptflops",
    unit="macs",
    description="ptflops' get_model_complexity_info with its default backend: 'MACs' with bias, norms and activations",
    by_module=True,
)
def entries(layers: Sequence[Layer]) -> Iterator[Entry]:
    """Modules per sample, functions for the whole batch; an activation or pooling module is counted as both.

    Functions count when they are called by the name that ptflops replaces: `torch.matmul(a, b)` and not `a @ b`,
    `F.softmax(x)` and not `x.softmax()`. The model's first input is taken to be positional, and its first axis the
    batch.
    """
    by_module = list(_by_module(layers))
    yield from by_module
    shapes = layers[0].call.input_shapes
    batch = shapes[0][0] if shapes and shapes[0] else 1
    if batch > 1:
        yield from _averaged(by_module, batch)
    for layer in layers:
        for subject, amount in _functional(layer):
            yield Entry(layer.call.index, subject, amount)


def _averaged(entries: Sequence[Entry], batch: int) -> Iterator[Entry]:
    """What dividing the sum by the batch takes away, rounded so that the whole is rounded once."""
    total = kept = 0
    for entry in entries:
        total += entry.amount
        share = total // batch - kept
        kept += share
        yield Entry(entry.layer, AVERAGING, share - entry.amount)
