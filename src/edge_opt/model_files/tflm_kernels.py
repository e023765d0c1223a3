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
    """The build of TFLM that sizes depend on.

    Attributes:
        kernels: TFLM's own kernels, or CMSIS-NN's where there are any.
        extension: What the core adds to Armv6-M or RISC-V: "dsp" (M4, M7, M33), "mve" (M55, M85) or "none".
        pointer_bytes: 4 on microcontrollers, 8 on a host.
        enum_bytes: 1 on Arm microcontrollers, 4 on RISC-V, Xtensa and hosts.
        is_recording: Whether the recording allocator is meant, which TFLM's own tools use; it is larger.
    """

    kernels: Kernels
    extension: Extension
    pointer_bytes: int = 4
    enum_bytes: int = 1
    is_recording: bool = False

    @property
    def is_cmsis(self) -> bool:
        return self.kernels == "cmsis-nn"

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
# Data that an operator allocates when it is made: bytes with TFLM's own kernels, then with CMSIS-NN's, on 32 bits.
_DATA = {
    "CONV_2D": (56, 60), "DEPTHWISE_CONV_2D": (56, 60), "TRANSPOSE_CONV": (72, 76), "FULLY_CONNECTED": (48, 72),
    "BATCH_MATMUL": (16, 36), "AVERAGE_POOL_2D": (32, 36), "MAX_POOL_2D": (32, 36), "SOFTMAX": (56, 64),
    "SVDF": (36, 40), "UNIDIRECTIONAL_SEQUENCE_LSTM": (688, 912),
}  # fmt: skip
# On a host of 64 bits, where pointers are among it; measured with the package `tflite-micro`.
_HOST_DATA = {
    "CONV_2D": 80, "DEPTHWISE_CONV_2D": 80, "TRANSPOSE_CONV": 88, "FULLY_CONNECTED": 72, "BATCH_MATMUL": 32,
    "SOFTMAX": 80, "CONCATENATION": 80, "ASSIGN_VARIABLE": 4,
}  # fmt: skip
_HOST_FULLY_CONNECTED_OPTIONS = 32
_SAME_DATA = {
    "ADD": 60, "ELU": 256, "SQUARED_DIFFERENCE": 112, "TFLite_Detection_PostProcess": 112, "STRIDED_SLICE": 84,
    "PAD": 56, "PADV2": 56, "SUB": 52, "MUL": 36, "QUANTIZE": 32, "DEQUANTIZE": 32, "DIV": 28, "RELU": 28,
    "PRELU": 28, "ABS": 28, "RSQRT": 28, "CONCATENATION": 24, "LEAKY_RELU": 24, "HARD_SWISH": 20, "MIRROR_PAD": 20,
    "LOGISTIC": 16, "TANH": 16, "RELU6": 8, "CALL_ONCE": 8, "IF": 8, "WHILE": 8, "CIRCULAR_BUFFER": 8,
    "VAR_HANDLE": 4, "L2_NORMALIZATION": 4, "SPACE_TO_BATCH_ND": 4, "SELECT_V2": 1, "SignalWindow": 8,
    "SignalEnergy": 8, "SignalFilterBankLog": 8, "SignalPCAN": 4,
    **dict.fromkeys(_REDUCERS, 44), **dict.fromkeys(_COMPARISONS, 32),
}  # fmt: skip


def option_bytes(operator: TflmOperator, build: TflmBuild) -> tuple[int, int]:
    """Return bytes and alignment of an operator's options; (0, 1) where it has none."""
    if build.pointer_bytes == 8 and operator.op == "FULLY_CONNECTED":
        return _HOST_FULLY_CONNECTED_OPTIONS, 8
    members = "" if operator.is_custom else _OPTIONS.get(operator.op, "")
    return build.struct(members) if members else (0, 1)


