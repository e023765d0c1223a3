"""Layers as runtimes run them, read from a profile: passes over memory for rooflines, and work for class costs.

Both views share what a convolution is (groups, depthwise, transposed). They fuse differently, on purpose. A roofline
asks what memory must see: a result that anybody else reads is written. Class costs were fitted to lists of layers as
runtimes' own tables have them, in which a batch norm or ReLU behind a convolution never stands by itself; to change
that rule is to fit every platform again (scripts/fit_platforms.py) and to compare benchmarks/boards.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from edge_opt.boards.class_costs import LayerWork, ModelWork, WorkKind, as_linear
from edge_opt.errors import InvalidInput
from edge_opt.records.costs import OpCall, OpSignature, TensorInfo
from edge_opt.records.devices import Precision
from edge_opt.records.profiles import ModelProfile

ITEMSIZE: dict[Precision, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int4": 2, "w8a16": 2}
# Bytes per value of matrices of weights where that is not the size of everything else. Groups of 128 share a half of
# scale and a zero of 4 bits: 4 + 20 / 128 bits, as `int4` of `weight_formats`.
WEIGHT_ITEMSIZE: dict[Precision, float] = {"int4": (4 + 20 / 128) / 8, "w8a16": 1}
_FLOATING = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}

# The precision of a pass: the requested one, int8 of the model itself, or none that a peak would limit.
Arithmetic = Literal["asked", "int8", "none"]
Grouping = Literal["none", "grouped", "depthwise"]


class MemoryPass(NamedTuple):
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


def passes(profile: ModelProfile, precision: Precision) -> tuple[MemoryPass, ...]:
    """Return one pass per operator that is not free, in order of execution.

    Floating tensors take the precision's size. Integers keep theirs: indices, token ids and masks are what they are,
    and arithmetic on them is counted as movement.
    """
    by_signature = signature_passes(profile, precision)[0]
    return tuple(
        item._replace(module=call.module)
        for call in profile.trace.ops
        if (item := by_signature[call.signature]) is not None
    )


def by_module(items: Sequence[MemoryPass]) -> dict[int, list[MemoryPass]]:
    """Return the passes of each module call."""
    grouped: dict[int, list[MemoryPass]] = {}
    for item in items:
        grouped.setdefault(item.module, []).append(item)
    return grouped


def fused_passes(profile: ModelProfile, precision: Precision) -> tuple[MemoryPass, ...]:
    """Return the same with one pass per convolution or product and what directly follows on its result.

    That is a batch norm with running statistics and an activation. Norms that need statistics of their own input
    cannot start before it is complete, so they stay apart. A result that anybody else reads is still written.
    """
    by_signature, widths = signature_passes(profile, precision)
    readers: dict[int, list[int]] = {}
    for call in profile.trace.ops:
        for storage in set(call.reads) if by_signature[call.signature] is not None else ():
            readers.setdefault(storage, []).append(call.index)
    fused: list[MemoryPass] = []
    tail: OpCall | None = None  # the last operator of a pass that may still grow
    for call in profile.trace.ops:
        shared = by_signature[call.signature]
        if shared is None:
            continue
        single = shared._replace(module=call.module)
        result = None if tail is None else _result(tail)
        if tail is not None and result is not None and _continues(profile, tail, call, result, readers.get(result, [])):
            inputs = profile.trace.signatures[call.signature].inputs
            handed_over = sum(
                _bytes(tensor, width)
                for tensor, width, storage in zip(inputs, widths[call.signature], call.reads, strict=True)
                if storage == result
            )
            # One operator more: what the head wrote, the follower no longer reads.
            head = fused[-1]
            fused[-1] = head._replace(
                includes=tuple(dict.fromkeys((*head.includes, single.module))),
                macs=head.macs + single.macs,
                flops=head.flops + single.flops,
                bytes_read=head.bytes_read + single.bytes_read - handed_over,
                bytes_written=single.bytes_written,
            )
            tail = call
        else:
            fused.append(single)
            tail = call if profile.prices[call.signature].kind in ("conv", "matmul") else None
    return tuple(fused)


def signature_passes(profile: ModelProfile, precision: Precision) -> tuple[list[MemoryPass | None], list[list[float]]]:
    """Return the pass of each distinct operator, still without its module, and the bytes per value of its inputs.

    An operator that is free has no pass. Models repeat their layers, so that this is done once for many calls.
    """
    widths = _input_widths(profile, precision)
    by_signature: list[MemoryPass | None] = []
    for signature, price, width in zip(profile.trace.signatures, profile.prices, widths, strict=True):
        if price.status == "free":
            by_signature.append(None)
            continue
        inputs, outputs, cost = signature.inputs, signature.outputs, price.cost
        if any(floating_itemsize(tensor.dtype) for tensor in (*inputs, *outputs)):
            arithmetic: Arithmetic = "asked"
        else:
            arithmetic = "int8" if cost.macs else "none"
        by_signature.append(
            MemoryPass(
                module=0,
                includes=(),
                macs=cost.macs,
                flops=cost.flops,
                bytes_read=_rescaled(cost.bytes_read, inputs, width),
                bytes_written=_rescaled(cost.bytes_written, outputs, [ITEMSIZE[precision]] * len(outputs)),
                arithmetic=arithmetic,
                grouping=_grouping(signature) if price.kind == "conv" else "none",
                is_unpriced=price.status == "unpriced",
                steps=_steps(inputs, cost.macs) if price.kind == "recurrent" else 1,
            )
        )
    return by_signature, widths


def _steps(inputs: Sequence[TensorInfo], macs: int) -> int:
    """Return the steps of a recurrent layer, from what it multiplies: every matrix once per step and sequence."""
    matrices = [tensor for tensor in inputs if len(tensor.shape) == 2]
    states = [tensor for tensor in inputs[1:] if len(tensor.shape) == 3]
    batch = states[0].shape[1] if states else 1
    once = batch * sum(tensor.elements for tensor in matrices)
    return max(1, macs // once) * max(1, len(matrices) // 2) if once else 1


def _groups_of(signature: OpSignature) -> tuple[int, int, bool]:
    """Return the groups of a convolution, the input channels of each filter, and whether it is transposed."""
    groups = signature.argument("groups", 1)
    groups = groups if isinstance(groups, int) else 1
    is_transposed = "transpose" in signature.op or signature.argument("transposed", False) is True
    weight = signature.inputs[1].shape
    return groups, weight[0] // groups if is_transposed else weight[1], is_transposed


def _grouping(signature: OpSignature) -> Grouping:
    groups, channels, _ = _groups_of(signature)
    if groups <= 1:
        return "none"
    return "depthwise" if channels <= 2 else "grouped"


def _result(call: OpCall) -> int | None:
    """Return the storage of what an operator made: a new one, or that of the only tensor it read and changed."""
    if len(call.creates) == 1:
        return call.creates[0]
    return call.reads[0] if not call.creates and len(call.reads) == 1 else None


def _continues(profile: ModelProfile, tail: OpCall, call: OpCall, result: int, readers: Sequence[int]) -> bool:
    """Return whether an operator can happen in the pass that made `result`, with nothing in memory between them."""
    signature, kind = profile.trace.signatures[call.signature], profile.prices[call.signature].kind
    is_training = signature.argument("training", False) is True or signature.argument("use_input_stats", False) is True
    has_statistics = not is_training and isinstance(signature.argument("running_mean"), TensorInfo)
    is_fusible = kind == "activation" or (kind == "norm" and has_statistics)
    if not is_fusible or result not in call.reads:
        return False
    if _result(call) == result:  # in place: later reads of the storage return the new values
        return True
    is_kept = profile.trace.storages[result].died is None
    return not is_kept and [index for index in readers if index > tail.index] == [call.index]


def _input_widths(profile: ModelProfile, precision: Precision) -> list[list[float]]:
    """Return the bytes per value of each input of each signature; matrices of weights may be narrower than the rest."""
    storages, signatures = profile.trace.storages, profile.trace.signatures
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
    """Return the bytes of a price at another precision.

    A price may count less than whole tensors, as for an embedding's table; integers beside them, its indices, are
    read whole. So these come off first, and the rest scales as the floating tensors do.
    """
    old = new = integers = 0
    for tensor, width in zip(tensors, widths, strict=True):
        if floating_itemsize(tensor.dtype):
            old += tensor.nbytes
            new += _bytes(tensor, width)
        else:
            integers += tensor.nbytes
    if not old:
        return nbytes
    kept = min(nbytes, integers)
    return kept + (nbytes - kept) * new // old


def _bytes(tensor: TensorInfo, width: float) -> int:
    old = floating_itemsize(tensor.dtype)
    return int(tensor.nbytes // old * width) if old else tensor.nbytes


def floating_itemsize(dtype: str) -> int:
    """Return the bytes per value of a floating dtype; 0 for integers, booleans, complex and quantized ones.

    >>> floating_itemsize("float16"), floating_itemsize("int64")
    (2, 0)
    """
    return _FLOATING.get(dtype.partition("_")[0], 0)


# Activations that runtimes compute with the convolution or linear layer before them.
FUSED = ("relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "leaky_relu", "threshold", "sigmoid")
_SPLITS = ("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split", "slice")
_WORK_KINDS: dict[str, WorkKind] = {
    "elementwise": "elementwise", "activation": "activation", "norm": "elementwise", "softmax": "elementwise",
    "pooling": "pool", "reduction": "pool",
}  # fmt: skip
_MOVES = ("movement", "embedding", "interpolation")


def model_work(profile: ModelProfile) -> ModelWork:
    """Return the layers of a profiled model, as a runtime with fused kernels would run them.

    Args:
        profile: what `edge_opt.profile` returns, with our own counts. Its batch is part of it: eight images are eight
            times the work.

    >>> import edge_opt as eo
    >>> from edge_opt.model import SmallCNN
    >>> [work.kind for work in model_work(eo.profile(SmallCNN(), (1, 1, 28, 28))).works]
    ['conv', 'pool', 'conv', 'pool', 'linear']
    """
    if profile.convention != "edge_opt":
        raise InvalidInput(
            f"the profile counts as {profile.convention} does, and class costs need our own counts; "
            "profile again without convention="
        )
    works: list[LayerWork] = []
    outside: dict[str, None] = {}
    for call, work, is_known in called_works(profile):
        if work is not None:
            works.append(work if is_known else work._replace(is_outside=True))
        if not is_known:
            outside[profile.trace.signatures[call.signature].op] = None
    return ModelWork(profile.name, tuple(works), tuple(outside))


def called_works(profile: ModelProfile) -> Iterator[tuple[OpCall, LayerWork | None, bool]]:
    """Yield the operator calls that are layers of their own, with their work and whether a class describes it."""
    trace = profile.trace
    # Storages that a convolution or linear layer wrote last, so that a batch norm or ReLU on them is part of it.
    fusible: set[int] = set()
    # Convolutions follow from their signature alone, and models repeat them.
    convolutions: dict[int, LayerWork] = {}
    constants = _constants(profile)
    for call in trace.ops:
        price, signature = profile.prices[call.signature], trace.signatures[call.signature]
        op = signature.op.removeprefix("aten.").removesuffix("_")
        if price.status == "unpriced":
            yield call, None, False
        elif price.status == "free":
            # Part of an image's channels is a copy in runtimes; a token is found by its address.
            source = signature.inputs[0].shape if op in _SPLITS else ()
            if len(source) == 4 and signature.outputs[0].elements < signature.inputs[0].elements:
                yield call, _moved(call.module, signature), True
        elif op.startswith("dropout") or not call.reads or price.kind == "quantization":
            # A constant, which an export folds, nothing at all in inference, or steps between precisions: whole nets in
            # int8 were timed with them, so that they are part of the costs.
            pass
        elif call.reads[0] in fusible and (op.endswith("batch_norm") or op in FUSED):
            fusible.update(call.creates)
        else:
            written = call.creates or call.reads[:1]
            fusible.difference_update(written)
            if price.kind in ("conv", "matmul", "attention", "recurrent"):
                fusible.update(written)
            if price.kind == "conv":
                if call.signature not in convolutions:
                    convolutions[call.signature] = _convolution(signature, price.cost.macs)
                yield call, convolutions[call.signature]._replace(module=call.module), True
                continue
            work = _moved(call.module, signature, price.cost.macs)._replace(
                is_constant=constants.issuperset(call.reads)
            )
            if price.kind in _WORK_KINDS:
                yield call, work._replace(kind=_WORK_KINDS[price.kind]), True
            elif price.kind in _MOVES:
                is_join = op in ("cat", "concat", "concatenate", "stack")
                yield call, work._replace(kind="join" if is_join else "move", reads=work.writes), True
            elif price.kind in ("matmul", "attention", "recurrent"):
                yield call, _product(constants, call, signature, price.kind, work), True
            else:
                yield call, work._replace(kind="elementwise"), False


def _constants(profile: ModelProfile) -> set[int]:
    """Return the storages whose values are the same in every forward: weights, buffers, and what follows from these."""
    roles = ("parameter", "buffer")
    constants = {number for number, storage in enumerate(profile.trace.storages) if storage.role in roles}
    for call in profile.trace.ops:
        if constants.issuperset(call.reads):
            constants.update(call.creates)
        else:  # written in place by something that is not constant
            constants.difference_update(call.creates or call.reads[:1])
    return constants


def _product(constants: set[int], call: OpCall, signature: OpSignature, kind: str, base: LayerWork) -> LayerWork:
    """Return the work of a matrix product, of attention or of a recurrent layer; `constants` are storages."""
    weights = sum(
        tensor.elements
        for tensor, storage in zip(signature.inputs, call.reads, strict=True)
        if storage in constants and len(tensor.shape) >= 2
    )
    if kind == "recurrent":  # step by step: every weight is read again for each
        return base._replace(kind="linear", weights=base.macs, rows=1, is_recurrent=True)
    if kind == "attention" or not weights:
        return base._replace(kind="product", is_attention=True)
    rows = max(1, base.macs // weights)
    return base._replace(kind="linear", weights=weights, rows=rows, reads=base.reads - weights)


def _moved(module: int, signature: OpSignature, macs: int = 0) -> LayerWork:
    return LayerWork(
        "move",
        module,
        macs=macs,
        reads=sum(tensor.elements for tensor in signature.inputs if len(tensor.shape) > 1),
        writes=sum(tensor.elements for tensor in signature.outputs),
        channels=_channels(signature.inputs),
        filters=_channels(signature.outputs),
    )


def _channels(tensors: Sequence[TensorInfo]) -> int:
    """Return the channels of the first tensor: of an image or a video its second dimension, else the last."""
    shape = tensors[0].shape if tensors else ()
    return shape[1] if len(shape) > 3 else shape[-1] if shape else 0


def _convolution(signature: OpSignature, macs: int) -> LayerWork:
    x, weight = signature.inputs[:2]
    out = signature.outputs[0]
    groups, channels, is_transposed = _groups_of(signature)
    batch = x.shape[0] if len(x.shape) == len(weight.shape) else 1
    work = LayerWork(
        "conv",
        0,
        macs=macs,
        weights=weight.elements,
        reads=x.elements,
        writes=out.elements,
        channels=channels,
        groups=groups,
        kernel=weight.shape[2:],
        # A transposed one has stride 1 in no kernel that is meant here.
        stride=2 if is_transposed else int(np.max(signature.argument("stride", 1))),
        places=out.shape[-len(weight.shape[2:]) :],
        filters=out.shape[-len(weight.shape[2:]) - 1],
    )
    return as_linear(work, batch)
