"""Operators: how each is traced, and one record for each operator with its set of shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import prod
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from edge_opt.records.costs import OpSignature, Shape, SparseInfo, TensorInfo
from edge_opt.trace.lifetimes import is_dense, is_sparse, nbytes_of, packed_bytes, shape_of, sparse_parts, stored_bytes
from edge_opt.trace.shapes import Spec


class Behavior(Enum):
    """How the tape handles an operator."""

    PURE = "fresh outputs that depend on shapes alone: run once, then replayed"
    IN_PLACE = "writes its first argument and returns it: run once, then returned as it is"
    ALWAYS_RUN = "may alias its input, or has unusual outputs: run on the meta device each time"
    FACTORY = "makes a tensor from nothing"
    DATA = "its result depends on values, so it needs real tensors"
    CONTROL = "a branch, a loop or a scan over Python functions: run step by step"
    DECOMPOSE = "made of other operators: taken apart and recorded piece by piece"


# Composite operators that a kernel library runs as one piece. Everything composite that is not here is taken apart.
WHOLE = frozenset(
    f"aten::{name}"
    for name in (
        "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
        "scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
        "layer_norm batch_norm group_norm instance_norm rms_norm softmax log_softmax dropout feature_dropout "
        "alpha_dropout feature_alpha_dropout max_pool1d max_pool2d max_pool3d avg_pool1d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d relu6 selu prelu square pad embedding_bag "
        "pixel_shuffle pixel_unshuffle "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d bilinear silu_backward mish_backward "
        # Taken apart under a dispatch mode, these also compute vectors for a backward pass that does not happen.
        "linalg_eigvals linalg_eigvalsh linalg_svdvals"
    ).split()
)

# Operators that read values although torch does not tag them so. `tolist` and `numpy` end with `resolve_neg`; without
# values, NumPy would get memory that nobody wrote.
_READS_VALUES = frozenset(
    f"aten::{name}"
    for name in "item is_nonzero equal allclose resolve_neg _pack_padded_sequence _pad_packed_sequence".split()
)

# Tagged as if values decided its shape; they do so only with a boolean index, which the tape looks for itself.
INDEX = torch.ops.aten.index.Tensor

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_DATA_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class OperatorFacts:
    """Facts about an operator that a trace needs, computed once.

    `method` is a tensor's own method that calls it with the same arguments in a third of the time, or the operator.
    `tensor_positions` are those of its parameters that are single tensors.
    """

    __slots__ = ("argument_names", "behavior", "func", "is_mutable", "method", "name", "tensor_positions")

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        self.func = func
        self.behavior = _behavior_of(func)
        self.name = operator_name(func)
        self.argument_names = tuple([argument.name for argument in arguments if not argument.kwarg_only])
        self.is_mutable = schema is not None and schema.is_mutable
        self.tensor_positions = [index for index, argument in enumerate(arguments) if str(argument.type) == "Tensor"]
        self.method = getattr(torch.Tensor, self.name[5:]) if func in _METHODS else func


# By identity, because `OpOverload.__hash__` is a Python call and there is one look-up per call of an operator. The
# facts keep the operator, so that its id is not given to another one.
_facts: dict[int, OperatorFacts] = {}
known_facts = _facts.get


def facts_of(func: Any) -> OperatorFacts:
    """Return the facts of an operator."""
    facts = _facts.get(id(func))
    if facts is None:
        facts = _facts[id(func)] = OperatorFacts(func)
    return facts


_METHODS = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("view", "default"), ("reshape", "default"), ("permute", "default"), ("transpose", "int"), ("select", "int"),
        ("expand", "default"), ("unsqueeze", "default"), ("squeeze", "dim"), ("t", "default"),
    )
)  # fmt: skip


def _behavior_of(func: Any) -> Behavior:
    if isinstance(func, HigherOrderOperator):
        return Behavior.ALWAYS_RUN if steps_of(func) is None else Behavior.CONTROL
    if not isinstance(func, OpOverload):
        return Behavior.ALWAYS_RUN
    schema = func._schema
    if func is INDEX:
        return Behavior.PURE
    if _DATA_TAGS & set(func.tags) or schema.name in _READS_VALUES:
        return Behavior.DATA
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return Behavior.FACTORY
    if schema.is_mutable:
        if _returns_written_self(func):
            return Behavior.IN_PLACE
        return Behavior.DECOMPOSE if is_composite(func) and schema.name not in WHOLE else Behavior.ALWAYS_RUN
    if any(result.alias_info is not None for result in schema.returns):
        return Behavior.ALWAYS_RUN
    if is_composite(func) and schema.name not in WHOLE:
        return Behavior.DECOMPOSE
    if all(str(result.type) in ("Tensor", "Tensor[]", "List[Tensor]") for result in schema.returns):
        return Behavior.PURE
    return Behavior.ALWAYS_RUN


def _returns_written_self(func: OpOverload) -> bool:
    schema = func._schema
    if torch.Tag.inplace_view in func.tags or len(schema.returns) != 1 or not schema.arguments:
        return False
    written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return len(written) == 1 and written[0] is not None and written[0].name == schema.arguments[0].name


def is_composite(func: OpOverload) -> bool:
    """Return whether torch takes the operator apart into others on every device."""
    name = func.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


@cache
def operator_name(func: Any) -> str:
    """Return the operator as users write it, such as `aten.conv2d`; overloads share a name."""
    if not isinstance(func, OpOverload):
        return str(func)
    return func._schema.name.replace("::", ".")


_LIMIT = 100_000


View = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(slots=True, eq=False)
class MemoEntry:
    """The cached result of an operator: its signature, and how to make its outputs without running it again.

    `specs` are those of new tensors. `views` are shapes, strides and offsets into its first argument; none at all where
    it returns that argument itself. Where both are None, the operator is run again.
    """

    signature: OpSignature
    specs: tuple[Spec, ...] | None = None
    views: tuple[View, ...] | None = None
    is_list: bool = False


_memo: dict[tuple[Any, ...], MemoEntry] = {}
memo_get = _memo.get


def memo_put(key: tuple[Any, ...], entry: MemoEntry) -> None:
    """Keep an entry; a memory that has grown out of bounds starts afresh."""
    if len(_memo) >= _LIMIT:
        clear_memo()
    _memo[key] = entry


def clear_memo() -> None:
    """Forget every remembered operator."""
    _memo.clear()
    _infos.clear()


def signature_of(
    func: Any, args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor], is_view: bool, scratch_bytes: int
) -> OpSignature:
    """Return the record of a call."""
    strides: list[Shape | None] = []
    facts = facts_of(func)
    return OpSignature(
        facts.name,
        facts.argument_names,
        tuple([_plain(value, strides) for value in args]),
        tuple([(name, _plain(value, strides)) for name, value in kwargs.items() if value is not None]),
        tuple([tensor_info(tensor) for tensor in outputs]),
        is_view,
        scratch_bytes,
        tuple(strides) if any(strides) else (),
    )


def _plain(value: Any, strides: list[Shape | None]) -> Any:
    """Return an argument as a plain value: tensors described, dtypes and devices by name.

    The strides of each tensor are added to `strides`: None for a row-major one.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        is_usual = is_dense(value) and not value.is_contiguous()
        strides.append(tuple(value.stride()) if is_usual else None)
        return tensor_info(value)
    if isinstance(value, (list, tuple)):
        return tuple([_plain(item, strides) for item in value])
    return str(value).removeprefix("torch.")


