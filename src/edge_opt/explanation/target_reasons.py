"""Why a change saves what it saves on a target: classes of work, layers in float, operators that nobody timed there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge_opt import units
from edge_opt.boards.class_costs import CLASSES
from edge_opt.boards.fused_layers import floating_itemsize
from edge_opt.boards.ratios import PredictedVariant, VariantOnPlatform
from edge_opt.records.compression import Reason
from edge_opt.records.predictions import LatencyRatio

_WORDS = {
    "conv3x3": "3x3 convolutions", "conv1x1": "1x1 convolutions", "conv": "strided and large convolutions",
    "first": "the first convolution", "depthwise": "depthwise convolutions", "grouped": "grouped convolutions",
    "linear": "linear layers", "product": "matrix products", "attention": "attention", "weights": "reading weights",
    "elementwise": "element-wise layers", "pooled": "pooling", "moved": "copies", "layers": "calling layers",
    "detections": "detection heads",
}  # fmt: skip
# A class that a precision makes faster by less than this gains nothing; one with less of the time is not listed.
_GAINED = 1.1
_WORTH_SAYING = 0.02


def target_reasons(old: PredictedVariant, new: PredictedVariant) -> Iterator[Reason]:
    """Yield the reasons that only a target has.

    Args:
        old: The first model as it is predicted to run there.
        new: The second model.
    """
    yield from _classes_without_gain(old, new)
    yield from _float_layers(new)
    outside = new.prediction.outside
    if outside:
        npu = " Its runtime may run them on the CPU, and copy tensors to and fro" * (new.target.spec.engine == "npu")
        paths = tuple(layer.path for layer in new.prediction.layers if layer.is_outside)
        named = ", ".join(dict.fromkeys(_word(name) if name in CLASSES else name for name in outside))
        what = f"Few models that were timed there have {named}, so the interval is wide.{npu}"
        yield Reason("outside", what, None, paths)
    platforms = [side.target.platform for side in (old, new)]
    if platforms[0] is not None and platforms[1] is not None and platforms[0].runtime != platforms[1].runtime:
        runtimes = [platform.runtime for platform in platforms if platform is not None]
        yield Reason("runtime", f"The first runs with {runtimes[0]} there and the second with {runtimes[1]}")
    for remark in dict.fromkeys(side.prediction.remarks[0] for side in (old, new) if side.prediction.remarks):
        yield Reason("prediction", f"predicted, not measured: {remark}")


def _word(name: str) -> str:
    return _WORDS[name if name in _WORDS else name.rpartition("_")[0]]


def _classes_without_gain(old: PredictedVariant, new: PredictedVariant) -> Iterator[Reason]:
    """Report the classes of work that the new precision does not make faster: the same layers, on both platforms."""
    if old.prediction.precision == new.prediction.precision or old.variant is None or new.variant is None:
        return
    times = []
    for platform in (old.variant.platform, new.variant.platform):
        by_module = VariantOnPlatform(new.variant.work, platform).time.by_module
        by_word: dict[str, float] = {}
        for name, seconds in zip(CLASSES, np.sum(list(by_module.values()), axis=0), strict=True):
            by_word[_word(name)] = by_word.get(_word(name), 0.0) + float(seconds)
        times.append(by_word)
    total = sum(times[1].values())
    slow = {
        word: seconds
        for word, seconds in times[1].items()
        if seconds >= _WORTH_SAYING * total and times[0][word] < _GAINED * seconds
    }
    if slow:
        listed = ", ".join(
            f"{word} {units.duration(times[0][word])} to {units.duration(seconds)}"
            for word, seconds in sorted(slow.items(), key=lambda item: -item[1])
        )
        spent = sum(slow.values())
        share = f"{units.duration(spent)}, {spent / total * 100:.1f} % of the time"
        what = f"Work that {new.prediction.precision} does not make faster there: {share} ({listed})"
        yield Reason("classes", what, spent)


def _float_layers(new: PredictedVariant) -> Iterator[Reason]:
    """Report layers of a file that compute in float although the file is in int8."""
    profile = new.profile
    if new.prediction.precision != "int8" or profile.computes_in != "int8":
        return
    paths: dict[str, None] = {}
    for call in profile.trace.ops:
        signature, price = profile.trace.signatures[call.signature], profile.prices[call.signature]
        is_float = bool(signature.outputs) and floating_itemsize(signature.outputs[0].dtype) > 0
        if price.status == "priced" and price.kind != "quantization" and is_float and not signature.is_view:
            paths[profile.trace.modules[call.module].path] = None
    if paths:
        listed = ", ".join([path or "the model itself" for path in paths][:4])
        leave = ", and leave the NPU" * (new.target.spec.engine == "npu")
        what = f"In float although the file is in int8: {len(paths)} layers{leave} ({listed})"
        yield Reason("float layers", what, None, tuple(paths))


def target_headline(latency: LatencyRatio, costs: str) -> str:
    """Return the result on a target in one sentence.

    Args:
        latency: Predicted times before and after.
        costs: Change of MACs and bytes, in words.
    """
    times = f"{units.duration(latency.before_s)} before, {units.duration(latency.after_s)} after"
    # The speedup is one over the ratio, so that the ends of its interval change places.
    interval = f"90 % interval {1 / latency.high:.2f}–{1 / latency.low:.2f}"
    speed = f"{1 / latency.ratio:.2f}{units.TIMES} as fast on {latency.target} ({interval}; predicted: {times})"
    undecided = "" if latency.is_decided else "; the interval contains 1, so a difference is not certain"
    return f"{speed}{undecided}; {costs}"
