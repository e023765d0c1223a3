"""Two models, timed interleaved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import edge_opt as eo
from edge_opt.measuring import session
from edge_opt.measuring.session import measure_pair
from edge_opt.measuring.statistics import latency_of
from edge_opt.records.measurements import Latency


def test_blocks_of_both_models_are_pairs_and_both_are_left_as_found() -> None:
    models = nn.Linear(16, 16).train(), nn.Linear(16, 16).eval()
    profiles = tuple(eo.profile(model, (4, 16)) for model in models)
    before, after, verdict = measure_pair(*models, (4, 16), profiles=(profiles[0], profiles[1]), min_time_s=0.02)
    assert len(before.latency.samples_s) == len(after.latency.samples_s)
    assert verdict.ratio_interval.low <= verdict.ratio <= verdict.ratio_interval.high
    assert [model.training for model in models] == [True, False]


def test_a_model_that_does_twenty_times_the_work_breaks_the_limit() -> None:
    small, large = nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    found = eo.check(
        large, inputs=(64, 64), baseline=small, max_increase={"latency": "100%"}, measure={"min_time_s": 0.1}
    )
    assert [one.outcome for one in found.budgets] == ["broken"]
    assert found.budgets[0].baseline is not None


def test_costs_of_a_baseline_model_are_compared_without_running_it() -> None:
    class Refuses(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.is_meta, "it ran"
            return super().forward(x)

    found = eo.check(Refuses(16, 8), inputs=(1, 16), baseline=Refuses(16, 4), max_increase={"macs": "50%"})
    assert [(one.outcome, one.baseline) for one in found.budgets] == [("broken", 64)]


def test_an_open_question_is_measured_again_and_a_settled_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = []

    def take(runs: dict[str, object], **options: object) -> dict[str, Latency]:
        sessions.append(len(runs) // 2)
        # Copies of the model take 0 % or 8 % longer: of ten pairs the mean is known to 3 %, of five to 5 %.
        return {name: latency((1.0 + 0.08 * (int(name.split()[-1]) % 2)) if name.startswith("model") else 1.0)
                for name in runs}  # fmt: skip

    monkeypatch.setattr(session, "interleaved", take)
    models = nn.Linear(16, 16), nn.Linear(16, 16)
    profiles = eo.profile(models[0], (4, 16)), eo.profile(models[1], (4, 16))
    for limit, counts in ((None, [5]), (1.5, [5]), (1.0, [5, 5]), (1.035, [5, 5, 5, 5])):
        sessions.clear()
        found = measure_pair(*models, (4, 16), profiles=profiles, limit=limit)[2]
        assert sessions == counts, (limit, found)


def latency(seconds: float) -> Latency:
    return latency_of([seconds] * 20, [seconds] * 20, batch_size=1, target_precision=0.02)
