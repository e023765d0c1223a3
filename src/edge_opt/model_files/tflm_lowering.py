"""The `.tflite` graph that LiteRT's converter would write for a traced model, before it is converted.

Follows litert-torch 0.10 with a fixed batch and ai-edge-quantizer's static int8: convolutions and pools compute with
channels last, a transposition stands where a model enters or leaves that layout, batch norms are folded, activations
fused, and padding that "SAME" cannot express is an operator of its own. Only shapes are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from edge_opt.errors import ConversionFailed
from edge_opt.model_files.graph_writer import GraphValue, GraphWriter, graph_shape
from edge_opt.model_files.tflm_graph import TflmGraph, TflmOperator
from edge_opt.records.costs import OpCall, OpSignature, Trace

_SAME, _VALID = 0, 1
_FUSED = {"RELU": 1, "RELU_N1_TO_1": 2, "RELU6": 3}
_WEIGHTED = frozenset("CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED TRANSPOSE_CONV".split())
# Operators that take ReLU as a part of them; a transposed convolution takes no other activation.
_FUSE_RELU = _WEIGHTED | frozenset("ADD SUB MUL".split())
_ELEMENTWISE = {"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "rsub": "SUB"}
_UNARY = {
    "relu": "RELU", "relu6": "RELU6", "hardswish": "HARD_SWISH", "sigmoid": "LOGISTIC", "tanh": "TANH",
    "leaky_relu": "LEAKY_RELU", "abs": "ABS", "log_softmax": "LOG_SOFTMAX", "gelu": "GELU",
}  # fmt: skip
# What the quantizer leaves in float32, between a DEQUANTIZE and a QUANTIZE.
_STAYS_FLOAT = frozenset("RELU6 LEAKY_RELU ABS LOG_SOFTMAX".split())
# Operators whose result has the scale of their input.
_KEEPS_SCALE = frozenset("RESIZE_NEAREST_NEIGHBOR RESIZE_BILINEAR MAX_POOL_2D TRANSPOSE RESHAPE PAD".split())


def lowered(trace: Trace, name: str, is_int8: bool = True) -> TflmGraph:
    """Return the graph that the converter would write for a traced model.

    Args:
        trace: The model on its inputs; the batch is fixed.
        name: Name of the model.
        is_int8: Whether it is quantized; else it stays in float32.
    """
    lowering = _Lowering(trace, is_int8)
    for call in lowering.calls:
        lowering.lower(call)
    return lowering.graph(name)


def _without_repeats(trace: Trace) -> list[OpCall]:
    """Return the operators; the converter computes once what is computed twice from the same tensors."""
    changed = {call.reads[0] for call in trace.ops if call.reads and not call.creates
               and not trace.signatures[call.signature].is_view}  # fmt: skip
    same: dict[int, int] = {}
    results: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    calls: list[OpCall] = []
    for call in trace.ops:
        reads = tuple(same.get(number, number) for number in call.reads)
        result = results.setdefault((call.signature, reads), call.creates)
        if result != call.creates and not changed.intersection((*reads, *result, *call.creates)):
            same.update(zip(call.creates, result, strict=True))
        else:
            calls.append(replace(call, reads=reads))
    return calls


class _Lowering(GraphWriter):
    def __init__(self, trace: Trace, is_int8: bool) -> None:
        super().__init__(is_int8)
        self.trace, self.calls = trace, _without_repeats(trace)
        # By storage, then by shape: views of one storage are different tensors of the graph. None: two views are alike.
        self.values: dict[int, dict[tuple[int, ...], GraphValue | None]] = {}
        # Views and operators in place read what they are themselves.
        self.readers = Counter(number for call in self.calls if call.creates for number in set(call.reads))
        self.reader = {number: call for call in self.calls for number in call.reads}  # the last one
        for number, storage in enumerate(trace.storages):
            if storage.role == "input":
                self._input(number)

    def _input(self, number: int) -> None:
        uses = (
            info
            for call in self.calls
            for place, info in zip(call.reads, self._signature(call).inputs, strict=True)
            if place == number
        )
        first = next(uses, None)
        if first is not None:
            index = self._tensor(first.shape)
            self.inputs.append(index)
            self.values[number] = {first.shape: GraphValue(index, first.shape, False)}

    def graph(self, name: str) -> TflmGraph:
        """Return the finished graph; results leave it as torch has them."""
        if not self.operators:
            raise ConversionFailed("the model has no operator that the converter would write")
        kept = [number for number, storage in enumerate(self.trace.storages)
                if storage.died is None and storage.role == "activation" and number in self.values]  # fmt: skip
        results = [[*self.values[number].values()][-1] for number in kept]
        if None in results:
            raise ConversionFailed("a result is one of several views of a tensor, which is not followed")
        return self.finished(name, [self._plain(value).index for value in results if value is not None])

    def lower(self, call: OpCall) -> None:
        """Write what one operator of torch becomes."""
        signature = self._signature(call)
        self.layer = self.trace.modules[call.module].path or signature.op
        rule = _RULES.get(_torch_name(signature))
        if rule is None:
            raise ConversionFailed(f"what LiteRT writes for {signature.op} is not known; convert the model first")
        result = rule(self, call, signature)
        # A layer may write several tensors, such as paddings; its result has the name of the layer.
        written = self.tensors[result.index]
        if written.name.startswith(f"{self.layer} (") and all(self.layer != it.name for it in self.tensors):
            self.tensors[result.index] = replace(written, name=self.layer)
        shape = signature.outputs[0].shape
        if signature.is_view and not call.creates:
            views = self.values[call.reads[0]]
            is_clear = shape not in views or views[shape] == result
            views[shape] = result if is_clear else None
        else:
            # An operator in place writes to the storage that it reads.
            for number in call.creates or call.reads[:1]:
                self.values[number] = {shape: result}

    def _signature(self, call: OpCall) -> OpSignature:
        return self.trace.signatures[call.signature]

    def _read(self, call: OpCall, place: int = 0) -> GraphValue:
        views = self.values.get(call.reads[place], {})
        value = views.get(self._signature(call).inputs[place].shape)
        if value is None:
            why = "one of several views of a tensor" if views else "a constant"
            raise ConversionFailed(f"an input of {self._signature(call).op} is {why}, which is not followed")
        return value

    def _layer(
        self, op: str, inputs: Sequence[int], source: GraphValue, out: Sequence[int], **options: Any
    ) -> GraphValue:
        """Write an operator that computes with channels last."""
        return replace(source, index=self._write(op, inputs, graph_shape(out, True), **options), shape=tuple(out))

    def _unchanged(self, call: OpCall, signature: OpSignature) -> GraphValue:
        return self._read(call)

    # Products

    def _convolution(self, call: OpCall, signature: OpSignature) -> GraphValue:
        stride, dilation = _sizes(signature, "stride", 1), _sizes(signature, "dilation", 1)
        groups = int(signature.argument("groups", 1))
        source = self._last(self._read(call))
        channels, kernel = source.shape[1], _wide(signature.inputs[1].shape)[2:]
        out = _wide(signature.outputs[0].shape)
        pads = None if signature.argument("padding") == "same" else _sizes(signature, "padding", 0)
        is_depthwise = groups == channels
        source, padding = self._padded(source, out, kernel, stride, dilation, pads, "PAD")
        shape = (1, *kernel, out[1]) if is_depthwise else (out[1], *kernel, channels // groups)
        inputs = (source.index, *self._weights(shape, out[1]))
        return self._layer(
            "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D", inputs, source, out, padding=padding, activation=0,
            stride_h=stride[0], stride_w=stride[1], dilation_h=dilation[0], dilation_w=dilation[1],
        )  # fmt: skip

    def _transposed_convolution(self, call: OpCall, signature: OpSignature) -> GraphValue:
        stride, pads = _sizes(signature, "stride", 1), _sizes(signature, "padding", 0)
        source, out = self._last(self._read(call)), signature.outputs[0].shape
        kernel, sizes = signature.inputs[1].shape[2:], zip(source.shape[2:], stride, out[2:], strict=True)
        is_same = all(size * step == made for size, step, made in sizes)
        is_plain = _sizes(signature, "dilation", 1) == (1, 1) and signature.argument("groups", 1) == 1
        if any(_sizes(signature, "output_padding", 0)) or not is_plain or (any(pads) and not is_same):
            raise ConversionFailed("LiteRT converts a transposed convolution only without groups and output_padding")
        weights, bias = self._weights((out[1], *kernel, source.shape[1]), out[1])
        inputs = (self._integers(*graph_shape(out, True)), weights, source.index, bias)
        padding = _SAME if any(pads) else _VALID
        return self._layer("TRANSPOSE_CONV", inputs, source, out, activation=0, padding=padding, stride_h=stride[0],
                           stride_w=stride[1])  # fmt: skip

    def _weights(self, shape: Sequence[int], outputs: int) -> tuple[int, int]:
        """Return weights with a scale per output, and a bias, which is written in any case."""
        scales = outputs if self.scales else 0
        bias = "int32" if self.scales else "float32"
        return self._tensor(shape, True, scales=scales), self._tensor((outputs,), True, bias, scales)

    def _padded(
        self, value: GraphValue, out: Sequence[int], kernel: tuple[int, ...], stride: tuple[int, int],
        dilation: tuple[int, int], pads: tuple[int, int] | None, op: str,
    ) -> tuple[GraphValue, int]:  # fmt: skip
        """Return the input with the padding that "SAME" and "VALID" cannot express, and which of both is left."""
        sizes = value.shape[2:]
        spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
        totals = [max((made - 1) * step + span - size, 0)
                  for size, made, step, span in zip(sizes, out[2:], stride, spans, strict=True)]  # fmt: skip
        if pads is None or all(total == 2 * pad for total, pad in zip(totals, pads, strict=True)):
            return value, _SAME if pads is None or any(pads) else _VALID
        if not any(pads):
            return value, _VALID
        return self._with_border(value, ((0, 0), (0, 0), (pads[0],) * 2, (pads[1],) * 2), op), _VALID

    def _with_border(self, value: GraphValue, border: Sequence[tuple[int, int]], op: str) -> GraphValue:
        """Return a value with elements added before and after each axis of torch."""
        shape = [size + sum(more) for size, more in zip(value.shape, border, strict=True)]
        numbers = [number for more in graph_shape(border, value.is_last) for number in more]
        inputs = [value.index, self._integers(*numbers, shape=(len(border), 2))]
        if op == "PADV2":
            inputs.append(self._tensor((), True))
        index = self._write(op, inputs, graph_shape(shape, value.is_last))
        return GraphValue(index, tuple(shape), value.is_last, value.is_row)

    def _padding(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value, pads = self._read(call), signature.argument("pad")
        if signature.argument("mode", "constant") != "constant" or value.is_row or min(pads) < 0:
            raise ConversionFailed("what LiteRT writes for this padding is not known; convert the model first")
        border = [(int(low), int(high)) for low, high in zip(pads[::2], pads[1::2], strict=True)]
        border += [(0, 0)] * (len(value.shape) - len(border))
        return self._with_border(value, border[::-1], "PADV2" if signature.argument("value") else "PAD")

    def _linear(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value, out = self._read(call), signature.outputs[0].shape
        # What is flat is read as it is.
        source = self._plain(value) if value.is_last or value.is_row else value
        weight = signature.inputs[1].shape
        inputs = (source.index, *self._weights(weight, weight[0]))
        index = self._write("FULLY_CONNECTED", inputs, out, activation=0, weights_format=0, keep_num_dims=len(out) > 2)
        return GraphValue(index, out, False)

    def _batch_norm(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value = self._read(call)
        if self._folds_back(value, call):
            return value
        channels = value.shape[1]
        shape = (1, 1, 1, channels) if value.is_last else (channels, *(1 for _ in value.shape[2:]))
        # Mean and variance; scale and shift where it has them.
        for op in ("SUB", "MUL", "MUL", "ADD")[: 4 if len(signature.inputs) > 3 else 2]:
            value = self._combined(op, value, self._tensor(shape, True))
        return value

    def _open_maker(self, value: GraphValue, call: OpCall) -> TflmOperator | None:
        """Return the operator that made a value, if it has no activation yet and nothing else reads the value."""
        maker = self._maker(value.index)
        is_alone = not call.creates or self.readers[call.reads[0]] == 1
        return maker if maker is not None and is_alone and maker.options.get("activation") == 0 else None

    def _folds_back(self, value: GraphValue, call: OpCall) -> bool:
        """Return whether constants are folded into the layer that made a value."""
        maker = self._open_maker(value, call)
        return maker is not None and maker.op in _WEIGHTED

    def _folds_on(self, value: GraphValue, call: OpCall, op: str) -> bool:
        """Return whether a constant is folded into the layer that reads the result."""
        result = (call.creates or call.reads)[0]
        reader = self.reader.get(result)
        if reader is None or reader.index <= call.index or self.readers[result] > 1:
            return False
        signature = self._signature(reader)
        if signature.op == "aten.linear":
            return True
        is_padded = signature.argument("padding") == "same" or any(_sizes(signature, "padding", 0))
        return signature.op == "aten.conv2d" and value.is_last and (op in ("mul", "div") or not is_padded)

    # Pools and means

    def _pool(self, call: OpCall, signature: OpSignature) -> GraphValue:
        op = "MAX_POOL_2D" if "max_pool" in signature.op else "AVERAGE_POOL_2D"
        kernel = _sizes(signature, "kernel_size", 1)
        stride = _sizes(signature, "stride", 1) if signature.argument("stride") else kernel
        out, pads = _wide(signature.outputs[0].shape), _sizes(signature, "padding", 0)
        source = self._last(self._read(call))
        border = ((0, 0), (0, 0), (pads[0],) * 2, (pads[1],) * 2)
        if any(pads) and op == "MAX_POOL_2D":
            source, _ = self._padded(source, out, kernel, stride, (1, 1), pads, "PADV2")
        elif any(pads) and signature.argument("count_include_pad", True):
            source = self._with_border(source, border, "PAD")
        elif any(pads) and self._padded(source, out, kernel, stride, (1, 1), pads, "PAD")[0] is not source:
            raise ConversionFailed("what LiteRT writes for this average pool is not known; convert the model first")
        # Padding, strides and the window do not change what is allocated.
        return self._layer(op, (source.index,), source, out, activation=0)

    def _adaptive_pool(self, call: OpCall, signature: OpSignature) -> GraphValue:
        out, source = _wide(signature.outputs[0].shape), self._last(self._read(call))
        steps = [size // made for size, made in zip(source.shape[2:], out[2:], strict=True)]
        if prod(out[2:]) == 1 and not source.is_row:
            return self._layer("MEAN", (source.index, self._integers(2, 1)), source, out, keep_dims=1)
        if prod(out[2:]) == 1:
            turned = self._plain(source, source.shape)
            index = self._write("MEAN", (turned.index, self._integers(3, 2)), out, keep_dims=1)
            return GraphValue(index, out, False, True)
        if [made * step for made, step in zip(out[2:], steps, strict=True)] != [*source.shape[2:]]:
            raise ConversionFailed("what LiteRT writes for this adaptive pool is not known; convert the model first")
        return self._layer("AVERAGE_POOL_2D", (source.index,), source, out, padding=_VALID, stride_h=steps[0],
                           stride_w=steps[1], filter_h=steps[0], filter_w=steps[1])  # fmt: skip

    def _mean(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value, out = self._read(call), signature.outputs[0].shape
        rank, dims = len(value.torch_shape), signature.argument("dim")
        dims = range(rank) if dims is None else dims if isinstance(dims, (list, tuple)) else (dims,)
        axes = [axis % rank for axis in dims]
        op = signature.op.removeprefix("aten.").upper()
        if value.is_last and axes == [2, 3] and len(out) == 4:
            return self._layer(op, (value.index, self._integers(1, 2)), value, out, keep_dims=1)
        source = self._plain(value)
        return GraphValue(self._write(op, (source.index, self._integers(*axes)), out, keep_dims=0), out, False)

    def _resized(self, call: OpCall, signature: OpSignature) -> GraphValue:
        source, out = self._last(self._read(call)), signature.outputs[0].shape
        op = "RESIZE_NEAREST_NEIGHBOR" if "nearest" in signature.op else "RESIZE_BILINEAR"
        return self._layer(op, (source.index, self._integers(*out[2:])), source, out)

    # Arithmetic

    def _unary(self, call: OpCall, signature: OpSignature) -> GraphValue:
        return self._activated(_UNARY[_torch_name(signature)], call)

    def _activated(self, op: str, call: OpCall) -> GraphValue:
        """Return a value after an activation, which is part of the layer before it where that can be."""
        value = self._read(call)
        maker = self._open_maker(value, call)
        fusing = _FUSE_RELU if op == "RELU" else _FUSE_RELU - {"TRANSPOSE_CONV"}
        if op in _FUSED and maker is not None and maker.op in fusing:
            self._changed(value.index, activation=_FUSED[op])
            return value
        return self._computed(op, self._plain(value) if op == "LOG_SOFTMAX" else value)

    def _computed(self, op: str, value: GraphValue) -> GraphValue:
        """Write an operator on single elements, in float32 where the quantizer leaves it so."""
        shape, index = self.tensors[value.index].shape, value.index
        if not self.scales or op not in _STAYS_FLOAT:
            return replace(value, index=self._write(op, (index,), shape))
        index = self._write("DEQUANTIZE", (index,), shape, "float32")
        index = self._write(op, (index,), shape, "float32")
        return replace(value, index=self._write("QUANTIZE", (index,), shape))

    def _hardtanh(self, call: OpCall, signature: OpSignature) -> GraphValue:
        limits = tuple(signature.args[1:3]) or (-1, 1)
        op = "RELU6" if limits == (0, 6) else "RELU_N1_TO_1" if limits == (-1, 1) else None
        if op is None:
            raise ConversionFailed(f"what LiteRT writes for a clamp to {limits} is not known; convert the model first")
        return self._activated(op, call)

    def _hardsigmoid(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value = self._read(call)
        if self._folds_back(value, call):
            self._changed(value.index, activation=_FUSED["RELU6"])
        else:
            value = self._with_constant("ADD", value, _FUSED["RELU6"])
        return value if self._folds_on(value, call, "mul") else self._with_constant("MUL", value)

    def _silu(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value = self._read(call)
        return self._combined("MUL", value, self._computed("LOGISTIC", value).index)

    def _prelu(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value = self._read(call)
        above = self._computed("RELU", value)
        below = self._with_constant("MUL", self._with_constant("MUL", value, _FUSED["RELU"]))
        return self._combined("SUB", above, below.index)

    def _combined(self, op: str, value: GraphValue, other: int, activation: int = 0) -> GraphValue:
        """Write an operator on a value and another tensor, in the shape of the value."""
        shape = self.tensors[value.index].shape
        return replace(value, index=self._write(op, (value.index, other), shape, activation=activation))

    def _with_constant(self, op: str, value: GraphValue, activation: int = 0) -> GraphValue:
        return self._combined(op, value, self._tensor((), True), activation)

    def _elementwise(self, call: OpCall, signature: OpSignature) -> GraphValue:
        torch_op, out = _torch_name(signature), signature.outputs[0].shape
        op = _ELEMENTWISE[torch_op]
        values = [self._read(call, place) for place in range(len(call.reads))]
        if len(values) == 1:
            folds = self._folds_back(values[0], call) or self._folds_on(values[0], call, torch_op)
            return values[0] if folds else self._with_constant("MUL" if op == "DIV" else op, values[0])
        last = next((value for value in values if value.is_last), None)
        rank = len(out)
        places = [
            (self._plain(value) if last is None or len(value.torch_shape) < rank else self._last(value)).index
            for value in values
        ]
        shape = _wide(out) if last is not None and last.is_row else out
        index = self._write(op, places, graph_shape(shape, last is not None), activation=0)
        return GraphValue(index, shape, last is not None, last is not None and last.is_row)

    def _joined(self, call: OpCall, signature: OpSignature) -> GraphValue:
        out = signature.outputs[0].shape
        values = [self._read(call, place) for place in range(len(call.reads))]
        is_last, is_row = all(value.is_last for value in values), all(value.is_row for value in values)
        rescaled = self._rescaled_inputs(call, values)
        aligned = [(self._last if is_last else self._plain)(value) for value in values]
        places = [
            self._write("QUANTIZE", (value.index,), self.tensors[value.index].shape)
            if place in rescaled
            else value.index
            for place, value in enumerate(aligned)
        ]
        shape = _wide(out) if is_last and is_row else out
        index = self._write("CONCATENATION", places, graph_shape(shape, is_last), activation=0, axis=0)
        return GraphValue(index, shape, is_last, is_last and is_row)

    def _rescaled_inputs(self, call: OpCall, values: Sequence[GraphValue]) -> list[int]:
        """Return the inputs of a concatenation that are converted to its scale, as far as shapes can tell.

        All inputs share the scale of the widest range. A layer that only the concatenation reads adopts it; what
        others read, or what keeps the scale of its own input, is converted, unless its range is the widest. Ranges
        are not known: a sum is taken to be wider than its terms, else the earliest input to be the widest, for ranges
        shrink with depth. Of tensors without a common lower end, as ReLU gives them, none has the whole range.
        """
        if not self.scales:
            return []
        makers = [self._maker(value.index) for value in values]
        ops = [None if maker is None else maker.op for maker in makers]
        fixed = [place for place, number in enumerate(call.reads)
                 if self.readers[number] > 1 or ops[place] in (None, *_KEEPS_SCALE)]  # fmt: skip
        has_sum = any(op == "ADD" for place, op in enumerate(ops) if place not in fixed)
        is_positive = all(self._is_positive(value.index) for value in values)
        if has_sum or (len(fixed) > 1 and not is_positive):
            return fixed
        return sorted(fixed, key=lambda place: values[place].index)[1:]

    def _is_positive(self, index: int) -> bool:
        """Return whether a ReLU bounds a tensor."""
        maker = self._maker(index)
        while maker is not None and maker.op in _KEEPS_SCALE:
            maker = self._maker(maker.input_indices[0])
        if maker is not None and maker.op == "CONCATENATION":
            return all(self._is_positive(place) for place in maker.input_indices)
        positive = ("RELU", "RELU6", "LOGISTIC", "QUANTIZE")
        return maker is not None and (maker.op in positive or maker.options.get("activation") in (1, 3))

    def _softmax(self, call: OpCall, signature: OpSignature) -> GraphValue:
        source = self._plain(self._read(call))
        return replace(source, index=self._write("SOFTMAX", (source.index,), source.shape, beta=1.0))

    def _reordered(self, call: OpCall, signature: OpSignature) -> GraphValue:
        """Return a value with its dimensions in another order; what channels last makes of it may be free."""
        value, out = self._read(call), signature.outputs[0].shape
        rank = len(out)
        order = [axis % rank for axis in signature.argument("dims", ())] or [*range(rank)]
        if "dims" not in signature.names:
            first, second = (0, 1) if signature.op == "aten.t" else (int(axis) % rank for axis in signature.args[1:3])
            order[first], order[second] = second, first
        if value.is_last and not value.is_row:
            order = [(0, 3, 1, 2)[axis] for axis in order]
        else:
            value = self._plain(value)
        sizes = self.tensors[value.index].shape
        moved = [axis for axis in order if sizes[axis] > 1]
        if moved == sorted(moved):
            return self._cast_shape(value, out)
        return GraphValue(self._transposed(value.index, order, out), out, False)

    def _reshaped(self, call: OpCall, signature: OpSignature) -> GraphValue:
        value, out = self._read(call), signature.outputs[0].shape
        maker = self._maker(value.index)
        is_flat = (value.is_last or value.is_row) and prod(value.shape[2:]) == 1 and len(out) == 2
        if not is_flat:
            return self._plain(value, out)
        if maker is not None and maker.op == "MEAN" and self.readers[call.reads[0]] <= 2:
            # The mean drops the dimensions itself.
            self.tensors[value.index] = replace(self.tensors[value.index], shape=tuple(out))
            self._changed(value.index, keep_dims=0)
        # A fully connected layer reads it as it is.
        return GraphValue(value.index, tuple(out), False)


def _wide(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape with a height of 1 where it has three dimensions."""
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else tuple(shape)


