"""What the published schema of `.tflite` files says: numbers of operators, element types and fields of options."""

from __future__ import annotations

from typing import Any

from edge_opt.model_files.flatbuffer_table import Table

IDENTIFIER = b"TFL3"

# Operators by their number.
OPERATORS = (
    "ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR "
    "FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC "
    "LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH "
    "SVDF TANH CONCAT_EMBEDDINGS SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER "
    "BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE "
    "BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM "
    "ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE "
    "TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK "
    "LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL "
    "FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL "
    "REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND "
    "HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM "
    "BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D IMAG REAL COMPLEX_ABS "
    "HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE "
    "ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU "
    "DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2 "
    "UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD STABLEHLO_DIVIDE "
    "STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE "
    "STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE "
    "STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG "
    "STABLEHLO_MINIMUM STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT "
    "STABLEHLO_SELECT STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT "
    "STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL "
    "STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE "
    "STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT STABLEHLO_CASE"
).split()
CUSTOM = OPERATORS.index("CUSTOM")

# Element types by their number, in torch's names; None for text and handles, which are no tensors.
TYPES: tuple[str | None, ...] = (
    "float32", "float16", "int32", "uint8", "int64", None, "bool", "int16", "complex64", "int8", "float64",
    "complex128", "uint64", None, None, "uint32", "uint16", "int4", "bfloat16", "int2", "uint4", "float8_e4m3fn",
    "float8_e5m2",
)  # fmt: skip

ACTIVATIONS = ("", "RELU", "RELU_N1_TO_1", "RELU6", "TANH", "SIGN_BIT")

_WINDOW = "padding:0b stride_w:1i stride_h:2i"
_REDUCER = "keep_dims:0?"
# Options of an operator: name, number of the field and letter of its type (of a vector after "*"), then its default.
_OPTIONS = {
    "CONV_2D": f"{_WINDOW} activation:3b dilation_w:4i=1 dilation_h:5i=1",
    "DEPTHWISE_CONV_2D": f"{_WINDOW} activation:4b dilation_w:5i=1 dilation_h:6i=1",
    "TRANSPOSE_CONV": f"{_WINDOW} activation:3b",
    "CONV_3D": "padding:0b stride_d:1i stride_w:2i stride_h:3i activation:4b dilation_d:5i=1 dilation_w:6i=1 "
               "dilation_h:7i=1",
    "AVERAGE_POOL_2D": f"{_WINDOW} filter_w:3i filter_h:4i activation:5b",
    "FULLY_CONNECTED": "activation:0b weights_format:1b keep_num_dims:2?",
    "BATCH_MATMUL": "adj_x:0? adj_y:1?",
    "ADD": "activation:0b", "MUL": "activation:0b", "SUB": "activation:0b", "DIV": "activation:0b",
    "L2_NORMALIZATION": "activation:0b", "CONCATENATION": "axis:0i activation:1b", "SOFTMAX": "beta:0f",
    "LOCAL_RESPONSE_NORMALIZATION": "radius:0i", "RESHAPE": "new_shape:0*", "SPACE_TO_DEPTH": "block:0i",
    "DEPTH_TO_SPACE": "block:0i", "GATHER": "axis:0i batch_dims:1i", "SQUEEZE": "axes:0*", "SPLIT": "num_splits:0i",
    "SPLIT_V": "num_splits:0i",
    "STRIDED_SLICE": "begin_mask:0i end_mask:1i ellipsis_mask:2i new_axis_mask:3i shrink_axis_mask:4i offset:5?",
    "SHAPE": "out_type:0b", "PACK": "axis:1i", "ONE_HOT": "axis:0i", "UNPACK": "num:0i axis:1i",
    "LEAKY_RELU": "alpha:0f", "MIRROR_PAD": "mode:0b", "CUMSUM": "exclusive:0? reverse:1?", "GELU": "approximate:0?",
    "SVDF": "rank:0i activation:1b", "LSTM": "activation:0b kernel:3b", "RNN": "activation:0b",
    "UNIDIRECTIONAL_SEQUENCE_LSTM": "activation:0b time_major:3?",
    "BIDIRECTIONAL_SEQUENCE_LSTM": "activation:0b merge_outputs:3? time_major:4?=1",
    "UNIDIRECTIONAL_SEQUENCE_RNN": "time_major:0? activation:1b",
    "IF": "then_branch:0i else_branch:1i", "WHILE": "condition:0i body:1i", "CALL_ONCE": "body:0i",
    "CALL": "body:0I", "STABLEHLO_COMPOSITE": "body:1i",
    **dict.fromkeys("MEAN SUM REDUCE_PROD REDUCE_MAX REDUCE_MIN REDUCE_ANY REDUCE_ALL".split(), _REDUCER),
}  # fmt: skip
_OPTIONS["MAX_POOL_2D"] = _OPTIONS["L2_POOL_2D"] = _OPTIONS["AVERAGE_POOL_2D"]
# Options that name another graph of the file.
GRAPHS = frozenset(("then_branch", "else_branch", "condition", "body"))


def options(op: str, table: Table | None) -> dict[str, Any]:
    """The settings of an operator, by name; defaults where the file leaves them out."""
    found: dict[str, Any] = {}
    for entry in _OPTIONS.get(op, "").split():
        name, _, rest = entry.partition(":")
        place, _, default = rest.partition("=")
        number, form = int(place[:-1]), place[-1]
        if form == "*":
            found[name] = () if table is None else table.numbers(number)
        else:
            otherwise = int(default or 0)
            found[name] = otherwise if table is None else table.number(number, form, otherwise)
    return found
