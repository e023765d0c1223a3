"""profile(): the whole chain from a model to a ModelProfile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from edge_opt.cost.layers import layer_costs, total_costs, unpriced_operators
from edge_opt.cost.liveness import peak_memory
from edge_opt.cost.registry import clear_prices, price
from edge_opt.devices.roofline import PRECISIONS
from edge_opt.errors import InvalidInput
from edge_opt.records import ModelProfile, Precision
from edge_opt.trace import clear_memo, trace

if TYPE_CHECKING:
    from edge_opt.devices.targets import Found, Target


def profile(
    model: nn.Module,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Literal["eval", "train"] = "eval",
    convention: str = "edge_opt",
    name: str | None = None,
    measure: bool | Mapping[str, Any] = False,
    target: Target | Sequence[Target] | None = None,
    precision: Precision = "fp32",
    time_operators: bool = False,
) -> ModelProfile:
    """What `model` costs on these inputs: per operator, per layer and as a whole, without running it.

    `inputs` is a shape, a tensor, a list with one entry per argument, or a mapping of arguments by name. Under another
    `convention` (fvcore, thop, ptflops, torch, rasp) MACs and FLOPs are what that tool would print. With `measure` it
    is run, too: True, or the options of `edge_opt.measure`; what that finds stands in `measurement`, beside the
    estimates. A `target` is a device of the catalogue, a device file or a `DeviceSpec`, "host", a calibration or its
    file, or a list of them: what the model would take there, at a `precision`, stands in `predictions`. With
    `time_operators` the host times each distinct operator once, for the last few per cent.

    >>> from torch import nn
    >>> profile(nn.Linear(16, 8), (4, 16)).totals.macs == 4 * 16 * 8
    True
    """
    if mode not in ("eval", "train"):
        raise InvalidInput(f"mode is {mode!r}; it must be 'eval' or 'train'")
    targets = _targets(target, precision, time_operators)
    recorded = trace(model, inputs, kwargs, training=mode == "train")
    prices = tuple(price(signature) for signature in recorded.signatures)
    layers = layer_costs(recorded, prices)
    profiled = ModelProfile(
        name=name or recorded.modules[0].kind,
        mode=mode,
        convention="edge_opt",
        trace=recorded,
        prices=prices,
        layers=layers,
        totals=total_costs(recorded, layers),
        peak=peak_memory(recorded),
        unpriced=unpriced_operators(recorded, prices),
    )
    if targets:
        from edge_opt.devices.predictions import predictions

        profiled = replace(profiled, predictions=predictions(profiled, targets, precision))
    if time_operators:
        from edge_opt.devices.predictions import timed_prediction

        profiled = replace(profiled, predictions=(timed_prediction(profiled),))
    if measure is not False:
        from edge_opt.measure.api import measure as measured_now

        options = {} if measure is True else dict(measure)
        measurement = measured_now(model, inputs, kwargs=kwargs, mode=mode, profile=profiled, **options)
        profiled = replace(profiled, measurement=measurement)
    if convention == profiled.convention:
        return profiled
    from edge_opt.cost.conventions import under_convention

    return under_convention(profiled, convention)


def with_predictions(profile: ModelProfile, target: Target, precision: Precision = "fp32") -> ModelProfile:
    """The profile with what the model would take on a target, in place of earlier predictions."""
    from edge_opt.devices.predictions import predictions

    return replace(profile, predictions=predictions(profile, _targets(target, precision, False), precision))


def _targets(target: Target | Sequence[Target] | None, precision: str, is_timed: bool) -> tuple[Found, ...]:
    """The targets, found before any work is done."""
    if precision not in PRECISIONS:
        raise InvalidInput(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if is_timed:
        if target not in ("host", ["host"], ("host",)) or precision != "fp32":
            raise InvalidInput(
                f"operators are timed on this host in fp32, and the target is {target!r} in {precision}; "
                "use target='host', or drop time_operators"
            )
        return ()  # what is timed needs no calibration
    if target is not None:
        from edge_opt.devices.targets import find_targets

        return find_targets(target)
    if precision != "fp32":
        raise InvalidInput(
            f"precision is {precision!r}, and there is no target to predict for; add target=, such as raspberry-pi-4"
        )
    return ()


def clear_caches() -> None:
    """Forget remembered operators and prices; the next profile starts cold."""
    clear_memo()
    clear_prices()