def _sizes(signature: OpSignature, name: str, default: int) -> tuple[int, int]:
    """Return an argument of a window as height and width; a row has a height of 1."""
    value = signature.argument(name, default)
    if isinstance(value, str):
        return 0, 0  # padding of "valid"
    high, wide = (value[0], value[-1]) if isinstance(value, (list, tuple)) else (value, value)
    return (0 if name == "padding" else 1) if signature.op.endswith("1d") else int(high), int(wide)


def _torch_name(signature: OpSignature) -> str:
    return signature.op.removeprefix("aten.").removesuffix("_").removesuffix(".default")


_Rule = Callable[[_Lowering, OpCall, OpSignature], GraphValue]
# By torch's name.
_RULES: dict[str, _Rule] = {
    "conv_transpose2d": _Lowering._transposed_convolution, "pad": _Lowering._padding, "linear": _Lowering._linear,
    "batch_norm": _Lowering._batch_norm, "hardsigmoid": _Lowering._hardsigmoid, "silu": _Lowering._silu,
    "prelu": _Lowering._prelu, "cat": _Lowering._joined, "softmax": _Lowering._softmax,
    **dict.fromkeys(("conv1d", "conv2d"), _Lowering._convolution),
    **dict.fromkeys(("mean", "sum"), _Lowering._mean),
    **dict.fromkeys(("hardtanh", "clamp"), _Lowering._hardtanh),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), _Lowering._adaptive_pool),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _Lowering._resized),
    **dict.fromkeys("max_pool1d max_pool2d avg_pool1d avg_pool2d".split(), _Lowering._pool),
    **dict.fromkeys("permute transpose t".split(), _Lowering._reordered),
    **dict.fromkeys("view reshape flatten squeeze unsqueeze _unsafe_view".split(), _Lowering._reshaped),
    **dict.fromkeys("dropout feature_dropout contiguous detach clone alias to".split(), _Lowering._unchanged),
    **dict.fromkeys(_UNARY, _Lowering._unary), **dict.fromkeys(_ELEMENTWISE, _Lowering._elementwise),
}  # fmt: skip
