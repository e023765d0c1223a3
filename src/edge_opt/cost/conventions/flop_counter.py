"""How torch's own FlopCounterMode counts: two per MAC of the products it has formulas for, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_opt.cost.conventions.ledger import RECURRENT_OPS, Entry, Layer, Op, recurrent_cells, subject_of
from edge_opt.cost.conventions.reconciliation import convention
from edge_opt.records.costs import TensorInfo

_ATTENTION = "aten.scaled_dot_product_attention"
_COUNTED = RECURRENT_OPS | frozenset((
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.conv_transpose1d", "aten.conv_transpose2d",
    "aten.conv_transpose3d", "aten.convolution", "aten._convolution", "aten.linear", "aten.mm", "aten.bmm",
    "aten.addmm", "aten.baddbmm", "aten._scaled_mm", _ATTENTION,
))  # fmt: skip


def _products(layers: Sequence[Layer]) -> Iterator[tuple[Layer, Op]]:
    for layer in layers:
        for op in layer.ops:
            if op.name in _COUNTED:
                yield layer, op


@convention(
    "torch",
    unit="flops",
    description="torch.utils.flop_counter.FlopCounterMode on the meta device: two per MAC of every product",
    by_module=False,
)
def entries(layers: Sequence[Layer]) -> Iterator[Entry]:
    """Attention and recurrent layers come apart into products on the meta device, and are counted whole."""
    for layer, op in _products(layers):
        yield Entry(layer.call.index, subject_of(op, layer), 2 * op.macs)


@convention(
    "torch-cpu",
    unit="flops",
    description="the same FlopCounterMode on a CPU, where fused attention and LSTMs are opaque to it and count as 0",
    by_module=False,
)
def entries_on_cpu(layers: Sequence[Layer]) -> Iterator[Entry]:
    """Without torch's fast path for attention modules, which hides them too (`eval` under `no_grad`)."""
    for layer, op in _products(layers):
        if not _is_opaque_on_cpu(op):
            yield Entry(layer.call.index, subject_of(op, layer), 2 * op.macs)


def _is_opaque_on_cpu(op: Op) -> bool:
    """Whether the CPU runs it as one kernel that has no formula."""
    if op.name == "aten.lstm":
        return not any(cell.projection for cell in recurrent_cells(op))
    if op.name != _ATTENTION:
        return False
    query, key, value = (op.argument(name) for name in ("query", "key", "value"))
    mask = op.argument("attn_mask")
    return (
        len(query.shape) == len(key.shape) == len(value.shape) == 4
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and not op.argument("dropout_p")
        and (not isinstance(mask, TensorInfo) or len(mask.shape) in (2, 4))
    )
