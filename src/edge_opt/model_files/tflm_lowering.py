"""The `.tflite` graph that LiteRT's converter would write for a traced model, before it is converted.

Follows litert-torch 0.10 with a fixed batch and ai-edge-quantizer's static int8: convolutions and pools compute with
channels last, a transposition stands where a model enters or leaves that layout, batch norms are folded, activations
fused, and padding that "SAME" cannot express is an operator of its own. Only shapes are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from edge_opt.errors import ConversionFailed
from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator, TflmSubgraph, TflmTensor
from edge_opt.records.costs import OpCall, OpSignature, TensorInfo, Trace

_SAME, _VALID = 0, 1
_RELU, _RELU6 = 1, 3
_FUSES = frozenset("CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED ADD SUB MUL".split())
_ELEMENTWISE = {"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV"}
_UNARY = {
    "relu": "RELU", "relu6": "RELU6", "hardswish": "HARD_SWISH", "sigmoid": "LOGISTIC", "tanh": "TANH",
    "elu": "ELU", "leaky_relu": "LEAKY_RELU",
}  # fmt: skip
# Bytes of a FlatBuffer beside its buffers: once, for each tensor and operator, and for each scale with its zero point.
# Fitted to eleven converted nets; names of tensors, which repeat the path of their module, take 65 to 250 bytes each.
_FILE_BYTES, _TENSOR_BYTES, _OPERATOR_BYTES, _SCALE_BYTES, _NAME_BYTES = 485, 98, 38, 12, 150
# Operators whose result has the scale of their input.
_KEEPS_SCALE = frozenset("RESIZE_NEAREST_NEIGHBOR MAX_POOL_2D TRANSPOSE RESHAPE".split())


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor of the graph that a storage of the trace holds now."""

    index: int
    shape: tuple[int, ...]  # as torch has it
    is_last: bool  # whether channels are last in the graph
    maker: int | None  # operator that made it


def lowered(trace: Trace, name: str, is_int8: bool = True) -> TflmGraph:
    """Return the graph that the converter would write for a traced model.

    Args:
        trace: The model on its inputs; the batch is fixed.
        name: Name of the model.
        is_int8: Whether it is quantized; else it stays in float32.
    """
    lowering = _Lowering(trace, is_int8)
    for call in trace.ops:
        lowering.lower(call)
    return lowering.graph(name)


