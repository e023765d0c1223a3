"""What TFLM's kernels allocate for one operator: options, data of the operator, and scratch.

From TFLM of 2026-08-20 and the CMSIS-NN that it pins (2026-06-17). Sizes of structures follow from their members and
the ABI. Formulas follow the kernels; docs/evidence/microcontrollers.md says which were checked by runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Literal

from edge_opt.model_files.tflm_graph import TflmOperator, TflmTensor

Kernels = Literal["reference", "cmsis-nn"]
Extension = Literal["none", "dsp", "mve"]


@dataclass(frozen=True, slots=True)
class TflmBuild:
    """The build of TFLM that sizes depend on."""

    kernels: Kernels  # TFLM's own, or CMSIS-NN's where there are any
    extension: Extension  # beside Armv6-M or RISC-V: "dsp" (M4, M7, M33), "mve" (M55, M85) or "none"
    pointer_bytes: int = 4  # 8 on a host
    enum_bytes: int = 1  # on Arm microcontrollers; 4 on RISC-V, Xtensa and hosts

    @property
    def is_cmsis(self) -> bool:
        return self.kernels == "cmsis-nn"

    @property
    def is_mve_cmsis(self) -> bool:
        return self.is_cmsis and self.extension == "mve"

    @property
    def is_arm(self) -> bool:
        return self.enum_bytes == 1

    @property
    def is_host(self) -> bool:
        """Whether the recording interpreter of the package `tflite-micro` is meant."""
        return self.pointer_bytes == 8

    def struct(self, members: str) -> tuple[int, int]:
        """Return bytes and alignment of a structure: p pointer, i int32, e enum, b bool; 4i is i four times.

        >>> TflmBuild("reference", "dsp").struct("eb"), TflmBuild("reference", "none", 8, 4).struct("eb2p")
        ((2, 1), (24, 8))
        """
        widths = {"p": self.pointer_bytes, "i": 4, "e": self.enum_bytes, "b": 1}
        size, alignment, repeat = 0, 1, ""
        for letter in members:
            if letter.isdigit():
                repeat += letter
                continue
            width = widths[letter]
            size = aligned(size, width) + width * int(repeat or 1)
            alignment, repeat = max(alignment, width), ""
        return aligned(size, alignment), alignment


# What an operator allocates in a build.
Rule = Callable[[TflmOperator, TflmBuild], list[int]]


def aligned(nbytes: int, alignment: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-nbytes // alignment) * alignment


# Members of the structures that options of builtin operators are read into.
_POOL, _RESIZE, _REDUCER = "e4ie4i", "2b", "b"
_OPTIONS = {
    "CONV_2D": "e2ie2ie", "DEPTHWISE_CONV_2D": "e3ie2i", "AVERAGE_POOL_2D": _POOL, "MAX_POOL_2D": _POOL,
    "L2_POOL_2D": _POOL, "RESHAPE": "9i", "SQUEEZE": "9i", "STRIDED_SLICE": "5ib", "TRANSPOSE_CONV": "e2i2e",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "e2i3b", "CONCATENATION": "ie", "GATHER": "2i", "IF": "2i", "WHILE": "2i",
    "PACK": "2i", "UNPACK": "2i", "SVDF": "ieb", "VAR_HANDLE": "2p", "CALL_ONCE": "i", "DEPTH_TO_SPACE": "i",
    "SPACE_TO_DEPTH": "i", "LEAKY_RELU": "i", "SOFTMAX": "i", "SPLIT": "i", "SPLIT_V": "i",
    "FULLY_CONNECTED": "2e2be", "BATCH_MATMUL": "3b", "ADD": "eb", "SUB": "eb", "CAST": "2e", "CUMSUM": "2b",
    "RESIZE_BILINEAR": _RESIZE, "RESIZE_NEAREST_NEIGHBOR": _RESIZE,
    **dict.fromkeys("MUL DIV ARG_MAX ARG_MIN L2_NORMALIZATION MIRROR_PAD SHAPE".split(), "e"),
    **dict.fromkeys("MEAN SUM REDUCE_MAX REDUCE_MIN REDUCE_ALL".split(), _REDUCER),
}  # fmt: skip

_COMPARISONS = "EQUAL NOT_EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL".split()
_REDUCERS = "MEAN SUM REDUCE_MAX REDUCE_MIN REDUCE_ALL".split()
# Data that an operator allocates when it is made: the same in every build.
_DATA = {
    "ADD": 60, "ELU": 256, "SQUARED_DIFFERENCE": 112, "TFLite_Detection_PostProcess": 112, "STRIDED_SLICE": 84,
    "PAD": 56, "PADV2": 56, "SUB": 52, "MUL": 36, "QUANTIZE": 32, "DEQUANTIZE": 32, "DIV": 28, "RELU": 28,
    "PRELU": 28, "ABS": 28, "RSQRT": 28, "LEAKY_RELU": 24, "HARD_SWISH": 20, "MIRROR_PAD": 20, "LOGISTIC": 16,
    "TANH": 16, "RELU6": 8, "CALL_ONCE": 8, "IF": 8, "WHILE": 8, "CIRCULAR_BUFFER": 8, "VAR_HANDLE": 4,
    "L2_NORMALIZATION": 4, "SPACE_TO_BATCH_ND": 4, "SELECT_V2": 1, "SignalWindow": 8, "SignalEnergy": 8,
    "SignalFilterBankLog": 8, "SignalPCAN": 4,
    **dict.fromkeys(_REDUCERS, 44), **dict.fromkeys(_COMPARISONS, 32),
}  # fmt: skip
# The same with TFLM's own kernels, with CMSIS-NN's, and on a host of 64 bits (measured with `tflite-micro`).
_DATA_BY_BUILD = {
    "CONV_2D": (56, 60, 80), "DEPTHWISE_CONV_2D": (56, 60, 80), "TRANSPOSE_CONV": (72, 76, 88),
    "FULLY_CONNECTED": (48, 72, 72), "BATCH_MATMUL": (16, 36, 32), "AVERAGE_POOL_2D": (32, 36, 32),
    "MAX_POOL_2D": (32, 36, 32), "SOFTMAX": (56, 64, 80), "SVDF": (36, 40, 36), "CONCATENATION": (24, 24, 80),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": (688, 912, 688), "ASSIGN_VARIABLE": (0, 0, 4),
}  # fmt: skip
_HOST_FULLY_CONNECTED_OPTIONS = 32


def option_bytes(operator: TflmOperator, build: TflmBuild) -> tuple[int, int]:
    """Return bytes and alignment of an operator's options; (0, 1) where it has none."""
    if build.is_host and operator.op == "FULLY_CONNECTED":
        return _HOST_FULLY_CONNECTED_OPTIONS, 8
    members = "" if operator.is_custom else _OPTIONS.get(operator.op, "")
    return build.struct(members) if members else (0, 1)


