"""Changes that would make a variant faster on a target, each with its predicted gain.

Every gain is a prediction of the changed model by what answers for `profile(target=)`: another platform of the device,
or the same platform with the layers that the change leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from edge_opt.boards.channel_groups import ChannelGroup, channel_groups, narrowed
from edge_opt.boards.class_costs import ModelWork
from edge_opt.boards.fused_layers import FUSED, called_works
from edge_opt.boards.platform_file import Platform
from edge_opt.boards.ratios import PredictedVariant, VariantOnPlatform, predict_variant, ratio_of
from edge_opt.boards.targets import ResolvedTarget, platforms_of
from edge_opt.pruning.ranking import LEAST_MULTIPLE, fast_multiple
from edge_opt.records.compression import HelpfulChange
from edge_opt.records.devices import Precision

_Topic = Literal["precision", "runtime", "prune", "widths", "activations"]
SHOWN = 3
# A change that saves less than this share of the time is not worth the work.
_WORTH_DOING = 0.02


def layers_text(count: int) -> str:
    """Return a number of layers in words."""
    return f"{count} layer" if count == 1 else f"{count} layers"


def helpful_changes(now: PredictedVariant) -> tuple[HelpfulChange, ...]:
    """Return the changes that would help most on the target, the largest gain first; at most three.

    Args:
        now: The variant as it is predicted to run there.
    """
    if now.prediction.seconds is None or now.target.calibration is not None:
        return ()
    changes = [*_other_platforms(now), *_other_layers(now)]
    worth = [change for change in changes if change.latency.ratio < 1 - _WORTH_DOING]
    return tuple(sorted(worth, key=lambda change: change.latency.ratio)[:SHOWN])


def _other_platforms(now: PredictedVariant) -> Iterator[HelpfulChange]:
    """Yield the fastest other precision with the same runtime, and the fastest other runtime in the same precision."""
    own = now.target.platform
    if own is None:
        return
    topics: tuple[_Topic, ...] = ("precision", "runtime")
    for topic in topics:
        known = [platform for platform in platforms_of(now.target.spec) if _is_change(topic, platform, own)]
        changes = [_on_platform(now, platform, topic, own) for platform in known]
        yield from sorted(changes, key=lambda change: change.latency.ratio)[:1]


def _is_change(topic: _Topic, platform: Platform, own: Platform) -> bool:
    """Return whether a platform differs in its precision alone, or only in what runs the same precision."""
    same_run = (platform.engine, platform.runtime, platform.threads, platform.cores) == (
        own.engine, own.runtime, own.threads, own.cores,
    )  # fmt: skip
    same_precision = platform.precision == own.precision
    return same_run and not same_precision if topic == "precision" else same_precision and not same_run


def _on_platform(now: PredictedVariant, platform: Platform, topic: _Topic, own: Platform) -> HelpfulChange:
    precision: Precision = platform.precision  # type: ignore[assignment]
    target = ResolvedTarget(now.prediction.target, now.target.spec, platform)
    latency = ratio_of(now, predict_variant(now.profile, target, precision))
    if topic == "precision":
        return HelpfulChange("precision", f"Run it in {precision} instead of {own.precision}", latency)
    parts = []
    if (platform.runtime, platform.engine) != (own.runtime, own.engine):
        parts.append(f"with {platform.runtime} on the {platform.engine}")
    if platform.threads and platform.threads != own.threads:
        parts.append(f"with {platform.threads} thread{'s' * (platform.threads != 1)}")
    return HelpfulChange("runtime", f"Run it {' '.join(parts) or f'on {platform.cores} cores'}", latency)


def _other_layers(now: PredictedVariant) -> Iterator[HelpfulChange]:
    """Yield what fewer channels, rounded widths and fused activations would bring; only fitted platforms can tell."""
    if now.variant is None:
        return
    groups, multiple = channel_groups(now.profile), fast_multiple(now.target)
    halves = [(group, kept) for group in groups if (kept := _half(group, multiple)) < group.channels]
    changes = []
    for group, kept in halves:
        coupled = f" and {len(group.layers) - 1} coupled with it" if len(group.layers) > 1 else ""
        text = f"Prune {group.layers[0]}{coupled} from {group.channels} to {kept} channels"
        changes.append(_with_work(now, narrowed(now.profile, [(group, kept)]), "prune", text, group.layers))
    yield from sorted(changes, key=lambda change: change.latency.ratio)[:1]
    odd = [
        (it, it.channels // multiple * multiple) for it in groups if it.channels > multiple and it.channels % multiple
    ]
    if odd:
        layers = tuple(path for group, _ in odd for path in group.layers)
        text = f"Round the widths of {layers_text(len(layers))} down to multiples of {multiple}"
        yield _with_work(now, narrowed(now.profile, odd), "widths", text, layers)
    yield from _fused_activations(now)


def _half(group: ChannelGroup, multiple: int) -> int:
    """Return half of the channels, rounded to what kernels run fast; a narrow layer is rounded to less."""
    while multiple > LEAST_MULTIPLE and 2 * multiple > group.channels:
        multiple //= 2
    return max(round(group.channels / 2 / multiple), 1) * multiple


def _fused_activations(now: PredictedVariant) -> Iterator[HelpfulChange]:
    """Yield what activations cost that runtimes do not fuse with the layer before them."""
    kept, names, layers = [], Counter[str](), []
    for call, work, _ in called_works(now.profile):
        if work is None:
            continue
        op = now.profile.trace.signatures[call.signature].op.removeprefix("aten.").removesuffix("_")
        if now.profile.prices[call.signature].kind == "activation" and op not in FUSED:
            names[op] += 1
            layers.append(now.profile.trace.modules[call.module].path)
        else:
            kept.append(work)
    if names:
        listed = ", ".join(f"{count} {name}" for name, count in names.most_common())
        text = f"Replace activations by ReLU, which is fused with the layer before it: {listed}"
        assert now.variant is not None
        fused = replace(now.variant.work, works=tuple(kept))
        yield _with_work(now, fused, "activations", text, tuple(dict.fromkeys(layers)))


def _with_work(
    now: PredictedVariant, work: ModelWork, topic: _Topic, text: str, layers: tuple[str, ...]
) -> HelpfulChange:
    """Return the change that leaves these layers, on the platform that the variant runs on."""
    assert now.target.platform is not None
    variant = VariantOnPlatform(work, now.target.platform)
    changed = replace(now, variant=variant, prediction=replace(now.prediction, seconds=variant.time.seconds))
    return HelpfulChange(topic, text, ratio_of(now, changed), layers)
