"""Operators as passes over memory, fused or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edge_opt.records.costs import OpCall, OpSignature, TensorInfo
from edge_opt.records.devices import Precision
from edge_opt.records.profiles import ModelProfile

ITEMSIZE: dict[Precision, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int4": 2}
# Bytes per value of matrices of weights where that is not the size of everything else. Groups of 128 share a half of
# scale and a zero of 4 bits: 4 + 20 / 128 bits, as `int4` of `weight_formats`.
WEIGHT_ITEMSIZE: dict[Precision, float] = {"int4": (4 + 20 / 128) / 8}
_FLOATING = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}

# What a pass computes in: the asked precision, int8 as the model has it already, or nothing that a peak would limit.
Arithmetic = Literal["asked", "int8", "none"]
Grouping = Literal["none", "grouped", "depthwise"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: everything between reading and writing that memory does not see. `includes` are fused modules.

    `grouping` is of a convolution: in groups of several channels, or depthwise, of one or two. `steps` follow each
    other in a recurrent layer, each for every layer of it and direction.
    """

    module: int
    includes: tuple[int, ...]
    macs: int
    flops: int
    bytes_read: int
    bytes_written: int
    arithmetic: Arithmetic
    grouping: Grouping
    is_unpriced: bool
    steps: int = 1


@dataclass(frozen=True, slots=True)
class _Scaled:
    """A signature at a precision: bytes as its price has them, and each input by itself."""

    bytes_read: int
    bytes_written: int
    inputs: tuple[int, ...]


def passes(profile: ModelProfile, precision: Precision) -> tuple[Pass, ...]:
    """One pass per operator that is not free, in order of execution.

    Floating tensors take the precision's size. Integers keep theirs: indices, token ids and masks are what they are,
    and arithmetic on them is counted as movement.
    """
    sizes = _sizes(profile, precision)
    return tuple(_single(profile, call, sizes[call.signature]) for call in _working(profile))


def fused_passes(profile: ModelProfile, precision: Precision) -> tuple[Pass, ...]:
    """The same with one pass per convolution or product and what directly follows on its result.

    That is a batch norm with running statistics and an activation. Norms that need statistics of their own input
    cannot start before it is complete, so they stay apart. A result that anybody else reads is still written.
    """
    sizes = _sizes(profile, precision)
    calls = _working(profile)
    readers: dict[int, list[int]] = {}
    for call in calls:
        for storage in set(call.reads):
            readers.setdefault(storage, []).append(call.index)
    found: list[Pass] = []
    tail: OpCall | None = None  # the last operator of a pass that may still grow
    for call in calls:
        result = None if tail is None else _result(tail)
        single = _single(profile, call, sizes[call.signature])
        if tail is not None and result is not None and _continues(profile, tail, call, result, readers.get(result, [])):
            handed_over = sum(
                size
                for size, storage in zip(sizes[call.signature].inputs, call.reads, strict=True)
                if storage == result
            )
            found[-1] = _joined(found[-1], single, handed_over)
            tail = call
        else:
            found.append(single)
            tail = call if profile.prices[call.signature].kind in ("conv", "matmul") else None
    return tuple(found)


def _working(profile: ModelProfile) -> list[OpCall]:
    return [call for call in profile.trace.ops if profile.prices[call.signature].status != "free"]


def _single(profile: ModelProfile, call: OpCall, size: _Scaled) -> Pass:
    price, signature = profile.prices[call.signature], profile.trace.signatures[call.signature]
    return Pass(
        module=call.module,
        includes=(),
        macs=price.cost.macs,
        flops=price.cost.flops,
        bytes_read=size.bytes_read,
        bytes_written=size.bytes_written,
        arithmetic=_arithmetic(signature, price.cost.macs),
        grouping=_grouping(signature) if price.kind == "conv" else "none",
        is_unpriced=price.status == "unpriced",
        steps=_steps(signature, price.cost.macs) if price.kind == "recurrent" else 1,
    )


