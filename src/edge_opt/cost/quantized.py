"""Quantisation: simulated, and the products of dynamically quantised layers."""

from __future__ import annotations

from math import prod
from typing import Any

from edge_opt.cost.rules import Work, aten, cost_rule, operator_name, per_output
from edge_opt.records import TensorInfo

QUANTIZE_OPS = 5  # multiply by 1 / scale, round, add the zero point, clamp on both sides
DEQUANTIZE_OPS = 2  # subtract the zero point, multiply by the scale
_OBSERVE_OPS = 2  # the smallest and the largest

for _operator, _ops in (
    (aten.quantize_per_tensor, QUANTIZE_OPS), (aten.quantize_per_channel, QUANTIZE_OPS),
    (aten.quantize_per_tensor_dynamic, QUANTIZE_OPS + _OBSERVE_OPS), (aten.dequantize, DEQUANTIZE_OPS),
    (aten.fake_quantize_per_tensor_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fake_quantize_per_channel_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fake_quantize_per_tensor_affine_cachemask, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fake_quantize_per_channel_affine_cachemask, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten._fake_quantize_learnable_per_tensor_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten._fake_quantize_learnable_per_channel_affine, QUANTIZE_OPS + DEQUANTIZE_OPS),
    (aten.fused_moving_avg_obs_fake_quant, QUANTIZE_OPS + DEQUANTIZE_OPS + _OBSERVE_OPS),
    (aten._fused_moving_avg_obs_fq_helper, QUANTIZE_OPS + DEQUANTIZE_OPS + _OBSERVE_OPS),
):  # fmt: skip
    cost_rule(_operator, kind="quantization")(per_output(operator_name(_operator), _ops))

cost_rule("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::quantize_per_channel",
          kind="quantization")(per_output("quantize", QUANTIZE_OPS))  # fmt: skip
cost_rule("quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel",
          kind="quantization")(per_output("dequantize", DEQUANTIZE_OPS))  # fmt: skip


@cost_rule("quantized::linear_dynamic", "quantized::linear_relu_dynamic", kind="matmul")
def dynamic_linear(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """The input is observed and quantised, multiplied in int8, and the result scaled with its bias.

    The packed weights are no tensor to the trace: one byte for each of in x out.
    """
    inner, outer = x.shape[-1], out.shape[-1]
    return Work(
        macs=out.elements * inner,
        other_ops=x.elements * (_OBSERVE_OPS + QUANTIZE_OPS) + 2 * out.elements,
        bytes_read=x.nbytes + inner * outer,
    )


@cost_rule("quantized::linear_dynamic_fp16", "quantized::linear_relu_dynamic_fp16", kind="matmul")
def half_linear(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """Weights are packed in two bytes each, and widened for the product."""
    inner, outer = x.shape[-1], out.shape[-1]
    return Work(macs=out.elements * inner, other_ops=out.elements, bytes_read=x.nbytes + 2 * inner * outer)


@cost_rule("quantized::linear", "quantized::linear_relu", kind="matmul")
def static_linear(out: TensorInfo, x: TensorInfo, *_: Any, **__: Any) -> Work:
    """An int8 product, its bias, and the result quantised again; packed weights as in the dynamic layer."""
    inner, outer = x.shape[-1], out.shape[-1]
    return Work(
        macs=out.elements * inner,
        other_ops=out.elements * (1 + QUANTIZE_OPS),
        bytes_read=prod(x.shape) + inner * outer,
    )
