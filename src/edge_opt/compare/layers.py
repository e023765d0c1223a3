"""Layers of a profile, as a comparison sees them."""

from __future__ import annotations

from edge_opt.records import LayerFigures, ModelProfile


def layer_figures(profile: ModelProfile) -> tuple[LayerFigures, ...]:
    """Every leaf call in order of execution, and every other call that works or holds parameters itself."""
    measured = profile.measurement.layers.layers if profile.measurement and profile.measurement.layers else ()
    seconds = {layer.module: layer.seconds for layer in measured}
    predicted = {layer.module: layer.seconds for layer in profile.prediction.layers} if profile.prediction else {}
    return tuple(
        LayerFigures(
            path=layer.call.path,
            kind=layer.call.kind,
            call_number=layer.call.call_number,
            input_shapes=layer.call.input_shapes,
            output_shapes=layer.call.output_shapes,
            params=layer.call.params,
            param_bytes=layer.call.param_bytes,
            macs=layer.cost.macs,
            flops=layer.cost.flops,
            bytes_moved=layer.cost.bytes_moved,
            activation_bytes=layer.activation_bytes,
            peak_live_bytes=layer.peak_live_bytes,
            unpriced=layer.unpriced,
            measured_s=seconds.get(layer.call.index),
            predicted_s=predicted.get(layer.call.index),
        )
        for layer in profile.layers
        if layer.call.is_leaf or layer.operators or layer.call.params or layer.activation_bytes
    )