def _steps(signature: OpSignature, macs: int) -> int:
    """Steps of a recurrent layer, from what it multiplies: every matrix once per step and sequence."""
    matrices = [tensor for tensor in signature.inputs if len(tensor.shape) == 2]
    states = [tensor for tensor in signature.inputs[1:] if len(tensor.shape) == 3]
    batch = states[0].shape[1] if states else 1
    once = batch * sum(tensor.elements for tensor in matrices)
    return max(1, macs // once) * max(1, len(matrices) // 2) if once else 1


def _grouping(signature: OpSignature) -> Grouping:
    groups = signature.argument("groups", 1)
    if not isinstance(groups, int) or groups <= 1:
        return "none"
    is_transposed = "transpose" in signature.op or signature.argument("transposed", False) is True
    weight = signature.inputs[1].shape
    channels = weight[0] // groups if is_transposed else weight[1]
    return "depthwise" if channels <= 2 else "grouped"


def _arithmetic(signature: OpSignature, macs: int) -> Arithmetic:
    if any(_itemsize(tensor) for tensor in (*signature.inputs, *signature.outputs)):
        return "asked"
    return "int8" if macs else "none"


def _joined(head: Pass, follower: Pass, handed_over: int) -> Pass:
    """A pass with one operator more: what the head wrote, the follower no longer reads."""
    return replace(
        head,
        includes=tuple(dict.fromkeys((*head.includes, follower.module))),
        macs=head.macs + follower.macs,
        flops=head.flops + follower.flops,
        bytes_read=head.bytes_read + follower.bytes_read - handed_over,
        bytes_written=follower.bytes_written,
    )


def _result(call: OpCall) -> int | None:
    """The storage that holds what an operator made: a new one, or that of the only tensor it read and changed."""
    if len(call.creates) == 1:
        return call.creates[0]
    return call.reads[0] if not call.creates and len(call.reads) == 1 else None


def _continues(profile: ModelProfile, tail: OpCall, call: OpCall, result: int, readers: Sequence[int]) -> bool:
    """Whether an operator can happen in the pass that made `result`, with nothing left in memory between them."""
    signature, kind = profile.trace.signatures[call.signature], profile.prices[call.signature].kind
    is_fusible = kind == "activation" or (kind == "norm" and _has_running_statistics(signature))
    if not is_fusible or result not in call.reads:
        return False
    if _result(call) == result:  # in place: whoever reads the storage afterwards reads the new values
        return True
    is_kept = profile.trace.storages[result].died is None
    return not is_kept and [index for index in readers if index > tail.index] == [call.index]


def _has_running_statistics(signature: OpSignature) -> bool:
    is_training = signature.argument("training", False) is True or signature.argument("use_input_stats", False) is True
    return not is_training and isinstance(signature.argument("running_mean"), TensorInfo)


def _sizes(profile: ModelProfile, precision: Precision) -> list[_Scaled]:
    return [
        _Scaled(
            _rescaled(price.cost.bytes_read, signature.inputs, inputs),
            _rescaled(price.cost.bytes_written, signature.outputs, [ITEMSIZE[precision]] * len(signature.outputs)),
            tuple(_bytes(tensor, width) for tensor, width in zip(signature.inputs, inputs, strict=True)),
        )
        for signature, price, inputs in zip(
            profile.trace.signatures, profile.prices, _input_widths(profile, precision), strict=True
        )
    ]


def _input_widths(profile: ModelProfile, precision: Precision) -> list[list[float]]:
    """Bytes per value of each input of each signature; matrices of weights may be narrower than the rest."""
    signatures, storages = profile.trace.signatures, profile.trace.storages
    widths: list[list[float]] = [[ITEMSIZE[precision]] * len(signature.inputs) for signature in signatures]
    narrow = WEIGHT_ITEMSIZE.get(precision)
    if narrow is None:
        return widths
    for call in profile.trace.ops:
        for position, (number, tensor) in enumerate(zip(call.reads, signatures[call.signature].inputs, strict=True)):
            if storages[number].role == "parameter" and len(tensor.shape) > 1:
                widths[call.signature][position] = narrow
    return widths


def _rescaled(nbytes: int, tensors: Sequence[TensorInfo], widths: Sequence[float]) -> int:
    """The bytes of a price at another precision.

    A price may count less than whole tensors, as for an embedding's table; integers beside them, its indices, are
    read whole. So these come off first, and the rest scales as the floating tensors do.
    """
    floating = [(tensor, width) for tensor, width in zip(tensors, widths, strict=True) if _itemsize(tensor)]
    old = sum(tensor.nbytes for tensor, _ in floating)
    if not old:
        return nbytes
    kept = min(nbytes, sum(tensor.nbytes for tensor in tensors if not _itemsize(tensor)))
    return kept + (nbytes - kept) * sum(_bytes(tensor, width) for tensor, width in floating) // old


def _bytes(tensor: TensorInfo, width: float) -> int:
    old = _itemsize(tensor)
    return int(tensor.nbytes // old * width) if old else tensor.nbytes


def _itemsize(tensor: TensorInfo) -> int:
    return floating_itemsize(tensor.dtype)


def floating_itemsize(dtype: str) -> int:
    """Bytes per value of a floating dtype; 0 for integers, booleans, complex and quantised ones.

    >>> floating_itemsize("float16"), floating_itemsize("int64")
    (2, 0)
    """
    return _FLOATING.get(dtype.partition("_")[0], 0)