def data_bytes(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return the bytes of each allocation that an operator makes at first, before its tensors are known."""
    op = operator.op
    if op in _DATA_BY_BUILD:
        reference, cmsis, host = _DATA_BY_BUILD[op]
        nbytes = host if build.is_host else cmsis if build.is_cmsis else reference
        return [nbytes] if nbytes else []
    channels = operator.outputs[0].elements if operator.outputs else 0
    if op == "SignalFilterBank":
        return [64 if build.is_host else 36, 8 * (channels + 1)]
    if op == "SignalFilterBankSpectralSubtraction":
        return [56 if build.is_host else 44, 4 * channels]
    if op == "SignalRfft":
        complex_bytes = 4 if operator.outputs[0].dtype == "int16" else 8
        length = fft_length(operator)
        twiddles = complex_bytes * (length // 2) + complex_bytes * (3 * length // 4)
        return [32, (304 if build.is_host else 276) + twiddles]
    return [_DATA[op]] if op in _DATA else []


def fft_length(operator: TflmOperator) -> int:
    """Return the points of a real FFT; its result has real and imaginary parts of half of them and one."""
    return operator.outputs[0].shape[-1] - 2


def _shape_copy(tensor: TflmTensor) -> int:
    """Return the bytes of a copied shape: a count and the sizes."""
    return 4 + 4 * len(tensor.shape)


def _channel_tables(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return the bytes of a multiplier and a shift for each channel of a convolution."""
    weights, is_depthwise = operator.needed(1), operator.op == "DEPTHWISE_CONV_2D"
    if build.is_cmsis and operator.op != "TRANSPOSE_CONV" and not operator.needed(0).is_quantized:
        return []
    return [4 * weights.shape[3 if is_depthwise else 0]] * 2


def _has_constant_weights(operator: TflmOperator) -> bool:
    weights, bias = operator.needed(1), operator.given(2)
    return weights.is_constant and (bias is None or bias.is_constant)


def _is_pointwise_product(operator: TflmOperator) -> bool:
    """Return whether CMSIS-NN computes a fully connected layer as a convolution of 1x1."""
    return len(operator.outputs[0].shape) > 2 and operator.needed(1).shape[-1] % 4 == 0


def _is_int8(operator: TflmOperator) -> bool:
    return operator.needed(0).dtype == operator.needed(1).dtype == "int8"


def _prepared_fully_connected(operator: TflmOperator, build: TflmBuild) -> list[int]:
    weights = operator.needed(1)
    sizes = [4 * weights.shape[0]] * (2 if weights.scales > 1 else 0)
    is_summed = build.is_mve_cmsis and _is_int8(operator) and not _is_pointwise_product(operator)
    if is_summed and _has_constant_weights(operator):
        sizes.append(4 * weights.shape[0])
    return sizes


def _prepared_batch_matmul(operator: TflmOperator, build: TflmBuild) -> list[int]:
    left, right = operator.needed(0), operator.needed(1)
    sizes: list[int] = []
    for tensor, is_turned in ((left, operator.options["adj_x"]), (right, not operator.options["adj_y"])):
        if is_turned:
            sizes += [build.struct("2pe")[0], _shape_copy(tensor), tensor.nbytes]
    sizes.append(_shape_copy(operator.outputs[0]))
    if left.is_quantized:
        sizes.insert(len(sizes) if build.is_cmsis else 0, 28)
    return sizes


def _prepared_lstm(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, cell = operator.needed(0), operator.needed(_LSTM_CELL)
    if not build.is_cmsis or not source.is_quantized or cell.dtype != "int16":
        return []
    return [(4 if source.dtype == "int8" else 8) * cell.shape[-1]] * 8


def _prepared_svdf(operator: TflmOperator, build: TflmBuild) -> list[int]:
    return [4 * operator.needed(1).shape[0]] if build.is_mve_cmsis and _is_int8(operator) else []


def _prepared_if(dtype: str, *sizes: int) -> Rule:
    """Return a rule for operators that allocate only for one type of input."""
    return lambda operator, build: list(sizes) if operator.needed(0).dtype == dtype else []


def _copied_shape(operator: TflmOperator, build: TflmBuild) -> list[int]:
    return [_shape_copy(operator.outputs[0])]


_LSTM_CELL = 19
_PREPARED: dict[str, Rule] = {
    **dict.fromkeys("CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV".split(), _channel_tables),
    "FULLY_CONNECTED": _prepared_fully_connected, "BATCH_MATMUL": _prepared_batch_matmul, "SVDF": _prepared_svdf,
    "UNIDIRECTIONAL_SEQUENCE_LSTM": _prepared_lstm, "SOFTMAX": _prepared_if("int16", 1026, 1026),
    "LOG_SOFTMAX": _prepared_if("int8", 28), "ADD_N": _prepared_if("int8", 32), "CUMSUM": _prepared_if("int8", 36),
    "EMBEDDING_LOOKUP": lambda operator, build: [8, *_copied_shape(operator, build)],
    **dict.fromkeys("GATHER GATHER_ND DEPTH_TO_SPACE SPACE_TO_DEPTH L2_POOL_2D".split(), _copied_shape),
}  # fmt: skip


def prepared_bytes(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return the bytes of each allocation that an operator makes when its tensors are known."""
    rule = _PREPARED.get(operator.op)
    return rule(operator, build) if rule is not None and not operator.is_custom else []


class _Window:
    """A convolution: sizes of input, kernel and output, and padding at the start; height before width."""

    def __init__(self, operator: TflmOperator) -> None:
        settings, weights = operator.options, operator.needed(1)
        self.batch, *self.inputs, self.channels = operator.needed(0).shape
        _, *self.outputs, self.out_channels = operator.outputs[0].shape
        self.kernel = list(weights.shape[1:3])
        self.strides: list[int] = [settings["stride_h"], settings["stride_w"]]
        self.dilations: list[int] = [settings.get("dilation_h", 1), settings.get("dilation_w", 1)]
        self.groups = max(self.channels // max(weights.shape[3], 1), 1)
        sizes = zip(self.inputs, self.outputs, self.kernel, self.strides, self.dilations, strict=True)
        # Half of the total, rounded down.
        self.pads = [max((out - 1) * step + (kernel - 1) * dilation + 1 - size, 0) // 2
                     for size, out, kernel, step, dilation in sizes]  # fmt: skip

    @property
    def columns(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.channels

    @property
    def is_pointwise(self) -> bool:
        return self.kernel == self.dilations == [1, 1] and self.pads == [0, 0] and self.groups == 1

    @property
    def is_row(self) -> bool:
        """Whether CMSIS-NN takes it for a convolution along one row."""
        is_flat = self.inputs[0] == self.kernel[0] == 1 and self.dilations[1] == 1
        return is_flat and self.groups == 1 and self.strides[1] * self.channels % 4 == 0


def _columns_bytes(columns: int, build: TflmBuild) -> int:
    """Return the bytes for columns of an int8 convolution: four on MVE, else two widened to 16 bits."""
    return 64 * ceil(columns / 16) if build.extension == "mve" else 4 * aligned(columns, 4)


def _row_bytes(window: _Window, build: TflmBuild) -> int:
    """Return the scratch of a convolution along one row on MVE."""
    stride, pad, channels, kernel = window.strides[1], window.pads[1], window.channels, window.kernel[1]
    total = (window.outputs[1] - 1) * stride + kernel - window.inputs[1]
    odd = total % 2 if total >= 0 else -(-total % 2)
    left = max(1, (pad + stride - 1) // stride) if pad else 0
    # C divides towards zero; only a negative sum differs, and the maximum covers it.
    right = max(1, (pad + odd + stride - 1) // stride) if pad + odd else 0
    if left + right > window.outputs[1]:
        return _columns_bytes(window.columns, build)
    return max((kernel + pad) * channels, (kernel - 1) * channels + (right if odd else pad) * channels)


def _int4_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return a byte for each weight of four bits: TFLM's own kernels widen them."""
    weights = operator.needed(1)
    return [weights.elements] if weights.dtype == "int4" else []


def _conv_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, window, is_mve = operator.needed(0), _Window(operator), build.extension == "mve"
    if source.dtype == "int16":
        return [64 * ceil(window.columns / 8) if is_mve else 4 * window.columns]
    if source.dtype != "int8" or window.is_pointwise:
        return []
    if operator.needed(1).dtype == "int4":
        return [4 * window.columns]
    return [_row_bytes(window, build) if is_mve and window.is_row else _columns_bytes(window.columns, build)]


def _depthwise_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    if operator.needed(0).dtype != "int8" or build.extension == "none":
        return []
    window = _Window(operator)
    area = window.kernel[0] * window.kernel[1]
    if build.extension == "mve" and window.channels == 1 and window.out_channels > 1:
        return [_columns_bytes(area, build) + window.out_channels * area]
    if window.batch != 1 or window.channels != window.out_channels or window.dilations != [1, 1]:
        return []
    if build.extension == "mve":
        return [496 * area]
    is_3x3 = window.kernel == [3, 3] and max(window.pads) <= 1
    return [] if is_3x3 else [2 * window.channels * area]


def _pool_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source = operator.needed(0)
    return [4 * source.shape[3]] if build.extension == "dsp" and source.is_quantized else []


def _fully_connected_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    if operator.needed(0).dtype != "int8":
        return []
    outputs = operator.outputs[0].shape[-1]
    if _is_pointwise_product(operator):
        return [] if operator.needed(1).scales > 1 else [8 * outputs]
    return [4 * outputs] if build.extension == "mve" and not _has_constant_weights(operator) else []


def _batch_matmul_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    is_summed = build.extension == "mve" and operator.needed(0).dtype == "int8"
    return [4 * operator.outputs[0].shape[-1]] if is_summed else []


def _transpose_conv_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    # Its inputs are the shape of the result, the weights, the input, and perhaps a bias.
    weights, source, bias = operator.needed(1), operator.needed(2), operator.given(3)
    elements = operator.outputs[0].elements
    if source.dtype == "int16":
        return [8 * elements, *([8 * bias.elements] if bias is not None and bias.dtype == "int16" else [])]
    if source.dtype != "int8":
        return []
    if not build.is_cmsis:
        return [4 * elements]
    out_channels, high, wide, channels = weights.shape
    stride_h, stride_w = operator.options["stride_h"], operator.options["stride_w"]
    if max(stride_h, stride_w) <= 2 and channels > 16:
        return [_columns_bytes(high * wide * channels, build), high * wide * channels * out_channels]
    width = (source.shape[2] - 1) * stride_w + max(wide, stride_h)
    return [4 * width * out_channels * max(high, stride_h), 0]


def _lstm_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    is_short = build.is_cmsis and operator.needed(0).is_quantized
    return [operator.needed(_LSTM_CELL).nbytes] * (3 if is_short else 4)


def _svdf_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source = operator.needed(0)
    sizes = [4 * source.shape[0] * operator.needed(1).shape[0]]
    return [*sizes, 4 * source.shape[0] * operator.outputs[0].shape[1]] if source.dtype == "int8" else sizes


def _reducer_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source = operator.needed(0)
    is_summed = operator.op in ("MEAN", "SUM") and source.is_quantized
    sums = [4 * operator.outputs[0].elements] if is_summed else []
    return [*sums, 4 * len(source.shape), 4 * operator.needed(1).elements]


def _detection_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    scores, boxes = operator.needed(1), operator.outputs[0]
    count, classes = scores.shape[-2], scores.shape[-1]
    most = boxes.shape[1] if len(boxes.shape) == 3 else count
    of_classes = [count, 16 * count, 4 * count * classes, 4 * count, 4 * count, 4 * most * count, 4 * most * count]
    return [*of_classes, 4 * count, 4 * most * count, 4 * count * max(classes, most), 4 * count * min(count, most)]


# With any kernels, then with one kind of kernels alone.
_SCRATCH: dict[str, Rule] = {
    "TRANSPOSE_CONV": _transpose_conv_scratch, "UNIDIRECTIONAL_SEQUENCE_LSTM": _lstm_scratch, "SVDF": _svdf_scratch,
    "MIRROR_PAD": lambda operator, build: [4 * len(operator.needed(0).shape)] * 2,
    "ADD_N": lambda operator, build: [build.pointer_bytes * len(operator.inputs)],
    "SignalRfft": lambda operator, build: [fft_length(operator) * operator.outputs[0].element_bytes],
    "TFLite_Detection_PostProcess": _detection_scratch, **dict.fromkeys(_REDUCERS, _reducer_scratch),
}  # fmt: skip
_KERNEL_SCRATCH: dict[Kernels, dict[str, Rule]] = {
    "reference": dict.fromkeys("CONV_2D DEPTHWISE_CONV_2D FULLY_CONNECTED".split(), _int4_scratch),
    "cmsis-nn": {
        "CONV_2D": _conv_scratch, "DEPTHWISE_CONV_2D": _depthwise_scratch, "AVERAGE_POOL_2D": _pool_scratch,
        "FULLY_CONNECTED": _fully_connected_scratch, "BATCH_MATMUL": _batch_matmul_scratch,
    },
}  # fmt: skip


def scratch_bytes(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return the bytes of each scratch buffer that an operator requests, in that order."""
    rule = _SCRATCH.get(operator.op) or _KERNEL_SCRATCH[build.kernels].get(operator.op)
    return [] if rule is None else rule(operator, build)