def data_bytes(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return the bytes of each allocation that an operator makes at first, before its tensors are known."""
    op = operator.op
    if build.pointer_bytes == 8 and op in _HOST_DATA:
        return [_HOST_DATA[op]]
    if op in _DATA:
        return [_DATA[op][build.is_cmsis]]
    channels = operator.outputs[0].elements if operator.outputs else 0
    is_host = build.pointer_bytes == 8
    if op == "SignalFilterBank":
        return [64 if is_host else 36, 8 * (channels + 1)]
    if op == "SignalFilterBankSpectralSubtraction":
        return [56 if is_host else 44, 4 * channels]
    if op == "SignalRfft":
        complex_bytes = 4 if operator.outputs[0].dtype == "int16" else 8
        length = fft_length(operator)
        twiddles = complex_bytes * (length // 2) + complex_bytes * (3 * length // 4)
        return [32, (304 if is_host else 276) + twiddles]
    return [_SAME_DATA[op]] if op in _SAME_DATA else []


def fft_length(operator: TflmOperator) -> int:
    """Return the points of a real FFT; its result has real and imaginary parts of half of them and one."""
    return operator.outputs[0].shape[-1] - 2


def _both(nbytes: int) -> list[int]:
    return [nbytes, nbytes]


def _shape_copy(tensor: TflmTensor) -> int:
    """Return the bytes of a copied shape: a count and the sizes."""
    return 4 + 4 * len(tensor.shape)


def _prepared_convolution(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, weights = operator.inputs[0], operator.inputs[1]
    assert source is not None and weights is not None
    if build.is_cmsis and source.dtype not in ("int8", "int16"):
        return []
    channels = weights.shape[3 if operator.op == "DEPTHWISE_CONV_2D" else 0]
    return _both(4 * channels)


def _prepared_transpose_conv(operator: TflmOperator, build: TflmBuild) -> list[int]:
    weights = operator.inputs[1]
    assert weights is not None
    return _both(4 * weights.shape[0])


def _is_constant(tensor: TflmTensor | None) -> bool:
    return tensor is None or tensor.is_constant


def _is_pointwise_product(operator: TflmOperator) -> bool:
    """Return whether CMSIS-NN computes a fully connected layer as a convolution of 1x1."""
    weights = operator.inputs[1]
    return weights is not None and len(operator.outputs[0].shape) > 2 and weights.shape[-1] % 4 == 0


def _prepared_fully_connected(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, weights = operator.inputs[0], operator.inputs[1]
    assert source is not None and weights is not None
    sizes = _both(4 * weights.shape[0]) if weights.scales > 1 else []
    is_int8 = source.dtype == weights.dtype == "int8"
    has_sums = build.is_cmsis and build.extension == "mve" and is_int8 and not _is_pointwise_product(operator)
    if has_sums and weights.is_constant and _is_constant(operator.given(2)):
        sizes.append(4 * weights.shape[0])
    return sizes


def _prepared_batch_matmul(operator: TflmOperator, build: TflmBuild) -> list[int]:
    left, right = operator.inputs[0], operator.inputs[1]
    assert left is not None and right is not None
    sizes: list[int] = []
    turned = ((left, operator.options["adj_x"]), (right, not operator.options["adj_y"]))
    for tensor, is_turned in turned:
        if is_turned:
            sizes += [build.struct("2pe")[0], _shape_copy(tensor), tensor.nbytes]
    sizes.append(_shape_copy(operator.outputs[0]))
    if left.dtype in ("int8", "int16"):
        sizes.insert(len(sizes) if build.is_cmsis else 0, 28)
    return sizes


def _prepared_lstm(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, cell = operator.inputs[0], operator.inputs[_LSTM_CELL]
    assert source is not None and cell is not None
    if not build.is_cmsis or source.dtype not in ("int8", "int16") or cell.dtype != "int16":
        return []
    return [(4 if source.dtype == "int8" else 8) * cell.shape[-1]] * 8


def _prepared_svdf(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, weights = operator.inputs[0], operator.inputs[1]
    assert source is not None and weights is not None
    is_summed = build.is_cmsis and build.extension == "mve" and source.dtype == weights.dtype == "int8"
    return [4 * weights.shape[0]] if is_summed else []


def _prepared_if(dtype: str, *sizes: int) -> Callable[[TflmOperator, TflmBuild], list[int]]:
    """Return a rule for operators that allocate only for one type of input."""

    def rule(operator: TflmOperator, build: TflmBuild) -> list[int]:
        source = operator.inputs[0]
        return list(sizes) if source is not None and source.dtype == dtype else []

    return rule


def _copied_shape(operator: TflmOperator, build: TflmBuild) -> list[int]:
    return [_shape_copy(operator.outputs[0])]


_LSTM_CELL = 19
_PREPARED: dict[str, Callable[[TflmOperator, TflmBuild], list[int]]] = {
    "CONV_2D": _prepared_convolution, "DEPTHWISE_CONV_2D": _prepared_convolution,
    "TRANSPOSE_CONV": _prepared_transpose_conv, "FULLY_CONNECTED": _prepared_fully_connected,
    "BATCH_MATMUL": _prepared_batch_matmul, "UNIDIRECTIONAL_SEQUENCE_LSTM": _prepared_lstm,
    "SVDF": _prepared_svdf, "SOFTMAX": _prepared_if("int16", 1026, 1026), "LOG_SOFTMAX": _prepared_if("int8", 28),
    "ADD_N": _prepared_if("int8", 32), "CUMSUM": _prepared_if("int8", 36),
    "EMBEDDING_LOOKUP": lambda operator, build: [8, *_copied_shape(operator, build)],
    **dict.fromkeys("GATHER GATHER_ND DEPTH_TO_SPACE SPACE_TO_DEPTH L2_POOL_2D".split(), _copied_shape),
}  # fmt: skip


def prepared_bytes(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return the bytes of each allocation that an operator makes when its tensors are known."""
    rule = _PREPARED.get(operator.op)
    return rule(operator, build) if rule is not None and not operator.is_custom else []


def _padding(in_size: int, out_size: int, kernel: int, stride: int, dilation: int) -> int:
    """Return the padding at the start: half of the total, rounded down."""
    return max((out_size - 1) * stride + (kernel - 1) * dilation + 1 - in_size, 0) // 2


@dataclass(frozen=True, slots=True)
class _Window:
    """A convolution: sizes of input, kernel and output, strides, and padding at the start; height before width."""

    batch: int
    inputs: tuple[int, int]
    channels: int
    kernel: tuple[int, int]
    outputs: tuple[int, int]
    out_channels: int
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int]
    groups: int

    @property
    def columns(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.channels

    @property
    def is_pointwise(self) -> bool:
        is_plain = self.kernel == self.dilations == (1, 1) and self.pads == (0, 0)
        return is_plain and self.groups == 1

    @property
    def is_row(self) -> bool:
        """Whether CMSIS-NN takes it for a convolution along one row."""
        is_flat = self.inputs[0] == self.kernel[0] == 1 and self.dilations[1] == 1
        return is_flat and self.groups == 1 and self.strides[1] * self.channels % 4 == 0


def _window(operator: TflmOperator) -> _Window:
    source, weights, result = operator.inputs[0], operator.inputs[1], operator.outputs[0]
    assert source is not None and weights is not None
    settings = operator.options
    inputs, outputs, kernel = source.shape[1:3], result.shape[1:3], weights.shape[1:3]
    strides = settings["stride_h"], settings["stride_w"]
    dilations = settings.get("dilation_h", 1), settings.get("dilation_w", 1)
    rows = zip(inputs, outputs, kernel, strides, dilations, strict=True)
    pads = [_padding(*row) for row in rows]
    groups = max(source.shape[3] // max(weights.shape[3], 1), 1)
    return _Window(
        source.shape[0], (inputs[0], inputs[1]), source.shape[3], (kernel[0], kernel[1]), (outputs[0], outputs[1]),
        result.shape[3], strides, dilations, (pads[0], pads[1]), groups,
    )  # fmt: skip


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


def _int4_scratch(operator: TflmOperator) -> list[int]:
    weights = operator.inputs[1]
    return [weights.elements] if weights is not None and weights.dtype == "int4" else []


def _conv_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, weights = operator.inputs[0], operator.inputs[1]
    assert source is not None and weights is not None
    if not build.is_cmsis:
        return _int4_scratch(operator)
    window = _window(operator)
    if source.dtype == "int16":
        mve = 64 * ceil(window.columns / 8)
        return [mve if build.extension == "mve" else 4 * window.columns]
    if source.dtype != "int8" or window.is_pointwise:
        return []
    if weights.dtype == "int4":
        return [4 * window.columns]
    if build.extension == "mve" and window.is_row:
        return [_row_bytes(window, build)]
    return [_columns_bytes(window.columns, build)]


def _depthwise_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source = operator.inputs[0]
    assert source is not None
    if not build.is_cmsis:
        return _int4_scratch(operator)
    if source.dtype != "int8" or build.extension == "none":
        return []
    window = _window(operator)
    area = window.kernel[0] * window.kernel[1]
    if build.extension == "mve" and window.channels == 1 and window.out_channels > 1:
        return [_columns_bytes(area, build) + window.out_channels * area]
    is_plain = window.batch == 1 and window.channels == window.out_channels and window.dilations == (1, 1)
    if not is_plain:
        return []
    if build.extension == "mve":
        return [496 * area]
    is_3x3 = window.kernel == (3, 3) and max(window.pads) <= 1
    return [] if is_3x3 else [2 * window.channels * area]


def _pool_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source = operator.inputs[0]
    assert source is not None
    is_summed = build.is_cmsis and build.extension == "dsp" and source.dtype in ("int8", "int16")
    return [4 * source.shape[3]] if is_summed else []


def _fully_connected_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, weights = operator.inputs[0], operator.inputs[1]
    assert source is not None and weights is not None
    if not build.is_cmsis:
        return _int4_scratch(operator)
    if source.dtype != "int8":
        return []
    outputs = operator.outputs[0].shape[-1]
    if _is_pointwise_product(operator):
        return [] if weights.scales > 1 else [8 * outputs]
    is_fixed = weights.is_constant and _is_constant(operator.given(2))
    return [4 * outputs] if build.extension == "mve" and not is_fixed else []


def _batch_matmul_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source = operator.inputs[0]
    is_summed = build.is_cmsis and build.extension == "mve" and source is not None and source.dtype == "int8"
    return [4 * operator.outputs[0].shape[-1]] if is_summed else []


def _transpose_conv_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    # Its inputs are the shape of the result, the weights, the input, and perhaps a bias.
    weights, source, bias = operator.inputs[1], operator.inputs[2], operator.given(3)
    assert weights is not None and source is not None
    elements = operator.outputs[0].elements
    if source.dtype == "int16":
        is_narrow = bias is not None and bias.dtype == "int16"
        return [8 * elements, *([8 * bias.elements] if is_narrow and bias is not None else [])]
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
    source, cell = operator.inputs[0], operator.inputs[_LSTM_CELL]
    assert source is not None and cell is not None
    is_short = build.is_cmsis and source.dtype in ("int8", "int16")
    return [cell.nbytes] * (3 if is_short else 4)


def _svdf_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, weights, result = operator.inputs[0], operator.inputs[1], operator.outputs[0]
    assert source is not None and weights is not None
    of_filters = 4 * source.shape[0] * weights.shape[0]
    return [of_filters, 4 * source.shape[0] * result.shape[1]] if source.dtype == "int8" else [of_filters]


def _reducer_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source, axes = operator.inputs[0], operator.inputs[1]
    assert source is not None and axes is not None
    is_summed = operator.op in ("MEAN", "SUM") and source.dtype in ("int8", "int16")
    sums = [4 * operator.outputs[0].elements] if is_summed else []
    return [*sums, 4 * len(source.shape), 4 * axes.elements]


def _detection_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    scores, boxes = operator.inputs[1], operator.outputs[0]
    assert scores is not None
    count, classes = scores.shape[-2], scores.shape[-1]
    most = boxes.shape[1] if len(boxes.shape) == 3 else count
    of_classes = [count, 16 * count, 4 * count * classes, 4 * count, 4 * count, 4 * most * count, 4 * most * count]
    return [*of_classes, 4 * count, 4 * most * count, 4 * count * max(classes, most), 4 * count * min(count, most)]


def _mirror_scratch(operator: TflmOperator, build: TflmBuild) -> list[int]:
    source = operator.inputs[0]
    assert source is not None
    return _both(4 * len(source.shape))


_SCRATCH: dict[str, Callable[[TflmOperator, TflmBuild], list[int]]] = {
    "CONV_2D": _conv_scratch, "DEPTHWISE_CONV_2D": _depthwise_scratch, "AVERAGE_POOL_2D": _pool_scratch,
    "FULLY_CONNECTED": _fully_connected_scratch, "BATCH_MATMUL": _batch_matmul_scratch,
    "TRANSPOSE_CONV": _transpose_conv_scratch, "UNIDIRECTIONAL_SEQUENCE_LSTM": _lstm_scratch,
    "SVDF": _svdf_scratch, "MIRROR_PAD": _mirror_scratch,
    "ADD_N": lambda operator, build: [build.pointer_bytes * len(operator.inputs)],
    "SignalRfft": lambda operator, build: [fft_length(operator) * operator.outputs[0].element_bytes],
    "TFLite_Detection_PostProcess": _detection_scratch, **dict.fromkeys(_REDUCERS, _reducer_scratch),
}  # fmt: skip


def scratch_bytes(operator: TflmOperator, build: TflmBuild) -> list[int]:
    """Return the bytes of each scratch buffer that an operator requests, in that order."""
    rule = _SCRATCH.get(operator.op)
    return [] if rule is None else rule(operator, build)
