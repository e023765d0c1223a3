"""ONNX files in each precision, for the runtimes that run them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from edge_opt._support.progress import quiet, report_progress
from edge_opt.quantization.int8_files import (
    Calibrated,
    collect_ranges,
    is_reduced,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
    range_remarks,
    sample_remarks,
)
from edge_opt.quantization.onnx_files import prepare, with_data
from edge_opt.records.conversions import Exported
from edge_opt.runtimes.export import export
from edge_opt.runtimes.protocol import BuiltModel, ConversionRequest
from edge_opt.runtimes.torch_runtime import cast_copy, is_float32
from edge_opt.runtimes.unseen_inputs import split


def build_float(request: ConversionRequest, precision: str) -> BuiltModel:
    """Write the model as ONNX in a floating precision; an export that the caller brings is copied."""
    if precision == "fp32" and request.exported is not None:
        return _copied(request.exported, request.folder)
    report_progress(f"exporting to ONNX in {precision}")
    if precision == "fp32" and is_float32(request.call.model):
        exported = export(request.call, request.path)
    else:
        model, dtype = cast_copy(request.call.model, precision)
        exported = export(request.call, request.path, dtype, model)
    return BuiltModel(request.path, exported.outputs, exported.remarks, reference=request.path, batch=exported.batch)


def _copied(exported: Exported, folder: Path) -> BuiltModel:
    """Copy the export that the caller brings; it keeps its name, which weights beside it go by."""
    copies = [Path(shutil.copyfile(file, folder / file.name)) for file in with_data(Path(exported.path))]
    return BuiltModel(copies[-1], exported.outputs, exported.remarks, reference=copies[-1], batch=exported.batch)


def build_int8(request: ConversionRequest) -> BuiltModel:
    """Write the model in int8 by the scheme of the request; static int8 is one file for all runtimes."""
    return QuantizableModel(request).build(request)


def build_int4(request: ConversionRequest) -> BuiltModel:
    """Write the weights of products in 4 bits, in groups; everything else stays in float."""
    return QuantizableModel(request).build(replace(request, scheme="weights"), bits=4)


class QuantizableModel:
    """A float file, prepared once, with the ranges found once, for as many quantized files as are tried."""

    def __init__(self, request: ConversionRequest) -> None:
        self._float = build_float(replace(request, filename=f"float-{request.filename}"), "fp32")
        with quiet():
            self._source = prepare(self._float.path, request.folder / f"prepared-{request.filename}")
        self._calibrated: Calibrated | None = None

    def build(self, request: ConversionRequest, bits: int = 8) -> BuiltModel:
        """Write one quantized file."""
        report_progress(f"quantizing to {request.precision}, {request.scheme}")
        built = replace(self._float, path=request.path, reference=self._source.path)
        if request.scheme == "static":
            return self._static(request, built)
        remarks = built.remarks
        if request.scheme == "dynamic":
            quantize_dynamic(self._source, request.path, request.keep_float, is_reduced(request.reduce_range))
            remarks = (*remarks, *range_remarks(request.reduce_range))
        else:
            quantize_weights(self._source, request.path, request.keep_float, bits, request.group_size)
        return replace(built, remarks=remarks)

    def _static(self, request: ConversionRequest, built: BuiltModel) -> BuiltModel:
        assert request.calibration is not None
        batches, held_out = split(request.calibration, built.batch) if request.holds_out else (request.calibration, [])
        if self._calibrated is None:
            with quiet():
                self._calibrated = collect_ranges(self._source, request.call.names, batches, held_out)
        calibrated, source = self._calibrated, self._source
        quantize_static(source, request.path, calibrated, request.keep_float, request.reduce_range)

        def twin() -> Path:
            beside = request.path.with_name(f"twin-{request.filename}")
            quantize_static(source, beside, calibrated.twin, request.keep_float, request.reduce_range)
            return beside

        return replace(
            built,
            remarks=(*built.remarks, *range_remarks(request.reduce_range), *sample_remarks(request.calibration)),
            held_out=tuple(held_out),
            twin=twin if held_out else None,
        )