_infos: dict[tuple[Any, ...], TensorInfo] = {}


def tensor_info(tensor: torch.Tensor) -> TensorInfo:
    """Return shape, dtype and distinct bytes; a dimension with stride 0 is stored, and counted, once."""
    if is_sparse(tensor):
        stored = sparse_parts(tensor)[0].numel()
        return SparseInfo(tuple(tensor.shape), dtype_name(tensor.dtype), nbytes_of(tensor), stored)
    if tensor.is_nested:
        return TensorInfo(shape_of(tensor), dtype_name(tensor.dtype), stored_bytes(tensor))
    key = (tensor.shape, tensor.stride(), tensor.dtype)
    info = _infos.get(key)
    if info is None:
        shape, strides, dtype = tuple(key[0]), key[1], key[2]
        distinct = shape if 0 not in strides else [size for size, step in zip(shape, strides, strict=True) if step]
        info = _infos[key] = TensorInfo(shape, dtype_name(dtype), packed_bytes(prod(distinct), tensor))
    return info


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype as users write it, such as float32."""
    return str(dtype).removeprefix("torch.")


_EAGER = torch._C.DispatchKey.CompositeExplicitAutograd


def steps_of(func: Any) -> Callable[..., Any] | None:
    """Return what to call in place of a higher-order operator; None where torch has no eager implementation of it.

    A branch follows its condition and a loop runs as often as its condition says, so both need to know its value: where
    it depends on an input, the model is traced with real tensors. A scan is unrolled.
    """
    return _OWN.get(func.name()) or func.py_kernels.get(_EAGER)


def _branch(condition: Any, true_function: Any, false_function: Any, operands: Any = ()) -> Any:
    return (true_function if condition else false_function)(*operands)


def _scan(combine: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(combine, init, xs, additional_inputs=additional_inputs)  # type: ignore[no-untyped-call]


# The eager implementations of torch refuse to run while a mode is active.
_OWN: dict[str, Callable[..., Any]] = {
    "cond": _branch,
    "scan": _scan,
    "invoke_subgraph": lambda subgraph, identifier, *operands: subgraph(*operands),
}
