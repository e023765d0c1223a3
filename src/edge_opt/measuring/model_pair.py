"""Two models timed in turn in one process: what disturbs the machine disturbs both, and goes out of their ratio."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from edge_opt.measuring.latency import Progress, interleaved
from edge_opt.measuring.machine import CPU, read_environment
from edge_opt.measuring.session import Caller, call_on, first_dimension, ready, subject_on
from edge_opt.measuring.statistics import compare_latencies
from edge_opt.records import Comparison, Measurement, ModelProfile


def measure_pair(
    baseline: nn.Module,
    model: nn.Module,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    profiles: tuple[ModelProfile, ModelProfile],
    min_time_s: float = 1.0,
    max_time_s: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[Measurement, Measurement, Comparison]:
    """What both models take on the same inputs, a block of each in turn, and how they compare round by round.

    Args:
        baseline: The model to compare with.
        model: The model to judge.
        inputs: As in `profile`; both get the same.
        kwargs: Arguments of the models by name.
        profiles: Profiles of both, which say what running them changes.
        min_time_s: Least seconds to measure each of them.
        max_time_s: Most seconds to measure each; five times the least unless given.
        threads: Threads that torch uses; its own number unless given.
        progress: Called with the share that is done and a word on it.
    """
    subjects = {name: subject_on(one, CPU, threads)[0] for name, one in (("baseline", baseline), ("model", model))}
    arguments = {name: call_on(one, inputs, kwargs, CPU) for name, one in subjects.items()}
    with ExitStack() as states:
        for one, profile in zip(subjects.values(), profiles, strict=True):
            states.enter_context(ready(one, profile.trace, False, threads))
        environment = read_environment(CPU.name)
        found = interleaved(
            {name: Caller(one, arguments[name]).runner() for name, one in subjects.items()},
            batch_size=first_dimension(arguments["model"]), min_time_s=min_time_s, max_time_s=max_time_s,
            environment=environment, progress=progress,
        )  # fmt: skip
    before, after = (Measurement(one, None, None, None, (), environment) for one in found.values())
    return before, after, compare_latencies(before.latency, after.latency, paired=True)
