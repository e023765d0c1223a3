"""Two models timed in turn in one process: what disturbs the machine disturbs both, and goes out of their ratio."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from edge_opt.measuring.latency import Progress, interleaved
from edge_opt.measuring.machine import CPU, read_environment
from edge_opt.measuring.session import Caller, call_on, first_dimension, ready, subject_on
from edge_opt.measuring.statistics import compare_latencies, compare_placements
from edge_opt.records import Comparison, Latency, Measurement, ModelProfile


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
    limit: float | None = None,
) -> tuple[Measurement, Measurement, Comparison]:
    """What both models take on the same inputs, a block of each in turn, and how they compare round by round.

    Args:
        baseline: The model to compare with.
        model: The model to judge.
        inputs: As in `profile`; both get the same.
        kwargs: Arguments of the models by name.
        profiles: Profiles of both, which say what running them changes.
        min_time_s: Least seconds to measure; each of five copies of a model gets half of it.
        max_time_s: Most seconds, likewise; five times the least unless given.
        threads: Threads that torch uses; its own number unless given.
        progress: Called with the share that is done and a word on it.
        limit: The ratio that is asked about: while it lies inside the interval, both are timed again, up to four times
            in all, with copies at other places.
    """
    asked = {_BASELINE: baseline, _MODEL: model}
    subjects = {name: subject_on(one, CPU, threads)[0] for name, one in asked.items()}
    arguments = {name: call_on(one, inputs, kwargs, CPU) for name, one in subjects.items()}
    with ExitStack() as states:
        for one, profile in zip(subjects.values(), profiles, strict=True):
            states.enter_context(ready(one, profile.trace, False, threads))
        environment = read_environment(CPU.name)
        batch = first_dimension(arguments[_MODEL])
        pairs: list[tuple[Latency, Latency]] = []
        for session in range(_MOST_SESSIONS):
            placements = _placements(subjects, has_originals=not session)
            if not placements:
                break
            found = interleaved(
                {
                    f"{name} {number}": Caller(one, arguments[name]).runner()
                    for number, pair in enumerate(placements)
                    for name, one in pair.items()
                },
                batch_size=batch, min_time_s=_SHARE_OF_TIME * min_time_s,
                max_time_s=None if max_time_s is None else _SHARE_OF_TIME * max_time_s,
                environment=environment, progress=progress,
            )  # fmt: skip
            pairs += [(found[f"{_BASELINE} {place}"], found[f"{_MODEL} {place}"]) for place in range(len(placements))]
            verdict = compare_latencies(*pairs[0], paired=True) if len(pairs) == 1 else compare_placements(pairs)
            if limit is None or not verdict.ratio_interval.low <= limit <= verdict.ratio_interval.high:
                break
    before, after = (Measurement(one, None, None, None, (), environment) for one in pairs[0])
    return before, after, verdict


_BASELINE, _MODEL = "baseline", "model"
# The models themselves and four copies of each: an interval over five places, for 2.5 times the time.
_COPIES = 4
_SHARE_OF_TIME = 0.5
_MOST_SESSIONS = 4


def _placements(subjects: Mapping[str, nn.Module], has_originals: bool) -> list[Mapping[str, nn.Module]]:
    """The models, and copies of them that lie elsewhere in memory; without copies where one cannot be copied.

    The same weights at another address take up to some per cent more or less time, as long as they lie there.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about what an exported program holds
            copies = [{name: copy.deepcopy(one) for name, one in subjects.items()}
                      for _ in range(_COPIES + (not has_originals))]  # fmt: skip
    except Exception:  # whatever a model's own code raises: it is compared as it is
        copies = []
    return [subjects, *copies] if has_originals else [*copies]