class _Lowering:
    def __init__(self, trace: Trace, is_int8: bool) -> None:
        self.trace = trace
        self.dtype = "int8" if is_int8 else "float32"
        self.scales = 1 if is_int8 else 0
        self.tensors: list[TflmTensor] = []
        self.operators: list[TflmOperator] = []
        self.constant_bytes = 0
        self.values: dict[int, _Value] = {}
        # Views and operators in place read what they are themselves.
        self.readers = Counter(number for call in trace.ops if call.creates for number in set(call.reads))
        self.inputs: list[int] = []
        self.layer = "input"
        for number, storage in enumerate(trace.storages):
            if storage.role == "input":
                self._input(number)

    def _input(self, number: int) -> None:
        uses = (
            info
            for call in self.trace.ops
            for place, info in zip(call.reads, self._signature(call).inputs, strict=True)
            if place == number
        )
        first = next(uses, None)
        if first is not None:
            index = self._tensor(first.shape)
            self.inputs.append(index)
            self.values[number] = _Value(index, first.shape, False, None)

    def graph(self, name: str) -> TflmGraph:
        """Return the finished graph; results leave it as torch has them."""
        last = self.trace.ops[-1] if self.trace.ops else None
        if last is None or not self.operators:
            raise ConversionFailed("the model has no operator that the converter would write")
        kept = [number for number, storage in enumerate(self.trace.storages)
                if storage.died is None and storage.role == "activation" and number in self.values]  # fmt: skip
        outputs = tuple(self._plain(self.values[number]).index for number in kept)
        subgraph = TflmSubgraph(tuple(self.tensors), tuple(self.operators), tuple(self.inputs), outputs)
        scales = sum(tensor.scales for tensor in self.tensors)
        of_tensors = (_TENSOR_BYTES + _NAME_BYTES) * len(self.tensors) + _SCALE_BYTES * scales
        beside = _FILE_BYTES + of_tensors + _OPERATOR_BYTES * len(self.operators)
        return TflmGraph(name, self.constant_bytes + beside, self.constant_bytes, (subgraph,), ())

    def lower(self, call: OpCall) -> None:
        """Write what one operator of torch becomes."""
        signature = self._signature(call)
        self.layer = self.trace.modules[call.module].path or signature.op
        op = signature.op.removeprefix("aten.").removesuffix("_").removesuffix(".default")
        rule: Callable[[OpCall, OpSignature], _Value | None] | None = getattr(self, f"_op_{op}", None)
        if rule is not None:
            result = rule(call, signature)
        elif op in _ELEMENTWISE:
            result = self._elementwise(_ELEMENTWISE[op], call, signature)
        elif op in _UNARY:
            result = self._unary(_UNARY[op], call, signature)
        elif op in ("dropout", "contiguous", "detach", "clone", "alias", "to", "feature_dropout"):
            result = self._read(call)
        elif op in ("view", "reshape", "flatten", "squeeze", "unsqueeze", "_unsafe_view"):
            result = self._reshaped(call, signature)
        else:
            raise ConversionFailed(f"what LiteRT writes for {signature.op} is not known; convert the model first")
        if result is not None:
            # A layer may write several tensors, such as paddings; its result has the name of the layer.
            written = self.tensors[result.index]
            if written.name.startswith(f"{self.layer} (") and all(self.layer != it.name for it in self.tensors):
                self.tensors[result.index] = replace(written, name=self.layer)
            # An operator in place, and a view, write to the storage that they read.
            for number in call.creates or call.reads[:1]:
                self.values[number] = result

    def _signature(self, call: OpCall) -> OpSignature:
        return self.trace.signatures[call.signature]

    def _read(self, call: OpCall, place: int = 0) -> _Value:
        value = self.values.get(call.reads[place])
        if value is None:
            raise ConversionFailed(f"an input of {self._signature(call).op} is a constant, which is not followed")
        return value

    # Tensors and operators

    def _tensor(self, shape: Sequence[int], is_constant: bool = False, dtype: str = "", scales: int = -1,
                values: tuple[int, ...] = ()) -> int:  # fmt: skip
        scales = self.scales if scales < 0 else scales
        dtype = dtype or self.dtype
        name = f"{self.layer} ({len(self.tensors)})"
        tensor = TflmTensor(name, tuple(shape), dtype, is_constant, False, scales, scales, values)
        self.tensors.append(tensor)
        self.constant_bytes += tensor.nbytes if is_constant else 0
        return len(self.tensors) - 1

    def _integers(self, *values: int, shape: Sequence[int] | None = None) -> int:
        """Return a constant of int32; the converter writes an equal one once."""
        dims = tuple(shape or (len(values),))
        for index, tensor in enumerate(self.tensors):
            if tensor.values == values and tensor.shape == dims:
                return index
        return self._tensor(dims, True, "int32", 0, values)

    def _write(self, op: str, inputs: Sequence[int], shape: Sequence[int], **options: Any) -> int:
        index = self._tensor(shape)
        tensors = tuple(self.tensors[place] for place in inputs)
        self.operators.append(
            TflmOperator(op, False, tensors, (self.tensors[index],), (), tuple(inputs), (index,), options, (), ("", ""))
        )
        return index

    def _made(self, index: int, shape: Sequence[int], is_last: bool) -> _Value:
        return _Value(index, tuple(shape), is_last, len(self.operators) - 1)

    def _graph_shape(self, shape: Sequence[int], is_last: bool) -> tuple[int, ...]:
        return (shape[0], *shape[2:], shape[1]) if is_last and len(shape) == 4 else tuple(shape)

    def _last(self, value: _Value) -> _Value:
        """Return a value with channels last."""
        return value if value.is_last else self._turned(value, True)

    def _plain(self, value: _Value) -> _Value:
        """Return a value as torch has it."""
        return self._turned(value, False) if value.is_last else value

    def _turned(self, value: _Value, to_last: bool) -> _Value:
        shape = self._graph_shape(value.shape, to_last)
        channels, *sizes = value.shape[1:]
        if channels == 1 or prod(sizes) == 1:
            return replace(self._cast_shape(value, shape, value.shape), is_last=to_last)
        order = self._integers(*((0, 2, 3, 1) if to_last else (0, 3, 1, 2)))
        return self._made(self._write("TRANSPOSE", (value.index, order), shape), value.shape, to_last)

    def _cast_shape(self, value: _Value, shape: Sequence[int], torch_shape: Sequence[int]) -> _Value:
        if self.tensors[value.index].shape == tuple(shape):
            return replace(value, shape=tuple(torch_shape), is_last=False)
        target = self._integers(*shape)
        return self._made(self._write("RESHAPE", (value.index, target), shape), torch_shape, False)

    # Products

    def _op_conv2d(self, call: OpCall, signature: OpSignature) -> _Value:
        weight: TensorInfo = signature.inputs[1]
        arguments = dict(zip(signature.names, signature.args, strict=False)) | dict(signature.kwargs)
        stride, dilation = _pair(arguments.get("stride", 1)), _pair(arguments.get("dilation", 1))
        groups = int(arguments.get("groups", 1))
        source = self._last(self._read(call))
        channels, (kernel_h, kernel_w) = source.shape[1], weight.shape[2:]
        out = signature.outputs[0].shape
        pads = _pair(arguments.get("padding", 0)) if not isinstance(arguments.get("padding"), str) else None
        is_depthwise = groups == channels
        if groups > 1 and not is_depthwise:
            raise ConversionFailed("what LiteRT writes for a convolution in groups is not known; convert the model")
        source, padding = self._padded(source, out, (kernel_h, kernel_w), stride, dilation, pads, "PAD")
        shape = (1, kernel_h, kernel_w, out[1]) if is_depthwise else (out[1], kernel_h, kernel_w, channels)
        inputs = (source.index, *self._weights(shape, out[1]))
        options = {"padding": padding, "stride_h": stride[0], "stride_w": stride[1], "activation": 0,
                   "dilation_h": dilation[0], "dilation_w": dilation[1]}  # fmt: skip
        op = "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D"
        return self._made(self._write(op, inputs, self._graph_shape(out, True), **options), out, True)

    def _weights(self, shape: Sequence[int], outputs: int) -> tuple[int, int]:
        """Return weights with a scale per output, and a bias, which is written in any case."""
        scales = outputs if self.scales else 0
        bias = "int32" if self.scales else "float32"
        return self._tensor(shape, True, scales=scales), self._tensor((outputs,), True, bias, scales)

    def _padded(
        self, value: _Value, out: Sequence[int], kernel: tuple[int, ...], stride: tuple[int, int],
        dilation: tuple[int, int], pads: tuple[int, int] | None, op: str,
    ) -> tuple[_Value, int]:  # fmt: skip
        """Return the input with the padding that "SAME" and "VALID" cannot express, and which of both is left."""
        sizes = value.shape[2:]
        spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
        totals = [max((made - 1) * step + span - size, 0)
                  for size, made, step, span in zip(sizes, out[2:], stride, spans, strict=True)]  # fmt: skip
        if pads is None or all(total == 2 * pad for total, pad in zip(totals, pads, strict=True)):
            return value, _SAME if pads is None or any(pads) else _VALID
        if not any(pads):
            return value, _VALID
        high, wide = pads
        shape = (*value.shape[:2], sizes[0] + 2 * high, sizes[1] + 2 * wide)
        inputs = [value.index, self._integers(0, 0, high, high, wide, wide, 0, 0, shape=(4, 2))]
        if op == "PADV2":
            inputs.append(self._tensor((), True))
        return self._made(self._write(op, inputs, self._graph_shape(shape, True)), shape, True), _VALID

    def _op_linear(self, call: OpCall, signature: OpSignature) -> _Value:
        source, out = self._plain(self._read(call)), signature.outputs[0].shape
        weight = signature.inputs[1].shape
        inputs = (source.index, *self._weights(weight, weight[0]))
        options = {"activation": 0, "weights_format": 0, "keep_num_dims": len(out) > 2}
        return self._made(self._write("FULLY_CONNECTED", inputs, out, **options), out, False)

    def _op_batch_norm(self, call: OpCall, signature: OpSignature) -> _Value:
        value = self._read(call)
        made = None if value.maker is None else self.operators[value.maker].op
        if made in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED") and self.readers[call.reads[0]] == 1:
            return value
        raise ConversionFailed("what LiteRT writes for a batch norm without a layer before it is not known")

    # Pools and means

    def _op_max_pool2d(self, call: OpCall, signature: OpSignature) -> _Value:
        return self._pool("MAX_POOL_2D", call, signature)

    def _op_avg_pool2d(self, call: OpCall, signature: OpSignature) -> _Value:
        return self._pool("AVERAGE_POOL_2D", call, signature)

    def _pool(self, op: str, call: OpCall, signature: OpSignature) -> _Value:
        arguments = dict(zip(signature.names, signature.args, strict=False)) | dict(signature.kwargs)
        kernel = _pair(arguments["kernel_size"])
        stride = _pair(arguments.get("stride") or kernel)
        out, pads = signature.outputs[0].shape, _pair(arguments.get("padding", 0))
        if op == "AVERAGE_POOL_2D" and any(pads):
            raise ConversionFailed("what LiteRT writes for an average pool with padding is not known")
        source = self._last(self._read(call))
        if any(pads):
            source, _ = self._padded(source, out, kernel, stride, (1, 1), pads, "PADV2")
        options = {"padding": _VALID, "stride_h": stride[0], "stride_w": stride[1], "filter_h": kernel[0],
                   "filter_w": kernel[1], "activation": 0}  # fmt: skip
        return self._made(self._write(op, (source.index,), self._graph_shape(out, True), **options), out, True)

    def _op_adaptive_avg_pool2d(self, call: OpCall, signature: OpSignature) -> _Value:
        out = signature.outputs[0].shape
        if out[2:] != (1, 1):
            raise ConversionFailed("what LiteRT writes for an adaptive pool to more than 1x1 is not known")
        source = self._last(self._read(call))
        index = self._write("MEAN", (source.index, self._integers(2, 1)), self._graph_shape(out, True), keep_dims=1)
        return self._made(index, out, True)

    def _op_mean(self, call: OpCall, signature: OpSignature) -> _Value:
        source, out = self._plain(self._read(call)), signature.outputs[0].shape
        arguments = dict(zip(signature.names, signature.args, strict=False)) | dict(signature.kwargs)
        rank = len(source.shape)
        dims = arguments.get("dim")
        axes = (
            [axis % rank for axis in (dims if isinstance(dims, (list, tuple)) else [dims])]
            if dims is not None
            else [*range(rank)]
        )
        return self._made(self._write("MEAN", (source.index, self._integers(*axes)), out), out, False)

    def _op_upsample_nearest2d(self, call: OpCall, signature: OpSignature) -> _Value:
        source, out = self._last(self._read(call)), signature.outputs[0].shape
        index = self._write("RESIZE_NEAREST_NEIGHBOR", (source.index, self._integers(*out[2:])),
                            self._graph_shape(out, True))  # fmt: skip
        return self._made(index, out, True)

    # Arithmetic

    def _unary(self, op: str, call: OpCall, signature: OpSignature) -> _Value:
        value = self._read(call)
        fused = {"RELU": _RELU, "RELU6": _RELU6}.get(op)
        is_alone = not call.creates or self.readers[call.reads[0]] == 1
        if fused is not None and value.maker is not None and is_alone:
            made = self.operators[value.maker]
            if made.op in _FUSES and not made.options.get("activation"):
                self.operators[value.maker] = replace(made, options={**made.options, "activation": fused})
                return value
        shape = self.tensors[value.index].shape
        return self._made(self._write(op, (value.index,), shape), value.shape, value.is_last)

    def _op_hardtanh(self, call: OpCall, signature: OpSignature) -> _Value:
        if tuple(signature.args[1:3]) != (0.0, 6.0):
            raise ConversionFailed("what LiteRT writes for hardtanh other than 0 to 6 is not known")
        return self._unary("RELU6", call, signature)

    def _elementwise(self, op: str, call: OpCall, signature: OpSignature) -> _Value:
        out = signature.outputs[0].shape
        values = [self._read(call, place) for place in range(len(call.reads))]
        is_last = any(value.is_last for value in values)
        aligned = [self._last(value) if is_last and len(value.shape) == 4 else self._plain(value) for value in values]
        places = [value.index for value in aligned]
        if len(places) == 1:
            places.append(self._tensor((), True))
        index = self._write(op, places, self._graph_shape(out, is_last), activation=0)
        return self._made(index, out, is_last)

    def _op_cat(self, call: OpCall, signature: OpSignature) -> _Value:
        out = signature.outputs[0].shape
        values = [self._read(call, place) for place in range(len(call.reads))]
        is_last = all(value.is_last for value in values)
        rescaled = self._rescaled_inputs(call, values)
        aligned = [(self._last if is_last else self._plain)(value) for value in values]
        places = [
            self._write("QUANTIZE", (value.index,), self.tensors[value.index].shape)
            if place in rescaled
            else value.index
            for place, value in enumerate(aligned)
        ]
        index = self._write("CONCATENATION", places, self._graph_shape(out, is_last), activation=0, axis=0)
        return self._made(index, out, is_last)

    def _rescaled_inputs(self, call: OpCall, values: Sequence[_Value]) -> list[int]:
        """Return the inputs of a concatenation that are converted to its scale, as far as shapes can tell.

        All inputs share the scale of the widest range. A layer that only the concatenation reads adopts it; what
        others read, or what keeps the scale of its own input, is converted, unless its range is the widest. Ranges
        are not known: a sum is taken to be wider than its terms, else the first input to be the widest.
        """
        if not self.scales:
            return []
        makers = [None if value.maker is None else self.operators[value.maker].op for value in values]
        fixed = [place for place, number in enumerate(call.reads)
                 if self.readers[number] > 1 or makers[place] in (None, *_KEEPS_SCALE)]  # fmt: skip
        has_sum = any(made == "ADD" for place, made in enumerate(makers) if place not in fixed)
        return fixed if has_sum else fixed[1:]

    def _op_softmax(self, call: OpCall, signature: OpSignature) -> _Value:
        source = self._plain(self._read(call))
        return self._made(self._write("SOFTMAX", (source.index,), source.shape, beta=1.0), source.shape, False)

    def _reshaped(self, call: OpCall, signature: OpSignature) -> _Value:
        value, out = self._read(call), signature.outputs[0].shape
        made = None if value.maker is None else self.operators[value.maker]
        is_flat = value.is_last and prod(value.shape[2:]) == 1
        if is_flat and made is not None and made.op == "MEAN" and self.readers[call.reads[0]] <= 2:
            # The mean drops the dimensions itself.
            self.tensors[value.index] = replace(self.tensors[value.index], shape=tuple(out))
            tensors = (self.tensors[value.index],)
            self.operators[value.maker or 0] = replace(made, outputs=tensors, options={"keep_dims": 0})
            return replace(value, shape=tuple(out), is_last=False)
        if is_flat:
            # A fully connected layer reads it as it is.
            return replace(value, shape=tuple(out), is_last=False)
        plain = self._plain(value)
        return self._cast_shape(plain, out, out)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (list, tuple)):
        return (int(value[0]), int(value[-1]))
    return int(value), int(value)
