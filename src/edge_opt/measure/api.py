"""measure(): what a model takes on this machine, whole and layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from edge_opt.cost.layers import layer_costs
from edge_opt.cost.registry import price
from edge_opt.errors import InvalidInput
from edge_opt.measure.device import Device, find_device
from edge_opt.measure.environment import read_environment
from edge_opt.measure.latency import Progress, check_repeats, interleaved, longest_time_s
from edge_opt.measure.layers import layer_latencies
from edge_opt.measure.recorder import Recorder, clock_of, recording_cost
from edge_opt.measure.session import Caller, call_on, first_dimension, on_device, ready
from edge_opt.measure.stopwatch import Runner
from edge_opt.records import (
    Energy,
    Latency,
    LayerCost,
    LayerLatencies,
    MeasuredMemory,
    Measurement,
    ModelProfile,
    Refusal,
    Trace,
)
from edge_opt.trace import trace
from edge_opt.trace.inputs import CallArguments


def measure(
    model: nn.Module,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
    batch_size: int | None = None,
    min_time_s: float = 1.0,
    max_time_s: float | None = None,
    target_precision: float = 0.02,
    threads: int | None = None,
    layers: bool = True,
    memory: bool = True,
    energy: str | None = "auto",
    power_watts: float | None = None,
    subtract_idle: bool = False,
    mode: Literal["eval", "train"] = "eval",
    profile: ModelProfile | None = None,
    progress: Progress | None = None,
    repeats: int | None = None,
    warmup: int = 0,
) -> Measurement:
    """What `model` takes here on these inputs: latency, each layer's share of it, memory and energy of one forward.

    `inputs` are as in `profile`; a shape is filled with random numbers. `batch_size` is the number of samples in one
    forward, for the throughput: the first dimension of the first tensor unless said otherwise. A model that lives
    elsewhere than `device` is copied there. `profile` spares tracing the model again. With `repeats` it is run exactly
    that many times, after `warmup` untimed runs, instead of until its latency is known well enough.

    >>> from torch import nn
    >>> found = measure(nn.Linear(16, 8), (4, 16), min_time_s=0.01, memory=False, energy=None)
    >>> found.latency.batch_size, [row.kind for row in found.layers.layers]
    (4, ['Linear'])
    """
    if mode not in ("eval", "train"):
        raise InvalidInput(f"mode is {mode!r}; it must be 'eval' or 'train'")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise InvalidInput(f"threads is {threads!r}; it must be a whole number of at least 1")
    check_repeats(repeats, warmup)
    limit_s = longest_time_s(min_time_s, max_time_s, target_precision, 1 if batch_size is None else batch_size)
    place = find_device(device)
    traced, costs = _traced(model, inputs, kwargs, mode, profile)
    subject = on_device(model, place)
    arguments = call_on(subject, inputs, kwargs, place)
    caller = Caller(subject, arguments)
    plain = caller.runner()
    with ready(subject, traced, mode == "train", threads):
        environment = read_environment(place.name)
        remarks = _output_remarks(plain.once())
        recorder = Recorder(subject, traced.modules, clock_of(place)) if layers else None
        latencies = interleaved(
            {"plain": plain} | ({} if recorder is None else {"recorded": caller.runner(recorder)}),
            batch_size=first_dimension(arguments) if batch_size is None else batch_size,
            min_time_s=min_time_s,
            max_time_s=limit_s,
            target_precision=target_precision,
            device=place,
            environment=environment,
            progress=progress,
            repeats=repeats,
            warmup=warmup,
        )
        latency = replace(latencies["plain"], remarks=(*latencies["plain"].remarks, *remarks))
        joules, refusals = _energy(plain, latency, place, profile, energy, power_watts, subtract_idle)
    return Measurement(
        latency=latency,
        layers=None if recorder is None else _layers(costs, latency, latencies["recorded"], recorder, place),
        memory=_memory(subject, arguments, traced, place, mode) if memory else None,
        energy=joules,
        energy_refusals=refusals,
        environment=environment,
    )


def _traced(
    model: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None, mode: str, profile: ModelProfile | None
) -> tuple[Trace, Sequence[LayerCost]]:
    """What the model calls and what that costs: from the profile, or found now."""
    if profile is not None:
        if profile.mode != mode:
            raise InvalidInput(
                f"the profile is of mode {profile.mode!r} and {mode!r} is to be measured; profile it again"
            )
        return profile.trace, profile.layers
    traced = trace(model, inputs, kwargs, training=mode == "train")
    return traced, layer_costs(traced, [price(signature) for signature in traced.signatures])


def _output_remarks(result: object) -> list[str]:
    """A sentence when the model's output has NaN in it; its speed is then that of an accident."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    spoiled = sum(bool(torch.isnan(tensor).any()) for tensor in tensors)
    return [f"{spoiled} of {len(tensors)} output tensors have NaN; check the weights and inputs"] if spoiled else []


def _layers(
    costs: Sequence[LayerCost], plain: Latency, recorded: Latency, recorder: Recorder, device: Device
) -> LayerLatencies:
    blocks = recorder.blocks[-len(recorded.samples_s) :]
    return layer_latencies(costs, plain, recorded, blocks, recording_cost(clock_of(device)))


def _memory(
    model: nn.Module, arguments: CallArguments, traced: Trace, device: Device, mode: str
) -> MeasuredMemory | None:
    """Memory of one forward; not known on devices whose allocator cannot be asked."""
    if device.torch_name == "mps":
        return None
    from edge_opt.measure.memory import measure_memory

    return measure_memory(model, arguments.args, arguments.kwargs, traced, device.torch_name, mode == "train")


def _energy(
    plain: Runner,
    latency: Latency,
    device: Device,
    profile: ModelProfile | None,
    energy: str | None,
    power_watts: float | None,
    subtract_idle: bool,
) -> tuple[Energy | None, tuple[Refusal, ...]]:
    """Joules of one forward, and the meters that could not say."""
    if energy is None:
        return None, ()
    from edge_opt.measure.energy import measure_energy

    def forward() -> None:
        plain.once()
        device.synchronize()

    return measure_energy(
        forward,
        latency,
        energy=energy,
        device=device.torch_name,
        power_watts=power_watts,
        profile=profile,
        subtract_idle=subtract_idle,
    )
